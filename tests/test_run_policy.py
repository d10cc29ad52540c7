"""`run --policy`: the search's policy or that of a file, and projections beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import refused_once, run, write_jsonl

from flexgen_h2o.placement import Percent
from flexgen_h2o.policy import Policy
from flexgen_h2o.policy_files import write_policy

T4 = ("--model", "opt-125m", "--hardware", "t4", "--device", "meta", "--gpu-mem", "2", "--cpu-mem", "8")


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"Number {n} is"} for n in range(5)])


def test_auto_takes_a_block_for_all_prompts_and_says_what_it_expects(prompt_file: str) -> None:
    finished = run("--input", prompt_file, "--gen-len", "4", "--policy", "auto", "--json")
    report = finished.report
    assert finished.code == 0 and len(finished.lines) == 5
    assert report["policy"]["gpu_batch_size"] * report["policy"]["num_gpu_batches"] >= 5
    predicted = report["predicted"]
    assert predicted["kind"] == "projection" and report["measured"]
    assert predicted["total_s"] == pytest.approx(predicted["prefill_s"] + predicted["decode_s"])
    assert predicted["throughput_tok_s"] == pytest.approx(5 * 4 / predicted["total_s"])
    assert predicted["cpu_peak_bytes"] == pytest.approx(report["memory"]["ledger_peak_bytes"]["cpu"], rel=0.1)


def test_auto_keeps_what_is_given(prompt_file: str) -> None:
    report = run("--input", prompt_file, "--gen-len", "4", "--policy", "auto", "--gpu-batch-size", "2", "--json").report
    assert report["policy"]["gpu_batch_size"] == 2


def test_a_dry_run_shows_the_plan_for_another_machine() -> None:
    finished = run(*T4, "--policy", "auto", "--prompt-len", "64", "--gen-len", "8", "--json")
    report = finished.report
    assert not report["measured"] and report["prefill_s"] is None
    assert report["predicted"]["kind"] == "projection" and report["predicted"]["throughput_tok_s"] > 0
    assert report["policy"]["gpu_batch_size"] * report["policy"]["num_gpu_batches"] > 32
    peaks = report["memory"]["ledger_peak_bytes"]
    assert peaks["gpu"] <= 2 * 2**30 and peaks["cpu"] <= 8 * 2**30
    text = run(*T4, "--policy", "auto", "--prompt-len", "64", "--gen-len", "8").out
    assert "projected, not measured" in text


def test_a_policy_file_is_followed(prompt_file: str, tmp_path: Path) -> None:
    policy = Policy(2, 3, 4, Percent(50, 0, 0, 0, 100, 0), overlap=False)
    write_policy(tmp_path / "policy.json", policy)
    folder = ("--offload-dir", str(tmp_path / "offload"))
    report = run(
        "--input", prompt_file, "--gen-len", "3", "--policy", str(tmp_path / "policy.json"), *folder, "--json"
    ).report
    assert (report["policy"]["gpu_batch_size"], report["policy"]["num_gpu_batches"]) == (2, 3)
    assert report["policy"]["decode_batch_size"] == 4 and not report["policy"]["overlap"]
    assert report["policy"]["percent"] == [50, 0, 0, 0, 100, 0]


def test_what_says_the_same_twice_is_refused(tmp_path: Path) -> None:
    assert "--percent" in refused_once("--policy", "auto", "--percent", *"100 0 100 0 100 0".split())
    write_policy(tmp_path / "policy.json", Policy())
    problem = refused_once("--policy", str(tmp_path / "policy.json"), "--gpu-batch-size", "4")
    assert "--gpu-batch-size" in problem and "leave one of them out" in problem


def test_a_policy_file_with_mistakes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(json.dumps({"gpu_batch_size": 0, "colour": "red"}))
    assert "colour" in refused_once("--policy", str(tmp_path / "policy.json"))
    assert "cannot be read" in refused_once("--policy", str(tmp_path / "missing.json"))


def test_what_does_not_fit_says_what_would(prompt_file: str) -> None:
    finished = run("--input", prompt_file, "--gen-len", "4", "--policy", "auto", "--cpu-mem", "0.01")
    assert finished.code == 2 and finished.problems
