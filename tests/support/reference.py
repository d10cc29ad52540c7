"""A slow, obvious reference of OPT with an evicting KV cache, to compare the engine with.

One row at a time, real tokens only: no batch, no padding, no buffer. What a head keeps is a Python list of
columns for the heavy slots and another for the ring; keys, values and scores are dictionaries by column, from
which a dropped column is deleted, so that a later use of it is a KeyError. A column is the index of a token
in the row.

The mathematics of OPT is that of Zhang et al. 2022 (arXiv 2205.01068), the names of the weights are those of
transformers' state dict; the eviction is that of H2O, Zhang et al. 2023 (arXiv 2306.14048).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LAYER_NORM_EPS = 1e-5
POSITION_OFFSET = 2  # OPT's table of positions has two rows in front that no token uses


@dataclass(frozen=True)
class ReferenceRule:
    """Which entries a head keeps: `heavy` slots (the sinks, for 'sink') and the last `recent` columns.

    'full' keeps everything and ignores both numbers. `decay` multiplies a score before a step's weight comes.
    `four_bits` says which entries are kept in 4 bits: "none", "all" of them from the moment they are stored, or only
    the "heavy" ones.
    """

    name: str
    heavy: int = 0
    recent: int = 1
    decay: float = 1.0
    four_bits: str = "none"

    def __post_init__(self) -> None:
        if self.four_bits not in ("none", "all", "heavy"):
            raise ValueError(f"four_bits is none, all or heavy, not {self.four_bits!r}")
        if self.name not in ("h2o", "full", "local", "sink"):
            raise ValueError(f"unknown rule {self.name!r}")
        if self.name == "full":
            return
        if self.heavy < 0 or self.recent < 1:
            raise ValueError(f"need heavy >= 0 and recent >= 1, not {self.heavy} and {self.recent}")
        if self.name == "local" and self.heavy != 0:
            raise ValueError(f"local has no heavy slots, not {self.heavy}")

    @property
    def heavy_slots(self) -> int:
        return 0 if self.name == "full" else self.heavy

    @property
    def ring_size(self) -> float:
        return math.inf if self.name == "full" else self.recent

    def is_sink(self, column: int) -> bool:
        return self.name == "sink" and column < self.heavy


def to_bfloat16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).to(torch.bfloat16))


def in_four_bits(vector: torch.Tensor) -> torch.Tensor:
    """[head_dim] as it comes back from 4-bit groups of 64, scale and minimum in bfloat16 (FlexGen, section 5)."""
    kept: list[float] = []
    for start in range(0, len(vector), 64):
        group = [float(value) for value in vector[start : start + 64].float()]
        scale, minimum = to_bfloat16((max(group) - min(group)) / 15), to_bfloat16(min(group))
        for value in group:
            code = min(15, max(0, round((value - minimum) / scale))) if scale else 0
            kept.append(minimum + scale * code)
    return torch.tensor(kept, dtype=vector.dtype)


class HeadCache:
    """What one head of one layer keeps of one row."""

    def __init__(self, rule: ReferenceRule) -> None:
        self.rule = rule
        self.heavy: list[int | None] = [None] * rule.heavy_slots  # by slot; None is a free slot
        self.ring: list[int] = []  # oldest first
        self.scores: dict[int, float] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def fill(self, keys: torch.Tensor, values: torch.Tensor, sums: Sequence[float]) -> None:
        """Choose what stays after prefill. keys, values: [n, head_dim]; sums: n sums of attention weights."""
        n = len(sums)
        for column in range(n):
            self.add(column, keys[column], values[column])
            self.raise_score(column, sums[column])
        first_in_ring = 0 if self.rule.ring_size >= n else n - self.rule.recent
        self.ring = list(range(first_in_ring, n))
        ranked = sorted(range(first_in_ring), key=lambda column: (-self.scores[column], column))
        chosen = sorted(ranked[: self.rule.heavy_slots])
        for slot, column in enumerate(chosen):
            self.heavy[slot] = column
            self.promote(column)
        for column in ranked[self.rule.heavy_slots :]:
            self.forget(column)

    def make_room(self) -> None:
        """If the ring is full its oldest entry leaves it: for a heavy slot, or for good."""
        if len(self.ring) < self.rule.ring_size:
            return
        leaving = self.ring.pop(0)
        if None in self.heavy:
            self.heavy[self.heavy.index(None)] = leaving  # index finds the lowest free slot
            self.promote(leaving)
            return
        slot = self.lowest_heavy_slot()
        if slot is None or not self.scores[leaving] > self.scores[self.heavy[slot]]:
            self.forget(leaving)
            return
        self.forget(self.heavy[slot])
        self.heavy[slot] = leaving
        self.promote(leaving)

    def lowest_heavy_slot(self) -> int | None:
        """The heavy slot with the lowest score, the lower slot if two tie; None without heavy slots."""
        best = None
        for slot, column in enumerate(self.heavy):
            if best is None or self.scores[column] < self.scores[self.heavy[best]]:
                best = slot
        return best

    def add(self, column: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one entry with the score of a newcomer. key, value: [head_dim]."""
        is_rounded = self.rule.four_bits == "all"
        self.keys[column] = in_four_bits(key) if is_rounded else key
        self.values[column] = in_four_bits(value) if is_rounded else value
        self.scores[column] = math.inf if self.rule.is_sink(column) else 0.0

    def promote(self, column: int) -> None:
        """An entry has moved to a heavy slot."""
        if self.rule.four_bits == "heavy":
            self.keys[column], self.values[column] = in_four_bits(self.keys[column]), in_four_bits(self.values[column])

    def raise_score(self, column: int, weight: float, decay: float = 1.0) -> None:
        if not self.rule.is_sink(column):  # a sink stays at infinity, and 0 * inf would not be a number
            self.scores[column] = decay * self.scores[column] + weight

    def forget(self, column: int) -> None:
        del self.keys[column], self.values[column], self.scores[column]

    def step(self, column: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One decode step. query (scaled), key, value: [head_dim] -> the attention's output [head_dim]."""
        self.make_room()
        self.ring.append(column)
        self.add(column, key, value)
        kept = sorted([c for c in self.heavy if c is not None] + self.ring)
        assert kept == sorted(self.scores), "the slots and the stored entries differ"
        weights = torch.softmax(torch.stack([self.keys[c] for c in kept]) @ query, dim=-1)
        for c, weight in zip(kept, weights.tolist(), strict=True):
            self.raise_score(c, weight, self.rule.decay)
        return weights @ torch.stack([self.values[c] for c in kept])

    def snapshot(self) -> dict[str, Any]:
        return {"heavy": list(self.heavy), "ring": set(self.ring), "scores": dict(self.scores)}


class ReferenceOPT:
    """One row on its way through an OPT: `prefill` once, then `decode` token by token."""

    def __init__(
        self, state_dict: Mapping[str, torch.Tensor], config: Any, rule: ReferenceRule, dtype: torch.dtype
    ) -> None:
        self.params = {name: tensor.detach().to(dtype) for name, tensor in state_dict.items()}
        self.config = config
        self.heads = config.num_attention_heads
        self.head_dim = config.hidden_size // self.heads
        self.caches = [[HeadCache(rule) for _ in range(self.heads)] for _ in range(config.num_hidden_layers)]
        self.seen = 0  # real tokens so far, which is also the position of the next one

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        """ids: n tokens -> logits after the last one [vocab]."""
        if self.seen or not ids:
            raise ValueError("prefill takes one or more tokens, once")
        return self._forward(ids, self._prefill_attention)

    @torch.no_grad()
    def decode(self, token: int) -> torch.Tensor:
        """Feed one token -> logits after it [vocab]."""
        return self._forward([token], self._decode_attention)

    def snapshot(self) -> list[list[dict[str, Any]]]:
        """What is kept now, as [layer][head]."""
        return [[head.snapshot() for head in layer] for layer in self.caches]

    def _forward(self, ids: Sequence[int], attention: Any) -> torch.Tensor:
        hidden = self._embed(ids)
        for layer in range(self.config.num_hidden_layers):
            hidden = self._layer(layer, hidden, attention)
        self.seen += len(ids)
        return self._logits(hidden[-1])

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        """ids: n tokens -> [n, hidden]."""
        end = self.seen + len(ids)
        if end > self.config.max_position_embeddings:
            raise ValueError(f"{end} tokens, but only {self.config.max_position_embeddings} positions")
        words = torch.stack([self.params["model.decoder.embed_tokens.weight"][token] for token in ids])
        if self.config.word_embed_proj_dim != self.config.hidden_size:
            words = words @ self.params["model.decoder.project_in.weight"].T
        positions = self.params["model.decoder.embed_positions.weight"]
        return words + positions[POSITION_OFFSET + self.seen : POSITION_OFFSET + end]

    def _layer(self, layer: int, hidden: torch.Tensor, attention: Any) -> torch.Tensor:
        """hidden: [n, hidden] -> [n, hidden]. Norms stand before each half of the layer, or after its sum."""
        name = f"model.decoder.layers.{layer}"
        before = self.config.do_layer_norm_before
        x = self._norm(f"{name}.self_attn_layer_norm", hidden) if before else hidden
        hidden = hidden + self._attend(layer, f"{name}.self_attn", x, attention)
        if not before:
            hidden = self._norm(f"{name}.self_attn_layer_norm", hidden)
        x = self._norm(f"{name}.final_layer_norm", hidden) if before else hidden
        x = _activate(self.config.activation_function, self._linear(f"{name}.fc1", x))
        hidden = hidden + self._linear(f"{name}.fc2", x)
        return hidden if before else self._norm(f"{name}.final_layer_norm", hidden)

    def _attend(self, layer: int, name: str, x: torch.Tensor, attention: Any) -> torch.Tensor:
        """x: [n, hidden] -> [n, hidden], one head after the other."""
        query = self._linear(f"{name}.q_proj", x) * self.head_dim**-0.5
        key = self._linear(f"{name}.k_proj", x)
        value = self._linear(f"{name}.v_proj", x)
        outputs = []
        for head in range(self.heads):
            part = slice(head * self.head_dim, (head + 1) * self.head_dim)
            outputs.append(attention(self.caches[layer][head], query[:, part], key[:, part], value[:, part]))
        return self._linear(f"{name}.out_proj", torch.cat(outputs, dim=-1))

    def _prefill_attention(
        self, cache: HeadCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention to everything; then the cache chooses. All: [n, head_dim]."""
        n = query.shape[0]
        future = torch.ones(n, n, dtype=torch.bool).triu(diagonal=1)
        weights = torch.softmax((query @ key.T).masked_fill(future, -math.inf), dim=-1)
        cache.fill(key, value, weights.double().sum(dim=0).tolist())
        return weights @ value

    def _decode_attention(
        self, cache: HeadCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one new token to what is kept. All: [1, head_dim]."""
        return cache.step(self.seen, query[0], key[0], value[0])[None]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [hidden] of one token -> [vocab]."""
        if self.config.do_layer_norm_before and not self.config._remove_final_layer_norm:
            hidden = self._norm("model.decoder.final_layer_norm", hidden)
        if self.config.word_embed_proj_dim != self.config.hidden_size:
            hidden = hidden @ self.params["model.decoder.project_out.weight"].T
        tied = self.config.tie_word_embeddings
        return hidden @ self.params["model.decoder.embed_tokens.weight" if tied else "lm_head.weight"].T

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out]."""
        y = x @ self.params[f"{name}.weight"].T
        return y + self.params[f"{name}.bias"] if self.config.enable_bias else y

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Layer norm over the last dimension, with the biased variance."""
        centred = x - x.mean(dim=-1, keepdim=True)
        y = centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + LAYER_NORM_EPS)
        if not self.config.layer_norm_elementwise_affine:
            return y
        return y * self.params[f"{name}.weight"] + self.params[f"{name}.bias"]


def _activate(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "relu":
        return x.clamp(min=0)
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_new":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    raise ValueError(f"unknown activation {name!r}")


def reference_logits(
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    prompt_ids: Sequence[int],
    forced_ids: Sequence[int],
    rule: ReferenceRule,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [len(forced_ids) + 1, vocab]: row 0 after the prompt, row k after feeding forced_ids[k - 1]."""
    row = ReferenceOPT(state_dict, config, rule, dtype)
    return torch.stack([row.prefill(prompt_ids), *(row.decode(token) for token in forced_ids)])


def reference_generate(
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    prompt_ids: Sequence[int],
    gen_len: int,
    rule: ReferenceRule,
    dtype: torch.dtype = torch.float32,
) -> list[int]:
    """`gen_len` greedy tokens (the lowest id where logits tie), without a stop: gen_len - 1 decode steps."""
    if gen_len < 1:
        return []
    row = ReferenceOPT(state_dict, config, rule, dtype)
    tokens = [int(row.prefill(prompt_ids).argmax())]
    while len(tokens) < gen_len:
        tokens.append(int(row.decode(tokens[-1]).argmax()))
    return tokens


def reference_trace(
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    prompt_ids: Sequence[int],
    forced_ids: Sequence[int],
    rule: ReferenceRule,
    dtype: torch.dtype = torch.float32,
) -> list[list[list[dict[str, Any]]]]:
    """What is kept, as [step][layer][head]: step 0 after the prompt, step k after feeding forced_ids[k - 1].

    Each is a dict: "heavy" is the list of columns in slot order, None for a free slot; "ring" is a set of
    columns; "scores" maps each kept column to its score.
    Scores are sums in double precision, so they do not depend on an order of summation.
    """
    row = ReferenceOPT(state_dict, config, rule, dtype)
    row.prefill(prompt_ids)
    steps = [row.snapshot()]
    for token in forced_ids:
        row.decode(token)
        steps.append(row.snapshot())
    return steps
