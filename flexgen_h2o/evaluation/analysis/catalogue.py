"""Every analysis by name: how it is carried out, told and drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.evaluation.analysis import (
    accumulated,
    budgets,
    diversity,
    four_bits,
    frequency,
    kept,
    local_global,
    masking,
    mlp,
    parts,
    patterns,
    sparsity,
    submodular,
)
from flexgen_h2o.evaluation.analysis.findings import Finding
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.policies import policy_for


@dataclass(frozen=True)
class Analysis:
    """One question to a model.

    Attributes:
        analyse: answers it.
        finding: puts the answer beside the paper's.
        draw: draws it on axes of matplotlib.
        missing: what keeps it from being carried out here, if anything.
    """

    analyse: Callable[[Subject], Result]
    finding: Callable[[Result], Finding]
    draw: Callable[[Any, Result], None]
    missing: Callable[[], str | None] = lambda: None


ANALYSES = {
    "sparsity": Analysis(sparsity.analyse, sparsity.finding, sparsity.draw),
    "accumulated": Analysis(accumulated.analyse, accumulated.finding, accumulated.draw),
    "frequency": Analysis(frequency.analyse, frequency.finding, frequency.draw),
    "masking": Analysis(masking.analyse, masking.finding, masking.draw),
    "kept": Analysis(kept.analyse, kept.finding, kept.draw),
    "local_global": Analysis(local_global.analyse, local_global.finding, local_global.draw),
    "submodular": Analysis(submodular.analyse, submodular.finding, submodular.draw),
    "budgets": Analysis(budgets.analyse, budgets.finding, budgets.draw),
    "patterns": Analysis(patterns.analyse, patterns.finding, patterns.draw),
    "parts": Analysis(parts.analyse, parts.finding, parts.draw),
    "four_bits": Analysis(four_bits.analyse, four_bits.finding, four_bits.draw),
    "diversity": Analysis(diversity.analyse, diversity.finding, diversity.draw, diversity.check_sacrebleu),
    "mlp": Analysis(mlp.analyse, mlp.finding, mlp.draw),
}


def chosen_analyses(names: Sequence[str]) -> list[str]:
    """The names, checked. Raises UsageError for those that are unknown or cannot be carried out here."""
    problems = [
        f"--analyses {name} is unknown; known analyses: {', '.join(ANALYSES)}" for name in names if name not in ANALYSES
    ]
    missing = [ANALYSES[name].missing() for name in names if name in ANALYSES]
    problems += [problem for problem in missing if problem is not None]
    if problems:
        raise UsageError(problems)
    return list(dict.fromkeys(names))


def check_subject(names: Sequence[str], subject: Subject) -> None:
    """Raises UsageError if the model, the documents or the budget do not allow what is asked."""
    if "diversity" in names and subject.llm.tokenizer is None:
        raise UsageError(
            f"{subject.llm.config.name} has no tokenizer, which the analysis `diversity` needs; name the others with"
            " --analyses"
        )
    policy_for("h2o", subject.budget, subject.prompt_len, subject.length, subject.layers)
    if subject.length < submodular.LENGTH:
        raise UsageError(
            f"documents of {subject.length} tokens are too short to analyse; --prompt-len and --continuation-len must"
            f" come to at least {submodular.LENGTH}"
        )


def analyse(names: Sequence[str], subject: Subject, on_done: Callable[[str], None]) -> dict[str, Result]:
    """What each analysis finds, by name.

    Args:
        on_done: told the name of each that has ended.
    """
    results = {}
    for name in names:
        results[name] = ANALYSES[name].analyse(subject)
        on_done(name)
    return results
