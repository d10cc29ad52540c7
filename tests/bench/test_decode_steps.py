"""Decode steps from a synthetic cache: that they are real ones, whose turns are taken, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import call, read_jsonl
from support.helpers import TinyOpt, largest_difference
from torch import Tensor
from transformers import DynamicCache

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench import __main__ as command
from flexgen_h2o.bench import decode_steps
from flexgen_h2o.bench.decode_steps import DecodeSizes, measure, transformers_model
from flexgen_h2o.bench.models import fill_cache
from flexgen_h2o.engine.block import BlockStart, PromptBlock
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.policy import Policy

TINY = ("--model", "opt-125m", "--layers", "1", "--batch", "2", "--cache-len", "30", "--steps", "2", "--threads", "1")
GB = 2**30


def workload(**changes: object) -> DecodeSizes:
    config = published("opt-125m", num_hidden_layers=1)
    return replace(DecodeSizes(config, 2, 30, 2, "float32", 1, 3), **changes)


def test_the_object_that_is_printed() -> None:
    finished = call(command, ["decode", *TINY, "--trials", "1", "--dtype", "float32", "--json"])
    assert finished.code == 0, finished.err
    result = json.loads(finished.out.splitlines()[-1])
    engines = result["engines"]
    assert list(engines) == ["h2o", "full", "transformers"]
    for name, row in engines.items():
        # 33 tokens at the end, a tenth of them twice; half-way through the trial 32 have been seen.
        slots = 6 if name == "h2o" else 32
        assert row["kv_bytes"] == 2 * 2 * slots * 768 * 4  # keys and values, rows, entries, elements, bytes
        assert row["tok_s"] == pytest.approx(2 / row["step_s"])
        weights = result["config"]["weight_bytes"]
        reading = row["kv_bytes"] / result["read_bytes_s"]
        assert row["memory_s"] == pytest.approx(weights / result["read_bytes_s"] + reading)
        assert row["limit_s"] == pytest.approx(max(row["memory_s"], result["products_s"] + reading))
        assert row["limit_share"] == pytest.approx(row["limit_s"] / row["step_s"])
    for name in ("full", "transformers"):
        assert result["ratios"][name] == pytest.approx(engines[name]["step_s"] / engines["h2o"]["step_s"])
    assert result["config"]["h2o_slots"] == 6 and result["config"]["layers"] == 1


def test_a_table_without_json_and_a_record_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "decode.jsonl"
    argv = ["decode", *TINY, "--record", str(file)]
    finished = call(command, argv)
    assert finished.code == 0, finished.err
    assert all(f"| {title} |" in finished.out for title in ("H2O, 6 entries", "full", "transformers"))
    (record,) = read_jsonl(file)
    assert record["name"] == "bench decode" and record["kind"] == "measurement"
    assert record["command"] == " ".join(["python -m flexgen_h2o.bench", *argv])
    assert all(len(row["seconds"]) == 5 for row in record["engines"].values())


def test_every_mistake_is_named() -> None:
    wrong = ["--layers", "99", "--dtype", "int4", "--batch", "0", "--cache-len", "x", "--steps", "-1"]
    finished = call(command, ["decode", *wrong])
    assert finished.code == 2 and finished.out == ""
    named = [problem.split()[0] for problem in finished.problems]
    assert named == ["--layers", "--dtype", "--batch", "--cache-len", "--steps"]
    (problem,) = call(command, ["decode", "--cache-len", "2044", "--steps", "4"]).problems
    assert "2044" in problem and "2048" in problem and "shorten" in problem


def test_what_does_not_fit_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_steps, "usable_memory", lambda: GB)
    with pytest.raises(UsageError) as refused:
        measure(workload(batch=1000, cache_len=2000))
    (problem,) = refused.value.problems
    assert "--batch 1000" in problem and "--cache-len 2000" in problem and "1.0 GB are free" in problem


def test_memory_that_is_foreseen() -> None:
    whole = DecodeSizes(published("opt-1.3b"), 32, 1024, 4, "bfloat16", 2, 5)
    weights, full, h2o = (1.316e9 * 2, 24 * 32 * 1029 * 2048 * 4, 24 * 32 * 204 * 2048 * 4)
    expected = decode_steps.resident_bytes() + 2 * weights + full + h2o + 2**29
    assert expected < whole.needed_bytes < expected + 2 * GB


def test_the_turns_are_taken_in_order_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([90.0, 90.0, 90.0, 4.0, 1.0, 9.0, 5.0, 3.0, 8.0, 6.0, 2.0, 7.0])
    turns = []

    def take(name: str) -> float:
        turns.append(name)
        return next(spent)

    monkeypatch.setattr(decode_steps, "_engine_steps", lambda work, runtime, name, *_: take(name))
    monkeypatch.setattr(decode_steps, "_transformers_steps", lambda *_: take("transformers"))
    monkeypatch.setattr(decode_steps, "_seconds_of_reading", lambda: 0.25)
    monkeypatch.setattr(decode_steps, "_seconds_of_products", lambda *_: 0.5)
    rounds: list[int] = []
    result = measure(workload(), lambda: rounds.append(len(turns)))
    assert turns == ["full", "h2o", "transformers"] * 4 and rounds == [3, 6, 9, 12]
    assert result["read_bytes_s"] == 2 * GB and result["products_s"] == 0.5
    assert {name: row["step_s"] for name, row in result["engines"].items()} == {
        "full": 5.0,
        "h2o": 2.0,
        "transformers": 8.0,
    }
    assert result["ratios"] == {"full": 2.5, "transformers": 4.0}


class KeptLogits:
    """A TokenChooser that goes on with given tokens, [rows, steps], and keeps the logits of every step."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens
        self.logits: list[Tensor] = []

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return self.tokens[list(requests), steps[0] % self.tokens.shape[1]]

    def finished(self) -> Sequence[int]:
        return ()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("cache_len", [1, 20])
def test_a_step_from_a_filled_cache_is_the_one_of_transformers(tiny: Callable[..., TinyOpt], cache_len: int) -> None:
    """The same keys and values in both caches, the same weights: the same logits, at the right positions."""
    rows, steps = 3, 4
    model = tiny()
    shape = (rows, model.config.num_attention_heads, cache_len, model.config.head_dim)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, *shape, generator=generator)
    tokens = torch.randint(model.config.vocab_size, (rows, steps), generator=generator)
    engine = model.engine(Full(0, cache_len + steps), Policy(rows), rows)
    fill_cache(engine, keys, values, torch.zeros(shape[:3]))
    block = PromptBlock(torch.zeros(rows, cache_len, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    chooser = KeptLogits(tokens)
    engine.run(block, steps + 1, chooser, BlockStart(1, tokens[:, :1]))
    assert len(chooser.logits) == steps
    cache = DynamicCache(config=model.model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(keys, values, layer)
    for step in range(steps):
        with torch.no_grad():
            expected = model.model(input_ids=tokens[:, step : step + 1], past_key_values=cache).logits[:, -1]
        assert largest_difference(chooser.logits[step], expected) < 1e-4


def test_the_model_of_transformers_has_random_weights_and_its_own_default_attention() -> None:
    config = published("opt-125m", num_hidden_layers=1, vocab_size=50)
    model = transformers_model(config, torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    assert model.lm_head.weight.data_ptr() == model.model.decoder.embed_tokens.weight.data_ptr()
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        assert parameter.dtype == torch.bfloat16, name
        assert 0.01 < float((parameter.detach().float() - mean).std()) < 0.03, name
