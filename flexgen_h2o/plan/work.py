"""The work of a block, counted: FLOPs of products, bytes of keys and values, by phase."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.policy import Policy


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


def prefill_flops(config: ModelShape, unit_rows: Iterable[int], width: int) -> Counter[int]:
    """FLOPs of prefill's products with weights, by rows, for sub-batches of prompts padded to `width` columns.

    A product of [rows, in] and [in, out] is 2 rows in out. After the last layer's attention only one token a row goes
    on.
    """
    flops: Counter[int] = Counter()
    layer, qkv = config.layer_elements, config.qkv_elements
    for rows in unit_rows:
        tokens = rows * width
        flops[tokens] += 2 * tokens * (layer * (config.num_hidden_layers - 1) + qkv)
        flops[rows] += 2 * rows * (layer - qkv + config.head_elements)
    return flops


def prefill_attention_flops(config: ModelShape, unit_rows: Iterable[int], width: int) -> Counter[int]:
    """FLOPs of prefill's attention, by the rows of the products beside it.

    Attention of n columns to all before them is half of 2 * 2 n^2 elements of a query per layer and sequence.
    """
    width_of_queries = config.num_attention_heads * config.head_dim
    flops: Counter[int] = Counter()
    for rows in unit_rows:
        flops[rows * width] += config.num_hidden_layers * 2 * rows * width**2 * width_of_queries
    return flops


def prefill_work(config: ModelShape, policy: Policy, unit_rows: Sequence[int], width: int) -> PhaseWork:
    """What prefill computes, for sub-batches of prompts padded to `width` columns."""
    work = PhaseWork(prefill_attention_flops(config, unit_rows, width))
    _products(work, policy).update(prefill_flops(config, unit_rows, width))
    return work


def decode_flops(config: ModelShape, group_rows: Iterable[int]) -> Counter[int]:
    """FLOPs of the products of one decode step, by their rows."""
    flops: Counter[int] = Counter()
    for rows in group_rows:
        flops[rows] += 2 * rows * (config.layer_elements * config.num_hidden_layers + config.head_elements)
    return flops


def decode_kv_bytes(config: ModelShape, rows: int, live_slots: int, entry_bytes: int, layers: int) -> int:
    """Bytes of keys and values that attention reads in some layers of one decode step.

    Args:
        entry_bytes: of one key of one head.
    """
    return 2 * layers * rows * live_slots * config.num_key_value_heads * entry_bytes


def live_slots(heavy: int, recent: int, columns_seen: int) -> tuple[int, int]:
    """Heavy and recent slots that hold something once a row without padding has taken in so many columns."""
    return min(heavy, max(0, columns_seen - recent)), min(recent, columns_seen)


def decode_work(
    config: ModelShape,
    policy: Policy,
    group_rows: Sequence[int],
    slots: Sequence[tuple[int, int]],
    columns: Iterable[int],
    itemsize: int,
) -> PhaseWork:
    """What decode steps compute.

    Args:
        group_rows: rows of each group.
        slots: heavy and recent, by layer.
        columns: how many columns have entered the cache at each step.
    """
    work = PhaseWork()
    rows, whole, quantised = sum(group_rows), config.head_dim * itemsize, entry_bytes(config.head_dim)
    for seen in columns:
        _products(work, policy).update(decode_flops(config, group_rows))
        for sizes, layers in Counter(slots).items():
            for live, in_4_bits in zip(live_slots(*sizes, seen), policy.cache_in_4_bits, strict=True):
                if in_4_bits:
                    work.kv4_bytes += decode_kv_bytes(config, rows, live, quantised, layers)
                else:
                    work.kv_bytes += decode_kv_bytes(config, rows, live, whole, layers)
    return work


def _products(work: PhaseWork, policy: Policy) -> Counter[int]:
    """Where products with weights are counted."""
    return work.gemm4_flops if policy.compress_weight else work.gemm_flops
