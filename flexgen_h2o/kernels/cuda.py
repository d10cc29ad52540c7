"""Decode's operators and 4-bit products on a GPU: Triton's kernels where a trial finds them the faster."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.kernels import triton_decode, triton_products
from flexgen_h2o.kernels.fastest import Fastest, Way


def attention(with_torch: Way, seconds: Callable[[Callable[[], object]], float]) -> Fastest:
    """decode_attention."""
    ways = {"torch": with_torch, "Triton": triton_decode.attend_with_triton}
    return Fastest(ways, _kind_of_attention, _rehearse_attention, seconds)


def entry(with_torch: Way, seconds: Callable[[Callable[[], object]], float]) -> Fastest:
    """enter_token."""
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


def _kind_of_attention(query: Tensor, *args: Any) -> Hashable | None:
    """Sizes of the same power of two are of one kind: the full cache grows with every step."""
    regions, (heavy_len, ring_len, accumulates, _) = args[:4], args[6:]
    if not triton_decode.fits(query.shape[3], *regions):
        return None
    precisions = (query.dtype, regions[0].dtype, regions[2].dtype)
    sizes = (query.shape[0] * query.shape[1], heavy_len, ring_len)
    return (query.device, *precisions, query.shape[3], accumulates, *(size.bit_length() for size in sizes))


def _rehearse_attention(query: Tensor, *args: Any) -> tuple[Any, ...]:
    scores, losers = args[4:6]
    return (query, *args[:4], scores.clone(), losers.clone(), *args[6:])


def _kind_of_entry(heavy_keys: Tensor, *args: Any) -> Hashable | None:
    ring_keys, keys = args[1], args[6]
    rows, heads, _, head_dim = keys.shape
    if not triton_decode.fits(head_dim, heavy_keys, *args[:3]) or ring_keys.dtype not in (keys.dtype, torch.uint8):
        return None
    precisions = (keys.dtype, heavy_keys.dtype, ring_keys.dtype)
    return (keys.device, *precisions, head_dim, heavy_keys.shape[2] > 0, (rows * heads).bit_length())


def _rehearse_entry(*args: Any) -> tuple[Any, ...]:
    """A full buffer of two slots a region: how many there are makes no difference to an entry."""
    heavy_keys, ring_keys, (keys, values, initial_scores, _) = args[0], args[2], args[7:]
    rows, heads = keys.shape[:2]
    heavy, ring = (
        region.new_zeros(2, rows, heads, slots, region.shape[3])
        for region, slots in ((heavy_keys, min(heavy_keys.shape[2], 2)), (ring_keys, 2))
    )
    state = keys.new_zeros(rows, heads, heavy.shape[3] + 2)
    losers = torch.zeros(rows, heads, dtype=torch.int32, device=keys.device)
    return (*heavy, *ring, state.float(), state.int(), losers, keys, values, initial_scores, 2)


def _kind_of_product(x: Tensor, entries: Tensor, bias: Tensor | None, output: Tensor, *_: Any) -> Hashable | None:
    if not triton_products.fits(x, entries, bias, output):
        return None
    return (x.device, x.dtype, len(entries), x.shape[1], len(x).bit_length())
