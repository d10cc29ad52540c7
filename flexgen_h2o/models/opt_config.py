"""OPT's models (Zhang et al. 2022, arXiv 2205.01068): published sizes (table 1), and what config.json says.

For a folder, its config.json decides and never its name. Keys that config.json leaves out take the defaults of
transformers' OPTConfig. A bias or norm parameter that the architecture lacks is simply absent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.values import shown
from flexgen_h2o.models.architecture import Architecture
from flexgen_h2o.plan.model_shape import ModelShape, ParameterShape

ACTIVATIONS = ("relu", "gelu", "gelu_new")
# OPT's position table has two rows before that of position 0.
POSITION_OFFSET = 2

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

# Beyond any model there is; a file that asks for more is broken, and would take memory before that is noticed.
MOST_LAYERS, MOST_SIZE = 10_000, 10**8

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "ffn_dim",
    "max_position_embeddings",
)
_SWITCHES = ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "tie_word_embeddings")


@dataclass(frozen=True)
class OptConfig:
    """Everything that an OPT model's config.json says and is needed here. Field names are transformers'."""

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

    def __repr__(self) -> str:
        # Its name when folders of weights and jobs were first named after it: they are found again.
        return f"ModelConfig({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in fields(self))})"

    @property
    def has_embedding_projection(self) -> bool:
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def has_final_norm(self) -> bool:
        return self.do_layer_norm_before and not self.remove_final_layer_norm

    @property
    def head_matrix(self) -> str:
        """The name of the matrix whose rows are the tokens that logits score."""
        return "embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"

    def shape(self) -> ModelShape:
        """The model as plans know it."""
        projection = ("project_out.weight",) if self.has_embedding_projection else ()
        return ModelShape(
            family=OptModels.name,
            name=self.name,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            intermediate_size=self.ffn_dim,
            max_position_embeddings=self.max_position_embeddings,
            layer=tuple(self._layer()),
            outer=tuple(self._outer()),
            head=(self.head_matrix, *projection),
            settings=self,
            norms_held=1 if self.do_layer_norm_before else 2,
            activates_in_place=self.activation_function == "relu",
            # Tied embeddings are stored under either name, or under both.
            aliases=(("lm_head.weight", "embed_tokens.weight"),) if self.tie_word_embeddings else (),
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
        )

    def _layer(self) -> Iterator[ParameterShape]:
        yield from self._norm("self_attn_layer_norm")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from self._linear(f"self_attn.{name}", self.hidden_size, self.hidden_size)
        yield from self._norm("final_layer_norm")
        yield from self._linear("fc1", self.ffn_dim, self.hidden_size)
        yield from self._linear("fc2", self.hidden_size, self.ffn_dim)

    def _outer(self) -> Iterator[ParameterShape]:
        embed, hidden = self.word_embed_proj_dim, self.hidden_size
        yield ParameterShape("embed_tokens.weight", (self.vocab_size, embed), "matrix")
        positions = self.max_position_embeddings + POSITION_OFFSET
        yield ParameterShape("embed_positions.weight", (positions, hidden), "table")
        if self.has_embedding_projection:
            yield ParameterShape("project_in.weight", (hidden, embed), "matrix")
            yield ParameterShape("project_out.weight", (embed, hidden), "matrix")
        if self.has_final_norm:
            yield from self._norm("final_layer_norm")
        if not self.tie_word_embeddings:
            yield ParameterShape("lm_head.weight", (self.vocab_size, embed), "matrix")

    def _linear(self, name: str, rows: int, columns: int) -> Iterator[ParameterShape]:
        yield ParameterShape(f"{name}.weight", (rows, columns), "matrix")
        if self.enable_bias:
            yield ParameterShape(f"{name}.bias", (rows,), "vector")

    def _norm(self, name: str) -> Iterator[ParameterShape]:
        if self.layer_norm_elementwise_affine:
            yield ParameterShape(f"{name}.weight", (self.hidden_size,), "vector", mean=1.0)
            yield ParameterShape(f"{name}.bias", (self.hidden_size,), "vector")


class OptModels(Architecture):
    """OPT's facts."""

    name = "opt"
    owner = "facebook"
    sizes = tuple(PUBLISHED_SIZES)
    second_mlp_matrix = "fc2.weight"

    @classmethod
    def read(cls, config: Mapping[str, Any], name: str, source: str) -> ModelShape:
        return read_config(config, name, source).shape()

    @classmethod
    def published(cls, name: str, changes: Mapping[str, Any]) -> ModelShape:
        layers, heads, hidden = PUBLISHED_SIZES[name]
        config = OptConfig(
            name=name,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_size=hidden,
            word_embed_proj_dim=hidden,
            ffn_dim=4 * hidden,
        )
        if name == "opt-350m":
            config = replace(config, word_embed_proj_dim=512, do_layer_norm_before=False)
        return replace(config, **changes).shape()

    @classmethod
    def config_values(cls, shape: ModelShape) -> dict[str, Any]:
        config = cast(OptConfig, shape.settings)
        names = (*_SIZES, *_SWITCHES, "word_embed_proj_dim", "activation_function")
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": cls.name,
            **{name: getattr(config, name) for name in names},
            "_remove_final_layer_norm": config.remove_final_layer_norm,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "layerdrop": 0.0,
            "use_cache": True,
        }

    @staticmethod
    def parameter_name(key: str) -> str:
        return key.removeprefix("model.").removeprefix("decoder.")

    @staticmethod
    def checkpoint_key(name: str) -> str:
        return name if name.startswith("lm_head.") else f"model.decoder.{name}"


def read_config(values: Mapping[str, Any], name: str, source: str) -> OptConfig:
    """The configuration that a parsed config.json describes. Raises UsageError with every mistake found in it."""
    problems = []
    found: dict[str, Any] = {"name": name}
    embed = values.get("word_embed_proj_dim")
    sizes = {key: values.get(key, getattr(OptConfig, key)) for key in _SIZES}
    if embed is not None:
        sizes["word_embed_proj_dim"] = embed
    for key, value in sizes.items():
        most = MOST_LAYERS if key == "num_hidden_layers" else MOST_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            problems.append(
                f"{source}: {key} is {shown(value)}; it must be a whole number of at least 1 and at most {most}"
            )
        found[key] = value
    switches = {key: (key, True) for key in _SWITCHES} | {
        "remove_final_layer_norm": ("_remove_final_layer_norm", False)
    }
    for field, (key, default) in switches.items():
        found[field] = values.get(key, default)
        if not isinstance(found[field], bool):
            problems.append(f"{source}: {key} is {shown(found[field])}; it must be true or false")
    found["activation_function"] = values.get("activation_function", "relu")
    if found["activation_function"] not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        problems.append(f"{source}: activation_function is {shown(found['activation_function'])}; known ones: {known}")
    found.setdefault("word_embed_proj_dim", found["hidden_size"])
    problems += _read_special_tokens(values, source, found)
    if not problems and found["hidden_size"] % found["num_attention_heads"]:
        problems.append(
            f"{source}: hidden_size {found['hidden_size']} is no multiple of"
            f" num_attention_heads {found['num_attention_heads']}"
        )
    if problems:
        raise UsageError(problems)
    return OptConfig(**found)


def _read_special_tokens(values: Mapping[str, Any], source: str, found: dict[str, Any]) -> list[str]:
    """Adds bos, eos (one id, a list or none) and pad to `found`; returns what is wrong with them."""
    eos = values.get("eos_token_id", 2)
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    found["eos_token_ids"] = tuple(eos_ids)
    found["bos_token_id"] = values.get("bos_token_id", 2)
    found["pad_token_id"] = values.get("pad_token_id", 1)
    ids = [*eos_ids, found["bos_token_id"], found["pad_token_id"]]
    if all(token is None or (isinstance(token, int) and not isinstance(token, bool)) for token in ids):
        return []
    return [f"{source}: special token ids {shown(ids)} must be whole numbers"]
