"""What a run is asked to do: how a block is cut, and where things live. Plain data, checked in one place."""

from dataclasses import dataclass

from flexgen_h2o.basics.settings import least_problems, setting
from flexgen_h2o.plan.placement import Percent, Tier

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

    gpu_batch_size: int = setting(
        DEFAULT_GPU_BATCH_SIZE,
        "whole",
        "rows of a prefill sub-batch",
        shown=f"as --policy says; with --percent {DEFAULT_GPU_BATCH_SIZE}",
        topic="block",
        least=1,
        most=MOST_ROWS,
    )
    num_gpu_batches: int = setting(
        1,
        "whole",
        "sub-batches of a block",
        shown="as --policy says; with --percent 1",
        topic="block",
        least=1,
        most=MOST_ROWS,
    )
    decode_batch_size: int | None = setting(
        None,
        "whole",
        "rows computed together in decode",
        shown="the block",
        topic="block",
        least=1,
        most=MOST_ROWS,
    )
    percent: Percent = setting(
        Percent(),
        "percent",
        "six numbers: per cent of weights on gpu and cpu, of cache likewise, of hidden states likewise; the rest is on"
        " disk",
        shown="as --policy says",
        topic="homes",
        metavar="N",
    )
    overlap: bool = setting(True, "switch", "load ahead: true or false", topic="loading")
    cpu_cache_compute: bool = setting(False, "switch", "attention beside KV in host memory", topic="computing")
    pin_weight: bool = setting(True, "switch", "weights in pinned host memory", topic="loading")
    compress_weight: bool = setting(False, "switch", "weights in 4-bit groups", topic="computing")
    compress_cache: bool = setting(False, "switch", "keys and values in 4-bit groups", topic="cache")
    ring_16bit: bool = setting(
        False, "switch", "with --compress-cache, recent entries stay in the compute precision", topic="cache"
    )

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

    def attends_at_home(self, home: Tier, joint: bool) -> bool:
        """Whether decode attention of a unit runs on the CPU, beside its KV; `joint`: there is no GPU."""
        return self.cpu_cache_compute and home == "cpu" and not joint

    def problems(self) -> list[str]:
        """Every mistake, a sentence each; empty if there is none."""
        found = least_problems(self) + self.percent.problems()
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
