"""What a run is asked to do: sizes of the block, and of the KV buffer. Plain data, checked in one place."""

import math
from dataclasses import dataclass
from fractions import Fraction

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.placement import Percent

EVICTIONS = ("h2o", "full", "local", "sink", "smooth")
DEFAULT_RATIO = "0.1"
DEFAULT_SINKS = 4
DEFAULT_GPU_BATCH_SIZE = 32
MOST_ROWS = 10**6  # of a sub-batch; and sub-batches of a block


@dataclass(frozen=True)
class Policy:
    """How a block is cut and where things live. FlexGen section 4 has the same choices.

    Attributes:
        gpu_batch_size: rows of a prefill sub-batch, the unit in which KV lives.
        num_gpu_batches: sub-batches of a block.
        decode_batch_size: rows computed together in decode; None for the whole block, or for half of it where
            attention runs beside the projections.
        percent: homes of weights, cache and hidden states.
        overlap: load what is needed next while computing.
        cpu_cache_compute: decode attention of KV in host memory runs on the CPU, beside a GPU.
        pin_weight: keep weights in host memory pinned, beside a GPU.
        compress_weight: weights in 4-bit groups, at home and on their way.
        compress_cache: KV likewise.
        ring_16bit: with compress_cache, entries are quantised only when they leave the ring.
    """

    gpu_batch_size: int = DEFAULT_GPU_BATCH_SIZE
    num_gpu_batches: int = 1
    decode_batch_size: int | None = None
    percent: Percent = Percent()
    overlap: bool = True
    cpu_cache_compute: bool = False
    pin_weight: bool = True
    compress_weight: bool = False
    compress_cache: bool = False
    ring_16bit: bool = False

    @property
    def cache_in_4_bits(self) -> tuple[bool, bool]:
        """Whether the heavy region, and the ring, are kept in 4 bits."""
        return self.compress_cache, self.compress_cache and not self.ring_16bit

    @property
    def block_rows(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def group_rows(self) -> int:
        if self.decode_batch_size is not None:
            return self.decode_batch_size
        if self.groups_in_flight == 1:
            return self.block_rows
        return self.gpu_batch_size * max(1, self.num_gpu_batches // self.groups_in_flight)

    @property
    def look_ahead(self) -> int:
        """Pages of weights, units of KV and hidden states that are on their way ahead of those in use."""
        return 1 if self.overlap else 0

    @property
    def travelling_hidden(self) -> int:
        """Hidden states of sub-batches on their way at once in prefill: one home, one back while another is used."""
        return 1 + self.look_ahead if self.percent.hidden[0] < 1 else 0

    @property
    def groups_in_flight(self) -> int:
        """Two groups keep both the CPU (attention) and the GPU (projections) at work."""
        return 2 if self.overlap and self.cpu_cache_compute else 1

    def problems(self) -> list[str]:
        """Every mistake, a sentence each; empty if there is none."""
        found = [
            f"--{name.replace('_', '-')} is {value}; it must be at least 1"
            for name, value in (
                ("gpu_batch_size", self.gpu_batch_size),
                ("num_gpu_batches", self.num_gpu_batches),
                ("decode_batch_size", self.decode_batch_size),
            )
            if value is not None and value < 1
        ]
        found += self.percent.problems()
        if self.ring_16bit and not self.compress_cache:
            found.append("--ring-16bit means nothing without --compress-cache; add it or leave --ring-16bit out")
        if self.decode_batch_size is None or self.gpu_batch_size < 1 or self.decode_batch_size < 1:
            return found
        if self.decode_batch_size % self.gpu_batch_size:
            found.append(
                f"--decode-batch-size {self.decode_batch_size} must be a multiple of"
                f" --gpu-batch-size {self.gpu_batch_size}"
            )
        if self.decode_batch_size > self.block_rows:
            found.append(
                f"--decode-batch-size {self.decode_batch_size} is larger than the block of {self.block_rows} rows"
                f" ({self.gpu_batch_size} x {self.num_gpu_batches}); raise --num-gpu-batches"
            )
        return found


Ratio = str | float | Fraction


@dataclass(frozen=True)
class EvictionSpec:
    """The eviction policy as asked for, before the lengths of the run are known.

    Ratios are shares of the whole sequence, prompt + generated; sizes are entries. None means not given: if only one
    of the two regions is given, the other is as large.
    """

    name: str = "h2o"
    hh_ratio: Ratio | None = None
    recent_ratio: Ratio | None = None
    hh_size: int | None = None
    recent_size: int | None = None
    sink_size: int | None = None

    def problems(self) -> list[str]:
        """Every mistake that can be seen before lengths are known."""
        found = []
        if self.name not in EVICTIONS:
            found.append(f"--eviction {self.name!r} is unknown; known policies: {', '.join(EVICTIONS)}")
        found += self._range_problems()
        for one, other in (("hh_ratio", "hh_size"), ("recent_ratio", "recent_size")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                found.append(f"{_flag(one)} and {_flag(other)} say the same thing twice; give one of them")
        for name in self._unused_by_policy():
            if getattr(self, name) is not None:
                found.append(f"{_flag(name)} means nothing with --eviction {self.name}; leave it out")
        return found

    def _unused_by_policy(self) -> tuple[str, ...]:
        return {
            "local": ("hh_ratio", "hh_size", "sink_size"),
            "sink": ("hh_ratio", "hh_size"),
            "full": ("hh_ratio", "hh_size", "recent_ratio", "recent_size", "sink_size"),
        }.get(self.name, ("sink_size",))

    def _range_problems(self) -> list[str]:
        found = []
        for name in ("hh_ratio", "recent_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= _fraction(value) <= 1:
                found.append(f"{_flag(name)} is {value}; it must be a number between 0 and 1")
        for name, least in (("hh_size", 0), ("recent_size", 1), ("sink_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                found.append(f"{_flag(name)} is {value}; it must be at least {least}")
        if self.recent_ratio is not None and _fraction(self.recent_ratio) == 0:
            found.append("--recent-ratio is 0; the newest token must be kept: use a larger ratio or --recent-size 1")
        recent_follows_heavy = self.recent_ratio is None and self.recent_size is None
        for name in ("hh_ratio", "hh_size"):
            value = getattr(self, name)
            if recent_follows_heavy and value is not None and _fraction(value) == 0:
                found.append(f"{_flag(name)} is 0 and so would be the recent region; give --recent-ratio too")
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
        if self.name == "full":
            return 0, length
        recent = self._entries(self.recent_size, self.recent_ratio, self.hh_size, self.hh_ratio, length)
        recent = min(max(1, recent), length)
        if self.name == "local":
            return 0, recent
        if self.name == "sink":
            heavy = DEFAULT_SINKS if self.sink_size is None else self.sink_size
        else:
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


def _fraction(ratio: Ratio) -> Fraction:
    """A ratio exactly as written; -1, which no rule allows, for what is no number."""
    if isinstance(ratio, Fraction):
        return ratio
    try:
        # By way of text: the float 0.35 is less than 35/100, and 0.35 * 180 would floor to 62.
        return Fraction(str(ratio))
    except (ValueError, ZeroDivisionError):
        return Fraction(-1)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
