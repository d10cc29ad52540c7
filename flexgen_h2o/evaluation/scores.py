"""How well the tokens of texts were predicted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ContinuationScores:
    """How well each token after the prompt was predicted.

    Attributes:
        nll: [documents, tokens] negative log-likelihood in nats, float32.
        correct: [documents, tokens] whether it was the most likely token.
        agrees: [documents, tokens] whether the most likely token was that of the reference; None without one.
        kl: [documents, tokens] divergence in nats, float32, of the prediction from the reference's; None without one.
    """

    nll: Tensor
    correct: Tensor
    agrees: Tensor | None = None
    kl: Tensor | None = None

    @property
    def perplexity(self) -> float:
        return float(self.nll.double().mean().exp())


def join(parts: Sequence[ContinuationScores]) -> ContinuationScores:
    """The scores of several batches of documents as one; all with a reference, or none."""

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(found) if found else None

    return ContinuationScores(
        torch.cat([part.nll for part in parts]),
        torch.cat([part.correct for part in parts]),
        joined([part.agrees for part in parts]),
        joined([part.kl for part in parts]),
    )
