"""A command as a process: signals that end it, errors in one sentence each, exit codes."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from flexgen_h2o.basics.errors import UsageError, notes_of

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_SIGNAL = 128  # plus the signal's number
ENDING = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class EndedBySignalError(KeyboardInterrupt):
    """Another signal than Ctrl-C's asks the command to end."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Signals that ask the command to end raise KeyboardInterrupt, so that all is cleaned up; a second ends it at once.

    A signal that whoever started the command has it ignore (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os.write(2, b"interrupted again: ended at once; the next run removes what is left\n")
            os._exit(EXIT_SIGNAL + number)
        asked = True
        raise KeyboardInterrupt if number == signal.SIGINT else EndedBySignalError(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        if not asked:  # a process that was asked to end has yet to, and a second signal may meet it there
            for number, handler in before.items():
                signal.signal(number, handler)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs a command's main function and exits with its code, or with one that says how it failed."""
    with _ending_by_signals():
        code = _run(main)
    sys.exit(code)


def _run(main: Callable[[], int]) -> int:
    """The exit code of a command's main function."""
    try:
        code = main()
        sys.stdout.flush()
    except UsageError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        code = EXIT_USAGE
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, EndedBySignalError) else signal.SIGINT
        print("; ".join([ENDING[signal.Signals(number)], *notes_of(error)]), file=sys.stderr)
        code = EXIT_SIGNAL + number
    except BrokenPipeError:
        # Whoever read the output has stopped reading. Python would complain once more when it closes stdout.
        sys.stdout = None
        code = EXIT_FAILED
    except (OSError, RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"error: {'; '.join([reason, *notes_of(error)])}", file=sys.stderr)
        code = EXIT_FAILED
    return code
