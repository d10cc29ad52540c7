"""scripts/warm_run.py: what its report is of."""

from __future__ import annotations

import sys

import pytest
from support.commands import ROOT, call

sys.path.insert(0, str(ROOT / "scripts"))

import warm_run

from flexgen_h2o.engine.loop import Engine

ARGV = "--prompt-len 12 --gen-len 3 --gpu-batch-size 2 --num-gpu-batches 2 --percent 100 0 100 0 100 0".split()


def test_the_report_is_of_the_second_of_two_generations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = Engine.run, []

    def counted(*arguments: object) -> object:
        runs.append(run(*arguments))  # type: ignore[arg-type]
        return runs[-1]

    monkeypatch.setattr(Engine, "run", counted)
    report = call(warm_run, [*ARGV, "--ignore-eos"]).report
    assert (report["num_prompts"], report["generated_tokens"], len(runs)) == (4, 12, 2)
    assert report["prefill_s"] == runs[1].prefill_s


def test_what_it_cannot_do_is_refused() -> None:
    assert "give --prompt-len and --percent" in call(warm_run, ["--prompt-len", "12"]).problems[0]
