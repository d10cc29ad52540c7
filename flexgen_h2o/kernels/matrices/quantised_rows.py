"""Matrices in 4-bit groups, a row an entry of bytes (four_bits.py), multiplied after their values have been restored.

For every device and precision. A part of the outputs at a time is decoded into a buffer that all matrices share. On a
GPU few rows are multiplied with the codes, where a trial finds that faster (kernels/cuda.py).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits, quantised
from flexgen_h2o.kernels.fastest import Fastest, Way
from flexgen_h2o.kernels.matrices.layout import Matrix, Storage
from flexgen_h2o.kernels.matrices.plain import PlainMatrix
from flexgen_h2o.plan.footprint import DECODED_BYTES
from flexgen_h2o.plan.four_bit_sizes import GROUP, entry_bytes, groups_of

ENCODED_VALUES = 2**18  # at once, lest what encoding needs in passing be larger than the matrix


def decoding_bytes(inputs: int, dtype: torch.dtype) -> int:
    """Bytes of the buffer that one row takes: its values in float32, and in the precision of compute."""
    return 8 * -(-inputs // 2) + (0 if dtype == torch.float32 else inputs * dtype.itemsize)


def multiply_restored(x: Tensor, entries: Tensor, bias: Tensor | None, output: Tensor, buffer: Tensor) -> Tensor:
    """x . weight^T + bias, in parts that fit the buffer.

    Args:
        x: [rows, in]. entries: [out, entry_bytes(in)] uint8 of the weight. bias: [out]. output: [rows, out], written.
        buffer: [n] uint8, for at least one row of the weight.
    """
    at_once = _rows_at_once(buffer, x.shape[1], x.dtype)
    for start in range(0, len(entries), at_once):
        part = slice(start, start + at_once)
        weight, target = _decode(entries[part], x.shape[1], x.dtype, buffer), output[:, part]
        if bias is None:
            torch.mm(x, weight.t(), out=target)
        else:
            torch.addmm(bias[part], x, weight.t(), out=target)
    return output


class QuantisedRowMatrix:
    """A matrix whose rows are entries.

    Args:
        storage: [out, entry_bytes(in)] uint8.
        buffer: [n] uint8, for at least one row.
        multiply: takes what multiply_restored() takes.
    """

    def __init__(
        self,
        storage: Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        buffer: Tensor,
        multiply: Way = multiply_restored,
    ):
        self.shape = shape
        self._storage = storage
        self._dtype = dtype
        self._buffer = buffer
        self._multiply = multiply

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        self._multiply(x, self._storage, bias, output, self._buffer)
        return output

    def rows(self, ids: Tensor) -> Tensor:
        wanted = ids.reshape(-1)
        found = torch.empty(len(wanted), self.shape[1], dtype=self._dtype, device=self._storage.device)
        at_once = _rows_at_once(self._buffer, self.shape[1], self._dtype)
        for part, target in zip(wanted.split(at_once), found.split(at_once), strict=True):
            target.copy_(_decode(self._storage[part], self.shape[1], self._dtype, self._buffer))
        return found.view(*ids.shape, self.shape[1])

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0], device=self._storage.device))


class QuantisedRowLayout:
    """[out, entry_bytes(in)] uint8.

    Args:
        device_type: where matrices will be used.
        multiply: takes what multiply_restored() takes.
    """

    name = "4-bit rows"

    def __init__(self, device_type: str = "cpu", multiply: Way = multiply_restored):
        self._decoded_bytes = DECODED_BYTES.get(device_type, DECODED_BYTES["cpu"])
        self._multiply = multiply

    @property
    def ways(self) -> str | None:
        """How products have been computed so far, where there is a choice."""
        return self._multiply.names if isinstance(self._multiply, Fastest) else None

    @property
    def tables(self) -> "QuantisedRowLayout":
        return self

    def prepare(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
        pass

    def storage(self, shape: tuple[int, int], dtype: torch.dtype) -> Storage:
        return Storage((shape[0], entry_bytes(shape[1])), torch.uint8)

    def encode(self, storage: Tensor, matrix: Tensor) -> None:
        if storage.is_meta:
            return
        if matrix.device.type == "cpu" and quantised.library() is not None:
            entries = storage if storage.device == matrix.device else torch.empty(storage.shape, dtype=torch.uint8)
            quantised.quantise(matrix, entries, four_bits.CUTS, four_bits.FITS, in_strips=False)
            if entries is not storage:
                storage.copy_(entries)
            return
        at_once = max(1, ENCODED_VALUES // matrix.shape[1])
        for part, target in zip(matrix.split(at_once), storage.split(at_once), strict=True):
            target.copy_(four_bits.encode_weight(part))

    def matrix(self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Tensor) -> Matrix:
        if storage.is_meta:
            return PlainMatrix(storage.new_empty(shape, dtype=dtype))  # shapes are all that matters there
        return QuantisedRowMatrix(storage, shape, dtype, buffer, self._multiply)

    def buffer_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        sizes = ((out, decoding_bytes(inputs, dtype)) for out, inputs in shapes)
        return max((row * min(out, max(1, self._decoded_bytes // row)) for out, row in sizes), default=0)

    def result_bytes(self, rows: int, out: int, itemsize: int) -> int:
        return 0


def _rows_at_once(buffer: Tensor, inputs: int, dtype: torch.dtype) -> int:
    """How many rows are restored at once."""
    return max(1, buffer.nbytes // decoding_bytes(inputs, dtype))


def _decode(entries: Tensor, inputs: int, dtype: torch.dtype, buffer: Tensor) -> Tensor:
    """Values [n, in] of entries [n, entry_bytes(in)], in the buffer; the same as four_bits.decode()'s."""
    code_bytes, groups = -(-inputs // 2), groups_of(inputs)
    wide = 8 * code_bytes * len(entries)
    values = buffer[:wide].view(torch.float32).view(len(entries), code_bytes, 2)
    low, high, packed = values[..., 0], values[..., 1], entries[:, :code_bytes]
    high.copy_(packed).mul_(1 / 16).floor_()
    low.copy_(packed).sub_(high, alpha=16)
    metadata = entries[:, code_bytes:].clone(memory_format=torch.contiguous_format)  # at an even address
    ranges = metadata.view(torch.bfloat16).float().view(len(entries), groups, 2)
    flat, whole = values.view(len(entries), 2 * code_bytes), inputs // GROUP
    for columns, of_groups in (
        (slice(0, whole * GROUP), slice(0, whole)),
        (slice(whole * GROUP, inputs), slice(whole, groups)),
    ):
        part = flat[:, columns]
        if part.numel():
            part = part.unflatten(1, (of_groups.stop - of_groups.start, -1))
            part.mul_(ranges[:, of_groups, :1]).add_(ranges[:, of_groups, 1:])
    if dtype == torch.float32:
        return flat[:, :inputs]
    nbytes = len(entries) * inputs * dtype.itemsize
    return buffer[wide : wide + nbytes].view(dtype).view(-1, inputs).copy_(flat[:, :inputs])
