"""A sweep's rows as pictures. Needs matplotlib, the extra `plots`."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench.grid import FULL
from flexgen_h2o.bench.trials import Group, Row

INCHES = (4.4, 3.3)  # a phone shows it at about its own size
WITHIN = 0.15  # band around what was predicted
OURS_COLORS = ("#c1440e", "#e8912d", "#8c2d04", "#f0b67f", "#5c1a00", "#d97706")
PEER_COLORS = ("#1f4e79", "#4f8fbf", "#3a7d44", "#7a5195", "#6b6b6b", "#009999")


@dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
        name: of its file, without ending.
        caption: what it shows, with units.
        groups: whose rows are in it.
        svg: the picture itself.
    """

    name: str
    caption: str
    groups: Sequence[Group]
    svg: str


def plots(groups: Sequence[Group]) -> list[Plot]:
    """All pictures that the rows have something for. Raises UsageError if matplotlib is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib, which is not installed: pip install 'flexgen_h2o[plots]'") from None
    found = [plot for number, group in enumerate(groups, 1) for plot in _of_group(group, number)]
    compared = [row for group in groups for row in group.rows if row.predicted_s and row.median("total_s")]
    if compared:
        caption = (
            "Seconds of a whole generation, prefill and decode: measured (median) against what the policy search's"
            f" model projects. Grey: within {WITHIN:.0%}."
        )
        found.append(Plot("predicted", caption, groups, drawn(lambda axes: _predicted(axes, compared))))
    return found


def _of_group(group: Group, number: int) -> Iterator[Plot]:
    """Those of one setting."""
    best = sorted(group.best(), key=lambda row: row.rate or 0.0)
    if not best:
        return
    caption = (
        f"{group.title}: generated tokens per second, each engine at its best number of rows; median, least and most"
    )
    yield Plot(f"throughput-{number}", f"{caption}.", [group], drawn(lambda axes: _throughput(axes, best)))
    if any(len(points) > 1 for points in _by_label(group).values()):
        caption = f"{group.title}: tokens per second against the seconds a whole batch takes. At each point its rows"
        yield Plot(f"frontier-{number}", f"{caption}.", [group], drawn(lambda axes: _frontier(axes, group)))
    ours = [row for row in best if row.is_ours]
    if len({row.config["budget"] for row in ours}) > 1:
        caption = f"{group.title}: tokens per second at the best number of rows, against the share of the KV cache kept"
        yield Plot(f"budget-{number}", f"{caption}.", [group], drawn(lambda axes: _budgets(axes, ours)))
    if any(row.step_s for row in best):
        caption = f"{group.title}: milliseconds of each decode step, in rows of the best batch; median over trials"
        yield Plot(f"steps-{number}", f"{caption}.", [group], drawn(lambda axes: _steps(axes, best)))
    limited = [row for row in ours if row.limit_share is not None]
    if limited:
        caption = (
            f"{group.title}: share of its limit that a generation reached. The limit is the largest, over processor and"
            " disk, of the counted work over rates measured alone"
        )
        yield Plot(f"limit-{number}", f"{caption}.", [group], drawn(lambda axes: _limits(axes, limited)))


def drawn(draw: Callable[[Any], None]) -> str:
    """A picture as SVG text, its letters as outlines, so that it looks the same everywhere."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # No date and no random ids: the same rows give the same file.
    with rc_context({"svg.hashsalt": "sweep", "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _by_label(group: Group) -> dict[str, list[Row]]:
    """Rows that gave something, by contender, the smallest batch first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(group.rows, key=lambda row: row.batch):
        if row.rate is not None:
            found.setdefault(row.label, []).append(row)
    return found


def colors(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each contender: warm ones for this engine."""
    found: dict[str, str] = {}
    for ours, palette in ((True, OURS_COLORS), (False, PEER_COLORS)):
        labels = sorted({row.label for row in rows if row.is_ours is ours})
        found |= {label: palette[index % len(palette)] for index, label in enumerate(labels)}
    return found


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    """Bars, the fastest on top, with the spread of the trials."""
    palette = colors(rows)
    for place, row in enumerate(rows):
        rate, (least, most) = row.rate or 0.0, row.range("throughput_tok_s") or (0.0, 0.0)
        axes.barh(place, rate, color=palette[row.label], xerr=[[rate - least], [most - rate]], ecolor="#333333")
        axes.annotate(
            f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            (most, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(rows)), [f"{row.label}\n{row.batch} rows" for row in rows], fontsize=8)
    axes.set(xlabel="tok/s")
    axes.margins(x=0.18)


def _frontier(axes: Any, group: Group) -> None:
    palette = colors(group.rows)
    for label, rows in _by_label(group).items():
        seconds, rates = [row.median("total_s") for row in rows], [row.rate for row in rows]
        axes.plot(seconds, rates, marker="o", markersize=4, color=palette[label], label=label)
        for row, x, y in zip(rows, seconds, rates, strict=True):
            axes.annotate(str(row.batch), (x, y), xytext=(2, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="seconds of a batch", ylabel="tok/s")
    _logarithmic(axes, "x", "y")
    _legend(axes)


def _budgets(axes: Any, rows: Sequence[Row]) -> None:
    palette = colors(rows)
    for bits in sorted({row.config["bits"] for row in rows}, reverse=True):
        own = sorted((_share(row), row.rate or 0.0, row) for row in rows if row.config["bits"] == bits)
        axes.plot(
            [100 * share for share, _, _ in own],
            [rate for _, rate, _ in own],
            marker="o",
            color=palette[own[0][2].label],
            label=f"weights and KV in {bits} bits",
        )
    axes.set(xlabel="KV cache kept (% of prompt + generated)", ylabel="tok/s")
    axes.set_ylim(0, 1.1 * max(row.rate or 0.0 for row in rows))
    _legend(axes)


def _share(row: Row) -> float:
    budget = row.config["budget"]
    return 1.0 if budget == FULL else float(Decimal(budget))


def _steps(axes: Any, rows: Sequence[Row]) -> None:
    palette = colors(rows)
    for row in rows:
        if row.step_s:
            tokens = range(2, len(row.step_s) + 2)
            times = [1e3 * seconds for seconds in row.step_s]
            axes.plot(tokens, times, color=palette[row.label], label=f"{row.label}, {row.batch} rows")
    axes.set(xlabel="generated tokens", ylabel="ms per step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _logarithmic(axes, "y")
    _legend(axes)


def _limits(axes: Any, rows: Sequence[Row]) -> None:
    palette = colors(rows)
    for place, row in enumerate(rows):
        share = 100 * (row.limit_share or 0.0)
        axes.barh(place, share, color=palette[row.label])
        axes.annotate(f"{share:.0f}", (share, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.axvline(100, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row.label}\n{row.batch} rows" for row in rows], fontsize=8)
    axes.set(xlabel="% of the limit", xlim=(0, 115))


def _predicted(axes: Any, rows: Sequence[Row]) -> None:
    points = [(row.predicted_s or 0.0, row.median("total_s") or 0.0, row) for row in rows]
    ends = [0.7 * min(min(x, y) for x, y, _ in points), 1.4 * max(max(x, y) for x, y, _ in points)]
    axes.fill_between(ends, [(1 - WITHIN) * end for end in ends], [(1 + WITHIN) * end for end in ends], color="#dddddd")
    axes.plot(ends, ends, color="black", linewidth=1)
    palette = colors(rows)
    for label in dict.fromkeys(row.label for row in rows):
        own = [(x, y) for x, y, row in points if row.label == label]
        axes.scatter(*zip(*own, strict=True), s=18, color=palette[label], label=label, zorder=3)
    axes.set(xlabel="projected s", ylabel="measured s", xlim=ends, ylim=ends)
    _logarithmic(axes, "x", "y")
    _legend(axes)


def _logarithmic(axes: Any, *names: str) -> None:
    """Axes of logarithms, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in names:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _legend(axes: Any) -> None:
    """Under the picture, where it hides nothing."""
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=1, fontsize=7)
