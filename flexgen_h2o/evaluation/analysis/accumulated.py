"""How attention is shared out among a text's tokens (H2O, section 3.2: accumulated scores follow a power law)."""

import functools
import operator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.subject import Result, Subject

TOP = 0.05
MORE = 1.5  # times what even attention gives the top 5 %
FITTED = 0.5  # of the ranks; the lower half are mostly the last tokens, at which few have been able to look
DRAWN_RANKS = 64


@dataclass(frozen=True)
class Fit:
    """A straight line through log(score).

    Attributes:
        slope: over log(rank) for a power law (the exponent), over rank for an exponential.
        r2: share of the variance of log(score) that the line explains.
    """

    slope: float
    r2: float


def accumulated_scores(weights: Tensor) -> Tensor:
    """What each token receives from all: [rows, heads, n, n] -> [rows, heads, n]. H2O's score after a prompt."""
    return weights.sum(dim=2)


def score_curve(scores: Tensor) -> Tensor:
    """Scores by rank, highest first, the mean over rows and heads: [rows, heads, n] -> [n] float64."""
    return scores.double().sort(dim=-1, descending=True).values.mean(dim=(0, 1)).cpu()


def power_law(curve: Tensor) -> Fit:
    """The power law nearest to positive scores by rank, [n], by least squares on both logarithms."""
    ranks = torch.arange(1, len(curve) + 1, dtype=torch.float64)
    return _line(ranks.log(), curve.double().log())


def exponential(curve: Tensor) -> Fit:
    """The exponential nearest to positive scores by rank, [n], by least squares on their logarithm."""
    return _line(torch.arange(1, len(curve) + 1, dtype=torch.float64), curve.double().log())


def _line(x: Tensor, y: Tensor) -> Fit:
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    rest = y - slope * x
    return Fit(slope, 1 - float(rest @ rest / (y @ y)) if float(y @ y) else 1.0)


def share_of_top(curve: Tensor, share: float) -> float:
    """What the highest `share` of the scores by rank, [n], have of their sum."""
    return float(curve[: max(1, round(share * len(curve)))].sum() / curve.sum())


def even_scores(n: int) -> Tensor:
    """What n tokens receive where every token looks at all before it alike: [n] float64, in order of position.

    Causal attention alone gives early tokens more; sharing out is to be held against this.
    """
    by_query = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    return by_query.flip(0).cumsum(0).flip(0)


def analyse(subject: Subject) -> Result:
    """The curve of accumulated scores of every layer, with and without the first token, and of even attention."""
    curves = torch.zeros(2, subject.layers, subject.length, dtype=torch.float64)
    for reading in subject.readings():
        scores = accumulated_scores(reading.weights())
        curves[0, reading.layer] += reading.share * score_curve(scores)
        curves[1, reading.layer, :-1] += reading.share * score_curve(scores[..., 1:])
    even = even_scores(subject.length)
    return {
        "layers": [
            {**_described(whole), "without_first": _described(rest[:-1])} for whole, rest in zip(*curves, strict=True)
        ],
        "even": {**_described(even), "without_first": _described(even[1:])},
    }


def _described(curve: Tensor) -> Result:
    ranks = torch.logspace(0, 1, DRAWN_RANKS, base=len(curve), dtype=torch.float64).round().long().unique()
    higher = curve[: max(2, round(FITTED * len(curve)))]
    return {
        "power_law": asdict(power_law(higher)),
        "exponential": asdict(exponential(higher)),
        "top_share": share_of_top(curve, TOP),
        "curve": [[int(rank), float(curve[rank - 1])] for rank in ranks],
    }


def finding(result: Result) -> Finding:
    layers, even = result["layers"], result["even"]
    fits = sum(
        layer["power_law"]["r2"] > layer["exponential"]["r2"] and layer["top_share"] > MORE * even["top_share"]
        for layer in layers
    )

    def shown(form: str, *keys: str) -> str:
        values = [functools.reduce(operator.getitem, keys, found) for found in (*layers, even)]
        return f"{by_layer(values[:-1], form)} ({values[-1]:{form}})"

    return Finding(
        "Accumulated scores follow a power law",
        "the accumulated attention scores of tokens follow a power law, in every layer (section 3.2, figure 2;"
        " appendix C.8, figure 10)",
        [
            Row(
                "R² of a power law, by layer (even attention)",
                shown(".2f", "power_law", "r2"),
                "power law, in a figure",
            ),
            Row("R² of an exponential", shown(".2f", "exponential", "r2")),
            Row("exponent of the power law", shown(".2f", "power_law", "slope")),
            Row("what the top 5 % of tokens receive", shown(".0%", "top_share"), "a small part has most of the value"),
            Row("the same, the first token left out", shown(".0%", "without_first", "top_share")),
        ],
        fits == len(layers),
        f"in {fits} of {len(layers)} layers a power law fits the higher half of the scores better than an exponential,"
        " and the top 5 % of tokens receive at least half as much again as with even attention; it had to be all",
    )


def draw(axes: Any, result: Result) -> None:
    """Scores by rank on two logarithmic axes."""
    for number, layer in enumerate(result["layers"]):
        axes.plot(*zip(*layer["curve"], strict=True), label=f"layer {number}")
    axes.plot(*zip(*result["even"]["curve"], strict=True), color="black", linestyle="--", label="even")
    axes.set(xscale="log", yscale="log", xlabel="rank of the token", ylabel="accumulated score")
    axes.legend(fontsize="small")
