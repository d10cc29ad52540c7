"""A search's result for people."""

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.plan.placement import TIERS
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.predict import Found
from flexgen_h2o.search.sizes import Job


def summary(job: Job, hardware: Hardware, found: Found, full: Found | UsageError) -> str:
    """The policy and its projection, and the full cache's beside it."""
    length = job.prompt_len + job.gen_len
    lines = [
        f"{job.config.name}, {job.prompt_len} + {job.gen_len} tokens, {job.dtype} on {hardware.name};"
        " all times and speeds are projections",
        f"KV cache: {job.heavy} heavy + {job.recent} recent of {length} entries per row and head",
        *_policy_lines(found.policy),
        "",
        f"{'':22}{'evicting':>32}{'full cache':>32}",
    ]
    columns = [_column(found), _column(full) if isinstance(full, Found) else {}]
    for label in columns[0]:
        lines.append(f"{label:22}" + "".join(f"{column.get(label, '-'):>32}" for column in columns))
    if isinstance(full, UsageError):
        lines.append(f"full cache: {full}")
    return "\n".join(lines)


def _policy_lines(policy: Policy) -> list[str]:
    options = [
        text
        for is_on, text in (
            (policy.cpu_cache_compute, "--cpu-cache-compute"),
            (policy.compress_weight, "--compress-weight"),
            (policy.compress_cache, "--compress-cache"),
            (policy.ring_16bit, "--ring-16bit"),
        )
        if is_on
    ]
    return [
        f"policy: --gpu-batch-size {policy.gpu_batch_size} --num-gpu-batches {policy.num_gpu_batches}"
        f" --decode-batch-size {policy.group_rows}",
        " ".join([f"        --percent {policy.percent}", *options]),
    ]


def _column(found: Found) -> dict[str, str]:
    """Labels and values of one result."""
    projection, policy = found.projection, found.policy
    return {
        "rows of a block": f"{policy.block_rows:,}",
        "weights gpu cpu %": " ".join(f"{value:.1f}" for value in projection.achieved_percent[:2]),
        "prefill": f"{projection.prefill_s:,.1f} s",
        "  is bound by": projection.binds["prefill"],
        "decode": f"{projection.decode_s:,.1f} s",
        "  is bound by ": projection.binds["decode"],
        "throughput": f"{projection.throughput_tok_s:,.2f} tok/s",
        **{f"peak on {tier}": f"{projection.peak_bytes(tier) / GB:,.2f} GB" for tier in TIERS},
    }
