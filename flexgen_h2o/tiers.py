"""Memory: what a run will need, and what there is."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from flexgen_h2o.kvcache.attention import PREFILL_LOGITS
from flexgen_h2o.kvcache.buffer import UnitShape
from flexgen_h2o.model_config import ModelConfig

GB = 2**30
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted peak bytes of a run with everything in memory, by what they are for."""

    baseline: int  # the process before any tensor: interpreter and libraries, measured
    weights: int
    kv_cache: int  # keys and values
    kv_state: int  # their scores and columns
    hidden: int  # hidden states of the block between layers
    workspace: int  # temporaries of the layer, of attention and of the choice of tokens

    @property
    def total(self) -> int:
        return self.baseline + self.weights + self.kv_cache + self.kv_state + self.hidden + self.workspace

    def __str__(self) -> str:
        parts = (
            f"weights {gb(self.weights)}",
            f"KV cache {gb(self.kv_cache + self.kv_state)}",
            f"hidden states and working space {gb(self.hidden + self.workspace)}",
            f"interpreter and libraries {gb(self.baseline)}",
        )
        return f"{gb(self.total)} of memory ({', '.join(parts)})"


def gb(count: int) -> str:
    """Bytes in GB of 2**30, for people."""
    return f"{count / GB:.2f} GB"


def plan_memory(
    config: ModelConfig, itemsize: int, weights: int, units: list[UnitShape], prompt_len: int, group_rows: int
) -> MemoryPlan:
    """Predicts the peak memory of a run.

    Args:
        itemsize: bytes per element of weights and activations.
        weights: bytes of all parameters.
        units: the buffers of one layer.
        prompt_len: width of the widest block.
        group_rows: rows computed together in decode.
    """
    rows = sum(unit.rows for unit in units)
    unit_rows = max(unit.rows for unit in units)
    layers = config.num_hidden_layers
    hidden = rows * prompt_len * config.hidden_size * itemsize
    # In prefill the widest moment of a layer is the MLP: input, norm, two inner states, output.
    tokens = max(unit_rows * prompt_len, group_rows)
    mlp = tokens * (2 * config.ffn_dim + 3 * config.hidden_size) * itemsize
    logits = min(PREFILL_LOGITS, unit_rows * config.num_attention_heads * prompt_len**2)
    attention = tokens * 6 * config.hidden_size * itemsize + logits * (2 * itemsize + 8)
    choice = min(rows, group_rows) * config.vocab_size * (itemsize + 8)
    return MemoryPlan(
        baseline=psutil.Process().memory_info().rss,
        weights=weights,
        kv_cache=layers * sum(unit.kv_bytes(itemsize) for unit in units),
        kv_state=layers * sum(unit.state_bytes for unit in units),
        hidden=hidden,
        workspace=max(mlp, attention, choice),
    )


def usable_memory() -> int:
    """Bytes that this process may still take, what it holds already included: the machine's or its cgroup's limit."""
    own = psutil.Process().memory_info().rss
    machine = psutil.virtual_memory().available + own
    return min([machine, *(free + own for free in _cgroup_free())])


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


def peak_resident_bytes() -> int:
    """The most memory this process has held so far, measured by the kernel (Linux: VmHWM)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        scale = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
