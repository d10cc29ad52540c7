"""Metrics of a running job: Prometheus text, replaced as a whole, and never a reason for a job to fail."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import refused_once
from support.jobs import Job, new_job

from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.jobs import pace as pace_module
from flexgen_h2o.jobs.job import BatchJob
from flexgen_h2o.jobs.pace import Pace
from flexgen_h2o.jobs.record import Progress

ARGV = "--gpu-batch-size 2 --num-gpu-batches 1 --gen-len 6 --ignore-eos --hh-size 2 --recent-size 2".split()


def read_metrics(path: Path) -> dict[str, float]:
    """Every sample of a file, by name and labels, as the package's own parser reads it."""
    parser = pytest.importorskip("prometheus_client.parser")
    samples = [
        sample for family in parser.text_string_to_metric_families(path.read_text()) for sample in family.samples
    ]
    return {
        "".join([sample.name.removeprefix("flexgen_h2o_"), *sample.labels.values()]): sample.value for sample in samples
    }


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return new_job(tmp_path / "job", 9, [*ARGV, "--metrics", str(tmp_path / "run.prom")])


def test_the_last_numbers_are_those_of_the_report(job: Job, tmp_path: Path) -> None:
    report = job.run("--json").report
    metrics = read_metrics(tmp_path / "run.prom")
    assert (metrics["prompts_done_total"], metrics["prompts_failed_total"], metrics["prompts"]) == (7, 2, 7)
    assert metrics["tokens_total"] == report["generated_tokens"] == 42
    assert metrics["evictions_total"] == report["eviction"]["evictions"] > 0
    assert metrics["eta_seconds"] == 0 and metrics["tokens_per_second"] > 0
    assert metrics["tier_peak_bytescpu"] == report["memory"]["ledger_peak_bytes"]["cpu"] > 0
    assert metrics["tier_bytesdisk"] == 0
    assert [path.name for path in tmp_path.glob("run.prom*")] == ["run.prom"]


def test_numbers_move_while_the_job_runs(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, float]] = []
    report = BatchJob._report

    def watched(self: BatchJob, pace: Pace, now: bool = False) -> None:
        report(self, pace, now=True)
        seen.append(read_metrics(tmp_path / "run.prom"))

    monkeypatch.setattr(BatchJob, "_report", watched)
    assert job.run().code == 0
    for name in ("prompts_done_total", "tokens_total", "prompts_failed_total"):
        values = [metrics[name] for metrics in seen]
        assert values == sorted(values) and len(set(values)) > 1, name
    assert all(metrics["eta_seconds"] > 0 for metrics in seen[:-2])


def test_a_job_that_goes_on_counts_what_was_done_before(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = Engine.run, iter(range(100))

    def two_blocks(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", two_blocks)
        job.run()
    job.run()
    metrics = read_metrics(tmp_path / "run.prom")
    assert (metrics["prompts_done_total"], metrics["tokens_total"]) == (7, 3 * 6)


def test_metrics_that_cannot_be_written_do_not_end_the_job(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flexgen_h2o.jobs.metrics.replace_file", full)
    finished = job.run()
    assert finished.code == 0
    assert finished.err.count("no metrics from here on, they cannot be written: No space left on device") == 1


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    problem = refused_once("--gen-len", "1", "--metrics", str(tmp_path / "run.prom"))
    assert "prometheus-client" in problem and "flexgen_h2o[metrics]" in problem


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    assert "--metrics" in refused_once("--metrics", str(tmp_path / "no" / "run.prom"))


# --- pace -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock."""
    clock = [0.0]
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: clock[0])
    return lambda now: clock.__setitem__(0, now)


def test_pace_by_hand(at: Callable[[float], None]) -> None:
    """20 of 100 prompts were done before; ten more take 50 s, so that the other 70 take 350 s."""
    pace = Pace(100, Progress(lines=25, failed=5), gen_len=4)
    assert pace.eta_s is None and pace.served == 20
    at(25.0)
    pace.tokens(20)
    assert pace.prompts == pytest.approx(25) and pace.tokens_per_s == pytest.approx(0.8)
    at(50.0)
    pace.tokens(20)
    pace.block_done(Progress(lines=36, failed=6))
    assert pace.prompts == pytest.approx(30) and pace.eta_s == pytest.approx(350)


def test_pace_of_who_knows_how_many(at: Callable[[float], None]) -> None:
    pace = Pace(None, Progress(), gen_len=4)
    pace.tokens(8)
    at(2.0)
    assert pace.eta_s is None and pace.prompts == 2 and math.isclose(pace.tokens_per_s, 4)
