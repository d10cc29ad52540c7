"""How each policy divides a budget, and that all of them get the same."""

from __future__ import annotations

import pytest

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.evaluation.plain import PlainPolicy
from flexgen_h2o.evaluation.policies import POLICIES, policy_for
from flexgen_h2o.evaluation.score_rules import Fixed, Strided
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.registry import HOMES

PROMPT_LEN, LENGTH, LAYERS = 384, 512, 4


@pytest.mark.parametrize(
    ("eviction", "budget", "sizes"),
    [
        ("h2o", 0.2, (38, 39)),
        ("local", 0.2, (0, 77)),
        ("sink", 0.2, (4, 73)),
        ("full", 0.2, (0, 512)),
        ("heavy", 0.2, (75, 2)),
        ("smooth", 0.2, (38, 39)),
        ("h2o", 0.1, (19, 19)),
        ("h2o", 1.0, (192, 192)),
        ("h2o", 1 / 384, (0, 1)),
        ("sink", 5 / 384, (4, 1)),
    ],
)
def test_budgets_are_shares_of_the_prompt(eviction: str, budget: float, sizes: tuple[int, int]) -> None:
    rule = policy_for(eviction, budget, PROMPT_LEN, LENGTH, LAYERS)
    assert isinstance(rule, EvictionRule) and (rule.heavy, rule.recent) == sizes


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@pytest.mark.parametrize(("budget", "entries"), [(0.04, 15), (0.1, 38), (0.2, 77)])
def test_every_policy_gets_as_many_entries(name: str, budget: float, entries: int) -> None:
    policy = policy_for(name, budget, PROMPT_LEN, LENGTH, LAYERS)
    if isinstance(policy, EvictionRule):
        assert policy.slots == entries
    else:
        assert isinstance(policy, PlainPolicy)
        sizes = [getattr(policy, part, 0) for part in ("heavy", "recent", "entries", "others")]
        assert sum(sizes) == entries


@pytest.mark.parametrize("budget", [0.04, 0.1, 0.2, 0.6])
@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_patterns_fit_the_whole_text(name: str, budget: float) -> None:
    """And are no sparser than they have to be."""
    rule = policy_for(name, budget, PROMPT_LEN, LENGTH, LAYERS)
    assert isinstance(rule, (Strided, Fixed))
    left = range(LENGTH - rule.recent)
    if isinstance(rule, Strided):
        assert sum(column % rule.stride == rule.stride - 1 for column in left) <= rule.heavy
        if rule.stride > 1:
            assert len(left) // (rule.stride - 1) > rule.heavy
    else:
        assert rule.block == 128 and rule.summary == max(1, rule.heavy // 4)


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_with_heavy_hitters_a_pattern_has_half_of_the_heavy_region(name: str) -> None:
    alone, with_heavy = (policy_for(full_name, 0.2, PROMPT_LEN, LENGTH, LAYERS) for full_name in (name, f"{name}+h2o"))
    assert isinstance(with_heavy, EvictionRule) and with_heavy.accumulates
    assert isinstance(alone, EvictionRule) and not alone.accumulates
    assert (alone.heavy, alone.recent) == (with_heavy.heavy, with_heavy.recent)
    if isinstance(alone, Strided) and isinstance(with_heavy, Strided):
        assert (alone.stride, with_heavy.stride) == (13, 24)
    if isinstance(alone, Fixed) and isinstance(with_heavy, Fixed):
        assert (alone.summary, with_heavy.summary) == (9, 4)


@pytest.mark.parametrize(
    ("eviction", "budget"),
    [("sink", 4 / 384), ("h2o", 0.001), ("local", 0.001), ("topk", 0.001), ("heavy", 0.001), ("best", 0.2)],
)
def test_a_budget_or_policy_that_cannot_be_is_refused(eviction: str, budget: float) -> None:
    with pytest.raises(UsageError, match=eviction):
        policy_for(eviction, budget, PROMPT_LEN, LENGTH, LAYERS)


def test_policies_of_the_table_are_called_what_they_call_themselves() -> None:
    """`heavy` apart, which is H2O with its budget divided in another way."""
    for name in POLICIES:
        assert policy_for(name, 0.2, PROMPT_LEN, LENGTH, LAYERS).name == ("h2o" if name == "heavy" else name)


def test_what_run_offers_can_be_judged() -> None:
    assert set(HOMES) <= set(POLICIES)
