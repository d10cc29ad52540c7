"""What the policy search's model says of runs on this machine, beside what they take.

    python scripts/check_predictions.py --rounds 2

Every configuration runs in a process of its own, once a round; they take turns. Its seconds are the median over the
rounds, its memory the largest. The rates are those of policies/hardware/. Goes to results/predictions.jsonl, and as a
table to standard output.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured_runs import ROOT, command_of, measured_run

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.machine.environment import append_record

RESULTS = ROOT / "results" / "predictions.jsonl"
CAP = "1500M"
ON_DISK = "--percent 0 0 100 0 100 0"
BOTH_IN_4_BITS = "--compress-weight --compress-cache"


@dataclass(frozen=True)
class Configuration:
    """A run, and what it is to be compared for.

    Attributes:
        block: rows of a sub-batch x sub-batches.
        more: further flags.
        memory: which it may use; None for all there is.
    """

    model: str
    block: tuple[int, int]
    prompt_len: int
    gen_len: int
    more: str = ""
    memory: str | None = None

    @property
    def words(self) -> list[str]:
        """The arguments of `run`."""
        rows, units = self.block
        words = f"--model {self.model} --dummy-weights --ignore-eos --gpu-batch-size {rows} --num-gpu-batches {units}"
        words += f" --prompt-len {self.prompt_len} --gen-len {self.gen_len} {self.more}"
        return words.split()


CONFIGURATIONS = (
    Configuration("opt-125m", (4, 1), 64, 64),
    Configuration("opt-125m", (16, 1), 128, 32, "--eviction full"),
    Configuration("opt-125m", (64, 1), 128, 32),
    Configuration("opt-125m", (32, 1), 512, 16),
    Configuration("opt-125m", (16, 4), 256, 32, "--eviction full"),
    Configuration("opt-125m", (64, 1), 128, 64, BOTH_IN_4_BITS),
    Configuration("opt-125m", (8, 1), 512, 64, "--eviction full --compress-cache"),
    Configuration("opt-1.3b", (4, 1), 64, 32),
    Configuration("opt-1.3b", (8, 1), 256, 16, "--eviction full"),
    Configuration("opt-1.3b", (32, 1), 64, 32),
    Configuration("opt-1.3b", (16, 4), 64, 16, "--eviction full"),
    Configuration("opt-1.3b", (8, 1), 128, 32, "--compress-weight"),
    Configuration("opt-1.3b", (32, 1), 64, 32, f"--eviction full {BOTH_IN_4_BITS}"),
    Configuration("opt-1.3b", (16, 2), 64, 16, ON_DISK, CAP),
    Configuration("opt-1.3b", (16, 4), 64, 8, "--percent 30 0 0 0 100 0 --eviction full", CAP),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of configurations, from 1 on (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    chosen = [CONFIGURATIONS[number - 1] for number in args.only or range(1, len(CONFIGURATIONS) + 1)]
    reports: list[list[dict[str, Any]]] = [[] for _ in chosen]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for configuration, found in zip(chosen, reports, strict=True):
                words = [*configuration.words, "--offload-dir", folder]
                found.append(measured_run(words, configuration.memory))
                print(command_of(configuration.words, configuration.memory), file=sys.stderr, flush=True)
    rows = [row(configuration, found) for configuration, found in zip(chosen, reports, strict=True)]
    errors = {kind: summarised([each[f"{kind}_error"] for each in rows]) for kind in ("time", "memory")}
    print(table(rows, errors))
    append_record(
        args.output,
        {
            "name": "projections beside measurements",
            "command": shlex.join(["python", "scripts/check_predictions.py", *sys.argv[1:]]),
            "rows": rows,
            "errors": errors,
        },
    )


def row(configuration: Configuration, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """A configuration's projection, measurements, and errors: projected over measured, less 1."""
    projected = reports[0]["predicted"]
    seconds = {
        name: statistics.median(report[name] for report in reports) for name in ("prefill_s", "decode_s", "total_s")
    }
    peak = max(report["memory"]["cpu_peak_bytes"] for report in reports)
    return {
        "command": command_of(configuration.words, configuration.memory),
        "projected": projected,
        "measured": {**seconds, "cpu_peak_bytes": peak, "total_s_of_rounds": [each["total_s"] for each in reports]},
        "time_error": projected["total_s"] / seconds["total_s"] - 1,
        "memory_error": projected["cpu_peak_bytes"] / peak - 1,
    }


def summarised(errors: list[float]) -> dict[str, float]:
    """Median and largest size of errors."""
    sizes = [abs(error) for error in errors]
    return {"median": statistics.median(sizes), "worst": max(sizes)}


def table(rows: list[dict[str, Any]], errors: dict[str, dict[str, float]]) -> str:
    """As Markdown."""
    lines = [
        "| run | prefill s | projected | decode s | projected | error in all | peak GB | projected | error |",
        "|---" * 9 + "|",
    ]
    for each in rows:
        projected, measured = each["projected"], each["measured"]
        what = each["command"].replace("python -m flexgen_h2o.run ", "").replace("--dummy-weights --ignore-eos ", "")
        lines.append(
            f"| `{what}` | {measured['prefill_s']:.2f} | {projected['prefill_s']:.2f} | {measured['decode_s']:.2f}"
            f" | {projected['decode_s']:.2f} | {each['time_error']:+.0%} | {measured['cpu_peak_bytes'] / GB:.2f}"
            f" | {projected['cpu_peak_bytes'] / GB:.2f} | {each['memory_error']:+.1%} |"
        )
    texts = [f"{kind} {found['median']:.1%} median, {found['worst']:.1%} worst" for kind, found in errors.items()]
    return "\n".join([*lines, "", f"Errors: {'; '.join(texts)}."])


if __name__ == "__main__":
    main()
