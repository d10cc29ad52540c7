"""How likely continuations are after their contexts, of any lengths, scored token by token through the evicting cache.

The cache of a request is sized by its own context, so that what is found does not depend on which others there are. A
context's last token is decoded with what follows it: were it part of prefill, which sees everything, the first token of
every answer would be that of the full cache, and a one-token answer would show nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.engine.block import pad_prompts
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.evaluation.policies import POLICIES, Budget
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.spec import DEFAULT_SINKS
from flexgen_h2o.llm import LLM

LEAST_ENTRIES = DEFAULT_SINKS + 2  # of any context, however short, so that every policy has recent ones


@dataclass(frozen=True)
class Request:
    """Token ids of a context, at least one, and of what follows it, at least one.

    Attributes:
        measure: tokens of which a budget is a share; None for the context's.
    """

    context: Sequence[int]
    continuation: Sequence[int]
    measure: int | None = None


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation: the sum of its tokens' log-probabilities in nats, and whether each was the most likely."""

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True)
class Eviction:
    """A policy, by name, and the share of a context that it keeps; 1 for the full cache."""

    name: str
    budget: float

    def entries(self, measure: int) -> int:
        """Entries that it keeps of so many tokens."""
        return max(LEAST_ENTRIES, round(self.budget * measure))

    def rule(self, measure: int, longest: int, llm: LLM) -> EvictionRule:
        """The rule for a request.

        Args:
            measure: tokens of which the budget is a share.
            longest: tokens of the longest text of the run, all of which the full cache keeps.
        """
        context = llm.config.max_position_embeddings
        length = longest if self.name == "full" else context  # a pattern must not depend on the other requests
        rule = POLICIES[self.name](Budget(self.entries(measure), length, llm.config.num_hidden_layers))
        assert isinstance(rule, EvictionRule)
        return rule


def make_evictions(names: Sequence[str], budgets: Sequence[float]) -> list[Eviction]:
    """One for each policy and budget; the full cache, which has no budget, is one.

    Raises UsageError for policies that are unknown, or that no cache carries out.
    """
    problems = []
    for name in dict.fromkeys(names):
        if name not in POLICIES:
            problems.append(f"--eviction {name} is unknown; known policies: {', '.join(POLICIES)}")
        elif not isinstance(POLICIES[name](Budget(LEAST_ENTRIES, LEAST_ENTRIES, 1)), EvictionRule):
            problems.append(
                f"--eviction {name} is carried out by no cache, through which tasks are scored; leave it out"
            )
    if problems:
        raise UsageError(problems)
    return [Eviction(name, budget) for name in names for budget in ((1.0,) if name == "full" else budgets)]


class ContinuationNotes:
    """Takes down how likely continuations are. A TokenChooser that goes on with them.

    Args:
        following: what each row is fed, one token after the other; rows may differ in length.
        unscored: how many of them, from the first on, do not count.
        filler: what rows that have ended are fed.
    """

    def __init__(self, following: Sequence[Sequence[int]], unscored: Sequence[int], filler: int):
        lengths = [len(tokens) for tokens in following]
        self.steps = max(lengths)
        self._tokens = torch.full((len(following), self.steps), filler, dtype=torch.int64)
        self._counts = torch.zeros(self._tokens.shape, dtype=torch.bool)
        for row, (tokens, first) in enumerate(zip(following, unscored, strict=True)):
            self._tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            self._counts[row, first : len(tokens)] = True
        self._sums = torch.zeros(len(following), dtype=torch.float64)
        self._greedy = torch.ones(len(following), dtype=torch.bool)

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        rows, at = list(requests), (list(requests), list(steps))
        target = self._tokens[at].to(logits.device)
        counts = self._counts[at]
        found = logits.log_softmax(dim=-1).gather(1, target[:, None]).squeeze(1).double().cpu()
        self._sums[rows] += torch.where(counts, found, 0.0)
        self._greedy[rows] &= ~counts | (logits.argmax(dim=-1) == target).cpu()
        return target

    def finished(self) -> Sequence[int]:
        return ()

    @property
    def likelihoods(self) -> list[Likelihood]:
        """By row."""
        pairs = zip(self._sums.tolist(), self._greedy.tolist(), strict=True)
        return [Likelihood(total, is_greedy) for total, is_greedy in pairs]


def likelihoods(llm: LLM, eviction: Eviction, requests: Sequence[Request]) -> list[Likelihood]:
    """How likely each continuation is, in the order of the requests.

    Args:
        requests: context and continuation of each have at most one token more than the model's context, since the last
            is not fed.
    """
    found: dict[int, Likelihood] = {}
    longest = max((len(request.context) + len(request.continuation) for request in requests), default=0)
    for rule, places in _by_rule(llm, eviction, requests, longest):
        rows = min(llm.policy.block_rows, len(places))
        widest = max(len(_prompt(requests[place])) for place in places)
        engine = llm.load().engine(RunSizes(rule, rows, widest))
        for block in _blocks([requests[place] for place in places], rows, llm.config.max_position_embeddings):
            of_block = [requests[place] for place in places[block]]
            found.update(zip(places[block], _scored(engine, of_block), strict=True))
    return [found[place] for place in range(len(requests))]


def _scored(engine: Engine, requests: Sequence[Request]) -> list[Likelihood]:
    """One block's likelihoods."""
    filler = engine.config.filler_token_id
    following = [_decoded(request) for request in requests]
    unscored = [len(ids) - len(request.continuation) for ids, request in zip(following, requests, strict=True)]
    notes = ContinuationNotes(following, unscored, filler)
    engine.run(pad_prompts([_prompt(request) for request in requests], filler), notes.steps, notes)
    return notes.likelihoods


def _blocks(requests: Sequence[Request], rows: int, context: int) -> Iterator[slice]:
    """Cuts requests into blocks of at most so many rows, none of which is fed past the end of the model's context.

    A row whose continuation has ended is fed on until the others' have.
    """
    start = widest = steps = 0
    for place, request in enumerate(requests):
        prompt, decoded = len(_prompt(request)), len(_decoded(request))
        if place - start == rows or max(widest, prompt) + max(steps, decoded) - 1 > context:
            if place > start:
                yield slice(start, place)
            start, widest, steps = place, 0, 0
        widest, steps = max(widest, prompt), max(steps, decoded)
    yield slice(start, len(requests))


def _prompt(request: Request) -> Sequence[int]:
    """What of the context is computed in prefill: all but its last token, unless that is the only one."""
    return request.context[: max(1, len(request.context) - 1)]


def _decoded(request: Request) -> list[int]:
    """What is fed token by token."""
    return [*request.context[len(_prompt(request)) :], *request.continuation]


def _by_rule(
    llm: LLM, eviction: Eviction, requests: Sequence[Request], longest: int
) -> Iterator[tuple[EvictionRule, list[int]]]:
    """Places of the requests that share a rule, those of like lengths side by side."""
    groups: dict[EvictionRule, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        measure = len(request.context) if request.measure is None else request.measure
        groups[eviction.rule(measure, longest, llm)].append(place)
    for rule, places in groups.items():
        yield rule, sorted(places, key=lambda place: (len(requests[place].context), len(requests[place].continuation)))
