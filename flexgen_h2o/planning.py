"""A run and the policy search: which policy suits it on a machine, and what its own is expected to take.

Everything here is a projection; what was timed stands in the report's other fields.
"""

import math
from dataclasses import replace
from typing import Any

from flexgen_h2o.errors import UsageError
from flexgen_h2o.llm import LLM
from flexgen_h2o.placement import TIERS, Tier
from flexgen_h2o.platforms import dtype_name
from flexgen_h2o.policy import Policy
from flexgen_h2o.search.cost_model import CostModel
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.predict import predict
from flexgen_h2o.search.search import BATCH_SIZES, Choices, find
from flexgen_h2o.search.sizes import Job

USED_SHARE = 0.98  # of a budget: the search's sizes agree with the ledger to within 2 %


def choose_policy(
    llm: LLM, hardware: Hardware, prompt_len: int, gen_len: int, num_prompts: int | None, given: dict[str, Any]
) -> Policy:
    """The policy that generates fastest, with those of its fields that were given as they are.

    Args:
        num_prompts: how many prompts there are, if known.
        given: fields of Policy.
    Raises UsageError if nothing fits, or the hardware file lacks a rate.
    """
    model = _cost_model(llm, hardware, prompt_len, gen_len)
    choices = Choices(
        gpu_batch_size=(given["gpu_batch_size"],) if "gpu_batch_size" in given else _batch_sizes(num_prompts),
        num_gpu_batches=given.get("num_gpu_batches"),
        cpu_cache_compute=(given["cpu_cache_compute"],) if "cpu_cache_compute" in given else (False, True),
        compress_weight=(llm.policy.compress_weight,),  # they change what the model says: never by themselves
        compress_cache=(llm.policy.compress_cache,),
        ring_16bit=llm.policy.ring_16bit,
        most_rows=num_prompts,
    )
    asked = llm.platform.budgets
    budgets: dict[Tier, float | None] = {}
    for tier in TIERS:
        budget = asked.get(tier) or hardware.memory.get(tier)
        budgets[tier] = None if budget is None else USED_SHARE * budget
    found = find(model, budgets, choices, uses_disk=asked.get("disk") is not None).policy
    kept = {name: given[name] for name in ("overlap", "pin_weight", "decode_batch_size") if name in given}
    return replace(found, **kept)


def _batch_sizes(num_prompts: int | None) -> list[int]:
    """Sizes of a sub-batch to try: one of them takes all prompts at once, if they are few."""
    if num_prompts is None or num_prompts > BATCH_SIZES[-1]:
        return list(BATCH_SIZES)
    return [*(size for size in BATCH_SIZES if size < num_prompts), num_prompts]


def predicted(
    llm: LLM, hardware: Hardware | None, prompt_len: int, gen_len: int, num_prompts: int | None
) -> dict[str, Any] | None:
    """What the run is expected to take, as the report says it; None where there are no rates of its device."""
    if hardware is None or llm.device.type not in (hardware.device, "meta"):
        return None
    policy = llm.policy
    rows = policy.block_rows if num_prompts is None else max(1, num_prompts)
    blocks = [policy] * (rows // policy.block_rows)
    if rest := rows % policy.block_rows:
        blocks.append(_smaller(policy, rest))
    try:
        model = _cost_model(llm, hardware, prompt_len, gen_len)
        known = {block: predict(model, block) for block in set(blocks)}
    except UsageError:
        return None
    parts = [known[block] for block in blocks]
    prefill_s, decode_s = sum(part.prefill_s for part in parts), sum(part.decode_s for part in parts)
    return {
        "kind": "projection",
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": prefill_s + decode_s,
        "throughput_tok_s": rows * gen_len / (prefill_s + decode_s),
        **{f"{tier}_peak_bytes": max(part.peak_bytes(tier) for part in parts) for tier in TIERS},
    }


def _smaller(policy: Policy, rows: int) -> Policy:
    """A policy for a block of about so many rows."""
    units = math.ceil(rows / policy.gpu_batch_size)
    return replace(
        policy,
        gpu_batch_size=math.ceil(rows / units),
        num_gpu_batches=units,
        decode_batch_size=None,
    )


def _cost_model(llm: LLM, hardware: Hardware, prompt_len: int, gen_len: int) -> CostModel:
    rule = llm.rule(prompt_len, gen_len)
    baseline = llm.platform.baseline or 0
    dtype = "float16" if llm.device.type == "meta" and hardware.device == "cuda" else dtype_name(llm.dtype)
    job = Job(
        *(llm.config, prompt_len, gen_len, rule.heavy, rule.recent, dtype, hardware.device),
        *(baseline, llm.platform.gpu_baseline),
    )
    return CostModel(job, hardware)
