"""oneDNN's linear product over weights that lie in memory of ours, through what torch makes public of it.

torch packs a weight into memory that oneDNN allocates. Weights here lie in buffers that a ledger counts and that disks
are read into, so a packed tensor is laid over such a buffer instead: torch's C interface for compiled models makes a
tensor from a pointer and oneDNN's own description of the layout.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Rows for which a layout is asked for. It is the same for all from 2 on.
TYPICAL_ROWS = 32


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether this processor and this torch have oneDNN's packed product in a precision."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return hasattr(_library(), "aoti_torch_create_tensor_from_blob_v2")


def pack(matrix: Tensor) -> Tensor:
    """A matrix [out, in] as oneDNN packs it, in memory that it allocates itself."""
    return torch.ops.mkldnn._reorder_linear_weight(matrix, TYPICAL_ROWS)


def packed_bytes(packed: Tensor) -> Tensor:
    """A copy of a packed tensor's memory, [nbytes] uint8."""
    nbytes = torch.ops.mkldnn._nbytes(packed)
    copy = torch.empty(nbytes, dtype=torch.uint8)
    ctypes.memmove(copy.data_ptr(), torch.ops.mkldnn.data_ptr(packed), nbytes)
    return copy


def describe(shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, bytes]:
    """How oneDNN packs a matrix of a shape: bytes in all, and its own description of the layout."""
    packed = pack(torch.empty(shape, dtype=dtype))
    return torch.ops.mkldnn._nbytes(packed), bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy())


def lay_over(storage: Tensor, shape: tuple[int, int], description: bytes) -> Tensor:
    """A packed tensor of a shape over a contiguous tensor's memory, which must outlive it."""
    library = _library()
    dtype = getattr(library, f"aoti_torch_dtype_{str(storage.dtype).removeprefix('torch.')}")()
    sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(storage.data_ptr()),
        ctypes.c_int64(2),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(dtype),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        (ctypes.c_uint8 * len(description)).from_buffer_copy(description),
        ctypes.c_int64(len(description)),
    )
    if failed:
        raise RuntimeError(f"torch {torch.__version__} makes no packed tensor of shape {list(shape)}")
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(handle)])[0]


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, in] . [out, in] packed + [out] -> [rows, out], newly allocated."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def _library() -> ctypes.CDLL:
    """torch's library, in which the C interface is; it is loaded already."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _capsule(pointer: ctypes.c_void_p) -> Any:
    """A pointer as Python hands it to C++."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new_capsule(pointer, None, None)
