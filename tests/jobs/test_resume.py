"""A job that was interrupted goes on where it ended, and what it ends with is what an undisturbed run gives."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import read_jsonl, run, write_jsonl
from support.helpers import ForcedTokens, TinyOpt, pad
from support.jobs import ON_DISK, Job, interrupt_in_block, kill, new_job
from support.placed import BACKENDS, MIXED, Backend, Case, delayed_threads, opened, small_block
from torch import Tensor

from flexgen_h2o.engine.block import BlockStart
from flexgen_h2o.engine.chooser import Sampler
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.engine.requests import Request
from flexgen_h2o.jobs import record as resume
from flexgen_h2o.jobs.record import JobRecord, Progress, read_record, write_record
from flexgen_h2o.jobs.saved_block import BlockCheckpoint
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.policy_files import policy_fields, write_policy
from flexgen_h2o.plan.sampling import SamplingParams


@pytest.fixture(autouse=True)
def quick_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of weights that no one else uses; and no waiting for the device, as no machine crashes here."""
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return new_job(tmp_path / "job")


def undisturbed(job: Job) -> bytes:
    """The output of the same job in another folder."""
    other = Job(job.folder.parent / "undisturbed", job.argv)
    shutil.rmtree(other.folder, ignore_errors=True)
    other.folder.mkdir()
    shutil.copy(job.input, other.input)
    assert other.run().code == 0
    return other.output.read_bytes()


def interrupt(
    job: Job, block: int, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = KeyboardInterrupt
) -> None:
    """Runs a job up to its block of this number, from 0."""
    whole, calls = Engine.run, iter(range(100))

    def run_some(*arguments: Any) -> Any:
        if next(calls) == block:
            raise error
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "run", run_some)
        assert job.run().code in (1, 130)


# --- between blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_an_interrupted_job_goes_on_after_its_last_block(job: Job, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine prompts, of which two cannot be served, in blocks of two."""
    expected = undisturbed(job)
    interrupt(job, block, monkeypatch)
    kept = job.output.read_bytes()
    assert expected.startswith(kept) and kept.endswith(b"\n") or not kept
    served = []
    whole = Engine.run
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "run", lambda *arguments: served.append(arguments[1].rows) or whole(*arguments))
        finished = job.run()
    assert finished.code == 0 and "going on from there" in finished.err
    assert job.output.read_bytes() == expected
    assert sum(served) == 7 - 2 * block
    assert job.leftovers() == []


def test_a_job_may_be_interrupted_at_every_block(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(job)
    for _ in range(3):
        interrupt(job, 1, monkeypatch)
    assert job.run().code == 0 and job.output.read_bytes() == expected


@pytest.mark.parametrize("rest", [b'{"id": "half a l', b'{"id": "a line that nobody promised"}\n', b"\0" * 5000])
def test_what_was_written_after_the_last_block_is_dropped(
    job: Job, rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(job)
    interrupt(job, 2, monkeypatch)
    with job.output.open("ab") as file:
        file.write(rest)
    assert job.run().code == 0 and job.output.read_bytes() == expected


def test_every_block_is_on_the_device_before_the_side_file_says_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine must not lose what the side file promises."""
    written: list[tuple[str, int]] = []
    sync, write = os.fsync, resume.write_record

    def synced(descriptor: int) -> None:
        sync(descriptor)
        if os.path.samestat(os.fstat(descriptor), job.output.stat()):
            written.append(("output", os.fstat(descriptor).st_size))

    def noted(path: Path, record: JobRecord) -> None:
        written.append(("side file", record.progress.output_bytes))
        write(path, record)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr("flexgen_h2o.jobs.results.write_record", noted)
    assert job.run().code == 0
    for before, after in zip(written[1::2], written[2::2], strict=True):
        assert before[0] == "output" and after == ("side file", before[1])
    assert len({size for _, size in written}) == 6  # 0, after each of four blocks, after the bad line that is the last


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interruption_beside_the_side_file_loses_nothing(
    job: Job, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(job)
    write, calls = resume.write_record, iter(range(100))

    def interrupted(path: Path, record: JobRecord) -> None:
        is_third = next(calls) == 2
        if moment == "after" or not is_third:
            write(path, record)
        if is_third:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("flexgen_h2o.jobs.results.write_record", interrupted)
        assert job.run().code == 130
    assert job.run().code == 0 and job.output.read_bytes() == expected


def test_a_job_that_is_done_writes_nothing_until_it_is_begun_again(job: Job) -> None:
    assert job.run().code == 0
    before = job.output.read_bytes(), job.output.stat().st_mtime_ns, job.side_file.read_bytes()
    finished = job.run("--json")
    assert finished.code == 0 and "all 9 prompts have been answered" in finished.err and "--restart" in finished.err
    assert finished.report["num_prompts"] == 0
    assert (job.output.read_bytes(), job.output.stat().st_mtime_ns, job.side_file.read_bytes()) == before
    assert job.run("--strict").code == 1  # two of them could not be served
    again = job.run("--restart", "--json")
    assert again.report["num_prompts"] == 7 and job.output.read_bytes() == before[0]


def test_a_job_of_nothing_but_bad_lines_is_done_too(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ["{", "}"])
    job = Job(tmp_path)
    assert job.run().code == job.run().code == 0
    assert [line["line"] for line in read_jsonl(job.output)] == [1, 2]


def test_reports_of_a_resumed_job_speak_of_their_own_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(job, 2, monkeypatch)
    report = job.run("--json").report
    assert (report["num_prompts"], report["generated_tokens"]) == (3, 18)
    predicted = report["predicted"]
    assert predicted["throughput_tok_s"] == pytest.approx(18 / predicted["total_s"])
    assert predicted["cpu_peak_bytes"] == pytest.approx(report["memory"]["ledger_peak_bytes"]["cpu"], rel=0.05)
    assert job.run("--json").report["predicted"] is None  # nothing was left to do


def test_results_that_were_moved_away_are_made_anew(job: Job) -> None:
    job.run()
    results = job.output.read_bytes()
    job.output.unlink()
    finished = job.run()
    assert "begins again" in finished.err and job.output.read_bytes() == results


def test_a_file_that_no_job_has_written_is_overwritten_as_ever(job: Job) -> None:
    job.output.write_text("old\n" * 100)
    assert job.run().code == 0 and len(read_jsonl(job.output)) == 9


def test_nothing_is_left_of_a_run_that_is_refused(job: Job) -> None:
    assert job.run("--cpu-mem", "0.001").code == 2
    assert not job.output.exists() and not job.side_file.exists()


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that was interrupted after two of its four blocks."""
    job = new_job(tmp_path_factory.mktemp("begun") / "job")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(job, 2, patch)
    return job


@pytest.fixture
def begun(begun_once: Job, tmp_path: Path) -> Job:
    """A copy of it, to be gone on with."""
    shutil.copytree(begun_once.folder, tmp_path / "begun")
    return Job(tmp_path / "begun")


# --- another job ----------------------------------------------------------------------------------------------------


def refusals(job: Job, *more: str) -> list[str]:
    finished = job.run(*more)
    assert finished.code == 2, finished
    return finished.problems


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--gen-len 7", ["--gen-len is 7", "with 6"]),
        ("--hh-ratio 0.3", ["--eviction is h2o with"]),
        ("--eviction full", ["--eviction is full"]),
        ("--eviction h2o:decay=0.9", ["recent entries, decay=0.9, and the job was begun with h2o with"]),
        ("--prompt-len 30", ["--prompt-len is 30", "not given"]),
        ("--dtype float16", ["--dtype is float16"]),
        ("--seed 5", ["--seed is 5", "with 0"]),
        ("--do-sample --temperature 0.5", ["--do-sample is true", "with false"]),
        ("--stop the --stop end", ["--stop is the end", "not given"]),
        ("--stop-token-ids 7 8", ["--stop-token-ids is 7 8"]),
        ("--ignore-eos", ["--ignore-eos is true"]),
        ("--dummy-weights", ["--dummy-weights is true", "the files of --model"]),
        ("--gpu-batch-size 3", ["--gpu-batch-size is 3", "with 2"]),
        ("--percent 50 0 100 0 100 0", ["--percent is 50 0 100 0 100 0", "with 100 0 100 0 100 0"]),
        ("--overlap false", ["--overlap is false", "with true"]),
        ("--compress-cache", ["--compress-cache is true"]),
    ],
)
def test_another_setting_is_refused_by_name(begun: Job, more: str, words: list[str]) -> None:
    job = begun
    before = job.output.read_bytes(), job.side_file.read_bytes()
    problems = refusals(job, *more.split())
    assert all(any(word in problem for problem in problems) for word in words), problems
    assert all("--restart" in problem and "--output" in problem for problem in problems)
    assert (job.output.read_bytes(), job.side_file.read_bytes()) == before


def test_parameters_of_an_eviction_policy_are_part_of_the_job(tmp_path: Path) -> None:
    flags = ("--gpu-batch-size", "2", "--num-gpu-batches", "1", "--gen-len", "6", "--json", "--eviction")
    job = new_job(tmp_path / "job", argv=(*flags, "smooth:pooled=5,decay=0.90"))
    report = job.run().report
    assert report["eviction"]["parameters"] == {"decay": 0.9, "pooled": 5}
    (said,) = re.findall(r'"--eviction": "([^"]*)"', job.side_file.read_text())
    assert re.fullmatch(r"smooth with \d+ heavy and \d+ recent entries, decay=0.9, pooled=5", said)
    assert Job(job.folder, (*flags, "smooth: decay=0.9, pooled=5")).run().code == 0
    assert Job(job.folder, (*flags, "smooth")).run().code == 2


def test_without_parameters_a_job_is_known_by_its_sizes_alone(job: Job) -> None:
    report = job.run("--json").report
    assert set(report["eviction"]) == {"name", "heavy_slots", "recent_slots", "evictions"}
    (said,) = re.findall(r'"--eviction": "([^"]*)"', job.side_file.read_text())
    assert re.fullmatch(r"h2o with \d+ heavy and \d+ recent entries", said)


def test_a_policy_file_that_says_otherwise_is_refused_too(begun: Job, tmp_path: Path) -> None:
    job = Job(begun.folder, ("--gen-len", "6", "--policy", str(tmp_path / "policy.json")))
    write_policy(tmp_path / "policy.json", Policy(4, 2), {})
    assert any("--gpu-batch-size is 4, and the job was begun with 2" in problem for problem in refusals(job))
    write_policy(tmp_path / "policy.json", Policy(2, 1), {})
    assert job.run().code == 0


def test_begun_again_a_job_may_have_other_settings(begun: Job) -> None:
    assert begun.run("--gen-len", "3", "--gpu-batch-size", "4", "--restart").code == 0
    assert {len(line["token_ids"]) for line in read_jsonl(begun.output) if "error" not in line} == {3}


def test_all_differences_are_listed_together(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(job, 1, monkeypatch)
    assert len(refusals(job, "--gen-len", "7", "--seed", "3")) >= 2
    assert len(refusals(job, "--gpu-batch-size", "4", "--num-gpu-batches", "2")) == 2


def test_another_input_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(job, 1, monkeypatch)
    content = job.input.read_bytes()
    job.input.write_bytes(content.replace(b"prompt 8", b"prompt X"))
    assert "--input has changed" in refusals(job)[0]
    job.input.write_bytes(content)
    assert job.run().code == 0


def test_another_model_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.tiny_models import make_tiny_opt, save_tiny_opt

    model = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path / "model")
    write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6 + n]} for n in range(6)])
    job = Job(tmp_path, ("--model", str(model), *"--gpu-batch-size 2 --num-gpu-batches 1 --gen-len 3".split()))
    interrupt(job, 1, monkeypatch)
    save_tiny_opt(make_tiny_opt("pre_norm", seed=1), model)
    assert "the files of --model has changed" in refusals(job)[0].replace("have", "has")


def test_the_stored_policy_is_gone_on_with(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not given is as when the job began, not as the defaults are."""
    begun = Job(job.folder, ("--gen-len", "6", *ON_DISK))
    interrupt(begun, 1, monkeypatch)
    finished = Job(job.folder, ("--gen-len", "6")).run("--json")
    policy = finished.report["policy"]
    assert (policy["gpu_batch_size"], policy["num_gpu_batches"], policy["percent"][:3]) == (2, 2, [50, 0, 40])
    assert begun.output.read_bytes() == undisturbed(begun)


def test_restart_means_nothing_where_nothing_can_go_on() -> None:
    for flag in (["--restart"], ["--checkpoint-minutes", "1"]):
        finished = run("--gen-len", "1", *flag)
        assert finished.code == 2 and f"{flag[0]} means nothing without --input FILE" in finished.problems[0]


# --- the side file --------------------------------------------------------------------------------------------------


def changed(**values: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-20],
        lambda content: content.replace(b'"lines": ', b'"lines": 1', 1),
        lambda content: b"[]",
        lambda content: b"\xff\xfe" + content,
        lambda content: b"[" * 100_000,
        changed(format=99),
        changed(checksum=None),
        changed(job={}),
        changed(job=3),
    ],
)
def test_a_damaged_side_file_is_refused(begun: Job, damage: Callable[[bytes], bytes]) -> None:
    job, side_file = begun, begun.side_file
    side_file.write_bytes(damage(side_file.read_bytes()))
    before = job.output.read_bytes()
    problem = refusals(job)[0]
    assert str(side_file) in problem and "--restart" in problem
    assert job.output.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"x" + content[1:]])
def test_an_output_that_is_not_what_was_left_is_refused(begun: Job, damage: Callable[[bytes], bytes]) -> None:
    begun.output.write_bytes(damage(begun.output.read_bytes()))
    assert "is not what its job left" in refusals(begun)[0]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    policy = policy_fields(Policy())
    record = JobRecord({"--seed": 3, "--stop": ["a"]}, policy, policy, 30, 9, Progress(5, 1, 60, 1234, 99, True))
    path = tmp_path / "out.job"
    assert read_record(path) is None
    write_record(path, record)
    assert read_record(path) == record
    assert [other.name for other in tmp_path.iterdir()] == ["out.job"]


# --- inside a block -------------------------------------------------------------------------------------------------

FOUR_ROWS = "--gpu-batch-size 4 --num-gpu-batches 1".split()  # in a block
SMALL = "--hh-size 3 --recent-size 4 --gen-len 12 --checkpoint-minutes 0 --ignore-eos".split()
HOMES = {
    "in_memory": [*FOUR_ROWS, "--stop-token-ids", "15", "16", "17"],
    "on_disk": ["--percent", *"100 0 0 0 0 0".split(), "--gpu-batch-size", "2", "--num-gpu-batches", "2"],
    "mixed": ["--percent", *"60 0 50 0 50 0".split(), "--gpu-batch-size", "3", "--num-gpu-batches", "2"],
    "4_bits": ["--compress-cache", *FOUR_ROWS],
    "sampled": ["--do-sample", "--seed", "7", *FOUR_ROWS],
    "full": FOUR_ROWS,
}


def small_argv(homes: str) -> list[str]:
    if homes == "full":
        return [*"--eviction full --gen-len 12 --checkpoint-minutes 0 --ignore-eos".split(), *HOMES["full"]]
    return [*SMALL, *HOMES[homes]]


@pytest.fixture
def steps_walked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps every block was walked."""
    walk, walked = Engine.walk, []

    def counted(*arguments: Any) -> Any:
        walked.append(len(arguments[2]))
        return walk(*arguments)

    monkeypatch.setattr(Engine, "walk", counted)
    yield walked


@pytest.mark.parametrize(
    ("homes", "steps"),
    [("in_memory", 5), ("on_disk", 5), ("mixed", 1), ("mixed", 16), ("4_bits", 5), ("sampled", 5), ("full", 16)],
)
def test_a_block_goes_on_at_the_step_that_was_saved(
    tmp_path: Path, homes: str, steps: int, monkeypatch: pytest.MonkeyPatch, steps_walked: list[int]
) -> None:
    """Bit for bit: one later token that differs would show."""
    small_job = new_job(tmp_path / "job", 9, small_argv(homes))
    expected = undisturbed(small_job)
    interrupt_in_block(small_job, steps, monkeypatch)
    steps_walked.clear()
    finished = small_job.run()
    assert finished.code == 0 and "goes on at its token" in finished.err
    assert steps_walked[0] == 12 - (steps - 1) % 11 - 1
    assert small_job.output.read_bytes() == expected
    assert small_job.leftovers() == []


def test_a_block_may_be_interrupted_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_job(tmp_path / "job", 3, [*SMALL, *HOMES["mixed"]])
    expected = undisturbed(job)
    for _ in range(10):
        interrupt_in_block(job, 1, monkeypatch)
    assert job.run().code == 0 and job.output.read_bytes() == expected


def test_what_was_saved_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it saves, a job goes on at the step before."""
    job = new_job(tmp_path / "job", 3, [*SMALL, *HOMES["mixed"]])
    expected = undisturbed(job)
    interrupt_in_block(job, 4, monkeypatch)
    (job.checkpoint / "step-4").mkdir()
    (job.checkpoint / "step-4" / "layer-0").write_bytes(b"half")
    (job.checkpoint / "current.json.new").write_bytes(b"half")
    finished = job.run()
    assert "goes on at its token 5" in finished.err and job.output.read_bytes() == expected
    assert job.leftovers() == []


@pytest.mark.parametrize("file", ["current.json", "layer-0", "layer-3"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_not_used(
    tmp_path: Path, file: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(tmp_path / "job", 3, [*SMALL, *HOMES["mixed"]])
    expected = undisturbed(job)
    interrupt_in_block(job, 4, monkeypatch)
    (path,) = job.checkpoint.rglob(file)
    content = path.read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    path.write_bytes(content[:half] if damage == "cut" else flipped)
    if damage == "gone":
        path.unlink()
    finished = job.run()
    assert finished.code == 0 and job.output.read_bytes() == expected
    assert "goes on at its token" not in finished.err
    assert ("cannot be used" in finished.err) == (damage != "gone" or file != "current.json")


def test_no_room_for_a_checkpoint_is_said_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_job(tmp_path / "job", 3, [*SMALL, *HOMES["in_memory"]])
    monkeypatch.setattr("flexgen_h2o.memory.run_folder.free_disk_bytes", lambda folder: 5)
    finished = job.run()
    assert finished.code == 0 and "could not be saved" in finished.err and job.leftovers() == []


def test_a_checkpoint_stays_while_there_is_no_room_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(tmp_path / "job", 3, small_argv("in_memory"))
    expected = undisturbed(job)
    save = BlockCheckpoint._save

    def save_once(self: BlockCheckpoint, reached: BlockStart) -> None:
        if reached.step == 3:
            save(self, reached)
            return
        (job.checkpoint / f"step-{reached.step - 1}").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(BlockCheckpoint, "_save", save_once)
        interrupted = interrupt_in_block(job, 4, monkeypatch)
    assert "could not be saved" in interrupted.err and "saved of it before stays" in interrupted.err
    assert [path.name for path in job.checkpoint.glob("step-*")] == ["step-2"]
    finished = job.run()
    assert "goes on at its token 4" in finished.err and job.output.read_bytes() == expected


def test_times_and_tokens_of_a_block_that_goes_on_are_those_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(tmp_path / "job", 3, small_argv("mixed"))
    interrupt_in_block(job, 4, monkeypatch)
    report = job.run("--json").report
    assert report["prefill_s"] == 0 and report["generated_tokens"] == 3 * 8
    assert report["decode_tok_s"] == pytest.approx(3 * 8 / report["decode_s"])


def test_saving_waits_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    now = 1000.0
    monkeypatch.setattr("flexgen_h2o.jobs.saved_block.time.monotonic", lambda: now)
    monkeypatch.setattr(BlockCheckpoint, "_save", lambda self, reached: saved.append(reached.step - 1))
    done = BlockCheckpoint.step_done

    def ten_seconds_later(*arguments: Any) -> None:
        nonlocal now
        now += 10
        done(*arguments)

    monkeypatch.setattr(BlockCheckpoint, "step_done", ten_seconds_later)
    argv = "--gen-len 12 --checkpoint-minutes 0.5 --ignore-eos".split() + FOUR_ROWS
    assert new_job(tmp_path / "job", 3, argv).run().code == 0
    assert saved == [2, 5, 8]


def test_what_was_saved_of_an_earlier_block_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a block was written and before what was saved of it was removed."""
    job = new_job(tmp_path / "job", 11, small_argv("on_disk"))  # two blocks of four rows, and one
    expected = undisturbed(job)
    interrupt_in_block(job, 4, monkeypatch)
    shutil.copytree(job.checkpoint, tmp_path / "saved")
    with monkeypatch.context() as patched:
        patched.setattr(BlockCheckpoint, "discard", _interrupted)
        assert job.run().code == 130
    shutil.rmtree(job.checkpoint)
    shutil.copytree(tmp_path / "saved", job.checkpoint)
    finished = job.run()
    assert finished.code == 0 and "goes on at its token" not in finished.err
    assert job.output.read_bytes() == expected and job.leftovers() == []


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


# So slow that copies are under way when a step ends.
SLOW = Backend(False, make=functools.partial(delayed_threads, 0, 0.05))


@pytest.mark.parametrize(
    ("backend", "percent"),
    [
        *((BACKENDS[name], MIXED) for name in ("one_memory", "inline", "inline_at_home", "threads_at_home")),
        (SLOW, Percent(100, 0, 0, 100, 100, 0)),
    ],
)
def test_a_block_is_saved_from_every_memory_and_brought_back_to_it(
    tiny: Callable[..., TinyOpt], tmp_path: Path, backend: Backend, percent: Percent
) -> None:
    """Where gpu and cpu are two memories as well: logits after the step that was saved are the same bits."""
    case = Case(tiny(), small_block(), H2O(4, 4), percent, backend=backend)
    forced = case.forced()
    prompts = [Request(row, ids) for row, ids in enumerate(case.prompts())]
    sampler = Sampler(prompts, SamplingParams(), (), 0, None, lambda count: None)
    sampler.resume([[9]] * len(prompts))

    def logits(saves_at: int | None, folder: Path) -> tuple[Tensor, int]:
        """Logits of all steps that were walked, and the first of them."""
        keeper = BlockCheckpoint(tmp_path / "saved", 0.0, "job", lambda note: None)
        chooser = ForcedTokens(forced)
        with opened(case, folder) as runtime:
            engine, block = runtime.engine(case.sizes), pad(case.prompts())
            start = keeper.restore(prompts, block, engine, sampler)
            first = 0 if start is None else start.step
            chooser.logits = [torch.zeros(block.rows, case.tiny.config.vocab_size)] * first

            def on_step(reached: BlockStart) -> None:
                if reached.step - 1 == saves_at:
                    keeper.step_done(reached)

            engine.run(block, forced.shape[1] + 1, chooser, start, on_step)
        return chooser.all_logits(), first

    whole, first = logits(2, tmp_path / "whole")
    again, resumed = logits(None, tmp_path / "again")
    assert (first, resumed) == (0, 3)
    assert torch.equal(whole[:, 3:], again[:, 3:])


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_moments_a_job_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """A few kills; tests/jobs/test_soak.py has fifty."""
    argv = [*ON_DISK, *"--gen-len 40 --ignore-eos --checkpoint-minutes 0.002".split()]
    job = new_job(tmp_path / "job", 40, argv)
    expected = undisturbed(job)
    kill(job, times=3, longest_s=8, seed=1)
    assert job.run().code == 0 and job.output.read_bytes() == expected
    assert job.leftovers() == []
