"""What a run reports, and where measured numbers are kept."""

import json
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flexgen_h2o.llm import LLM
from flexgen_h2o.sampling import SamplingParams
from flexgen_h2o.tiers import peak_resident_bytes


def run_report(llm: LLM, params: SamplingParams, prompt_len: int, num_prompts: int | None) -> dict[str, Any]:
    """The JSON object of `run --json`: everything in it was measured, or is null."""
    totals = llm.totals
    total_s = totals.prefill_s + totals.decode_s
    rule = llm.rule(prompt_len, params.max_new_tokens)
    # The first token of each prompt comes from prefill.
    decoded = totals.generated_tokens - totals.num_prompts
    return {
        "model": llm.config.name,
        "policy": {
            "gpu_batch_size": llm.policy.gpu_batch_size,
            "num_gpu_batches": llm.policy.num_gpu_batches,
            "decode_batch_size": llm.policy.group_rows,
        },
        "eviction": {
            "name": rule.name,
            "heavy_slots": rule.heavy,
            "recent_slots": rule.recent,
            "evictions": totals.evictions,
        },
        "dtype": str(llm.dtype).removeprefix("torch."),
        "dummy_weights": llm.uses_dummy_weights,
        "num_prompts": totals.num_prompts,
        "prompt_tokens": totals.prompt_tokens,
        "generated_tokens": totals.generated_tokens,
        "load_s": llm.load_s,
        "prefill_s": totals.prefill_s,
        "decode_s": totals.decode_s,
        "total_s": total_s,
        "throughput_tok_s": _rate(totals.generated_tokens, total_s),
        "decode_tok_s": _rate(decoded, totals.decode_s),
        "memory": {
            "gpu_peak_bytes": 0,
            "cpu_peak_bytes": peak_resident_bytes(),
            "disk_peak_bytes": 0,
            "weights_bytes": 0 if llm.weights is None else llm.weights.nbytes,
            "kv_cache_bytes": llm.kv_cache_bytes,
            "full_kv_cache_bytes": llm.full_kv_cache_bytes(prompt_len, params.max_new_tokens, num_prompts),
        },
        "io": {"disk_read_bytes": 0, "disk_write_bytes": 0, "h2d_bytes": 0, "d2h_bytes": 0},
        "achieved_percent": [100, 0, 100, 0, 100, 0],
        "phases": {
            "prefill": _phase(totals.prefill_s),
            "decode": _phase(totals.decode_s),
        },
        "predicted": None,
        "measured": True,
    }


def _phase(seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "limit_s": None,
        "busy_s": {"compute": seconds, "disk_read": 0.0, "disk_write": 0.0, "h2d": 0.0, "d2h": 0.0},
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def environment() -> dict[str, Any]:
    """What a measurement depends on beside its own settings: machine, versions, commit."""
    import psutil
    import torch

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "flexgen_h2o", "scripts")),
        "machine": {
            "cpu": _cpu_name(),
            "cores": psutil.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers", "numpy")},
        },
    }


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends one measurement to a file under results/, with the environment it was made in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "measurement", **environment(), **record}) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
