"""Layouts of weight matrices: what lies where, and products with it against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexgen_h2o.kernels import onednn
from flexgen_h2o.kernels import panels as native_panels
from flexgen_h2o.kernels.matrices import panels
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.layout import Matrix, MatrixLayout
from flexgen_h2o.kernels.matrices.panels import LEAST_ROWS, PanelLayout, rows_at_once
from flexgen_h2o.kernels.matrices.plain import PlainLayout
from flexgen_h2o.profiling.timing import compute_threads

CPU = torch.device("cpu")
NO_BUFFER = torch.empty(0, dtype=torch.uint8)
DTYPES = [torch.float32, torch.bfloat16]
needs_panels = pytest.mark.skipif(
    not PanelLayout().is_native(torch.float32), reason="oneDNN has another layout, or none, on this processor"
)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(layout: MatrixLayout, matrix: Tensor, dtype: torch.dtype) -> Matrix:
    """The matrix in memory that was full of NaN."""
    shape = (matrix.shape[0], matrix.shape[1])
    in_memory = layout.storage(shape, dtype)
    storage = in_memory.over(torch.full((in_memory.nbytes,), 255, dtype=torch.uint8))
    layout.encode(storage, matrix)
    return layout.matrix(storage, shape, dtype, torch.empty(layout.buffer_bytes([shape], dtype), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 96])
def test_every_weight_lies_where_the_layout_says(out: int, inputs: int, dtype: torch.dtype) -> None:
    matrix, layout = random((out, inputs), dtype), PanelLayout()
    storage = torch.full(layout.storage((out, inputs), dtype).shape, torch.nan, dtype=dtype)
    layout.encode(storage, matrix)
    together = 4 // dtype.itemsize
    expected = torch.zeros(storage.shape, dtype=dtype)
    for row in range(out):
        for column in range(inputs):
            expected[row // 64, column // together, row % 64, column % together] = matrix[row, column]
    assert torch.equal(storage, expected)
    # Whole panels, and 16 steps of 4 bytes along the inputs.
    assert storage.nbytes == -(-out // 64) * 64 * -(-inputs // (16 * together)) * 16 * 4


@needs_panels
@settings(deadline=None, max_examples=60)
@given(
    out=st.integers(2, 300),
    inputs=st.integers(1, 200),
    rows=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_products_in_panels_are_those_of_float64(
    out: int, inputs: int, rows: int, dtype: torch.dtype, has_bias: bool
) -> None:
    weight, x = random((out, inputs), dtype), random((rows, inputs), dtype, 1)
    bias = random((out,), dtype, 2) if has_bias else None
    matrix = stored(PanelLayout(), weight, dtype)
    got = matrix.product(x, bias, torch.full((rows, out), torch.nan, dtype=dtype))
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Sums in float32, rounded once to the result's precision.
    scale = x.double().abs() @ weight.double().abs().T + 1
    bound = torch.finfo(dtype).eps * exact.abs() + inputs * torch.finfo(torch.float32).eps * scale
    assert ((got.double() - exact).abs() <= bound).all()
    assert torch.equal(matrix.dense(), weight)


@needs_panels
@pytest.mark.skipif(not native_panels.most_rows(torch.bfloat16), reason="no native product on this processor")
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 12, 13, panels.FEW_ROWS, panels.FEW_ROWS + 1])
@pytest.mark.parametrize("inputs", [2, 1022, 1024, 1026, 2500])  # a part of a panel is 1024 of them
def test_products_of_few_rows_are_those_of_many(inputs: int, rows: int) -> None:
    weight, x, bias = random((130, inputs), torch.bfloat16), random((rows, inputs), torch.bfloat16, 1), None
    matrix = stored(PanelLayout(), weight, torch.bfloat16)
    got = matrix.product(x, bias, torch.full((rows, 130), torch.nan, dtype=torch.bfloat16))
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T + 1
    bound = 2.0**-8 * exact.abs() + inputs * torch.finfo(torch.float32).eps * scale
    assert ((got.double() - exact).abs() <= bound).all()
    many = stored(PanelLayout(), weight, torch.bfloat16).product(
        x.repeat(panels.FEW_ROWS + 1, 1), bias, got.new_empty(rows * (panels.FEW_ROWS + 1), 130)
    )
    assert torch.allclose(got.float(), many[:rows].float(), rtol=2.0**-7, atol=1e-2)


@needs_panels
@pytest.mark.skipif(not native_panels.most_rows(torch.bfloat16), reason="no native product on this processor")
def test_the_number_of_threads_changes_nothing() -> None:
    matrix = stored(PanelLayout(), random((1000, 600), torch.bfloat16), torch.bfloat16)
    x = random((33, 600), torch.bfloat16, 1)
    results = []
    for threads in (1, 2):
        with compute_threads(threads):
            results.append(matrix.product(x, None, torch.empty(33, 1000, dtype=torch.bfloat16)))
    assert torch.equal(*results)


@needs_panels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_taken_from_panels_as_from_a_table(dtype: torch.dtype) -> None:
    table = random((131, 33), dtype)
    ids = torch.tensor([[0, 63, 64], [130, 1, 1]])
    assert torch.equal(stored(PanelLayout(), table, dtype).rows(ids), table[ids])
    assert torch.equal(stored(PlainLayout(), table, dtype).rows(ids), table[ids])


@needs_panels
@pytest.mark.parametrize("rows", [LEAST_ROWS - 1, LEAST_ROWS, LEAST_ROWS + 1, 3 * LEAST_ROWS + 5])
def test_many_rows_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(panels, "RESULT_BYTES", 1)
    parts, linear = [], onednn.linear
    monkeypatch.setattr(onednn, "linear", lambda x, *rest: parts.append(len(x)) or linear(x, *rest))
    weight, x = random((70, 40), torch.float32), random((rows, 40), torch.float32, 1)
    got = stored(PanelLayout(), weight, torch.float32).product(x, None, torch.empty(rows, 70))
    torch.testing.assert_close(got, x @ weight.T)
    assert parts == [LEAST_ROWS] * (rows // LEAST_ROWS) + [rows % LEAST_ROWS] * (rows % LEAST_ROWS > 0)


@needs_panels
def test_a_matrix_is_what_its_memory_holds_now() -> None:
    """A read buffer is filled again for every layer."""
    layout, first, second = PanelLayout(), random((80, 48), torch.bfloat16), random((80, 48), torch.bfloat16, 1)
    storage = torch.empty(layout.storage((80, 48), torch.bfloat16).shape, dtype=torch.bfloat16)
    matrix = layout.matrix(storage, (80, 48), torch.bfloat16, NO_BUFFER)
    x = random((3, 48), torch.bfloat16, 2)
    for weight in (first, second):
        layout.encode(storage, weight)
        got = matrix.product(x, None, torch.empty(3, 80, dtype=torch.bfloat16))
        torch.testing.assert_close(got, x @ weight.T)


def test_a_result_on_its_way_is_charged() -> None:
    in_panels, plain = PanelLayout(), PlainLayout()
    assert rows_at_once(8192, 2) == 512 and rows_at_once(50272, 4) == LEAST_ROWS
    assert in_panels.result_bytes(10, 8192, 2) == 10 * 8192 * 2
    assert in_panels.result_bytes(4096, 8192, 2) == 8 * 2**20
    assert plain.result_bytes(4096, 8192, 2) == 0


def test_where_panels_are_not_native_matrices_are_row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {(64, 64)}
    assert best_layout(torch.device("meta"), torch.float32, shapes).name == "plain"
    assert best_layout(CPU, torch.float16, shapes).name == "plain"
    assert best_layout(CPU, torch.float32, {(1, 64)}).name == "plain"
    monkeypatch.setattr(onednn, "packed_bytes", lambda packed: torch.zeros(1, dtype=torch.uint8))
    assert best_layout(CPU, torch.float32, shapes).name == "plain"
    monkeypatch.setattr(onednn, "can_multiply", lambda dtype: False)
    assert best_layout(CPU, torch.float32, shapes).name == "plain"


@needs_panels
def test_a_shape_that_is_packed_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "describe", lambda shape, dtype: (1, b""))
    layout = PanelLayout()
    with pytest.raises(RuntimeError, match=r"\[80, 48\]"):
        layout.matrix(torch.empty(layout.storage((80, 48), torch.float32).shape), (80, 48), torch.float32, NO_BUFFER)
