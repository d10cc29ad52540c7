"""Random units for decode attention, the same in float64, and calls of the native library on each instruction set."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexgen_h2o.kernels import decode, native
from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kernels.decode_unit import DecodeUnit

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = [1, 3, 8, 16, 20, 24, 32, 48, 64, 80, 96, 128, 144, 256]
REGIONS = ("heavy_keys", "heavy_values", "ring_keys", "ring_values")
WIDTHS = {"portable": 1, "AVX2": 8, "AVX-512": 16, "AVX-512 BF16": 16}
EPSILON = 2.0**-23  # float32's
# Half of the distance between neighbours: relative to a normal number, and in absolute terms for subnormal ones.
ROUNDING = {torch.float32: (2.0**-24, 0.0), torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 0.0)}

needs_library = pytest.mark.skipif(native.library() is None, reason="the native library was not compiled")


def paths(head_dim: int, in_4_bits: bool = False) -> list[str]:
    """Instruction sets that this processor has and that fit a head size."""
    best = native.best_path(256, in_4_bits)
    known = native.PATHS[: native.PATHS.index(best) + 1] if best is not None else ()
    return [path for path in known if head_dim % WIDTHS[path] == 0]


@dataclass(frozen=True)
class Unit:
    """Arguments of attend_with_torch()."""

    query: Tensor
    kv: DecodeUnit

    @property
    def arguments(self) -> tuple[Tensor, DecodeUnit]:
        return self.query, self.kv

    def tensors(self) -> dict[str, Tensor]:
        """The query and what the KV consists of, by name."""
        return {"query": self.query, **tensors_of(self.kv)}

    def changed(self, query: Tensor | None = None, **changes: Any) -> Unit:
        """The same with another query, or other fields of the KV."""
        return Unit(self.query if query is None else query, replace(self.kv, **changes))

    def copy(self, dtype: torch.dtype | None = None) -> Unit:
        """With memory of its own; query, keys and values in another precision if one is given."""
        tensors = {name: value.clone() for name, value in self.tensors().items()}
        for name in ("query", *REGIONS):
            tensors[name] = tensors[name].to(dtype or tensors[name].dtype)
        return self.changed(**tensors)

    def live(self, slots: Tensor) -> Tensor:
        """The live ones of [rows, heads, slots], heavy first."""
        heavy = self.kv.heavy_slots
        return torch.cat((slots[..., : self.kv.heavy_len], slots[..., heavy : heavy + self.kv.ring_len]), dim=-1)


def tensors_of(kv: DecodeUnit) -> dict[str, Tensor]:
    return {name: value for name, value in vars(kv).items() if isinstance(value, Tensor)}


def copy_of(kv: DecodeUnit) -> DecodeUnit:
    """The same with memory of its own."""
    return replace(kv, **{name: value.clone() for name, value in tensors_of(kv).items()})


def empty_kv(
    rows: int, heads: int, head_dim: int, heavy: int, ring: int, heavy_dtype: torch.dtype, ring_dtype: torch.dtype
) -> DecodeUnit:
    """KV into which no token has entered; uint8 is in 4 bits."""

    def entries(slots: int, dtype: torch.dtype) -> Tensor:
        size = quant.entry_bytes(head_dim) if dtype == torch.uint8 else head_dim
        return torch.zeros(rows, heads, slots, size, dtype=dtype)

    state = (rows, heads, heavy + ring)
    return DecodeUnit(
        *(entries(heavy, heavy_dtype) for _ in range(2)),
        *(entries(ring, ring_dtype) for _ in range(2)),
        scores=torch.full(state, -math.inf),
        columns=torch.full(state, -1, dtype=torch.int32),
        losers=torch.zeros(rows, heads, dtype=torch.int32),
        heavy_len=0,
        ring_len=0,
    )


def entered(kv: DecodeUnit) -> tuple[Tensor, ...]:
    """What enter() writes."""
    return *kv.regions, kv.scores, kv.columns


def find_losers(kv: DecodeUnit) -> None:
    """As attention finds them."""
    if kv.heavy_slots:
        kv.losers.copy_(kv.scores[..., : kv.heavy_slots].min(dim=-1).indices)


def some_scores(rows: int, heads: int, pads: Tensor, column: int, generator: torch.Generator) -> Tensor:
    """Initial scores of a token, [rows, heads]: few, often equal, each head's its own; -inf of the first `pads`."""
    scores = torch.randint(0, 2, (rows, heads), generator=generator).float()
    return scores.masked_fill(column < pads[:, None], -math.inf)


def make_unit(
    head_dim: int,
    dtype: torch.dtype,
    query_dtype: torch.dtype | None = None,
    rows: int = 2,
    heads: int = 3,
    heavy: tuple[int, int] = (9, 7),
    ring: tuple[int, int] = (13, 13),
    empty: float = 0.2,
    seed: int = 0,
    in_4_bits: str = "",
) -> Unit:
    """A random unit; `heavy` and `ring` are (slots, live ones).

    Args:
        empty: share of live slots that are empty; the last live ring slot, the current token's, never is.
        in_4_bits: the regions that are, of "heavy ring".
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, heads, *shape, generator=generator)

    scores = torch.full((rows, heads, heavy[0] + ring[0]), -math.inf)
    random = torch.rand(scores.shape, generator=generator)
    is_live = torch.zeros(scores.shape, dtype=torch.bool)
    is_live[..., : heavy[1]] = is_live[..., heavy[0] : heavy[0] + ring[1]] = True
    is_live &= torch.rand(scores.shape, generator=generator) >= empty
    is_live[..., heavy[0] + ring[1] - 1] = True
    query = (normal(1, head_dim) * head_dim**-0.5).to(query_dtype or dtype)
    kv = DecodeUnit(
        *(
            quant.encode(normal(slots, head_dim)) if name in in_4_bits.split() else normal(slots, head_dim).to(dtype)
            for name, slots in (("heavy", heavy[0]), ("heavy", heavy[0]), ("ring", ring[0]), ("ring", ring[0]))
        ),
        scores=torch.where(is_live, random, scores),
        columns=torch.where(is_live, torch.arange(scores.shape[2]), -1).to(torch.int32),
        losers=torch.full((rows, heads), 77, dtype=torch.int32),
        heavy_len=heavy[1],
        ring_len=ring[1],
        accumulates=True,
    )
    return Unit(query, kv)


def attend(path: str, unit: Unit, threads: int = 1) -> Tensor:
    """The native library, on the instruction set of that name."""
    library = native.library()
    assert library is not None
    output = torch.empty_like(unit.query)
    described = decode.describe(*unit.arguments, output)
    described.threads, described.path = threads, native.PATHS.index(path)
    library.flexgen_h2o_decode_attention(ctypes.byref(described))
    return output


@dataclass(frozen=True)
class Exact:
    """Attention in float64, and how far float32 arithmetic may be from it."""

    output: Tensor
    weights: Tensor  # [rows, heads, live slots]
    scores: Tensor  # live ones
    output_bound: Tensor
    weights_bound: Tensor


def decode_exactly(entries: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """What entries stand for, in float64, and the magnitude of the terms that an element is the sum of.

    That of 4 bits is taken apart by hand: an element is minimum + scale * code.
    """
    if entries.dtype != torch.uint8:
        return entries.double(), entries.double().abs()
    elements = torch.arange(head_dim)
    codes = entries[..., elements // 2] >> (4 * (elements % 2)).to(torch.uint8) & 15
    metadata = entries[..., -(-head_dim // 2) :].long()
    bits = (metadata[..., ::2] | metadata[..., 1::2] << 8) << 16  # of float32s whose lower half is zero
    numbers = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32).double()
    scale, minimum = (numbers[..., first::2][..., elements // 64] for first in (0, 1))
    return minimum + scale * codes, minimum.abs() + 15 * scale


def attend_exactly(unit: Unit) -> Exact:
    """The definition, in float64.

    Bounds, with epsilon = 2^-23: a logit is a sum of head_dim products, each addition of which is wrong by at most
    epsilon / 2 of the sum of magnitudes; e^x turns that into a relative error. The sums of weights and values have as
    many terms as there are slots; exp and the division are within 4 epsilon. A product that float32 flushes to 0 (e^x
    below e^-87) is below 2^-125. In 4 bits the terms are minimum and scale * code, and weights of values may be cut
    after 16 bits where the output is in half precision.
    """
    head_dim = unit.query.shape[-1]

    def live(name: str) -> tuple[Tensor, Tensor]:
        """Entries of both regions, and their magnitudes."""
        parts = [
            decode_exactly(getattr(unit.kv, f"{region}_{name}")[:, :, :length], head_dim)
            for region, length in (("heavy", unit.kv.heavy_len), ("ring", unit.kv.ring_len))
        ]
        entries, magnitudes = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
        return entries, magnitudes

    (keys, key_magnitudes), (values, value_magnitudes) = live("keys"), live("values")
    query, scores = unit.query.double(), unit.live(unit.kv.scores).double()
    is_empty = scores == -math.inf
    logits = (keys * query).sum(-1)
    logits[is_empty] = -math.inf
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = powers / powers.sum(-1, keepdim=True)
    added = torch.where(is_empty, scores, unit.kv.decay * scores + weights) if unit.kv.accumulates else scores
    output = (weights[..., None] * values).sum(2, keepdim=True)
    in_4_bits = unit.kv.heavy_values.dtype == torch.uint8
    logit_error = (head_dim + 4 * in_4_bits) * EPSILON * (key_magnitudes * query.abs()).sum(-1).amax(-1, keepdim=True)
    relative = 2 * logit_error + (keys.shape[2] + 8) * EPSILON
    is_cut = in_4_bits and unit.query.dtype != torch.float32
    magnitude = (weights[..., None] * value_magnitudes).sum(2, keepdim=True)
    share, least = ROUNDING[unit.query.dtype]
    output_error = (relative + is_cut * 2.0**-15)[..., None] * magnitude
    output_bound = output_error * (1 + share) + share * output.abs() + least + 2.0**-100
    return Exact(output, weights, added, output_bound, relative * weights + 2.0**-125)


def check_against_float64(unit: Unit, call: Callable[[Unit], Tensor]) -> None:
    """Calls, and compares output, scores and losers."""
    exact = attend_exactly(unit)
    ran = unit.copy()
    output = call(ran)
    assert output.dtype == unit.query.dtype and output.shape == unit.query.shape
    assert bool(((output.double() - exact.output).abs() <= exact.output_bound).all())
    scores = ran.live(ran.kv.scores).double()
    assert bool((scores.isneginf() == exact.scores.isneginf()).all())
    finite = exact.scores.isfinite()
    assert bool((scores[~finite] == exact.scores[~finite]).all())
    bound = exact.weights_bound + exact.scores.abs() * 2 * EPSILON
    assert bool(((scores - exact.scores).abs() <= bound)[finite].all())
    if unit.kv.heavy_slots:
        assert ran.kv.losers.tolist() == [[lowest(head, unit.kv.heavy_slots) for head in row] for row in ran.kv.scores]


def lowest(scores: Tensor, heavy: int) -> int:
    """The heavy slot with the lowest of [slots] scores, the lower one of equals, by hand."""
    loser = 0
    for slot in range(heavy):
        if scores[slot] < scores[loser]:
            loser = slot
    return loser


def spread(shape: tuple[int, ...], dtype: torch.dtype, canary: int) -> tuple[Tensor, Tensor]:
    """A tensor in the middle of a larger piece of memory, and that memory as bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.full((nbytes + 512,), canary, dtype=torch.uint8)
    return memory[256 : 256 + nbytes].view(dtype).view(shape), memory
