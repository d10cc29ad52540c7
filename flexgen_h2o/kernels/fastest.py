"""Chooses between ways of doing the same by trying them."""

import statistics
from collections.abc import Callable, Hashable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

TRIALS = 5
# Whether there is a second way on a GPU: it comes with torch, but not on every system.
HAS_TRITON = torch.backends.cuda.is_built() and find_spec("triton") is not None

Way = Callable[..., Any]


class Fastest:
    """Of several ways to do the same, the one that was the quickest when work of that kind first came up.

    Args:
        ways: by name. The first is the reference: it can do any work, and is taken unless another one is quicker.
        kind: the kind of work that arguments make, anything hashable; None if only the reference can do it.
        rehearsal: arguments that make work of the same kind, and are none of what the given ones refer to that a call
            would change.
        seconds: what a call takes.

    Attributes:
        chosen: the names, by kind.
        failures: what those said that failed where they were tried, by name.
    """

    def __init__(
        self,
        ways: Mapping[str, Way],
        kind: Callable[..., Hashable | None],
        rehearsal: Callable[..., tuple[Any, ...]],
        seconds: Callable[[Callable[[], object]], float],
    ):
        self._ways = dict(ways)
        self._reference = next(iter(ways))
        self._kind = kind
        self._rehearsal = rehearsal
        self._seconds = seconds
        self.chosen: dict[Hashable, str] = {}
        self.failures: dict[str, str] = {}

    def __call__(self, *args: Any) -> Any:
        kind = self._kind(*args)
        if kind is None:
            return self._ways[self._reference](*args)
        if kind not in self.chosen:
            self.chosen[kind] = self._choose(self._rehearsal(*args))
        return self._ways[self.chosen[kind]](*args)

    @property
    def names(self) -> str:
        """The ways that have been chosen so far, for reports; the reference if none has been. And what has failed."""
        chosen = " and ".join(name for name in self._ways if name in self.chosen.values()) or self._reference
        failed = "; ".join(f"{name} failed: {said}" for name, said in self.failures.items())
        return f"{chosen} ({failed})" if failed else chosen

    def _choose(self, args: tuple[Any, ...]) -> str:
        """Tries all ways in turn, after a call of each that warms up. One that fails there is out."""
        self._ways[self._reference](*args)
        able = [self._reference]
        for name, way in self._ways.items():
            if name == self._reference:
                continue
            try:
                way(*args)
                able.append(name)
            except Exception as error:  # a compiler may refuse a device that the reference runs on
                self.failures[name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        spent: dict[str, list[float]] = {name: [] for name in able}
        for _ in range(TRIALS):
            for name, times in spent.items():
                way = self._ways[name]
                times.append(self._seconds(lambda way=way: way(*args)))  # type: ignore[misc]
        return min(spent, key=lambda name: statistics.median(spent[name]))
