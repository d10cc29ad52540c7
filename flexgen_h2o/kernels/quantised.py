"""Matrices in 4-bit groups through the native library: quantising, restoring, and products of few rows.

How they lie is said in native/quantised.h: strips of 16 outputs.
"""

from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from functools import cache

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits, native
from flexgen_h2o.kernels.native import pointer, set_product
from flexgen_h2o.plan import four_bit_sizes
from flexgen_h2o.plan.four_bit_sizes import LEVELS

STRIP = 16  # outputs side by side
PRODUCTS = {torch.float32: 1, torch.bfloat16: 2}  # the path from which on there is a product of few rows


class Quantisation(Structure):
    """`struct Quantisation` of quantised.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("values", "target", "cuts", "steps")),
        *((name, c_int64) for name in ("outputs", "inputs", "stride")),
        *((name, c_int32) for name in ("type", "clips", "fits", "in_strips", "threads")),
    ]


class Strips(Structure):
    """`struct Strips` of quantised.h: a matrix, and what is done with it."""

    _fields_ = [
        *((name, c_void_p) for name in ("strips", "x", "bias", "passing", "output")),
        *((name, c_int64) for name in ("outputs", "inputs", "rows", "first_output", "end_output")),
        *((name, c_int32) for name in ("type", "threads", "path")),
    ]


@cache
def library() -> CDLL | None:
    """The library, with this module's functions; None where there is none, or none of this version."""
    found = native.library()
    if found is None or not hasattr(found, "flexgen_h2o_quantised_sizes"):
        return None
    for name in ("quantised_sizes", "strip_bytes", "packed_row_bytes"):
        getattr(found, f"flexgen_h2o_{name}").restype = c_int64
    found.flexgen_h2o_strip_bytes.argtypes = [c_int64]
    found.flexgen_h2o_packed_row_bytes.argtypes = [c_int64, c_int32]
    found.flexgen_h2o_quantise.argtypes = [POINTER(Quantisation)]
    for name in ("restore_panels", "restore_rows", "multiply_strips"):
        getattr(found, f"flexgen_h2o_{name}").argtypes = [POINTER(Strips)]
    is_of_this_version = found.flexgen_h2o_quantised_sizes() == sizeof(Quantisation) << 32 | sizeof(Strips)
    return found if is_of_this_version else None


def _library() -> CDLL:
    found = library()
    if found is None:
        raise RuntimeError("the native library is missing")
    return found


def best_path() -> int:
    """The best instruction set that this processor has for strips: 0 portable, 1 AVX-512, 2 AVX-512 with BF16."""
    return int(_library().flexgen_h2o_strips_path())


def strip_bytes(inputs: int) -> int:
    """Bytes of a strip, 16 outputs."""
    return int(_library().flexgen_h2o_strip_bytes(inputs))


def has_product(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies few rows with codes, in a precision."""
    return dtype in PRODUCTS and best_path() >= PRODUCTS[dtype]


def packed_row_bytes(inputs: int, dtype: torch.dtype) -> int:
    """Bytes that multiply() needs in passing for a row of x."""
    return int(_library().flexgen_h2o_packed_row_bytes(inputs, native.TYPES[dtype]))


def quantise(matrix: Tensor, target: Tensor, cuts: Sequence[four_bits.Cut], fits: int, in_strips: bool) -> None:
    """Quantises a matrix as four_bits.encode() does.

    Args:
        matrix: [out, in] float32, float16 or bfloat16, in host memory.
        target: uint8, the strips, or with `in_strips` false the entries of four_bits.encode().
    """
    if matrix.dtype not in native.TYPES:
        matrix = matrix.float()
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    cut_below = (c_float * len(cuts))(*(below for below, _ in cuts))
    steps = (c_float * len(cuts))(*((1 - below - above) / LEVELS for below, above in cuts))
    task = Quantisation(
        values=matrix.data_ptr(),
        target=pointer(target),
        cuts=addressof(cut_below),
        steps=addressof(steps),
        outputs=matrix.shape[0],
        inputs=matrix.shape[1],
        stride=matrix.stride(0),
        type=native.TYPES[matrix.dtype],
        clips=len(cuts),
        fits=fits,
        in_strips=in_strips,
        threads=torch.get_num_threads(),
    )
    _library().flexgen_h2o_quantise(byref(task))


def encode(values: Tensor) -> Tensor:
    """four_bits.encode() by the library, where it is there.

    Args:
        values: [..., dim], floating point, finite.
    """
    if values.device.type != "cpu" or library() is None:
        return four_bits.encode(values)
    dim = values.shape[-1]
    entries = torch.empty(*values.shape[:-1], four_bit_sizes.entry_bytes(dim), dtype=torch.uint8)
    quantise(values.reshape(-1, dim), entries, (four_bits.NO_CUT,), 0, in_strips=False)
    return entries


class StripMatrix:
    """A matrix in strips, for the library.

    Args:
        storage: [ceil(out / 16), strip_bytes(in)] uint8.
        passing: [n] uint8, for what multiply() needs in passing.
        path: the instruction set; None for the best.
    """

    def __init__(
        self, storage: Tensor, shape: tuple[int, int], dtype: torch.dtype, passing: Tensor, path: int | None = None
    ):
        self._library = _library()
        self._kept = storage, passing  # what the addresses below point to
        self._task = Strips(
            strips=pointer(storage),
            passing=pointer(passing),
            outputs=shape[0],
            inputs=shape[1],
            type=native.TYPES[dtype],
            path=best_path() if path is None else path,
        )

    def multiply(self, x: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """x . matrix^T + bias, where has_product(); x: [rows, in], output: [rows, out]."""
        set_product(self._task, x, bias, output)
        self._library.flexgen_h2o_multiply_strips(byref(self._task))

    def restore_panels(self, outputs: range, panels: Tensor) -> None:
        """Writes consecutive outputs as panels.PanelLayout has them; they begin at a whole panel."""
        task = self._task
        task.output, task.first_output, task.end_output = pointer(panels), outputs.start, outputs.stop
        task.threads = torch.get_num_threads()
        self._library.flexgen_h2o_restore_panels(byref(task))

    def restore_rows(self, wanted: Tensor, rows: Tensor) -> None:
        """Writes some rows of the matrix; wanted: [n] int64, rows: [n, in]."""
        task = self._task
        task.x, task.output, task.rows = pointer(wanted), pointer(rows), len(wanted)
        task.threads = torch.get_num_threads()
        self._library.flexgen_h2o_restore_rows(byref(task))
