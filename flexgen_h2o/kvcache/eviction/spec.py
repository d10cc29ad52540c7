"""Which eviction policy is asked for, and how large its regions are. Plain data, checked in one place."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import field_values, flag_name, least_problems, setting
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.registry import HELP, HOMES, load, read_parameters

DEFAULT_RATIO = "0.1"
DEFAULT_SINKS = 4

Ratio = str | float | Fraction


@dataclass(frozen=True)
class EvictionSpec:
    """The eviction policy as asked for, before the lengths of the run are known.

    Ratios are shares of the whole sequence, prompt + generated; sizes are entries. None means not given: if only one
    of the two regions is given, the other is as large.

    Attributes:
        eviction: the policy's name, and after a colon those of its parameters that are not to have their defaults, as
            in smooth:decay=0.99,pooled=5.
    """

    eviction: str = setting(
        "h2o",
        "text",
        f"{', '.join(HOMES)}; with parameters as in smooth:decay=0.99,pooled=5; {HELP} says what each keeps, and"
        " what can be set",
        shown="h2o",
        topic="cache",
    )
    hh_ratio: Ratio | None = setting(
        None, "ratio", "heavy hitters, as a share of prompt + generated", shown=DEFAULT_RATIO, topic="cache"
    )
    recent_ratio: Ratio | None = setting(
        None, "ratio", "recent entries, likewise", shown="as --hh-ratio", topic="cache"
    )
    hh_size: int | None = setting(None, "whole", "heavy hitters, in entries", topic="cache", least=0)
    recent_size: int | None = setting(None, "whole", "recent entries, in entries", topic="cache", least=1)
    sink_size: int | None = setting(
        None, "whole", "first tokens kept by --eviction sink", shown=DEFAULT_SINKS, topic="cache", least=1
    )

    @property
    def name(self) -> str:
        """The policy's name alone."""
        return str(self.eviction).partition(":")[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that were given, by name. Raises UsageError for what cannot be."""
        name, colon, text = str(self.eviction).partition(":")
        return read_parameters(name, text) if colon else {}

    @property
    def size_fields(self) -> tuple[str, ...]:
        """The fields that have to be given for the regions to depend on no length; none where they always do."""
        rule = self._class
        sizes = [name for name in ("hh_size", "recent_size") if name in (*rule.heavy_by, *rule.recent_by)]
        return tuple(sizes) if rule.recent_by else ()

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether the regions are as large whatever the lengths are."""
        return bool(self.size_fields) and all(getattr(self, name) is not None for name in self.size_fields)

    @property
    def _class(self) -> type[EvictionRule]:
        """The policy's class; that of all policies where the name is unknown."""
        return load(self.name) if self.name in HOMES else EvictionRule

    def problems(self) -> list[str]:
        """Every mistake that can be seen before lengths are known."""
        found = self._policy_problems() + self._range_problems()
        for one, other in (("hh_ratio", "hh_size"), ("recent_ratio", "recent_size")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                found.append(f"{flag_name(one)} and {flag_name(other)} say the same thing twice; give one of them")
        return found

    def _policy_problems(self) -> list[str]:
        """Whether there is such a policy, and what means nothing to it."""
        if self.name not in HOMES:
            known = ", ".join(HOMES)
            return [f"--eviction {self.name!r} is unknown; known policies: {known}; --eviction {HELP} shows all"]
        used = ("eviction", *self._class.heavy_by, *self._class.recent_by)
        found = [
            f"{flag_name(name)} means nothing with --eviction {self.name}; leave it out"
            for name, value in field_values(self).items()
            if name not in used and value is not None
        ]
        try:
            _ = self.parameters
        except UsageError as error:
            found += error.problems
        return found

    def _range_problems(self) -> list[str]:
        found = []
        for name in ("hh_ratio", "recent_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= _fraction(value) <= 1:
                found.append(f"{flag_name(name)} is {value}; it must be a number between 0 and 1")
        found += least_problems(self)
        if self.recent_ratio is not None and _fraction(self.recent_ratio) == 0:
            found.append("--recent-ratio is 0; the newest token must be kept: use a larger ratio or --recent-size 1")
        recent_follows_heavy = self.recent_ratio is None and self.recent_size is None
        for name in ("hh_ratio", "hh_size"):
            value = getattr(self, name)
            if recent_follows_heavy and value is not None and _fraction(value) == 0:
                found.append(f"{flag_name(name)} is 0 and so would be the recent region; give --recent-ratio too")
        return found

    def sizes(self, length: int) -> tuple[int, int]:
        """(heavy, recent) in entries for sequences of `length` tokens, prompt + generated.

        heavy = floor(hh_ratio * length), recent = max(1, floor(recent_ratio * length)), floored as decimals, so that
        0.35 of 180 is 63. Together at most `length`: what would exceed it is taken from heavy. Raises UsageError if
        the specification has mistakes.
        """
        problems = self.problems()
        if problems:
            raise UsageError(problems)
        recent = length
        if self._class.recent_by:
            recent = self._entries(self.recent_size, self.recent_ratio, self.hh_size, self.hh_ratio, length)
            recent = min(max(1, recent), length)
        heavy = 0
        if "sink_size" in self._class.heavy_by:
            heavy = DEFAULT_SINKS if self.sink_size is None else self.sink_size
        elif self._class.heavy_by:
            heavy = self._entries(self.hh_size, self.hh_ratio, self.recent_size, self.recent_ratio, length)
        return min(heavy, length - recent), recent

    @staticmethod
    def _entries(
        size: int | None, ratio: Ratio | None, other_size: int | None, other_ratio: Ratio | None, length: int
    ) -> int:
        """Entries of one region: as given for it, else as given for the other region, else the default."""
        for entries, share in ((size, ratio), (other_size, other_ratio)):
            if entries is not None:
                return entries
            if share is not None:
                return math.floor(_fraction(share) * length)
        return math.floor(_fraction(DEFAULT_RATIO) * length)

    def rule(self, length: int) -> EvictionRule:
        """The rule with its sizes, for sequences of `length` tokens. Raises UsageError if there are mistakes."""
        return load(self.name)(*self.sizes(length), **self.parameters)


def _fraction(ratio: Ratio) -> Fraction:
    """A ratio exactly as written; -1, which no rule allows, for what is no number."""
    if isinstance(ratio, Fraction):
        return ratio
    try:
        # By way of text: the float 0.35 is less than 35/100, and 0.35 * 180 would floor to 62.
        return Fraction(str(ratio))
    except (ValueError, ZeroDivisionError):
        return Fraction(-1)
