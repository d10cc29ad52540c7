"""The flags of `python -m flexgen_h2o.run`: parsed, checked, every mistake reported at once."""

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import MOST_GB
from flexgen_h2o.commands.command import Flags, Parser, unwritable
from flexgen_h2o.plan.policy import EVICTIONS, MOST_ROWS, EvictionSpec, Policy
from flexgen_h2o.plan.policy_files import read_policy

DEFAULT_GEN_LEN = 32

DESCRIPTION = "Generates text for a file of prompts, or for random prompts to measure speed."

EPILOG = """Ratios are shares of the whole sequence, prompt + generated: 0.1 + 0.1 keeps 20 % of the full cache whatever
the mix. (In H2O's own code they are shares of the prompt.) exit codes: 0 done; 1 failed while running, or a prompt
could not be served and --strict was given; 2 unusable arguments, input or plan; 130 interrupted, 143 terminated.

A job from one file to another survives any interruption: the same command goes on after the last block that was
written, with the policy that it was begun with. OUTPUT.job keeps how far it has come. Once all prompts are answered the
command says so and writes nothing, until --restart is given."""


FLAGS = {
    "model": {
        "--model": "folder in Hugging Face format or name, e.g. opt-30b (default: the demo model)",
        "--path": "folder in which a named model is looked for first",
        "--dummy-weights": "random weights: for measuring speed",
        "--device": "auto, cuda, cpu, or meta for a dry run that only counts bytes (default: auto)",
        "--dtype": "auto, float32, bfloat16 or float16 (default: auto)",
    },
    "prompts and results": {
        "--input": "FILE.jsonl, FILE.txt (a prompt a line) or - (JSON lines on standard input)",
        "--output": "FILE.jsonl (default: standard output)",
        "--restart": "begin again, whatever an earlier run has left in --output",
        "--checkpoint-minutes": "save inside a block too, whenever so many minutes are at risk (default: only between"
        " blocks)",
        "--metrics": "FILE.prom for Prometheus metrics, replaced every few seconds",
        "--strict": "exit 1 if any prompt could not be served",
        "--json": "print the report as one JSON object, the last line",
        "--hardware": "rates to plan with and to compute limits from: auto (this machine's file; without one it is"
        " measured quickly, once, where rates are needed), a name or FILE",
        "--trace": "FILE for a trace of what every resource did when, for Perfetto or chrome://tracing",
        "--prompt-len": "longest prompt in tokens (default: the longest of the input)",
        "--gen-len": f"tokens to generate per prompt (default: {DEFAULT_GEN_LEN})",
    },
    "block": {
        "--gpu-batch-size": "rows of a prefill sub-batch (default: as --policy says; with --percent 32)",
        "--num-gpu-batches": "sub-batches of a block (default: as --policy says; with --percent 1)",
        "--decode-batch-size": "rows computed together in decode (default: the block)",
        "--policy": "auto, for the block and the homes that the policy search finds for this machine or --hardware,"
        " which is the default without --percent; or FILE, as policy_search -o writes it. A dry run without --hardware"
        " is of no machine, and has nothing to search with: there the default is one block of 32 rows on the gpu",
    },
    "homes (GB are 2**30 bytes)": {
        "--percent": "six numbers: per cent of weights on gpu and cpu, of cache likewise, of hidden states likewise;"
        " the rest is on disk (default: as --policy says)",
        "--gpu-mem": "budget on the gpu; without a GPU it adds to --cpu-mem",
        "--cpu-mem": "budget in host memory (default: what is usable)",
        "--disk-mem": "budget on disk (default: what is free)",
        "--offload-dir": "folder for KV and hidden states on disk (default: ~/flexgen_h2o_offload)",
        "--overlap": "load ahead: true or false (default: true)",
        "--pin-weight": "weights in pinned host memory (default: true)",
        "--cpu-cache-compute": "attention beside KV in host memory (default: false)",
        "--compress-weight": "weights in 4-bit groups (default: false)",
    },
    "KV cache": {
        "--eviction": f"{', '.join(EVICTIONS)} (default: h2o)",
        "--hh-ratio": "heavy hitters, as a share of prompt + generated (default: 0.1)",
        "--recent-ratio": "recent entries, likewise (default: as --hh-ratio)",
        "--hh-size": "heavy hitters, in entries",
        "--recent-size": "recent entries, in entries",
        "--sink-size": "first tokens kept by --eviction sink (default: 4)",
        "--compress-cache": "keys and values in 4-bit groups (default: false)",
        "--ring-16bit": "with --compress-cache, recent entries stay in the compute precision (default: false)",
    },
    "sampling": {
        "--do-sample": "sample instead of taking the likeliest token",
        "--temperature": "default 1; 0 is greedy",
        "--top-k": "only the k likeliest tokens (default: 0, all)",
        "--top-p": "only the likeliest tokens that sum to p (default: 1)",
        "--seed": "of sampling, dummy weights and random prompts (default: 0)",
        "--stop": "string that ends a text; may be repeated",
        "--stop-token-ids": "token ids that end a text",
        "--ignore-eos": "go on after the end-of-text token",
    },
}


def _flag(name: str) -> str:
    """The flag of a field of Policy."""
    return "--" + name.replace("_", "-")


POLICY_FLAGS = tuple(_flag(field.name) for field in fields(Policy))
# A dry run leaves files alone, and times nothing.
IDLE_IN_A_DRY_RUN = ("--output", "--restart", "--checkpoint-minutes", "--metrics", "--strict", "--trace")
GIVEN_OR_NOT: dict[str, Any] = {"action": "store_true"}
TRUE_IF_BARE: dict[str, Any] = {"nargs": "?", "const": "true"}
KINDS = {  # flags that do not take exactly one value
    **dict.fromkeys(("--dummy-weights", "--restart", "--strict", "--json"), GIVEN_OR_NOT),
    **dict.fromkeys(("--do-sample", "--ignore-eos"), GIVEN_OR_NOT),
    **dict.fromkeys(("--overlap", "--pin-weight", "--cpu-cache-compute"), TRUE_IF_BARE),
    **dict.fromkeys(("--compress-weight", "--compress-cache", "--ring-16bit"), TRUE_IF_BARE),
    "--percent": {"nargs": "+", "metavar": "N"},
    "--stop-token-ids": {"nargs": "+", "metavar": "ID"},
    "--stop": {"action": "append"},
}


def build_parser() -> argparse.ArgumentParser:
    """All flags. Values stay text here, so that every mistake in them can be reported at once."""
    parser = Parser(prog="python -m flexgen_h2o.run", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, text in flags.items():
            group.add_argument(flag, help=text.replace("%", "%%"), **KINDS.get(flag, {}))
    return parser


@dataclass(frozen=True)
class Options:
    """Checked flags."""

    llm: dict[str, Any]  # arguments of LLM
    params: dict[str, Any]  # arguments of SamplingParams
    input: str | None
    output: str | None
    prompt_len: int | None
    strict: bool
    json: bool
    hardware: str | None  # None for no machine
    trace: str | None
    searches: bool  # for the parts of the policy that are not given
    restart: bool
    checkpoint_s: float | None
    metrics: str | None
    given_policy: dict[str, Any]  # fields of Policy that are on the command line, or in the file that it names
    gpu_only: tuple[str, ...]  # flags given that only matter beside a GPU
    timed_only: tuple[str, ...]  # flags given that only matter where something is computed
    has_fixed_sizes: bool  # the KV buffer's size does not depend on the prompts

    @property
    def may_resume(self) -> bool:
        """Whether the job goes from one file to another, so that it can go on after an interruption."""
        return self.input not in (None, "-") and self.output is not None


def read_flags(argv: list[str]) -> Options:
    """Parses and checks the command line. Raises UsageError with every mistake found in it."""
    args, unknown = build_parser().parse_known_args(argv)
    flags = Flags(args)
    flags.problems += [f"{word} is not a flag of this command; see --help" for word in unknown]
    llm = _llm_arguments(args, flags)
    searches = _searches(args, flags)
    given_policy = {
        field.name: llm[field.name] for field in fields(Policy) if field.name in llm and flags.given(_flag(field.name))
    }
    if args.policy not in (None, "auto"):
        given_policy |= _policy_of_file(args.policy, flags)
        llm |= given_policy
    elif searches:
        llm = {**_begin_with(given_policy), **llm}
    params = _sampling_arguments(args, flags, llm["seed"])
    _check_files(args, flags)
    checkpoint_minutes = flags.real("--checkpoint-minutes")
    sizes = ("recent_size",) if llm["eviction"] in ("local", "sink") else ("hh_size", "recent_size")
    options = Options(
        llm=llm,
        params=params,
        input=args.input,
        output=args.output,
        prompt_len=llm["prompt_len"],
        strict=args.strict,
        json=args.json,
        hardware=args.hardware or (None if args.device == "meta" else "auto"),
        trace=args.trace,
        searches=searches,
        restart=args.restart,
        checkpoint_s=None if checkpoint_minutes is None else 60 * checkpoint_minutes,
        metrics=args.metrics,
        given_policy=given_policy,
        gpu_only=tuple(flag for flag in ("--pin-weight", "--cpu-cache-compute") if flags.given(flag)),
        timed_only=tuple(flag for flag in IDLE_IN_A_DRY_RUN if flags.given(flag)),
        has_fixed_sizes=llm["eviction"] != "full" and all(llm[name] is not None for name in sizes),
    )
    if options.input == "-" and not (args.prompt_len or options.has_fixed_sizes):
        instead = {"h2o": ", or --hh-size and --recent-size", "full": ""}.get(llm["eviction"], ", or --recent-size")
        flags.problems.append(f"--input - can be read only once: give --prompt-len{instead}")
    if not options.may_resume:
        flags.problems += [
            f"{flag} means nothing without --input FILE and --output FILE; leave it out"
            for flag in ("--restart", "--checkpoint-minutes")
            if flags.given(flag)
        ]
    if args.path is not None and args.model is None:
        flags.problems.append(f"--path {args.path} means nothing without a name for --model; leave it out")
    _add_deeper_problems(options, flags)
    if flags.problems:
        raise UsageError(flags.problems)
    if args.device == "meta":
        return replace(options, output=None, strict=False, restart=False, checkpoint_s=None, metrics=None, trace=None)
    return options


def _searches(args: argparse.Namespace, flags: Flags) -> bool:
    """Whether the policy search chooses what is not given."""
    if args.policy == "auto" and args.percent is not None:
        flags.problems.append("--policy auto and --percent both say where things live; leave one of them out")
    if args.policy is not None or args.percent is not None:
        return bool(args.policy == "auto")
    return args.device != "meta" or args.hardware is not None


def _begin_with(given: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a block that agree with those that are given, until a search has found better ones."""
    rows, decode_rows = given.get("gpu_batch_size"), given.get("decode_batch_size")
    if decode_rows is None:
        return {}
    return {"gpu_batch_size": decode_rows} if rows is None else {"num_gpu_batches": -(-decode_rows // rows)}


def _llm_arguments(args: argparse.Namespace, flags: Flags) -> dict[str, Any]:
    """What the model is made with; what was not given is left out where it has a default there."""
    switches = {"overlap": True, "pin_weight": True, "cpu_cache_compute": False}
    switches |= dict.fromkeys(("compress_weight", "compress_cache", "ring_16bit"), False)
    given = {
        "gpu_batch_size": flags.whole("--gpu-batch-size", 1, MOST_ROWS),
        "num_gpu_batches": flags.whole("--num-gpu-batches", 1, MOST_ROWS),
        "decode_batch_size": flags.whole("--decode-batch-size", 1, MOST_ROWS),
        "percent": flags.percent("--percent", args.percent),
        "offload_dir": args.offload_dir,
        **{name: flags.switch("--" + name.replace("_", "-"), default) for name, default in switches.items()},
    }
    return {
        "model": args.model,
        "path": args.path,
        "eviction": flags.choice("--eviction", EVICTIONS, "h2o"),
        "hh_ratio": flags.ratio("--hh-ratio"),
        "recent_ratio": flags.ratio("--recent-ratio"),
        "hh_size": flags.whole("--hh-size", 0),
        "recent_size": flags.whole("--recent-size", 1),
        "sink_size": flags.whole("--sink-size", 1),
        "prompt_len": flags.whole("--prompt-len", 1),
        "dtype": flags.choice("--dtype", ("auto", "float32", "bfloat16", "float16"), "auto"),
        "device": flags.choice("--device", ("auto", "cuda", "cpu", "meta"), "auto"),
        **{f"{tier}_mem": flags.real(f"--{tier}-mem", most=MOST_GB) for tier in ("gpu", "cpu", "disk")},
        "dummy_weights": args.dummy_weights,
        "trace": args.trace is not None,
        "seed": flags.whole("--seed", 0, 2**63 - 1) or 0,
        **{name: value for name, value in given.items() if value is not None},
    }


def _policy_of_file(path: str, flags: Flags) -> dict[str, Any]:
    """The fields of a policy's file; no flag may say them once more."""
    again = [name for name in POLICY_FLAGS if flags.given(name)]
    flags.problems += [f"{name} and --policy {path} both say it; leave one of them out" for name in again]
    try:
        policy = read_policy(Path(path))
    except UsageError as error:
        flags.problems += error.problems
        return {}
    return {field.name: getattr(policy, field.name) for field in fields(Policy)}


def _sampling_arguments(args: argparse.Namespace, flags: Flags, seed: int) -> dict[str, Any]:
    temperature = flags.real("--temperature")
    for flag in ("--temperature", "--top-k", "--top-p"):
        is_greedy = flag == "--temperature" and temperature == 0
        if flags.given(flag) and not args.do_sample and not is_greedy:
            flags.problems.append(f"{flag} means nothing without --do-sample; add it or leave {flag} out")
    given = {
        "max_new_tokens": flags.whole("--gen-len", 1) or DEFAULT_GEN_LEN,
        "temperature": temperature,
        "top_k": flags.whole("--top-k", 0),
        "top_p": flags.real("--top-p"),
    }
    stop_ids = [flags.whole_number("--stop-token-ids", text, 0) for text in args.stop_token_ids or []]
    return {
        **{name: value for name, value in given.items() if value is not None},
        "do_sample": args.do_sample,
        "seed": seed,
        "stop": tuple(args.stop or ()),
        "stop_token_ids": tuple(token for token in stop_ids if token is not None),
        "ignore_eos": args.ignore_eos,
    }


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


def _add_deeper_problems(options: Options, flags: Flags) -> None:
    """Adds what the parts of a run find wrong with their own settings."""
    from flexgen_h2o.engine.sampling import SamplingParams

    def given(kind: type) -> dict[str, Any]:
        return {field.name: options.llm[field.name] for field in fields(kind) if field.name in options.llm}

    spec = EvictionSpec(options.llm["eviction"], **given(EvictionSpec))
    flags.problems += spec.problems() + Policy(**given(Policy)).problems()
    flags.problems += SamplingParams(**options.params).problems()
