"""4-bit groups inside Triton's kernels; the format and its arithmetic are those of module quant.

Vectors have a multiple of 8 elements, so that the word of 4 bytes with a group's scale and minimum lies at a multiple
of 4 bytes from the entry's beginning.
"""

import torch
import triton
import triton.language as tl

from flexgen_h2o.plan.four_bit_sizes import GROUP, LEVELS

PRECISIONS = (torch.float16, torch.bfloat16, torch.float32)  # that the kernels compute with, or read and write
_GROUP = tl.constexpr(GROUP)
_LEVELS = tl.constexpr(LEVELS)
_ROUNDS = tl.constexpr(1.5 * 2**23)  # added to a number from 0 to 2^22 it leaves no digit after the point


@triton.jit
def ranges(words):  # type: ignore[no-untyped-def]
    """Scale and minimum of groups: two bfloat16 in a word, the upper halves of float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def restored(entries, elements, is_read, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of entries in float32; `entries`, their addresses, and `elements` are broadcast to `is_read`."""
    codes = tl.load(entries + elements // 2, mask=is_read, other=0).to(tl.int32) >> (elements % 2 * 4) & 15
    words = (entries + dim // 2).to(tl.pointer_type(tl.int32), bitcast=True)
    scale, minimum = ranges(tl.load(words + elements // _GROUP, mask=is_read, other=0))
    return minimum + scale * codes.to(tl.float32)


@triton.jit
def quantised(source, target, dim: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantises a vector of `dim` elements at `source` and writes its entry at `target`; `width` is a power of two."""
    group_width: tl.constexpr = width if width < _GROUP else _GROUP
    groups: tl.constexpr = width // group_width
    at = tl.arange(0, width)
    values = tl.reshape(tl.load(source + at, mask=at < dim, other=0.0).to(tl.float32), [groups, group_width])
    is_value = tl.reshape(at < dim, [groups, group_width])
    low = tl.min(tl.where(is_value, values, float("inf")), axis=1)
    high = tl.max(tl.where(is_value, values, float("-inf")), axis=1)
    minimum_bits = _rounded_to_bfloat16(low + (high - low) * 0.0)  # of -0 that makes 0, as it does in module quant
    scale_bits = _rounded_to_bfloat16((high - low) * (1.0 / _LEVELS))
    minimum, scale = minimum_bits.to(tl.float32, bitcast=True), scale_bits.to(tl.float32, bitcast=True)
    steps = tl.div_rn(values - minimum[:, None], tl.where(scale == 0, 1.0, scale)[:, None])
    codes = tl.minimum(tl.maximum(steps, 0.0), _LEVELS) + _ROUNDS - _ROUNDS
    codes = tl.where((scale == 0)[:, None], 0.0, codes).to(tl.int32)
    even, odd = tl.split(tl.reshape(codes, [width // 2, 2]))
    byte = tl.arange(0, width // 2)
    tl.store(target + byte, (even | odd << 4).to(tl.uint8), mask=byte < dim // 2)
    group = tl.arange(0, groups)
    words = (target + dim // 2).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + group, minimum_bits | (scale_bits >> 16 & 65535), mask=group * group_width < dim)


@triton.jit
def _rounded_to_bfloat16(values):  # type: ignore[no-untyped-def]
    """Bits of float32 rounded to the nearest bfloat16, ties to even, as not every GPU has an instruction for it."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits + 32767 + (bits >> 16 & 1)) & -65536
