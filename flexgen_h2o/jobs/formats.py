"""Prompts in, results out: JSON lines and plain text, one prompt at a time and in order."""

import codecs
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

JsonScalar = str | int | float | None
KNOWN_KEYS = ("id", "prompt", "prompt_ids")
MOST_LINE_BYTES = 2**26
MOST_NAMED_KEYS, MOST_KEY_LETTERS = 8, 40  # of a line, in messages


@dataclass(frozen=True)
class PromptLine:
    """One line of the input as it was read.

    Attributes:
        line: its number, from 1.
        id: what the line calls itself, else its number among the prompts, from 0.
        prompt: text or token ids; None if `error` says why there is none.
        error: what is wrong with the line.
        unknown_keys: keys that mean nothing here.
    """

    line: int
    id: JsonScalar
    prompt: str | list[int] | None = None
    error: str | None = None
    unknown_keys: tuple[str, ...] = ()


def bounded_lines(file: BinaryIO, most: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a file; of one that is longer than `most` bytes only the first `most` + 1."""
    while line := file.readline(most + 1):
        part = line
        while part and not part.endswith(b"\n"):
            part = file.readline(most + 1)
        yield line


def read_prompts(file: Iterable[bytes], is_json: bool, most: int = MOST_LINE_BYTES) -> Iterator[PromptLine]:
    """Yields a PromptLine for every line that is not blank; one of more than `most` bytes is an error."""
    index = 0
    for number, raw in enumerate(file, start=1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8").rstrip("\r\n") if len(raw) <= most else None
        except UnicodeDecodeError as error:
            yield PromptLine(number, index, error=f"line is not UTF-8: byte {error.start} is {raw[error.start]:#04x}")
        else:
            yield _line(text, number, index, is_json, most)
        index += 1


def _line(text: str | None, number: int, index: int, is_json: bool, most: int) -> PromptLine:
    if text is None:
        return PromptLine(number, index, error=f"line has more than {most:,} bytes; no prompt may be longer")
    return _parse(text, number, index) if is_json else PromptLine(number, index, text)


def _parse(text: str, number: int, index: int) -> PromptLine:
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as reason:
        return PromptLine(number, index, error=f"line is not JSON: {reason}")
    if not isinstance(values, dict):
        return PromptLine(number, index, error=f"line is {type(values).__name__}, not an object with a prompt")
    identity = values.get("id", index)
    if not _is_identity(identity):
        shown = identity if isinstance(identity, float | bool) else type(identity).__name__
        return PromptLine(number, index, error=f"id must be a string or a finite number, not {shown}")
    unknown = tuple(key[:MOST_KEY_LETTERS] for key in values if key not in KNOWN_KEYS)[:MOST_NAMED_KEYS]
    prompt, error = _prompt_of(values)
    return PromptLine(number, identity, prompt, error, unknown)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _is_identity(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _prompt_of(values: dict[str, Any]) -> tuple[str | list[int] | None, str | None]:
    """The prompt of a parsed line, or what is wrong with it."""
    if "prompt" in values and "prompt_ids" in values:
        return None, "line has both prompt and prompt_ids; give one of them"
    if "prompt" in values:
        if not isinstance(values["prompt"], str):
            return None, f"prompt is {type(values['prompt']).__name__}; it must be a string"
        return values["prompt"], None
    if "prompt_ids" in values:
        ids = values["prompt_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return None, "prompt_ids must be a list of whole numbers"
        return ids, None
    return None, f"line has no prompt and no prompt_ids (its keys: {_keys(values)})"


def _keys(values: dict[str, Any]) -> str:
    """A few of the keys, for a message."""
    names = [key[:MOST_KEY_LETTERS] for key in islice(values, MOST_NAMED_KEYS)]
    return ", ".join([*names, *(["..."] if len(values) > len(names) else [])]) or "none"


def json_line(values: dict[str, Any]) -> str:
    """A JSON line. Text that is not valid Unicode is escaped, never lost."""
    return json.dumps(values) + "\n"
