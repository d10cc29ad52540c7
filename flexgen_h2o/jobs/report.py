"""What a run reports."""

from typing import Any

import torch

from flexgen_h2o.basics.memory_sizes import gb
from flexgen_h2o.kernels.decode import attention_path
from flexgen_h2o.kernels.matrices.choice import product_path
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.limits import peak_resident_bytes
from flexgen_h2o.machine.platform import dtype_name
from flexgen_h2o.plan.names import LANES, MOVES
from flexgen_h2o.plan.placement import TIERS
from flexgen_h2o.plan.policy_files import policy_fields
from flexgen_h2o.plan.sampling import SamplingParams
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.limits import limit_of


def run_report(
    llm: LLM, params: SamplingParams, prompt_len: int, num_prompts: int | None, hardware: Hardware | None = None
) -> dict[str, Any]:
    """The JSON object of `run --json`: everything in it was measured or counted, or is null.

    Args:
        hardware: rates of this machine, from which the limits of both phases follow.
    """
    totals = llm.totals
    measured = llm.device.type != "meta"
    total_s = totals.prefill_s + totals.decode_s
    rule = llm.rule(prompt_len, params.max_new_tokens)
    return {
        "model": llm.config.name,
        "policy": {**policy_fields(llm.policy), "decode_batch_size": llm.policy.group_rows},
        "eviction": {
            "name": rule.name,
            "heavy_slots": rule.heavy,
            "recent_slots": rule.recent,
            "evictions": totals.evictions,
            **({"parameters": parameters} if (parameters := llm.eviction.parameters) else {}),
        },
        "dtype": dtype_name(llm.dtype),
        "device": llm.device.type,
        "dummy_weights": llm.uses_dummy_weights,
        "num_prompts": totals.num_prompts,
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": totals.generated_tokens,
        "load_s": llm.load_s if measured else None,
        "prefill_s": totals.prefill_s if measured else None,
        "decode_s": totals.decode_s if measured else None,
        "total_s": total_s if measured else None,
        "throughput_tok_s": _rate(totals.generated_tokens, total_s),
        "decode_tok_s": _rate(totals.decoded_tokens, totals.decode_s),
        "memory": _memory(llm, params, prompt_len, num_prompts),
        "io": {f"{link}_bytes": llm.moved_bytes(link) for link in MOVES},
        "achieved_percent": [] if llm.runtime is None else llm.runtime.achieved_percent(),
        "phases": {
            "prefill": _phase(llm, "prefill", totals.prefill_s if measured else None, hardware),
            "decode": _phase(llm, "decode", totals.decode_s if measured else None, hardware),
        },
        "kernels": {
            "matrices": product_path(llm.platform.matrix_layout),
            "decode_attention": attention_path(llm.device, llm.config.head_dim),
            "disk": _disk_path(llm),
            "threads": torch.get_num_threads(),
        },
        "predicted": None,
        "measured": measured,
    }


def _memory(llm: LLM, params: SamplingParams, prompt_len: int, num_prompts: int | None) -> dict[str, Any]:
    """Peaks as the system measured them, and as the ledger counted them. In a dry run only the ledger speaks."""
    ledger = llm.ledger()
    peaks = {tier: 0 if ledger is None else ledger.peak(tier) for tier in TIERS}
    measured = {**peaks}
    if llm.device.type != "meta":
        measured["cpu"] = peak_resident_bytes()
    if llm.device.type == "cuda":
        before = 0 if llm.runtime is None else llm.runtime.reserved_before
        measured["gpu"] = torch.cuda.max_memory_reserved(llm.device) - before + llm.platform.gpu_baseline
    return {
        **{f"{tier}_peak_bytes": measured[tier] for tier in TIERS},
        "weights_bytes": 0 if llm.runtime is None else llm.runtime.weights.nbytes,
        "kv_cache_bytes": llm.kv_cache_bytes,
        "full_kv_cache_bytes": llm.full_kv_cache_bytes(prompt_len, params.max_new_tokens, num_prompts),
        "ledger_peak_bytes": peaks,
        "ledger": {tier: {} if ledger is None else ledger.accounts[tier].largest for tier in TIERS},
    }


def _disk_path(llm: LLM) -> str | None:
    """How files are read and written, or why not past the page cache; None if none have been."""
    if llm.runtime is None or not (llm.moved_bytes("disk_read") or llm.moved_bytes("disk_write")):
        return None
    return llm.runtime.transfer.refusal or "O_DIRECT"


def _phase(llm: LLM, name: str, seconds: float | None, hardware: Hardware | None) -> dict[str, Any]:
    """Measured and least seconds of a phase. On a GPU the host sees when work is issued and not when it is done."""
    work = llm.totals.work[name]
    limit, binds, reason = limit_of(work, hardware, dtype_name(llm.dtype), llm.config.head_dim, llm.device.type)
    is_seen = seconds is not None and llm.device.type == "cpu"
    busy = {lane: work.busy_s.get(lane, 0.0) if is_seen else None for lane in LANES}
    return {"seconds": seconds, "limit_s": limit, "binds": binds, "no_limit": reason, "busy_s": busy}


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def summary(report: dict[str, Any], length: int) -> str:
    """A run's report for people; `length` is prompt + generated tokens."""
    memory, eviction = report["memory"], report["eviction"]
    held, full = memory["kv_cache_bytes"], memory["full_kv_cache_bytes"]
    share = f" ({held / full:.0%} of the full cache's {full:,})" if full else ""
    percent = " ".join(f"{value:.1f}".removesuffix(".0") for value in report["achieved_percent"])
    lines = [
        f"{report['model']}{' with dummy weights' if report['dummy_weights'] else ''}, {report['dtype']} on"
        f" {report['device']}: {report['num_prompts']} prompts, {report['prompt_tokens']} tokens in,"
        f" {report['generated_tokens']} out",
        f"KV cache: {eviction['name']}, {eviction['heavy_slots']} heavy + {eviction['recent_slots']} recent of {length}"
        f" entries per row and head; {held:,} bytes{share}; {eviction['evictions']:,} entries evicted",
        f"homes achieved: {percent} per cent (weights, cache, hidden states on gpu and cpu)",
    ]
    lines += _predicted_lines(report["predicted"])
    if not report["measured"]:
        return "\n".join(
            [*lines, "dry run: nothing was computed or timed; peaks by the ledger:", *_ledger_lines(memory)]
        )
    lines.append(
        f"prefill {report['prefill_s']:.3f} s, decode {report['decode_s']:.3f} s, loading {report['load_s']:.3f} s"
    )
    kernels = report["kernels"]
    lines.append(f"products: matrices in {kernels['matrices']}; decode attention: {kernels['decode_attention']}")
    if kernels["disk"] is not None:
        lines.append(f"disk: {kernels['disk']}")
    lines += _limit_lines(report["phases"])
    if report["throughput_tok_s"] is not None:
        decode = f", decode {report['decode_tok_s']:.1f} tok/s" if report["decode_tok_s"] is not None else ""
        lines.append(f"throughput {report['throughput_tok_s']:.1f} tok/s{decode}")
    return "\n".join([*lines, "peak memory, counted by the ledger:", *_ledger_lines(memory), _measured_line(memory)])


def _predicted_lines(predicted: dict[str, Any] | None) -> list[str]:
    if predicted is None:
        return []
    return [
        f"projected, not measured: prefill {predicted['prefill_s']:.3f} s, decode {predicted['decode_s']:.3f} s,"
        f" {predicted['throughput_tok_s']:.1f} tok/s"
    ]


def _limit_lines(phases: dict[str, Any]) -> list[str]:
    """How near each phase came to its limit; nothing where there is none."""
    return [
        f"{name}: limit {phase['limit_s']:.3f} s ({phase['binds']}), {phase['limit_s'] / phase['seconds']:.0%} of it"
        " reached"
        for name, phase in phases.items()
        if phase["limit_s"] and phase["seconds"]
    ]


def _ledger_lines(memory: dict[str, Any]) -> list[str]:
    lines = []
    for tier, peak in memory["ledger_peak_bytes"].items():
        if peak:
            parts = ", ".join(f"{line} {gb(size)}" for line, size in memory["ledger"][tier].items() if size)
            lines.append(f"  {tier:4} {gb(peak):>10}: {parts}")
    return lines


def _measured_line(memory: dict[str, Any]) -> str:
    on_gpu = f"; of the GPU: {gb(memory['gpu_peak_bytes'])}" if memory["gpu_peak_bytes"] else ""
    return f"peak memory of the process, measured: {gb(memory['cpu_peak_bytes'])}{on_gpu}"
