"""OPT's mathematics as pure functions of tensors (Zhang et al. 2022, arXiv 2205.01068).

Weights come by the parameter's name, relative to its layer; a bias or norm parameter that the architecture lacks is
simply absent. `rows` are sequences, `n` is tokens per sequence: the prompt's width in
prefill, 1 in decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.matrices import Matrix
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.plan.model_config import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Parameters of a layer, or of what lies outside the layers, where compute can reach them; by relative name.

    Attributes:
        tensors: norms and biases.
        matrices: all others, the position table among them.
    """

    tensors: Mapping[str, Tensor]
    matrices: Mapping[str, Matrix]


# OPT's position table has two rows before that of position 0.
POSITION_OFFSET = 2


def embed(ids: Tensor, positions: Tensor, weights: Parameters, config: ModelConfig) -> Tensor:
    """Token plus position embedding.

    Args:
        ids: [rows, n] token ids.
        positions: [rows, n] count of real tokens before each token; pads may hold any value from 0 up.
    Returns: [rows, n, hidden_size].
    """
    tokens = weights.matrices["embed_tokens.weight"].rows(ids)
    if config.has_embedding_projection:
        tokens = _project(tokens, weights.matrices["project_in.weight"])
    return tokens + weights.matrices["embed_positions.weight"].rows(positions + POSITION_OFFSET)


def project_qkv(
    hidden: Tensor, weights: Parameters, config: ModelConfig, workspace: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (already scaled by head_dim ** -0.5), keys and values of one layer, in the workspace.

    Args:
        hidden: [rows, n, hidden_size], the residual stream.
    Returns: three tensors [rows, heads, n, head_dim].
    """
    rows, n, _ = hidden.shape
    x = hidden.reshape(rows * n, config.hidden_size)
    if config.do_layer_norm_before:
        x = _norm(x, weights, "self_attn_layer_norm", config, workspace)
    query, key, value = (_linear(x, weights, f"self_attn.{name}_proj", workspace) for name in "qkv")
    query *= config.head_dim**-0.5
    shape = (rows, n, config.num_attention_heads, config.head_dim)
    return (
        query.view(shape).transpose(1, 2),
        key.view(shape).transpose(1, 2),
        value.view(shape).transpose(1, 2),
    )


def finish_layer(
    hidden: Tensor, attended: Tensor, weights: Parameters, config: ModelConfig, workspace: Workspace
) -> Tensor:
    """Attention's output projection, the MLP and both residual additions. Changes `hidden` and returns it.

    Args:
        hidden: [rows, n, hidden_size], the residual stream that entered the layer.
        attended: [rows, heads, n, head_dim], what attention returned.
    Returns: [rows, n, hidden_size].
    """
    stream = hidden.view(-1, config.hidden_size)
    merged = attended.transpose(1, 2).reshape(stream.shape)
    stream += _linear(merged, weights, "self_attn.out_proj", workspace)
    if not config.do_layer_norm_before:
        stream.copy_(_norm(stream, weights, "self_attn_layer_norm", config, workspace))
    x = _norm(stream, weights, "final_layer_norm", config, workspace) if config.do_layer_norm_before else stream
    inner = _activate(_linear(x, weights, "fc1", workspace), config.activation_function)
    stream += _linear(inner, weights, "fc2", workspace)
    if not config.do_layer_norm_before:
        stream.copy_(_norm(stream, weights, "final_layer_norm", config, workspace))
    return hidden


def next_token_logits(hidden: Tensor, weights: Parameters, config: ModelConfig, workspace: Workspace) -> Tensor:
    """Scores of the token after each row's last one, in the workspace.

    Args:
        hidden: [rows, hidden_size], the residual stream at the last position.
    Returns: [rows, vocab_size] float32.
    """
    if config.has_final_norm:
        hidden = _norm(hidden, weights, "final_layer_norm", config, workspace)
    if config.has_embedding_projection:
        hidden = _project(hidden, weights.matrices["project_out.weight"])
    head = weights.matrices["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = head.product(hidden, None, workspace.take((hidden.shape[0], head.shape[0]), hidden.dtype))
    if logits.dtype == torch.float32:
        return logits
    return workspace.take(tuple(logits.shape), torch.float32).copy_(logits)


def _linear(x: Tensor, weights: Parameters, name: str, workspace: Workspace) -> Tensor:
    """[tokens, in] -> [tokens, out], in the workspace."""
    weight = weights.matrices[f"{name}.weight"]
    output = workspace.take((x.shape[0], weight.shape[0]), x.dtype)
    return weight.product(x, weights.tensors.get(f"{name}.bias"), output)


def _project(x: Tensor, weight: Matrix) -> Tensor:
    """[..., in] -> [..., out], between the width of the embeddings and that of the hidden states."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # rows of a padded table are not
    return weight.product(flat, None, flat.new_empty(flat.shape[0], weight.shape[0])).view(*x.shape[:-1], -1)


def _norm(x: Tensor, weights: Parameters, name: str, config: ModelConfig, workspace: Workspace) -> Tensor:
    """Layer normalisation of [tokens, hidden_size]."""
    statistics = (x.shape[0], 1)
    output, _, _ = torch.ops.aten.native_layer_norm.out(
        x,
        (config.hidden_size,),
        weights.tensors.get(f"{name}.weight"),
        weights.tensors.get(f"{name}.bias"),
        1e-5,
        out0=workspace.take(tuple(x.shape), x.dtype),
        out1=workspace.take(statistics, _statistics_dtype(x)),
        out2=workspace.take(statistics, _statistics_dtype(x)),
    )
    return cast(Tensor, output)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    """Means and deviations come in the input's type on a CPU, in float32 on CUDA."""
    return torch.float32 if x.is_cuda else x.dtype


def _activate(x: Tensor, activation: str) -> Tensor:
    """Applied in place: this is the widest tensor of a layer."""
    if activation == "relu":
        return torch.relu_(x)
    return x.copy_(F.gelu(x, approximate="tanh" if activation == "gelu_new" else "none"))
