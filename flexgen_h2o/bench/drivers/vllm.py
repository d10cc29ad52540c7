"""vLLM on a CPU, in an environment of its own: its versions of other packages are not ours."""

import math
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.bench.drivers.common import EngineAbsent, EngineRefused, Generation, Loaded, Settings, refuse_gpu

BLOCK_TOKENS = 128  # of a KV block on a CPU


def load(settings: Settings) -> Loaded:
    """The engine inside this process, with room for exactly this batch.

    Options: `enforce_eager` (no compilation of the model: loads sooner, runs slower), `kv_cache_bytes`.
    """
    options = settings.chosen(enforce_eager=False, kv_cache_bytes=_kv_cache_bytes(settings))
    refuse_gpu(settings, "its environment is made for CPUs")
    if settings.dtype not in ("float32", "bfloat16", "float16"):
        raise EngineRefused(f"vllm computes an unquantized OPT in float32, bfloat16 or float16, not {settings.dtype}")
    # One process, so that memory and processor time are all its own and no message passing is timed.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # As vLLM binds the threads of its own worker processes: a thread to each processor.
    processors = sorted(os.sched_getaffinity(0))[: settings.threads]
    os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, processors))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams  # type: ignore[import-not-found]
    except ImportError as error:
        raise EngineAbsent(f"vllm cannot be imported ({error}): scripts/setup_peers.sh vllm installs it") from None
    import torch

    torch.set_num_threads(settings.threads)
    length = settings.prompt_len + settings.gen_len
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(settings.checkpoint),
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            enforce_eager=options["enforce_eager"],
            max_model_len=length,
            max_num_seqs=settings.batch,
            # All prompts in one step: prefill is then one forward, as in the other engines.
            max_num_batched_tokens=max(settings.batch * settings.prompt_len, length, 2048),
            kv_cache_memory_bytes=options["kv_cache_bytes"],
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )

    def generate(prompts: NDArray[np.int64], gen_len: int) -> Generation:
        return _generate(engine, _params(SamplingParams, gen_len), prompts)

    return Loaded(generate, options)


def _params(make: Any, gen_len: int) -> Any:
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    return make(
        temperature=0.0,
        max_tokens=gen_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _generate(engine: Any, params: Any, prompts: NDArray[np.int64]) -> Generation:
    """Steps the engine by hand, as vLLM's own example does, so that prefill and decode come from one run.

    Prefill ends with the step after which every row has a token. A separate run for one token would time prefill
    under other conditions and count its scheduling twice.
    """
    tokens: dict[str, list[int]] = {str(row): [] for row in range(len(prompts))}
    first_token = None
    started = time.perf_counter()
    for row, ids in enumerate(prompts.tolist()):
        engine.add_request(str(row), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
        if first_token is None and all(tokens.values()):
            first_token = time.perf_counter()
    ended = time.perf_counter()
    assert first_token is not None
    return Generation(list(tokens.values()), first_token - started, ended - first_token)


def _kv_cache_bytes(settings: Settings) -> int:
    """Keys and values of the whole batch in whole blocks, and two blocks that vLLM keeps for itself."""
    config = settings.model_config()
    blocks = settings.batch * math.ceil((settings.prompt_len + settings.gen_len) / BLOCK_TOKENS) + 2
    itemsize = 4 if settings.dtype == "float32" else 2
    return 2 * config["num_hidden_layers"] * config["hidden_size"] * itemsize * BLOCK_TOKENS * blocks
