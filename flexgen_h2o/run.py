"""`python -m flexgen_h2o.run`: generates text for a file of prompts, or for random prompts to measure speed."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli import EXIT_FAILED, EXIT_OK, Flags, Parser, run_command
from flexgen_h2o.errors import UsageError

if TYPE_CHECKING:
    from flexgen_h2o.batch import BatchJob, PromptSource
    from flexgen_h2o.llm import LLM

# Flags of FlexGen and H2O that this version does not carry out.
NOT_YET = {
    "--percent": "everything stays in memory",
    "--offload-dir": "everything stays in memory",
    "--disk-mem": "everything stays in memory",
    "--pin-weight": "everything stays in memory",
    "--cpu-cache-compute": "attention runs on the CPU already",
    "--compress-weight": "weights stay in 16 or 32 bit",
    "--compress-cache": "the KV cache stays in 16 or 32 bit",
    "--ring-16bit": "the KV cache stays in 16 or 32 bit",
    "--overlap": "nothing is copied, so there is nothing to overlap",
    "--policy": "sizes are given by flags",
    "--hardware": "sizes are given by flags",
    "--trace": "the report has the times of both phases",
}
DEFAULT_GEN_LEN = 32
DEFAULT_RANDOM_PROMPT_LEN = 512

EPILOG = """Ratios are shares of the whole sequence, prompt + generated: 0.1 + 0.1 keeps 20 % of the full cache whatever
the mix. (In H2O's own code they are shares of the prompt.) exit codes: 0 done; 1 failed while running, or a prompt
could not be served and --strict was given; 2 unusable arguments, input or plan; 130 interrupted."""


def build_parser() -> argparse.ArgumentParser:
    """All flags. Values stay text here, so that every mistake in them can be reported at once."""
    parser = Parser(prog="python -m flexgen_h2o.run", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="folder in Hugging Face format or name, e.g. opt-30b (default: the demo model)")
    model.add_argument("--path", help="folder in which a named model is looked for first")
    model.add_argument("--dummy-weights", action="store_true", help="random weights: for measuring speed")
    model.add_argument("--device", help="auto or cpu (default: auto)")
    model.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: auto)")
    work = parser.add_argument_group("prompts and results")
    work.add_argument("--input", help="FILE.jsonl, FILE.txt (a prompt a line) or - (JSON lines on standard input)")
    work.add_argument("--output", help="FILE.jsonl (default: standard output)")
    work.add_argument("--strict", action="store_true", help="exit 1 if any prompt could not be served")
    work.add_argument("--json", action="store_true", help="print the report as one JSON object, the last line")
    work.add_argument("--prompt-len", help="longest prompt in tokens (default: the longest of the input)")
    work.add_argument("--gen-len", help=f"tokens to generate per prompt (default: {DEFAULT_GEN_LEN})")
    block = parser.add_argument_group("block")
    block.add_argument("--gpu-batch-size", help="rows of a prefill sub-batch (default: 32)")
    block.add_argument("--num-gpu-batches", help="sub-batches of a block (default: 1)")
    block.add_argument("--decode-batch-size", help="rows computed together in decode (default: the block)")
    block.add_argument("--gpu-mem", help="memory budget in GB; without a GPU it adds to --cpu-mem")
    block.add_argument("--cpu-mem", help="memory budget in GB (default: what is usable)")
    cache = parser.add_argument_group("KV cache")
    cache.add_argument("--eviction", help="h2o, full, local or sink (default: h2o)")
    cache.add_argument("--hh-ratio", help="heavy hitters, as a share of prompt + generated (default: 0.1)")
    cache.add_argument("--recent-ratio", help="recent entries, likewise (default: as --hh-ratio)")
    cache.add_argument("--hh-size", help="heavy hitters, in entries")
    cache.add_argument("--recent-size", help="recent entries, in entries")
    cache.add_argument("--sink-size", help="first tokens kept by --eviction sink (default: 4)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    sampling.add_argument("--temperature", help="default 1; 0 is greedy")
    sampling.add_argument("--top-k", help="only the k likeliest tokens (default: 0, all)")
    sampling.add_argument("--top-p", help="only the likeliest tokens that sum to p (default: 1)")
    sampling.add_argument("--seed", help="of sampling, dummy weights and random prompts (default: 0)")
    sampling.add_argument("--stop", action="append", help="string that ends a text; may be repeated")
    sampling.add_argument("--stop-token-ids", nargs="+", metavar="ID", help="token ids that end a text")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    later = parser.add_argument_group("known, but not carried out by this version")
    for flag in NOT_YET:
        later.add_argument(flag, nargs="*", help=argparse.SUPPRESS)
    later.description = " ".join(NOT_YET)
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
    has_fixed_sizes: bool  # the KV buffer's size does not depend on the prompts


def read_flags(argv: list[str]) -> Options:
    """Parses and checks the command line. Raises UsageError with every mistake found in it."""
    args, unknown = build_parser().parse_known_args(argv)
    flags = Flags(args)
    flags.problems += [f"{word} is not a flag of this command; see --help" for word in unknown]
    for flag, instead in NOT_YET.items():
        if flags.text(flag) is not None:
            flags.problems.append(f"{flag} is not carried out by this version ({instead}); leave it out")
    flags.choice("--device", ("auto", "cpu"), "auto")
    budgets = [flags.real("--gpu-mem"), flags.real("--cpu-mem")]
    given_budgets = [budget for budget in budgets if budget is not None]
    prompt_len = flags.whole("--prompt-len", 1)
    seed = flags.whole("--seed", 0, 2**63 - 1)
    llm = {
        "model": args.model,
        "path": args.path,
        "eviction": flags.choice("--eviction", ("h2o", "full", "local", "sink"), "h2o"),
        "hh_ratio": flags.ratio("--hh-ratio"),
        "recent_ratio": flags.ratio("--recent-ratio"),
        "hh_size": flags.whole("--hh-size", 0),
        "recent_size": flags.whole("--recent-size", 1),
        "sink_size": flags.whole("--sink-size", 1),
        "gpu_batch_size": flags.whole("--gpu-batch-size", 1),
        "num_gpu_batches": flags.whole("--num-gpu-batches", 1) or 1,
        "decode_batch_size": flags.whole("--decode-batch-size", 1),
        "prompt_len": prompt_len,
        "dtype": flags.choice("--dtype", ("auto", "float32", "bfloat16", "float16"), "auto"),
        "memory_gb": sum(given_budgets) if given_budgets else None,
        "dummy_weights": args.dummy_weights,
        "seed": seed or 0,
    }
    params = _sampling_arguments(args, flags, seed or 0)
    _check_files(args, flags)
    sizes = ("recent_size",) if llm["eviction"] in ("local", "sink") else ("hh_size", "recent_size")
    options = Options(
        llm=llm,
        params=params,
        input=args.input,
        output=args.output,
        prompt_len=prompt_len,
        strict=args.strict,
        json=args.json,
        has_fixed_sizes=llm["eviction"] != "full" and all(llm[name] is not None for name in sizes),
    )
    if options.input == "-" and not (args.prompt_len or options.has_fixed_sizes):
        flags.problems.append("--input - can be read only once: give --prompt-len, or --hh-size and --recent-size")
    _add_deeper_problems(options, flags)
    if flags.problems:
        raise UsageError(flags.problems)
    return options


def _sampling_arguments(args: argparse.Namespace, flags: Flags, seed: int) -> dict[str, Any]:
    for flag in ("--temperature", "--top-k", "--top-p"):
        if flags.given(flag) and not args.do_sample and not (flag == "--temperature" and args.temperature == "0"):
            flags.problems.append(f"{flag} means nothing without --do-sample; add it or leave {flag} out")
    given = {
        "max_new_tokens": flags.whole("--gen-len", 1) or DEFAULT_GEN_LEN,
        "temperature": flags.real("--temperature"),
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
    if args.input is not None and args.input != "-":
        path = Path(args.input)
        if path.is_dir() or not path.exists():
            what = "is a folder" if path.is_dir() else "does not exist"
            flags.problems.append(f"--input {path} {what}; give a .jsonl or .txt file, or - for standard input")
        elif not path.is_file():
            flags.problems.append(f"--input {path} is no regular file and cannot be read twice; use --input -")
        elif path.suffix not in (".jsonl", ".json", ".txt"):
            flags.problems.append(f"--input {path} must end in .jsonl (JSON lines) or .txt (a prompt a line)")
    if args.output is None:
        return
    output = Path(args.output)
    if args.input not in (None, "-") and output.exists() and output.samefile(args.input):
        flags.problems.append(f"--output {output} is the input file; give another name")
    if output.is_dir() or not output.resolve().parent.is_dir():
        flags.problems.append(f"--output {output} cannot be written: its folder does not exist or it is a folder")


def _add_deeper_problems(options: Options, flags: Flags) -> None:
    """Adds what the parts of a run find wrong with their own settings, without what was said already."""
    from flexgen_h2o.policy import EvictionSpec, Policy

    spec = EvictionSpec(
        options.llm["eviction"],
        *(options.llm[n] for n in ("hh_ratio", "recent_ratio", "hh_size", "recent_size", "sink_size")),
    )
    policy = Policy(
        options.llm["gpu_batch_size"] or Policy.gpu_batch_size,
        options.llm["num_gpu_batches"],
        options.llm["decode_batch_size"],
    )
    flags.problems += spec.problems() + policy.problems()


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError for what cannot work, before any weight is loaded."""
    options = read_flags(argv)
    # Loading torch takes a second, which --help and a mistyped flag need not wait for.
    from flexgen_h2o.batch import BatchJob
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.records import run_report
    from flexgen_h2o.sampling import SamplingParams

    llm = LLM(**options.llm)
    params = SamplingParams(**options.params)
    job = BatchJob(llm, params, _source(options, llm))
    sizes = job.measure()
    job.run(sizes, options.output)
    _warn(job, llm)
    report = run_report(llm, params, sizes.prompt_len, sizes.num_prompts)
    print(json.dumps(report) if options.json else _summary(report, sizes.prompt_len + params.max_new_tokens))
    return EXIT_FAILED if job.failed and options.strict else EXIT_OK


def _source(options: Options, llm: "LLM") -> "PromptSource":
    """Prompts as asked for: a file, random ones to measure speed with, or the built-in samples."""
    from flexgen_h2o.batch import file_source, random_source, sample_source

    if options.input is not None:
        return file_source(options.input)
    if options.llm["dummy_weights"] or options.prompt_len is not None:
        longest = llm.config.max_position_embeddings - options.params["max_new_tokens"]
        return random_source(llm, options.prompt_len or max(1, min(DEFAULT_RANDOM_PROMPT_LEN, longest)))
    if llm.tokenizer is None:
        raise UsageError("the model has no tokenizer: give prompt_ids with --input, or --prompt-len for random prompts")
    return sample_source()


def _warn(job: "BatchJob", llm: "LLM") -> None:
    """Says what was left out of the job, on standard error."""
    if job.unknown_keys:
        print(
            f"warning: keys of the input that mean nothing here: {', '.join(sorted(job.unknown_keys))}",
            file=sys.stderr,
        )
    if job.failed:
        print(f"warning: {job.failed} of the prompts could not be served; see their lines", file=sys.stderr)
    if llm.eviction.name != "full" and llm.totals.num_prompts and not llm.totals.evictions:
        print(
            f"note: the texts fit the cache, so {llm.eviction.name} evicted nothing in this run",
            file=sys.stderr,
        )


def _summary(report: dict[str, Any], length: int) -> str:
    """The report for people."""
    memory, eviction = report["memory"], report["eviction"]
    held, full = memory["kv_cache_bytes"], memory["full_kv_cache_bytes"]
    share = f" ({held / full:.0%} of the full cache's {full:,})" if full else ""
    lines = [
        f"{report['model']}{' with dummy weights' if report['dummy_weights'] else ''}, {report['dtype']}:"
        f" {report['num_prompts']} prompts, {report['prompt_tokens']} tokens in, {report['generated_tokens']} out",
        f"KV cache: {eviction['name']}, {eviction['heavy_slots']} heavy + {eviction['recent_slots']} recent of {length}"
        f" entries per row and head; {held:,} bytes{share}; {eviction['evictions']:,} entries evicted",
        f"prefill {report['prefill_s']:.3f} s, decode {report['decode_s']:.3f} s, loading {report['load_s']:.3f} s",
    ]
    if report["throughput_tok_s"] is not None:
        decode = f", decode {report['decode_tok_s']:.1f} tok/s" if report["decode_tok_s"] is not None else ""
        lines.append(
            f"throughput {report['throughput_tok_s']:.1f} tok/s{decode};"
            f" peak memory {memory['cpu_peak_bytes'] / 2**30:.2f} GB (measured)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
