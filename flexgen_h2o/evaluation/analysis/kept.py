"""Where the entries lie that H2O keeps, and how they change while a text goes on."""

from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.plain import LayerAttention, PlainPolicy, walk
from flexgen_h2o.evaluation.plain_policies import PlainH2O

STEP_BINS, COLUMN_BINS = 16, 64
EARLY = 0.1  # of the prompt


def kept_entries(attention: LayerAttention, policy: PlainPolicy) -> Tensor:
    """What a policy keeps: bool [steps, rows, heads, columns], by token after the prompt."""
    rows, heads, columns, _ = attention.keys.shape
    kept = torch.zeros(columns - attention.prompt_len, rows, heads, columns, dtype=torch.bool)
    for step, (column, allowed, _) in enumerate(walk(attention, policy)):
        kept[step, :, :, : column + 1] = allowed
    return kept


def heat_map(kept: Tensor, step_bins: int, column_bins: int) -> Tensor:
    """How often the entries of a stretch of columns are kept in a stretch of steps.

    Args:
        kept: bool [steps, rows, heads, columns].
    Returns: [at most step_bins, at most column_bins] float64, shares of 1.
    """
    share = kept.double().mean(dim=(1, 2))
    by_step = torch.stack([part.mean(dim=0) for part in share.tensor_split(min(step_bins, len(share)))])
    parts = by_step.tensor_split(min(column_bins, share.shape[1]), dim=1)
    return torch.stack([part.mean(dim=1) for part in parts], dim=1)


def heavy_only(kept: Tensor, prompt_len: int, recent: int) -> Tensor:
    """The kept entries that are no longer recent ones: bool of the same shape.

    Args:
        kept: bool [steps, rows, heads, columns], of a policy that always keeps the `recent` newest.
    """
    newest = torch.arange(prompt_len, prompt_len + len(kept))[:, None]
    left = torch.arange(kept.shape[-1]) <= newest - recent
    return kept & left[:, None, None]


def analyse(subject: Subject) -> Result:
    """Heat maps by layer, on attention in which everything is kept, and what becomes of the first heavy hitters."""
    heavy, recent = subject.entries // 2, subject.entries - subject.entries // 2
    layers: list[Result] = [{"map": 0.0, "early": 0.0, "stayed": 0.0} for _ in range(subject.layers)]
    for reading in subject.readings():
        kept = kept_entries(reading.attention, PlainH2O(heavy, recent))
        chosen = heavy_only(kept, subject.prompt_len, recent)
        share, layer = reading.share, layers[reading.layer]
        layer["map"] = layer["map"] + share * heat_map(kept, STEP_BINS, COLUMN_BINS)
        layer["early"] += share * early_share(chosen, round(EARLY * subject.prompt_len))
        layer["stayed"] += share * stayed_share(chosen)
    return {
        "heavy": heavy,
        "recent": recent,
        "layers": [{**layer, "map": [[round(x, 4) for x in row] for row in layer["map"].tolist()]} for layer in layers],
    }


def early_share(heavy: Tensor, columns: int) -> float:
    """Which share of the heavy entries, bool [steps, rows, heads, columns], lies in the first columns of the text."""
    return float(heavy[..., :columns].sum() / heavy.sum().clamp(min=1))


def stayed_share(heavy: Tensor) -> float:
    """Which share of the first step's heavy entries, bool [steps, rows, heads, columns], is kept to the last step."""
    return float((heavy[0] & heavy[-1]).sum() / heavy[0].sum().clamp(min=1))


def finding(result: Result) -> Finding:
    layers = result["layers"]
    changed = sum(layer["stayed"] < 1 for layer in layers)
    return Finding(
        "Which entries are heavy differs by layer, and changes",
        "every layer and head keeps entries of its own, and what is kept is decided anew at every step (section 4.1,"
        " appendix C.9)",
        [
            Row(
                f"of {result['heavy']} heavy entries, in the first tenth of the prompt, by layer",
                by_layer(layer["early"] for layer in layers),
            ),
            Row("of those that the prompt chose, kept to the end", by_layer(layer["stayed"] for layer in layers)),
        ],
        changed == len(layers),
        f"in {changed} of {len(layers)} layers some heavy entries are replaced by later ones; it had to be all",
    )


def draw(axes: Any, result: Result) -> None:
    """The layers' heat maps, one below the other."""
    rows = [row for layer in result["layers"] for row in layer["map"]]
    axes.imshow(rows, aspect="auto", vmin=0, vmax=1, cmap="magma", interpolation="nearest")
    per_layer = len(rows) // len(result["layers"])
    axes.set_yticks([per_layer * (number + 0.5) for number in range(len(result["layers"]))])
    axes.set_yticklabels([f"layer {number}" for number in range(len(result["layers"]))])
    axes.set(xlabel="column of the text", ylabel="steps, downwards", xticks=[], title="kept entries")
