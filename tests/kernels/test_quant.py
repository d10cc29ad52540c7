"""4-bit groups: the bytes of the format, and how far a value may be off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.plan.four_bit_sizes import entry_bytes, groups_of

UNIT = 2.0**-8  # roundoff of bfloat16
DIMS = [1, 63, 64, 65, 288, 4096]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
RANGES = [1e-4, 1.0, 6e4]


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform between 0 and 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def groups(values: Tensor) -> list[Tensor]:
    """Every group of vectors [..., dim] by itself, in float64."""
    return [part.double() for part in values.split(64, dim=-1)]


def assert_within_bounds(values: Tensor, kept: Tensor) -> None:
    assert kept.isfinite().all()
    for group, found in zip(groups(values), groups(kept), strict=True):
        low, high = group.amin(dim=-1, keepdim=True), group.amax(dim=-1, keepdim=True)
        bound = (high - low) / 30 + UNIT * (low.abs() + 2 * (high - low))
        assert ((found - group).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    dim=st.sampled_from(DIMS),
    width=st.sampled_from(RANGES),
    centre=st.sampled_from([0.0, 0.5, -0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_a_value_is_off_by_a_thirtieth_of_its_groups_range(
    dtype: torch.dtype, dim: int, width: float, centre: float, seed: int
) -> None:
    values = ((random((2, 3, dim), seed) - centre) / (1 + abs(centre)) * width).to(dtype)
    entries = quant.encode(values)
    assert entries.dtype == torch.uint8 and entries.shape == (2, 3, entry_bytes(dim))
    assert_within_bounds(values, quant.decode(entries, dim, torch.float32))


@given(
    dim=st.sampled_from(DIMS[:-1]),
    spikes=st.lists(st.floats(-6e4, 6e4, width=16), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_outliers_are_kept_too(dim: int, spikes: list[float], seed: int) -> None:
    values = random((dim,), seed)
    for number, spike in enumerate(spikes):
        values[(seed + 17 * number) % dim] = spike
    assert_within_bounds(values, quant.decode(quant.encode(values), dim, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-4, 6e4])
def test_a_group_all_alike_is_kept_as_well_as_bfloat16_keeps_it(dtype: torch.dtype, dim: int, value: float) -> None:
    values = torch.full((2, dim), value, dtype=dtype)
    for entries in (quant.encode(values), quant.encode_weight(values)):
        kept = quant.decode(entries, dim, torch.float32)
        assert torch.equal(kept, values.float().bfloat16().float())


def test_the_range_of_a_short_last_group_is_its_own() -> None:
    values = torch.cat((torch.linspace(-100, 100, 64), torch.linspace(0, 0.15, 16)))
    kept = quant.decode(quant.encode(values), 80, torch.float32)
    assert (kept[64:] - values[64:]).abs().max() < 0.15 / 15 / 2 + 0.001


def test_the_bytes_are_those_of_the_format() -> None:
    whole, rest = torch.arange(64) % 16, torch.tensor([3, 0, 15])
    entry = quant.encode(torch.cat((whole * 0.5 - 2, rest * 2.0 + 1)))
    codes = [whole[i] | whole[i + 1] << 4 for i in range(0, 64, 2)] + [3 | 0 << 4, 15]
    ranges = torch.tensor([0.5, -2, 2, 1], dtype=torch.bfloat16).view(torch.uint8)
    assert entry.tolist() == [*(int(code) for code in codes), *ranges.tolist()]


@pytest.mark.parametrize("dim", DIMS)
def test_an_entry_takes_what_the_formula_says(dim: int) -> None:
    bits = 4 + 32 * -(-dim // 64) / dim
    assert bits * dim / 8 <= entry_bytes(dim) < bits * dim / 8 + 1  # a last half byte
    assert groups_of(dim) == -(-dim // 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    entries = quant.encode(random((5, 200), 0) - 0.5)
    assert torch.equal(quant.decode(entries, 200, dtype), quant.decode(entries, 200, torch.float32).to(dtype))


def squared_error(values: Tensor, entries: Tensor) -> Tensor:
    """By vector and group."""
    kept = quant.decode(entries, values.shape[-1], torch.float32)
    parts = zip(groups(values), groups(kept), strict=True)
    return torch.stack([(group - found).square().sum(dim=-1) for group, found in parts])


@pytest.mark.parametrize("dim", [63, 64, 288])
def test_a_weights_ranges_are_chosen_for_the_least_error(dim: int) -> None:
    values = torch.randn(200, dim, generator=torch.Generator().manual_seed(0)) * 0.02
    nearest = squared_error(values, quant.encode(values))
    clipped = squared_error(values, quant.encode(values, quant.CUTS))
    fitted = squared_error(values, quant.encode_weight(values))
    each = torch.stack([squared_error(values, quant.encode(values, (cut,))) for cut in quant.CUTS])
    torch.testing.assert_close(clipped, each.amin(dim=0))
    assert (fitted <= clipped).all()
    assert fitted.sum() < 0.985 * clipped.sum() and clipped.sum() < 0.93 * nearest.sum()


def test_a_fit_is_a_line_through_the_codes() -> None:
    """Against numpy's, where one is enough: values on a line but for a small error."""
    numpy = pytest.importorskip("numpy")
    codes = torch.arange(64) % 16
    values = 0.25 * codes - 1 + 0.02 * torch.sin(torch.arange(64.0))
    entry = quant.encode(values, fits=1)
    slope, intercept = numpy.polyfit(codes.numpy(), values.numpy(), 1)
    scale, minimum = entry[-4:].view(torch.bfloat16).tolist()
    assert scale == pytest.approx(slope, rel=UNIT / 2) and minimum == pytest.approx(intercept, rel=UNIT / 2)
