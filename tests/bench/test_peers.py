"""Processes of engines: whatever happens to one is a row, and nothing stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import ROOT, environment

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench import peers
from flexgen_h2o.bench.drivers.common import random_prompts
from flexgen_h2o.bench.peers import PeerJob, PeerProcess, alternate, run_peer
from flexgen_h2o.bench.rows import STATUSES

# What is left of control groups is looked at, whoever made them.
pytestmark = pytest.mark.xdist_group("control groups")
WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"
LIMIT = ["bash", str(ROOT / "scripts" / "limit.sh")]
VOCAB_SIZE = 100
DRIVER_COMMAND = peers.driver_command


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No process, file or control group of any test here outlives it."""
    groups = set(Path("/sys/fs/cgroup").rglob("limit-*"))
    before = set(psutil.Process().children(recursive=True))  # other tests may have started Python's resource tracker
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])] == []
    offload = tmp_path / "offload"
    assert not offload.exists() or list(offload.iterdir()) == []
    # A script that was killed has its group removed by what outlives it, in its own time.
    for _ in range(100):
        if set(Path("/sys/fs/cgroup").rglob("limit-*")) <= groups:
            break
        time.sleep(0.1)
    assert set(Path("/sys/fs/cgroup").rglob("limit-*")) <= groups


def job(tmp_path: Path, does: str = "answer", when: str = "loading", **changes: Any) -> PeerJob:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    options = {"does": does, "when": when}
    values: dict[str, Any] = {"threads": 1, "offload_dir": tmp_path / "offload", "timeout_s": 30.0, "options": options}
    return PeerJob("fake", checkpoint, batch=2, prompt_len=3, gen_len=6, **{**values, **changes})


def command(asked: PeerJob) -> list[str]:
    """The command of a real engine, with the fake one in its place."""
    words = DRIVER_COMMAND(replace(asked, engine="transformers"))
    return [words[0], str(WORKER), "fake", *words[4:]]


def row_of(asked: PeerJob) -> dict[str, Any]:
    row = run_peer(asked, command(asked))
    assert row["status"] in STATUSES
    json.dumps(row)  # plain data
    return row


def test_an_engine_that_answers_gives_times_usage_and_medians(tmp_path: Path) -> None:
    row = row_of(job(tmp_path, repeats=3))
    assert row["status"] == "ok" and row["sentence"] == "3 generations of 2 x 6 tokens"
    assert len(row["repeats"]) == 3 and row["engine"] == "fake" and row["checkpoint"] == "model"
    assert row["versions"]["numpy"] and row["versions"]["no-such-package"] is None
    for run in row["repeats"]:
        assert (run["prefill_s"], run["decode_s"], run["generated_tokens"]) == (0.25, 0.5, 12)
        assert run["peak_anonymous_bytes"] > 2**20 and run["cpu_user_s"] >= 0 and run["disk_read_bytes"] >= 0
    assert row["median"] == {
        "prefill_s": 0.25,
        "decode_s": 0.5,
        "total_s": 0.75,
        "throughput_tok_s": 16.0,  # 2 x 6 tokens in 0.75 s
        "decode_tok_s": 20.0,  # 2 x 5 in 0.5 s
    }


def test_all_engines_get_the_same_prompts(tmp_path: Path) -> None:
    row = row_of(job(tmp_path))
    prompts = random_prompts(1234, 2, 3, VOCAB_SIZE)
    assert row["repeats"][0]["first_tokens"] == [(int(prompts[0].sum()) + step) % VOCAB_SIZE for step in range(6)]
    assert prompts.shape == (2, 3) and prompts.min() >= 4 and prompts.max() < VOCAB_SIZE


@pytest.mark.parametrize("when", ["loading", "generating"])
@pytest.mark.parametrize(
    ("does", "status", "part"),
    [
        ("refuse", "refused", "fake cannot do that"),
        ("lack", "absent", "fake is not installed: pip install flexgen_h2o[bench]"),
        ("fail_to_allocate", "out_of_memory", "an allocation failed: no room for 8 bytes"),
        ("crash", "failed", "IndexError: list index out of range"),
        ("exit_silently", "failed", "ended with code 3 while {when}: about to go"),
    ],
)
def test_what_goes_wrong_is_a_row(tmp_path: Path, when: str, does: str, status: str, part: str) -> None:
    row = row_of(job(tmp_path, does, when))
    assert (row["status"], row["sentence"]) == (status, part.format(when=when))
    assert row["repeats"] == [] and row["median"] == {}


def test_a_kill_from_outside_is_no_lack_of_memory(tmp_path: Path) -> None:
    row = row_of(job(tmp_path, "be_killed"))
    assert row["status"] == "failed" and "code -9" in row["sentence"]


@pytest.mark.skipif(
    subprocess.run([*LIMIT, "200M", "--", "true"], capture_output=True).returncode != 0,
    reason="control groups cannot be changed here",
)
def test_a_memory_limit_that_is_met_is_told(tmp_path: Path) -> None:
    row = row_of(job(tmp_path, "take_memory", "generating", memory_limit="200M", repeats=2))
    assert row["status"] == "out_of_memory"
    assert row["sentence"] == "killed by the kernel within 200M while generating"
    row = row_of(job(tmp_path, "hang", memory_limit="200M", timeout_s=2.0))
    assert row["status"] == "timeout"
    assert row_of(job(tmp_path, memory_limit="200M"))["status"] == "ok"


@pytest.mark.parametrize("when", ["loading", "generating"])
def test_a_process_that_takes_too_long_ends_with_its_children(tmp_path: Path, when: str) -> None:
    asked = job(tmp_path, "hang", when, timeout_s=2.0 if when == "loading" else 60.0)
    with PeerProcess(asked, command(asked)) as peer:
        assert peer.start() == (when == "generating")
        peer._left_s = 0.5  # of 60 s, for what would take forever
        assert peer.generate() is None and peer.has_stopped
    row = peer.row(1)
    assert row["status"] == "timeout" and row["sentence"] == f"ended after {asked.timeout_s:g} s in all, while {when}"


def test_a_wrong_number_of_tokens_is_a_failure(tmp_path: Path) -> None:
    row = row_of(job(tmp_path, "stop_early"))
    assert row["status"] == "failed" and "asked for 2 x 4 tokens, got 2 rows of [3]" in row["sentence"]


def test_an_engine_may_start_again_with_other_options(tmp_path: Path) -> None:
    row = row_of(job(tmp_path, "start_again"))
    assert row["status"] == "ok" and len(row["repeats"]) == 1


def test_what_was_measured_before_an_engine_stopped_is_kept(tmp_path: Path) -> None:
    asked = job(tmp_path)
    with PeerProcess(asked, command(asked)) as peer:
        assert peer.start() and peer.generate()
    row = peer.row(2)
    assert row["status"] == "failed" and row["sentence"] == "ended after 1 of 2 generations without a reason"
    assert len(row["repeats"]) == 1 and row["median"]["total_s"] == 0.75
    assert peer.generate() is None and not peer.is_running


def test_engines_take_turns_in_processes_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "driver_command", command)
    rows = alternate([job(tmp_path), job(tmp_path, "crash", "generating"), job(tmp_path)], rounds=2)
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert [len(row["repeats"]) for row in rows] == [2, 0, 2]
    assert rows[0]["details"]["process"] != rows[2]["details"]["process"]


def test_engines_that_are_loaded_anew_have_a_process_for_every_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "driver_command", command)
    said: list[tuple[int, int | None]] = []
    starts: list[int] = []

    def keep(index: int, event: dict[str, Any] | None) -> None:
        said.append((index, None if event is None else event["details"]["process"]))

    def started(peer: PeerProcess) -> bool:
        starts.append(["answer", "crash"].index(peer.job.options["does"]))
        return start(peer)

    start = PeerProcess.start
    monkeypatch.setattr(PeerProcess, "start", started)
    jobs = [job(tmp_path), job(tmp_path, "crash", "generating")]
    rows = alternate(jobs, rounds=2, after=keep, together=False)
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert [len(row["repeats"]) for row in rows] == [2, 0]
    assert [index for index, _ in said] == [0, 1, 0]
    first, stopped, second = (process for _, process in said)
    assert stopped is None and None not in (first, second) and first != second
    assert starts == [0, 1, 0], "an engine that has stopped is not started again"


def test_an_environment_that_is_not_there_is_an_absent_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    row = run_peer(PeerJob("vllm", tmp_path, 1, 4, 4, offload_dir=tmp_path / "offload"))
    assert row["status"] == "absent" and "scripts/setup_peers.sh vllm" in row["sentence"]


def test_an_engine_that_there_is_not_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="engine 'vlm' is unknown; known ones: transformers"):
        run_peer(PeerJob("vlm", tmp_path, 1, 4, 4))


def test_the_command_prints_one_row_on_standard_output(tmp_path: Path) -> None:
    asked = job(tmp_path)
    words = [word for word in command(asked) if word != "--serve"]
    done = subprocess.run([*words, "--repeats", "2"], env=environment(), capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()  # what the library says goes to standard error
    row = json.loads(line)
    assert row["status"] == "ok" and len(row["repeats"]) == 2
    assert "a library says hello" in done.stderr


def test_drivers_need_no_torch_to_be_started() -> None:
    script = "import sys, flexgen_h2o.bench.drivers.__main__, flexgen_h2o.bench.peers; print(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True
    )
    assert {"torch", "transformers", "psutil", "safetensors"}.isdisjoint(shown.stdout.split())
