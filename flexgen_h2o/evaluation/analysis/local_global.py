"""Do the tokens so far tell which entries the whole text will look at? (H2O, section 4.1: equally well.)"""

from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.plain import LayerAttention
from flexgen_h2o.evaluation.plain_policies import Constant
from flexgen_h2o.evaluation.statistics import perplexity, perplexity_change
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O

STEPS = 8  # at which the two are compared
EQUAL = 0.02  # of perplexity


class Global(Constant):
    """H2O by the attention that an entry receives from the whole text, what is still to come included."""

    name = "h2o, global statistics"

    def first_scores(self, attention: LayerAttention, scores: Tensor) -> None:
        prompt_len, columns = attention.prompt_len, scores.shape[-1]
        scores[..., :prompt_len] = attention.prompt_sums()
        scores += attention.weights(prompt_len, columns).sum(dim=2)


def heavy_overlap(weights: Tensor, column: int, heavy: int) -> float:
    """How many heavy hitters up to a column are so by the tokens up to it, and by the whole text: a share of `heavy`.

    Args:
        weights: [rows, heads, n, n], a query in each row.
        heavy: how many there are by either; at most column + 1.
    """
    local = weights[:, :, : column + 1, : column + 1].sum(dim=2)
    whole = weights[:, :, :, : column + 1].sum(dim=2)
    sets = [
        torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, scores.topk(heavy, dim=2).indices.cpu(), True)
        for scores in (local, whole)
    ]
    return float((sets[0] & sets[1]).sum() / sets[0].sum())


def analyse(subject: Subject) -> Result:
    """Overlap of both sets by layer and column, and what either costs in perplexity."""
    heavy = max(1, subject.entries // 2)
    columns = torch.linspace(subject.prompt_len, subject.length - 1, STEPS).long().tolist()
    overlaps = torch.zeros(subject.layers, STEPS, dtype=torch.float64)
    for reading in subject.readings():
        weights = reading.weights()
        found = torch.tensor([heavy_overlap(weights, column, heavy) for column in columns])
        overlaps[reading.layer] += reading.share * found
    sizes = (subject.entries // 2, subject.entries - subject.entries // 2)
    full, local, whole = (
        subject.judge.score_all(policy, subject.windows).nll
        for policy in (Full(0, subject.length), H2O(*sizes), Global(*sizes))
    )
    change = perplexity_change(local, whole)
    return {
        "heavy": heavy,
        "columns": columns,
        "overlap": overlaps.tolist(),
        "by_chance": [heavy / (column + 1) for column in columns],
        "perplexity": {
            name: perplexity(nll).mean for name, nll in {"full": full, "local": local, "global": whole}.items()
        },
        "local_above_global": change.mean,
        "local_above_global_stderr": change.stderr,
    }


def finding(result: Result) -> Finding:
    found = result["perplexity"]
    chance = sum(result["by_chance"]) / len(result["by_chance"])
    change, error = result["local_above_global"], result["local_above_global_stderr"]
    rows = [
        Row(
            f"of {result['heavy']} heavy hitters, those that both statistics name, by layer (by chance)",
            f"{by_layer(sum(overlap) / len(overlap) for overlap in result['overlap'])} ({chance:.0%})",
        ),
        Row("perplexity, full cache", f"{found['full']:.1f}"),
        Row("perplexity, h2o by local statistics", f"{found['local']:.1f}", "equally effective, in a figure"),
        Row("perplexity, h2o by global statistics", f"{found['global']:.1f}"),
    ]
    return Finding(
        "Local statistics are as good as global ones",
        "heavy hitters by the attention of the tokens so far are as effective as with that of future tokens"
        " (section 4.1, figure 2d)",
        rows,
        abs(change) < EQUAL,
        f"perplexity by local statistics is {change:+.1%} ± {error:.1%} from that by global ones; 2 % either way would"
        " do",
    )


def draw(axes: Any, result: Result) -> None:
    """Overlap by column, a line for each layer."""
    for number, overlap in enumerate(result["overlap"]):
        axes.plot(result["columns"], overlap, label=f"layer {number}")
    axes.plot(result["columns"], result["by_chance"], color="black", linestyle="--", label="by chance")
    axes.set(xlabel="column", ylabel="heavy hitters that both name", ylim=(0, 1))
    axes.legend(fontsize="small")
