"""Results of lm-eval's tasks as rows, and whether lm-eval, an optional dependency, is there."""

from collections.abc import Mapping, Sequence
from typing import Any

from flexgen_h2o.evaluation.continuations import Eviction
from flexgen_h2o.evaluation.tables import markdown

Row = dict[str, Any]


def check_lm_eval() -> str | None:
    """What keeps tasks from being run, if anything."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        return "tasks need lm-eval, which is not installed: pip install 'flexgen_h2o[eval]'"
    return None


def task_row(eviction: Eviction, results: Mapping[str, Mapping[str, Any]]) -> Row:
    """One policy's row.

    Args:
        results: lm-eval's, by task and then by "metric,filter".
    Returns: eviction, budget, and tasks: by name, by metric, value and stderr (None where lm-eval gives none).
    """
    return {
        "eviction": eviction.name,
        "budget": eviction.budget,
        "tasks": {task: _metrics(found) for task, found in results.items()},
    }


def _metrics(found: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Values and standard errors; a filter that is not "none" is named with its metric."""
    metrics = {}
    for key, value in found.items():
        name, _, filtered = key.partition(",")
        if not filtered or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = found.get(f"{name}_stderr,{filtered}")
        shown = name if filtered == "none" else key
        metrics[shown] = {"value": float(value), "stderr": float(error) if isinstance(error, (int, float)) else None}
    return metrics


def task_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, a column for every metric of every task. +- is one standard error."""
    columns = {"policy": [row["eviction"] for row in rows]}
    columns["budget"] = ["all" if row["eviction"] == "full" else f"{row['budget']:.0%}" for row in rows]
    for task, metrics in rows[0]["tasks"].items():
        for metric in metrics:
            columns[f"{task} {metric}"] = [_shown(row["tasks"][task][metric]) for row in rows]
    return markdown(columns)


def _shown(metric: Mapping[str, float | None]) -> str:
    error = "" if metric["stderr"] is None else f" ± {metric['stderr']:.3f}"
    return f"{metric['value']:.3f}{error}"
