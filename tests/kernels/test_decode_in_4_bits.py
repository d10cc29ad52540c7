"""Decode attention over entries in 4 bits, and the entry of one: the native library beside float64 and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decode_units import (
    DTYPES,
    HEAD_DIMS,
    Unit,
    attend,
    check_against_float64,
    copy_of,
    decode_exactly,
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
from flexgen_h2o.kernels import four_bits as quant

REGIONS = ["heavy ring", "heavy"]  # those in 4 bits; with neither see test_decode.py
SHAPES = [
    ((9, 7), (13, 13)),
    ((33, 33), (70, 37)),
    ((70, 65), (66, 66)),
    ((0, 0), (5, 5)),
    ((6, 0), (3, 2)),
    ((1, 1), (1, 1)),
]


def check(unit: Unit, head_dim: int) -> None:
    """Compares every instruction set with float64."""
    for path in paths(head_dim, in_4_bits=True):
        check_against_float64(unit, lambda ran, path=path: attend(path, ran))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_the_reference_takes_apart_by_hand_is_what_quant_decodes(head_dim: int) -> None:
    entries = quant.encode(torch.randn(3, head_dim, generator=torch.Generator().manual_seed(head_dim)))
    by_hand, magnitudes = decode_exactly(entries, head_dim)
    decoded = quant.decode(entries, head_dim, torch.float64)
    assert bool(((by_hand - decoded).abs() <= magnitudes * 2.0**-23).all())


@needs_library
@pytest.mark.parametrize("in_4_bits", REGIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_instruction_set_is_within_rounding_of_float64(head_dim: int, dtype: torch.dtype, in_4_bits: str) -> None:
    for query_dtype in {torch.float32, dtype}:
        for seed, (heavy, ring) in enumerate(SHAPES):
            unit = make_unit(head_dim, dtype, query_dtype, heavy=heavy, ring=ring, seed=seed, in_4_bits=in_4_bits)
            check(unit, head_dim)


sizes = st.integers(0, 80).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(0, slots)))
ring_sizes = st.integers(1, 80).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(1, slots)))


@needs_library
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    in_4_bits=st.sampled_from(REGIONS),
    rows=st.integers(1, 3),
    heads=st.integers(1, 4),
    heavy=sizes,
    ring=ring_sizes,
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    accumulates=st.booleans(),
    decay=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_filling(
    head_dim: int,
    dtype: torch.dtype,
    in_4_bits: str,
    rows: int,
    heads: int,
    heavy: tuple[int, int],
    ring: tuple[int, int],
    empty: float,
    accumulates: bool,
    decay: float,
    seed: int,
) -> None:
    """Within rounding of float64 on every instruction set; in float32 close to torch's operations too."""
    unit = make_unit(head_dim, dtype, None, rows, heads, heavy, ring, empty, seed, in_4_bits)
    unit = unit.changed(accumulates=accumulates, decay=decay)
    check(unit, head_dim)
    for path in paths(head_dim, in_4_bits=True):
        if dtype == torch.float32:
            ours, theirs = unit.copy(), unit.copy()
            output = attend(path, ours)
            torch.testing.assert_close(output, decode.attend_with_torch(*theirs.arguments), rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(ours.kv.scores, theirs.kv.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_4_bits", REGIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_operations_are_within_rounding_of_float64(dtype: torch.dtype, in_4_bits: str) -> None:
    unit = make_unit(80, dtype, heavy=(33, 33), ring=(70, 37), in_4_bits=in_4_bits)
    if dtype == torch.float32:
        check_against_float64(unit, lambda ran: decode.attend_with_torch(*ran.arguments))
        return
    exact = make_unit(80, torch.float32, heavy=(33, 33), ring=(70, 37), in_4_bits=in_4_bits)
    output = decode.attend_with_torch(*unit.copy().arguments).float()
    expected = decode.attend_with_torch(*exact.arguments)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_far_apart(dtype: torch.dtype) -> None:
    """Groups of equal elements, whose scale is 0; tiny and large ones beside one another; minus zero."""
    unit = make_unit(144, torch.float32, dtype, heavy=(40, 40), ring=(30, 30), in_4_bits="heavy ring")
    for entries in (unit.kv.heavy_keys, unit.kv.heavy_values, unit.kv.ring_keys, unit.kv.ring_values):
        values = torch.randn(*entries.shape[:3], 144)
        values[:, :, ::5, :64] = 0.75
        values[:, :, 1::5, 64:128] = -0.0
        values[:, :, 2::5, 64:] *= 1e-30
        values[:, :, 3::5, 128:] *= 30.0
        entries.copy_(quant.encode(values))
    check(unit, 144)


@needs_library
@pytest.mark.parametrize("in_4_bits", REGIONS)
def test_the_number_of_threads_changes_nothing(in_4_bits: str) -> None:
    unit = make_unit(80, torch.float16, rows=9, heads=7, heavy=(40, 40), ring=(50, 50), in_4_bits=in_4_bits)
    for path in paths(80, in_4_bits=True):
        results = []
        for threads in (1, 1, 2, 3, 5):
            ran = unit.copy()
            results.append((attend(path, ran, threads), ran.kv.scores, ran.kv.losers))
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))


@needs_library
@pytest.mark.parametrize("in_4_bits", REGIONS)
@pytest.mark.parametrize("head_dim", [3, 24, 80, 128])
def test_nothing_else_is_read_or_written(head_dim: int, in_4_bits: str) -> None:
    plain = make_unit(head_dim, torch.bfloat16, heavy=(21, 6), ring=(19, 18), in_4_bits=in_4_bits)
    tensors = plain.tensors()
    for path in paths(head_dim, in_4_bits=True):
        expected = plain.copy()
        output = attend(path, expected)
        # 0xff: in bfloat16 not a number.
        memories = {name: spread(tuple(tensor.shape), tensor.dtype, 0xFF) for name, tensor in tensors.items()}
        unit = plain.changed(**{name: tensor for name, (tensor, _) in memories.items()})
        for name, tensor in tensors.items():
            live = {"heavy": 6, "ring": 18}.get(name.split("_")[0], tensor.shape[-2])
            memories[name][0][..., :live, :] = tensor[..., :live, :]
        before = {name: memory.clone() for name, (_, memory) in memories.items()}
        assert torch.equal(attend(path, unit), output)
        assert torch.equal(unit.kv.scores, expected.kv.scores) and torch.equal(unit.kv.losers, expected.kv.losers)
        for name, (tensor, memory) in memories.items():
            inside = slice(256, 256 + tensor.nbytes) if name in ("scores", "losers") else slice(0)
            memory[inside] = before[name][inside] = 0
            assert torch.equal(memory, before[name]), name


# --- entry of a token ---


def random_values(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal; few, half-way between codes among them; equal; tiny; large; zeros of both signs."""
    normal = torch.randn(shape, generator=generator)
    return {
        "normal": normal,
        "few": torch.randint(0, 31, shape, generator=generator) / 2.0,
        "equal": normal[..., :1].expand(shape),
        "tiny": normal * 1e-37,
        "large": normal * 1e4,
        "zero": normal.sign() * 0.0,
    }[kind]


KINDS = ["normal", "few", "equal", "tiny", "large", "zero"]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_quantises_as_torch_does_bit_for_bit(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native.library()
    assert library is not None
    generator = torch.Generator().manual_seed(0)
    for head_dim in HEAD_DIMS:
        keys, values = (random_values(kind, (6, 5, 1, head_dim), generator).to(dtype) for _ in range(2))
        for path in paths(head_dim, in_4_bits=True):
            number = native.PATHS.index(path)
            monkeypatch.setattr(library, "flexgen_h2o_best_path", lambda *_, number=number: number)
            kv = empty_kv(6, 5, head_dim, 2, 3, torch.uint8, torch.uint8)
            decode.enter_natively(kv, keys, values, torch.zeros(6, 5), 1)
            for region, token in ((kv.ring_keys, keys), (kv.ring_values, values)):
                assert torch.equal(region[:, :, 1:2], quant.encode(token)), (path, head_dim)
                assert not region[:, :, ::2].any() and not kv.heavy_keys.any() and not kv.heavy_values.any()


def test_half_way_between_two_codes_is_rounded_to_the_even_one() -> None:
    """By hand, whatever does it: from 0 to 15 in halves, so that the scale is 1."""
    values = torch.zeros(1, 1, 1, 32)
    values[0, 0, 0, :31] = torch.arange(31) / 2.0
    kv = empty_kv(1, 1, 32, 0, 1, torch.uint8, torch.uint8)
    decode.enter(kv, values, values, torch.zeros(1, 1), 0)
    entry = kv.ring_keys.flatten().tolist()
    codes = [entry[i // 2] >> 4 * (i % 2) & 15 for i in range(32)]
    assert codes == [*(round(i / 2) for i in range(31)), 0]
    assert bytes(entry[16:]) == b"\x80\x3f\x00\x00"  # 1 and 0 in bfloat16


@needs_library
@given(
    dtype=st.sampled_from(DTYPES),
    ring_in_4_bits=st.booleans(),
    kind=st.sampled_from(KINDS),
    head_dim=st.sampled_from([1, 3, 16, 20, 64, 80]),
    rows=st.integers(1, 3),
    heavy=st.integers(0, 6),
    ring=st.integers(1, 5),
    steps=st.integers(1, 20),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_tokens_enter_and_leave_as_with_torch_bit_for_bit(
    dtype: torch.dtype,
    ring_in_4_bits: bool,
    kind: str,
    head_dim: int,
    rows: int,
    heavy: int,
    ring: int,
    steps: int,
    threads: int,
    seed: int,
) -> None:
    """An entry is quantised when it comes to a region in 4 bits; between two such its bytes move unchanged."""
    generator = torch.Generator().manual_seed(seed)
    ours = empty_kv(rows, 2, head_dim, heavy, ring, torch.uint8, torch.uint8 if ring_in_4_bits else dtype)
    theirs = copy_of(ours)
    pads = torch.randint(0, 4, (rows,), generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for column in range(steps):
            keys, values = (random_values(kind, (rows, 2, 1, head_dim), generator).to(dtype) for _ in range(2))
            entry = (keys, values, some_scores(rows, 2, pads, column, generator), column)
            decode.enter_natively(ours, *entry)
            decode.enter_with_torch(theirs, *entry)
            assert all(map(torch.equal, entered(ours), entered(theirs)))
            added = torch.randint(0, 3, ours.scores.shape, generator=generator)
            for kv in (ours, theirs):
                kv.scores.add_(added)
                find_losers(kv)
    finally:
        torch.set_num_threads(before)


@needs_library
def test_many_steps_of_attention_and_entry_keep_what_torch_keeps() -> None:
    """Both as the device suits and by their reference; scores differ by rounding, columns do not."""
    generator = torch.Generator().manual_seed(5)
    calls: list[tuple[Callable[..., Tensor], Callable[..., None]]] = [
        (decode.attend, decode.enter),
        (decode.attend_with_torch, decode.enter_with_torch),
    ]
    states = [empty_kv(2, 3, 64, 8, 8, torch.uint8, torch.float32) for _ in calls]
    for column in range(60):
        query, keys, values = torch.randn(3, 2, 3, 1, 64, generator=generator)
        outputs = []
        for (attend_to, enter), state in zip(calls, states, strict=True):
            enter(state, keys, values, torch.zeros(2, 3), column)
            live = replace(state, heavy_len=min(8, max(0, column - 7)), ring_len=min(8, column + 1), accumulates=True)
            outputs.append(attend_to(query * 0.125, live))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
        assert torch.equal(states[0].columns, states[1].columns)
        assert torch.equal(states[0].heavy_keys, states[1].heavy_keys)


@pytest.mark.parametrize("at_once", [1, 100, 10**9])
def test_entries_are_restored_some_rows_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what that makes in passing is several times the cache."""
    monkeypatch.setattr(decode, "QUANTISED_AT_ONCE", at_once)
    region = quant.encode(torch.randn(5, 2, 7, 64))
    query = torch.zeros(5, 2, 1, 64, dtype=torch.bfloat16)
    assert torch.equal(decode._entries(region, 6, query), quant.decode(region[:, :, :6], 64, torch.bfloat16))
