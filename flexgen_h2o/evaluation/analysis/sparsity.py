"""How sparse attention is, by layer (H2O, section 3.1: over 95 % in almost all layers of OPT)."""

from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.subject import Result, Subject

THRESHOLD = 0.01  # of the row's maximum, as in the paper
SPARSE = 0.95
FIRST_QUERY = 16  # before it hardly anything but the first token can be looked at


def sparse_share(weights: Tensor) -> Tensor:
    """Share of the entries a token may look at whose weight is below 1 % of the largest that it gives.

    Args:
        weights: [rows, heads, n, n], a query in each row, 0 for columns behind it.
    Returns: [heads] float64.
    """
    rows, _, n, _ = weights.shape
    visible = torch.ones(n, n, dtype=torch.bool, device=weights.device).tril()
    below = (weights < THRESHOLD * weights.amax(dim=-1, keepdim=True)) & visible
    return below.sum(dim=(0, 2, 3)).double().cpu() / (rows * n * (n + 1) / 2)


def first_token_weight(weights: Tensor) -> Tensor:
    """The weight on the first token, the mean over the queries from the seventeenth on: [heads] float64."""
    return weights[:, :, FIRST_QUERY:, 0].double().mean(dim=(0, 2)).cpu()


def analyse(subject: Subject) -> Result:
    """Sparsity and the weight on the first token, by layer and head."""
    heads = subject.llm.config.num_attention_heads
    sparse, first = torch.zeros(2, subject.layers, heads, dtype=torch.float64)
    for reading in subject.readings():
        weights = reading.weights()
        sparse[reading.layer] += reading.share * sparse_share(weights)
        first[reading.layer] += reading.share * first_token_weight(weights)
    layers = [
        {"sparse": float(by_head.mean()), "sparse_by_head": by_head.tolist(), "first_token": float(on_first.mean())}
        for by_head, on_first in zip(sparse, first, strict=True)
    ]
    return {"threshold": THRESHOLD, "layers": layers}


def finding(result: Result) -> Finding:
    layers = result["layers"]
    sparse = sum(layer["sparse"] > SPARSE for layer in layers)
    return Finding(
        "Attention is sparse",
        "over 95 % of the weights are below 1 % of their row's maximum, in almost all layers (section 3.1, OPT)",
        [
            Row("below 1 % of the maximum, by layer", by_layer(layer["sparse"] for layer in layers), "> 95 % in most"),
            Row("weight on the first token, by layer", by_layer(layer["first_token"] for layer in layers)),
        ],
        sparse >= 0.8 * len(layers),
        f"{sparse} of {len(layers)} layers are sparser than 95 %; four in five would do",
    )


def draw(axes: Any, result: Result) -> None:
    """Bars by layer, and the paper's mark."""
    axes.bar(range(len(result["layers"])), [layer["sparse"] for layer in result["layers"]])
    axes.axhline(SPARSE, color="black", linestyle="--")
    axes.set(xlabel="layer", ylabel="share below 1 % of the maximum", ylim=(0, 1))
