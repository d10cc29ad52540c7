"""Which model is computed, where and how, and within what memory. Plain data, as people give it."""

from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.memory_sizes import MOST_GB
from flexgen_h2o.basics.settings import setting
from flexgen_h2o.plan import names
from flexgen_h2o.plan.names import DEVICES

DTYPES = ("auto", *names.DTYPES)


@dataclass(frozen=True)
class ModelChoice:
    """Which model, and where and in which precision it is computed.

    Attributes:
        model: a folder in Hugging Face format, a name such as "opt-30b", or None for the demo model that ships.
        path: where to look for a named model before the Hugging Face cache.
        dummy_weights: random weights, for measuring speed without a checkpoint.
        device: "auto" (a GPU if there is one), "cuda", "cpu", or "meta" for a dry run.
        dtype: "auto", "float32", "bfloat16" or "float16".
    """

    model: str | None = setting(
        None, "text", "folder in Hugging Face format or name, e.g. opt-30b", shown="the demo model", topic="model"
    )
    path: str | None = setting(None, "text", "folder in which a named model is looked for first", topic="model")
    dummy_weights: bool = setting(False, "given", "random weights: for measuring speed", topic="model")
    device: str = setting(
        "auto",
        "choice",
        "auto, cuda, cpu, or meta for a dry run that only counts bytes",
        shown="auto",
        topic="model",
        known=DEVICES,
    )
    dtype: str = setting(
        "auto", "choice", "auto, float32, bfloat16 or float16", shown="auto", topic="model", known=DTYPES
    )


@dataclass(frozen=True)
class MemoryBudgets:
    """What of each tier may be used.

    Attributes:
        gpu_mem, cpu_mem, disk_mem: budgets in GB (2**30 bytes); None for all that is usable. Without a GPU the first
            two are one budget, their sum.
        offload_dir: where files of the run go, if KV or hidden states live on disk.
    """

    gpu_mem: float | None = setting(
        None, "real", "budget on the gpu; without a GPU it adds to --cpu-mem", topic="homes", most=MOST_GB
    )
    cpu_mem: float | None = setting(
        None, "real", "budget in host memory", shown="what is usable", topic="homes", most=MOST_GB
    )
    disk_mem: float | None = setting(None, "real", "budget on disk", shown="what is free", topic="homes", most=MOST_GB)
    offload_dir: str | Path = setting(
        folders.OFFLOAD, "text", "folder for KV and hidden states on disk", shown=folders.OFFLOAD, topic="homes"
    )

    @property
    def by_tier(self) -> dict[str, float | None]:
        return {"gpu": self.gpu_mem, "cpu": self.cpu_mem, "disk": self.disk_mem}
