"""The zig-zag block schedule (FlexGen, Sheng et al. 2023, arXiv 2303.06865, section 4.1) as a pure generator.

A block is all the sequences that share one pass over the layers. Every layer is visited once a step for the whole
block, so that whatever a layer costs to bring is paid once for all its rows. The schedule knows no tensors: the engine
executes its operations, and a simulator can count them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from flexgen_h2o.plan.model_shape import OUTER

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Group:
    """Consecutive rows of a block that are computed together.

    Attributes:
        index: among the groups of its phase.
        units: indices of the units it holds; in prefill it is one.
    """

    index: int
    phase: Phase
    units: tuple[int, ...]
    rows: slice

    @property
    def key(self) -> tuple[Phase, int]:
        """Tells it from all other groups of a block."""
        return self.phase, self.index

    @property
    def count(self) -> int:
        """How many rows it has."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class Step:
    """One pass over the layers.

    Attributes:
        number: tokens of each row that earlier steps have chosen.
        groups: in the order in which they are computed.
        is_last: nothing follows, whatever is chosen.
    """

    number: int
    groups: tuple[Group, ...]
    is_last: bool = False

    @property
    def phase(self) -> Phase:
        """What it is counted as: prefill, if there is nothing else in it."""
        return "prefill" if all(group.phase == "prefill" for group in self.groups) else "decode"


@dataclass(frozen=True)
class BlockShape:
    """How the rows of one block are cut.

    Units are sub-batches of `gpu_batch_size` rows: prefill computes one at a time, and KV lives and moves by unit.
    Groups are runs of units whose projections and MLPs are computed together in decode.
    """

    unit_rows: tuple[slice, ...]
    prefill_groups: tuple[Group, ...]
    decode_groups: tuple[Group, ...]

    @property
    def rows(self) -> int:
        return self.unit_rows[-1].stop

    def steps(self, numbers: Sequence[int]) -> Iterator[Step]:
        """Passes of all rows together: number 0 is prefill, the others are decode steps.

        Args:
            numbers: in order; all of them, or a few that stand for the rest.
        """
        for number in numbers:
            yield Step(number, self.decode_groups if number else self.prefill_groups, number == numbers[-1])


def cut_block(rows: int, gpu_batch_size: int, decode_batch_size: int) -> BlockShape:
    """Cuts `rows` rows (at least 1) into units of `gpu_batch_size` and groups of `decode_batch_size` rows.

    The last unit and the last group may be smaller. `decode_batch_size` is a multiple of `gpu_batch_size`.
    """
    units = tuple(slice(a, min(a + gpu_batch_size, rows)) for a in range(0, rows, gpu_batch_size))
    per_group = decode_batch_size // gpu_batch_size
    return BlockShape(units, _group(units, 1, "prefill"), _group(units, per_group, "decode"))


def _group(units: Sequence[slice], units_per_group: int, phase: Phase) -> tuple[Group, ...]:
    groups: list[Group] = []
    for first in range(0, len(units), units_per_group):
        members = tuple(range(first, min(first + units_per_group, len(units))))
        groups.append(Group(len(groups), phase, members, slice(units[members[0]].start, units[members[-1]].stop)))
    return tuple(groups)


@dataclass(frozen=True)
class FetchWeights:
    """Starts to bring a page of weights to the device."""

    page: int


@dataclass(frozen=True)
class ReleaseWeights:
    """The page's place on the device may be used for another."""

    page: int


@dataclass(frozen=True)
class LoadCache:
    """Starts to bring a unit's KV to the device."""

    layer: int
    unit: int


@dataclass(frozen=True)
class StoreCache:
    """Starts to put back what a step has changed of the KV of one of a group's units."""

    layer: int
    unit: int
    group: Group


@dataclass(frozen=True)
class LoadHidden:
    """Starts to bring a prefill group's hidden states to the device."""

    group: Group


@dataclass(frozen=True)
class StoreHidden:
    """Starts to put a prefill group's hidden states where they live between layers."""

    group: Group


@dataclass(frozen=True)
class Embed:
    """Turns the group's token ids into hidden states."""

    step: int
    group: Group


@dataclass(frozen=True)
class Project:
    """Computes the layer's queries, keys and values for the group."""

    layer: int
    group: Group


@dataclass(frozen=True)
class Attend:
    """Attention of one of a group's units over its KV, which it also updates."""

    step: int
    layer: int
    unit: int
    group: Group


@dataclass(frozen=True)
class Finish:
    """Output projection and MLP of the layer for the group."""

    layer: int
    group: Group


@dataclass(frozen=True)
class Choose:
    """Chooses the group's next token from its logits."""

    step: int
    group: Group


@dataclass(frozen=True)
class EndStep:
    """Every row of the step has its next token."""

    step: int


Operation = (
    FetchWeights
    | ReleaseWeights
    | LoadCache
    | StoreCache
    | LoadHidden
    | StoreHidden
    | Embed
    | Project
    | Attend
    | Finish
    | Choose
    | EndStep
)


def places(look_ahead: int) -> int:
    """How many pages of weights, or units of KV, have a place on the device: that in use, and those on their way."""
    return 1 + look_ahead


def telling_steps(gen_len: int) -> list[int]:
    """Prefill, the first two decode steps and the last: what a walk needs that is to stand for a whole run."""
    return sorted({0, *(step for step in (1, 2, gen_len - 1) if 0 < step < gen_len)})


class Zigzag:
    """The schedule of one block: step after step, the operations of a pass over the layers.

    Args:
        layers: decoder layers.
        look_ahead: how many pages of weights, units of KV, and hidden states of groups are on their way ahead of those
            in use. Computation is the same, in the same order, whatever it is.
        groups_in_flight: decode groups whose attention may be under way at once, where it runs beside the projections.
    """

    def __init__(self, layers: int, look_ahead: int = 0, groups_in_flight: int = 1):
        self._layers = layers
        self._look_ahead = look_ahead
        self._groups_in_flight = groups_in_flight
        self._pages: deque[FetchWeights] = deque()  # in the order of use; those not yet fetched
        self._has_begun = False

    def walk(self, step: Step) -> Iterator[Operation]:
        """All operations of a step; the next one is asked for once they have been carried out."""
        groups = step.groups
        # A unit must have been put back before it is loaded again, so there is no looking ahead of all of them.
        ahead = min(self._look_ahead, self._layers * sum(len(group.units) for group in groups) - 1)
        units, hidden = _unit_order(self._layers, groups), _hidden_order(self._layers, groups)
        yield from self._begin(step)
        yield from islice(units, ahead)
        if not self._has_begun:
            yield from self._fetch(1)
            self._has_begun = True
        for group in groups:
            yield Embed(step.number, group)
            yield from _store_hidden(group)
        # Hidden states, too, and only those in prefill move.
        in_prefill = sum(group.phase == "prefill" for group in groups)
        yield from islice(hidden, max(0, min(self._look_ahead, in_prefill - 1)))
        yield ReleaseWeights(OUTER)
        for layer in range(self._layers):
            yield from self._fetch(1)
            waiting: deque[Group] = deque()
            for group in groups:
                yield from islice(hidden, int(group.phase == "prefill"))
                yield Project(layer, group)
                for unit in group.units:
                    yield from islice(units, int(group.phase == "decode"))
                    yield Attend(step.number, layer, unit, group)
                    yield StoreCache(layer, unit, group)
                waiting.append(group)
                while len(waiting) >= (self._groups_in_flight if group.phase == "decode" else 1):
                    yield from _finish(layer, waiting.popleft())
            for group in waiting:
                yield from _finish(layer, group)
            yield ReleaseWeights(layer)
        yield from self._fetch(1)
        for group in groups:
            yield from islice(hidden, int(group.phase == "prefill"))
            yield Choose(step.number, group)
        yield EndStep(step.number)

    def _begin(self, step: Step) -> Iterator[FetchWeights]:
        """Pages in the order of use. The outer page that chooses one token stays to embed the next."""
        one_pass = [*map(FetchWeights, range(self._layers)), FetchWeights(OUTER)]
        if not self._has_begun:
            self._pages += [FetchWeights(OUTER), *one_pass]
        if not step.is_last:
            self._pages += one_pass
        if not self._has_begun:
            yield from self._fetch(self._look_ahead)

    def _fetch(self, count: int) -> Iterator[FetchWeights]:
        for _ in range(min(count, len(self._pages))):
            yield self._pages.popleft()


def zigzag(steps: Iterable[Step], layers: int, look_ahead: int = 0, groups_in_flight: int = 1) -> Iterator[Operation]:
    """All operations of some steps; the other arguments are those of Zigzag."""
    schedule = Zigzag(layers, look_ahead, groups_in_flight)
    for step in steps:
        yield from schedule.walk(step)


def _finish(layer: int, group: Group) -> Iterator[Operation]:
    yield Finish(layer, group)
    yield from _store_hidden(group)


def _store_hidden(group: Group) -> Iterator[StoreHidden]:
    """Hidden states have homes in prefill; in decode they are small and stay on the device."""
    if group.phase == "prefill":
        yield StoreHidden(group)


def _hidden_order(layers: int, groups: Sequence[Group]) -> Iterator[LoadHidden]:
    """Hidden states in the order of their use: by every layer, and by the choice of the token."""
    in_prefill = [group for group in groups if group.phase == "prefill"]
    for _ in range(layers + 1):
        yield from map(LoadHidden, in_prefill)


def _unit_order(layers: int, groups: Sequence[Group]) -> Iterator[LoadCache]:
    """Units in the order of use; prefill fills them and loads none."""
    for layer in range(layers):
        for group in groups:
            if group.phase == "decode":
                for unit in group.units:
                    yield LoadCache(layer, unit)
