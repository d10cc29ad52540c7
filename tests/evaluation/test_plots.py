"""What is drawn. That every task's plot is written, see test_evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.evaluation.plots import check_plot, panels


def row(eviction: str, entries: int, change: float | None, hot: float) -> dict[str, Any]:
    against = {} if change is None else {"full": {"perplexity": change, "perplexity_stderr": 0.01}}
    text = {"perplexity": 50.0, "agreement": 0.8, "agreement_stderr": 0.02, "kl": 0.1, "kl_stderr": 0.03}
    return {
        **{"eviction": eviction, "entries": entries, "against": against},
        **text,
        **{"recall": {"hot": hot}, "recall_stderr": {"hot": 0.05}},
    }


def test_each_policy_is_a_line_over_the_entries_that_it_keeps() -> None:
    rows = [row("full", 512, None, 1.0), row("h2o", 77, 0.06, 0.9), row("h2o", 38, 0.13, 0.8)]
    found = panels(rows)
    assert list(found) == [
        "perplexity above the full cache's (%)",
        "same greedy token as the full cache",
        "KL from the full cache (nats)",
        "recall, hot",
    ]
    assert found["perplexity above the full cache's (%)"] == {
        "full": [(512, 0.0, 0.0)],
        "h2o": [(38, pytest.approx(13), pytest.approx(1)), (77, pytest.approx(6), pytest.approx(1))],
    }
    assert found["recall, hot"]["h2o"] == [(38, 0.8, 0.05), (77, 0.9, 0.05)]
    assert found["KL from the full cache (nats)"]["full"] == [(512, 0.1, 0.03)]


def test_only_what_was_judged_has_a_panel() -> None:
    whole = row("h2o", 77, 0.06, 0.9)
    only_recall = {key: whole[key] for key in ("eviction", "entries", "against", "recall", "recall_stderr")}
    assert list(panels([only_recall])) == ["recall, hot"]


def test_a_plot_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert check_plot(str(tmp_path / "plot.png")) is None
    assert "folder does not exist" in str(check_plot(str(tmp_path / "none" / "plot.png")))
    assert ".png" in str(check_plot(str(tmp_path / "plot.txt")))
