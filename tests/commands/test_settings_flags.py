"""Flags that are made of dataclasses: each once in a command's help, and values that come back."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o import convert, profile_hardware
from flexgen_h2o.basics.settings import Setting, field_values, setting, settings_of
from flexgen_h2o.commands import run_options, search_options
from flexgen_h2o.commands.flags import Flags, Parser
from flexgen_h2o.commands.settings_flags import add_flags, filled_from, given_values
from flexgen_h2o.evaluation import options as evaluation_options
from flexgen_h2o.machine import platform
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.run_settings import DTYPES
from flexgen_h2o.plan.sampling import SamplingParams


def evaluate_parser() -> argparse.ArgumentParser:
    """That of one of its tasks."""
    (tasks,) = (
        action
        for action in evaluation_options.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parser: argparse.ArgumentParser = tasks.choices["compare"]
    return parser


COMMANDS: dict[str, tuple[Callable[[], argparse.ArgumentParser], tuple[type, ...]]] = {
    "run": (run_options.build_parser, run_options.KINDS),
    "policy_search": (search_options.build_parser, (search_options.SearchFlags,)),
    "convert": (convert.build_parser, (convert.ConvertOptions,)),
    "profile_hardware": (profile_hardware.build_parser, (profile_hardware.ProfileOptions,)),
    "evaluate": (evaluate_parser, (evaluation_options.ModelOptions, evaluation_options.Compression)),
}
CASES = [
    (command, kind, name) for command, (_, kinds) in COMMANDS.items() for kind in kinds for name in settings_of(kind)
]


@pytest.mark.parametrize(("command", "kind", "name"), CASES, ids=str)
def test_every_field_for_people_is_in_help_exactly_once(command: str, kind: type, name: str) -> None:
    parser, known = COMMANDS[command][0](), settings_of(kind)[name]
    text = parser.format_help()
    listed = re.findall(rf"^  (?:-\w \w+, )?{known.flag}(?= |$)", text, re.MULTILINE)
    assert len(listed) == 1
    assert re.sub(r"\s", "", known.help) in re.sub(r"\s", "", text)  # wherever lines are broken


@pytest.mark.parametrize("command", COMMANDS)
def test_no_two_fields_of_a_command_share_a_flag(command: str) -> None:
    flags = [known.flag for kind in COMMANDS[command][1] for known in settings_of(kind).values()]
    assert len(flags) == len(set(flags))


def test_all_flags_of_run_come_from_fields() -> None:
    known = {known.flag for kind in run_options.KINDS for known in settings_of(kind).values()}
    assert set(run_options.build_parser()._option_string_actions) - {"-h", "--help"} == known


def test_topics_of_settings_are_those_that_help_lists() -> None:
    listed = {topic for topics in run_options.GROUPS.values() for topic in topics}
    assert listed == {known.topic for kind in run_options.KINDS for known in settings_of(kind).values()}


def test_every_field_of_a_policy_and_of_sampling_can_be_asked_for() -> None:
    for kind in (Policy, SamplingParams):
        assert list(settings_of(kind)) == [field.name for field in fields(kind)]


def test_precisions_are_those_that_there_are() -> None:
    assert ("auto", *platform.DTYPES) == DTYPES


# --- values ---


@dataclass(frozen=True)
class Everything:
    """A field of every kind."""

    whole: int = setting(1, "whole", "", least=1, most=99)
    real: float = setting(0.0, "real", "")
    ratio: Any = setting(None, "ratio", "")
    switch: bool = setting(False, "switch", "")
    choice: str = setting("a", "choice", "", known=("a", "b"))
    text: str | None = setting(None, "text", "% of it", short="-t")
    percent: Percent | None = setting(None, "percent", "")
    given: bool = setting(False, "given", "")
    wholes: tuple[int, ...] = setting((), "wholes", "", metavar="ID")
    texts: tuple[str, ...] = setting((), "texts", "")
    repeated: tuple[str, ...] = setting((), "repeated", "")
    silent: int = 5


def parsed(*argv: str) -> Flags:
    parser = Parser(allow_abbrev=False)
    add_flags(parser, [Everything])
    return Flags(parser.parse_args(argv))


def test_without_flags_everything_has_its_default() -> None:
    flags = parsed()
    assert given_values(flags, Everything) == {} and flags.problems == []
    assert filled_from(flags, Everything) == Everything()


words = st.text("abc xyz%", min_size=1).map(lambda text: "w" + text)
VALUES: dict[str, st.SearchStrategy[tuple[list[str], Any]]] = {
    "whole": st.integers(1, 99).map(lambda n: ([str(n)], n)),
    "real": st.floats(0, 1e9).map(lambda x: ([repr(x)], x)),
    "ratio": st.fractions(0, 1).map(lambda x: ([str(x)], x)),
    "switch": st.sampled_from([([], True), (["true"], True), (["False"], False)]),
    "choice": st.sampled_from("ab").map(lambda text: ([text], text)),
    "text": words.map(lambda text: ([text], text)),
    "percent": st.lists(st.integers(0, 50), min_size=6, max_size=6).map(lambda n: ([str(x) for x in n], Percent(*n))),
    "given": st.just(([], True)),
    "wholes": st.lists(st.integers(0, 99), min_size=1).map(lambda n: ([str(x) for x in n], tuple(n))),
    "texts": st.lists(words, min_size=1).map(lambda texts: (texts, tuple(texts))),
}


@given(st.fixed_dictionaries({}, optional=VALUES), st.lists(words, max_size=3))
def test_values_that_are_written_come_back(values: dict[str, tuple[list[str], Any]], repeated: list[str]) -> None:
    argv = [word for name, (texts, _) in values.items() for word in (f"--{name}", *texts)]
    argv += [word for text in repeated for word in ("--repeated", text)]
    flags = parsed(*argv)
    expected = {name: value for name, (_, value) in values.items()}
    if repeated:
        expected["repeated"] = tuple(repeated)
    assert given_values(flags, Everything) == expected and flags.problems == []
    assert filled_from(flags, Everything) == Everything(**expected)


def test_every_mistake_is_noted_and_left_out() -> None:
    argv = "--whole 0 --real x --ratio 2 --switch 1 --choice c --percent 1 2 --wholes 1 -1 x --text fine".split()
    flags = parsed(*argv)
    values = given_values(flags, Everything)
    assert values == {"text": "fine", "wholes": (1,)}
    beginnings = ["--whole", "--real", "--ratio", "--switch", "--choice", "--percent", "--wholes", "--wholes"]
    assert [problem.split()[0] for problem in flags.problems] == beginnings


def test_a_short_name_and_a_per_cent_sign_are_taken_as_they_are() -> None:
    assert given_values(parsed("-t", "x"), Everything) == {"text": "x"}
    parser = Parser()
    add_flags(parser, [Everything])
    assert "% of it" in parser.format_help()


def test_only_a_topic_is_added_where_one_is_named() -> None:
    parser = Parser(allow_abbrev=False)
    add_flags(parser, [Policy], "cache")
    assert set(parser._option_string_actions) == {"-h", "--help", "--compress-cache", "--ring-16bit"}


# --- what run makes of them ---


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "gpu_batch_size": st.integers(1, 10**6),
            "num_gpu_batches": st.integers(1, 10**6),
            "overlap": st.booleans(),
            "compress_cache": st.booleans(),
        },
    )
)
def test_fields_of_a_policy_are_given_to_it_and_no_others(values: dict[str, Any]) -> None:
    argv = [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value).lower())]
    options = run_options.read_flags(argv)
    assert options.given_policy == values
    assert Policy(**options.begins_with) == Policy(**values)
    assert {name: options.llm[name] for name in values} == values


def test_what_run_gives_to_the_model_are_settings_of_it() -> None:
    argv = "--device meta --hh-ratio 0.35 --gpu-mem 2 --seed 3 --prompt-len 8 --gen-len 4 --stop x --do-sample".split()
    options = run_options.read_flags(argv)
    assert options.params == SamplingParams(4, do_sample=True, seed=3, stop=("x",))
    expected = {"device": "meta", "hh_ratio": Fraction(35, 100), "gpu_mem": 2.0, "seed": 3, "prompt_len": 8}
    assert expected.items() <= options.llm.items()
    assert field_values(options.model).items() <= options.llm.items()


def test_help_of_a_setting_without_default_says_nothing_of_one() -> None:
    assert Setting("text", "what it is").help == "what it is"
