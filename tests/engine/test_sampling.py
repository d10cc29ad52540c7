"""Choosing tokens: greedy, filtered and sampled, against numpy and against the frequencies asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from flexgen_h2o.engine.sampling import choose_tokens, uniform_numbers
from flexgen_h2o.plan.sampling import SamplingParams


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def choose(logits: Tensor, step: int | list[int] = 0, first: int = 0, **params: Any) -> list[int]:
    """Rows are prompts first, first + 1, ...; all at the same step, or each at its own."""
    indices = torch.arange(first, first + len(logits))
    steps = step if isinstance(step, list) else [step] * len(logits)
    return choose_tokens(logits, SamplingParams(**params), indices, steps).tolist()


def numbers_at(seed: int, indices: NDArray[np.int64], step: int) -> NDArray[np.float64]:
    """uniform_numbers, all at the same step."""
    return uniform_numbers(seed, indices, np.full(len(indices), step))


# --- greedy ---


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 3.0, "top_p": 0.5},  # these mean nothing without do_sample
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "temperature": 5.0, "top_k": 1, "top_p": 0.9},
        {"do_sample": True, "top_p": 1e-6},
        {"do_sample": True, "temperature": 1e-3},
        {"do_sample": True, "temperature": 1e-40},  # logits divided by it are infinite
    ],
    ids=str,
)
def test_the_most_likely_token_is_taken(params: dict[str, float]) -> None:
    logits = random_logits(50, 30)
    assert choose(logits, **params) == logits.argmax(dim=-1).tolist()


def test_greedy_takes_the_lowest_of_tied_ids() -> None:
    assert choose(torch.tensor([[1.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]])) == [1, 0]


# --- the numbers ---


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**20))
def test_numbers_lie_in_0_to_1(seed: int, index: int, step: int) -> None:
    number = numbers_at(seed, np.array([index]), step)[0]
    assert 0 <= number < 1


def test_numbers_depend_on_seed_index_and_step_alone() -> None:
    indices = np.arange(100)
    numbers = numbers_at(3, indices, 5)
    shuffled = np.random.default_rng(0).permutation(indices)
    assert (numbers_at(3, shuffled, 5) == numbers[shuffled]).all()
    assert all(numbers_at(3, np.array([index]), 5)[0] == numbers[index] for index in indices)
    for other in (
        numbers_at(4, indices, 5),
        numbers_at(3, indices, 6),
        numbers_at(3, indices + 1, 5),
    ):
        assert (other != numbers).all()


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)), min_size=1), st.integers(0, 2**40))
def test_each_row_has_the_number_that_it_would_have_alone(rows: list[tuple[int, int]], seed: int) -> None:
    indices, steps = np.array(rows).T
    alone = [numbers_at(seed, np.array([index]), step)[0] for index, step in rows]
    assert uniform_numbers(seed, indices, steps).tolist() == alone


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """In standard deviations above its mean; a right sampler stays below 4 with near certainty."""
    value = ((counts - expected) ** 2 / expected).sum()
    freedom = max(1, len(counts) - 1)  # one class alone deviates by 0
    return float((value - freedom) / math.sqrt(2 * freedom))


def test_numbers_are_uniform_over_prompts_steps_and_seeds() -> None:
    zero = np.array([0])
    families = [
        numbers_at(0, np.arange(20_000), 0),
        np.concatenate([numbers_at(0, zero, step) for step in range(20_000)]),
        np.concatenate([numbers_at(seed, zero, 0) for seed in range(20_000)]),
        # Neighbours on the diagonal, which a hash that adds index and step would make all equal.
        np.concatenate([numbers_at(0, np.array([20_000 - step]), step) for step in range(20_000)]),
    ]
    for numbers in families:
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert chi_square(counts, np.full(50, len(numbers) / 50)) < 4
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
        assert len(np.unique(numbers)) == len(numbers)


# --- sampled ---


def allowed(logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float) -> NDArray[np.float64]:
    """Probabilities of one row after temperature, top-k and top-p, the obvious way."""
    scaled = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k] if top_k else order
    chances = scaled[kept] / scaled[kept].sum()
    needed = int(np.searchsorted(np.cumsum(chances), top_p) + 1)  # until they sum to at least top_p
    result = np.zeros(len(logits))
    result[kept[:needed]] = scaled[kept[:needed]] / scaled[kept[:needed]].sum()
    return result


FILTERS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.5, "top_k": 0, "top_p": 1.0},
    {"temperature": 2.0, "top_k": 5, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 2, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 100, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.3},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.7},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_are_those_that_numpy_draws_with_the_same_numbers(params: dict[str, float]) -> None:
    """The token in whose share of [0, 1), in order of ids, the row's number falls."""
    logits = random_logits(2000, 12)
    found = choose(logits, step=3, do_sample=True, seed=9, **params)
    numbers = numbers_at(9, np.arange(2000), 3)
    near = 0
    for row, number in enumerate(numbers):
        chances = allowed(logits[row].double().numpy(), **params)
        edges = np.cumsum(chances)
        if np.abs(edges - number).min() < 1e-6:  # within rounding of an edge either side is right
            near += 1
            continue
        assert found[row] == int(np.searchsorted(edges, number, side="right"))
    assert near < 5


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_frequencies_follow_the_probabilities(params: dict[str, float]) -> None:
    rows = 20_000
    logits = random_logits(1, 12, seed=4)
    tokens = choose(logits.expand(rows, -1), do_sample=True, **params)
    counts = np.bincount(tokens, minlength=12)
    chances = allowed(logits[0].double().numpy(), **params)
    assert counts[chances == 0].sum() == 0
    possible = chances > 1e-4
    assert chi_square(counts[possible], rows * chances[possible]) < 4


@pytest.mark.parametrize("cuts", [[1] * 24, [7, 7, 7, 3], [24]], ids=str)
def test_the_split_into_batches_changes_no_token(cuts: list[int]) -> None:
    logits = random_logits(24, 40)
    params = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 11}
    whole = choose(logits, step=2, first=100, **params)
    starts = [sum(cuts[:part]) for part in range(len(cuts))]
    pieces = list(zip(starts, cuts, strict=True))
    found = {s: choose(logits[s : s + size], step=2, first=100 + s, **params) for s, size in reversed(pieces)}
    assert [token for start in starts for token in found[start]] == whole


def test_rows_at_different_steps_choose_as_each_would_alone() -> None:
    logits = random_logits(60, 40)
    steps = [7 * row % 11 for row in range(60)]
    params = {"do_sample": True, "temperature": 1.2, "seed": 11}
    alone = [choose(logits[row : row + 1], step, row, **params)[0] for row, step in enumerate(steps)]
    together = choose(logits, steps, **params)
    assert together == alone
    assert together != choose(logits, 0, **params)


def test_the_same_seed_repeats_and_another_does_not() -> None:
    logits = random_logits(200, 40)
    one = choose(logits, do_sample=True, seed=1)
    assert choose(logits, do_sample=True, seed=1) == one
    assert choose(logits, do_sample=True, seed=2) != one
    assert choose(logits, do_sample=True, seed=1, step=1) != one


def test_a_token_of_no_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the smallest and the largest number there are."""
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0, -math.inf]])
    for number, token in ((0.0, 1), (1 - 2.0**-53, 3)):
        monkeypatch.setattr("flexgen_h2o.engine.sampling.uniform_numbers", lambda *_, n=number: np.array([n]))
        assert choose(logits, do_sample=True) == [token]


# --- mistakes ---


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(max_new_tokens=0), ["--gen-len is 0", "at least 1"]),
        (SamplingParams(temperature=-0.1), ["--temperature is -0.1"]),
        (SamplingParams(temperature=math.nan), ["--temperature is nan"]),
        (SamplingParams(temperature=math.inf), ["--temperature is inf"]),
        (SamplingParams(top_k=-1), ["--top-k is -1"]),
        (SamplingParams(top_p=0.0), ["--top-p is 0.0"]),
        (SamplingParams(top_p=1.1), ["--top-p is 1.1"]),
        (SamplingParams(top_p=math.nan), ["--top-p is nan"]),
        (SamplingParams(stop=("a", "")), ["--stop is empty"]),
    ],
    ids=str,
)
def test_each_mistake_is_one_sentence(params: SamplingParams, words: list[str]) -> None:
    assert len(params.problems()) == 1
    assert all(word in params.problems()[0] for word in words)


def test_sound_parameters_have_no_problems() -> None:
    assert SamplingParams().problems() == []
    assert SamplingParams(1, True, 0.0, 1, 1.0, -5, ("\n",), (0,), True).problems() == []


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**70])
def test_any_seed_is_taken_or_refused(seed: int) -> None:
    params = SamplingParams(do_sample=True, seed=seed)
    if not params.problems():
        choose_tokens(random_logits(2, 5), params, torch.arange(2), [0, 0])
