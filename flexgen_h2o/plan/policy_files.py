"""Policies in files: what `policy_search -o` writes and `run --policy` takes."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.json_files import read_json
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy

KIND = "policy"
COUNTS = ("gpu_batch_size", "num_gpu_batches", "decode_batch_size")
IGNORED = ("kind", "about")  # what kind of file it is, and where it comes from


def policy_fields(policy: Policy) -> dict[str, Any]:
    """A policy as plain values, percent as a list of six."""
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return {**values, "percent": list(policy.percent.values)}


def policy_to_json(policy: Policy, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A policy as an object.

    Args:
        about: what it was made for; for people, not read again.
    """
    return {"kind": KIND, **policy_fields(policy), **({"about": dict(about)} if about else {})}


def policy_from_json(values: Any, origin: str) -> Policy:
    """The policy of an object; what it does not name has its default.

    Args:
        origin: the file it comes from, for messages.
    Raises UsageError with every mistake found.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{origin}: it must hold one JSON object; policy_search -o writes one")
    known = {field.name for field in fields(Policy)}
    problems = [
        f"{key!r} is unknown; known ones: {', '.join(sorted(known))}"
        for key in sorted(set(values) - known - {*IGNORED})
    ]
    if values.get("kind", KIND) != KIND:
        problems.append(f"kind is {values['kind']!r}; it must be {KIND!r}")
    found: dict[str, Any] = {}
    for key in sorted(known & set(values)):
        problem = _problem(key, values[key])
        if problem is not None:
            problems.append(problem)
        else:
            found[key] = Percent(*values[key]) if key == "percent" else values[key]
    if not problems:
        problems = Policy(**found).problems()
    if problems:
        raise UsageError(f"{origin}: {problem}" for problem in problems)
    return Policy(**found)


def _problem(key: str, value: Any) -> str | None:
    """What is wrong with the type of a field, if anything."""
    if key == "percent":
        if isinstance(value, list) and len(value) == 6 and all(_is_number(number) for number in value):
            return None
        return f"percent is {value!r}; it must be six numbers, such as [20, 80, 0, 100, 0, 100]"
    if key in COUNTS:
        if value is None and key == "decode_batch_size":
            return None
        is_count = isinstance(value, int) and not isinstance(value, bool)
        return None if is_count else f"{key} is {value!r}; it must be a whole number"
    return None if isinstance(value, bool) else f"{key} is {value!r}; it must be true or false"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_policy(path: Path) -> Policy:
    """The policy of a file. Raises UsageError with every mistake found in it."""
    return policy_from_json(read_json(path, "policy file"), str(path))


def write_policy(path: Path, policy: Policy, about: Mapping[str, Any] | None = None) -> None:
    """Writes a policy's file. Raises OSError if it cannot be written."""
    path.write_text(json.dumps(policy_to_json(policy, about), indent=1) + "\n", encoding="utf-8")
