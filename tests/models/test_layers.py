"""OPT's mathematics against transformers, with the plainest attention between the functions under test."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.helpers import TinyOpt, largest_difference, new_workspace, oracle_logits, random_ids
from support.tiny_models import VARIANTS
from torch import Tensor

from flexgen_h2o.models import layers

Tiny = Callable[..., TinyOpt]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    n = query.shape[2]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return (query @ key.transpose(2, 3)).masked_fill(future, -math.inf).softmax(dim=-1) @ value


def forward(tiny_opt: TinyOpt, ids: Tensor) -> Tensor:
    """[1, n] -> logits after every token [n, vocab_size]."""
    config, weights = tiny_opt.config, tiny_opt.weights
    hidden = layers.embed(ids, torch.arange(ids.shape[1])[None], weights.outer, config)
    for layer in weights.layers:
        workspace = new_workspace()
        query, key, value = layers.project_qkv(hidden, layer, config, workspace)
        hidden = layers.finish_layer(hidden, causal_attention(query, key, value), layer, config, workspace)
    return layers.next_token_logits(hidden[0], weights.outer, config, new_workspace())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tiny: Tiny, variant: str) -> None:
    tiny_opt = tiny(variant)
    ids = random_ids(tiny_opt.config, [30])[0]
    logits = forward(tiny_opt, torch.tensor([ids]))
    assert largest_difference(logits, oracle_logits(tiny_opt.model, ids[:1], ids[1:])) < 1e-4
    assert logits.std() > 0.1  # else the comparison says nothing


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_is_that_of_transformers(tiny: Tiny, variant: str) -> None:
    tiny_opt = tiny(variant)
    n = 9
    hidden = torch.randn(2, n, tiny_opt.config.hidden_size, generator=torch.Generator().manual_seed(0))
    weights, workspace = tiny_opt.weights.layers[1], new_workspace()
    query, key, value = layers.project_qkv(hidden, weights, tiny_opt.config, workspace)
    assert query.shape == (2, tiny_opt.config.num_attention_heads, n, tiny_opt.config.head_dim)
    attended = causal_attention(query, key, value)
    mine = layers.finish_layer(hidden.clone(), attended, weights, tiny_opt.config, workspace)
    future = torch.full((n, n), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        theirs = tiny_opt.model.model.decoder.layers[1](hidden, attention_mask=future)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert largest_difference(mine, theirs) < 1e-4


def test_positions_are_those_given_and_not_the_columns(tiny: Tiny) -> None:
    """The same tokens behind pads, with the positions they would have alone, get the same embeddings."""
    tiny_opt = tiny("post_norm_projected")
    ids = torch.tensor([random_ids(tiny_opt.config, [6])[0]])
    alone = layers.embed(ids, torch.arange(6)[None], tiny_opt.weights.outer, tiny_opt.config)
    padded_ids = torch.cat([torch.tensor([[1, 1, 1]]), ids], dim=1)
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
    padded = layers.embed(padded_ids, positions, tiny_opt.weights.outer, tiny_opt.config)
    assert torch.equal(padded[:, 3:], alone)
    shifted = layers.embed(ids, torch.arange(1, 7)[None], tiny_opt.weights.outer, tiny_opt.config)
    assert largest_difference(shifted, alone) > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_in_every_precision(tiny: Tiny, dtype: torch.dtype) -> None:
    tiny_opt = tiny("pre_norm", dtype)
    hidden = torch.randn(3, tiny_opt.config.hidden_size).to(dtype)
    logits = layers.next_token_logits(hidden, tiny_opt.weights.outer, tiny_opt.config, new_workspace())
    assert logits.dtype == torch.float32
