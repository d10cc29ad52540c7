"""How long a block takes on this engine, from a machine's rates: seconds by phase and resource.

The schedule overlaps copies with computation, so that a phase takes what its busiest resource takes (FlexGen, Sheng et
al. 2023, arXiv 2303.06865, section 4.2 and appendix A.3, whose model takes the largest of them too). What differs here:

    - On one device, products, attention and what lies between them add. Beside a GPU, attention of KV in host memory
      may run on the CPU: a lane of its own, `host`, which works while the GPU projects another group of rows.
    - Reads of KV by the CPU and copies from and to host memory share its bandwidth: the lane `host_memory`.
    - With H2O (Zhang et al. 2023, arXiv 2306.14048) a step reads the kept entries, however long the text is; after
      prefill only these go back; and a step on the CPU sends queries, keys and values one way, outputs the other.
    - Decode's products run over groups of rows, prefill's over sub-batches.
    - A disk may do one thing at a time: reads and writes share the lane `disk`, by what was measured of both at once.
    - What is done for a sub-batch, or a group, in a layer has a fixed time too: on a GPU that of issuing it, while the
      GPU computes what was issued before; on the CPU it adds.
    - Hidden states move in prefill alone. What lies outside the layers is brought once and stays.

Everything here is a sum of terms that are each proportional to a share of weights, cache or hidden states, to the
number of sub-batches, or to neither: lp.py relies on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from flexgen_h2o.plan.placement import Shares
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.work import decode_flops, live_slots, prefill_flops
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.layer_times import choice_s, decode_layer_s, prefill_layer_s
from flexgen_h2o.search.rates import FOUR_BITS
from flexgen_h2o.search.sizes import Job, MemoryPlan

Lanes = dict[str, float]  # seconds by resource
PHASES = ("prefill", "decode")
LANES = ("compute", "issue", "host", "h2d", "d2h", "disk_read", "disk_write", "host_memory")
SHARED = ("disk", "host_memory")  # what passes these has a lane of its own too


@dataclass(frozen=True)
class Split:
    """Shares by tier of weights, cache and hidden states. To find what each share costs, one alone may be 1."""

    weights: Shares
    cache: Shares
    hidden: Shares


class TimeModel(Protocol):
    """What lp.py and search.py ask of an engine's model; flexgen_model.py has another one."""

    @property
    def job(self) -> Job: ...

    @property
    def hardware(self) -> Hardware: ...

    def phases(
        self, policy: Policy, split: Split, units: float, group_rows: float | None, groups: float
    ) -> dict[str, Lanes]: ...

    def achieved(self, plan: MemoryPlan) -> dict[str, Lanes]: ...

    def seconds(self, lanes: Lanes, overlap: bool) -> float: ...


@dataclass(frozen=True)
class CostModel:
    """Seconds of the phases of a job on a machine, as this engine takes them.

    Attributes:
        lane_shares: which share of its rate each lane reaches, by lane; 1 where nothing is said.
    Every method raises UsageError if the hardware lacks a rate that is needed.
    """

    job: Job
    hardware: Hardware
    lane_shares: Mapping[str, float] = field(default_factory=dict)
    _known: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def phases(
        self, policy: Policy, split: Split, units: float, group_rows: float | None, groups: float
    ) -> dict[str, Lanes]:
        """Seconds of prefill, and of one decode step, by lane.

        Args:
            policy: its sizes of block and percent are not looked at.
            units: sub-batches of the block.
            group_rows: rows of a decode group; None for as many as products are fastest with.
            groups: how many there are.
        """
        return {
            "prefill": self._prefill(policy, split, units),
            "decode": self._decode_step(policy, split, units, group_rows, groups),
        }

    def seconds(self, lanes: Lanes, overlap: bool) -> float:
        """Seconds of a phase from those of its lanes."""
        if overlap:
            return max(lanes.values())
        return sum(seconds for lane, seconds in lanes.items() if lane not in SHARED)

    def achieved(self, plan: MemoryPlan) -> dict[str, Lanes]:
        """The phases of a policy with the homes that its tensors and units come to have."""
        policy = plan.policy
        weights = plan.layer_weights
        total = sum(weights.values())
        split = Split(
            (weights["gpu"] / total, weights["cpu"] / total, weights["disk"] / total),
            plan.cache_shares,
            plan.hidden_shares,
        )
        groups = policy.block_rows / policy.group_rows
        return self.phases(policy, split, policy.num_gpu_batches, policy.group_rows, groups)

    # --- phases ---

    def _prefill(self, policy: Policy, split: Split, units: float) -> Lanes:
        job, config = self.job, self.job.config
        rows, layers = policy.gpu_batch_size, config.num_hidden_layers
        compute = self._once(("prefill", rows, policy.compress_weight), lambda: self._prefill_compute(policy))
        # Hidden states of every sub-batch are stored by each layer but the last, and by the embedding; loaded by all.
        hidden = layers * units * job.hidden_bytes(rows, job.prompt_len)
        filled = layers * units * job.unit_bytes(policy, rows)
        return self._lanes(
            compute=units * compute,
            issuing=layers * units * (self._operation_s("products") + self._operation_s("attention")),
            weights=self._weights(policy, split),
            to_device=_scaled(split.hidden, hidden),
            from_device=_sum(_scaled(split.hidden, hidden), _scaled(split.cache, filled)),
        )

    def _decode_step(
        self, policy: Policy, split: Split, units: float, group_rows: float | None, groups: float
    ) -> Lanes:
        job, config = self.job, self.job.config
        layers, rows = config.num_hidden_layers, units * policy.gpu_batch_size
        compute = self._decode_products(policy, rows, group_rows) + choice_s(job, self.hardware, rows)
        compute += layers * decode_layer_s(job, self.hardware, rows)
        at_home = policy.cpu_cache_compute and not job.joint
        on_host = split.cache[1] if at_home else 0.0
        whole = layers * job.unit_bytes(policy, rows)
        moved = (split.cache[0], split.cache[1] - on_host, split.cache[2])
        entry = layers * rows * config.hidden_size * job.itemsize
        scores = layers * rows * config.num_key_value_heads * 4 * (job.slots + 1)
        attend_s = self._operation_s("attention")
        lanes = self._lanes(
            compute=compute + self._attention(policy, sum(moved) * rows, self.hardware.device),
            issuing=layers * (groups * self._operation_s("products") + sum(moved) * units * attend_s),
            weights=self._weights(policy, split),
            to_device=_sum(_scaled(moved, whole), (0.0, on_host * entry, 0.0)),
            # Units on disk go back whole, those in host memory by what has changed.
            from_device=_sum((0.0, moved[1] * (2 * entry + scores), moved[2] * whole), (0.0, on_host * 3 * entry, 0.0)),
            read_by_host=on_host * rows * layers * sum(self._live_bytes(policy)),
        )
        if at_home:
            host = self._attention(policy, on_host * rows, "cpu")
            host += on_host * layers * units * attend_s
            host /= self.lane_shares.get("host", 1.0)
            lanes |= _beside(lanes["compute"], host, groups if policy.overlap else 1)
        return lanes

    # --- terms ---

    def _once(self, key: object, compute: Callable[[], float]) -> float:
        """A number that is asked for many times."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _prefill_compute(self, policy: Policy) -> float:
        """Seconds that the compute device is busy with prefill of one sub-batch."""
        job, config, rows = self.job, self.job.config, policy.gpu_batch_size
        products = self._products(self._weight_precision(policy), prefill_flops(config, [rows], job.prompt_len))
        rest = config.num_hidden_layers * prefill_layer_s(job, self.hardware, rows)
        return products + rest + choice_s(job, self.hardware, rows)

    def _weight_precision(self, policy: Policy) -> str:
        return FOUR_BITS if policy.compress_weight else self.job.dtype

    def _products(self, precision: str, flops: Mapping[int, float]) -> float:
        """Seconds of so many FLOPs by rows."""
        return sum(count / self.hardware.gemm_flops(precision, rows) for rows, count in flops.items())

    def _decode_products(self, policy: Policy, rows: float, group_rows: float | None) -> float:
        """Seconds of the products of a step. Groups are full, but for a last one."""
        config, precision = self.job.config, self._weight_precision(policy)

        def group(rows: int) -> float:
            return self._once((precision, rows), lambda: self._products(precision, decode_flops(config, [rows])))

        if group_rows is None:
            fastest = self.hardware.fastest_gemm_flops(precision)
            return rows * self._once(precision, lambda: sum(decode_flops(config, [1]).values()) / fastest)
        whole, rest = divmod(rows, group_rows)
        return whole * group(int(group_rows)) + (group(int(rest)) if rest else 0.0)

    def _operation_s(self, kind: str) -> float:
        return self._once(("operation", kind), lambda: self.hardware.operation_s(kind))

    def _weights(self, policy: Policy, split: Split) -> Shares:
        """Bytes of the layers' weights that a pass over the layers brings, by where they live."""
        layers, packed = self.job.config.num_hidden_layers, policy.compress_weight
        return _scaled(split.weights, layers * self._once(("layer", packed), lambda: self.job.layer_bytes(packed)))

    def _live_bytes(self, policy: Policy) -> tuple[float, float]:
        """Keys and values of a row and layer that a step reads, of heavy region and ring, on average over the steps."""
        heavy, ring = self.job.kv_row_bytes(policy)
        return heavy * self._live_shares[0], ring * self._live_shares[1]

    @cached_property
    def _live_shares(self) -> tuple[float, float]:
        """Shares of the slots of heavy region and ring that hold something, on average over the decode steps."""
        job = self.job
        columns = range(job.prompt_len + 1, job.prompt_len + job.gen_len)
        live = [live_slots(job.heavy, job.recent, seen) for seen in columns] or [(job.heavy, job.recent)]
        heavy, ring = (sum(slots[region] for slots in live) / len(live) for region in (0, 1))
        return heavy / max(1, job.heavy), ring / job.recent

    def _attention(self, policy: Policy, rows: float, device: str) -> float:
        """Seconds to attend to the KV of so many rows in all layers."""
        if not rows:
            return 0.0
        key = ("attention", device, policy.cache_in_4_bits)
        return rows * self._once(key, lambda: self._row_attention(policy, device))

    def _row_attention(self, policy: Policy, device: str) -> float:
        head_dim, layers = self.job.config.head_dim, self.job.config.num_hidden_layers
        return sum(
            layers * nbytes / self.hardware.attention_bytes_s(precision, head_dim, device)
            for nbytes, packed in zip(self._live_bytes(policy), policy.cache_in_4_bits, strict=True)
            for precision in [FOUR_BITS if packed else self.job.dtype]
            if nbytes
        )

    def _lanes(
        self,
        compute: float,
        issuing: float,
        weights: Shares,
        to_device: Shares,
        from_device: Shares,
        read_by_host: float = 0.0,
    ) -> Lanes:
        """Seconds by lane, from bytes by the tier that they come from or go to.

        Args:
            issuing: fixed seconds of what is done for some rows in a layer.
        """
        hardware, joint = self.hardware, self.job.joint
        disk_read, disk_write = weights[2] + to_device[2], from_device[2]
        seconds = {"compute": compute, "disk_read": 0.0, "disk_write": 0.0}
        if disk_read:
            seconds["disk_read"] = disk_read / hardware.disk_read_bytes_s()
        if disk_write:
            seconds["disk_write"] = disk_write / hardware.disk_write_bytes_s()
        if joint:
            seconds["compute"] += issuing
            if disk_read:
                seconds["compute"] += disk_read * hardware.disk_read_cpu_s_per_byte() / hardware.cores
            if disk_write:
                seconds["compute"] += disk_write * hardware.disk_write_cpu_s_per_byte() / hardware.cores
        else:
            to_gpu, to_host = weights[1] + disk_read + to_device[1], from_device[1] + disk_write
            seconds["h2d"] = to_gpu / hardware.link_bytes_s("h2d", pinned=True) if to_gpu else 0.0
            seconds["d2h"] = to_host / hardware.link_bytes_s("d2h", pinned=True) if to_host else 0.0
            # What comes from disk is written to host memory and read again; what goes there likewise.
            seconds["issue"] = issuing
            shared = to_gpu + to_host + disk_read + disk_write + read_by_host
            seconds["host_memory"] = shared / hardware.read_bytes_s("cpu") if shared else 0.0
        lanes = {lane: value / self.lane_shares.get(lane, 1.0) for lane, value in seconds.items()}
        alone = lanes["disk_read"] + lanes["disk_write"]
        lanes["disk"] = alone * hardware.disk_both_share if alone else 0.0
        return lanes


def _beside(compute: float, host: float, groups: float) -> Lanes:
    """Lanes of a step in which the CPU attends while the GPU projects, for so many equal groups, two in flight.

    The GPU takes project 0, project 1, finish 0, project 2, finish 1, ... and the CPU attends in between. If the CPU is
    the slower, it waits once a layer, for the first group's projection and for the last one's end; if it is not, the
    GPU may wait for the first and the last group. Projections are a quarter of a layer's products.
    """
    if groups < 2:
        return {"host": compute + host}
    project, finish, attend = compute / groups / 4, compute / groups * 3 / 4, host / groups
    return {
        "host": host + project + finish,
        "compute and host (first group)": compute + attend - project,
        "compute and host (last group)": compute + 2 * attend - project - finish,
    }


def _scaled(shares: Shares, total: float) -> Shares:
    return shares[0] * total, shares[1] * total, shares[2] * total


def _sum(left: Shares, right: Shares) -> Shares:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]
