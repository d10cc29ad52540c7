"""A sweep's rows as Markdown tables, and as one page that needs nothing else."""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.bench.plots import Plot
from flexgen_h2o.bench.trials import Group, Row

HEADS = (
    "engine",
    "rows",
    "prefill s",
    "decode tok/s",
    "tok/s in all",
    "least to most",
    "trials",
    "against the fastest other",
    "of its limit",
    "peak GB",
    "projected s",
    "measured s",
)
NOTE = (
    "tok/s in all: generated tokens over the seconds of prefill and decode, the median of the trials. Against the"
    " fastest other: the median over rounds of the ratio within a round; engines took turns. Of its limit: seconds"
    " that the counted work would take at rates measured alone, over the seconds it took. Peak: anonymous memory of"
    " the process while generating. Projected: by the policy search's model, not measured."
)
STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.45 system-ui, sans-serif; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; overflow-wrap: anywhere; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #999; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: normal; position: sticky; left: 0; background: #fff; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; flex: 1 1 20rem; max-width: 34rem; }
img { width: 100%; height: auto; } figcaption { font-size: .85rem; color: #444; } code { overflow-wrap: anywhere; }
.facts { font-size: .85rem; color: #444; overflow-wrap: anywhere; }
"""


def markdown(groups: Sequence[Group]) -> str:
    """All tables, each with what it stands on."""
    parts = [f"# Engines beside one another\n\n{NOTE}"]
    for group in groups:
        lines = [_line(HEADS), "|---" * len(HEADS) + "|", *(_line(cells(row)) for row in table(group))]
        failures = [f"- {text}" for text in stopped(group)]
        parts.append("\n".join([f"## {group.title}", "", *lines, "", *failures, "", facts(group)]))
    return "\n\n".join(parts) + "\n"


def table(group: Group) -> list[Row]:
    """Rows that gave something: those of a comparison before those of a climb alone, the fastest first."""
    best = {id(row) for row in group.best()}
    rows = [row for row in group.rows if row.rate is not None]
    return sorted(rows, key=lambda row: (id(row) not in best, -(row.rate or 0.0)))


def cells(row: Row) -> list[str]:
    """A line of the table."""
    least, most = row.range("throughput_tok_s") or (0.0, 0.0)
    return [
        row.label,
        str(row.batch),
        _number(row.median("prefill_s")),
        _number(row.median("decode_tok_s")),
        _number(row.rate),
        f"{_number(least)} to {_number(most)}",
        str(len(row.trials)),
        f"{row.ratio:.2f} x" if row.ratio is not None else "",
        f"{row.limit_share:.0%}" if row.limit_share is not None else "",
        _number(row.peak_gb),
        _number(row.predicted_s),
        _number(row.median("total_s")),
    ]


def stopped(group: Group) -> Iterator[str]:
    """What engines could not do, a sentence each."""
    for row in group.rows:
        if row.status != "ok":
            status = row.status.replace("_", " ")
            yield f"{row.label}, {row.batch} rows: {status}: {row.sentence}"


def facts(group: Group) -> str:
    """What a table stands on: date, commit, machine, versions, command."""
    machine = group.facts["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(group.facts["versions"].items()))
    commands = "; ".join(f"`{command}`" for command in group.facts["commands"])
    memory = machine["memory_bytes"] / GB
    return (
        f"{group.facts['date']}, commit {group.facts['commit']}; {machine['cores']} cores of {machine['cpu']},"
        f" {memory:.0f} GB, {group.setting['threads']} threads; {versions}; {commands}"
    )


def page(groups: Sequence[Group], pictures: Sequence[Plot]) -> str:
    """Tables and pictures as HTML. Pictures are inside, so that nothing has to be fetched."""
    body = ["<h1>Engines beside one another</h1>", f"<p>{escape(NOTE)}</p>"]
    for group in groups:
        own = [picture for picture in pictures if list(picture.groups) == [group]]
        body += [f"<h2>{escape(group.title)}</h2>", _html_table(group), _html_stopped(group)]
        body += [f'<p class="facts">{_code(facts(group))}</p>', _html_plots(own)]
    shared = [picture for picture in pictures if len(picture.groups) != 1 or picture.name == "predicted"]
    if shared:
        body += ["<h2>All of them</h2>", _html_plots(shared)]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Engines beside one another</title><style>{STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _html_table(group: Group) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) for row in table(group)]
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def _html_stopped(group: Group) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in stopped(group))
    return f"<ul>{items}</ul>" if items else ""


def _html_plots(pictures: Sequence[Plot]) -> str:
    figures = []
    for picture in pictures:
        data = base64.b64encode(picture.svg.encode()).decode()
        dates = " and ".join(sorted({group.facts["date"] for group in picture.groups}))
        commands = sorted({command for group in picture.groups for command in group.facts["commands"]})
        caption = f"{escape(picture.caption)} {_code('; '.join(f'`{command}`' for command in commands))}, {dates}."
        figures.append(
            f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.caption)}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return f'<div class="plots">{"".join(figures)}</div>'


def _code(text: str) -> str:
    """Escaped, with what stands in backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _line(words: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, words))} |"


def _number(value: float | None) -> str:
    """Three digits, as many as mean something."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
