"""Running the commands in this process, as a shell would see them: arguments in, exit code and two streams out."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from flexgen_h2o import run as run_module
from flexgen_h2o.commands.command import ENDING, run_command

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines of standard output that answer a prompt."""
        objects = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return [values for values in objects if "id" in values]

    @property
    def report(self) -> dict[str, Any]:
        """The JSON report: the last line of standard output."""
        report = json.loads(self.out.splitlines()[-1])
        assert "throughput_tok_s" in report
        return report

    @property
    def problems(self) -> list[str]:
        """The sentences of a refusal."""
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


@contextmanager
def signals_as_before() -> Iterator[None]:
    """Takes back the handlers that a command leaves in place which was asked to end."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def call(command: ModuleType, argv: Sequence[str], stdin: bytes = b"") -> Finished:
    """Runs a command module. An exception that would be a traceback for the user comes through as it is."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with (
        signals_as_before(),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        patch.object(sys, "stdout", out),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            run_command(lambda: command.main(list(argv)))
        except SystemExit as stopped:
            code = stopped.code
    assert isinstance(code, int)
    return Finished(code, out.getvalue(), err.getvalue())


def run(*argv: str, stdin: bytes = b"") -> Finished:
    """`python -m flexgen_h2o.run` with these arguments."""
    return call(run_module, argv, stdin)


def refused(*argv: str, stdin: bytes = b"") -> list[str]:
    """The sentences with which `run` refuses these arguments: exit 2, nothing on standard output, nothing else said."""
    finished = run(*argv, stdin=stdin)
    assert finished.code == 2, finished
    assert finished.out == ""
    assert finished.problems and len(finished.problems) == len(finished.err.splitlines()), finished.err
    return finished.problems


def refused_once(*argv: str, stdin: bytes = b"") -> str:
    """The one sentence with which `run` refuses these arguments."""
    (problem,) = refused(*argv, stdin=stdin)
    return problem


def write_jsonl(path: Path, lines: Sequence[object]) -> str:
    """Writes objects as JSON lines, and strings and bytes as they are. Returns the path."""
    raw = [line if isinstance(line, bytes) else _as_text(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return str(path)


def _as_text(line: object) -> str:
    return line if isinstance(line, str) else json.dumps(line)


def ids_file(folder: Path, *lengths: int) -> str:
    """A file with a prompt of token ids of each length."""
    prompts = [[2, *range(10, 9 + length)] for length in lengths]
    return write_jsonl(folder / "ids.jsonl", [{"prompt_ids": ids} for ids in prompts])


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def environment() -> dict[str, str]:
    """For true processes: one thread, no network, this copy of the package."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def start(*argv: str, module: str = "flexgen_h2o.run", **streams: Any) -> subprocess.Popen[bytes]:
    """A true process of a command."""
    return subprocess.Popen([sys.executable, "-m", module, *argv], env=environment(), cwd=ROOT, **streams)
