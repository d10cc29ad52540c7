"""Panels of 64 outputs, multiplied by oneDNN, or with few rows by a kernel of ours."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flexgen_h2o.kernels import onednn
from flexgen_h2o.kernels import panels as native_panels
from flexgen_h2o.kernels.matrices.layout import Matrix, Storage
from flexgen_h2o.kernels.matrices.plain import PlainLayout, PlainMatrix
from flexgen_h2o.plan.footprint import PANEL_OUTPUTS, RESULT_BYTES

PANEL = PANEL_OUTPUTS  # side by side
DEPTH = 16  # steps along the inputs to which a panel is padded
LEAST_ROWS = 128  # with fewer rows at once, weights are read more often than they need be
# Up to so many, the kernel of ours is the faster (results/gemm_layouts.jsonl).
FEW_ROWS = 96


class PanelMatrix:
    """Panels of 64 outputs.

    Args:
        storage: [panels, in / v, 64, v]; v inputs, 4 bytes in all, are side by side. Padded with zeros.
        packed: oneDNN's view of it.
    """

    def __init__(self, storage: Tensor, shape: tuple[int, int], packed: Tensor):
        self.shape = shape
        self._storage = storage
        self._packed = packed
        # Pairs of inputs are read from x as they lie there.
        self._few_rows = 0 if shape[1] % 2 else min(FEW_ROWS, native_panels.most_rows(storage.dtype))
        self._few = native_panels.PanelProduct(storage, shape) if self._few_rows else None

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        if self._few is not None and len(x) <= self._few_rows:
            self._few.multiply(x, bias, output)
            return output
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
            self.describe(shape, dtype)

    @property
    def tables(self) -> PlainLayout:
        return PlainLayout()

    def storage(self, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
        together = 4 // dtype.itemsize
        depth = -(-shape[1] // (DEPTH * together)) * DEPTH
        return Storage((-(-shape[0] // PANEL), depth, PANEL, together), dtype)

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

    def matrix(self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Matrix:
        if storage.is_meta:
            return PlainMatrix(storage.new_empty(shape))  # shapes are all that matters there
        return PanelMatrix(storage, shape, onednn.lay_over(storage, shape, self.describe(shape, storage.dtype)))

    def buffer_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        return 0

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return min(rows, rows_at_once(out, itemsize)) * out * itemsize

    def describe(self, shape: tuple[int, int], dtype: torch.dtype) -> bytes:
        """oneDNN's description of a matrix in panels. It has to pack one of that shape to tell."""
        key = (shape, dtype)
        if key not in self._descriptions:
            nbytes, self._descriptions[key] = onednn.describe(shape, dtype)
            if nbytes != self.storage(shape, dtype).nbytes:
                raise RuntimeError(f"oneDNN packs a matrix of shape {list(shape)} in another way than {self.name}")
        return self._descriptions[key]

    def is_native(self, dtype: torch.dtype) -> bool:
        """Whether oneDNN would choose this very layout here: tried on a matrix with ragged edges."""
        if not onednn.can_multiply(dtype):
            return False
        matrix = torch.randn(2 * PANEL + 3, 4 * DEPTH + 1).to(dtype)
        storage = torch.empty(self.storage((matrix.shape[0], matrix.shape[1]), dtype).shape, dtype=dtype)
        self.encode(storage, matrix)
        packed = onednn.pack(matrix)
        return packed.is_mkldnn and torch.equal(onednn.packed_bytes(packed), storage.view(-1).view(torch.uint8))


def rows_at_once(out: int, itemsize: int) -> int:
    """How many rows a product in panels computes at once."""
    return max(LEAST_ROWS, RESULT_BYTES // (out * itemsize))
