"""Matrices in 4-bit groups: their bytes, and products with them against float64 of the values that are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.matrix_products import assert_is_product, kept, random
from torch import Tensor

from flexgen_h2o.kernels import quantised
from flexgen_h2o.kernels.matrices import quantised_panels
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.layout import Matrix, MatrixLayout
from flexgen_h2o.kernels.matrices.panels import PanelLayout
from flexgen_h2o.kernels.matrices.quantised_panels import QuantisedPanelLayout
from flexgen_h2o.kernels.matrices.quantised_rows import QuantisedRowLayout
from flexgen_h2o.plan import footprint

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS: dict[str, MatrixLayout] = {"rows": QuantisedRowLayout()}
HAS_STRIPS = best_layout(CPU, torch.float32, {(64, 64)}, compressed=True).name == QuantisedPanelLayout.name
if HAS_STRIPS:
    LAYOUTS |= {"strips": QuantisedPanelLayout(), "strips, panels restored": QuantisedPanelLayout(code_rows=0)}
CASES = [(name, dtype) for name in LAYOUTS for dtype in DTYPES if name == "rows" or dtype != torch.float16]
needs_strips = pytest.mark.skipif(not HAS_STRIPS, reason="no native library, or oneDNN has other panels here")


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Torch computes on as many threads as before, afterwards."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def multiplied(layout: MatrixLayout, weight: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """What so many rows are multiplied with: few, the codes, before values are rounded to the precision of compute."""
    has_codes = isinstance(layout, QuantisedPanelLayout) and quantised.has_product(dtype) and rows <= layout.code_rows
    return kept(weight, torch.float32 if has_codes else dtype)


def stored(layout: MatrixLayout, weight: Tensor, dtype: torch.dtype, buffer_bytes: int | None = None) -> Matrix:
    """The matrix in memory that was full of ones."""
    shape = (weight.shape[0], weight.shape[1])
    in_memory = layout.storage(shape, dtype)
    storage = in_memory.over(torch.full((in_memory.nbytes,), 255, dtype=torch.uint8))
    layout.encode(storage, weight)
    nbytes = layout.buffer_bytes([shape], dtype) if buffer_bytes is None else buffer_bytes
    return layout.matrix(storage, shape, dtype, torch.full((nbytes,), 255, dtype=torch.uint8))


@pytest.mark.parametrize(("name", "dtype"), CASES)
@given(
    out=st.integers(2, 200),
    inputs=st.sampled_from([1, 2, 31, 63, 64, 65, 96, 128, 200, 288]),
    rows=st.sampled_from([1, 3, 8, 33, 300]),
    has_bias=st.booleans(),
)
def test_products_are_those_of_float64(
    name: str, dtype: torch.dtype, out: int, inputs: int, rows: int, has_bias: bool
) -> None:
    weight, x = random((out, inputs), dtype), random((rows, inputs), dtype, 1)
    bias = random((out,), dtype, 2) if has_bias else None
    matrix = stored(LAYOUTS[name], weight, dtype)
    got = matrix.product(x, bias, torch.full((rows, out), torch.nan, dtype=dtype))
    assert_is_product(got, x, multiplied(LAYOUTS[name], weight, dtype, rows), bias)


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("inputs", [1, 33, 64, 288])
def test_rows_are_the_values_that_are_kept(name: str, dtype: torch.dtype, inputs: int) -> None:
    table = random((131, inputs), dtype)
    matrix = stored(LAYOUTS[name], table, dtype)
    ids = torch.tensor([[0, 63, 64], [130, 1, 1]])
    assert torch.equal(matrix.rows(ids), kept(table, dtype)[ids])
    assert torch.equal(matrix.dense(), kept(table, dtype))
    assert matrix.rows(ids[:0]).shape == (0, 3, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_at_once", [1, 2, 7])
def test_a_small_buffer_gives_the_same(dtype: torch.dtype, rows_at_once: int) -> None:
    weight, x = random((50, 70), dtype), random((5, 70), dtype, 1)
    row = QuantisedRowLayout().buffer_bytes([(1, 70)], dtype)
    matrix = stored(QuantisedRowLayout(), weight, dtype, rows_at_once * row)
    bias = random((50,), dtype, 2)
    assert_is_product(matrix.product(x, bias, torch.empty(5, 50, dtype=dtype)), x, kept(weight, dtype), bias)
    assert torch.equal(matrix.dense(), kept(weight, dtype))


def test_the_buffer_is_as_large_as_the_largest_needs_and_no_larger() -> None:
    layout = QuantisedRowLayout()
    assert layout.buffer_bytes([], torch.float32) == 0
    assert layout.buffer_bytes([(3, 10)], torch.float32) == 3 * 10 * 4
    assert layout.buffer_bytes([(3, 10), (2, 11)], torch.bfloat16) == 3 * 10 * (4 + 2)
    assert layout.buffer_bytes([(2, 11)], torch.bfloat16) == 2 * (12 * 4 + 11 * 2)
    whole = layout.buffer_bytes([(50272, 12288)], torch.bfloat16)
    assert 0.9 * 8 * 2**20 < whole <= 8 * 2**20
    assert 0.9 * 64 * 2**20 < QuantisedRowLayout("cuda").buffer_bytes([(50272, 12288)], torch.float16) <= 64 * 2**20


@needs_strips
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 9, 10, 11, 64])
def test_neither_threads_nor_parts_change_a_product(
    monkeypatch: pytest.MonkeyPatch, restored_threads: None, rows: int, threads: int, dtype: torch.dtype
) -> None:
    shape = (16 * 9 + 5, 200)
    weight, x, bias = random(shape, dtype), random((rows, 200), dtype, 1), random(shape[:1], dtype, 2)
    matrix = stored(QuantisedPanelLayout(), weight, dtype)
    expected = matrix.product(x, bias, torch.empty(rows, shape[0], dtype=dtype))
    torch.set_num_threads(threads)
    assert torch.equal(matrix.product(x, bias, torch.empty(rows, shape[0], dtype=dtype)), expected)
    monkeypatch.setattr(quantised_panels, "PACKED_BYTES", 5 * quantised.packed_row_bytes(200, dtype))
    layout = QuantisedPanelLayout()
    assert layout.code_rows_at_once(200, dtype) == 5
    got = stored(layout, weight, dtype).product(x, bias, torch.empty(rows, shape[0], dtype=dtype))
    assert_is_product(got, x, kept(weight, torch.float32), bias)


@needs_strips
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out", [64, 65, 128, 129, 193, 256])
def test_panels_that_are_restored_in_parts_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, out: int
) -> None:
    monkeypatch.setattr(footprint, "RESTORED_OUTPUTS", 64)
    monkeypatch.setattr(footprint, "RESTORED_BYTES", 1)
    weight, x, bias = random((out, 97), dtype), random((9, 97), dtype, 1), random((out,), dtype, 2)
    layout = QuantisedPanelLayout(code_rows=0)
    assert layout.buffer_bytes([(out, 97)], dtype) <= 2 * 64 * 128 * dtype.itemsize
    got = stored(layout, weight, dtype).product(x, bias, torch.empty(9, out, dtype=dtype))
    assert_is_product(got, x, kept(weight, dtype), bias)


@needs_strips
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out", "inputs"), [(64, 64), (70, 97), (130, 33), (17, 288)])
@pytest.mark.parametrize("path", [0, 1, 2])
def test_restored_panels_are_those_of_the_panel_layout(dtype: torch.dtype, out: int, inputs: int, path: int) -> None:
    """On every instruction set that there is, up to the padding with zeros."""
    if path > quantised.best_path():
        pytest.skip("not on this processor")
    weight, layout, panels = random((out, inputs), dtype), QuantisedPanelLayout(), PanelLayout()
    in_memory, wanted = layout.storage((out, inputs), dtype), panels.storage((out, inputs), dtype)
    storage = in_memory.over(torch.empty(in_memory.nbytes, dtype=torch.uint8))
    layout.encode(storage, weight)
    strips = quantised.StripMatrix(storage, (out, inputs), dtype, torch.empty(0, dtype=torch.uint8), path)
    got = wanted.over(torch.full((wanted.nbytes,), 255, dtype=torch.uint8))
    strips.restore_panels(range(out), got)
    expected = torch.empty_like(got)
    panels.encode(expected, kept(weight, dtype))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(2048, 2048), (8192, 2048), (50272, 4096), (4096, 16384), (1024, 288)], ids=str)
def test_storage_is_what_the_formula_says(name: str, shape: tuple[int, int]) -> None:
    out, inputs = shape
    formula = out * inputs * (4 + 32 * -(-inputs // 64) / inputs) / 8
    layout = LAYOUTS[name]
    for part in (layout, layout.tables):
        assert part.storage(shape, torch.bfloat16).nbytes == pytest.approx(formula, rel=0.01)


def test_a_matrix_is_what_its_memory_holds_now() -> None:
    """A read buffer is filled again for every layer."""
    for layout in LAYOUTS.values():
        first, second = random((80, 48), torch.bfloat16), random((80, 48), torch.bfloat16, 1)
        in_memory = layout.storage((80, 48), torch.bfloat16)
        storage = in_memory.over(torch.empty(in_memory.nbytes, dtype=torch.uint8))
        buffer = torch.empty(layout.buffer_bytes([(80, 48)], torch.bfloat16), dtype=torch.uint8)
        matrix = layout.matrix(storage, (80, 48), torch.bfloat16, buffer)
        x = random((3, 48), torch.bfloat16, 2)
        for weight in (first, second):
            layout.encode(storage, weight)
            got = matrix.product(x, None, torch.empty(3, 80, dtype=torch.bfloat16))
            assert_is_product(got, x, multiplied(layout, weight, torch.bfloat16, 3), None)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_matrices_of_any_precision_are_quantised_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Bit for bit: what a parameter is does not depend on where it was quantised."""
    for shape, scale, offset in (
        ((37, 97), 0.02, 0.0),
        ((130, 320), 1e-4, 0.0),
        ((64, 64), 100.0, 3e4),
        ((5, 1), 1, 0),
    ):
        weight = (random(shape, torch.float32) * scale + offset).to(dtype)
        weight[1] = weight[0, 0]  # a row all alike
        weight[2] = 0
        expected = kept(weight, torch.float32)
        assert torch.equal(stored(LAYOUTS[name], weight, torch.float32).dense(), expected)
        assert torch.equal(stored(LAYOUTS[name], weight.T.contiguous().T, torch.float32).dense(), expected)
        assert torch.equal(expected[1:3], weight[1:3].bfloat16().float())
    with monkeypatch.context() as patch:
        patch.setattr(quantised, "library", lambda: None)
        rows = QuantisedRowLayout()
        assert torch.equal(stored(rows, weight, torch.float32).dense(), expected)
        assert best_layout(CPU, torch.float32, {(64, 64)}, compressed=True).name == rows.name


def test_layouts_have_names_of_their_own() -> None:
    names = [best_layout(CPU, torch.float32, {(64, 64)}, compressed).name for compressed in (False, True)]
    assert len(set(names)) == 2


def test_without_memory_shapes_are_all_there_is() -> None:
    layout = best_layout(torch.device("meta"), torch.bfloat16, {(70, 48)}, compressed=True)
    in_memory = layout.storage((70, 48), torch.bfloat16)
    storage = torch.empty(in_memory.shape, dtype=in_memory.dtype, device="meta")
    layout.encode(storage, torch.empty(70, 48, device="meta"))
    matrix = layout.matrix(storage, (70, 48), torch.bfloat16, torch.empty(0, dtype=torch.uint8, device="meta"))
    x = torch.empty(3, 48, dtype=torch.bfloat16, device="meta")
    assert matrix.product(x, None, x.new_empty(3, 70)).shape == (3, 70)
    assert matrix.rows(torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 48)
