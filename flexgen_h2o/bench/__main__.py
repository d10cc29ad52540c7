"""`python -m flexgen_h2o.bench TASK`: measures parts of the engine, beside what they are held against."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench.sweep_command import REPORT, SWEEP, add_report, add_sweep, report, sweep
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import Flags, Parser
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import DTYPES

KV_DTYPES = (*DTYPES, "4-bit")
LEAST_TRIALS = 5  # of a record: fewer have no median to speak of

ATTENTION = """Decode attention in the native kernel, beside the same memory read without arithmetic and beside torch's
batched products. Rates count bytes of keys and values, in GB (2^30) per second."""
COLUMN_SUMS = """What H2O's scores cost in prefill: its sums of attention weights, as a share of a whole prefill beside
engines that need none, and the memory that attention to a long prompt takes in a process of its own."""
DECODE = """Decode steps of a whole model from a synthetic KV cache: H2O's, beside this engine's full cache and beside
transformers with its default cache."""
EPILOG = """A number is the median of its trials; what is compared takes turns.
exit codes: 0 done; 1 failed while measuring; 2 unusable arguments; 130 interrupted."""


def build_parser() -> argparse.ArgumentParser:
    """The command's flags: one sub-command a task."""
    parser = Parser(prog="python -m flexgen_h2o.bench", description=__doc__, allow_abbrev=False)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK", parser_class=Parser)
    attention = _add_task(tasks, "attention", "rate of decode attention", ATTENTION)
    attention.add_argument(
        "--dtype", help="precisions of keys and values, comma-separated (default: float16,bfloat16,4-bit)"
    )
    attention.add_argument("--head-dim", help="elements of a key, comma-separated (default: 64,80,128)")
    attention.add_argument("--slots", help="entries per row and head, comma-separated (default: 128,512,2048)")
    attention.add_argument("--threads", help="comma-separated (default: 1 and as many as there are cores)")
    attention.add_argument("--megabytes", help="of keys and values, 2^20 bytes (default: 512)")
    sums = _add_task(tasks, "column-sums", "cost of H2O's scores in prefill", COLUMN_SUMS)
    sums.add_argument("--rows", help="prompts of a prefill, comma-separated (default: 1,4)")
    sums.add_argument("--prompt-len", help="tokens of a prompt (default: 2048)")
    sums.add_argument("--long-prompt-len", help="tokens of the prompt whose memory is measured (default: 12000)")
    decode = _add_task(tasks, "decode", "decode steps with H2O and with the full cache", DECODE)
    decode.add_argument("--batch", help="rows (default: 32)")
    decode.add_argument("--cache-len", help="tokens in the cache before the first step (default: 1024)")
    decode.add_argument("--steps", help="timed steps of each trial (default: 4)")
    add_sweep(_add_plain_task(tasks, "sweep", "engines beside one another", SWEEP))
    add_report(_add_plain_task(tasks, "report", "tables, plots and a page from records of sweeps", REPORT))
    for task, layers in ((sums, "4"), (decode, "all of them")):
        task.add_argument("--model", help="a published size (default: opt-1.3b)")
        task.add_argument("--layers", help=f"how many of its layers (default: {layers})")
        task.add_argument("--dtype", help="bfloat16, float16 or float32 (default: bfloat16)")
        task.add_argument("--threads", help="of compute (default: as many as there are cores)")
    return parser


def _add_plain_task(tasks: Any, name: str, title: str, description: str) -> argparse.ArgumentParser:
    """A sub-command without flags yet."""
    task: argparse.ArgumentParser = tasks.add_parser(
        name, help=title, description=description, epilog=EPILOG, allow_abbrev=False
    )
    return task


def _add_task(tasks: Any, name: str, title: str, description: str) -> argparse.ArgumentParser:
    """A sub-command with the flags of what measures parts of this engine."""
    task = _add_plain_task(tasks, name, title, description)
    task.add_argument("--trials", help=f"of each number (default: {LEAST_TRIALS})")
    task.add_argument("--json", action="store_true", help="print one JSON object, the last line")
    task.add_argument("--record", metavar="FILE", help="append the result to this file, with versions and machine")
    return task


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found."""
    args = build_parser().parse_args(argv)
    tasks: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
        "attention": attention,
        "column-sums": column_sums,
        "decode": decode,
        "sweep": sweep,
        "report": lambda args, argv: report(args),
    }
    return tasks[args.task](args, argv)


def attention(args: argparse.Namespace, argv: list[str]) -> int:
    """`bench attention`. Raises UsageError with every mistake found."""
    flags = Flags(args)
    cores = os.cpu_count() or 1
    dtypes = [name for name in flags.words("--dtype", "float16,bfloat16,4-bit") if _is_dtype(flags, name)]
    head_dims = flags.whole_numbers("--head-dim", (64, 80, 128), least=1)
    slots = flags.whole_numbers("--slots", (128, 512, 2048), least=2)
    threads = flags.whole_numbers("--threads", sorted({1, cores}), least=1, most=cores)
    megabytes = flags.whole("--megabytes", 1) or 512
    trials = _trials(flags)
    if flags.problems:
        raise UsageError(flags.problems)

    from flexgen_h2o.bench.attention import Grid, measure, summary

    grid = Grid(dtypes, head_dims, slots, threads, megabytes * 2**20, trials)
    with _progress(len(grid), "row") as bar:
        result = measure(grid, lambda: bar.update())
    return _report(args, argv, result, summary)


def column_sums(args: argparse.Namespace, argv: list[str]) -> int:
    """`bench column-sums`. Raises UsageError with every mistake found."""
    flags = Flags(args)
    config, dtype, threads = _model(flags, 4)
    rows = flags.whole_numbers("--rows", (1, 4), least=1)
    tokens = flags.whole("--prompt-len", 2, 2048) or 2048
    long_tokens = flags.whole("--long-prompt-len", 1) or 12_000
    trials = _trials(flags)
    if flags.problems:
        raise UsageError(flags.problems)

    from flexgen_h2o.bench.column_sums import PromptSizes, measure, summary

    workload = PromptSizes(config, rows, tokens, long_tokens, dtype, threads, trials)
    with _progress(len(rows), "prefill") as bar:
        result = measure(workload, lambda: bar.update())
    return _report(args, argv, result, summary)


def decode(args: argparse.Namespace, argv: list[str]) -> int:
    """`bench decode`. Raises UsageError with every mistake found."""
    flags = Flags(args)
    config, dtype, threads = _model(flags, None)
    batch = flags.whole("--batch", 1) or 32
    cache_len = flags.whole("--cache-len", 1) or 1024
    steps = flags.whole("--steps", 1) or 4
    trials = _trials(flags)
    context = config.max_position_embeddings
    if not flags.problems and cache_len + steps + 1 > context:
        flags.problems.append(
            f"--cache-len {cache_len} and {steps + 1} steps exceed {config.name}'s context of {context} tokens;"
            " shorten one of them"
        )
    if flags.problems:
        raise UsageError(flags.problems)

    from flexgen_h2o.bench.decode_steps import DecodeSizes, measure, summary

    workload = DecodeSizes(config, batch, cache_len, steps, dtype, threads, trials)
    with _progress(trials + 1, "round") as bar:
        result = measure(workload, lambda: bar.update())
    return _report(args, argv, result, summary)


def _model(flags: Flags, layers: int | None) -> tuple[ModelShape, str, int]:
    """Shape, precision and threads of what is measured; those of some model where a flag is wrong."""
    name = flags.text("--model") or "opt-1.3b"
    try:
        config = published(name)
    except UsageError as error:
        flags.problems += error.problems
        name = "opt-125m"
        config = published(name)
    count = flags.whole("--layers", 1, config.num_hidden_layers) or min(
        layers or config.num_hidden_layers, config.num_hidden_layers
    )
    dtype = flags.choice("--dtype", DTYPES, "bfloat16")
    cores = os.cpu_count() or 1
    return published(name, num_hidden_layers=count), dtype, flags.whole("--threads", 1, cores) or cores


def _trials(flags: Flags) -> int:
    """How often each number is measured; a record wants a median, and a place."""
    flags.check_record()
    return flags.whole("--trials", LEAST_TRIALS if flags.given("--record") else 1) or LEAST_TRIALS


def _progress(total: int, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())


def _report(
    args: argparse.Namespace, argv: list[str], result: dict[str, Any], summary: Callable[[dict[str, Any]], str]
) -> int:
    """Prints a result, and keeps it if asked to."""
    from flexgen_h2o.machine.environment import append_record

    try:
        print(json.dumps(result) if args.json else summary(result), flush=True)
    finally:  # whether or not somebody is there to read it
        if args.record:
            command = shlex.join(["python", "-m", "flexgen_h2o.bench", *argv])
            append_record(Path(args.record), {"name": f"bench {args.task}", "command": command, **result})
    return EXIT_OK


def _is_dtype(flags: Flags, name: str) -> bool:
    if name not in KV_DTYPES:
        flags.problems.append(f"--dtype has {name!r}; each must be one of {', '.join(KV_DTYPES)}")
    return name in KV_DTYPES


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
