"""Searches the policy that takes the least time per token: sizes of the block outside, a linear program inside.

For every way to cut and compute a block (lp.Candidate) one program with a free number of sub-batches bounds what any
number could reach, and says which is best. Candidates are tried from the best bound on; once a policy has been found
that is better than a candidate's bound, that candidate and all after it are left out. A program's shares become percent
of whole tensors and units (plan/placement.py); where these exceed a budget, the program is solved again with that much
less, and what was found last is improved in small steps (polish.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.plan.placement import Percent, Shares, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import TimeModel
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.lp import PARTS, Candidate, Optimum, Program
from flexgen_h2o.search.polish import Freedom, polish
from flexgen_h2o.search.predict import Budgets, Found, predict
from flexgen_h2o.search.sizes import Job, MemoryPlan

BATCH_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
GROUPS = (1, 2, 4, 8)
MOST_ROWS = 2**16  # of a block
REPAIRS = 8
CLOSE = 0.005  # to the bound: good enough
DEEP = 3  # policies that are improved further, if none is
STARTS = (1.0, 0.9)
DISK_GAIN = 1.1
LESS_ON_DISK: tuple[tuple[str, ...], ...] = ((), ("weights",), ("weights", "cache"))
ROUNDING = 0.05  # that whole tensors may need more than shares
GAP = 1e-4  # a bound that promises less than this more is not looked into


@dataclass(frozen=True)
class Choices:
    """What a search may choose from; a single value fixes a choice.

    Attributes:
        num_gpu_batches: None for any.
        cpu_cache_compute, compress_weight, compress_cache: both, or one of them.
        most_rows: of all blocks together: how many prompts there are. None for any number.
        on_disk: what may be there: some of lp.PARTS.
    """

    gpu_batch_size: Sequence[int] = BATCH_SIZES
    num_gpu_batches: int | None = None
    cpu_cache_compute: Sequence[bool] = (False, True)
    compress_weight: Sequence[bool] = (False,)
    compress_cache: Sequence[bool] = (False,)
    ring_16bit: bool = False
    most_rows: int | None = None
    on_disk: Sequence[str] = PARTS


def search(model: TimeModel, budgets: Budgets, choices: Choices | None = None) -> Found:
    """The policy that takes the least time per token within budgets.

    Args:
        budgets: bytes by tier; None or absent for no limit. Where gpu and cpu are one memory, cpu's pays for both.
    Raises UsageError if nothing fits: which limit binds, and what would fit.
    """
    choices = _with_known_rates(choices or Choices(), model.hardware)
    least, most = _range(choices)
    bounds: list[tuple[float, int, Program]] = []
    for index, candidate in enumerate(_candidates(model.job, choices)):
        program = Program(model, candidate, budgets, choices.on_disk)
        optimum = program.solve(least, max(least, most // candidate.policy.gpu_batch_size))
        if optimum is not None:
            bounds.append((optimum.seconds / candidate.policy.gpu_batch_size, index, program))
    may_resize = choices.num_gpu_batches is None
    freedom = Freedom(may_resize, most, choices.on_disk)
    found: list[Found] = []
    for bound, _, program in sorted(bounds, key=lambda entry: entry[:2]):
        best = min(found, key=_seconds, default=None)
        if best is not None and best.seconds_per_token * model.job.gen_len <= bound * (1 + GAP):
            break
        starts = (_start(program, least, most, part) for part in (STARTS if may_resize else STARTS[:1]))
        found += [polish(model, budgets, start, freedom) for start in starts if start is not None]
    if not found:
        raise UsageError(_what_is_missing(model, budgets, choices))
    found.sort(key=_seconds)
    if found[0].seconds_per_token * model.job.gen_len > (1 + CLOSE) * min(bound for bound, _, _ in bounds):
        found += [polish(model, budgets, each, freedom, deeply=True) for each in found[:DEEP]]
    return min(found, key=_seconds)


def _seconds(found: Found) -> float:
    return found.seconds_per_token


def find(model: TimeModel, budgets: Budgets, choices: Choices | None = None, uses_disk: bool = True) -> Found:
    """search(), with a budget of the disk's that nobody has asked to be used.

    Then as little as can be is put there: nothing, or weights alone, which are never written again, or the cache too;
    more only where nothing else fits, or where it gains more than a tenth. The disk's rate varies more than any other,
    and what a search wins on paper by a disk that is just fast enough is soon lost.

    Args:
        uses_disk: the disk's budget was asked for, so that it may be used as any other.
    """
    choices = choices or Choices()
    best = search(model, budgets, choices)
    if uses_disk or not best.projection.peak_bytes("disk"):
        return _balanced(model, budgets, choices, best)
    for parts in LESS_ON_DISK:
        fewer = replace(choices, on_disk=parts)
        try:
            found = search(model, budgets, fewer)
        except UsageError:
            continue
        if found.seconds_per_token <= DISK_GAIN * best.seconds_per_token:
            return _balanced(model, budgets, fewer, found)
    return _balanced(model, budgets, choices, best)


def _balanced(model: TimeModel, budgets: Budgets, choices: Choices, found: Found) -> Found:
    """Where prompts fill several blocks, and the last one only in part: as many blocks, alike."""
    rows, policy = choices.most_rows, found.policy
    if rows is None or choices.num_gpu_batches is not None or rows <= policy.block_rows:
        return found
    blocks = -(-rows // policy.block_rows)
    units = -(-rows // (blocks * policy.gpu_batch_size))
    if units == policy.num_gpu_batches:
        return found
    fixed = replace(choices, gpu_batch_size=(policy.gpu_batch_size,), num_gpu_batches=units)
    return search(model, budgets, fixed)


def largest_block(model: TimeModel, budgets: Budgets, choices: Choices | None = None) -> int:
    """The most rows that fit the budgets in one block, whatever time they take; 0 if none do.

    By shares of the memory alone; whole tensors and units may leave a little less.
    """
    choices = _with_known_rates(choices or Choices(), model.hardware)
    least, most = _range(choices)
    rows = [0]
    for candidate in _candidates(model.job, choices):
        size = candidate.policy.gpu_batch_size
        units = Program(model, candidate, budgets, choices.on_disk).most_units(least, max(least, most // size))
        rows.append(size * math.floor(units + 1e-6))
    return max(rows)


def _range(choices: Choices) -> tuple[int, int]:
    """The least sub-batches and the most rows of a block."""
    if choices.num_gpu_batches is not None:
        return choices.num_gpu_batches, choices.num_gpu_batches * max(choices.gpu_batch_size)
    return 1, choices.most_rows or MOST_ROWS


def _with_known_rates(choices: Choices, hardware: Hardware) -> Choices:
    """Choices without those whose rates the hardware lacks, unless nothing else may be chosen."""

    def known(values: Sequence[bool], *prefixes: str) -> Sequence[bool]:
        has_rates = all(any(name.startswith(prefix) for name in hardware.rates) for prefix in prefixes)
        return values if has_rates or len(values) == 1 else (False,)

    return replace(
        choices,
        cpu_cache_compute=known(choices.cpu_cache_compute, "attention/cpu/"),
        compress_weight=known(choices.compress_weight, "gemm/int4/"),
        compress_cache=known(choices.compress_cache, f"attention/{hardware.device}/int4/"),
    )


def _candidates(job: Job, choices: Choices) -> Iterator[Candidate]:
    """All ways to cut and compute a block that differ in more than shares and the number of sub-batches."""
    for compress_weight in choices.compress_weight:
        for compress_cache in choices.compress_cache:
            for at_home in choices.cpu_cache_compute:
                if at_home and job.joint:
                    continue
                for rows in _useful(choices):
                    policy = Policy(
                        gpu_batch_size=rows,
                        cpu_cache_compute=at_home,
                        compress_weight=compress_weight,
                        compress_cache=compress_cache,
                        ring_16bit=compress_cache and choices.ring_16bit,
                    )
                    for groups in GROUPS[1:] if at_home else GROUPS[:1]:
                        yield Candidate(policy, groups)


def _useful(choices: Choices) -> Sequence[int]:
    """Sizes of sub-batches that are not larger than all prompts together, but for the smallest."""
    most = choices.most_rows or math.inf
    return [size for size in choices.gpu_batch_size if size <= most] or [min(choices.gpu_batch_size)]


def _start(program: Program, least: int, most_rows: int, part: float) -> Found | None:
    """A good policy of a candidate that fits, from which to look for better ones; None if none is found.

    Where whole tensors and units exceed a budget, both programs, that of the size and that of the shares, are solved
    again with that much less.

    Args:
        part: of the sub-batches that the bound names, to be taken.
    """
    budgets = dict(program.budgets)
    most = max(least, most_rows // program.candidate.policy.gpu_batch_size)
    for attempt in range(REPAIRS):
        tightened = replace(program, budgets=budgets)
        relaxed = tightened.solve(least, most)
        if relaxed is None:
            return None
        units = max(least, math.floor(part * relaxed.units + 1e-6))
        optimum = tightened.solve(units, units)
        if optimum is None:
            most = units - 1  # the bound has left out what only this size shows
            if most < least:
                return None
            continue
        policy = _policy(program, optimum, units)
        peaks = MemoryPlan(program.job, policy).peaks()
        over = {tier: peaks[tier] - budget for tier, budget in program.budgets.items() if budget is not None}
        if all(excess <= 0 for excess in over.values()):
            return Found(policy, predict(program.model, policy))
        for tier, excess in over.items():
            budget = budgets[tier]
            if excess > 0 and budget is not None:
                # More each time: a step in whole tensors may be larger than what is too much.
                budgets[tier] = budget - excess * 1.01 * 2**attempt
    return None


def _policy(program: Program, optimum: Optimum, units: int) -> Policy:
    """The policy of an optimum, in per cent to one decimal."""
    split, policy = optimum.split, program.candidate.policy
    parts = (split.weights, split.cache, split.hidden)
    percent = Percent(*(value for part in parts for value in _percent(part)))
    group_rows = program.group_rows(units)
    return replace(
        policy,
        num_gpu_batches=units,
        decode_batch_size=None if group_rows == replace(policy, num_gpu_batches=units).group_rows else group_rows,
        percent=percent,
    )


def _percent(shares: Shares) -> tuple[float, float]:
    """Per cent on gpu and on cpu, to one decimal; a disk's share of less than a twentieth of a per cent is none."""
    gpu, disk = round(100 * shares[0], 1), round(100 * shares[2], 1)
    return gpu, round(max(0.0, 100 - gpu - disk), 1)


def _what_is_missing(model: TimeModel, budgets: Budgets, choices: Choices) -> str:
    """Which budgets bind where nothing fits, and what would fit: for the smallest block, in the cheapest way."""
    rows, units = min(choices.gpu_batch_size), choices.num_gpu_batches or 1
    found: list[tuple[float, dict[Tier, float]]] = []
    for candidate in _candidates(model.job, replace(choices, gpu_batch_size=(rows,))):
        program = Program(model, candidate, budgets, choices.on_disk)
        optimum = program.solve(units, units, relaxed=True)
        if optimum is not None:
            missing = {tier: excess for tier, excess in optimum.excess.items() if excess > 1e-6}
            found.append((sum(program.relaxed_cost(tier) * excess for tier, excess in missing.items()), missing))
    config, job = model.job.config, model.job
    what = f"{config.name} with a block of {units} x {rows} rows of {job.prompt_len} + {job.gen_len} tokens"
    missing = min(found, key=lambda entry: entry[0])[1] if found else {}
    if not missing:
        # The shares would fit; whole tensors and units do not.
        missing = {tier: ROUNDING * (budgets[tier] or 0) / GB for tier in job.tiers if budgets.get(tier)}
    have = {tier: (budgets[tier] or 0) / GB for tier in missing}
    lacks = [f"{excess:.2f} GB more on {tier} than the {have[tier]:.2f} GB there" for tier, excess in missing.items()]
    enough = [f"--{tier}-mem {math.ceil((have[tier] + excess) * (1 + ROUNDING)):g}" for tier, excess in missing.items()]
    return f"{what} needs {' and '.join(lacks)}; {' '.join(enough)} would fit"
