"""Products of few rows with panels of 64 outputs, through the native library (native/panels.cpp)."""

from ctypes import CDLL, POINTER, Structure, byref, c_int32, c_int64, c_void_p, sizeof
from functools import cache

import torch
from torch import Tensor

from flexgen_h2o.kernels import native
from flexgen_h2o.kernels.native import pointer, set_product


class Panels(Structure):
    """`struct Panels` of panels.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "x", "bias", "output")),
        *((name, c_int64) for name in ("outputs", "inputs", "depth", "rows")),
        ("threads", c_int32),
    ]


@cache
def _library() -> CDLL | None:
    """The library, with this module's functions; None where there is none, or none of this version."""
    found = native.library()
    if found is None or not hasattr(found, "flexgen_h2o_panels_size"):
        return None
    for name in ("panels_size", "panel_rows"):
        getattr(found, f"flexgen_h2o_{name}").restype = c_int64
    found.flexgen_h2o_multiply_panels.argtypes = [POINTER(Panels)]
    return found if found.flexgen_h2o_panels_size() == sizeof(Panels) else None


@cache
def most_rows(dtype: torch.dtype) -> int:
    """The most rows that multiply() takes in a precision; 0 where there is no such product."""
    found = _library()
    return 0 if found is None or dtype != torch.bfloat16 else int(found.flexgen_h2o_panel_rows())


class PanelProduct:
    """A matrix of bfloat16 in panels, for the library.

    Args:
        storage: [panels, depth, 64, 2].
        shape: [out, in] of the matrix; an even number of inputs.
    """

    def __init__(self, storage: Tensor, shape: tuple[int, int]):
        found = _library()
        assert found is not None
        self._library = found
        self._kept = storage  # what the address below points to
        self._task = Panels(weights=pointer(storage), outputs=shape[0], inputs=shape[1], depth=storage.shape[1])

    def multiply(self, x: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """x . matrix^T + bias; x: [rows, in], output: [rows, out], of at most most_rows() rows."""
        set_product(self._task, x, bias, output)
        self._library.flexgen_h2o_multiply_panels(byref(self._task))
