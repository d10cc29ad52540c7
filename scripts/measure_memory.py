"""Peak memory of whole runs, measured by the kernel, beside what the ledger counted: to results/memory.jsonl."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flexgen_h2o.machine.environment import append_record

RESULTS = Path(__file__).parent.parent / "results" / "memory.jsonl"
IN_MEMORY, ON_DISK = "100 0 100 0 100 0", "0 0 0 0 0 0"
RUNS = (
    ("opt-125m", "float32", 8, 128, IN_MEMORY),
    ("opt-125m", "bfloat16", 32, 256, IN_MEMORY),
    ("opt-125m", "bfloat16", 32, 256, ON_DISK),
    ("opt-1.3b", "bfloat16", 32, 128, IN_MEMORY),
    ("opt-1.3b", "bfloat16", 32, 128, ON_DISK),
)


def measure(model: str, dtype: str, rows: int, prompt_len: int, percent: str, offload_dir: str) -> dict[str, Any]:
    """One run in a process of its own."""
    words = f"--model {model} --dummy-weights --ignore-eos --dtype {dtype} --gpu-batch-size {rows}".split()
    words += f"--prompt-len {prompt_len} --gen-len 4 --percent {percent} --json".split()
    command = [sys.executable, "-m", "flexgen_h2o.run", *words, "--offload-dir", offload_dir]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    memory = json.loads(done.stdout.splitlines()[-1])["memory"]
    measured, ledger = memory["cpu_peak_bytes"], memory["ledger_peak_bytes"]["cpu"]
    return {
        "command": "python -m flexgen_h2o.run " + " ".join(words),
        "measured_peak_bytes": measured,
        "ledger_peak_bytes": ledger,
        "ratio": measured / ledger,
        "ledger": memory["ledger"],
        "disk_bytes": memory["disk_peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            rows.append(measure(*run, folder))
            ratio, peak = rows[-1]["ratio"], rows[-1]["measured_peak_bytes"] / 2**30
            what = f"{run[0]} {run[1]} {run[2]} x {run[3]}, {run[4]}"
            print(f"{what}: {peak:.2f} GB, {ratio:.3f} of the ledger", flush=True)
    append_record(args.output, {"name": "peak memory against the ledger", "runs": rows})


if __name__ == "__main__":
    main()
