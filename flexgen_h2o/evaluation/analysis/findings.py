"""A finding of the paper beside what was seen here, as data and as Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One quantity: what it is, what was seen, and what the paper says of it (empty where it says nothing)."""

    quantity: str
    seen: str
    paper: str = ""


@dataclass(frozen=True)
class Finding:
    """What the paper found, and what was seen.

    Attributes:
        claim: the paper's, with its place.
        agrees: whether what was seen is in agreement.
        judged_by: what had to hold for that.
    """

    title: str
    claim: str
    rows: Sequence[Row]
    agrees: bool
    judged_by: str


def by_layer(values: Iterable[float], form: str = ".0%") -> str:
    """A number for each layer, from the first on."""
    return ", ".join(format(value, form) for value in values)


def markdown(finding: Finding, model: str, command: str) -> str:
    """A section with a table. `command` makes it anew."""
    verdict = "in agreement" if finding.agrees else "not in agreement"
    lines = [f"| {row.quantity} | {row.seen} | {row.paper} |" for row in finding.rows]
    return "\n".join(
        [
            f"## {finding.title}",
            "",
            f"The paper: {finding.claim}",
            "",
            f"**{verdict[0].upper()}{verdict[1:]}**: {finding.judged_by}.",
            "",
            f"| | {model} | the paper |",
            "|---|---|---|",
            *lines,
            "",
            f"`{command}`",
        ]
    )
