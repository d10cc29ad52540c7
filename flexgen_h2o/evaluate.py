"""`python -m flexgen_h2o.evaluate compare`: what eviction costs in quality, measured through the evicting cache."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from flexgen_h2o.cli import EXIT_OK, Flags, Parser, run_command
from flexgen_h2o.errors import UsageError


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(prog="python -m flexgen_h2o.evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("task", choices=["compare"], help="compare: perplexity and recall of several policies")
    parser.add_argument("--model", help="folder with the demo model's tokenizer (default: the demo model)")
    parser.add_argument("--device", help="auto, cuda or cpu (default: auto)")
    parser.add_argument("--dtype", help="auto (float32), float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--eviction", help="policies, separated by commas (default: full,h2o,sink,local)")
    parser.add_argument("--budget", help="kept entries as shares of the prompt (default: 0.2)")
    parser.add_argument("--documents", help="windows of held-out text (default: 32)")
    parser.add_argument("--recall-documents", help="documents per kind of recall (default: 48)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, the last line")
    parser.add_argument("--record", metavar="FILE", help="append the result to this file, with versions and machine")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found."""
    args = build_parser().parse_args(argv)
    flags = Flags(args)
    device = flags.choice("--device", ("auto", "cuda", "cpu"), "auto")
    dtype = flags.choice("--dtype", ("auto", "float32", "bfloat16", "float16"), "auto").replace("auto", "float32")
    documents = flags.whole("--documents", 2) or 32
    recall_documents = flags.whole("--recall-documents", 1) or 48
    evictions = ("full,h2o,sink,local" if args.eviction is None else args.eviction).split(",")
    budgets = _budgets(flags)
    if flags.problems:
        raise UsageError(flags.problems)

    from tqdm import tqdm

    from flexgen_h2o.evaluation.compare import compare, demo_heldout_set
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.records import append_record

    with (
        LLM(args.model, device=device, dtype=dtype, gpu_batch_size=max(documents, recall_documents)) as llm,
        tqdm(unit="row", file=sys.stderr, disable=not sys.stderr.isatty()) as bar,
    ):
        heldout = demo_heldout_set(llm, documents, recall_documents)
        rows = compare(llm, evictions, budgets, heldout, bar.update)
    result = {"model": llm.config.name, "dtype": dtype, "rows": rows}
    if args.record:
        command = "python -m flexgen_h2o.evaluate " + " ".join(argv)
        append_record(Path(args.record), {"name": "evaluate compare", "command": command, **result})
    print(json.dumps(result) if args.json else table(rows))
    return EXIT_OK


def _budgets(flags: Flags) -> list[float]:
    budgets = []
    for text in (flags.text("--budget") or "0.2").split(","):
        try:
            budget = float(text)
        except ValueError:
            budget = 0.0
        if not 0 < budget <= 1:
            flags.problems.append(f"--budget has {text!r}; each must be a number above 0 and at most 1")
        budgets.append(budget)
    return budgets


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    kinds = list(rows[0]["recall"])
    names = " | ".join(kind.replace("_", " ") for kind in kinds)
    lines = [
        f"| policy | kept entries | perplexity | against full | {names} |",
        "|---" * (4 + len(kinds)) + "|",
    ]
    full = next((row["perplexity"] for row in rows if row["eviction"] == "full"), None)
    for row in rows:
        kept = "all" if row["eviction"] == "full" else str(row["heavy_slots"] + row["recent_slots"])
        against = "" if full is None else f"{row['perplexity'] / full - 1:+.1%}"
        recall = " | ".join(f"{row['recall'][kind]:.2f}" for kind in kinds)
        lines.append(f"| {row['eviction']} | {kept} | {row['perplexity']:.1f} | {against} | {recall} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
