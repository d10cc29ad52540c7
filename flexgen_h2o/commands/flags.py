"""Flags of the commands: texts that become values, with a sentence for every mistake, all reported at once."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.values import read_choice, read_real, read_whole
from flexgen_h2o.plan.placement import Percent

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def parse_all(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, "Flags"]:
    """Parses a command line; words that are no flags are noted beside the other mistakes."""
    args, unknown = parser.parse_known_args(argv)
    flags = Flags(args)
    flags.problems += [f"{word} is not a flag of this command; see --help" for word in unknown]
    return args, flags


class Flags:
    """Turns the texts of parsed flags into values, collecting a sentence for each that cannot be."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.problems: list[str] = []

    def given(self, flag: str) -> bool:
        """Whether the flag was on the command line."""
        return self._parsed(flag) not in (None, False)

    def text(self, flag: str) -> str | None:
        """What was given for a flag that takes one text; None if it was not."""
        value: str | None = self._parsed(flag)
        return value

    def texts(self, flag: str) -> list[str]:
        """What was given for a flag that takes several texts."""
        return list(self._parsed(flag) or ())

    def _parsed(self, flag: str) -> Any:
        return getattr(self._args, flag.removeprefix("--").replace("-", "_"))

    def checked(self, read: Callable[..., Value], *given: Any) -> Value | None:
        """What a function makes of its arguments; None, and its sentences are noted, if it raises UsageError."""
        try:
            return read(*given)
        except UsageError as error:
            self.problems += error.problems
            return None

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
        return self.checked(read_whole, flag, text, least, most)

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
        return self.checked(read_real, flag, text, least, most)

    def percent(self, flag: str, texts: Sequence[str] | None) -> Percent | None:
        """FlexGen's six numbers; None if not given or wrong."""
        if texts is None:
            return None
        if len(texts) != 6:
            self.problems.append(f"{flag} has {len(texts)} numbers; it takes six, such as 20 80 0 100 0 100")
            return None
        values = [self.real_number(flag, text) for text in texts]
        return None if None in values else Percent(*(value for value in values if value is not None))

    def choice(self, flag: str, known: Sequence[str], default: str) -> str:
        """One of `known`; the default if not given or wrong."""
        text = self.text(flag)
        return default if text is None else self.checked(read_choice, flag, text, known) or default


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
