"""OPT's mathematics (Zhang et al. 2022, arXiv 2205.01068)."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.matrices.layout import Matrix
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.models.base import Family, Parameters
from flexgen_h2o.models.opt_config import POSITION_OFFSET, OptConfig
from flexgen_h2o.plan.model_shape import ModelShape


class Opt(Family):
    """Pre-norm or post-norm layers with learned positions; what config.json says decides."""

    def __init__(self, shape: ModelShape):
        super().__init__(shape)
        self.config = cast(OptConfig, shape.settings)

    def embed(self, ids: Tensor, positions: Tensor, outer: Parameters) -> Tensor:
        tokens = outer.matrices["embed_tokens.weight"].rows(ids)
        if self.config.has_embedding_projection:
            tokens = _project(tokens, outer.matrices["project_in.weight"])
        return tokens + outer.matrices["embed_positions.weight"].rows(positions + POSITION_OFFSET)

    def project_qkv(
        self, hidden: Tensor, positions: Tensor, page: Parameters, workspace: Workspace
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, shape = self.config, self.shape
        x = _norm(hidden, page, "self_attn_layer_norm", workspace) if config.do_layer_norm_before else hidden
        query, key, value = (_linear(x, page, f"self_attn.{name}_proj", workspace) for name in "qkv")
        query *= shape.head_dim**-0.5
        by_head = (len(hidden), shape.num_key_value_heads, shape.head_dim)
        return query.view(by_head).unsqueeze(2), key.view(by_head), value.view(by_head)

    def finish_layer(self, hidden: Tensor, attended: Tensor, page: Parameters, workspace: Workspace) -> Tensor:
        is_pre_norm = self.config.do_layer_norm_before
        hidden += _linear(attended.reshape(hidden.shape), page, "self_attn.out_proj", workspace)
        if not is_pre_norm:
            hidden.copy_(_norm(hidden, page, "self_attn_layer_norm", workspace))
        x = _norm(hidden, page, "final_layer_norm", workspace) if is_pre_norm else hidden
        inner = _activate(_linear(x, page, "fc1", workspace), self.config.activation_function)
        hidden += _linear(inner, page, "fc2", workspace)
        if not is_pre_norm:
            hidden.copy_(_norm(hidden, page, "final_layer_norm", workspace))
        return hidden

    def logits(self, hidden: Tensor, outer: Parameters, workspace: Workspace) -> Tensor:
        if self.config.has_final_norm:
            hidden = _norm(hidden, outer, "final_layer_norm", workspace)
        if self.config.has_embedding_projection:
            hidden = _project(hidden, outer.matrices["project_out.weight"])
        head = outer.matrices[self.config.head_matrix]
        logits = head.product(hidden, None, workspace.take((hidden.shape[0], head.shape[0]), hidden.dtype))
        if logits.dtype == torch.float32:
            return logits
        return workspace.take(tuple(logits.shape), torch.float32).copy_(logits)


def _linear(x: Tensor, page: Parameters, name: str, workspace: Workspace) -> Tensor:
    """[tokens, in] -> [tokens, out], in the workspace."""
    weight = page.matrices[f"{name}.weight"]
    output = workspace.take((x.shape[0], weight.shape[0]), x.dtype)
    return weight.product(x, page.tensors.get(f"{name}.bias"), output)


def _project(x: Tensor, weight: Matrix) -> Tensor:
    """[..., in] -> [..., out], between the width of the embeddings and that of the hidden states."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # rows of a padded table are not
    return weight.product(flat, None, flat.new_empty(flat.shape[0], weight.shape[0])).view(*x.shape[:-1], -1)


def _norm(x: Tensor, page: Parameters, name: str, workspace: Workspace) -> Tensor:
    """Layer normalisation of [tokens, hidden_size]."""
    statistics = (x.shape[0], 1)
    output, _, _ = torch.ops.aten.native_layer_norm.out(
        x,
        (x.shape[1],),
        page.tensors.get(f"{name}.weight"),
        page.tensors.get(f"{name}.bias"),
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
