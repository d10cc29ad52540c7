"""Bytes of a plan against the ledger of a run without memory, for every kind of home."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.planning import job

from flexgen_h2o.basics.memory_sizes import HUGE_PAGE, whole_pages
from flexgen_h2o.engine.assemble import RunSizes, predict
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.tiers import Ledger
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.footprint import STAGED_BYTES
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.placement import TIERS, Percent, spread
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.sizes import DEFAULT_BASELINE, Job, MemoryPlan

PERCENTS = [
    Percent(),
    Percent(0, 100, 0, 100, 0, 100),
    Percent(20, 80, 0, 100, 0, 100),
    Percent(0, 50, 0, 0, 0, 100),
    Percent(33.3, 33.3, 10, 45, 50, 25),
    Percent(0, 0, 0, 0, 0, 0),
    Percent(60, 0, 40, 0, 100, 0),
]


def ledger_of(job: Job, policy: Policy) -> Ledger:
    rule = H2O(job.heavy, job.recent)
    platform = Platform(torch.device("meta"), {}, joint=job.joint, baseline=DEFAULT_BASELINE)
    sizes = RunSizes(rule, policy.block_rows, job.prompt_len)
    return predict(job.config, torch.float16, policy, platform, sizes)


def assert_agrees(job: Job, policy: Policy) -> None:
    counted, planned = ledger_of(job, policy), MemoryPlan(job, policy).peaks()
    staging = 0 if job.joint else STAGED_BYTES  # a device without memory stages nothing
    for tier in TIERS:
        want = counted.peak(tier) + (staging if tier == "cpu" else 0)
        assert planned[tier] == pytest.approx(want, rel=0.02, abs=2**20), (tier, counted.account(tier).largest)


@pytest.mark.parametrize("percent", PERCENTS, ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plan_counts_what_the_ledger_counts(percent: Percent, device: str) -> None:
    for model in ("opt-125m", "opt-350m", "opt-6.7b"):
        for policy in (Policy(4, 3, percent=percent), Policy(2, 7, 4, percent, overlap=False)):
            assert_agrees(job(model, 100, 28, device=device), policy)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("block", [(4, 3), (12, 2), (16, 2)])
def test_kv_buffers_are_whole_huge_pages_where_files_are_read_into_them(device: str, block: tuple[int, int]) -> None:
    one, policy = job("opt-125m", 100, 28, device=device), Policy(*block, percent=Percent(0, 0, 0, 0, 0, 0))
    planned, tier = MemoryPlan(one, policy).lines, one.account("gpu")
    counted = ledger_of(one, policy).account(tier).largest
    for line in ("weight read buffers", "KV working buffers"):
        assert counted[line] == planned[tier][line]
    asked = 2 * whole_pages(int(one.unit_bytes(policy, block[0])))
    rounded = device == "cpu" and asked * 4 / 3 > -(-asked // HUGE_PAGE) * HUGE_PAGE
    assert planned[tier]["KV working buffers"] == (-(-asked // HUGE_PAGE) * HUGE_PAGE if rounded else asked)


@pytest.mark.parametrize("percent", PERCENTS[:4], ids=str)
def test_attention_on_the_cpu_and_large_models(percent: Percent) -> None:
    assert_agrees(job("opt-30b", 512, 32), Policy(8, 6, percent=percent, cpu_cache_compute=True))
    assert_agrees(job("opt-175b", 512, 32), Policy(32, 2, percent=percent))


@pytest.mark.parametrize("ring_16bit", [False, True])
def test_a_cache_in_4_bits(ring_16bit: bool) -> None:
    policy = Policy(4, 3, percent=PERCENTS[4], compress_cache=True, ring_16bit=ring_16bit)
    assert_agrees(job("opt-2.7b", 100, 28), policy)  # heads of 80


@pytest.mark.parametrize("model", ["opt-125m", "opt-1.3b", "opt-30b"])
@pytest.mark.parametrize("percent", PERCENTS[:4], ids=str)
def test_weights_in_4_bits_in_the_layout_that_a_cpu_takes(model: str, percent: Percent) -> None:
    one = job(model, 100, 28, device="cpu")
    policy = Policy(4, 3, percent=percent, compress_weight=True, compress_cache=True)
    layout = best_layout(torch.device("cpu"), torch.bfloat16, one.config.matrix_shapes(), True)
    platform = Platform(torch.device("cpu"), {}, baseline=DEFAULT_BASELINE, matrix_layout=layout)
    sizes = RunSizes(H2O(one.heavy, one.recent), policy.block_rows, one.prompt_len)
    counted = predict(one.config, torch.bfloat16, policy, platform, sizes)
    planned = MemoryPlan(one, policy).peaks()
    for tier in TIERS:
        assert planned[tier] == pytest.approx(counted.peak(tier), rel=0.02, abs=2**20), tier
    if layout.name == "4-bit strips":  # where panels are restored
        line = "weights being decoded"
        assert MemoryPlan(one, policy).lines["cpu"][line] == pytest.approx(
            counted.account("cpu").largest[line], rel=0.01
        )


@pytest.mark.parametrize("eviction", ["h2o", "full", "local"])
def test_the_cache_is_as_large_as_its_slots(eviction: str) -> None:
    plan = MemoryPlan(job("opt-125m", 500, 100, eviction), Policy(4, 3))
    slots = {"h2o": 120, "full": 600, "local": 60}[eviction]
    state = 12 * 12 * 12 * (slots * 8 + 4)  # layers x rows x heads: score and column of each slot, one loser
    assert plan.lines["gpu"]["KV cache"] == 12 * 12 * slots * 768 * 2 * 2 + state


def test_4_bits_take_what_their_groups_take() -> None:
    for dim in (64, 80, 96, 128, 7168):
        assert 8 * entry_bytes(dim) / dim == pytest.approx(4 + 32 * -(-dim // 64) / dim)
    plain, packed = (MemoryPlan(job("opt-30b"), Policy(compress_weight=on)) for on in (False, True))
    ratio = packed.lines["gpu"]["weights"] / plain.lines["gpu"]["weights"]
    assert ratio == pytest.approx(4.5 / 16, rel=0.01)


def test_achieved_shares_are_whole_units() -> None:
    plan = MemoryPlan(job("opt-125m", 100, 28), Policy(4, 5, percent=Percent(50, 50, 30, 70, 50, 50)))
    assert plan.achieved_percent[2] * 60 / 100 == pytest.approx(18)  # of 12 layers x 5 units
    assert plan.achieved_percent[4] in (pytest.approx(40), pytest.approx(60))
    assert sum(plan.achieved_percent[:2]) == pytest.approx(100)
    assert published("opt-125m").num_hidden_layers == 12


@given(st.integers(1, 400), st.floats(0, 100), st.floats(0, 100))
def test_units_go_where_placement_puts_them(units: int, gpu: float, cpu: float) -> None:
    percent = Percent(100, 0, round(gpu, 1), round(min(cpu, 100 - round(gpu, 1)), 1), 100, 0)
    homes = spread(12 * units, percent.cache)
    plan = MemoryPlan(job("opt-125m", 100, 28), Policy(1, units, percent=percent))
    assert plan.cache_shares == tuple(homes.count(tier) / len(homes) for tier in TIERS)
