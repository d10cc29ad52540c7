"""The command: what it prints and records, what it refuses, and that the published numbers hold."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.commands import Finished, call, read_jsonl
from support.tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o import LLM, evaluate
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.evaluation.compare import compare, make_cases
from flexgen_h2o.evaluation.heldout import HeldoutSizes, heldout_set
from flexgen_h2o.evaluation.recall import KINDS
from flexgen_h2o.evaluation.scoring import Judge


def evaluate_with(*argv: str) -> Finished:
    return call(evaluate, argv)


def rows_of(finished: Finished) -> list[dict[str, Any]]:
    assert finished.code == 0, finished.err
    rows: list[dict[str, Any]] = json.loads(finished.out.splitlines()[-1])["rows"]
    return rows


# --- what it prints and records ---------------------------------------------------------------------------------

TEXT_KEYS = "perplexity stderr agreement agreement_stderr kl kl_stderr documents".split()
RECALL_KEYS = "recall recall_stderr recall_documents".split()
CASE_KEYS = "eviction budget entries heavy_slots recent_slots path against".split()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    record = tmp_path_factory.mktemp("results") / "new" / "compare.jsonl"
    argv = "compare --eviction full,h2o,local --documents 2 --recall-documents 2 --json --record".split()
    return evaluate_with(*argv, str(record)), record


def test_compare_reports_a_row_for_each_policy(quick: tuple[Finished, Path]) -> None:
    finished, _ = quick
    assert finished.err == ""
    rows = rows_of(finished)
    result = json.loads(finished.out.splitlines()[-1])
    assert (result["model"], result["dtype"]) == ("demo", "float32")
    assert (result["prompt_len"], result["continuation_len"], result["compress_cache"]) == (384, 128, False)
    assert [row["eviction"] for row in rows] == ["full", "h2o", "local"]
    for row in rows:
        assert set(row) == {*CASE_KEYS, *TEXT_KEYS, *RECALL_KEYS} and set(row["recall"]) == set(KINDS)
        assert row["documents"] == 2 and row["stderr"] > 0
        assert all(0 <= value <= 1 for value in row["recall"].values())


def test_compare_shows_what_eviction_costs(quick: tuple[Finished, Path]) -> None:
    full, h2o, local = rows_of(quick[0])
    assert full["perplexity"] < h2o["perplexity"] < local["perplexity"]
    assert full["recall"]["hot"] == h2o["recall"]["hot"] == 1.0 > local["recall"]["hot"]
    assert 1 == full["agreement"] > h2o["agreement"] > local["agreement"] > 0
    assert 0 == full["kl"] < h2o["kl"] < local["kl"]
    assert (full["budget"], h2o["budget"]) == (1.0, 0.2)
    assert h2o["against"]["full"]["perplexity"] == pytest.approx(h2o["perplexity"] / full["perplexity"] - 1)
    assert local["against"]["h2o"]["recall"]["hot"] == local["recall"]["hot"] - 1


def test_a_record_says_how_its_numbers_were_made(quick: tuple[Finished, Path]) -> None:
    finished, path = quick
    (record,) = read_jsonl(path)
    assert (record["kind"], record["name"]) == ("measurement", "evaluate compare")
    assert record["command"].startswith("python -m flexgen_h2o.evaluate compare --eviction full,h2o,local")
    assert record["rows"] == rows_of(finished)
    assert {"torch", "transformers", "numpy", "python"} <= set(record["versions"])
    assert {"cpu", "cores", "threads", "memory_bytes"} <= set(record["machine"])
    assert {"date", "git_commit"} <= set(record)


@pytest.mark.parametrize(
    ("task", "judged"),
    [("perplexity", TEXT_KEYS), ("agreement", TEXT_KEYS), ("recall", RECALL_KEYS)],
)
def test_a_task_judges_what_it_is_called_after(task: str, judged: list[str]) -> None:
    sizes = "--documents 2 --recall-documents 1 --prompt-len 200 --continuation-len 8".split()
    (row,) = rows_of(evaluate_with(task, "--eviction", "h2o", *sizes, "--json"))
    assert set(row) == {*CASE_KEYS, *judged}


def test_budgets_and_compression_are_carried_out() -> None:
    argv = "perplexity --eviction full,smooth --budget 0.1,0.4 --documents 2 --prompt-len 100 --continuation-len 30"
    plain = rows_of(evaluate_with(*argv.split(), "--json"))
    assert [(row["eviction"], row["entries"]) for row in plain] == [("full", 130), ("smooth", 10), ("smooth", 40)]
    assert plain[0]["kl"] == 0
    in_4_bits = rows_of(evaluate_with(*argv.split(), "--compress-cache", "--ring-16bit", "--json"))
    # The full cache's entries are all recent, so none is quantised; the heavy ones of the other are.
    assert in_4_bits[0]["perplexity"] == pytest.approx(plain[0]["perplexity"], rel=1e-6)
    assert in_4_bits[2]["perplexity"] != pytest.approx(plain[2]["perplexity"], rel=1e-6)
    quantised = rows_of(evaluate_with(*argv.split(), "--compress-weight", "--json"))
    assert 0 < quantised[0]["kl"] < quantised[1]["kl"]


def test_another_text_can_be_scored(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(4, 4096, 400))
    argv = "perplexity --eviction full --documents 2 --prompt-len 60 --continuation-len 20 --json --text".split()
    (row,) = rows_of(evaluate_with(*argv, str(tmp_path / "ids.npy")))
    assert row["perplexity"] > 4096  # of random tokens


# --- what it refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--documents", "1"], ["--documents is 1", "at least 2"]),
        (["--documents", "x"], ["--documents", "'x'"]),
        (["--recall-documents", "0"], ["--recall-documents is 0", "at least 1"]),
        (["--prompt-len", "0"], ["--prompt-len is 0", "at least 1"]),
        (["--continuation-len", "1"], ["--continuation-len is 1", "at least 2"]),
        (["--continuation-len", "129"], ["384 + 129", "512", "shorten"]),
        (["--gpu-batch-size", "0"], ["--gpu-batch-size is 0", "at least 1"]),
        (["--ring-16bit"], ["--ring-16bit", "--compress-cache"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "float32"]),
        (["--budget", "0"], ["--budget", "'0'"]),
        (["--budget", "0.2,1.5"], ["--budget", "'1.5'"]),
        (["--budget", "nan"], ["--budget", "'nan'"]),
        (["--budget", "0.2,"], ["--budget", "''"]),
        (["--budget", "0.001"], ["--budget 0.001", "larger"]),
        (["--eviction", "best"], ["best", "h2o", "snapkv"]),
        (["--eviction", "h2o,"], ["known policies"]),
        (["--eviction", ""], ["known policies"]),
        (["--model", "/nowhere"], ["/nowhere"]),
        (["--text", "/nowhere.txt"], ["--text /nowhere.txt", "No such file"]),
        (["--plot", "/nowhere/plot.png"], ["--plot"]),
        (["--record", "/"], ["--record / cannot be written"]),
        (["--eviction", "topk", "--compress-cache"], ["topk", "--compress-cache"]),
        (["--documents"], ["--documents"]),
        (["--misspelt"], ["--misspelt"]),
    ],
)
def test_mistakes_are_refused_before_any_work(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.evaluation.scoring.Judge._feed", None)
    finished = evaluate_with("compare", *argv)
    assert finished.code == 2 and finished.out == "" and len(finished.problems) == 1
    assert all(word in finished.problems[0] for word in words), finished.problems


def test_all_mistakes_are_listed_together() -> None:
    flags = "--documents 1 --recall-documents 0 --budget 0,x,1.5,nan --dtype int8 --gpu-batch-size 0"
    finished = evaluate_with("compare", *flags.split())
    assert finished.code == 2 and len(finished.problems) == 8


@pytest.mark.parametrize("argv", [[], ["fidelity"]], ids=["nothing", "unknown"])
def test_a_task_has_to_be_given(argv: list[str]) -> None:
    finished = evaluate_with(*argv)
    assert finished.code == 2 and len(finished.problems) == 1


@pytest.mark.parametrize("argv", [["--device", "cpu"], ["--device", "auto"], ["--dtype", "auto"]], ids=" ".join)
def test_device_and_dtype_are_taken_as_run_takes_them(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.evaluation.compare.compare", lambda *_: [])
    finished = evaluate_with("compare", *argv, "--json")
    assert finished.code == 0, finished.err


def test_a_model_without_a_tokenizer_cannot_be_compared(tmp_path: Path) -> None:
    folder = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path / "tiny")
    argv = "compare --prompt-len 60 --continuation-len 4 --model".split()
    finished = evaluate_with(*argv, str(folder))
    assert finished.code == 2 and "no tokenizer" in finished.problems[0]


@pytest.mark.parametrize("change", ["context", "vocabulary"])
def test_a_model_too_small_for_the_documents_is_refused(tmp_path: Path, change: str) -> None:
    """The demo model with half its positions, or half its tokens."""
    for path in DEMO_MODEL.iterdir():
        shutil.copy(path, tmp_path)
    key, name, size = {
        "context": ("max_position_embeddings", "model.decoder.embed_positions.weight", 256),
        "vocabulary": ("vocab_size", "model.decoder.embed_tokens.weight", 2048),
    }[change]
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, key: size}))
    tensors = load_file(tmp_path / "model.safetensors")
    rows = size + 2 if change == "context" else size
    save_file({**tensors, name: tensors[name][:rows].clone()}, tmp_path / "model.safetensors")
    argv = "compare --eviction full --documents 2 --recall-documents 1 --model".split()
    finished = evaluate_with(*argv, str(tmp_path))
    assert finished.code == 2 and str(size) in finished.problems[0]


# --- plots ------------------------------------------------------------------------------------------------------


def test_a_plot_without_matplotlib_is_refused_and_the_extra_named(monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return true_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    monkeypatch.setattr("flexgen_h2o.evaluation.scoring.Judge._feed", None)
    finished = evaluate_with("compare", "--plot", "plot.png")
    assert finished.code == 2 and "flexgen_h2o[plots]" in finished.problems[0]


@pytest.mark.parametrize("task", ["perplexity", "recall", "agreement", "compare"])
def test_every_task_has_a_plot(task: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = "--budget 0.1,0.2 --documents 2 --recall-documents 1 --prompt-len 200 --continuation-len 4".split()
    finished = evaluate_with(task, "--eviction", "full,h2o", *sizes, "--plot", str(tmp_path / "plot.svg"))
    assert finished.code == 0, finished.err
    drawing = (tmp_path / "plot.svg").read_text()
    assert drawing.startswith("<?xml") and len(drawing) > 10_000


# --- the published numbers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged() -> dict[tuple[str, float], dict[str, Any]]:
    """200 windows, and 50 recall documents of each kind, by policy and budget."""
    with LLM(dtype="float32") as llm:
        heldout = heldout_set(llm, HeldoutSizes(200, 50))
        judge = Judge(llm, heldout.prompt_len)
        at_20 = "full,h2o,sink,local,smooth,strided,strided+h2o,fixed,fixed+h2o".split(",")
        cases = make_cases(at_20, [0.2], 384, 512, 4)
        cases += make_cases(["h2o", "smooth"], [0.1, 0.04], 384, 512, 4)
        rows = compare(cases, heldout, judge, judge, lambda documents: None)
    return {(row["eviction"], row["budget"]): row for row in rows}


Judged = dict[tuple[str, float], dict[str, Any]]


@pytest.mark.slow
def test_h2o_costs_little_and_less_than_sinks_or_recency(judged: Judged) -> None:
    h2o, sink, local = (judged[name, 0.2]["against"]["full"] for name in ("h2o", "sink", "local"))
    assert 0 < h2o["perplexity"] - 2 * h2o["perplexity_stderr"] < 0.08
    assert local["perplexity"] > 0.25 and h2o["perplexity"] < sink["perplexity"] < local["perplexity"]
    against = judged["sink", 0.2]["against"]["h2o"]
    assert against["perplexity"] > 3 * against["perplexity_stderr"]  # paired
    assert all(judged[name, 0.2]["documents"] == 200 for name in ("h2o", "sink", "local"))


@pytest.mark.slow
def test_what_was_asked_about_before_is_remembered_and_what_was_not_is_lost(judged: Judged) -> None:
    full = judged["full", 1.0]["recall"]
    assert full["hot"] > 0.9 and full["never"] > 0.9 and full["in_prompt"] > 0.9
    assert judged["h2o", 0.2]["recall"]["hot"] >= 0.9 * full["hot"]
    assert all(judged[name, 0.2]["recall"]["hot"] < 0.1 for name in ("sink", "local"))
    # That is the nature of every choice by attention received.
    assert all(row["recall"]["never"] < 0.1 for (name, _), row in judged.items() if name != "full")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_patterns_rise_with_heavy_hitters(judged: Judged, pattern: str) -> None:
    alone, with_heavy = judged[pattern, 0.2], judged[f"{pattern}+h2o", 0.2]
    assert with_heavy["perplexity"] < alone["perplexity"]
    assert with_heavy["recall"]["hot"] > alone["recall"]["hot"] + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.1, 0.04])
def test_smooth_is_better_than_h2o_where_memory_is_short(judged: Judged, budget: float) -> None:
    against = judged["smooth", budget]["against"]["h2o"]
    assert against["perplexity"] < -3 * against["perplexity_stderr"]
    assert judged["smooth", budget]["recall"]["hot"] >= judged["h2o", budget]["recall"]["hot"] - 0.05


@pytest.mark.slow
def test_the_demo_tells_policies_apart(capsys: pytest.CaptureFixture[str]) -> None:
    from flexgen_h2o.demo.__main__ import main

    assert main() == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    verdicts = {line.split()[0]: re.search(r"\b(right|wrong)\b", line.split("'")[-1]) for line in lines}
    found = {name: match and match[1] for name, match in verdicts.items()}
    assert found == {"full": "right", "h2o": "right", "sink": "wrong", "local": "wrong"}
