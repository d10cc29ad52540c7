"""Seconds by lane, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning import T4, achieved, job, machine, on_t4

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import SHARED, CostModel, Lanes
from flexgen_h2o.search.search import predict
from flexgen_h2o.search.simulate import simulate
from flexgen_h2o.search.sizes import Job, MemoryPlan

OFFLOADED = Percent(0, 100, 0, 100, 0, 100)
ROWS = 8 * 52
LAYER = (12 * 7168**2 + 13 * 7168) * 2  # bytes of a layer of opt-30b, biases and norms too


def step(policy: Policy, job: Job, **rates: float) -> Lanes:
    return achieved(CostModel(job, machine(**rates)), policy)["decode"]


def test_a_step_of_opt_30b_on_a_t4_by_hand() -> None:
    lanes = achieved(on_t4("opt-30b", 512, 512), Policy(8, 52, None, OFFLOADED, cpu_cache_compute=True))["decode"]
    outputs = ROWS * 48 * 7168 * 2
    assert lanes["h2d"] == pytest.approx((48 * LAYER + outputs) / 13.8405e9, rel=1e-4)
    assert lanes["d2h"] == pytest.approx(3 * outputs / 13.8405e9, rel=1e-4)
    kept = ROWS * 204 * 48 * 2 * 7168 * 2
    products = 2 * ROWS * (48 * 12 * 7168**2 + 50272 * 7168) / 24e12
    between = 48 * 28 * ROWS * 7168 * 2 / 320e9
    assert lanes["compute"] == pytest.approx(products + between, rel=1e-4)
    attention = kept / 80e9 + 48 * 52 * T4.operation_s("attention")
    assert lanes["host"] == pytest.approx(attention + lanes["compute"] / 2, rel=1e-4)  # a group's share, of two
    assert lanes["host_memory"] == pytest.approx((48 * LAYER + 4 * outputs + kept) / 80e9, rel=1e-4)
    assert lanes["disk_read"] == lanes["disk_write"] == 0


def test_prefill_of_opt_30b_on_a_t4_by_hand() -> None:
    lanes = achieved(on_t4("opt-30b", 512, 512), Policy(8, 52, None, OFFLOADED, cpu_cache_compute=True))["prefill"]
    tokens, matrices = ROWS * 512, 12 * 7168**2
    products = 2 * tokens * (47 * matrices + 3 * 7168**2)
    last = 2 * ROWS * (9 * 7168**2 + 50272 * 7168) / (8 * 320e9)  # of 8 rows at a time: bound by memory
    attention = 48 * 2 * ROWS * 512**2 * 7168
    between = (48 * 28 * tokens * 7168 * 2 + 48 * 56 * ROWS * 512**2 / 2 * 24) / 320e9
    assert lanes["compute"] == pytest.approx((products + attention) / 24e12 + last + between, rel=1e-4)
    hidden, kept = 48 * tokens * 7168 * 2, ROWS * 48 * (204 * 2 * 7168 * 2 + 56 * (204 * 8 + 4))
    assert lanes["h2d"] == pytest.approx((48 * LAYER + hidden) / 13.8405e9, rel=1e-4)
    assert lanes["d2h"] == pytest.approx((hidden + kept) / 13.8405e9, rel=1e-4)


def test_the_cache_of_h2o_costs_the_same_however_long_the_text_is() -> None:
    policy = Policy(8, 52, None, OFFLOADED, cpu_cache_compute=True)
    short, long = (replace(job("opt-30b"), heavy=54, recent=54, gen_len=length) for length in (32, 1024))
    steps = [achieved(CostModel(each, T4), policy)["decode"] for each in (short, long)]
    assert steps[0] == steps[1]


def test_a_full_cache_costs_its_mean_length() -> None:
    full = job("opt-125m", 100, 101, eviction="full")
    kept = step(Policy(4, 2), full)["compute"] - step(Policy(4, 2), replace(full, recent=1))["compute"]
    live = sum(range(101, 201)) / 100 - 1
    assert kept == pytest.approx(8 * live * 12 * 2 * 768 * 2 / 400e9, rel=1e-6)


def test_attention_on_the_gpu_brings_the_cache_and_takes_its_time_there() -> None:
    homes = Percent(100, 0, 0, 100, 100, 0)
    at_home, moved = (Policy(4, 2, 8, homes, cpu_cache_compute=on) for on in (True, False))
    one = job("opt-125m", 100, 28)
    home, away = step(at_home, one), step(moved, one)
    assert "host" in home and "host" not in away
    assert away["compute"] > home["compute"] and away["h2d"] > 5 * home["h2d"]
    unit = MemoryPlan(one, moved).lines["cpu"]["KV cache"]
    assert away["h2d"] == pytest.approx(unit / 10e9)
    changed = 8 * 12 * (2 * 768 * 2 + 12 * 4 * (one.slots + 1))  # the new key and value, all scores
    assert away["d2h"] == pytest.approx(changed / 8e9)


def test_disk_units_go_both_ways_whole() -> None:
    policy, one = Policy(4, 2, None, Percent(100, 0, 0, 0, 100, 0)), job("opt-125m", 100, 28)
    lanes = step(policy, one)
    unit = one.unit_bytes(policy, 8) * 12
    assert lanes["disk_read"] == pytest.approx(unit / 2e9) and lanes["disk_write"] == pytest.approx(unit / 1e9)
    assert lanes["h2d"] == pytest.approx(unit / 10e9) and lanes["d2h"] == pytest.approx(unit / 8e9)


@pytest.mark.parametrize(("slowed", "share"), [(None, 0.0), (2, 1.0), (1, 0.5), (1.5, 0.75), (0.9, 0.5), (3, 1.0)])
def test_reads_and_writes_share_a_disk_as_far_as_was_measured(slowed: float | None, share: float) -> None:
    both = {"read": 2e9, "write": 1e9}
    changes = {} if slowed is None else {f"disk_both/{way}/direct/1": rate / slowed for way, rate in both.items()}
    one = replace(job("opt-125m", 100, 28, device="cpu"), dtype="float16")
    model = CostModel(one, machine("cpu", **changes))
    policy = Policy(4, 6, None, Percent(100, 0, 0, 0, 100, 0))
    lanes = achieved(model, policy)["decode"]
    assert lanes["disk"] == pytest.approx(share * (lanes["disk_read"] + lanes["disk_write"]))
    assert achieved(model, Policy(4, 6))["decode"]["disk"] == 0
    walked = simulate(model, policy).projection.lanes["decode"]
    assert walked.get("disk", 0.0) == pytest.approx(share * (walked["disk_read"] + walked["disk_write"]), rel=0.1)
    derated = achieved(CostModel(one, machine("cpu", **changes), {"disk_read": 0.5}), policy)["decode"]
    assert derated["disk"] == pytest.approx(share * (2 * lanes["disk_read"] + lanes["disk_write"]))
    if share == 1:
        assert predict(model, policy).decode_s == pytest.approx(27 * lanes["disk"])
        assert predict(model, replace(policy, overlap=False)).decode_s < 27 * (lanes["compute"] + 1.01 * lanes["disk"])


def test_on_a_cpu_nothing_is_copied_and_everything_adds() -> None:
    one = replace(job("opt-125m", 100, 28, device="cpu"), dtype="float16")
    model = CostModel(one, machine("cpu"))
    lanes = achieved(model, Policy(4, 2, None, Percent(50, 0, 100, 0, 100, 0)))["decode"]
    assert set(lanes) == {"compute", "disk_read", "disk_write", "disk"}
    resident = achieved(model, Policy(4, 2))["decode"]
    read = lanes["disk_read"] * 2e9
    assert lanes["compute"] - resident["compute"] == pytest.approx(read * 1e-11 / 4)
    assert resident["disk_read"] == 0


def test_with_two_groups_cpu_and_gpu_work_at_once() -> None:
    one = job("opt-30b", 512, 512)
    policy = Policy(8, 52, 208, OFFLOADED, cpu_cache_compute=True)
    alone = replace(policy, decode_batch_size=416)
    at_once, in_turns = (achieved(CostModel(one, T4), each)["decode"] for each in (policy, alone))
    assert in_turns["host"] == pytest.approx(in_turns["compute"] + at_once["host"] - at_once["compute"] / 2, rel=1e-6)
    assert at_once["host"] < in_turns["host"]


def test_without_overlap_a_phase_takes_the_sum() -> None:
    model, policy = on_t4(), Policy(8, 4, None, OFFLOADED)
    lanes = achieved(model, replace(policy, overlap=False))["prefill"]
    apart = predict(model, replace(policy, overlap=False)).prefill_s
    assert apart == pytest.approx(sum(seconds for lane, seconds in lanes.items() if lane not in SHARED))
    assert predict(model, policy).prefill_s == max(achieved(model, policy)["prefill"].values()) < apart


def test_a_lane_may_reach_a_share_of_its_rate() -> None:
    policy = Policy(8, 52, None, OFFLOADED, cpu_cache_compute=True)
    whole = achieved(on_t4("opt-30b", 512, 512), policy)["decode"]
    derated = achieved(CostModel(job("opt-30b", 512, 512), T4, {"h2d": 0.5, "host": 0.8}), policy)["decode"]
    assert derated["h2d"] == pytest.approx(2 * whole["h2d"])
    assert derated["compute"] == whole["compute"]
    group = whole["compute"] / 2
    assert derated["host"] - group == pytest.approx((whole["host"] - group) / 0.8)


def test_4_bits_move_less_and_read_their_own_rates() -> None:
    one = job("opt-30b", 512, 512)
    plain, packed = (
        achieved(CostModel(one, T4), Policy(8, 52, None, OFFLOADED, compress_weight=on, compress_cache=on))["decode"]
        for on in (False, True)
    )
    assert packed["h2d"] == pytest.approx(plain["h2d"] * 4.5 / 16, rel=0.03)
    missing = CostModel(job("opt-125m"), machine())
    with pytest.raises(UsageError, match="gemm/int4"):
        achieved(missing, Policy(compress_weight=True))


def test_the_resource_that_binds_is_named() -> None:
    policy = Policy(8, 52, None, OFFLOADED, cpu_cache_compute=True)
    projection = predict(on_t4("opt-30b", 512, 512), policy)
    assert projection.binds == {"prefill": "compute", "decode": "h2d"}
    assert projection.decode_s == pytest.approx(projection.lanes["decode"]["h2d"])
    assert projection.tokens == 416 * 512
    assert projection.throughput_tok_s == pytest.approx(projection.tokens / projection.total_s)
