"""The zig-zag schedule: one case written out by hand, and what must hold for every cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.plan.model_shape import OUTER
from flexgen_h2o.plan.schedule import (
    Attend,
    BlockShape,
    Choose,
    Embed,
    EndStep,
    FetchWeights,
    Finish,
    Group,
    LoadCache,
    LoadHidden,
    Operation,
    Project,
    Step,
    StoreCache,
    StoreHidden,
    Zigzag,
    cut_block,
    zigzag,
)

COMPUTATIONS = (Embed, Project, Attend, Finish, Choose, EndStep)


def walked(shape: BlockShape, tokens: int, layers: int, look_ahead: int = 0) -> Iterator[tuple[Step, Operation]]:
    """Operations of a whole block, each with the step that it belongs to."""
    schedule = Zigzag(layers, look_ahead)
    for step in shape.steps(range(tokens)):
        yield from ((step, operation) for operation in schedule.walk(step))


def computations(operations: Iterable[Operation]) -> list[Operation]:
    """Without what moves bytes."""
    return [operation for operation in operations if isinstance(operation, COMPUTATIONS)]


def test_a_small_block_by_hand() -> None:
    """3 rows in units of 2, decoded together: 2 layers, 2 tokens."""
    first, second = Group(0, "prefill", (0,), slice(0, 2)), Group(1, "prefill", (1,), slice(2, 3))
    both = Group(0, "decode", (0, 1), slice(0, 3))
    assert computations(zigzag(cut_block(3, 2, 4).steps(range(2)), 2)) == [
        Embed(0, first),
        Embed(0, second),
        *(Project(0, first), Attend(0, 0, 0, first), Finish(0, first)),
        *(Project(0, second), Attend(0, 0, 1, second), Finish(0, second)),
        *(Project(1, first), Attend(0, 1, 0, first), Finish(1, first)),
        *(Project(1, second), Attend(0, 1, 1, second), Finish(1, second)),
        Choose(0, first),
        Choose(0, second),
        EndStep(0),
        Embed(1, both),
        *(Project(0, both), Attend(1, 0, 0, both), Attend(1, 0, 1, both), Finish(0, both)),
        *(Project(1, both), Attend(1, 1, 0, both), Attend(1, 1, 1, both), Finish(1, both)),
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


@given(SHAPES)
def test_a_group_counts_its_rows_and_no_other_has_its_key(shape: BlockShape) -> None:
    groups = (*shape.prefill_groups, *shape.decode_groups)
    assert [group.count for group in groups] == [len(range(shape.rows)[group.rows]) for group in groups]
    assert len({group.key for group in groups}) == len(groups)


def test_the_first_step_is_prefill_and_the_last_says_so() -> None:
    shape = cut_block(3, 2, 4)
    assert list(shape.steps([0, 1, 7])) == [
        Step(0, shape.prefill_groups),
        Step(1, shape.decode_groups),
        Step(7, shape.decode_groups, is_last=True),
    ]
    assert [step.phase for step in shape.steps([0, 1, 7])] == ["prefill", "decode", "decode"]
    assert [step.is_last for step in shape.steps([0])] == [True]


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_each_layer_and_unit_is_attended_once_per_token(shape: BlockShape, tokens: int, layers: int) -> None:
    operations = list(zigzag(shape.steps(range(tokens)), layers))
    attended = Counter((op.step, op.layer, op.unit) for op in operations if isinstance(op, Attend))
    units = range(len(shape.unit_rows))
    assert attended == Counter((t, la, u) for t in range(tokens) for la in range(layers) for u in units)
    assert [op.step for op in operations if isinstance(op, EndStep)] == list(range(tokens))


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_each_layer_is_visited_once_per_token_for_the_whole_block(shape: BlockShape, tokens: int, layers: int) -> None:
    """So that its weights are brought once: the layer never changes and changes back."""
    visits = [(step.number, op.layer) for step, op in walked(shape, tokens, layers) if isinstance(op, Project)]
    changes = [visit for visit, before in zip(visits, [None, *visits], strict=False) if visit != before]
    assert changes == [(token, layer) for token in range(tokens) for layer in range(layers)]


@given(SHAPES, st.integers(1, 3), st.integers(1, 3))
def test_a_group_is_embedded_projected_attended_finished_and_chosen_in_turn(
    shape: BlockShape, tokens: int, layers: int
) -> None:
    operations = list(walked(shape, tokens, layers))
    for step in shape.steps(range(tokens)):
        for group in step.groups:
            of_group = [op for at, op in operations if at.number == step.number and concerns(op, group)]
            assert of_group == computations_of(group, step.number, layers)


def computations_of(group: Group, step: int, layers: int) -> list[Operation]:
    """What is computed of a group in a step, in order."""
    expected: list[Operation] = [Embed(step, group)]
    for layer in range(layers):
        attends = [Attend(step, layer, unit, group) for unit in group.units]
        expected += [Project(layer, group), *attends, Finish(layer, group)]
    return [*expected, Choose(step, group)]


def concerns(operation: Operation, group: Group) -> bool:
    """Whether something is computed of a group."""
    return isinstance(operation, COMPUTATIONS) and not isinstance(operation, EndStep) and operation.group == group


@given(SHAPES, st.integers(1, 3))
def test_a_group_is_not_interrupted_between_project_and_finish(shape: BlockShape, layers: int) -> None:
    """Its queries, keys and values are held for one group at a time."""
    holder: Group | None = None
    for operation in zigzag(shape.steps(range(2)), layers):
        if isinstance(operation, Project):
            assert holder is None
            holder = operation.group
        elif isinstance(operation, Attend):
            assert operation.group == holder and operation.unit in operation.group.units
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
    for step, operation in walked(shape, 2, layers, look_ahead):
        match operation:
            case StoreHidden(group):
                at_home.add(group.index)
                on_device.discard(group.index)
            case LoadHidden(group):
                at_home.remove(group.index)
                on_device.add(group.index)
                most = max(most, len(on_device))
            case Project(_, group) if step.number == 0:
                assert group.index in on_device
            case Choose(0, group):
                on_device.remove(group.index)  # of every row's last token alone, which is little
    assert most == min(1 + look_ahead, len(shape.prefill_groups))


@given(SHAPES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3))
def test_pages_are_fetched_in_the_same_order_whatever_is_asked(
    shape: BlockShape, tokens: int, layers: int, look_ahead: int, groups_in_flight: int
) -> None:
    """Once for each use, by every layer of every step; and the outer page that chooses stays to embed."""
    operations = zigzag(shape.steps(range(tokens)), layers, look_ahead, groups_in_flight)
    pages = [operation.page for operation in operations if isinstance(operation, FetchWeights)]
    assert pages == [OUTER, *[*range(layers), OUTER] * tokens]


@given(SHAPES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_a_page_is_there_before_it_is_used_and_nothing_is_fetched_after_the_last_step(
    shape: BlockShape, tokens: int, layers: int, look_ahead: int
) -> None:
    schedule = Zigzag(layers, look_ahead)
    fetched = 0
    uses = 0  # of pages, in the order in which they are fetched: outer, every layer, outer, every layer, ...
    for step in shape.steps(range(tokens)):
        for operation in schedule.walk(step):
            match operation:
                case FetchWeights():
                    fetched += 1
                case Embed(number):
                    uses = number * (layers + 1) + 1
                case Project(layer):
                    uses = step.number * (layers + 1) + layer + 2
                case Choose(number):
                    uses = (number + 1) * (layers + 1) + 1
            assert uses <= fetched
        # As far ahead of the last use as asked, by a step at most.
        assert fetched == uses + (0 if step.is_last else min(look_ahead, layers + 1))
    assert fetched == tokens * (layers + 1) + 1


@st.composite
def mixed_steps(draw: st.DrawFn) -> Step:
    """Steps in which some units are prefilled while the others decode, in any order."""
    shape = draw(SHAPES)
    unit = shape.unit_rows[0].stop
    decoding = cut_block(shape.rows, unit, unit).decode_groups
    pairs = zip(shape.prefill_groups, decoding, strict=True)
    groups = [prefill if draw(st.booleans()) else decode for prefill, decode in pairs]
    return Step(5, tuple(draw(st.permutations(groups))), is_last=True)


@given(mixed_steps(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_groups_of_both_phases_share_a_pass(step: Step, layers: int, look_ahead: int, groups_in_flight: int) -> None:
    operations = list(zigzag([step], layers, look_ahead, groups_in_flight))
    for group in step.groups:
        assert [op for op in operations if concerns(op, group)] == computations_of(group, 5, layers)
    prefill = [group for group in step.groups if group.phase == "prefill"]
    decode = [group for group in step.groups if group.phase == "decode"]
    assert step.phase == ("decode" if decode else "prefill")
    # Hidden states move in prefill alone: home after the embedding and after every layer, back before every use.
    moves = [prefill] * (layers + 1)
    assert [op.group for op in operations if isinstance(op, StoreHidden)] == [g for groups in moves for g in groups]
    assert [op.group for op in operations if isinstance(op, LoadHidden)] == [g for groups in moves for g in groups]
    # KV comes for decode alone, and goes back for all.
    units = [unit for group in decode for unit in group.units]
    loaded = [(op.layer, op.unit) for op in operations if isinstance(op, LoadCache)]
    assert loaded == [(layer, unit) for layer in range(layers) for unit in units]
    stored = [op for op in operations if isinstance(op, StoreCache)]
    assert stored == [StoreCache(la, unit, g) for la in range(layers) for g in step.groups for unit in g.units]
    assert operations[-1] == EndStep(5)


@given(mixed_steps(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_a_mixed_pass_loads_what_it_uses_and_nothing_before_it_was_put_back(
    step: Step, layers: int, look_ahead: int, groups_in_flight: int
) -> None:
    at_home: set[int] = set()
    on_device: set[int] = set()
    cached: set[tuple[int, int]] = set()
    in_flight = 0
    for operation in zigzag([step], layers, look_ahead, groups_in_flight):
        match operation:
            case StoreHidden(group):
                at_home.add(group.index)
                on_device.discard(group.index)
            case LoadHidden(group):
                at_home.remove(group.index)
                on_device.add(group.index)
            case LoadCache(layer, unit):
                cached.add((layer, unit))
            case Project(_, group):
                assert group.phase == "decode" or group.index in on_device
                in_flight += 1
                assert in_flight <= groups_in_flight
            case Choose(_, group):
                assert group.phase == "decode" or group.index in on_device
            case Finish():
                in_flight -= 1
            case Attend(_, layer, unit, group):
                assert group.phase == "prefill" or (layer, unit) in cached
            case StoreCache(layer, unit, group):
                cached.discard((layer, unit))
    assert not at_home and not cached
