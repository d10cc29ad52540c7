"""`python -m flexgen_h2o.run`: generates text for a file of prompts, or for random prompts to measure speed."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.command import EXIT_FAILED, EXIT_OK, run_command
from flexgen_h2o.commands.run_options import RunOptions, asks_for_evictions, read_flags
from flexgen_h2o.kvcache.eviction.registry import descriptions

DEFAULT_RANDOM_PROMPT_LEN = 512

if TYPE_CHECKING:
    from flexgen_h2o.jobs.job import BatchJob, InputSizes, PromptSource
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.search.hardware import Hardware


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError for what cannot work, before any weight is loaded."""
    if asks_for_evictions(argv):
        print(descriptions())
        return EXIT_OK
    options = read_flags(argv)
    # Loading torch takes a second, which --help and a mistyped flag need not wait for.
    from flexgen_h2o.jobs.job import BatchJob
    from flexgen_h2o.jobs.metrics import MetricsFile
    from flexgen_h2o.jobs.planning import Workload, predicted
    from flexgen_h2o.jobs.record import stored_policy
    from flexgen_h2o.jobs.report import run_report, summary
    from flexgen_h2o.jobs.results import open_results
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.machine.environment import machine_name
    from flexgen_h2o.plan.timeline import write_trace

    params = options.params
    metrics = None if options.metrics is None else MetricsFile(Path(options.metrics))
    with (
        open_results(options.output, options.may_resume, options.restart) as results,
        LLM(**{**options.llm, **stored_policy(results.stored, options.given_policy)}) as llm,
    ):
        rates = _rates(options, llm, may_measure=not options.searches)
        job = BatchJob(llm, params, _source(options, llm), results, options.checkpoint_s, metrics)
        sizes = job.measure()
        if options.searches and results.stored is None and sizes.num_prompts != 0:
            _choose_policy(options, llm, rates, sizes)
            rates = rates or _rates(options, llm)
            if _has_random_prompts(options, llm):  # they fill the block that was chosen
                job.source = _source(options, llm)
                sizes = job.measure()
        _warn_of_idle_flags(options, llm)
        if rates is not None and rates.name == machine_name(llm.device.type) and rates.compute_threads is not None:
            _use_threads(llm, rates.compute_threads)
        if llm.device.type == "meta":
            llm.dry_run(params, sizes.prompt_len, sizes.num_prompts)
        else:
            job.run(sizes)
            _warn(job, llm)
        report = run_report(llm, params, sizes.prompt_len, sizes.num_prompts, rates)
        work = Workload(sizes.prompt_len, params.max_new_tokens, sizes.num_prompts)
        served = None if llm.device.type == "meta" else llm.totals.num_prompts
        report["predicted"] = predicted(llm, rates, work, served)
        if options.trace is not None and llm.runtime is not None:
            write_trace(Path(options.trace), llm.runtime.timeline.spans)
    print(json.dumps(report) if options.json else summary(report, sizes.prompt_len + params.max_new_tokens))
    return EXIT_FAILED if job.failed and options.strict else EXIT_OK


def _rates(options: RunOptions, llm: "LLM", may_measure: bool = False) -> "Hardware | None":
    """What is known of the machine that is planned for, or found out if it may be measured."""
    from flexgen_h2o.machine.environment import machine_name
    from flexgen_h2o.profiling.quick import find_or_measure, known_rates

    name = machine_name(llm.device.type)
    if options.hardware is None:
        return None
    if not may_measure:
        return known_rates(options.hardware, name)
    return find_or_measure(options.hardware, name, llm.device, llm.platform.offload_dir or Path())


def _choose_policy(options: RunOptions, llm: "LLM", rates: "Hardware | None", sizes: "InputSizes") -> None:
    """Goes on with the policy that is the best for the machine."""
    from flexgen_h2o.jobs.planning import Workload, choose_policy

    num_prompts = None if _has_random_prompts(options, llm) else sizes.num_prompts
    work = Workload(sizes.prompt_len, options.params.max_new_tokens, num_prompts)
    llm.policy = choose_policy(llm, work, options.given_policy, rates, lambda: _rates(options, llm, may_measure=True))


def _use_threads(llm: "LLM", beside_streams: int) -> None:
    """Computes on as many threads as are best beside a stream from or to disk, if there is one; never on more."""
    import torch

    if llm.device.type == "cpu" and any(share > 0 for share in llm.policy.percent.disk_shares):
        torch.set_num_threads(min(torch.get_num_threads(), beside_streams))


def _source(options: RunOptions, llm: "LLM") -> "PromptSource":
    """Prompts as asked for: a file, random ones to measure speed with, or the built-in samples."""
    from flexgen_h2o.jobs.job import file_source, random_source, sample_source

    if options.input is not None:
        return file_source(options.input)
    if _has_random_prompts(options, llm):
        longest = llm.config.max_position_embeddings - options.params.max_new_tokens
        return random_source(llm, options.prompt_len or max(1, min(DEFAULT_RANDOM_PROMPT_LEN, longest)))
    if llm.tokenizer is None:
        raise UsageError("the model has no tokenizer: give prompt_ids with --input, or --prompt-len for random prompts")
    return sample_source()


def _has_random_prompts(options: RunOptions, llm: "LLM") -> bool:
    """Whether speed is measured, with one block of prompts."""
    measures = options.model.dummy_weights or options.prompt_len is not None or llm.device.type == "meta"
    return options.input is None and measures


def _warn_of_idle_flags(options: RunOptions, llm: "LLM") -> None:
    """Names what was asked for and means nothing in a dry run, or without a GPU."""
    for flag in options.timed_only if llm.device.type == "meta" else ():
        print(f"note: {flag} means nothing in a dry run", file=sys.stderr)
    if llm.policy.cpu_cache_compute and llm.device.type != "cpu" and llm.policy.group_rows >= llm.policy.block_rows:
        print(
            "note: --cpu-cache-compute has one group of rows, so that CPU and GPU take turns;"
            " with --num-gpu-batches 2 or more, and --overlap, they work at once",
            file=sys.stderr,
        )
    if llm.device.type != "cpu":
        return
    for flag in options.gpu_only:
        print(f"note: {flag} means nothing without a GPU, where gpu and cpu are one memory", file=sys.stderr)


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
    if llm.policy.ring_16bit and llm.totals.num_prompts and not llm.totals.heavy_entries:
        print(
            "note: with --ring-16bit no entry was outside of the ring in this run, so none is in 4 bits",
            file=sys.stderr,
        )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
