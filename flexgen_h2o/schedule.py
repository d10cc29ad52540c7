"""The zig-zag block schedule (FlexGen, Sheng et al. 2023, arXiv 2303.06865, section 4.1) as a pure generator.

A block is all the sequences that share one pass over the layers. Every layer is visited once per token for the whole
block, so that whatever a layer costs to bring is paid once for all its rows. The generator knows no tensors: the
engine executes its operations, and a simulator can count them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


Operation = Embed | Project | Attend | Finish | Choose | EndStep


def zigzag(tokens: int, layers: int, shape: BlockShape) -> Iterator[Operation]:
    """All operations that generate `tokens` tokens per row: token 0 is prefill, the others are decode steps."""
    for token in range(tokens):
        groups = shape.prefill_groups if token == 0 else shape.decode_groups
        for group in groups:
            yield Embed(token, group)
        for layer in range(layers):
            for group in groups:
                yield Project(token, layer, group)
                for unit in group.units:
                    yield Attend(token, layer, unit)
                yield Finish(token, layer, group)
        for group in groups:
            yield Choose(token, group)
        yield EndStep(token)
