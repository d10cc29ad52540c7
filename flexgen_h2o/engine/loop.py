"""Executes the block schedule: the one loop in which all text is generated."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.engine.block import BlockStart, BlockWork, PromptBlock, RowFault
from flexgen_h2o.engine.rows import FixedRows, RowScheduler
from flexgen_h2o.models.registry import family_of
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import (
    Attend,
    BlockShape,
    Choose,
    Embed,
    EndStep,
    FetchWeights,
    Finish,
    Group,
    LoadCache,
    LoadHidden,
    Operation,
    Phase,
    Project,
    ReleaseWeights,
    StoreCache,
    StoreHidden,
    Zigzag,
    cut_block,
)
from flexgen_h2o.plan.work import PhaseWork, decode_work, prefill_work

if TYPE_CHECKING:  # what an engine is put together from is given to it
    from flexgen_h2o.engine.chooser import TokenChooser
    from flexgen_h2o.engine.hidden import HiddenStore
    from flexgen_h2o.kvcache.cache import KVCache
    from flexgen_h2o.memory.transfer import Transfer
    from flexgen_h2o.memory.workspace import Workspace
    from flexgen_h2o.weights.store import WeightStore

OnStep = Callable[[BlockStart], None]  # told between two steps how far the block has come


def no_step(reached: BlockStart) -> None:
    """The OnStep of whoever does not need to know."""


# The operations that keep compute busy; the others start copies or say that memory is free.
COMPUTATIONS = (Embed, Project, Attend, Finish, Choose)


@dataclass(frozen=True)
class BlockTimes:
    """Measured seconds of one block: prefill up to its first token, then each decode step; and what was done in them.

    Attributes:
        prefill_s: 0 if the block was not begun here.
        work: by phase, "prefill" and "decode".
        faults: by row, of those whose logits have not been finite.
    """

    prefill_s: float
    step_s: list[float]
    work: dict[str, PhaseWork]
    faults: dict[int, RowFault]

    @property
    def decode_s(self) -> float:
        return sum(self.step_s)


class Engine:
    """A model with its KV, for blocks of up to as many rows as the KV was made for.

    Attributes are its parts, which whoever made them closes. There is a workspace for each group in flight.
    """

    def __init__(
        self,
        config: ModelShape,
        policy: Policy,
        weights: "WeightStore",
        kv: "KVCache",
        hidden: "HiddenStore",
        workspaces: "Sequence[Workspace]",
        transfer: "Transfer",
        device: torch.device,
    ):
        self.config = config
        self.family = family_of(config)
        self.policy = policy
        self.weights = weights
        self.kv = kv
        self.hidden = hidden
        self.workspaces = workspaces
        self.transfer = transfer
        self.device = device

    def run(
        self,
        block: PromptBlock,
        gen_len: int,
        chooser: "TokenChooser",
        start: BlockStart | None = None,
        on_step: OnStep = no_step,
    ) -> BlockTimes:
        """Generates up to `gen_len` tokens (at least 1) for each row, as the chooser decides."""
        return self.walk(block, range(0 if start is None else start.step, gen_len), chooser, start, on_step)

    @torch.inference_mode()
    def walk(
        self,
        block: PromptBlock,
        numbers: Sequence[int],
        chooser: "TokenChooser",
        start: BlockStart | None = None,
        on_step: OnStep = no_step,
    ) -> BlockTimes:
        """Walks the steps of the given numbers; on a device without memory a few stand for all."""
        shape = cut_block(block.rows, self.policy.gpu_batch_size, self.policy.group_rows)
        clock = _Clock(self.transfer, is_begun=start is not None)
        try:
            work = BlockWork(self, block, shape, start)
            self._walk(work, FixedRows(shape, numbers), chooser, clock, on_step)
        except BaseException:
            # What is still on its way must not arrive in the next block. The first error is the one to report.
            with contextlib.suppress(Exception):
                self.transfer.drain()
            self.weights.forget()
            raise
        self._count(shape, block.width, numbers[0], clock)
        return BlockTimes(clock.step_s[0], clock.step_s[1:], clock.work, work.faults)

    def _walk(
        self, work: BlockWork, rows: RowScheduler, chooser: "TokenChooser", clock: "_Clock", on_step: OnStep
    ) -> None:
        """The one loop: pass after pass over the layers, until no row is left to go on with."""
        policy = self.policy
        schedule = Zigzag(self.config.num_hidden_layers, policy.look_ahead, policy.groups_in_flight)
        step = rows.next_step(())
        while step is not None:
            clock.begin_step()
            for operation in schedule.walk(step):
                began = time.perf_counter()
                self._carry_out(operation, work, chooser)
                if isinstance(operation, COMPUTATIONS):
                    self.transfer.timeline.add("compute", operation, began, time.perf_counter())
            clock.end_step(step.phase)
            done, step = step, rows.next_step(chooser.finished())
            if step is not None:
                on_step(BlockStart(done.number + 1, work.next_ids, work.faults))
        self.transfer.drain()  # what was still on its way to its home belongs to this block
        clock.end()

    def _carry_out(self, operation: Operation, work: BlockWork, chooser: "TokenChooser") -> None:
        match operation:
            case FetchWeights(page):
                self.weights.fetch(page)
            case LoadCache(layer, unit):
                self.kv.load(layer, unit)
            case LoadHidden(group):
                self.hidden.load(group.index)
            case Embed(step, group):
                work.embed(step, group)
            case Project(layer, group):
                work.project(layer, group)
            case Attend(step, layer, unit, group):
                work.attend(step, layer, unit, group)
            case StoreCache(layer, unit, group):
                work.store_cache(layer, unit, group)
            case Finish(layer, group):
                work.finish(layer, group)
            case StoreHidden(group):
                self.hidden.store(group.index)
            case ReleaseWeights(page):
                self.weights.release(page)
            case Choose(step, group):
                work.choose(step, group, chooser)
            case EndStep():
                work.end_step()

    def _count(self, shape: BlockShape, width: int, first: int, clock: "_Clock") -> None:
        """Adds to each phase's work what it has computed, from step `first` on."""
        config, policy = self.config, self.policy
        if not first:
            clock.work["prefill"].add(prefill_work(config, policy, _row_counts(shape.prefill_groups), width))
        columns = range(width + max(1, first), width + max(1, first) + len(clock.step_s) - 1)
        slots, itemsize = [rule.sizes for rule in self.kv.rules], self.weights.dtype.itemsize
        groups = _row_counts(shape.decode_groups)
        clock.work["decode"].add(decode_work(config, policy, groups, slots, columns, itemsize))


class _Clock:
    """Seconds of prefill and of each decode step, and what was moved and busy in either phase.

    The copies that prefill has begun for the first decode step are counted where they end.

    Args:
        is_begun: prefill was done before, and took nothing here.

    Attributes:
        step_s: prefill's first.
        work: by phase.
    """

    def __init__(self, transfer: "Transfer", is_begun: bool):
        self._transfer = transfer
        self.step_s: list[float] = [0.0] if is_begun else []
        self.work = {"prefill": PhaseWork(), "decode": PhaseWork()}
        self._phase = "decode" if is_begun else "prefill"
        self._moved, self._busy = self._snapshot()
        self._started = 0.0

    def begin_step(self) -> None:
        self._started = time.perf_counter()

    def end_step(self, phase: Phase) -> None:
        self.step_s.append(time.perf_counter() - self._started)
        if phase == "prefill":
            self.end()
            self._phase = "decode"

    def end(self) -> None:
        """Counts what has been moved, and was busy, since the phase began."""
        moved, busy = self._snapshot()
        self.work[self._phase].moved.update(moved - self._moved)
        for lane, seconds in busy.items():
            self.work[self._phase].busy_s[lane] = seconds - self._busy.get(lane, 0.0)
        self._moved, self._busy = moved, busy

    def _snapshot(self) -> tuple[Counter[str], dict[str, float]]:
        """Bytes moved and seconds busy so far."""
        return self._transfer.moved.copy(), self._transfer.timeline.busy_now()


def _row_counts(groups: Sequence[Group]) -> list[int]:
    return [group.count for group in groups]
