"""Rules about scores that are there to compare with: the engine carries them out, but `run` does not offer them.

Patterns: Sparse Transformer, Child et al. 2019, arXiv 1904.10509. Forgetting: A2SF, Jo and Shin 2024, arXiv 2407.20485.
The last query only: TOVA, Oren et al. 2024, arXiv 2401.06104. An observation window: SnapKV, Li et al. 2024, arXiv
2404.14469.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.kvcache.eviction.base import Entries, EvictionRule
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.smooth import pooled

# More tokens than any text has, so that a position minus this is negative, and float32 still holds it exactly.
FAR = 2**23


@dataclass(frozen=True)
class Forgetting(H2O):
    """A2SF: what was attended to loses a share of its score with every token after it, in the prompt as in decode."""

    decay: float = 0.99
    name = "a2sf"

    def query_weights(self, n: int) -> Tensor | None:
        return torch.tensor(self.decay, dtype=torch.float64).pow(torch.arange(n - 1, -1, -1)).float()


@dataclass(frozen=True)
class LastQuery(Forgetting):
    """TOVA: a score is the weight that the last token gave. (TOVA has no recent entries that are safe; here it has.)"""

    decay: float = 0.0
    name = "tova"


@dataclass(frozen=True)
class ObservationWindow(H2O):
    """SnapKV: after the prompt those entries stay that its last tokens have looked at, or whose neighbours they have.

    In decode, which SnapKV leaves open, scores go on as H2O's.

    Attributes:
        window: queries at the end of the prompt that count.
        pooled: columns, an odd number, over which attention is averaged.
    """

    window: int = 32
    pooled: int = 5
    name = "snapkv"

    def query_weights(self, n: int) -> Tensor | None:
        return (torch.arange(n) >= n - self.window).float()

    def initial_scores(self, entries: Entries) -> Tensor:
        return pooled(super().initial_scores(entries), self.pooled)


class Pattern(EvictionRule):
    """Tokens at positions that are known beforehand, plus the most recent entries.

    What the pattern leaves free of the heavy region goes to the most recent of the other entries; or, where a
    subclass accumulates attention, to heavy hitters.
    """

    def has(self, positions: Tensor) -> Tensor:
        """Whether positions (0 or more) are in the pattern, bool of the same shape."""
        raise NotImplementedError

    def initial_scores(self, entries: Entries) -> Tensor:
        scores, positions = super().initial_scores(entries), entries.positions
        if not self.accumulates:
            scores = (positions - FAR).float()[:, None]
        return scores.masked_fill(self.has(positions.clamp(min=0))[:, None], math.inf)


@dataclass(frozen=True)
class Strided(Pattern):
    """The last of every `stride` tokens.

    In a Sparse Transformer the stride is counted back from the query; what is evicted cannot come back, so here it is
    counted from the start.
    """

    stride: int = 32
    name = "strided"

    def has(self, positions: Tensor) -> Tensor:
        return positions % self.stride == self.stride - 1


class StridedHeavy(Strided):
    """The last of every `stride` tokens, and heavy hitters."""

    name = "strided+h2o"
    accumulates = True


@dataclass(frozen=True)
class Fixed(Pattern):
    """The last `summary` tokens of every block of `block` tokens."""

    block: int = 128
    summary: int = 8
    name = "fixed"

    def has(self, positions: Tensor) -> Tensor:
        return positions % self.block >= self.block - self.summary


class FixedHeavy(Fixed):
    """The last `summary` tokens of every block of `block` tokens, and heavy hitters."""

    name = "fixed+h2o"
    accumulates = True
