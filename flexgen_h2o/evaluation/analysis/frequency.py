"""Are heavy hitters the frequent tokens? (H2O, section 3.2: scores go with how often words occur together.)"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.accumulated import accumulated_scores
from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.subject import Result, Subject

REACH = 10  # tokens to either side that a token occurs together with
HIGH = 0.5  # a rank correlation that is called high


@dataclass(frozen=True)
class Vocabulary:
    """What is known of each token of the vocabulary, [vocab_size] float64 each.

    Attributes:
        frequency: times that it occurs.
        together: different tokens that have occurred near it.
        scores: attention that all its occurrences have received.
    """

    frequency: Tensor
    together: Tensor
    scores: Tensor


def ranks(values: Tensor) -> Tensor:
    """Ranks of [n], lowest first, ties sharing their mean: [n] float64."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[place]


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, of two [n]. 0 where one of them is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float((x @ x).sqrt() * (y @ y).sqrt())
    return float(x @ y) / norm if norm else 0.0


def occurrences(ids: Tensor, vocab_size: int) -> Tensor:
    """How often each token occurs in [documents, n]: [vocab_size] float64."""
    return torch.bincount(ids.flatten(), minlength=vocab_size).double()


def neighbours(ids: Tensor, vocab_size: int, reach: int) -> Tensor:
    """How many different tokens have occurred within `reach` tokens of each, in [documents, n]: [vocab_size] float64.

    How often a token occurs together with any other is in proportion to how often it occurs at all; the number of
    different ones is not.
    """
    pairs = [
        torch.stack((ids[:, :-distance].flatten(), ids[:, distance:].flatten()))
        for distance in range(1, min(reach, ids.shape[1] - 1) + 1)
    ]
    both = torch.cat([torch.cat(pairs, dim=1), torch.cat(pairs, dim=1).flip(0)], dim=1)
    different = (both[0] * vocab_size + both[1])[both[0] != both[1]].unique()
    return torch.bincount(different // vocab_size, minlength=vocab_size).double()


def scores_by_token(ids: Tensor, scores: Tensor, vocab_size: int) -> Tensor:
    """Attention that each token of the vocabulary has received, the mean over heads, summed over its occurrences.

    Args:
        ids: [rows, n]. scores: [rows, heads, n].
    Returns: [vocab_size] float64.
    """
    total = torch.zeros(vocab_size, dtype=torch.float64)
    return total.index_add_(0, ids.flatten(), scores.double().mean(dim=1).flatten().cpu())


def correlations(vocabulary: Vocabulary) -> Result:
    """Rank correlations over the tokens that occur: of a token's whole score, and of its score per occurrence."""
    seen = vocabulary.frequency > 0
    frequency, together = vocabulary.frequency[seen], vocabulary.together[seen]
    total = vocabulary.scores[seen]
    return {
        "total_frequency": rank_correlation(total, frequency),
        "total_together": rank_correlation(total, together),
        "mean_frequency": rank_correlation(total / frequency, frequency),
        "mean_together": rank_correlation(total / frequency, together),
    }


def analyse(subject: Subject) -> Result:
    """Rank correlations by layer. The leading token, which is in every document, is left out."""
    vocab_size = subject.llm.config.vocab_size
    texts = subject.windows[:, 1:]
    frequency, together = occurrences(texts, vocab_size), neighbours(texts, vocab_size, REACH)
    scores = torch.zeros(subject.layers, vocab_size, dtype=torch.float64)
    for reading in subject.readings():
        received = accumulated_scores(reading.weights())[..., 1:]
        scores[reading.layer] += scores_by_token(reading.ids[:, 1:], received, vocab_size)
    return {
        "reach": REACH,
        "tokens": int((frequency > 0).sum()),
        "layers": [correlations(Vocabulary(frequency, together, of_layer)) for of_layer in scores],
    }


def finding(result: Result) -> Finding:
    layers = result["layers"]
    high = sum(layer["total_together"] > HIGH for layer in layers)
    return Finding(
        "Heavy hitters go with frequent co-occurrence",
        "the accumulated score of a word correlates highly with its co-occurrences in the data (section 3.2, figure"
        " 2b)",
        [
            Row(
                f"rank correlation, by layer, of a token's {score} with {other}",
                by_layer((layer[f"{key}_{kind}"] for layer in layers), ".2f"),
                "high, in a figure" if (key, kind) == ("total", "together") else "",
            )
            for key, score in {"total": "whole score", "mean": "score per occurrence"}.items()
            for kind, other in {"together": "how many others it occurs near", "frequency": "its frequency"}.items()
        ],
        high == len(layers),
        f"whole scores correlate above {HIGH:g} in {high} of {len(layers)} layers; it had to be all. A token that"
        " occurs more often collects more in any case, so scores per occurrence stand beside",
    )


def draw(axes: Any, result: Result) -> None:
    """Bars by layer: whole scores, and scores per occurrence."""
    numbers = range(len(result["layers"]))
    for offset, (key, label) in enumerate({"total_together": "whole score", "mean_together": "per occurrence"}.items()):
        heights = [layer[key] for layer in result["layers"]]
        axes.bar([number + 0.4 * offset - 0.2 for number in numbers], heights, width=0.4, label=label)
    axes.set(xlabel="layer", ylabel="rank correlation with co-occurrence")
    axes.legend(fontsize="small")
