"""Scoring texts through the evicting cache, token by token.

A model's likelihood of a text is usually computed in one pass, in which nothing is ever evicted. Here only the prompt
is computed in one pass; what follows is fed a token at a time, as in generation, so that eviction acts on it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.engine.loop import Engine, PromptBlock
from flexgen_h2o.evaluation.plain import PlainModel, PlainPolicy, PlainPrompt
from flexgen_h2o.evaluation.scores import ContinuationScores, join
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.base import Parameters
from flexgen_h2o.plan.schedule import OUTER


class Notes:
    """Takes down, token by token, how likely a text was. A TokenChooser that goes on with that text.

    Args:
        continuations: [documents, tokens] int64, what follows the prompts.
        reference: [documents, tokens, vocab_size] float32, log-probabilities to compare predictions with.
        keep: whether to keep the log-probabilities, as a reference for others.
    """

    def __init__(self, continuations: Tensor, reference: Tensor | None = None, keep: bool = False):
        self._continuations = continuations
        self._reference = reference
        self._keep = keep
        self._nll = torch.zeros(continuations.shape)
        self._correct = torch.zeros(continuations.shape, dtype=torch.bool)
        self._agrees = torch.zeros(continuations.shape, dtype=torch.bool)
        self._kl = torch.zeros(continuations.shape)
        self.log_probabilities = torch.empty(0)  # [documents, tokens, vocab_size] float32, where they are kept

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        at = (list(requests), list(steps))
        target = self._continuations[at].to(logits.device)
        predicted = logits.log_softmax(dim=-1)
        greedy = logits.argmax(dim=-1)
        self._nll[at] = -predicted.gather(1, target[:, None]).squeeze(1).cpu()
        self._correct[at] = (greedy == target).cpu()
        if self._reference is not None:
            expected = self._reference[at].to(logits.device)
            self._agrees[at] = (greedy == expected.argmax(dim=-1)).cpu()
            self._kl[at] = (expected.exp() * (expected - predicted)).sum(dim=-1).cpu()
        if self._keep:
            if not len(self.log_probabilities):
                self.log_probabilities = torch.empty(*self._continuations.shape, logits.shape[-1])
            self.log_probabilities[at] = predicted.cpu()
        return target

    def finished(self) -> Sequence[int]:
        return ()

    @property
    def scores(self) -> ContinuationScores:
        if self._reference is None:
            return ContinuationScores(self._nll, self._correct)
        return ContinuationScores(self._nll, self._correct, self._agrees, self._kl)


def feed(engine: Engine, documents: Tensor, prompt_len: int, notes: Notes) -> None:
    """Feeds documents through an engine, all tokens from column `prompt_len` on one by one.

    Args:
        engine: with at least as many rows as there are documents, and room for their length.
        documents: [documents, length] int64, all of one length.
        prompt_len: tokens computed in prefill.
    """
    prompts = PromptBlock(documents[:, :prompt_len], torch.zeros(len(documents), dtype=torch.int64))
    engine.run(prompts, documents.shape[1] - prompt_len, notes)


def plain_model(
    llm: LLM, change: Callable[[int, Parameters], Parameters] = lambda layer, parameters: parameters
) -> PlainModel:
    """A model on the plain path; its weights are in memory.

    Args:
        change: what a layer, by its number, has in place of its parameters.
    """
    weights = llm.load().weights
    pages = [change(layer, weights.page(layer)) for layer in range(llm.config.num_hidden_layers)]
    return PlainModel(llm.config, weights.page(OUTER), pages, llm.device)


class Judge:
    """Scores batches of documents under one policy after the other.

    Args:
        llm: whose blocks hold a batch. Its weights are in memory, for policies on the plain path.
    """

    def __init__(self, llm: LLM, prompt_len: int):
        self._llm = llm
        self.prompt_len = prompt_len
        self._plain: PlainModel | None = None
        self._prompt: tuple[Tensor, PlainPrompt] | None = None

    @property
    def rows(self) -> int:
        """Documents of a batch."""
        return self._llm.policy.block_rows

    def score(
        self, policy: EvictionRule | PlainPolicy, documents: Tensor, reference: Tensor | None = None
    ) -> ContinuationScores:
        """Scores a batch of documents, [documents, length] int64, against a reference's log-probabilities."""
        notes = Notes(documents[:, self.prompt_len :], reference)
        self._feed(policy, documents, notes)
        return notes.scores

    def score_all(self, policy: EvictionRule | PlainPolicy, documents: Tensor) -> ContinuationScores:
        """Scores any number of documents, [documents, length] int64, batch by batch."""
        return join([self.score(policy, batch) for batch in documents.split(self.rows)])

    def reference(self, rule: EvictionRule, documents: Tensor) -> tuple[ContinuationScores, Tensor]:
        """Scores of a batch, which agree with themselves, and the log-probabilities to hold others against."""
        notes = Notes(documents[:, self.prompt_len :], keep=True)
        self._feed(rule, documents, notes)
        alone = notes.scores
        same = ContinuationScores(alone.nll, alone.correct, torch.ones_like(alone.correct), torch.zeros_like(alone.nll))
        return same, notes.log_probabilities

    def _feed(self, policy: EvictionRule | PlainPolicy, documents: Tensor, notes: Notes) -> None:
        if isinstance(policy, EvictionRule):
            engine = self._llm.load().engine(RunSizes(policy, len(documents), self.prompt_len))
            feed(engine, documents, self.prompt_len, notes)
            return
        logits = self._plain_model().logits(self._computed(documents), documents[:, self.prompt_len : -1], policy)
        for step in range(logits.shape[1]):
            notes.choose(range(len(documents)), [step] * len(documents), logits[:, step])

    def _plain_model(self) -> PlainModel:
        if self._plain is None:
            self._plain = plain_model(self._llm)
        return self._plain

    def _computed(self, documents: Tensor) -> PlainPrompt:
        """The prompts of a batch, computed once for all policies that follow each other on it."""
        if self._prompt is None or self._prompt[0] is not documents:
            self._prompt = (documents, self._plain_model().prefill(documents[:, : self.prompt_len]))
        return self._prompt[1]
