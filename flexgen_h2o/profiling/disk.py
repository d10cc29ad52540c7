"""Rates of a disk, past the page cache and through it, and the processor time that they take."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import PAGE, gb, whole_pages
from flexgen_h2o.memory.direct_io import DirectFile, aligned_bytes
from flexgen_h2o.memory.extents import free_disk_bytes

SHIFT = 0x9E3779B97F4A7C1  # odd, so that bytes come again only after 2**64 shifts

Move = Callable[[DirectFile, int, Tensor, Executor | None], None]


class TestFile:
    """A file full of random bytes, without a name: it is gone when this process is, however that ends.

    Args:
        folder: that exists. Its file system must have room.

    Attributes:
        direct, buffered: the file, opened both ways.
        memory: [at least `at_once`] uint8 of random bytes, page-aligned: what is written, and where reads go.
    """

    __test__ = False  # no test of pytest's, whatever its name

    def __init__(self, folder: Path, nbytes: int, at_once: int):
        self.nbytes = nbytes
        self._resources = ExitStack()
        self.memory = aligned_bytes(at_once)
        self._numbers = self.memory[: at_once // 8 * 8].view(torch.int64).random_(-(2**63), None)
        try:
            self._open(folder)
            self._write_all()
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(prefix="profile-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, self.nbytes)
            self.direct = self._resources.enter_context(DirectFile(Path(name), writes=True))
            self.buffered = self._resources.enter_context(DirectFile(Path(name), writes=True, direct=False))
        finally:
            os.unlink(name)
            os.close(handle)

    def _write_all(self) -> None:
        """Writes every byte once: what was only reserved would be read as zeros, without the disk."""
        for start, part in self.parts():
            self.direct.write(start, part)
            self.shuffle()
        self.direct.sync()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Where the file's parts begin that pass through memory one after the other, and each one's memory."""
        for start in range(0, self.nbytes, len(self.memory)):
            yield start, self.memory[: self.nbytes - start]

    def shuffle(self) -> None:
        """Other bytes in memory, as random as before, so that no trial writes what the file holds already."""
        self._numbers += SHIFT

    def close(self) -> None:
        """Gives the file's space back."""
        self._resources.close()

    def __enter__(self) -> "TestFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_folder(folder: Path, nbytes: int) -> None:
    """Raises UsageError if a test file of `nbytes` cannot be made in a folder."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--folder {folder} is no folder that can be written to; give another one")
    if (free := free_disk_bytes(folder)) < nbytes:
        raise UsageError(
            f"the test file needs {gb(nbytes)} of disk, and {folder} has {gb(free)} left;"
            " give another --folder or free some"
        )


class Disk:
    """A disk's rates, as a subject. Each trial reads or writes the whole test file; at once, the halves of it.

    Args:
        in_flight: numbers of requests in flight that are tried past the page cache.
        buffered: whether the page cache is measured too.
    """

    def __init__(self, file: TestFile, in_flight: tuple[int, ...], buffered: bool):
        self._file = file
        self._in_flight = in_flight
        self._buffered = buffered

    def trial(self) -> Iterator[tuple[str, float]]:
        """Bytes per second, and seconds of processor time per byte.

        Processor time is that of the process, its threads and the kernel on their behalf, but not of the kernel's own
        threads, which write the page cache back.
        """
        for direction, move in (("read", self._read), ("write", self._write)):
            if self._file.direct.is_direct:
                for count in self._in_flight:
                    with ThreadPoolExecutor(count) as pool:
                        yield from self._rates(f"{direction}/direct/{count}", self._file.direct, move, pool)
            if self._buffered or not self._file.direct.is_direct:
                yield from self._rates(f"{direction}/buffered/1", self._file.buffered, move, None)
        if self._file.direct.is_direct:
            yield from self._both(self._in_flight[0])

    def missing(self) -> dict[str, str]:
        """Names of rates that cannot be measured here, with the reason."""
        if self._file.direct.refusal is None:
            return {}
        reason = "the file system of the test file refuses O_DIRECT"
        names = [
            f"{kind}/{direction}/direct/{count}"
            for kind in ("disk", "disk_cpu")
            for direction in ("read", "write")
            for count in self._in_flight
        ]
        names += [f"disk_both/{direction}/direct/{self._in_flight[0]}" for direction in ("read", "write")]
        return dict.fromkeys(names, reason)

    def _rates(self, name: str, file: DirectFile, move: Move, pool: Executor | None) -> Iterator[tuple[str, float]]:
        self._file.shuffle()
        if not file.is_direct:
            file.drop_cache()
        started, started_cpu = time.perf_counter(), time.process_time()
        for start, part in self._file.parts():
            move(file, start, part, pool)
        if not file.is_direct:
            file.sync()  # what waits in the page cache was not written yet
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        yield f"disk/{name}", self._file.nbytes / seconds
        yield f"disk_cpu/{name}", max(cpu_seconds, 1e-9) / self._file.nbytes

    def _both(self, count: int) -> Iterator[tuple[str, float]]:
        """Bytes per second read, and written, while both go on, each with so many requests in flight.

        The first half of the file is read and the second written, until one of the two is through.
        """
        size, memory = self._file.nbytes, self._file.memory
        middle, at_once = whole_pages(size // 2), len(memory) // 2 // PAGE * PAGE
        self._file.shuffle()
        through = threading.Event()
        moved = {"read": 0, "write": 0}

        def pass_over(direction: str, start: int, stop: int, move: Move, passing: Tensor) -> None:
            with ThreadPoolExecutor(count) as pool:
                for at in range(start, stop, len(passing)):
                    if through.is_set():
                        return
                    part = passing[: stop - at]
                    move(self._file.direct, at, part, pool)
                    moved[direction] += len(part)
            through.set()

        halves = (
            ("read", 0, middle, self._read, memory[:at_once]),
            ("write", middle, size, self._write, memory[at_once : 2 * at_once]),
        )
        started = time.perf_counter()
        with ThreadPoolExecutor(len(halves)) as both:
            for done in [both.submit(pass_over, *half) for half in halves]:
                done.result()
        seconds = time.perf_counter() - started
        for direction, nbytes in moved.items():
            yield f"disk_both/{direction}/direct/{count}", max(nbytes, 1) / seconds

    def _read(self, file: DirectFile, start: int, part: Tensor, pool: Executor | None) -> None:
        file.read(part, start, pool)

    def _write(self, file: DirectFile, start: int, part: Tensor, pool: Executor | None) -> None:
        file.write(start, part, pool)
