"""`python -m flexgen_h2o.policy_search`: the policy that generates fastest on a machine, and its projection."""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB, MOST_GB, gb
from flexgen_h2o.commands.command import EXIT_OK, Flags, Parser, run_command, unwritable
from flexgen_h2o.plan.model_config import ModelConfig, from_folder, published
from flexgen_h2o.plan.placement import Tier
from flexgen_h2o.plan.policy import MOST_ROWS, EvictionSpec, Policy
from flexgen_h2o.plan.policy_files import policy_to_json, write_policy
from flexgen_h2o.plan.timeline import write_trace
from flexgen_h2o.search.cost_model import LANES, CostModel, TimeModel
from flexgen_h2o.search.flexgen_model import FlexgenCost
from flexgen_h2o.search.hardware import DTYPES, Hardware
from flexgen_h2o.search.hardware_files import find_hardware
from flexgen_h2o.search.plots import plot
from flexgen_h2o.search.predict import Found, predict
from flexgen_h2o.search.report import summary
from flexgen_h2o.search.search import BATCH_SIZES, Choices, find
from flexgen_h2o.search.simulate import simulate
from flexgen_h2o.search.sizes import DEFAULT_BASELINE, Job

DESCRIPTION = """Finds the block size and the homes of weights, KV cache and hidden states that take the least time per
token within the memory of a machine, with and without eviction. Every time and speed is a projection."""
EPILOG = """With --percent, --gpu-batch-size and --num-gpu-batches the policy is given: what it would take is predicted.
exit codes: 0 done; 2 unusable arguments, or nothing fits; 130 interrupted."""
FLAGS = {
    "--model": "folder in Hugging Face format or name, e.g. opt-30b (default: the demo model)",
    "--prompt-len": "tokens of a prompt (default: 512, or what the context allows)",
    "--gen-len": "tokens to generate per prompt (default: 32)",
    "--hh-ratio": "heavy hitters, as a share of prompt + generated (default: 0.1)",
    "--recent-ratio": "recent entries, likewise (default: as --hh-ratio)",
    "--hardware": "auto for this machine, a name such as t4, or FILE (default: auto)",
    "--dtype": "float32, bfloat16 or float16 (default: float16 on a GPU; else the fastest)",
    "--gpu-mem": "GB (2**30 bytes) on the gpu (default: what the hardware has)",
    "--cpu-mem": "in host memory, likewise",
    "--disk-mem": "on disk, likewise; unless given, the disk is used only where it gains more than a tenth",
    "--compress-weight": "4-bit weights: auto, on or off (default: off, as they change what the model says)",
    "--compress-cache": "4-bit keys and values: auto, on or off (default: off)",
    "--cpu-cache-compute": "attention of KV in host memory on the CPU, beside a GPU: auto, on or off (default: auto)",
    "--gpu-batch-size": "rows of a prefill sub-batch (default: the best)",
    "--num-gpu-batches": "sub-batches of a block (default: the best)",
    "--percent": "six numbers, as run takes them: predict this placement",
    "--decode-batch-size": "with --percent: rows computed together in decode",
    "--engine-model": "flexgen_h2o, or flexgen for the engine of FlexGen and H2O's authors (default: flexgen_h2o)",
    "--lane-share": f"LANE=SHARE ...: a lane reaches that share of its rate; lanes: {', '.join(LANES)}",
    "--output": "FILE for the policy, as run --policy takes it",
    "--plot": "FILE.png for throughput against rows and memory by tier (needs matplotlib)",
    "--trace": "FILE for a simulated trace, for Perfetto or chrome://tracing",
    "--json": "print one JSON object, the last line",
}
DEFAULT_PROMPT_LEN, DEFAULT_GEN_LEN = 512, 32
SWITCHES = {"auto": (False, True), "on": (True,), "off": (False,)}


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m flexgen_h2o.policy_search", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False
    )
    for flag, text in FLAGS.items():
        kind: dict[str, Any] = {}
        if flag in ("--percent", "--lane-share"):
            kind = {"nargs": "+", "metavar": "N" if flag == "--percent" else "LANE=SHARE"}
        elif flag == "--json":
            kind = {"action": "store_true"}
        names = ("-o", flag) if flag == "--output" else (flag,)
        parser.add_argument(*names, help=text.replace("%", "%%"), **kind)
    return parser


@dataclass(frozen=True)
class Options:
    """Checked flags.

    Attributes:
        given: the policy, where it is given; choices: what may be chosen, where it is not.
    """

    config: ModelConfig
    prompt_len: int
    gen_len: int
    eviction: EvictionSpec
    hardware: str
    dtype: str | None
    memory: dict[Tier, float | None]
    choices: Choices
    given: Policy | None
    engine_model: str
    lane_shares: dict[str, float]
    output: str | None
    plot: str | None
    trace: str | None
    json: bool


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found, or if nothing fits."""
    options = read_flags(argv)
    hardware, budgets, baselines = _machine(options)
    jobs = {
        "evicting": _job(options, options.eviction, hardware, baselines),
        "full": _job(options, EvictionSpec("full"), hardware, baselines),
    }
    found: dict[str, Found | UsageError] = {}
    for name, job in jobs.items():
        try:
            found[name] = _find(options, job, hardware, budgets)
        except UsageError as error:
            if name == "evicting":
                raise
            found[name] = error
    best, full = found["evicting"], found["full"]
    assert isinstance(best, Found)
    if options.output is not None:
        _write(Path(options.output), best, jobs["evicting"], hardware)
    if options.trace is not None:
        write_trace(Path(options.trace), list(simulate(_model(options, jobs["evicting"], hardware), best.policy).spans))
    if options.plot is not None:
        models = {name: _model(options, job, hardware) for name, job in jobs.items()}
        plot(Path(options.plot), models, budgets, options.choices, found)
    report = {
        **_entry(best),
        "full_cache": _entry(full)
        if isinstance(full, Found)
        else {"policy": None, "predicted": None, "why": str(full)},
        "hardware": {"name": hardware.name, "origin": hardware.origin, "budget_bytes": budgets},
        "engine_model": options.engine_model,
        "measured": False,
    }
    print(json.dumps(report) if options.json else summary(jobs["evicting"], hardware, best, full))
    return EXIT_OK


def _entry(found: Found) -> dict[str, Any]:
    return {"policy": policy_to_json(found.policy), "predicted": found.projection.to_json()}


def read_flags(argv: list[str]) -> Options:
    """Parses and checks the command line. Raises UsageError with every mistake found in it."""
    args, unknown = build_parser().parse_known_args(argv)
    flags = Flags(args)
    flags.problems += [f"{word} is not a flag of this command; see --help" for word in unknown]
    config = _config(args.model, flags)
    eviction = EvictionSpec("h2o", flags.ratio("--hh-ratio"), flags.ratio("--recent-ratio"))
    flags.problems += eviction.problems()
    gen_len = flags.whole("--gen-len", 1) or DEFAULT_GEN_LEN
    longest = config.max_position_embeddings - gen_len if config is not None else DEFAULT_PROMPT_LEN
    prompt_len = flags.whole("--prompt-len", 1) or max(1, min(DEFAULT_PROMPT_LEN, longest))
    if config is not None and prompt_len + gen_len > config.max_position_embeddings:
        flags.problems.append(
            f"--prompt-len {prompt_len} + --gen-len {gen_len} exceed {config.name}'s context of"
            f" {config.max_position_embeddings} tokens; shorten one of them"
        )
    memory: dict[Tier, float | None] = {
        tier: flags.real(f"--{tier}-mem", most=MOST_GB) for tier in ("gpu", "cpu", "disk")
    }
    dtype = flags.choice("--dtype", ("auto", *DTYPES), "auto")
    choices, given = _choices(args, flags)
    for flag, path in (("--output", args.output), ("--plot", args.plot), ("--trace", args.trace)):
        problem = None if path is None else unwritable(flag, Path(path))
        flags.problems += [] if problem is None else [problem]
    engine_model = flags.choice("--engine-model", ("flexgen_h2o", "flexgen"), "flexgen_h2o")
    lane_shares = _lane_shares(args.lane_share or [], flags)
    if lane_shares and engine_model == "flexgen":
        flags.problems.append("--lane-share means nothing with --engine-model flexgen; leave it out")
    if flags.problems or config is None:
        raise UsageError(flags.problems)
    return Options(
        config,
        prompt_len,
        gen_len,
        eviction,
        args.hardware or "auto",
        None if dtype == "auto" else dtype,
        memory,
        choices,
        given,
        engine_model,
        lane_shares,
        args.output,
        args.plot,
        args.trace,
        args.json,
    )


def _config(model: str | None, flags: Flags) -> ModelConfig | None:
    """The model's sizes; no weights are needed."""
    if model is None:
        return replace(from_folder(Path(__file__).parent / "demo" / "model"), name="demo")
    try:
        folder = Path(model).expanduser()
        return from_folder(folder) if folder.is_dir() else published(model)
    except UsageError as error:
        flags.problems += error.problems
    except (OSError, RuntimeError) as error:
        flags.problems.append(f"--model {model} cannot be looked for: {error}; give another name")
    return None


def _choices(args: argparse.Namespace, flags: Flags) -> tuple[Choices, Policy | None]:
    """What may be chosen; and the policy, if all of it is given."""
    rows, units = flags.whole("--gpu-batch-size", 1, MOST_ROWS), flags.whole("--num-gpu-batches", 1, MOST_ROWS)
    decode_rows = flags.whole("--decode-batch-size", 1, MOST_ROWS)
    switches = {
        name: SWITCHES[flags.choice("--" + name.replace("_", "-"), tuple(SWITCHES), default)]
        for name, default in (("compress_weight", "off"), ("compress_cache", "off"), ("cpu_cache_compute", "auto"))
    }
    choices = Choices(
        gpu_batch_size=BATCH_SIZES if rows is None else (rows,),
        num_gpu_batches=units,
        compress_weight=switches["compress_weight"],
        compress_cache=switches["compress_cache"],
        cpu_cache_compute=switches["cpu_cache_compute"],
    )
    if args.percent is None:
        if decode_rows is not None:
            flags.problems.append("--decode-batch-size means nothing without --percent; leave it out")
        return choices, None
    percent = flags.percent("--percent", args.percent)
    if percent is None:
        return choices, None
    if rows is None or units is None:
        flags.problems.append(
            "--percent is predicted for a block of given size: add --gpu-batch-size and --num-gpu-batches"
        )
        return choices, None
    flags.problems += [
        f"--{name.replace('_', '-')} auto leaves a choice, and with --percent all of it is given; say on or off"
        for name in switches
        if getattr(args, name) == "auto"
    ]
    given = Policy(
        rows,
        units,
        decode_rows,
        percent,
        **{name: options == (True,) for name, options in switches.items()},
    )
    flags.problems += given.problems()
    return choices, given


def _lane_shares(texts: list[str], flags: Flags) -> dict[str, float]:
    found = {}
    for text in texts:
        lane, _, number = text.partition("=")
        share = flags.real_number("--lane-share", number, 0.01, 1) if lane in LANES else None
        if lane not in LANES:
            flags.problems.append(f"--lane-share {text}: {lane!r} is no lane; lanes are {', '.join(LANES)}")
        if share is not None:
            found[lane] = share
    return found


Baselines = tuple[int, int]  # bytes that host and GPU hold before there is a model


def _machine(options: Options) -> tuple[Hardware, dict[Tier, float | None], Baselines]:
    """The machine that is planned for, its budgets in bytes, and what is taken before there is a model."""
    asked = {tier: None if size is None else size * GB for tier, size in options.memory.items()}
    if options.hardware == "auto":
        return _this_machine(options, asked)
    hardware = find_hardware(options.hardware, options.hardware)
    assert hardware is not None  # it was named
    budgets = {tier: size if size is not None else hardware.memory.get(tier) for tier, size in asked.items()}
    return hardware, _joined(budgets, asked, hardware), (DEFAULT_BASELINE, 0)


def _this_machine(
    options: Options, asked: dict[Tier, float | None]
) -> tuple[Hardware, dict[Tier, float | None], Baselines]:
    """This machine as it is now."""
    from flexgen_h2o.jobs.report import machine_name
    from flexgen_h2o.machine.limits import process_baseline
    from flexgen_h2o.machine.platform import DTYPES, choose_device, taken_on_gpu, tier_budgets
    from flexgen_h2o.memory.extents import free_disk_bytes
    from flexgen_h2o.profiling.quick import find_or_measure

    device = choose_device("auto")
    hardware = find_or_measure("auto", machine_name(device.type), device, Path(folders.OFFLOAD))
    if hardware is None:
        raise UsageError("this machine has no hardware file: python -m flexgen_h2o.profile_hardware makes one")
    usable = tier_budgets(device, *(options.memory[tier] for tier in ("gpu", "cpu", "disk")))
    budgets: dict[Tier, float | None] = {tier: size for tier, size in usable.items()}
    if budgets.get("disk") is None:
        budgets["disk"] = free_disk_bytes(Path(folders.OFFLOAD).expanduser())
    dtype = options.dtype or _dtype(hardware)
    return hardware, budgets, (process_baseline(DTYPES[dtype]), taken_on_gpu(device))


def _joined(
    budgets: dict[Tier, float | None], asked: dict[Tier, float | None], hardware: Hardware
) -> dict[Tier, float | None]:
    """Without a GPU, the budgets that were asked for of gpu and cpu are one: their sum."""
    if hardware.device == "cuda":
        return budgets
    given = [size for tier, size in asked.items() if tier != "disk" and size is not None]
    return {"cpu": sum(given) if given else hardware.memory.get("cpu"), "disk": budgets["disk"]}


def _dtype(hardware: Hardware) -> str:
    """float16 on a GPU; else the precision whose products are fastest."""
    known = [dtype for dtype in DTYPES if any(name.startswith(f"gemm/{dtype}/") for name in hardware.rates)]
    if hardware.device == "cuda" or not known:
        return "float16" if hardware.device == "cuda" else "float32"
    return max(known, key=hardware.fastest_gemm_flops)


def _job(options: Options, eviction: EvictionSpec, hardware: Hardware, baselines: Baselines) -> Job:
    heavy, recent = eviction.sizes(options.prompt_len + options.gen_len)
    return Job(
        options.config,
        options.prompt_len,
        options.gen_len,
        heavy,
        recent,
        options.dtype or _dtype(hardware),
        hardware.device,
        *baselines,
    )


def _model(options: Options, job: Job, hardware: Hardware) -> TimeModel:
    if options.engine_model == "flexgen":
        return FlexgenCost(job, hardware)
    return CostModel(job, hardware, options.lane_shares)


def _find(options: Options, job: Job, hardware: Hardware, budgets: dict[Tier, float | None]) -> Found:
    model = _model(options, job, hardware)
    if options.given is not None:
        found = Found(options.given, predict(model, options.given))
        _check_budgets(found, budgets)
        return found
    return find(model, budgets, options.choices, uses_disk=options.memory["disk"] is not None)


def _check_budgets(found: Found, budgets: dict[Tier, float | None]) -> None:
    """Raises UsageError with every budget that a policy exceeds."""
    problems = [
        f"--percent {found.policy.percent} needs {gb(found.projection.peak_bytes(tier))} on {tier}, where {gb(budget)}"
        " can be used; move some of it, or take a smaller block"
        for tier, budget in budgets.items()
        if budget is not None and found.projection.peak_bytes(tier) > budget
    ]
    if problems:
        raise UsageError(problems)


def _write(path: Path, found: Found, job: Job, hardware: Hardware) -> None:
    about = {
        "model": job.config.name,
        "prompt_len": job.prompt_len,
        "gen_len": job.gen_len,
        "heavy_slots": job.heavy,
        "recent_slots": job.recent,
        "hardware": hardware.name,
        "projected_throughput_tok_s": round(found.projection.throughput_tok_s, 3),
    }
    write_policy(path, found.policy, about)
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
