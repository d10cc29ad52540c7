"""Executes the block schedule: the one loop in which all text is generated."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o import layers
from flexgen_h2o.kvcache.attention import decode_attention, prefill_attention
from flexgen_h2o.kvcache.buffer import KVBuffer, UnitShape
from flexgen_h2o.kvcache.eviction import EvictionRule
from flexgen_h2o.model_config import ModelConfig
from flexgen_h2o.policy import Policy
from flexgen_h2o.schedule import (
    Attend,
    BlockShape,
    Choose,
    Embed,
    EndStep,
    Finish,
    Group,
    Project,
    cut_block,
    zigzag,
)
from flexgen_h2o.weights import Weights


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
class BlockTimes:
    """Measured seconds of one block: prefill up to its first token, then each decode step."""

    prefill_s: float
    step_s: list[float]

    @property
    def decode_s(self) -> float:
        return sum(self.step_s)


class Engine:
    """One model with its KV buffers, for blocks of up to `rows` rows. The buffers are made once and serve every block.

    Attributes:
        kv: the buffer of each unit, by layer and sub-batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights, rule: EvictionRule, policy: Policy, rows: int):
        self.config = config
        self.weights = weights
        self.rule = rule
        self.policy = policy
        table = weights.outer["embed_tokens.weight"]
        self.device = table.device
        shapes = unit_shapes(config, rule, policy, rows)
        self.kv = [
            [KVBuffer(shape, rule, table.dtype, table.device) for shape in shapes]
            for _ in range(config.num_hidden_layers)
        ]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of keys and values of all buffers; scores and columns apart."""
        return sum(unit.kv_bytes for layer in self.kv for unit in layer)

    @torch.inference_mode()
    def run(self, block: PromptBlock, gen_len: int, chooser: TokenChooser) -> BlockTimes:
        """Generates up to `gen_len` tokens (at least 1) for each row, as the chooser decides."""
        shape = cut_block(block.rows, self.policy.gpu_batch_size, self.policy.group_rows)
        work = _BlockWork(self, block, shape)
        step_s = []
        started = time.perf_counter()
        for operation in zigzag(gen_len, self.config.num_hidden_layers, shape):
            match operation:
                case Embed(token, group):
                    work.embed(token, group)
                case Project(_, layer, group):
                    work.project(layer, group)
                case Attend(token, layer, unit):
                    work.attend(token, layer, unit)
                case Finish(token, layer, group):
                    work.finish(token, layer, group)
                case Choose(token, group):
                    work.choose(token, group, chooser)
                case EndStep():
                    work.end_step()
                    step_s.append(time.perf_counter() - started)
                    if chooser.finished():
                        break
                    started = time.perf_counter()
        return BlockTimes(step_s[0], step_s[1:])


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


class _BlockWork:
    """What one block has in flight between the operations of the schedule."""

    def __init__(self, engine: Engine, block: PromptBlock, shape: BlockShape):
        self.config = engine.config
        self.weights = engine.weights
        self.kv = engine.kv
        self.width = block.width
        self.unit_rows = shape.unit_rows
        self.ids = block.ids.to(engine.device)  # [rows, n], the tokens that the next Embed takes
        self.next_ids = torch.empty(block.rows, 1, dtype=torch.int64, device=engine.device)
        self.first_columns = block.first_columns.to(engine.device)
        self.hidden: dict[int, Tensor] = {}  # group -> [rows, n, hidden_size]
        self.group_start = 0
        self.qkv: tuple[Tensor, Tensor, Tensor]  # of the group being computed: [rows, heads, n, head_dim] each
        self.attended: list[Tensor] = []  # of its units so far
        for layer in self.kv:
            for unit, rows in zip(layer, shape.unit_rows, strict=False):
                unit.reset(block.first_columns[rows])

    def column(self, token: int) -> int:
        """The column of the last token that step `token` takes in."""
        return self.width - 1 + token

    def embed(self, token: int, group: Group) -> None:
        ids = self.ids[group.rows]
        last = self.column(token)
        columns = torch.arange(last + 1 - ids.shape[1], last + 1, device=ids.device)
        positions = (columns - self.first_columns[group.rows, None]).clamp(min=0)
        self.hidden[group.index] = layers.embed(ids, positions, self.weights.outer, self.config)

    def project(self, layer: int, group: Group) -> None:
        self.group_start = group.rows.start
        self.qkv = layers.project_qkv(self.hidden[group.index], self.weights.layers[layer], self.config)

    def attend(self, token: int, layer: int, unit: int) -> None:
        rows = self.unit_rows[unit]
        in_group = slice(rows.start - self.group_start, rows.stop - self.group_start)
        query, key, value = (tensor[in_group] for tensor in self.qkv)
        buffer = self.kv[layer][unit]
        if token == 0:
            attended, sums = prefill_attention(query, key, value, self.first_columns[rows], buffer.rule.accumulates)
            buffer.fill(key, value, sums)
        else:
            buffer.append(key, value, self.column(token))
            attended = decode_attention(query, buffer)
        self.attended.append(attended)

    def finish(self, token: int, layer: int, group: Group) -> None:
        attended = self.attended[0] if len(self.attended) == 1 else torch.cat(self.attended)
        self.attended = []
        hidden = self.hidden[group.index]
        if token == 0 and layer == self.config.num_hidden_layers - 1:
            # Nothing reads the last layer's output but the choice of the next token.
            hidden, attended = hidden[:, -1:], attended[:, :, -1:]
        self.hidden[group.index] = layers.finish_layer(hidden, attended, self.weights.layers[layer], self.config)

    def choose(self, token: int, group: Group, chooser: TokenChooser) -> None:
        hidden = self.hidden.pop(group.index)[:, -1]
        logits = layers.next_token_logits(hidden, self.weights.outer, self.config)
        self.next_ids[group.rows, 0] = chooser.choose(token, group.rows, logits)

    def end_step(self) -> None:
        self.ids = self.next_ids
