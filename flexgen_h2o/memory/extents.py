"""Bytes in files: extents, which begin at whole pages, and the memory of tensors as bytes."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.basics.folders import nearest_parent


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


def free_disk_bytes(folder: Path) -> int:
    """Bytes that can still be written below a folder, or below its nearest parent that exists."""
    status = os.statvfs(nearest_parent(folder))
    return status.f_bavail * status.f_frsize


def file_system(folder: Path) -> int:
    """A number that folders of one file system share; of the nearest parent, for a folder that does not exist."""
    return nearest_parent(folder).stat().st_dev


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as [nbytes] uint8."""
    return tensor.view(-1).view(torch.uint8)


def host_bytes(tensor: Tensor) -> Any:
    """A contiguous host tensor's memory as something that files read into and write from."""
    return as_bytes(tensor).numpy()
