"""Heavy hitters whose scores are smoothed. This package's own."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.basics.settings import borrowed, setting
from flexgen_h2o.kvcache.eviction.base import Entries
from flexgen_h2o.kvcache.eviction.h2o import H2O


@dataclass(frozen=True)
class Smooth(H2O):
    """Heavy hitters by attention that is smoothed over neighbours and over time, plus the most recent entries.

    A prompt's entry scores what it and the tokens beside it have received on average, since a token is seldom needed
    without them; and a little less the longer it has been there to be looked at. In decode the past fades, so that what
    the text has turned to can replace what a long prompt has looked at.

    Attributes:
        decay, pooled, age_power: chosen on other documents than those of the published table.
        pooled: columns, an odd number, over which a prompt's sums are averaged.
        age_power: power of the number of queries that have seen an entry by which its sum is divided; 1 is their mean.
    """

    decay: float = borrowed(H2O, "decay", 0.98)
    pooled: int = setting(3, "whole", "columns over which a prompt's sums are averaged", least=1, most=999, is_odd=True)
    age_power: float = setting(0.1, "real", "how much less an entry counts that was there longer", least=0, most=1)
    name = "smooth"

    def initial_scores(self, entries: Entries) -> Tensor:
        scores = super().initial_scores(entries)
        if entries.attention_sums is None:
            return scores
        seen_by = entries.positions[:, -1:] + 1 - entries.positions  # [rows, n], the entry's own query among them
        return pooled(scores / seen_by[:, None].float() ** self.age_power, self.pooled)


def pooled(scores: Tensor, columns: int) -> Tensor:
    """Averages over `columns` neighbours of [rows, heads, n]. A missing one counts as 0, as a pad does."""
    return F.avg_pool1d(scores, columns, stride=1, padding=columns // 2)
