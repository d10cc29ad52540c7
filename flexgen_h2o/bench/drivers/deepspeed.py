"""DeepSpeed's ZeRO-Inference: parameters live in host memory or in files, and are gathered module by module."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.bench.drivers import deepspeed_ops
from flexgen_h2o.bench.drivers.common import (
    EngineAbsent,
    EngineRefused,
    Generation,
    Loaded,
    Settings,
    StartAgain,
    absent,
    refuse_gpu,
    torch_dtype,
)
from flexgen_h2o.bench.drivers.generate import generate

FEWEST_BUFFERS, MOST_BUFFERS = 1, 16


def load(settings: Settings) -> Loaded:
    """The model under ZeRO stage 3 with `offload_param` on cpu or nvme, as DeepSpeed's own example sets it up.

    Option of deepspeed_nvme: `buffer_count`, the number of buffers that files are read into, each as large as the
    largest parameter. Without it the smallest count that works is found: too few end in an error, and the process
    starts again with one more (`first_buffer_count` tells where that begins). The smallest count takes least memory but
    leaves nothing to read ahead into: where memory allows, a larger one is faster (opt-1.3b, fast disk: 6 decodes 1.6
    times as fast as 1) and the fair choice.

    Option of both: `num_bits` 4 or 8, weights in groups of 64 of so many bits; DeepSpeed does that in float16 alone.
    """
    nvme = settings.engine == "deepspeed_nvme"
    only_nvme = {"buffer_count": None, "first_buffer_count": FEWEST_BUFFERS} if nvme else {}
    options = settings.chosen(num_bits=None, **only_nvme)
    bits = options["num_bits"]
    if bits is not None and settings.dtype != "float16":
        raise EngineRefused(
            f"{settings.engine} quantises weights of float16 alone, and the precision is {settings.dtype}"
        )
    if nvme:
        refuse_gpu(settings, "what it reads files with is built here for CPUs")
    _prepare(nvme, settings.device)
    if not nvme:
        return Loaded(_Model(settings, _config(settings), bits).generate, {"num_bits": bits})
    given = options["buffer_count"] is not None
    count = options["buffer_count"] if given else options["first_buffer_count"]
    with buffers(count, given):
        model = _Model(settings, _config(settings, count), bits)

    def generate_within_buffers(prompts: NDArray[np.int64], gen_len: int) -> Generation:
        with buffers(count, given):
            return model.generate(prompts, gen_len)

    return Loaded(generate_within_buffers, {"buffer_count": count, "num_bits": bits})


class _Model:
    """A model of transformers whose parameters DeepSpeed keeps elsewhere."""

    def __init__(self, settings: Settings, config: dict[str, Any], num_bits: int | None = None):
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        torch.set_num_threads(settings.threads)
        deepspeed.init_distributed("gloo" if settings.device == "cpu" else "nccl")
        self._device = settings.device
        # While this object lives, from_pretrained makes parameters where the configuration wants them.
        self._switch = HfDeepSpeedConfig(config)
        model = AutoModelForCausalLM.from_pretrained(settings.checkpoint, dtype=torch_dtype(settings.dtype))
        try:
            model = deepspeed.initialize(model=model, config=config)[0].module.eval()
        except ValueError as error:  # on a CPU: float16, and with it weights of few bits
            raise EngineRefused(f"{settings.engine} refuses {settings.dtype} here: {error}") from error
        self._model = model if num_bits is None else _quantised(model, config, num_bits)

    def generate(self, prompts: NDArray[np.int64], gen_len: int) -> Generation:
        return generate(self._model, prompts, gen_len, self._device)


def _quantised(model: Any, config: dict[str, Any], num_bits: int) -> Any:
    """The model with its weights in groups, as DeepSpeed's ZeRO-Inference example does it after loading."""
    from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization

    group = {"num_bits": num_bits, "group_size": 64, "group_dim": 1, "symmetric": False}
    kinds = ("fc1", "fc2", "q_proj", "k_proj", "v_proj", "out_proj", "embed_tokens")
    config["weight_quantization"] = {"post_init_quant": dict.fromkeys(kinds, group)}
    return _init_group_wise_weight_quantization(model, config)


def _prepare(nvme: bool, device: str) -> None:
    """Environment of a run of one process, and compiled ops. Raises EngineAbsent for what is not there."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(_free_port())
    needed = (deepspeed_ops.COMMUNICATION, *(deepspeed_ops.FILES if nvme else ())) if device == "cpu" else ()
    try:
        deepspeed_ops.prepare(needed, device)
        import deepspeed  # noqa: F401
    except ImportError:
        raise absent("deepspeed") from None
    if not deepspeed_ops.is_built(needed):
        raise EngineAbsent(f"deepspeed's {', '.join(needed)} are not built: scripts/setup_peers.sh deepspeed does that")
    if nvme:
        deepspeed_ops.load_file_access()


def _config(settings: Settings, buffer_count: int = 0) -> dict[str, Any]:
    """The configuration of DeepSpeed's ZeRO-Inference example, with buffers that fit the largest parameter."""
    model = settings.model_config()
    hidden = model["hidden_size"]
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 2 * hidden * hidden,
        "stage3_param_persistence_threshold": hidden,
        "stage3_max_live_parameters": 2 * hidden * hidden,
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    config: dict[str, Any] = {
        "fp16": {"enabled": settings.dtype == "float16"},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": zero,
        "steps_per_print": 2000,
        "train_batch_size": 1,  # DeepSpeed wants a number; it matters in training alone
        "wall_clock_breakdown": False,
    }
    if settings.engine == "deepspeed_nvme":
        largest = max(model["vocab_size"] * model["word_embed_proj_dim"], model["ffn_dim"] * hidden)
        zero["offload_param"] = {
            "device": "nvme",
            "pin_memory": False,
            "nvme_path": str(settings.offload_dir),
            "buffer_count": buffer_count,
            "buffer_size": largest,
        }
        config["aio"] = {
            "block_size": 1048576,
            "queue_depth": 8,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    return config


@contextmanager
def buffers(count: int, given: bool) -> Iterator[None]:
    """Around what may need more buffers than there are: refuses then, or starts the process again with one more."""
    try:
        yield
    except (AssertionError, RuntimeError, IndexError) as error:
        if "buffer" not in str(error):
            raise
        if given or count >= MOST_BUFFERS:
            raise EngineRefused(f"deepspeed_nvme cannot run with buffer_count {count}: {error}") from error
        raise StartAgain({"first_buffer_count": count + 1}) from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
