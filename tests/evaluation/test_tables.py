"""The table that a user reads."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.evaluation.tables import table


def row(eviction: str, entries: int, against: dict[str, Any], **judged: Any) -> dict[str, Any]:
    return {"eviction": eviction, "entries": entries, "against": against, **judged}


TEXT = {"perplexity": 50.04, "agreement": 0.8, "agreement_stderr": 0.01, "kl": 0.1, "kl_stderr": 0.004}
RECALL = {"recall": {"hot": 1.0, "in_prompt": 0.25}, "recall_stderr": {"hot": 0.0, "in_prompt": 0.061}}
AGAINST = {"perplexity": 0.0612, "perplexity_stderr": 0.0049}


def test_a_table_of_everything() -> None:
    rows = [
        row("full", 512, {}, **TEXT, **RECALL),
        row("sink", 77, {"full": AGAINST, "h2o": {**AGAINST, "perplexity": -0.02}}, **TEXT, **RECALL),
    ]
    assert table(rows).splitlines() == [
        "| policy | kept entries | perplexity | against full | against h2o | agreement | KL | hot | in prompt |",
        "|---|---|---|---|---|---|---|---|---|",
        "| full | all | 50.0 |  |  | 0.800 ± 0.010 | 0.100 ± 0.004 | 1.00 ± 0.00 | 0.25 ± 0.06 |",
        "| sink | 77 | 50.0 | +6.1% ± 0.5% | -2.0% ± 0.5% | 0.800 ± 0.010 | 0.100 ± 0.004 | 1.00 ± 0.00"
        " | 0.25 ± 0.06 |",
    ]


def test_only_what_was_judged_has_a_column() -> None:
    assert table([row("h2o", 77, {"full": AGAINST}, **TEXT)]).splitlines()[0] == (
        "| policy | kept entries | perplexity | against full | agreement | KL |"
    )
    assert table([row("h2o", 77, {}, **RECALL)]).splitlines() == [
        "| policy | kept entries | hot | in prompt |",
        "|---|---|---|---|",
        "| h2o | 77 | 1.00 ± 0.00 | 0.25 ± 0.06 |",
    ]
