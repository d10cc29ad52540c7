"""Decode attention over a KV buffer's two regions, and the entry of a new token.

    attend   logits, one softmax, sum of values, scores, and the next loser, in one pass
    enter    the ring's oldest entry leaves, the new token takes its slot

On a CPU they run in the native library, if it is there, and read every key and value once, in its own precision. With
torch's operations, their reference, they run everywhere; on a GPU also as Triton's kernels, where a trial finds those
faster (cuda.py).
"""

import ctypes
import math
from typing import cast

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits, native
from flexgen_h2o.kernels.decode_unit import DecodeUnit
from flexgen_h2o.kernels.fastest import HAS_TRITON, Fastest
from flexgen_h2o.plan.footprint import QUANTISED_AT_ONCE

if HAS_TRITON:
    from flexgen_h2o.kernels import cuda


def attend(query: Tensor, unit: DecodeUnit) -> Tensor:
    """Attention of each row's current token to the live entries, in the way that suits the device.

    The arguments are those of attend_with_torch().
    """
    if query.is_cuda and ATTEND_ON_CUDA is not None:
        return cast(Tensor, ATTEND_ON_CUDA(query, unit))
    if query.device.type == "cpu" and native.library() is not None:
        return attend_natively(query, unit)
    return attend_with_torch(query, unit)


def enter(unit: DecodeUnit, keys: Tensor, values: Tensor, initial_scores: Tensor, column: int) -> None:
    """Enters a token, in the way that suits the device. The arguments are those of enter_with_torch()."""
    if keys.is_cuda and ENTER_ON_CUDA is not None:
        ENTER_ON_CUDA(unit, keys, values, initial_scores, column)
    elif keys.device.type == "cpu" and native.library() is not None:
        enter_natively(unit, keys, values, initial_scores, column)
    else:
        enter_with_torch(unit, keys, values, initial_scores, column)


def attend_with_torch(query: Tensor, unit: DecodeUnit) -> Tensor:
    """Attention of each row's current token to the live entries, with one softmax over both regions.

    Changes the unit's scores, where it accumulates, and its losers.

    Args:
        query: [rows, heads, 1, head_dim], already scaled.
    Returns: [rows, heads, 1, head_dim].
    """
    heavy, heavy_len, ring_len, scores = unit.heavy_slots, unit.heavy_len, unit.ring_len, unit.scores
    live_scores = (scores[..., :heavy_len], scores[..., heavy : heavy + ring_len])
    keys = (_entries(unit.heavy_keys, heavy_len, query), _entries(unit.ring_keys, ring_len, query))
    values = (_entries(unit.heavy_values, heavy_len, query), _entries(unit.ring_values, ring_len, query))
    logits = torch.cat([_dot_keys(query, part) for part in keys], dim=-1).float()
    logits.masked_fill_(torch.cat(live_scores, dim=-1).isneginf(), -math.inf)
    weights = logits.softmax(dim=-1)  # [rows, heads, live slots]
    parts = weights.split([heavy_len, ring_len], dim=-1)
    for part, region in zip(parts, live_scores, strict=True):
        if unit.accumulates:
            region.copy_(torch.where(region.isneginf(), region, unit.decay * region + part))
    if heavy:
        unit.losers.copy_(scores[..., :heavy].min(dim=-1).indices)
    outputs = [_weigh_values(part.to(query.dtype), region) for part, region in zip(parts, values, strict=True)]
    return outputs[0] + outputs[1] if heavy_len else outputs[1]


def enter_with_torch(unit: DecodeUnit, keys: Tensor, values: Tensor, initial_scores: Tensor, column: int) -> None:
    """Enters a token, after the entry whose ring slot it takes has left.

    That one replaces the loser of the heavy region if its own score is strictly greater; an empty slot has score -inf,
    so it loses to any entry, and a pad has -inf and beats none.

    Args:
        keys, values: [rows, heads, 1, head_dim] of the token.
        initial_scores: [rows, heads] float32.
        column: the token's.
    """
    scores, columns = unit.scores, unit.columns
    slot = column % unit.ring_slots
    at = unit.heavy_slots + slot
    if unit.heavy_slots and column >= unit.ring_slots:
        loser = unit.losers.long()[..., None]  # [rows, heads, 1]
        leaving = scores[..., at : at + 1]
        lowest = scores.gather(2, loser)
        wins = leaving > lowest
        for stored, region in ((unit.heavy_keys, unit.ring_keys), (unit.heavy_values, unit.ring_values)):
            index = loser[..., None].expand(-1, -1, 1, stored.shape[-1])
            leaving_entry = _as_stored(region[:, :, slot : slot + 1], stored)
            stored.scatter_(2, index, torch.where(wins[..., None], leaving_entry, stored.gather(2, index)))
        columns.scatter_(2, loser, torch.where(wins, columns[..., at : at + 1], columns.gather(2, loser)))
        scores.scatter_(2, loser, torch.where(wins, leaving, lowest))
    unit.ring_keys[:, :, slot : slot + 1] = _as_stored(keys, unit.ring_keys)
    unit.ring_values[:, :, slot : slot + 1] = _as_stored(values, unit.ring_values)
    scores[..., at] = initial_scores
    columns[..., at] = torch.where(initial_scores.isneginf(), -1, column).to(torch.int32)


def _entries(region: Tensor, live: int, query: Tensor) -> Tensor:
    """The live entries of a region in the query's precision, [rows, heads, live, head_dim]."""
    entries = region[:, :, :live]
    if region.dtype != torch.uint8:
        return entries
    whole = query.new_empty(*entries.shape[:3], query.shape[-1])
    rows = max(1, QUANTISED_AT_ONCE // max(1, whole[0].numel()))
    for part, target in zip(entries.split(rows), whole.split(rows), strict=True):
        target.copy_(four_bits.decode(part, query.shape[-1], query.dtype))
    return whole


def _as_stored(entries: Tensor, region: Tensor) -> Tensor:
    """Entries as a region keeps them: quantised there if they are not yet."""
    return four_bits.encode(entries) if region.dtype == torch.uint8 != entries.dtype else entries


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


def attend_natively(query: Tensor, unit: DecodeUnit) -> Tensor:
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
    library.flexgen_h2o_decode_attention(ctypes.byref(describe(query, unit, output)))
    return output


def describe(query: Tensor, unit: DecodeUnit, output: Tensor) -> native.Attention:
    """A unit as the native library takes it."""
    library = native.library()
    ring_keys, heavy_keys = unit.ring_keys, unit.heavy_keys
    assert library is not None and (ring_keys.dtype == torch.uint8 or query.dtype in (torch.float32, ring_keys.dtype))
    assert heavy_keys.dtype in (ring_keys.dtype, torch.uint8)
    head_dim = query.shape[-1]
    tensors = (query, *unit.regions, unit.scores, unit.losers, output)
    return native.Attention(
        *map(native.pointer, tensors),
        *(unit.pairs, head_dim, unit.heavy_slots, unit.ring_slots, unit.heavy_len, unit.ring_len),
        *(native.TYPES[tensor.dtype] for tensor in (heavy_keys, ring_keys, query)),
        *(unit.accumulates, unit.decay, torch.get_num_threads()),
        library.flexgen_h2o_best_path(head_dim, heavy_keys.dtype == torch.uint8),
    )


def enter_natively(unit: DecodeUnit, keys: Tensor, values: Tensor, initial_scores: Tensor, column: int) -> None:
    """The same by the native library."""
    library = native.library()
    assert library is not None
    head_dim, ring_slots = keys.shape[-1], unit.ring_slots
    keys, values, initial_scores = keys.contiguous(), values.contiguous(), initial_scores.contiguous()
    stored = (*unit.regions, unit.scores, unit.columns, unit.losers)
    entry = native.Entry(
        *map(native.pointer, (*stored, keys, values, initial_scores)),
        *(unit.pairs, head_dim, unit.heavy_slots, ring_slots, column % ring_slots),
        *(native.TYPES[tensor.dtype] for tensor in (unit.heavy_keys, unit.ring_keys, keys)),
        *(column, column >= ring_slots, torch.get_num_threads()),
        library.flexgen_h2o_best_path(head_dim, unit.heavy_keys.dtype == torch.uint8),
    )
    library.flexgen_h2o_enter(ctypes.byref(entry))


def attention_path(device: torch.device, head_dim: int) -> str:
    """How decode attention runs on a device, for reports."""
    if device.type == "cuda" and ATTEND_ON_CUDA is not None:
        return ATTEND_ON_CUDA.names
    path = native.best_path(head_dim) if device.type == "cpu" else None
    return "torch" if path is None else f"native, {path}"


ATTEND_ON_CUDA: Fastest | None = cuda.attention(attend_with_torch, cuda.event_seconds) if HAS_TRITON else None
ENTER_ON_CUDA: Fastest | None = cuda.entry(enter_with_torch, cuda.event_seconds) if HAS_TRITON else None
