"""What heavy hitters and recent entries are worth alone (H2O, table 9: only both together are enough)."""

from typing import Any

from flexgen_h2o.evaluation.analysis.compared import by_name, compared, shown
from flexgen_h2o.evaluation.analysis.findings import Finding, Row
from flexgen_h2o.evaluation.analysis.subject import Result, Subject

# The paper's accuracies in % of OPT-30B: PiQA, OpenBookQA, Winogrande.
NAMES = {
    "full": ("everything", "78.5, 43.2, 70.2"),
    "local": ("recent entries only", "55.8, 25.2, 49.2"),
    "heavy": ("heavy hitters only", "67.3, 26.6, 47.4"),
    "h2o": ("half of each", "78.5, 43.0, 69.1"),
}


def analyse(subject: Subject) -> Result:
    """Perplexity with recent entries, with heavy hitters, and with half of each; as many in all."""
    return {"rows": compared(subject, list(NAMES), [subject.budget])}


def finding(result: Result) -> Finding:
    rows = by_name(result["rows"])
    return Finding(
        "Neither heavy hitters nor recent entries alone are enough",
        "heavy hitters contribute more than recent entries, and only both together keep the accuracy (appendix C.6,"
        " table 9, OPT-30B, 20 %; on Winogrande heavy hitters alone are the worse of the two)",
        [
            Row(
                f"perplexity with {what}",
                shown(rows[name]),
                paper + (" (accuracy in %: PiQA, OpenBookQA, Winogrande)" if name == "full" else ""),
            )
            for name, (what, paper) in NAMES.items()
        ],
        rows["h2o"]["perplexity"] < min(rows["local"]["perplexity"], rows["heavy"]["perplexity"]),
        "perplexity with half of each had to be below that with either alone; of the two, "
        + ("heavy hitters" if rows["heavy"]["perplexity"] < rows["local"]["perplexity"] else "recent entries")
        + " alone are the better",
    )


def draw(axes: Any, result: Result) -> None:
    """Bars by what is kept."""
    rows = result["rows"][1:]
    axes.barh([NAMES[row["eviction"]][0] for row in rows], [100 * row["change"] for row in rows])
    axes.set(xlabel="perplexity above the full cache's (%)")
