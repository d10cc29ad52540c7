"""Puts the parts of an engine together on one machine, within its budgets, and takes them apart again.

The same code makes the parts on a device without memory: what its ledger then counts is the prediction for a real run.
"""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.engine.hidden import HiddenStore
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.kernels.matrices.layout import MatrixLayout
from flexgen_h2o.kvcache.attention import prefill_attention_bytes
from flexgen_h2o.kvcache.cache import KVCache
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.machine.limits import process_baseline
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.run_folder import RunFolder
from flexgen_h2o.memory.tiers import Ledger, Tiers
from flexgen_h2o.memory.transfer import CudaTransfer, InlineTransfer, ThreadTransfer, Transfer
from flexgen_h2o.memory.workspace import ALIGNMENT, Workspace
from flexgen_h2o.models.base import TensorSource
from flexgen_h2o.plan import footprint
from flexgen_h2o.plan.footprint import GPU_PREFILL_LOGITS, STAGED_BYTES
from flexgen_h2o.plan.kv_shape import unit_shapes
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import achieved, place_weights, spread
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import cut_block
from flexgen_h2o.plan.timeline import Timeline
from flexgen_h2o.weights.files import WeightFolder
from flexgen_h2o.weights.store import Progress, WeightStore


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
        config: ModelShape,
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
        self.timeline = Timeline(platform.keeps_spans)
        self.reserved_before = 0  # bytes of the GPU that torch's allocator held already
        self._resources = ExitStack()
        self._engine_resources = ExitStack()
        self._sizes: RunSizes | None = None
        self.transfer = self._make_transfer()
        try:
            self._start(weight_folder)
        except BaseException:
            self.close()
            raise

    def _start(self, weight_folder: WeightFolder | None) -> None:
        baseline = self.platform.baseline
        if baseline is None:
            baseline = process_baseline(self.dtype)
        hold = self._resources.enter_context
        device, policy = self.platform.device, self.policy
        hold(self.ledger.held("cpu", Line.BASELINE, baseline))
        hold(self.ledger.held("gpu", Line.BASELINE, self.platform.gpu_baseline))
        if device.type == "cuda":
            hold(self.ledger.held("cpu", Line.STAGING, STAGED_BYTES))
            self.reserved_before = torch.cuda.memory_reserved(device)
            others = self.platform.gpu_baseline - self.reserved_before
            hold(_bound_on_gpu(self.platform.budgets.get("gpu"), others))
        self.tiers = Tiers(device, self.ledger)
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
            self.platform.matrix_layout,
            weight_folder,
            policy.pin_weight,
        )
        self._resources.callback(self.weights.close)

    def _make_transfer(self) -> Transfer:
        if self.platform.make_transfer is not None:
            return self.platform.make_transfer()
        if self.platform.device.type == "cuda":
            return CudaTransfer(self.platform.device, timeline=self.timeline)
        overlaps = self.policy.overlap and self.platform.device.type == "cpu" and self._reads_disk
        return ThreadTransfer(timeline=self.timeline) if overlaps else InlineTransfer(self.timeline)

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
            passing = passing_bytes(config, policy, self.dtype.itemsize, sizes, self.platform.matrix_layout)
            resources.enter_context(self.ledger.held("gpu", Line.TEMPORARIES, passing))
            workspaces = [self._make_workspace(resources, sizes) for _ in range(policy.groups_in_flight)]
            shapes = unit_shapes(config, sizes.rule.sizes, policy, sizes.rows)
            if not self.platform.joint:
                unit = shapes[0]
                host_passing = footprint.host_passing_bytes(
                    unit.rows, unit.heads, unit.head_dim, unit.slots, self.dtype.itemsize
                )
                resources.enter_context(self.ledger.held("cpu", Line.TEMPORARIES, host_passing))
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
        return Engine(config, policy, self.weights, kv, hidden, workspaces, self.transfer, self.platform.device)

    def _make_workspace(self, resources: ExitStack, sizes: RunSizes) -> Workspace:
        logits = None if self.platform.joint else GPU_PREFILL_LOGITS
        nbytes = workspace_bytes(self.config, self.policy, self.dtype.itemsize, sizes, logits)
        stored = self.tiers.allocate("gpu", Line.WORKSPACE, (nbytes,), torch.uint8, Line.WORKSPACE)
        resources.callback(self.tiers.release, stored, Line.WORKSPACE)
        workspace = Workspace(stored.resident(frozenset(("gpu",))), logits)
        resources.callback(workspace.close)
        return workspace

    def achieved_percent(self) -> list[float]:
        """The six percentages as they are: whole tensors of weights, whole units of KV and hidden states."""
        weights = achieved(self.weights.sizes())
        if self._sizes is None:
            return [*weights]
        cache = achieved(self._engine.kv.sizes())
        units = unit_shapes(self.config, self._sizes.rule.sizes, self.policy, self._sizes.rows)
        rows = [unit.rows for unit in units]
        hidden = achieved(zip(spread(len(units), self.policy.percent.hidden), rows, strict=True))
        return [*weights, *cache, *hidden]

    def close(self) -> None:
        """Gives everything back: threads, memory and files. Copies end before what they read or write is gone."""
        with ExitStack() as last_to_first:
            last_to_first.push(self._resources)
            last_to_first.push(self._engine_resources)
            last_to_first.callback(self.transfer.close)
            with contextlib.suppress(Exception):  # whoever waited for a copy that failed has had its error
                self.transfer.drain()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _bound_on_gpu(budget: int | None, others: int) -> Iterator[None]:
    """Has torch's allocator keep to what a budget leaves beside what others than it have taken."""
    total = torch.cuda.mem_get_info()[1]
    if budget is None or budget >= total:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(max(0, budget - others) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def workspace_bytes(
    config: ModelShape, policy: Policy, itemsize: int, sizes: RunSizes, prefill_logits: int | None = None
) -> int:
    """The most that compute takes of one workspace: for a layer in prefill or decode, or for the choice of tokens."""
    shape = cut_block(sizes.rows, policy.gpu_batch_size, policy.group_rows)
    unit_rows = max(rows.stop - rows.start for rows in shape.unit_rows)
    group_rows = max(group.rows.stop - group.rows.start for group in shape.decode_groups)
    attention = prefill_attention_bytes(
        unit_rows, config.num_attention_heads, sizes.prompt_len, config.head_dim, itemsize, prefill_logits
    )
    needs = footprint.workspace_needs(config, itemsize, unit_rows * sizes.prompt_len, group_rows, attention)
    return int(max(needs)) + 32 * ALIGNMENT


def passing_bytes(config: ModelShape, policy: Policy, itemsize: int, sizes: RunSizes, layout: MatrixLayout) -> int:
    """What compute allocates and frees beside the workspace: hidden states that come and go, and what fills the KV."""
    unit_rows = min(policy.gpu_batch_size, sizes.rows)
    group_rows = max(unit_rows, min(policy.group_rows, sizes.rows))
    products = max(
        layout.result_bytes(max(unit_rows * sizes.prompt_len, group_rows), config.intermediate_size, itemsize),
        layout.result_bytes(group_rows, config.vocab_size, itemsize),
    )
    slots = sizes.rule.sizes
    return int(
        footprint.passing_bytes(
            *(config, itemsize, unit_rows, sizes.prompt_len, slots, products),
            *(policy.travelling_hidden, policy.compress_cache),
        )
    )


def predict(config: ModelShape, dtype: torch.dtype, policy: Policy, platform: Platform, sizes: RunSizes) -> Ledger:
    """What a run would hold on each tier at its peak: all its buffers, made on a device without memory."""
    dry = replace(platform, device=torch.device("meta"), budgets={}, make_transfer=None)
    with Runtime(config, dtype, policy, dry) as runtime:
        names = config.shapes()
        runtime.load(
            lambda wanted: ((n, torch.empty(names[n], device="meta", dtype=dtype)) for n in wanted), lambda _: None
        )
        runtime.engine(sizes)
        if platform.device.type == "cuda":
            runtime.ledger.charge("cpu", Line.STAGING, STAGED_BYTES)
        return runtime.ledger
