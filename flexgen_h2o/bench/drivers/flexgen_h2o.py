"""This engine, through its Python interface. Options are the arguments of `LLM`, policy included."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench.drivers.common import EngineRefused, Generation, Loaded, Settings
from flexgen_h2o.bench.roofline import with_slower_disk
from flexgen_h2o.jobs.planning import Workload, choose_policy, predicted
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.environment import machine_name
from flexgen_h2o.plan.placement import TIERS, Percent
from flexgen_h2o.plan.policy_files import policy_fields
from flexgen_h2o.plan.sampling import SamplingParams
from flexgen_h2o.profiling.quick import find_or_measure
from flexgen_h2o.search.hardware import Hardware

AUTO = "auto"


def load(settings: Settings) -> Loaded:
    """A block of the whole batch, unless options say otherwise; `percent` is a list of six numbers.

    With `policy` "auto" the policy search cuts and places the block, in the memory that this process may take, and with
    `disk_read_bytes_s` for a disk that was made slower than the hardware file says.
    """
    import torch

    torch.set_num_threads(settings.threads)
    options = dict(settings.options)
    is_auto, cap = options.pop("policy", None) == AUTO, options.pop("disk_read_bytes_s", None)
    if "percent" in options:
        options["percent"] = Percent(*options["percent"])
    try:
        llm = LLM(
            str(settings.checkpoint),
            dtype=settings.dtype,
            offload_dir=settings.offload_dir,
            prompt_len=settings.prompt_len,
            **{"gpu_batch_size": settings.batch, "device": settings.device, **options},
        )
        hardware = find_or_measure(AUTO, machine_name(settings.device), llm.device, settings.offload_dir)
        if hardware is not None and cap is not None:
            hardware = with_slower_disk(hardware, cap)
        work = Workload(settings.prompt_len, settings.gen_len, settings.batch)
        if is_auto:
            llm.policy = choose_policy(llm, work, _given(llm), hardware, lambda: None)
        llm.load()
    except (UsageError, TypeError) as error:  # a TypeError names an option that there is not
        raise EngineRefused(" ".join(str(error).split())) from error

    def generate(prompts: NDArray[np.int64], gen_len: int) -> Generation:
        return _generate(llm, prompts, gen_len)

    return Loaded(generate, _details(llm, hardware, work), llm.close)


def _given(llm: LLM) -> dict[str, Any]:
    """The fields of the policy that options have set, which the search leaves as they are."""
    return {name: True for name in ("compress_weight", "compress_cache", "ring_16bit") if getattr(llm.policy, name)}


def _details(llm: LLM, hardware: Hardware | None, work: Workload) -> dict[str, Any]:
    """How the engine was set up, and what was expected of it, which is no measurement."""
    heavy, recent = llm.eviction.sizes(work.prompt_len + work.gen_len)
    folder = None if llm.runtime is None or llm.runtime.weights.folder is None else llm.runtime.weights.folder.path
    return {
        "eviction": llm.eviction.name,
        "heavy_slots": heavy,
        "recent_slots": recent,
        "policy": policy_fields(llm.policy),
        "achieved_percent": [] if llm.runtime is None else llm.runtime.achieved_percent(),
        "weight_folder": None if folder is None else str(folder),
        "predicted": predicted(llm, hardware, work),
    }


def _generate(llm: LLM, prompts: NDArray[np.int64], gen_len: int) -> Generation:
    """The engine times its decode steps; all else that the call takes counts as prefill, before which most of it is."""
    try:
        started = time.perf_counter()
        outputs = llm.generate(prompts.tolist(), SamplingParams(max_new_tokens=gen_len, ignore_eos=True))
        ended = time.perf_counter()
    except UsageError as error:
        raise EngineRefused(" ".join(error.problems)) from error
    decode_s, blocks = llm.totals.decode_s, llm.totals.step_s
    ledger = llm.ledger()
    counted = {
        "work": {phase: work.to_json() for phase, work in llm.totals.work.items()},
        "ledger_peak_bytes": None if ledger is None else {tier: ledger.peak(tier) for tier in TIERS},
        "step_s": blocks[0] if len(blocks) == 1 else None,  # of several blocks no one step is that of all rows
    }
    return Generation([output.token_ids for output in outputs], ended - started - decode_s, decode_s, counted)
