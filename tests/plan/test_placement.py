"""From percentages to homes: what is asked for is what comes out, within one tensor or unit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import VARIANTS, tiny_config

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.registry import from_dict, published
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.placement import TIERS, Percent, Tier, achieved, place_weights, spread
from flexgen_h2o.plan.policy import Policy

MODELS = {name: published(name) for name in ("opt-125m", "opt-350m", "opt-1.3b", "opt-30b", "opt-175b")}
TINY = {variant: from_dict(tiny_config(variant).to_dict(), variant) for variant in VARIANTS}
PAIRS = st.integers(0, 100).flatmap(lambda gpu: st.tuples(st.just(gpu), st.integers(0, 100 - gpu)))


def weights_percent(gpu: float, cpu: float) -> Percent:
    return Percent(weights_gpu=gpu, weights_cpu=cpu)


def elements(config: ModelShape, homes: dict[str, Tier]) -> dict[Tier, int]:
    """Elements on each tier."""
    found: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for name, shape in config.shapes().items():
        found[homes[name]] += math.prod(shape)
    return found


def assert_weights_as_asked(config: ModelShape, gpu: float, cpu: float) -> None:
    homes = dict(place_weights(config, weights_percent(gpu, cpu).weights))
    assert homes.keys() == config.shapes().keys()
    total, largest = _total_and_largest(config)
    for (tier, got), share in zip(elements(config, homes).items(), (gpu, cpu, 100 - gpu - cpu), strict=True):
        assert abs(got - total * share / 100) <= largest, (tier, share, got / total)
        if share == 0:
            assert got == 0, tier
        if share == 100:
            assert got == total, tier
    assert_neighbours_alike(config, homes)


def _total_and_largest(config: ModelShape) -> tuple[int, int]:
    sizes = [math.prod(shape) for shape in config.shapes().values()]
    return sum(sizes), max(sizes)


def assert_neighbours_alike(config: ModelShape, homes: dict[str, Tier]) -> None:
    """Two layers that follow one another differ by one tensor at most at each of the two boundaries."""
    layers = [[homes[f"layers.{n}.{name}"] for name in config.layer_shapes()] for n in range(config.num_hidden_layers)]
    for one, other in itertools.pairwise(layers):
        for faster in (("gpu",), ("gpu", "cpu")):  # what lies before either boundary
            assert sum((a in faster) != (b in faster) for a, b in zip(one, other, strict=True)) <= 1


def multiples_of(step: int) -> Iterator[tuple[int, int]]:
    return ((gpu, cpu) for gpu in range(0, 101, step) for cpu in range(0, 101 - gpu, step))


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_placed_as_asked_within_one_tensor(model: str) -> None:
    for gpu, cpu in multiples_of(5):
        assert_weights_as_asked(MODELS[model], gpu, cpu)


@given(pair=PAIRS, model=st.sampled_from(sorted(MODELS) + sorted(TINY)))
def test_weights_of_any_model_are_placed_as_asked(pair: tuple[int, int], model: str) -> None:
    assert_weights_as_asked((MODELS | TINY)[model], *pair)


@given(
    pair=st.tuples(st.floats(0, 100), st.floats(0, 1)).map(lambda drawn: (drawn[0], (100 - drawn[0]) * drawn[1])),
    model=st.sampled_from(["opt-125m", "opt-350m", "opt-30b"]),
)
def test_fractions_of_a_per_cent_are_placed_too(pair: tuple[float, float], model: str) -> None:
    config = MODELS[model]
    homes = dict(place_weights(config, weights_percent(*pair).weights))
    total, largest = _total_and_largest(config)
    got = elements(config, homes)
    assert abs(got["gpu"] - total * pair[0] / 100) <= largest and abs(got["cpu"] - total * pair[1] / 100) <= largest


def test_small_tensors_go_to_the_fastest_tier_that_has_a_share() -> None:
    config = MODELS["opt-1.3b"]
    small = [name for name, shape in config.shapes().items() if len(shape) == 1]
    for (gpu, cpu), fastest in (((20, 80), "gpu"), ((0, 50), "cpu"), ((20, 0), "gpu")):
        homes = place_weights(config, weights_percent(gpu, cpu).weights)
        assert {homes[name] for name in small} == {fastest}


def test_placing_weights_is_deterministic() -> None:
    shares = weights_percent(37, 41).weights
    assert place_weights(MODELS["opt-1.3b"], shares) == place_weights(MODELS["opt-1.3b"], shares)


# --- units ---


def assert_spread_as_asked(count: int, gpu: float, cpu: float) -> list[Tier]:
    tiers = spread(count, weights_percent(gpu, cpu).weights)
    assert len(tiers) == count
    for tier, share in zip(TIERS, (gpu, cpu, 100 - gpu - cpu), strict=True):
        assert abs(tiers.count(tier) - count * share / 100) <= 1, (tier, share, tiers)
        if share == 0:
            assert tier not in tiers
        if share == 100:
            assert set(tiers) <= {tier}
    return tiers


@given(count=st.integers(0, 300), pair=PAIRS)
def test_units_are_spread_as_asked_within_one(count: int, pair: tuple[int, int]) -> None:
    tiers = assert_spread_as_asked(count, *pair)
    assert_evenly_interleaved([tier == "gpu" for tier in tiers])
    rest = [tier for tier in tiers if tier != "gpu"]
    assert_evenly_interleaved([tier == "cpu" for tier in rest])


def assert_evenly_interleaved(chosen: Sequence[bool]) -> None:
    """Every stretch of a length holds as many of them as every other, but for one."""
    for length in {1, 2, 3, 7, len(chosen) // 2}:
        counts = {sum(chosen[start : start + length]) for start in range(len(chosen) - length + 1)}
        assert not counts or max(counts) - min(counts) <= 1


def test_units_of_all_shares_by_fives() -> None:
    for (gpu, cpu), count in itertools.product(multiples_of(5), (0, 1, 2, 3, 7, 96)):
        assert_spread_as_asked(count, gpu, cpu)


def test_four_units_by_hand() -> None:
    assert spread(4, (0.5, 0.25, 0.25)) == ["disk", "gpu", "cpu", "gpu"]
    assert spread(3, (0.0, 1.0, 0.0)) == ["cpu", "cpu", "cpu"]
    assert spread(0, (1.0, 0.0, 0.0)) == []


# --- the six numbers ---


@given(weights=PAIRS, cache=PAIRS, hidden=PAIRS)
def test_every_legal_six_are_accepted_and_shares_sum_to_one(
    weights: tuple[int, int], cache: tuple[int, int], hidden: tuple[int, int]
) -> None:
    percent = Percent(*weights, *cache, *hidden)
    assert percent.problems() == [] and Policy(percent=percent).problems() == []
    assert percent.values == (*weights, *cache, *hidden)
    for shares, (gpu, cpu) in zip(
        (percent.weights, percent.cache, percent.hidden), (weights, cache, hidden), strict=True
    ):
        assert shares == pytest.approx((gpu / 100, cpu / 100, 1 - (gpu + cpu) / 100))
        assert all(share >= 0 for share in shares)


def test_six_fifties_leave_nothing_on_disk() -> None:
    percent = Percent(50, 50, 50, 50, 50, 50)
    assert percent.problems() == []
    assert percent.weights == percent.cache == percent.hidden == (0.5, 0.5, 0.0)
    homes = place_weights(MODELS["opt-1.3b"], percent.weights)
    assert set(homes.values()) == {"gpu", "cpu"}


DECIMALS = [weights_percent(tenths / 10, (1000 - tenths) / 10) for tenths in range(1001)]


def test_decimals_that_sum_to_a_hundred_are_placed_in_memory() -> None:
    for percent in DECIMALS:
        assert percent.problems() == []
        assert "disk" not in place_weights(TINY["pre_norm"], percent.weights).values()
        assert "disk" not in spread(7, percent.weights)


def test_decimals_that_sum_to_a_hundred_leave_no_share_for_the_disk() -> None:
    """100.0 - 64.1 - 35.9 is not 0, but 64.1 + 35.9 is 100: such a run needs no folder for files."""
    assert [str(percent) for percent in DECIMALS if percent.weights[2] != 0] == []


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("value", [-1, -0.001, 100.001, 101, math.nan, math.inf, -math.inf])
def test_what_is_no_percentage_is_refused_in_one_sentence(position: int, value: float) -> None:
    values: list[float] = [0, 0, 0, 0, 0, 0]
    values[position] = value
    (problem,) = Percent(*values).problems()
    assert f"{value:g}" in problem and "between 0 and 100" in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("percent", "what"),
    [
        (Percent(60, 41, 0, 0, 0, 0), "weights"),
        (Percent(0, 0, 100, 1, 0, 0), "cache"),
        (Percent(0, 0, 0, 0, 50, 50.5), "hidden states"),
    ],
    ids=str,
)
def test_a_pair_above_a_hundred_is_refused_in_one_sentence(percent: Percent, what: str) -> None:
    (problem,) = percent.problems()
    assert what in problem and "at most 100" in problem


def test_every_pair_above_a_hundred_is_listed() -> None:
    problems = Percent(60, 60, 70, 70, 80, 80).problems()
    assert len(problems) == 3
    assert all(what in problem for what, problem in zip(("weights", "cache", "hidden states"), problems, strict=True))


def test_the_model_refuses_an_illegal_placement_before_anything_else() -> None:
    with pytest.raises(UsageError) as caught:
        LLM("opt-125m", dummy_weights=True, percent=Percent(60, 60, -1, 0, 0, 0))
    assert any("-1" in problem for problem in caught.value.problems)


# --- what was achieved ---


def test_achieved_is_counted_in_bytes() -> None:
    assert achieved([("gpu", 30), ("cpu", 10), ("gpu", 10), ("disk", 50)]) == (40.0, 10.0)
    assert achieved([]) == (100.0, 0.0)
    assert achieved([("disk", 7)]) == (0.0, 0.0)
