"""Bytes of weights by tier, and of the buffers that they are read into, once whole tensors have their homes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.model_config import ModelConfig, Shapes
from flexgen_h2o.plan.placement import TIERS, Shares, Tier, WeightHomes, place_weights, small_first


@dataclass(frozen=True)
class WeightForm:
    """How a model's weights are kept."""

    config: ModelConfig
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
    """Where weights come to lie (placement.py), in bytes.

    Args:
        layer_buffers: on the device, for pages that compute cannot reach at home.
        joint: whether gpu and cpu are one memory.
    """
    config, homes = form.config, place_weights(form.config, shares)
    layer, outer = config.layer_shapes(), config.outer_shapes()
    prefixes = [f"layers.{index}." for index in range(config.num_hidden_layers)]
    reachable: tuple[Tier, ...] = ("gpu", "cpu") if joint else ("gpu",)
    # One buffer for what lies outside the layers; the others take turns.
    turns = [prefixes[first::layer_buffers] for first in range(layer_buffers)]
    buffers = _buffer(form, outer, homes, [""], reachable)
    buffers += sum(_buffer(form, layer, homes, turn, reachable) for turn in turns)
    return PlacedWeights(_by_home(form, layer, homes, prefixes), _by_home(form, outer, homes, [""]), buffers)


def _by_home(form: WeightForm, shapes: Shapes, homes: WeightHomes, prefixes: Sequence[str]) -> dict[Tier, float]:
    found: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
    sizes = {name: form.nbytes(shape) for name, shape in shapes.items()}
    for prefix in prefixes:
        for name, nbytes in sizes.items():
            tier = homes[prefix + name]
            found[tier] += whole_pages(nbytes) if tier == "disk" else nbytes
    return found


def _buffer(
    form: WeightForm, shapes: Shapes, homes: WeightHomes, prefixes: Sequence[str], reachable: Sequence[Tier]
) -> float:
    """From the first to the last of what some page that uses the buffer lacks, in the order on disk."""
    sizes = {name: whole_pages(form.nbytes(shape)) for name, shape in small_first(shapes).items()}
    order = list(sizes)
    away = [order.index(name) for name in order if any(homes[prefix + name] not in reachable for prefix in prefixes)]
    return float(sum(sizes[name] for name in order[away[0] : away[-1] + 1])) if away else 0.0
