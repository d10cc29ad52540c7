"""Which KV entries stay: one small class per policy.

A policy is a rule about scores. The buffer keeps, beside the `recent` newest entries, the `heavy` entries with the
highest scores, so a policy says only what score an entry starts with and whether attention adds to it. Higher is kept.

H2O: Zhang et al. 2023, arXiv 2306.14048, section 4. Sinks: StreamingLLM, Xiao et al. 2023, arXiv 2309.17453.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class EvictionRule:
    """Sizes of the two regions of the KV buffer, in entries per row and head, and the rule that fills them.

    Attributes:
        heavy: slots for entries chosen by score; 0 or more.
        recent: slots for the newest entries, the current one included; at least 1.
        accumulates: whether attention weights are added to scores. Where not, prefill need not sum them.
        decay: what a score is multiplied with in each step before the step's weight is added.
    """

    heavy: int
    recent: int
    decay: float = 1.0
    name: ClassVar[str]
    accumulates: ClassVar[bool] = False

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        """Scores of entries that have just been computed.

        Args:
            positions: [rows, n] true positions (real tokens before each); negative for pads.
            attention_sums: [rows, heads, n] attention each entry has received so far, float32; None for an entry that
                has not been attended to, or where the rule does not accumulate.
        Returns: float32, broadcastable to [rows, heads, n].
        """
        if attention_sums is not None:
            return attention_sums
        return torch.zeros(positions.shape[0], 1, positions.shape[1], device=positions.device)


class H2O(EvictionRule):
    """Heavy hitters by accumulated attention, plus the most recent entries."""

    name = "h2o"
    accumulates = True


class Full(EvictionRule):
    """Keeps everything: the ring is as long as the whole sequence, so that nothing ever leaves it."""

    name = "full"


class Local(EvictionRule):
    """Only the most recent entries."""

    name = "local"


class Sink(EvictionRule):
    """The first `heavy` real tokens of each row, plus the most recent entries."""

    name = "sink"

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        scores = super().initial_scores(positions, None)
        is_sink = (positions >= 0) & (positions < self.heavy)
        return scores.masked_fill(is_sink[:, None], math.inf)


def choose_heavy(scores: Tensor, heavy: int) -> Tensor:
    """Indices of the `heavy` highest scores, ties to the lower index, in ascending order, empty entries last.

    Args:
        scores: [rows, heads, n] float32; -inf marks an entry that does not exist.
        heavy: how many to choose; at most n.
    Returns: [rows, heads, heavy] int64.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :heavy]
    is_empty = scores.gather(-1, order).isneginf()
    place = order + is_empty * scores.shape[-1]
    return order.gather(-1, place.argsort(dim=-1))


RULES: dict[str, type[EvictionRule]] = {rule.name: rule for rule in (H2O, Full, Local, Sink)}
