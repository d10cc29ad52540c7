"""The KV buffer of one unit: two regions of fixed size, overwritten in place.

    slots   0 ........ heavy-1 | heavy ........ heavy+recent-1
    region  heavy              | ring, slot = heavy + column % recent
    live    [0, heavy_len)     | [heavy, heavy + ring_len)

Every slot has a key, a value, a score and the column it came from. A score of -inf marks an empty slot (or a pad): it
is masked out of attention and loses every comparison. All rows of a unit share `heavy_len` and `ring_len`, the maxima
over its rows, so attention reads no more than what some row has filled.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.kvcache.eviction import EvictionRule, choose_heavy

EMPTY = -math.inf


class Region:
    """Keys and values of consecutive slots, at rest in the compute precision.

    Attributes:
        keys, values: [rows, heads, slots, head_dim].
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys = keys
        self.values = values

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> "Region":
        """An empty region of [rows, heads, slots, head_dim].

        Zeros, not merely allocated: a slot that one row has filled may be empty in another, where its value meets a
        weight of 0, and 0 times whatever lay in memory might be NaN.
        """
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def first_rows(self, rows: int) -> "Region":
        """The same memory, seen as a region of `rows` rows."""
        return Region(self.keys[:rows], self.values[:rows])

    def clear(self) -> None:
        """Sets everything to zero."""
        self.keys.zero_()
        self.values.zero_()

    def live(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` slots, [rows, heads, length, head_dim] each."""
        return self.keys[:, :, :length], self.values[:, :, :length]

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Key and value of one slot, the same for all rows and heads: [rows, heads, 1, head_dim] each."""
        return self.keys[:, :, slot : slot + 1], self.values[:, :, slot : slot + 1]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrites `slots` ([n] int64, the same for all rows and heads) with [rows, heads, n, head_dim]."""
        self.keys.index_copy_(2, slots, keys)
        self.values.index_copy_(2, slots, values)

    def replace(self, slots: Tensor, where: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrites one slot per row and head, where asked.

        Args:
            slots: [rows, heads, 1] int64.
            where: [rows, heads, 1] bool; elsewhere the slot keeps what it holds.
            keys, values: [rows, heads, 1, head_dim].
        """
        index = slots[..., None].expand(keys.shape)
        for stored, new in ((self.keys, keys), (self.values, values)):
            stored.scatter_(2, index, torch.where(where[..., None], new, stored.gather(2, index)))


@dataclass(frozen=True)
class UnitShape:
    """Sizes of one unit's buffer."""

    rows: int
    heads: int
    head_dim: int
    heavy: int
    recent: int

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values."""
        return self.rows * self.heads * self.slots * self.head_dim * 2 * itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of scores (float32) and columns (int32)."""
        return self.rows * self.heads * self.slots * 8


class KVBuffer:
    """KV of one unit (one layer, one sub-batch), evicting by `rule`.

    Attributes:
        heavy, ring: the two regions.
        scores: [rows, heads, slots] float32. columns: [rows, heads, slots] int32, -1 where empty.
        heavy_len, ring_len: live slots of each region.
    """

    def __init__(self, shape: UnitShape, rule: EvictionRule, dtype: torch.dtype, device: torch.device):
        self.rule = rule
        self._heavy = Region.allocate((shape.rows, shape.heads, shape.heavy, shape.head_dim), dtype, device)
        self._ring = Region.allocate((shape.rows, shape.heads, shape.recent, shape.head_dim), dtype, device)
        self._scores = torch.empty(shape.rows, shape.heads, shape.slots, device=device)
        self._columns = torch.empty(shape.rows, shape.heads, shape.slots, dtype=torch.int32, device=device)
        self.reset(torch.zeros(shape.rows, dtype=torch.int64))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values at rest."""
        return self._heavy.nbytes + self._ring.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of scores and columns."""
        return self._scores.nbytes + self._columns.nbytes

    def reset(self, first_columns: Tensor) -> None:
        """Empties the buffer for a new sub-batch, of at most as many rows as it was made for.

        Args:
            first_columns: [rows] int64 on the CPU, the column of each row's first real token.
        """
        rows = len(first_columns)
        # A slot that one row has filled may be empty in another, where its value meets a weight of 0. What an earlier
        # block left there might be NaN, and 0 times NaN is NaN.
        self._heavy.clear()
        self._ring.clear()
        self.heavy = self._heavy.first_rows(rows)
        self.ring = self._ring.first_rows(rows)
        self.scores = self._scores[:rows].fill_(EMPTY)
        self.columns = self._columns[:rows].fill_(-1)
        self.heavy_len = 0
        self.ring_len = 0
        self.first_columns = first_columns.to(self.scores.device)
        self._earliest_column = int(first_columns.min())

    def fill(self, keys: Tensor, values: Tensor, attention_sums: Tensor | None) -> None:
        """Takes what prefill computed: the last columns into the ring, the best of the others into heavy.

        Args:
            keys, values: [rows, heads, n, head_dim], left-padded.
            attention_sums: [rows, heads, n] float32, what each column received from the row's real queries; None
                where the rule does not accumulate.
        """
        rows, heads, n, _ = keys.shape
        columns = torch.arange(n, device=keys.device)
        positions = columns - self.first_columns[:, None]  # [rows, n]
        scores = self.rule.initial_scores(positions, attention_sums).expand(rows, heads, n)
        scores = scores.masked_fill(positions[:, None] < 0, EMPTY)
        before = max(0, n - self.rule.recent)  # columns that come before the ring's
        self._fill_ring(columns[before:], keys[:, :, before:], values[:, :, before:], scores[:, :, before:])
        if before and self.rule.heavy:
            self._fill_heavy(keys[:, :, :before], values[:, :, :before], scores[:, :, :before])
        self._update_lengths(n)

    def append(self, keys: Tensor, values: Tensor, column: int) -> None:
        """Enters the current token, after the entry whose ring slot it takes has left.

        Args:
            keys, values: [rows, heads, 1, head_dim].
            column: the token's column, one more than at the last call.
        """
        slot = column % self.rule.recent
        if self.rule.heavy and column >= self.rule.recent:
            self._move_to_heavy(slot)
        positions = column - self.first_columns[:, None]  # [rows, 1]
        scores = self.rule.initial_scores(positions, None).expand(keys.shape[:3])
        self._fill_ring(torch.tensor([column], device=keys.device), keys, values, scores)
        self._update_lengths(column + 1)

    def live_scores(self) -> Tensor:
        """Scores of the live slots, heavy first: [rows, heads, heavy_len + ring_len]."""
        heavy, ring = self._live_score_views()
        return ring if not self.heavy_len else torch.cat((heavy, ring), dim=-1)

    def accumulate(self, weights: Tensor) -> None:
        """Adds a step's attention to the scores of the live slots.

        Args:
            weights: [rows, heads, heavy_len + ring_len] float32, softmax over the live slots, heavy first.
        """
        heavy, ring = self._live_score_views()
        for scores, part in ((heavy, weights[..., : self.heavy_len]), (ring, weights[..., self.heavy_len :])):
            if self.rule.decay != 1.0:
                scores *= self.rule.decay
            scores += part

    def _live_score_views(self) -> tuple[Tensor, Tensor]:
        first_ring_slot = self.rule.heavy
        return (
            self.scores[..., : self.heavy_len],
            self.scores[..., first_ring_slot : first_ring_slot + self.ring_len],
        )

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

    def _move_to_heavy(self, slot: int) -> None:
        """The ring's oldest entry, in `slot`, replaces the lowest-scored heavy entry if its own score is greater.

        A free slot has score -inf, so it is the lowest and loses to any real entry; a pad has -inf and beats none.
        """
        ring_slot = self.rule.heavy + slot
        heavy_scores = self.scores[..., : self.rule.heavy]
        lowest, loser = heavy_scores.min(dim=-1, keepdim=True)  # [rows, heads, 1]; ties: lower slot
        leaving = self.scores[..., ring_slot : ring_slot + 1]
        wins = leaving > lowest
        self.heavy.replace(loser, wins, *self.ring.slot(slot))
        heavy_scores.scatter_(2, loser, torch.where(wins, leaving, lowest))
        heavy_columns = self.columns[..., : self.rule.heavy]
        leaving_column = self.columns[..., ring_slot : ring_slot + 1]
        heavy_columns.scatter_(2, loser, torch.where(wins, leaving_column, heavy_columns.gather(2, loser)))

    def _update_lengths(self, columns_seen: int) -> None:
        self.ring_len = min(self.rule.recent, columns_seen)
        left_the_ring = columns_seen - self.rule.recent - self._earliest_column
        self.heavy_len = min(self.rule.heavy, max(0, left_the_ring))
