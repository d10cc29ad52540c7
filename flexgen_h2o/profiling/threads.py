"""How many threads should compute while one more streams: products beside a thread that reads a disk or copies memory.

A stream takes processor time and memory bandwidth from the products. With a thread less to compute with it need not
wait for a processor. Which is better depends on the machine.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flexgen_h2o.memory.direct_io import REQUEST_BYTES
from flexgen_h2o.memory.extents import host_bytes
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.profiling.disk import TestFile
from flexgen_h2o.profiling.gemm import Products, WeightSet
from flexgen_h2o.profiling.timing import compute_threads
from flexgen_h2o.search.rates import Rate

ROWS = 32
# Scores that differ by less are taken as equal; then more threads compute.
TIE = 0.05

Step = Callable[[int], int]  # (its number) -> bytes moved


class Stream(threading.Thread):
    """Moves bytes, step by step, until the context ends. Errors are raised there."""

    def __init__(self, step: Step):
        super().__init__(name="profile-stream", daemon=True)
        self.moved = 0
        self._step = step
        self._moving = threading.Event()
        self._stopping = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        number = 0
        try:
            while not self._stopping.is_set():
                self.moved += self._step(number)
                number += 1
                self._moving.set()
        except BaseException as error:  # whatever it is, it belongs to whoever wanted the stream
            self._error = error
        finally:
            self._moving.set()

    def __enter__(self) -> "Stream":
        self.start()
        self._moving.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()
        if self._error is not None:
            raise self._error


def disk_step(file: TestFile) -> Step:
    """Reads the test file a request at a time, over and over."""
    requests = max(1, file.nbytes // REQUEST_BYTES)
    target = file.memory[: min(REQUEST_BYTES, file.nbytes)]

    def step(number: int) -> int:
        file.direct.read(target, number % requests * REQUEST_BYTES)
        return target.nbytes

    return step


def copy_step(file: TestFile) -> Step:
    """Copies the file's memory in half, a request's bytes at a time; numpy, which copies with one thread."""
    memory = host_bytes(file.memory)
    half = len(memory) // 2
    size = min(REQUEST_BYTES, half)

    def step(number: int) -> int:
        start = number % (half // size) * size
        memory[half + start : half + start + size] = memory[start : start + size]
        return size

    return step


@dataclass(frozen=True)
class ThreadSplit:
    """Products and a stream at once, as a subject.

    Attributes:
        candidates: numbers of compute threads.
        seconds: how long one trial of one candidate lasts.
        workspace: in host memory.
        file: what is streamed; its memory is what is copied.
    """

    candidates: tuple[int, ...]
    seconds: float
    weights: WeightSet
    workspace: Workspace
    file: TestFile

    def trial(self) -> Iterator[tuple[str, float]]:
        """FLOP/s of products and bytes per second of the stream beside them, by stream and threads."""
        steps = {"copy": copy_step(self.file)}
        if self.file.direct.is_direct:
            steps["disk"] = disk_step(self.file)
        with self.workspace.frame():
            products = Products(self.weights, ROWS, self.workspace)
            for threads in self.candidates:
                for stream, step in steps.items():
                    with compute_threads(threads):
                        flops, moved = self._both(products, step)
                    yield f"threads/{threads}/{stream}/gemm", flops
                    yield f"threads/{threads}/{stream}/stream", moved

    def _both(self, products: Products, step: Step) -> tuple[float, float]:
        """FLOP/s and bytes per second while both run."""
        with Stream(step) as stream:
            products.multiply(ROWS)  # the threads are there, and the stream runs
            moved, started, count = stream.moved, time.perf_counter(), 0
            while (elapsed := time.perf_counter() - started) < self.seconds:
                products.multiply(ROWS)
                count += 1
            moved = stream.moved - moved
        return count * products.flops(ROWS) / elapsed, max(moved, 1) / elapsed


def candidates(cores: int) -> tuple[int, ...]:
    """Numbers of compute threads worth trying beside a stream."""
    return tuple(sorted({max(1, count) for count in (cores, cores - 1, cores // 2)}, reverse=True))


def best_threads(rates: Mapping[str, Rate]) -> int | None:
    """The number of compute threads with the largest product of both rates: neither may be bought with the other.

    The stream is the disk's where that was measured, else the copy's; None if neither was.
    """
    scores: dict[str, dict[int, float]] = {"disk": {}, "copy": {}}
    for name, rate in rates.items():
        kind, *rest = name.split("/")
        if kind == "threads" and rest[2] == "gemm":
            stream = rates[f"threads/{rest[0]}/{rest[1]}/stream"]
            scores[rest[1]][int(rest[0])] = rate.value * stream.value
    found = scores["disk"] or scores["copy"]
    best = max(found.values(), default=0.0)
    return max((threads for threads, score in found.items() if score >= (1 - TIE) * best), default=None)
