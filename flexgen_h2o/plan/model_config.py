"""The architecture of an OPT model: sizes, variants, and the shape of every parameter.

Published sizes: OPT (Zhang et al. 2022, arXiv 2205.01068), table 1. For a folder, its config.json decides and never
its name. Keys that config.json leaves out take the defaults of transformers' OPTConfig.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError

ACTIVATIONS = ("relu", "gelu", "gelu_new")

OUTER_MATRICES = ("embed_tokens.weight", "project_in.weight", "project_out.weight", "lm_head.weight")

# name: (layers, heads, hidden size). All but 350m: pre-norm, embeddings as wide as the hidden state.
PUBLISHED_SIZES = {
    "opt-125m": (12, 12, 768),
    "opt-350m": (24, 16, 1024),
    "opt-1.3b": (24, 32, 2048),
    "opt-2.7b": (32, 32, 2560),
    "opt-6.7b": (32, 32, 4096),
    "opt-13b": (40, 40, 5120),
    "opt-30b": (48, 56, 7168),
    "opt-66b": (64, 72, 9216),
    "opt-175b": (96, 96, 12288),
}

Shapes = dict[str, tuple[int, ...]]


def is_matrix(name: str) -> bool:
    """Whether a parameter is multiplied with, or a table as large as one; not so the position table, norms and biases.

    Args:
        name: relative to the decoder or to its layer.
    """
    return name.endswith(("_proj.weight", "fc1.weight", "fc2.weight")) or name in OUTER_MATRICES


def is_table(name: str) -> bool:
    """Whether a parameter is two-dimensional and only looked up."""
    return name == "embed_positions.weight"


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its config.json says and the engine needs. Field names are transformers'."""

    name: str
    vocab_size: int = 50272
    hidden_size: int = 768
    word_embed_proj_dim: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    activation_function: str = "relu"
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_ids: tuple[int, ...] = (2,)
    pad_token_id: int | None = 1

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_embedding_projection(self) -> bool:
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def has_final_norm(self) -> bool:
        return self.do_layer_norm_before and not self.remove_final_layer_norm

    @property
    def filler_token_id(self) -> int:
        """A valid id for pads and finished rows. Its value never matters: masks come from lengths."""
        pad = self.pad_token_id
        return pad if pad is not None and 0 <= pad < self.vocab_size else 0

    def _linear(self, name: str, rows: int, columns: int) -> Shapes:
        bias = {f"{name}.bias": (rows,)} if self.enable_bias else {}
        return {f"{name}.weight": (rows, columns), **bias}

    def _norm(self, name: str) -> Shapes:
        if not self.layer_norm_elementwise_affine:
            return {}
        return {f"{name}.weight": (self.hidden_size,), f"{name}.bias": (self.hidden_size,)}

    def layer_shapes(self) -> Shapes:
        """Parameters of one decoder layer, named relative to it. All layers are alike."""
        hidden = self.hidden_size
        shapes = self._norm("self_attn_layer_norm")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= self._linear(f"self_attn.{name}", hidden, hidden)
        shapes |= self._norm("final_layer_norm")
        shapes |= self._linear("fc1", self.ffn_dim, hidden)
        return shapes | self._linear("fc2", hidden, self.ffn_dim)

    def outer_shapes(self) -> Shapes:
        """Parameters outside the decoder layers, named relative to the decoder."""
        embed, hidden = self.word_embed_proj_dim, self.hidden_size
        shapes: Shapes = {
            "embed_tokens.weight": (self.vocab_size, embed),
            # OPT's learned positions start at row 2 of the table.
            "embed_positions.weight": (self.max_position_embeddings + 2, hidden),
        }
        if self.has_embedding_projection:
            shapes |= {"project_in.weight": (hidden, embed), "project_out.weight": (embed, hidden)}
        if self.has_final_norm:
            shapes |= self._norm("final_layer_norm")
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, embed)
        return shapes

    def matrix_shapes(self) -> set[tuple[int, int]]:
        """Shapes [out, in] of the model's matrices."""
        shapes = {**self.outer_shapes(), **self.layer_shapes()}
        return {(shape[0], shape[1]) for name, shape in shapes.items() if is_matrix(name)}

    def table_shapes(self) -> set[tuple[int, int]]:
        """Shapes of what is two-dimensional and only looked up."""
        return {(shape[0], shape[1]) for name, shape in self.outer_shapes().items() if is_table(name)}

    def shapes(self) -> Shapes:
        """Every parameter of the model, by its name relative to the decoder."""
        per_layer = self.layer_shapes()
        layers = {
            f"layers.{layer}.{name}": shape
            for layer in range(self.num_hidden_layers)
            for name, shape in per_layer.items()
        }
        return self.outer_shapes() | layers


def published(name: str) -> ModelConfig:
    """The configuration of a published size, such as "opt-30b" or "facebook/opt-30b".

    Raises UsageError for any other name.
    """
    short = name.removeprefix("facebook/")
    if short not in PUBLISHED_SIZES:
        known = ", ".join(PUBLISHED_SIZES)
        raise UsageError(f"--model {name} is neither a folder nor a published size; known sizes: {known}")
    layers, heads, hidden = PUBLISHED_SIZES[short]
    variant: dict[str, Any] = {}
    if short == "opt-350m":
        variant = {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
    return ModelConfig(
        **{
            "name": short,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_size": hidden,
            "word_embed_proj_dim": hidden,
            "ffn_dim": 4 * hidden,
            **variant,
        }
    )


def from_folder(folder: Path) -> ModelConfig:
    """Reads config.json of a folder in Hugging Face format. Raises UsageError with every mistake found in it."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no config.json; --model takes a folder in Hugging Face format or a name such as opt-125m"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {type(values).__name__} where an object of settings is expected")
    return from_dict(values, name=folder.resolve().name, source=str(path))


# Beyond any model there is; a file that asks for more is broken, and would take memory before that is noticed.
MOST_LAYERS, MOST_SIZE = 10_000, 10**8
MOST_LETTERS = 80  # of a value, in messages

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "ffn_dim",
    "max_position_embeddings",
)
_SWITCHES = ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "tie_word_embeddings")


def _shown(value: object) -> str:
    """A value of a file, for a message."""
    return repr(value)[:MOST_LETTERS]


def from_dict(values: dict[str, Any], name: str, source: str = "config") -> ModelConfig:
    """The configuration that a parsed config.json describes. Raises UsageError with every mistake found in it."""
    problems = []
    model_type = values.get("model_type", "opt")
    if model_type != "opt":
        problems.append(f"{source}: model_type is {_shown(model_type)}; only 'opt' models are supported")
    found: dict[str, Any] = {"name": name}
    embed = values.get("word_embed_proj_dim")
    sizes = {key: values.get(key, getattr(ModelConfig, key)) for key in _SIZES}
    if embed is not None:
        sizes["word_embed_proj_dim"] = embed
    for key, value in sizes.items():
        most = MOST_LAYERS if key == "num_hidden_layers" else MOST_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            shown = _shown(value)
            problems.append(f"{source}: {key} is {shown}; it must be a whole number of at least 1 and at most {most}")
        found[key] = value
    switches = {key: (key, True) for key in _SWITCHES} | {
        "remove_final_layer_norm": ("_remove_final_layer_norm", False)
    }
    for field, (key, default) in switches.items():
        found[field] = values.get(key, default)
        if not isinstance(found[field], bool):
            problems.append(f"{source}: {key} is {_shown(found[field])}; it must be true or false")
    found["activation_function"] = values.get("activation_function", "relu")
    if found["activation_function"] not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        problems.append(f"{source}: activation_function is {_shown(found['activation_function'])}; known ones: {known}")
    found.setdefault("word_embed_proj_dim", found["hidden_size"])
    problems += _read_special_tokens(values, source, found)
    if not problems and found["hidden_size"] % found["num_attention_heads"]:
        problems.append(
            f"{source}: hidden_size {found['hidden_size']} is no multiple of"
            f" num_attention_heads {found['num_attention_heads']}"
        )
    if problems:
        raise UsageError(problems)
    return ModelConfig(**found)


def _read_special_tokens(values: dict[str, Any], source: str, found: dict[str, Any]) -> list[str]:
    """Adds bos, eos (one id, a list or none) and pad to `found`; returns what is wrong with them."""
    eos = values.get("eos_token_id", 2)
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    found["eos_token_ids"] = tuple(eos_ids)
    found["bos_token_id"] = values.get("bos_token_id", 2)
    found["pad_token_id"] = values.get("pad_token_id", 1)
    ids = [*eos_ids, found["bos_token_id"], found["pad_token_id"]]
    if all(token is None or (isinstance(token, int) and not isinstance(token, bool)) for token in ids):
        return []
    return [f"{source}: special token ids {_shown(ids)} must be whole numbers"]
