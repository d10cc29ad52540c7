"""Drivers of the engines that are installed: all compute the same model, and give exactly the tokens asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.bench.drivers import deepspeed, deepspeed_ops
from flexgen_h2o.bench.drivers.common import ENGINES, EngineRefused, Settings, StartAgain, random_prompts
from flexgen_h2o.bench.paths import ROOT
from flexgen_h2o.bench.peers import PeerJob, alternate, run_peer
from flexgen_h2o.bench.published_models import write_checkpoint
from flexgen_h2o.models.opt_config import OptConfig

# vLLM wants heads of at least 32.
TINY = OptConfig(
    "tiny",
    vocab_size=104,
    hidden_size=128,
    word_embed_proj_dim=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=256,
    max_position_embeddings=64,
).shape()
BATCH, PROMPT_LEN, GEN_LEN = 3, 7, 9
IN_PROCESS = ("transformers", "accelerate_cpu", "accelerate_disk", "ctranslate2", "flexgen_h2o")
FULL_CACHE = {"flexgen_h2o": {"eviction": "full"}, "vllm": {"enforce_eager": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-float32"
    write_checkpoint(TINY, "float32", folder, shard_bytes=200_000)
    return folder


def settings(engine: str, checkpoint: Path, offload_dir: Path, **changes: Any) -> Settings:
    options = FULL_CACHE.get(engine, {})
    wanted = Settings(engine, checkpoint, BATCH, PROMPT_LEN, GEN_LEN, "float32", 1, offload_dir, options)
    return replace(wanted, **changes)


def tokens(wanted: Settings) -> list[list[int]]:
    """What an engine generates, inside this process."""
    module = importlib.import_module(ENGINES[wanted.engine].module)
    package = ENGINES[wanted.engine].packages[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: scripts/setup_peers.sh packages")
    loaded = module.load(wanted)
    try:
        prompts = random_prompts(0, wanted.batch, wanted.prompt_len, TINY.vocab_size)
        generation = loaded.generate(prompts, wanted.gen_len)
    finally:
        loaded.close()
    assert min(generation.prefill_s, generation.decode_s) > 0
    return [list(map(int, row)) for row in generation.token_ids]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens(settings("transformers", checkpoint, checkpoint))


@pytest.mark.parametrize("engine", IN_PROCESS)
def test_engines_generate_the_tokens_of_transformers(
    engine: str, checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    assert [len(row) for row in expected] == [GEN_LEN] * BATCH
    assert len({token for row in expected for token in row}) > BATCH  # they are not one token over and over
    assert tokens(settings(engine, checkpoint, tmp_path)) == expected


@pytest.mark.parametrize("engine", IN_PROCESS)
def test_end_tokens_end_nothing(engine: str, tmp_path: Path) -> None:
    """Whatever token comes first is made the model's end token: rows go on, with the very same tokens."""
    first = tmp_path / "first"
    write_checkpoint(TINY, "float32", first)
    offload = [tmp_path / "offload-1", tmp_path / "offload-2"]
    for folder in offload:
        folder.mkdir()
    before = tokens(settings(engine, first, offload[0]))
    other = replace(TINY, eos_token_ids=(before[0][0],))
    write_checkpoint(other, "float32", tmp_path / "second")
    assert tokens(settings(engine, tmp_path / "second", offload[1])) == before


def test_ctranslate2_converts_once_beside_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    wanted = settings("ctranslate2", checkpoint, tmp_path, dtype="int8")
    assert [len(row) for row in tokens(wanted)] == [GEN_LEN] * BATCH
    made = checkpoint.with_name("tiny-float32-ctranslate2-int8")
    before = (made / "model.bin").stat().st_mtime_ns
    tokens(wanted)
    assert (made / "model.bin").stat().st_mtime_ns == before
    assert not list(checkpoint.parent.glob("*.part-*"))


@pytest.mark.parametrize(
    ("engine", "changes", "part"),
    [
        ("ctranslate2", {"dtype": "bfloat16"}, "int8 or float32 on a CPU, not in bfloat16"),
        ("transformers", {"dtype": "int8"}, "int8 is no precision of torch models"),
        ("transformers", {"options": {"hh_ratio": 0.1}}, "transformers has no option hh_ratio; it has: none"),
        ("flexgen_h2o", {"options": {"hh_ratio": 2}}, "--hh-ratio is 2"),
        ("flexgen_h2o", {"options": {"hh": 2}}, "'hh'"),
        ("flexgen_h2o", {"dtype": "int8"}, "--dtype 'int8' is unknown"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    engine: str, changes: dict[str, Any], part: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineRefused) as refusal:
        tokens(settings(engine, checkpoint, tmp_path, **changes))
    assert part in str(refusal.value)


def test_a_lock_of_a_dead_build_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w"):
        deepspeed_ops.remove_stale_lock(lock)
        assert lock.exists()
    deepspeed_ops.remove_stale_lock(lock)
    assert not lock.exists()
    deepspeed_ops.remove_stale_lock(lock)  # nothing there is fine


def test_too_few_buffers_of_deepspeed_are_refused_if_given_and_else_one_more_is_tried() -> None:
    too_few = AssertionError("Not enough buffers 0 for swapping 1")
    with pytest.raises(EngineRefused, match="buffer_count 1: Not enough buffers"), deepspeed.buffers(1, given=True):
        raise too_few
    with pytest.raises(StartAgain) as again, deepspeed.buffers(1, given=False):
        raise too_few
    assert again.value.options == {"first_buffer_count": 2}
    with pytest.raises(EngineRefused), deepspeed.buffers(deepspeed.MOST_BUFFERS, given=False):
        raise too_few
    with pytest.raises(AssertionError, match="something else"), deepspeed.buffers(1, given=False):
        raise AssertionError("something else")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_in_their_own_process_generate_the_tokens_of_transformers(
    engine: str, checkpoint: Path, tmp_path: Path
) -> None:
    shape = {"batch": BATCH, "prompt_len": PROMPT_LEN, "gen_len": GEN_LEN, "dtype": "float32", "threads": 1}
    jobs = [
        PeerJob(name, checkpoint, **shape, offload_dir=tmp_path, options=FULL_CACHE.get(name, {}))
        for name in ("transformers", engine)
    ]
    reference, row = alternate(jobs, rounds=2)
    if row["status"] == "absent":
        pytest.skip(row["sentence"])
    assert row["status"] == "ok", row["sentence"]
    assert [run["generated_tokens"] for run in row["repeats"]] == [BATCH * GEN_LEN] * 2
    digests = {run["tokens_digest"] for run in [*reference["repeats"], *row["repeats"]]}
    assert len(digests) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv-vllm").exists(), reason="there is no .venv-vllm: scripts/setup_peers.sh vllm")
def test_vllm_says_what_it_does_not_know(checkpoint: Path, tmp_path: Path) -> None:
    row = run_peer(PeerJob("vllm", checkpoint, 1, 4, 4, dtype="int8", offload_dir=tmp_path))
    assert row["status"] == "refused" and "not int8" in row["sentence"]
