"""Bandwidth of a memory: read, and copied from one place of it to another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flexgen_h2o.profiling.timing import Stopwatch, compute_threads, fill
from flexgen_h2o.workspace import Workspace


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
