"""`python -m flexgen_h2o.policy_search`: the policy that generates fastest on a machine, and its projection."""

import json
import sys
from pathlib import Path
from typing import Any

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB, gb
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.search_options import AUTO, SearchOptions, read_flags
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec
from flexgen_h2o.plan.names import DTYPES
from flexgen_h2o.plan.placement import Tier
from flexgen_h2o.plan.policy_files import policy_to_json, write_policy
from flexgen_h2o.plan.timeline import write_trace
from flexgen_h2o.search.cost_model import CostModel, TimeModel
from flexgen_h2o.search.flexgen_model import FlexgenCost
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.hardware_files import find_hardware
from flexgen_h2o.search.plots import plot
from flexgen_h2o.search.predict import Found, predict
from flexgen_h2o.search.report import summary
from flexgen_h2o.search.search import find
from flexgen_h2o.search.simulate import simulate
from flexgen_h2o.search.sizes import DEFAULT_BASELINE, Job


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


Baselines = tuple[int, int]  # bytes that host and GPU hold before there is a model


def _machine(options: SearchOptions) -> tuple[Hardware, dict[Tier, float | None], Baselines]:
    """The machine that is planned for, its budgets in bytes, and what is taken before there is a model."""
    asked = {tier: None if size is None else size * GB for tier, size in options.memory.items()}
    if options.hardware == "auto":
        return _this_machine(options, asked)
    hardware = find_hardware(options.hardware, options.hardware)
    assert hardware is not None  # it was named
    budgets = {tier: size if size is not None else hardware.memory.get(tier) for tier, size in asked.items()}
    return hardware, _joined(budgets, asked, hardware), (DEFAULT_BASELINE, 0)


def _this_machine(
    options: SearchOptions, asked: dict[Tier, float | None]
) -> tuple[Hardware, dict[Tier, float | None], Baselines]:
    """This machine as it is now."""
    from flexgen_h2o.machine.environment import machine_name
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
    dtype = _dtype(options, hardware)
    return hardware, budgets, (process_baseline(DTYPES[dtype]), taken_on_gpu(device))


def _joined(
    budgets: dict[Tier, float | None], asked: dict[Tier, float | None], hardware: Hardware
) -> dict[Tier, float | None]:
    """Without a GPU, the budgets that were asked for of gpu and cpu are one: their sum."""
    if hardware.device == "cuda":
        return budgets
    given = [size for tier, size in asked.items() if tier != "disk" and size is not None]
    return {"cpu": sum(given) if given else hardware.memory.get("cpu"), "disk": budgets["disk"]}


def _dtype(options: SearchOptions, hardware: Hardware) -> str:
    """As asked for; unless it was, float16 on a GPU, else the precision whose products are fastest."""
    if options.dtype != AUTO:
        return options.dtype
    known = [dtype for dtype in DTYPES if any(name.startswith(f"gemm/{dtype}/") for name in hardware.rates)]
    if hardware.device == "cuda" or not known:
        return "float16" if hardware.device == "cuda" else "float32"
    return max(known, key=hardware.fastest_gemm_flops)


def _job(options: SearchOptions, eviction: EvictionSpec, hardware: Hardware, baselines: Baselines) -> Job:
    heavy, recent = eviction.sizes(options.prompt_len + options.gen_len)
    return Job(
        options.config,
        options.prompt_len,
        options.gen_len,
        heavy,
        recent,
        _dtype(options, hardware),
        hardware.device,
        *baselines,
    )


def _model(options: SearchOptions, job: Job, hardware: Hardware) -> TimeModel:
    if options.engine_model == "flexgen":
        return FlexgenCost(job, hardware)
    return CostModel(job, hardware, options.lane_shares)


def _find(options: SearchOptions, job: Job, hardware: Hardware, budgets: dict[Tier, float | None]) -> Found:
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
