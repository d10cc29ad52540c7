"""Measures a machine: all subjects, interleaved, put together as its Hardware."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import gb
from flexgen_h2o.machine.limits import bound_kernel_caches, return_freed_memory, usable_memory
from flexgen_h2o.machine.platform import default_dtype
from flexgen_h2o.memory.extents import free_disk_bytes
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.profiling.attention import Attention, attention_bytes
from flexgen_h2o.profiling.disk import Disk, TestFile, check_folder
from flexgen_h2o.profiling.gemm import Gemm, WeightSet, native_dtypes, products_bytes, weight_sets
from flexgen_h2o.profiling.layers import Layers
from flexgen_h2o.profiling.links import Links
from flexgen_h2o.profiling.memory import Memory, NewMemory
from flexgen_h2o.profiling.settings import Settings
from flexgen_h2o.profiling.threads import ROWS, ThreadSplit, best_threads, candidates
from flexgen_h2o.profiling.timing import Advance, Stopwatch, Subject, collect
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.rates import UNITS

SPREAD = "interquartile range of the trials over their median; or the change since the measurement before, if larger"
HOST = torch.device("cpu")
ROOM = 256 * 2**20  # host memory that libraries and temporaries take beside what is counted


@torch.inference_mode()
def measure(
    settings: Settings,
    device: torch.device,
    folder: Path,
    name: str,
    environment: Mapping[str, Any],
    advance: Advance = lambda title, done, total: None,
) -> Hardware:
    """Measures this machine.

    Args:
        device: where compute happens: cpu or cuda.
        folder: on the disk to measure.
        environment: versions, machine and command, for the record.
        advance: told of progress.
    Raises UsageError if memory or disk have no room for it.
    """
    return_freed_memory()  # as runs do: memory for results of products then is new each time
    bound_kernel_caches()
    cores = psutil.cpu_count() or 1
    dtypes = native_dtypes(device) if settings.all_dtypes else [default_dtype(device)]
    memory = _usable(device, folder)
    check_folder(folder, settings.file_bytes)
    _check_memory(settings, device, dtypes, memory)
    new_memory = NewMemory(settings.new_bytes, 1 + settings.trials, cores)
    with TestFile(folder, settings.file_bytes, settings.passing_bytes) as file:
        disk = Disk(file, settings.in_flight, settings.buffered)
        subjects = [*_compute(settings, device, dtypes, cores), *_host(settings, device, dtypes, file, cores)]
        subjects += [Subject("disk", disk.trial), Subject("new memory", new_memory.trial)]
        rates = collect(subjects, settings.trials, advance)
        missing = disk.missing()
    return Hardware(
        name=name,
        device=device.type,
        cores=cores,
        memory=memory,
        rates={rate: rates[rate] for rate in sorted(rates, key=_order)},
        missing=missing,
        compute_threads=best_threads(rates),
        environment={**environment, "settings": _as_json(settings), "spread": SPREAD},
    )


def _compute(settings: Settings, device: torch.device, dtypes: list[torch.dtype], cores: int) -> list[Subject]:
    """What is measured on the compute device."""
    storage = torch.empty(_compute_bytes(settings, device, dtypes), dtype=torch.uint8, device=device)
    workspace, stopwatch = Workspace(storage), Stopwatch(device, settings.least_s)
    gemm = Gemm(settings.rows, _weights(settings, device, dtypes), workspace, stopwatch)
    attention = Attention(settings.head_dims, dtypes, settings.slots, settings.kv_bytes, workspace, stopwatch)
    threads = tuple(sorted({1, cores})) if device.type == "cpu" else (1,)
    memory = Memory(settings.memory_bytes, threads, workspace, stopwatch)
    subjects = [Subject("products", gemm.trial), Subject("attention", attention.trial), Subject("memory", memory.trial)]
    if device.type == "cuda":
        return [*subjects, Subject("links", Links(settings.link_bytes, stopwatch).trial)]
    layers = Layers(default_dtype(device), settings.prompt_lens, settings.tokens, settings.steps)
    return [*subjects, Subject("layers", layers.trial)]


def _host(
    settings: Settings, device: torch.device, dtypes: list[torch.dtype], file: TestFile, cores: int
) -> list[Subject]:
    """What is measured on the host: beside a GPU also what is measured anyway where the host computes."""
    subjects = []
    workspace = Workspace(torch.empty(_host_bytes(settings, device, dtypes), dtype=torch.uint8))
    if device.type == "cuda":
        stopwatch = Stopwatch(HOST, settings.least_s)
        attention = Attention(settings.head_dims, dtypes, settings.slots, settings.kv_bytes, workspace, stopwatch)
        memory = Memory(settings.memory_bytes, tuple(sorted({1, cores})), workspace, stopwatch)
        subjects += [Subject("attention on the host", attention.trial), Subject("host memory", memory.trial)]
    if settings.split_s:
        split = ThreadSplit(
            candidates(cores),
            settings.split_s,
            _split_weights(settings),
            workspace,
            file,
        )
        subjects.append(Subject("threads", split.trial))
    return subjects


def _weights(settings: Settings, device: torch.device, dtypes: list[torch.dtype]) -> dict[str, WeightSet]:
    """What is multiplied with on the compute device."""
    return weight_sets(settings.weight_shape, settings.weight_bytes, dtypes, device)


def _split_weights(settings: Settings) -> WeightSet:
    """What is multiplied with on the host beside a stream."""
    return WeightSet(settings.weight_shape, settings.weight_bytes, default_dtype(HOST), HOST)


def _compute_bytes(settings: Settings, device: torch.device, dtypes: list[torch.dtype]) -> int:
    """Bytes of the workspace on the compute device."""
    sets = _weights(settings, device, dtypes).values()
    products = [products_bytes(weights, max(settings.rows)) for weights in sets]
    return max(*products, settings.memory_bytes, _attention_bytes(settings, dtypes))


def _host_bytes(settings: Settings, device: torch.device, dtypes: list[torch.dtype]) -> int:
    """Bytes of the workspace on the host, beside that of a compute device of CPU."""
    needed = [products_bytes(_split_weights(settings), ROWS) if settings.split_s else 0]
    if device.type == "cuda":
        needed += [settings.memory_bytes, _attention_bytes(settings, dtypes)]
    return max(needed)


def _attention_bytes(settings: Settings, dtypes: list[torch.dtype]) -> int:
    return attention_bytes(settings.head_dims, dtypes, settings.slots, settings.kv_bytes)


def _usable(device: torch.device, folder: Path) -> dict[str, int]:
    """Usable bytes by tier, before anything is measured."""
    usable = {"cpu": usable_memory(), "disk": free_disk_bytes(folder)}
    return {"gpu": torch.cuda.mem_get_info(device)[1], **usable} if device.type == "cuda" else usable


def _check_memory(
    settings: Settings, device: torch.device, dtypes: list[torch.dtype], usable: Mapping[str, int]
) -> None:
    """Raises UsageError if what is measured with does not fit."""
    needed = {"cpu": _host_bytes(settings, device, dtypes) + settings.passing_bytes + ROOM}
    if device.type == "cuda":
        needed["cpu"] += 2 * settings.link_bytes
        needed["gpu"] = _compute_bytes(settings, device, dtypes) + settings.link_bytes + ROOM
    else:
        needed["cpu"] += _compute_bytes(settings, device, dtypes)
    problems = [
        f"measuring needs {gb(nbytes)} of {tier} memory, of which {gb(usable[tier])} are usable;"
        " give --quick, which needs less, or free some"
        for tier, nbytes in needed.items()
        if nbytes > usable[tier]
    ]
    if problems:
        raise UsageError(problems)


def _as_json(settings: Settings) -> dict[str, Any]:
    """As a file gives it back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def _order(name: str) -> tuple[object, ...]:
    """Sorts rates by kind, then by name, numbers in them by size."""
    kinds = [pattern.split("/")[0] for pattern in UNITS]
    kind, *rest = name.split("/")
    return (kinds.index(kind), *((0, int(part), "") if part.isdigit() else (1, 0, part) for part in rest))
