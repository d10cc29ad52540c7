"""Does eviction go together with a cache in 4 bits? (H2O, table 6: it does.)"""

from typing import Any

from flexgen_h2o.evaluation.analysis.compared import compared, shown
from flexgen_h2o.evaluation.analysis.findings import Finding, Row
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.platform import dtype_name

LITTLE = 0.01  # of perplexity, that 4 bits may add
PAPER = {
    ("full", 16): "85.0, 43.2, 78.5 (accuracy in %: COPA, OpenBookQA, PiQA)",
    ("h2o", 16): "84.0, 43.0, 78.5",
    ("full", 4): "84.0, 43.3, 78.7",
    ("h2o", 4): "84.0, 43.2, 78.8",
}


def analyse(subject: Subject) -> Result:
    """Perplexity of the full cache and of H2O, with keys and values as they are and in 4-bit groups."""
    llm, names = subject.llm, ("full", "h2o")
    with LLM(
        None if llm.folder is None else str(llm.folder),
        device=llm.device.type,
        dtype=dtype_name(llm.dtype),
        gpu_batch_size=subject.judge.rows,
        compress_cache=True,
    ) as compressed:
        in_4_bits = compared(subject, names, [subject.budget], Judge(compressed, subject.prompt_len))
    plain = compared(subject, names, [subject.budget])
    return {"rows": [{**row, "bits": bits} for bits, rows in ((16, plain), (4, in_4_bits)) for row in rows]}


def finding(result: Result) -> Finding:
    rows = {(row["eviction"], row["bits"]): row for row in result["rows"]}
    added = rows["h2o", 4]["perplexity"] / rows["h2o", 16]["perplexity"] - 1
    return Finding(
        "Eviction goes together with 4 bits",
        "quantisation to 4 bits keeps the accuracy of H2O as it does that of the full cache (table 6, OPT-30B)",
        [
            Row(
                f"perplexity, {name}, {'cache in 4 bits' if bits == 4 else 'cache as it is'}",
                shown(row),
                PAPER[name, bits],
            )
            for (name, bits), row in rows.items()
        ],
        added < LITTLE,
        f"4 bits change the perplexity of H2O by {added:+.1%}; less than 1 % had to be added",
    )


def draw(axes: Any, result: Result) -> None:
    """Bars by policy and encoding."""
    labels = [f"{row['eviction']}, {'4 bits' if row['bits'] == 4 else 'as it is'}" for row in result["rows"]]
    axes.barh(labels, [100 * row["change"] for row in result["rows"]])
    axes.set(xlabel="perplexity above the full cache's (%)")
