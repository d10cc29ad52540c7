"""Neurons against transformers' activations, and how diverse texts are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.helpers import PEAKED, TinyOpt, oracle_logits, random_ids
from torch import Tensor

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.analysis.diversity import analyse, distinct, self_bleu
from flexgen_h2o.evaluation.analysis.mlp import activated_frequency, as_many, described, overlap, perplexity_with
from flexgen_h2o.evaluation.analysis.subject import Subject
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.kvcache.eviction.full import Full

PROMPT_LEN, LENGTH = 12, 20


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny("pre_norm", std=PEAKED)


@pytest.fixture(scope="module")
def subject(peaked: TinyOpt) -> Subject:
    llm = LLM(str(peaked.folder), dtype="float32", gpu_batch_size=2)
    windows = torch.tensor(random_ids(peaked.config, [LENGTH] * 3))
    return Subject(llm, Judge(llm, PROMPT_LEN), windows, 0.5)


@torch.no_grad()
def neurons_by_transformers(model: torch.nn.Module, ids: Tensor) -> list[Tensor]:
    """What the first matrix of each layer's MLP gives: [tokens, ffn_dim]."""
    found: list[Tensor] = []
    layers = model.model.decoder.layers  # type: ignore[union-attr]
    hooks = [layer.fc1.register_forward_hook(lambda _, __, output: found.append(output)) for layer in layers]  # type: ignore[union-attr, operator]
    model(ids)
    for hook in hooks:
        hook.remove()
    return [output.reshape(-1, output.shape[-1]) for output in found]


def test_frequencies_are_those_of_transformers_activations(peaked: TinyOpt, subject: Subject) -> None:
    outputs = neurons_by_transformers(peaked.model, subject.windows)
    expected = torch.stack([(output > 0).double().mean(dim=0) for output in outputs])
    found = activated_frequency(subject, subject.windows)
    assert found.shape == (3, 128) and 0.1 < float(found.mean()) < 0.9
    assert (found - expected).abs().max() < 2 / subject.windows.numel()  # a rounding's sign may differ


def test_perplexity_without_neurons_is_that_of_a_model_without_them(peaked: TinyOpt, subject: Subject) -> None:
    kept = torch.rand(3, 128, generator=torch.Generator().manual_seed(1)) > 0.3
    state = {name: tensor.clone() for name, tensor in peaked.model.state_dict().items()}
    try:
        for layer, mask in enumerate(kept):
            peaked.model.state_dict()[f"model.decoder.layers.{layer}.fc2.weight"][:, ~mask] = 0.0
        rows = [oracle_logits(peaked.model, row[:PROMPT_LEN], row[PROMPT_LEN:-1]) for row in subject.windows.tolist()]
    finally:
        peaked.model.load_state_dict(state)
    logged = torch.stack(rows).double().log_softmax(dim=-1)
    nll = -logged.gather(2, subject.windows[:, PROMPT_LEN:, None])
    assert perplexity_with(subject, kept) == pytest.approx(float(nll.mean().exp()), rel=1e-3)
    everything = perplexity_with(subject, torch.ones_like(kept))
    assert everything == pytest.approx(subject.judge.score_all(Full(0, LENGTH), subject.windows).perplexity, rel=1e-3)
    assert everything != pytest.approx(perplexity_with(subject, kept), rel=1e-2)


def test_uneven_neurons_are_described() -> None:
    frequency = torch.tensor([1.0, 0.04, 0.02, 0.0], dtype=torch.float64)
    found = described(frequency)
    assert (found["nearly_always"], found["heavy"], found["rarely"]) == (0.25, 0.25, 0.75)
    assert found["mean"] == pytest.approx(0.265) and found["top_share"] == pytest.approx(1 / 1.06)
    assert found["curve"] == [1.0, 0.04, 0.02, 0.0]


def test_overlap_is_a_share_of_the_most_active() -> None:
    a, b = torch.tensor([9.0, 8, 1, 2]), torch.tensor([9.0, 1, 8, 2])
    assert overlap(a, b, 0.5) == 0.5 and overlap(a, b, 0.25) == 1 and overlap(a, -a, 0.5) == 0


def test_as_many_others_are_taken_of_each_layer() -> None:
    chosen = torch.zeros(3, 50, dtype=torch.bool)
    chosen[0, :7], chosen[2, :50] = True, True
    random = as_many(chosen)
    assert random.sum(dim=1).tolist() == [7, 0, 50] and not torch.equal(random, chosen)


def test_distinct_n_grams_are_counted_within_each_text() -> None:
    assert distinct([[1, 2, 1, 2]], 1) == 0.5
    assert distinct([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1, 2, 1, 2], [1, 2, 3, 4]], 2) == pytest.approx((2 / 3 + 1) / 2)
    assert distinct([[1]], 2) == 0


def test_self_bleu_is_1_for_one_text_said_again_and_0_for_nothing_in_common() -> None:
    pytest.importorskip("sacrebleu")
    text = "the ship went down in the cold sea"
    assert self_bleu([text, text]) == pytest.approx(1)
    others = ["a b c d e f g h", "i j k l m n o p", "q r s t u v w x"]
    assert self_bleu(others) < 0.1
    # Against all others at once: one copy is enough for a pair, and the third has none.
    assert self_bleu([text, text, others[0]]) == pytest.approx(2 / 3, abs=0.05)


def test_texts_of_every_policy_are_of_one_length() -> None:
    pytest.importorskip("sacrebleu")
    with LLM(dtype="float32", gpu_batch_size=2) as llm:
        windows = torch.randint(10, 4000, (3, 40), generator=torch.Generator().manual_seed(2))
        result = analyse(Subject(llm, Judge(llm, 30), windows, 0.2))
    assert [row["eviction"] for row in result["rows"]] == ["full", "h2o", "local"]
    assert (result["texts"], result["tokens"]) == (3, 10)
    assert all(0 < row["distinct"]["1"] <= 1 and row["example"] for row in result["rows"])
