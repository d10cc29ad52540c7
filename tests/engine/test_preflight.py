"""Before anything is loaded: a plan that does not fit is refused, with one that does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import call
from support.helpers import TinyOpt
from support.placed import CPU

from flexgen_h2o import llm
from flexgen_h2o import run as run_command
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB, gb, whole_pages
from flexgen_h2o.engine import assemble as runtime_module
from flexgen_h2o.engine import fit as preflight
from flexgen_h2o.engine.assemble import RunSizes, predict
from flexgen_h2o.engine.fit import check_fit
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory import run_folder as disk
from flexgen_h2o.memory.tiers import Ledger
from flexgen_h2o.models.opt_config import OptConfig
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import TIERS, Percent, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.sampling import SamplingParams

BASELINE = 200 * 2**20
MODEL = published("opt-125m")
SIZES = RunSizes(H2O(26, 26), 16, 256)
POLICY = Policy(4, 4)


@pytest.fixture(autouse=True)
def fixed_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process holds is not what the tests are about."""
    monkeypatch.setattr(runtime_module, "process_baseline", lambda dtype: BASELINE)
    monkeypatch.setattr("flexgen_h2o.llm.process_baseline", lambda dtype: BASELINE)


def fit(budgets: dict[Tier, int | None], percent: Percent = Percent(), joint: bool = False, **more: Any) -> Ledger:  # noqa: B008
    platform = Platform(CPU, budgets, joint, **more)
    return check_fit(MODEL, torch.float16, replace(POLICY, percent=percent), platform, SIZES)


def refusal(budgets: dict[Tier, int | None], percent: Percent = Percent(), joint: bool = False, **more: Any) -> str:  # noqa: B008
    with pytest.raises(UsageError) as caught:
        fit(budgets, percent, joint, **more)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


def way_out(problem: str) -> Percent:
    """The placement that a refusal names."""
    found = re.search(r"--percent ([\d. ]+) would fit", problem)
    assert found, problem
    return Percent(*map(float, found[1].split()))


# --- one budget at a time ---


@pytest.mark.parametrize("joint", [False, True], ids=["two_memories", "one_memory"])
@pytest.mark.parametrize("percent", [Percent(), Percent(0, 0, 0, 0, 0, 0), Percent(20, 50, 30, 30, 50, 20)], ids=str)
def test_what_fits_to_the_last_byte_is_accepted_and_a_byte_less_is_refused(percent: Percent, joint: bool) -> None:
    needed = fit({}, percent, joint)
    budgets: dict[Tier, int | None] = {tier: needed.peak(tier) for tier in TIERS}
    assert fit(budgets, percent, joint).peak("cpu") == needed.peak("cpu")
    for tier in TIERS:
        if not needed.peak(tier):
            continue
        problem = refusal({**budgets, tier: needed.peak(tier) - 1}, percent, joint)
        assert str(percent) in problem and MODEL.name in problem


def test_a_refusal_names_both_numbers_and_the_largest_holders() -> None:
    problem = refusal({"gpu": GB // 10, "cpu": 64 * GB})
    assert gb(fit({}).peak("gpu")) in problem and gb(GB // 10) in problem and "gpu memory" in problem
    assert f"weights {gb(fit({}).accounts['gpu'].largest['weights'])}" in problem


def test_every_tier_that_is_exceeded_is_named() -> None:
    problem = refusal({"gpu": 1, "cpu": 1, "disk": 1}, Percent(20, 50, 30, 30, 50, 20))
    assert all(f"of {name}" in problem for name in ("gpu memory", "cpu memory", "disk"))


def test_one_memory_is_spoken_of_as_one() -> None:
    problem = refusal({"cpu": GB // 4}, Percent(50, 50, 50, 50, 50, 50), joint=True)
    assert "of memory" in problem and "gpu memory" not in problem and "cpu memory" not in problem


def test_the_process_itself_is_counted() -> None:
    assert fit({}, joint=True).accounts["cpu"].largest[Line.BASELINE] == BASELINE


# --- ways out ---


@pytest.mark.parametrize("joint", [False, True], ids=["two_memories", "one_memory"])
@pytest.mark.parametrize("megabytes", [20, 60, 100, 150, 200, 300])
def test_the_placement_that_is_named_really_fits(megabytes: int, joint: bool) -> None:
    budget = megabytes * 2**20
    budgets: dict[Tier, int | None] = {"gpu": budget, "cpu": BASELINE + (budget if joint else 50 * 2**20)}
    try:
        fit(budgets, joint=joint)
    except UsageError as error:
        problem = str(error)
        advice = problem.split(". ")[-1]
        if "--percent" in advice and "block of" not in advice:
            fit(budgets, way_out(problem), joint)
        else:
            assert "block of" in problem or "smaller model" in problem
    else:
        assert budget > fit({}, joint=joint).peak("cpu" if joint else "gpu") - BASELINE


def test_the_fastest_placement_that_fits_is_named() -> None:
    """With room on the cpu for all, nothing is sent to disk."""
    needed = fit({})
    percent = way_out(refusal({"gpu": needed.peak("gpu") * 3 // 4, "cpu": 64 * GB, "disk": 64 * GB}))
    assert percent.weights[2] == percent.cache[2] == percent.hidden[2] == 0
    assert percent.weights[0] > 0 or percent.cache[0] > 0


def test_one_memory_is_never_told_to_split_what_is_one() -> None:
    percent = way_out(refusal({"cpu": BASELINE + 150 * 2**20}, joint=True))
    assert percent.weights_cpu == percent.cache_cpu == percent.hidden_cpu == 0


def test_a_smaller_block_is_named_where_no_placement_fits() -> None:
    lowest = predict(MODEL, torch.float16, replace(POLICY, percent=Percent(0, 0, 0, 0, 0, 0)), platform({}), SIZES)
    budgets: dict[Tier, int | None] = {"gpu": lowest.peak("gpu") - 1, "cpu": lowest.peak("cpu")}
    problem = refusal(budgets, Percent(0, 0, 0, 0, 0, 0))
    found = re.search(r"--gpu-batch-size (\d+) --num-gpu-batches 1\) would fit", problem)
    assert found, problem
    rows = int(found[1])
    smaller = Policy(rows, 1, percent=Percent(0, 0, 0, 0, 0, 0))
    check_fit(MODEL, torch.float16, smaller, platform(budgets), replace(SIZES, rows=rows))


def platform(budgets: dict[Tier, int | None], joint: bool = False) -> Platform:
    return Platform(CPU, budgets, joint)


def test_where_nothing_fits_that_is_said() -> None:
    problem = refusal({"gpu": 2**20, "cpu": BASELINE})
    assert "smaller model" in problem


SHARES = st.integers(0, 100).flatmap(lambda gpu: st.tuples(st.just(gpu), st.integers(0, 100 - gpu)))
SMALL = OptConfig("small", 1000, 64, 64, 4, 4, 256, 512).shape()


@given(
    shares=st.tuples(SHARES, SHARES, SHARES),
    budget=st.tuples(*(st.integers(0, 4 * 2**20) for _ in TIERS)),
    more=st.tuples(*(st.integers(0, 2 * 2**20) for _ in TIERS)),
    joint=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_more_memory_never_turns_a_plan_that_fits_into_one_that_does_not(
    shares: tuple[tuple[int, int], ...], budget: tuple[int, ...], more: tuple[int, ...], joint: bool
) -> None:
    policy = Policy(2, 2, percent=Percent(*shares[0], *shares[1], *shares[2]))
    sizes = RunSizes(Full(0, 40), 4, 32)

    def fits(extra: tuple[int, ...]) -> bool:
        sums = (own + added for own, added in zip(budget, extra, strict=True))
        budgets: dict[Tier, int | None] = dict(zip(TIERS, sums, strict=True))
        budgets["cpu"] = (budgets["cpu"] or 0) + BASELINE
        try:
            check_fit(SMALL, torch.float32, policy, platform(budgets, joint), sizes)
        except UsageError as error:
            if "--percent" in str(error).split(". ")[-1]:
                named = replace(policy, percent=way_out(str(error)))
                check_fit(SMALL, torch.float32, named, platform(budgets, joint), sizes)
            return False
        return True

    if fits((0, 0, 0)):
        assert fits(more)


# --- disk ---


def test_a_disk_budget_binds() -> None:
    needed = fit({}, Percent(0, 0, 0, 0, 0, 0)).peak("disk")
    problem = refusal({"gpu": GB, "cpu": GB, "disk": needed - 1}, Percent(0, 0, 0, 0, 0, 0))
    assert f"{gb(needed)} of disk" in problem
    fit({"gpu": GB, "cpu": GB, "disk": needed - 1}, way_out(problem))


@pytest.mark.parametrize("asked", [None, 10 * GB])
def test_no_more_than_what_is_free_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None) -> None:
    needed = fit({}, Percent(0, 0, 0, 0, 0, 0)).peak("disk")
    monkeypatch.setattr(preflight, "free_disk_bytes", lambda folder: needed - 1)
    problem = refusal({"disk": asked}, Percent(0, 0, 0, 0, 0, 0), offload_dir=tmp_path)
    assert gb(needed - 1) in problem
    fit({"disk": asked}, offload_dir=tmp_path)  # which needs no disk


def test_weights_and_files_of_a_run_may_be_on_two_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is charged for what lies on the other."""
    on_disk = Percent(0, 0, 0, 0, 0, 0)
    lines = fit({}, on_disk).account("disk").largest
    files = sum(lines.values()) - lines["weights"]
    cache = tmp_path / "cache"
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(cache))
    monkeypatch.setattr(preflight, "file_system", lambda folder: int(folder == cache))
    free = {cache: lines["weights"], tmp_path: files}
    monkeypatch.setattr(preflight, "free_disk_bytes", lambda folder: free[folder])
    fit({}, on_disk, offload_dir=tmp_path)
    for folder, what in ((cache, "disk for weights"), (tmp_path, "disk")):
        free[folder] -= 1
        problem = refusal({}, on_disk, offload_dir=tmp_path)
        assert f"of {what}, where {gb(free[folder])} can be used in {folder}" in problem
        free[folder] += 1


def tiny_llm(tiny_opt: TinyOpt, folder: Path, **more: Any) -> LLM:
    settings = {"device": "cpu", "dtype": "float32", "gpu_batch_size": 2, "offload_dir": folder / "offload"}
    return LLM(str(tiny_opt.folder), **{**settings, **more})


def test_weights_that_are_on_disk_already_need_no_space(
    tiny: Callable[..., TinyOpt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model that takes more than half of the disk could be run only once."""
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "weights"))
    for module in (preflight, disk):
        monkeypatch.setattr(module, "free_disk_bytes", lambda folder: 500_000 - stored(tmp_path))
    for _ in range(2):
        with tiny_llm(tiny(), tmp_path, percent=Percent(0, 0)) as model:
            model.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))


def stored(folder: Path) -> int:
    return sum(whole_pages(path.stat().st_size) for path in folder.rglob("*") if path.is_file())


# --- more than one call ---


def test_a_second_call_is_not_refused_for_what_the_first_has_loaded(
    tiny: Callable[..., TinyOpt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has grown by the weights, which must not be counted as its own and once more as weights."""
    sizes = RunSizes(H2O(1, 1), 1, 3)
    layout = best_layout(CPU, torch.float32, tiny().config.matrix_shapes())
    where = replace(platform({}, True), matrix_layout=layout)
    needed = predict(tiny().config, torch.float32, Policy(2), where, sizes).peak("cpu")
    with tiny_llm(tiny(), tmp_path, hh_size=1, recent_size=1, cpu_mem=(needed + 1000) / GB) as model:
        held = lambda: 0 if model.runtime is None else model.runtime.weights.nbytes  # noqa: E731
        monkeypatch.setattr(runtime_module, "process_baseline", lambda dtype: BASELINE + held())
        monkeypatch.setattr("flexgen_h2o.llm.process_baseline", lambda dtype: BASELINE + held())
        first = model.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
        assert model.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2)) == first


# --- the command ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_command_exits_with_2_before_it_loads_anything(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "dummy_source", None)  # whatever would make weights fails
    finished = call(
        run_command,
        [
            *("--model", "opt-1.3b", "--dummy-weights", "--device", device, "--dtype", "float16", "--prompt-len", "64"),
            *("--gpu-mem", "0.6", "--cpu-mem", "1", "--disk-mem", "50", "--offload-dir", str(tmp_path / "offload")),
            *("--percent", "100", "0", "100", "0", "100", "0"),
        ],
    )
    assert finished.code == 2 and finished.out == ""
    (problem,) = finished.problems
    assert "opt-1.3b" in problem and ("1.60 GB" if device == "cpu" else "0.60 GB") in problem
    assert way_out(problem).problems() == []
    assert not (tmp_path / "offload").exists()


def test_the_placement_that_the_command_names_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
                    "ffn_dim": 1024, "max_position_embeddings": 128})
    )  # fmt: skip
    argv = [
        *("--model", str(tmp_path), "--dummy-weights", "--device", "cpu", "--dtype", "float32", "--prompt-len", "8"),
        *("--gen-len", "2", "--gpu-batch-size", "2", "--offload-dir", str(tmp_path / "offload")),
        *("--cpu-mem", str((BASELINE + 25 * 2**20) / GB), "--percent", "100", "0", "100", "0", "100", "0", "--json"),
    ]
    refused = call(run_command, argv)
    assert refused.code == 2
    finished = call(run_command, [*argv, "--percent", *str(way_out(refused.problems[0])).split()])
    assert finished.code == 0, finished.err
    assert finished.report["memory"]["ledger_peak_bytes"]["cpu"] <= BASELINE + 25 * 2**20
