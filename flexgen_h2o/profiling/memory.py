"""Bandwidth of a memory: read, copied from one place of it to another, and written where it is new."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flexgen_h2o.memory.direct_io import aligned_bytes
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.profiling.timing import Stopwatch, compute_threads, fill


@dataclass(frozen=True)
class Memory:
    """A memory's bandwidths, as a subject.

    Attributes:
        nbytes: read in a trial; half of them are copied to the other half.
        thread_counts: of the host, with which a CPU is measured; (1,) for a GPU.
    """

    nbytes: int
    thread_counts: tuple[int, ...]
    workspace: Workspace
    stopwatch: Stopwatch

    def trial(self) -> Iterator[tuple[str, float]]:
        """Bytes per second that a sum reads, and that a copy copies."""
        device = self.stopwatch.device.type
        with self.workspace.frame():
            numbers = fill(self.workspace.take((2, self.nbytes // 8), torch.float32))
            works: dict[str, Callable[[], object]] = {
                "read": numbers.sum,
                "copy": lambda: numbers[1].copy_(numbers[0]),
            }
            for threads in self.thread_counts:
                with compute_threads(threads):
                    for kind, work in works.items():
                        nbytes = numbers.nbytes if kind == "read" else numbers[0].nbytes
                        name = f"memory/{device}/{kind}/{threads}"
                        yield name, nbytes / self.stopwatch.seconds(name, work)


class NewMemory:
    """How fast host memory is written that was just allocated, as the engine does it, as a subject.

    The kernel clears its pages first, and on a virtual machine may have to ask for them. As it finds at once what has
    just been given back, all is written when this is made, before other subjects take memory and give it back.

    Args:
        nbytes: written in a trial.
        trials: how many there will be.
        threads: that write.
    """

    def __init__(self, nbytes: int, trials: int, threads: int):
        kept, self._rates = [], []
        for _ in range(trials):
            started = time.perf_counter()
            kept.append(aligned_bytes(nbytes).fill_(1))
            self._rates.append(nbytes / (time.perf_counter() - started))
        self._threads = threads

    def trial(self) -> Iterator[tuple[str, float]]:
        """Bytes per second."""
        yield f"memory/cpu/new/{self._threads}", self._rates.pop()
