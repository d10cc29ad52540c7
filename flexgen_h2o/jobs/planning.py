"""A run and the policy search: which policy suits it on a machine, and what its own is expected to take.

Everything here is a projection; what was timed stands in the report's other fields.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.platform import dtype_name
from flexgen_h2o.memory.extents import free_disk_bytes
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import TIERS, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import CostModel
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.predict import Budgets, predict
from flexgen_h2o.search.projection import Projection
from flexgen_h2o.search.search import BATCH_SIZES, Choices, find
from flexgen_h2o.search.simulate import simulate
from flexgen_h2o.search.sizes import Job, MemoryPlan

USED_SHARE = 0.98  # of a budget: the search's sizes agree with the ledger to within 2 %
# Rows of a block whose tensors are all in memory, at the most: products gain little from more (policies/hardware). The
# smallest is taken that is projected to be nearly as fast as any: what is done sooner is written sooner.
BLOCK_ROWS = (32, 64, 128, 256)
NEARLY = 1.03
MOST_AT_ONCE = BATCH_SIZES[-1]  # rows of a sub-batch
# Sub-batches times layers whose schedule is walked to say what a run is expected to take: about two seconds.
MOST_WALKED = 10_000
USED_BEFORE = (Line.BASELINE, Line.WEIGHTS, Line.TEMPORARIES)  # memory that prefill does not find new


@dataclass(frozen=True)
class Workload:
    """What a run has to do.

    Attributes:
        prompt_len: the longest prompt, in tokens.
        num_prompts: how many there are; None if prompts are made to fill the block.
    """

    prompt_len: int
    gen_len: int
    num_prompts: int | None


def choose_policy(
    llm: LLM,
    work: Workload,
    given: Mapping[str, Any],
    hardware: Hardware | None,
    measure: Callable[[], Hardware | None],
) -> Policy:
    """The policy that generates fastest, with those of its fields that were given as they are.

    Where all tensors fit the memory that computes, that is where they are, and nothing is searched but the size of the
    block; beside a GPU only if there are no rates to search with.

    Args:
        given: fields of Policy.
        hardware: rates of the machine that is planned for, where they are known.
        measure: asked for them where they are not, and are needed.
    Raises UsageError if nothing fits, or there are no rates to go by.
    """
    if llm.device.type == "cpu" or (hardware is None and llm.device.type != "meta"):
        resident = resident_policy(llm, work, given, hardware)
        if resident is not None:
            return resident
    hardware = hardware or measure()
    if hardware is None:
        raise UsageError(
            "the policy search needs rates of this machine, and there are none; give --hardware, or --percent and the"
            " sizes of the block"
        )
    if llm.device.type not in (hardware.device, "meta"):
        raise UsageError(
            f"{hardware.origin} describes a machine that computes on {hardware.device}, and this one computes on"
            f" {llm.device.type}; leave --hardware out, or add --device meta to plan for that machine"
        )
    return _searched(llm, work, given, hardware)


def resident_policy(llm: LLM, work: Workload, given: Mapping[str, Any], hardware: Hardware | None) -> Policy | None:
    """The policy with all tensors in the memory that computes; None if the largest block worth having does not fit it.

    The arguments are those of choose_policy().
    """
    blocks = [_resident_block(work, given, rows) for rows in BLOCK_ROWS]
    if not _fits(llm, work, blocks[-1]):
        return None
    projections = [_projected(llm, policy, hardware, work) for policy in blocks]
    speeds = [0.0 if found is None else float(found["throughput_tok_s"]) for found in projections]
    if not all(speeds):  # there are no rates
        return blocks[-1] if work.num_prompts is not None else blocks[0]
    return next(policy for policy, speed in zip(blocks, speeds, strict=True) if speed * NEARLY >= max(speeds))


def _resident_block(work: Workload, given: Mapping[str, Any], most_rows: int) -> Policy:
    """A policy with large sub-batches in blocks of equal size and up to so many rows, unless more are asked for."""
    decode_rows: int = given.get("decode_batch_size") or 0
    rows = max(_equal_part(work.num_prompts or most_rows, most_rows), decode_rows)
    units: int | None = given.get("num_gpu_batches")
    size = _equal_part(rows, MOST_AT_ONCE) if units is None else min(MOST_AT_ONCE, math.ceil(rows / units))
    if decode_rows:  # groups are made of whole sub-batches
        size = next(part for part in range(min(size, decode_rows), decode_rows + 1) if decode_rows % part == 0)
    size = given.get("gpu_batch_size", size)
    return Policy(**{"gpu_batch_size": size, "num_gpu_batches": math.ceil(rows / size), **given})


def _equal_part(count: int, most: int) -> int:
    """The size of equal parts of so many things, the last one apart, none of which has more than `most`."""
    return math.ceil(count / math.ceil(count / most))


def _fits(llm: LLM, work: Workload, policy: Policy) -> bool:
    """Whether all of a policy is within the budgets. A block is never larger than all prompts together."""
    if work.num_prompts is not None:
        policy = _at_most(policy, max(1, work.num_prompts))
    peaks = MemoryPlan(_job(llm, work, llm.device.type), policy).peaks()
    return all(budget is None or peaks[tier] <= USED_SHARE * budget for tier, budget in llm.platform.budgets.items())


def _searched(llm: LLM, work: Workload, given: Mapping[str, Any], hardware: Hardware) -> Policy:
    """The policy that the search finds for a machine's rates."""
    decode_rows: int | None = given.get("decode_batch_size")
    sizes = _batch_sizes(work.num_prompts)
    if "gpu_batch_size" in given:
        sizes = [min(given["gpu_batch_size"], work.num_prompts or given["gpu_batch_size"])]
    elif decode_rows is not None:  # groups are made of whole sub-batches
        sizes = [size for size in sizes if decode_rows % size == 0]
    choices = Choices(
        gpu_batch_size=sizes,
        num_gpu_batches=given.get("num_gpu_batches"),
        cpu_cache_compute=(given["cpu_cache_compute"],) if "cpu_cache_compute" in given else (False, True),
        compress_weight=(llm.policy.compress_weight,),  # they change what the model says: never by themselves
        compress_cache=(llm.policy.compress_cache,),
        ring_16bit=llm.policy.ring_16bit,
        most_rows=work.num_prompts,
    )
    model = CostModel(_job(llm, work, hardware.device), hardware)
    uses_disk = llm.platform.budgets.get("disk") is not None
    kept = llm.kept_weight_bytes()
    best = find(model, _budgets(llm, hardware, kept), choices, uses_disk)
    weights = best.projection.memory["disk"].get(Line.WEIGHTS, 0)
    if kept > weights:  # what was kept of weights that this plan has elsewhere leaves its place to nothing else
        best = find(model, _budgets(llm, hardware, weights), choices, uses_disk)
    found = best.policy
    if decode_rows is not None and decode_rows > found.block_rows:
        raise UsageError(
            f"--decode-batch-size {decode_rows} is larger than the block of {found.block_rows} rows that is planned;"
            " lower it, or leave it out"
        )
    return replace(found, **given)


def _budgets(llm: LLM, hardware: Hardware, kept: float) -> Budgets:
    """Bytes by tier that a plan may take: as asked for, else as the machine has them; of the disk what is free now.

    Args:
        kept: bytes of weights that are on disk already.
    """
    found: dict[Tier, float | None] = {}
    folder = llm.platform.offload_dir
    for tier in TIERS:
        asked = llm.platform.budgets.get(tier)
        budget: float | None = hardware.memory.get(tier) if asked is None else asked
        if tier == "disk" and folder is not None and llm.device.type != "meta":
            free = free_disk_bytes(folder) + kept
            budget = free if asked is None else min(asked, free)
        found[tier] = None if budget is None else USED_SHARE * budget
    return found


def _batch_sizes(num_prompts: int | None) -> list[int]:
    """Sizes of a sub-batch to try: one of them takes all prompts at once, if they are few."""
    if num_prompts is None or num_prompts > BATCH_SIZES[-1]:
        return list(BATCH_SIZES)
    return [*(size for size in BATCH_SIZES if size < num_prompts), num_prompts]


def predicted(llm: LLM, hardware: Hardware | None, work: Workload, served: int | None = None) -> dict[str, Any] | None:
    """What the run is expected to take, as the report says it; None where there are no rates of its device.

    By a walk over its schedule, unless that is very long: the search's own model takes for granted that everything
    overlaps which can.

    Args:
        served: how many prompts that time is for, where those of `work`, which size the buffers, are not all.
    """
    return _projected(llm, llm.policy, hardware, work, served)


def _projected(
    llm: LLM, policy: Policy, hardware: Hardware | None, work: Workload, served: int | None = None
) -> dict[str, Any] | None:
    """The same with another policy."""
    prompts = work.num_prompts if served is None else served
    if hardware is None or llm.device.type not in (hardware.device, "meta") or prompts == 0:
        return None
    rows = policy.block_rows if prompts is None else prompts
    largest = policy if work.num_prompts is None else _at_most(policy, work.num_prompts)
    blocks = [policy] * (rows // policy.block_rows)
    if rest := rows % policy.block_rows:
        blocks.append(_smaller(policy, rest))
    try:
        model = CostModel(_job(llm, work, hardware.device), hardware)
        known = {block: _expected(model, block) for block in {*blocks, largest}}
    except UsageError:
        return None
    parts = [known[block] for block in blocks]
    prefill_s, decode_s = sum(part.prefill_s for part in parts), sum(part.decode_s for part in parts)
    prefill_s += _first_use_s(known[largest], hardware)
    return {
        "kind": "projection",
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": prefill_s + decode_s,
        "throughput_tok_s": rows * work.gen_len / (prefill_s + decode_s),
        **{f"{tier}_peak_bytes": known[largest].peak_bytes(tier) for tier in TIERS},
    }


def _expected(model: CostModel, block: Policy) -> Projection:
    if block.num_gpu_batches * model.job.config.num_hidden_layers > MOST_WALKED:
        return predict(model, block)
    return simulate(model, block).projection


def _first_use_s(projection: Projection, hardware: Hardware) -> float:
    """What the first block takes longer than the others, because its buffers are new; nothing where that is unknown."""
    rate = hardware.new_bytes_s()
    lines = projection.memory["cpu"]
    return 0.0 if rate is None else sum(nbytes for line, nbytes in lines.items() if line not in USED_BEFORE) / rate


def _at_most(policy: Policy, rows: int) -> Policy:
    """A policy for a block that is never larger than all prompts together."""
    return policy if policy.block_rows <= rows else _smaller(policy, rows)


def _smaller(policy: Policy, rows: int) -> Policy:
    """A policy for a block of about so many rows."""
    units = math.ceil(rows / policy.gpu_batch_size)
    return replace(
        policy,
        gpu_batch_size=math.ceil(rows / units),
        num_gpu_batches=units,
        decode_batch_size=None,
    )


def _job(llm: LLM, work: Workload, device: str) -> Job:
    """What is planned for, on a device: cuda or cpu."""
    rule = llm.rule(work.prompt_len, work.gen_len)
    dtype = "float16" if llm.device.type == "meta" and device == "cuda" else dtype_name(llm.dtype)
    return Job(
        *(llm.config, work.prompt_len, work.gen_len, rule.heavy, rule.recent, dtype, device),
        *(llm.platform.baseline or 0, llm.platform.gpu_baseline),
    )
