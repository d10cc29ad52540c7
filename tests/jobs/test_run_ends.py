"""How a run ends: the exit code, what is kept, what is said. In this process, and in true ones where signals, pipes and
terminals matter."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, call, environment, ids_file, read_jsonl, run, start, write_jsonl

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o import run as run_module
from flexgen_h2o.basics.errors import UsageError, add_note
from flexgen_h2o.commands import command as cli
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.jobs.formats import read_prompts
from flexgen_h2o.jobs.job import BatchJob, InputSizes, PromptSource
from flexgen_h2o.jobs.results import StreamResults

PATIENCE_S = 60
LIBRARIES = {"torch", "numpy", "transformers", "safetensors", "tokenizers", "pulp"}


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError(["one", "two"]), 2, "error: one\nerror: two\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (RuntimeError("first line\nsecond line"), 1, "error: first line\n"),
        (MemoryError(), 1, "error: MemoryError\n"),
    ],
)
def test_failures_end_in_a_sentence_and_a_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run_module, "read_flags", fail)
    finished = call(run_module, [])
    assert (finished.code, finished.err) == (code, said)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "terminated\n"), (signal.SIGHUP, 129, "hung up\n"), (signal.SIGINT, 130, "interrupted\n")],
)
def test_signals_end_a_command_after_it_has_cleaned_up(
    number: signal.Signals, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = []

    def wait(argv: list[str]) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(PATIENCE_S)
        finally:
            cleaned.append(number)

    before = signal.getsignal(number)
    monkeypatch.setattr(run_module, "read_flags", wait)
    finished = call(run_module, [])
    assert (finished.code, finished.err, cleaned) == (code, said, [number])
    assert signal.getsignal(number) == before


def test_a_signal_that_is_to_be_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        def go_on(argv: list[str]) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            raise RuntimeError("went on")

        monkeypatch.setattr(run_module, "read_flags", go_on)
        assert call(run_module, []).err == "error: went on\n"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_has_been_noted_of_an_error_is_said_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said in ((OSError("no"), "error: no; a; b\n"), (KeyboardInterrupt(), "interrupted; a; b\n")):
        add_note(error, "a")
        add_note(error, "b")
        monkeypatch.setattr(run_module, "read_flags", _raising(error))
        assert call(run_module, []).err == said


def _raising(error: BaseException) -> Callable[[list[str]], None]:
    def fail(argv: list[str]) -> None:
        raise error

    return fail


def test_a_fault_of_the_program_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        cli.run_command(_failing_assertion)
    assert capsys.readouterr().err == ""


def _failing_assertion() -> int:
    raise AssertionError


def test_an_interrupted_run_keeps_the_lines_it_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the third block of two rows."""
    whole, calls = Engine.run, iter(range(100))

    def run_two(*args: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(Engine, "run", run_two)
    output = tmp_path / "out.jsonl"
    argv = [
        "--input",
        ids_file(tmp_path, *range(2, 9)),
        "--gen-len",
        "2",
        *"--gpu-batch-size 2 --num-gpu-batches 1".split(),
    ]
    finished = run(*argv, "--output", str(output))
    assert finished.code == 130 and "interrupted" in finished.err
    assert [line["id"] for line in read_jsonl(output)] == [0, 1, 2, 3]


def test_results_appear_as_soon_as_their_block_is_done() -> None:
    """With standard input a second block is not even read before the first is answered."""
    written: list[str] = []
    seen: list[int] = []

    def lines() -> Iterator[bytes]:
        for number in range(4):
            seen.append(len([line for line in written if '"token_ids"' in line]))
            yield b'{"prompt_ids": [2, %d]}\n' % (number + 5)

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return super().write(text)

    llm = LLM(gpu_batch_size=2, prompt_len=2, dtype="float32")
    source = PromptSource(lambda: read_prompts(lines(), is_json=True), "lines", rereadable=False)
    job = BatchJob(llm, SamplingParams(max_new_tokens=1), source, StreamResults(None))
    assert job.measure() == InputSizes(2, None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdout", Sink())
        job.run(InputSizes(2, None))
    assert seen == [0, 0, 2, 2] and len([json.loads(line) for line in written]) == 4


# --- true processes ---------------------------------------------------------------------------------------------


def long_job(folder: Path) -> list[str]:
    """Two hundred blocks of one row each, which takes a while."""
    file = write_jsonl(folder / "long.jsonl", [{"prompt_ids": [2, number % 4000]} for number in range(200)])
    return ["--input", file, "--ignore-eos", *"--gen-len 40 --gpu-batch-size 1 --num-gpu-batches 1".split()]


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no results came"
        time.sleep(0.05)


def imported_by(*argv: str) -> tuple[subprocess.CompletedProcess[str], list[str], set[str]]:
    """The command, finished; what it has said on standard error; and the modules that it has imported."""
    command = [sys.executable, "-X", "importtime", "-m", "flexgen_h2o.run", *argv]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    lines, prefix = done.stderr.splitlines(), "import time:"
    modules = {line.split("|")[-1].strip() for line in lines if line.startswith(prefix)}
    return done, [line for line in lines if not line.startswith(prefix)], modules


def test_help_waits_for_no_library() -> None:
    done, _, modules = imported_by("--help")
    assert done.returncode == 0 and "--gen-len" in done.stdout
    assert "flexgen_h2o.commands.run_options" in modules and modules.isdisjoint(LIBRARIES)


def test_a_flag_that_there_is_not_waits_for_no_library() -> None:
    done, said, modules = imported_by("--gen-length", "2")
    assert done.returncode == 2 and "--gen-length" in said[0]
    assert modules.isdisjoint(LIBRARIES)


def test_mistaken_values_wait_for_none_of_what_runs_a_model() -> None:
    done, said, modules = imported_by("--gen-len", "0", "--hh-ratio", "2")
    assert done.returncode == 2
    assert [line.split()[1] for line in said] == ["--hh-ratio", "--gen-len"]
    assert modules.isdisjoint({*LIBRARIES, "flexgen_h2o.llm", "flexgen_h2o.engine.loop"} - {"torch", "numpy"})


def test_ctrl_c_ends_with_130_and_keeps_finished_lines(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = start(*long_job(tmp_path), "--output", str(output), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_lines(output, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    kept = read_jsonl(output)
    said = f"interrupted; {len(kept)} prompts are answered in {output}, and the same command goes on from there\n"
    assert (out, err.decode()) == (b"", said)
    assert 2 <= len(kept) < 200 and [line["id"] for line in kept] == list(range(len(kept)))
    assert {len(line["token_ids"]) for line in kept} == {40}


def test_a_reader_that_has_seen_enough_ends_the_run_without_a_complaint(tmp_path: Path) -> None:
    process = start(*long_job(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert json.loads(process.stdout.readline())["id"] == 0
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 1
    assert process.stderr.read() == b""


def test_piped_through_a_shell_answers_come_before_the_report_and_no_progress_is_shown() -> None:
    process = start(
        *"--input - --prompt-len 8 --gen-len 4 --hh-size 2 --recent-size 2 --json".split(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(b'{"id": "a", "prompt": "Hello"}\n{"prompt_ids": [9999]}\n', timeout=PATIENCE_S)
    first, second, report = map(json.loads, out.splitlines())
    assert (first["id"], second["id"], report["num_prompts"]) == ("a", 1, 1)
    assert err == b"warning: 1 of the prompts could not be served; see their lines\n"
    assert process.returncode == 0


def read_terminal(descriptor: int) -> str:
    """Everything that was written to a pseudo-terminal until its other side was closed."""
    parts = []
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # Linux's way to say that nobody writes any more
            part = b""
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def test_progress_is_shown_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    rows_and_columns = struct.pack("HHHH", 24, 120, 0, 0)  # a new one has none, and nothing would be shown
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, rows_and_columns)
    argv = [
        "--input",
        ids_file(tmp_path, 3, 4, 5),
        "--json",
        *"--gen-len 30 --gpu-batch-size 1 --num-gpu-batches 1".split(),
    ]
    process = start(*argv, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = read_terminal(ours)
    os.close(ours)
    out = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0 and "Traceback" not in shown
    assert "weights: 100%" in shown
    assert "3/3" in shown and "prompt" in shown and "tok/s" in shown and "<" in shown  # done, rate, time to go
    assert [json.loads(line) for line in out.splitlines()][-1]["num_prompts"] == 3
