"""The policy that `run` chooses by itself beside policies set by hand, for one job on a machine with too little memory.

    python scripts/check_auto.py --rounds 3

Weights and the KV cache of all prompts do not fit the memory together: something has to go to disk, or the prompts be
taken in several blocks. Every policy has a process of its own, once a round; they take turns. Its seconds
are the median over the rounds. Goes to results/auto.jsonl, and as a table to standard output.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured_runs import ROOT, measured_run

from flexgen_h2o.machine.environment import append_record

RESULTS = ROOT / "results" / "auto.jsonl"
MEMORY = "640M"
MODEL, VOCABULARY = "opt-125m", 50000
PROMPTS, PROMPT_LEN, GEN_LEN = 96, 128, 32
AUTO = "auto"
BY_HAND = (
    "--percent 100 0 100 0 100 0 --gpu-batch-size 8",
    "--percent 100 0 100 0 100 0 --gpu-batch-size 16",
    "--percent 100 0 100 0 100 0 --gpu-batch-size 24",
    "--percent 100 0 0 0 100 0 --gpu-batch-size 8 --num-gpu-batches 12",
    "--percent 100 0 0 0 100 0 --gpu-batch-size 16 --num-gpu-batches 6",
    "--percent 100 0 50 0 100 0 --gpu-batch-size 8 --num-gpu-batches 6",
    "--percent 50 0 100 0 100 0 --gpu-batch-size 16 --num-gpu-batches 3",
    "--percent 50 0 100 0 100 0 --gpu-batch-size 16 --num-gpu-batches 2",
    "--percent 50 0 50 0 100 0 --gpu-batch-size 16 --num-gpu-batches 6",
    "--percent 0 0 100 0 100 0 --gpu-batch-size 8 --num-gpu-batches 12",
    "--percent 0 0 100 0 100 0 --gpu-batch-size 16 --num-gpu-batches 6",
    "--percent 0 0 100 0 100 0 --gpu-batch-size 16 --num-gpu-batches 3",
    "--percent 0 0 100 0 100 0 --gpu-batch-size 48",
    "--percent 0 0 50 0 100 0 --gpu-batch-size 16 --num-gpu-batches 6",
    "--percent 0 0 0 0 0 0 --gpu-batch-size 16 --num-gpu-batches 6",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, help="so many of the policies set by hand (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    policies = [AUTO, *BY_HAND[: args.only]]
    reports: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    refusals: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = ["--input", write_prompts(Path(folder)), "--output", f"{folder}/out.jsonl", "--restart"]
        job += f"--model {MODEL} --dummy-weights --ignore-eos --gen-len {GEN_LEN} --offload-dir {folder}".split()
        for _ in range(args.rounds):
            for policy in policies:
                if policy not in refusals:
                    run(policy, job, reports, refusals)
    rows = [row(policy, found) for policy, found in reports.items() if found]
    best = min(rows, key=lambda each: each["total_s"])
    share = best["total_s"] / rows[0]["total_s"]
    print(table(rows, refusals))
    print(f"\nauto reaches {share:.0%} of the throughput of the best of all, `{best['policy']}`")
    append_record(
        args.output,
        {
            "name": "the policy chosen beside policies set by hand",
            "command": shlex.join(["python", "scripts/check_auto.py", *sys.argv[1:]]),
            "config": {
                "model": MODEL,
                "prompts": PROMPTS,
                "prompt_len": PROMPT_LEN,
                "gen_len": GEN_LEN,
                "memory": MEMORY,
            },
            "rows": rows,
            "refused": refusals,
            "share_of_best": share,
        },
    )


def write_prompts(folder: Path) -> str:
    """A file of prompts of random tokens, all of one length."""
    numbers, path = random.Random(0), folder / "prompts.jsonl"
    prompts = ([numbers.randrange(4, VOCABULARY) for _ in range(PROMPT_LEN)] for _ in range(PROMPTS))
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts), encoding="utf-8")
    return str(path)


def run(policy: str, job: list[str], reports: dict[str, list[dict[str, Any]]], refusals: dict[str, str]) -> None:
    """One run of the job with a policy."""
    try:
        report = measured_run([*job, *([] if policy == AUTO else policy.split())], MEMORY)
    except RuntimeError as error:
        if policy == AUTO:
            raise
        refusals[policy] = str(error)
        print(f"{policy}: {error}", file=sys.stderr, flush=True)
        return
    reports[policy].append(report)
    print(f"{policy}: {report['total_s']:.2f} s", file=sys.stderr, flush=True)


def row(policy: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """A policy's median seconds, and what it is."""
    predicted = reports[0]["predicted"]
    return {
        "policy": policy,
        "fields": reports[0]["policy"],
        "total_s": statistics.median(report["total_s"] for report in reports),
        "total_s_of_rounds": [report["total_s"] for report in reports],
        "projected_total_s": None if predicted is None else predicted["total_s"],
        "peak_bytes": max(report["memory"]["cpu_peak_bytes"] for report in reports),
    }


def table(rows: list[dict[str, Any]], refusals: dict[str, str]) -> str:
    """As Markdown."""
    lines = ["| policy | block | percent | s in all | projected | peak MB |", "|---" * 6 + "|"]
    for each in sorted(rows, key=lambda each: float(each["total_s"])):
        fields = each["fields"]
        percent = " ".join(f"{value:g}" for value in fields["percent"])
        name = AUTO if each["policy"] == AUTO else "by hand"
        projected = "-" if each["projected_total_s"] is None else f"{each['projected_total_s']:.2f}"
        lines.append(
            f"| {name} | {fields['gpu_batch_size']} x {fields['num_gpu_batches']} | {percent}"
            f" | {each['total_s']:.2f} | {projected} | {each['peak_bytes'] / 2**20:.0f} |"
        )
    return "\n".join([*lines, *(f"| by hand, refused: `{policy}` | | | | | |" for policy in refusals)])


if __name__ == "__main__":
    main()
