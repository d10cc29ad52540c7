"""Flags that fill dataclasses, made of what the fields say of themselves."""

import argparse
from collections.abc import Iterable
from typing import Any

from flexgen_h2o.basics.settings import Kind, Setting, settings_of
from flexgen_h2o.commands.flags import Flags

# How argparse takes what is no single text. Values stay text there, so that every mistake can be reported at once.
TAKEN: dict[Kind, dict[str, Any]] = {
    "given": {"action": "store_true"},
    "switch": {"nargs": "?", "const": "true"},
    "percent": {"nargs": "+"},
    "wholes": {"nargs": "+"},
    "texts": {"nargs": "+"},
    "repeated": {"action": "append"},
}


def add_flags(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup", kinds: Iterable[type], topic: str | None = None
) -> None:
    """Adds a flag for every field of some dataclasses that is for people.

    Args:
        topic: only for those about it.
    """
    for kind in kinds:
        for known in settings_of(kind).values():
            if topic is None or known.topic == topic:
                _add_flag(parser, known)


def _add_flag(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", known: Setting) -> None:
    more = dict(TAKEN.get(known.kind, {}))
    if known.metavar is not None:
        more["metavar"] = known.metavar
    names = [known.flag] if known.short is None else [known.short, known.flag]
    parser.add_argument(*names, help=known.help.replace("%", "%%"), **more)


def given_values(flags: Flags, kind: type) -> dict[str, Any]:
    """What was given for the fields of a dataclass, by their names; what is wrong is noted, and left out."""
    values = {name: _value(flags, known) for name, known in settings_of(kind).items() if flags.given(known.flag)}
    return {name: value for name, value in values.items() if value is not None}


def filled_from(flags: Flags, kind: type) -> Any:
    """An instance of a dataclass with what was given, and its own defaults; what is wrong is noted."""
    return kind(**given_values(flags, kind))


def _value(flags: Flags, known: Setting) -> Any:
    """What was given for a flag; None if it is wrong."""
    match known.kind:
        case "given":
            return True
        case "percent":
            return flags.percent(known.flag, flags.texts(known.flag))
        case "wholes":
            values = [flags.checked(known.read, known.flag, text) for text in flags.texts(known.flag)]
            return tuple(value for value in values if value is not None)
        case "texts" | "repeated":
            return tuple(flags.texts(known.flag))
        case _:
            return flags.checked(known.read, known.flag, flags.text(known.flag))
