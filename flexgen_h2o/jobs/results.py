"""Where the lines of a job go: a stream, or a file with a side file that lets an interrupted job go on."""

import fcntl
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from flexgen_h2o.basics.errors import UsageError, add_note
from flexgen_h2o.jobs.formats import json_line
from flexgen_h2o.jobs.record import (
    JobRecord,
    Progress,
    checkpoint_folder,
    crc_of,
    read_record,
    remove_checkpoint,
    side_file,
    write_record,
)

WRITE_BYTES = 2**16


class Results(Protocol):
    """Takes one line for each prompt, in order. A context: leaving it closes what is open.

    Attributes:
        progress: what has been written.
        stored: what an earlier run of the same output has left; None where there is nothing to go on from.
        checkpoint_folder: where blocks may be saved; None where a job cannot go on.
    """

    progress: Progress
    stored: JobRecord | None
    checkpoint_folder: Path | None

    def begin(self, record: JobRecord) -> None:
        """Everything has been checked: what was there before may be overwritten now."""

    def write(self, values: dict[str, Any]) -> None:
        """Adds the line of a prompt."""

    def commit(self, policy: dict[str, Any], is_finished: bool = False) -> None:
        """Makes sure that what was written stays; `policy` is what the job goes on with."""

    def __enter__(self) -> "Results": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_results(output: str | None, may_resume: bool, restart: bool = False) -> Results:
    """Where results go: a file, or standard output for None.

    Args:
        may_resume: the same prompts can be read again.
        restart: forget what an earlier run has left.
    Raises UsageError if the output cannot be used.
    """
    if output is None:
        return StreamResults(None)
    path = Path(output)
    if may_resume and (path.is_file() or not path.exists()):
        return FileResults(path, restart)
    return StreamResults(path)


def _counted(progress: Progress, values: dict[str, Any], line: bytes) -> Progress:
    return replace(
        progress,
        lines=progress.lines + 1,
        failed=progress.failed + ("error" in values),
        tokens=progress.tokens + len(values.get("token_ids", ())),
        output_bytes=progress.output_bytes + len(line),
        output_crc=zlib.crc32(line, progress.output_crc),
    )


class StreamResults:
    """Standard output, a pipe, a device, or a file that is written anew each time: nothing goes on from there."""

    def __init__(self, path: Path | None):
        self.progress = Progress()
        self.stored: JobRecord | None = None
        self.checkpoint_folder: Path | None = None
        self._path = path
        self._file: IO[str] | None = None

    def begin(self, record: JobRecord) -> None:
        try:
            self._file = sys.stdout if self._path is None else self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output {self._path} cannot be written: {error.strerror}") from None

    def write(self, values: dict[str, Any]) -> None:
        assert self._file is not None
        line = json_line(values)
        self._file.write(line)
        self.progress = _counted(self.progress, values, line.encode())

    def commit(self, policy: dict[str, Any], is_finished: bool = False) -> None:
        assert self._file is not None
        self._file.flush()

    def __enter__(self) -> "StreamResults":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()


class FileResults:
    """A file whose job can go on after any interruption, however it came.

    Locked for as long as it is open, so that no two runs write to it. Raises UsageError if another run does, if it
    cannot be written, or if it is not what its side file says.
    """

    def __init__(self, path: Path, restart: bool):
        self.path = path
        self.checkpoint_folder: Path | None = checkpoint_folder(path)
        self._is_new = not path.exists()
        self._record: JobRecord | None = None
        self._unwritten = bytearray()
        self._file = _open_locked(path)
        try:
            self.stored = None if restart else self._find()
        except BaseException:
            self._close()
            raise
        self.progress = Progress() if self.stored is None else self.stored.progress

    def _find(self) -> JobRecord | None:
        """What an earlier run has left, if its results are there."""
        found = read_record(side_file(self.path))
        if found is None or not found.progress.output_bytes:
            return found
        size = os.fstat(self._file).st_size
        if not size:
            print(f"note: {self.path} is gone, so its job begins again", file=sys.stderr)
            return None
        if crc_of(self._file, found.progress.output_bytes) != found.progress.output_crc:
            raise UsageError(
                f"{self.path} is not what its job left ({size} bytes, where the first {found.progress.output_bytes} are"
                " known); put back a good copy, or begin again with --restart"
            )
        return found

    def begin(self, record: JobRecord) -> None:
        if self.stored is None:
            remove_checkpoint(self.path)
        self._record = replace(record, progress=self.progress)
        with _writing(self.path):
            if self.stored is None:
                write_record(side_file(self.path), self._record)
            self._drop_the_rest()

    def write(self, values: dict[str, Any]) -> None:
        line = json_line(values).encode()
        self._unwritten += line
        if len(self._unwritten) >= WRITE_BYTES:
            self._write_out()
        self.progress = _counted(self.progress, values, line)

    def commit(self, policy: dict[str, Any], is_finished: bool = False) -> None:
        assert self._record is not None
        self._write_out()
        progress = replace(self.progress, is_finished=is_finished)
        with _writing(self.path):
            os.fsync(self._file)
            # Noted before it is written: whenever an interruption comes, no promised line is cut off after it.
            self._record = replace(self._record, policy=policy, progress=progress)
            write_record(side_file(self.path), self._record)
        if is_finished:
            remove_checkpoint(self.path)

    def _drop_the_rest(self) -> None:
        """Cuts off what no side file promises, such as half a line."""
        assert self._record is not None
        self._unwritten.clear()
        os.ftruncate(self._file, self._record.progress.output_bytes)
        os.lseek(self._file, 0, os.SEEK_END)

    def _write_out(self) -> None:
        with _writing(self.path):
            while self._unwritten:
                del self._unwritten[: os.write(self._file, self._unwritten)]

    def __enter__(self) -> "FileResults":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._record is not None and not self._record.progress.is_finished:
                with suppress(OSError):
                    self._drop_the_rest()
                done = self._record.progress.lines
                add_note(error, f"{done} prompts are answered in {self.path}, and the same command goes on from there")
        finally:
            self._close()

    def _close(self) -> None:
        if self._is_new and self._record is None:
            self.path.unlink(missing_ok=True)  # nothing was begun, and nothing was there
        os.close(self._file)


def _open_locked(path: Path) -> int:
    """A descriptor of a file that no other run writes to."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}; give another name") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            f"--output {path} is being written by another run; wait for it, or give another name"
        ) from None
    except OSError:
        pass  # a file system without locks
    return descriptor


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Has an error of the system name the file."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{path} cannot be written: {error.strerror or error}") from error
