"""4-bit groups: 64 consecutive values share a scale and a minimum (FlexGen, Sheng et al. 2023, section 5).

    value = minimum + scale * code        code 0 to 15, scale and minimum in bfloat16

bfloat16 has the exponents of float32, so neither a tiny nor a huge range overflows. A vector of `dim` values becomes an
entry of bytes: the codes, two a byte (element 2i in the low half of byte i), then each group's scale and minimum. The
last group may be shorter; its range is that of its own values. So a value takes 4 + 32 ceil(dim / 64) / dim bits.

An element is off by at most range / 30 + u (|minimum| + 2 range), u = 2^-8 the unit roundoff of bfloat16.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexgen_h2o.plan.four_bit_sizes import GROUP, LEVELS, entry_bytes, groups_of

Cut = tuple[float, float]  # shares of a group's range that are cut off at its lower and its upper end
NO_CUT: Cut = (0.0, 0.0)
# For weights: the cuts among which the one with the least squared error is taken, and how often scale and minimum are
# then fitted to the codes that came out.
SHARES = (0.0, 0.04, 0.08, 0.12)
CUTS: tuple[Cut, ...] = tuple(itertools.product(SHARES, SHARES))
FITS = 2


def encode_weight(matrix: Tensor) -> Tensor:
    """Quantises a matrix, with more care than what is quantised in passing; see encode()."""
    return encode(matrix, CUTS, FITS)


def encode(values: Tensor, cuts: Sequence[Cut] = (NO_CUT,), fits: int = 0) -> Tensor:
    """Quantises vectors.

    Args:
        values: [..., dim], floating point, finite.
        cuts: each group takes the one with the least squared error.
        fits: how often scale and minimum are then fitted to the codes, and kept where the squared error is less.
    Returns: [..., entry_bytes(dim)] uint8.
    """
    dim = values.shape[-1]
    entries = torch.empty(*values.shape[:-1], entry_bytes(dim), dtype=torch.uint8, device=values.device)
    if values.is_meta:
        return entries
    codes = torch.zeros(*values.shape[:-1], -(-dim // 2) * 2, dtype=torch.uint8, device=values.device)
    metadata = torch.empty(*values.shape[:-1], groups_of(dim), 2, dtype=torch.bfloat16, device=values.device)
    for columns, groups in _runs(dim):
        grouped = values[..., columns].float().unflatten(-1, (groups.stop - groups.start, -1))
        scale, minimum = choose_ranges(grouped, cuts, fits)
        codes[..., columns] = encode_groups(grouped, scale, minimum).flatten(-2)
        metadata[..., groups, 0], metadata[..., groups, 1] = scale, minimum
    pairs = codes.unflatten(-1, (-1, 2))
    entries[..., : pairs.shape[-2]] = pairs[..., 0] | pairs[..., 1] << 4
    entries[..., pairs.shape[-2] :] = metadata.flatten(-2).view(torch.uint8)
    return entries


def decode(entries: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The values of entries, as good as they were kept.

    Args:
        entries: [..., entry_bytes(dim)] uint8.
    Returns: [..., dim] of `dtype`; computed in float32, rounded once.
    """
    if entries.is_meta:
        return torch.empty(*entries.shape[:-1], dim, dtype=dtype, device="meta")
    code_bytes = -(-dim // 2)
    packed = entries[..., :code_bytes]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    # At an even address: a single entry is contiguous as it is, whatever its offset.
    metadata = entries[..., code_bytes:].clone(memory_format=torch.contiguous_format)
    metadata = metadata.view(torch.bfloat16).unflatten(-1, (-1, 2))
    values = torch.empty(*entries.shape[:-1], dim, dtype=dtype, device=entries.device)
    for columns, groups in _runs(dim):
        part = codes[..., columns].float().unflatten(-1, (groups.stop - groups.start, -1))
        scale, minimum = metadata[..., groups, :1].float(), metadata[..., groups, 1:].float()
        values[..., columns] = (minimum + scale * part).flatten(-2).to(dtype)
    return values


def choose_ranges(grouped: Tensor, cuts: Sequence[Cut] = (NO_CUT,), fits: int = 0) -> tuple[Tensor, Tensor]:
    """Scale and minimum of groups; see encode().

    Args:
        grouped: [..., groups, n] float32.
    Returns: two tensors [..., groups] bfloat16.
    """
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    best = _range(low, high, cuts[0])
    if len(cuts) + fits == 1:
        return best
    least = _squared_error(grouped, *best)
    for cut in cuts[1:]:
        best, least = _better(grouped, _range(low, high, cut), best, least)
    for _ in range(fits):
        best, least = _better(grouped, _fit(grouped, *best), best, least)
    return best


def encode_groups(grouped: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Codes of groups, rounded to the nearest, ties to even.

    Args:
        grouped: [..., groups, n] float32. scale, minimum: [..., groups] bfloat16.
    Returns: [..., groups, n] uint8; 0 where the scale is 0.
    """
    steps = scale.float()[..., None]
    codes = ((grouped - minimum.float()[..., None]) / torch.where(steps == 0, 1.0, steps)).round_().clamp_(0, LEVELS)
    return torch.where(steps == 0, 0.0, codes).to(torch.uint8)


def _range(low: Tensor, high: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Scale and minimum of what is left of the ranges."""
    below, above = cut
    minimum = (low + (high - low) * below).to(torch.bfloat16)
    return ((high - low) * ((1 - below - above) / LEVELS)).to(torch.bfloat16), minimum


def _fit(grouped: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """The line through the values over their present codes, by least squares.

    Sums are of values above the minimum: small, whatever the minimum.
    """
    n = grouped.shape[-1]
    codes = encode_groups(grouped, scale, minimum).double()
    values = (grouped - minimum.float()[..., None]).double()
    code_sum, value_sum = codes.sum(dim=-1), values.sum(dim=-1)
    spread = n * codes.square().sum(dim=-1) - code_sum.square()
    slope = (n * (codes * values).sum(dim=-1) - code_sum * value_sum) / torch.where(spread > 0, spread, 1.0)
    fitted = torch.where(spread > 0, slope.float(), scale.float()).to(torch.bfloat16)
    offset = (value_sum - fitted.double() * code_sum) / n
    return fitted, (minimum.double() + offset).float().to(torch.bfloat16)


Ranges = tuple[Tensor, Tensor]


def _better(grouped: Tensor, tried: Ranges, best: Ranges, least: Tensor) -> tuple[Ranges, Tensor]:
    """Whichever of two ranges has the smaller squared error, group by group, and that error."""
    error = _squared_error(grouped, *tried)
    better = error < least
    scale, minimum = (torch.where(better, one, other) for one, other in zip(tried, best, strict=True))
    return (scale, minimum), torch.where(better, error, least)


def _squared_error(grouped: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    codes = encode_groups(grouped, scale, minimum).float()
    kept = minimum.float()[..., None] + scale.float()[..., None] * codes
    return (kept - grouped).double().square_().sum(dim=-1)


def _runs(dim: int) -> Iterator[tuple[slice, slice]]:
    """Columns and groups that can be taken together: the whole groups, then the shorter last one."""
    whole = dim // GROUP
    if whole:
        yield slice(0, whole * GROUP), slice(0, whole)
    if dim % GROUP:
        yield slice(whole * GROUP, dim), slice(whole, whole + 1)
