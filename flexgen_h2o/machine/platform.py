"""What a run has to run on: device, precision, memory budgets, folders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flexgen_h2o.basics.memory_sizes import GB, MOST_GB
from flexgen_h2o.kernels.matrices.layout import MatrixLayout
from flexgen_h2o.kernels.matrices.plain import PlainLayout
from flexgen_h2o.machine.limits import usable_memory
from flexgen_h2o.memory.transfer import Transfer
from flexgen_h2o.plan import names
from flexgen_h2o.plan.placement import Tier

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in names.DTYPES}


@dataclass(frozen=True)
class Platform:
    """What a run has to run on.

    Attributes:
        device: where compute happens: cuda, cpu, or meta for a dry run.
        budgets: bytes that each tier may hold; None for no limit. With `joint`, gpu and cpu share that of cpu.
        joint: the gpu and cpu tiers are one memory: so without a GPU.
        offload_dir: where the files of a run go.
        make_transfer: overrides the back-end that goes with the device.
        baseline: bytes that the process held before the model; None to measure them when the runtime starts.
        gpu_baseline: bytes of the GPU that were taken before the model: by CUDA itself and by others.
        matrix_layout: how weight matrices lie in memory and on disk.
        keeps_spans: keep what every resource did when, for a trace.
    """

    device: torch.device
    budgets: dict[Tier, int | None] = field(default_factory=dict)
    joint: bool = True
    offload_dir: Path | None = None
    make_transfer: Callable[[], Transfer] | None = None
    baseline: int | None = None
    gpu_baseline: int = 0
    matrix_layout: MatrixLayout = field(default_factory=PlainLayout)
    keeps_spans: bool = False


def setting_problems(device: str, dtype: str, budgets: Mapping[str, float | None]) -> list[str]:
    """What is wrong with the names of device and precision, and with budgets in GB by tier; a sentence each."""
    found = []
    for tier, budget in budgets.items():
        if budget is not None and not 0 <= budget <= MOST_GB:
            found.append(f"--{tier}-mem is {budget}; it must be a number of GB between 0 and {MOST_GB}")
    if device not in names.DEVICES:
        found.append(f"--device {device!r} is unknown; known ones: {', '.join(names.DEVICES)}")
    elif device == "cuda" and not torch.cuda.is_available():
        found.append("--device 'cuda': torch finds no GPU here; use --device cpu, or --device meta for a dry run")
    if dtype not in ("auto", *DTYPES):
        found.append(f"--dtype {dtype!r} is unknown; known ones: auto, {', '.join(DTYPES)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As flags and files name it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def taken_on_gpu(device: torch.device) -> int:
    """Bytes of a GPU that are taken now, by whomever, libraries that compute will load included; 0 without one."""
    if device.type != "cuda":
        return 0
    _load_libraries(device)
    torch.cuda.empty_cache()  # what earlier runs of this process have left is free
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _load_libraries(device: torch.device) -> None:
    """Has CUDA load what it keeps on the device from its first use on: cuBLAS with its workspace, kernels."""
    square = torch.ones(64, 64, dtype=torch.float16, device=device)
    product = torch.addmm(square[0], square, square)
    batch = torch.bmm(product[None], square[None]).float().softmax(dim=-1)
    torch.nn.functional.layer_norm(batch, (64,)).sum().item()


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def default_dtype(device: torch.device) -> torch.dtype:
    """float16 on a GPU; on a CPU bfloat16 where the processor multiplies it, else float32."""
    if device.type != "cpu":
        return torch.float16
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has_bfloat16 = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if has_bfloat16 else torch.float32


def tier_budgets(
    device: torch.device, gpu_mem: float | None, cpu_mem: float | None, disk_mem: float | None
) -> dict[Tier, int | None]:
    """Bytes per tier: as given in GB, but no more than this machine has. A dry run is bound by what is given alone."""
    gpu, cpu, disk = (None if given is None else int(given * GB) for given in (gpu_mem, cpu_mem, disk_mem))
    if device.type == "cpu":
        joint = None if gpu is None and cpu is None else (gpu or 0) + (cpu or 0)
        return {"cpu": _at_most(usable_memory(), joint), "disk": disk}
    if device.type == "cuda":
        gpu = _at_most(torch.cuda.mem_get_info(device)[1], gpu)
        cpu = _at_most(usable_memory(), cpu)
    return {"gpu": gpu, "cpu": cpu, "disk": disk}


def _at_most(limit: int, asked: int | None) -> int:
    return limit if asked is None else min(limit, asked)
