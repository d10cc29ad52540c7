"""Which rows each pass computes: a block whose rows begin together."""

from __future__ import annotations

import pytest

from flexgen_h2o.engine.rows import FixedRows
from flexgen_h2o.plan.schedule import cut_block

SHAPE = cut_block(5, 2, 4)


@pytest.mark.parametrize("numbers", [range(4), range(2, 6), [0, 1, 7], [3]], ids=str)
def test_the_numbers_come_in_order_and_none_after_them(numbers: range | list[int]) -> None:
    rows = FixedRows(SHAPE, numbers)
    steps = [rows.next_step(()) for _ in numbers]
    assert steps == list(SHAPE.steps(numbers))
    assert [step.number for step in steps if step is not None] == list(numbers)
    assert [rows.next_step(()) for _ in range(3)] == [None] * 3


def test_rows_stay_until_the_last_of_them_is_done() -> None:
    rows = FixedRows(SHAPE, range(10))
    for number, finished in enumerate([(), (3,), (3, 0), (3, 0, 1, 4)]):
        step = rows.next_step(finished)
        assert step is not None and step.number == number
        assert [row for group in step.groups for row in range(5)[group.rows]] == list(range(5))
    assert rows.next_step((3, 0, 1, 4, 2)) is None
