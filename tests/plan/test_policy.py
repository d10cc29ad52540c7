"""Sizes of the block and of the KV buffer: boundaries, and a sentence for every mistake."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.policy import EVICTIONS, EvictionSpec, Policy

# --- the block ---


@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(1, 1, 1), Policy(2, 4, 4), Policy(2, 4, 8), Policy(3, 1, 3), Policy(5, 7)],
    ids=str,
)
def test_sound_policies_have_no_problems(policy: Policy) -> None:
    assert policy.problems() == []


def test_a_block_is_its_batches_and_decode_takes_it_whole_unless_told() -> None:
    assert Policy(3, 4).block_rows == Policy(3, 4).group_rows == 12
    assert Policy(3, 4, 6).group_rows == 6


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(0, 1), ["--gpu-batch-size is 0", "at least 1"]),
        (Policy(1, -2), ["--num-gpu-batches is -2", "at least 1"]),
        (Policy(1, 1, 0), ["--decode-batch-size is 0", "at least 1"]),
        (Policy(4, 2, 6), ["--decode-batch-size 6", "multiple", "--gpu-batch-size 4"]),
        (Policy(4, 2, 2), ["--decode-batch-size 2", "multiple", "--gpu-batch-size 4"]),
        (Policy(4, 2, 12), ["--decode-batch-size 12", "larger than the block of 8", "--num-gpu-batches"]),
    ],
    ids=str,
)
def test_each_mistake_of_a_policy_is_one_sentence(policy: Policy, words: list[str]) -> None:
    assert len(policy.problems()) == 1
    assert all(word in policy.problems()[0] for word in words)


def test_all_mistakes_of_a_policy_are_named_at_once() -> None:
    assert len(Policy(0, 0, 0).problems()) == 3
    assert len(Policy(4, 2, 13).problems()) == 2


# --- the KV buffer ---


def spec_id(value: object) -> str | None:
    """What a specification says, without what it leaves open."""
    if not isinstance(value, EvictionSpec):
        return None
    given = {name: setting for name, setting in dataclasses.asdict(value).items() if setting is not None}
    return " ".join(f"{name}={setting}" for name, setting in given.items())


@pytest.mark.parametrize(
    ("spec", "length", "sizes"),
    [
        (EvictionSpec(), 180, (18, 18)),  # 0.1 + 0.1
        (EvictionSpec(), 9, (0, 1)),
        (EvictionSpec(), 10, (1, 1)),
        (EvictionSpec(), 1, (0, 1)),
        (EvictionSpec(), 19, (1, 1)),
        # Floored as decimals: as binary fractions these would give one less.
        (EvictionSpec(hh_ratio=0.35), 180, (63, 63)),
        (EvictionSpec(hh_ratio="0.35"), 180, (63, 63)),
        (EvictionSpec(hh_ratio=Fraction(35, 100)), 180, (63, 63)),
        (EvictionSpec(hh_ratio=0.29, recent_ratio=0.57), 100, (29, 57)),
        (EvictionSpec(hh_ratio=0.07, recent_ratio=0.28), 100, (7, 28)),
        # One given, the other equals it.
        (EvictionSpec(hh_ratio=0.2), 100, (20, 20)),
        (EvictionSpec(recent_ratio=0.3), 100, (30, 30)),
        (EvictionSpec(hh_size=7), 100, (7, 7)),
        (EvictionSpec(recent_size=9), 100, (9, 9)),
        (EvictionSpec(hh_ratio=0.2, recent_size=3), 100, (20, 3)),
        (EvictionSpec(hh_size=3, recent_ratio=0.2), 100, (3, 20)),
        # Boundaries: nothing heavy, one recent, and the whole sequence or more.
        (EvictionSpec(hh_ratio=0, recent_ratio=0.2), 100, (0, 20)),
        (EvictionSpec(hh_size=0, recent_size=1), 100, (0, 1)),
        (EvictionSpec(hh_ratio=0.5, recent_ratio=0.001), 100, (50, 1)),
        (EvictionSpec(hh_size=49, recent_size=50), 100, (49, 50)),
        (EvictionSpec(hh_size=50, recent_size=50), 100, (50, 50)),
        (EvictionSpec(hh_size=51, recent_size=50), 100, (50, 50)),
        (EvictionSpec(hh_ratio=0.9, recent_ratio=0.9), 100, (10, 90)),
        (EvictionSpec(hh_ratio=1, recent_ratio=1), 100, (0, 100)),
        (EvictionSpec(hh_size=5, recent_size=500), 100, (0, 100)),
        (EvictionSpec("full"), 180, (0, 180)),
        (EvictionSpec("full"), 1, (0, 1)),
        (EvictionSpec("local"), 180, (0, 18)),
        (EvictionSpec("local", recent_ratio=0.2), 180, (0, 36)),
        (EvictionSpec("local", recent_size=200), 180, (0, 180)),
        (EvictionSpec("sink"), 180, (4, 18)),
        (EvictionSpec("sink", sink_size=1, recent_size=1), 180, (1, 1)),
        (EvictionSpec("sink", recent_ratio=0.2), 180, (4, 36)),
        (EvictionSpec("sink", sink_size=50, recent_size=5), 20, (15, 5)),
        (EvictionSpec("sink", recent_size=19), 20, (1, 19)),
        (EvictionSpec("sink", recent_size=20), 20, (0, 20)),
    ],
    ids=spec_id,
)
def test_sizes_by_hand(spec: EvictionSpec, length: int, sizes: tuple[int, int]) -> None:
    assert spec.problems() == []
    assert spec.sizes(length) == sizes


PER_MILLE = st.integers(1, 1000)


@given(PER_MILLE, PER_MILLE, st.integers(1, 4096), st.sampled_from([float, str, Fraction]))
def test_ratios_are_floored_as_decimals(heavy: int, recent: int, length: int, kind: type) -> None:
    """Whatever type a ratio comes in. Integers tell what is exact."""
    ratios = [Fraction(n, 1000) if kind is Fraction else kind(n / 1000) for n in (heavy, recent)]
    expected_recent = max(1, recent * length // 1000)
    expected_heavy = min(heavy * length // 1000, length - expected_recent)
    assert EvictionSpec("h2o", *ratios).sizes(length) == (expected_heavy, expected_recent)


@given(
    st.sampled_from(EVICTIONS),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(1, 50),
    st.integers(1, 60),
)
def test_slots_never_exceed_the_sequence(name: str, recent: int | None, heavy: int | None, length: int) -> None:
    sizes = {
        "h2o": EvictionSpec("h2o", hh_size=heavy, recent_size=recent),
        "smooth": EvictionSpec("smooth", hh_size=heavy, recent_size=recent),
        "local": EvictionSpec("local", recent_size=recent),
        "sink": EvictionSpec("sink", sink_size=heavy, recent_size=recent),
        "full": EvictionSpec("full"),
    }[name].sizes(length)
    assert sizes[0] >= 0 and sizes[1] >= 1 and sum(sizes) <= length


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EvictionSpec("lru"), ["--eviction 'lru'", "h2o, full, local, sink"]),
        (EvictionSpec(hh_ratio=1.01), ["--hh-ratio is 1.01", "between 0 and 1"]),
        (EvictionSpec(hh_ratio=-0.1), ["--hh-ratio is -0.1", "between 0 and 1"]),
        (EvictionSpec(recent_ratio="1.5"), ["--recent-ratio is 1.5", "between 0 and 1"]),
        (EvictionSpec(recent_ratio=0), ["--recent-ratio is 0", "--recent-size 1"]),
        (EvictionSpec(recent_size=0), ["--recent-size is 0", "at least 1"]),
        (EvictionSpec(recent_size=-3), ["--recent-size is -3", "at least 1"]),
        (EvictionSpec(hh_size=-1, recent_size=4), ["--hh-size is -1", "at least 0"]),
        (EvictionSpec("sink", sink_size=0), ["--sink-size is 0", "at least 1"]),
        (EvictionSpec(hh_ratio=0), ["--hh-ratio is 0", "--recent-ratio"]),
        (EvictionSpec(hh_size=0), ["--hh-size is 0", "--recent-ratio"]),
        (EvictionSpec(hh_ratio=0.1, hh_size=5), ["--hh-ratio and --hh-size"]),
        (EvictionSpec(recent_ratio=0.1, recent_size=5), ["--recent-ratio and --recent-size"]),
        (EvictionSpec("h2o", sink_size=4), ["--sink-size", "--eviction h2o"]),
        (EvictionSpec("local", sink_size=4), ["--sink-size", "--eviction local"]),
        (EvictionSpec("local", hh_ratio=0.1), ["--hh-ratio", "--eviction local"]),
        (EvictionSpec("local", hh_size=3), ["--hh-size", "--eviction local"]),
        (EvictionSpec("sink", hh_ratio=0.1), ["--hh-ratio", "--eviction sink"]),
        (EvictionSpec("sink", hh_size=3), ["--hh-size", "--eviction sink"]),
        (EvictionSpec("full", hh_ratio=0.1), ["--hh-ratio", "--eviction full"]),
        (EvictionSpec("full", hh_size=3), ["--hh-size", "--eviction full"]),
        (EvictionSpec("full", recent_ratio=0.1), ["--recent-ratio", "--eviction full"]),
        (EvictionSpec("full", recent_size=3), ["--recent-size", "--eviction full"]),
        (EvictionSpec("full", sink_size=3), ["--sink-size", "--eviction full"]),
        (EvictionSpec(hh_ratio=float("nan")), ["--hh-ratio is nan"]),
        (EvictionSpec(recent_ratio=float("inf")), ["--recent-ratio is inf"]),
        (EvictionSpec(recent_ratio="a lot"), ["--recent-ratio is", "a lot"]),
    ],
    ids=spec_id,
)
def test_each_mistake_of_an_eviction_is_one_sentence(spec: EvictionSpec, words: list[str]) -> None:
    problems = spec.problems()
    assert len(problems) == 1
    assert all(word in problems[0] for word in words), problems
    with pytest.raises(UsageError) as caught:
        spec.sizes(100)
    assert caught.value.problems == problems


def test_all_mistakes_of_an_eviction_are_named_at_once() -> None:
    assert len(EvictionSpec("full", hh_ratio=2, recent_size=0).problems()) == 4
