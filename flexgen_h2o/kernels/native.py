"""The native library, where the installation could compile it: its functions, called through ctypes.

Sources are in native/. The library knows no torch and no Python; OpenMP's functions it takes from torch, which must
have been loaded before.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}  # uint8: entries of 4 bits an element
PATHS = ("portable", "AVX2", "AVX-512", "AVX-512 BF16")


class Attention(Structure):
    """`struct Attention` of attention.h: one unit's KV and what attention does to it."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "heavy_keys", "heavy_values", "ring_keys", "ring_values")),
        *((name, c_void_p) for name in ("scores", "losers", "output")),
        *((name, c_int64) for name in ("pairs", "head_dim", "heavy_slots", "ring_slots", "heavy_len", "ring_len")),
        *((name, c_int32) for name in ("heavy_type", "ring_type", "query_type", "accumulates")),
        ("decay", c_float),
        ("threads", c_int32),
        ("path", c_int32),
    ]


class Entry(Structure):
    """`struct Entry` of attention.h: a new token of one unit."""

    _fields_ = [
        *((name, c_void_p) for name in ("heavy_keys", "heavy_values", "ring_keys", "ring_values")),
        *((name, c_void_p) for name in ("scores", "columns", "losers", "keys", "values", "initial_scores")),
        *((name, c_int64) for name in ("pairs", "head_dim", "heavy_slots", "ring_slots", "ring_slot")),
        *((name, c_int32) for name in ("heavy_type", "ring_type", "token_type")),
        *((name, c_int32) for name in ("column", "ring_is_full", "threads", "path")),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where it was not compiled, cannot be loaded or is of another version."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            found = ctypes.CDLL(str(path))
            found.flexgen_h2o_decode_attention.argtypes = [POINTER(Attention)]
            found.flexgen_h2o_read_only.argtypes = [POINTER(Attention)]
            found.flexgen_h2o_read_only.restype = c_float
            found.flexgen_h2o_enter.argtypes = [POINTER(Entry)]
            found.flexgen_h2o_best_path.argtypes = [c_int64, c_int32]
            found.flexgen_h2o_sizes.restype = c_int64
            is_of_this_version = found.flexgen_h2o_sizes() == ctypes.sizeof(Attention) << 32 | ctypes.sizeof(Entry)
        except (OSError, AttributeError):
            continue
        if is_of_this_version:
            return found
    return None


def best_path(head_dim: int, in_4_bits: bool = False) -> str | None:
    """The instruction set that entries of a size are read with; None without the library."""
    found = library()
    return None if found is None else PATHS[found.flexgen_h2o_best_path(head_dim, in_4_bits)]


def set_product(task: Structure, x: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """Tells a task of the library, with fields of these names, what to multiply, and on as many threads as torch."""
    task.x, task.output = pointer(x), pointer(output)
    task.bias = None if bias is None else pointer(bias)
    task.rows, task.threads = x.shape[0], torch.get_num_threads()


def pointer(tensor: Tensor) -> int:
    """A contiguous tensor's address."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()
