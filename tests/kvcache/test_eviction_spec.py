"""Which eviction policy is asked for: sizes of its regions, its parameters, and a sentence for every mistake."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import setting
from flexgen_h2o.kvcache.eviction import registry
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.registry import HOMES, descriptions, load, parameters, read_parameters
from flexgen_h2o.kvcache.eviction.smooth import Smooth
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec

# --- sizes ---


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
    st.sampled_from(sorted(HOMES)),
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


def test_of_a_policy_that_is_unknown_nothing_else_is_said() -> None:
    assert len(EvictionSpec("lru:decay=7", sink_size=4).problems()) == 1


@pytest.mark.parametrize(
    ("spec", "is_fixed"),
    [
        (EvictionSpec(), False),
        (EvictionSpec(hh_size=3), False),
        (EvictionSpec(hh_size=3, recent_size=4), True),
        (EvictionSpec("smooth", recent_size=4), False),
        (EvictionSpec("smooth", hh_size=3, recent_size=4), True),
        (EvictionSpec("local", recent_size=4), True),
        (EvictionSpec("sink", recent_size=4), True),
        (EvictionSpec("sink", sink_size=4), False),
        (EvictionSpec("full"), False),
        (EvictionSpec("lru", hh_size=3, recent_size=4), True),
    ],
    ids=spec_id,
)
def test_sizes_that_depend_on_no_length(spec: EvictionSpec, is_fixed: bool) -> None:
    assert spec.has_fixed_sizes == is_fixed
    if is_fixed and not spec.problems():
        assert spec.sizes(100) == spec.sizes(200)


# --- parameters ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h2o", {}),
        ("smooth", {}),
        ("h2o:decay=0.5", {"decay": 0.5}),
        ("smooth:decay=1", {"decay": 1.0}),
        ("smooth:pooled=5,decay=0.98", {"decay": 0.98, "pooled": 5}),
        ("smooth: age_power = 0 , pooled = 1", {"pooled": 1, "age_power": 0.0}),
    ],
)
def test_parameters_are_read_in_the_order_of_the_fields(text: str, expected: dict[str, Any]) -> None:
    spec = EvictionSpec(text)
    assert spec.problems() == [] and list(spec.parameters.items()) == list(expected.items())
    assert spec.name == text.split(":")[0]
    rule = spec.rule(100)
    assert type(rule) is load(spec.name) and (rule.heavy, rule.recent) == (10, 10)
    assert {name: getattr(rule, name) for name in expected} == expected


def test_what_is_not_given_has_its_default() -> None:
    assert EvictionSpec("smooth:pooled=5").rule(100) == Smooth(10, 10, pooled=5)
    assert EvictionSpec("h2o").rule(100) == H2O(10, 10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lru:decay=0.5", ["'lru'", "h2o, full, local, sink, smooth", "--eviction help"]),
        ("smooth:dcay=0.5", ["smooth", "'dcay'", "decay, pooled, age_power", "--eviction help"]),
        ("smooth:decay=fast", ["smooth: decay is 'fast'", "a number of at least 0 and at most 1"]),
        ("smooth:decay=nan", ["smooth: decay is 'nan'"]),
        ("smooth:decay=1.5", ["smooth: decay is '1.5'", "at most 1"]),
        ("smooth:decay=", ["smooth: decay is ''"]),
        ("smooth:pooled=3.0", ["smooth: pooled is '3.0'", "a whole number"]),
        ("smooth:pooled=4", ["smooth: pooled is 4", "an odd number of at least 1"]),
        ("smooth:pooled=-1", ["smooth: pooled is -1", "at least 1"]),
        ("smooth:age_power=-0.1", ["smooth: age_power is '-0.1'", "at least 0"]),
        ("smooth:decay", ["smooth: 'decay' is no parameter with a value", "decay=0.98"]),
        ("smooth:", ["smooth: '' is no parameter", "decay=0.98"]),
        ("smooth:pooled=3,pooled=5", ["smooth: pooled is given twice", "leave one"]),
        ("full:decay=0.5", ["full: 'decay=0.5'", "no parameters", "leave it out"]),
        ("sink:decay=0.5", ["sink: 'decay=0.5'", "no parameters"]),
        ("h2o:heavy=3", ["h2o: 'heavy' is unknown", "known parameters: decay"]),
    ],
)
def test_each_mistake_in_parameters_is_one_sentence(text: str, words: list[str]) -> None:
    (problem,) = EvictionSpec(text).problems()
    assert problem.startswith("--eviction ") and all(word in problem for word in words), problem


def test_all_mistakes_in_parameters_are_named_at_once() -> None:
    assert len(EvictionSpec("smooth:decay=2,pooled=2,speed=2").problems()) == 3


def smooth_parameters() -> st.SearchStrategy[dict[str, Any]]:
    shares = st.floats(0, 1)
    return st.fixed_dictionaries(
        {}, optional={"decay": shares, "pooled": st.integers(0, 499).map(lambda n: 2 * n + 1), "age_power": shares}
    )


@given(smooth_parameters())
def test_what_is_written_comes_back(values: dict[str, Any]) -> None:
    text = ",".join(f"{name}={value!r}" for name, value in values.items())
    if values:
        assert read_parameters("smooth", text) == values


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for spec in (EvictionSpec(text), EvictionSpec(f"smooth:{text}")):
        problems = spec.problems()
        assert all(problem.startswith("--eviction ") and "\n" not in repr(problem) for problem in problems)
        assert problems or spec.rule(60).slots <= 60


# --- what is known of policies ---


def test_every_policy_is_described_in_a_line_with_its_parameters() -> None:
    lines = descriptions().splitlines()
    assert [line.split()[0] for line in lines] == list(HOMES)
    for line, name in zip(lines, HOMES, strict=True):
        assert (load(name).__doc__ or "").splitlines()[0] in line
    assert lines[0].endswith("Parameters: decay=1.0.")
    assert lines[-1].endswith("Parameters: decay=0.98, pooled=3, age_power=0.1.")
    assert all(line.endswith("No parameters.") for line in lines[1:4])


@dataclass(frozen=True)
class Newest(H2O):
    """The newest of every pair.

    More is not shown.
    """

    pairs: int = 2
    shift: float = setting(0.5, "real", "where a pair begins", most=1)
    wraps: bool = False
    name = "newest"


def test_a_new_policy_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("newest")
    module.Newest = Newest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "newest", module)
    monkeypatch.setattr(registry, "HOMES", {"newest": "newest:Newest"})
    assert load("newest") is Newest
    line = "The newest of every pair. Parameters: decay=1.0, pairs=2, shift=0.5, wraps=False."
    assert descriptions() == f"newest  {line}"
    assert read_parameters("newest", "wraps=TRUE,pairs=9") == {"pairs": 9, "wraps": True}
    with pytest.raises(UsageError) as caught:
        read_parameters("newest", "pairs=a,shift=2,wraps=1")
    assert len(caught.value.problems) == 3


def test_what_does_not_add_up_attention_has_nothing_that_fades() -> None:
    assert parameters(EvictionRule) == {} and list(parameters(H2O)) == ["decay"]


@pytest.mark.parametrize("name", HOMES)
def test_regions_are_sized_by_fields_that_there_are(name: str) -> None:
    rule = load(name)
    known = {field.name for field in dataclasses.fields(EvictionSpec)}
    assert {*rule.heavy_by, *rule.recent_by} <= known and rule.name == name
