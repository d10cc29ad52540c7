"""Do other ways of keeping entries gain from heavy hitters? (H2O, tables 2 and 8: all do.)"""

from typing import Any

from flexgen_h2o.evaluation.analysis.compared import by_name, compared, shown
from flexgen_h2o.evaluation.analysis.findings import Finding, Row
from flexgen_h2o.evaluation.analysis.subject import Result, Subject

# What is compared: without heavy hitters, with them, and the paper's accuracies in % of OPT-30B, OpenBookQA and PiQA.
PAIRS = {
    "local": ("h2o", "25.2, 55.8; 43.0, 78.5"),
    "strided": ("strided+h2o", "24.6, 56.2; 42.6, 78.2"),
    "fixed": ("fixed+h2o", "23.8, 58.6; 41.4, 77.8"),
    "topk": ("topk+h2o", "41.4, 77.0; 42.8, 78.0"),
}


def analyse(subject: Subject) -> Result:
    """Perplexity of every pattern without and with heavy hitters, with as many entries."""
    names = ["full", *(name for alone, (both, _) in PAIRS.items() for name in (alone, both))]
    return {"rows": compared(subject, names, [subject.budget])}


def finding(result: Result) -> Finding:
    rows = by_name(result["rows"])
    better = [alone for alone, (both, _) in PAIRS.items() if rows[both]["perplexity"] < rows[alone]["perplexity"]]
    others = [alone for alone in PAIRS if alone not in better]
    return Finding(
        "Every pattern gains from heavy hitters",
        "local, strided and fixed patterns, and the top k, all gain accuracy when heavy hitters take half of their"
        " entries (tables 2 and 8, OPT-30B, 20 %)",
        [
            Row("perplexity, full cache", shown(rows["full"]), "43.2, 78.5 (accuracy in %: OpenBookQA, PiQA)"),
            *(
                Row(f"{alone}: without; with heavy hitters", f"{shown(rows[alone])}; {shown(rows[both])}", paper)
                for alone, (both, paper) in PAIRS.items()
            ),
        ],
        not others,
        f"perplexity is lower with heavy hitters for {', '.join(better) or 'none'}"
        + (f", and not for {', '.join(others)}; it had to be for all" if others else ", which is all"),
    )


def draw(axes: Any, result: Result) -> None:
    """Bars for each pattern, without and with."""
    rows = by_name(result["rows"])
    for offset, names in enumerate((list(PAIRS), [both for both, _ in PAIRS.values()])):
        axes.bar(
            [number + 0.4 * offset - 0.2 for number in range(len(names))],
            [100 * rows[name]["change"] for name in names],
            width=0.4,
            label=("without heavy hitters", "with")[offset],
        )
    axes.set_xticks(range(len(PAIRS)), list(PAIRS))
    axes.set(ylabel="perplexity above the full cache's (%)")
    axes.legend(fontsize="small")
