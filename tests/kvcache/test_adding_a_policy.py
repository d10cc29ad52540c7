"""Adding an eviction policy: one file, and one line of registration. It sees keys, and its sizes differ by layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.dummy_policy import SmallKeys

from flexgen_h2o import LLM, SamplingParams, run
from flexgen_h2o.kvcache.eviction import registry
from flexgen_h2o.plan.placement import Percent

PROMPTS = [[11, 25, 3, 140, 7, 9, 300, 12, 8, 77, 5, 6], [9, 8, 7], [40, 41, 42, 43, 44, 45, 46, 47]]
HOMES = {
    "memory": Percent(),
    "KV on disk": Percent(100, 0, 0, 0, 100, 0),
    "half of the KV on disk": Percent(100, 0, 50, 0, 100, 0),
    "everything on disk": Percent(0, 0, 0, 0, 0, 0),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(registry.HOMES, "small-keys", "support.dummy_policy:SmallKeys")
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "cache"))


def opened(tmp_path: Path, home: str, **more: object) -> LLM:
    sizes = {"eviction": "small-keys:slope=4", "hh_size": 4, "recent_size": 2, "dtype": "float32"}
    block = {"gpu_batch_size": 2, "num_gpu_batches": 2, "percent": HOMES[home]}
    return LLM(offload_dir=tmp_path / "offload", **{**sizes, **block, **more})  # type: ignore[arg-type]


def test_entries_with_small_keys_stay_more_of_them_in_deep_layers(tmp_path: Path) -> None:
    with opened(tmp_path, "memory") as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=1))
        engine = llm._engine
        assert engine is not None
        heavy = [layer[0].buffer.shape.heavy for layer in engine.kv.units]  # type: ignore[union-attr]
        # By hand: 4 more in the last of 4 layers than in the first, 4 on average.
        assert heavy == [2, 3, 5, 6]
        for layer, (unit,) in enumerate(engine.kv.units):
            buffer = unit.buffer
            assert buffer is not None
            kept = buffer.columns[0, :, : heavy[layer]]
            norms = buffer.heavy.keys[0].norm(dim=-1)[:, : heavy[layer]]
            assert torch.allclose(buffer.scores[0, :, : heavy[layer]], -norms)
            assert bool((kept >= 0).all()) and bool((kept < len(PROMPTS[0]) - 2).all())


@pytest.mark.parametrize("home", [name for name in HOMES if name != "memory"])
def test_homes_change_nothing(tmp_path: Path, home: str) -> None:
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    outputs, sizes = [], []
    for place in ("memory", home):
        with opened(tmp_path, place) as llm:
            outputs.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            sizes.append((llm.kv_cache_bytes, llm.totals.evictions))
    assert outputs[0] == outputs[1] and sizes[0] == sizes[1]
    # By hand: two keys and values of 32 float32 for each of 8 heads, 4 rows, (4 heavy on average + 2) slots, 4 layers.
    assert sizes[0][0] == 2 * 32 * 4 * 8 * 3 * 6 * 4


def test_run_takes_it_with_its_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "prompts.jsonl"
    given.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    words = ["--input", str(given), "--output", str(tmp_path / "out.jsonl"), "--json", "--gen-len", "4"]
    words += ["--percent", *"100 0 100 0 100 0".split(), "--hh-size", "3", "--recent-size", "2"]
    assert run.main([*words, "--eviction", "small-keys:slope=0"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["eviction"]["name"] == "small-keys" and report["eviction"]["evictions"] > 0


def test_the_mean_of_the_layers_sizes_is_as_asked() -> None:
    rules = [SmallKeys(10, 4, slope=6).at_layer(layer, 7) for layer in range(7)]
    assert sum(rule.heavy for rule in rules) == 70
