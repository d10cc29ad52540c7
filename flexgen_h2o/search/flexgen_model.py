"""How long FlexGen's and H2O's own engines took, from the constants that FlexGen's authors fitted on a T4.

The formulas are those of FlexGen (Sheng et al. 2023, arXiv 2303.06865), appendix A.3, and of the repository's
experimental/cost_model.py, where a decode step is the transfer of weights plus the largest of the rest: that engine
waits for everything after every sub-batch. Prefill is the largest of all. Everything that is computed, on GPU or CPU,
takes turns in one lane.

To the fitted constants three additions can be made. Without them, rows that the authors' own model did not aim at (all
weights on the GPU, 4 bits, KV on disk) are missed by up to a factor of five:

    GPU memory and launches   products of a sub-batch take at least the time to read the weights from GPU memory, and
                              every layer of every sub-batch a fixed time more
    4-bit values              brought to 16 bits at a rate: KV once a step, weights once per sub-batch
    effective disk rate       in place of the fitted one
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.placement import Percent, Shares
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import Split
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.sizes import Job, MemoryPlan

ADDITIONS = ("flexgen/effective_disk_read", "flexgen/gpu_memory", "flexgen/launch", "flexgen/dequantise")
ATTENTION_MATRICES, MLP_MATRICES = 4, 2  # equal ones, each placed by itself
HALF = 2  # bytes


@dataclass(frozen=True)
class FlexgenRun:
    """A run of that engine.

    Attributes:
        percent: as asked for; the engine's own rule decides what becomes of it.
        kept_entries: of H2O's cache; None for the full cache.
        decode_context: entries that a decode step attends to; None for as many as the prompt has, which is what its
            authors timed: the first step, multiplied out.
    """

    config: ModelShape
    prompt_len: int
    gen_len: int
    gpu_batch_size: int
    num_gpu_batches: float
    percent: Percent
    cpu_attention: bool = False
    compress_weight: bool = False
    compress_cache: bool = False
    kept_entries: int | None = None
    decode_context: float | None = None

    @property
    def rows(self) -> float:
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def context(self) -> float:
        """Entries that a decode step attends to."""
        if self.kept_entries is not None:
            return self.kept_entries
        return self.prompt_len if self.decode_context is None else self.decode_context

    @property
    def weights(self) -> int:
        """Elements of the layers' matrices: 12 h^2 a layer."""
        config = self.config
        return config.num_hidden_layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)

    @property
    def weight_bytes(self) -> float:
        hidden = self.config.hidden_size
        return self.weights * (entry_bytes(hidden) / hidden if self.compress_weight else HALF)

    def cache_values(self, entries: float) -> float:
        """Values of so many entries of all rows: a key and a value per layer."""
        return 2 * self.config.num_hidden_layers * self.config.hidden_size * self.rows * entries

    def cache_bytes(self, entries: float) -> float:
        """What they take at home."""
        dim = self.config.head_dim
        return self.cache_values(entries) * (entry_bytes(dim) / dim if self.compress_cache else HALF)

    def hidden_bytes(self, tokens: int) -> float:
        """Hidden states that go home and come back once a layer."""
        return self.config.num_hidden_layers * self.config.hidden_size * self.rows * tokens * HALF


@dataclass(frozen=True)
class FlexgenTimes:
    """Seconds of a run.

    Attributes:
        prefill, step: by lane; a decode step's. prefill_s, decode_s: of the phases.
    """

    prefill: Mapping[str, float]
    step: Mapping[str, float]
    prefill_s: float
    decode_s: float
    tokens: float

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens over prefill and decode."""
        return self.tokens / (self.prefill_s + self.decode_s)


def flexgen_times(run: FlexgenRun, hardware: Hardware, additions: bool = True) -> FlexgenTimes:
    """What the engine would take. Raises UsageError if the hardware lacks a constant."""
    rates = _Rates(hardware, additions)
    homes = whole_tensor_shares(run.percent.weights), run.percent.cache, run.percent.hidden
    prefill, step = _prefill(run, homes, rates), _decode_step(run, homes, rates)
    prefill_s = combine(prefill, is_prefill=True)
    decode_s = (run.gen_len - 1) * combine(step, is_prefill=False)
    return FlexgenTimes(prefill, step, prefill_s, decode_s, run.rows * run.gen_len)


def combine(lanes: Mapping[str, float], is_prefill: bool) -> float:
    """Seconds of a phase from those of its lanes: the largest; in decode, what goes to the GPU comes first."""
    if is_prefill:
        return max(lanes.values())
    return lanes["h2d"] + max(seconds for lane, seconds in lanes.items() if lane != "h2d")


def whole_tensor_shares(shares: Shares) -> Shares:
    """What FlexGen makes of asked shares of weights: it gives each matrix whole to disk, CPU or GPU, in this order,
    by where its middle falls among the attention's, or the MLP's, matrices.

    So 20 80 puts a twelfth on the GPU (one matrix in four of the attention's third), and 10 90 nothing.
    """
    ascending = (shares[2], shares[2] + shares[1])  # where the disk's and the CPU's parts end
    found = [0.0, 0.0, 0.0]
    for matrices, share_of_layer in ((ATTENTION_MATRICES, 1 / 3), (MLP_MATRICES, 2 / 3)):
        for index in range(matrices):
            middle = (index + 0.5) / matrices
            tier = 2 if middle < ascending[0] else 1 if middle < ascending[1] else 0
            found[tier] += share_of_layer / matrices
    return found[0], found[1], found[2]


class _Rates:
    """The constants, by the names that they have behind `flexgen/`."""

    def __init__(self, hardware: Hardware, additions: bool):
        self._hardware = hardware
        self.additions = additions

    def __getitem__(self, name: str) -> float:
        return self._hardware.rate(f"flexgen/{name}").value

    @property
    def disk_read(self) -> float:
        return self["effective_disk_read" if self.additions else "disk_read"]

    def dequantised(self, values: float) -> float:
        """Seconds to bring 4-bit values to 16 bits; the fitted constants know of none."""
        return values / self["dequantise"] if self.additions else 0.0

    def products(self, phase: str, weights: int, tokens: float, batches: float, layers: int) -> float:
        """Seconds of the products of `batches` sub-batches, of `tokens` in all, with all weights."""
        seconds = 2 * weights * tokens / self[f"gemm/{phase}"]
        if not self.additions:
            return seconds
        reading = batches * weights * HALF / self["gpu_memory"]
        return max(seconds, reading) + batches * layers * self["launch"]


Homes = Sequence[Shares]  # of weights, cache and hidden states


def _prefill(run: FlexgenRun, homes: Homes, rates: _Rates) -> dict[str, float]:
    (_, weights_cpu, weights_disk), (_, cache_cpu, cache_disk), (_, hidden_cpu, hidden_disk) = homes
    config = run.config
    cache = run.cache_bytes(run.prompt_len if run.kept_entries is None else run.kept_entries)
    hidden = run.hidden_bytes(run.prompt_len)
    layers, batches = config.num_hidden_layers, run.num_gpu_batches
    attention = 4 * run.rows * run.prompt_len**2 * config.hidden_size * layers
    return {
        "h2d": ((weights_cpu + weights_disk) * run.weight_bytes + (hidden_cpu + hidden_disk) * hidden) / rates["h2d"],
        "d2h": (cache_cpu + cache_disk) * cache / rates["d2h/cache"]
        + (hidden_cpu + hidden_disk) * hidden / rates["d2h/hidden"],
        "disk_read": (weights_disk * run.weight_bytes + hidden_disk * hidden) / rates.disk_read,
        "disk_write": cache_disk * cache / rates["disk_write/cache"]
        + hidden_disk * hidden / rates["disk_write/hidden"],
        "compute": rates.products("prefill", run.weights, run.rows * run.prompt_len, batches, layers)
        + attention / rates["attention/prefill"]
        + rates.dequantised(run.weights * batches if run.compress_weight else 0),
    }


def _decode_step(run: FlexgenRun, homes: Homes, rates: _Rates) -> dict[str, float]:
    (_, weights_cpu, weights_disk), (cache_gpu, cache_cpu, cache_disk), (_, hidden_cpu, hidden_disk) = homes
    layers, batches = run.config.num_hidden_layers, run.num_gpu_batches
    cache, entry, hidden = run.cache_bytes(run.context), run.cache_bytes(1), run.hidden_bytes(1)
    # With attention on the CPU only hidden states cross the link.
    crossing = 0.0 if run.cpu_attention else cache_cpu + cache_disk
    on_cpu = cache_cpu + cache_disk if run.cpu_attention else 0.0
    attention = 2 * run.cache_values(run.context)
    four_bit = (run.weights * batches if run.compress_weight else 0) + (
        run.cache_values(run.context) if run.compress_cache else 0
    )
    return {
        "h2d": (
            (weights_cpu + weights_disk) * run.weight_bytes + crossing * cache + (hidden_cpu + hidden_disk) * hidden
        )
        / rates["h2d"],
        "d2h": crossing * entry / rates["d2h/cache"] + (hidden_cpu + hidden_disk) * hidden / rates["d2h/hidden"],
        "disk_read": (weights_disk * run.weight_bytes + cache_disk * cache + hidden_disk * hidden) / rates.disk_read,
        "disk_write": cache_disk * entry / rates["disk_write/cache"]
        + hidden_disk * hidden / rates["disk_write/hidden"],
        "compute": rates.products("decode", run.weights, run.rows, batches, layers)
        + attention * on_cpu / rates["attention/decode/cpu"]
        + attention * (1 - on_cpu) / rates["attention/decode/cuda"]
        + rates.dequantised(four_bit),
    }


@dataclass(frozen=True)
class FlexgenCost:
    """The same as cost_model.CostModel, of FlexGen's engine: to search policies for it, or to predict them.

    Memory is still counted as this engine holds it.
    """

    job: Job
    hardware: Hardware

    def phases(
        self, policy: Policy, split: Split, units: float, group_rows: float | None, groups: float
    ) -> dict[str, dict[str, float]]:
        """Seconds of prefill, and of one decode step; that engine computes sub-batch by sub-batch, not in groups."""
        return _in_turns(self._lanes(policy, (split.weights, split.cache, split.hidden), units))

    def achieved(self, plan: MemoryPlan) -> dict[str, dict[str, float]]:
        """The phases of a policy with the homes that this engine's rule for whole tensors gives."""
        return _in_turns(self.lanes(plan.policy))

    def lanes(self, policy: Policy) -> dict[str, dict[str, float]]:
        """Seconds of prefill, and of one decode step, by lane."""
        percent = policy.percent
        homes = (whole_tensor_shares(percent.weights), percent.cache, percent.hidden)
        return self._lanes(policy, homes, policy.num_gpu_batches)

    def seconds(self, lanes: Mapping[str, float], overlap: bool) -> float:
        """Seconds of a phase."""
        return max(lanes.values())

    def _lanes(self, policy: Policy, homes: Homes, units: float) -> dict[str, dict[str, float]]:
        job, rates = self.job, _Rates(self.hardware, additions=True)
        length = job.prompt_len + job.gen_len
        run = FlexgenRun(
            job.config,
            job.prompt_len,
            job.gen_len,
            policy.gpu_batch_size,
            units,
            policy.percent,
            policy.cpu_cache_compute,
            policy.compress_weight,
            policy.compress_cache,
            None if job.slots == length else job.slots,
            (job.prompt_len + length) / 2,  # what a step of the full cache attends to on average
        )
        return {"prefill": _prefill(run, homes, rates), "decode": _decode_step(run, homes, rates)}


def _in_turns(lanes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The same, so that a decode step too takes what the largest takes."""
    step = lanes["decode"]
    return {
        "prefill": lanes["prefill"],
        "decode": {f"h2d, then {lane}": step["h2d"] + seconds for lane, seconds in step.items() if lane != "h2d"},
    }
