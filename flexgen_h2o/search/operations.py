"""Seconds and bytes of single operations of the schedule, from the same rates and sizes as the cost model's."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from flexgen_h2o.plan.model_shape import full_name
from flexgen_h2o.plan.placement import Tier, small_first
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import Attend, BlockShape, Choose, Finish, Group, Operation, Project
from flexgen_h2o.plan.work import live_slots
from flexgen_h2o.search.cost_model import CostModel
from flexgen_h2o.search.layer_times import choice_s, decode_layer_s, prefill_layer_s
from flexgen_h2o.search.rates import FOUR_BITS
from flexgen_h2o.search.sizes import MemoryPlan


class OperationTimes:
    """Of a policy on a machine. Units and groups are those of the block's shape."""

    def __init__(self, model: CostModel, policy: Policy):
        self.model, self.policy, self.job = model, policy, model.job
        self.config, self.hardware = model.job.config, model.hardware
        self.plan = MemoryPlan(model.job, policy)
        self._page_bytes: dict[int, dict[Tier, float]] = {}

    def issue_s(self, kind: str) -> float:
        """The fixed time of products of a group, or of attention of a unit, in a layer."""
        lane = "compute" if self.job.joint else "issue"
        return self.hardware.operation_s(kind) / self._share(lane)

    # --- computation ---

    def compute_s(self, operation: Operation, shape: BlockShape) -> float:
        """Seconds that the compute device is busy with an operation."""
        return self._device_s(operation, shape) / self._share("compute")

    def _device_s(self, operation: Operation, shape: BlockShape) -> float:
        match operation:
            case Project(_, group):
                return self._product_s(self._tokens(group), self._qkv_elements)
            case Finish(layer, group):
                in_prefill, tokens = group.phase == "prefill", self._tokens(group)
                # After the last layer's attention in prefill, one token of a row goes on.
                last = in_prefill and layer == self.config.num_hidden_layers - 1
                products = self._product_s(group.count if last else tokens, self._layer_elements - self._qkv_elements)
                return products + (0.0 if in_prefill else decode_layer_s(self.job, self.hardware, tokens))
            case Choose(_, group):
                rows = group.count
                return self._product_s(rows, self.config.head_elements) + choice_s(self.job, self.hardware, rows)
            case Attend(step, _, unit, group):
                rows = _rows(shape.unit_rows[unit])
                if group.phase == "prefill":  # all that prefill does beside products
                    return prefill_layer_s(self.job, self.hardware, rows)
                return self._decode_attention_s(rows, step, self.job.device)
        return 0.0

    def host_attention(self, unit: int, step: int, shape: BlockShape) -> tuple[float, float]:
        """Seconds of a unit's attention on the CPU, and the bytes that it reads."""
        rows = _rows(shape.unit_rows[unit])
        seconds = self._decode_attention_s(rows, step, "cpu") + self.hardware.operation_s("attention")
        return seconds / self._share("host"), rows * sum(self._live_bytes(step))

    def _tokens(self, group: Group) -> int:
        return group.count * (self.job.prompt_len if group.phase == "prefill" else 1)

    def _product_s(self, rows: int, elements: int) -> float:
        precision = FOUR_BITS if self.policy.compress_weight else self.job.dtype
        return 2 * rows * elements / self.hardware.gemm_flops(precision, rows)

    def _decode_attention_s(self, rows: int, step: int, device: str) -> float:
        return sum(
            rows
            * nbytes
            / self.hardware.attention_bytes_s(FOUR_BITS if packed else self.job.dtype, self.config.head_dim, device)
            for nbytes, packed in zip(self._live_bytes(step), self.policy.cache_in_4_bits, strict=True)
            if nbytes
        )

    def _live_bytes(self, step: int) -> tuple[float, float]:
        """Keys and values of a row and layer that a step reads, of heavy region and ring."""
        heavy, recent = live_slots(self.job.heavy, self.job.recent, self.job.prompt_len + step)
        whole = self.job.kv_row_bytes(self.policy)
        return whole[0] * heavy / max(1, self.job.heavy), whole[1] * recent / self.job.recent

    @cached_property
    def _layer_elements(self) -> int:
        return self.config.layer_elements

    @property
    def _qkv_elements(self) -> int:
        return self.config.qkv_elements

    # --- bytes ---

    def page_bytes(self, page: int) -> dict[Tier, float]:
        """What has to be brought of a page of weights, by tier."""
        if page not in self._page_bytes:
            found: dict[Tier, float] = {"cpu": 0.0, "disk": 0.0}
            for parameter in small_first(self.config.page(page)):
                tier = self.plan.homes[full_name(page, parameter.name)]
                if tier == "disk" or (tier == "cpu" and not self.job.joint):
                    found[tier] += self.job.tensor_bytes(parameter.shape, self.policy.compress_weight)
            self._page_bytes[page] = found
        return self._page_bytes[page]

    def unit_bytes(self, unit: int, shape: BlockShape) -> float:
        """A unit's KV, whole."""
        return self.job.unit_bytes(self.policy, _rows(shape.unit_rows[unit]))

    def entry_bytes(self, unit: int, shape: BlockShape) -> float:
        """What a step on the device changes of a unit in host memory: the new key and value, and all scores."""
        rows = _rows(shape.unit_rows[unit])
        return 2 * self.job.hidden_bytes(rows, 1) + 4 * rows * self.config.num_key_value_heads * (self.job.slots + 1)

    def query_bytes(self, unit: int, shape: BlockShape) -> float:
        """What a step on the CPU needs of a unit: queries, keys and values."""
        return 3 * self.job.hidden_bytes(_rows(shape.unit_rows[unit]), 1)

    def output_bytes(self, unit: int, shape: BlockShape) -> float:
        """What it returns."""
        return self.job.hidden_bytes(_rows(shape.unit_rows[unit]), 1)

    def hidden_bytes(self, group: Group) -> float:
        """Hidden states of a prefill group."""
        return self.job.hidden_bytes(group.count, self.job.prompt_len)

    def moves(self, direction: str, nbytes: Mapping[Tier, float]) -> Iterator[tuple[str, float, float]]:
        """Lanes that a move takes, at once: lane, seconds, and bytes that pass host memory.

        Args:
            direction: "load" to the device, or "store" from it.
            nbytes: by the tier that they come from or go to.
        """
        hardware, loads = self.hardware, direction == "load"
        on_disk = nbytes.get("disk", 0.0)
        if on_disk:
            lane = "disk_read" if loads else "disk_write"
            rate = hardware.disk_read_bytes_s() if loads else hardware.disk_write_bytes_s()
            alone = on_disk / rate / self._share(lane)
            yield lane, alone, on_disk
            yield "disk", alone * hardware.disk_both_share, 0.0
            if self.job.joint:
                cost = hardware.disk_read_cpu_s_per_byte() if loads else hardware.disk_write_cpu_s_per_byte()
                yield "processor", on_disk * cost / hardware.cores / self._share("compute"), 0.0
        through_link = 0.0 if self.job.joint else on_disk + nbytes.get("cpu", 0.0)
        if through_link:
            lane = "h2d" if loads else "d2h"
            yield lane, through_link / hardware.link_bytes_s(lane, pinned=True) / self._share(lane), through_link

    def host_memory_s(self, nbytes: float) -> float:
        """Seconds of host memory's bandwidth."""
        return nbytes / self.hardware.read_bytes_s("cpu") / self._share("host_memory")

    def _share(self, lane: str) -> float:
        return self.model.lane_shares.get(lane, 1.0)


def _rows(rows: slice) -> int:
    return int(rows.stop - rows.start)
