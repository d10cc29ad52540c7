"""The header of a safetensors file, believed only as far as the file's own size bears it out.

8 bytes   n, little-endian            https://github.com/huggingface/safetensors#format
n bytes   JSON: name -> {dtype, shape, data_offsets [begin, end)}, offsets counted from the end of the header
the rest  the tensors' bytes, which cover it without gaps
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_HEADER_BYTES = 100_000_000  # as the format has it
MOST_DIMENSIONS = 8
# Bytes of an element. Others exist; checkpoints of the models here do not have them.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a header describes it."""

    shape: tuple[int, ...]
    is_floating: bool


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. Raises ValueError or OSError that says what cannot be."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"its header would have {length} bytes, and the file has {size}")
        try:
            entries = json.loads(file.read(length), object_pairs_hook=_once)
        except RecursionError:
            raise ValueError("its header is nested too deeply") from None
    if not isinstance(entries, dict):
        raise ValueError(f"its header is {type(entries).__name__}, not an object")
    entries.pop("__metadata__", None)
    places = sorted(_place(name, entry) for name, entry in entries.items())
    end = 0
    for begin, stop, name in places:
        if begin != end:
            raise ValueError(f"{name[:80]} begins at byte {begin} of the data, where {end} was expected")
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"its tensors have {end} bytes, and the file has {size - 8 - length} for them")
    return {name: StoredTensor(tuple(entry["shape"]), entry["dtype"] in FLOATING) for name, entry in entries.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("its header has a key twice")
    return values


def _place(name: str, entry: Any) -> tuple[int, int, str]:
    """Where a tensor begins and ends, after everything has been checked that its entry says."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"the entry of {name[:80]} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name[:80]} has dtype {str(dtype)[:20]}; known ones are {', '.join(ITEM_BYTES)}")
    if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{name[:80]} has no shape that can be: {str(shape)[:80]}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name[:80]} has no data_offsets that can be: {str(offsets)[:80]}")
    if offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name[:80]} has {offsets[1] - offsets[0]} bytes, which its shape {shape} does not make")
    return offsets[0], offsets[1], name


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
