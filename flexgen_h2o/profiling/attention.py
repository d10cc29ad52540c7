"""Rate of decode attention, in bytes of keys and values that it reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.machine.platform import default_dtype, dtype_name
from flexgen_h2o.memory.workspace import Workspace, padded
from flexgen_h2o.plan.kv_shape import UnitShape
from flexgen_h2o.profiling.timing import Stopwatch, fill

HIDDEN_SIZE = 2048  # heads x head_dim of a row: OPT-1.3b's


def unit_shape(head_dim: int, slots: int, kv_bytes: int, itemsize: int, in_4_bits: bool = False) -> UnitShape:
    """A unit of as many rows as fit into `kv_bytes`, at least one; half of its slots are heavy."""
    heads, heavy = HIDDEN_SIZE // head_dim, slots // 2
    one_row = UnitShape(1, heads, head_dim, heavy, slots - heavy, in_4_bits, in_4_bits)
    return replace(one_row, rows=max(1, kv_bytes // one_row.kv_bytes(itemsize)))


def full_buffer(shape: UnitShape, dtype: torch.dtype, storage: Tensor) -> KVBuffer:
    """An H2O buffer all of whose slots hold entries.

    Args:
        storage: [shape.nbytes(dtype.itemsize)] uint8.
    """
    buffer = KVBuffer(shape, H2O(shape.heavy, shape.recent), dtype, storage)
    buffer.resume(Padding(torch.zeros(shape.rows, dtype=torch.int64)), shape.slots)
    for part in (buffer.heavy, buffer.ring):
        for entries in (part.keys, part.values):
            fill_entries(entries, shape.head_dim)
    buffer.scores.zero_()
    buffer.columns.zero_()
    return buffer


def fill_entries(entries: Tensor, head_dim: int) -> None:
    """Fills keys or values with random numbers; in 4 bits all rows with the same ones."""
    if entries.dtype != torch.uint8:
        fill(entries)
    elif entries.numel():
        row = torch.empty(*entries.shape[1:3], head_dim, device=entries.device)
        entries.copy_(four_bits.encode(fill(row)).expand_as(entries))


@dataclass(frozen=True)
class Attention:
    """Decode attention's rates on one device, as a subject."""

    head_dims: Sequence[int]
    dtypes: Sequence[torch.dtype]
    slots: int
    kv_bytes: int
    workspace: Workspace
    stopwatch: Stopwatch

    def trial(self) -> Iterator[tuple[str, float]]:
        """Bytes of keys and values per second, by precision and head size; on a CPU in 4 bits too, as int4."""
        device = self.stopwatch.device
        kinds = [(dtype_name(dtype), dtype, False) for dtype in self.dtypes]
        if device.type == "cpu":
            kinds.append(("int4", default_dtype(device), True))
        for kind, dtype, in_4_bits in kinds:
            for head_dim in self.head_dims:
                with self.workspace.frame():
                    name = f"attention/{device.type}/{kind}/{head_dim}"
                    yield name, self._rate(name, dtype, head_dim, in_4_bits)

    def _rate(self, name: str, dtype: torch.dtype, head_dim: int, in_4_bits: bool) -> float:
        shape = unit_shape(head_dim, self.slots, self.kv_bytes, dtype.itemsize, in_4_bits)
        storage = self.workspace.take((shape.nbytes(dtype.itemsize),), torch.uint8)
        buffer = full_buffer(shape, dtype, storage)
        query = fill(self.workspace.take((shape.rows, shape.heads, 1, head_dim), dtype)) * head_dim**-0.5
        return shape.kv_bytes(dtype.itemsize) / self.stopwatch.seconds(name, lambda: buffer.attend(query))


def attention_bytes(head_dims: Sequence[int], dtypes: Sequence[torch.dtype], slots: int, kv_bytes: int) -> int:
    """The most that Attention takes of its workspace."""
    needed = []
    for dtype in (*dtypes, torch.float32):  # 4 bits may go with float32
        for head_dim, in_4_bits in product(head_dims, (False, True)):
            shape = unit_shape(head_dim, slots, kv_bytes, dtype.itemsize, in_4_bits)
            query = shape.rows * shape.heads * head_dim * dtype.itemsize
            needed.append(padded(shape.nbytes(dtype.itemsize)) + padded(query))
    return max(needed)
