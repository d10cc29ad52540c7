"""`python -m flexgen_h2o.evaluate`: what eviction costs in quality, scored token by token through the cache."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_h2o.cli import EXIT_OK, Flags, Parser, run_command
from flexgen_h2o.errors import UsageError

TASKS = {
    "perplexity": "of the text after a prompt, and agreement of the predictions with the full cache's",
    "recall": "of passwords that the prompt told, by kind",
    "agreement": "the same as perplexity",
    "compare": "all of it",
}
DEFAULT_EVICTIONS, DEFAULT_BUDGETS = "full,h2o,sink,local", "0.2"
DEFAULT_DOCUMENTS, DEFAULT_RECALL_DOCUMENTS, DEFAULT_ROWS = 200, 50, 32
COMPRESSION = ("compress_weight", "compress_cache", "ring_16bit")

EPILOG = """Policies: those of run's --eviction, and many that are there to compare with; an unknown one is answered
with the list. The full cache that all are held against is never compressed."""


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(prog="python -m flexgen_h2o.evaluate", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("task", choices=TASKS, help="; ".join(f"{task}: {text}" for task, text in TASKS.items()))
    parser.add_argument("--model", help="folder in Hugging Face format, or name (default: the demo model)")
    parser.add_argument("--device", help="auto, cuda or cpu (default: auto)")
    parser.add_argument("--dtype", help="auto (float32), float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--eviction", help=f"policies, separated by commas (default: {DEFAULT_EVICTIONS})")
    parser.add_argument("--budget", help=f"kept entries as shares of the prompt (default: {DEFAULT_BUDGETS})")
    parser.add_argument("--documents", help=f"windows of text (default: {DEFAULT_DOCUMENTS})")
    parser.add_argument(
        "--recall-documents", help=f"documents per kind of recall (default: {DEFAULT_RECALL_DOCUMENTS})"
    )
    parser.add_argument("--text", metavar="FILE", help="text, or .npy of token ids, in place of the held-out text")
    parser.add_argument("--prompt-len", help="tokens of a document that are computed in prefill (default: 384)")
    parser.add_argument("--continuation-len", help="tokens that are scored, of a window of text (default: 128)")
    parser.add_argument("--gpu-batch-size", help=f"documents that are scored together (default: {DEFAULT_ROWS})")
    parser.add_argument("--compress-weight", action="store_true", help="weights in 4-bit groups")
    parser.add_argument("--compress-cache", action="store_true", help="keys and values in 4-bit groups")
    parser.add_argument("--ring-16bit", action="store_true", help="with --compress-cache: recent entries are not")
    parser.add_argument("--json", action="store_true", help="print one JSON object, the last line")
    parser.add_argument("--plot", metavar="FILE", help="draw the result; needs matplotlib, the extra `plots`")
    parser.add_argument("--record", metavar="FILE", help="append the result to this file, with versions and machine")
    return parser


@dataclass(frozen=True)
class Options:
    """Checked flags."""

    device: str
    dtype: str
    evictions: list[str]
    budgets: list[float]
    sizes: dict[str, int]  # arguments of HeldoutSizes
    rows: int
    compression: dict[str, bool]  # fields of Policy


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found."""
    args = build_parser().parse_args(argv)
    options = _read(args)

    from flexgen_h2o.evaluation.plots import check_plot, plot
    from flexgen_h2o.evaluation.tables import table
    from flexgen_h2o.records import append_record

    if args.plot is not None and (problem := check_plot(args.plot)):
        raise UsageError(problem)
    name, rows = _evaluate(args, options)
    result = {"model": name, "dtype": options.dtype, **options.compression, **options.sizes, "rows": rows}
    if args.record:
        command = "python -m flexgen_h2o.evaluate " + " ".join(argv)
        append_record(Path(args.record), {"name": f"evaluate {args.task}", "command": command, **result})
    if args.plot is not None:
        plot(rows, Path(args.plot), f"{name}, {options.sizes['prompt_len']} tokens of prompt")
    print(json.dumps(result) if args.json else table(rows))
    return EXIT_OK


def _read(args: argparse.Namespace) -> Options:
    """Checks the flags. Raises UsageError with every mistake found in them."""
    flags = Flags(args)
    judges_text, judges_recall = args.task != "recall", args.task in ("recall", "compare")
    documents = flags.whole("--documents", 2) or DEFAULT_DOCUMENTS
    recall_documents = flags.whole("--recall-documents", 1) or DEFAULT_RECALL_DOCUMENTS
    options = Options(
        device=flags.choice("--device", ("auto", "cuda", "cpu"), "auto"),
        dtype=flags.choice("--dtype", ("auto", "float32", "bfloat16", "float16"), "auto").replace("auto", "float32"),
        evictions=(DEFAULT_EVICTIONS if args.eviction is None else args.eviction).split(","),
        budgets=_budgets(flags),
        sizes={
            "prompt_len": flags.whole("--prompt-len", 1) or 384,
            "continuation_len": flags.whole("--continuation-len", 2) or 128,
            "documents": documents if judges_text else 0,
            "recall_documents": recall_documents if judges_recall else 0,
        },
        rows=flags.whole("--gpu-batch-size", 1) or DEFAULT_ROWS,
        compression={name: getattr(args, name) for name in COMPRESSION},
    )
    if flags.problems:
        raise UsageError(flags.problems)
    return options


def _budgets(flags: Flags) -> list[float]:
    budgets = []
    for text in (flags.text("--budget") or DEFAULT_BUDGETS).split(","):
        try:
            budget = float(text)
        except ValueError:
            budget = 0.0
        if not 0 < budget <= 1:
            flags.problems.append(f"--budget has {text!r}; each must be a number above 0 and at most 1")
        budgets.append(budget)
    return budgets


def _evaluate(args: argparse.Namespace, options: Options) -> tuple[str, list[dict[str, Any]]]:
    """The model's name and a row for each policy and budget."""
    from contextlib import ExitStack

    from tqdm import tqdm

    from flexgen_h2o.evaluation.compare import compare, compression_problems, documents_to_score, make_cases
    from flexgen_h2o.evaluation.heldout import HeldoutSizes, heldout_set
    from flexgen_h2o.evaluation.scoring import Judge
    from flexgen_h2o.llm import LLM

    def model(compression: dict[str, Any]) -> LLM:
        return LLM(args.model, device=options.device, dtype=options.dtype, gpu_batch_size=options.rows, **compression)

    with ExitStack() as stack:
        llm = stack.enter_context(model(options.compression))
        sizes = HeldoutSizes(**options.sizes)
        length = sizes.prompt_len + sizes.continuation_len
        layers = llm.config.num_hidden_layers
        cases = make_cases(options.evictions, options.budgets, sizes.prompt_len, length, layers)
        if problems := compression_problems(cases, llm.policy):
            raise UsageError(problems)
        heldout = heldout_set(llm, sizes, args.text)
        judge = reference = Judge(llm, sizes.prompt_len)
        if any(options.compression.values()) and sizes.documents:
            reference = Judge(stack.enter_context(model({})), sizes.prompt_len)
        total = documents_to_score(cases, heldout, judge is reference)
        is_quiet = not sys.stderr.isatty()
        bar = stack.enter_context(tqdm(total=total, unit="document", file=sys.stderr, disable=is_quiet))
        return llm.config.name, compare(cases, heldout, judge, reference, bar.update)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
