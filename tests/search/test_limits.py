"""Limits: counts against a count by hand, and which resource sets them."""

from __future__ import annotations

from collections import Counter

import pytest

from flexgen_h2o.plan.model_config import published
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.limits import (
    PhaseWork,
    decode_flops,
    decode_kv_bytes,
    decode_work,
    limit_of,
    live_slots,
    prefill_attention_flops,
    prefill_flops,
    prefill_work,
    resource_seconds,
)
from flexgen_h2o.search.rates import Rate

OPT = published("opt-125m")  # 12 layers, hidden size 768, 50272 tokens
LAYER = 12 * 768**2
HEAD = 50272 * 768


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


def test_decode_multiplies_each_row_with_every_matrix_once() -> None:
    assert decode_flops(OPT, [8, 8, 3]) == Counter({8: 2 * 16 * (12 * LAYER + HEAD), 3: 2 * 3 * (12 * LAYER + HEAD)})


def test_prefill_multiplies_every_token_but_in_the_last_layer_one_a_row() -> None:
    rows, width = 4, 10
    tokens = rows * width
    products = Counter({tokens: 2 * tokens * (11 * LAYER + 3 * 768**2), rows: 2 * rows * (LAYER - 3 * 768**2 + HEAD)})
    # 2 products of n x n x head_dim, 2 FLOPs each, half of them masked
    attention = Counter({tokens: 12 * rows * 2 * width**2 * 768})
    assert prefill_flops(OPT, [rows], width) == products
    assert prefill_attention_flops(OPT, [rows], width) == attention
    assert prefill_work(OPT, Policy(), [rows], width) == PhaseWork(products + attention)
    compressed = prefill_work(OPT, Policy(compress_weight=True), [rows], width)
    assert compressed == PhaseWork(attention, gemm4_flops=products)


def test_attention_reads_keys_and_values_of_live_slots() -> None:
    assert decode_kv_bytes(OPT, 8, 20, 64 * 2) == 8 * 20 * 12 * 2 * 768 * 2


@pytest.mark.parametrize(("columns", "live"), [(1, 1), (5, 5), (6, 6), (8, 8), (9, 8), (100, 8)], ids=str)
def test_slots_fill_up(columns: int, live: int) -> None:
    assert sum(live_slots(3, 5, columns)) == live


def test_decode_work_is_that_of_its_steps() -> None:
    work = decode_work(OPT, Policy(), [2], (3, 5), [4, 100], 2)
    assert work.gemm_flops[2] == 2 * decode_flops(OPT, [2])[2]
    assert work.kv_bytes == decode_kv_bytes(OPT, 2, 4, 128) + decode_kv_bytes(OPT, 2, 8, 128)
    assert (work.gemm4_flops, work.kv4_bytes) == (Counter(), 0)


def test_what_is_in_4_bits_is_counted_apart() -> None:
    policy = Policy(compress_weight=True, compress_cache=True)
    work = decode_work(OPT, policy, [2], (3, 5), [100], 2)
    assert work == PhaseWork(gemm4_flops=decode_flops(OPT, [2]), kv4_bytes=decode_kv_bytes(OPT, 2, 8, 36))
    mixed = decode_work(OPT, Policy(compress_cache=True, ring_16bit=True), [2], (3, 5), [100], 2)
    assert (mixed.kv_bytes, mixed.kv4_bytes) == (decode_kv_bytes(OPT, 2, 5, 128), decode_kv_bytes(OPT, 2, 3, 36))
    rates = {"gemm/int4/1": 1e9, "gemm/int4/100": 1e9, "attention/cpu/int4/64": 1e6}
    seconds = resource_seconds(work, machine(**rates), "bfloat16", 64)["compute"]
    assert seconds == pytest.approx(work.gemm4_flops[2] / 1e9 + work.kv4_bytes / 1e6)


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


def test_work_of_blocks_adds_up() -> None:
    total = PhaseWork()
    for _ in range(2):
        total.add(PhaseWork(Counter({4: 3}), 5, Counter(disk_read=7), {"compute": 0.5}))
    assert total == PhaseWork(Counter({4: 6}), 10, Counter(disk_read=14), {"compute": 1.0})
