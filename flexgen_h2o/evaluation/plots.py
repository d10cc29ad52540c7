"""What was judged, drawn over the entries that policies keep. Needs matplotlib, the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o.evaluation.tables import above_full

Row = dict[str, Any]
Points = dict[str, list[tuple[int, float, float]]]  # by policy: entries, value, standard error

PANEL_INCHES, PANELS_IN_A_ROW = 4.0, 4


def check_plot(path: str) -> str | None:
    """What keeps a plot from being written to `path`, if anything."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"--plot {path} needs matplotlib, which is not installed: pip install 'flexgen_h2o[plots]'"
    if not Path(path).resolve().parent.is_dir():
        return f"--plot {path} cannot be written: its folder does not exist; give another name"
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        return f"--plot {path} must end in .png, .svg or .pdf"
    return None


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws a panel for everything in the rows: a line for each policy, bars of one standard error. Writes a file."""
    drawn = panels(rows)
    figure, grid = new_figure(len(drawn))
    for axes, (label, points) in zip(grid, drawn.items(), strict=True):
        _draw(axes, points)
        axes.set(xlabel="entries kept per layer and head", ylabel=label)
    handles, names = grid[0].get_legend_handles_labels()
    across = min(PANELS_IN_A_ROW, len(drawn))
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 2 * across))
    figure.suptitle(title)
    figure.savefig(path)


def new_figure(count: int) -> tuple[Any, list[Any]]:
    """An empty figure of matplotlib, and axes for `count` panels (1 or more)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(PANELS_IN_A_ROW, count)
    down = -(-count // across)
    figure = Figure(figsize=(PANEL_INCHES * across, PANEL_INCHES * down), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(down, across, squeeze=False).flatten())
    for unused in grid[count:]:
        unused.remove()
    return figure, grid[:count]


def panels(rows: Sequence[Row]) -> dict[str, Points]:
    """What each panel shows, by its label."""
    found: dict[str, Points] = {}
    if "perplexity" in rows[0]:
        # Paired by document; the spread of texts themselves would hide all differences.
        values = [(100 * change, 100 * error) for change, error in map(above_full, rows)]
        found["perplexity above the full cache's (%)"] = _points(rows, values)
        agreement = [(row["agreement"], row["agreement_stderr"]) for row in rows]
        found["same greedy token as the full cache"] = _points(rows, agreement)
        found["KL from the full cache (nats)"] = _points(rows, [(row["kl"], row["kl_stderr"]) for row in rows])
    for kind in rows[0].get("recall", {}):
        values = [(row["recall"][kind], row["recall_stderr"][kind]) for row in rows]
        found[f"recall, {kind.replace('_', ' ')}"] = _points(rows, values)
    return found


def _points(rows: Sequence[Row], values: Sequence[tuple[float, float]]) -> Points:
    points: Points = {}
    for row, (value, error) in zip(rows, values, strict=True):
        points.setdefault(row["eviction"], []).append((row["entries"], value, error))
    return {name: sorted(found) for name, found in points.items()}


def _draw(axes: Any, points: Points) -> None:
    """A line for each policy; the full cache, which is the same at every budget, across."""
    for name, found in points.items():
        entries, values, errors = zip(*found, strict=True)
        if name == "full":
            axes.axhline(values[0], color="black", linestyle="--", label=name)
        else:
            axes.errorbar(entries, values, yerr=errors, marker="o", capsize=2, label=name)
    axes.grid(alpha=0.3)
