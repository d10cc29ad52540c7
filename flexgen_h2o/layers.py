"""OPT's mathematics as pure functions of tensors (Zhang et al. 2022, arXiv 2205.01068).

Weights come as a mapping from the parameter's name, relative to its layer, to a tensor; a bias or norm parameter that
the architecture lacks is simply absent. `rows` are sequences, `n` is tokens per sequence: the prompt's width in
prefill, 1 in decode.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.model_config import ModelConfig

TensorMap = Mapping[str, Tensor]

# OPT's position table has two rows before that of position 0.
POSITION_OFFSET = 2


def embed(ids: Tensor, positions: Tensor, weights: TensorMap, config: ModelConfig) -> Tensor:
    """Token plus position embedding.

    Args:
        ids: [rows, n] token ids.
        positions: [rows, n] count of real tokens before each token; pads may hold any value from 0 up.
    Returns: [rows, n, hidden_size].
    """
    tokens = F.embedding(ids, weights["embed_tokens.weight"])
    if config.has_embedding_projection:
        tokens = F.linear(tokens, weights["project_in.weight"])
    return tokens + F.embedding(positions + POSITION_OFFSET, weights["embed_positions.weight"])


def project_qkv(hidden: Tensor, weights: TensorMap, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (already scaled by head_dim ** -0.5), keys and values of one layer.

    Args:
        hidden: [rows, n, hidden_size], the residual stream.
    Returns: three tensors [rows, heads, n, head_dim].
    """
    x = _norm(hidden, weights, "self_attn_layer_norm", config) if config.do_layer_norm_before else hidden
    rows, n, _ = x.shape
    shape = (rows, n, config.num_attention_heads, config.head_dim)
    query = _linear(x, weights, "self_attn.q_proj") * config.head_dim**-0.5
    key = _linear(x, weights, "self_attn.k_proj")
    value = _linear(x, weights, "self_attn.v_proj")
    return (
        query.view(shape).transpose(1, 2),
        key.view(shape).transpose(1, 2),
        value.view(shape).transpose(1, 2),
    )


def finish_layer(hidden: Tensor, attended: Tensor, weights: TensorMap, config: ModelConfig) -> Tensor:
    """Attention's output projection, the MLP and both residual additions.

    Args:
        hidden: [rows, n, hidden_size], the residual stream that entered the layer.
        attended: [rows, heads, n, head_dim], what attention returned.
    Returns: [rows, n, hidden_size].
    """
    merged = attended.transpose(1, 2).reshape(hidden.shape)
    hidden = hidden + _linear(merged, weights, "self_attn.out_proj")
    if not config.do_layer_norm_before:
        hidden = _norm(hidden, weights, "self_attn_layer_norm", config)
    x = _norm(hidden, weights, "final_layer_norm", config) if config.do_layer_norm_before else hidden
    inner = _activate(_linear(x, weights, "fc1"), config.activation_function)
    hidden = hidden + _linear(inner, weights, "fc2")
    if not config.do_layer_norm_before:
        hidden = _norm(hidden, weights, "final_layer_norm", config)
    return hidden


def next_token_logits(hidden: Tensor, weights: TensorMap, config: ModelConfig) -> Tensor:
    """Scores of the token after each row's last one.

    Args:
        hidden: [rows, hidden_size], the residual stream at the last position.
    Returns: [rows, vocab_size] float32.
    """
    if config.has_final_norm:
        hidden = _norm(hidden, weights, "final_layer_norm", config)
    if config.has_embedding_projection:
        hidden = F.linear(hidden, weights["project_out.weight"])
    head = weights["embed_tokens.weight"] if config.tie_word_embeddings else weights["lm_head.weight"]
    return F.linear(hidden, head).float()


def _linear(x: Tensor, weights: TensorMap, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(x: Tensor, weights: TensorMap, name: str, config: ModelConfig) -> Tensor:
    return F.layer_norm(x, (config.hidden_size,), weights.get(f"{name}.weight"), weights.get(f"{name}.bias"), eps=1e-5)


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu_(x)  # in place: this is the widest tensor of a layer
    return F.gelu(x, approximate="tanh" if activation == "gelu_new" else "none")
