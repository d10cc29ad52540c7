"""Rate of decode attention over a KV cache in memory, held against that of reading the same memory.

The unit is one KV buffer, as the engine lays it out, with H2O's rule and half of its slots for heavy hitters; all slots
are live. Its memory begins at a huge page, like the engine's, and is far larger than the processor's caches.
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

from flexgen_h2o.direct_io import aligned_bytes
from flexgen_h2o.kernels import native
from flexgen_h2o.kernels.decode import attend_with_torch, attention_path, describe
from flexgen_h2o.kvcache.attention import decode_attention
from flexgen_h2o.kvcache.buffer import KVBuffer, UnitShape
from flexgen_h2o.kvcache.eviction import Local
from flexgen_h2o.profiling import attention as units
from flexgen_h2o.tiers import GB


@dataclass(frozen=True)
class Grid:
    """What to measure: every combination of the first four.

    Attributes:
        dtypes: of keys, values and queries, by name.
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
        second, `share` = gb_s / stream_gb_s, and `bookkeeping_share`: what H2O's step takes longer than that of a
        window of as many entries, as a share of the latter.
    """
    threads_before = torch.get_num_threads()
    storage = aligned_bytes(_storage_bytes(grid))
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
        "| dtype | head_dim | slots | threads | attention | reading | share | torch | H2O's bookkeeping |",
        "|---" * 9 + "|",
    ]
    for row in result["rows"]:
        sizes = " | ".join(str(row[name]) for name in ("dtype", "head_dim", "slots", "threads"))
        stream = "" if row["stream_gb_s"] is None else f"{row['stream_gb_s']:.1f} | {row['share']:.0%}"
        lines.append(
            f"| {sizes} | {row['gb_s']:.1f} | {stream or ' | '} | {row['torch_gb_s']:.1f}"
            f" | {row['bookkeeping_share']:+.1%} |"
        )
    return "\n".join(lines)


def unit_shape(head_dim: int, slots: int, kv_bytes: int, itemsize: int) -> UnitShape:
    """A unit of as few rows as have `kv_bytes` bytes of keys and values or more; half of its slots are heavy."""
    one_row = units.unit_shape(head_dim, slots, 0, itemsize)
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


def _storage_bytes(grid: Grid) -> int:
    """What the largest unit of the grid takes."""
    itemsizes = [getattr(torch, dtype).itemsize for dtype in grid.dtypes]
    sizes = product(grid.head_dims, grid.slots, itemsizes)
    return max(unit_shape(*size[:2], grid.nbytes, size[2]).nbytes(size[2]) for size in sizes)


def _measure_row(storage: Tensor, sizes: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
    """Rates of one combination."""
    dtype = getattr(torch, sizes["dtype"])
    shape = unit_shape(sizes["head_dim"], sizes["slots"], grid.nbytes, dtype.itemsize)
    query = torch.randn(shape.rows, shape.heads, 1, shape.head_dim).to(dtype) * shape.head_dim**-0.5
    buffer = units.full_buffer(shape, dtype, storage)
    seconds = take_turns(_calls(query, buffer), grid.trials)
    gigabytes = shape.kv_bytes(dtype.itemsize) / GB
    rates = {name: gigabytes / value for name, value in seconds.items()}
    stream = rates.get("stream")
    return {
        "gb_s": rates["attention"],
        "stream_gb_s": stream,
        "torch_gb_s": rates["torch"],
        "share": None if stream is None else rates["attention"] / stream,
        "bookkeeping_share": _bookkeeping_share(query, buffer, grid.trials),
    }


def _calls(query: Tensor, buffer: KVBuffer) -> dict[str, Callable[[], object]]:
    """What a row of the grid compares: one reading of all keys and values each."""
    heavy, ring = buffer.heavy, buffer.ring
    state = (heavy.keys, heavy.values, ring.keys, ring.values, buffer.scores, buffer.losers)
    lengths = (buffer.heavy_len, buffer.ring_len)
    calls: dict[str, Callable[[], object]] = {"attention": lambda: decode_attention(query, buffer)}
    library = native.library()
    if library is not None:
        unit = describe(query, *state, torch.empty_like(query))
        calls["stream"] = lambda: library.flexgen_h2o_read_only(ctypes.byref(unit))
    rule = buffer.rule
    calls["torch"] = lambda: attend_with_torch(query, *state, *lengths, rule.accumulates, rule.decay)
    return calls


def decode_step(query: Tensor, buffer: KVBuffer) -> Callable[[], object]:
    """A function that enters one token more, each time it is called, and attends to what the buffer has then."""
    rows, heads, _, head_dim = query.shape
    keys, values = torch.randn(2, rows, heads, 1, head_dim).to(buffer.dtype)
    columns = count(buffer.columns_seen)

    def step() -> Tensor:
        buffer.append(keys, values, next(columns))
        return decode_attention(query, buffer)

    return step


def _bookkeeping_share(query: Tensor, buffer: KVBuffer, trials: int) -> float:
    """What a decode step of H2O takes longer than one of a window of as many entries, as a share of the latter.

    A step is the token's entry and its attention. H2O's has more to do: the addition to scores, the search for the
    loser, and the move of the entry that leaves the ring, which here nearly every head makes. The window only
    overwrites its oldest entry.

    Args:
        query: [rows, heads, 1, head_dim].
        buffer: H2O's, full. The window takes its memory over, so it is unusable afterwards.
    """
    h2o = take_turns({"step": decode_step(query, buffer)}, trials)
    shape = buffer.shape
    rule = Local(0, shape.slots)
    window = KVBuffer(replace(shape, heavy=0, recent=shape.slots), rule, buffer.dtype, buffer.storage)
    window.resume(buffer.padding, shape.slots)
    window.scores.zero_()
    window.columns.zero_()
    local = take_turns({"step": decode_step(query, window)}, trials)
    return h2o["step"] / local["step"] - 1
