"""Flags of `python -m flexgen_h2o.evaluate`, and what they ask for once they have been checked."""

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import borrowed
from flexgen_h2o.commands.flags import Flags, Parser
from flexgen_h2o.commands.settings_flags import add_flags, filled_from
from flexgen_h2o.plan.names import COMPUTING_DEVICES
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.run_settings import ModelChoice

COMPARISONS = {
    "perplexity": "of the text after a prompt, and agreement of the predictions with the full cache's",
    "recall": "of passwords that the prompt told, by kind",
    "agreement": "the same as perplexity",
    "compare": "all of it",
}
ANALYSE, TASKS = "analyse", "tasks"
OTHERS = {
    ANALYSE: "what the H2O paper found in attention, looked for in this model",
    TASKS: "accuracy on tasks of lm-eval, scored through the evicting cache",
}
DEFAULT_EVICTIONS, DEFAULT_BUDGETS = "full,h2o,sink,local", "0.2"
DEFAULT_TASK_EVICTIONS = "full,h2o,local"
PAPER_TASKS = "copa,mathqa,openbookqa,piqa,rte,winogrande"
DEFAULT_DOCUMENTS, DEFAULT_RECALL_DOCUMENTS, DEFAULT_ROWS = 200, 50, 32
DEFAULT_ANALYSED = 32  # windows of text
DEFAULT_PROMPT, DEFAULT_CONTINUATION = 384, 128

POLICIES_EPILOG = """Policies: those of run's --eviction, and many that are there to compare with; an unknown one is
answered with the list. The full cache that all are held against is never compressed."""
TASKS_EPILOG = """An answer is scored token by token, and so is the last token of its context, so that eviction acts on
all of it. A task's data comes from the network unless it was fetched before."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where and how it is computed. The fields are LLM's arguments."""

    model: str | None = borrowed(ModelChoice, "model", text="folder in Hugging Face format, or name")
    device: str = borrowed(ModelChoice, "device", text="auto, cuda or cpu", known=COMPUTING_DEVICES)
    dtype: str = borrowed(ModelChoice, "dtype", text="auto (float32), float32, bfloat16 or float16")
    gpu_batch_size: int = borrowed(
        Policy,
        "gpu_batch_size",
        DEFAULT_ROWS,
        text="documents that are scored together",
        shown=DEFAULT_ROWS,
        most=None,
    )


@dataclass(frozen=True)
class Compression:
    """What is kept in 4 bits. The fields are Policy's."""

    compress_weight: bool = borrowed(Policy, "compress_weight", kind="given", shown=None)
    compress_cache: bool = borrowed(Policy, "compress_cache", kind="given", shown=None)
    ring_16bit: bool = borrowed(
        Policy, "ring_16bit", kind="given", text="with --compress-cache: recent entries are not", shown=None
    )


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m flexgen_h2o.evaluate", description="What eviction costs in quality.", allow_abbrev=False
    )
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK", parser_class=Parser)
    for name, text in COMPARISONS.items():
        comparison = tasks.add_parser(name, help=text, description=text, epilog=POLICIES_EPILOG, allow_abbrev=False)
        add_flags(comparison, [ModelOptions])
        _add_text(comparison, DEFAULT_DOCUMENTS)
        _add_comparison(comparison)
        _add_output(comparison)
    analysis = tasks.add_parser(ANALYSE, help=OTHERS[ANALYSE], description=OTHERS[ANALYSE], allow_abbrev=False)
    add_flags(analysis, [ModelOptions])
    _add_text(analysis, DEFAULT_ANALYSED)
    _add_analysis(analysis)
    _add_output(analysis)
    harness = tasks.add_parser(
        TASKS, help=OTHERS[TASKS], description=OTHERS[TASKS], epilog=TASKS_EPILOG, allow_abbrev=False
    )
    add_flags(harness, [ModelOptions])
    _add_harness(harness)
    _add_output(harness, plots=False)
    return parser


def _add_text(parser: argparse.ArgumentParser, documents: int) -> None:
    parser.add_argument("--documents", help=f"windows of text (default: {documents})")
    parser.add_argument("--text", metavar="FILE", help="text, or .npy of token ids, in place of the held-out text")
    parser.add_argument(
        "--prompt-len", help=f"tokens of a document that are computed in prefill (default: {DEFAULT_PROMPT})"
    )
    parser.add_argument(
        "--continuation-len", help=f"tokens that are scored, of a window of text (default: {DEFAULT_CONTINUATION})"
    )


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--eviction", help=f"policies, separated by commas (default: {DEFAULT_EVICTIONS})")
    parser.add_argument("--budget", help=f"kept entries as shares of the prompt (default: {DEFAULT_BUDGETS})")
    parser.add_argument(
        "--recall-documents", help=f"documents per kind of recall (default: {DEFAULT_RECALL_DOCUMENTS})"
    )
    add_flags(parser, [Compression])


def _add_analysis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--analyses", help="those to carry out, separated by commas (default: all)")
    parser.add_argument("--budget", help=f"kept entries as a share of the prompt (default: {DEFAULT_BUDGETS})")
    parser.add_argument("--findings", metavar="FILE.md", help="write what was found beside what the paper says")


def _add_harness(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", help=f"of lm-eval, separated by commas (default: {PAPER_TASKS})")
    parser.add_argument("--include-path", metavar="FOLDER", help="tasks of your own, in lm-eval's YAML format")
    parser.add_argument("--limit", help="documents of each task (default: all)")
    parser.add_argument("--num-fewshot", help="examples before each question (default: as the task says)")
    parser.add_argument("--eviction", help=f"policies, separated by commas (default: {DEFAULT_TASK_EVICTIONS})")
    parser.add_argument("--budget", help=f"kept entries as shares of a question's context (default: {DEFAULT_BUDGETS})")
    add_flags(parser, [Compression])


def _add_output(parser: argparse.ArgumentParser, plots: bool = True) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, the last line")
    if plots:
        parser.add_argument("--plot", metavar="FILE", help="draw the result; needs matplotlib, the extra `plots`")
    parser.add_argument("--record", metavar="FILE", help="append the result to this file, with versions and machine")


@dataclass(frozen=True)
class EvaluationOptions:
    """Checked flags of a comparison, or of an analysis, which has one budget and no compression.

    Attributes:
        sizes: arguments of HeldoutSizes.
        compression: fields of Policy.
    """

    model: ModelOptions
    evictions: list[str]
    budgets: list[float]
    sizes: dict[str, int]
    compression: dict[str, Any]


@dataclass(frozen=True)
class TaskOptions:
    """Checked flags of `tasks`.

    Attributes:
        fewshot: None to leave it to the task. limit: None for all documents.
    """

    model: ModelOptions
    tasks: list[str]
    include_path: str | None
    limit: int | None
    fewshot: int | None
    evictions: list[str]
    budgets: list[float]
    compression: dict[str, Any]


def read_comparison(args: argparse.Namespace) -> EvaluationOptions:
    """Flags of a comparison. Raises UsageError with every mistake found in them."""
    flags = Flags(args)
    judges_text, judges_recall = args.task != "recall", args.task in ("recall", "compare")
    documents = flags.whole("--documents", 2) or DEFAULT_DOCUMENTS
    recall_documents = flags.whole("--recall-documents", 1) or DEFAULT_RECALL_DOCUMENTS
    options = EvaluationOptions(
        model=_model(flags),
        evictions=flags.words("--eviction", DEFAULT_EVICTIONS),
        budgets=_budgets(flags),
        sizes={
            **_lengths(flags),
            "documents": documents if judges_text else 0,
            "recall_documents": recall_documents if judges_recall else 0,
        },
        compression=asdict(filled_from(flags, Compression)),
    )
    _finish(flags)
    return options


def read_analysis(args: argparse.Namespace) -> EvaluationOptions:
    """Flags of an analysis. Raises UsageError with every mistake found in them."""
    flags = Flags(args)
    documents = flags.whole("--documents", 2) or DEFAULT_ANALYSED
    options = EvaluationOptions(
        model=_model(flags),
        evictions=[],
        budgets=_budgets(flags),
        sizes={**_lengths(flags), "documents": documents, "recall_documents": 0},
        compression={},
    )
    if len(options.budgets) > 1:
        flags.problems.append(f"--budget has {len(options.budgets)} numbers; an analysis takes one")
    _finish(flags)
    return options


def read_tasks(args: argparse.Namespace) -> TaskOptions:
    """Flags of `tasks`. Raises UsageError with every mistake found in them."""
    flags = Flags(args)
    options = TaskOptions(
        model=_model(flags),
        tasks=flags.words("--tasks", PAPER_TASKS),
        include_path=flags.text("--include-path"),
        limit=flags.whole("--limit", 1),
        fewshot=flags.whole("--num-fewshot", 0),
        evictions=flags.words("--eviction", DEFAULT_TASK_EVICTIONS),
        budgets=_budgets(flags),
        compression=asdict(filled_from(flags, Compression)),
    )
    _finish(flags)
    return options


def _model(flags: Flags) -> ModelOptions:
    options: ModelOptions = filled_from(flags, ModelOptions)
    return replace(options, dtype=options.dtype.replace("auto", "float32"))


def _lengths(flags: Flags) -> dict[str, int]:
    return {
        "prompt_len": flags.whole("--prompt-len", 1) or DEFAULT_PROMPT,
        "continuation_len": flags.whole("--continuation-len", 2) or DEFAULT_CONTINUATION,
    }


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


def _finish(flags: Flags) -> None:
    flags.check_record()
    if flags.problems:
        raise UsageError(flags.problems)
