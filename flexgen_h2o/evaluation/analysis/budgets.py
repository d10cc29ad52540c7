"""How small the cache may be (H2O, section 5.1 and table 1: a fifth is enough, but not with recent entries only)."""

from typing import Any

from flexgen_h2o.evaluation.analysis.compared import compared, shown
from flexgen_h2o.evaluation.analysis.findings import Finding, Row
from flexgen_h2o.evaluation.analysis.subject import Result, Subject

BUDGETS = (0.6, 0.4, 0.2, 0.1, 0.04)
ENOUGH = 0.2
NEARLY = 0.05  # of perplexity, above the full cache's


def analyse(subject: Subject) -> Result:
    """Perplexity of H2O and of recent entries only, by budget."""
    return {"rows": compared(subject, ("full", "h2o", "local"), BUDGETS)}


def finding(result: Result) -> Finding:
    full, *rest = result["rows"]
    h2o, local = ({row["budget"]: row for row in rest if row["eviction"] == eviction} for eviction in ("h2o", "local"))
    rows = [Row("perplexity, full cache", shown(full), "43.2, 78.5 (accuracy in %: OpenBookQA, PiQA)")]
    rows += [
        Row(
            f"{budget:.0%} of the prompt: h2o; recent only",
            f"{shown(h2o[budget])}; {shown(local[budget])}",
            "43.0, 78.5; 25.2, 55.8" if budget == ENOUGH else "",
        )
        for budget in BUDGETS
    ]
    return Finding(
        "A fifth of the cache is enough",
        "with 20 % of the cache H2O's accuracy is that of the full cache within a point, and recent entries only fall"
        " far behind (section 5.1, tables 1 and 2, OPT-30B)",
        rows,
        h2o[ENOUGH]["change"] < NEARLY and local[ENOUGH]["change"] > 3 * h2o[ENOUGH]["change"],
        "at 20 % perplexity with H2O had to be less than 5 % above the full cache's, and recent entries only to cost"
        " more than three times as much",
    )


def draw(axes: Any, result: Result) -> None:
    """A line for each policy."""
    for name in ("h2o", "local"):
        rows = [row for row in result["rows"] if row["eviction"] == name]
        axes.errorbar(
            [100 * row["budget"] for row in rows],
            [100 * row["change"] for row in rows],
            yerr=[100 * row["change_stderr"] for row in rows],
            marker="o",
            label=name,
        )
    axes.set(xlabel="kept of the prompt (%)", ylabel="perplexity above the full cache's (%)", yscale="symlog")
    axes.legend(fontsize="small")
