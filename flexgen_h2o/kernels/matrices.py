"""How weight matrices lie in memory and on disk, and the products with them.

A layout says what shape of memory a matrix takes and how to fill it; on disk lie the same bytes. Which is the fastest
depends on the processor: torch's own product of few rows reads row-major weights at a third of what memory gives,
because a vector of weights then holds one output's inputs and has to be summed across. In panels it holds 16 outputs'.
"""

from collections.abc import Iterable
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels import onednn

PANEL = 64  # outputs side by side
DEPTH = 16  # steps along the inputs to which a panel is padded
# A product's result is allocated anew and then copied to where it belongs; so many bytes stay in the caches.
RESULT_BYTES = 8 * 2**20
LEAST_ROWS = 128  # with fewer rows at once, weights are read more often than they need be


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

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        """Finds out what there is to know of matrices of these shapes; that may take as much memory as the largest."""

    def storage_shape(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of the memory that a matrix of a shape takes."""

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        """Fills storage with a matrix [out, in], converting its precision if need be."""

    def matrix(self, storage: Tensor, shape: tuple[int, int]) -> Matrix:
        """The matrix in a storage, whatever will be written there."""

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        """What a product [rows, out] allocates and frees beside its output."""


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

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        pass

    def storage_shape(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, ...]:
        return shape

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        storage.copy_(matrix)

    def matrix(self, storage: Tensor, shape: tuple[int, int]) -> Matrix:
        return PlainMatrix(storage)

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return 0


class PanelMatrix:
    """Panels of 64 outputs, multiplied by oneDNN.

    Args:
        storage: [panels, in / v, 64, v]; v inputs, 4 bytes in all, are side by side. Padded with zeros.
        packed: oneDNN's view of it.
    """

    def __init__(self, storage: Tensor, shape: tuple[int, int], packed: Tensor):
        self.shape = shape
        self._storage = storage
        self._packed = packed

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        at_once = rows_at_once(self.shape[0], x.dtype.itemsize)
        for part, target in zip(x.split(at_once), output.split(at_once), strict=True):
            target.copy_(onednn.linear(part, self._packed, bias))
        return output

    def rows(self, ids: Tensor) -> Tensor:
        gathered = self._storage[ids // PANEL, :, ids % PANEL]  # [..., in / v, v]
        return gathered.flatten(-2)[..., : self.shape[1]]

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0]))


class PanelLayout:
    """[out / 64, in / v, 64, v] with v inputs of 4 bytes together: what oneDNN wants where vectors hold 64 bytes.

    For bfloat16 these are the pairs that the processor's dot product takes.
    """

    name = "panels"

    def __init__(self) -> None:
        self._descriptions: dict[tuple[tuple[int, int], torch.dtype], bytes] = {}

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        for shape in shapes:
            self._describe(shape, dtype)

    def storage_shape(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, ...]:
        together = 4 // dtype.itemsize
        return (-(-shape[0] // PANEL), -(-shape[1] // (DEPTH * together)) * DEPTH, PANEL, together)

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        if storage.is_meta:
            return
        panels, depth, _, together = storage.shape
        out, inputs = matrix.shape
        if (out, inputs) != (panels * PANEL, depth * together):
            storage.zero_()
        whole, even = out // PANEL, inputs // together
        # As views: no second matrix is made. The rest are the last panel's rows and an input without a partner.
        storage[:whole, :even].copy_(
            matrix[: whole * PANEL, : even * together].reshape(whole, PANEL, even, together).transpose(1, 2)
        )
        if left := out - whole * PANEL:
            rows = matrix[whole * PANEL :, : even * together].reshape(left, even, together)
            storage[whole, :even, :left].copy_(rows.transpose(0, 1))
        if even * together < inputs:
            column = matrix[:, -1]
            storage[:whole, even, :, 0].copy_(column[: whole * PANEL].reshape(whole, PANEL))
            storage[whole:, even, :left, 0].copy_(column[None, whole * PANEL :].expand(panels - whole, -1))

    def matrix(self, storage: Tensor, shape: tuple[int, int]) -> Matrix:
        if storage.is_meta:
            return PlainMatrix(storage.new_empty(shape))  # shapes are all that matters there
        return PanelMatrix(storage, shape, onednn.lay_over(storage, shape, self._describe(shape, storage.dtype)))

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return min(rows, rows_at_once(out, itemsize)) * out * itemsize

    def _describe(self, shape: tuple[int, int], dtype: torch.dtype) -> bytes:
        """oneDNN's description of a matrix in panels. It has to pack one of that shape to tell."""
        key = (shape, dtype)
        if key not in self._descriptions:
            nbytes, self._descriptions[key] = onednn.describe(shape, dtype)
            if nbytes != prod(self.storage_shape(shape, dtype)) * dtype.itemsize:
                raise RuntimeError(f"oneDNN packs a matrix of shape {list(shape)} in another way than {self.name}")
        return self._descriptions[key]

    def is_native(self, dtype: torch.dtype) -> bool:
        """Whether oneDNN would choose this very layout here: tried on a matrix with ragged edges."""
        if not onednn.can_multiply(dtype):
            return False
        matrix = torch.randn(2 * PANEL + 3, 4 * DEPTH + 1).to(dtype)
        storage = torch.empty(self.storage_shape((matrix.shape[0], matrix.shape[1]), dtype), dtype=dtype)
        self.encode(storage, matrix)
        packed = onednn.pack(matrix)
        return packed.is_mkldnn and torch.equal(onednn.packed_bytes(packed), storage.view(-1).view(torch.uint8))


def rows_at_once(out: int, itemsize: int) -> int:
    """How many rows a product in panels computes at once."""
    return max(LEAST_ROWS, RESULT_BYTES // (out * itemsize))


def best_layout(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int]]) -> MatrixLayout:
    """The layout with the fastest products: panels on a CPU for which oneDNN has them, else row-major.

    In panels, bfloat16 products are 1.3 to 2.3 times as fast with up to 32 rows and a tenth to a quarter faster with
    more; in float32 twice to three times (results/gemm_layouts.jsonl). Of a single output oneDNN makes
    no panel.

    Args:
        shapes: of the model's matrices.
    """
    panels = PanelLayout()
    native = device.type == "cpu" and all(out > 1 for out, _ in shapes) and panels.is_native(dtype)
    return panels if native else PlainLayout()
