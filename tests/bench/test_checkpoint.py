"""Checkpoints with random weights: transformers and this engine load the same model from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.helpers import largest_difference, oracle_logits, random_forced, random_ids, run_forced
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench import published_models as checkpoint
from flexgen_h2o.bench.published_models import published_checkpoint, write_checkpoint
from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.llm import LLM
from flexgen_h2o.models import registry
from flexgen_h2o.models.opt_config import OptConfig

PRE_NORM = OptConfig(
    "tiny",
    vocab_size=104,
    hidden_size=32,
    word_embed_proj_dim=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=128,
    max_position_embeddings=64,
)
CONFIGS = {
    "pre_norm": PRE_NORM,
    "post_norm_projected": replace(PRE_NORM, word_embed_proj_dim=16, do_layer_norm_before=False),  # as opt-350m
    "untied": replace(PRE_NORM, tie_word_embeddings=False),
}
TINY = PRE_NORM.shape()
SHARD_BYTES = 20_000


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_and_the_engine_compute_the_same_logits(name: str, tmp_path: Path) -> None:
    config, folder = replace(CONFIGS[name], name="model").shape(), tmp_path / "model"
    write_checkpoint(config, "float32", folder, shard_bytes=SHARD_BYTES)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    prompts, forced = random_ids(config, [7, 7]), random_forced(config, 2, 3)
    with LLM(str(folder), dtype="float32", eviction="full") as llm:
        assert llm.config == config
        logits = run_forced(llm.load().engine(RunSizes(Full(0, 11), 2, 7)), prompts, forced)
        assert llm.unused_keys == ()
    for row, prompt in enumerate(prompts):
        expected = oracle_logits(model.eval(), prompt, forced[row].tolist())
        assert expected.std() > 1e-3
        assert largest_difference(logits[row], expected) < 1e-5


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_files_are_in_shards_of_random_tensors(dtype: str, itemsize: int, tmp_path: Path) -> None:
    write_checkpoint(TINY, dtype, tmp_path / "model", shard_bytes=SHARD_BYTES)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    tensors = {}
    for file in files:
        stored = load_file(tmp_path / "model" / file)
        assert sum(tensor.nbytes for tensor in stored.values()) <= SHARD_BYTES
        assert all(index["weight_map"][key] == file for key in stored)
        tensors |= stored
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    for key, tensor in tensors.items():
        assert tensor.nbytes == tensor.numel() * itemsize
        mean = 1.0 if key.endswith("norm.weight") else 0.0
        assert abs(tensor.float().mean() - mean) < 0.02 and 0.01 < tensor.float().std() < 0.03
    assert len({tensor.flatten()[:8].float().sum().item() for tensor in tensors.values()}) == len(tensors)


def test_weights_depend_on_the_seed_and_nothing_else(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(name) + seed)
        write_checkpoint(TINY, "float32", tmp_path / name, seed)
    first, same, other = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in "abc")
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_the_tokenizer_knows_every_id(tmp_path: Path) -> None:
    write_checkpoint(TINY, "float32", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert sorted(tokenizer.get_vocab().values()) == [*range(TINY.vocab_size)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)


def test_a_published_size_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 96}
    small = registry.published("opt-125m", **sizes)
    monkeypatch.setattr(checkpoint, "published", lambda name: small)
    folder = published_checkpoint("opt-125m", "bfloat16", tmp_path)
    assert folder == tmp_path / "opt-125m-bfloat16"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert published_checkpoint("opt-125m", "bfloat16", tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["opt-125m-bfloat16"]


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="opt-1b is neither a folder nor a published size"):
        published_checkpoint("opt-1b", "bfloat16", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", no_room)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(TINY, "float32", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
