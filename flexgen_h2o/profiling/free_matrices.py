"""Matrices whose products take no time, to measure what else an engine does."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flexgen_h2o.kernels.matrices.layout import Matrix, MatrixLayout, Storage
from flexgen_h2o.kernels.matrices.plain import PlainMatrix


class FreeMatrix:
    """A matrix without content.

    Args:
        layout: its results are handled as that layout's: where it makes them in memory of their own, such memory is
            taken, written, copied and given back.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, layout: MatrixLayout):
        self.shape = shape
        self._dtype = dtype
        self._layout = layout

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        rows, out = output.shape
        passing = self._layout.result_bytes(rows, out, output.element_size())
        if not passing:
            return output.zero_()
        for target in output.split(passing // (out * output.element_size())):
            target.copy_(torch.zeros_like(target))
        return output

    def rows(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.shape[1], dtype=self._dtype)

    def dense(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self._dtype)


class FreeLayout:
    """Matrices that take next to no memory, and no time.

    Args:
        layout: whose results theirs are handled like.
    """

    name = "free"

    def __init__(self, layout: MatrixLayout):
        self._layout = layout

    @property
    def tables(self) -> "FreeLayout":
        return self

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        pass

    def storage(self, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
        return Storage((1,), dtype)

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        pass

    def matrix(self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Matrix:
        return PlainMatrix(storage.new_empty(shape)) if storage.is_meta else FreeMatrix(shape, dtype, self._layout)

    def buffer_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        return 0

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return self._layout.result_bytes(rows, out, itemsize)
