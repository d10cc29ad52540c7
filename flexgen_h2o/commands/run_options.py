"""The flags of `python -m flexgen_h2o.run`: parsed, checked, every mistake reported at once."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import field_values, flag_name, setting, settings_of
from flexgen_h2o.commands.flags import Flags, Parser, parse_all, unwritable
from flexgen_h2o.commands.settings_flags import add_flags, filled_from, given_values
from flexgen_h2o.kvcache.eviction.registry import HELP
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.policy_files import read_policy
from flexgen_h2o.plan.run_settings import MemoryBudgets, ModelChoice
from flexgen_h2o.plan.sampling import SamplingParams

DESCRIPTION = "Generates text for a file of prompts, or for random prompts to measure speed."

EPILOG = """Ratios are shares of the whole sequence, prompt + generated: 0.1 + 0.1 keeps 20 % of the full cache whatever
the mix. (In H2O's own code they are shares of the prompt.) exit codes: 0 done; 1 failed while running, or a prompt
could not be served and --strict was given; 2 unusable arguments, input or plan; 130 interrupted, 143 terminated.

A job from one file to another survives any interruption: the same command goes on after the last block that was
written, with the policy that it was begun with. OUTPUT.job keeps how far it has come. Once all prompts are answered the
command says so and writes nothing, until --restart is given."""


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Where prompts come from, what becomes of the results, and what is planned with.

    Attributes:
        hardware: None for no machine.
    """

    input: str | None = setting(
        None, "text", "FILE.jsonl, FILE.txt (a prompt a line) or - (JSON lines on standard input)", topic="results"
    )
    output: str | None = setting(None, "text", "FILE.jsonl", shown="standard output", topic="results")
    restart: bool = setting(
        False, "given", "begin again, whatever an earlier run has left in --output", topic="results"
    )
    checkpoint_minutes: float | None = setting(
        None,
        "real",
        "save inside a block too, whenever so many minutes are at risk",
        shown="only between blocks",
        topic="results",
    )
    metrics: str | None = setting(
        None, "text", "FILE.prom for Prometheus metrics, replaced every few seconds", topic="results"
    )
    strict: bool = setting(False, "given", "exit 1 if any prompt could not be served", topic="results")
    json: bool = setting(False, "given", "print the report as one JSON object, the last line", topic="results")
    hardware: str | None = setting(
        None,
        "text",
        "rates to plan with and to compute limits from: auto (this machine's file; without one it is measured quickly,"
        " once, where rates are needed), a name or FILE",
        topic="results",
    )
    trace: str | None = setting(
        None,
        "text",
        "FILE for a trace of what every resource did when, for Perfetto or chrome://tracing",
        topic="results",
    )
    prompt_len: int | None = setting(
        None, "whole", "longest prompt in tokens", shown="the longest of the input", topic="results", least=1
    )
    policy: str | None = setting(
        None,
        "text",
        "auto, for the block and the homes that the policy search finds for this machine or --hardware, which is the"
        " default without --percent; or FILE, as policy_search -o writes it. A dry run without --hardware is of no"
        " machine, and has nothing to search with: there the default is one block of 32 rows on the gpu",
        topic="block",
    )


KINDS = (ModelChoice, EvictionSpec, Policy, JobFlags, MemoryBudgets, SamplingParams)
GROUPS = {  # title -> topics of settings, in the order in which help lists them
    "model": ("model",),
    "prompts and results": ("results",),
    "block": ("block",),
    "homes (GB are 2**30 bytes)": ("homes", "loading", "computing"),
    "KV cache": ("cache",),
    "sampling": ("sampling",),
}
# A dry run leaves files alone, and times nothing.
IDLE_IN_A_DRY_RUN = ("output", "restart", "checkpoint_minutes", "metrics", "strict", "trace")


def build_parser() -> Parser:
    """All flags. Values stay text here, so that every mistake in them can be reported at once."""
    parser = Parser(prog="python -m flexgen_h2o.run", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    for title, topics in GROUPS.items():
        group = parser.add_argument_group(title)
        for topic in topics:
            add_flags(group, KINDS, topic)
    return parser


@dataclass(frozen=True, kw_only=True)
class RunOptions(JobFlags):
    """Checked flags.

    Attributes:
        begins_with: fields of the policy that a run begins with, until a search has found a better one.
        given_policy: those of them that are on the command line, or in the file that it names.
        searches: for the parts of the policy that are not given.
        gpu_only: flags given that only matter beside a GPU.
        timed_only: flags given that only matter where something is computed.
    """

    model: ModelChoice
    budgets: MemoryBudgets
    eviction: EvictionSpec
    params: SamplingParams
    begins_with: dict[str, Any]
    given_policy: dict[str, Any]
    searches: bool
    gpu_only: tuple[str, ...]
    timed_only: tuple[str, ...]

    @property
    def llm(self) -> dict[str, Any]:
        """Arguments of LLM."""
        return {
            **field_values(self.model),
            **field_values(self.budgets),
            **field_values(self.eviction),
            **self.begins_with,
            "prompt_len": self.prompt_len,
            "seed": self.params.seed,
            "trace": self.trace is not None,
        }

    @property
    def may_resume(self) -> bool:
        """Whether the job goes from one file to another, so that it can go on after an interruption."""
        return self.input not in (None, "-") and self.output is not None

    @property
    def checkpoint_s(self) -> float | None:
        return None if self.checkpoint_minutes is None else 60 * self.checkpoint_minutes


def asks_for_evictions(argv: list[str]) -> bool:
    """Whether the command line asks what the eviction policies are. Raises UsageError if it cannot be read."""
    return bool(build_parser().parse_known_args(argv)[0].eviction == HELP)


def read_flags(argv: list[str]) -> RunOptions:
    """Parses and checks the command line. Raises UsageError with every mistake found in it."""
    args, flags = parse_all(build_parser(), argv)
    given_policy = given_values(flags, Policy)
    model = filled_from(flags, ModelChoice)
    job = given_values(flags, JobFlags)
    is_dry = model.device == "meta"
    searches = _searches(args, flags, is_dry)
    if args.policy not in (None, "auto"):
        given_policy |= _policy_of_file(args.policy, flags)
    options = RunOptions(
        **{**job, "hardware": args.hardware or (None if is_dry else "auto")},
        model=model,
        budgets=filled_from(flags, MemoryBudgets),
        eviction=filled_from(flags, EvictionSpec),
        params=filled_from(flags, SamplingParams),
        begins_with={**(_sizes_that_agree(given_policy) if searches else {}), **given_policy},
        given_policy=given_policy,
        searches=searches,
        gpu_only=_given_of(flags, Policy, ("pin_weight", "cpu_cache_compute")),
        timed_only=_given_of(flags, JobFlags, IDLE_IN_A_DRY_RUN),
    )
    _check_sampling(options.params, flags)
    _check_files(args, flags)
    _check_lengths_and_resuming(options, flags)
    if args.path is not None and args.model is None:
        flags.problems.append(f"--path {args.path} means nothing without a name for --model; leave it out")
    flags.problems += options.eviction.problems() + Policy(**options.begins_with).problems()
    flags.problems += options.params.problems()
    if flags.problems:
        raise UsageError(flags.problems)
    if is_dry:
        return replace(options, **{name: getattr(JobFlags(), name) for name in IDLE_IN_A_DRY_RUN})
    return options


def _given_of(flags: Flags, kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """The flags of some fields that are on the command line."""
    known = settings_of(kind)
    return tuple(known[name].flag for name in names if flags.given(known[name].flag))


def _searches(args: argparse.Namespace, flags: Flags, is_dry: bool) -> bool:
    """Whether the policy search chooses what is not given."""
    if args.policy == "auto" and args.percent is not None:
        flags.problems.append("--policy auto and --percent both say where things live; leave one of them out")
    if args.policy is not None or args.percent is not None:
        return bool(args.policy == "auto")
    return not is_dry or args.hardware is not None


def _sizes_that_agree(given: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a block that agree with those that are given, until a search has found better ones."""
    rows, decode_rows = given.get("gpu_batch_size"), given.get("decode_batch_size")
    if decode_rows is None:
        return {}
    return {"gpu_batch_size": decode_rows} if rows is None else {"num_gpu_batches": -(-decode_rows // rows)}


def _policy_of_file(path: str, flags: Flags) -> dict[str, Any]:
    """The fields of a policy's file; no flag may say them once more."""
    again = [known.flag for known in settings_of(Policy).values() if flags.given(known.flag)]
    flags.problems += [f"{flag} and --policy {path} both say it; leave one of them out" for flag in again]
    policy = flags.checked(read_policy, Path(path))
    return {} if policy is None else field_values(policy)


def _check_sampling(params: SamplingParams, flags: Flags) -> None:
    """Notes what means nothing where the likeliest token is taken."""
    for flag in ("--temperature", "--top-k", "--top-p"):
        is_greedy = flag == "--temperature" and params.temperature == 0
        if flags.given(flag) and not params.do_sample and not is_greedy:
            flags.problems.append(f"{flag} means nothing without --do-sample; add it or leave {flag} out")


def _check_lengths_and_resuming(options: RunOptions, flags: Flags) -> None:
    """Notes what prompts that can be read only once, or results that go nowhere, do not allow."""
    if options.input == "-" and not (flags.given("--prompt-len") or options.eviction.has_fixed_sizes):
        sizes = " and ".join(flag_name(name) for name in options.eviction.size_fields)
        instead = f", or {sizes}" if sizes else ""
        flags.problems.append(f"--input - can be read only once: give --prompt-len{instead}")
    if not options.may_resume:
        flags.problems += [
            f"{flag} means nothing without --input FILE and --output FILE; leave it out"
            for flag in ("--restart", "--checkpoint-minutes")
            if flags.given(flag)
        ]


def _check_files(args: argparse.Namespace, flags: Flags) -> None:
    """What can be seen of the input and output files without reading them."""
    checks = {
        "--input": _input_problem,
        "--output": _output_problem,
        "--trace": lambda args: unwritable("--trace", Path(args.trace)),
        "--metrics": lambda args: unwritable("--metrics", Path(args.metrics), is_replaced=True),
    }
    for flag, check in checks.items():
        if flags.text(flag) is None:
            continue
        try:
            problem = check(args)
        except OSError as error:
            problem = f"{flag} {flags.text(flag)} cannot be used: {error.strerror}; give another name"
        if problem is not None:
            flags.problems.append(problem)


def _input_problem(args: argparse.Namespace) -> str | None:
    path = Path(args.input)
    if args.input == "-":
        return None
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        return f"--input {path} {what}; give a .jsonl or .txt file, or - for standard input"
    if not path.is_file():
        return f"--input {path} is no regular file and cannot be read twice; use --input -"
    if path.suffix not in (".jsonl", ".json", ".txt"):
        return f"--input {path} must end in .jsonl (JSON lines) or .txt (a prompt a line)"
    return None


def _output_problem(args: argparse.Namespace) -> str | None:
    output = Path(args.output)
    if args.input not in (None, "-") and output.exists() and Path(args.input).exists() and output.samefile(args.input):
        return f"--output {output} is the input file; give another name"
    return unwritable("--output", output)
