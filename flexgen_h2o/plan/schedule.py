"""The zig-zag block schedule (FlexGen, Sheng et al. 2023, arXiv 2303.06865, section 4.1) as a pure generator.

A block is all the sequences that share one pass over the layers. Every layer is visited once per token for the whole
block, so that whatever a layer costs to bring is paid once for all its rows. The generator knows no tensors: the
engine executes its operations, and a simulator can count them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

# The page of weights that holds what lies outside the decoder layers; layer n is page n.
OUTER = -1


@dataclass(frozen=True)
class Group:
    """Consecutive rows of a block that are computed together."""

    index: int
    units: tuple[int, ...]  # indices of the units it holds
    rows: slice


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


def cut_block(rows: int, gpu_batch_size: int, decode_batch_size: int) -> BlockShape:
    """Cuts `rows` rows (at least 1) into units of `gpu_batch_size` and groups of `decode_batch_size` rows.

    The last unit and the last group may be smaller. `decode_batch_size` is a multiple of `gpu_batch_size`.
    """
    units = tuple(slice(a, min(a + gpu_batch_size, rows)) for a in range(0, rows, gpu_batch_size))
    per_group = decode_batch_size // gpu_batch_size
    return BlockShape(units, _group(units, 1), _group(units, per_group))


def _group(units: Sequence[slice], units_per_group: int) -> tuple[Group, ...]:
    groups: list[Group] = []
    for first in range(0, len(units), units_per_group):
        members = tuple(range(first, min(first + units_per_group, len(units))))
        groups.append(Group(len(groups), members, slice(units[members[0]].start, units[members[-1]].stop)))
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
    """Starts to put back what the token has changed of a unit's KV."""

    token: int
    layer: int
    unit: int


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

    token: int
    group: Group


@dataclass(frozen=True)
class Project:
    """Computes the layer's queries, keys and values for the group."""

    token: int
    layer: int
    group: Group


@dataclass(frozen=True)
class Attend:
    """Attention of one unit over its KV, which it also updates."""

    token: int
    layer: int
    unit: int


@dataclass(frozen=True)
class Finish:
    """Output projection and MLP of the layer for the group."""

    token: int
    layer: int
    group: Group


@dataclass(frozen=True)
class Choose:
    """Chooses the group's next token from its logits."""

    token: int
    group: Group


@dataclass(frozen=True)
class EndStep:
    """Every row has its next token."""

    token: int


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


def telling_steps(gen_len: int) -> list[int]:
    """Prefill, the first two decode steps and the last: what a walk needs that is to stand for a whole run."""
    return sorted({0, *(step for step in (1, 2, gen_len - 1) if 0 < step < gen_len)})


def zigzag(
    tokens: Sequence[int], layers: int, shape: BlockShape, look_ahead: int = 0, groups_in_flight: int = 1
) -> Iterator[Operation]:
    """All operations that generate tokens for a block: token 0 is prefill, the others are decode steps.

    Args:
        tokens: the steps to walk, in order; all of them, or a few that stand for the rest.
        layers: decoder layers.
        look_ahead: how many pages of weights, units of KV, and hidden states of groups are on their way ahead of those
            in use. Computation is the same, in the same order, whatever it is.
        groups_in_flight: decode groups whose attention may be under way at once, where it runs beside the projections.
    """
    pages = _page_order(len(tokens), layers)
    yield from islice(pages, look_ahead)
    for step, token in enumerate(tokens):
        groups = shape.prefill_groups if token == 0 else shape.decode_groups
        in_flight = 1 if token == 0 else groups_in_flight
        # A unit must have been put back before it is loaded again, so there is no looking ahead of all of them.
        ahead = min(look_ahead, layers * len(shape.unit_rows) - 1)
        units, hidden = _unit_order(token, layers, groups), _hidden_order(token, layers, groups)
        yield from islice(units, ahead)
        if step == 0:
            yield from islice(pages, 1)
        for group in groups:
            yield Embed(token, group)
            yield from _store_hidden(token, group)
        yield from islice(hidden, min(look_ahead, len(groups) - 1))
        yield ReleaseWeights(OUTER)
        for layer in range(layers):
            yield from islice(pages, 1)
            waiting: deque[Group] = deque()
            for group in groups:
                yield from islice(hidden, 1)
                yield Project(token, layer, group)
                for unit in group.units:
                    yield from islice(units, 1)
                    yield Attend(token, layer, unit)
                    yield StoreCache(token, layer, unit)
                waiting.append(group)
                if len(waiting) == in_flight:
                    yield from _finish(token, layer, waiting.popleft())
            for group in waiting:
                yield from _finish(token, layer, group)
            yield ReleaseWeights(layer)
        yield from islice(pages, 1)
        for group in groups:
            yield from islice(hidden, 1)
            yield Choose(token, group)
        yield EndStep(token)


def _finish(token: int, layer: int, group: Group) -> Iterator[Operation]:
    yield Finish(token, layer, group)
    yield from _store_hidden(token, group)


def _store_hidden(token: int, group: Group) -> Iterator[StoreHidden]:
    """Hidden states have homes in prefill; in decode they are small and stay on the device."""
    if token == 0:
        yield StoreHidden(group)


def _hidden_order(token: int, layers: int, groups: Sequence[Group]) -> Iterator[LoadHidden]:
    """Hidden states in the order of their use: by every layer, and by the choice of the token."""
    if token == 0:
        for _ in range(layers + 1):
            yield from map(LoadHidden, groups)


def _page_order(tokens: int, layers: int) -> Iterator[FetchWeights]:
    """Pages in the order of use. The outer page that chooses one token stays to embed the next."""
    yield FetchWeights(OUTER)
    for _ in range(tokens):
        for layer in range(layers):
            yield FetchWeights(layer)
        yield FetchWeights(OUTER)


def _unit_order(token: int, layers: int, groups: Sequence[Group]) -> Iterator[LoadCache]:
    """Units in the order of use; prefill fills them and loads none."""
    if token == 0:
        return
    for layer in range(layers):
        for group in groups:
            for unit in group.units:
                yield LoadCache(layer, unit)
