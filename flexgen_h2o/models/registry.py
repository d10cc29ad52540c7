"""The families of models, by name; and what a model is made of, from its config.json or its published name.

A new family is its facts and its mathematics, beside this, and a line here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.values import shown
from flexgen_h2o.models.architecture import Architecture
from flexgen_h2o.plan.model_shape import ModelShape

if TYPE_CHECKING:
    from flexgen_h2o.models.base import Family


class Home(NamedTuple):
    """Where a family's facts, and its mathematics, are: module:class. They are imported when they are asked for."""

    facts: str
    mathematics: str


HOMES = {  # by model_type of config.json
    "opt": Home("flexgen_h2o.models.opt_config:OptModels", "flexgen_h2o.models.opt:Opt"),
}
DEFAULT_FAMILY = "opt"  # of a config.json without model_type


def facts_of(name: str) -> type[Architecture]:
    """The facts of a family."""
    facts: type[Architecture] = resolve_name(HOMES[name].facts)
    return facts


def family_of(shape: ModelShape) -> "Family":
    """The mathematics of a model."""
    family: Family = resolve_name(HOMES[shape.family].mathematics)(shape)
    return family


def find_published(name: str) -> tuple[type[Architecture], str]:
    """The family of a published size, and its name there: of "opt-30b" or "facebook/opt-30b".

    Raises UsageError for any other name.
    """
    families = [facts_of(each) for each in HOMES]
    for family in families:
        short = name.removeprefix(f"{family.owner}/")
        if short in family.sizes:
            return family, short
    known = ", ".join(size for family in families for size in family.sizes)
    raise UsageError(f"--model {name} is neither a folder nor a published size; known sizes: {known}")


def published(model: str, **changes: Any) -> ModelShape:
    """A published model, with some settings of its config.json changed. Raises UsageError for an unknown name."""
    family, short = find_published(model)
    return family.published(short, changes)


def from_folder(folder: Path, name: str | None = None) -> ModelShape:
    """Reads config.json of a folder in Hugging Face format. Raises UsageError with every mistake found in it.

    Args:
        name: of the model; None for that of the folder.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no config.json; --model takes a folder in Hugging Face format or a name such as opt-125m"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {type(values).__name__} where an object of settings is expected")
    return from_dict(values, name or folder.resolve().name, str(path))


def from_dict(values: Mapping[str, Any], name: str, source: str = "config") -> ModelShape:
    """The model that a parsed config.json describes. Raises UsageError with every mistake found in it."""
    model_type = values.get("model_type", DEFAULT_FAMILY)
    if isinstance(model_type, str) and model_type in HOMES:
        return facts_of(model_type).read(values, name, source)
    known = ", ".join(map(repr, HOMES))
    raise UsageError(f"{source}: model_type is {shown(model_type)}; only {known} models are supported")
