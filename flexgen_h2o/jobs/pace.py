"""How far a job has come, how fast it goes, and when it will be done: by a clock that nobody sets."""

import time

from flexgen_h2o.jobs.record import Progress


class Pace:
    """Counts while a job runs.

    Args:
        total: prompts of the whole job that can be served; None if nobody knows.
        before: what earlier runs have done.
        gen_len: tokens per prompt, at most.

    Attributes:
        served: prompts that are done, those of earlier runs too.
        generated: tokens, of this run.
    """

    def __init__(self, total: int | None, before: Progress, gen_len: int):
        self.total = total
        self.served = before.served
        self.generated = 0
        self._served_before = before.served
        self._gen_len = gen_len
        self._of_block = 0  # tokens
        self._started = time.monotonic()

    def tokens(self, count: int) -> None:
        """Counts tokens that have just been generated."""
        self.generated += count
        self._of_block += count

    def block_done(self, progress: Progress) -> None:
        """Counts a block whose lines are written."""
        self.served, self._of_block = progress.served, 0

    @property
    def elapsed_s(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.elapsed_s

    @property
    def prompts(self) -> float:
        """Prompts served, that of the block under way by its tokens."""
        done = self.served + self._of_block / self._gen_len
        return done if self.total is None else min(done, self.total)

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is done, if it goes on as it did in this run; None if that cannot be said."""
        done = self.prompts - self._served_before
        if self.total is None or not done:
            return None
        return (self.total - self.prompts) * self.elapsed_s / done
