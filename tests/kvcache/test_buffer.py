"""The KV buffer by itself: by name on small cases, and against a list of entries on random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.base import Entries, EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.plan.kv_shape import UnitShape

EMPTY = -math.inf
HEAD_DIM = 3


def make_buffer(
    rule: EvictionRule, first_columns: list[int], heads: int = 1, dtype: torch.dtype = torch.float32
) -> KVBuffer:
    shape = UnitShape(len(first_columns), heads, HEAD_DIM, rule.heavy, rule.recent)
    buffer = KVBuffer(shape, rule, dtype, torch.zeros(shape.nbytes(dtype.itemsize), dtype=torch.uint8))
    buffer.reset(Padding(torch.tensor(first_columns)))
    return buffer


def keys_of(rows: int, heads: int, first: int, stop: int) -> Tensor:
    """Keys that tell row, head and column: [rows, heads, columns, HEAD_DIM]. Values are their negatives."""
    parts = torch.meshgrid(torch.arange(rows), torch.arange(heads), torch.arange(first, stop), indexing="ij")
    return torch.stack(parts, dim=-1).float() + 1


def fill(buffer: KVBuffer, n: int, sums: Tensor | None) -> None:
    rows, heads = buffer.columns.shape[:2]
    keys = keys_of(rows, heads, 0, n).to(buffer.ring.keys.dtype)
    buffer.fill(keys, -keys, sums)


def append(buffer: KVBuffer, column: int) -> None:
    rows, heads = buffer.columns.shape[:2]
    keys = keys_of(rows, heads, column, column + 1).to(buffer.ring.keys.dtype)
    buffer.append(keys, -keys, column)
    settle(buffer)


def settle(buffer: KVBuffer, weights: Tensor | None = None) -> None:
    """What attention does to the state, with the weights of the live slots given: [rows, heads, live slots]."""
    if weights is not None:
        ring = slice(buffer.rule.heavy, buffer.rule.heavy + buffer.ring_len)
        for part, region in zip(
            weights.split([buffer.heavy_len, buffer.ring_len], dim=-1), (slice(buffer.heavy_len), ring), strict=True
        ):
            buffer.scores[..., region] = buffer.rule.decay * buffer.scores[..., region] + part
    if buffer.rule.heavy:
        buffer.losers.copy_(buffer.scores[..., : buffer.rule.heavy].min(dim=-1).indices)


def columns(buffer: KVBuffer, row: int = 0) -> tuple[list[int], list[int]]:
    """(heavy, ring) of the first head, in order of slots."""
    found = buffer.columns[row, 0].tolist()
    return found[: buffer.rule.heavy], found[buffer.rule.heavy :]


# --- by name ---


class ByLayer(EvictionRule):
    """Entries score the number of their layer."""

    name = "by_layer"

    def initial_scores(self, entries: Entries) -> Tensor:
        return torch.full((1, 1, entries.positions.shape[1]), float(entries.layer))


def test_a_rule_is_told_the_layer_of_what_prefill_and_decode_enter() -> None:
    buffer = make_buffer(ByLayer(2, 2), [0])
    for layer in (5, 3):
        buffer.serve(buffer.shape, buffer.rule, layer)
        buffer.reset(Padding(torch.tensor([0])))
        fill(buffer, 2, None)
        assert buffer.scores[0, 0].tolist() == [EMPTY, EMPTY, layer, layer]
        buffer.scores.zero_()
        append(buffer, 2)
        assert buffer.scores[0, 0].tolist() == [0, 0, layer, 0]


def test_prefill_keeps_the_best_of_the_columns_before_the_ring() -> None:
    buffer = make_buffer(H2O(2, 3), [0])
    #                                       0    1    2    3    4 | 5    6    7
    fill(buffer, 8, torch.tensor([[[0.1, 3.0, 0.2, 2.0, 2.0, 9.0, 9.0, 9.0]]]))
    assert columns(buffer) == ([1, 3], [6, 7, 5])  # 3 ties with 4; ring slot is column % 3
    assert buffer.scores[0, 0].tolist() == [3.0, 2.0, 9.0, 9.0, 9.0]


def test_the_leaving_entry_replaces_the_lowest_only_if_it_is_strictly_greater() -> None:
    buffer = make_buffer(H2O(2, 2), [0])
    fill(buffer, 4, torch.tensor([[[1.0, 2.0, 1.0, 1.5]]]))
    append(buffer, 4)  # 2 leaves with 1.0, as much as column 0 has: dropped
    assert columns(buffer) == ([0, 1], [4, 3])
    append(buffer, 5)  # 3 leaves with 1.5 and takes the place of column 0
    assert columns(buffer) == ([3, 1], [4, 5])


def test_of_two_lowest_the_lower_slot_gives_way() -> None:
    buffer = make_buffer(H2O(3, 1), [0])
    fill(buffer, 4, torch.tensor([[[2.0, 1.0, 1.0, 1.5]]]))
    append(buffer, 4)
    assert columns(buffer) == ([0, 3, 2], [4])


def test_a_free_heavy_slot_takes_any_real_entry_even_with_score_0() -> None:
    buffer = make_buffer(H2O(2, 2), [0])
    fill(buffer, 2, torch.zeros(1, 1, 2))
    append(buffer, 2)
    append(buffer, 3)
    assert columns(buffer) == ([0, 1], [2, 3])


def test_a_newcomer_with_score_0_stays_for_as_long_as_the_ring_is() -> None:
    """Heavy entries have a hundred times its score, yet it leaves only after `recent` steps."""
    buffer = make_buffer(H2O(1, 3), [0])
    fill(buffer, 4, torch.full((1, 1, 4), 100.0))
    append(buffer, 4)
    assert 4 in columns(buffer)[1]
    for column in (5, 6):
        append(buffer, column)
        assert 4 in columns(buffer)[1]
    append(buffer, 7)
    assert 4 not in [*columns(buffer)[0], *columns(buffer)[1]]


def test_a_newcomer_starts_at_0_and_not_at_what_its_slot_held() -> None:
    buffer = make_buffer(H2O(1, 2), [0])
    fill(buffer, 4, torch.full((1, 1, 4), 100.0))
    append(buffer, 4)
    assert buffer.scores[0, 0].tolist() == [100.0, 0.0, 100.0]


def test_pads_enter_neither_region() -> None:
    buffer = make_buffer(H2O(2, 3), [0, 4])
    fill(buffer, 6, torch.tensor([[[6.0, 5.0, 4.0, 1.0, 1.0, 1.0]], [[9.0, 9.0, 9.0, 9.0, 1.0, 1.0]]]))
    assert columns(buffer, 0) == ([0, 1], [3, 4, 5])
    assert columns(buffer, 1) == ([-1, -1], [-1, 4, 5])
    append(buffer, 6)  # a pad leaves the second row's ring
    assert columns(buffer, 1) == ([-1, -1], [6, 4, 5])
    append(buffer, 7)
    assert columns(buffer, 1) == ([4, -1], [6, 7, 5])


def test_sinks_move_to_heavy_slots_in_order_and_stay() -> None:
    buffer = make_buffer(Sink(2, 2), [0, 2])
    fill(buffer, 3, None)
    assert columns(buffer, 0) == ([0, -1], [2, 1]) and columns(buffer, 1) == ([-1, -1], [2, -1])
    for column in range(3, 9):
        append(buffer, column)
    assert columns(buffer, 0) == ([0, 1], [8, 7]) and columns(buffer, 1) == ([2, 3], [8, 7])
    assert (buffer.scores[..., :2] == math.inf).all()


@pytest.mark.parametrize("rule", [Local(0, 3), Full(0, 20)], ids=str)
def test_without_heavy_slots_the_ring_is_all_there_is(rule: EvictionRule) -> None:
    buffer = make_buffer(rule, [0])
    fill(buffer, 5, None)
    for column in range(5, 12):
        append(buffer, column)
        kept = sorted(c for c in columns(buffer)[1] if c >= 0)
        assert kept == list(range(max(0, column + 1 - rule.recent), column + 1))
    assert buffer.heavy_len == 0


# --- memory ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bytes_are_counted_and_allocated_alike(dtype: torch.dtype) -> None:
    shape = UnitShape(rows=2, heads=3, head_dim=5, heavy=4, recent=7)
    assert shape.slots == 11
    assert shape.kv_bytes(dtype.itemsize) == 2 * 3 * 11 * 5 * 2 * dtype.itemsize
    assert shape.state_bytes == 2 * 3 * (11 * (4 + 4) + 4)
    storage = torch.zeros(shape.nbytes(dtype.itemsize), dtype=torch.uint8)
    buffer = KVBuffer(shape, H2O(4, 7), dtype, storage)
    buffer.reset(Padding(torch.zeros(2, dtype=torch.int64)))
    parts = [
        buffer.scores,
        buffer.columns,
        buffer.losers,
        *(t for r in (buffer.heavy, buffer.ring) for t in (r.keys, r.values)),
    ]
    assert sum(part.nbytes for part in parts) == storage.nbytes
    assert {part.untyped_storage().data_ptr() for part in parts} == {storage.untyped_storage().data_ptr()}
    assert buffer.scores.dtype == torch.float32 and buffer.columns.dtype == torch.int32


def test_reset_with_fewer_rows_uses_the_same_memory() -> None:
    buffer = make_buffer(H2O(2, 3), [0, 0, 0])
    whole = buffer.ring.keys
    buffer.reset(Padding(torch.tensor([1])))
    assert buffer.ring.keys.shape[0] == buffer.scores.shape[0] == buffer.columns.shape[0] == 1
    assert buffer.ring.keys.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert (buffer.scores == EMPTY).all() and (buffer.columns == -1).all()
    assert (buffer.heavy_len, buffer.ring_len) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_rank_like_double_precision_after_2048_steps(dtype: torch.dtype) -> None:
    """In float16, 1024 + 0.4 is 1024: scores kept in the precision of the keys would stop growing."""
    slots, offset = 15, 1000.0
    buffer = make_buffer(H2O(slots, 1), [0], dtype=dtype)
    fill(buffer, slots + 1, torch.full((1, 1, slots + 1), offset))
    generator = torch.Generator().manual_seed(0)
    exact = torch.full((slots + 1,), offset, dtype=torch.float64)
    for _ in range(2048):
        query = torch.randn(1, 1, 1, HEAD_DIM, generator=generator).to(dtype) * 0.05
        keys = torch.cat((buffer.heavy.keys, buffer.ring.keys), dim=2)[0, 0].double()
        buffer.attend(query)
        exact += (keys @ query[0, 0, 0].double()).softmax(dim=0)
    assert (buffer.scores[0, 0] - exact).abs().max() < 0.05
    order = exact.argsort()
    apart = exact[order].diff() > 0.1
    assert apart.sum() > 5  # of such pairs float32 confuses none
    assert (buffer.scores[0, 0][order].diff()[apart] > 0).all()


# --- against a list of entries ---


@dataclass(frozen=True)
class Entry:
    column: int
    score: float


class ListBuffer:
    """One row and head: heavy entries in a list (None is free), the ring's in another, oldest first."""

    def __init__(self, rule: EvictionRule, first: int, sums: list[float]):
        self.rule, self.first = rule, first
        real = [Entry(column, score) for column, score in enumerate(sums) if column >= first]
        cut = len(sums) - rule.recent
        self.ring = [entry for entry in real if entry.column >= cut]
        rest = [entry for entry in real if entry.column < cut]
        best = sorted(rest, key=lambda entry: (-entry.score, entry.column))[: rule.heavy]
        self.heavy: list[Entry | None] = [*sorted(best, key=lambda entry: entry.column)]
        self.heavy += [None] * (rule.heavy - len(best))

    def append(self, column: int) -> None:
        if self.ring and self.ring[0].column <= column - self.rule.recent:
            self._leave(self.ring.pop(0))
        self.ring.append(Entry(column, 0.0))

    def _leave(self, entry: Entry) -> None:
        ranks = [EMPTY if kept is None else kept.score for kept in self.heavy]
        if ranks and entry.score > min(ranks):
            self.heavy[ranks.index(min(ranks))] = entry

    def accumulate(self, weight_of: dict[int, float]) -> None:
        def grown(entry: Entry) -> Entry:
            return replace(entry, score=self.rule.decay * entry.score + weight_of[entry.column])

        self.heavy = [entry and grown(entry) for entry in self.heavy]
        self.ring = [grown(entry) for entry in self.ring]

    def slots(self) -> list[Entry | None]:
        ring: list[Entry | None] = [None] * self.rule.recent
        for entry in self.ring:
            ring[entry.column % self.rule.recent] = entry
        return self.heavy + ring


HEADS = 2
WEIGHTS = st.sampled_from([0.0, 0.25, 0.5])  # so few that ties are common, and exact in binary


@dataclass(frozen=True)
class Case:
    rule: H2O
    first_columns: list[int]
    sums: list[list[list[float]]]  # by row, head and column
    step_weights: list[list[float]]  # by step and column, alike for all rows and heads


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n, rows = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    steps = draw(st.integers(0, 9))
    rule = H2O(draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.sampled_from([1.0, 0.5])))
    by_column = st.lists(WEIGHTS, min_size=n, max_size=n)
    sums = [[draw(by_column) for _ in range(HEADS)] for _ in range(rows)]
    later = st.lists(WEIGHTS, min_size=n + steps, max_size=n + steps)
    first_columns = [draw(st.integers(0, n - 1)) for _ in range(rows)]
    return Case(rule, first_columns, sums, [draw(later) for _ in range(steps)])


def state(buffer: KVBuffer) -> Tensor:
    """All that is at rest: [rows, heads, slots, 2 x HEAD_DIM + 2]."""
    keys = torch.cat([buffer.heavy.keys, buffer.ring.keys], dim=2)
    values = torch.cat([buffer.heavy.values, buffer.ring.values], dim=2)
    return torch.cat([keys, values, buffer.scores[..., None], buffer.columns[..., None].float()], dim=-1)


def assert_equals(buffer: KVBuffer, models: list[list[ListBuffer]]) -> None:
    """Every slot of every row and head has the column, score, key and value of the model's entry."""
    keys = torch.cat([buffer.heavy.keys, buffer.ring.keys], dim=2)
    values = torch.cat([buffer.heavy.values, buffer.ring.values], dim=2)
    for row, heads in enumerate(models):
        for head, model in enumerate(heads):
            slots = model.slots()
            assert buffer.columns[row, head].tolist() == [-1 if e is None else e.column for e in slots]
            assert buffer.scores[row, head].tolist() == [EMPTY if e is None else e.score for e in slots]
            for slot, entry in enumerate(slots):
                if entry is not None:
                    expected = [row + 1, head + 1, entry.column + 1]
                    assert keys[row, head, slot].tolist() == expected
                    assert values[row, head, slot].tolist() == [-part for part in expected]


def assert_written_once(before: Tensor, buffer: KVBuffer, column: int) -> None:
    """At most one heavy slot and one ring slot per head have changed, the ring's being the column's."""
    changed = (state(buffer) != before).any(dim=-1)
    heavy, recent = buffer.rule.heavy, buffer.rule.recent
    assert (changed[..., :heavy].sum(dim=-1) <= 1).all()
    elsewhere = changed[..., heavy:].clone()
    elsewhere[..., column % recent] = False
    assert not elsewhere.any()


def step_weights(buffer: KVBuffer, by_column: list[float]) -> Tensor:
    """[rows, heads, live slots]: each live slot's weight by its column, 0 where empty, as after a softmax."""
    heavy, recent = buffer.rule.heavy, buffer.rule.recent
    live = [*range(buffer.heavy_len), *range(heavy, heavy + recent)][: buffer.heavy_len + buffer.ring_len]
    found = buffer.columns[..., live].long()
    return torch.where(found < 0, 0.0, torch.tensor(by_column)[found.clamp(min=0)])


@settings(max_examples=300)
@given(cases())
def test_any_sequence_of_steps_equals_a_list_of_entries(case: Case) -> None:
    buffer = make_buffer(case.rule, case.first_columns, HEADS)
    n = len(case.sums[0][0])
    fill(buffer, n, torch.tensor(case.sums))
    models = [
        [ListBuffer(case.rule, first, sums) for sums in heads]
        for first, heads in zip(case.first_columns, case.sums, strict=True)
    ]
    assert_equals(buffer, models)
    for column, by_column in enumerate(case.step_weights, start=n):
        before = state(buffer)
        append(buffer, column)
        assert_written_once(before, buffer, column)
        settle(buffer, step_weights(buffer, by_column) if case.rule.accumulates else None)
        for model in (model for heads in models for model in heads):
            model.append(column)
            model.accumulate(dict(enumerate(by_column)))
        assert_equals(buffer, models)
        fullest = max(sum(e is not None for e in heads[0].heavy) for heads in models)
        assert buffer.heavy_len == fullest
        assert buffer.ring_len == min(case.rule.recent, column + 1)
