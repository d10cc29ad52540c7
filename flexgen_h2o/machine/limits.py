"""What this machine offers: memory limits as the kernel and its control groups set them."""

import contextlib
import ctypes
import os
from pathlib import Path

import psutil
import torch

from flexgen_h2o.kernels.matrices.choice import best_layout

M_MMAP_THRESHOLD = -3  # glibc's malloc.h
LARGEST_KEPT_BLOCK = 2**20  # bytes
KEPT_KERNELS = 64

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_memory() -> int:
    """Bytes that this process may hold in all: what it holds already, plus what the machine or its cgroup has left.

    Pages of files that it has mapped, its libraries' code above all, count among what is left: they are in the page
    cache. Of what may be held they take their part; without them the process would wait for its own code.
    """
    own = anonymous_bytes()
    machine = psutil.virtual_memory().available + own
    return min([machine, *(free + own for free in _cgroup_free())])


def resident_bytes() -> int:
    """What this process holds now."""
    return int(psutil.Process().memory_info().rss)


def anonymous_bytes() -> int:
    """What this process holds now but pages of files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def peak_resident_bytes() -> int:
    """The most this process has held so far, measured by the kernel."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        scale = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def return_freed_memory() -> None:
    """Has the C library give freed tensors back to the system at once, so that the process holds what it uses.

    glibc keeps freed blocks of up to 32 MB for reuse. Layers free and allocate such blocks of many sizes, which fit
    badly into one another: for a model of 2.6 GB some 0.7 GB were held beside what was in use.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)


def bound_kernel_caches() -> None:
    """Has oneDNN, and torch's layer above it, forget kernels that they made for shapes of long ago.

    Each keeps code for up to 1024 shapes. Every width of a block is a new shape, so that over a night of mixed lengths
    a process grew to twice its size. A block has a dozen shapes. Both read their limits at their first product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_KERNELS))


def process_baseline(dtype: torch.dtype) -> int:
    """What this process holds before there is a model: interpreter and libraries, measured.

    torch and oneDNN load part of their libraries at the first product, and make code for it, so there are some here:
    with one row, a few and many, as decode and prefill have them.
    """
    return_freed_memory()
    bound_kernel_caches()
    shape = (128, 128)
    weight = torch.ones(shape, dtype=dtype)
    layout = best_layout(weight.device, dtype, [shape])
    storage = torch.empty(layout.storage(shape, dtype).shape, dtype=dtype)
    layout.encode(storage, weight)
    matrix = layout.matrix(storage, shape, dtype, torch.empty(layout.buffer_bytes([shape], dtype), dtype=torch.uint8))
    for rows in (1, 8, 512):
        x = torch.ones(rows, shape[1], dtype=dtype)
        matrix.product(x, weight[0], torch.empty_like(x)).float().softmax(dim=-1)
    torch.nn.functional.linear(weight, weight, weight[0])
    return resident_bytes()


def _cgroup_free() -> list[int]:
    """What is left below each memory limit that applies to this process, in cgroup v1 or v2."""
    free = []
    for folder, limit_name, usage_name in _cgroup_folders():
        limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
        if limit is not None and usage is not None:
            free.append(limit - usage + _reclaimable(folder / "memory.stat"))
    return free


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    """This process' memory cgroup and its parents, with the names of the files for limit and usage."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = CGROUP_ROOT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            root, names = CGROUP_ROOT, ("memory.max", "memory.current")
        else:
            continue
        own = root / path.lstrip("/")
        folders += [(folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders


def _read_number(path: Path) -> int | None:
    """A limit or count; None where there is no such file or no limit ("max")."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _reclaimable(stat: Path) -> int:
    """Page cache that counts as used but gives way."""
    try:
        fields = dict(line.split() for line in stat.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
