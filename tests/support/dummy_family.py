"""A family of models that nobody has published: all that adding one takes is this file and a line of registration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.models.architecture import Architecture
from flexgen_h2o.models.base import Family, Parameters
from flexgen_h2o.plan.model_shape import ModelShape, ParameterShape


class DummyModels(Architecture):
    """What there is to know of them."""

    name = "dummy"
    owner = "nobody"
    sizes = ("dummy-small",)
    second_mlp_matrix = "down"

    @classmethod
    def read(cls, config: Mapping[str, Any], name: str, source: str) -> ModelShape:
        width, heads, words = config["width"], config["heads"], config["words"]
        return ModelShape(
            family=cls.name,
            name=name,
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=config["layers"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=width // heads,
            intermediate_size=2 * width,
            max_position_embeddings=64,
            layer=(
                ParameterShape("qkv", (3 * width, width), "matrix"),
                ParameterShape("out", (width, width), "matrix"),
                ParameterShape("up", (2 * width, width), "matrix"),
                ParameterShape("down", (width, 2 * width), "matrix"),
                ParameterShape("shift", (width,), "vector"),
            ),
            outer=(ParameterShape("words", (words, width), "matrix"),),
            head=("words",),
            settings=tuple(sorted(config.items())),
            eos_token_ids=(words - 1,),
        )

    @classmethod
    def published(cls, name: str, changes: Mapping[str, Any]) -> ModelShape:
        return cls.read({"layers": 3, "width": 32, "heads": 4, "words": 50, **changes}, name, name)

    @classmethod
    def config_values(cls, shape: ModelShape) -> dict[str, Any]:
        return {"model_type": cls.name, **dict(shape.settings)}  # type: ignore[call-overload]


class Dummy(Family):
    """Attention and an MLP with tanh, without norms, biases or positions; queries, keys and values by one matrix."""

    def embed(self, ids: Tensor, positions: Tensor, outer: Parameters) -> Tensor:
        return outer.matrices["words"].rows(ids)

    def project_qkv(
        self, hidden: Tensor, positions: Tensor, page: Parameters, workspace: Workspace
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, heads, size = len(hidden), self.shape.num_attention_heads, self.shape.head_dim
        together = _product(hidden, page, "qkv", workspace).view(tokens, 3, heads, size)
        query, key, value = (workspace.take((tokens, heads, size), hidden.dtype) for _ in range(3))
        for part, target in zip(together.unbind(1), (query, key, value), strict=True):
            target.copy_(part)
        return (query * size**-0.5).unsqueeze(2), key, value

    def finish_layer(self, hidden: Tensor, attended: Tensor, page: Parameters, workspace: Workspace) -> Tensor:
        hidden += _product(attended.reshape(hidden.shape), page, "out", workspace) + page.tensors["shift"]
        inner = _product(hidden, page, "up", workspace).tanh_()
        hidden += _product(inner, page, "down", workspace)
        return hidden

    def logits(self, hidden: Tensor, outer: Parameters, workspace: Workspace) -> Tensor:
        return _product(hidden, outer, "words", workspace).float()


def _product(x: Tensor, parameters: Parameters, name: str, workspace: Workspace) -> Tensor:
    matrix = parameters.matrices[name]
    return matrix.product(x, None, workspace.take((len(x), matrix.shape[0]), x.dtype))


def next_logits(weights: Mapping[str, Tensor], layers: int, heads: int, ids: list[int]) -> Tensor:
    """The logits after a text, [words], by the definition."""
    hidden = weights["words"][ids]
    n = len(ids)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    for layer in range(layers):
        own = {name: weights[f"layers.{layer}.{name}"] for name in ("qkv", "out", "up", "down", "shift")}
        query, key, value = (
            part.view(n, heads, -1).transpose(0, 1) for part in (hidden @ own["qkv"].T).chunk(3, dim=1)
        )
        logits = (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
        attended = (logits.softmax(dim=-1) @ value).transpose(0, 1).reshape(n, -1)
        hidden = hidden + attended @ own["out"].T + own["shift"]
        hidden = hidden + (hidden @ own["up"].T).tanh() @ own["down"].T
    return hidden[-1] @ weights["words"].T
