"""Attention sinks: StreamingLLM, Xiao et al. 2023, arXiv 2309.17453."""

import math
from typing import TYPE_CHECKING

from flexgen_h2o.kvcache.eviction.base import Entries, EvictionRule

if TYPE_CHECKING:
    from torch import Tensor


class Sink(EvictionRule):
    """The first `heavy` real tokens of each row, plus the most recent entries."""

    name = "sink"
    heavy_by = ("sink_size",)

    def initial_scores(self, entries: Entries) -> "Tensor":
        scores = super().initial_scores(entries)
        is_sink = (entries.positions >= 0) & (entries.positions < self.heavy)
        return scores.masked_fill(is_sink[:, None], math.inf)
