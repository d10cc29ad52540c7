"""Rows of a comparison as a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with a column for everything that was judged. +- is one standard error."""
    columns: dict[str, list[str]] = {
        "policy": [row["eviction"] for row in rows],
        "kept entries": ["all" if row["eviction"] == "full" else str(row["entries"]) for row in rows],
    }
    if "perplexity" in rows[0]:
        columns["perplexity"] = [f"{row['perplexity']:.1f}" for row in rows]
        columns["against full"] = [_change(row, "full") for row in rows]
        if any("h2o" in row["against"] for row in rows):
            columns["against h2o"] = [_change(row, "h2o") for row in rows]
        columns["agreement"] = [f"{row['agreement']:.3f} ± {row['agreement_stderr']:.3f}" for row in rows]
        columns["KL"] = [f"{row['kl']:.3f} ± {row['kl_stderr']:.3f}" for row in rows]
    for kind in rows[0].get("recall", {}):
        columns[kind.replace("_", " ")] = [
            f"{row['recall'][kind]:.2f} ± {row['recall_stderr'][kind]:.2f}" for row in rows
        ]
    return markdown(columns)


def markdown(columns: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table of columns by their heads, all of one length."""
    lines = [list(columns), *zip(*columns.values(), strict=True)]
    header, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([header, "|---" * len(columns) + "|", *body])


def above_full(row: Row) -> tuple[float, float]:
    """By how much a row's perplexity is above the full cache's, a share, and its standard error; 0 for that itself."""
    change = row["against"].get("full", {"perplexity": 0.0, "perplexity_stderr": 0.0})
    return change["perplexity"], change["perplexity_stderr"]


def _change(row: Row, other: str) -> str:
    """By how much perplexity is above another policy's; paired by document."""
    change = row["against"].get(other)
    return "" if change is None else f"{change['perplexity']:+.1%} ± {change['perplexity_stderr']:.1%}"
