"""Tests and measures what only a GPU decides; scripts/gpu_check.sh runs it.

profile       rates of the GPU, its links, memory and disk (profile_hardware --quick)
correctness   float16 on CUDA against float32 on the CPU, tiny models, every home; Triton's kernels against torch
resident      opt-6.7b shape, all on the GPU: full cache and H2O 20 %
offload       opt-30b shape, weights in host memory, 16 GB of GPU: full cache and H2O 20 %, 8 tokens
peers         opt-2.7b shape, weights in host memory, beside Accelerate's cpu offload, 8 tokens; needs the extra `bench`
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.machine.environment import append_record

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "gpu" / "gpu_check.jsonl"
EVICTIONS = {"full": ["--eviction", "full"], "h2o 20 %": ["--hh-ratio", "0.1", "--recent-ratio", "0.1"]}
COMMON = ["--device", "cuda", "--dummy-weights", "--ignore-eos", "--json"]
RUNS = {
    "resident": "--model opt-6.7b --prompt-len 512 --gen-len 32 --gpu-batch-size 16 --num-gpu-batches 2"
    " --percent 100 0 100 0 100 0",
    "offload": "--model opt-30b --prompt-len 512 --gen-len 8 --gpu-batch-size 8 --num-gpu-batches 6 --gpu-mem 16"
    " --percent 0 100 0 100 0 100",
}

PEERS = (
    "--device cuda --model opt-2.7b --engines accelerate@32,flexgen_h2o@128 --lengths 512+8 --budget 0.2 --trials 3"
    " --percent 0 100 0 100 0 100 --unit 16"
)


def correctness() -> dict[str, Any]:
    """The tests that need a GPU; their closing line."""
    tests = ["tests/engine/test_cuda.py", "tests/kernels/test_triton.py", "tests/kernels/test_triton_products.py"]
    # What compiles kernels for a GPU that is not there has nothing to say where one is.
    command = [sys.executable, "-m", "pytest", *tests, "-k", "not compile_for_a_gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-3000:], done.stderr[-1000:])
    summary = done.stdout.strip().split("\n")[-1]
    passed = done.returncode == 0 and "passed" in summary and "skipped" not in summary
    return {"command": " ".join(command[1:]), "passed": passed, "summary": summary}


def profile() -> dict[str, Any]:
    """The machine's rates, as a hardware file has them."""
    words = ["-m", "flexgen_h2o.profile_hardware", "--device", "cuda", "--quick", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *words, "--output", str(Path(folder) / "gpu.json")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"profile failed: {done.stderr[-500:]}", flush=True)
        return {"command": " ".join(words), "passed": False, "summary": done.stderr[-2000:]}
    return {"command": " ".join(words), "passed": True, "hardware": json.loads(done.stdout.strip().split("\n")[-1])}


def measure(part: str, extra: list[str]) -> dict[str, Any]:
    """A warm run for each eviction policy; their reports."""
    reports = {}
    for name, eviction in EVICTIONS.items():
        words = ["scripts/warm_run.py", *RUNS[part].split(), *COMMON, *eviction, *extra]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            reports[name] = {"command": " ".join(words), "failed": done.stderr[-2000:]}
            print(f"{part} {name}: failed: {done.stderr[-500:]}", flush=True)
            continue
        report = json.loads(done.stdout.strip().split("\n")[-1])
        reports[name] = {"command": " ".join(words), **report}
        print(
            f"{part} {name}: {report['throughput_tok_s']:.1f} tok/s, decode {report['decode_tok_s']:.1f} tok/s",
            flush=True,
        )
    return reports


def peers(extra: list[str]) -> dict[str, Any]:
    """A sweep with one engine more; its records, which are those of `bench sweep`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "sweep.jsonl"
        words = ["-m", "flexgen_h2o.bench", "sweep", *PEERS.split(), *extra]
        done = subprocess.run(
            [sys.executable, *words, "--output", str(output)], cwd=ROOT, capture_output=True, text=True
        )
        print(done.stderr[-2000:], flush=True)
        records = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    passed = done.returncode == 0 and {record["status"] for record in records} == {"ok"}
    return {"command": " ".join(words), "passed": passed, "summary": done.stderr[-2000:], "records": records}


TESTS: dict[str, Callable[[], dict[str, Any]]] = {"profile": profile, "correctness": correctness}
PARTS = [*TESTS, *RUNS, "peers"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--extra", default="", help="more flags for the measured runs, in one string: a smaller model, say"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available() and "--device" not in args.extra:
        print("error: torch finds no GPU here, and this script checks what only a GPU decides", file=sys.stderr)
        return 2
    failed = False
    parts = args.part or PARTS
    if args.part is None and find_spec("accelerate") is None:
        print("peers: left out, as accelerate is not there: pip install '.[bench]'", file=sys.stderr)
        parts = [part for part in parts if part != "peers"]
    for part in parts:
        started = time.perf_counter()
        extra = args.extra.split()
        result = TESTS[part]() if part in TESTS else peers(extra) if part == "peers" else measure(part, extra)
        seconds = time.perf_counter() - started
        append_record(args.output, {"name": f"gpu check: {part}", "seconds": seconds, "result": result})
        reports = [report for report in result.values() if isinstance(report, dict)]
        failed = failed or any("failed" in report for report in reports) or not result.get("passed", True)
        print(f"{part}: {seconds:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
