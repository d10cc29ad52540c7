"""What H2O's scores cost in prefill, at sizes that say nothing about speed; but memory is that of the full size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.commands import call, read_jsonl

from flexgen_h2o.bench import __main__ as command
from flexgen_h2o.bench import column_sums, models
from flexgen_h2o.bench.column_sums import PromptSizes, measure, memory_of_long_prompt, summary
from flexgen_h2o.engine.loop import BlockTimes, Engine
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.models.registry import published

TINY = ("--model", "opt-125m", "--layers", "1", "--prompt-len", "20", "--long-prompt-len", "30", "--threads", "1")
GB = 2**30


def test_the_object_that_is_printed() -> None:
    finished = call(command, ["column-sums", *TINY, "--rows", "1,3", "--trials", "1", "--dtype", "float32", "--json"])
    assert finished.code == 0, finished.err
    result = json.loads(finished.out.splitlines()[-1])
    rows = result["prefill"]
    assert [row["rows"] for row in rows] == [1, 3]
    for row in rows:
        least = min(row["sink_s"], row["full_s"])
        assert row["h2o_s"] > 0 and row["added_share"] == pytest.approx(row["h2o_s"] / least - 1)
    assert result["worst_added_share"] == max(row["added_share"] for row in rows)
    config = result["config"]
    assert (config["model"], config["layers"], config["tokens"], config["dtype"]) == ("opt-125m", 1, 20, "float32")


def test_a_table_without_json_and_a_record_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    argv = ["column-sums", *TINY, "--rows", "2", "--trials", "5", "--record", str(file)]
    finished = call(command, argv)
    assert finished.code == 0, finished.err
    assert "| 2 |" in finished.out and "30 tokens" in finished.out
    (record,) = read_jsonl(file)
    assert record["name"] == "bench column-sums" and record["kind"] == "measurement"
    assert record["command"] == " ".join(["python -m flexgen_h2o.bench", *argv])
    assert all(len(record["prefill"][0]["seconds"][name]) == 5 for name in ("h2o", "sink", "full"))


def test_every_mistake_is_named() -> None:
    wrong = ["--model", "opt-9b", "--layers", "0", "--dtype", "int8", "--threads", "x", "--rows", "1,0"]
    wrong += ["--prompt-len", "2049", "--trials", "0"]
    finished = call(command, ["column-sums", *wrong])
    assert finished.code == 2 and finished.out == ""
    named = [problem.split()[0] for problem in finished.problems]
    assert named == ["--model", "--layers", "--dtype", "--threads", "--rows", "--prompt-len", "--trials"]
    assert "--trials is 4" in call(command, ["column-sums", "--trials", "4", "--record", "x"]).problems[0]


def test_engines_take_turns_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([50.0, 50.0, 50.0, 3.0, 2.0, 4.0, 5.0, 2.5, 9.0, 3.3, 2.2, 4.4])
    rules = []

    def run(engine: Engine, block: object, gen_len: int, chooser: object) -> BlockTimes:
        rules.append(type(engine.kv.rules[0]))
        return BlockTimes(next(spent), [], {}, {})

    monkeypatch.setattr(Engine, "run", run)
    monkeypatch.setattr(column_sums, "memory_of_long_prompt", lambda *_: dict.fromkeys(("peak_bytes",), 0))
    config = published("opt-125m", num_hidden_layers=1)
    result = measure(PromptSizes(config, [2], 20, 30, "float32", 1, 3))
    assert rules == [H2O, Sink, Full] * 4
    (row,) = result["prefill"]
    assert (row["h2o_s"], row["sink_s"], row["full_s"]) == (3.3, 2.2, 4.4)
    assert row["added_share"] == pytest.approx(0.5)  # beside the quicker one of the two without sums


def test_a_long_prompt_fits_little_memory() -> None:
    """All weights at once would take 2.1 GB; code for a product of every shape took more."""
    memory = memory_of_long_prompt(12_000, "bfloat16", 1)
    assert memory["matrix_bytes"] > 2 * GB
    assert memory["peak_bytes"] < 1.3 * GB / 2
    assert memory["baseline_bytes"] < memory["peak_bytes"]
    assert memory["workspace_bytes"] < 2**25


def test_the_peak_is_that_of_the_new_process_and_not_of_its_parent() -> None:
    held = bytearray(b"x") * (GB // 2)
    memory = memory_of_long_prompt(10, "float32", 1)
    assert memory["peak_bytes"] < len(held)


def test_the_summary_names_all_numbers() -> None:
    result = {
        "config": {"tokens": 7, "model": "m", "layers": 2, "dtype": "float32", "threads": 1, "long_tokens": 9},
        "prefill": [{"rows": 3, "h2o_s": 1.5, "sink_s": 1.25, "full_s": 1.0, "added_share": 0.5}],
        "memory": {"peak_bytes": GB, "baseline_bytes": GB // 4, "matrix_bytes": 2 * GB},
    }
    text = summary(result)
    assert "| 3 | 1.500 s | 1.250 s | 1.000 s | +50.0% |" in text
    assert "1.00 GB at its peak, 0.25 GB before" in text and "2.00 GB" in text


def test_a_model_of_random_weights() -> None:
    config = published("opt-125m", num_hidden_layers=2, vocab_size=10)
    with models.random_model(config, torch.float32, 1) as runtime:
        tensors = runtime.weights.page(1).tensors
        for name, mean in (("fc1.bias", 0.0), ("final_layer_norm.weight", 1.0)):
            assert 0.01 < float((tensors[name] - mean).std()) < 0.03
            assert abs(float(tensors[name].mean()) - mean) < 0.01
