"""Attention that is made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_h2o.evaluation.plain import LayerAttention


def weights_of(*heads: Sequence[Sequence[float]]) -> Tensor:
    """[1, heads, n, n] from the rows of each head, whose missing entries, behind the query, are 0."""
    n = len(heads[0])
    return torch.tensor([[[[*row, *[0.0] * (n - len(row))] for row in head] for head in heads]])


def attention_of(logits: Tensor, prompt_len: int) -> LayerAttention:
    """Attention with given logits, [heads, n, n]: every key is a direction of its own."""
    keys = torch.eye(logits.shape[-1]).expand(1, *logits.shape)
    return LayerAttention(0, prompt_len, logits[None], keys)
