"""The sweep and its report as a user runs them, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, environment

from flexgen_h2o.bench.published_models import write_checkpoint
from flexgen_h2o.models.opt_config import OptConfig

TINY = OptConfig(
    "tiny",
    vocab_size=104,
    hidden_size=64,
    word_embed_proj_dim=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=128,
    max_position_embeddings=64,
).shape()


def test_a_sweep_and_its_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_checkpoint(TINY, "float32", tmp_path / "tiny")
    records, folder = tmp_path / "sweep.jsonl", tmp_path / "report"
    words = ["--model", str(tmp_path / "tiny"), "--dtype", "float32", "--threads", "1", "--lengths", "8+4"]
    words += ["--engines", "flexgen_h2o,transformers", "--budget", "0.5", "--batch", "2", "--trials", "2"]
    bench = [sys.executable, "-m", "flexgen_h2o.bench"]
    env = environment()
    subprocess.run([*bench, "sweep", *words, "--output", str(records)], check=True, cwd=ROOT, env=env)
    kept = [json.loads(line) for line in records.read_text().splitlines()]
    assert [r["status"] for r in kept] == ["ok"] * 4
    assert all(
        r["kind"] == "measurement" and r["command"].startswith("python -m flexgen_h2o.bench sweep") for r in kept
    )
    # Greedy tokens of the full prompt agree between engines for the first step at least.
    firsts = {r["config"]["engine"]: r["first_tokens"][0] for r in kept if r["status"] == "ok"}
    assert firsts["flexgen_h2o"] == firsts["transformers"]
    done = subprocess.run([*bench, "report", str(records), "--output", str(folder)], cwd=ROOT, env=env, check=True)
    assert done.returncode == 0
    text = (folder / "report.md").read_text()
    assert "flexgen_h2o, h2o 50 %" in text and "transformers" in text
    assert {path.name for path in folder.iterdir()} >= {"report.md", "index.html", "throughput-1.svg", "steps-1.svg"}
