"""Which entries stay: choose_heavy by itself, the rules' scores, and the kept set of a whole generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import PEAKED, ForcedTokens, TinyOpt, buffers, random_forced, random_ids, run_block
from support.reference import ReferenceRule, reference_trace
from torch import Tensor

from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.base import Entries, EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.select import choose_heavy
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.plan.policy import Policy

EMPTY = -math.inf

# --- choose_heavy ---

CPU = torch.device("cpu")


def chosen(scores: list[float], heavy: int) -> list[int]:
    return choose_heavy(torch.tensor([[scores]]), heavy)[0, 0].tolist()


@pytest.mark.parametrize(
    ("scores", "heavy", "expected"),
    [
        ([3.0, 1.0, 2.0], 2, [0, 2]),
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),  # ties: lower index
        ([0.0, 2.0, 1.0, 2.0, 2.0], 2, [1, 3]),
        ([EMPTY, EMPTY, 0.0, 5.0], 3, [2, 3, 0]),  # empty entries last
        ([EMPTY, 0.0, EMPTY, 1.0, 7.0], 2, [3, 4]),  # a score of 0 is no empty entry
        ([math.inf, 9.0, math.inf, 10.0], 3, [0, 2, 3]),
        ([2.0], 1, [0]),
        ([2.0, 1.0], 0, []),
    ],
)
def test_choose_heavy_by_hand(scores: list[float], heavy: int, expected: list[int]) -> None:
    assert chosen(scores, heavy) == expected


def slow_choice(scores: list[float], heavy: int) -> list[int]:
    real = [index for index, score in enumerate(scores) if score != EMPTY]
    best = sorted(real, key=lambda index: (-scores[index], index))[:heavy]
    empty = [index for index, score in enumerate(scores) if score == EMPTY]
    return (sorted(best) + empty)[:heavy]


SCORES = st.sampled_from([EMPTY, 0.0, 0.25, 0.5, 1.0, 2.0, math.inf])


@given(st.lists(st.lists(SCORES, min_size=7, max_size=7), min_size=1, max_size=6), st.integers(0, 7))
def test_choose_heavy_is_a_stable_sort_of_each_head(heads: list[list[float]], heavy: int) -> None:
    found = choose_heavy(torch.tensor([heads]), heavy)[0].tolist()
    assert found == [slow_choice(scores, heavy) for scores in heads]


# --- scores of newcomers ---

POSITIONS = torch.tensor([[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]])


def entries(sums: Tensor | None = None) -> Entries:
    keys, values = torch.randn(2, 2, 3, 5, 8)
    return Entries(0, keys, values, POSITIONS, sums)


def test_h2o_starts_with_the_sums_of_prefill_and_with_0_in_decode() -> None:
    sums = torch.rand(2, 3, 5)
    assert torch.equal(H2O(1, 1).initial_scores(entries(sums)), sums)
    assert torch.equal(H2O(1, 1).initial_scores(entries()).expand(2, 3, 5), torch.zeros(2, 3, 5))


def test_sinks_are_the_first_real_tokens_of_each_row() -> None:
    scores = Sink(2, 1).initial_scores(entries()).expand(2, 3, 5)[:, 0]
    is_sink = [[False, False, True, True, False], [True, True, False, False, False]]
    assert torch.equal(scores, torch.tensor(is_sink).float().masked_fill(torch.tensor(is_sink), math.inf))


@pytest.mark.parametrize(("rule", "accumulates"), [(H2O, True), (Full, False), (Local, False), (Sink, False)])
def test_only_h2o_needs_sums_of_attention(rule: type[EvictionRule], accumulates: bool) -> None:
    assert rule.accumulates is accumulates


# --- the kept set of a whole generation ---

LENGTHS = (12, 1, 5, 8, 3)
STEPS = 9
Snapshot = list[list[list[dict[str, Any]]]]  # by row, layer and head, as reference_trace tells it


class Tracing(ForcedTokens):
    """Looks into the buffers after every step."""

    def __init__(self, engine: Engine, forced: Tensor):
        super().__init__(forced)
        self.engine = engine
        self.steps: list[Snapshot] = []
        self.lengths: list[list[tuple[int, int]]] = []

    def finished(self) -> Sequence[int]:
        layers = buffers(self.engine)
        by_layer = [[row for unit in layer for row in unit_rows(unit)] for layer in layers]
        self.steps.append([list(row) for row in zip(*by_layer, strict=True)])
        self.lengths.append([(unit.heavy_len, unit.ring_len) for unit in layers[-1]])
        return super().finished()


def unit_rows(unit: KVBuffer) -> list[list[dict[str, Any]]]:
    """What a unit holds, as [row][head]. Columns count from the row's first real token."""
    rows = []
    for first, columns, scores in zip(unit.padding.on(CPU), unit.columns, unit.scores, strict=True):
        heads = zip(columns.tolist(), scores.tolist(), strict=True)
        rows.append([head_snapshot(unit.rule, int(first), *head) for head in heads])
    return rows


def head_snapshot(rule: EvictionRule, first: int, columns: list[int], scores: list[float]) -> dict[str, Any]:
    kept = [None if column < 0 else column - first for column in columns]
    for slot, column in enumerate(columns[rule.heavy :]):
        assert column < 0 or column % rule.recent == slot  # the ring's slot is the column's
    assert all((score == EMPTY) == (column is None) for column, score in zip(kept, scores, strict=True))
    return {
        "heavy": kept[: rule.heavy],
        "ring": {column for column in kept[rule.heavy :] if column is not None},
        "scores": {column: score for column, score in zip(kept, scores, strict=True) if column is not None},
    }


def assert_same_head(found: dict[str, Any], expected: dict[str, Any], accumulates: bool) -> None:
    assert found["heavy"] == expected["heavy"]
    assert found["ring"] == expected["ring"]
    assert found["scores"].keys() == expected["scores"].keys()
    if accumulates:  # the reference keeps scores for every rule
        for column, score in expected["scores"].items():
            assert found["scores"][column] == pytest.approx(score, abs=1e-4)


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny(std=PEAKED)


SIZES = (
    (0, 1),
    (1, 1),
    (0, 5),
    (1, 4),
    (4, 1),
    (3, 8),
    (4, 8),
    (5, 8),
    (2, 12),
    (4, 13),
    (10, 11),
    (10, 12),
    (30, 20),
)
TRACED: list[EvictionRule] = [
    *(H2O(heavy, recent) for heavy, recent in SIZES),
    *(H2O(heavy, recent, decay) for heavy, recent in ((1, 1), (3, 4)) for decay in (0.5, 0.95)),
    *(Sink(heavy, recent) for heavy, recent in ((4, 1), (4, 3), (6, 8), (4, 12), (13, 3))),
    *(Local(0, recent) for recent in (1, 5, 12, 30)),
]


@pytest.mark.parametrize("rule", TRACED, ids=lambda rule: f"{rule.name}_{rule.heavy}_{rule.recent}_{rule.decay}")
def test_what_is_kept_is_what_the_reference_keeps(peaked: TinyOpt, rule: EvictionRule) -> None:
    """Columns, heavy ones in order of their slots, and scores: after every step, in every layer and head."""
    prompts = random_ids(peaked.config, LENGTHS)
    forced = random_forced(peaked.config, len(prompts), STEPS)
    engine = peaked.engine(rule, Policy(2, 3, 4), len(prompts))
    chooser = Tracing(engine, forced)
    run_block(engine, prompts, STEPS + 1, chooser)
    parameters, slow_rule = (
        peaked.model.state_dict(),
        ReferenceRule(rule.name, rule.heavy, rule.recent, rule.decay),
    )
    for row, prompt in enumerate(prompts):
        expected = reference_trace(parameters, peaked.model.config, prompt, forced[row].tolist(), slow_rule)
        for step in range(STEPS + 1):
            for layer in range(peaked.config.num_hidden_layers):
                heads = zip(chooser.steps[step][row][layer], expected[step][layer], strict=True)
                for found, slow in heads:
                    assert_same_head(found, slow, rule.accumulates)


@pytest.mark.parametrize("rule", [H2O(3, 4), H2O(0, 5), H2O(4, 13), Sink(4, 3), Local(0, 6), Full(0, 30)], ids=str)
def test_live_prefixes_are_as_long_as_the_fullest_row_and_no_longer(peaked: TinyOpt, rule: EvictionRule) -> None:
    prompts = random_ids(peaked.config, LENGTHS)
    engine = peaked.engine(rule, Policy(2, 3, 4), len(prompts))
    chooser = Tracing(engine, random_forced(peaked.config, len(prompts), STEPS))
    run_block(engine, prompts, STEPS + 1, chooser)
    for step, lengths in enumerate(chooser.lengths):
        for (heavy_len, ring_len), longest in zip(lengths, (12, 8, 3), strict=True):  # by unit of two rows
            assert heavy_len == min(rule.heavy, max(0, longest + step - rule.recent))
            assert ring_len == min(rule.recent, max(LENGTHS) + step)


def test_the_trace_sees_replacements_and_drops(peaked: TinyOpt) -> None:
    """Otherwise the comparison above would say little about either."""
    prompts = random_ids(peaked.config, LENGTHS)
    engine = peaked.engine(H2O(2, 4), Policy(5, 1), len(prompts))
    chooser = Tracing(engine, random_forced(peaked.config, len(prompts), STEPS))
    run_block(engine, prompts, STEPS + 1, chooser)
    by_step = [[head["heavy"] for row in step for layer in row for head in layer] for step in chooser.steps]
    pairs = [pair for step in range(STEPS) for pair in zip(by_step[step], by_step[step + 1], strict=True)]
    replaced = sum(None not in old and old != new for old, new in pairs)
    dropped = sum(None not in old and old == new for old, new in pairs)
    assert replaced > 20 and dropped > 20
