"""Before anything is loaded: does the run fit its budgets, and if not, what would."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import gb
from flexgen_h2o.engine.assemble import RunSizes, predict
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.extents import file_system, free_disk_bytes
from flexgen_h2o.memory.tiers import Ledger
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import TIERS, Percent, Tier
from flexgen_h2o.plan.policy import Policy

# Of torch without an accelerator, of CUDA outside of torch's allocator, and of cuBLAS.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# Placements to try when the one asked for does not fit, from fast to slow.
LADDER = tuple(
    Percent(weights_gpu, weights_memory - weights_gpu, *cache, *cache)
    for weights_memory in (100, 75, 50, 25, 0)
    for cache in ((100, 0), (0, 100), (0, 0))
    for weights_gpu in (100, 75, 50, 25, 0)
    if weights_gpu <= weights_memory
)


@dataclass(frozen=True)
class _Room:
    """What is free on a file system, for some of what a run has on disk: weights, files of the run, or both."""

    folder: Path
    free: int
    for_weights: bool = True
    for_files: bool = True

    def taken(self, ledger: Ledger) -> int:
        """Bytes that a plan puts there."""
        on_disk = ledger.account("disk").largest
        kept = on_disk.get(Line.WEIGHTS, 0)
        return kept * self.for_weights + (sum(on_disk.values()) - kept) * self.for_files


@dataclass(frozen=True)
class _Limits:
    """What a plan is held against."""

    budgets: Mapping[Tier, int | None]
    joint: bool
    rooms: tuple[_Room, ...] = ()

    def exceeded(self, ledger: Ledger) -> list[str]:
        """What a plan takes too much of, and how much there is; nothing if it fits."""
        found = []
        for tier in TIERS:
            budget = self.budgets.get(tier)
            if budget is not None and ledger.peak(tier) > budget:
                found.append(f"{self._needed(ledger, tier)}, where {gb(budget)} can be used")
        for room in self.rooms:
            if (taken := room.taken(ledger)) > room.free:
                what = "disk" if room.for_files else "disk for weights"
                found.append(f"{gb(taken)} of {what}, where {gb(room.free)} can be used in {room.folder}")
        return found

    def _needed(self, ledger: Ledger, tier: Tier) -> str:
        name = "memory" if self.joint and tier == "cpu" else f"{tier} memory" if tier != "disk" else "disk"
        lines = sorted(ledger.account(tier).largest.items(), key=lambda line: -line[1])
        parts = ", ".join(f"{line} {gb(size)}" for line, size in lines[:4])
        return f"{gb(ledger.peak(tier))} of {name} ({parts})"


def check_fit(
    config: ModelShape,
    dtype: torch.dtype,
    policy: Policy,
    platform: Platform,
    sizes: RunSizes,
    on_disk_already: Mapping[str, int] | None = None,
) -> Ledger:
    """The predicted ledger. Raises UsageError with both numbers, and what would fit, if a tier's budget is exceeded.

    Args:
        on_disk_already: bytes, by line of the ledger, that the run will find on disk, or has put there itself: they
            need no free space.
    """
    limits = _Limits(platform.budgets, platform.joint, _rooms(platform, on_disk_already or {}))
    predicted = predict(config, dtype, policy, platform, sizes)
    exceeded = limits.exceeded(predicted)
    if not exceeded:
        return predicted
    way_out = _way_out(config, dtype, policy, platform, sizes, limits)
    raise UsageError(f"{config.name} with --percent {policy.percent} needs {'; and '.join(exceeded)}. {way_out}")


def lighter_plan(config: ModelShape, dtype: torch.dtype, policy: Policy, platform: Platform, sizes: RunSizes) -> str:
    """What to do where a plan ran out of memory though it should have fitted: one that takes three quarters."""
    tier: Tier = "cpu" if platform.joint else "gpu"
    predicted = predict(config, dtype, policy, platform, sizes)
    given_up = (predicted.peak(tier) - predicted.account(tier).largest.get(Line.BASELINE, 0)) // 4
    limits = _Limits({**platform.budgets, tier: predicted.peak(tier) - given_up}, platform.joint)
    return _way_out(config, dtype, policy, platform, sizes, limits)


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an allocation on the device failed. What is none of torch's own error classes says so in words."""
    known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    return known or any(words in str(error) for words in NO_MEMORY)


def smaller_sub_batches(policy: Policy) -> Policy | None:
    """The same block in sub-batches, and decode groups, of half the rows, or of as few as divide them; None of one."""
    rows = policy.gpu_batch_size
    if rows == 1:
        return None
    parts = next(parts for parts in range(2, rows + 1) if rows % parts == 0)
    return replace(
        policy,
        gpu_batch_size=rows // parts,
        num_gpu_batches=policy.num_gpu_batches * parts,
        decode_batch_size=policy.group_rows // parts,
    )


def _rooms(platform: Platform, on_disk_already: Mapping[str, int]) -> tuple[_Room, ...]:
    """The file systems of the run's files and of its weights, which may be one."""
    folder = platform.offload_dir
    if folder is None or platform.device.type == "meta":
        return ()
    kept = on_disk_already.get(Line.WEIGHTS, 0)
    files = sum(on_disk_already.values()) - kept
    cache = Path(folders.CACHE).expanduser()
    if file_system(folder) == file_system(cache):
        return (_Room(folder, free_disk_bytes(folder) + kept + files),)
    return (
        _Room(folder, free_disk_bytes(folder) + files, for_weights=False),
        _Room(cache, free_disk_bytes(cache) + kept, for_files=False),
    )


def _way_out(
    config: ModelShape, dtype: torch.dtype, policy: Policy, platform: Platform, sizes: RunSizes, limits: _Limits
) -> str:
    """A placement that fits, or else a smaller block that does, as asked or with everything on disk."""
    for percent in LADDER:
        if platform.joint and percent != _joint(percent):
            continue
        ledger = predict(config, dtype, replace(policy, percent=percent), platform, sizes)
        if not limits.exceeded(ledger):
            return f"--percent {percent} would fit"
    for percent in (policy.percent, LADDER[-1]):
        for rows in _fewer(sizes.rows):
            smaller = replace(policy, gpu_batch_size=rows, num_gpu_batches=1, decode_batch_size=None, percent=percent)
            ledger = predict(config, dtype, smaller, platform, replace(sizes, rows=rows))
            if not limits.exceeded(ledger):
                placed = "" if percent == policy.percent else f" with --percent {percent}"
                placed += "" if policy.decode_batch_size is None else " and without --decode-batch-size"
                return f"A block of {rows} rows (--gpu-batch-size {rows} --num-gpu-batches 1){placed} would fit"
    return "Take a smaller model, shorter texts, or a machine with more memory"


def _joint(percent: Percent) -> Percent:
    """The same placement where gpu and cpu are one memory."""
    pairs = (percent.weights, percent.cache, percent.hidden)
    return Percent(*(value for gpu, cpu, _ in pairs for value in (round(100 * (gpu + cpu)), 0)))


def _fewer(rows: int) -> Iterator[int]:
    while rows > 1:
        rows //= 2
        yield rows
