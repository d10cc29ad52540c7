"""Decode attention over a KV buffer's two regions, and the entry of a new token: two operators of torch.

    flexgen_h2o::decode_attention   logits, one softmax, sum of values, scores, and the next loser, in one pass
    flexgen_h2o::enter_token        the ring's oldest entry leaves, the new token takes its slot

On a CPU they run in the native library, if it is there, and read every key and value once, in its own precision. With
torch's operations, their reference, they run everywhere; on a GPU also as Triton's kernels, where a trial finds those
faster (cuda.py).
"""

import ctypes
import math

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kernels import native
from flexgen_h2o.kernels.fastest import HAS_TRITON, Fastest
from flexgen_h2o.plan.footprint import QUANTISED_AT_ONCE

_operators = torch.library.Library("flexgen_h2o", "DEF")
_operators.define(
    "decode_attention(Tensor query, Tensor heavy_keys, Tensor heavy_values, Tensor ring_keys, Tensor ring_values,"
    " Tensor(a!) scores, Tensor(b!) losers, int heavy_len, int ring_len, bool accumulates, float decay) -> Tensor"
)
_operators.define(
    "enter_token(Tensor(a!) heavy_keys, Tensor(b!) heavy_values, Tensor(c!) ring_keys, Tensor(d!) ring_values,"
    " Tensor(e!) scores, Tensor(f!) columns, Tensor losers, Tensor keys, Tensor values, Tensor initial_scores,"
    " int column) -> ()"
)


def attend_with_torch(
    query: Tensor,
    heavy_keys: Tensor,
    heavy_values: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    scores: Tensor,
    losers: Tensor,
    heavy_len: int,
    ring_len: int,
    accumulates: bool,
    decay: float,
) -> Tensor:
    """Attention of each row's current token to the live entries, with one softmax over both regions.

    Args:
        query: [rows, heads, 1, head_dim], already scaled.
        heavy_keys, heavy_values: [rows, heads, heavy slots, head_dim]; the first `heavy_len` are live. In 4 bits
            (uint8) they are the entries of quant.encode(), [rows, heads, heavy slots, entry bytes].
        ring_keys, ring_values: the same of the ring; the first `ring_len` are live.
        scores: [rows, heads, heavy + ring slots] float32, -inf where a slot is empty. Where `accumulates`, live ones
            become decay * score + weight.
        losers: [rows, heads] int32, written: the heavy slot with the lowest score, the lower one of equals.
    Returns: [rows, heads, 1, head_dim].
    """
    heavy_slots = heavy_keys.shape[2]
    live_scores = (scores[..., :heavy_len], scores[..., heavy_slots : heavy_slots + ring_len])
    keys = (_entries(heavy_keys, heavy_len, query), _entries(ring_keys, ring_len, query))
    values = (_entries(heavy_values, heavy_len, query), _entries(ring_values, ring_len, query))
    logits = torch.cat([_dot_keys(query, part) for part in keys], dim=-1).float()
    logits.masked_fill_(torch.cat(live_scores, dim=-1).isneginf(), -math.inf)
    weights = logits.softmax(dim=-1)  # [rows, heads, live slots]
    parts = weights.split([heavy_len, ring_len], dim=-1)
    for part, region in zip(parts, live_scores, strict=True):
        if accumulates:
            region.copy_(torch.where(region.isneginf(), region, decay * region + part))
    if heavy_slots:
        losers.copy_(scores[..., :heavy_slots].min(dim=-1).indices)
    outputs = [_weigh_values(part.to(query.dtype), region) for part, region in zip(parts, values, strict=True)]
    return outputs[0] + outputs[1] if heavy_len else outputs[1]


def enter_with_torch(
    heavy_keys: Tensor,
    heavy_values: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    scores: Tensor,
    columns: Tensor,
    losers: Tensor,
    keys: Tensor,
    values: Tensor,
    initial_scores: Tensor,
    column: int,
) -> None:
    """Enters a token, after the entry whose ring slot it takes has left.

    That one replaces the loser of the heavy region if its own score is strictly greater; an empty slot has score -inf,
    so it loses to any entry, and a pad has -inf and beats none.

    Args:
        columns: [rows, heads, heavy + ring slots] int32, -1 where a slot is empty.
        losers: [rows, heads] int32, the heavy slot with the lowest score.
        keys, values: [rows, heads, 1, head_dim] of the token.
        initial_scores: [rows] float32.
        column: the token's.
        The rest as in attend_with_torch().
    """
    heavy_slots, ring_slots = heavy_keys.shape[2], ring_keys.shape[2]
    slot = column % ring_slots
    at = heavy_slots + slot
    if heavy_slots and column >= ring_slots:
        loser = losers.long()[..., None]  # [rows, heads, 1]
        leaving = scores[..., at : at + 1]
        lowest = scores.gather(2, loser)
        wins = leaving > lowest
        for stored, region in ((heavy_keys, ring_keys), (heavy_values, ring_values)):
            index = loser[..., None].expand(-1, -1, 1, stored.shape[-1])
            leaving_entry = _as_stored(region[:, :, slot : slot + 1], stored)
            stored.scatter_(2, index, torch.where(wins[..., None], leaving_entry, stored.gather(2, index)))
        columns.scatter_(2, loser, torch.where(wins, columns[..., at : at + 1], columns.gather(2, loser)))
        scores.scatter_(2, loser, torch.where(wins, leaving, lowest))
    ring_keys[:, :, slot : slot + 1] = _as_stored(keys, ring_keys)
    ring_values[:, :, slot : slot + 1] = _as_stored(values, ring_values)
    scores[..., at] = initial_scores[:, None]
    columns[..., at] = torch.where(initial_scores.isneginf(), -1, column).to(torch.int32)[:, None]


def _entries(region: Tensor, live: int, query: Tensor) -> Tensor:
    """The live entries of a region in the query's precision, [rows, heads, live, head_dim]."""
    entries = region[:, :, :live]
    if region.dtype != torch.uint8:
        return entries
    whole = query.new_empty(*entries.shape[:3], query.shape[-1])
    rows = max(1, QUANTISED_AT_ONCE // max(1, whole[0].numel()))
    for part, target in zip(entries.split(rows), whole.split(rows), strict=True):
        target.copy_(quant.decode(part, query.shape[-1], query.dtype))
    return whole


def _as_stored(entries: Tensor, region: Tensor) -> Tensor:
    """Entries as a region keeps them: quantised there if they are not yet."""
    return quant.encode(entries) if region.dtype == torch.uint8 != entries.dtype else entries


def _dot_keys(query: Tensor, keys: Tensor) -> Tensor:
    """[rows, heads, 1, head_dim] . [rows, heads, slots, head_dim] -> [rows, heads, slots].

    Keys times query and not the other way round: the matrix is then read in the order in which it lies.
    """
    rows, heads, slots, head_dim = keys.shape
    vectors = query.reshape(rows * heads, head_dim, 1)
    return torch.bmm(keys.reshape(rows * heads, slots, head_dim), vectors).view(rows, heads, slots)


def _weigh_values(weights: Tensor, values: Tensor) -> Tensor:
    """[rows, heads, slots] . [rows, heads, slots, head_dim] -> [rows, heads, 1, head_dim]."""
    rows, heads, slots, head_dim = values.shape
    flat = weights.reshape(rows * heads, 1, slots)
    return torch.bmm(flat, values.reshape(rows * heads, slots, head_dim)).view(rows, heads, 1, head_dim)


def attend_natively(
    query: Tensor,
    heavy_keys: Tensor,
    heavy_values: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    scores: Tensor,
    losers: Tensor,
    heavy_len: int,
    ring_len: int,
    accumulates: bool,
    decay: float,
) -> Tensor:
    """The same by the native library, in float32 whatever the precision of query, keys and values.

    Of a logit the error is at most (head_dim + 4) 2^-23 sum |query| |key|, of a weight twice as much, relative; sums
    over n slots add (n + 8) 2^-23 to that. In 4 bits |minimum| + 15 scale takes the place of |key| and of |value|, as
    an element is minimum + scale code; and there, for an output in half precision, weights of values may be cut after
    16 bits, an error of 2^-15. The output is rounded once.
    """
    library = native.library()
    assert library is not None
    query = query.contiguous()
    output = torch.empty_like(query)
    unit = describe(query, heavy_keys, heavy_values, ring_keys, ring_values, scores, losers, output)
    unit.heavy_len, unit.ring_len, unit.accumulates, unit.decay = heavy_len, ring_len, accumulates, decay
    library.flexgen_h2o_decode_attention(ctypes.byref(unit))
    return output


def describe(
    query: Tensor,
    heavy_keys: Tensor,
    heavy_values: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    scores: Tensor,
    losers: Tensor,
    output: Tensor,
) -> native.Attention:
    """A unit as the native library takes it, all slots live."""
    library = native.library()
    assert library is not None and (ring_keys.dtype == torch.uint8 or query.dtype in (torch.float32, ring_keys.dtype))
    assert heavy_keys.dtype in (ring_keys.dtype, torch.uint8)
    rows, heads, ring_slots, _ = ring_keys.shape
    head_dim, heavy_slots = query.shape[-1], heavy_keys.shape[2]
    tensors = (query, heavy_keys, heavy_values, ring_keys, ring_values, scores, losers, output)
    return native.Attention(
        *map(native.pointer, tensors),
        *(rows * heads, head_dim, heavy_slots, ring_slots, heavy_slots, ring_slots),
        *(native.TYPES[tensor.dtype] for tensor in (heavy_keys, ring_keys, query)),
        *(False, 1.0, torch.get_num_threads()),
        library.flexgen_h2o_best_path(head_dim, heavy_keys.dtype == torch.uint8),
    )


def enter_natively(
    heavy_keys: Tensor,
    heavy_values: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    scores: Tensor,
    columns: Tensor,
    losers: Tensor,
    keys: Tensor,
    values: Tensor,
    initial_scores: Tensor,
    column: int,
) -> None:
    """The same by the native library."""
    library = native.library()
    assert library is not None
    rows, heads, ring_slots, _ = ring_keys.shape
    head_dim = keys.shape[-1]
    keys, values, initial_scores = keys.contiguous(), values.contiguous(), initial_scores.contiguous()
    stored = (heavy_keys, heavy_values, ring_keys, ring_values, scores, columns, losers)
    unit = native.Entry(
        *map(native.pointer, (*stored, keys, values, initial_scores)),
        *(rows * heads, heads, head_dim, heavy_keys.shape[2], ring_slots, column % ring_slots),
        *(native.TYPES[tensor.dtype] for tensor in (heavy_keys, ring_keys, keys)),
        *(column, column >= ring_slots, torch.get_num_threads()),
        library.flexgen_h2o_best_path(head_dim, heavy_keys.dtype == torch.uint8),
    )
    library.flexgen_h2o_enter(ctypes.byref(unit))


def attention_path(device: torch.device, head_dim: int) -> str:
    """How decode attention runs on a device, for reports."""
    if device.type == "cuda" and ON_CUDA is not None:
        return ON_CUDA.names
    path = native.best_path(head_dim) if device.type == "cpu" else None
    return "torch" if path is None else f"native, {path}"


_operators.impl("decode_attention", attend_with_torch, "CompositeExplicitAutograd")
_operators.impl("enter_token", enter_with_torch, "CompositeExplicitAutograd")
if native.library() is not None:
    _operators.impl("decode_attention", attend_natively, "CPU")
    _operators.impl("enter_token", enter_natively, "CPU")
ON_CUDA: Fastest | None = None
if HAS_TRITON:
    from flexgen_h2o.kernels import cuda

    ON_CUDA = cuda.attention(attend_with_torch, cuda.event_seconds)
    _operators.impl("decode_attention", ON_CUDA, "CUDA")
    _operators.impl("enter_token", cuda.entry(enter_with_torch, cuda.event_seconds), "CUDA")
attend = torch.ops.flexgen_h2o.decode_attention
enter = torch.ops.flexgen_h2o.enter_token
