"""Decode's operators and 4-bit products on a GPU: Triton's kernels where a trial finds them the faster."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.kernels import triton_decode, triton_products
from flexgen_h2o.kernels.decode_unit import DecodeUnit
from flexgen_h2o.kernels.fastest import Fastest, Way


def attention(with_torch: Way, seconds: Callable[[Callable[[], object]], float]) -> Fastest:
    """decode.attend()."""
    ways = {"torch": with_torch, "Triton": triton_decode.attend_with_triton}
    return Fastest(ways, _kind_of_attention, _rehearse_attention, seconds)


def entry(with_torch: Way, seconds: Callable[[Callable[[], object]], float]) -> Fastest:
    """decode.enter()."""
    return Fastest(
        {"torch": with_torch, "Triton": triton_decode.enter_with_triton}, _kind_of_entry, _rehearse_entry, seconds
    )


def product_in_4_bits(restored: Way, seconds: Callable[[Callable[[], object]], float]) -> Fastest:
    """A product with entries: x, entries, bias, output, buffer. By `restored`, through the buffer, or with codes."""
    ways = {"restored": restored, "Triton": lambda *args: triton_products.multiply_with_triton(*args[:4])}
    # What a trial writes, output and buffer, the call that it is made for writes once more.
    return Fastest(ways, _kind_of_product, lambda *args: args, seconds)


def event_seconds(call: Callable[[], object]) -> float:
    """What a call takes on the current stream of the current GPU, launches included."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _kind_of_attention(query: Tensor, unit: DecodeUnit) -> Hashable | None:
    """Sizes of the same power of two are of one kind: the full cache grows with every step."""
    if not triton_decode.fits(query.shape[3], unit):
        return None
    precisions = (query.dtype, unit.heavy_keys.dtype, unit.ring_keys.dtype)
    sizes = (unit.pairs, unit.heavy_len, unit.ring_len)
    return (query.device, *precisions, query.shape[3], unit.accumulates, *(size.bit_length() for size in sizes))


def _rehearse_attention(query: Tensor, unit: DecodeUnit) -> tuple[Any, ...]:
    return query, replace(unit, scores=unit.scores.clone(), losers=unit.losers.clone())


def _kind_of_entry(unit: DecodeUnit, keys: Tensor, *_: Any) -> Hashable | None:
    head_dim = keys.shape[3]
    if not triton_decode.fits(head_dim, unit) or unit.ring_keys.dtype not in (keys.dtype, torch.uint8):
        return None
    precisions = (keys.dtype, unit.heavy_keys.dtype, unit.ring_keys.dtype)
    return (keys.device, *precisions, head_dim, unit.heavy_slots > 0, unit.pairs.bit_length())


def _rehearse_entry(
    unit: DecodeUnit, keys: Tensor, values: Tensor, initial_scores: Tensor, column: int
) -> tuple[Any, ...]:
    """A full buffer of two slots a region: how many there are makes no difference to an entry."""
    rows, heads = keys.shape[:2]
    heavy, ring = (
        region.new_zeros(2, rows, heads, slots, region.shape[3])
        for region, slots in ((unit.heavy_keys, min(unit.heavy_slots, 2)), (unit.ring_keys, 2))
    )
    state = keys.new_zeros(rows, heads, heavy.shape[3] + 2)
    losers = torch.zeros(rows, heads, dtype=torch.int32, device=keys.device)
    full = DecodeUnit(heavy[0], heavy[1], ring[0], ring[1], state.float(), state.int(), losers, heavy.shape[3], 2)
    return full, keys, values, initial_scores, 2


def _kind_of_product(x: Tensor, entries: Tensor, bias: Tensor | None, output: Tensor, *_: Any) -> Hashable | None:
    if not triton_products.fits(x, entries, bias, output):
        return None
    return (x.device, x.dtype, len(entries), x.shape[1], len(x).bit_length())
