"""Bytes in files: whole-page extents, read into tensors and written from them."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PAGE = 4096  # bytes; extents begin at whole pages


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file."""

    path: Path
    offset: int
    nbytes: int

    def part(self, at: slice) -> "Extent":
        """Bytes `at.start` to `at.stop` of it."""
        return Extent(self.path, self.offset + at.start, at.stop - at.start)

    def cut(self, sizes: Iterable[int]) -> Iterator["Extent"]:
        """Pieces of it of the given bytes, one behind the other."""
        start = 0
        for size in sizes:
            yield self.part(slice(start, start + size))
            start += size


def whole_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def free_disk_bytes(folder: Path) -> int:
    """Bytes that can still be written below a folder, or below its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as [nbytes] uint8."""
    return tensor.view(-1).view(torch.uint8)


def host_bytes(tensor: Tensor) -> Any:
    """A contiguous host tensor's memory as something that files read into and write from."""
    return as_bytes(tensor).numpy()


def read_extent(target: Tensor, extent: Extent) -> None:
    """Reads an extent into a contiguous host tensor of as many bytes. Raises OSError if the file is shorter."""
    view = memoryview(host_bytes(target))
    with extent.path.open("rb", buffering=0) as file:
        done = 0
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done:]], extent.offset + done)
            if count == 0:
                raise OSError(
                    f"{extent.path} ends at byte {extent.offset + done}; {len(view) - done} bytes are missing"
                )
            done += count


def write_extent(extent: Extent, source: Tensor) -> None:
    """Writes a contiguous host tensor to an extent of a file that exists."""
    view = memoryview(host_bytes(source))
    with extent.path.open("r+b", buffering=0) as file:
        done = 0
        while done < len(view):
            done += os.pwritev(file.fileno(), [view[done:]], extent.offset + done)
