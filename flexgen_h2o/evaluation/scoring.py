"""Scoring texts through the evicting cache, token by token.

A model's likelihood of a text is usually computed in one pass, in which nothing is ever evicted. Here only the prompt
is computed in one pass; what follows is fed a token at a time, as in generation, so that eviction acts on it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.engine import Engine, PromptBlock


@dataclass(frozen=True)
class ContinuationScores:
    """How well each token after the prompt was predicted.

    Attributes:
        nll: [documents, tokens] negative log-likelihood in nats, float32.
        correct: [documents, tokens] whether it was the most likely token.
    """

    nll: Tensor
    correct: Tensor

    @property
    def perplexity(self) -> float:
        return float(self.nll.double().mean().exp())


def score_continuations(engine: Engine, documents: Tensor, prompt_len: int) -> ContinuationScores:
    """Scores all tokens from column `prompt_len` on.

    Args:
        engine: with at least as many rows as there are documents, and room for their length.
        documents: [documents, length] int64, all of one length.
        prompt_len: tokens computed in prefill.
    """
    scorer = _Scorer(documents[:, prompt_len:])
    prompts = PromptBlock(documents[:, :prompt_len], torch.zeros(len(documents), dtype=torch.int64))
    engine.run(prompts, documents.shape[1] - prompt_len, scorer)
    return ContinuationScores(scorer.nll, scorer.correct)


class _Scorer:
    """A TokenChooser that goes on with the given text and notes how likely it was."""

    def __init__(self, continuations: Tensor):
        self._continuations = continuations
        self.nll = torch.zeros(continuations.shape)
        self.correct = torch.zeros(continuations.shape, dtype=torch.bool)

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        target = self._continuations[rows, step].to(logits.device)
        log_probabilities = logits.log_softmax(dim=-1)
        self.nll[rows, step] = -log_probabilities.gather(1, target[:, None]).squeeze(1).cpu()
        self.correct[rows, step] = (logits.argmax(dim=-1) == target).cpu()
        return target

    def finished(self) -> bool:
        return False
