"""The work of a block: counts against a count by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.work import (
    PhaseWork,
    decode_flops,
    decode_kv_bytes,
    decode_work,
    live_slots,
    prefill_attention_flops,
    prefill_flops,
    prefill_work,
)

OPT = published("opt-125m")  # 12 layers, hidden size 768, 50272 tokens
LAYER = 12 * 768**2
HEAD = 50272 * 768


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
    assert decode_kv_bytes(OPT, 8, 20, 64 * 2, 12) == 8 * 20 * 12 * 2 * 768 * 2


@pytest.mark.parametrize(("columns", "live"), [(1, 1), (5, 5), (6, 6), (8, 8), (9, 8), (100, 8)], ids=str)
def test_slots_fill_up(columns: int, live: int) -> None:
    assert sum(live_slots(3, 5, columns)) == live


def test_decode_work_is_that_of_its_steps() -> None:
    work = decode_work(OPT, Policy(), [2], [(3, 5)] * 12, [4, 100], 2)
    assert work.gemm_flops[2] == 2 * decode_flops(OPT, [2])[2]
    assert work.kv_bytes == decode_kv_bytes(OPT, 2, 4, 128, 12) + decode_kv_bytes(OPT, 2, 8, 128, 12)
    assert (work.gemm4_flops, work.kv4_bytes) == (Counter(), 0)


def test_what_is_in_4_bits_is_counted_apart() -> None:
    policy = Policy(compress_weight=True, compress_cache=True)
    work = decode_work(OPT, policy, [2], [(3, 5)] * 12, [100], 2)
    assert work == PhaseWork(gemm4_flops=decode_flops(OPT, [2]), kv4_bytes=decode_kv_bytes(OPT, 2, 8, 36, 12))
    mixed = decode_work(OPT, Policy(compress_cache=True, ring_16bit=True), [2], [(3, 5)] * 12, [100], 2)
    assert (mixed.kv_bytes, mixed.kv4_bytes) == (
        decode_kv_bytes(OPT, 2, 5, 128, 12),
        decode_kv_bytes(OPT, 2, 3, 36, 12),
    )


def test_work_of_blocks_adds_up() -> None:
    total = PhaseWork()
    for _ in range(2):
        total.add(PhaseWork(Counter({4: 3}), 5, Counter(disk_read=7), {"compute": 0.5}))
    assert total == PhaseWork(Counter({4: 6}), 10, Counter(disk_read=14), {"compute": 1.0})


def test_layers_may_keep_different_numbers_of_entries() -> None:
    slots = [(3, 5)] * 11 + [(1, 2)]
    work = decode_work(OPT, Policy(), [2], slots, [100], 2)
    assert work.kv_bytes == decode_kv_bytes(OPT, 2, 8, 128, 11) + decode_kv_bytes(OPT, 2, 3, 128, 1)
