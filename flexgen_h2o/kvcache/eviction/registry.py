"""The eviction policies that `run` offers, by name, and what people can know of each.

A new one is a file beside this, and a line here. What is known of it comes from its class, which is loaded when it is
asked for: some need torch, which takes a second to load.
"""

from collections.abc import Mapping
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import Kind, Setting, setting_of
from flexgen_h2o.kvcache.eviction.base import EvictionRule

HOMES = {
    "h2o": "flexgen_h2o.kvcache.eviction.h2o:H2O",
    "full": "flexgen_h2o.kvcache.eviction.full:Full",
    "local": "flexgen_h2o.kvcache.eviction.local:Local",
    "sink": "flexgen_h2o.kvcache.eviction.sink:Sink",
    "smooth": "flexgen_h2o.kvcache.eviction.smooth:Smooth",
}
HELP = "help"  # what is asked for in place of a policy, to be told of all of them
SIZES = ("heavy", "recent")
KINDS: dict[type, Kind] = {bool: "switch", int: "whole", float: "real"}  # of fields that do not say theirs


def load(name: str) -> type[EvictionRule]:
    """The class of a policy."""
    rule: type[EvictionRule] = resolve_name(HOMES[name])
    return rule


def parameters(rule: type[EvictionRule]) -> dict[str, tuple[Setting, Any]]:
    """What can be set of a policy, by name, and its default: its fields beside the sizes.

    The decay is none where attention is not added up: there is nothing that could fade.
    """
    without = SIZES if rule.accumulates else (*SIZES, "decay")
    return {
        owned.name: (setting_of(owned) or Setting(KINDS.get(type(owned.default), "text"), owned.name), owned.default)
        for owned in fields(rule)
        if owned.name not in without
    }


def read_parameters(name: str, text: str) -> dict[str, Any]:
    """Parameters of a policy from KEY=VALUE,KEY=VALUE, in the order of its fields.

    Raises UsageError with every mistake found.
    """
    known = parameters(load(name))
    found: dict[str, Any] = {}
    problems = []
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not known or not equals or key not in known or key in found:
            problems.append(_refusal(name, word, key, known, found))
            continue
        try:
            found[key] = known[key][0].read(f"--eviction {name}: {key}", value)
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)
    return {key: found[key] for key in known if key in found}


def _refusal(name: str, word: str, key: str, known: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Why a word is no parameter that can still be given."""
    if not known:
        return f"--eviction {name}: {word!r} cannot be set, as {name} has no parameters; leave it out"
    if key in found:
        return f"--eviction {name}: {key} is given twice; leave one of them out"
    example = next(f"{key}={default}" for key, (_, default) in known.items())
    if "=" not in word:
        return f"--eviction {name}: {word!r} is no parameter with a value; write them as in {example}"
    return f"--eviction {name}: {key!r} is unknown; known parameters: {', '.join(known)}; --eviction {HELP} shows all"


def descriptions() -> str:
    """A line for each policy: its name, what it keeps, its parameters with their defaults."""
    return "\n".join(_description(name) for name in HOMES)


def _description(name: str) -> str:
    rule = load(name)
    what = (rule.__doc__ or "").splitlines()[0]
    settable = ", ".join(f"{key}={default}" for key, (_, default) in parameters(rule).items())
    return f"{name:8}{what} " + (f"Parameters: {settable}." if settable else "No parameters.")
