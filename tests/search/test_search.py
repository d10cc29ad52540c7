"""Searched policies: what they promise on a T4, that they fit, and what is said where nothing does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.planning import T4, T4_MEMORY, job, machine, on_t4

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.engine.assemble import predict as ledger_of
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.plan.footprint import STAGED_BYTES
from flexgen_h2o.plan.placement import Percent, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import LANES, CostModel
from flexgen_h2o.search.flexgen_model import FlexgenCost
from flexgen_h2o.search.search import Choices, Found, find, largest_block, predict, search
from flexgen_h2o.search.sizes import DEFAULT_BASELINE, Job, MemoryPlan

# tokens to generate, rows of the authors' block, its limit in tok/s; least and most of a search; least when derated
CASES = [(32, 728, 22.0, 22.5, 23.4, 18), (512, 416, 78.5, 110, 119, 63), (1024, 264, 57.4, 90, 99, 46)]
DERATED = dict.fromkeys(LANES, 0.85)
SMALL = {"gpu": 1.5 * GB, "cpu": 3.0 * GB, "disk": 20.0 * GB}
FEW = Choices(gpu_batch_size=(2, 8, 32))
FEWEST = Choices(gpu_batch_size=(4, 16))


def fits_by_dry_run(one: Job, found: Found, budgets: dict[Tier, float | None]) -> bool:
    """Whether the run's own ledger stays within the budgets, pinned staging added."""
    platform = Platform(torch.device("meta"), {}, joint=one.joint, baseline=DEFAULT_BASELINE)
    sizes = RunSizes(H2O(one.heavy, one.recent), found.policy.block_rows, one.prompt_len)
    ledger = ledger_of(one.config, torch.float16, found.policy, platform, sizes)
    staging = {"gpu": 0, "cpu": 0 if one.joint else STAGED_BYTES, "disk": 0}
    return all(
        budget is None or ledger.peak(tier) + staging[tier] <= budget + 2**20 for tier, budget in budgets.items()
    )


@pytest.mark.parametrize(("gen_len", "rows", "limit", "least", "most", "derated"), CASES)
def test_opt_30b_on_a_t4(gen_len: int, rows: int, limit: float, least: float, most: float, derated: float) -> None:
    model = on_t4("opt-30b", 512, gen_len)
    theirs = Policy(8, rows // 8, None, Percent(0, 100, 0, 100, 0, 100), cpu_cache_compute=True)
    slower = CostModel(model.job, T4, DERATED)
    assert 0.90 * limit <= predict(model, theirs).throughput_tok_s <= 1.01 * limit
    assert predict(slower, theirs).throughput_tok_s >= derated
    found = search(model, T4_MEMORY)
    assert least <= found.projection.throughput_tok_s <= most
    assert predict(slower, found.policy).throughput_tok_s >= derated
    assert fits_by_dry_run(model.job, found, T4_MEMORY)
    assert fits_by_dry_run(model.job, Found(theirs, predict(model, theirs)), T4_MEMORY)
    assert 12 < found.projection.achieved_percent[0] < 22  # of weights, in the GPU's idle memory


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("model", ["opt-1.3b", "opt-2.7b"])
def test_what_is_found_fits(model: str, device: str) -> None:
    one = job(model, 128, 32, device=device)
    budgets: dict[Tier, float | None] = {**SMALL} if device == "cuda" else {"cpu": 3.0 * GB, "disk": 20.0 * GB}
    found = search(CostModel(one, machine(device)), budgets, FEW)
    assert fits_by_dry_run(one, found, budgets)
    assert not found.policy.problems()
    assert found.policy.block_rows >= 8
    peaks = MemoryPlan(one, found.policy).peaks()
    assert peaks["cpu"] > 0.8 * (budgets["cpu"] or 0)  # memory is there to be used


def test_a_search_is_no_worse_than_any_policy_tried() -> None:
    model = CostModel(job("opt-1.3b", 128, 32), machine())
    best = search(model, {**SMALL}, Choices()).projection.throughput_tok_s
    tried = 0
    for percent in (Percent(20, 80, 0, 100, 0, 100), Percent(0, 60, 0, 100, 0, 100), Percent(10, 40, 0, 0, 0, 100)):
        for rows, units in ((2, 4), (8, 8), (8, 30), (32, 3)):
            for at_home in (False, True):
                policy = Policy(rows, units, None, percent, cpu_cache_compute=at_home)
                found = predict(model, policy)
                if all(found.peak_bytes(tier) <= size for tier, size in SMALL.items()):  # type: ignore[arg-type]
                    tried += 1
                    assert found.throughput_tok_s <= best * 1.001
    assert tried > 8


def test_given_choices_are_kept() -> None:
    model = CostModel(job("opt-1.3b", 128, 32), machine())
    found = search(model, {**SMALL}, Choices(gpu_batch_size=(6,), num_gpu_batches=3, cpu_cache_compute=(True,)))
    assert found.policy.gpu_batch_size == 6 and found.policy.num_gpu_batches == 3 and found.policy.cpu_cache_compute
    assert not found.policy.compress_weight and not found.policy.compress_cache


def test_4_bits_where_they_may_be_chosen() -> None:
    model = on_t4("opt-30b", 512, 512)
    few = Choices(gpu_batch_size=(8,), cpu_cache_compute=(True,))
    plain = search(model, T4_MEMORY, few)
    packed = search(model, T4_MEMORY, replace(few, compress_weight=(False, True), compress_cache=(False, True)))
    assert packed.policy.compress_weight or packed.policy.compress_cache
    assert packed.projection.throughput_tok_s > plain.projection.throughput_tok_s
    # A machine whose rates in 4 bits nobody knows is not asked for them.
    unknown = CostModel(job("opt-1.3b", 128, 32), machine())
    assert not search(unknown, {**SMALL}, replace(FEW, compress_weight=(False, True))).policy.compress_weight
    with pytest.raises(UsageError, match="gemm/int4"):
        search(unknown, {**SMALL}, replace(FEW, compress_weight=(True,)))


@pytest.mark.parametrize(
    ("budgets", "tier"),
    [
        ({"gpu": 0.1 * GB, "cpu": 9.0 * GB, "disk": 9.0 * GB}, "gpu"),
        ({"gpu": 1.0 * GB, "cpu": 0.2 * GB, "disk": 9.0 * GB}, "cpu"),
        ({"gpu": 1.0 * GB, "cpu": 1.0 * GB, "disk": 0.5 * GB}, "disk"),
    ],
    ids=str,
)
def test_where_nothing_fits_it_is_said_what_would(budgets: dict[Tier, float | None], tier: Tier) -> None:
    model = CostModel(job("opt-2.7b", 128, 32), machine())
    with pytest.raises(UsageError) as refused:
        search(model, budgets, FEW)
    (text,) = refused.value.problems
    assert f"more on {tier} than the {(budgets[tier] or 0) / GB:.2f} GB" in text
    enough = re.findall(r"--(gpu|cpu|disk)-mem ([\d.]+)", text)
    assert enough
    assert search(model, {**budgets, **{name: float(size) * GB for name, size in enough}}, FEW)


def test_the_disk_is_left_alone_unless_it_is_worth_it_or_was_asked_for() -> None:
    model = on_t4("opt-30b", 512, 512)
    few = Choices(gpu_batch_size=(8,), cpu_cache_compute=(True,))
    with_disk: dict[Tier, float | None] = {**T4_MEMORY, "disk": 1500.0 * GB}
    alone = find(model, with_disk, few, uses_disk=False)
    assert alone.projection.peak_bytes("disk") == 0
    asked = find(model, with_disk, few, uses_disk=True)
    assert asked.projection.peak_bytes("disk") > GB
    assert asked.projection.throughput_tok_s > alone.projection.throughput_tok_s
    needed = find(model, {**with_disk, "cpu": 30.0 * GB}, few, uses_disk=False)
    assert needed.projection.peak_bytes("disk") > GB


def test_weights_alone_go_to_a_disk_that_nobody_asked_for_where_more_gains_little() -> None:
    slow = machine("cpu", **{"gemm/float16/1": 4e10, "gemm/float16/100": 1e12, "disk/read/direct/1": 2e10})
    model = CostModel(job("opt-1.3b", 128, 32, device="cpu"), slow)
    budgets: dict[Tier, float | None] = {"cpu": 2.0 * GB, "disk": 40.0 * GB}
    free, careful = search(model, budgets, FEWEST), find(model, budgets, FEWEST, uses_disk=False)
    percent = careful.policy.percent
    assert percent.weights[2] > 0 and percent.cache == percent.hidden == (1.0, 0.0, 0.0)
    assert careful.seconds_per_token <= 1.1 * free.seconds_per_token


@pytest.mark.parametrize("on_disk", [("weights",), ("weights", "cache")])
def test_what_may_not_go_to_disk_does_not(on_disk: tuple[str, ...]) -> None:
    model = CostModel(job("opt-1.3b", 128, 32, device="cpu"), machine("cpu"))
    found = search(model, {"cpu": 1.5 * GB, "disk": 40.0 * GB}, replace(FEWEST, on_disk=on_disk))
    there = dict(zip(("weights", "cache", "hidden"), found.policy.percent.disk_shares, strict=True))
    assert all(share == 0 for part, share in there.items() if part not in on_disk) and there["weights"] > 0


def test_few_prompts_make_equal_blocks() -> None:
    model = CostModel(job("opt-1.3b", 128, 32), machine())
    alone = find(model, {**SMALL, "disk": 0.0}, FEW)
    rows = alone.policy.block_rows
    halves = find(model, {**SMALL, "disk": 0.0}, replace(FEW, most_rows=rows + 10))
    assert halves.policy.block_rows <= rows / 2 + halves.policy.gpu_batch_size + 5
    few = find(model, {**SMALL, "disk": 0.0}, replace(FEW, most_rows=5))
    assert few.policy.block_rows <= 5
    one = find(model, {**SMALL, "disk": 0.0}, Choices(gpu_batch_size=(8,), most_rows=1))
    assert one.policy.block_rows == 8


def test_opt_175b_needs_the_disk() -> None:
    budgets: dict[Tier, float | None] = {**T4_MEMORY, "disk": 1500.0 * GB}
    found = find(on_t4("opt-175b"), budgets, Choices(gpu_batch_size=(8, 32)), uses_disk=False)
    assert found.projection.peak_bytes("disk") > 100 * GB
    # Half the weights on disk take 87 s a step at 2 GB/s; FlexGen reached 0.69 tok/s.
    assert 0.69 < found.projection.throughput_tok_s < 4


def test_flexgens_engine_is_searched_by_its_own_times() -> None:
    model = FlexgenCost(job("opt-30b"), T4)
    few = Choices(gpu_batch_size=(48,), cpu_cache_compute=(True,))
    found = search(model, T4_MEMORY, few)
    assert 12 < found.projection.throughput_tok_s < 15  # its authors reached 12.7 and 14.3
    assert set(found.projection.binds.values()) == {"compute", "h2d, then compute"}


QUIETLY = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUIETLY
@given(st.floats(0, 3), st.floats(0, 4), st.sampled_from(["gpu", "cpu", "disk"]), st.floats(0.1, 3))
def test_what_is_found_is_monotone_within_a_hundredth(gpu: float, cpu: float, tier: Tier, more: float) -> None:
    budgets: dict[Tier, float | None] = {"gpu": (1 + gpu) * GB, "cpu": (1 + cpu) * GB, "disk": 5.0 * GB}
    model = CostModel(job("opt-1.3b", 128, 32), machine())
    before = search(model, budgets, FEWEST).projection.throughput_tok_s
    after = search(model, {**budgets, tier: (budgets[tier] or 0) + more * GB}, FEWEST).projection.throughput_tok_s
    assert after >= 0.99 * before


@QUIETLY
@given(st.floats(0, 3), st.floats(0, 4), st.floats(0, 10), st.sampled_from(["cuda", "cpu"]))
def test_h2o_is_never_slower_and_its_block_never_smaller(gpu: float, cpu: float, disk: float, device: str) -> None:
    budgets: dict[Tier, float | None] = {"gpu": (1 + gpu) * GB, "cpu": (1 + cpu) * GB, "disk": (3 + disk) * GB}
    models = {name: CostModel(job("opt-1.3b", 128, 32, name, device), machine(device)) for name in ("h2o", "full")}
    speeds = {name: search(model, budgets, FEWEST).projection.throughput_tok_s for name, model in models.items()}
    assert speeds["h2o"] >= 0.99 * speeds["full"]
    blocks = {name: largest_block(model, budgets, FEWEST) for name, model in models.items()}
    assert blocks["h2o"] >= blocks["full"] > 0
