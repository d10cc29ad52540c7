"""What decode.py offers as Triton kernels for a GPU: few launches, and keys and values read once.

A program computes one row and head. Keys and values may be float16, bfloat16 or float32, or in 4-bit groups
(four_bits.py); everything is computed in float32, so outputs are nearer to the exact ones than those of torch's
operations in half precision.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.kernels.decode_unit import DecodeUnit
from flexgen_h2o.kernels.triton_quant import PRECISIONS, quantised, restored

TILE = 4096  # elements of keys read at once by a program
SCORES_AT_ONCE = 1024
LENGTHS = ["heavy_slots", "ring_slots", "heavy_len", "ring_len"]


def fits(head_dim: int, unit: DecodeUnit) -> bool:
    """Whether regions lie as the kernels want them: both in the same precision, or heavy alone in 4 bits.

    In 4 bits, words of 4 bytes have to lie at multiples of 4.
    """
    return unit.heavy_keys.dtype in (unit.ring_keys.dtype, torch.uint8) and all(
        region.is_contiguous() and (region.dtype in PRECISIONS or _fits_in_4_bits(head_dim, region))
        for region in unit.regions
    )


def _fits_in_4_bits(head_dim: int, region: Tensor) -> bool:
    return region.dtype == torch.uint8 and head_dim % 8 == 0 and region.data_ptr() % 4 == 0


def attend_with_triton(query: Tensor, unit: DecodeUnit) -> Tensor:
    """attend(); arguments and result are those of decode.attend_with_torch()."""
    head_dim, pairs = query.shape[3], unit.pairs
    query = query.contiguous()
    output = torch.empty_like(query)
    logits = torch.empty(pairs, unit.heavy_len + unit.ring_len if unit.accumulates else 0, device=query.device)
    statistics = torch.empty(pairs, 2, device=query.device)
    width = triton.next_power_of_2(head_dim)
    sizes = (unit.heavy_slots, unit.ring_slots, unit.heavy_len, unit.ring_len)
    _attend[(pairs,)](
        *(query, *unit.regions, unit.scores, output, logits, statistics, *sizes),
        heavy_entry=unit.heavy_keys.shape[3],
        ring_entry=unit.ring_keys.shape[3],
        head_dim=head_dim,
        width=width,
        block=max(1, TILE // width),
        keeps_logits=unit.accumulates,
    )
    if unit.accumulates or unit.heavy_slots:
        _update_scores[(pairs,)](
            *(unit.scores, unit.losers, logits, statistics, *sizes, unit.decay),
            accumulates=unit.accumulates,
            block=SCORES_AT_ONCE,
        )
    return output


def enter_with_triton(unit: DecodeUnit, keys: Tensor, values: Tensor, initial_scores: Tensor, column: int) -> None:
    """enter(); arguments are those of decode.enter_with_torch()."""
    head_dim, ring_slots = keys.shape[3], unit.ring_slots
    # One warp: what it reads of a slot and then writes there stays in order.
    _enter[(unit.pairs,)](
        *(*unit.regions, unit.scores, unit.columns, unit.losers),
        *(keys.contiguous(), values.contiguous(), initial_scores.contiguous()),
        *(unit.heavy_slots, ring_slots, column % ring_slots, column, int(column >= ring_slots)),
        heavy_entry=unit.heavy_keys.shape[3],
        ring_entry=unit.ring_keys.shape[3],
        head_dim=head_dim,
        width=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


@triton.jit
def _entries(region, slots, dims, is_read, entry: tl.constexpr, head_dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of one row and head in float32, [slots, dims]; 0 where none is read."""
    if region.dtype.element_ty == tl.uint8:
        return restored(region + slots[:, None] * entry, dims[None, :], is_read, head_dim)
    else:
        return tl.load(region + slots[:, None] * entry + dims[None, :], mask=is_read, other=0.0).to(tl.float32)


@triton.jit
def _attend_region(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    scores,
    logits,
    live,
    largest,
    total,
    weighted,
    entry: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    keeps_logits: tl.constexpr,
):
    """Goes on with a softmax over one more region: its largest logit, the sum of weights, and that of values by weight.

    Weights are relative to the largest logit so far.
    """
    dims = tl.arange(0, width)
    for first in range(0, live, block):
        slots = first + tl.arange(0, block)
        is_live = slots < live
        is_read = is_live[:, None] & (dims < head_dim)[None, :]
        logit = tl.sum(_entries(keys, slots, dims, is_read, entry, head_dim) * query[None, :], axis=1)
        score = tl.load(scores + slots, mask=is_live, other=float("-inf"))
        logit = tl.where(score == float("-inf"), float("-inf"), logit)
        if keeps_logits:
            tl.store(logits + slots, logit, mask=is_live)
        new_largest = tl.maximum(largest, tl.max(logit, axis=0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # as long as all slots have been empty
        weight = tl.exp(logit - shift)
        fade = tl.exp(largest - shift)
        value = _entries(values, slots, dims, is_read, entry, head_dim)
        total = total * fade + tl.sum(weight, axis=0)
        weighted = weighted * fade + tl.sum(weight[:, None] * value, axis=0)
        largest = new_largest
    return largest, total, weighted


@triton.jit(do_not_specialize=LENGTHS)
def _attend(  # type: ignore[no-untyped-def]
    query,
    heavy_keys,
    heavy_values,
    ring_keys,
    ring_values,
    scores,
    output,
    logits,
    statistics,
    heavy_slots,
    ring_slots,
    heavy_len,
    ring_len,
    heavy_entry: tl.constexpr,
    ring_entry: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    keeps_logits: tl.constexpr,
):
    """The output of one row and head, and for its scores: logits of live slots, the largest, and the sum of weights."""
    pair = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, width)
    q = tl.load(query + pair * head_dim + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    largest, total, weighted = float("-inf"), 0.0, tl.zeros([width], tl.float32)
    own_scores = scores + pair * (heavy_slots + ring_slots)
    own_logits = logits + pair * (heavy_len + ring_len)
    at = pair * heavy_slots * heavy_entry
    largest, total, weighted = _attend_region(
        q, heavy_keys + at, heavy_values + at, own_scores, own_logits, heavy_len, largest, total, weighted,
        heavy_entry, head_dim, width, block, keeps_logits,
    )  # fmt: skip
    at = pair * ring_slots * ring_entry
    largest, total, weighted = _attend_region(
        q, ring_keys + at, ring_values + at, own_scores + heavy_slots, own_logits + heavy_len, ring_len,
        largest, total, weighted, ring_entry, head_dim, width, block, keeps_logits,
    )  # fmt: skip
    tl.store(output + pair * head_dim + dims, weighted / total, mask=dims < head_dim)
    tl.store(statistics + pair * 2, largest)
    tl.store(statistics + pair * 2 + 1, total)


@triton.jit(do_not_specialize=[*LENGTHS, "decay"])
def _update_scores(  # type: ignore[no-untyped-def]
    scores,
    losers,
    logits,
    statistics,
    heavy_slots,
    ring_slots,
    heavy_len,
    ring_len,
    decay,
    accumulates: tl.constexpr,
    block: tl.constexpr,
):
    """Adds the weights to the scores of one row and head, and finds the lowest in heavy, the lower slot of equals."""
    pair = tl.program_id(0).to(tl.int64)
    largest = tl.load(statistics + pair * 2)
    total = tl.load(statistics + pair * 2 + 1)
    scores += pair * (heavy_slots + ring_slots)
    logits += pair * (heavy_len + ring_len)
    lowest, loser = float("inf"), 0
    for first in range(0, heavy_slots, block):
        slots = first + tl.arange(0, block)
        is_slot = slots < heavy_slots
        score = tl.load(scores + slots, mask=is_slot, other=float("inf"))
        if accumulates:
            is_live = (slots < heavy_len) & (score != float("-inf"))
            logit = tl.load(logits + slots, mask=is_live, other=0.0)
            score = tl.where(is_live, decay * score + tl.exp(logit - largest) / total, score)
            tl.store(scores + slots, score, mask=is_live)
        least = tl.min(score, axis=0)
        slot = tl.min(tl.where((score == least) & is_slot, slots, heavy_slots), axis=0)
        loser = tl.where(least < lowest, slot, loser)
        lowest = tl.minimum(least, lowest)
    if heavy_slots > 0:
        tl.store(losers + pair, loser)
    if accumulates:
        for first in range(0, ring_len, block):
            slots = first + tl.arange(0, block)
            score = tl.load(scores + heavy_slots + slots, mask=slots < ring_len, other=float("-inf"))
            is_live = score != float("-inf")
            logit = tl.load(logits + heavy_len + slots, mask=is_live, other=0.0)
            score = decay * score + tl.exp(logit - largest) / total
            tl.store(scores + heavy_slots + slots, score, mask=is_live)


@triton.jit
def _copy_entry(  # type: ignore[no-untyped-def]
    source, target, source_entry: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr
):
    """Copies an entry, quantising it where only the target is in 4 bits."""
    if target.dtype.element_ty == source.dtype.element_ty:
        at = tl.arange(0, width)
        tl.store(target + at, tl.load(source + at, mask=at < source_entry), mask=at < source_entry)
    else:
        tl.static_assert(target.dtype.element_ty == tl.uint8)
        quantised(source, target, head_dim, width)


@triton.jit(do_not_specialize=["heavy_slots", "ring_slots", "slot", "column", "ring_is_full"])
def _enter(  # type: ignore[no-untyped-def]
    heavy_keys,
    heavy_values,
    ring_keys,
    ring_values,
    scores,
    columns,
    losers,
    keys,
    values,
    initial_scores,
    heavy_slots,
    ring_slots,
    slot,
    column,
    ring_is_full,
    heavy_entry: tl.constexpr,
    ring_entry: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
):
    """Enters the token of one row and head."""
    pair = tl.program_id(0).to(tl.int64)
    scores += pair * (heavy_slots + ring_slots)
    columns += pair * (heavy_slots + ring_slots)
    in_ring = (pair * ring_slots + slot) * ring_entry
    if (heavy_slots > 0) & (ring_is_full != 0):
        loser = tl.load(losers + pair)
        leaving = tl.load(scores + heavy_slots + slot)
        if leaving > tl.load(scores + loser):
            in_heavy = (pair * heavy_slots + loser) * heavy_entry
            _copy_entry(ring_keys + in_ring, heavy_keys + in_heavy, ring_entry, head_dim, width)
            _copy_entry(ring_values + in_ring, heavy_values + in_heavy, ring_entry, head_dim, width)
            tl.store(columns + loser, tl.load(columns + heavy_slots + slot))
            tl.store(scores + loser, leaving)
    own = pair * head_dim
    _copy_entry(keys + own, ring_keys + in_ring, head_dim, head_dim, width)
    _copy_entry(values + own, ring_values + in_ring, head_dim, head_dim, width)
    score = tl.load(initial_scores + pair)
    tl.store(scores + heavy_slots + slot, score)
    tl.store(columns + heavy_slots + slot, tl.where(score == float("-inf"), -1, column))
