"""What one block holds while the schedule walks over it: its tokens, and what is in flight between operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flexgen_h2o.kvcache.attention import prefill_attention
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.memory.transfer import Ticket
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.schedule import OUTER, BlockShape, Group, Phase

if TYPE_CHECKING:  # what an engine is put together from is given to it
    from flexgen_h2o.engine.chooser import TokenChooser
    from flexgen_h2o.engine.hidden import HiddenStore
    from flexgen_h2o.kvcache.cache import KVCache
    from flexgen_h2o.memory.workspace import Workspace
    from flexgen_h2o.models.base import Family
    from flexgen_h2o.weights.store import WeightStore


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

    config: ModelShape
    family: "Family"
    weights: "WeightStore"
    kv: "KVCache"
    hidden: "HiddenStore"
    workspaces: "Sequence[Workspace]"
    device: torch.device


@dataclass
class _InFlight:
    """A group between its projections and the end of its layer.

    Attributes:
        query: [tokens, key heads, query heads that share one, head_dim]; key, value: [tokens, key heads, head_dim].
        attended: of its units so far, each of the shape of its queries.
        arriving: attention that is computed elsewhere.
    """

    workspace: "Workspace"
    query: Tensor
    key: Tensor
    value: Tensor
    attended: list[Tensor] = field(default_factory=list)
    arriving: list[Ticket] = field(default_factory=list)


class BlockWork:
    """What one block has in flight between the operations of the schedule.

    Hidden states, queries, keys and values are by token: a row's tokens one behind the other, then the next row's.
    """

    def __init__(self, engine: EngineParts, block: PromptBlock, shape: BlockShape, start: BlockStart | None):
        self.config = engine.config
        self.family = engine.family
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
        self.positions: dict[tuple[Phase, int], Tensor] = {}  # group -> [tokens] int64
        self.decode_hidden: dict[int, Tensor] = {}  # group -> [tokens, hidden_size]
        self.groups: dict[tuple[Phase, int], _InFlight] = {}
        # Of each row's hidden states after a layer, in the last step. A single NaN or infinity shows in a mean.
        shape_of_means = (self.config.num_hidden_layers, block.rows)
        self.means = torch.zeros(shape_of_means, dtype=self.weights.dtype, device=engine.device)
        self.faults: dict[int, RowFault] = {} if start is None else {**start.faults}
        self.kv.begin(self.paddings)
        self.hidden.begin()

    def column(self, step: int) -> int:
        """The column of the last token that a step takes in."""
        return self.width - 1 + step

    def embed(self, step: int, group: Group) -> None:
        ids = self.ids[group.rows]
        last = self.column(step)
        columns = torch.arange(last + 1 - ids.shape[1], last + 1, device=ids.device)
        positions = (columns - self.first_columns[group.rows, None]).clamp(min=0).flatten()
        self.positions[group.key] = positions
        self._put(group, self.family.embed(ids.flatten(), positions, self.weights.page(OUTER)))

    def project(self, layer: int, group: Group) -> None:
        workspace = self.workspaces[group.index % len(self.workspaces)]
        workspace.clear()
        hidden, positions, page = self._get(group), self.positions[group.key], self.weights.page(layer)
        self.groups[group.key] = _InFlight(workspace, *self.family.project_qkv(hidden, positions, page, workspace))

    def attend(self, step: int, layer: int, unit: int, group: Group) -> None:
        state = self.groups[group.key]
        query, key, value = self._of_unit(group, unit)
        if group.phase == "prefill":
            attended = self._attend_to_prompt(layer, unit, query, key, value, state.workspace)
        elif self.kv.attends_at_home(layer, unit):
            attended, arriving = self.kv.attend_at_home(layer, unit, query, key[:, :, None], value[:, :, None])
            state.arriving.append(arriving)
        else:
            buffer = self.kv.buffer(layer, unit)
            buffer.append(key[:, :, None], value[:, :, None], self.column(step))
            attended = buffer.attend(query)
        state.attended.append(attended)

    def _attend_to_prompt(
        self, layer: int, unit: int, query: Tensor, key: Tensor, value: Tensor, workspace: "Workspace"
    ) -> Tensor:
        """Prefill's attention of a unit, which fills its KV; the arguments and the result are by token."""
        buffer, padding = self.kv.empty(layer, unit), self.paddings[unit]
        # [rows, heads, n, head_dim]
        keys, values = (tensor.unflatten(0, (padding.rows, -1)).transpose(1, 2) for tensor in (key, value))
        attended, sums = prefill_attention(
            *(query.unflatten(0, (padding.rows, -1)), keys, values, padding, buffer.rule.accumulates, workspace),
            buffer.rule.query_weights(self.width),
        )
        buffer.fill(keys, values, sums)
        return attended.flatten(0, 1)

    def store_cache(self, layer: int, unit: int, group: Group) -> None:
        if group.phase == "prefill":
            self.kv.store_filled(layer, unit)
        elif not self.kv.attends_at_home(layer, unit):
            _, key, value = self._of_unit(group, unit)
            self.kv.store_step(layer, unit, key[:, :, None], value[:, :, None])

    def finish(self, layer: int, group: Group) -> None:
        state = self.groups.pop(group.key)
        for ticket in state.arriving:
            ticket.wait()
        attended = state.attended[0] if len(state.attended) == 1 else torch.cat(state.attended)
        hidden = self._get(group)
        if group.phase == "prefill" and layer == self.config.num_hidden_layers - 1:
            # Nothing reads the last layer's output but the choice of the next token.
            hidden, attended = self._last_tokens(group, hidden).clone(), self._last_tokens(group, attended).contiguous()
        hidden = self.family.finish_layer(hidden, attended, self.weights.page(layer), state.workspace)
        torch.mean(hidden.view(group.count, -1), dim=1, out=self.means[layer, group.rows])
        self._put(group, hidden)

    def choose(self, step: int, group: Group, chooser: "TokenChooser") -> None:
        hidden = self._last_tokens(group, self._get(group))
        workspace = self.workspaces[0]
        workspace.clear()
        logits = self.family.logits(hidden, self.weights.page(OUTER), workspace)
        if not logits.is_meta:
            self._note_faults(step, group.rows, logits)
        requests = range(group.rows.start, group.rows.stop)
        self.next_ids[group.rows, 0] = chooser.choose(requests, [step] * group.count, logits)

    def _note_faults(self, step: int, rows: slice, logits: Tensor) -> None:
        """Notes the rows whose logits are not finite, and the first layer after which that could be seen."""
        finite = logits.sum(dim=1).isfinite()
        if finite.all():
            return
        for row in (rows.start + offset for offset in (~finite).nonzero().flatten().tolist()):
            layers_off = (~self.means[:, row].isfinite()).nonzero().flatten().tolist()
            self.faults.setdefault(row, RowFault(step, min(layers_off, default=None)))

    def end_step(self) -> None:
        self.ids = self.next_ids

    def _of_unit(self, group: Group, unit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one of a group's units."""
        state, rows, first = self.groups[group.key], self.unit_rows[unit], group.rows.start
        of_row = len(state.query) // group.count  # tokens
        tokens = slice((rows.start - first) * of_row, (rows.stop - first) * of_row)
        return state.query[tokens], state.key[tokens], state.value[tokens]

    @staticmethod
    def _last_tokens(group: Group, by_token: Tensor) -> Tensor:
        """What belongs to the last token of each row."""
        return by_token.unflatten(0, (group.count, -1))[:, -1]

    def _put(self, group: Group, hidden: Tensor) -> None:
        if group.phase == "prefill":
            self.hidden.put(group.index, hidden)
        else:
            self.decode_hidden[group.index] = hidden

    def _get(self, group: Group) -> Tensor:
        return self.hidden.get(group.index) if group.phase == "prefill" else self.decode_hidden[group.index]
