"""From percentages to homes: which weight tensor, KV unit and hidden state lives on which tier, as plain data.

Homes are spread evenly, so that every layer has nearly the same bytes to stream. What was achieved is returned beside
what was asked for: weights are whole tensors, KV whole units, so the two differ by at most one of them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from flexgen_h2o.plan.model_shape import ModelShape, ParameterShape, full_name

Tier = Literal["gpu", "cpu", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
Shares = tuple[float, float, float]  # of gpu, cpu and disk; they sum to 1


def reachable(joint: bool) -> frozenset[Tier]:
    """The tiers that compute works on without a copy; with `joint`, gpu and cpu are one memory."""
    return frozenset(("gpu", "cpu")) if joint else frozenset(("gpu",))


@dataclass(frozen=True)
class Percent:
    """FlexGen's six numbers: per cent of weights, cache and hidden states on gpu and cpu; the rest is on disk."""

    weights_gpu: float = 100
    weights_cpu: float = 0
    cache_gpu: float = 100
    cache_cpu: float = 0
    hidden_gpu: float = 100
    hidden_cpu: float = 0

    @property
    def values(self) -> tuple[float, ...]:
        return (
            self.weights_gpu,
            self.weights_cpu,
            self.cache_gpu,
            self.cache_cpu,
            self.hidden_gpu,
            self.hidden_cpu,
        )

    def __str__(self) -> str:
        return " ".join(f"{value:g}" for value in self.values)

    @property
    def weights(self) -> Shares:
        return _shares(self.weights_gpu, self.weights_cpu)

    @property
    def cache(self) -> Shares:
        return _shares(self.cache_gpu, self.cache_cpu)

    @property
    def hidden(self) -> Shares:
        return _shares(self.hidden_gpu, self.hidden_cpu)

    @property
    def disk_shares(self) -> Shares:
        """Shares of weights, cache and hidden states on disk."""
        return self.weights[2], self.cache[2], self.hidden[2]

    def problems(self) -> list[str]:
        """Every mistake, a sentence each; empty if there is none."""
        found = []
        pairs = {
            "weights": (self.weights_gpu, self.weights_cpu),
            "cache": (self.cache_gpu, self.cache_cpu),
            "hidden states": (self.hidden_gpu, self.hidden_cpu),
        }
        for what, pair in pairs.items():
            wrong = [value for value in pair if not 0 <= value <= 100]
            found += [f"--percent has {value:g} for the {what}; each must lie between 0 and 100" for value in wrong]
            if not wrong and sum(pair) > 100:
                found.append(
                    f"--percent puts {pair[0]:g} + {pair[1]:g} per cent of the {what} on gpu and cpu; at most 100"
                )
        return found


def _shares(gpu: float, cpu: float) -> Shares:
    # Rounded: 64.1 + 35.9 leave nothing for the disk, and not a millionth of a millionth of a per cent.
    return gpu / 100, cpu / 100, round(max(0.0, 100 - gpu - cpu), 6) / 100


def spread(count: int, shares: Shares) -> list[Tier]:
    """Homes for `count` equal things, each share within one thing of what was asked, evenly interleaved."""
    on_gpu, on_cpu = spread_counts(count, shares)
    gpu_here = _evenly(on_gpu, count)
    cpu_here = iter(_evenly(on_cpu, count - on_gpu))
    return ["gpu" if here else "cpu" if next(cpu_here) else "disk" for here in gpu_here]


def spread_counts(count: int, shares: Shares) -> tuple[int, int]:
    """How many of `count` equal things go to gpu and to cpu; the rest to disk."""
    on_gpu = round(shares[0] * count)
    return on_gpu, max(on_gpu, round((shares[0] + shares[1]) * count)) - on_gpu


def _evenly(chosen: int, count: int) -> list[bool]:
    """Marks `chosen` of `count` places, as far apart as can be."""
    return [(place + 1) * chosen // count > place * chosen // count for place in range(count)]


WeightHomes = Mapping[str, Tier]


def place_weights(config: ModelShape, shares: Shares) -> WeightHomes:
    """The home of every parameter, by its name relative to the decoder.

    Within a layer the small tensors come first, so that they go to the fastest tier that has any share; then the
    matrices in order. Where a share ends inside a tensor, that tensor goes one way in some layers and the other way in
    the rest, by error diffusion; neighbouring layers differ by at most that one tensor per boundary.
    """
    outer, layer = small_first(config.outer), small_first(config.layer)
    outer_sums, layer_sums = _sums(outer), _sums(layer)
    layers = config.num_hidden_layers
    total = outer_sums[-1] + layers * layer_sums[-1]
    outer_cuts, targets = [], []
    for boundary in (shares[0], shares[0] + shares[1]):
        outer_cuts.append(_nearest_cut(outer_sums, boundary * outer_sums[-1]))
        # What the outer tensors take too much or too little is made up for by all layers alike.
        target = (boundary * total - outer_sums[outer_cuts[-1]]) / layers
        targets.append(min(max(target, 0.0), layer_sums[-1]))
    homes = {each.name: tier for each, tier in zip(outer, _by_cuts(len(outer), *outer_cuts), strict=True)}
    for index, cuts in enumerate(_diffuse(layer_sums, targets, layers)):
        tiers = _by_cuts(len(layer), *cuts)
        homes |= {full_name(index, each.name): tier for each, tier in zip(layer, tiers, strict=True)}
    return homes


def small_first(page: Iterable[ParameterShape]) -> list[ParameterShape]:
    """The order in which a page's parameters fill the tiers, from fast to slow, and lie on disk."""
    return sorted(page, key=lambda parameter: len(parameter.shape))


def _sums(page: Iterable[ParameterShape]) -> list[int]:
    """Elements before each tensor, and in all."""
    return [0, *accumulate(parameter.elements for parameter in page)]


def _nearest_cut(sums: Sequence[int], target: float) -> int:
    return min(range(len(sums)), key=lambda cut: abs(sums[cut] - target))


def _diffuse(sums: Sequence[int], targets: Sequence[float], layers: int) -> Iterator[tuple[int, int]]:
    """For each layer, how many of its tensors lie before each of two boundaries.

    Args:
        sums: elements before each tensor of a layer, and in all.
        targets: where the boundaries should fall, in elements of a layer, ascending.
    """
    lower = [min(bisect_right(sums, target) - 1, len(sums) - 2) for target in targets]
    owed = [0.0, 0.0]  # elements that earlier layers have put too little before each boundary
    for _ in range(layers):
        cuts = [0, 0]
        for side in (0, 1):
            wanted = targets[side] + owed[side]
            # The second boundary never lies before the first, and pays for it in the layers that follow.
            allowed = [cut for cut in (lower[side], lower[side] + 1) if cut >= cuts[0]] or [cuts[0]]
            cuts[side] = min(allowed, key=lambda cut: abs(sums[cut] - wanted))
            owed[side] = wanted - sums[cuts[side]]
        yield cuts[0], cuts[1]


def _by_cuts(count: int, gpu_cut: int, memory_cut: int) -> list[Tier]:
    return ["gpu" if index < gpu_cut else "cpu" if index < memory_cut else "disk" for index in range(count)]


def achieved(sizes: Iterable[tuple[Tier, int]]) -> tuple[float, float]:
    """Per cent of bytes on gpu and on cpu; (100, 0) where there is nothing to place."""
    by_tier = {"gpu": 0, "cpu": 0, "disk": 0}
    for tier, size in sizes:
        by_tier[tier] += size
    total = sum(by_tier.values())
    return (100 * by_tier["gpu"] / total, 100 * by_tier["cpu"] / total) if total else (100.0, 0.0)
