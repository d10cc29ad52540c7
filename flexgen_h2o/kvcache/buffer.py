"""The KV buffer of one unit: two regions of fixed size, overwritten in place.

    slots   0 ........ heavy-1 | heavy ........ heavy+recent-1
    region  heavy              | ring, slot = heavy + column % recent
    live    [0, heavy_len)     | [heavy, heavy + ring_len)

Every slot has a key, a value, a score and the column it came from. A score of -inf marks an empty slot (or a pad): it
is masked out of attention and loses every comparison. All rows of a unit share `heavy_len` and `ring_len`, the maxima
over its rows, so attention reads no more than what some row has filled.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from flexgen_h2o.kernels import decode, quantised
from flexgen_h2o.kernels.decode_unit import DecodeUnit
from flexgen_h2o.kvcache.eviction.base import Entries, EvictionRule
from flexgen_h2o.kvcache.eviction.select import choose_heavy
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.plan.footprint import QUANTISED_AT_ONCE
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.kv_shape import UnitShape, aligned

EMPTY = -math.inf


class Region:
    """Keys and values of consecutive slots, at rest in the compute precision or in 4 bits (four_bits.py).

    Attributes:
        keys, values: [rows, heads, slots, head_dim]; in 4 bits [rows, heads, slots, entry bytes] uint8.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys = keys
        self.values = values

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrites `slots` ([n] int64, the same for all rows and heads) with [rows, heads, n, head_dim]."""
        for stored, entries in ((self.keys, keys), (self.values, values)):
            if stored.dtype != torch.uint8:
                stored.index_copy_(2, slots, entries)
                continue
            for target, part in zip(
                *(_in_parts(tensor, entries[0].numel()) for tensor in (stored, entries)), strict=True
            ):
                target.index_copy_(2, slots, quantised.encode(part))


class KVBuffer:
    """KV of one unit (one layer, one sub-batch), evicting by `rule`, in one piece of memory.

    Scores, columns, losers, then keys and values of each region lie one behind the other, so that a unit moves between
    tiers in one copy. reset() or resume() says for which rows it is used, and comes first.

    Args:
        shape: rows are the most that a sub-batch may have.
        storage: [at least shape.nbytes] uint8, the memory.

    Attributes:
        heavy, ring: the two regions.
        scores: [rows, heads, slots] float32. columns: [rows, heads, slots] int32, -1 where empty.
        losers: [rows, heads] int32, the heavy slot with the lowest score: the next to be replaced.
        heavy_len, ring_len: live slots of each region.
    """

    def __init__(self, shape: UnitShape, rule: EvictionRule, dtype: torch.dtype, storage: Tensor, layer: int = 0):
        self.shape = shape
        self.rule = rule
        self.layer = layer
        self.dtype = dtype
        self.storage = storage

    def serve(self, shape: UnitShape, rule: EvictionRule, layer: int) -> None:
        """Is used for a unit of another layer from now on. reset() or resume() comes next."""
        self.shape, self.rule, self.layer = shape, rule, layer

    def reset(self, padding: Padding) -> None:
        """Empties the buffer for a new sub-batch; the arguments are those of `resume`."""
        # Zeros, not merely empty slots: a slot that one row has filled may be empty in another, where its value meets
        # a weight of 0, and 0 times whatever lay in memory might be NaN.
        self.storage.zero_()
        self.resume(padding, 0)
        self.scores.fill_(EMPTY)
        self.columns.fill_(-1)
        self.losers.zero_()

    def resume(self, padding: Padding, columns_seen: int) -> None:
        """Takes the memory as that of a sub-batch that has seen `columns_seen` columns."""
        shape = replace(self.shape, rows=padding.rows)
        state = (shape.rows, shape.heads, shape.slots)
        heavy = self._entries(shape.heavy, shape.heavy_in_4_bits)
        ring = self._entries(shape.recent, shape.ring_in_4_bits)
        views = _carve(
            self.storage,
            *((state, torch.float32), (state, torch.int32), (state[:2], torch.int32)),
            *(((*state[:2], *size), dtype) for size, dtype in (heavy, heavy, ring, ring)),
        )
        self.scores, self.columns, self.losers = views[:3]
        self.heavy, self.ring = Region(*views[3:5]), Region(*views[5:])
        self.padding = padding
        self._update_lengths(columns_seen)

    def _entries(self, slots: int, in_4_bits: bool) -> tuple[tuple[int, int], torch.dtype]:
        """Shape and type of a head's keys, or values, in a region."""
        if in_4_bits:
            return (slots, entry_bytes(self.shape.head_dim)), torch.uint8
        return (slots, self.shape.head_dim), self.dtype

    @property
    def unit(self) -> DecodeUnit:
        """What decode attention and the entry of a token work on, as it is now."""
        return DecodeUnit(
            *(self.heavy.keys, self.heavy.values, self.ring.keys, self.ring.values),
            *(self.scores, self.columns, self.losers),
            heavy_len=self.heavy_len,
            ring_len=self.ring_len,
            accumulates=self.rule.accumulates,
            decay=self.rule.decay,
        )

    def fill(self, keys: Tensor, values: Tensor, attention_sums: Tensor | None) -> None:
        """Takes what prefill computed: the last columns into the ring, the best of the others into heavy.

        Args:
            keys, values: [rows, heads, n, head_dim], left-padded.
            attention_sums: [rows, heads, n] float32, what each column received from the row's real queries; None
                where the rule does not accumulate.
        """
        rows, heads, n, _ = keys.shape
        columns = torch.arange(n, device=keys.device)
        positions = columns - self.padding.on(keys.device)[:, None]  # [rows, n]
        entries = Entries(self.layer, keys, values, positions, attention_sums)
        scores = self.rule.initial_scores(entries).expand(rows, heads, n)
        scores = scores.masked_fill(positions[:, None] < 0, EMPTY)
        before = max(0, n - self.rule.recent)  # columns that come before the ring's
        self._fill_ring(columns[before:], keys[:, :, before:], values[:, :, before:], scores[:, :, before:])
        if before and self.rule.heavy:
            self._fill_heavy(keys[:, :, :before], values[:, :, :before], scores[:, :, :before])
            self.losers.copy_(self.scores[..., : self.rule.heavy].min(dim=-1).indices)
        self._update_lengths(n)

    def attend(self, query: Tensor) -> Tensor:
        """Attention of each row's current token to the live entries, with one softmax over both regions.

        Adds the weights to the entries' scores where the rule accumulates, and notes who would be evicted next.

        Args:
            query: [rows, heads, 1, head_dim], already scaled.
        Returns: [rows, heads, 1, head_dim].
        """
        return decode.attend(query, self.unit)

    def append(self, keys: Tensor, values: Tensor, column: int) -> None:
        """Enters the current token, after the entry whose ring slot it takes has left.

        Args:
            keys, values: [rows, heads, 1, head_dim].
            column: the token's column, one more than at the last call.
        """
        positions = column - self.padding.on(keys.device)[:, None]  # [rows, 1]
        entries = Entries(self.layer, keys, values, positions)
        scores = self.rule.initial_scores(entries).expand(*keys.shape[:2], 1)[..., 0]
        decode.enter(self.unit, keys, values, scores, column)
        self._update_lengths(column + 1)

    def _fill_ring(self, columns: Tensor, keys: Tensor, values: Tensor, scores: Tensor) -> None:
        """Writes `columns` ([n], at most `recent` of them) to their ring slots, whatever is there."""
        slots = columns % self.rule.recent
        self.ring.write(slots, keys, values)
        self.scores.index_copy_(2, slots + self.rule.heavy, scores)
        real = torch.where(scores.isneginf(), -1, columns).to(torch.int32)
        self.columns.index_copy_(2, slots + self.rule.heavy, real)

    def _fill_heavy(self, keys: Tensor, values: Tensor, scores: Tensor) -> None:
        """Keeps the best of the columns that came before the ring's."""
        chosen = choose_heavy(scores, min(self.rule.heavy, scores.shape[-1]))  # [rows, heads, m]
        count = chosen.shape[-1]
        slots = torch.arange(count, device=keys.device)
        index = chosen[..., None].expand(-1, -1, -1, keys.shape[-1])
        self.heavy.write(slots, keys.gather(2, index), values.gather(2, index))
        kept_scores = scores.gather(2, chosen)
        self.scores[..., :count] = kept_scores
        self.columns[..., :count] = torch.where(kept_scores.isneginf(), -1, chosen).to(torch.int32)

    def _update_lengths(self, columns_seen: int) -> None:
        self.ring_len = min(self.rule.recent, columns_seen)
        self.columns_seen = columns_seen
        left_the_ring = columns_seen - self.rule.recent - self.padding.earliest
        self.heavy_len = min(self.rule.heavy, max(0, left_the_ring))


def _carve(storage: Tensor, *parts: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Cuts memory into tensors of the given shapes and types, one behind the other."""
    views = []
    start = 0
    for shape, dtype in parts:
        stop = start + math.prod(shape) * dtype.itemsize
        views.append(storage[start:stop].view(dtype).view(shape))
        start = aligned(stop)
    return views


def _in_parts(tensor: Tensor, row_elements: int) -> tuple[Tensor, ...]:
    """A tensor by as many rows as are quantised at once."""
    return tensor.split(max(1, QUANTISED_AT_ONCE // max(1, row_elements)))
