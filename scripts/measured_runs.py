"""Runs of `python -m flexgen_h2o.run`, each in a process of its own, for scripts that compare them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def measured_run(words: Sequence[str], memory: str | None = None) -> dict[str, Any]:
    """The report of one run.

    Args:
        words: the command's arguments beside --json.
        memory: which it may use, as scripts/limit.sh takes it; None for all there is.
    Raises RuntimeError with what the run has said if it fails.
    """
    command = [sys.executable, "-m", "flexgen_h2o.run", *words, "--json"]
    if memory is not None:
        command = ["bash", str(ROOT / "scripts" / "limit.sh"), memory, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        raise RuntimeError(next((line for line in said if line.startswith("error: ")), said[-1]))
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def command_of(words: Sequence[str], memory: str | None = None) -> str:
    """The same run as people type it."""
    limit = "" if memory is None else f"bash scripts/limit.sh {memory} -- "
    return f"{limit}python -m flexgen_h2o.run {' '.join(words)}"
