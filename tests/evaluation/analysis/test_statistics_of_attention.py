"""Sparsity, accumulated scores and their correlation with frequency, on attention made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import weights_of

from flexgen_h2o.evaluation.analysis.accumulated import (
    accumulated_scores,
    even_scores,
    exponential,
    power_law,
    score_curve,
    share_of_top,
)
from flexgen_h2o.evaluation.analysis.frequency import (
    Vocabulary,
    correlations,
    neighbours,
    occurrences,
    rank_correlation,
    ranks,
    scores_by_token,
)
from flexgen_h2o.evaluation.analysis.sparsity import FIRST_QUERY, first_token_weight, sparse_share

SPARSE = [[1.0], [0.995, 0.005], [0.6, 0.397, 0.003]]  # two of six below a hundredth of their row's largest
DENSE = [[1.0], [0.5, 0.5], [0.98, 0.0099, 0.0101]]  # 0.0099 is above a hundredth of 0.98


def test_sparsity_counts_what_is_below_a_hundredth_of_the_row_maximum() -> None:
    assert sparse_share(weights_of(SPARSE, DENSE)).tolist() == pytest.approx([2 / 6, 0])
    both = torch.cat((weights_of(SPARSE, DENSE), weights_of(DENSE, SPARSE)))
    assert sparse_share(both).tolist() == pytest.approx([1 / 6, 1 / 6])


def test_the_weight_on_the_first_token_leaves_out_the_first_queries() -> None:
    n = FIRST_QUERY + 2
    weights = torch.ones(1, 1, n, n).tril()
    weights[0, 0, FIRST_QUERY:, 0] = torch.tensor([0.25, 0.75])
    assert first_token_weight(weights).tolist() == [0.5]


def test_a_token_has_what_all_queries_give_it() -> None:
    scores = accumulated_scores(weights_of(SPARSE, DENSE))
    assert scores[0, 0].tolist() == pytest.approx([1 + 0.995 + 0.6, 0.005 + 0.397, 0.003])
    # Each head by rank: the second head's last token is its third, above no other.
    expected = [(2.595 + 2.48) / 2, (0.402 + 0.5099) / 2, (0.003 + 0.0101) / 2]
    assert score_curve(scores).tolist() == pytest.approx(expected, rel=1e-6)


def test_scores_are_ranked_before_heads_are_averaged() -> None:
    assert score_curve(torch.tensor([[[1.0, 3.0], [5.0, 2.0]]])).tolist() == [4.0, 1.5]


def test_power_laws_and_exponentials_are_told_apart() -> None:
    x = torch.arange(1, 101, dtype=torch.float64)
    falls_as_power, falls_as_exponential = 7 * x**-1.5, 7 * (-0.1 * x).exp()
    fit = power_law(falls_as_power)
    assert (fit.slope, fit.r2) == (pytest.approx(-1.5), pytest.approx(1))
    assert exponential(falls_as_power).r2 < 0.9
    fit = exponential(falls_as_exponential)
    assert (fit.slope, fit.r2) == (pytest.approx(-0.1), pytest.approx(1))
    assert power_law(falls_as_exponential).r2 < 0.9


def test_what_the_top_has_and_what_even_attention_gives() -> None:
    assert share_of_top(torch.tensor([5.0, 3.0, 1.0, 1.0]), 0.5) == pytest.approx(0.8)
    assert share_of_top(torch.tensor([5.0, 3.0, 1.0, 1.0]), 0.01) == pytest.approx(0.5)  # at least one
    assert even_scores(3).tolist() == pytest.approx([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])


def test_ranks_share_ties() -> None:
    assert ranks(torch.tensor([10.0, 20.0, 20.0, 5.0])).tolist() == [2.0, 3.5, 3.5, 1.0]
    a = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert rank_correlation(a, a**3) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15).
    assert rank_correlation(a, torch.tensor([2.0, 1.0, 40.0, 3.0])) == pytest.approx(0.6)
    assert rank_correlation(a, torch.ones(4)) == 0


def test_occurrences_and_neighbours_are_counted() -> None:
    ids = torch.tensor([[1, 2, 3, 1], [1, 2, 1, 2]])
    assert occurrences(ids, 5).tolist() == [0, 4, 3, 1, 0]
    assert neighbours(ids, 5, reach=1).tolist() == [0, 2, 2, 2, 0]  # 1: 2 and 3; 2: 1 and 3; 3: 2 and 1
    assert neighbours(ids[1:], 5, reach=9).tolist() == [0, 1, 1, 0, 0]
    assert neighbours(torch.tensor([[1, 2, 3]]), 4, reach=1).tolist() == [0, 1, 2, 1]  # 1 and 3 are two apart


def test_scores_go_to_the_token_that_stands_there() -> None:
    ids = torch.tensor([[1, 3, 1], [3, 3, 0]])
    scores = torch.tensor([[[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 3.0]]])
    assert scores_by_token(ids, scores, 4).tolist() == [2, 2 + 4, 0, 3 + 1 + 1]


def test_scores_per_occurrence_lose_what_frequency_alone_gives() -> None:
    frequency = torch.tensor([0.0, 1, 2, 4, 8], dtype=torch.float64)
    received = torch.tensor([math.nan, 4.0, 3.5, 3.0, 2.5], dtype=torch.float64)  # per occurrence
    found = correlations(Vocabulary(frequency, frequency, frequency * received))
    assert found["total_frequency"] == pytest.approx(1) and found["mean_frequency"] == pytest.approx(-1)
    assert found["total_together"] == pytest.approx(1) and found["mean_together"] == pytest.approx(-1)
