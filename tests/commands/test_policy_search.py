"""`python -m flexgen_h2o.policy_search`, as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, call, environment

from flexgen_h2o import policy_search
from flexgen_h2o.plan.policy_files import policy_from_json, read_policy
from flexgen_h2o.search.lp import Program

T4 = ("--hardware", "t4")
IN_ONE = ("--gpu-batch-size", "8", "--num-gpu-batches", "1")
QUICK = ("--gpu-batch-size", "8", "--cpu-cache-compute", "on")


def search(*argv: str) -> dict[str, Any]:
    finished = call(policy_search, [*argv, "--json"])
    assert finished.code == 0, finished.err
    report: dict[str, Any] = json.loads(finished.out.splitlines()[-1])
    return report


def test_the_report_has_what_the_contract_names() -> None:
    report = search("--model", "opt-30b", *T4, *QUICK, "--gen-len", "512")
    assert set(report) == {"policy", "predicted", "full_cache", "hardware", "engine_model", "measured"}
    assert report["measured"] is False and report["predicted"]["kind"] == "projection"
    for found in (report, report["full_cache"]):
        predicted = found["predicted"]
        assert {"prefill_s", "decode_s", "total_s", "throughput_tok_s", "binds"} <= set(predicted)
        assert predicted["total_s"] == pytest.approx(predicted["prefill_s"] + predicted["decode_s"])
        assert set(predicted["binds"]) == {"prefill", "decode"}
        assert 0 < predicted["gpu_peak_bytes"] <= 15 * 2**30 and 0 < predicted["cpu_peak_bytes"] <= 204 * 2**30
        assert predicted["disk_peak_bytes"] == 0
        assert not policy_from_json(found["policy"], "report").problems()
    assert 110 <= report["predicted"]["throughput_tok_s"] <= 119
    assert report["full_cache"]["predicted"]["throughput_tok_s"] < 40
    assert report["hardware"]["name"] == "t4"


def test_what_it_prints_says_that_it_is_a_projection(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    finished = call(policy_search, ["--model", "opt-1.3b", *T4, "--gpu-batch-size", "16", "-o", str(path)])
    assert finished.code == 0, finished.err
    assert "projections" in finished.out and "measured" not in finished.out
    for word in ("prefill", "decode", "tok/s", "peak on gpu", "full cache", "is bound by", "--percent"):
        assert word in finished.out, word
    policy = read_policy(path)
    assert f"--gpu-batch-size {policy.gpu_batch_size} --num-gpu-batches {policy.num_gpu_batches}" in finished.out
    assert json.loads(path.read_text())["about"]["model"] == "opt-1.3b"


def test_a_given_policy_is_predicted() -> None:
    given = ("--percent", *"0 100 0 100 0 100".split(), "--gpu-batch-size", "8", "--num-gpu-batches", "52")
    report = search("--model", "opt-30b", *T4, "--gen-len", "512", *given, "--cpu-cache-compute", "on")
    assert report["policy"]["num_gpu_batches"] == 52 and report["policy"]["percent"] == [0, 100, 0, 100, 0, 100]
    assert 0.9 * 78.5 <= report["predicted"]["throughput_tok_s"] <= 1.01 * 78.5
    slower = search("--model", "opt-30b", *T4, "--gen-len", "512", *given, "--lane-share", "h2d=0.5", "compute=0.9")
    assert slower["predicted"]["decode_s"] > 1.9 * report["predicted"]["decode_s"]
    theirs = search(
        "--model", "opt-30b", *T4, "--gen-len", "512", *given, "--cpu-cache-compute", "on", "--engine-model", "flexgen"
    )
    assert theirs["predicted"]["throughput_tok_s"] == pytest.approx(18.8, rel=0.25)


@pytest.mark.parametrize("path", sorted((ROOT / "policies").glob("*.json")), ids=lambda path: path.stem)
def test_policies_that_ship_fit_the_machine_that_they_are_for(path: Path) -> None:
    policy, about = read_policy(path), json.loads(path.read_text())["about"]
    sizes = {"--prompt-len": about["prompt_len"], "--gen-len": about["gen_len"], "--hardware": about["hardware"]}
    sizes |= {"--gpu-batch-size": policy.gpu_batch_size, "--num-gpu-batches": policy.num_gpu_batches}
    sizes |= {"--decode-batch-size": policy.group_rows, "--model": about["model"]}
    sizes |= {
        f"--{name.replace('_', '-')}": "on" if getattr(policy, name) else "off"
        for name in ("compress_weight", "compress_cache", "cpu_cache_compute")
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    finished = call(policy_search, [*words, "--percent", *str(policy.percent).split()])
    assert finished.code == 0, finished.err


def test_memory_and_ratios_matter() -> None:
    base = ("--model", "opt-30b", *T4, *QUICK, "--gen-len", "512", "--disk-mem", "0")
    less = search(*base, "--cpu-mem", "120")
    fewer = search(*base, "--hh-ratio", "0.05")
    whole = search(*base)
    speeds = [found["predicted"]["throughput_tok_s"] for found in (less, whole, fewer)]
    assert speeds == sorted(speeds) and speeds[0] < 0.7 * speeds[1]
    assert less["predicted"]["cpu_peak_bytes"] <= 120 * 2**30


def test_a_machine_without_a_gpu() -> None:
    report = search("--model", "opt-1.3b", "--hardware", "amd-epyc-2-cores", "--cpu-mem", "2", "--gpu-mem", "1")
    assert report["predicted"]["cpu_peak_bytes"] <= 3 * 2**30 and report["predicted"]["gpu_peak_bytes"] == 0
    assert report["policy"]["percent"][1] == report["policy"]["percent"][3] == 0


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--model", "opt-31b"), "neither a folder nor a published size"),
        (("--prompt-len", "2048"), "exceed demo's context of"),
        (("--hardware", "nowhere.json"), "nowhere.json cannot be read"),
        (("--percent", "1", "2"), "--percent has 2 numbers"),
        (("--percent", *"0 100 0 100 0 100".split()), "add --gpu-batch-size and --num-gpu-batches"),
        (
            ("--percent", *"0 100 0 100 0 100".split(), *IN_ONE, "--compress-weight", "auto"),
            "--compress-weight auto leaves a choice",
        ),
        (
            ("--model", "opt-30b", "--percent", *"100 0 100 0 100 0".split(), *IN_ONE),
            "on gpu, where 15.00 GB can be used",
        ),
        (("--compress-weight", "maybe"), "must be one of auto, on, off"),
        (("--lane-share", "h3d=1"), "'h3d' is no lane"),
        (("--lane-share", "h2d=2"), "must be a number of at least 0.01 and at most 1"),
        (("--cpu-mem", "-1"), "--cpu-mem is '-1'"),
        (("--hh-ratio", "2"), "--hh-ratio is '2'"),
        (("--decode-batch-size", "8"), "means nothing without --percent"),
        (("-o", "/nowhere/policy.json"), "--output /nowhere/policy.json cannot be written"),
        (("--engine-model", "other"), "must be one of flexgen_h2o, flexgen"),
        (("--speed",), "--speed is not a flag"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(argv: tuple[str, ...], problem: str) -> None:
    finished = call(policy_search, argv if "--hardware" in argv else [*argv, *T4])
    assert finished.code == 2
    assert any(problem in text for text in finished.problems), finished.err


def test_several_mistakes_are_listed_together() -> None:
    finished = call(policy_search, ["--model", "opt-31b", "--gen-len", "0", "--compress-cache", "2", *T4])
    assert finished.code == 2 and len(finished.problems) == 3


def test_what_does_not_fit_is_said_with_a_way_out() -> None:
    finished = call(policy_search, ["--model", "opt-30b", *T4, "--gpu-mem", "1", "--gpu-batch-size", "1"])
    assert finished.code == 2
    (text,) = finished.problems
    assert "opt-30b" in text and "more on gpu than the 1.00 GB there" in text and "--gpu-mem" in text


def test_where_only_the_full_cache_does_not_fit_it_is_said_beside() -> None:
    given = ("--gpu-batch-size", "64", "--num-gpu-batches", "6", "--gen-len", "512", "--disk-mem", "0")
    report = search("--model", "opt-30b", *T4, *given)
    assert report["full_cache"]["policy"] is None and "more on cpu" in report["full_cache"]["why"]


def test_a_trace_of_the_simulated_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    search("--model", "opt-125m", *T4, "--gpu-batch-size", "16", "--num-gpu-batches", "2", "--trace", str(path))
    names = {event["args"]["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "M"}
    assert "compute" in names


def test_a_picture_needs_matplotlib(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    argv = ["--model", "opt-125m", *T4, "--gpu-batch-size", "16", "--num-gpu-batches", "4", "--plot", str(path)]
    finished = call(policy_search, argv)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert finished.code == 2 and "flexgen_h2o[plots]" in finished.problems[0]
    else:
        assert finished.code == 0 and path.stat().st_size > 10_000


def test_another_machine_is_planned_for_without_torch() -> None:
    script = (
        "import sys; from flexgen_h2o import policy_search as p;"
        "p.main(['--model', 'opt-125m', '--hardware', 't4', '--gpu-batch-size', '16']);"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.slow
def test_opt_175b_takes_no_more_than_some_hundreds_of_linear_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are what a search spends its time on."""
    solve, solved = Program.solve, []

    def counted(*arguments: Any, **named: Any) -> Any:
        solved.append(1)
        return solve(*arguments, **named)

    monkeypatch.setattr(Program, "solve", counted)
    report = search("--model", "opt-175b", *T4)
    assert len(solved) < 1000
    assert report["predicted"]["throughput_tok_s"] > report["full_cache"]["predicted"]["throughput_tok_s"]
