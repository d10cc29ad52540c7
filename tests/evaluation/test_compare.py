"""Rows of a comparison: each policy on the same documents, held against the full cache and H2O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.helpers import PEAKED, TinyOpt, random_ids

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.compare import Case, compare, documents_to_score, make_cases
from flexgen_h2o.evaluation.documents import HeldoutSet
from flexgen_h2o.evaluation.recall import RecallSet
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.evaluation.statistics import difference, perplexity, perplexity_change
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local

PROMPT_LEN, LENGTH, DOCUMENTS = 20, 28, 5


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny("pre_norm", std=PEAKED)


@pytest.fixture(scope="module")
def judge(peaked: TinyOpt) -> Judge:
    """Scores two documents at a time."""
    return Judge(LLM(str(peaked.folder), dtype="float32", gpu_batch_size=2), PROMPT_LEN)


@pytest.fixture(scope="module")
def heldout(peaked: TinyOpt) -> HeldoutSet:
    windows = torch.tensor(random_ids(peaked.config, [LENGTH] * DOCUMENTS))
    recall = torch.tensor(random_ids(peaked.config, [LENGTH - 2] * 3, seed=4))
    return HeldoutSet(PROMPT_LEN, windows, {"hot": RecallSet(recall, (range(21, 22), range(24, 26)))})


def rows_of(
    evictions: Sequence[str], heldout: HeldoutSet, judge: Judge, reference: Judge | None = None
) -> tuple[list[Case], list[dict[str, Any]], int]:
    cases = make_cases(evictions, [0.4], PROMPT_LEN, LENGTH, layers=3)
    scored: list[int] = []
    reference = reference or judge
    rows = compare(cases, heldout, judge, reference, scored.append)
    assert sum(scored) == documents_to_score(cases, heldout, judge is reference)
    return cases, rows, sum(scored)


def test_cases_are_policies_times_budgets() -> None:
    cases = make_cases(["full", "h2o", "topk"], [0.2, 0.1], 384, 512, 4)
    assert [(case.name, case.budget, case.entries) for case in cases] == [
        ("full", 1.0, 512),
        ("h2o", 0.2, 77),
        ("h2o", 0.1, 38),
        ("topk", 0.2, 77),
        ("topk", 0.1, 38),
    ]


def test_a_row_says_what_its_scores_are(heldout: HeldoutSet, judge: Judge) -> None:
    _, rows, _ = rows_of(["full", "h2o", "local"], heldout, judge)
    full_text, reference = judge.reference(Full(0, LENGTH), heldout.windows)
    scored = {"full": full_text}
    for name, rule in {"h2o": H2O(4, 4), "local": Local(0, 8)}.items():
        scored[name] = judge.score(rule, heldout.windows, reference)
    for row in rows:
        expected = scored[row["eviction"]]
        assert expected.agrees is not None and expected.kl is not None
        assert (row["documents"], row["recall_documents"]) == (DOCUMENTS, 3)
        assert row["perplexity"] == pytest.approx(perplexity(expected.nll).mean, rel=1e-5)
        assert row["stderr"] == pytest.approx(perplexity(expected.nll).stderr, rel=1e-4)
        assert row["agreement"] == pytest.approx(float(expected.agrees.double().mean()))
        assert row["kl"] == pytest.approx(float(expected.kl.double().mean()), abs=1e-6)
        for other in {"full", "h2o"} - {row["eviction"]}:
            if other == "h2o" and row["eviction"] == "full":
                continue
            change = perplexity_change(expected.nll, scored[other].nll)
            found = row["against"][other]
            assert found["perplexity"] == pytest.approx(change.mean, rel=1e-3, abs=1e-6)
            assert found["perplexity_stderr"] == pytest.approx(change.stderr, rel=1e-3)
    full, h2o, local = rows
    assert (full["agreement"], full["kl"], full["against"]) == (1.0, 0.0, {})
    assert h2o["agreement"] < 1 and h2o["kl"] > 0.01
    assert set(h2o["against"]) == {"full"} and set(local["against"]) == {"full", "h2o"}
    assert (h2o["heavy_slots"], h2o["recent_slots"], h2o["entries"], h2o["path"]) == (4, 4, 8, "cache")


def test_recall_is_by_document_and_paired(heldout: HeldoutSet, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"full": [1.0, 1.0, 0.5], "h2o": [1.0, 0.5, 0.5], "local": [0.5, 0.5, 0.0]}
    order = iter(answers)
    monkeypatch.setattr(RecallSet, "answered", lambda *_: torch.tensor(answers[next(order)]))
    _, (full, h2o, local), _ = rows_of(list(answers), heldout, judge)
    assert [row["recall"]["hot"] for row in (full, h2o, local)] == pytest.approx([5 / 6, 2 / 3, 1 / 3])
    for row, other in ((h2o, "full"), (local, "full"), (local, "h2o")):
        change = difference(torch.tensor(answers[row["eviction"]]), torch.tensor(answers[other]))
        found = row["against"][other]
        assert (found["recall"]["hot"], found["recall_stderr"]["hot"]) == (change.mean, change.stderr)


def test_the_full_cache_is_there_to_be_held_against_though_not_asked_for(heldout: HeldoutSet, judge: Judge) -> None:
    _, (alone,), scored = rows_of(["h2o"], heldout, judge)
    _, (_, beside), scored_beside = rows_of(["full", "h2o"], heldout, judge)
    assert alone["against"]["full"]["perplexity"] == beside["against"]["full"]["perplexity"] != 0
    assert (scored, scored_beside) == (2 * DOCUMENTS + 3, 2 * DOCUMENTS + 2 * 3)


def test_only_what_there_are_documents_for_is_judged(heldout: HeldoutSet, judge: Judge) -> None:
    _, (text,), _ = rows_of(["h2o"], HeldoutSet(PROMPT_LEN, heldout.windows), judge)
    assert "recall" not in text and "perplexity" in text
    only_recall = HeldoutSet(PROMPT_LEN, heldout.windows[:0], heldout.recall)
    _, (recall,), scored = rows_of(["h2o"], only_recall, judge)
    assert "perplexity" not in recall and set(recall["recall"]) == {"hot"} and recall["against"] == {}
    assert scored == 3


def test_a_compressed_cache_is_held_against_one_that_is_not(peaked: TinyOpt, heldout: HeldoutSet, judge: Judge) -> None:
    compressed = Judge(LLM(str(peaked.folder), dtype="float32", gpu_batch_size=2, compress_cache=True), PROMPT_LEN)
    _, (full, h2o), scored = rows_of(["full", "h2o"], heldout, compressed, judge)
    assert 0 < full["kl"] < h2o["kl"] and full["against"]["full"]["perplexity"] != 0
    assert scored == 3 * DOCUMENTS + 2 * 3


def test_documents_do_not_depend_on_the_batch(peaked: TinyOpt, heldout: HeldoutSet, judge: Judge) -> None:
    one = Judge(LLM(str(peaked.folder), dtype="float32", gpu_batch_size=1), PROMPT_LEN)
    for policies in (["h2o"], ["mean"], ["topk"]):
        found, alone = (rows_of(policies, heldout, judging)[1][0] for judging in (judge, one))
        assert found["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-4)
        assert found["kl"] == pytest.approx(alone["kl"], rel=1e-3)
