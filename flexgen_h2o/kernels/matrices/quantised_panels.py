"""Matrices in 4-bit groups on a CPU: few rows are multiplied with the codes themselves, many with restored panels."""

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits, onednn, quantised
from flexgen_h2o.kernels.matrices.layout import Matrix, Storage
from flexgen_h2o.kernels.matrices.panels import PANEL, PanelLayout, rows_at_once
from flexgen_h2o.kernels.matrices.plain import PlainMatrix
from flexgen_h2o.plan.footprint import restored_outputs

# Up to how many rows are multiplied with codes rather than with restored panels, where the processor can; measured.
CODE_ROWS = 256
# Bytes of x that are multiplied with codes at once: they stay in the caches while all of the matrix passes.
PACKED_BYTES = 2 * 2**20


class QuantisedPanelMatrix:
    """A matrix in strips of 16 outputs.

    Args:
        storage: [ceil(out / 16), bytes of a strip] uint8.
        buffer: [n] uint8, for the largest part in panels.
        layout: says which part that is, and up to how many rows are multiplied with codes.
    """

    def __init__(
        self,
        storage: Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        buffer: Tensor,
        layout: "QuantisedPanelLayout",
    ):
        self.shape = shape
        self._strips = quantised.StripMatrix(storage, shape, dtype, buffer)
        self._dtype = dtype
        self._buffer = buffer
        self._layout = layout
        self._code_rows = layout.code_rows if quantised.has_product(dtype) else 0

    @cached_property
    def _parts(self) -> list[tuple[range, Tensor]]:
        """Which outputs are restored at once, and oneDNN's view of their panels. A table never needs them."""
        return list(self._layout.parts(self.shape, self._dtype, self._buffer))

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        if len(x) <= self._code_rows:
            at_once = self._layout.code_rows_at_once(self.shape[1], x.dtype)
            for rows, target in zip(x.split(at_once), output.split(at_once), strict=True):
                self._strips.multiply(rows, bias, target)
            return output
        for outputs, packed in self._parts:
            self._strips.restore_panels(outputs, self._buffer)
            columns = slice(outputs.start, outputs.stop)
            own_bias = None if bias is None else bias[columns]
            at_once = rows_at_once(len(outputs), x.dtype.itemsize)
            for rows, target in zip(x.split(at_once), output[:, columns].split(at_once), strict=True):
                target.copy_(onednn.linear(rows, packed, own_bias))
        return output

    def rows(self, ids: Tensor) -> Tensor:
        found = torch.empty(*ids.shape, self.shape[1], dtype=self._dtype)
        self._strips.restore_rows(ids.reshape(-1).contiguous(), found)
        return found

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0]))


class QuantisedPanelLayout:
    """[ceil(out / 16), bytes of a strip] uint8, see kernels/native/quantised.h; used through panels of 64 outputs.

    Args:
        code_rows: up to how many rows are multiplied with codes, where the processor can; with more, panels are
            restored first.
    """

    name = "4-bit strips"

    def __init__(self, code_rows: int = CODE_ROWS) -> None:
        self.code_rows = code_rows
        self._panels = PanelLayout()

    @property
    def tables(self) -> "QuantisedPanelLayout":
        return self

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        for out, inputs in shapes:
            for outputs in self._cut(out, inputs, dtype):
                self._panels.describe((len(outputs), inputs), dtype)

    def storage(self, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
        return Storage((-(-shape[0] // quantised.STRIP), quantised.strip_bytes(shape[1])), torch.uint8)

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        if not storage.is_meta:
            quantised.quantise(matrix, storage, four_bits.CUTS, four_bits.FITS, in_strips=True)

    def matrix(self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Matrix:
        if storage.is_meta:
            return PlainMatrix(storage.new_empty(shape, dtype=dtype))  # shapes are all that matters there
        return QuantisedPanelMatrix(storage, shape, dtype, buffer, self)

    def parts(self, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Which outputs of a matrix are restored at once, and oneDNN's view of their panels in the buffer."""
        for outputs in self._cut(*shape, dtype):
            part = (len(outputs), shape[1])
            panels = self._panels.storage(part, dtype)
            description = self._panels.describe(part, dtype)
            yield outputs, onednn.lay_over(panels.over(buffer[: panels.nbytes]), part, description)

    def buffer_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        sizes = []
        for out, inputs in shapes:
            largest = max(len(outputs) for outputs in self._cut(out, inputs, dtype))
            panels = self._panels.storage((largest, inputs), dtype).nbytes
            packed = self.code_rows_at_once(inputs, dtype) * quantised.packed_row_bytes(inputs, dtype)
            sizes.append(max(panels, packed))
        return max(sizes, default=0)

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return self._panels.result_bytes(rows, out, itemsize)

    def code_rows_at_once(self, inputs: int, dtype: torch.dtype) -> int:
        """How many rows are multiplied with codes in one pass over a matrix."""
        return max(1, min(self.code_rows, PACKED_BYTES // quantised.packed_row_bytes(inputs, dtype)))

    def _cut(self, out: int, inputs: int, dtype: torch.dtype) -> Iterator[range]:
        """Which outputs are restored at once: whole panels, and what is left."""
        panel_bytes = self._panels.storage((PANEL, inputs), dtype).nbytes
        at_once = restored_outputs(panel_bytes)
        start = 0
        while start < out:
            stop = min(out, start + at_once)
            if stop == out - 1:
                stop = out  # oneDNN makes no panel of a single output
            yield range(start, stop)
            start = stop
