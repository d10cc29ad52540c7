"""What every layout of weight matrices offers.

A layout says what memory a matrix takes and how to fill it; on disk lie the same bytes. Which is the fastest depends on
the processor: torch's own product of few rows reads row-major weights at a third of what memory gives, because a vector
of weights then holds one output's inputs and has to be summed across. In panels it holds 16 outputs'.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Storage:
    """Memory of a shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def over(self, memory: Tensor) -> Tensor:
        """[nbytes] uint8 as a tensor of this shape and type."""
        return memory.view(self.dtype).view(self.shape)


class Matrix(Protocol):
    """A weight [out, in] that compute can reach.

    Attributes:
        shape: (out, in).
    """

    shape: tuple[int, int]

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        """x . weight^T + bias, written to `output`, which is returned.

        Args:
            x: [rows, in], contiguous. bias: [out]. output: [rows, out], contiguous.
        """

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix as a table: ids of any shape [...] -> [..., in]."""

    def dense(self) -> Tensor:
        """The matrix itself, [out, in]."""


class MatrixLayout(Protocol):
    """A way for matrices to lie in memory.

    Attributes:
        name: goes into the names of files.
    """

    name: str

    @property
    def tables(self) -> "MatrixLayout":
        """The layout of what is only looked up and never multiplied with."""

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        """Finds out what there is to know of matrices of these shapes; that may take as much memory as the largest."""

    def storage(self, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
        """The memory that a matrix of a shape takes.

        Args:
            dtype: in which is computed.
        """

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        """Fills storage with a matrix [out, in], converting its precision if need be."""

    def matrix(self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Matrix:
        """The matrix in a storage, whatever will be written there.

        Args:
            buffer: [at least buffer_bytes] uint8 on the same device, which all matrices may share: what is in it
                counts for one call only.
        """

    def buffer_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        """Bytes of the buffer through which matrices of these shapes are used."""

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        """What a product [rows, out] allocates and frees beside its output."""
