"""`python -m flexgen_h2o.evaluate`: what eviction costs in quality, and what there is in attention to evict by."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import unwritable
from flexgen_h2o.evaluation.options import (
    ANALYSE,
    TASKS,
    EvaluationOptions,
    TaskOptions,
    build_parser,
    read_analysis,
    read_comparison,
    read_tasks,
)

COMMAND = "python -m flexgen_h2o.evaluate"

Result = dict[str, Any]


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found."""
    args = build_parser().parse_args(argv)
    work = {ANALYSE: _analyse_and_tell, TASKS: _run_tasks_and_tell}.get(args.task, _compare_and_tell)
    result, text = work(args, argv)
    try:
        print(json.dumps(result) if args.json else text, flush=True)
    finally:  # whether or not somebody is there to read it
        if args.record:
            _record(args, argv, result)
    return EXIT_OK


def _record(args: argparse.Namespace, argv: list[str], result: Result) -> None:
    from flexgen_h2o.machine.environment import append_record

    append_record(Path(args.record), {"name": f"evaluate {args.task}", "command": _command(argv), **result})


def _command(argv: list[str]) -> str:
    return f"{COMMAND} {shlex.join(argv)}"


def _check_plot(args: argparse.Namespace) -> list[str]:
    """What keeps the asked-for plot from being drawn."""
    from flexgen_h2o.evaluation.plots import check_plot

    problem = None if args.plot is None else check_plot(args.plot)
    return [] if problem is None else [problem]


# --- policies side by side ---


def _compare_and_tell(args: argparse.Namespace, argv: list[str]) -> tuple[Result, str]:
    """The result, and a table of it."""
    options = read_comparison(args)

    from flexgen_h2o.evaluation.plots import plot
    from flexgen_h2o.evaluation.tables import table

    if problems := _check_plot(args):
        raise UsageError(problems)
    name, rows = _compare(args, options)
    result = {"model": name, "dtype": options.model.dtype, **options.compression, **options.sizes, "rows": rows}
    if args.plot is not None:
        plot(rows, Path(args.plot), f"{name}, {options.sizes['prompt_len']} tokens of prompt")
    return result, "" if args.json else table(rows)


def _compare(args: argparse.Namespace, options: EvaluationOptions) -> tuple[str, list[Result]]:
    """The model's name and a row for each policy and budget."""
    from contextlib import ExitStack

    from flexgen_h2o.evaluation.compare import compare, compression_problems, documents_to_score, make_cases
    from flexgen_h2o.evaluation.heldout import HeldoutSizes, heldout_set
    from flexgen_h2o.evaluation.scoring import Judge
    from flexgen_h2o.llm import LLM

    with ExitStack() as stack:
        llm = stack.enter_context(LLM(**asdict(options.model), **options.compression))
        sizes = HeldoutSizes(**options.sizes)
        length = sizes.prompt_len + sizes.continuation_len
        layers = llm.config.num_hidden_layers
        cases = make_cases(options.evictions, options.budgets, sizes.prompt_len, length, layers)
        if problems := compression_problems(cases, llm.policy):
            raise UsageError(problems)
        heldout = heldout_set(llm, sizes, args.text)
        judge = reference = Judge(llm, sizes.prompt_len)
        if any(options.compression.values()) and sizes.documents:
            reference = Judge(stack.enter_context(LLM(**asdict(options.model))), sizes.prompt_len)
        advance = stack.enter_context(_bar(documents_to_score(cases, heldout, judge is reference), "document"))
        return llm.config.name, compare(cases, heldout, judge, reference, advance.update)


def _bar(total: int, unit: str) -> Any:
    """A progress bar on standard error, where that is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())


# --- what there is in attention ---


def _analyse_and_tell(args: argparse.Namespace, argv: list[str]) -> tuple[Result, str]:
    """The result, and a page of findings."""
    options = read_analysis(args)

    from flexgen_h2o.evaluation.analysis.catalogue import ANALYSES, chosen_analyses
    from flexgen_h2o.evaluation.analysis.report import findings_page, plot

    names = chosen_analyses(list(ANALYSES) if args.analyses is None else args.analyses.split(","))
    problems = _check_plot(args)
    if args.findings is not None and (problem := unwritable("--findings", Path(args.findings))):
        problems.append(problem)
    if problems:
        raise UsageError(problems)
    model, results = _analyse(args, options, names)
    about = {"model": model, "dtype": options.model.dtype, **options.sizes, "budget": options.budgets[0]}
    page = findings_page(results, {**about, "text": args.text or "held-out text"}, _analysis_commands(argv, names))
    if args.findings is not None:
        Path(args.findings).write_text(page, encoding="utf-8")
    if args.plot is not None:
        plot(results, Path(args.plot), f"{model}, {options.sizes['prompt_len']} tokens of prompt")
    return {**about, "analyses": results}, page


def _analysis_commands(argv: list[str], names: list[str]) -> dict[str, str]:
    """The command of the whole run under "", and for each analysis the one that carries out no other."""
    rest = _without(argv, "--findings", "--plot", "--record", "--analyses")
    return {"": _command(argv), **{name: _command([*rest, "--analyses", name]) for name in names}}


def _without(argv: list[str], *flags: str) -> list[str]:
    """The words of a command line without some flags that take a value each."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in flags:
            next(words, None)
        elif word.split("=", 1)[0] not in flags:
            kept.append(word)
    return kept


def _analyse(args: argparse.Namespace, options: EvaluationOptions, names: list[str]) -> tuple[str, dict[str, Result]]:
    """The model's name and what each analysis finds."""
    from flexgen_h2o.evaluation.analysis.catalogue import analyse, check_subject
    from flexgen_h2o.evaluation.analysis.subject import Subject
    from flexgen_h2o.evaluation.heldout import HeldoutSizes, heldout_set
    from flexgen_h2o.evaluation.scoring import Judge
    from flexgen_h2o.llm import LLM

    with LLM(**asdict(options.model)) as llm, _bar(len(names), "analysis") as bar:
        sizes = HeldoutSizes(**options.sizes)
        heldout = heldout_set(llm, sizes, args.text)
        subject = Subject(llm, Judge(llm, sizes.prompt_len), heldout.windows, options.budgets[0])
        check_subject(names, subject)
        return llm.config.name, analyse(names, subject, lambda name: bar.update())


# --- tasks of lm-eval ---


def _run_tasks_and_tell(args: argparse.Namespace, argv: list[str]) -> tuple[Result, str]:
    """The result, and a table of it."""
    options = read_tasks(args)

    from flexgen_h2o.evaluation.tasks import check_lm_eval, task_table

    if problem := check_lm_eval():
        raise UsageError(problem)
    name, rows = _run_tasks(options)
    settings = {"limit": options.limit, "num_fewshot": options.fewshot, "budget_of": "context"}
    result = {"model": name, "dtype": options.model.dtype, **options.compression, **settings, "rows": rows}
    return result, task_table(rows)


def _run_tasks(options: TaskOptions) -> tuple[str, list[Result]]:
    """The model's name and a row for each policy and budget."""
    from flexgen_h2o.evaluation.continuations import make_evictions
    from flexgen_h2o.evaluation.lm_eval import evaluate_tasks, load_tasks
    from flexgen_h2o.llm import LLM

    evictions = make_evictions(options.evictions, options.budgets)
    with LLM(**asdict(options.model), **options.compression) as llm:
        manager = load_tasks(options.tasks, options.include_path)
        settings = (options.tasks, manager, options.limit, options.fewshot)
        return llm.config.name, [evaluate_tasks(llm, eviction, *settings) for eviction in evictions]


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
