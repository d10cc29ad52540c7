"""Rate of decode attention over a KV cache in memory, held against that of reading the same memory.

The unit is one KV buffer, as the engine lays it out, with H2O's rule and half of its slots for heavy hitters; all slots
are live. Its memory begins at a huge page, like the engine's, and is far larger than the processor's caches. What is
compared takes turns: it meets the same slow phases of the machine.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.kernels import native
from flexgen_h2o.kernels.decode import attend_with_torch, attention_path, describe
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.memory.direct_io import aligned_bytes
from flexgen_h2o.plan.kv_shape import UnitShape
from flexgen_h2o.profiling import attention as units

IN_4_BITS = "4-bit"
QUERY_IN_4_BITS = torch.bfloat16  # what the products with 4-bit keys are quickest with
TORCH_SHARE = 16  # of the rows in 4 bits torch's operations get one in so many: they make all of them whole at once


@dataclass(frozen=True)
class Grid:
    """What to measure: every combination of the first four.

    Attributes:
        dtypes: of keys, values and queries, by name; "4-bit" for keys and values in 4 bits, queries in bfloat16.
        head_dims: elements of a key. slots: entries per row and head. threads: of one rate.
        nbytes: bytes of keys and values.
        trials: of each rate.
    """

    dtypes: Sequence[str]
    head_dims: Sequence[int]
    slots: Sequence[int]
    threads: Sequence[int]
    nbytes: int
    trials: int

    def __len__(self) -> int:
        return len(self.dtypes) * len(self.head_dims) * len(self.slots) * len(self.threads)


def measure(grid: Grid, advance: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Measures a grid on the CPU.

    Args:
        advance: called after each combination.
    Returns: as `--json` prints it: `path`, how attention runs; `config`; `worst_share`, the lowest share of the rate of
        reading, null without the native library; and `rows`, each with `dtype, head_dim, slots, threads`, the rates
        `gb_s` (the engine's attention), `stream_gb_s` (reading alone) and `torch_gb_s` in GB of keys and values per
        second, `share` = gb_s / stream_gb_s; `entries_s`, entries (a key and a value) per second, and
        `times_float16`, that of 4 bits over that of float16, null of other precisions; and `bookkeeping_share`: what
        H2O's step takes longer than that of a window of as many entries, as a share of the latter.
    """
    threads_before = torch.get_num_threads()
    storage = Storage(*(aligned_bytes(_storage_bytes(grid)) for _ in range(2)))
    rows = []
    try:
        for dtype in grid.dtypes:
            for head_dim, slots, threads in product(grid.head_dims, grid.slots, grid.threads):
                torch.set_num_threads(threads)
                sizes = {"dtype": dtype, "head_dim": head_dim, "slots": slots, "threads": threads}
                rows.append({**sizes, **_measure_row(storage, sizes, grid)})
                advance()
    finally:
        torch.set_num_threads(threads_before)
    paths = {str(head_dim): attention_path(torch.device("cpu"), head_dim) for head_dim in grid.head_dims}
    shares = [row["share"] for row in rows if row["share"] is not None]
    return {
        "path": ", ".join(dict.fromkeys(paths.values())),
        "config": {"paths": paths, "kv_bytes": grid.nbytes, "trials": grid.trials, "heavy_share": 0.5},
        "worst_share": min(shares, default=None),
        "rows": rows,
    }


def summary(result: Mapping[str, Any]) -> str:
    """The rates as a Markdown table."""
    lines = [
        f"decode attention ({result['path']}), GB/s of keys and values",
        "| dtype | head_dim | slots | threads | attention | reading | share | torch | 10^6 entries/s | x float16"
        " | H2O's bookkeeping |",
        "|---" * 11 + "|",
    ]
    for row in result["rows"]:
        sizes = " | ".join(str(row[name]) for name in ("dtype", "head_dim", "slots", "threads"))
        stream = "" if row["stream_gb_s"] is None else f"{row['stream_gb_s']:.1f} | {row['share']:.0%}"
        times = "" if row["times_float16"] is None else f"{row['times_float16']:.2f}"
        lines.append(
            f"| {sizes} | {row['gb_s']:.1f} | {stream or ' | '} | {row['torch_gb_s']:.1f}"
            f" | {row['entries_s'] / 1e6:.1f} | {times} | {row['bookkeeping_share']:+.1%} |"
        )
    return "\n".join(lines)


def unit_shape(head_dim: int, slots: int, kv_bytes: int, itemsize: int, in_4_bits: bool = False) -> UnitShape:
    """A unit of as few rows as have `kv_bytes` bytes of keys and values or more; half of its slots are heavy."""
    one_row = units.unit_shape(head_dim, slots, 0, itemsize, in_4_bits)
    return replace(one_row, rows=-(-kv_bytes // one_row.kv_bytes(itemsize)))


def take_turns(calls: Mapping[str, Callable[[], object]], trials: int) -> dict[str, float]:
    """Median seconds of each call, one after the other in every trial; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(trials + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if trial:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


@dataclass(frozen=True)
class Storage:
    """Memory of the unit that is measured, and of another that takes turns with it; uint8."""

    unit: Tensor
    other: Tensor


def _precision(dtype: str) -> tuple[torch.dtype, bool]:
    """Of queries; and whether keys and values are in 4 bits."""
    return (QUERY_IN_4_BITS, True) if dtype == IN_4_BITS else (getattr(torch, dtype), False)


def _storage_bytes(grid: Grid) -> int:
    """What the largest unit of the grid takes."""
    precisions = (*map(_precision, grid.dtypes), (torch.float16, False))
    return max(
        unit_shape(head_dim, slots, grid.nbytes, dtype.itemsize, in_4_bits).nbytes(dtype.itemsize)
        for head_dim, slots, (dtype, in_4_bits) in product(grid.head_dims, grid.slots, precisions)
    )


def _measure_row(storage: Storage, sizes: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
    """Rates of one combination."""
    dtype, in_4_bits = _precision(sizes["dtype"])
    head_dim, slots = sizes["head_dim"], sizes["slots"]
    shape = unit_shape(head_dim, slots, grid.nbytes, dtype.itemsize, in_4_bits)
    buffer, query = units.full_buffer(shape, dtype, storage.unit), _queries(shape, dtype)
    calls = _calls(query, buffer)
    whole = unit_shape(head_dim, slots, grid.nbytes, torch.float16.itemsize)
    if in_4_bits:
        other, half = units.full_buffer(whole, torch.float16, storage.other), _queries(whole, torch.float16)
        calls["float16"] = lambda: other.attend(half)
    seconds = take_turns(calls, grid.trials)
    gigabytes = shape.kv_bytes(dtype.itemsize) / GB
    rates = {name: gigabytes / value for name, value in seconds.items()}
    stream = rates.get("stream")
    entries_s = _entries(shape) / seconds["attention"]
    return {
        "gb_s": rates["attention"],
        "stream_gb_s": stream,
        "torch_gb_s": rates["torch"] * _torch_rows(shape) / shape.rows,
        "share": None if stream is None else rates["attention"] / stream,
        "entries_s": entries_s,
        "times_float16": entries_s * seconds["float16"] / _entries(whole) if in_4_bits else None,
        "bookkeeping_share": _bookkeeping_share(query, buffer, storage.other, grid.trials),
    }


def _queries(shape: UnitShape, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.rows, shape.heads, 1, shape.head_dim).to(dtype) * shape.head_dim**-0.5


def _entries(shape: UnitShape) -> int:
    return shape.rows * shape.heads * shape.slots


def _torch_rows(shape: UnitShape) -> int:
    """Rows that torch's operations get."""
    return max(1, shape.rows // TORCH_SHARE) if shape.ring_in_4_bits else shape.rows


def _calls(query: Tensor, buffer: KVBuffer) -> dict[str, Callable[[], object]]:
    """What a row of the grid compares: one reading of all keys and values each, by torch of its rows."""
    calls: dict[str, Callable[[], object]] = {"attention": lambda: buffer.attend(query)}
    library = native.library()
    if library is not None:
        unit = describe(query, buffer.unit, torch.empty_like(query))
        calls["stream"] = lambda: library.flexgen_h2o_read_only(ctypes.byref(unit))
    rows = _torch_rows(buffer.shape)
    some = buffer.unit.first_rows(rows)
    calls["torch"] = lambda: attend_with_torch(query[:rows], some)
    return calls


def decode_step(query: Tensor, buffer: KVBuffer) -> Callable[[], object]:
    """A function that enters one token more, each time it is called, and attends to what the buffer has then."""
    rows, heads, _, head_dim = query.shape
    keys, values = torch.randn(2, rows, heads, 1, head_dim).to(buffer.dtype)
    columns = count(buffer.columns_seen)

    def step() -> Tensor:
        buffer.append(keys, values, next(columns))
        return buffer.attend(query)

    return step


def _bookkeeping_share(query: Tensor, buffer: KVBuffer, storage: Tensor, trials: int) -> float:
    """What a decode step of H2O takes longer than one of a window of as many entries, as a share of the latter.

    A step is the token's entry and its attention. H2O's has more to do: the addition to scores, the search for the
    loser, and the move of the entry that leaves the ring, which here nearly every head makes. The window only
    overwrites its oldest entry.

    Args:
        query: [rows, heads, 1, head_dim].
        buffer: H2O's, full.
        storage: the window's memory, as large as the buffer's.
    """
    shape = replace(buffer.shape, heavy=0, recent=buffer.shape.slots)
    window = KVBuffer(shape, Local(0, shape.slots), buffer.dtype, storage)
    window.resume(buffer.padding, shape.slots)
    for entries in (window.ring.keys, window.ring.values):
        units.fill_entries(entries, shape.head_dim)
    window.scores.zero_()
    window.columns.zero_()
    seconds = take_turns({"h2o": decode_step(query, buffer), "window": decode_step(query, window)}, trials)
    return seconds["h2o"] / seconds["window"] - 1
