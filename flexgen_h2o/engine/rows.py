"""Which rows each pass over the layers computes."""

from collections.abc import Sequence
from typing import Protocol

from flexgen_h2o.plan.schedule import BlockShape, Step


class RowScheduler(Protocol):
    """Decides, step by step, which groups of rows share the next pass over the layers."""

    def next_step(self, finished: Sequence[int]) -> Step | None:
        """The next step; None if nothing is left to do.

        Args:
            finished: the rows whose texts have ended.
        """


class FixedRows:
    """A block whose rows begin together and stay until the last of them is done.

    Args:
        numbers: of the steps, in order: all of them, or a few that stand for the rest.
    """

    def __init__(self, shape: BlockShape, numbers: Sequence[int]):
        self._rows = shape.rows
        self._steps = shape.steps(numbers)

    def next_step(self, finished: Sequence[int]) -> Step | None:
        return next(self._steps, None) if len(finished) < self._rows else None
