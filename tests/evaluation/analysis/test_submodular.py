"""Greedy eviction against all ways to evict, and worths of sets whose nature is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from by_hand import attention_of
from torch import Tensor

from flexgen_h2o.evaluation.analysis.kept import kept_entries
from flexgen_h2o.evaluation.analysis.submodular import (
    best_kept_weight,
    best_worth,
    diminishing_share,
    eviction_paths,
    greedy_worth,
    kept_weight,
    set_values,
)
from flexgen_h2o.evaluation.plain_policies import PlainH2O


def random_weights(count: int, n: int, seed: int) -> Tensor:
    """[count, n, n], peaked and causal."""
    logits = 3 * torch.randn(count, n, n, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)


def best_by_recursion(weights: Tensor, prompt_len: int, entries: int) -> float:
    """One head; a slow walk over every decision."""
    n = len(weights)

    def from_here(kept: frozenset[int], column: int) -> float:
        received = float(sum(weights[column, other] for other in kept))
        if column == n - 1:
            return received
        return received + max(from_here((kept - {gone}) | {column + 1}, column + 1) for gone in kept)

    starts = itertools.combinations(range(prompt_len), entries - 1)
    return max(from_here(frozenset((*start, prompt_len)), prompt_len) for start in starts) / (n - prompt_len)


@pytest.mark.parametrize(("prompt_len", "n", "entries"), [(3, 7, 3), (4, 7, 2), (4, 6, 5), (5, 6, 1)])
def test_all_ways_to_evict_are_tried(prompt_len: int, n: int, entries: int) -> None:
    weights = random_weights(4, n, seed=prompt_len)
    found = best_kept_weight(weights, eviction_paths(prompt_len, n, entries))
    expected = [best_by_recursion(head, prompt_len, entries) for head in weights]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_no_policy_keeps_more_than_the_best_and_greedy_keeps_less_where_the_text_turns() -> None:
    weights = random_weights(6, 12, seed=1)
    logits = weights.log().clamp(min=-30)
    attention = attention_of(logits, 6)
    kept = kept_entries(attention, PlainH2O(2, 2))
    best = best_kept_weight(weights, eviction_paths(6, 12, 4))
    assert (kept_weight(weights[None], kept, 6)[0] <= best + 1e-5).all()
    turning = torch.zeros(1, 8, 8)
    turning[0, :4, 0], turning[0, 4:, 2] = 9.0, 9.0  # the prompt looks at 0, what follows at 2
    of_turning = attention_of(turning, 4)
    exact = of_turning.weights(0, 8)
    ratio = kept_weight(exact, kept_entries(of_turning, PlainH2O(1, 1)), 4) / best_kept_weight(
        exact[0], eviction_paths(4, 8, 2)
    )
    assert float(ratio) < 0.01


def test_kept_weight_is_what_would_have_been_given() -> None:
    weights = torch.tensor([[[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]]])[None]
    kept = torch.tensor([[True, False, True, False], [True, False, False, True]]).view(2, 1, 1, 4)
    assert float(kept_weight(weights, kept, 2)) == pytest.approx((0.7 + 0.5) / 2)


def test_a_set_is_worth_what_it_brings_the_output_nearer() -> None:
    query = torch.zeros(1, 2, dtype=torch.float64)  # looks at both alike
    keys = torch.eye(2, dtype=torch.float64)[None]
    values = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]], dtype=torch.float64)
    # All: (1, 1). The first alone: (2, 0), which is (1, -1) off, as far as nothing at all.
    assert set_values(query, keys, values)[0].tolist() == pytest.approx([0, 0, 0, 1])
    same = torch.ones(1, 2, 2, dtype=torch.float64)
    assert set_values(query, keys, same)[0].tolist() == pytest.approx([0, 1, 1, 1])


def sizes(n: int) -> Tensor:
    return torch.tensor([number.bit_count() for number in range(2**n)], dtype=torch.float64)[None]


@pytest.mark.parametrize(
    ("worth", "share"),
    [(sizes(4), 1.0), (sizes(4).sqrt(), 1.0), (sizes(4) ** 2, 0.0)],
    ids=["a sum", "diminishing", "growing"],
)
def test_diminishing_gains_are_told_from_growing_ones(worth: Tensor, share: float) -> None:
    assert diminishing_share(worth) == share


def test_mixed_gains_are_counted() -> None:
    # Two entries: only the pair {0, 1} over the empty set is there to judge. Three: six pairs with a third in or out.
    assert diminishing_share(torch.tensor([[0.0, 1, 1, 3]])) == 0
    worth = torch.tensor([[0.0, 1, 1, 3, 1, 2, 2, 3]])  # 0 and 1 add to each other, unless 2 is there
    assert diminishing_share(worth) == pytest.approx(5 / 6)


def test_adding_the_best_one_after_the_other_may_miss_the_best_set() -> None:
    covered = [{1, 2, 3, 4}, {1, 2, 5}, {3, 4, 6}]  # the largest first, though the other two cover all
    worth = torch.tensor(
        [[float(len(set().union(*(covered[i] for i in range(3) if number >> i & 1)))) for number in range(8)]]
    )
    assert diminishing_share(worth) == 1
    assert (float(greedy_worth(worth, 2)), float(best_worth(worth, 2))) == (5, 6)
    assert float(greedy_worth(worth, 2) / best_worth(worth, 2)) > 1 - 1 / math.e
    assert float(greedy_worth(worth, 3)) == float(best_worth(worth, 3)) == 6
    assert greedy_worth(-sizes(3), 2).tolist() == [-2]  # no entry twice, even where each costs
