"""Eviction policies side by side: perplexity, agreement with the full cache, and recall, on the same documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexgen_h2o.evaluation.documents import HeldoutSet
from flexgen_h2o.evaluation.policies import Policy, entries_of, policy_for
from flexgen_h2o.evaluation.recall import RecallSet
from flexgen_h2o.evaluation.scores import ContinuationScores, join
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.evaluation.statistics import difference, estimate, perplexity, perplexity_change
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.plan.policy import Policy as RunPolicy


@dataclass(frozen=True)
class Case:
    """A policy with a budget, a share of the prompt; 1 for the full cache."""

    name: str
    budget: float
    entries: int
    policy: Policy


@dataclass(frozen=True)
class Judged:
    """What was found about a case; what was not judged is None or empty.

    Attributes:
        recall: by kind, [documents] share of a document's questions that were answered right.
    """

    text: ContinuationScores | None
    recall: dict[str, Tensor]


OnDocuments = Callable[[int], None]  # told how many documents have just been scored


def make_cases(
    evictions: Sequence[str], budgets: Sequence[float], prompt_len: int, length: int, layers: int
) -> list[Case]:
    """One case for each policy and budget; the full cache, which has no budget, is one.

    Raises UsageError for an unknown policy, or a budget too small for one.
    """
    cases = []
    for name in evictions:
        for budget in (1.0,) if name == "full" else budgets:
            entries = length if name == "full" else entries_of(budget, prompt_len)
            cases.append(Case(name, budget, entries, policy_for(name, budget, prompt_len, length, layers)))
    return cases


def compression_problems(cases: Sequence[Case], policy: RunPolicy) -> list[str]:
    """Cases that cannot be judged with this compression, a sentence each."""
    plain = dict.fromkeys(case.name for case in cases if not isinstance(case.policy, EvictionRule))
    return [
        f"--eviction {name} is judged on a path that keeps all entries as they are, so --compress-cache would do"
        " nothing; leave one of them out"
        for name in plain
        if policy.compress_cache
    ]


def compare(
    cases: Sequence[Case], heldout: HeldoutSet, judge: Judge, reference: Judge, on_documents: OnDocuments
) -> list[dict[str, Any]]:
    """One row per case, held against the full cache and, where it is there, H2O with as many entries.

    Args:
        judge: scores the cases.
        reference: scores the full cache that they are held against: the judge itself, or one whose model and cache are
            not compressed.
    """
    texts: Sequence[ContinuationScores | None] = [None] * len(cases)
    full_text: ContinuationScores | None = None
    if len(heldout.windows):
        full_text, texts = _judge_text(cases, heldout, judge, reference, on_documents)
    recalls = _judge_recall(cases, heldout.recall, judge, on_documents)
    judged = [Judged(text, recall) for text, recall in zip(texts, recalls, strict=True)]
    rows = []
    for case, found in zip(cases, judged, strict=True):
        others = {
            other.name: result
            for other, result in zip(cases, judged, strict=True)
            if other is not case and (other.name == "full" or (other.name == "h2o" and other.budget == case.budget))
        }
        if full_text is not None and (case.name != "full" or judge is not reference):
            recall = others["full"].recall if judge is reference and "full" in others else {}
            others["full"] = Judged(full_text, recall)
        rows.append(_row(case, found, others))
    return rows


def documents_to_score(cases: Sequence[Case], heldout: HeldoutSet, shares_model: bool) -> int:
    """How many documents compare() will report, all cases together."""
    windows, recall = len(heldout.windows), sum(len(kind.documents) for kind in heldout.recall.values())
    with_reference = len(cases) + (0 if shares_model and any(case.name == "full" for case in cases) else 1)
    return windows * with_reference + recall * len(cases)


def _judge_text(
    cases: Sequence[Case], heldout: HeldoutSet, judge: Judge, reference: Judge, on_documents: OnDocuments
) -> tuple[ContinuationScores, list[ContinuationScores]]:
    """Scores of the reference, and of every case. Batch by batch, so that only a batch's probabilities are held."""
    full: list[ContinuationScores] = []
    found: list[list[ContinuationScores]] = [[] for _ in cases]
    for batch in heldout.windows.split(judge.rows):
        scores, log_probabilities = reference.reference(Full(0, heldout.length), batch)
        full.append(scores)
        if judge is not reference or all(case.name != "full" for case in cases):
            on_documents(len(batch))
        for case, results in zip(cases, found, strict=True):
            is_reference = judge is reference and case.name == "full"
            results.append(scores if is_reference else judge.score(case.policy, batch, log_probabilities))
            on_documents(len(batch))
    return join(full), [join(results) for results in found]


def _judge_recall(
    cases: Sequence[Case], sets: dict[str, RecallSet], judge: Judge, on_documents: OnDocuments
) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in cases]
    for kind, recall in sets.items():
        parts: list[list[ContinuationScores]] = [[] for _ in cases]
        for batch in recall.documents.split(judge.rows):
            for case, results in zip(cases, parts, strict=True):
                results.append(judge.score(case.policy, batch))
                on_documents(len(batch))
        for by_kind, results in zip(found, parts, strict=True):
            by_kind[kind] = recall.answered(join(results), judge.prompt_len)
    return found


def _row(case: Case, found: Judged, others: dict[str, Judged]) -> dict[str, Any]:
    is_rule = isinstance(case.policy, EvictionRule)
    row: dict[str, Any] = {
        "eviction": case.name,
        "budget": case.budget,
        "entries": case.entries,
        "heavy_slots": getattr(case.policy, "heavy", None),
        "recent_slots": getattr(case.policy, "recent", None),
        "path": "cache" if is_rule else "plain",
    }
    if found.text is not None:
        row |= _text_columns(found.text)
    if found.recall:
        estimates = {kind: estimate(values) for kind, values in found.recall.items()}
        row["recall"] = {kind: value.mean for kind, value in estimates.items()}
        row["recall_stderr"] = {kind: value.stderr for kind, value in estimates.items()}
        row["recall_documents"] = len(next(iter(found.recall.values())))
    row["against"] = {name: _against(found, other) for name, other in others.items()}
    return row


def _text_columns(text: ContinuationScores) -> dict[str, Any]:
    assert text.agrees is not None and text.kl is not None
    value = perplexity(text.nll)
    agreement = estimate(text.agrees.double().mean(dim=1))
    kl = estimate(text.kl.double().mean(dim=1))
    return {
        "documents": len(text.nll),
        "perplexity": value.mean,
        "stderr": value.stderr,
        "agreement": agreement.mean,
        "agreement_stderr": agreement.stderr,
        "kl": kl.mean,
        "kl_stderr": kl.stderr,
    }


def _against(found: Judged, other: Judged) -> dict[str, Any]:
    """Differences from another policy on the same documents: a share for perplexity, absolute for recall."""
    result: dict[str, Any] = {}
    if found.text is not None and other.text is not None:
        change = perplexity_change(found.text.nll, other.text.nll)
        result |= {"perplexity": change.mean, "perplexity_stderr": change.stderr}
    if found.recall and other.recall:
        changes = {kind: difference(values, other.recall[kind]) for kind, values in found.recall.items()}
        result["recall"] = {kind: value.mean for kind, value in changes.items()}
        result["recall_stderr"] = {kind: value.stderr for kind, value in changes.items()}
    return result
