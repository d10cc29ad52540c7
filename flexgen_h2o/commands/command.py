"""What the commands share: flags whose mistakes are all reported at once, and errors in one sentence each."""

import argparse
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flexgen_h2o.basics.errors import UsageError, notes_of
from flexgen_h2o.plan.placement import Percent

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_SIGNAL = 128  # plus the signal's number
ENDING = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


class Flags:
    """Turns the texts of parsed flags into values, collecting a sentence for each that cannot be."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.problems: list[str] = []

    def given(self, flag: str) -> bool:
        """Whether the flag was on the command line."""
        return self.text(flag) not in (None, False)

    def text(self, flag: str) -> str | None:
        value: str | None = getattr(self._args, flag.removeprefix("--").replace("-", "_"))
        return value

    def check_record(self) -> None:
        """Notes what keeps a result from being added to --record's file, whose folders are made if need be."""
        if (record := self.text("--record")) is None:
            return
        path = Path(record)
        parent = next((parent for parent in path.absolute().parents if parent.exists()), path)
        if path.is_dir() or not parent.is_dir():
            self.problems.append(
                f"--record {path} cannot be written: it is a folder, or lies in what is none; give another name"
            )
        elif not os.access(path if path.exists() else parent, os.W_OK):
            self.problems.append(f"--record {path} cannot be written: permission denied; give another name")

    def words(self, flag: str, default: str) -> list[str]:
        """What is separated by commas."""
        text = self.text(flag)
        return (default if text is None else text).split(",")

    def whole(self, flag: str, least: int, most: int | None = None) -> int | None:
        """A whole number within limits; None if not given or wrong."""
        text = self.text(flag)
        return None if text is None else self.whole_number(flag, text, least, most)

    def whole_number(self, flag: str, text: str, least: int, most: int | None = None) -> int | None:
        """The number that `text`, given for `flag`, stands for; None if it is wrong."""
        try:
            value = int(text)
        except ValueError:
            self.problems.append(f"{flag} is {text!r}; it must be a whole number of at least {least}")
            return None
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" + ("" if most is None else f" and at most {most}")
            self.problems.append(f"{flag} is {value}; it must be {limit}")
            return None
        return value

    def whole_numbers(self, flag: str, default: Sequence[int], least: int, most: int | None = None) -> list[int]:
        """Whole numbers within limits, separated by commas; what is wrong is left out."""
        text = self.text(flag)
        if text is None:
            return list(default)
        numbers = [self.whole_number(flag, word, least, most) for word in text.split(",")]
        return [number for number in numbers if number is not None]

    def real(self, flag: str, least: float = 0.0, most: float = math.inf) -> float | None:
        """A finite number within limits; None if not given or wrong."""
        text = self.text(flag)
        return None if text is None else self.real_number(flag, text, least, most)

    def real_number(self, flag: str, text: str, least: float = 0.0, most: float = math.inf) -> float | None:
        """The finite number that `text`, given for `flag`, stands for; None if it is wrong."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            limit = f"of at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
            self.problems.append(f"{flag} is {text!r}; it must be a number {limit}")
            return None
        return value

    def ratio(self, flag: str) -> Fraction | None:
        """A share between 0 and 1, exactly as written; None if not given or wrong."""
        text = self.text(flag)
        if text is None:
            return None
        try:
            value = Fraction(text)
        except (ValueError, ZeroDivisionError):
            value = Fraction(-1)
        if not 0 <= value <= 1:
            self.problems.append(f"{flag} is {text!r}; it must be a number between 0 and 1")
            return None
        return value

    def percent(self, flag: str, texts: Sequence[str] | None) -> Percent | None:
        """FlexGen's six numbers; None if not given or wrong."""
        if texts is None:
            return None
        if len(texts) != 6:
            self.problems.append(f"{flag} has {len(texts)} numbers; it takes six, such as 20 80 0 100 0 100")
            return None
        values = [self.real_number(flag, text) for text in texts]
        return None if None in values else Percent(*(value for value in values if value is not None))

    def switch(self, flag: str, default: bool) -> bool:
        """True or false, as FlexGen's switches take it."""
        text = self.text(flag)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            self.problems.append(f"{flag} is {text!r}; it must be true or false")
        return text.lower() == "true"

    def choice(self, flag: str, known: Sequence[str], default: str) -> str:
        """One of `known`."""
        text = self.text(flag)
        if text is not None and text not in known:
            self.problems.append(f"{flag} is {text!r}; it must be one of {', '.join(known)}")
            return default
        return default if text is None else text


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


def unwritable(flag: str, output: Path, is_replaced: bool = False) -> str | None:
    """What keeps the file of a flag from being written, if anything.

    Args:
        is_replaced: by another file that is written beside it.
    """
    if output.is_dir() or not output.resolve().parent.is_dir():
        return f"{flag} {output} cannot be written: its folder does not exist or it is a folder; give another name"
    if not os.access(output if output.exists() and not is_replaced else output.resolve().parent, os.W_OK):
        return f"{flag} {output} cannot be written: permission denied; give another name"
    return None


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
