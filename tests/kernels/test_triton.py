"""Triton's kernels, on a GPU or else in Triton's interpreter, beside torch's operations; and the choice between them.

conftest.py switches the interpreter on where there is no GPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import ROOT, environment
from support.decode_units import REGIONS, Unit, empty_kv, entered, find_losers, some_scores, tensors_of
from torch import Tensor

from flexgen_h2o.kernels import decode
from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kernels.decode_unit import DecodeUnit
from flexgen_h2o.kernels.fastest import TRIALS, Fastest

pytest.importorskip("triton", reason="Triton is not installed")

from flexgen_h2o.kernels import cuda, triton_decode

# NumPy, which interprets, warns of NaN where they are meant.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Half of the distance between neighbours, relative to the largest output; of bfloat16 all of it where Triton's
# interpreter cuts digits off.
ROUNDING = {
    torch.float32: 1e-6,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7,
}


def make_unit(
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    rows: int = 2,
    heads: int = 3,
    heavy: tuple[int, int] = (9, 7),
    ring: tuple[int, int] = (13, 11),
    accumulates: bool = True,
    decay: float = 1.0,
    empty: float = 0.2,
    seed: int = 0,
    in_4_bits: str = "",
) -> Unit:
    """A random unit; `heavy` and `ring` are (slots, live ones), `empty` the share of live slots that are empty.

    What lies behind the live slots is no number, and has any score. Scores are few, so that many are equal.

    Args:
        in_4_bits: names of the regions that are.
    """
    generator = torch.Generator().manual_seed(seed)

    def region(sizes: tuple[int, int], name: str) -> Tensor:
        slots, live = sizes
        entries = torch.full((rows, heads, slots, head_dim), math.nan).to(dtype)
        entries[:, :, :live] = torch.randn(rows, heads, live, head_dim, generator=generator)
        if name in in_4_bits:
            values, entries = entries, quant.encode(entries.nan_to_num())
            entries[values[..., 0].isnan()] = 255  # so are the scale and the minimum there
        return entries.to(DEVICE)

    scores = torch.full((rows, heads, heavy[0] + ring[0]), -math.inf if seed % 2 else 1.5)
    for first, live in ((0, heavy[1]), (heavy[0], ring[1])):
        scores[..., first : first + live] = torch.randint(0, 3, (rows, heads, live), generator=generator).float()
    scores[torch.rand(scores.shape, generator=generator) < empty] = -math.inf
    scores[..., heavy[0] + ring[1] - 1] = 0.0  # the current token
    query = (torch.randn(rows, heads, 1, head_dim, generator=generator) * head_dim**-0.5).to(DEVICE, dtype)
    columns = torch.where(scores.isneginf(), -1, torch.arange(scores.shape[2])).to(torch.int32)
    kv = DecodeUnit(
        *(region(heavy, "heavy") for _ in ("keys", "values")),
        *(region(ring, "ring") for _ in ("keys", "values")),
        scores.to(DEVICE),
        columns.to(DEVICE),
        torch.full((rows, heads), 77, dtype=torch.int32, device=DEVICE),
        *(heavy[1], ring[1], accumulates, decay),
    )
    return Unit(query, kv)


def in_float32(unit: Unit) -> Unit:
    """The same unit with memory of its own."""
    head_dim = unit.query.shape[3]
    in_4_bits = {name: region for name in REGIONS if (region := getattr(unit.kv, name)).dtype == torch.uint8}
    restored = {name: quant.decode(region, head_dim, torch.float32) for name, region in in_4_bits.items()}
    return unit.copy(torch.float32).changed(**restored)


def on_device(kv: DecodeUnit) -> DecodeUnit:
    return replace(kv, **{name: tensor.to(DEVICE) for name, tensor in tensors_of(kv).items()})


def check(unit: Unit) -> None:
    """Runs both; torch in float32, whatever the precision of the unit."""
    dtype = unit.query.dtype
    ours, theirs = unit.copy(), in_float32(unit)
    output = triton_decode.attend_with_triton(*ours.arguments)
    expected = decode.attend_with_torch(*theirs.arguments)
    assert output.dtype == dtype and output.shape == unit.query.shape
    bound = ROUNDING[dtype] * (1 + float(expected.abs().nan_to_num(0.0).max()))
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=bound, equal_nan=True)
    assert torch.equal(ours.kv.scores.isneginf(), unit.kv.scores.isneginf())
    torch.testing.assert_close(ours.kv.scores, theirs.kv.scores, rtol=1e-5, atol=1e-6)
    if unit.kv.heavy_slots:
        # Of scores that are as good as equal either may be the lower one; where none are, it is the same slot.
        lowest = ours.kv.scores.gather(2, ours.kv.losers.long()[..., None])[..., 0]
        assert torch.equal(lowest, ours.kv.scores[..., : unit.kv.heavy_slots].amin(dim=2))
        first = (ours.kv.scores[..., : unit.kv.heavy_slots] == lowest[..., None]).int().argmax(dim=2)
        assert torch.equal(ours.kv.losers.long(), first)
    else:
        assert torch.equal(ours.kv.losers, unit.kv.losers)
    for name in ("query", *REGIONS, "columns"):
        assert torch.equal(ours.tensors()[name].nan_to_num(), unit.tensors()[name].nan_to_num()), name


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([1, 3, 16, 20, 80]),
    rows=st.integers(1, 2),
    heads=st.integers(1, 3),
    heavy_slots=st.integers(0, 12),
    ring_slots=st.integers(1, 12),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    accumulates=st.booleans(),
    decay=st.sampled_from([1.0, 0.5, 0.0]),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_attention_is_that_of_torch(
    heavy_slots: int, ring_slots: int, shares: tuple[float, float], **changes: Any
) -> None:
    heavy = (heavy_slots, round(shares[0] * heavy_slots))
    ring = (ring_slots, max(1, round(shares[1] * ring_slots)))
    check(make_unit(heavy=heavy, ring=ring, **changes))


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([8, 24, 64, 72, 80, 136]),
    in_4_bits=st.sampled_from(["heavy ring", "heavy"]),
    heavy=st.sampled_from([(0, 0), (9, 9), (9, 4), (70, 65)]),
    ring=st.sampled_from([(1, 1), (13, 11), (66, 66)]),
    accumulates=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_in_4_bits_is_that_of_torch(**changes: Any) -> None:
    check(make_unit(**changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heavy", "ring"), [((300, 290), (150, 150)), ((1500, 1100), (1, 1)), ((0, 0), (2100, 1300))])
def test_more_slots_than_are_read_at_once(dtype: torch.dtype, heavy: tuple[int, int], ring: tuple[int, int]) -> None:
    unit = make_unit(dtype, head_dim=40, rows=1, heads=2, heavy=heavy, ring=ring)
    assert max(heavy[0], ring[0]) > triton_decode.TILE // 64  # the walk does take several turns
    check(unit)


def test_losers_are_the_lower_slot_of_equals_and_empty_ones_lose() -> None:
    unit = make_unit(heavy=(1200, 1200), ring=(4, 4), accumulates=False, empty=0.0, rows=1, heads=1)
    for lowest, expected in (({700: -1.0, 1100: -1.0, 30: 0.5}, 700), ({1199: -math.inf, 3: -5.0}, 1199), ({}, 0)):
        unit.kv.scores[..., :1200] = 1.0
        for slot, score in lowest.items():
            unit.kv.scores[..., slot] = score
        check(unit)
        ran = unit.copy()
        triton_decode.attend_with_triton(*ran.arguments)
        assert ran.kv.losers.item() == expected
    unit.kv.scores[..., :1200] = math.inf  # sinks never lose, unless all are
    check(unit)


def test_a_head_without_entries_has_no_output_and_its_scores_stay() -> None:
    unit = make_unit(heavy=(5, 3), ring=(6, 6))
    unit.kv.scores[0, 1] = -math.inf
    check(unit)
    ran = unit.copy()
    output = triton_decode.attend_with_triton(*ran.arguments)
    assert bool(output[0, 1].isnan().all()) and int(output.isnan().sum()) == output.shape[3]
    assert bool(ran.kv.scores[0, 1].isneginf().all())


def test_slots_whose_scores_are_infinite_are_attended_to_and_stay() -> None:
    unit = make_unit(heavy=(4, 4), ring=(3, 3), accumulates=False, empty=0.0)
    unit.kv.scores[..., :2] = math.inf
    check(unit)


@settings(max_examples=15)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.one_of(
        st.tuples(st.sampled_from([1, 20, 64]), st.just("")),
        st.tuples(st.sampled_from([8, 24, 64, 72, 136]), st.sampled_from(["heavy ring", "heavy"])),
    ),
    heavy=st.integers(0, 4),
    ring=st.integers(1, 4),
    magnitude=st.sampled_from([1.0, 1e-4, 6e4, 0.0]),
    seed=st.integers(0, 2**31),
)
def test_tokens_enter_as_with_torch_bit_for_bit(
    dtype: torch.dtype, sizes: tuple[int, str], heavy: int, ring: int, magnitude: float, seed: int
) -> None:
    """From the first token on, past a full ring; some rows begin with pads, scores are each head's own, often equal."""
    rows, heads = 2, 3
    head_dim, in_4_bits = sizes
    generator = torch.Generator().manual_seed(seed)

    precisions = [torch.uint8 if name in in_4_bits.split() else dtype for name in ("heavy", "ring")]
    ours, theirs = (on_device(empty_kv(rows, heads, head_dim, heavy, ring, *precisions)) for _ in range(2))
    for column in range(3 * ring + heavy):
        entries = torch.randn(2, rows, heads, 1, head_dim, generator=generator).clamp(-1, 1) * magnitude
        keys, values = entries.to(DEVICE, dtype)
        initial = some_scores(rows, heads, torch.tensor([0, 2]), column, generator).to(DEVICE)
        triton_decode.enter_with_triton(ours, keys, values, initial, column)
        decode.enter_with_torch(theirs, keys, values, initial, column)
        assert all(map(torch.equal, entered(ours), entered(theirs)))
        added = torch.randint(0, 3, ours.scores.shape, generator=generator).to(DEVICE)
        for kv in (ours, theirs):
            kv.scores.add_(added)
            find_losers(kv)


def test_each_head_has_its_own_initial_score() -> None:
    kv = on_device(empty_kv(2, 3, 8, 2, 2, torch.float32, torch.float32))
    initial = torch.tensor([[0.5, 1.5, -math.inf], [2.5, -math.inf, 3.5]], device=DEVICE)
    keys, values = torch.zeros(2, 2, 3, 1, 8, device=DEVICE)
    triton_decode.enter_with_triton(kv, keys, values, initial, 1)
    assert torch.equal(kv.scores[..., 3], initial)
    assert kv.columns[..., 3].tolist() == [[1, 1, -1], [1, -1, 1]]


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flexgen_h2o.kernels import triton_decode, triton_products
SCORES = dict.fromkeys(("scores", "logits", "statistics", "initial_scores"), "*fp32")
STATE = {"losers": "*i32", "columns": "*i32", "decay": "fp32", **SCORES}
HEAVY, RING = ("heavy_keys", "heavy_values"), ("ring_keys", "ring_values")
precision, capability, head_dim, width, entry = sys.argv[1], *map(int, sys.argv[2:])
SIZES = {"head_dim": head_dim, "width": width}
WITHIN = {"block": 32, "keeps_logits": True}
WHOLE, IN_4_BITS = {"heavy_entry": head_dim, "ring_entry": head_dim}, {"heavy_entry": entry, "ring_entry": entry}
HEAVY_IN_4_BITS = {"heavy_entry": entry, "ring_entry": head_dim}
TILES = {"row_tile": 16, "output_tile": 32, "group_tile": 4, "group": 64, "has_bias": True}
KERNELS = [
    ("_attend", {**SIZES, **WITHIN, **WHOLE}),
    ("_attend", {**SIZES, **WITHIN, **IN_4_BITS}),
    ("_attend", {**SIZES, **WITHIN, **HEAVY_IN_4_BITS}),
    ("_update_scores", {"accumulates": True, "block": 1024}),
    ("_enter", {**SIZES, **WHOLE}),
    ("_enter", {**SIZES, **IN_4_BITS}),
    ("_enter", {**SIZES, **HEAVY_IN_4_BITS}),
    ("_multiply", TILES),
    ("_multiply", {**TILES, "row_tile": 64}),
]
for name, constants in KERNELS:
    kernel = getattr(triton_products if name == "_multiply" else triton_decode, name)
    heavy, ring = ("*u8" if constants.get(f"{region}_entry") == entry else precision for region in ("heavy", "ring"))
    regions = {**dict.fromkeys(HEAVY, heavy), **dict.fromkeys(RING, ring), "entries": "*u8"}
    others = dict.fromkeys(("query", "output", "keys", "values", "x", "bias"), precision)
    types = {**STATE, **others, **regions, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    values = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
    print(name, len(compiled.asm["cubin"]) > 0)
"""


@pytest.mark.parametrize(
    ("precision", "capability", "head_dim", "width", "entry"),
    [
        ("*fp16", 75, 64, 64, 36),
        ("*bf16", 90, 128, 128, 72),
        pytest.param("*fp32", 75, 80, 128, 48, marks=pytest.mark.slow),
        pytest.param("*fp16", 75, 128, 128, 72, marks=pytest.mark.slow),
        pytest.param("*bf16", 75, 64, 64, 36, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compile_for_a_gpu(
    tmp_path: Any, precision: str, capability: int, head_dim: int, width: int, entry: int
) -> None:
    """The interpreter takes much that the compiler does not. 75 is a T4."""
    variables = {**environment(), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, precision, *map(str, (capability, head_dim, width, entry))]
    result = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    compiled = result.stdout.split()
    assert compiled[1::2] == ["True"] * 9, result.stderr


# --- the choice ---


class Ways:
    """Two ways whose seconds are given, and what was done with them."""

    def __init__(self, torch_s: float, triton_s: float, fails: bool = False):
        self.cost = {"torch": torch_s, "Triton": triton_s}
        self.fails = fails
        self.calls: list[tuple[str, Any]] = []
        self.clock = 0.0
        ways = {name: lambda *args, name=name: self.run(name, *args) for name in self.cost}
        self.choice = Fastest(ways, self.kind, lambda *args: ("rehearsal", *args), self.seconds)

    def run(self, name: str, *args: Any) -> str:
        self.calls.append((name, args))
        if name == "Triton" and self.fails:
            raise RuntimeError("no such device")
        self.clock += self.cost[name]
        return name

    @staticmethod
    def kind(size: int) -> int | None:
        return None if size < 0 else size // 10

    def seconds(self, call: Any) -> float:
        before = self.clock
        call()
        return self.clock - before


@pytest.mark.parametrize(("torch_s", "triton_s", "expected"), [(2.0, 1.0, "Triton"), (1.0, 2.0, "torch")])
def test_the_faster_way_is_kept_for_each_kind_of_work(torch_s: float, triton_s: float, expected: str) -> None:
    ways = Ways(torch_s, triton_s)
    assert ways.choice.names == "torch"
    assert ways.choice(5) == expected
    trial = ways.calls[:-1]
    assert [args for _, args in trial] == [("rehearsal", 5)] * (2 + 2 * TRIALS)  # each warms up once
    assert [name for name, _ in trial] == ["torch", "Triton"] * (1 + TRIALS)
    assert ways.calls[-1] == (expected, (5,))
    before = len(ways.calls)
    assert ways.choice(7) == expected and len(ways.calls) == before + 1  # of the same kind: no trial
    assert ways.choice.names == expected
    ways.cost = {"torch": triton_s, "Triton": torch_s}
    assert ways.choice(5) == expected
    assert ways.choice(15) != expected
    assert ways.choice.names == "torch and Triton"


def test_what_only_the_reference_can_do_it_does_without_a_trial() -> None:
    ways = Ways(2.0, 1.0)
    assert ways.choice(-1) == "torch"
    assert ways.calls == [("torch", (-1,))] and ways.choice.names == "torch"


def test_a_way_that_fails_is_left_out() -> None:
    ways = Ways(2.0, 1.0, fails=True)
    assert ways.choice(5) == "torch" and ways.choice(6) == "torch"
    assert ways.choice.names == "torch (Triton failed: no such device)"
    assert [name for name, _ in ways.calls].count("Triton") == 1


def steps_of(preferred: str | None, in_4_bits: str = "") -> list[Tensor]:
    """All that some decode steps leave behind, with both operators chosen by a trial that one way wins; None: torch."""
    times = iter([1.0, 2.0] * 100 if preferred == "torch" else [2.0, 1.0] * 100)

    def seconds(call: Any) -> float:
        call()
        return next(times)

    attend: Any = cuda.attention(decode.attend_with_torch, seconds) if preferred else decode.attend_with_torch
    enter: Any = cuda.entry(decode.enter_with_torch, seconds) if preferred else decode.enter_with_torch
    kv = make_unit(heavy=(3, 3), ring=(4, 4), empty=0.0, in_4_bits=in_4_bits).kv
    kv.losers.zero_()
    outputs = []
    generator = torch.Generator().manual_seed(1)
    for column in range(7, 15):
        keys, values, query = torch.randn(3, 2, 3, 1, 16, generator=generator).to(DEVICE)
        enter(kv, keys, values, torch.zeros(2, 3, device=DEVICE), column)
        outputs.append(attend(query, kv))
    if preferred is not None:
        assert attend.names == enter.names == preferred
    return [*outputs, *entered(kv), kv.losers]


@pytest.mark.parametrize("in_4_bits", ["", "heavy ring", "heavy"])
@pytest.mark.parametrize("preferred", ["torch", "Triton"])
def test_a_trial_changes_nothing_of_what_it_was_made_for(preferred: str, in_4_bits: str) -> None:
    for ours, theirs in zip(steps_of(preferred, in_4_bits), steps_of(None, in_4_bits), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_sizes_of_another_power_of_two_are_tried_anew_and_what_lies_otherwise_is_torchs() -> None:
    kinds = [cuda._kind_of_attention(*make_unit(ring=(64, live)).arguments) for live in (16, 31, 32)]
    assert kinds[0] == kinds[1] != kinds[2]
    unit = make_unit()
    in_4_bits = [make_unit(head_dim=head_dim, in_4_bits="heavy ring") for head_dim in (16, 20)]
    kinds = [cuda._kind_of_attention(*unit.arguments) for unit in in_4_bits]
    assert kinds[0] is not None and kinds[0] != cuda._kind_of_attention(*make_unit().arguments)
    assert kinds[1] is None
    ring_in_4_bits = in_4_bits[0].changed(heavy_keys=unit.kv.heavy_keys, heavy_values=unit.kv.heavy_values)
    assert cuda._kind_of_attention(*ring_in_4_bits.arguments) is None
    strided = unit.changed(ring_keys=unit.kv.ring_keys.transpose(1, 2).contiguous().transpose(1, 2))
    assert cuda._kind_of_attention(*strided.arguments) is None


REGISTER = """
import torch
torch.backends.cuda.is_built = lambda: True
from flexgen_h2o.kernels import decode
print(decode.attention_path(torch.device("cuda"), 64))
from flexgen_h2o.kernels.matrices.choice import best_layout
print(best_layout(torch.device("cuda"), torch.float16, [(64, 64)], compressed=True).ways)
for name in ("ATTEND_ON_CUDA", "ENTER_ON_CUDA"):
    setattr(decode, name, lambda *_, name=name: print(name))
from types import SimpleNamespace
on_gpu = SimpleNamespace(is_cuda=True)
decode.attend(on_gpu, None)
decode.enter(None, on_gpu, on_gpu, None, 0)
"""


def test_with_torch_for_cuda_the_choice_is_made_on_a_gpu() -> None:
    variables = {**environment(), "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0")}
    command = [sys.executable, "-c", REGISTER]
    result = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["torch", "restored", "ATTEND_ON_CUDA", "ENTER_ON_CUDA"]
