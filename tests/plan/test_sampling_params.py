"""How tokens are to be chosen: a sentence for every mistake."""

from __future__ import annotations

from typing import Any

import pytest

from flexgen_h2o import SamplingParams
from flexgen_h2o.plan import sampling


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "--gen-len is 0; it must be at least 1"),
        ({"temperature": -0.5}, "--temperature is -0.5"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"seed": 2**63}, f"--seed is {2**63}"),
        ({"stop": ("a", "")}, "--stop is empty"),
        ({"stop": "\udcff"}, "--stop is no text"),
    ],
    ids=str,
)
def test_each_mistake_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    (problem,) = SamplingParams(**settings).problems()
    assert words in problem


def test_all_mistakes_are_named_at_once() -> None:
    assert len(SamplingParams(0, temperature=-1, top_k=-1, top_p=2).problems()) == 4


def test_a_single_stop_and_lists_are_taken_as_they_are_meant() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("end",), (1, 2)) and params.problems() == []


def test_the_public_name_is_this_class() -> None:
    assert SamplingParams is sampling.SamplingParams
