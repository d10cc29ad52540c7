"""Runs of tiny models with their weights, KV and hidden states on any tiers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.engine.assemble import RunSizes, Runtime
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.layout import MatrixLayout
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.tiers import Ledger
from flexgen_h2o.memory.transfer import InlineTransfer, ThreadTransfer, Transfer
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import Percent, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.weights.files import WeightFolder
from support.helpers import Block, TinyOpt, random_forced, random_ids, run_forced

CPU = torch.device("cpu")
STEPS = 6  # forced tokens
FIFTIES = Percent(50, 50, 50, 50, 50, 50)
MIXED = Percent(30, 40, 50, 20, 60, 40)
ON_DISK = Percent(0, 0, 0, 0, 0, 0)
# What is awkward in particular: every tier has some of the weights and of the KV, and none of it divides evenly.
ROUGH = Percent(25, 40, 35, 30, 20, 45)
HOMES = {
    "all_gpu": Percent(),
    "all_cpu": Percent(0, 100, 0, 100, 0, 100),
    "all_disk": ON_DISK,
    "mixed": MIXED,
    "fifties": FIFTIES,
    "hidden_on_cpu": Percent(0, 0, 0, 0, 0, 100),
}
# 40 tokens of prompt and 6 forced ones make 46. The small sizes evict in prefill and in every decode step.
RULES: dict[str, EvictionRule] = {"full": Full(0, 47), "h2o": H2O(4, 4), "local": Local(0, 5), "sink": Sink(4, 3)}


@dataclass(frozen=True)
class Backend:
    """Memories and transfers of a run without an accelerator.

    Attributes:
        joint: gpu and cpu are one memory, as without a GPU; else two, between which bytes are copied.
        attend_at_home: decode attention of KV in host memory runs there.
        make: the transfer; None for the one that goes with the platform.
    """

    joint: bool
    attend_at_home: bool = False
    make: Callable[[], Transfer] | None = None

    def platform(self, offload_dir: Path, budgets: dict[Tier, int | None] | None = None) -> Platform:
        return Platform(CPU, budgets or {}, self.joint, offload_dir, self.make)


def delayed_threads(seed: int = 0, max_delay_s: float = 0.0003) -> ThreadTransfer:
    """Copies on threads, each after a random pause, so that a missing wait is a wrong answer."""
    return ThreadTransfer(max_delay_s, seed)


BACKENDS = {
    "one_memory": Backend(True),
    "inline": Backend(False, make=InlineTransfer),
    "inline_at_home": Backend(False, attend_at_home=True, make=InlineTransfer),
    "threads": Backend(False, make=delayed_threads),
    "threads_at_home": Backend(False, attend_at_home=True, make=functools.partial(delayed_threads, 1)),
}


@dataclass(frozen=True)
class Case:
    """One generation: what is computed, and where everything lives meanwhile.

    Attributes:
        block: how rows are cut, and the prompts' lengths.
        longest: the prompt that buffers are made for; None for the longest of the block.
    """

    tiny: TinyOpt
    block: Block
    rule: EvictionRule
    percent: Percent = field(default_factory=Percent)
    overlap: bool = True
    backend: Backend = BACKENDS["one_memory"]

    @property
    def policy(self) -> Policy:
        at_home = self.backend.attend_at_home
        policy = replace(self.block.policy, percent=self.percent, overlap=self.overlap, cpu_cache_compute=at_home)
        # Not by default: it would depend on the other choices, and then so would the last bits of a product.
        return replace(policy, decode_batch_size=self.block.policy.group_rows)

    @property
    def sizes(self) -> RunSizes:
        return RunSizes(self.rule, len(self.block.lengths), max(self.block.lengths))

    def prompts(self, seed: int = 0) -> list[list[int]]:
        return random_ids(self.tiny.config, self.block.lengths, seed)

    def forced(self, steps: int = STEPS) -> Tensor:
        return random_forced(self.tiny.config, len(self.block.lengths), steps)


def layout_of(tiny: TinyOpt, compressed: bool = False) -> MatrixLayout:
    """How matrices lie in these runs: as they would without a GPU."""
    return best_layout(CPU, torch.float32, tiny.config.matrix_shapes(), compressed)


@contextmanager
def opened(case: Case, folder: Path, budgets: dict[Tier, int | None] | None = None) -> Iterator[Runtime]:
    """A runtime with the case's weights loaded; files of runs and of weights go below `folder`."""
    layout = layout_of(case.tiny, case.policy.compress_weight)
    weight_folder = WeightFolder(folder / "weights" / case.tiny.folder.name / layout.name)
    platform = replace(case.backend.platform(folder / "offload", budgets), matrix_layout=layout)
    with Runtime(case.tiny.config, torch.float32, case.policy, platform, weight_folder) as runtime:
        runtime.load(case.tiny.source(), lambda nbytes: None)
        yield runtime


def case_logits(case: Case, folder: Path, steps: int = STEPS) -> Tensor:
    """Logits of forced decoding: [rows, steps + 1, vocab_size]."""
    with opened(case, folder) as runtime:
        logits = run_forced(runtime.engine(case.sizes), case.prompts(), case.forced(steps))
    assert_all_given_back(runtime, folder)
    return logits


def assert_all_given_back(runtime: Runtime, folder: Path) -> None:
    """No byte is counted any more, no thread is left, and no file of the run."""
    for account in runtime.ledger.accounts.values():
        assert account.in_use == 0 and not any(account.entries.values())
    assert transfer_threads() == []
    assert run_folders(folder / "offload") == []


def transfer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")]


def run_folders(offload_dir: Path) -> list[Path]:
    return sorted(offload_dir.glob("*")) if offload_dir.exists() else []


def largest_lines(ledger: Ledger) -> dict[str, Mapping[str, int]]:
    """What each line has held at most, by tier, but for the size of this process."""
    return {
        tier: {line: size for line, size in account.largest.items() if size and line != Line.BASELINE}
        for tier, account in ledger.accounts.items()
    }


def small_block(**changes: Any) -> Block:
    """Five rows in three units of two, decoded four at a time."""
    return Block(replace(Policy(2, 3, 4), **changes), (9, 2, 14, 5, 7))
