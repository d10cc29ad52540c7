"""Policies on the plain path (module plain): what is no rule about scores, and bounds on what any rule could reach.

Top-k: Gupta et al. 2021, arXiv 2106.06899; with heavy hitters, and the statistics of the future: Zhang et al. 2023,
arXiv 2306.14048, sections 3 and 5. A pyramid of budgets: PyramidKV, Cai et al. 2024, arXiv 2406.02069.
"""

import torch
from torch import Tensor

from flexgen_h2o.evaluation.plain import LayerAttention, PlainPolicy


class PlainH2O(PlainPolicy):
    """H2O: what has left the recent entries stays while its score is among the `heavy` highest.

    The score is the attention that an entry has received; subclasses make it something else.

    Args:
        heavy, recent: entries per row and head.
    """

    def __init__(self, heavy: int, recent: int):
        self.heavy = heavy
        self.recent = recent

    def begin(self, attention: LayerAttention) -> None:
        rows, heads, columns, _ = attention.keys.shape
        prompt_len = attention.prompt_len
        self._slots = self.heavy_of(attention.layer)
        self._scores = torch.zeros(rows, heads, columns, device=attention.keys.device)
        self.first_scores(attention, self._scores)
        left = max(0, prompt_len - self.recent)
        order = self.scores(prompt_len)[..., :left].sort(dim=-1, descending=True, stable=True).indices
        # Columns of the heavy entries, [rows, heads, at most the slots], lowest first as in the buffer.
        self._heavy = order[..., : self._slots].sort(dim=-1).values

    def allowed(self, column: int, logits: Tensor) -> Tensor:
        leaving = column - self.recent
        if leaving >= 0 and self._slots:
            self._leave(leaving, self.scores(column))
        mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        mask.scatter_(2, self._heavy, True)
        mask[..., max(0, leaving + 1) :] = True
        return mask

    def _leave(self, leaving: int, scores: Tensor) -> None:
        """The entry of column `leaving` is recent no longer."""
        newcomer = torch.full((*self._heavy.shape[:2], 1), leaving, device=scores.device)
        if self._heavy.shape[-1] < self._slots:
            self._heavy = torch.cat((self._heavy, newcomer), dim=-1)
            return
        lowest = scores.gather(2, self._heavy).min(dim=-1, keepdim=True)
        wins = scores[..., leaving : leaving + 1] > lowest.values
        loser = lowest.indices
        self._heavy = self._heavy.scatter(2, loser, torch.where(wins, newcomer, self._heavy.gather(2, loser)))

    def observe(self, column: int, weights: Tensor) -> None:
        self._scores[..., : column + 1] += weights

    def heavy_of(self, layer: int) -> int:
        """Heavy entries in a layer."""
        return self.heavy

    def first_scores(self, attention: LayerAttention, scores: Tensor) -> None:
        """Fills the scores [rows, heads, columns], zeros, as they are after the prompt."""
        scores[..., : attention.prompt_len] = attention.prompt_sums()

    def scores(self, columns: int) -> Tensor:
        """The scores of the first `columns` columns, all that the text has so far."""
        return self._scores[..., :columns]


class Mean(PlainH2O):
    """The attention that an entry has received on average, from all tokens since its own."""

    name = "mean"

    def scores(self, columns: int) -> Tensor:
        received = super().scores(columns)
        return received / torch.arange(columns, 0, -1, device=received.device)


class Constant(PlainH2O):
    """Scores that attention does not change."""

    def observe(self, column: int, weights: Tensor) -> None:
        pass


class Random(Constant):
    """Any of the entries, each as likely as the others, in every layer and head by itself."""

    name = "random"
    SEED = 20230614

    def first_scores(self, attention: LayerAttention, scores: Tensor) -> None:
        generator = torch.Generator().manual_seed(self.SEED + attention.layer)
        scores.copy_(torch.rand(scores.shape, generator=generator))


class Oracle(Constant):
    """The attention that an entry would receive from now on, if everything were kept. No cache can know it."""

    name = "oracle"

    def first_scores(self, attention: LayerAttention, scores: Tensor) -> None:
        self._prompt_len = attention.prompt_len
        weights = attention.weights(attention.prompt_len, scores.shape[-1])
        # By column of the query: what comes from it and from all after it, [rows, heads, queries, columns].
        self._to_come = weights.flip(2).cumsum(dim=2).flip(2)

    def scores(self, columns: int) -> Tensor:
        return self._to_come[:, :, columns - self._prompt_len, :columns]


class Pyramid(PlainH2O):
    """H2O with more heavy entries in the lower layers, and fewer in the upper ones; as many in all.

    Args:
        layers: of the model.
        slope: what the first layer has more, and the last less, as a share of `heavy`.
    """

    name = "pyramid"

    def __init__(self, heavy: int, recent: int, layers: int, slope: float = 0.5):
        super().__init__(heavy, recent)
        self.layers = layers
        self.slope = slope

    def heavy_of(self, layer: int) -> int:
        # Cut a total that grows evenly, so that the layers' shares add up to it whatever is rounded.
        return self._up_to(layer + 1) - self._up_to(layer)

    def _up_to(self, layers: int) -> int:
        """Heavy entries in the first `layers` layers."""
        more_below = layers * (self.layers - layers) / max(1, self.layers - 1)
        return round(self.heavy * (layers + self.slope * more_below))


class TopK(PlainPolicy):
    """The `entries` entries that the query itself likes best, chosen anew for every token from all that there ever was.

    It saves attention, not memory.
    """

    name = "topk"

    def __init__(self, entries: int):
        self.entries = entries

    def begin(self, attention: LayerAttention) -> None:
        pass

    def allowed(self, column: int, logits: Tensor) -> Tensor:
        return _highest(logits, self.entries)


class TopKHeavy(PlainPolicy):
    """The `heavy` entries that have received the most attention, and of the others those that the query likes best.

    Chosen anew for every token from all that there ever was.
    """

    name = "topk+h2o"

    def __init__(self, heavy: int, others: int):
        self.heavy = heavy
        self.others = others

    def begin(self, attention: LayerAttention) -> None:
        rows, heads, columns, _ = attention.keys.shape
        self._received = torch.zeros(rows, heads, columns, device=attention.keys.device)
        self._received[..., : attention.prompt_len] = attention.prompt_sums()

    def allowed(self, column: int, logits: Tensor) -> Tensor:
        heavy = _highest(self._received[..., : column + 1], self.heavy)
        return heavy | _highest(logits.masked_fill(heavy, -torch.inf), self.others)

    def observe(self, column: int, weights: Tensor) -> None:
        self._received[..., : column + 1] += weights


def _highest(values: Tensor, count: int) -> Tensor:
    """Whether each of [rows, heads, n] is among the `count` highest of its head, bool."""
    indices = values.topk(min(count, values.shape[-1]), dim=-1).indices
    return torch.zeros(values.shape, dtype=torch.bool, device=values.device).scatter_(2, indices, True)
