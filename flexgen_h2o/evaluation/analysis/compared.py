"""Policies side by side on the subject's documents, for the findings that rest on such a comparison."""

from collections.abc import Sequence

from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.compare import compare, make_cases
from flexgen_h2o.evaluation.documents import HeldoutSet
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.evaluation.tables import above_full

KEYS = ("eviction", "budget", "entries", "perplexity")


def compared(
    subject: Subject, evictions: Sequence[str], budgets: Sequence[float], judge: Judge | None = None
) -> list[Result]:
    """A row for each policy and budget: its perplexity, and by how much it is above the full, uncompressed cache's.

    Args:
        judge: scores the policies; None for the subject's own, which always scores the full cache they are held
            against.
    """
    cases = make_cases(evictions, budgets, subject.prompt_len, subject.length, subject.layers)
    heldout = HeldoutSet(subject.prompt_len, subject.windows)
    rows = compare(cases, heldout, judge or subject.judge, subject.judge, lambda documents: None)
    names = ("change", "change_stderr")
    return [{**{key: row[key] for key in KEYS}, **dict(zip(names, above_full(row), strict=True))} for row in rows]


def by_name(rows: Sequence[Result]) -> dict[str, Result]:
    """The rows by policy, of which each has one."""
    return {row["eviction"]: row for row in rows}


def shown(row: Result) -> str:
    """A row's perplexity, and by how much it is above the full cache's."""
    return f"{row['perplexity']:.1f} ({row['change']:+.1%} ± {row['change_stderr']:.1%})"
