"""Before anything is loaded: does the run fit its budgets, and if not, what would."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from flexgen_h2o.errors import UsageError
from flexgen_h2o.extents import free_disk_bytes
from flexgen_h2o.model_config import ModelConfig
from flexgen_h2o.placement import TIERS, Percent, Tier
from flexgen_h2o.platforms import Platform
from flexgen_h2o.policy import Policy
from flexgen_h2o.runtime import BASELINE_LINE, RunSizes, predict
from flexgen_h2o.tiers import Ledger, gb

# Placements to try when the one asked for does not fit, from fast to slow.
LADDER = tuple(
    Percent(weights_gpu, weights_memory - weights_gpu, *cache, *cache)
    for weights_memory in (100, 75, 50, 25, 0)
    for cache in ((100, 0), (0, 100), (0, 0))
    for weights_gpu in (100, 75, 50, 25, 0)
    if weights_gpu <= weights_memory
)


def check_fit(
    config: ModelConfig,
    dtype: torch.dtype,
    policy: Policy,
    platform: Platform,
    sizes: RunSizes,
    on_disk_already: int = 0,
) -> Ledger:
    """The predicted ledger. Raises UsageError with both numbers, and what would fit, if a tier's budget is exceeded.

    Args:
        on_disk_already: bytes that the run will find on disk, or has put there itself: they need no free space.
    """
    platform = _with_disk_budget(platform, on_disk_already)
    predicted = predict(config, dtype, policy, platform, sizes)
    exceeded = [_excess(predicted, platform, tier) for tier in TIERS if _exceeds(predicted, platform, tier)]
    if not exceeded:
        return predicted
    way_out = _way_out(config, dtype, policy, platform, sizes)
    raise UsageError(f"{config.name} with --percent {policy.percent} needs {'; and '.join(exceeded)}. {way_out}")


def lighter_plan(config: ModelConfig, dtype: torch.dtype, policy: Policy, platform: Platform, sizes: RunSizes) -> str:
    """What to do where a plan ran out of memory though it should have fitted: one that takes three quarters."""
    tier: Tier = "cpu" if platform.joint else "gpu"
    predicted = predict(config, dtype, policy, platform, sizes)
    given_up = (predicted.peak(tier) - predicted.account(tier).largest.get(BASELINE_LINE, 0)) // 4
    budget = predicted.peak(tier) - given_up
    return _way_out(config, dtype, policy, replace(platform, budgets={**platform.budgets, tier: budget}), sizes)


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an allocation on the device failed. torch says so in words where there is no accelerator."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


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


def _with_disk_budget(platform: Platform, on_disk_already: int) -> Platform:
    """The platform, with no more on disk than there is."""
    if platform.offload_dir is None or platform.device.type == "meta":
        return platform
    available = free_disk_bytes(platform.offload_dir) + on_disk_already
    asked = platform.budgets.get("disk")
    budgets: dict[Tier, int | None] = {
        **platform.budgets,
        "disk": available if asked is None else min(asked, available),
    }
    return replace(platform, budgets=budgets)


def _budget(platform: Platform, tier: Tier) -> int | None:
    return platform.budgets.get(tier)


def _exceeds(predicted: Ledger, platform: Platform, tier: Tier) -> bool:
    budget = _budget(platform, tier)
    return budget is not None and predicted.peak(tier) > budget


def _excess(predicted: Ledger, platform: Platform, tier: Tier) -> str:
    name = "memory" if platform.joint and tier == "cpu" else f"{tier} memory" if tier != "disk" else "disk"
    lines = sorted(predicted.account(tier).largest.items(), key=lambda line: -line[1])
    parts = ", ".join(f"{line} {gb(size)}" for line, size in lines[:4])
    return f"{gb(predicted.peak(tier))} of {name} ({parts}), where {gb(_budget(platform, tier) or 0)} can be used"


def _way_out(config: ModelConfig, dtype: torch.dtype, policy: Policy, platform: Platform, sizes: RunSizes) -> str:
    """A placement that fits, or else a smaller block that does, as asked or with everything on disk."""
    for percent in LADDER:
        if platform.joint and percent != _joint(percent):
            continue
        ledger = predict(config, dtype, replace(policy, percent=percent), platform, sizes)
        if not any(_exceeds(ledger, platform, tier) for tier in TIERS):
            return f"--percent {percent} would fit"
    for percent in (policy.percent, LADDER[-1]):
        for rows in _fewer(sizes.rows):
            smaller = replace(policy, gpu_batch_size=rows, num_gpu_batches=1, decode_batch_size=None, percent=percent)
            ledger = predict(config, dtype, smaller, platform, replace(sizes, rows=rows))
            if not any(_exceeds(ledger, platform, tier) for tier in TIERS):
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
