"""Long runs: nothing creeps up, and fifty kills lose nothing. All slow; scripts/soak.sh sets for how long.

SOAK_SECONDS (default 60) is how long memory is watched, KILLS (default 50) how often a job is killed.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.jobs import ON_DISK, kill, new_job

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.plan.placement import Percent

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
KILLS = int(os.environ.get("KILLS", "50"))

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Held:
    """What this process holds of the system."""

    resident: int
    descriptors: int
    threads: int


def held() -> Held:
    gc.collect()
    process = psutil.Process()
    return Held(process.memory_info().rss, process.num_fds(), threading.active_count())


PLACEMENTS = {
    "memory": {"gpu_batch_size": 4},
    "disk": {"gpu_batch_size": 2, "num_gpu_batches": 2, "percent": Percent(50, 0, 30, 0, 50, 0)},
    "4 bits": {"gpu_batch_size": 4, "compress_cache": True, "compress_weight": True},
}


def call(numbers: random.Random, folder: Path, placement: str) -> None:
    """One model, made, used for a few calls of mixed lengths, and closed."""
    settings = PLACEMENTS[placement]
    eviction = numbers.choice(("h2o", "full", "local", "sink"))
    with LLM(eviction=eviction, offload_dir=folder / "offload", **settings) as llm:  # type: ignore[arg-type]
        for _ in range(numbers.randrange(1, 5)):
            prompts = [
                [numbers.randrange(4, 4000) for _ in range(numbers.randrange(1, 200))]
                for _ in range(numbers.randrange(1, 10))
            ]
            params = SamplingParams(numbers.randrange(1, 24), do_sample=numbers.random() < 0.5, top_k=5)
            assert len(llm.generate(prompts, params)) == len(prompts)


def test_nothing_creeps_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is within 1 % of what it was after a first fifth; descriptors and threads are as many."""
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / ".cache"))
    own_seed, began = time.time_ns(), time.monotonic()
    numbers, seen = random.Random(own_seed), [held()]
    print(f"seed {own_seed}")
    while time.monotonic() - began < SOAK_SECONDS or len(seen) < 60:
        for placement in PLACEMENTS:
            call(numbers, tmp_path, placement)
        seen.append(held())
    fifth = len(seen) // 5
    settled = seen[fifth]
    # Medians: single moments vary by a few megabytes.
    before, after = (
        statistics.median(now.resident for now in part) for part in (seen[fifth : 2 * fifth], seen[-fifth:])
    )
    print(f"{len(seen)} rounds, resident {before / 2**20:.1f} and {after / 2**20:.1f} MB, {settled}, {seen[-1]}")
    assert after < 1.01 * before
    assert seen[-1].descriptors <= settled.descriptors and seen[-1].threads <= settled.threads
    assert list((tmp_path / "offload").glob("*")) == []


def test_fifty_kills_lose_nothing(tmp_path: Path) -> None:
    """A job of 200 prompts, with KV and weights partly on disk, that is killed at random moments."""
    argv = [*ON_DISK, *"--gen-len 96 --ignore-eos --checkpoint-minutes 0.003".split()]
    job, other = new_job(tmp_path / "job", 200, argv), new_job(tmp_path / "other", 200, argv)
    process = other.start()
    process.communicate()
    assert process.returncode == 0
    own_seed = time.time_ns()
    killed, rounds = 0, 0
    while killed < KILLS:
        killed += kill(job, KILLS - killed, longest_s=6, seed=own_seed + rounds)
        if killed < KILLS:  # it is done: begin again
            assert job.output.read_bytes() == other.output.read_bytes() and job.leftovers() == []
            job.output.unlink()
            rounds += 1
    print(f"seed {own_seed}: {killed} kills, done {rounds} times before")
    process = job.start()
    _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    assert job.output.read_bytes() == other.output.read_bytes()
    assert job.leftovers() == []
