"""Trials: how long something takes, how often it is tried, and what is made of the results.

A shared machine has slow phases of seconds. So a rate's trials do not follow one another: every pass over all subjects
makes one trial of each rate, and a slow phase hits a few trials of many rates instead of all trials of one.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.search.rates import Rate, unit_of

TILE_ELEMENTS = 2**20


class Stopwatch:
    """Times work on a device; on CUDA with events, so that what is timed is the device's time.

    Args:
        least_s: work that is shorter is repeated until it takes this long.
    """

    def __init__(self, device: torch.device, least_s: float):
        self.device = device
        self._least_s = least_s
        self._repeats: dict[str, int] = {}

    def seconds(self, name: str, work: Callable[[], object]) -> float:
        """Seconds of one call of `work`, the mean of as many as it takes.

        The first call for a name, which warms up, finds out how many; its result is to be discarded.
        """
        if name not in self._repeats:
            work()
            once = self._time(work, 1)
            self._repeats[name] = max(1, round(self._least_s / max(once, 1e-7)))
            return once
        return self._time(work, self._repeats[name])

    def _time(self, work: Callable[[], object], repeats: int) -> float:
        if self.device.type == "cuda":
            return self._time_on_cuda(work, repeats) / repeats
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - started) / repeats

    def _time_on_cuda(self, work: Callable[[], object], repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record(torch.cuda.current_stream(self.device))
        for _ in range(repeats):
            work()
        end.record(torch.cuda.current_stream(self.device))
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        title: for people.
        trial: one trial of each of the subject's rates: (name, value) as they are found.
    """

    title: str
    trial: Callable[[], Iterator[tuple[str, float]]]


Advance = Callable[[str, int, int], object]  # (what is about to be measured, how much is done, of how much)


def collect(subjects: Sequence[Subject], trials: int, advance: Advance) -> dict[str, Rate]:
    """Measures all subjects in turn, `trials` times after a first pass that is discarded."""
    samples: dict[str, list[float]] = {}
    for number in range(trials + 1):
        for index, subject in enumerate(subjects):
            advance(subject.title, number * len(subjects) + index, (trials + 1) * len(subjects))
            for name, value in subject.trial():
                if number:
                    samples.setdefault(name, []).append(value)
    return {name: summarise(name, values) for name, values in samples.items()}


def summarise(name: str, values: Sequence[float]) -> Rate:
    """The median of trials, and their interquartile range over it as the spread; to the digits that mean something."""
    unit = unit_of(name)
    assert unit is not None, name
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Rate(float(f"{median:.5g}"), unit, spread=round((high - low) / median, 4), trials=len(values))


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Has torch compute with so many threads for as long as the context lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fill(tensor: Tensor) -> Tensor:
    """Fills a contiguous tensor with normally distributed numbers, the same each time; they repeat after a while."""
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(min(TILE_ELEMENTS, tensor.numel()), generator=generator).to(tensor.device, tensor.dtype)
    for part in tensor.view(-1).split(len(tile)) if len(tile) else ():
        part.copy_(tile[: len(part)])
    return tensor
