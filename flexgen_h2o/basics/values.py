"""Values out of texts that people write, for a flag or for a parameter.

Each function raises UsageError in one sentence, which begins with the name of what the text was given for.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from flexgen_h2o.basics.errors import UsageError

MOST_LETTERS = 80  # of a value, in messages


def shown(value: object) -> str:
    """A value that a file holds, for a message."""
    return repr(value)[:MOST_LETTERS]


def read_whole(name: str, text: str, least: int, most: int | None = None, is_odd: bool = False) -> int:
    """A whole number within limits."""
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it must be a whole number of at least {least}") from None
    if value < least or (most is not None and value > most) or (is_odd and value % 2 == 0):
        limit = f"at least {least}" + ("" if most is None else f" and at most {most}")
        raise UsageError(f"{name} is {value}; it must be {'an odd number of ' if is_odd else ''}{limit}")
    return value


def read_real(name: str, text: str, least: float = 0.0, most: float = math.inf) -> float:
    """A finite number within limits."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value <= most):
        limit = f"of at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
        raise UsageError(f"{name} is {text!r}; it must be a number {limit}")
    return value


def read_ratio(name: str, text: str) -> Fraction:
    """A share between 0 and 1, exactly as written."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is {text!r}; it must be a number between 0 and 1")
    return value


def read_switch(name: str, text: str) -> bool:
    """True or false, as FlexGen's switches take it."""
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{name} is {text!r}; it must be true or false")
    return text.lower() == "true"


def read_choice(name: str, text: str, known: Sequence[str]) -> str:
    """One of `known`."""
    if text not in known:
        raise UsageError(f"{name} is {text!r}; it must be one of {', '.join(known)}")
    return text
