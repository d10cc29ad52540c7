"""This engine, through its Python interface. Options are the arguments of `LLM`, policy included."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.bench.drivers.common import EngineRefused, Generation, Loaded, Settings
from flexgen_h2o.errors import UsageError
from flexgen_h2o.llm import LLM
from flexgen_h2o.placement import TIERS, Percent
from flexgen_h2o.sampling import SamplingParams


def load(settings: Settings) -> Loaded:
    """A block of the whole batch on the CPU unless options say otherwise; `percent` is a list of six numbers."""
    import torch

    torch.set_num_threads(settings.threads)
    options: dict[str, Any] = {"gpu_batch_size": settings.batch, "device": "cpu", **settings.options}
    if "percent" in options:
        options["percent"] = Percent(*options["percent"])
    try:
        llm = LLM(
            str(settings.checkpoint),
            dtype=settings.dtype,
            offload_dir=settings.offload_dir,
            prompt_len=settings.prompt_len,
            **options,
        )
    except (UsageError, TypeError) as error:  # a TypeError names an option that there is not
        raise EngineRefused(" ".join(str(error).split())) from error
    llm.load()
    heavy, recent = llm.eviction.sizes(settings.prompt_len + settings.gen_len)

    def generate(prompts: NDArray[np.int64], gen_len: int) -> Generation:
        return _generate(llm, prompts, gen_len)

    details: dict[str, Any] = {"eviction": llm.eviction.name, "heavy_slots": heavy, "recent_slots": recent}
    folder = None if llm.runtime is None or llm.runtime.weights.folder is None else llm.runtime.weights.folder.path
    details |= {"achieved_percent": llm.achieved_percent(), "weight_folder": None if folder is None else str(folder)}
    return Loaded(generate, details, llm.close)


def _generate(llm: LLM, prompts: NDArray[np.int64], gen_len: int) -> Generation:
    """The engine times its decode steps; all else that the call takes counts as prefill, before which most of it is."""
    try:
        started = time.perf_counter()
        outputs = llm.generate(prompts.tolist(), SamplingParams(max_new_tokens=gen_len, ignore_eos=True))
        ended = time.perf_counter()
    except UsageError as error:
        raise EngineRefused(" ".join(error.problems)) from error
    decode_s = llm.totals.decode_s
    ledger = llm.ledger()
    counted = {
        "work": {phase: work.to_json() for phase, work in llm.totals.work.items()},
        "ledger_peak_bytes": None if ledger is None else {tier: ledger.peak(tier) for tier in TIERS},
    }
    return Generation([output.token_ids for output in outputs], ended - started - decode_s, decode_s, counted)
