"""What layers take beside products: by measured rates where there are any, else counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning import achieved, job, machine

from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import CostModel
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.layer_times import choice_s, decode_layer_s, prefill_layer_s
from flexgen_h2o.search.predict import predict
from flexgen_h2o.search.simulate import simulate

ONE = replace(job("opt-125m", 100, 28, device="cpu"))
HIDDEN = 768 * 2  # bytes of a token
COUNTED = {"gemm/float16/1": 1e12, "gemm/float16/100": 1e12, "memory/cpu/read/1": 60e9}
MEASURED = {
    "prefill/cpu/50": 1e9,
    "prefill/cpu/150": 0.5e9,
    "layer/cpu": 2e9,
    "choice/cpu": 1e8,
    "operation/cpu/products": 3e-4,
    "operation/cpu/attention": 1e-4,
}


def test_without_a_measurement_bytes_and_flops_are_counted() -> None:
    hardware = machine("cpu", **COUNTED)
    tokens, weights = 8 * 100, 8 * 12 * 100**2 / 2
    assert prefill_layer_s(ONE, hardware, 8) == pytest.approx(
        2 * 8 * 100**2 * 768 / 1e12 + (28 * tokens * HIDDEN + weights * 24) / 60e9
    )
    assert decode_layer_s(ONE, hardware, 8) == pytest.approx(28 * 8 * HIDDEN / 60e9)
    assert choice_s(ONE, hardware, 8) == 0


def test_a_measurement_is_taken_instead() -> None:
    hardware = machine("cpu", **MEASURED)
    assert prefill_layer_s(ONE, hardware, 8) == pytest.approx(800 * HIDDEN * (1e-9 + 2e-9) / 2)  # half-way
    assert decode_layer_s(ONE, hardware, 8) == pytest.approx(8 * HIDDEN / 2e9)
    assert choice_s(ONE, hardware, 8) == pytest.approx(8 * 50272 / 1e8)


@pytest.mark.parametrize(
    ("width", "seconds"), [(50, 1e-9), (150, 2e-9), (250, 2.5e-9), (450, 3.5e-9), (350, 3e-9), (25, 0.75e-9)]
)
def test_lengths_of_prompts_lie_on_lines_between_and_beyond(width: int, seconds: float) -> None:
    hardware = machine("cpu", **MEASURED, **{"prefill/cpu/250": 1 / 2.5e-9})
    assert hardware.prefill_s_per_byte(width) == pytest.approx(seconds)
    alone = machine("cpu", **{"prefill/cpu/50": 1e9})
    assert alone.prefill_s_per_byte(width) == 1e-9
    assert machine("cpu").prefill_s_per_byte(width) is None


def test_fixed_times_are_those_of_their_kind() -> None:
    both, old, none = machine("cpu", **MEASURED), machine("cpu"), machine("cpu")
    assert (both.operation_s("products"), both.operation_s("attention")) == (3e-4, 1e-4)
    assert old.operation_s("products") == old.operation_s("attention") == 1e-4  # of operation/cpu
    unknown = replace(none, rates={name: rate for name, rate in none.rates.items() if "operation" not in name})
    assert unknown.operation_s("products") == 2e-4


def test_a_step_and_a_prefill_by_hand() -> None:
    hardware: Hardware = machine("cpu", **MEASURED)
    model, policy = CostModel(ONE, hardware), Policy(4, 2)
    plain = CostModel(ONE, machine("cpu", **{name: 1e30 for name in MEASURED if "operation" not in name}))
    seconds, products = achieved(model, policy), achieved(plain, policy)
    fixed = 12 * (3e-4 + 2 * 1e-4) - 12 * 3 * 1e-4  # the other machine's are 1e-4 each
    step = 12 * 8 * HIDDEN / 2e9 + 8 * 50272 / 1e8 + fixed
    assert seconds["decode"]["compute"] - products["decode"]["compute"] == pytest.approx(step)
    prefill = 12 * 800 * HIDDEN * 1.5e-9 + 8 * 50272 / 1e8 + 12 * 2 * (4e-4 - 2e-4)
    assert seconds["prefill"]["compute"] - products["prefill"]["compute"] == pytest.approx(prefill)


def test_the_simulator_counts_the_same() -> None:
    model, policy = CostModel(ONE, machine("cpu", **MEASURED)), Policy(4, 2)
    planned, walked = predict(model, policy), simulate(model, policy).projection
    assert walked.prefill_s == pytest.approx(planned.prefill_s, rel=0.03)
    assert walked.decode_s == pytest.approx(planned.decode_s, rel=0.03)
