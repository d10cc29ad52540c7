"""A structured start: heads that look back and heads that copy, put in by hand and then trained like all else.

A small model that is trained for minutes does not get past the statistics of pairs of words by itself. The residual
stream of width D is thought of in quarters: positions, the token in two, and room for the tokens before it.

- The position table begins as sinusoids in the first quarter.
- Layer 0: heads 0 and 2 look one token back, heads 1 and 3 two; heads 0 and 1 copy what they find to the room.
- Layer 1: heads 0 and 1 are induction heads (Olsson et al. 2022, arXiv 2209.11895): they look for a token before which
  the current one stood, and copy it. Heads 2 and 3 do so with the token before the current one, two back.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import OPTForCausalLM

TOKEN_SPREAD, OTHER_SPREAD = 0.05, 0.01  # of token embeddings, in their two quarters and elsewhere
POSITION_HEIGHT = 0.1  # of the sinusoids
LONGEST_WAVE = 750.0  # times the shortest
LOOK, MATCH = 1.1, 1.6  # factors of queries and keys: that look back, that look for the same token
COPY = 0.15  # factor of what is copied
SEED = 7


@torch.no_grad()
def seed_circuits(model: OPTForCausalLM) -> None:
    """Changes a new model's weights. It needs two layers or more, and eight heads or more.

    Raises ValueError for a smaller one.
    """
    config = model.config
    if config.num_hidden_layers < 2 or config.num_attention_heads < 8:
        raise ValueError("seeded circuits take at least 2 layers of 8 heads")
    generator = torch.Generator().manual_seed(SEED)
    width, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    quarter = width // 4
    token, room = slice(quarter, 3 * quarter), 3 * quarter
    tokens = model.model.decoder.embed_tokens.weight
    tokens.normal_(0, OTHER_SPREAD, generator=generator)
    tokens[:, token] *= TOKEN_SPREAD / OTHER_SPREAD
    waves = _waves(quarter // 2)
    _fill_positions(model.model.decoder.embed_positions.weight, waves, quarter, generator)
    # Of the token's two quarters, as many directions as a head has.
    reading = torch.zeros(head_dim, width)
    directions = torch.linalg.qr(torch.randn(2 * quarter, head_dim, generator=generator))[0]
    reading[:, token] = directions.t()
    found = [_identity(head_dim, width, room + head * head_dim) for head in (0, 1)]  # one back, two back
    first, second = (layer.self_attn for layer in model.model.decoder.layers[:2])
    for head, distance in enumerate((1, 2, 1, 2)):
        looking, standing = _look_back(distance, waves, head_dim, width)
        _set_head(first, head, head_dim, LOOK * looking, LOOK * standing)
        if head < 2:
            _set_copy(first, head, head_dim, reading, found[head])
    for head in range(4):
        wanted, before = (reading, found[0]) if head < 2 else (found[0], found[1])
        _set_head(second, head, head_dim, MATCH * wanted, MATCH * before)
        part = _identity(head_dim, width, quarter + head * head_dim)  # each head copies its part of the token
        _set_copy(second, head, head_dim, part, part)


def _waves(count: int) -> Tensor:
    """Angles that each sinusoid turns by in one position."""
    return math.pi * torch.exp(-math.log(LONGEST_WAVE) * torch.arange(count) / max(1, count - 1))


def _fill_positions(table: Tensor, waves: Tensor, quarter: int, generator: torch.Generator) -> None:
    angles = torch.arange(len(table))[:, None] * waves
    table.normal_(0, 0.002, generator=generator)
    table[:, :quarter] = 0.0
    table[:, : len(waves)] = POSITION_HEIGHT * angles.sin()
    table[:, len(waves) : 2 * len(waves)] = POSITION_HEIGHT * angles.cos()


def _look_back(distance: int, waves: Tensor, head_dim: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows [head_dim, width] of a query that has turned back by `distance` positions, and of the key it looks for."""
    query, key = torch.zeros(2, head_dim, width)
    for pair in range(min(head_dim // 2, len(waves))):
        sine, cosine = pair, pair + len(waves)
        turn = float(distance * waves[pair])
        query[2 * pair, sine], query[2 * pair, cosine] = math.cos(turn), -math.sin(turn)
        query[2 * pair + 1, sine], query[2 * pair + 1, cosine] = math.sin(turn), math.cos(turn)
        key[2 * pair, sine] = key[2 * pair + 1, cosine] = 1.0
    return query, key


def _identity(head_dim: int, width: int, start: int) -> Tensor:
    """Rows [head_dim, width] that read the columns from `start` on."""
    rows = torch.zeros(head_dim, width)
    rows[:, start : start + head_dim] = torch.eye(head_dim)
    return rows


def _set_head(attention: Any, head: int, head_dim: int, query: Tensor, key: Tensor) -> None:
    rows = slice(head * head_dim, (head + 1) * head_dim)
    attention.q_proj.weight[rows] = query
    attention.k_proj.weight[rows] = key


def _set_copy(attention: Any, head: int, head_dim: int, read: Tensor, write: Tensor) -> None:
    """What the head reads from each token, [head_dim, width], and where it writes that."""
    rows = slice(head * head_dim, (head + 1) * head_dim)
    attention.v_proj.weight[rows] = read
    attention.out_proj.weight[:, rows] = COPY * write.t()
