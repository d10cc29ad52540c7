"""Attention in prefill against the dense n x n matrix in double precision, in decode one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from support.helpers import largest_difference, new_workspace
from torch import Tensor

from flexgen_h2o.kvcache import attention
from flexgen_h2o.kvcache.attention import prefill_attention
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.plan import footprint
from flexgen_h2o.plan.kv_shape import UnitShape

ROWS, HEADS, HEAD_DIM = 3, 2, 8


def random_qkv(n: int, rows: int = ROWS, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(rows, HEADS, n, HEAD_DIM, generator=generator) for _ in range(3))
    return query * scale * HEAD_DIM**-0.5, key * scale, value


def dense_attention(query: Tensor, key: Tensor, value: Tensor, firsts: list[int]) -> tuple[Tensor, Tensor]:
    """Each row alone, without its pads, all weights at once. Outputs and sums of pads are 0."""
    output, sums = (
        torch.zeros_like(value, dtype=torch.float64),
        torch.zeros(query.shape[:3], dtype=torch.float64),
    )
    for row, first in enumerate(firsts):
        q, k, v = (tensor[row, :, first:].double() for tensor in (query, key, value))
        n = q.shape[1]
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(1, 2)).masked_fill(future, -math.inf).softmax(dim=-1)
        output[row, :, first:] = weights @ v
        sums[row, :, first:] = weights.sum(dim=1)
    return output, sums


def real_part(tensor: Tensor, firsts: list[int]) -> Tensor:
    """The tensor [rows, heads, n, ...] with its pads set to 0."""
    is_pad = torch.arange(tensor.shape[2]) < torch.tensor(firsts)[:, None]
    shape = (tensor.shape[0], 1, tensor.shape[2], *[1] * (tensor.dim() - 3))
    return tensor.masked_fill(is_pad.view(shape), 0.0)


# --- prefill ---


def attend(
    query: Tensor, key: Tensor, value: Tensor, padding: Padding, sum_attention: bool, workspace: Workspace | None = None
) -> tuple[Tensor, Tensor | None]:
    """prefill_attention of [rows, heads, n, head_dim], in a workspace of its own."""
    by_token = query.transpose(1, 2).unsqueeze(3)  # one query head to a head of keys
    attended, sums = prefill_attention(by_token, key, value, padding, sum_attention, workspace or new_workspace())
    assert attended.shape == by_token.shape
    return attended.squeeze(3).transpose(1, 2), sums


N = 23
FIRSTS = [0, 9, 22]  # no pads, some, and all but the last


# How many rows, heads of those, and queries are computed at once. With few queries keys end before the last column.
CHUNKS = [(1, 1, 1), (1, 1, 7), (1, 2, 2), (2, 2, 7), (3, 2, 22), (3, 2, 23)]


def set_chunks(monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, int, int]) -> None:
    monkeypatch.setattr(attention, "prefill_chunks", lambda *_: chunks)


@pytest.mark.parametrize("firsts", [FIRSTS, [0, 0, 0], [5, 6, 7]], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_of_any_size_equal_the_dense_matrix(
    monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, int, int], firsts: list[int]
) -> None:
    set_chunks(monkeypatch, chunks)
    query, key, value = random_qkv(N, scale=2.0)
    output, sums = attend(
        query, key, value, Padding(torch.tensor(firsts)), sum_attention=True, workspace=new_workspace()
    )
    expected_output, expected_sums = dense_attention(query, key, value, firsts)
    assert sums is not None and sums.dtype == torch.float32
    assert largest_difference(real_part(output, firsts), expected_output) < 1e-5
    assert largest_difference(real_part(sums, firsts), expected_sums) < 1e-5
    assert torch.equal(real_part(sums, firsts), sums)  # pad keys get exactly nothing
    assert output.isfinite().all()


def test_without_sums_the_output_is_the_same() -> None:
    query, key, value = random_qkv(N)
    firsts = torch.tensor(FIRSTS)
    output, sums = attend(query, key, value, Padding(firsts), sum_attention=False)
    assert sums is None
    assert torch.equal(output, attend(query, key, value, Padding(firsts), sum_attention=True)[0])


@pytest.mark.parametrize("chunks", CHUNKS[::2], ids=str)
def test_what_pads_hold_changes_nothing(monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, int, int]) -> None:
    set_chunks(monkeypatch, chunks)
    results = []
    for seed in (1, 2):
        tensors = random_qkv(N)
        noise = random_qkv(N, seed=seed, scale=5.0)
        is_pad = (torch.arange(N) < torch.tensor(FIRSTS)[:, None])[:, None, :, None]
        padded = [torch.where(is_pad, junk, tensor) for tensor, junk in zip(tensors, noise, strict=True)]
        output, sums = attend(*padded, Padding(torch.tensor(FIRSTS)), sum_attention=True, workspace=new_workspace())
        results.append((real_part(output, FIRSTS), sums))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS[::2], ids=str)
def test_pads_stay_finite_and_each_real_query_gives_1(
    monkeypatch: pytest.MonkeyPatch, chunks: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A pad query that is masked altogether would be NaN; one that counts would add 1 to the sum."""
    set_chunks(monkeypatch, chunks)
    query, key, value = (tensor.to(dtype) for tensor in random_qkv(N, scale=3.0))
    output, sums = attend(
        query, key, value, Padding(torch.tensor(FIRSTS)), sum_attention=True, workspace=new_workspace()
    )
    assert output.dtype == dtype and output.isfinite().all()
    real_queries = N - torch.tensor(FIRSTS)[:, None].float().expand(ROWS, HEADS)
    assert largest_difference(sums.sum(dim=-1), real_queries) < 1e-4


# Measured: the worst output differs by 0.006 in bfloat16 and 0.0011 in float16, the worst sum by half of it.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.004)], ids=str)
def test_half_precision_is_near_the_dense_matrix(dtype: torch.dtype, bound: float) -> None:
    query, key, value = (tensor.to(dtype) for tensor in random_qkv(N))
    output, sums = attend(
        query, key, value, Padding(torch.tensor(FIRSTS)), sum_attention=True, workspace=new_workspace()
    )
    expected_output, expected_sums = dense_attention(query, key, value, FIRSTS)
    assert largest_difference(real_part(output, FIRSTS), expected_output) < bound
    assert largest_difference(sums, expected_sums) < bound


def test_sums_rank_2048_columns_like_double_precision() -> None:
    n = 2048
    query, key, value = random_qkv(n, rows=1)
    _, sums = attend(query, key, value, Padding(torch.tensor([100])), sum_attention=True, workspace=new_workspace())
    _, exact = dense_attention(query, key, value, [100])
    order = exact.argsort(dim=-1)
    gaps = exact.gather(-1, order).diff(dim=-1)
    steps = sums.gather(-1, order).diff(dim=-1)
    assert (steps[gaps > 1e-5] > 0).all()
    assert (gaps > 1e-5).sum() > 0.9 * HEADS * (n - 100)  # few are too near for float32 to tell


def test_memory_grows_with_the_prompt_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    n, limit = 3000, 100_000
    query, key, value = random_qkv(n, rows=1)
    expected, _ = attend(query[:, :, :50], key[:, :, :50], value[:, :, :50], Padding(torch.tensor([0])), False)
    monkeypatch.setattr(attention, "PREFILL_LOGITS", limit)
    nbytes = attention.prefill_attention_bytes(1, HEADS, n, HEAD_DIM, 4)
    workspace, largest = new_workspace(nbytes), LargestTensor()
    with largest:
        output, _ = attend(query, key, value, Padding(torch.tensor([0])), True, workspace)
    assert largest.elements <= limit
    assert nbytes < 5 * 4 * HEADS * n * HEAD_DIM + 4 * 4 * limit + 4 * HEADS * n + 10_000 < 4 * HEADS * n * n
    assert largest_difference(output[:, :, :50], expected) < 1e-5


@pytest.mark.parametrize("limit", [200, 5_000, 100_000])
@pytest.mark.parametrize(
    ("rows", "heads", "n", "head_dim"), [(5, 3, 40, 8), (2, 4, 100, 16), (7, 2, 5, 4), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_workspace_that_is_foreseen_suffices(
    dtype: torch.dtype, rows: int, heads: int, n: int, head_dim: int, limit: int
) -> None:
    """And little of it is left."""
    nbytes = attention.prefill_attention_bytes(rows, heads, n, head_dim, dtype.itemsize, limit)
    workspace = MeteredWorkspace(torch.empty(nbytes, dtype=torch.uint8), limit)
    query, key, value = torch.randn(3, rows, heads, n, head_dim).to(dtype)
    attend(query, key, value, Padding(torch.zeros(rows, dtype=torch.int64)), True, workspace)
    # In float32 products are the logits: no second copy.
    unused = 4 * n * math.prod(attention.prefill_chunks(rows, heads, n, limit)) if dtype == torch.float32 else 0
    assert nbytes - workspace.most <= 10 * 64 + unused


class MeteredWorkspace(Workspace):
    """Notes the most bytes that were in use."""

    most = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        taken = super().take(shape, dtype)
        self.most = max(self.most, self._used)
        return taken


@pytest.mark.parametrize("n", [1000, 1023])
def test_a_long_prompt_takes_products_of_few_shapes(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Some libraries keep code for each, and a prompt of n tokens must not have n of them."""
    set_chunks(monkeypatch, (1, 1, 4))
    products = ProductShapes()
    with products:
        attend(*random_qkv(n, rows=1), Padding(torch.tensor([3])), True)
    assert products.count > n // 4 * HEADS * 3 - 3  # the walk does see them
    assert len(products.shapes) <= 3 * (attention.PREFIXES + 1)


class ProductShapes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the shapes of batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "bmm" in str(func):
            self.count += 1
            self.shapes.add(tuple(tuple(tensor.shape) for tensor in args if isinstance(tensor, Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("limit", [1, 1000, 2**20, 2**25])
@pytest.mark.parametrize(
    ("rows", "heads", "n"), [(1, 32, 2048), (32, 32, 128), (3, 4, 12_000), (64, 12, 1), (2, 7, 63)]
)
def test_rows_and_heads_are_taken_apart_before_queries(rows: int, heads: int, n: int, limit: int) -> None:
    rows_at_once, heads_at_once, queries = attention.prefill_chunks(rows, heads, n, limit)
    assert 1 <= rows_at_once <= rows and 1 <= heads_at_once <= heads and 1 <= queries <= n
    assert rows_at_once == 1 or heads_at_once == heads
    at_once = rows_at_once * heads_at_once
    assert at_once * queries * n <= limit or (at_once == queries == 1)
    assert at_once == 1 or queries >= min(n, footprint.LEAST_QUERIES)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.nbytes // 4)  # in float32; parts of a workspace are bytes
        return result


# --- decode ---


def filled_buffer(rule: EvictionRule, firsts: list[int], n: int, dtype: torch.dtype = torch.float32) -> KVBuffer:
    shape = UnitShape(len(firsts), HEADS, HEAD_DIM, rule.heavy, rule.recent)
    buffer = KVBuffer(shape, rule, dtype, torch.zeros(shape.nbytes(dtype.itemsize), dtype=torch.uint8))
    buffer.reset(Padding(torch.tensor(firsts)))
    _, key, value = (tensor.to(dtype) for tensor in random_qkv(n, len(firsts)))
    positions = torch.arange(n) - torch.tensor(firsts)[:, None]
    sums = torch.rand(len(firsts), HEADS, n, generator=torch.Generator().manual_seed(1))
    buffer.fill(key, value, sums.masked_fill(positions[:, None] < 0, 0.0) if rule.accumulates else None)
    return buffer


def slow_decode(query: Tensor, buffer: KVBuffer) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, 1, head_dim], and the weight of every slot, one row and head at a time."""
    keys = torch.cat([buffer.heavy.keys, buffer.ring.keys], dim=2).double()
    values = torch.cat([buffer.heavy.values, buffer.ring.values], dim=2).double()
    output, weights = torch.zeros(query.shape).double(), torch.zeros(buffer.scores.shape).double()
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            live = (buffer.columns[row, head] >= 0).nonzero()[:, 0]
            shares = (keys[row, head, live] @ query[row, head, 0].double()).softmax(dim=0)
            weights[row, head, live] = shares
            output[row, head, 0] = shares @ values[row, head, live]
    return output, weights


RULES = [H2O(3, 4), H2O(3, 4, 0.5), H2O(0, 4), H2O(8, 3), H2O(4, 30), Sink(3, 4), Full(0, 20)]
DECODE_FIRSTS = [0, 2, 7]  # the last has fewer entries than any ring


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decode_attends_to_exactly_what_is_kept(rule: EvictionRule) -> None:
    buffer = filled_buffer(rule, DECODE_FIRSTS, n=9)
    query, _, _ = random_qkv(1, seed=2, scale=2.0)
    expected, weights = slow_decode(query, buffer)
    before = buffer.scores.clone()
    output = buffer.attend(query)
    assert output.shape == query.shape
    assert largest_difference(output, expected) < 1e-5
    live = ~before.isneginf()
    grown = rule.decay * before + weights if rule.accumulates else before
    assert torch.equal(buffer.scores.isneginf(), ~live)
    assert torch.allclose(buffer.scores[live], grown[live].float(), atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_slots_behind_the_live_prefixes_are_never_read(rule: EvictionRule) -> None:
    results = []
    for junk in (0.0, math.nan):
        buffer = filled_buffer(rule, [0, 2, 4], n=5)
        for region, length in ((buffer.heavy, buffer.heavy_len), (buffer.ring, buffer.ring_len)):
            region.keys[:, :, length:] = junk
            region.values[:, :, length:] = junk
        query, _, _ = random_qkv(1, seed=2)
        results.append(buffer.attend(query))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_in_half_precision_keeps_float32_scores(dtype: torch.dtype) -> None:
    buffer = filled_buffer(H2O(3, 4), DECODE_FIRSTS, n=9, dtype=dtype)
    query = random_qkv(1, seed=2)[0].to(dtype)
    expected, weights = slow_decode(query, buffer)
    before = buffer.scores.clone()
    output = buffer.attend(query)
    assert output.dtype == dtype and buffer.scores.dtype == torch.float32
    assert largest_difference(output, expected) < 0.02  # measured: 0.006 in bfloat16
    live = ~before.isneginf()
    gained = (buffer.scores - before).masked_fill(~live, 0.0)
    assert largest_difference(gained, weights) < 0.01
    assert largest_difference(gained.sum(dim=-1), torch.ones(ROWS, HEADS)) < 1e-5  # not rounded to half


def test_a_score_of_any_size_hides_nothing() -> None:
    """Only -inf masks: scores are no part of the logits."""
    buffer = filled_buffer(H2O(3, 4), DECODE_FIRSTS, n=9)
    query, _, _ = random_qkv(1, seed=2)
    expected = buffer.attend(query)
    buffer.scores.masked_fill_(~buffer.scores.isneginf(), -1e30)
    assert torch.equal(buffer.attend(query), expected)
