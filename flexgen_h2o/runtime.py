"""Puts the parts of an engine together on one machine, within its budgets, and takes them apart again.

The same code makes the parts on a device without memory: what its ledger then counts is the prediction for a real run.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from flexgen_h2o.disk import RunFolder, WeightFolder
from flexgen_h2o.engine import Engine, unit_shapes
from flexgen_h2o.hidden import HiddenStore
from flexgen_h2o.kvcache.attention import PREFILL_LOGITS
from flexgen_h2o.kvcache.cache import KVCache
from flexgen_h2o.kvcache.eviction import EvictionRule
from flexgen_h2o.machine import resident_bytes, return_freed_memory, warm_up
from flexgen_h2o.model_config import ModelConfig
from flexgen_h2o.placement import achieved, place_weights, spread
from flexgen_h2o.platforms import Platform
from flexgen_h2o.policy import Policy
from flexgen_h2o.schedule import cut_block
from flexgen_h2o.tiers import Ledger, Tiers
from flexgen_h2o.transfer import LINKS, STAGING_BYTES, CudaTransfer, InlineTransfer, ThreadTransfer, Transfer
from flexgen_h2o.weights import Progress, TensorSource, WeightStore

BASELINE_LINE = "process baseline"
WORKSPACE_LINE = "workspace"
STAGING_LINE = "pinned staging"
STAGED_BYTES = 2 * STAGING_BYTES * len(LINKS)


@dataclass(frozen=True)
class RunSizes:
    """What sizes the buffers of a run.

    Attributes:
        rows: of the largest block.
        prompt_len: width of the widest block.
    """

    rule: EvictionRule
    rows: int
    prompt_len: int


class Runtime:
    """A model on a platform: its weights, and the engine for the sizes last asked for.

    Args:
        weight_folder: the cache folder of this model's weights; None if nothing lives on disk or nothing is written.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        policy: Policy,
        platform: Platform,
        weight_folder: WeightFolder | None = None,
    ):
        self.config = config
        self.dtype = dtype
        self.policy = policy
        self.platform = platform
        self.ledger = Ledger(platform.budgets, platform.joint)
        self._resources = ExitStack()
        self._engine_resources = ExitStack()
        self._sizes: RunSizes | None = None
        try:
            self._start(weight_folder)
        except BaseException:
            self.close()
            raise

    def _start(self, weight_folder: WeightFolder | None) -> None:
        return_freed_memory()
        warm_up(self.dtype)
        hold = self._resources.enter_context
        device, policy = self.platform.device, self.policy
        hold(self.ledger.held("cpu", BASELINE_LINE, resident_bytes()))
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            hold(self.ledger.held("gpu", BASELINE_LINE, total - free))
            hold(self.ledger.held("cpu", STAGING_LINE, STAGED_BYTES))
        self.tiers = Tiers(device, self.ledger)
        self.transfer = self._make_transfer()
        self._resources.callback(self.transfer.close)
        self.run_folder: RunFolder | None = None
        if self._uses_disk and self.platform.offload_dir is not None and device.type != "meta":
            self.run_folder = hold(RunFolder(self.platform.offload_dir))
        self.weights = WeightStore(
            self.config,
            self.dtype,
            place_weights(self.config, policy.percent.weights),
            self.tiers,
            self.transfer,
            policy.look_ahead,
            weight_folder,
            policy.pin_weight,
        )
        self._resources.callback(self.weights.close)

    def _make_transfer(self) -> Transfer:
        if self.platform.make_transfer is not None:
            return self.platform.make_transfer()
        if self.platform.device.type == "cuda":
            return CudaTransfer(self.platform.device)
        overlaps = self.policy.overlap and self.platform.device.type == "cpu" and self._reads_disk
        return ThreadTransfer() if overlaps else InlineTransfer()

    @property
    def _uses_disk(self) -> bool:
        """Whether KV or hidden states live on disk."""
        percent = self.policy.percent
        return percent.cache[2] > 0 or percent.hidden[2] > 0

    @property
    def _reads_disk(self) -> bool:
        return self._uses_disk or self.policy.percent.weights[2] > 0

    def load(self, source: TensorSource, progress: Progress) -> None:
        """Places all weights."""
        self.weights.load(source, progress)

    def engine(self, sizes: RunSizes) -> Engine:
        """The engine with buffers of these sizes; those of other sizes are given back first."""
        if sizes != self._sizes:
            self._engine_resources.close()
            self._sizes = None
            self._engine = self._make_engine(sizes)
            self._sizes = sizes
        return self._engine

    def _make_engine(self, sizes: RunSizes) -> Engine:
        config, policy, percent = self.config, self.policy, self.policy.percent
        self._engine_resources = resources = ExitStack()
        try:
            workspace = workspace_bytes(config, policy, self.dtype.itemsize, sizes)
            resources.enter_context(self.ledger.held("gpu", WORKSPACE_LINE, workspace))
            shapes = unit_shapes(config, sizes.rule, policy, sizes.rows)
            flat = spread(config.num_hidden_layers * len(shapes), percent.cache)
            homes = [flat[start : start + len(shapes)] for start in range(0, len(flat), len(shapes))]
            kv = KVCache(
                shapes,
                homes,
                sizes.rule,
                self.dtype,
                self.tiers,
                self.transfer,
                self.run_folder,
                policy.look_ahead,
                policy.cpu_cache_compute,
            )
            resources.callback(kv.close)
            hidden = HiddenStore(
                spread(len(shapes), percent.hidden),
                [shape.rows * sizes.prompt_len * config.hidden_size for shape in shapes],
                self.dtype,
                self.tiers,
                self.transfer,
                self.run_folder,
            )
            resources.callback(hidden.close)
        except BaseException:
            resources.close()
            raise
        return Engine(config, policy, self.weights, kv, hidden, self.transfer, self.platform.device)

    def achieved_percent(self) -> list[float]:
        """The six percentages as they are: whole tensors of weights, whole units of KV and hidden states."""
        shapes = self.config.shapes()
        weights = achieved((tier, torch.Size(shapes[name]).numel()) for name, tier in self.weights.homes.items())
        if self._sizes is None:
            return [*weights]
        units = unit_shapes(self.config, self._sizes.rule, self.policy, self._sizes.rows)
        sizes = [unit.nbytes(self.dtype.itemsize) for unit in units]
        homes = spread(self.config.num_hidden_layers * len(units), self.policy.percent.cache)
        cache = achieved(zip(homes, sizes * self.config.num_hidden_layers, strict=True))
        hidden = achieved(zip(spread(len(units), self.policy.percent.hidden), sizes, strict=True))
        return [*weights, *cache, *hidden]

    def close(self) -> None:
        """Gives everything back: memory, threads and files."""
        try:
            self._engine_resources.close()
        finally:
            self._resources.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def workspace_bytes(config: ModelConfig, policy: Policy, itemsize: int, sizes: RunSizes) -> int:
    """The most that temporaries of compute take on the device: of a layer, of attention, of the choice of tokens."""
    shape = cut_block(sizes.rows, policy.gpu_batch_size, policy.group_rows)
    unit_rows = max(rows.stop - rows.start for rows in shape.unit_rows)
    group_rows = max(group.rows.stop - group.rows.start for group in shape.decode_groups)
    hidden, prompt_len = config.hidden_size, sizes.prompt_len
    tokens = max(unit_rows * prompt_len, group_rows * policy.groups_in_flight)
    # The widest moment of the MLP: input, norm, inner state before and after activation, output.
    mlp = tokens * (2 * config.ffn_dim + 3 * hidden) * itemsize
    logits = min(PREFILL_LOGITS, unit_rows * config.num_attention_heads * prompt_len**2)
    # Input, norm, queries, keys, values, contiguous copies of two of them, output; logits in two precisions, weights.
    attention = tokens * 8 * hidden * itemsize + logits * (2 * itemsize + 8)
    choice = group_rows * config.vocab_size * (itemsize + 8)
    # Hidden states of groups that live elsewhere come and go.
    passing = (
        (1 + policy.look_ahead) * unit_rows * prompt_len * hidden * itemsize if policy.percent.hidden[0] < 1 else 0
    )
    return max(mlp, attention, choice) + passing


def predict(config: ModelConfig, dtype: torch.dtype, policy: Policy, platform: Platform, sizes: RunSizes) -> Ledger:
    """What a run would hold on each tier at its peak: all its buffers, made on a device without memory."""
    dry = Platform(torch.device("meta"), {}, platform.joint)
    with Runtime(config, dtype, policy, dry) as runtime:
        names = config.shapes()
        runtime.load(
            lambda wanted: ((n, torch.empty(names[n], device="meta", dtype=dtype)) for n in wanted), lambda _: None
        )
        runtime.engine(sizes)
        if platform.device.type == "cuda":
            runtime.ledger.charge("cpu", STAGING_LINE, STAGED_BYTES)
        return runtime.ledger
