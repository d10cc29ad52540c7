"""What one block holds while the schedule walks over it: its tokens, and what is in flight between operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o.engine.hidden import HiddenStore
from flexgen_h2o.kvcache.attention import decode_attention, prefill_attention
from flexgen_h2o.kvcache.buffer import Padding
from flexgen_h2o.kvcache.cache import KVCache
from flexgen_h2o.memory.transfer import Ticket
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.models import layers
from flexgen_h2o.plan.model_config import ModelConfig
from flexgen_h2o.plan.schedule import OUTER, BlockShape, Group
from flexgen_h2o.weights.store import WeightStore


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


@dataclass(frozen=True)
class RowFault:
    """Where a row's logits stopped being finite: at which step, and after which layer its hidden states."""

    step: int
    layer: int | None  # None if all of them are finite


@dataclass(frozen=True)
class BlockStart:
    """Where a block goes on whose KV is at its homes already.

    Attributes:
        step: the first one that is walked; 1 or more.
        next_ids: [rows, 1] int64, the tokens that it takes in.
        faults: by row, what has been found so far.
    """

    step: int
    next_ids: Tensor
    faults: Mapping[int, RowFault] = field(default_factory=dict)


class EngineParts(Protocol):
    """What computes a block, and holds its KV and hidden states."""

    config: ModelConfig
    weights: WeightStore
    kv: KVCache
    hidden: HiddenStore
    workspaces: Sequence[Workspace]
    device: torch.device


@dataclass
class _InFlight:
    """A group between its projections and the end of its layer."""

    first_row: int
    workspace: Workspace
    qkv: tuple[Tensor, ...]  # queries, keys and values, [rows, heads, n, head_dim] each
    attended: list[Tensor] = field(default_factory=list)  # of its units so far
    arriving: list[Ticket] = field(default_factory=list)  # attention that is computed elsewhere


class BlockWork:
    """What one block has in flight between the operations of the schedule."""

    def __init__(self, engine: EngineParts, block: PromptBlock, shape: BlockShape, start: BlockStart | None):
        self.config = engine.config
        self.weights = engine.weights
        self.kv = engine.kv
        self.hidden = engine.hidden
        self.workspaces = engine.workspaces
        self.width = block.width
        self.unit_rows = shape.unit_rows
        self.ids = block.ids.to(engine.device)  # [rows, n], the tokens that the next Embed takes
        self.next_ids = torch.empty(block.rows, 1, dtype=torch.int64, device=engine.device)
        if start is not None:
            self.ids = self.next_ids.copy_(start.next_ids)
        self.first_columns = block.first_columns.to(engine.device)
        self.paddings = [Padding(block.first_columns[rows]) for rows in shape.unit_rows]
        self.decode_hidden: dict[int, Tensor] = {}  # group -> [rows, 1, hidden_size]
        self.groups: dict[int, _InFlight] = {}
        self.current: _InFlight
        # Of each row's hidden states after a layer, in the last step. A single NaN or infinity shows in a mean.
        shape_of_means = (self.config.num_hidden_layers, block.rows)
        self.means = torch.zeros(shape_of_means, dtype=self.weights.dtype, device=engine.device)
        self.faults: dict[int, RowFault] = {} if start is None else {**start.faults}
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
                *(query, key, value, self.paddings[unit], buffer.rule.accumulates, self.current.workspace),
                buffer.rule.query_weights(self.width),
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
            hidden, attended = hidden[:, -1:].clone(), attended[:, :, -1:].contiguous()
        hidden = layers.finish_layer(hidden, attended, self.weights.page(layer), self.config, state.workspace)
        torch.mean(hidden.flatten(1), dim=1, out=self.means[layer, group.rows])
        self._put(token, group, hidden)

    def choose(self, token: int, group: Group, chooser: TokenChooser) -> None:
        hidden = self._get(token, group)[:, -1]
        workspace = self.workspaces[0]
        workspace.clear()
        logits = layers.next_token_logits(hidden, self.weights.page(OUTER), self.config, workspace)
        if not logits.is_meta:
            self._note_faults(token, group.rows, logits)
        self.next_ids[group.rows, 0] = chooser.choose(token, group.rows, logits)

    def _note_faults(self, token: int, rows: slice, logits: Tensor) -> None:
        """Notes the rows whose logits are not finite, and the first layer after which that could be seen."""
        finite = logits.sum(dim=1).isfinite()
        if finite.all():
            return
        for row in (rows.start + offset for offset in (~finite).nonzero().flatten().tolist()):
            layers_off = (~self.means[:, row].isfinite()).nonzero().flatten().tolist()
            self.faults.setdefault(row, RowFault(token, min(layers_off, default=None)))

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
