"""Jobs of the demo model from one file to another, in this process and in true ones that may be killed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.jobs.saved_block import BlockCheckpoint
from support.commands import Finished, environment, run, write_jsonl

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
# KV and weights partly on disk; blocks of 2 x 2 rows.
ON_DISK = "--percent 50 0 40 0 60 0 --gpu-batch-size 2 --num-gpu-batches 2".split()


@dataclass(frozen=True)
class Job:
    """One command, in a folder of its own that holds all that it reads and writes.

    Attributes:
        folder: has the input; HOME of true processes, so that the cache of weights lies there too.
        argv: flags beside --input and --output.
    """

    folder: Path
    argv: Sequence[str] = field(default=("--gpu-batch-size", "2", "--num-gpu-batches", "1", "--gen-len", "6"))

    @property
    def input(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def side_file(self) -> Path:
        return self.folder / "out.jsonl.job"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "out.jsonl.checkpoint"

    @property
    def command(self) -> list[str]:
        files = ["--input", str(self.input), "--output", str(self.output)]
        return [*files, "--offload-dir", str(self.folder / "offload"), *self.argv]

    def run(self, *more: str) -> Finished:
        """Runs the command in this process."""
        return run(*self.command, *more)

    def start(self) -> subprocess.Popen[bytes]:
        """The command as a true process."""
        return subprocess.Popen(
            # A hardware file, lest every folder measure the machine anew.
            [sys.executable, "-m", "flexgen_h2o.run", *self.command, "--hardware", "amd-epyc-2-cores"],
            env={**environment(), "HOME": str(self.folder)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def has_lines(self, count: int) -> bool:
        """Whether so many lines are written."""
        return self.output.exists() and self.output.read_bytes().count(b"\n") >= count

    def leftovers(self) -> list[str]:
        """What is in the folder beside input, output, side file and the cache of weights."""
        declared = {"in.jsonl", "out.jsonl", "out.jsonl.job", ".cache", "offload"}
        found = [path.name for path in self.folder.iterdir() if path.name not in declared]
        found += [f"offload/{path.name}" for path in (self.folder / "offload").glob("*")]
        # Half an index, of which there is at most one, is replaced when the next is written.
        return found + [str(path) for path in self.folder.glob(".cache/**/*") if path.name.startswith((".", "tmp"))]


def new_job(folder: Path, count: int = 9, argv: Sequence[str] | None = None, seed: int = 0) -> Job:
    """A job of prompts of mixed lengths, some of which cannot be served."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed)
    lines: list[object] = []
    for number in range(count):
        length = numbers.randrange(1, 24)
        ids = [2, *(numbers.randrange(10, 4000) for _ in range(length))]
        lines.append({"id": f"prompt {number}", "prompt_ids": [5000] if number % 5 == 3 else ids})
    write_jsonl(folder / "in.jsonl", lines)
    return Job(folder) if argv is None else Job(folder, argv)


def interrupt_in_block(job: Job, steps: int, monkeypatch: pytest.MonkeyPatch) -> Finished:
    """Runs a job until this many steps have been saved."""
    save, calls = BlockCheckpoint.step_done, iter(range(1, 1000))

    def save_some(*arguments: Any) -> None:
        save(*arguments)
        if next(calls) == steps:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BlockCheckpoint, "step_done", save_some)
        finished = job.run()
    assert finished.code == 130 and job.checkpoint.is_dir()
    return finished


def kill(job: Job, times: int, longest_s: float, seed: int) -> int:
    """Starts a job again and again, and kills it at random moments. Returns how often it was killed before it was done.

    Args:
        longest_s: until it is killed.
    """
    moments = random.Random(seed)
    for killed in range(times):
        process = job.start()
        try:
            _, said = process.communicate(timeout=moments.uniform(0, longest_s))
            assert process.returncode == 0, said.decode()
            return killed
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    return times
