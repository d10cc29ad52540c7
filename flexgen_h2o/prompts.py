"""Prompts in, results out: JSON lines and plain text, one prompt at a time and in order."""

import codecs
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

JsonScalar = str | int | float | None
KNOWN_KEYS = ("id", "prompt", "prompt_ids")


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


def read_prompts(file: Iterable[bytes], is_json: bool) -> Iterator[PromptLine]:
    """Yields a PromptLine for every line that is not blank."""
    index = 0
    for number, raw in enumerate(file, start=1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield PromptLine(number, index, error=f"line is not UTF-8: byte {error.start} is {raw[error.start]:#04x}")
        else:
            yield _parse(text, number, index) if is_json else PromptLine(number, index, text)
        index += 1


def _parse(text: str, number: int, index: int) -> PromptLine:
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as reason:
        return PromptLine(number, index, error=f"line is not JSON: {reason}")
    if not isinstance(values, dict):
        return PromptLine(number, index, error=f"line is {type(values).__name__}, not an object with a prompt")
    identity = values.get("id", index)
    if not _is_identity(identity):
        return PromptLine(number, index, error=f"id must be a string or a finite number, not {str(identity)[:40]}")
    unknown = tuple(key for key in values if key not in KNOWN_KEYS)
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
    return None, f"line has no prompt and no prompt_ids (its keys: {', '.join(values) or 'none'})"


def write_line(file: IO[str], values: dict[str, Any]) -> None:
    """Appends one JSON line. Text that is not valid Unicode is escaped, never lost."""
    file.write(json.dumps(values) + "\n")
