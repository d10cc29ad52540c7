"""OPT's mathematics against transformers, with the plainest attention between the methods under test."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.helpers import TinyOpt, largest_difference, new_workspace, oracle_logits, random_ids
from support.tiny_models import VARIANTS
from torch import Tensor

from flexgen_h2o.models.registry import family_of

Tiny = Callable[..., TinyOpt]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, sequences: int) -> Tensor:
    """Of sequences of the same length, one behind the other; arguments and result are by token."""
    tokens, heads, group, head_dim = query.shape
    assert group == 1
    n = tokens // sequences
    queries, keys, values = (
        tensor.reshape(sequences, n, heads, head_dim).transpose(1, 2) for tensor in (query, key, value)
    )
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = (queries @ keys.transpose(2, 3)).masked_fill(future, -math.inf).softmax(dim=-1)
    return (weights @ values).transpose(1, 2).reshape(query.shape)


def forward(tiny_opt: TinyOpt, ids: Tensor) -> Tensor:
    """[n] -> logits after every token [n, vocab_size]."""
    family, weights = family_of(tiny_opt.config), tiny_opt.weights
    positions = torch.arange(len(ids))
    hidden = family.embed(ids, positions, weights.outer)
    for page in weights.layers:
        workspace = new_workspace()
        query, key, value = family.project_qkv(hidden, positions, page, workspace)
        hidden = family.finish_layer(hidden, causal_attention(query, key, value, 1), page, workspace)
    return family.logits(hidden, weights.outer, new_workspace())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tiny: Tiny, variant: str) -> None:
    tiny_opt = tiny(variant)
    ids = random_ids(tiny_opt.config, [30])[0]
    logits = forward(tiny_opt, torch.tensor(ids))
    assert largest_difference(logits, oracle_logits(tiny_opt.model, ids[:1], ids[1:])) < 1e-4
    assert logits.std() > 0.1  # else the comparison says nothing


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_is_that_of_transformers(tiny: Tiny, variant: str) -> None:
    tiny_opt = tiny(variant)
    n, config, family = 9, tiny_opt.config, family_of(tiny_opt.config)
    hidden = torch.randn(2, n, config.hidden_size, generator=torch.Generator().manual_seed(0))
    page, workspace = tiny_opt.weights.layers[1], new_workspace()
    by_token = hidden.flatten(0, 1).clone()
    query, key, value = family.project_qkv(by_token, torch.arange(n).repeat(2), page, workspace)
    heads = config.num_key_value_heads
    assert query.shape == (2 * n, heads, config.num_attention_heads // heads, config.head_dim)
    assert key.shape == value.shape == (2 * n, heads, config.head_dim)
    mine = family.finish_layer(by_token, causal_attention(query, key, value, 2), page, workspace)
    assert mine is by_token
    future = torch.full((n, n), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        theirs = tiny_opt.model.model.decoder.layers[1](hidden, attention_mask=future)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert largest_difference(mine.view(hidden.shape), theirs) < 1e-4


def test_positions_are_those_given_and_not_the_columns(tiny: Tiny) -> None:
    """The same tokens behind pads, with the positions they would have alone, get the same embeddings."""
    tiny_opt = tiny("post_norm_projected")
    family, outer = family_of(tiny_opt.config), tiny_opt.weights.outer
    ids = torch.tensor(random_ids(tiny_opt.config, [6])[0])
    alone = family.embed(ids, torch.arange(6), outer)
    padded_ids = torch.cat([torch.tensor([1, 1, 1]), ids])
    padded = family.embed(padded_ids, torch.tensor([0, 0, 0, 0, 1, 2, 3, 4, 5]), outer)
    assert torch.equal(padded[3:], alone)
    shifted = family.embed(ids, torch.arange(1, 7), outer)
    assert largest_difference(shifted, alone) > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_in_every_precision(tiny: Tiny, dtype: torch.dtype) -> None:
    tiny_opt = tiny("pre_norm", dtype)
    hidden = torch.randn(3, tiny_opt.config.hidden_size).to(dtype)
    logits = family_of(tiny_opt.config).logits(hidden, tiny_opt.weights.outer, new_workspace())
    assert logits.dtype == torch.float32
