"""Which KV entries stay: one small class per policy.

A policy is a rule about scores. The buffer keeps, beside the `recent` newest entries, the `heavy` entries with the
highest scores, so a policy says only what score an entry starts with and how attention changes it. Higher is kept.

H2O: Zhang et al. 2023, arXiv 2306.14048, section 4. Sinks: StreamingLLM, Xiao et al. 2023, arXiv 2309.17453. Patterns:
Sparse Transformer, Child et al. 2019, arXiv 1904.10509. Forgetting: A2SF, Jo and Shin 2024, arXiv 2407.20485. The last
query only: TOVA, Oren et al. 2024, arXiv 2401.06104. An observation window: SnapKV, Li et al. 2024, arXiv 2404.14469.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

# More tokens than any text has, so that a position minus this is negative, and float32 still holds it exactly.
FAR = 2**23


@dataclass(frozen=True)
class EvictionRule:
    """Sizes of the two regions of the KV buffer, in entries per row and head, and the rule that fills them.

    Attributes:
        heavy: slots for entries chosen by score; 0 or more.
        recent: slots for the newest entries, the current one included; at least 1.
        accumulates: whether attention weights are added to scores. Where not, prefill need not sum them.
        decay: what a score is multiplied with in each step before the step's weight is added.
    """

    heavy: int
    recent: int
    decay: float = 1.0
    name: ClassVar[str]
    accumulates: ClassVar[bool] = False

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    def query_weights(self, n: int) -> Tensor | None:
        """How much each of a prompt's `n` columns counts as a query in the sums of attention; None if all count alike.

        Returns: [n] float32, 0 or more; the last column is the prompt's last token.
        """
        return None

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        """Scores of entries that have just been computed.

        Args:
            positions: [rows, n] true positions (real tokens before each); negative for pads.
            attention_sums: [rows, heads, n] attention each entry has received so far, float32; None for an entry that
                has not been attended to, or where the rule does not accumulate.
        Returns: float32, broadcastable to [rows, heads, n].
        """
        if attention_sums is not None:
            return attention_sums
        return torch.zeros(positions.shape[0], 1, positions.shape[1], device=positions.device)


class H2O(EvictionRule):
    """Heavy hitters by accumulated attention, plus the most recent entries."""

    name = "h2o"
    accumulates = True


class Full(EvictionRule):
    """Keeps everything: the ring is as long as the whole sequence, so that nothing ever leaves it."""

    name = "full"


class Local(EvictionRule):
    """Only the most recent entries."""

    name = "local"


class Sink(EvictionRule):
    """The first `heavy` real tokens of each row, plus the most recent entries."""

    name = "sink"

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        scores = super().initial_scores(positions, None)
        is_sink = (positions >= 0) & (positions < self.heavy)
        return scores.masked_fill(is_sink[:, None], math.inf)


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

    decay: float = 0.98
    pooled: int = 3
    age_power: float = 0.1
    name = "smooth"

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        scores = super().initial_scores(positions, attention_sums)
        if attention_sums is None:
            return scores
        seen_by = positions[:, -1:] + 1 - positions  # [rows, n], the entry's own query among them
        return _pooled(scores / seen_by[:, None].float() ** self.age_power, self.pooled)


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

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        return _pooled(super().initial_scores(positions, attention_sums), self.pooled)


class Pattern(EvictionRule):
    """Tokens at positions that are known beforehand, plus the most recent entries.

    What the pattern leaves free of the heavy region goes to the most recent of the other entries; or, where a
    subclass accumulates attention, to heavy hitters.
    """

    def has(self, positions: Tensor) -> Tensor:
        """Whether positions (0 or more) are in the pattern, bool of the same shape."""
        raise NotImplementedError

    def initial_scores(self, positions: Tensor, attention_sums: Tensor | None) -> Tensor:
        scores = super().initial_scores(positions, attention_sums)
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


def _pooled(scores: Tensor, columns: int) -> Tensor:
    """Averages over `columns` neighbours of [rows, heads, n]. A missing one counts as 0, as a pad does."""
    return F.avg_pool1d(scores, columns, stride=1, padding=columns // 2)


def choose_heavy(scores: Tensor, heavy: int) -> Tensor:
    """Indices of the `heavy` highest scores, ties to the lower index, in ascending order, empty entries last.

    Args:
        scores: [rows, heads, n] float32; -inf marks an entry that does not exist.
        heavy: how many to choose; at most n.
    Returns: [rows, heads, heavy] int64.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :heavy]
    is_empty = scores.gather(-1, order).isneginf()
    place = order + is_empty * scores.shape[-1]
    return order.gather(-1, place.argsort(dim=-1))


RULES: dict[str, type[EvictionRule]] = {rule.name: rule for rule in (H2O, Full, Local, Sink, Smooth)}
