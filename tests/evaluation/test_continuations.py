"""Likelihoods of continuations of any lengths against transformers' and the slow reference, one request at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.helpers import PEAKED, TinyOpt, oracle_logits, random_ids
from support.reference import ReferenceRule, reference_logits

from flexgen_h2o import LLM
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.evaluation.continuations import (
    LEAST_ENTRIES,
    Eviction,
    Likelihood,
    Request,
    likelihoods,
    make_evictions,
)
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local

LENGTHS = [(40, 3), (1, 4), (2, 1), (40, 1), (17, 6), (63, 2), (40, 5)]  # of context and continuation


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny("pre_norm", std=PEAKED)


@pytest.fixture(scope="module")
def llm(peaked: TinyOpt) -> LLM:
    """Three requests at a time."""
    return LLM(str(peaked.folder), dtype="float32", gpu_batch_size=3)


@pytest.fixture(scope="module")
def requests(peaked: TinyOpt) -> list[Request]:
    texts = random_ids(peaked.config, [sum(lengths) for lengths in LENGTHS])
    return [Request(text[:n], text[n:]) for text, (n, _) in zip(texts, LENGTHS, strict=True)]


def expected(logits: torch.Tensor, request: Request) -> Likelihood:
    """From logits whose last ones are after the context and after each token of the continuation but the last."""
    logged = logits[-len(request.continuation) :].double().log_softmax(dim=-1)
    target = torch.tensor(request.continuation)
    return Likelihood(float(logged.gather(1, target[:, None]).sum()), bool((logged.argmax(dim=1) == target).all()))


def assert_alike(found: list[Likelihood], wanted: list[Likelihood]) -> None:
    assert [one.is_greedy for one in found] == [one.is_greedy for one in wanted]
    assert [one.log_probability for one in found] == pytest.approx([one.log_probability for one in wanted], abs=2e-4)


def test_with_the_full_cache_they_are_transformers(peaked: TinyOpt, llm: LLM, requests: list[Request]) -> None:
    wanted = [expected(oracle_logits(peaked.model, r.context, r.continuation[:-1]), r) for r in requests]
    assert_alike(likelihoods(llm, Eviction("full", 1.0), requests), wanted)


@pytest.mark.parametrize("name", ["h2o", "local", "sink"])
def test_with_eviction_they_are_the_references_with_the_last_token_of_the_context_decoded(
    peaked: TinyOpt, llm: LLM, requests: list[Request], name: str
) -> None:
    eviction, wanted = Eviction(name, 0.25), []
    for request in requests:
        entries = max(6, round(0.25 * len(request.context)))
        heavy = {"h2o": entries // 2, "local": 0, "sink": 4}[name]
        prompt = request.context[:-1] or request.context
        decoded = [*request.context[len(prompt) :], *request.continuation[:-1]]
        rule = ReferenceRule(name, heavy, entries - heavy)
        state = peaked.model.state_dict()
        wanted.append(expected(reference_logits(state, peaked.model.config, prompt, decoded, rule), request))
    found = likelihoods(llm, eviction, requests)
    assert_alike(found, wanted)
    full = likelihoods(llm, Eviction("full", 1.0), requests)
    # Also where one token is the whole answer, and not where all of the context fits.
    differs = [abs(a.log_probability - b.log_probability) > 1e-3 for a, b in zip(found, full, strict=True)]
    assert differs == [True, False, False, True, True, True, True]


def test_a_request_does_not_depend_on_the_others(llm: LLM, requests: list[Request]) -> None:
    for name in ("full", "h2o", "strided", "fixed+h2o"):
        eviction = Eviction(name, 0.3)
        together = likelihoods(llm, eviction, requests)
        alone = [likelihoods(llm, eviction, [request])[0] for request in requests]
        assert_alike(together, alone)
        assert_alike(likelihoods(llm, eviction, requests[::-1]), together[::-1])
    assert likelihoods(llm, Eviction("h2o", 0.3), []) == []


def test_a_continuation_that_is_the_most_likely_is_said_to_be(
    llm: LLM, requests: list[Request], peaked: TinyOpt
) -> None:
    context = list(requests[0].context)
    best = []
    for _ in range(3):
        best.append(int(oracle_logits(peaked.model, context, best)[-1].argmax()))
    other = [*best[:2], (best[2] + 1) % 100]
    found = likelihoods(llm, Eviction("full", 1.0), [Request(context, best), Request(context, other)])
    assert [one.is_greedy for one in found] == [True, False]
    assert found[0].log_probability > found[1].log_probability


def test_a_text_as_long_as_the_context_and_one_token_more_is_scored(peaked: TinyOpt, llm: LLM) -> None:
    """Also beside one that is decoded for longer than there is context left."""
    texts = random_ids(peaked.config, [peaked.config.max_position_embeddings + 1] * 3)
    requests = [Request(text[:n], text[n:]) for text, n in zip(texts, (100, 127, 30), strict=True)]
    wanted = [expected(oracle_logits(peaked.model, r.context, r.continuation[:-1]), r) for r in requests]
    assert_alike(likelihoods(llm, Eviction("full", 1.0), requests), wanted)


def test_a_budget_is_a_share_of_the_context_or_of_what_is_said(llm: LLM) -> None:
    assert Eviction("h2o", 0.2).rule(100, 130, llm) == H2O(10, 10)
    assert Eviction("local", 0.04).rule(300, 330, llm) == Local(0, 12)
    assert Eviction("full", 1.0).rule(100, 130, llm) == Full(0, 130)
    assert Eviction("h2o", 0.04).entries(20) == LEAST_ENTRIES
    long_measure = Request([5], [6, 7, 8], measure=100)
    assert Eviction("h2o", 0.2).entries(long_measure.measure or 0) == 20


def test_policies_without_a_cache_and_unknown_ones_are_refused() -> None:
    assert make_evictions(["full", "h2o"], [0.2, 0.1]) == [
        Eviction("full", 1.0),
        Eviction("h2o", 0.2),
        Eviction("h2o", 0.1),
    ]
    with pytest.raises(UsageError) as refused:
        make_evictions(["topk", "h2o", "best"], [0.2])
    assert len(refused.value.problems) == 2
    assert "topk" in refused.value.problems[0] and "known policies" in refused.value.problems[1]
