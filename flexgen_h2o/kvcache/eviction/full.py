"""The full cache, which evicts nothing: what every other policy is held against."""

from flexgen_h2o.kvcache.eviction.base import EvictionRule


class Full(EvictionRule):
    """Keeps everything: the ring is as long as the whole sequence, so that nothing ever leaves it."""

    name = "full"
    heavy_by = ()
    recent_by = ()
