"""How weight matrices lie in memory and on disk, and the products with them; a module for each layout."""

from flexgen_h2o.kernels.matrices.choice import best_layout, product_path
from flexgen_h2o.kernels.matrices.layout import Matrix, MatrixLayout, Storage
from flexgen_h2o.kernels.matrices.panels import PanelLayout, PanelMatrix
from flexgen_h2o.kernels.matrices.plain import PlainLayout, PlainMatrix
from flexgen_h2o.kernels.matrices.quantised_panels import QuantisedPanelLayout, QuantisedPanelMatrix
from flexgen_h2o.kernels.matrices.quantised_rows import QuantisedRowLayout, QuantisedRowMatrix

__all__ = [
    "Matrix",
    "MatrixLayout",
    "PanelLayout",
    "PanelMatrix",
    "PlainLayout",
    "PlainMatrix",
    "QuantisedPanelLayout",
    "QuantisedPanelMatrix",
    "QuantisedRowLayout",
    "QuantisedRowMatrix",
    "Storage",
    "best_layout",
    "product_path",
]
