"""The linear program against a search by hand, and what must hold for every machine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.planning import T4, job, machine

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.plan.placement import TIERS, Percent, Shares, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import CostModel, Split
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.lp import Candidate, Program
from flexgen_h2o.search.predict import predict
from flexgen_h2o.search.sizes import Job, MemoryPlan

SMALL = job("opt-1.3b", 128, 32)
FULL = job("opt-1.3b", 128, 32, eviction="full")
QUIETLY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BOX = machine()


def program(budgets: dict[Tier, float | None], candidate: Candidate | None = None, **where: object) -> Program:
    """A program for opt-1.3b on the made-up machine, unless told otherwise."""
    one, hardware = where.get("job", SMALL), where.get("hardware", BOX)
    assert isinstance(one, Job) and isinstance(hardware, Hardware)
    return Program(CostModel(one, hardware), candidate or Candidate(Policy(4)), budgets)


def all_shares(steps: int) -> list[Shares]:
    grid = range(steps + 1)
    return [
        (gpu / steps, cpu / steps, (steps - gpu - cpu) / steps)
        for gpu, cpu in itertools.product(grid, grid)
        if gpu + cpu <= steps
    ]


@pytest.mark.parametrize(
    "budgets",
    [
        {"gpu": 1.5 * GB, "cpu": 3.0 * GB, "disk": 50.0 * GB},
        {"gpu": 2.5 * GB, "cpu": 2.0 * GB, "disk": 50.0 * GB},
        {"gpu": 1.2 * GB, "cpu": 6.0 * GB, "disk": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("at_home", [False, True])
def test_no_shares_on_a_grid_are_faster(budgets: dict[Tier, float | None], at_home: bool) -> None:
    candidate = Candidate(Policy(4, cpu_cache_compute=at_home), groups=2 if at_home else 1)
    one = program(budgets, candidate)
    units = 16
    optimum = one.solve(units, units)
    assert optimum is not None
    steps, best = 10, float("inf")
    rows = one.group_rows(units)
    for shares in itertools.product(all_shares(steps), repeat=2):
        for hidden in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
            split = Split(*shares, hidden)
            held = one.held_bytes(split, units, rows)
            if any(max(held[tier]) > (budget or 0) for tier, budget in budgets.items()):
                continue
            phases = one.model.phases(candidate.policy, split, units, rows, units * 4 / rows)
            best = min(best, max(phases["prefill"].values()) + 31 * max(phases["decode"].values()))
    assert best < float("inf")
    assert optimum.seconds * units <= best * (1 + 1e-6)
    # And not by much: the grid is coarse, the program is not wrong.
    assert optimum.seconds * units > 0.5 * best


def test_the_optimum_keeps_the_budgets_and_says_what_it_costs() -> None:
    budgets: dict[Tier, float | None] = {"gpu": 1.5 * GB, "cpu": 3.0 * GB, "disk": 50.0 * GB}
    one = program(budgets)
    optimum = one.solve(16, 16)
    assert optimum is not None and optimum.units == pytest.approx(16)
    held = one.held_bytes(optimum.split, 16, one.group_rows(16))
    for tier, budget in budgets.items():
        assert max(held[tier]) <= (budget or 0) * (1 + 1e-6)
    phases = one.model.phases(Policy(4), optimum.split, 16, one.group_rows(16), 1)
    seconds = max(phases["prefill"].values()) + 31 * max(phases["decode"].values())
    assert optimum.seconds * 16 == pytest.approx(seconds, rel=1e-5)
    for shares in (optimum.split.weights, optimum.split.cache, optimum.split.hidden):
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0


def test_a_free_size_bounds_every_size() -> None:
    budgets: dict[Tier, float | None] = {"gpu": 1.5 * GB, "cpu": 3.0 * GB, "disk": 0.0}
    one = program(budgets)
    free = one.solve(1, 10**4)
    assert free is not None
    sizes = [size for size in (1, 5, 20, int(free.units), int(free.units) + 1, 200) if one.solve(size, size)]
    assert len(sizes) >= 4 and free.units > 20
    for size in sizes:
        fixed = one.solve(size, size)
        assert fixed is not None and free.seconds <= fixed.seconds * (1 + 1e-6)
    nearest = one.solve(int(free.units), int(free.units))
    assert nearest is not None and nearest.seconds < free.seconds * 1.05


def test_nothing_fits_nothing() -> None:
    budgets: dict[Tier, float | None] = {"gpu": 1.0 * GB, "cpu": 1.0 * GB, "disk": 0.1 * GB}
    assert program(budgets).solve(1, 1) is None
    missing = program(budgets).solve(1, 1, relaxed=True)
    assert missing is not None and missing.excess["disk"] > 0.5 and missing.excess["gpu"] == pytest.approx(0)
    # A disk that is not there is not asked for.
    missing = program({**budgets, "disk": 0.0}).solve(1, 1, relaxed=True)
    assert missing is not None and missing.excess["cpu"] > 0.5 and missing.excess["disk"] == pytest.approx(0)


def test_the_optimum_bounds_what_whole_tensors_and_units_take() -> None:
    """No policy of whole tensors and units that fits is faster, and none holds less than its shares are said to."""
    budgets: dict[Tier, float | None] = {"gpu": 2.0 * GB, "cpu": 3.0 * GB, "disk": 20.0 * GB}
    one = program(budgets)
    tried = 0
    for percent in (
        Percent(),
        Percent(50, 50, 20, 80, 0, 100),
        Percent(55, 30, 100, 0, 50, 50),
        Percent(3, 0, 0, 0, 0, 0),
    ):
        for units in (3, 8, 20):
            policy = Policy(4, units, percent=percent)
            plan = MemoryPlan(SMALL, policy)
            gpu, cpu = (share / 100 for share in plan.achieved_percent[:2])
            split = Split((gpu, cpu, 1 - gpu - cpu), plan.cache_shares, plan.hidden_shares)
            said, held = one.held_bytes(split, units, policy.group_rows), plan.peaks()
            for tier in TIERS:
                assert max(said[tier]) <= held[tier] * 1.02 + 2**20, (percent, tier)
            optimum = one.solve(units, units)
            if optimum is not None and all(held[tier] <= (budgets[tier] or 0) for tier in TIERS):
                tried += 1
                assert optimum.seconds * units <= predict(one.model, policy).total_s * (1 + 1e-6)
    assert tried > 3


GIGABYTES = st.floats(0, 6)


def seconds(one: Program) -> float:
    optimum = one.solve(1, 2000)
    return float("inf") if optimum is None else optimum.seconds


def tolerated(value: float) -> float:
    return value * (1 + 1e-5)


@QUIETLY
@given(GIGABYTES, GIGABYTES, GIGABYTES, st.sampled_from(["gpu", "cpu", "disk"]), st.floats(0, 4), st.booleans())
def test_more_memory_is_never_slower(
    gpu: float, cpu: float, disk: float, tier: Tier, more: float, at_home: bool
) -> None:
    budgets: dict[Tier, float | None] = {"gpu": (1 + gpu) * GB, "cpu": (1 + cpu) * GB, "disk": disk * GB}
    candidate = Candidate(Policy(4, cpu_cache_compute=at_home), groups=2 if at_home else 1)
    before = seconds(program(budgets, candidate))
    after = seconds(program({**budgets, tier: (budgets[tier] or 0) + more * GB}, candidate))
    assert after <= tolerated(before)


@QUIETLY
@given(GIGABYTES, GIGABYTES, st.sampled_from(sorted(set(BOX.rates) - {"disk_cpu/read/direct/1"})), st.floats(1.01, 8))
def test_a_faster_machine_is_never_slower(gpu: float, cpu: float, name: str, factor: float) -> None:
    budgets: dict[Tier, float | None] = {"gpu": (1 + gpu) * GB, "cpu": (1 + cpu) * GB, "disk": 100.0 * GB}
    # Of what is a time, less is faster.
    faster = BOX.rates[name].value * (factor if not BOX.rates[name].unit.startswith("s/") else 1 / factor)
    candidate = Candidate(Policy(4, cpu_cache_compute=True), groups=2)
    before = seconds(program(budgets, candidate))
    after = seconds(program(budgets, candidate, hardware=machine(**{name: faster})))
    assert after <= tolerated(before)


@QUIETLY
@given(GIGABYTES, GIGABYTES, GIGABYTES, st.booleans())
def test_h2o_is_never_slower_than_the_full_cache_nor_its_block_smaller(
    gpu: float, cpu: float, disk: float, at_home: bool
) -> None:
    budgets: dict[Tier, float | None] = {"gpu": (1 + gpu) * GB, "cpu": (1 + cpu) * GB, "disk": disk * GB}
    candidate = Candidate(Policy(4, cpu_cache_compute=at_home), groups=2 if at_home else 1)
    h2o, full = program(budgets, candidate), program(budgets, candidate, job=FULL)
    assert seconds(h2o) <= tolerated(seconds(full))
    assert h2o.most_units(1, 10**4) >= full.most_units(1, 10**4) * (1 - 1e-6)


def test_the_largest_block_is_where_memory_ends() -> None:
    budgets: dict[Tier, float | None] = {"gpu": 1.5 * GB, "cpu": 6.0 * GB, "disk": 0.0}
    one = program(budgets)
    most = one.most_units(1, 10**4)
    assert one.solve(int(most), int(most)) is not None
    assert one.solve(int(most) + 2, int(most) + 2) is None
    assert program({**budgets, "cpu": 0.0}).most_units(1, 10) == 0


def test_a_cpu_has_one_memory() -> None:
    one = replace(SMALL, device="cpu")
    optimum = program({"cpu": 3.0 * GB, "disk": 50.0 * GB}, job=one, hardware=machine("cpu")).solve(1, 100)
    assert optimum is not None
    assert optimum.split.weights[1] == optimum.split.cache[1] == optimum.split.hidden[1] == 0


def test_the_published_machine_is_monotone_too() -> None:
    model = CostModel(job("opt-30b", 512, 512), T4)
    candidate = Candidate(Policy(8, cpu_cache_compute=True), groups=4)
    found = []
    for cpu in (60, 80, 120, 204, 300):
        optimum = Program(model, candidate, {"gpu": 15.0 * GB, "cpu": cpu * 1.0 * GB, "disk": 0.0}).solve(1, 5000)
        assert optimum is not None
        found.append(optimum.seconds)
    assert found == sorted(found, reverse=True) and found[0] > 2 * found[-1]
