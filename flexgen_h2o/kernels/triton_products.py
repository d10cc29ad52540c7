"""Products with matrices in 4-bit groups as a Triton kernel for a GPU: codes become values in registers.

A program computes a tile of rows by outputs. It reads the entries (four_bits.py) of its outputs once, several groups
at a time, and rounds values to the precision of x as four_bits.decode() does; sums are in float32. torch's own product
with packed 4-bit groups wants bfloat16 and compute capability 8.0, which a T4 has neither of.
"""

import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.kernels.triton_quant import PRECISIONS, ranges
from flexgen_h2o.plan.four_bit_sizes import GROUP, entry_bytes, groups_of

# With more rows, entries would be read more than twice, and a product with restored values is bound by arithmetic.
MOST_ROWS = 128
LEAST_TILE, LARGEST_TILE = 16, 64  # rows; fewer than 16 the GPU's matrix units do not take
OUTPUTS_AT_ONCE = 32
GROUPS_AT_ONCE = 4


def fits(x: Tensor, entries: Tensor, bias: Tensor | None, output: Tensor) -> bool:
    """Whether the kernel can multiply these: words of 4 bytes in entries have to lie at multiples of 4."""
    contiguous = all(tensor.is_contiguous() for tensor in (x, entries, output, *([] if bias is None else [bias])))
    return (
        contiguous
        and entries.data_ptr() % 4 == 0
        and x.dtype in PRECISIONS
        and x.shape[1] % 8 == 0
        and len(x) <= MOST_ROWS
    )


def multiply_with_triton(x: Tensor, entries: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
    """x . weight^T + bias.

    Args:
        x: [rows, in]. entries: [out, entry_bytes(in)] uint8 of the weight. bias: [out]. output: [rows, out], written.
    """
    rows, inputs = x.shape
    out = len(entries)
    row_tile = min(max(triton.next_power_of_2(rows), LEAST_TILE), LARGEST_TILE)
    _multiply[(triton.cdiv(out, OUTPUTS_AT_ONCE), triton.cdiv(rows, row_tile))](
        *(x, entries, output if bias is None else bias, output),
        *(rows, out, inputs, entry_bytes(inputs), groups_of(inputs)),
        has_bias=bias is not None,
        row_tile=row_tile,
        output_tile=OUTPUTS_AT_ONCE,
        group_tile=GROUPS_AT_ONCE,
        group=GROUP,
    )
    return output


@triton.jit
def _values(codes, scale, minimum, output_tile: tl.constexpr, group_tile: tl.constexpr, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes [outputs, groups x half] as values in float32."""
    grouped = tl.reshape(codes.to(tl.float32), [output_tile, group_tile, half])
    return tl.reshape(minimum[:, :, None] + scale[:, :, None] * grouped, [output_tile, group_tile * half])


@triton.jit(do_not_specialize=["rows", "out"])
def _multiply(  # type: ignore[no-untyped-def]
    x,
    entries,
    bias,
    output,
    rows,
    out,
    inputs,
    bytes_of_entry,
    groups,
    has_bias: tl.constexpr,
    row_tile: tl.constexpr,
    output_tile: tl.constexpr,
    group_tile: tl.constexpr,
    group: tl.constexpr,
):
    """A tile [row_tile, output_tile] of the product.

    A byte holds the codes of two neighbouring inputs. They are not put side by side: inputs of even and of odd number
    are multiplied apart.
    """
    half: tl.constexpr = group // 2
    code_bytes = inputs // 2
    outputs = tl.program_id(0) * output_tile + tl.arange(0, output_tile)
    row = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    is_output, is_row = outputs < out, row < rows
    entry = outputs.to(tl.int64) * bytes_of_entry
    own_x = x + row[:, None].to(tl.int64) * inputs
    total = tl.zeros([row_tile, output_tile], tl.float32)
    for first in range(0, groups, group_tile):
        at = first * half + tl.arange(0, group_tile * half)
        is_read = is_output[:, None] & (at < code_bytes)[None, :]
        codes = tl.load(entries + entry[:, None] + at[None, :], mask=is_read, other=0)
        of_groups = first + tl.arange(0, group_tile)
        is_group = is_output[:, None] & (of_groups < groups)[None, :]
        words = (entries + entry[:, None] + code_bytes).to(tl.pointer_type(tl.int32), bitcast=True)
        scale, minimum = ranges(tl.load(words + of_groups[None, :], mask=is_group, other=0))
        is_read = is_row[:, None] & (at < code_bytes)[None, :]
        even = tl.load(own_x + 2 * at[None, :], mask=is_read, other=0.0)
        odd = tl.load(own_x + 2 * at[None, :] + 1, mask=is_read, other=0.0)
        low = _values(codes & 15, scale, minimum, output_tile, group_tile, half).to(even.dtype)
        high = _values(codes >> 4, scale, minimum, output_tile, group_tile, half).to(even.dtype)
        total = tl.dot(even, tl.trans(low), total, input_precision="ieee")
        total = tl.dot(odd, tl.trans(high), total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at_output = output + row[:, None].to(tl.int64) * out + outputs[None, :]
    tl.store(at_output, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
