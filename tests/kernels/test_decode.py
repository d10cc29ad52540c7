"""Decode attention and the entry of a token: the native library beside float64 and beside torch's operations."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.commands import ROOT, environment
from support.decode_units import (
    DTYPES,
    HEAD_DIMS,
    Unit,
    attend,
    attend_exactly,
    check_against_float64,
    copy_of,
    empty_kv,
    entered,
    find_losers,
    make_unit,
    needs_library,
    paths,
    some_scores,
    spread,
)
from torch import Tensor

from flexgen_h2o.kernels import decode, native
from flexgen_h2o.kernels.decode_unit import DecodeUnit


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_instruction_set_is_within_rounding_of_float64(head_dim: int, dtype: torch.dtype) -> None:
    for query_dtype in {torch.float32, dtype}:
        for seed, (heavy, ring) in enumerate([((9, 7), (13, 13)), ((33, 33), (70, 37)), ((0, 0), (5, 5))]):
            unit = make_unit(head_dim, dtype, query_dtype, heavy=heavy, ring=ring, seed=seed)
            for path in paths(head_dim):
                check_against_float64(unit, lambda ran, path=path: attend(path, ran))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_operations_are_within_rounding_of_float64(dtype: torch.dtype) -> None:
    """In float32; in half precision torch rounds logits and weights on the way."""
    unit = make_unit(24, dtype, heavy=(33, 33), ring=(70, 37))
    if dtype == torch.float32:
        check_against_float64(unit, lambda ran: decode.attend_with_torch(*ran.arguments))
    else:
        exact, ran = attend_exactly(unit), unit.copy()
        step = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
        torch.testing.assert_close(
            decode.attend_with_torch(*ran.arguments).double(), exact.output, rtol=8 * step, atol=8 * step
        )
        torch.testing.assert_close(ran.live(ran.kv.scores).double(), exact.scores, rtol=8 * step, atol=8 * step)


sizes = st.integers(0, 40).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(0, slots)))
ring_sizes = st.integers(1, 40).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(1, slots)))


@needs_library
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 3),
    heads=st.integers(1, 4),
    heavy=sizes,
    ring=ring_sizes,
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    accumulates=st.booleans(),
    decay=st.sampled_from([1.0, 0.5, 0.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_filling(
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    heavy: tuple[int, int],
    ring: tuple[int, int],
    empty: float,
    accumulates: bool,
    decay: float,
    seed: int,
) -> None:
    """Within rounding of float64 on every instruction set; in float32 within 1e-5 of torch's operations too."""
    unit = make_unit(head_dim, dtype, None, rows, heads, heavy, ring, empty, seed)
    unit = unit.changed(accumulates=accumulates, decay=decay)
    for path in paths(head_dim):
        check_against_float64(unit, lambda ran, path=path: attend(path, ran))
        if dtype == torch.float32:
            ours, theirs = unit.copy(), unit.copy()
            output = attend(path, ours)
            torch.testing.assert_close(output, decode.attend_with_torch(*theirs.arguments), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.kv.scores, theirs.kv.scores, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize("heavy", [1, 2, 15, 16, 17, 40])
def test_of_equal_scores_the_lower_slot_loses(heavy: int) -> None:
    for path in paths(16):
        for slot in range(heavy):
            unit = make_unit(16, torch.float32, heavy=(heavy, heavy), empty=0.0).changed(accumulates=False)
            unit.kv.scores[..., :heavy] += 1.0
            unit.kv.scores[..., slot:heavy:3] = 0.5
            for low in (0.5, -math.inf):
                unit.kv.scores[..., slot:heavy:3] = low
                attend(path, unit)
                assert bool((unit.kv.losers == slot).all()), (path, slot, low)


@needs_library
def test_sinks_stay_and_lose_last() -> None:
    unit = make_unit(16, torch.float32, heavy=(20, 20), empty=0.0).changed(accumulates=False)
    unit.kv.scores[..., :20] = math.inf
    for path in paths(16):
        check_against_float64(unit, lambda ran, path=path: attend(path, ran))
        attend(path, unit)
        assert bool((unit.kv.losers == 0).all())
    unit.kv.scores[..., 19] = 3.0
    for path in paths(16):
        check_against_float64(unit, lambda ran, path=path: attend(path, ran))
        attend(path, unit)
        assert bool((unit.kv.losers == 19).all())
    accumulating = unit.changed(accumulates=True, decay=0.5)
    for path in paths(16):
        check_against_float64(accumulating, lambda ran, path=path: attend(path, ran))


@needs_library
@pytest.mark.parametrize("slots", [1, 5, 16, 33])
def test_a_head_without_entries_has_no_output_either_way(slots: int) -> None:
    unit = make_unit(16, torch.float32, heavy=(4, 0), ring=(slots, slots))
    unit.kv.scores.fill_(-math.inf)
    assert bool(decode.attend_with_torch(*unit.copy().arguments).isnan().all())
    for path in paths(16):
        ran = unit.copy()
        assert bool(attend(path, ran).isnan().all()), path
        assert bool(ran.kv.scores.isneginf().all())


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [3, 24, 80])
def test_nothing_else_is_read_or_written(head_dim: int, dtype: torch.dtype) -> None:
    plain = make_unit(head_dim, dtype, heavy=(21, 6), ring=(19, 18))
    tensors = plain.tensors()
    for path in paths(head_dim):
        expected = plain.copy()
        output = attend(path, expected)
        # 0xff: not a number in every precision, and a slot that there is not.
        memories = {name: spread(tuple(tensor.shape), tensor.dtype, 0xFF) for name, tensor in tensors.items()}
        unit = plain.changed(**{name: tensor for name, (tensor, _) in memories.items()})
        for name, tensor in tensors.items():
            live = {"heavy": 6, "ring": 18}.get(name.split("_")[0], tensor.shape[-2])
            memories[name][0][..., :live, :] = tensor[..., :live, :]
        before = {name: memory.clone() for name, (_, memory) in memories.items()}
        assert torch.equal(attend(path, unit), output)
        assert torch.equal(unit.kv.scores, expected.kv.scores) and torch.equal(unit.kv.losers, expected.kv.losers)
        assert torch.equal(unit.kv.scores[..., 6:21], plain.kv.scores[..., 6:21])
        for name, (tensor, memory) in memories.items():
            inside = slice(256, 256 + tensor.nbytes) if name in ("scores", "losers") else slice(0)
            memory[inside] = before[name][inside] = 0
            assert torch.equal(memory, before[name]), name


@needs_library
def test_the_number_of_threads_changes_nothing() -> None:
    unit = make_unit(80, torch.float16, rows=3, heads=7, heavy=(40, 40), ring=(50, 50))
    for path in paths(80):
        results = []
        for threads in (1, 1, 2, 3, 5):
            ran = unit.copy()
            results.append((attend(path, ran, threads), ran.kv.scores, ran.kv.losers))
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))


def every_number(dtype: torch.dtype) -> Tensor:
    """All numbers of a 16-bit type, ascending but for the sign: [256, 1, 1, 256]."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(numbers.isnan(), 0.0, numbers).view(256, 1, 1, 256)


def unit_of_values(values: Tensor, query_dtype: torch.dtype) -> Unit:
    """A unit whose ring holds [rows, 1, slots, head_dim] values, each with the same weight."""
    rows, _, slots, head_dim = values.shape
    nothing = torch.empty(rows, 1, 0, head_dim, dtype=values.dtype)
    query = torch.zeros(rows, 1, 1, head_dim, dtype=query_dtype)
    keys = torch.randn(values.shape).to(values.dtype)
    scores, losers = torch.zeros(rows, 1, slots), torch.zeros(rows, 1, dtype=torch.int32)
    kv = DecodeUnit(nothing, nothing, keys, values, scores, scores.int(), losers, 0, slots, accumulates=True)
    return Unit(query, kv)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_number_of_half_precision_comes_through_as_it_is(dtype: torch.dtype) -> None:
    """Infinities and subnormal numbers too."""
    values = every_number(dtype)
    for path in paths(256):
        for query_dtype in (torch.float32, dtype):
            output = attend(path, unit_of_values(values, query_dtype))
            assert torch.equal(output.double(), values.double()), path


@needs_library
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_way_between_neighbours_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Ties to even; half way from the largest number to what would follow is infinite."""
    numbers = every_number(dtype)
    following = numbers.flatten().roll(-1).view(numbers.shape)
    values = torch.cat((numbers, following), dim=2)
    # Two of the largest of bfloat16 do not fit float32 together.
    values = torch.where(values.double().abs().amax(2, keepdim=True) < 1e38, values, 0.0)
    if dtype == torch.float16:
        values[0, 0, :, 0] = torch.tensor([65504.0, math.inf]).to(dtype)
    values = torch.where(values.sum(2, keepdim=True).isnan(), 0.0, values).to(dtype)
    expected = values.double().mean(2, keepdim=True).float().to(dtype)
    for path in paths(256):
        assert torch.equal(attend(path, unit_of_values(values, dtype)), expected), path


@needs_library
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_half_precision_is_one_step_from_the_rounded_float64(dtype: torch.dtype, scale: float) -> None:
    """Values of one sign, whose sum is as exact as its terms; at 1e-6 they are subnormal in float16."""
    unit = make_unit(64, dtype, rows=4, heavy=(60, 60), ring=(70, 70))
    for values in (unit.kv.heavy_values, unit.kv.ring_values):
        values.copy_(values.float().abs().mul(scale))
    expected = attend_exactly(unit).output.to(dtype).view(torch.int16).int()
    for path in paths(64):
        steps = attend(path, unit.copy()).view(torch.int16).int() - expected
        assert int(steps.abs().max()) <= 1


@needs_library
def test_logits_that_overflow_are_not_a_number_either_way() -> None:
    unit = make_unit(16, torch.float32, empty=0.0)
    unit.query.fill_(1e30)
    unit.kv.ring_keys[:, :, 2] = 1e30
    assert bool(decode.attend_with_torch(*unit.copy().arguments).isnan().all())
    for path in paths(16):
        assert bool(attend(path, unit.copy()).isnan().all())


def test_very_small_weights_are_zero() -> None:
    """Logits 200 apart: e^-200 is below every float32."""
    unit = make_unit(16, torch.float32, heavy=(0, 0), ring=(40, 40), empty=0.0)
    unit.query.fill_(1.0)
    unit.kv.ring_keys.copy_(-200 / 16 * torch.arange(40.0)[:, None])
    calls: list[Callable[[Unit], Tensor]] = [lambda ran: decode.attend_with_torch(*ran.arguments)]
    for path in paths(16):
        calls.append(lambda ran, path=path: attend(path, ran))
    for call in calls:
        ran = unit.copy()
        torch.testing.assert_close(call(ran), unit.kv.ring_values[:, :, :1], rtol=1e-6, atol=1e-6)
        assert torch.equal(ran.kv.scores[..., 1:], unit.kv.scores[..., 1:])


@needs_library
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([1, 3, 16, 20]),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    heavy=st.integers(0, 6),
    ring=st.integers(1, 5),
    steps=st.integers(1, 20),
    accumulates=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_tokens_enter_as_with_torch_bit_for_bit(
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    heads: int,
    heavy: int,
    ring: int,
    steps: int,
    accumulates: bool,
    threads: int,
    seed: int,
) -> None:
    """From the first token on, past a full ring; some rows begin with pads, scores are each head's own, often equal."""
    generator = torch.Generator().manual_seed(seed)
    ours = empty_kv(rows, heads, head_dim, heavy, ring, dtype, dtype)
    theirs = copy_of(ours)
    pads = torch.randint(0, 4, (rows,), generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for column in range(steps):
            keys, values = torch.randn(2, rows, heads, 1, head_dim, generator=generator).to(dtype)
            entry = (keys, values, some_scores(rows, heads, pads, column, generator), column)
            decode.enter_natively(ours, *entry)
            decode.enter_with_torch(theirs, *entry)
            assert all(map(torch.equal, entered(ours), entered(theirs)))
            for kv in (ours, theirs):
                if accumulates:
                    added = torch.randint(0, 3, kv.scores.shape, generator=torch.Generator().manual_seed(seed + column))
                    kv.scores.add_(added)
                find_losers(kv)
    finally:
        torch.set_num_threads(before)


@needs_library
def test_an_entry_that_leaves_with_an_equal_score_is_dropped() -> None:
    ours = empty_kv(1, 1, 4, 2, 2, torch.float32, torch.float32)
    for column in range(6):
        decode.enter_natively(ours, *torch.full((2, 1, 1, 1, 4), float(column)), torch.zeros(1, 1), column)
        find_losers(ours)
    # 0 and 1 went to the free slots; 2 and 3 have the same score as those and went nowhere.
    assert ours.columns.tolist() == [[[0, 1, 4, 5]]]
    assert ours.heavy_keys[0, 0, :, 0].tolist() == [0.0, 1.0]
    assert ours.ring_values[0, 0, :, 0].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("enter", [decode.enter_with_torch, pytest.param(decode.enter_natively, marks=needs_library)])
def test_each_head_has_its_own_initial_score(enter: Callable[..., None]) -> None:
    kv = empty_kv(2, 3, 4, 2, 2, torch.float32, torch.float32)
    initial = torch.tensor([[0.5, 1.5, -math.inf], [2.5, -math.inf, 3.5]])
    for column in range(2):
        enter(kv, *torch.zeros(2, 2, 3, 1, 4), initial + column, column)
        assert torch.equal(kv.scores[..., 2 + column], initial + column)
        assert kv.columns[..., 2 + column].tolist() == [[column, column, -1], [column, -1, column]]
    find_losers(kv)
    enter(kv, *torch.zeros(2, 2, 3, 1, 4), torch.zeros(2, 3), 2)  # the first leaves, with each head's own
    assert torch.equal(kv.scores[..., 0], initial)
    assert kv.columns[..., 0].tolist() == [[0, 0, -1], [0, -1, 0]]


@needs_library
def test_on_a_cpu_it_is_the_librarys_attention() -> None:
    unit = make_unit(80, torch.bfloat16)
    ours, theirs = unit.copy(), unit.copy()
    assert torch.equal(decode.attend(*ours.arguments), decode.attend_natively(*theirs.arguments))
    assert torch.equal(ours.kv.scores, theirs.kv.scores) and torch.equal(ours.kv.losers, theirs.kv.losers)
    assert decode.attention_path(torch.device("cpu"), 80) == f"native, {native.best_path(80)}"
    assert decode.attention_path(torch.device("meta"), 80) == "torch"


@pytest.mark.parametrize(
    ("device", "library", "expected"),
    [("cpu", object(), "natively"), ("cpu", None, "with_torch"), ("meta", object(), "with_torch")],
)
def test_the_library_is_taken_on_a_cpu_where_it_is_there(
    device: str, library: object, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(native, "library", lambda: library)
    for name in ("attend_natively", "attend_with_torch", "enter_natively", "enter_with_torch"):
        monkeypatch.setattr(decode, name, lambda *_, name=name: called.append(name))
    unit = make_unit(16, torch.float32)
    token = torch.zeros(2, 3, 1, 16, device=device)
    decode.attend(token, unit.kv)
    decode.enter(unit.kv, token, token, torch.zeros(2, 3), 13)
    assert called == [f"attend_{expected}", f"enter_{expected}"]


WITHOUT_LIBRARY = """
import torch, flexgen_h2o
from flexgen_h2o.kernels import decode, native

from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.plan.kv_shape import UnitShape
from flexgen_h2o.kvcache.eviction.h2o import H2O
print(flexgen_h2o.__file__)
print(native.library(), native.best_path(64), decode.attention_path(torch.device("cpu"), 64))
torch.manual_seed(0)
shape = UnitShape(2, 3, 16, 4, 4)
buffer = KVBuffer(shape, H2O(4, 4), torch.float32, torch.empty(shape.nbytes(4), dtype=torch.uint8))
buffer.reset(Padding(torch.zeros(2, dtype=torch.int64)))
for column in range(12):
    query, key, value = torch.randn(3, 2, 3, 1, 16)
    buffer.append(key, value, column)
    output = buffer.attend(query)
print(*buffer.columns.flatten().tolist())
print(*output.flatten().tolist())
"""


def test_without_the_library_torchs_operations_do_the_same(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "demo")
    shutil.copytree(ROOT / "flexgen_h2o", tmp_path / "flexgen_h2o", ignore=ignored)
    results = []
    for root in (tmp_path, ROOT):
        variables = {**environment(), "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", WITHOUT_LIBRARY]
        result = subprocess.run(command, env=variables, cwd=root, capture_output=True, text=True, check=True)
        file, path, columns, output = result.stdout.splitlines()
        assert file == str(root / "flexgen_h2o" / "__init__.py")
        results.append((path, columns, torch.tensor([float(word) for word in output.split()])))
    assert results[0][0] == "None None torch"
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=1e-5)
