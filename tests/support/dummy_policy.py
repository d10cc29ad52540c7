"""An eviction policy that nobody has proposed: all that adding one takes is this file and a line of registration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from flexgen_h2o.basics.settings import setting
from flexgen_h2o.kvcache.eviction.base import Entries, EvictionRule


@dataclass(frozen=True)
class SmallKeys(EvictionRule):
    """Entries with small keys; deep layers keep more of them than those before.

    Attributes:
        slope: how many more the last layer keeps than the first.
    """

    slope: int = setting(2, "whole", "how many more entries the last layer keeps than the first", least=0)
    name = "small-keys"

    def at_layer(self, layer: int, layers: int) -> EvictionRule:
        more = round(self.slope * (layer / (layers - 1) - 0.5))
        return replace(self, heavy=max(0, self.heavy + more))

    def initial_scores(self, entries: Entries) -> Tensor:
        return -entries.keys.float().norm(dim=-1)
