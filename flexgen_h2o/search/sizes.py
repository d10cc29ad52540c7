"""How many bytes a run holds on each tier, without making its buffers: the ledger of engine/assemble.py in closed form.

All buffers of a run are made before its first block and given back after its last, so that prefill and decode have the
same peak; what only one of them uses is in the larger of the two, the workspace. Sizes are those of FlexGen (Sheng et
al. 2023, arXiv 2303.06865), section 4.2 and appendix A.3, with this engine's buffers in place of its own, and for H2O
(Zhang et al. 2023, arXiv 2306.14048) a KV cache of constant size: heavy + recent entries a row, whatever is generated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from flexgen_h2o.plan import footprint
from flexgen_h2o.plan.footprint import DECODED_BYTES, GPU_PREFILL_LOGITS, PREFILL_LOGITS, RESULT_BYTES, STAGED_BYTES
from flexgen_h2o.plan.kv_shape import UnitShape, working_bytes
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import ITEMSIZES, Line
from flexgen_h2o.plan.placement import TIERS, Shares, Tier, place_weights, reachable, spread_counts
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import places
from flexgen_h2o.plan.weight_plan import PlacedWeights, WeightForm, place

LOGITS = {"cpu": PREFILL_LOGITS, "cuda": GPU_PREFILL_LOGITS}
DEFAULT_BASELINE = 500 * 10**6  # interpreter and libraries; measured by the run itself

Lines = dict[str, float]


@dataclass(frozen=True)
class Job:
    """What is planned for: a model, lengths, the size of the KV buffer, and the device that computes.

    Attributes:
        heavy, recent: entries of the KV buffer per row and head; their sum is at most prompt_len + gen_len.
        device: cuda or cpu. On a CPU the gpu and cpu tiers are one memory.
        baseline, gpu_baseline: bytes that are taken before there is a model.
    """

    config: ModelShape
    prompt_len: int
    gen_len: int
    heavy: int
    recent: int
    dtype: str = "float16"
    device: str = "cuda"
    baseline: int = DEFAULT_BASELINE
    gpu_baseline: int = 0

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def joint(self) -> bool:
        """Whether gpu and cpu are one memory."""
        return self.device == "cpu"

    def account(self, tier: Tier) -> Tier:
        """The tier whose budget pays for a tier."""
        return "cpu" if self.joint and tier == "gpu" else tier

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that have a budget of their own."""
        return ("cpu", "disk") if self.joint else TIERS

    def tensor_bytes(self, shape: tuple[int, ...], compressed: bool) -> int:
        """A parameter at home."""
        return WeightForm(self.config, self.itemsize, compressed).nbytes(shape)

    def layer_bytes(self, compressed: bool) -> int:
        """The parameters of a decoder layer."""
        return sum(self.tensor_bytes(shape, compressed) for shape in self.config.layer_shapes().values())

    def outer_bytes(self, compressed: bool) -> int:
        """The parameters outside the layers."""
        return sum(self.tensor_bytes(shape, compressed) for shape in self.config.outer_shapes().values())

    def kv_row_bytes(self, policy: Policy) -> tuple[int, int]:
        """Keys and values of a row in one layer: of its heavy region, and of its ring."""
        heavy, ring = self._row(policy).region_bytes(self.itemsize)
        return 2 * heavy, 2 * ring

    def unit_bytes(self, policy: Policy, rows: float) -> float:
        """The KV of so many rows in one layer, with scores, columns and losers."""
        row = self._row(policy)
        return rows * (row.kv_bytes(self.itemsize) + row.state_bytes)

    def _row(self, policy: Policy) -> UnitShape:
        """The KV of one row in one layer."""
        config = self.config
        sizes = (config.num_key_value_heads, config.head_dim, self.heavy, self.recent)
        return UnitShape(1, *sizes, *policy.cache_in_4_bits)

    def hidden_bytes(self, rows: float, tokens: float) -> float:
        """Hidden states of so many tokens of each row."""
        return rows * tokens * self.config.hidden_size * self.itemsize

    def decoding_bytes(self, policy: Policy) -> int:
        """The buffer in which 4-bit weights are brought to the compute precision."""
        if not policy.compress_weight:
            return 0
        if self.device == "cuda":
            return DECODED_BYTES[self.device]
        return footprint.restored_bytes(self.config.matrix_shapes(), self.itemsize)

    def host_bytes(self, policy: Policy) -> float:
        """What host memory holds beside tensors that have their home there."""
        return sum(self.host_lines(policy).values())

    def host_lines(self, policy: Policy) -> dict[str, float]:
        """The same by line."""
        if self.joint:
            return {Line.BASELINE: self.baseline}
        config, rows = self.config, policy.gpu_batch_size
        passing = footprint.host_passing_bytes(
            rows, config.num_key_value_heads, config.head_dim, self.slots, self.itemsize
        )
        return {Line.BASELINE: self.baseline, Line.STAGING: STAGED_BYTES, Line.TEMPORARIES: passing}


def workspace_bytes(job: Job, policy: Policy, group_rows: float) -> float:
    """What compute takes of one workspace: in a layer of prefill or of decode, or for the choice of tokens."""
    return max(workspace_needs(job, policy, group_rows))


def workspace_needs(job: Job, policy: Policy, group_rows: float) -> tuple[float, ...]:
    """What takes a workspace, one after the other; each is linear in the rows of a decode group."""
    config, rows, size = job.config, policy.gpu_batch_size, job.itemsize
    attention = footprint.prefill_attention_bytes(
        rows, config.num_attention_heads, job.prompt_len, config.head_dim, size, LOGITS[job.device]
    )
    return footprint.workspace_needs(config, size, rows * job.prompt_len, group_rows, attention)


def passing_bytes(job: Job, policy: Policy, group_rows: float) -> float:
    """What compute allocates and frees beside the workspace."""
    products = max(RESULT_BYTES, group_rows * job.config.intermediate_size * job.itemsize) if job.joint else 0
    return footprint.passing_bytes(
        *(job.config, job.itemsize, policy.gpu_batch_size, job.prompt_len, (job.heavy, job.recent)),
        *(min(products, 2 * RESULT_BYTES), policy.travelling_hidden, policy.compress_cache),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Where the tensors and units of a policy come to lie, and the bytes of everything."""

    job: Job
    policy: Policy

    @cached_property
    def homes(self) -> Mapping[str, Tier]:
        """Of every parameter."""
        return place_weights(self.job.config, self.policy.percent.weights)

    @property
    def layer_weights(self) -> Mapping[Tier, float]:
        """Bytes of all decoder layers' parameters by tier."""
        return self._placed.layers

    @property
    def outer_weights(self) -> Mapping[Tier, float]:
        """Bytes of the parameters outside the layers by tier."""
        return self._placed.outer

    @cached_property
    def _placed(self) -> PlacedWeights:
        job, policy = self.job, self.policy
        form = WeightForm(job.config, job.itemsize, policy.compress_weight)
        return place(form, policy.percent.weights, places(policy.look_ahead), job.joint)

    @cached_property
    def cache_shares(self) -> Shares:
        """Shares of KV units by tier, as achieved."""
        units = self.job.config.num_hidden_layers * self.policy.num_gpu_batches
        return _achieved(units, self.policy.percent.cache)

    @cached_property
    def hidden_shares(self) -> Shares:
        """Shares of the hidden states of sub-batches by tier, as achieved."""
        return _achieved(self.policy.num_gpu_batches, self.policy.percent.hidden)

    @cached_property
    def achieved_percent(self) -> list[float]:
        """The six percentages as they are."""
        weights = {tier: self.layer_weights[tier] + self.outer_weights[tier] for tier in TIERS}
        total = sum(weights.values())
        shares = (weights["gpu"] / total, weights["cpu"] / total)
        return [100 * share for part in (shares, self.cache_shares[:2], self.hidden_shares[:2]) for share in part]

    @cached_property
    def lines(self) -> dict[Tier, Lines]:
        """Bytes by tier and line. Where gpu and cpu are one memory, both are under cpu."""
        job, policy = self.job, self.policy
        found: dict[Tier, Lines] = {tier: {} for tier in TIERS}
        self._add(found, "gpu", Line.BASELINE, job.gpu_baseline)
        for line, nbytes in job.host_lines(policy).items():
            self._add(found, "cpu", line, nbytes)
        self._add(
            found, "gpu", Line.WORKSPACE, policy.groups_in_flight * workspace_bytes(job, policy, policy.group_rows)
        )
        self._add(found, "gpu", Line.DECODING, job.decoding_bytes(policy))
        self._add(found, "gpu", Line.TEMPORARIES, passing_bytes(job, policy, policy.group_rows))
        unit = job.unit_bytes(policy, policy.gpu_batch_size)
        hidden = job.hidden_bytes(policy.block_rows, job.prompt_len)
        whole_cache = job.config.num_hidden_layers * policy.num_gpu_batches * unit
        for index, tier in enumerate(TIERS):
            self._add(found, tier, Line.WEIGHTS, self.layer_weights[tier] + self.outer_weights[tier])
            self._add(found, tier, Line.KV_CACHE, self.cache_shares[index] * whole_cache)
            self._add(found, tier, Line.HIDDEN_STATES, self.hidden_shares[index] * hidden)
        self._add(found, "gpu", Line.READ_BUFFERS, self._placed.buffers)
        if self._out_of_reach(self.cache_shares):
            working = working_bytes(int(unit), policy.look_ahead, job.joint)
            self._add(found, "gpu", Line.WORKING_BUFFERS, working)
        return found

    def peaks(self) -> dict[Tier, float]:
        """The most bytes on each tier."""
        return {tier: sum(lines.values()) for tier, lines in self.lines.items()}

    def _add(self, found: dict[Tier, Lines], tier: Tier, line: str, nbytes: float) -> None:
        if nbytes:
            lines = found[self.job.account(tier)]
            lines[line] = lines.get(line, 0) + nbytes

    def _out_of_reach(self, shares: Shares) -> bool:
        return any(
            share > 0 for tier, share in zip(TIERS, shares, strict=True) if tier not in reachable(self.job.joint)
        )


def _achieved(count: int, asked: Shares) -> Shares:
    """Shares of `count` equal things, as placement.spread() gives them to the tiers."""
    on_gpu, on_cpu = spread_counts(count, asked)
    return on_gpu / count, on_cpu / count, (count - on_gpu - on_cpu) / count
