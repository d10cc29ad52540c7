"""The zig-zag schedule: one case written out by hand, and what must hold for every cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.plan.schedule import (
    Attend,
    BlockShape,
    Choose,
    Embed,
    EndStep,
    Finish,
    Group,
    LoadHidden,
    Operation,
    Project,
    StoreHidden,
    cut_block,
    zigzag,
)

COMPUTATIONS = (Embed, Project, Attend, Finish, Choose, EndStep)


def computations(operations: Iterable[Operation]) -> list[Operation]:
    """Without what moves bytes."""
    return [operation for operation in operations if isinstance(operation, COMPUTATIONS)]


def test_a_small_block_by_hand() -> None:
    """3 rows in units of 2, decoded together: 2 layers, 2 tokens."""
    first, second = Group(0, (0,), slice(0, 2)), Group(1, (1,), slice(2, 3))
    both = Group(0, (0, 1), slice(0, 3))
    assert computations(zigzag(range(2), 2, cut_block(3, 2, 4))) == [
        Embed(0, first),
        Embed(0, second),
        *(Project(0, 0, first), Attend(0, 0, 0), Finish(0, 0, first)),
        *(Project(0, 0, second), Attend(0, 0, 1), Finish(0, 0, second)),
        *(Project(0, 1, first), Attend(0, 1, 0), Finish(0, 1, first)),
        *(Project(0, 1, second), Attend(0, 1, 1), Finish(0, 1, second)),
        Choose(0, first),
        Choose(0, second),
        EndStep(0),
        Embed(1, both),
        *(Project(1, 0, both), Attend(1, 0, 0), Attend(1, 0, 1), Finish(1, 0, both)),
        *(Project(1, 1, both), Attend(1, 1, 0), Attend(1, 1, 1), Finish(1, 1, both)),
        Choose(1, both),
        EndStep(1),
    ]


@pytest.mark.parametrize(
    ("rows", "batch", "decode", "units", "groups"),
    [
        (1, 1, 1, [(0, 1)], [(0, 1)]),
        (1, 4, 8, [(0, 1)], [(0, 1)]),
        (4, 4, 4, [(0, 4)], [(0, 4)]),
        (7, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 7)], [(0, 4), (4, 7)]),
        (7, 2, 2, [(0, 2), (2, 4), (4, 6), (6, 7)], [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (7, 2, 6, [(0, 2), (2, 4), (4, 6), (6, 7)], [(0, 6), (6, 7)]),
        (6, 3, 12, [(0, 3), (3, 6)], [(0, 6)]),
    ],
)
def test_cuts_by_hand(
    rows: int, batch: int, decode: int, units: list[tuple[int, int]], groups: list[tuple[int, int]]
) -> None:
    shape = cut_block(rows, batch, decode)
    assert [(unit.start, unit.stop) for unit in shape.unit_rows] == units
    assert [(group.rows.start, group.rows.stop) for group in shape.prefill_groups] == units
    assert [(group.rows.start, group.rows.stop) for group in shape.decode_groups] == groups
    assert shape.rows == rows


SHAPES = st.builds(
    lambda rows, batch, per_group: cut_block(rows, batch, batch * per_group),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 5),
)


@given(SHAPES)
def test_every_row_is_in_one_unit_and_one_group(shape: BlockShape) -> None:
    rows = list(range(shape.rows))
    assert [row for unit in shape.unit_rows for row in rows[unit]] == rows
    for groups in (shape.prefill_groups, shape.decode_groups):
        assert [row for group in groups for row in rows[group.rows]] == rows
        assert [unit for group in groups for unit in group.units] == list(range(len(shape.unit_rows)))
        assert [group.index for group in groups] == list(range(len(groups)))
        for group in groups:
            assert rows[group.rows] == [row for unit in group.units for row in rows[shape.unit_rows[unit]]]
    assert [group.units for group in shape.prefill_groups] == [(unit,) for unit in range(len(shape.unit_rows))]


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_each_layer_and_unit_is_attended_once_per_token(shape: BlockShape, tokens: int, layers: int) -> None:
    operations = list(zigzag(range(tokens), layers, shape))
    attended = Counter((op.token, op.layer, op.unit) for op in operations if isinstance(op, Attend))
    units = range(len(shape.unit_rows))
    assert attended == Counter((t, la, u) for t in range(tokens) for la in range(layers) for u in units)
    assert [op.token for op in operations if isinstance(op, EndStep)] == list(range(tokens))


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_each_layer_is_visited_once_per_token_for_the_whole_block(shape: BlockShape, tokens: int, layers: int) -> None:
    """So that its weights are brought once: the layer never changes and changes back."""
    visits = [(op.token, op.layer) for op in zigzag(range(tokens), layers, shape) if isinstance(op, Project)]
    changes = [visit for visit, before in zip(visits, [None, *visits], strict=False) if visit != before]
    assert changes == [(token, layer) for token in range(tokens) for layer in range(layers)]


@given(SHAPES, st.integers(1, 3), st.integers(1, 3))
def test_a_group_is_embedded_projected_attended_finished_and_chosen_in_turn(
    shape: BlockShape, tokens: int, layers: int
) -> None:
    for token in range(tokens):
        groups = shape.prefill_groups if token == 0 else shape.decode_groups
        for group in groups:
            steps = [op for op in zigzag(range(tokens), layers, shape) if concerns(op, token, group)]
            expected: list[Operation] = [Embed(token, group)]
            for layer in range(layers):
                attends = [Attend(token, layer, unit) for unit in group.units]
                expected += [Project(token, layer, group), *attends, Finish(token, layer, group)]
            assert steps == [*expected, Choose(token, group)]


def concerns(operation: Operation, token: int, group: Group) -> bool:
    if not isinstance(operation, COMPUTATIONS) or operation.token != token or isinstance(operation, EndStep):
        return False
    return operation.unit in group.units if isinstance(operation, Attend) else operation.group == group


@given(SHAPES, st.integers(1, 3))
def test_a_group_is_not_interrupted_between_project_and_finish(shape: BlockShape, layers: int) -> None:
    """Its queries, keys and values are held for one group at a time."""
    holder = None
    for operation in zigzag(range(2), layers, shape):
        if isinstance(operation, Project):
            assert holder is None
            holder = operation.group
        elif isinstance(operation, Attend):
            assert holder is not None and operation.unit in holder.units
        elif isinstance(operation, Finish):
            assert operation.group == holder
            holder = None


@pytest.mark.parametrize("look_ahead", [0, 1])
@given(shape=SHAPES, layers=st.integers(1, 3))
def test_hidden_states_are_on_the_device_where_they_are_used_and_one_group_more_at_most(
    look_ahead: int, shape: BlockShape, layers: int
) -> None:
    at_home: set[int] = set()
    on_device: set[int] = set()
    most = 0
    for operation in zigzag(range(2), layers, shape, look_ahead):
        match operation:
            case StoreHidden(group):
                at_home.add(group.index)
                on_device.discard(group.index)
            case LoadHidden(group):
                at_home.remove(group.index)
                on_device.add(group.index)
                most = max(most, len(on_device))
            case Project(0, _, group):
                assert group.index in on_device
            case Choose(0, group):
                on_device.remove(group.index)  # of every row's last token alone, which is little
    assert most == min(1 + look_ahead, len(shape.prefill_groups))
