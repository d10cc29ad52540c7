"""Heavy hitters among the neurons of the MLP blocks (H2O, appendix C.10).

A neuron, one output of the first of the two layers, is active for a token where the activation function leaves more
than 0 of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.plain import PlainModel
from flexgen_h2o.evaluation.plain_policies import TopK
from flexgen_h2o.evaluation.scoring import plain_model
from flexgen_h2o.evaluation.statistics import perplexity
from flexgen_h2o.kernels.matrices.layout import Matrix
from flexgen_h2o.models.base import Parameters
from flexgen_h2o.models.registry import facts_of

HEAVY = 0.2  # of the tokens: a neuron that is active for more is a heavy hitter, as in the paper
NEARLY_ALL, RARELY = 0.99, 0.05  # of the tokens
TOP = 0.05  # of the neurons
SEED = 20230614
# Of what, and the paper's.
PERPLEXITIES = {
    "all": ("all neurons", "19.32 (GPT-2)"),
    "without_heavy": ("without those active for over 20 %", "31.78 (GPT-2)"),
    "without_random": ("without as many others", ""),
}


class Between:
    """A matrix whose inputs pass through a function before they are multiplied.

    Args:
        change: [rows, in] -> the same shape.
    """

    def __init__(self, matrix: Matrix, change: Callable[[Tensor], Tensor]):
        self.shape = matrix.shape
        self._matrix = matrix
        self._change = change

    def product(self, x: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return self._matrix.product(self._change(x), bias, output)

    def rows(self, ids: Tensor) -> Tensor:
        return self._matrix.rows(ids)

    def dense(self) -> Tensor:
        return self._matrix.dense()


def with_neurons(parameters: Parameters, second_matrix: str, change: Callable[[Tensor], Tensor]) -> Parameters:
    """A layer in whose MLP the neurons, [tokens, intermediate_size], pass through a function before that matrix."""
    matrices = {**parameters.matrices, second_matrix: Between(parameters.matrices[second_matrix], change)}
    return Parameters(parameters.tensors, matrices)


def activated_frequency(subject: Subject, documents: Tensor) -> Tensor:
    """For which share of the documents' tokens each neuron is active: [layers, intermediate_size] float64."""
    active = torch.zeros(subject.layers, subject.llm.config.intermediate_size, dtype=torch.float64)

    def count(layer: int, neurons: Tensor) -> Tensor:
        active[layer] += (neurons > 0).sum(dim=0).double().cpu()
        return neurons

    matrix = facts_of(subject.llm.config.family).second_mlp_matrix

    def watched(layer: int, parameters: Parameters) -> Parameters:
        return with_neurons(parameters, matrix, lambda neurons: count(layer, neurons))

    model = plain_model(subject.llm, watched)
    for batch in documents.split(subject.judge.rows):
        model.prefill(batch)
    return active / documents.numel()


def described(frequency: Tensor) -> Result:
    """How unevenly a layer's neurons, [intermediate_size] shares of tokens, are active."""
    ordered = frequency.sort(descending=True).values
    top = max(1, round(TOP * len(ordered)))
    return {
        "mean": float(ordered.mean()),
        "nearly_always": float((ordered >= NEARLY_ALL).double().mean()),
        "heavy": float((ordered > HEAVY).double().mean()),
        "rarely": float((ordered < RARELY).double().mean()),
        "top_share": float(ordered[:top].sum() / ordered.sum().clamp(min=1e-12)),
        "curve": [round(value, 4) for value in ordered[:: max(1, len(ordered) // 128)].tolist()],
    }


def overlap(a: Tensor, b: Tensor, share: float) -> float:
    """How many of the `share` most active neurons are so in both, of [intermediate_size] each: a share of them."""
    count = max(1, round(share * len(a)))
    first, second = (set(frequency.topk(count).indices.tolist()) for frequency in (a, b))
    return len(first & second) / count


def analyse(subject: Subject) -> Result:
    """How often neurons are active, by layer, and in how far the same ones in both halves of the documents.

    And perplexity without every neuron that is active for more than 20 % of the tokens, and without as many others.
    """
    halves = subject.windows.tensor_split(2)
    frequencies = [activated_frequency(subject, half) for half in halves]
    whole = sum(len(half) * found for half, found in zip(halves, frequencies, strict=True)) / len(subject.windows)
    assert isinstance(whole, Tensor)
    heavy = whole > HEAVY
    kept = {"all": torch.ones_like(heavy), "without_heavy": ~heavy, "without_random": ~as_many(heavy)}
    return {
        "layers": [
            {**described(of_layer), "overlap": overlap(first, second, TOP)}
            for of_layer, first, second in zip(whole, *frequencies, strict=True)
        ],
        "perplexity": {name: perplexity_with(subject, neurons) for name, neurons in kept.items()},
    }


def as_many(chosen: Tensor) -> Tensor:
    """Random neurons, as many of each layer as are chosen: bool [layers, intermediate_size]."""
    numbers = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(SEED))
    places = numbers.argsort(dim=1).argsort(dim=1)
    return places < chosen.sum(dim=1, keepdim=True)


def perplexity_with(subject: Subject, kept: Tensor) -> float:
    """Perplexity after the prompts, which too are read with the kept neurons alone: bool [layers, neurons]."""
    masks = kept.to(subject.llm.device, subject.llm.dtype)
    matrix = facts_of(subject.llm.config.family).second_mlp_matrix

    def masked(layer: int, parameters: Parameters) -> Parameters:
        return with_neurons(parameters, matrix, lambda neurons: neurons * masks[layer])

    model = plain_model(subject.llm, masked)
    parts = [_nll(model, batch, subject.prompt_len) for batch in subject.windows.split(subject.judge.rows)]
    return perplexity(torch.cat(parts)).mean


def _nll(model: PlainModel, documents: Tensor, prompt_len: int) -> Tensor:
    """Negative log-likelihood of what follows the prompts, nothing evicted: [documents, tokens] float32."""
    everything = TopK(documents.shape[1])
    logits = model.logits(model.prefill(documents[:, :prompt_len]), documents[:, prompt_len:-1], everything)
    following = documents[:, prompt_len:, None].to(logits.device)
    return -logits.log_softmax(dim=-1).gather(2, following).squeeze(2).cpu()


def finding(result: Result) -> Finding:
    layers, found = result["layers"], result["perplexity"]
    uneven = sum(layer["rarely"] > 0.5 and layer["nearly_always"] > 0 for layer in layers)
    rows = [
        Row(
            "neurons active for 99 % of the tokens, by layer",
            by_layer(layer["nearly_always"] for layer in layers),
            "a few",
        ),
        Row("for over 20 %", by_layer(layer["heavy"] for layer in layers)),
        Row("for under 5 %", by_layer(layer["rarely"] for layer in layers), "most"),
        Row("what the most active 5 % have of all activity", by_layer(layer["top_share"] for layer in layers)),
        Row(
            "of the most active 5 %, those that are so in both halves of the documents",
            by_layer(layer["overlap"] for layer in layers),
            "significant overlap between data sets",
        ),
        *(
            Row(f"perplexity, {PERPLEXITIES[name][0]}", f"{value:.1f}", PERPLEXITIES[name][1])
            for name, value in found.items()
        ),
    ]
    return Finding(
        "Heavy hitters among neurons",
        "the frequency with which neurons are active follows a power law: a small number is active for nearly all"
        " tokens, most are rarely (appendix C.10, OPT-6.7B); they are much the same for other texts, and without them"
        " perplexity rises",
        rows,
        uneven == len(layers) and found["without_heavy"] > 1.1 * found["all"],
        f"in {uneven} of {len(layers)} layers some neurons are active for 99 % of the tokens and most for"
        " under 5 %, which had to be all; and perplexity without the heavy ones had to rise by more than 10 %",
    )


def draw(axes: Any, result: Result) -> None:
    """Frequencies of neurons by rank, a line for each layer."""
    for number, layer in enumerate(result["layers"]):
        shares = [rank / len(layer["curve"]) for rank in range(len(layer["curve"]))]
        axes.plot(shares, layer["curve"], label=f"layer {number}")
    axes.set(xlabel="neurons, the most active first (share)", ylabel="share of tokens for which active", ylim=(0, 1))
    axes.legend(fontsize="small")
