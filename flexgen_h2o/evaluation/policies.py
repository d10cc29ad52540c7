"""Every policy that can be judged, by name, and how each divides a budget of entries."""

from collections.abc import Callable
from dataclasses import dataclass

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.evaluation.plain import PlainPolicy
from flexgen_h2o.evaluation.plain_policies import Mean, Oracle, Pyramid, Random, TopK, TopKHeavy
from flexgen_h2o.evaluation.score_rules import (
    Fixed,
    FixedHeavy,
    Forgetting,
    LastQuery,
    ObservationWindow,
    Strided,
    StridedHeavy,
)
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.kvcache.eviction.smooth import Smooth
from flexgen_h2o.kvcache.eviction.spec import DEFAULT_SINKS

FIXED_BLOCK = 128


@dataclass(frozen=True)
class Budget:
    """What a policy may keep.

    Attributes:
        entries: per layer, row and head.
        length: tokens of a text, prompt and continuation.
        layers: of the model.
    """

    entries: int
    length: int
    layers: int

    @property
    def halves(self) -> tuple[int, int]:
        """(heavy, recent)."""
        return self.entries // 2, self.entries - self.entries // 2

    @property
    def quarters(self) -> tuple[int, int, int]:
        """(entries in a pattern, heavy, recent), where a pattern shares the heavy half."""
        heavy, recent = self.halves
        return heavy // 2, heavy - heavy // 2, recent

    def stride(self, entries: int) -> int:
        """The smallest with which `entries` entries reach from the start of a text to its recent ones."""
        return (self.length - self.halves[1]) // (entries + 1) + 1

    def block(self, entries: int) -> tuple[int, int]:
        """(tokens of a block, how many of them are kept), where `entries` entries serve the whole text."""
        blocks = -(-self.length // FIXED_BLOCK)
        return FIXED_BLOCK, max(1, entries // blocks)


Policy = EvictionRule | PlainPolicy

POLICIES: dict[str, Callable[[Budget], Policy]] = {
    "full": lambda b: Full(0, b.length),
    "h2o": lambda b: H2O(*b.halves),
    "sink": lambda b: Sink(DEFAULT_SINKS, b.entries - DEFAULT_SINKS),
    "local": lambda b: Local(0, b.entries),
    "smooth": lambda b: Smooth(*b.halves),
    # The newest two: an entry that only its own query has seen has no score to be chosen by, and no text can be
    # followed without the token before.
    "heavy": lambda b: H2O(b.entries - 2, 2),
    "a2sf": lambda b: Forgetting(*b.halves),
    "tova": lambda b: LastQuery(*b.halves),
    "snapkv": lambda b: ObservationWindow(*b.halves),
    "strided": lambda b: Strided(*b.halves, stride=b.stride(b.halves[0])),
    "strided+h2o": lambda b: StridedHeavy(*b.halves, stride=b.stride(b.quarters[0])),
    "fixed": lambda b: Fixed(*b.halves, 1.0, *b.block(b.halves[0])),
    "fixed+h2o": lambda b: FixedHeavy(*b.halves, 1.0, *b.block(b.quarters[0])),
    "random": lambda b: Random(*b.halves),
    "mean": lambda b: Mean(*b.halves),
    "pyramid": lambda b: Pyramid(*b.halves, b.layers),
    "topk": lambda b: TopK(b.entries),
    "topk+h2o": lambda b: TopKHeavy(*b.halves),
    "oracle": lambda b: Oracle(*b.halves),
}


def entries_of(budget: float, prompt_len: int) -> int:
    """Entries that a share of the prompt comes to."""
    return round(budget * prompt_len)


def policy_for(name: str, budget: float, prompt_len: int, length: int, layers: int) -> Policy:
    """A policy that keeps `budget` of the prompt's entries. Raises UsageError if there is none, or it cannot."""
    if name not in POLICIES:
        raise UsageError(f"--eviction {name} is unknown; known policies: {', '.join(POLICIES)}")
    entries = entries_of(budget, prompt_len)
    policy = POLICIES[name](Budget(entries, length, layers))
    if entries < 1 or getattr(policy, "recent", 1) < 1 or getattr(policy, "heavy", 0) < 0:
        raise UsageError(
            f"--budget {budget:g} keeps {entries} of {prompt_len} entries, which leaves no recent one for {name};"
            " give a larger budget"
        )
    return policy
