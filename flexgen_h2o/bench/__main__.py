"""`python -m flexgen_h2o.bench TASK`: measures parts of the engine, beside what they are held against."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o.cli import EXIT_OK, Flags, Parser, run_command
from flexgen_h2o.errors import UsageError

DTYPES = ("float16", "bfloat16", "float32")
LEAST_TRIALS = 5  # of a record: fewer have no median to speak of

ATTENTION = """Decode attention in the native kernel, beside the same memory read without arithmetic and beside torch's
batched products. Rates count bytes of keys and values, in GB (2^30) per second."""
EPILOG = """A rate is the median of its trials; those of the kernel, of reading and of torch take turns.
exit codes: 0 done; 1 failed while measuring; 2 unusable arguments; 130 interrupted."""


def build_parser() -> argparse.ArgumentParser:
    """The command's flags: one sub-command a task."""
    parser = Parser(prog="python -m flexgen_h2o.bench", description=__doc__, allow_abbrev=False)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK", parser_class=Parser)
    attention = tasks.add_parser(
        "attention", help="rate of decode attention", description=ATTENTION, epilog=EPILOG, allow_abbrev=False
    )
    attention.add_argument("--dtype", help="precisions of keys and values, comma-separated (default: float16,bfloat16)")
    attention.add_argument("--head-dim", help="elements of a key, comma-separated (default: 64,80,128)")
    attention.add_argument("--slots", help="entries per row and head, comma-separated (default: 128,512,2048)")
    attention.add_argument("--threads", help="comma-separated (default: 1 and as many as there are cores)")
    attention.add_argument("--megabytes", help="of keys and values, 2^20 bytes (default: 512)")
    attention.add_argument("--trials", help=f"of each rate (default: {LEAST_TRIALS})")
    attention.add_argument("--json", action="store_true", help="print one JSON object, the last line")
    attention.add_argument("--record", metavar="FILE", help="append the result to this file, with versions and machine")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found."""
    args = build_parser().parse_args(argv)
    tasks: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {"attention": attention}
    return tasks[args.task](args, argv)


def attention(args: argparse.Namespace, argv: list[str]) -> int:
    """`bench attention`. Raises UsageError with every mistake found."""
    flags = Flags(args)
    cores = os.cpu_count() or 1
    dtypes = [name for name in _words(args.dtype, "float16,bfloat16") if _is_dtype(flags, name)]
    head_dims = _numbers(flags, "--head-dim", (64, 80, 128), least=1)
    slots = _numbers(flags, "--slots", (128, 512, 2048), least=2)
    threads = _numbers(flags, "--threads", sorted({1, cores}), least=1, most=cores)
    megabytes = flags.whole("--megabytes", 1) or 512
    trials = flags.whole("--trials", LEAST_TRIALS if args.record else 1) or LEAST_TRIALS
    if flags.problems:
        raise UsageError(flags.problems)

    from tqdm import tqdm

    from flexgen_h2o.bench.attention import Grid, measure, summary
    from flexgen_h2o.records import append_record

    grid = Grid(dtypes, head_dims, slots, threads, megabytes * 2**20, trials)
    with tqdm(total=len(grid), unit="row", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        result = measure(grid, lambda: bar.update())
    if args.record:
        command = shlex.join(["python", "-m", "flexgen_h2o.bench", *argv])
        append_record(Path(args.record), {"name": "bench attention", "command": command, **result})
    print(json.dumps(result) if args.json else summary(result))
    return EXIT_OK


def _words(text: str | None, default: str) -> list[str]:
    return (default if text is None else text).split(",")


def _is_dtype(flags: Flags, name: str) -> bool:
    if name not in DTYPES:
        flags.problems.append(f"--dtype has {name!r}; each must be one of {', '.join(DTYPES)}")
    return name in DTYPES


def _numbers(flags: Flags, flag: str, default: Sequence[int], least: int, most: int | None = None) -> list[int]:
    """Whole numbers separated by commas; what is wrong is left out."""
    text = flags.text(flag)
    if text is None:
        return list(default)
    numbers: list[Any] = [flags.whole_number(flag, word, least, most) for word in text.split(",")]
    return [number for number in numbers if number is not None]


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
