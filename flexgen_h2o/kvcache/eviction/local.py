"""A sliding window."""

from flexgen_h2o.kvcache.eviction.base import EvictionRule


class Local(EvictionRule):
    """Only the most recent entries."""

    name = "local"
    heavy_by = ()
