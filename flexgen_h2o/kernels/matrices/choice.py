"""Which layout is the fastest where."""

from collections.abc import Iterable

import torch

from flexgen_h2o.kernels import quantised
from flexgen_h2o.kernels.fastest import HAS_TRITON
from flexgen_h2o.kernels.matrices.layout import MatrixLayout
from flexgen_h2o.kernels.matrices.panels import PanelLayout
from flexgen_h2o.kernels.matrices.plain import PlainLayout
from flexgen_h2o.kernels.matrices.quantised_panels import QuantisedPanelLayout
from flexgen_h2o.kernels.matrices.quantised_rows import QuantisedRowLayout, multiply_restored

if HAS_TRITON:
    from flexgen_h2o.kernels import cuda


def product_path(layout: MatrixLayout) -> str:
    """How products with matrices in a layout run, for reports."""
    ways = layout.ways if isinstance(layout, QuantisedRowLayout) else None
    return layout.name if ways is None else f"{layout.name}, {ways}"


def best_layout(
    device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, int]], compressed: bool = False
) -> MatrixLayout:
    """The layout with the fastest products: panels on a CPU for which oneDNN has them, else row-major.

    In panels, bfloat16 products are 1.3 to 2.3 times as fast with up to 32 rows and a tenth to a quarter faster with
    more; in float32 twice to three times (results/gemm_layouts.jsonl). Of a single output oneDNN makes
    no panel.

    Args:
        shapes: of the model's matrices.
        compressed: in 4-bit groups, then in strips where those can be restored to panels, else row by row.
    """
    panels = PanelLayout()
    native = device.type == "cpu" and all(out > 1 for out, _ in shapes) and panels.is_native(dtype)
    if not compressed:
        return panels if native else PlainLayout()
    if native and quantised.library() is not None:
        return QuantisedPanelLayout()
    if device.type == "cuda" and HAS_TRITON:
        return QuantisedRowLayout(device.type, cuda.product_in_4_bits(multiply_restored, cuda.event_seconds))
    return QuantisedRowLayout(device.type)
