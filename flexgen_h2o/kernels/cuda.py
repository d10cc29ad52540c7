"""The operators of decode.py on a GPU: Triton's kernels where a trial finds them faster than torch's operations."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.kernels import triton_decode
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
    if not triton_decode.fits(*regions):
        return None
    keys = regions[2]
    sizes = (query.shape[0] * query.shape[1], heavy_len, ring_len)
    return (keys.device, query.dtype, keys.dtype, keys.shape[3], accumulates, *(size.bit_length() for size in sizes))


def _rehearse_attention(query: Tensor, *args: Any) -> tuple[Any, ...]:
    scores, losers = args[4:6]
    return (query, *args[:4], scores.clone(), losers.clone(), *args[6:])


def _kind_of_entry(heavy_keys: Tensor, *args: Any) -> Hashable | None:
    keys = args[6]
    if not triton_decode.fits(heavy_keys, *args[:3]) or keys.dtype != heavy_keys.dtype:
        return None
    rows, heads, heavy_slots, head_dim = heavy_keys.shape
    return (keys.device, keys.dtype, head_dim, heavy_slots > 0, (rows * heads).bit_length())


def _rehearse_entry(*args: Any) -> tuple[Any, ...]:
    """A full buffer of two slots a region: how many there are makes no difference to an entry."""
    heavy_slots, (keys, values, initial_scores, _) = args[0].shape[2], args[7:]
    rows, heads, _, head_dim = keys.shape
    heavy, ring = (keys.new_zeros(2, rows, heads, slots, head_dim) for slots in (min(heavy_slots, 2), 2))
    state = keys.new_zeros(rows, heads, heavy.shape[3] + 2)
    losers = torch.zeros(rows, heads, dtype=torch.int32, device=keys.device)
    return (*heavy, *ring, state.float(), state.int(), losers, keys, values, initial_scores, 2)
