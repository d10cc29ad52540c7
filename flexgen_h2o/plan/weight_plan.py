"""Bytes of weights by tier, and of the buffers that they are read into, once whole tensors have their homes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.model_shape import OUTER, ModelShape, full_name
from flexgen_h2o.plan.placement import TIERS, Shares, Tier, WeightHomes, place_weights, reachable, small_first


@dataclass(frozen=True)
class WeightForm:
    """How a model's weights are kept."""

    config: ModelShape
    itemsize: int
    compressed: bool

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """A parameter at home: what has two dimensions may be in 4-bit groups along the last."""
        if self.compressed and len(shape) == 2:
            return shape[0] * entry_bytes(shape[1])
        return prod(shape) * self.itemsize


@dataclass(frozen=True)
class PlacedWeights:
    """Bytes by tier of all layers' parameters, and of those outside the layers; and of the read buffers."""

    layers: Mapping[Tier, float]
    outer: Mapping[Tier, float]
    buffers: float


@lru_cache(maxsize=4096)
def place(form: WeightForm, shares: Shares, layer_buffers: int, joint: bool) -> PlacedWeights:
    """Where weights come to lie (plan/placement.py), in bytes.

    Args:
        layer_buffers: on the device, for pages that compute cannot reach at home.
        joint: whether gpu and cpu are one memory.
    """
    config, homes = form.config, place_weights(form.config, shares)
    layers = range(config.num_hidden_layers)
    in_reach = reachable(joint)
    # One buffer for what lies outside the layers; the others take turns.
    turns = [layers[first::layer_buffers] for first in range(layer_buffers)]
    buffers = _buffer(form, homes, [OUTER], in_reach)
    buffers += sum(_buffer(form, homes, turn, in_reach) for turn in turns)
    return PlacedWeights(_by_home(form, homes, layers), _by_home(form, homes, [OUTER]), buffers)


def _by_home(form: WeightForm, homes: WeightHomes, pages: Sequence[int]) -> dict[Tier, float]:
    found: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
    sizes = {name: form.nbytes(shape) for name, shape in form.config.page_shapes(pages[0]).items()} if pages else {}
    for page in pages:
        for name, nbytes in sizes.items():
            tier = homes[full_name(page, name)]
            found[tier] += whole_pages(nbytes) if tier == "disk" else nbytes
    return found


def _buffer(form: WeightForm, homes: WeightHomes, pages: Sequence[int], in_reach: Collection[Tier]) -> float:
    """From the first to the last of what some of the pages that use the buffer lacks, in the order on disk."""
    if not pages:
        return 0.0
    sizes = {each.name: whole_pages(form.nbytes(each.shape)) for each in small_first(form.config.page(pages[0]))}
    order = list(sizes)
    away = [order.index(name) for name in order if any(homes[full_name(page, name)] not in in_reach for page in pages)]
    return float(sum(sizes[name] for name in order[away[0] : away[-1] + 1])) if away else 0.0
