"""Scores of texts against transformers', which computes them in one pass and without a cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.helpers import PEAKED, TinyOpt, oracle_logits, random_ids
from torch import Tensor

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.heldout import heldout_tokens, text_windows
from flexgen_h2o.evaluation.plain_policies import PlainH2O, TopK
from flexgen_h2o.evaluation.policies import Policy
from flexgen_h2o.evaluation.scores import ContinuationScores, join
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local

PROMPT_LEN, TOKENS, DOCUMENTS = 20, 9, 5
LENGTH = PROMPT_LEN + TOKENS


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny("pre_norm", std=PEAKED)


@pytest.fixture(scope="module")
def documents(peaked: TinyOpt) -> Tensor:
    return torch.tensor(random_ids(peaked.config, [LENGTH] * DOCUMENTS))


@pytest.fixture(scope="module")
def judge(peaked: TinyOpt) -> Judge:
    """Its batches are cut into units of two rows."""
    return Judge(LLM(str(peaked.folder), dtype="float32", gpu_batch_size=2, num_gpu_batches=3), PROMPT_LEN)


def expected_log_probabilities(peaked: TinyOpt, documents: Tensor) -> Tensor:
    """[documents, tokens, vocab_size] by transformers."""
    rows = [oracle_logits(peaked.model, row[:PROMPT_LEN], row[PROMPT_LEN:-1]) for row in documents.tolist()]
    return torch.stack(rows).double().log_softmax(dim=-1)


@pytest.mark.parametrize(
    "policy",
    [Full(0, LENGTH), H2O(20, 20), H2O(4, 28), PlainH2O(20, 20), TopK(40)],
    ids=lambda policy: type(policy).__name__,
)
def test_with_everything_kept_scores_are_those_of_transformers(
    peaked: TinyOpt, judge: Judge, documents: Tensor, policy: Policy
) -> None:
    expected = expected_log_probabilities(peaked, documents)
    targets = documents[:, PROMPT_LEN:, None]
    scores = judge.score(policy, documents)
    assert torch.allclose(scores.nll.double(), -expected.gather(2, targets)[..., 0], rtol=1e-4, atol=1e-4)
    assert torch.equal(scores.correct, expected.argmax(dim=-1) == targets[..., 0])
    assert scores.perplexity == pytest.approx(float((-expected.gather(2, targets)).mean().exp()), rel=1e-4)


def test_the_reference_is_transformers_distribution_and_agrees_with_itself(
    peaked: TinyOpt, judge: Judge, documents: Tensor
) -> None:
    scores, found = judge.reference(Full(0, LENGTH), documents)
    assert torch.allclose(found.double(), expected_log_probabilities(peaked, documents), atol=1e-4)
    assert scores.agrees is not None and scores.agrees.all() and scores.kl is not None and not scores.kl.any()
    again = judge.score(Full(0, LENGTH), documents, found)
    assert torch.equal(again.nll, scores.nll) and again.agrees is not None and again.agrees.all()
    assert again.kl is not None and again.kl.abs().max() < 1e-6


@pytest.mark.parametrize("rule", [H2O(3, 4), Local(0, 5)], ids=str)
def test_agreement_and_divergence_are_those_of_two_distributions(
    judge: Judge, documents: Tensor, rule: EvictionRule
) -> None:
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(DOCUMENTS, TOKENS, 100, generator=generator).log_softmax(dim=-1)
    _, predicted = judge.reference(rule, documents)
    reference[:, ::2] = predicted[:, ::2] + 0.01  # where they agree; a constant, which does not sum to 1
    reference = reference.log_softmax(dim=-1)
    scores = judge.score(rule, documents, reference)
    assert scores.kl is not None and scores.agrees is not None
    kl = torch.nn.functional.kl_div(predicted, reference, reduction="none", log_target=True).sum(dim=-1)
    assert torch.allclose(scores.kl, kl, rtol=1e-4, atol=1e-5)
    assert scores.kl[:, 1::2].min() > 0.05 > 1e-5 > scores.kl[:, ::2].max()
    assert scores.agrees[:, ::2].all() and scores.agrees[:, 1::2].double().mean() < 0.2


def test_eviction_acts_on_scores(judge: Judge, documents: Tensor) -> None:
    """From the second token on: the first comes from the prompt's own pass."""
    full, evicting = (judge.score(rule, documents) for rule in (Full(0, LENGTH), H2O(3, 4)))
    assert torch.equal(full.nll[:, 0], evicting.nll[:, 0])
    assert ((full.nll - evicting.nll)[:, 1:].abs() > 1e-3).double().mean() > 0.9


def test_batches_are_put_together_in_order(judge: Judge, documents: Tensor) -> None:
    _, reference = judge.reference(Full(0, LENGTH), documents)
    whole = judge.score(H2O(3, 4), documents, reference)
    parts = [judge.score(H2O(3, 4), documents[rows], reference[rows]) for rows in (slice(0, 3), slice(3, 5))]
    joined = join(parts)
    assert torch.allclose(joined.nll, whole.nll, atol=1e-5) and torch.equal(joined.correct, whole.correct)
    assert joined.kl is not None and whole.kl is not None and torch.allclose(joined.kl, whole.kl, atol=1e-5)
    assert join([ContinuationScores(parts[0].nll, parts[0].correct)]).kl is None


def test_full_cache_perplexity_of_the_demo_model_is_that_of_transformers() -> None:
    from transformers import OPTForCausalLM

    llm = LLM(dtype="float32", gpu_batch_size=2)
    windows = text_windows(heldout_tokens(), 2, 200, leading_id=2)
    model = OPTForCausalLM.from_pretrained(llm.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(windows).logits[:, 149:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), windows[:, 150:].flatten()).exp()
    judge = Judge(llm, 150)
    for rule in (Full(0, 200), H2O(100, 100)):
        assert judge.score(rule, windows).perplexity == pytest.approx(float(expected), rel=1e-4)
