"""Executes the block schedule: the one loop in which all text is generated."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o import layers
from flexgen_h2o.hidden import HiddenStore
from flexgen_h2o.kvcache.attention import decode_attention, prefill_attention
from flexgen_h2o.kvcache.buffer import Padding, UnitShape
from flexgen_h2o.kvcache.cache import KVCache
from flexgen_h2o.kvcache.eviction import EvictionRule
from flexgen_h2o.model_config import ModelConfig
from flexgen_h2o.policy import Policy
from flexgen_h2o.schedule import (
    OUTER,
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
from flexgen_h2o.search.limits import PhaseWork, decode_work, prefill_flops
from flexgen_h2o.transfer import Ticket, Transfer
from flexgen_h2o.weights import WeightStore
from flexgen_h2o.workspace import Workspace


class TokenChooser(Protocol):
    """Decides what each row goes on with: a sampler, or a text that is being scored."""

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        """The next token of some rows of the block.

        Args:
            step: tokens chosen before this one.
            rows: which rows of the block.
            logits: [rows, vocab_size] float32.
        Returns: [rows] int64.
        """

    def finished(self) -> bool:
        """Whether all rows of the block are done, so that no further token is needed."""


@dataclass(frozen=True)
class PromptBlock:
    """Left-padded prompts of one block.

    Attributes:
        ids: [rows, width] int64.
        first_columns: [rows] int64, the column of each row's first real token. The mask comes from here, never from
            the ids.
    """

    ids: Tensor
    first_columns: Tensor

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        return self.ids.shape[1]


def pad_prompts(prompts: Sequence[Sequence[int]], filler: int) -> PromptBlock:
    """Left-pads token ids to the longest prompt. No prompt may be empty."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), filler, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    return PromptBlock(ids, torch.tensor([width - len(prompt) for prompt in prompts]))


# The operations that keep compute busy; the others start copies or say that memory is free.
COMPUTATIONS = (Embed, Project, Attend, Finish, Choose)


@dataclass(frozen=True)
class BlockTimes:
    """Measured seconds of one block: prefill up to its first token, then each decode step; and what was done in them.

    Attributes:
        work: by phase, "prefill" and "decode".
    """

    prefill_s: float
    step_s: list[float]
    work: dict[str, PhaseWork]

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

    def run(self, block: PromptBlock, gen_len: int, chooser: TokenChooser) -> BlockTimes:
        """Generates up to `gen_len` tokens (at least 1) for each row, as the chooser decides."""
        return self.walk(block, range(gen_len), chooser)

    @torch.inference_mode()
    def walk(self, block: PromptBlock, tokens: Sequence[int], chooser: TokenChooser) -> BlockTimes:
        """Walks the given steps of the schedule; on a device without memory a few stand for all."""
        try:
            return self._walk(block, tokens, chooser)
        except BaseException:
            # What is still on its way must not arrive in the next block. The first error is the one to report.
            with contextlib.suppress(Exception):
                self.transfer.drain()
            self.weights.forget()
            raise

    def _walk(self, block: PromptBlock, tokens: Sequence[int], chooser: TokenChooser) -> BlockTimes:
        policy = self.policy
        shape = cut_block(block.rows, policy.gpu_batch_size, policy.group_rows)
        work = _BlockWork(self, block, shape)
        step_s: list[float] = []
        snapshots = [self._snapshot()]
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
                    if chooser.finished():
                        break
                    started = time.perf_counter()
            if isinstance(operation, COMPUTATIONS):
                self.transfer.timeline.add("compute", operation, began, time.perf_counter())
        self.transfer.drain()  # what was still on its way to its home belongs to this block
        snapshots.append(self._snapshot())
        return BlockTimes(step_s[0], step_s[1:], self._count(shape, block.width, len(step_s) - 1, snapshots))

    def _snapshot(self) -> tuple[Counter[str], dict[str, float]]:
        """Bytes moved and seconds busy so far."""
        return self.transfer.moved.copy(), self.transfer.timeline.busy_now()

    def _count(
        self, shape: BlockShape, width: int, steps: int, snapshots: Sequence[tuple[Counter[str], dict[str, float]]]
    ) -> dict[str, PhaseWork]:
        """What each phase has computed, and what was moved and busy between snapshots.

        The copies that prefill has begun for the first decode step are counted where they end.
        """
        rule = self.kv.rule
        prefill = PhaseWork(prefill_flops(self.config, _row_counts(shape.prefill_groups), width))
        columns = range(width + 1, width + 1 + steps)
        itemsize = self.weights.dtype.itemsize
        decode = decode_work(
            self.config, _row_counts(shape.decode_groups), (rule.heavy, rule.recent), columns, itemsize
        )
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
        )
        for unit in units
    ]


@dataclass
class _InFlight:
    """A group between its projections and the end of its layer."""

    first_row: int
    workspace: Workspace
    qkv: tuple[Tensor, ...]  # queries, keys and values, [rows, heads, n, head_dim] each
    attended: list[Tensor] = field(default_factory=list)  # of its units so far
    arriving: list[Ticket] = field(default_factory=list)  # attention that is computed elsewhere


class _BlockWork:
    """What one block has in flight between the operations of the schedule."""

    def __init__(self, engine: Engine, block: PromptBlock, shape: BlockShape):
        self.config = engine.config
        self.weights = engine.weights
        self.kv = engine.kv
        self.hidden = engine.hidden
        self.workspaces = engine.workspaces
        self.width = block.width
        self.unit_rows = shape.unit_rows
        self.ids = block.ids.to(engine.device)  # [rows, n], the tokens that the next Embed takes
        self.next_ids = torch.empty(block.rows, 1, dtype=torch.int64, device=engine.device)
        self.first_columns = block.first_columns.to(engine.device)
        self.paddings = [Padding(block.first_columns[rows]) for rows in shape.unit_rows]
        self.decode_hidden: dict[int, Tensor] = {}  # group -> [rows, 1, hidden_size]
        self.groups: dict[int, _InFlight] = {}
        self.current: _InFlight
        self.kv.begin(self.paddings)
        self.hidden.begin()

    def column(self, token: int) -> int:
        """The column of the last token that a step takes in."""
        return self.width - 1 + token

    def embed(self, token: int, group: Group) -> None:
        ids = self.ids[group.rows]
        last = self.column(token)
        columns = torch.arange(last + 1 - ids.shape[1], last + 1, device=ids.device)
        positions = (columns - self.first_columns[group.rows, None]).clamp(min=0)
        self._put(token, group, layers.embed(ids, positions, self.weights.page(OUTER), self.config))

    def project(self, token: int, layer: int, group: Group) -> None:
        workspace = self.workspaces[group.index % len(self.workspaces)]
        workspace.clear()
        qkv = layers.project_qkv(self._get(token, group), self.weights.page(layer), self.config, workspace)
        self.current = _InFlight(group.rows.start, workspace, qkv)
        self.groups[group.index] = self.current

    def attend(self, token: int, layer: int, unit: int) -> None:
        query, key, value = self._unit_qkv(unit)
        if token == 0:
            buffer = self.kv.empty(layer, unit)
            attended, sums = prefill_attention(
                query, key, value, self.paddings[unit], buffer.rule.accumulates, self.current.workspace
            )
            buffer.fill(key, value, sums)
        elif self.kv.attends_at_home(layer, unit):
            attended, arriving = self.kv.attend_at_home(layer, unit, query, key, value)
            self.current.arriving.append(arriving)
        else:
            buffer = self.kv.buffer(layer, unit)
            buffer.append(key, value, self.column(token))
            attended = decode_attention(query, buffer)
        self.current.attended.append(attended)

    def store_cache(self, token: int, layer: int, unit: int) -> None:
        if token == 0:
            self.kv.store_filled(layer, unit)
        elif not self.kv.attends_at_home(layer, unit):
            _, key, value = self._unit_qkv(unit)
            self.kv.store_step(layer, unit, key, value)

    def finish(self, token: int, layer: int, group: Group) -> None:
        state = self.groups.pop(group.index)
        for ticket in state.arriving:
            ticket.wait()
        attended = state.attended[0] if len(state.attended) == 1 else torch.cat(state.attended)
        hidden = self._get(token, group)
        if token == 0 and layer == self.config.num_hidden_layers - 1:
            # Nothing reads the last layer's output but the choice of the next token.
            hidden, attended = hidden[:, -1:].clone(), attended[:, :, -1:]
        weights = self.weights.page(layer)
        self._put(token, group, layers.finish_layer(hidden, attended, weights, self.config, state.workspace))

    def choose(self, token: int, group: Group, chooser: TokenChooser) -> None:
        hidden = self._get(token, group)[:, -1]
        workspace = self.workspaces[0]
        workspace.clear()
        logits = layers.next_token_logits(hidden, self.weights.page(OUTER), self.config, workspace)
        self.next_ids[group.rows, 0] = chooser.choose(token, group.rows, logits)

    def end_step(self) -> None:
        self.ids = self.next_ids

    def _unit_qkv(self, unit: int) -> tuple[Tensor, ...]:
        rows = self.unit_rows[unit]
        first = self.current.first_row
        return tuple(tensor[rows.start - first : rows.stop - first] for tensor in self.current.qkv)

    def _put(self, token: int, group: Group, hidden: Tensor) -> None:
        if token == 0:
            self.hidden.put(group.index, hidden)
        else:
            self.decode_hidden[group.index] = hidden

    def _get(self, token: int, group: Group) -> Tensor:
        return self.hidden.get(group.index) if token == 0 else self.decode_hidden[group.index]
