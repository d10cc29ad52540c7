"""Pictures of a search; matplotlib is needed for nothing else, and comes with the extra "plots"."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.plan.placement import TIERS
from flexgen_h2o.search.cost_model import TimeModel
from flexgen_h2o.search.predict import Budgets, Found
from flexgen_h2o.search.search import Choices, search

POINTS = 8  # block sizes on the way to the largest


def plot(
    path: Path,
    models: Mapping[str, TimeModel],
    budgets: Budgets,
    choices: Choices,
    found: Mapping[str, Found | UsageError],
) -> None:
    """Throughput against the rows of a block, and memory by tier as stacked bars.

    Args:
        models, found: by what is kept of the cache.
    Raises UsageError if matplotlib is not there.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install flexgen_h2o[plots]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = {name: result for name, result in found.items() if isinstance(result, Found)}
    figure, (rows_axis, memory_axis) = pyplot.subplots(1, 2, figsize=(12, 5))
    for name, result in results.items():
        points = list(throughput_by_rows(models[name], budgets, choices, result))
        rows_axis.plot(*zip(*points, strict=True), marker="o", label=name)
    rows_axis.set(xlabel="rows of a block", ylabel="projected tok/s", xscale="log")
    rows_axis.legend()
    _draw_memory(memory_axis, results, budgets)
    config = next(iter(models.values())).job.config
    figure.suptitle(f"{config.name}: projections, nothing was measured")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def throughput_by_rows(
    model: TimeModel, budgets: Budgets, choices: Choices, best: Found
) -> Iterator[tuple[int, float]]:
    """Rows, and projected tok/s of the best policy for so many, up to those of the best of all."""
    most = best.policy.num_gpu_batches
    sizes = sorted({max(1, round(most ** (step / POINTS))) for step in range(POINTS)})
    rows = best.policy.gpu_batch_size
    for units in (size for size in sizes if size < most):
        try:
            found = search(model, budgets, replace(choices, gpu_batch_size=(rows,), num_gpu_batches=units))
        except UsageError:
            continue
        yield rows * units, found.projection.throughput_tok_s
    yield best.policy.block_rows, best.projection.throughput_tok_s


def memory_bars(results: Mapping[str, Found]) -> dict[str, dict[str, float]]:
    """GB by line of the ledger and bar; a bar is a tier of a result."""
    bars: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        for tier in TIERS:
            for line, nbytes in result.projection.memory[tier].items():
                bars.setdefault(line, {})[f"{tier}\n{name}"] = nbytes / GB
    return bars


def _draw_memory(axis: Any, results: Mapping[str, Found], budgets: Budgets) -> None:
    bars = memory_bars(results)
    names = sorted({bar for line in bars.values() for bar in line})
    bottoms = dict.fromkeys(names, 0.0)
    for line, heights in sorted(bars.items()):
        values = [heights.get(name, 0.0) for name in names]
        axis.bar(names, values, bottom=[bottoms[name] for name in names], label=line)
        for name, value in zip(names, values, strict=True):
            bottoms[name] += value
    for index, name in enumerate(names):
        budget = budgets.get(name.split("\n")[0])  # type: ignore[call-overload]
        if budget is not None:
            axis.hlines(budget / GB, index - 0.45, index + 0.45, colors="black", linestyles="dashed")
    axis.set(ylabel="GB; budgets dashed", yscale="symlog")
    axis.legend(fontsize="small")
