"""Models with random weights in this process' memory, for measuring parts of a run without a prompt or a checkpoint."""

from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.engine.assemble import Runtime
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.profiling.timing import fill
from flexgen_h2o.weights.sources import DUMMY_STD

CPU = torch.device("cpu")


def random_model(config: ModelShape, dtype: torch.dtype, rows: int) -> Runtime:
    """A model of random weights in this machine's memory, for blocks of one sub-batch of `rows` rows; to be closed."""
    layout = best_layout(CPU, dtype, config.matrix_shapes())
    runtime = Runtime(config, dtype, Policy(gpu_batch_size=rows), Platform(CPU, matrix_layout=layout))
    shapes = config.shapes()
    try:
        runtime.load(
            lambda names: ((name, fill_parameter(name, torch.empty(shapes[name], dtype=dtype))) for name in names),
            lambda placed: None,
        )
    except BaseException:
        runtime.close()
        raise
    return runtime


def fill_parameter(name: str, parameter: Tensor) -> Tensor:
    """Fills a parameter with the distribution of dummy weights; quickly, since the numbers repeat."""
    return fill(parameter).mul_(DUMMY_STD).add_(1.0 if name.endswith("norm.weight") else 0.0)


def model_facts(config: ModelShape) -> dict[str, Any]:
    """What a record says of a model's shape."""
    return {"model": config.name, "layers": config.num_hidden_layers, "hidden_size": config.hidden_size}


def no_padding(rows: int) -> Padding:
    """Rows that all begin at column 0."""
    return Padding(torch.zeros(rows, dtype=torch.int64))


def fill_cache(engine: Engine, keys: Tensor, values: Tensor, attention_sums: Tensor) -> None:
    """Fills every layer of a one-unit KV cache as a prefill would that had computed these.

    Args:
        keys, values: [rows, heads, n, head_dim], the same for all layers.
        attention_sums: [rows, heads, n] float32; ignored where the rule does not accumulate.
    """
    engine.kv.begin([no_padding(len(keys))])
    for layer in range(engine.config.num_hidden_layers):
        buffer = engine.kv.empty(layer, 0)
        buffer.fill(keys, values, attention_sums if buffer.rule.accumulates else None)
        engine.kv.store_filled(layer, 0)
