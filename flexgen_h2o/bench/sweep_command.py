"""`bench sweep` and `bench report`: flags, files and progress."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError, add_note
from flexgen_h2o.bench.grid import BITS, Plan, Setting, contenders
from flexgen_h2o.commands.command import EXIT_FAILED, EXIT_OK
from flexgen_h2o.commands.flags import Flags, unwritable
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.names import DTYPES

AUTO = "auto"
AMOUNT = r"[1-9][0-9]*[KMG]?"
CLIMB_STEPS = 5  # generations that looking for the best number of rows usually takes

SWEEP = """Engines beside one another: each in its own process, greedy, every row to the end, taking turns; a record for
every trial. An engine that is absent, refuses or is killed is a row that says so. With --memory, engines offload to
disk, and this one is placed by its policy search."""
REPORT = """Tables, plots and one HTML page from records of sweeps."""


def add_sweep(task: argparse.ArgumentParser) -> None:
    """The flags of `bench sweep`."""
    task.add_argument(
        "--engines",
        help="comma-separated, each with @ROWS if it has rows of its own: flexgen_h2o, transformers, accelerate,"
        " deepspeed, ctranslate2, vllm (default: flexgen_h2o,transformers)",
    )
    task.add_argument("--model", help="published sizes, given random weights, or folders (default: opt-1.3b)")
    task.add_argument("--lengths", help="PROMPT+GENERATED tokens, comma-separated (default: 128+16)")
    task.add_argument(
        "--budget", help="of this engine's KV: 'full' or shares of prompt + generated (default: full,0.2)"
    )
    task.add_argument("--bits", help="of this engine's weights and KV: 16, 4 or both (default: 16)")
    task.add_argument("--batch", help="rows, comma-separated, or 'auto': the best of each engine (default: auto)")
    task.add_argument("--memory", help="bytes that an engine may take, page cache included, such as 1500M")
    task.add_argument("--disk-read", help="bytes per second from disk, such as 200M")
    task.add_argument(
        "--percent",
        nargs="*",
        metavar="N",
        help="places this engine's 16 bits as `run` would; 4 bits are placed by auto",
    )
    task.add_argument("--unit", help="rows of this engine's sub-batches, with --percent (default: 16)")
    task.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: bfloat16; on a GPU float16)")
    task.add_argument("--device", help="where compute happens: cpu or cuda (default: cpu)")
    task.add_argument("--threads", help="of compute (default: as many as there are cores)")
    task.add_argument("--trials", help="generations of each engine in a comparison (default: 5)")
    task.add_argument("--timeout", help="seconds for each engine's process in all (default: 1200)")
    task.add_argument("--output", metavar="FILE", help="records are appended (default: results/sweep.jsonl)")
    task.add_argument("--resume", action="store_true", help="leave out what the file has, measured at this commit")


def add_report(task: argparse.ArgumentParser) -> None:
    """The flags of `bench report`."""
    task.add_argument("records", nargs="+", metavar="FILE", help="what bench sweep has written")
    task.add_argument(
        "--output", metavar="FOLDER", help="for report.md, index.html and plots (default: results/report)"
    )


def sweep(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """`bench sweep`. Raises UsageError with every mistake found."""
    plan = read_plan(args)
    output = Path(args.output or "results/sweep.jsonl")
    if problem := unwritable("--output", output):
        raise UsageError(problem)
    from tqdm import tqdm

    from flexgen_h2o.bench.sweep import Sweep
    from flexgen_h2o.machine.environment import append_record

    known = _known(output) if args.resume else []
    command = shlex.join(["python", "-m", "flexgen_h2o.bench", *(word for word in argv if word != "--resume")])
    done: list[dict[str, Any]] = []
    with tqdm(total=expected(plan), unit="generation", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def keep(record: dict[str, Any]) -> None:
            append_record(output, {"command": command, **record})
            done.append(record)
            bar.write(told(record), file=sys.stderr)

        def advance(label: str) -> None:
            bar.set_postfix_str(label)
            bar.update()

        try:
            Sweep(plan, keep, known, advance).run()
        except KeyboardInterrupt as error:
            add_note(error, f"{len(done)} new records are in {output}; the same command with --resume goes on")
            raise
    print(f"{len(done)} records in {output}; python -m flexgen_h2o.bench report {output} makes tables and plots")
    return EXIT_OK if known or any(record["status"] == "ok" for record in done) else EXIT_FAILED


def read_plan(args: argparse.Namespace) -> Plan:
    """What the flags ask for. Raises UsageError with every mistake found."""
    flags = Flags(args)
    cores = os.cpu_count() or 1
    for flag in ("--memory", "--disk-read"):
        if flags.given(flag) and not re.fullmatch(AMOUNT, flags.text(flag) or ""):
            flags.problems.append(
                f"{flag} is {flags.text(flag)!r}; it must be bytes, or a number with K, M or G: 1500M"
            )
    settings = [
        Setting(model, prompt_len, gen_len, dtype, threads, device, flags.text("--memory"), flags.text("--disk-read"))
        for device in [flags.choice("--device", ("cpu", "cuda"), "cpu")]
        for dtype in [flags.choice("--dtype", DTYPES, "bfloat16" if device == "cpu" else "float16")]
        for threads in [flags.whole("--threads", 1, cores) or cores]
        for model in _models(flags)
        for prompt_len, gen_len in _lengths(flags)
    ]
    found, problems = contenders(
        flags.words("--engines", "flexgen_h2o,transformers"),
        flags.words("--budget", "full,0.2"),
        _bits(flags),
        flags.given("--memory"),
        _own(flags, args),
    )
    batches = None
    if flags.text("--batch") not in (None, AUTO):
        batches = flags.whole_numbers("--batch", (), 1)
    trials = flags.whole("--trials", 1) or 5
    timeout_s = flags.real("--timeout", 1.0) or 1200.0
    if flags.problems or problems:
        raise UsageError(flags.problems + problems)
    return Plan(settings, found, batches, trials, timeout_s)


def _own(flags: Flags, args: argparse.Namespace) -> dict[str, Any]:
    """Options of this engine alone."""
    unit = flags.whole("--unit", 1)
    if args.percent is None:
        if unit is not None:
            flags.problems.append("--unit cuts blocks that --percent places; give that too, or leave it out")
        return {}
    if "16" not in flags.words("--bits", "16"):
        flags.problems.append("--percent places 16 bits, and --bits has none; leave one of them out")
    percent = flags.percent("--percent", args.percent)
    if percent is None:
        return {}
    return {"percent": list(percent.values), "gpu_batch_size": unit or 16}


def _bits(flags: Flags) -> list[int]:
    words = flags.words("--bits", "16")
    wrong = [word for word in words if word not in map(str, BITS)]
    flags.problems += [f"--bits has {word!r}; each must be 16 or 4" for word in wrong]
    return [int(word) for word in words if word not in wrong]


def _models(flags: Flags) -> list[str]:
    words = flags.words("--model", "opt-1.3b")
    for word in words:
        if not Path(word).is_dir():
            try:
                published(word)
            except UsageError as error:
                flags.problems += error.problems
    return words


def _lengths(flags: Flags) -> list[tuple[int, int]]:
    found = []
    for word in flags.words("--lengths", "128+16"):
        match = re.fullmatch(r"([1-9][0-9]*)\+([1-9][0-9]*)", word)
        if match is None:
            flags.problems.append(f"--lengths has {word!r}; each must be PROMPT+GENERATED tokens, such as 512+32")
        else:
            found.append((int(match[1]), int(match[2])))
    return found


def expected(plan: Plan) -> int:
    """How many generations a plan takes, about: how long an engine looks for its best nobody knows."""
    count = 0
    for _ in plan.settings:
        if plan.batches is None:
            climbs = sum(CLIMB_STEPS for contender in plan.contenders if contender.batch is None)
            count += climbs + plan.trials * len(plan.contenders)
        count += sum(plan.trials * len(rows) for rows in plan.comparisons())
    return count


def told(record: dict[str, Any]) -> str:
    """A record as a line of progress."""
    config = record["config"]
    name = f"{config['label']}, {config['batch']} rows"
    if record["status"] != "ok":
        return f"{name}: {record['status'].replace('_', ' ')}: {record['sentence']}"
    return f"{name}: {record['total_s']:.2f} s, {record['throughput_tok_s']:.4g} tok/s"


def _known(output: Path) -> list[dict[str, Any]]:
    """Records in a file that were made by the code as it is now."""
    from flexgen_h2o.bench.trials import trials_in
    from flexgen_h2o.machine.environment import environment

    now = environment()
    if now["git_dirty"]:
        raise UsageError("--resume takes only what this very code has measured, and the code has changes: commit them")
    records = trials_in(output) if output.exists() else []
    return [dict(record) for record in records if record["git_commit"] == now["git_commit"]]


def report(args: argparse.Namespace) -> int:
    """`bench report`. Raises UsageError with every mistake found."""
    from flexgen_h2o.bench.plots import plots
    from flexgen_h2o.bench.report import markdown, page
    from flexgen_h2o.bench.trials import groups, read_records

    found = groups(read_records([Path(name) for name in args.records]))
    pictures = plots(found)
    folder = Path(args.output or "results/report")
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(found)
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "index.html").write_text(page(found, pictures), encoding="utf-8")
    for picture in pictures:
        (folder / f"{picture.name}.svg").write_text(picture.svg, encoding="utf-8")
    print(text)
    print(f"{folder}/report.md, index.html and {len(pictures)} plots", file=sys.stderr)
    return EXIT_OK
