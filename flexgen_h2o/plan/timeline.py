"""What every resource of a run was busy with, and when.

A lane is a resource: "compute", or a link of memory/transfer.py. Sums are always kept; single spans only for a trace.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STALL = "waiting"  # the lane of compute's waits for copies


@dataclass(frozen=True)
class Span:
    """A piece of work of one lane; times are seconds of time.perf_counter()."""

    lane: str
    work: object  # str() of it is its name
    start_s: float
    end_s: float


class Timeline:
    """Busy seconds by lane, from any thread.

    Args:
        keeps_spans: also keep every span, for write_trace().
    """

    def __init__(self, keeps_spans: bool = False):
        self.busy_s: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self._keeps_spans = keeps_spans
        self._adding = threading.Lock()

    @contextmanager
    def span(self, lane: str, work: object) -> Iterator[None]:
        """A lane is busy for as long as the context lasts."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, work, started, time.perf_counter())

    def add(self, lane: str, work: object, start_s: float, end_s: float) -> None:
        """Notes that a lane was busy."""
        with self._adding:
            self.busy_s[lane] += end_s - start_s
            if lane == STALL:  # inside a piece of computation, which was not busy meanwhile
                self.busy_s["compute"] -= end_s - start_s
            if self._keeps_spans:
                self.spans.append(Span(lane, work, start_s, end_s))

    def busy_now(self) -> dict[str, float]:
        """A copy of the sums."""
        with self._adding:
            return dict(self.busy_s)


def write_trace(path: Path, spans: list[Span]) -> None:
    """Writes spans as a trace for Perfetto or chrome://tracing (the Trace Event Format), a thread per lane."""
    lanes = sorted({span.lane for span in spans})
    first = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(lanes, start=1)
    ]
    for span in sorted(spans, key=lambda span: span.start_s):
        events.append(
            {
                "ph": "X",
                "name": str(span.work),
                "pid": 1,
                "tid": lanes.index(span.lane) + 1,
                "ts": (span.start_s - first) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
