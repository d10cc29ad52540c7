"""The product with 4-bit groups as a Triton kernel, on a GPU or else in Triton's interpreter, beside float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matrix_products import assert_is_product, kept, random
from torch import Tensor

from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kernels.fastest import TRIALS
from flexgen_h2o.kernels.matrices.choice import product_path
from flexgen_h2o.kernels.matrices.quantised_rows import QuantisedRowLayout, multiply_restored

pytest.importorskip("triton", reason="Triton is not installed")

from flexgen_h2o.kernels import cuda, triton_products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter keeps bfloat16 as integers and multiplies those.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


def multiply(x: Tensor, entries: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel's product, over what was no number."""
    output = torch.full((len(x), len(entries)), math.nan, dtype=x.dtype, device=DEVICE)
    moved = None if bias is None else bias.to(DEVICE)
    return triton_products.multiply_with_triton(x.to(DEVICE), entries.to(DEVICE), moved, output).cpu()


@settings(max_examples=30)
@given(
    dtype=st.sampled_from(DTYPES),
    out=st.integers(1, 70),
    inputs=st.sampled_from([8, 56, 64, 72, 128, 256, 288, 320]),
    rows=st.sampled_from([1, 3, 16, 17, 40, 70, 128]),
    has_bias=st.booleans(),
)
def test_products_are_those_of_float64(dtype: torch.dtype, out: int, inputs: int, rows: int, has_bias: bool) -> None:
    weight, x = random((out, inputs), dtype), random((rows, inputs), dtype, 1)
    bias = random((out,), dtype, 2) if has_bias else None
    assert_is_product(multiply(x, quant.encode_weight(weight), bias), x, kept(weight, dtype), bias)


def test_what_follows_a_matrix_in_memory_is_not_read() -> None:
    weight, x = random((5, 72), torch.float32), random((3, 72), torch.float32, 1)
    entries = quant.encode_weight(weight)
    memory = torch.full((entries.numel() + 64,), 255, dtype=torch.uint8)  # scales there are no numbers
    memory[: entries.numel()] = entries.view(-1)
    assert_is_product(multiply(x, memory[: entries.numel()].view(5, -1), None), x, kept(weight, torch.float32), None)


def test_what_the_kernel_cannot_multiply_is_restored() -> None:
    def kind(rows: int, inputs: int, dtype: torch.dtype = torch.float16, offset: int = 0) -> object:
        entries = quant.encode(torch.zeros(3, inputs))
        memory = torch.zeros(entries.numel() + offset, dtype=torch.uint8)[offset:].view_as(entries)
        output = torch.empty(rows, 3, dtype=dtype)
        return cuda._kind_of_product(torch.zeros(rows, inputs, dtype=dtype), memory, None, output)

    assert kind(1, 64) is not None and kind(triton_products.MOST_ROWS, 8) is not None
    assert kind(8, 64) == kind(15, 64) != kind(16, 64)
    assert kind(8, 64) != kind(8, 128) and kind(8, 64) != kind(8, 64, torch.bfloat16)
    assert kind(1, 68) is None and kind(triton_products.MOST_ROWS + 1, 64) is None
    assert kind(1, 64, torch.float64) is None and kind(1, 64, offset=2) is None
    x, entries, output = torch.zeros(2, 64), quant.encode(torch.zeros(3, 64)), torch.empty(2, 6)
    assert cuda._kind_of_product(x, entries, None, output[:, :3]) is None
    assert cuda._kind_of_product(x, entries, output[0, ::2], output[:, :3].contiguous()) is None


@pytest.mark.parametrize("preferred", ["restored", "Triton"])
def test_a_layout_for_a_gpu_multiplies_the_faster_way(preferred: str) -> None:
    times = iter([1.0, 2.0] * TRIALS if preferred == "restored" else [2.0, 1.0] * TRIALS)
    product = cuda.product_in_4_bits(multiply_restored, lambda call: (call(), next(times))[1])
    weight, x = random((9, 64), torch.float32), random((4, 64), torch.float32, 1).to(DEVICE)
    layout = QuantisedRowLayout("cuda", product)
    storage = quant.encode_weight(weight).to(DEVICE)
    buffer = torch.empty(layout.buffer_bytes([(9, 64)], torch.float32), dtype=torch.uint8, device=DEVICE)
    matrix = layout.matrix(storage, (9, 64), torch.float32, buffer)
    for _ in range(2):  # a trial and its call, then a call
        output = torch.full((4, 9), math.nan, device=DEVICE)
        assert_is_product(matrix.product(x, None, output).cpu(), x.cpu(), kept(weight, torch.float32), None)
    assert layout.ways == preferred and product_path(layout) == f"4-bit rows, {preferred}"
    assert product_path(QuantisedRowLayout()) == "4-bit rows"
    assert next(times, None) is None
