"""What a field of a dataclass says of itself, so that a command can make a flag of it.

A dataclass that people fill says once, in its fields, what each of them is, how it is written and what limits it has:

    rows: int = setting(32, "whole", "rows of a sub-batch", shown=32, least=1)

No command line is known here: `commands.settings_flags` makes flags of this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.values import read_choice, read_ratio, read_real, read_switch, read_whole

KEY = "setting"  # in a field's metadata
Kind = Literal[
    "whole",
    "real",
    "ratio",  # a share between 0 and 1, exactly as written
    "switch",  # true or false
    "choice",
    "text",
    "percent",  # FlexGen's six numbers
    "given",  # it is true where it is named; it takes no value
    "wholes",  # one or more, side by side
    "texts",  # likewise
    "repeated",  # a text each time that it is named
]


@dataclass(frozen=True)
class Setting:
    """What is known of a field that people fill.

    Attributes:
        kind: of its value.
        text: what it is, for people.
        shown: its default, for people; None where nothing is said of one.
        topic: what it is about, by which a command's help is ordered.
        flag: "" for the field's name with hyphens.
        short: a second name of the flag, with one letter.
        metavar: what help calls the value; None for the field's name.
        least, most, is_odd: limits of numbers.
        known: the values of a choice.
    """

    kind: Kind
    text: str
    shown: object = None
    topic: str = ""
    flag: str = ""
    short: str | None = None
    metavar: str | None = None
    least: float = 0
    most: float | None = None
    is_odd: bool = False
    known: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        return self.text if self.shown is None else f"{self.text} (default: {self.shown})"

    def read(self, name: str, text: str) -> Any:
        """The value that a text stands for, of a kind that takes one text. Raises UsageError in one sentence.

        Args:
            name: what the text was given for, such as a flag.
        """
        match self.kind:
            case "whole" | "wholes":
                most = None if self.most is None else int(self.most)
                return read_whole(name, text, int(self.least), most, self.is_odd)
            case "real":
                return read_real(name, text, self.least, math.inf if self.most is None else self.most)
            case "ratio":
                return read_ratio(name, text)
            case "switch":
                return read_switch(name, text)
            case "choice":
                return read_choice(name, text, self.known)
            case _:
                return text


def setting(value: Any, kind: Kind, text: str, **more: Any) -> Any:
    """A field with a default that people can set.

    Args:
        more: further attributes of Setting. The default of a switch is shown.
    """
    if kind == "switch":
        more = {"shown": str(value).lower(), **more}
    return field(default=value, metadata={KEY: Setting(kind, text, **more)})


def borrowed(lender: type, name: str, value: Any = MISSING, **changes: Any) -> Any:
    """A field like one of another dataclass.

    Args:
        value: its default, if that is another.
        changes: attributes of Setting that are others.
    """
    (like,) = (other for other in fields(lender) if other.name == name)
    default = like.default if value is MISSING else value
    return field(default=default, metadata={KEY: replace(like.metadata[KEY], **changes)})


def flag_name(name: str) -> str:
    """The flag of a field, unless its setting says another."""
    return "--" + name.replace("_", "-")


def setting_of(owned: "Field[Any]") -> Setting | None:
    """What a field says of itself, flag included; None if it is not for people."""
    found: Setting | None = owned.metadata.get(KEY)
    return None if found is None else replace(found, flag=found.flag or flag_name(owned.name))


def settings_of(kind: type) -> Mapping[str, Setting]:
    """What a dataclass says of its fields, by their names; fields that are not for people are left out."""
    found = {owned.name: setting_of(owned) for owned in fields(kind)}
    return {name: known for name, known in found.items() if known is not None}


def field_values(instance: Any) -> dict[str, Any]:
    """The values of a dataclass's fields as they are, by name."""
    return {owned.name: getattr(instance, owned.name) for owned in fields(instance)}


def least_problems(instance: Any) -> list[str]:
    """A sentence for every whole number of a dataclass that is less than it may be."""
    return [
        f"{known.flag} is {value}; it must be at least {known.least}"
        for name, known in settings_of(type(instance)).items()
        if known.kind == "whole" and (value := getattr(instance, name)) is not None and value < known.least
    ]


def filled(owner: str, values: Mapping[str, Any], kinds: Sequence[type], also: Sequence[str] = ()) -> list[Any]:
    """An instance of each dataclass, each with those of the values that are named as its fields.

    Args:
        owner: what the values are settings of, for messages.
        also: names that are known beside the fields.
    Raises UsageError with every name that nothing has, and the one nearest to it.
    """
    names = {kind: [owned.name for owned in fields(kind)] for kind in kinds}
    known = [name for of_kind in names.values() for name in of_kind]
    problems = []
    for name in values:
        if name not in known:
            (nearest,) = get_close_matches(name, [*known, *also], n=1, cutoff=0)
            problems.append(f"{owner} has no setting {name!r}; the nearest that it has is {nearest!r}")
    if problems:
        raise UsageError(problems)
    return [kind(**{name: values[name] for name in of_kind if name in values}) for kind, of_kind in names.items()]
