"""Row-major matrices, as torch has them."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.matrices.layout import Matrix, Storage


class PlainMatrix:
    """Row-major, as torch has it."""

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.shape = (weight.shape[0], weight.shape[1])

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        if bias is None:
            return torch.mm(x, self.weight.t(), out=output)
        return torch.addmm(bias, x, self.weight.t(), out=output)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def dense(self) -> Tensor:
        return self.weight


class PlainLayout:
    """Row-major matrices: on a GPU, and wherever nothing better is known."""

    name = "plain"

    @property
    def tables(self) -> "PlainLayout":
        return self

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        pass

    def storage(self, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
        return Storage(shape, dtype)

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        storage.copy_(matrix)

    def matrix(self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Matrix:
        return PlainMatrix(storage)

    def buffer_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        return 0

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return 0
