"""The walk over the schedule: what it must agree on with the cost model, and what it alone sees."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.planning import T4, achieved, job, machine

from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import Finish
from flexgen_h2o.plan.timeline import write_trace
from flexgen_h2o.search.cost_model import CostModel
from flexgen_h2o.search.flexgen_model import FlexgenCost
from flexgen_h2o.search.search import predict
from flexgen_h2o.search.simulate import simulate

HOMES = [
    Percent(),
    Percent(0, 100, 100, 0, 100, 0),
    Percent(0, 100, 0, 100, 0, 100),
    Percent(30, 70, 20, 80, 0, 100),
    Percent(0, 50, 0, 0, 0, 100),
    Percent(0, 0, 0, 0, 0, 0),
]
BOX = machine()


@pytest.mark.parametrize("percent", HOMES, ids=str)
@pytest.mark.parametrize("at_home", [False, True])
def test_nothing_is_faster_than_its_busiest_lane(percent: Percent, at_home: bool) -> None:
    model = CostModel(job("opt-1.3b", 128, 32), BOX)
    policy = Policy(4, 6, None, percent, cpu_cache_compute=at_home)
    bound, walked = predict(model, policy), simulate(model, policy).projection
    for phase, seconds in (("prefill", walked.prefill_s), ("decode", walked.decode_s)):
        assert seconds >= max(walked.lanes[phase].values()) * (1 - 1e-6)
    assert walked.prefill_s >= 0.999 * bound.prefill_s
    assert walked.total_s >= 0.98 * bound.total_s
    assert walked.tokens == bound.tokens and walked.memory == bound.memory


@pytest.mark.parametrize("percent", HOMES, ids=str)
def test_both_count_the_same_work(percent: Percent) -> None:
    model, policy = CostModel(job("opt-1.3b", 128, 4), BOX), Policy(4, 6, None, percent)
    planned, walked = achieved(model, policy), simulate(model, policy).projection
    for lane in ("compute", "h2d", "d2h", "disk_read", "disk_write"):
        # Over prefill and decode: what a phase has begun may end in the next. Weights outside the layers come once.
        total = sum(walked.lanes[phase].get(lane, 0.0) for phase in ("prefill", "decode"))
        want = planned["prefill"][lane] + 3 * planned["decode"][lane]
        outer = 50272 * 2048 * 2 / {"h2d": 10e9, "disk_read": 2e9}.get(lane, 1e18)
        assert total == pytest.approx(want, rel=0.03, abs=1e-4 + 1.2 * outer + want / 24), lane


@pytest.mark.parametrize(
    ("percent", "at_home"), [(Percent(), False), (HOMES[1], False), (HOMES[2], False), (HOMES[2], True)], ids=str
)
def test_long_steps_overlap_as_the_cost_model_says(percent: Percent, at_home: bool) -> None:
    model = CostModel(job("opt-1.3b", 128, 64), BOX)
    policy = Policy(16, 16, None, percent, cpu_cache_compute=at_home)
    assert simulate(model, policy).projection.total_s == pytest.approx(predict(model, policy).total_s, rel=0.05)


def test_opt_30b_on_a_t4_reaches_its_limit_walked_too() -> None:
    model = CostModel(job("opt-30b", 512, 512), T4)
    policy = Policy(16, 26, None, Percent(0, 100, 0, 100, 0, 100), cpu_cache_compute=True)
    assert 0.90 * 78.5 <= simulate(model, policy).projection.throughput_tok_s <= 1.01 * 78.5


def test_without_looking_ahead_a_step_waits_for_its_weights() -> None:
    model, policy = CostModel(job("opt-1.3b", 128, 8), BOX), Policy(16, 4, None, HOMES[1])
    ahead, alone = (simulate(model, replace(policy, overlap=on)).projection for on in (True, False))
    lanes = achieved(model, policy)["decode"]
    assert ahead.decode_s / 7 == pytest.approx(max(lanes["compute"], lanes["h2d"]), rel=0.1)
    assert alone.decode_s / 7 == pytest.approx(lanes["compute"] + lanes["h2d"], rel=0.1)


def test_a_layer_ends_when_the_cpu_has_attended() -> None:
    slow = machine(**{"attention/cpu/float16/64": 1e9})
    policy = Policy(4, 4, 8, Percent(100, 0, 0, 100, 100, 0), cpu_cache_compute=True)
    spans = simulate(CostModel(job("opt-125m", 64, 4), slow), policy).spans
    attended = {(s.work.step, s.work.layer, s.work.unit): s.end_s for s in spans if s.lane == "host"}  # type: ignore[attr-defined]
    ends = [s for s in spans if isinstance(s.work, Finish) and s.work.group.phase == "decode"]
    assert len(ends) == 3 * 12 * 2 and len(attended) == 3 * 12 * 4
    steps: Counter[tuple[int, int]] = Counter()  # of a layer and a group, so far
    for span in sorted(ends, key=lambda span: span.start_s):
        assert isinstance(span.work, Finish)
        layer, group = span.work.layer, span.work.group
        steps[layer, group.index] += 1
        assert span.start_s >= max(attended[steps[layer, group.index], layer, unit] for unit in group.units)


def test_a_full_cache_grows() -> None:
    one = replace(job("opt-1.3b", 128, 200, eviction="full"))
    model = CostModel(one, machine(**{"attention/cuda/float16/64": 5e9}))
    policy = Policy(8, 2)
    assert simulate(model, policy).projection.decode_s == pytest.approx(predict(model, policy).decode_s, rel=0.02)


@pytest.mark.parametrize("gen_len", [1, 2, 3, 4])
def test_short_texts(gen_len: int) -> None:
    model, policy = CostModel(job("opt-125m", 64, gen_len), BOX), Policy(8, 2)
    walked = simulate(model, policy).projection
    assert walked.tokens == 16 * gen_len
    assert walked.decode_s == pytest.approx(predict(model, policy).decode_s, rel=0.2, abs=1e-9)
    assert (walked.decode_s == 0) == (gen_len == 1)


def test_on_a_cpu_the_loop_itself_computes() -> None:
    model = CostModel(job("opt-1.3b", 128, 16, device="cpu"), machine("cpu"))
    walked = simulate(model, Policy(4, 6)).projection
    assert walked.total_s == pytest.approx(predict(model, Policy(4, 6)).total_s, rel=0.02)
    assert set(walked.lanes["decode"]) == {"compute"}


def test_flexgens_engine_takes_turns() -> None:
    model = FlexgenCost(job("opt-30b", 512, 32), T4)
    policy = Policy(52, 14, None, Percent(0, 100, 0, 100, 0, 100), cpu_cache_compute=True)
    walked, planned = simulate(model, policy), predict(model, policy)
    assert walked.projection.prefill_s == pytest.approx(planned.prefill_s)
    assert walked.projection.decode_s == pytest.approx(planned.decode_s)
    assert walked.projection.decode_s == pytest.approx(788, rel=0.2)  # its authors' log
    step = [span for span in walked.spans if span.start_s > walked.projection.prefill_s]
    loads = [span for span in step if span.lane == "h2d"]
    for load in loads[:5]:
        assert not any(s.lane == "compute" and s.start_s < load.end_s and s.end_s > load.start_s + 1e-9 for s in step)


def test_no_lane_does_two_things_at_once_and_the_trace_shows_it(tmp_path: Path) -> None:
    model = CostModel(job("opt-125m", 64, 8), BOX)
    spans = simulate(model, Policy(4, 4, None, HOMES[3])).spans
    assert {"compute", "h2d", "d2h"} <= {span.lane for span in spans}
    for lane in ("compute", "h2d", "d2h", "issue"):
        own = sorted((span.start_s, span.end_s) for span in spans if span.lane == lane)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in zip(own, own[1:], strict=False))
    write_trace(tmp_path / "trace.json", list(spans))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) > len(spans)
