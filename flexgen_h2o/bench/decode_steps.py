"""Decode steps of a whole model, from a KV cache that no prompt had to fill.

Three take turns in one process: this engine with H2O's entries, this engine with the full cache, and transformers with
its default cache, scaled dot product attention and the same shape. In every round each cache is filled anew, with
random numbers; a first step warms up and is not counted. Beside each stands how quick a step could be: the bytes of
weights, keys and values over the rate at which this process reads memory; and the same with the time that the products
with weights take by themselves, which with many rows is more than reading the weights.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.bench.models import CPU, fill_cache, fill_parameter, model_facts, random_model
from flexgen_h2o.engine.assemble import RunSizes, Runtime
from flexgen_h2o.engine.block import BlockStart, PromptBlock
from flexgen_h2o.engine.chooser import Greedy
from flexgen_h2o.kernels.decode import attention_path
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.machine.limits import resident_bytes, return_freed_memory, usable_memory
from flexgen_h2o.machine.platform import DTYPES
from flexgen_h2o.models.registry import facts_of
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.schedule import OUTER
from flexgen_h2o.profiling.timing import compute_threads, fill

ENGINES = ("h2o", "full", "transformers")
REGION_SHARE = 0.1  # heavy and recent entries, each of the whole sequence
READ_BYTES = 512 * 2**20  # in one measurement of the memory's rate


@dataclass(frozen=True)
class DecodeSizes:
    """What to measure.

    Attributes:
        config: shape of the model, which may have fewer layers than are usual.
        batch: rows. cache_len: tokens in the cache before the first step.
        steps: that are timed in a trial; their mean counts. trials: of each engine.
    """

    config: ModelShape
    batch: int
    cache_len: int
    steps: int
    dtype: str
    threads: int
    trials: int

    @property
    def kind(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def length(self) -> int:
        """Tokens of a row at the end: those of the cache, and one for each step, the first included."""
        return self.cache_len + 1 + self.steps

    def rules(self) -> dict[str, EvictionRule]:
        """Of this engine's two."""
        region = max(1, int(REGION_SHARE * self.length))
        return {"h2o": H2O(region, region), "full": Full(0, self.length)}

    def live_slots(self, name: str) -> int:
        """Entries of a row and head that a step of an engine attends to, half-way through the trial."""
        seen = self.cache_len + 1 + (self.steps + 1) // 2
        return min(seen, self.rules()["h2o"].slots) if name == "h2o" else seen

    def kv_bytes(self, slots: int) -> int:
        """Keys and values of all layers."""
        config = self.config
        return 2 * config.num_hidden_layers * self.batch * slots * config.hidden_size * self.kind.itemsize

    @property
    def weight_bytes(self) -> int:
        """All parameters once."""
        return sum(map(prod, self.config.shapes().values())) * self.kind.itemsize

    @property
    def needed_bytes(self) -> int:
        """Memory at the most: both models, one full cache, H2O's, and one layer's KV a few times."""
        caches = self.kv_bytes(self.length) + self.kv_bytes(self.rules()["h2o"].slots)
        passing = 4 * self.kv_bytes(self.length) // self.config.num_hidden_layers
        return resident_bytes() + 2 * self.weight_bytes + caches + passing + READ_BYTES


@dataclass(frozen=True)
class Rates:
    """What bounds a step.

    Attributes:
        products_s: of all of a step's products with weights.
    """

    weight_bytes: int
    read_bytes_s: float
    products_s: float


def measure(sizes: DecodeSizes, advance: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Measures on the CPU.

    Args:
        advance: called after each round; the first warms up.
    Returns: as `--json` prints it: `config`; `path`, how attention runs; `read_bytes_s` of memory; `products_s`, the
        products of a step by themselves; `ratios`: what a step of the full cache, and one of transformers, takes as a
        multiple of H2O's; and `engines`, by name, each with `step_s`, `tok_s`, `kv_bytes` read in a step, `memory_s` =
        (weight bytes + kv_bytes) / read_bytes_s, `limit_s` = products_s + kv_bytes / read_bytes_s, where that is more,
        `limit_share` = limit_s / step_s, and all trials' `seconds`.
    Raises UsageError if memory does not suffice.
    """
    if sizes.needed_bytes > usable_memory():
        raise UsageError(
            f"--batch {sizes.batch} with --cache-len {sizes.cache_len} takes {sizes.needed_bytes / GB:.1f} GB,"
            f" and {usable_memory() / GB:.1f} GB are free; lower one of them, or --layers"
        )
    return_freed_memory()
    with compute_threads(sizes.threads), random_model(sizes.config, sizes.kind, sizes.batch) as runtime:
        seconds = _take_turns(sizes, runtime, transformers_model(sizes.config, sizes.kind), advance)
        rates = Rates(
            runtime.weights.nbytes,
            READ_BYTES / statistics.median(seconds["reading"]),
            statistics.median(seconds["products"]),
        )
    engines = {name: _engine_row(sizes, name, seconds[name], rates) for name in ENGINES}
    settings = {name: value for name, value in vars(sizes).items() if name != "config"}
    return {
        "config": {
            **model_facts(sizes.config),
            **settings,
            "weight_bytes": rates.weight_bytes,
            "h2o_slots": sizes.rules()["h2o"].slots,
        },
        "path": attention_path(CPU, sizes.config.head_dim),
        "read_bytes_s": rates.read_bytes_s,
        "products_s": rates.products_s,
        "ratios": {name: engines[name]["step_s"] / engines["h2o"]["step_s"] for name in ENGINES[1:]},
        "engines": engines,
    }


def summary(result: Mapping[str, Any]) -> str:
    """The numbers as a Markdown table and a sentence."""
    config, ratios = result["config"], result["ratios"]
    lines = [
        f"decode of {config['batch']} rows from {config['cache_len']} tokens, {config['model']}'s shape with"
        f" {config['layers']} layers, {config['dtype']}, {config['threads']} threads; attention: {result['path']}",
        "| cache | step | tok/s | bytes / memory's rate | products + KV | reached |",
        "|---" * 6 + "|",
    ]
    titles = {"h2o": f"H2O, {config['h2o_slots']} entries", "full": "full", "transformers": "transformers"}
    for name, row in result["engines"].items():
        lines.append(
            f"| {titles[name]} | {row['step_s'] * 1e3:.0f} ms | {row['tok_s']:.0f} | {row['memory_s'] * 1e3:.0f} ms"
            f" | {row['limit_s'] * 1e3:.0f} ms | {row['limit_share']:.0%} |"
        )
    lines.append(
        f"a step with H2O is {ratios['full']:.2f} times as fast as with the full cache and"
        f" {ratios['transformers']:.2f} times as fast as transformers; memory is read at"
        f" {result['read_bytes_s'] / GB:.1f} GB/s"
    )
    return "\n".join(lines)


def transformers_model(config: ModelShape, dtype: torch.dtype) -> Any:
    """transformers' model of a shape, with random weights and its default attention for it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        settings = AutoConfig.for_model(**facts_of(config.family).config_values(config))
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.to_empty(device=CPU)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        fill_parameter(name, parameter.data)
    return model.eval()


def _take_turns(
    sizes: DecodeSizes, runtime: Runtime, model: Any, advance: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds in every trial: per step of each engine, and of reading memory and of products by themselves."""
    config = sizes.config
    shape = (sizes.batch, config.num_key_value_heads, sizes.cache_len, config.head_dim)
    keys, values = (fill(torch.empty(shape, dtype=sizes.kind)) for _ in range(2))
    sums = torch.rand(shape[:3])
    seconds: dict[str, list[float]] = {name: [] for name in (*ENGINES, "reading", "products")}
    for trial in range(sizes.trials + 1):
        # The full cache first: it is gone before transformers has its own.
        spent = {name: _engine_steps(sizes, runtime, name, keys, values, sums) for name in ("full", "h2o")}
        spent["transformers"] = _transformers_steps(sizes, model, keys, values)
        spent["reading"] = _seconds_of_reading()
        spent["products"] = _seconds_of_products(sizes, runtime)
        advance()
        if trial:
            for name, times in seconds.items():
                times.append(spent[name])
    return seconds


def _engine_steps(sizes: DecodeSizes, runtime: Runtime, name: str, keys: Tensor, values: Tensor, sums: Tensor) -> float:
    """Mean seconds of this engine's steps from a cache filled with these."""
    engine = runtime.engine(RunSizes(sizes.rules()[name], sizes.batch, prompt_len=1))
    fill_cache(engine, keys, values, sums)
    rows = sizes.batch
    block = PromptBlock(torch.zeros(rows, sizes.cache_len, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    start = BlockStart(1, torch.zeros(rows, 1, dtype=torch.int64))
    step_s = engine.run(block, sizes.steps + 2, Greedy(), start).step_s
    return statistics.fmean(step_s[1:])


@torch.inference_mode()
def _transformers_steps(sizes: DecodeSizes, model: Any, keys: Tensor, values: Tensor) -> float:
    """The same of transformers, as its generate() makes them for a greedy choice."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in range(sizes.config.num_hidden_layers):
        cache.update(keys, values, layer)
    ids = torch.zeros(sizes.batch, 1, dtype=torch.int64)
    seconds = []
    for _ in range(sizes.steps + 1):
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for the cache
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        ids = logits[:, -1].float().argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - started)
    return statistics.fmean(seconds[1:])


def _seconds_of_reading() -> float:
    """What it takes to sum READ_BYTES of memory."""
    numbers = fill(torch.empty(READ_BYTES // 4))
    numbers.sum()
    started = time.perf_counter()
    numbers.sum()
    return time.perf_counter() - started


@torch.inference_mode()
def _seconds_of_products(sizes: DecodeSizes, runtime: Runtime) -> float:
    """All products of a step with weights, and nothing else."""
    calls = []
    for page in (*range(sizes.config.num_hidden_layers), OUTER):
        for matrix in runtime.weights.page(page).matrices.values():
            out, inputs = matrix.shape
            x = fill(torch.empty(sizes.batch, inputs, dtype=sizes.kind))
            calls.append((matrix, x, torch.empty(sizes.batch, out, dtype=sizes.kind)))
    started = time.perf_counter()
    for matrix, x, output in calls:
        matrix.product(x, None, output)
    return time.perf_counter() - started


def _engine_row(sizes: DecodeSizes, name: str, seconds: list[float], rates: Rates) -> dict[str, Any]:
    """One of `engines`."""
    step_s = statistics.median(seconds)
    kv_bytes = sizes.kv_bytes(sizes.live_slots(name))
    memory_s = (rates.weight_bytes + kv_bytes) / rates.read_bytes_s
    limit_s = max(memory_s, rates.products_s + kv_bytes / rates.read_bytes_s)
    return {
        "step_s": step_s,
        "tok_s": sizes.batch / step_s,
        "kv_bytes": kv_bytes,
        "memory_s": memory_s,
        "limit_s": limit_s,
        "limit_share": limit_s / step_s,
        "seconds": seconds,
    }
