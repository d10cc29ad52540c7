"""What was found, for people: Markdown with a table for each finding, and a figure with a panel for each."""

from pathlib import Path
from typing import Any

from flexgen_h2o.evaluation.analysis.catalogue import ANALYSES
from flexgen_h2o.evaluation.analysis.findings import markdown
from flexgen_h2o.evaluation.analysis.subject import Result
from flexgen_h2o.evaluation.plots import new_figure

HEADER = """# The H2O paper's findings, looked for in `{model}`

What Zhang et al. 2023 (arXiv 2306.14048) found in large models, beside what is measured here on {documents} windows of
{text}, {prompt_len} tokens of prompt and {continuation_len} after it; where entries are evicted, {budget:.0%} of the
prompt's are kept unless it is said otherwise. {note}Made by

`{command}`
"""
DEMO_NOTE = """The model is small and some of its attention heads were built in by hand (flexgen_h2o/demo/README.md), so
agreement or its absence says little about others. """


def findings_page(results: dict[str, Result], about: dict[str, Any], commands: dict[str, str]) -> str:
    """A Markdown page with a section for each analysis.

    Args:
        about: model, documents, prompt_len, continuation_len, budget and text of the run.
        commands: by analysis, what makes its section anew; "" for all of them.
    """
    note = DEMO_NOTE if about["model"] == "demo" else ""
    page = [HEADER.format(**about, note=note, command=commands[""])]
    page += [
        markdown(ANALYSES[name].finding(result), about["model"], commands[name]) for name, result in results.items()
    ]
    return "\n".join(f"{section}\n" for section in page)


def plot(results: dict[str, Result], path: Path, title: str) -> None:
    """Draws a panel for each analysis. Writes a file."""
    figure, panels = new_figure(len(results))
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        ANALYSES[name].draw(axes, result)
        axes.set_title(ANALYSES[name].finding(result).title, fontsize="medium")
    figure.suptitle(title)
    figure.savefig(path)
