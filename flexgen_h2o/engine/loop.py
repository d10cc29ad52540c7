"""Executes the block schedule: the one loop in which all text is generated."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.engine.block import BlockStart, BlockWork, PromptBlock, RowFault, TokenChooser
from flexgen_h2o.engine.hidden import HiddenStore
from flexgen_h2o.kvcache.buffer import UnitShape
from flexgen_h2o.kvcache.cache import KVCache
from flexgen_h2o.kvcache.eviction.rules import EvictionRule
from flexgen_h2o.memory.transfer import Transfer
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.plan.model_config import ModelConfig
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
    Project,
    ReleaseWeights,
    StoreCache,
    StoreHidden,
    cut_block,
    zigzag,
)
from flexgen_h2o.search.limits import PhaseWork, decode_work, prefill_work
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
        config: ModelConfig,
        policy: Policy,
        weights: WeightStore,
        kv: KVCache,
        hidden: HiddenStore,
        workspaces: Sequence[Workspace],
        transfer: Transfer,
        device: torch.device,
    ):
        self.config = config
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
        chooser: TokenChooser,
        start: BlockStart | None = None,
        on_step: OnStep = no_step,
    ) -> BlockTimes:
        """Generates up to `gen_len` tokens (at least 1) for each row, as the chooser decides."""
        return self.walk(block, range(0 if start is None else start.step, gen_len), chooser, start, on_step)

    @torch.inference_mode()
    def walk(
        self,
        block: PromptBlock,
        tokens: Sequence[int],
        chooser: TokenChooser,
        start: BlockStart | None = None,
        on_step: OnStep = no_step,
    ) -> BlockTimes:
        """Walks the given steps of the schedule; on a device without memory a few stand for all."""
        try:
            return self._walk(block, tokens, chooser, start, on_step)
        except BaseException:
            # What is still on its way must not arrive in the next block. The first error is the one to report.
            with contextlib.suppress(Exception):
                self.transfer.drain()
            self.weights.forget()
            raise

    def _walk(
        self,
        block: PromptBlock,
        tokens: Sequence[int],
        chooser: TokenChooser,
        start: BlockStart | None,
        on_step: OnStep,
    ) -> BlockTimes:
        policy = self.policy
        shape = cut_block(block.rows, policy.gpu_batch_size, policy.group_rows)
        work = BlockWork(self, block, shape, start)
        # The first of each is prefill's, which took nothing if it was done before.
        step_s = [] if start is None else [0.0]
        snapshots = [self._snapshot()] * (1 + len(step_s))
        started = time.perf_counter()
        for operation in zigzag(
            tokens, self.config.num_hidden_layers, shape, policy.look_ahead, policy.groups_in_flight
        ):
            began = time.perf_counter()
            match operation:
                case FetchWeights(page):
                    self.weights.fetch(page)
                case LoadCache(layer, unit):
                    self.kv.load(layer, unit)
                case LoadHidden(group):
                    self.hidden.load(group.index)
                case Embed(token, group):
                    work.embed(token, group)
                case Project(token, layer, group):
                    work.project(token, layer, group)
                case Attend(token, layer, unit):
                    work.attend(token, layer, unit)
                case Finish(token, layer, group):
                    work.finish(token, layer, group)
                case StoreHidden(group):
                    self.hidden.store(group.index)
                case StoreCache(token, layer, unit):
                    work.store_cache(token, layer, unit)
                case ReleaseWeights(page):
                    self.weights.release(page)
                case Choose(token, group):
                    work.choose(token, group, chooser)
                case EndStep(token):
                    work.end_step()
                    step_s.append(time.perf_counter() - started)
                    if token == 0:
                        snapshots.append(self._snapshot())
                    if chooser.finished() or token == tokens[-1]:
                        break
                    on_step(BlockStart(token + 1, work.next_ids, work.faults))
                    started = time.perf_counter()
            if isinstance(operation, COMPUTATIONS):
                self.transfer.timeline.add("compute", operation, began, time.perf_counter())
        self.transfer.drain()  # what was still on its way to its home belongs to this block
        snapshots.append(self._snapshot())
        done = self._count(shape, block.width, tokens[0], len(step_s) - 1, snapshots)
        return BlockTimes(step_s[0], step_s[1:], done, work.faults)

    def _snapshot(self) -> tuple[Counter[str], dict[str, float]]:
        """Bytes moved and seconds busy so far."""
        return self.transfer.moved.copy(), self.transfer.timeline.busy_now()

    def _count(
        self,
        shape: BlockShape,
        width: int,
        first: int,
        steps: int,
        snapshots: Sequence[tuple[Counter[str], dict[str, float]]],
    ) -> dict[str, PhaseWork]:
        """What each phase has computed, from step `first` on, and what was moved and busy between snapshots.

        The copies that prefill has begun for the first decode step are counted where they end.
        """
        config, policy, rule = self.config, self.policy, self.kv.rule
        prefill = prefill_work(config, policy, _row_counts(shape.prefill_groups), width) if not first else PhaseWork()
        columns = range(width + max(1, first), width + max(1, first) + steps)
        slots, itemsize = (rule.heavy, rule.recent), self.weights.dtype.itemsize
        decode = decode_work(config, policy, _row_counts(shape.decode_groups), slots, columns, itemsize)
        for phase, before, after in zip((prefill, decode), snapshots, snapshots[1:], strict=False):
            phase.moved = after[0] - before[0]
            phase.busy_s = {lane: seconds - before[1].get(lane, 0.0) for lane, seconds in after[1].items()}
        return {"prefill": prefill, "decode": decode}


def _row_counts(groups: Sequence[Group]) -> list[int]:
    return [group.rows.stop - group.rows.start for group in groups]


def unit_shapes(config: ModelConfig, rule: EvictionRule, policy: Policy, rows: int) -> list[UnitShape]:
    """The buffers that one layer needs for a block of `rows` rows."""
    units = cut_block(rows, policy.gpu_batch_size, policy.group_rows).unit_rows
    return [
        UnitShape(
            rows=unit.stop - unit.start,
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            heavy=rule.heavy,
            recent=rule.recent,
            heavy_in_4_bits=policy.cache_in_4_bits[0],
            ring_in_4_bits=policy.cache_in_4_bits[1],
        )
        for unit in units
    ]
