"""Limits: which resource sets them."""

from __future__ import annotations

from collections import Counter

import pytest

from flexgen_h2o.plan.work import PhaseWork
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.limits import limit_of, resource_seconds
from flexgen_h2o.search.rates import Rate


def machine(device: str = "cpu", **rates: float) -> Hardware:
    found = {
        "gemm/bfloat16/1": 1e9,
        "gemm/bfloat16/100": 100e9,
        f"attention/{device}/bfloat16/64": 10e9,
        "disk/read/direct/1": 2e9,
        "disk_cpu/read/direct/1": 1e-10,
        **rates,
    }
    units = {"gemm": "FLOP/s", "disk_cpu": "s/byte"}
    known = {n: Rate(v, units.get(n.split("/")[0], "byte/s"), "assumed", "made up") for n, v in found.items()}
    return Hardware("box", device, 4, {"cpu": 1, "gpu": 1}, known)


def test_what_is_in_4_bits_takes_the_rates_of_4_bits() -> None:
    work = PhaseWork(gemm4_flops=Counter({2: 10**9}), kv4_bytes=10**6)
    rates = {"gemm/int4/1": 1e9, "gemm/int4/100": 1e9, "attention/cpu/int4/64": 1e6}
    assert resource_seconds(work, machine(**rates), "bfloat16", 64)["compute"] == pytest.approx(1.0 + 1.0)


def test_products_attention_and_what_a_disk_costs_add_up_on_one_device() -> None:
    work = PhaseWork(Counter({100: 200 * 10**9}), 5 * 10**9, Counter(disk_read=8 * 10**9))
    seconds = resource_seconds(work, machine(), "bfloat16", 64)
    assert seconds == pytest.approx({"compute": 2.0 + 0.5 + 8e9 * 1e-10 / 4, "disk_read": 4.0})
    assert limit_of(work, machine(), "bfloat16", 64, "cpu") == (4.0, "disk_read", None)
    fast = machine(**{"disk/read/direct/1": 8e9})
    assert limit_of(work, fast, "bfloat16", 64, "cpu")[:2] == (pytest.approx(2.7), "compute")


def test_links_count_beside_a_gpu_only() -> None:
    work = PhaseWork(Counter({100: 10**9}), moved=Counter(h2d=6 * 10**9))
    links = {"link/h2d/pinned": 3e9, "link/d2h/pinned": 3e9}
    assert resource_seconds(work, machine("cuda", **links), "bfloat16", 64)["h2d"] == pytest.approx(2.0)
    assert "h2d" not in resource_seconds(work, machine(), "bfloat16", 64)


def test_without_a_rate_there_is_no_limit_but_a_reason() -> None:
    work = PhaseWork(Counter({4: 1}))
    assert limit_of(work, machine(), "float16", 64, "cpu")[0] is None
    assert "gemm/float16" in str(limit_of(work, machine(), "float16", 64, "cpu")[2])
    assert "cpu" in str(limit_of(work, machine(), "bfloat16", 64, "cuda")[2])
    assert limit_of(PhaseWork(), machine(), "bfloat16", 64, "cpu") == (None, None, "nothing was computed")
    assert "profile_hardware" in str(limit_of(work, None, "bfloat16", 64, "cpu")[2])
