"""What was busy when: sums, spans, and the trace that a run writes."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.commands import call

from flexgen_h2o import run as run_command
from flexgen_h2o.memory.transfer import InlineTransfer, ThreadTransfer
from flexgen_h2o.plan.timeline import STALL, Span, Timeline, write_trace


def test_waits_inside_a_computation_are_not_busy() -> None:
    timeline = Timeline()
    timeline.add(STALL, "x", 1.0, 1.75)
    timeline.add("compute", "y", 0.5, 2.5)
    assert timeline.busy_now() == {STALL: 0.75, "compute": 1.25}
    assert timeline.spans == []


def test_spans_are_kept_where_asked_for() -> None:
    timeline = Timeline(keeps_spans=True)
    with pytest.raises(KeyError), timeline.span("disk_read", "page 3"):
        raise KeyError
    (span,) = timeline.spans
    assert (span.lane, span.work) == ("disk_read", "page 3") and span.end_s >= span.start_s


@pytest.mark.parametrize("make", [InlineTransfer, ThreadTransfer])
def test_links_are_busy_while_they_work_and_not_while_they_wait(make: Any) -> None:
    transfer = make(timeline=Timeline(keeps_spans=True))
    slow = transfer.submit("disk_read", lambda: time.sleep(0.05), what="slow")
    transfer.submit("h2d", lambda: None, [slow], what="after").wait()
    transfer.drain()
    transfer.close()
    spans = {span.work: span for span in transfer.timeline.spans if span.lane != STALL}
    assert spans["slow"].end_s - spans["slow"].start_s >= 0.05
    assert spans["after"].start_s >= spans["slow"].end_s


def test_only_compute_stalls() -> None:
    waiting = threading.Event()

    class Noting(Timeline):
        def span(self, lane: str, work: object) -> AbstractContextManager[None]:
            if lane == STALL:
                waiting.set()
            return super().span(lane, work)

    transfer = ThreadTransfer(timeline=Noting())
    first = transfer.submit("disk_read", lambda: time.sleep(0.05))
    transfer.submit("host", lambda: None, [first])
    transfer.drain()
    assert STALL not in transfer.timeline.busy_now()
    transfer.submit("disk_read", lambda: waiting.wait(60)).wait()  # not done before it is waited for
    transfer.close()
    assert transfer.timeline.busy_now()[STALL] > 0


def test_sums_are_exact_from_many_threads() -> None:
    timeline = Timeline()
    adders = [
        threading.Thread(target=lambda: [timeline.add("h2d", "", 0.0, 1.0) for _ in range(500)]) for _ in range(8)
    ]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert timeline.busy_now() == {"h2d": 4000.0}


def test_a_trace_has_a_named_thread_for_every_lane(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [Span("b", "two", 11.0, 11.5), Span("a", "one", 10.0, 12.0)])
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [("a", "one", 0.0, 2e6), ("b", "two", 1e6, 0.5e6)]


def test_a_run_that_streams_weights_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "weights"))
    path = tmp_path / "trace.json"
    argv = ["--percent", "0", "0", "100", "0", "100", "0", "--gen-len", "3", "--trace", str(path), "--json"]
    finished = call(run_command, argv)
    report = finished.report
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    busy: dict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            busy[lanes[event["tid"]]] += event["dur"] / 1e6
    assert {"compute", "disk_read"} <= set(busy)
    assert any(event["name"].startswith("Project(layer=3") for event in events)
    phases = report["phases"].values()
    reported = sum(phase["busy_s"]["compute"] for phase in phases)
    assert reported == pytest.approx(busy["compute"] - busy[STALL], rel=0.01, abs=1e-3)
    assert reported <= report["total_s"] * 1.01
    assert report["io"]["disk_read_bytes"] > 0


@pytest.mark.parametrize("refused", [False, True])
def test_the_report_says_how_files_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "weights"))
    if refused:
        real = os.open

        def open_without_direct(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(path, flags, *rest, **named)

        monkeypatch.setattr("flexgen_h2o.memory.direct_io.os.open", open_without_direct)
    report = call(run_command, ["--percent", "0", "0", "100", "0", "100", "0", "--gen-len", "2", "--json"]).report
    said = report["kernels"]["disk"]
    assert ("cannot be used with O_DIRECT" in said) is refused or said != "O_DIRECT"
    assert call(run_command, ["--gen-len", "2", "--json"]).report["kernels"]["disk"] is None


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    finished = call(run_command, ["--trace", str(tmp_path / "nowhere" / "trace.json")])
    assert finished.code == 2 and "--trace" in finished.problems[0]
