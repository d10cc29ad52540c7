"""What is lost with the heavy hitters (H2O, section 3.2: without them quality drops drastically)."""

from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.plain import LayerAttention, PlainPolicy
from flexgen_h2o.evaluation.scores import ContinuationScores
from flexgen_h2o.evaluation.statistics import perplexity, perplexity_change
from flexgen_h2o.kvcache.eviction.full import Full

REMOVED = 0.1  # of the prompt's entries
SEED = 20230614


class Without(PlainPolicy):
    """Everything but the `removed` entries of the prompt that have the highest scores, chosen once by layer and head.

    A score is the attention that an entry has received from the prompt; subclasses make it something else.
    """

    name = "without the heavy hitters"

    def __init__(self, removed: int):
        self.removed = removed

    def begin(self, attention: LayerAttention) -> None:
        scores = self.scores(attention)
        self._kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        self._kept.scatter_(2, scores.topk(min(self.removed, scores.shape[2]), dim=2).indices, False)

    def scores(self, attention: LayerAttention) -> Tensor:
        """[rows, heads, prompt_len] float32."""
        return attention.prompt_sums()

    def allowed(self, column: int, logits: Tensor) -> Tensor:
        mask = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        mask[..., : self._kept.shape[2]] = self._kept
        return mask


class WithoutRandom(Without):
    """Everything but as many random entries."""

    name = "without random entries"

    def scores(self, attention: LayerAttention) -> Tensor:
        generator = torch.Generator().manual_seed(SEED + attention.layer)
        rows, heads, _, _ = attention.keys.shape
        return torch.rand(rows, heads, attention.prompt_len, generator=generator).to(attention.keys.device)


class WithoutLight(Without):
    """Everything but the entries that have received the least."""

    name = "without the lightest entries"

    def scores(self, attention: LayerAttention) -> Tensor:
        return -attention.prompt_sums()


class WithoutFirst(Without):
    """Everything but the first token, which many heads rest on."""

    name = "without the first token"

    def __init__(self) -> None:
        super().__init__(1)

    def scores(self, attention: LayerAttention) -> Tensor:
        rows, heads, _, _ = attention.keys.shape
        return -torch.arange(attention.prompt_len, device=attention.keys.device).float().expand(rows, heads, -1)


def analyse(subject: Subject) -> Result:
    """Perplexity after the prompt with everything kept, and without a tenth of the prompt's entries."""
    removed = max(1, round(REMOVED * subject.prompt_len))
    full = subject.judge.score_all(Full(0, subject.length), subject.windows)
    policies = (Without(removed), WithoutRandom(removed), WithoutLight(removed), WithoutFirst())
    rows = [_row("full", 0, full, full)]
    for policy in policies:
        scores = subject.judge.score_all(policy, subject.windows)
        rows.append(_row(policy.name, policy.removed, scores, full))
    return {"rows": rows}


def _row(name: str, removed: int, scores: ContinuationScores, full: ContinuationScores) -> Result:
    found, change = perplexity(scores.nll), perplexity_change(scores.nll, full.nll)
    return {
        "name": name,
        "removed": removed,
        "perplexity": found.mean,
        "change": change.mean,
        "change_stderr": change.stderr,
    }


def finding(result: Result) -> Finding:
    heavy, random = (
        next(row for row in result["rows"] if row["name"] == kind.name) for kind in (Without, WithoutRandom)
    )
    return Finding(
        "Without heavy hitters quality drops",
        "the quality of what is generated drops drastically when the heavy hitters are masked (section 3.2, figure 2c)",
        [
            Row(
                f"perplexity {row['name']} ({row['removed']} entries of a prompt)",
                f"{row['perplexity']:.1f} ({row['change']:+.1%} ± {row['change_stderr']:.1%})",
                "drops drastically, in a figure" if row is heavy else "",
            )
            for row in result["rows"]
        ],
        heavy["change"] - 2 * heavy["change_stderr"] > max(0.1, 3 * random["change"]),
        "without the heavy hitters perplexity had to rise by more than 10 %, two standard errors apart, and by more"
        " than three times what as many random entries cost",
    )


def draw(axes: Any, result: Result) -> None:
    """Bars by what is removed."""
    rows = result["rows"][1:]
    labels = [row["name"].removeprefix("without ") for row in rows]
    axes.barh(labels, [100 * row["change"] for row in rows], xerr=[100 * row["change_stderr"] for row in rows])
    axes.set(xlabel="perplexity above the full cache's (%)", title="removed")
