"""`run --policy`: the search's policy or that of a file, and projections beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import refused_once, run, write_jsonl

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.jobs.planning import BLOCK_ROWS, USED_SHARE, Workload, predicted
from flexgen_h2o.llm import LLM
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.policy_files import write_policy
from flexgen_h2o.profiling import quick
from flexgen_h2o.search.cost_model import CostModel
from flexgen_h2o.search.hardware import Hardware, read_hardware
from flexgen_h2o.search.hardware_files import default_folder
from flexgen_h2o.search.predict import predict
from flexgen_h2o.search.projection import Projection
from flexgen_h2o.search.search import find
from flexgen_h2o.search.simulate import Simulation, simulate

IN_MEMORY = "100 0 100 0 100 0".split()
KNOWN = read_hardware(default_folder() / "amd-epyc-2-cores.json")
T4 = ("--model", "opt-125m", "--hardware", "t4", "--device", "meta", "--gpu-mem", "1", "--cpu-mem", "1.5")


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"Number {n} is"} for n in range(5)])


@pytest.fixture
def unknown_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine that nobody has measured; what is measured of it is noted, and is another machine's rates."""
    measured: list[str] = []

    def measure(settings: Any, device: Any, folder: Path, name: str, environment: Any) -> Hardware:
        measured.append(name)
        return KNOWN

    monkeypatch.setattr(quick, "find_hardware", lambda choice, name: None)
    monkeypatch.setattr(quick, "quick_file", lambda name: tmp_path / "measured" / f"{name}.json")
    monkeypatch.setattr(quick, "measure", measure)
    return measured


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a linear program is solved."""

    def solve(*_: Any) -> None:
        raise AssertionError("a linear program is solved")

    monkeypatch.setattr("flexgen_h2o.search.lp.Program.solve", solve)


# --- what is chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--policy", "auto")])
def test_auto_takes_a_block_for_all_prompts_and_says_what_it_expects(
    prompt_file: str, more: tuple[str, ...], no_programs: None
) -> None:
    finished = run("--input", prompt_file, "--gen-len", "4", *more, "--json")
    report = finished.report
    assert finished.code == 0 and len(finished.lines) == 5
    assert (report["policy"]["gpu_batch_size"], report["policy"]["num_gpu_batches"]) == (5, 1)
    assert report["policy"]["percent"] == [100, 0, 100, 0, 100, 0]
    predicted = report["predicted"]
    assert predicted["kind"] == "projection" and report["measured"]
    assert predicted["total_s"] == pytest.approx(predicted["prefill_s"] + predicted["decode_s"])
    assert predicted["throughput_tok_s"] == pytest.approx(5 * 4 / predicted["total_s"])
    assert predicted["cpu_peak_bytes"] == pytest.approx(report["memory"]["ledger_peak_bytes"]["cpu"], rel=0.1)


def test_a_model_that_fits_is_placed_without_measuring_the_machine(
    prompt_file: str, unknown_machine: list[str], no_programs: None
) -> None:
    finished = run("--input", prompt_file, "--gen-len", "4", "--json")
    report = finished.report
    assert finished.code == 0 and unknown_machine == [] and finished.err == ""
    assert report["policy"]["gpu_batch_size"] == 5 and report["predicted"] is None
    assert report["phases"]["decode"]["limit_s"] is None
    assert "profile_hardware makes one" in report["phases"]["decode"]["no_limit"]
    assert run("--input", prompt_file, "--gen-len", "1", "--percent", *IN_MEMORY).code == 0
    assert len(unknown_machine) == 1  # whoever places things himself is told how near they come to the limit


def test_what_does_not_fit_is_searched_with_rates_that_are_measured_once(
    prompt_file: str, unknown_machine: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    argv = ("--input", prompt_file, "--gen-len", "4", "--offload-dir", str(tmp_path / "offload"), "--json")
    for _ in range(2):
        finished = run(*argv)
        assert finished.code == 0 and len(unknown_machine) == 1
        assert finished.report["predicted"]["kind"] == "projection"


def test_peaks_are_those_of_the_buffers_however_few_prompts_are_served() -> None:
    work = Workload(prompt_len=256, gen_len=8, num_prompts=64)
    with LLM(gpu_batch_size=64, dtype="bfloat16") as llm:
        whole, part = predicted(llm, KNOWN, work), predicted(llm, KNOWN, work, served=1)
    assert whole is not None and part is not None
    assert part["cpu_peak_bytes"] == whole["cpu_peak_bytes"] and part["total_s"] < whole["total_s"]


def test_where_no_prompt_can_be_served_nothing_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_programs: None
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [10**6]}])
    finished = run("--input", path, "--gen-len", "4", "--json")
    assert finished.code == 0 and finished.report["num_prompts"] == 0 and finished.report["predicted"] is None


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The disk budgets of all searches, where every policy is searched for and 10^9 bytes of disk are free."""
    planned: list[float | None] = []

    def noted(model: CostModel, budgets: dict[str, float | None], *rest: Any) -> Any:
        planned.append(budgets["disk"])
        return find(model, budgets, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    monkeypatch.setattr("flexgen_h2o.jobs.planning.find", noted)
    monkeypatch.setattr("flexgen_h2o.jobs.planning.free_disk_bytes", lambda folder: 10**9)
    return planned


def test_what_was_kept_of_weights_is_room_for_weights_alone(
    prompt_file: str, planned: list[float | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flexgen_h2o.llm.LLM.kept_weight_bytes", lambda llm, names=None: 5 * 10**6)
    argv = ("--input", prompt_file, "--gen-len", "4", "--offload-dir", str(tmp_path / "offload"))
    assert run(*argv).code == 0
    assert planned == [USED_SHARE * (10**9 + 5 * 10**6), USED_SHARE * 10**9]  # the plan has all in memory


def test_no_more_of_the_disk_is_planned_with_than_is_free_now(
    prompt_file: str, planned: list[float | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "cache"))
    argv = ("--input", prompt_file, "--gen-len", "4", "--offload-dir", str(tmp_path / "offload"))
    assert run(*argv).code == 0 and run(*argv, "--disk-mem", "0.5").code == 0
    assert planned == [USED_SHARE * 10**9, USED_SHARE * 2**29]


def test_what_is_expected_is_a_walk_over_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that comes from host memory hides behind nothing while a layer's first unit is on its way."""
    walked: list[Projection] = []

    def noted(model: CostModel, policy: Policy) -> Simulation:
        walked.append(simulate(model, policy).projection)
        assert walked[-1].decode_s > 1.01 * predict(model, policy).decode_s
        return simulate(model, policy)

    monkeypatch.setattr("flexgen_h2o.jobs.planning.simulate", noted)
    percent = "100 0 0 100 100 0".split()
    block = ("--gpu-batch-size", "8", "--num-gpu-batches", "4", "--prompt-len", "64", "--gen-len", "8")
    predicted = run(*T4, "--percent", *percent, *block, "--json").report["predicted"]
    assert predicted["decode_s"] == walked[0].decode_s and predicted["prefill_s"] >= walked[0].prefill_s
    monkeypatch.setattr("flexgen_h2o.jobs.planning.MOST_WALKED", 4 * 12 - 1)
    shorter = run(*T4, "--percent", *percent, *block, "--json").report["predicted"]
    assert len(walked) == 1 and shorter["decode_s"] < predicted["decode_s"]


def test_without_rates_what_does_not_fit_is_refused(
    prompt_file: str, unknown_machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Hardware:
        raise UsageError("there is no room")

    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    monkeypatch.setattr(quick, "measure", refuse)
    (problem,) = run("--input", prompt_file, "--gen-len", "4").problems
    assert "needs rates of this machine" in problem and "--hardware" in problem and "--percent" in problem


def test_tokens_do_not_depend_on_what_is_chosen(prompt_file: str, tmp_path: Path) -> None:
    argv = ("--input", prompt_file, "--gen-len", "6", "--dtype", "float32", "--offload-dir", str(tmp_path))
    by_hand = ("--percent", *"50 0 0 0 0 0".split(), "--gpu-batch-size", "2", "--num-gpu-batches", "2")
    assert run(*argv).lines == run(*argv, *by_hand).lines != []


@pytest.mark.parametrize(
    ("given", "rows", "units", "group"),
    [
        ("--gpu-batch-size 2", 2, 3, 6),
        ("--num-gpu-batches 2", 3, 2, 6),
        ("--gpu-batch-size 2 --num-gpu-batches 1", 2, 1, 2),
        ("--decode-batch-size 2", 2, 3, 2),
        ("--gpu-batch-size 1 --decode-batch-size 3", 1, 5, 3),
        ("--decode-batch-size 9", 9, 1, 9),
        ("--num-gpu-batches 3 --decode-batch-size 4", 2, 3, 4),
        ("--gpu-batch-size 1000", 1000, 1, 1000),
        ("--overlap false", 5, 1, 5),
        ("--compress-cache --compress-weight", 5, 1, 5),
    ],
)
def test_what_is_given_is_kept(prompt_file: str, given: str, rows: int, units: int, group: int) -> None:
    finished = run("--input", prompt_file, "--gen-len", "4", *given.split(), "--json")
    policy = finished.report["policy"]
    assert (policy["gpu_batch_size"], policy["num_gpu_batches"], policy["decode_batch_size"]) == (rows, units, group)
    assert policy["overlap"] == ("--overlap" not in given) and policy["compress_cache"] == ("--compress" in given)
    assert len(finished.lines) == 5


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--gpu-batch-size 2", {"gpu_batch_size": 2}),
        ("--num-gpu-batches 2", {"num_gpu_batches": 2}),
        ("--gpu-batch-size 1000", {"gpu_batch_size": 1000}),
        ("--decode-batch-size 4 --gpu-batch-size 1", {"decode_batch_size": 4, "gpu_batch_size": 1}),
        ("--decode-batch-size 4 --overlap false", {"decode_batch_size": 4, "overlap": False}),
    ],
)
def test_a_search_keeps_what_is_given_too(
    prompt_file: str, given: str, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    argv = ("--input", prompt_file, "--gen-len", "4", "--offload-dir", str(tmp_path), *given.split(), "--json")
    finished = run(*argv)
    assert finished.code == 0 and kept.items() <= finished.report["policy"].items()


def test_groups_larger_than_any_block_are_refused(prompt_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    problem = refused_once("--input", prompt_file, "--gen-len", "4", "--decode-batch-size", "64")
    assert "--decode-batch-size 64 is larger than the block of" in problem and "leave it out" in problem


def test_many_prompts_make_blocks_of_equal_size(tmp_path: Path) -> None:
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [2, 20 + n]} for n in range(300)])
    policy = run("--input", prompts, "--gen-len", "2", "--json").report["policy"]
    rows = policy["gpu_batch_size"] * policy["num_gpu_batches"]
    assert 32 <= rows <= 256 and 300 / rows - 300 // rows in (0, pytest.approx(1, abs=0.15))


def test_random_prompts_fill_a_block_that_is_nearly_as_fast_as_any() -> None:
    report = run(*"--prompt-len 20 --gen-len 2 --json".split()).report
    assert report["num_prompts"] in BLOCK_ROWS
    assert report["num_prompts"] == report["policy"]["gpu_batch_size"] * report["policy"]["num_gpu_batches"]


def test_a_budget_is_kept_even_if_it_is_nothing(prompt_file: str) -> None:
    argv = "--model opt-125m --dummy-weights --prompt-len 64 --gen-len 4 --cpu-mem 0.3 --disk-mem 0".split()
    problem = refused_once(*argv)
    assert "more on cpu than the" in problem and "--cpu-mem" in problem and "--disk-mem" not in problem


# --- other machines -------------------------------------------------------------------------------------------------


def test_a_dry_run_without_hardware_is_of_no_machine_and_searches_nothing(no_programs: None) -> None:
    policy = run(*"--model opt-125m --device meta --prompt-len 64 --gen-len 8 --json".split()).report["policy"]
    assert (policy["gpu_batch_size"], policy["num_gpu_batches"]) == (32, 1)
    assert policy["percent"] == [100, 0, 100, 0, 100, 0]


def test_a_dry_run_with_hardware_shows_its_plan_without_being_asked() -> None:
    argv = (*T4, *"--prompt-len 64 --gen-len 8 --gpu-batch-size 128 --cpu-cache-compute --json".split())
    assert run(*argv).report["policy"] == run(*argv, "--policy", "auto").report["policy"]


def test_rates_of_a_machine_with_a_gpu_are_of_no_use_here(prompt_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--input", prompt_file, "--gen-len", "4", "--hardware", "t4").code == 0  # all fits
    monkeypatch.setattr("flexgen_h2o.jobs.planning._fits", lambda *_: False)
    problem = refused_once("--input", prompt_file, "--gen-len", "4", "--hardware", "t4")
    assert "computes on cuda" in problem and "--device meta" in problem


def test_opt_30b_without_weights_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "opt-30b" in refused_once(*"--model opt-30b --hh-ratio 0.1 --recent-ratio 0.1 --hardware t4".split())


@pytest.mark.slow
def test_opt_30b_on_a_t4_is_the_plan_that_a_search_finds() -> None:
    argv = "--model opt-30b --hh-ratio 0.1 --recent-ratio 0.1 --hardware t4 --device meta --gpu-batch-size 32 --json"
    report = run(*argv.split()).report
    rows = report["policy"]["gpu_batch_size"] * report["policy"]["num_gpu_batches"]
    assert rows > 400 and report["predicted"]["throughput_tok_s"] > 20
    peaks = report["memory"]["ledger_peak_bytes"]
    assert peaks["gpu"] <= 15 * 2**30 and peaks["cpu"] <= 204 * 2**30


def test_a_dry_run_shows_the_plan_for_another_machine() -> None:
    quickly = "--prompt-len 64 --gen-len 8 --gpu-batch-size 128 --policy auto".split()
    finished = run(*T4, *quickly, "--json")
    report = finished.report
    assert not report["measured"] and report["prefill_s"] is None
    assert report["predicted"]["kind"] == "projection" and report["predicted"]["throughput_tok_s"] > 0
    assert report["policy"]["gpu_batch_size"] * report["policy"]["num_gpu_batches"] > 32
    peaks = report["memory"]["ledger_peak_bytes"]
    assert peaks["gpu"] <= 2**30 and peaks["cpu"] <= 1.5 * 2**30
    text = run(*T4, *quickly).out
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
