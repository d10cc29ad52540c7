"""Scores of every rule against sums of transformers' attention, and patterns against a slow account."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from support.helpers import PEAKED, ForcedTokens, TinyOpt, buffers, random_forced, random_ids, run_block
from torch import Tensor

from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.evaluation.score_rules import (
    Fixed,
    FixedHeavy,
    Forgetting,
    LastQuery,
    ObservationWindow,
    Strided,
    StridedHeavy,
)
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.registry import HOMES, load
from flexgen_h2o.kvcache.eviction.smooth import Smooth
from flexgen_h2o.plan.policy import Policy

LENGTHS = (12, 1, 5, 8, 17)
STEPS = 12


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny(std=PEAKED)


def test_run_offers_no_policy_that_is_not_there() -> None:
    assert all(load(name).name == name for name in HOMES)


# --- how much a query counts ---


def test_all_queries_count_alike_unless_a_rule_says_otherwise() -> None:
    assert H2O(1, 1).query_weights(5) is None and Smooth(1, 1).query_weights(5) is None
    assert Full(0, 5).query_weights(5) is None


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Forgetting(1, 1, 0.5), [0.0625, 0.125, 0.25, 0.5, 1.0]),
        (Forgetting(1, 1, 1.0), [1.0] * 5),
        (LastQuery(1, 1), [0.0, 0.0, 0.0, 0.0, 1.0]),
        (ObservationWindow(1, 1, window=2), [0.0, 0.0, 0.0, 1.0, 1.0]),
        (ObservationWindow(1, 1, window=9), [1.0] * 5),
    ],
    ids=str,
)
def test_query_weights_by_hand(rule: EvictionRule, expected: list[float]) -> None:
    weights = rule.query_weights(5)
    assert weights is not None and weights.dtype == torch.float32 and weights.tolist() == expected


# --- scores ---


class Looking(ForcedTokens):
    """Copies every buffer's columns, counted from the row's first real token, and scores, after every step.

    Attributes:
        seen: by step, layer and row: [heads, slots] of both.
    """

    def __init__(self, engine: Engine, forced: Tensor):
        super().__init__(forced)
        self.engine = engine
        self.seen: list[list[list[tuple[Tensor, Tensor]]]] = []

    def finished(self) -> Sequence[int]:
        self.seen.append([[row for unit in layer for row in self._rows(unit)] for layer in buffers(self.engine)])
        return super().finished()

    @staticmethod
    def _rows(unit: object) -> Iterable[tuple[Tensor, Tensor]]:
        first = unit.padding.on(torch.device("cpu"))[:, None, None]
        columns = torch.where(unit.columns < 0, -1, unit.columns - first)
        return zip(columns.clone(), unit.scores.clone(), strict=True)


def look(peaked: TinyOpt, rule: EvictionRule, steps: int = STEPS) -> Looking:
    """Runs a block of prompts of all lengths, two rows to a unit, so that all but one are padded."""
    engine = peaked.engine(rule, Policy(2, 3, 4), len(LENGTHS))
    chooser = Looking(engine, random_forced(peaked.config, len(LENGTHS), steps))
    run_block(engine, random_ids(peaked.config, LENGTHS), steps + 1, chooser)
    return chooser


@torch.no_grad()
def attention_of(peaked: TinyOpt, prompt: list[int]) -> list[Tensor]:
    """transformers' weights of a prompt by itself: by layer, [heads, queries, columns]."""
    output = peaked.model(torch.tensor([prompt]), output_attentions=True)
    return [layer[0].double() for layer in output.attentions]


def forgotten(decay: float) -> Callable[[Tensor], Tensor]:
    def sums(weights: Tensor) -> Tensor:
        n = weights.shape[1]
        return sum(weights[:, query] * decay ** (n - 1 - query) for query in range(n))

    return sums


def pooled(columns: int, window: int) -> Callable[[Tensor], Tensor]:
    """Sums over the last `window` queries, and of `columns` neighbours, those beyond the ends counting 0."""

    def sums(weights: Tensor) -> Tensor:
        n = weights.shape[1]
        received = weights[:, max(0, n - window) :].sum(dim=1)
        reach = columns // 2
        parts = [received[:, max(0, c - reach) : c + reach + 1].sum(dim=1) / columns for c in range(n)]
        return torch.stack(parts, dim=1)

    return sums


def ages(weights: Tensor) -> Tensor:
    """How many queries have seen each column."""
    return (weights > 0).sum(dim=1)


def aged(power: float) -> Callable[[Tensor], Tensor]:
    """Sums over all queries, divided by a power of their number, and averaged over three neighbours."""
    return lambda weights: pooled(3, 99)(weights / ages(weights)[:, None] ** power)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (H2O(4, 3), lambda weights: weights.sum(dim=1)),
        (Forgetting(4, 3, 0.7), forgotten(0.7)),
        (LastQuery(4, 3), lambda weights: weights[:, -1]),
        (ObservationWindow(4, 3, window=4, pooled=1), lambda weights: weights[:, -4:].sum(dim=1)),
        (ObservationWindow(4, 3, window=4, pooled=5), pooled(5, 4)),
        (Smooth(4, 3), aged(0.1)),
        (Smooth(4, 3, age_power=1.0, pooled=1), lambda weights: weights.sum(dim=1) / ages(weights)),
        (StridedHeavy(4, 3, stride=99), lambda weights: weights.sum(dim=1)),
    ],
    ids=lambda value: str(value) if isinstance(value, EvictionRule) else "",
)
def test_a_prompt_leaves_the_entries_with_the_highest_scores(
    peaked: TinyOpt, rule: EvictionRule, expected: Callable[[Tensor], Tensor]
) -> None:
    found = look(peaked, rule, steps=1).seen[0]
    for row, prompt in enumerate(random_ids(peaked.config, LENGTHS)):
        for layer, weights in enumerate(attention_of(peaked, prompt)):
            scores = expected(weights)
            columns, kept_scores = found[layer][row]
            for head in range(len(columns)):
                left = max(0, len(prompt) - rule.recent)
                best = sorted(range(left), key=lambda c, s=scores[head]: (-float(s[c]), c))[: rule.heavy]
                assert set(columns[head, : rule.heavy].tolist()) - {-1} == set(best)
                for column, score in zip(columns[head].tolist(), kept_scores[head].tolist(), strict=True):
                    if column >= 0:
                        assert score == pytest.approx(float(scores[head, column]), abs=1e-4)


def test_the_last_query_alone_decides_after_every_step(peaked: TinyOpt) -> None:
    """Scores are then one softmax: they sum to 1."""
    for step in look(peaked, LastQuery(4, 3)).seen[1:]:
        for layer in step:
            for _, scores in layer:
                assert torch.allclose(scores.masked_fill(scores.isneginf(), 0).sum(dim=-1), torch.ones(len(scores)))


def test_what_is_not_smoothed_is_h2o(peaked: TinyOpt) -> None:
    smooth, h2o = (look(peaked, rule).all_logits() for rule in (Smooth(4, 3, 1.0, pooled=1, age_power=0.0), H2O(4, 3)))
    assert torch.equal(smooth, h2o)
    for rule in (
        Smooth(4, 3, 1.0, age_power=0.0),
        Smooth(4, 3, pooled=1, age_power=0.0),
        Smooth(4, 3, 1.0, pooled=1, age_power=1.0),
    ):
        assert not torch.allclose(look(peaked, rule).all_logits(), h2o, atol=1e-3)


# --- patterns ---


def in_stride(column: int) -> bool:
    return column % 4 == 3


def in_block(column: int) -> bool:
    return column % 6 in (4, 5)


def id_of(value: EvictionRule | Callable[[int], bool]) -> str:
    """The same in every process, which an address is not."""
    return str(value) if isinstance(value, EvictionRule) else value.__name__


PATTERNS = [
    (Strided(5, 3, stride=4), in_stride),
    (Strided(3, 1, stride=4), in_stride),  # fewer slots than the pattern wants
    (Fixed(5, 3, block=6, summary=2), in_block),
    (Fixed(12, 3, block=6, summary=2), in_block),  # more
]


@pytest.mark.parametrize(("rule", "has"), PATTERNS, ids=id_of)
def test_patterns_keep_their_positions_and_the_most_recent(
    peaked: TinyOpt, rule: EvictionRule, has: Callable[[int], bool]
) -> None:
    for step, layers in enumerate(look(peaked, rule).seen):
        for layer in layers:
            for (columns, _), length in zip(layer, LENGTHS, strict=True):
                left = range(max(0, length + step - rule.recent))
                pattern = [column for column in left if has(column)][: rule.heavy]
                others = [column for column in left if not has(column)]
                free = rule.heavy - len(pattern)
                expected = {*pattern, *others[len(others) - min(free, len(others)) :]}
                for head in columns[:, : rule.heavy].tolist():
                    assert set(head) - {-1} == expected, (step, length)


@pytest.mark.parametrize(
    ("rule", "has"),
    [(StridedHeavy(6, 3, stride=4), in_stride), (FixedHeavy(8, 3, block=6, summary=2), in_block)],
    ids=id_of,
)
def test_patterns_with_heavy_hitters_keep_both(peaked: TinyOpt, rule: EvictionRule, has: Callable[[int], bool]) -> None:
    differing = 0
    for step, layers in enumerate(look(peaked, rule).seen):
        for layer in layers:
            for (columns, scores), length in zip(layer, LENGTHS, strict=True):
                left = range(max(0, length + step - rule.recent))
                pattern = [column for column in left if has(column)][: rule.heavy]
                others = {tuple(sorted(set(head) - {-1} - set(pattern))) for head in columns[:, : rule.heavy].tolist()}
                differing += len(others) > 1
                for head, kept in enumerate(columns[:, : rule.heavy].tolist()):
                    assert set(pattern) <= set(kept)
                    assert len(set(kept) - {-1}) == min(rule.heavy, len(left))
                    kept_scores = scores[head, : rule.heavy].tolist()
                    for column, score in zip(kept, kept_scores, strict=True):
                        assert column < 0 or (score == math.inf) == has(column)
    assert differing > 20  # heads choose for themselves what the pattern leaves them


def test_a_pattern_out_of_reach_leaves_h2o(peaked: TinyOpt) -> None:
    h2o = look(peaked, H2O(4, 3)).all_logits()
    for rule in (StridedHeavy(4, 3, stride=99), FixedHeavy(4, 3, block=99, summary=1)):
        assert torch.equal(look(peaked, rule).all_logits(), h2o)
