"""H2O: Zhang et al. 2023, arXiv 2306.14048, section 4."""

from flexgen_h2o.kvcache.eviction.base import EvictionRule


class H2O(EvictionRule):
    """Heavy hitters by accumulated attention, plus the most recent entries."""

    name = "h2o"
    accumulates = True
