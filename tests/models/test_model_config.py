"""What config.json says, checked: against transformers' own parameters, and every mistake named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import VARIANTS, make_tiny_opt, tiny_config

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.models.opt_config import PUBLISHED_SIZES, OptConfig
from flexgen_h2o.models.registry import facts_of, from_dict, from_folder, published
from flexgen_h2o.plan.model_shape import ModelShape


def parameters(model: Any) -> dict[str, tuple[int, ...]]:
    """transformers' parameters by their names relative to the decoder; a tied head is listed once."""
    return {name.removeprefix("model.decoder."): tuple(parameter.shape) for name, parameter in model.named_parameters()}


def opt_settings(shape: ModelShape) -> OptConfig:
    """What config.json says of OPT alone."""
    assert isinstance(shape.settings, OptConfig)
    return shape.settings


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_the_parameters_of_transformers(variant: str, tmp_path: Path) -> None:
    tiny_config(variant).save_pretrained(tmp_path)
    assert from_folder(tmp_path).shapes() == parameters(make_tiny_opt(variant))


def test_a_folder_is_judged_by_its_config_and_not_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "opt-125m"
    tiny_config("post_norm_projected").save_pretrained(folder)
    config = from_folder(folder)
    assert config.name == "opt-125m"
    settings = opt_settings(config)
    assert (config.num_hidden_layers, config.hidden_size, settings.word_embed_proj_dim) == (2, 32, 16)
    assert not settings.do_layer_norm_before and not settings.has_final_norm and settings.has_embedding_projection


def test_keys_that_are_left_out_take_the_defaults_of_transformers() -> None:
    from transformers import OPTConfig

    mine, theirs = opt_settings(from_dict({}, "x")), OPTConfig()
    for field in dataclasses.fields(OptConfig):
        if hasattr(theirs, field.name):
            assert getattr(mine, field.name) == getattr(theirs, field.name), field.name
    assert mine.remove_final_layer_norm == theirs._remove_final_layer_norm
    assert mine.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-125m", 0.125),
        ("opt-350m", 0.331),
        ("opt-1.3b", 1.316),
        ("opt-2.7b", 2.652),
        ("opt-6.7b", 6.658),
        ("opt-13b", 12.85),
        ("opt-30b", 29.97),
        ("opt-66b", 65.72),
        ("opt-175b", 174.6),
    ],
)
def test_published_sizes_have_as_many_parameters_as_published(name: str, billions: float) -> None:
    counts = []
    for shape in published(name).shapes().values():
        counts.append(shape[0] * (shape[1] if len(shape) == 2 else 1))
    assert sum(counts) == pytest.approx(billions * 1e9, rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_names_with_and_without_their_owner(name: str) -> None:
    config = published(name)
    assert published(f"facebook/{name}") == config
    assert config.name == name and config.max_position_embeddings == 2048
    assert opt_settings(config).do_layer_norm_before == (name != "opt-350m")
    assert config.head_dim * config.num_attention_heads == config.hidden_size


@pytest.mark.parametrize("name", ["opt-31b", "gpt2", "", "facebook/", "OPT-30B"])
def test_other_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="opt-125m.*opt-175b"):
        published(name)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "llama"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"hidden_size": "768"}, ["hidden_size", "'768'"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_attention_heads": 2.0}, ["num_attention_heads", "2.0"]),
        ({"ffn_dim": None}, ["ffn_dim", "None"]),
        ({"max_position_embeddings": True}, ["max_position_embeddings", "True"]),
        ({"word_embed_proj_dim": "512"}, ["word_embed_proj_dim", "512"]),
        ({"word_embed_proj_dim": 0}, ["word_embed_proj_dim", "0"]),
        ({"do_layer_norm_before": "yes"}, ["do_layer_norm_before", "yes"]),
        ({"enable_bias": 1}, ["enable_bias", "1"]),
        ({"layer_norm_elementwise_affine": None}, ["layer_norm_elementwise_affine"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings", "false"]),
        ({"_remove_final_layer_norm": "false"}, ["_remove_final_layer_norm", "false"]),
        ({"activation_function": "swish"}, ["activation_function", "swish", "relu"]),
        ({"hidden_size": 100, "num_attention_heads": 12}, ["hidden_size 100", "num_attention_heads 12"]),
        ({"eos_token_id": "2"}, ["special token"]),
        ({"bos_token_id": 1.5}, ["special token"]),
        ({"pad_token_id": [1]}, ["special token"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_each_mistake_is_named(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_dict(values, "x", "folder/config.json")
    assert len(caught.value.problems) == 1
    for word in [*words, "folder/config.json"]:
        assert word in caught.value.problems[0]


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        from_dict({"vocab_size": -5, "enable_bias": "no", "activation_function": "tanh"}, "x")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "words"), [("{", "JSON"), ("[1]", "list"), ("", "JSON"), ('"opt"', "str"), ("\x00", "JSON")]
)
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        from_folder(tmp_path)


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_without_config_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no config.json"):
        from_folder(tmp_path / folder)


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ()), (0, (0,))])
def test_eos_may_be_one_id_or_several_or_none(eos: Any, ids: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert from_folder(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize(("pad", "filler"), [(1, 1), (0, 0), (99, 99), (100, 0), (-1, 0), (None, 0)])
def test_the_filler_is_always_a_valid_id(pad: int | None, filler: int) -> None:
    assert from_dict({"vocab_size": 100, "pad_token_id": pad}, "x").filler_token_id == filler


@pytest.mark.parametrize("model_type", ["llama", None, 3, ["opt"], "x" * 1000])
def test_of_another_family_nothing_else_is_judged(model_type: Any) -> None:
    with pytest.raises(UsageError, match="model_type is .*only 'opt'") as caught:
        from_dict({"model_type": model_type, "vocab_size": -5, "enable_bias": "no"}, "x", "folder/config.json")
    assert len(caught.value.problems) == 1 and len(caught.value.problems[0]) < 200


def test_settings_of_a_published_model_can_be_changed() -> None:
    config = published("facebook/opt-350m", num_hidden_layers=1, ffn_dim=96)
    assert (config.num_hidden_layers, config.intermediate_size, config.hidden_size) == (1, 96, 1024)
    assert opt_settings(config).word_embed_proj_dim == 512
    assert config.layer_shapes()["fc1.weight"] == (96, 1024)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_multiplied_with_is_told_from_what_is_looked_up(variant: str) -> None:
    shape = from_dict(tiny_config(variant).to_dict(), "x")
    kinds = {name: parameter.kind for name, parameter in shape.parameters().items()}
    assert {name for name, kind in kinds.items() if kind == "table"} == {"embed_positions.weight"}
    for name, parameter in shape.parameters().items():
        assert (parameter.kind == "vector") == (len(parameter.shape) == 1), name
        assert parameter.mean == (1.0 if name.endswith("norm.weight") else 0.0), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_elements_of_products_by_hand(variant: str) -> None:
    shape = from_dict(tiny_config(variant).to_dict(), "x")
    hidden, embed = shape.hidden_size, opt_settings(shape).word_embed_proj_dim
    assert shape.qkv_elements == 3 * hidden**2
    assert shape.layer_elements == 4 * hidden**2 + 2 * hidden * shape.intermediate_size
    assert shape.head_elements == shape.vocab_size * embed + (hidden * embed if embed != hidden else 0)
    assert shape.num_key_value_heads * shape.head_dim == hidden


def test_the_same_architecture_has_the_same_identity() -> None:
    assert published("opt-125m").identity == published("facebook/opt-125m").identity
    assert published("opt-125m").identity != published("opt-125m", eos_token_ids=(7,)).identity
    # As it was when the first folders of weights and of jobs were named after it: they are found again.
    assert published("opt-125m").identity.startswith("ModelConfig(name='opt-125m', vocab_size=50272, hidden_size=768,")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_that_is_written_is_read_as_the_same_model(variant: str) -> None:
    shape = from_dict(tiny_config(variant).to_dict(), "x")
    tokens = {"bos_token_id": shape.bos_token_id, "eos_token_id": list(shape.eos_token_ids)}
    written = {**facts_of(shape.family).config_values(shape), **tokens, "pad_token_id": shape.pad_token_id}
    assert from_dict(written, "x") == shape
