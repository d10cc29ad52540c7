"""How fast a phase could be: its counted work over rates that were measured alone.

The limit is the largest, over devices and links, of bytes or FLOPs over the rate. On one device products and attention
add, and so does the processor time that a disk costs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.model_config import ModelConfig, is_matrix
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.hardware import Hardware

FOUR_BITS = "int4"  # the name of that precision among rates


@dataclass
class PhaseWork:
    """What prefill or decode has computed and moved, counted, and how long it took, measured.

    Attributes:
        gemm_flops: FLOPs of products by their rows, in the compute precision.
        kv_bytes: keys and values that decode attention has read in that precision.
        moved: bytes by link.
        busy_s: seconds by lane.
        gemm4_flops, kv4_bytes: the same with weights, or keys and values, in 4 bits.
    """

    gemm_flops: Counter[int] = field(default_factory=Counter)
    kv_bytes: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    busy_s: dict[str, float] = field(default_factory=dict)
    gemm4_flops: Counter[int] = field(default_factory=Counter)
    kv4_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As an object; rows become text there."""
        # asdict() would make counters of pairs out of these.
        counters = {name: dict(getattr(self, name)) for name in ("gemm_flops", "gemm4_flops", "moved")}
        return {"kv_bytes": self.kv_bytes, "kv4_bytes": self.kv4_bytes, "busy_s": dict(self.busy_s), **counters}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PhaseWork":
        """What to_json() has written."""
        by_rows = {
            name: Counter({int(rows): flops for rows, flops in values[name].items()})
            for name in ("gemm_flops", "gemm4_flops")
        }
        return cls(**{**values, **by_rows, "moved": Counter(values["moved"])})

    def add(self, other: "PhaseWork") -> None:
        """Adds the work of another block."""
        self.gemm_flops.update(other.gemm_flops)
        self.kv_bytes += other.kv_bytes
        self.gemm4_flops.update(other.gemm4_flops)
        self.kv4_bytes += other.kv4_bytes
        self.moved.update(other.moved)
        for lane, seconds in other.busy_s.items():
            self.busy_s[lane] = self.busy_s.get(lane, 0.0) + seconds


def prefill_flops(config: ModelConfig, unit_rows: Iterable[int], width: int) -> Counter[int]:
    """FLOPs of prefill's products with weights, by rows, for sub-batches of prompts padded to `width` columns.

    A product of [rows, in] and [in, out] is 2 rows in out. After the last layer's attention only one token a row goes
    on.
    """
    flops: Counter[int] = Counter()
    hidden, layers = config.hidden_size, config.num_hidden_layers
    for rows in unit_rows:
        tokens = rows * width
        flops[tokens] += 2 * tokens * (layer_elements(config) * (layers - 1) + 3 * hidden**2)
        flops[rows] += 2 * rows * (layer_elements(config) - 3 * hidden**2 + head_elements(config))
    return flops


def prefill_attention_flops(config: ModelConfig, unit_rows: Iterable[int], width: int) -> Counter[int]:
    """FLOPs of prefill's attention, by the rows of the products beside it.

    Attention of n columns to all before them is half of 2 * 2 n^2 hidden_size per layer and sequence.
    """
    flops: Counter[int] = Counter()
    for rows in unit_rows:
        flops[rows * width] += config.num_hidden_layers * 2 * rows * width**2 * config.hidden_size
    return flops


def prefill_work(config: ModelConfig, policy: Policy, unit_rows: Sequence[int], width: int) -> PhaseWork:
    """What prefill computes, for sub-batches of prompts padded to `width` columns."""
    work = PhaseWork(prefill_attention_flops(config, unit_rows, width))
    _products(work, policy).update(prefill_flops(config, unit_rows, width))
    return work


def decode_flops(config: ModelConfig, group_rows: Iterable[int]) -> Counter[int]:
    """FLOPs of the products of one decode step, by their rows."""
    flops: Counter[int] = Counter()
    for rows in group_rows:
        flops[rows] += 2 * rows * (layer_elements(config) * config.num_hidden_layers + head_elements(config))
    return flops


def decode_kv_bytes(config: ModelConfig, rows: int, live_slots: int, entry_bytes: int) -> int:
    """Bytes of keys and values that attention reads in one decode step.

    Args:
        entry_bytes: of one key of one head.
    """
    return 2 * config.num_hidden_layers * rows * live_slots * config.num_attention_heads * entry_bytes


def resource_seconds(work: PhaseWork, hardware: Hardware, dtype: str, head_dim: int) -> dict[str, float]:
    """What each resource would take for the work at the rate measured alone.

    Raises UsageError if the hardware file lacks a rate.
    """
    seconds = {"compute": 0.0}
    for precision, flops, nbytes in (
        (dtype, work.gemm_flops, work.kv_bytes),
        (FOUR_BITS, work.gemm4_flops, work.kv4_bytes),
    ):
        seconds["compute"] += sum(count / hardware.gemm_flops(precision, rows) for rows, count in flops.items())
        if nbytes:
            seconds["compute"] += nbytes / hardware.attention_bytes_s(precision, head_dim)
    disk = {
        "disk_read": (hardware.disk_read_bytes_s, hardware.disk_read_cpu_s_per_byte),
        "disk_write": (hardware.disk_write_bytes_s, hardware.disk_write_cpu_s_per_byte),
    }
    for link, (rate, processor) in disk.items():
        if work.moved[link]:
            seconds[link] = work.moved[link] / rate()
            if hardware.device == "cpu":
                seconds["compute"] += work.moved[link] * processor() / hardware.cores
    for link in ("h2d", "d2h"):
        if work.moved[link] and hardware.device != "cpu":
            seconds[link] = work.moved[link] / hardware.link_bytes_s(link, pinned=True)
    return seconds


def limit_of(
    work: PhaseWork, hardware: Hardware | None, dtype: str, head_dim: int, device: str
) -> tuple[float | None, str | None, str | None]:
    """Limit of a phase in seconds and the resource that sets it; or neither, and why.

    Args:
        device: where compute happens: cpu or cuda.
    """
    if not work.gemm_flops and not work.gemm4_flops:
        return None, None, "nothing was computed"
    if hardware is not None and hardware.device != device:
        return None, None, f"{hardware.origin} describes a machine that computes on {hardware.device}"
    if hardware is None:
        return None, None, "no hardware file: python -m flexgen_h2o.profile_hardware makes one"
    try:
        seconds = resource_seconds(work, hardware, dtype, head_dim)
    except UsageError as error:
        return None, None, str(error)
    binding = max(seconds, key=lambda resource: seconds[resource])
    return seconds[binding], binding, None


def live_slots(heavy: int, recent: int, columns_seen: int) -> tuple[int, int]:
    """Heavy and recent slots that hold something once a row without padding has taken in so many columns."""
    return min(heavy, max(0, columns_seen - recent)), min(recent, columns_seen)


def decode_work(
    config: ModelConfig,
    policy: Policy,
    group_rows: Sequence[int],
    slots: tuple[int, int],
    columns: Iterable[int],
    itemsize: int,
) -> PhaseWork:
    """What decode steps compute.

    Args:
        group_rows: rows of each group.
        slots: heavy and recent.
        columns: how many columns have entered the cache at each step.
    """
    work = PhaseWork()
    rows, whole, quantised = sum(group_rows), config.head_dim * itemsize, entry_bytes(config.head_dim)
    for seen in columns:
        _products(work, policy).update(decode_flops(config, group_rows))
        for live, in_4_bits in zip(live_slots(*slots, seen), policy.cache_in_4_bits, strict=True):
            if in_4_bits:
                work.kv4_bytes += decode_kv_bytes(config, rows, live, quantised)
            else:
                work.kv_bytes += decode_kv_bytes(config, rows, live, whole)
    return work


def _products(work: PhaseWork, policy: Policy) -> Counter[int]:
    """Where products with weights are counted."""
    return work.gemm4_flops if policy.compress_weight else work.gemm_flops


def layer_elements(config: ModelConfig) -> int:
    """Elements that a layer multiplies with."""
    return sum(prod(shape) for name, shape in config.layer_shapes().items() if is_matrix(name))


def head_elements(config: ModelConfig) -> int:
    """Elements that the choice of a token multiplies with."""
    projected = config.hidden_size * config.word_embed_proj_dim if config.has_embedding_projection else 0
    return config.vocab_size * config.word_embed_proj_dim + projected
