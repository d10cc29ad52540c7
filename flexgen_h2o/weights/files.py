"""Weights on disk: a file per page of the schedule, in the layout that compute wants, reused by later runs.

In a page's file every parameter begins at whole pages of 4096 bytes, in the order of the read buffer that the file is
read into; parameters that live elsewhere are holes. An index says which parameters are there, with their checksums; it
is written after them, so an interrupted run leaves nothing that could be taken for weights.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.memory.direct_io import REQUEST_BYTES, DirectFile, aligned_bytes, read_direct, write_direct
from flexgen_h2o.memory.extents import Extent, host_bytes
from flexgen_h2o.memory.run_folder import cache_key, check_space, replace_file, take_space

INDEX, LOCK = "index.json", "lock"
FILE_VERSION = 3  # of everything here, and of how layouts fill what they ask for


@dataclass(frozen=True)
class WeightPlace:
    """Where a parameter lies: which file, at which byte, how many bytes."""

    file: str
    offset: int
    nbytes: int


def lay_out(file: str, sizes: Mapping[str, int]) -> dict[str, WeightPlace]:
    """Places in one file for parameters of the given bytes, one behind the other, each at whole pages."""
    offsets, end = {}, 0
    for name, nbytes in sizes.items():
        offsets[name] = end
        end += whole_pages(nbytes)
    return {name: WeightPlace(file, offsets[name], nbytes) for name, nbytes in sizes.items()}


def weight_folder(origin: str, dtype: torch.dtype, layout: str) -> "WeightFolder":
    """Where a model's weights are kept on disk, named by everything that they depend on.

    Args:
        origin: what tells their checkpoint from others, or dummy_origin().
        layout: the name of the layout of matrices.
    """
    return WeightFolder(Path(folders.CACHE).expanduser() / cache_key(origin, dtype, layout, FILE_VERSION))


class WeightFolder:
    """Weights of one checkpoint in one precision and layout.

    Attributes:
        damaged: names of the parameters that were found not to be what was written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.damaged: set[str] = set()

    def reserve(self, places: Mapping[str, WeightPlace]) -> set[str]:
        """Names of the parameters that are not there yet, or are not what was written.

        Raises OSError that says what is needed and what there is, if they do not all fit.
        """
        index = self._index()
        missing = {name for name, place in places.items() if not self._is_whole(place, index.get(name))}
        self.damaged |= missing & set(index)
        check_space(self.path, sum(whole_pages(places[name].nbytes) for name in missing), "weights")
        return missing

    def present_bytes(self, places: Mapping[str, WeightPlace]) -> int:
        """Bytes on disk of those of the parameters that are there, as the index says."""
        index = self._index()
        return sum(whole_pages(place.nbytes) for name, place in places.items() if name in index)

    def notes(self) -> list[str]:
        """What people should know of it, a sentence each."""
        if not self.damaged:
            return []
        return [f"{len(self.damaged)} parameters in {self.path} were damaged; they are taken from the model anew"]

    def promised(self, places: Mapping[str, WeightPlace]) -> list[str]:
        """Names of those of the parameters that are there, as the index says."""
        index = self._index()
        return [
            name
            for name, place in places.items()
            if index.get(name, [])[:3] == [place.file, place.offset, place.nbytes]
        ]

    def read(self, name: str, place: WeightPlace, target: Tensor) -> bool:
        """Reads a parameter, past the page cache; False if it is not what was written.

        Args:
            target: [whole pages] uint8, in host memory; what follows the parameter in its last page is read too.
        """
        noted = self._index().get(name)
        try:
            read_direct(target, self.extent(place))
            is_whole = noted is not None and noted[3] == zlib.crc32(host_bytes(target[: place.nbytes]))
        except OSError:
            is_whole = False  # gone, or cut short
        if not is_whole:
            self.damaged.add(name)
        return is_whole

    def write(self, name: str, place: WeightPlace, tensor: Tensor) -> None:
        """Writes a parameter from host memory, past the page cache."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensor = tensor.contiguous()
        path = self.path / place.file
        with path.open("ab") as file:
            take_space(file, place.offset, whole_pages(place.nbytes))
        write_direct(Extent(path, place.offset, place.nbytes), tensor)
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # or a crash could leave an index that promises what is not there
        with self._locked():
            index = self._index()
            index[name] = [place.file, place.offset, place.nbytes, zlib.crc32(host_bytes(tensor))]
            replace_file(self.path / INDEX, json.dumps(index).encode())

    def extent(self, place: WeightPlace) -> Extent:
        """Where a parameter lies, up to the end of its last page."""
        return Extent(self.path / place.file, place.offset, whole_pages(place.nbytes))

    def _is_whole(self, place: WeightPlace, noted: list[object] | None) -> bool:
        """Whether the file holds what the index says."""
        if noted is None or noted[:3] != [place.file, place.offset, place.nbytes]:
            return False
        try:
            return noted[3] == _checksum(self.extent(place), place.nbytes)
        except OSError:
            return False  # gone, or cut short

    def _index(self) -> dict[str, list[object]]:
        """By parameter: file, offset, bytes, checksum. Empty where there is none that can be read."""
        try:
            found = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        entries = found.items() if isinstance(found, dict) else []
        return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 4}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two runs may start on the same model at once; each adds to the index what it has written."""
        with (self.path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _checksum(extent: Extent, nbytes: int) -> int:
    """CRC-32 of the first `nbytes` of an extent, read past the page cache."""
    found = 0
    passing = aligned_bytes(min(REQUEST_BYTES, extent.nbytes) or 1)
    with DirectFile(extent.path) as file:
        for start in range(0, nbytes, REQUEST_BYTES):
            part = passing[: min(REQUEST_BYTES, extent.nbytes - start)]
            file.read(part, extent.offset + start)
            found = zlib.crc32(host_bytes(part[: nbytes - start]), found)
    return found
