"""Eviction policies side by side: perplexity and recall at equal budgets, on the same documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexgen_h2o.errors import UsageError
from flexgen_h2o.evaluation.heldout import heldout_tokens, text_windows
from flexgen_h2o.evaluation.recall import KINDS, RecallSet, RecallWriter
from flexgen_h2o.evaluation.scoring import ContinuationScores, score_continuations
from flexgen_h2o.kvcache.eviction import RULES, EvictionRule
from flexgen_h2o.llm import LLM
from flexgen_h2o.policy import DEFAULT_SINKS
from flexgen_h2o.runtime import RunSizes

PROMPT_LEN, CONTINUATION_LEN = 384, 128
RECALL_SEED = 4242


@dataclass(frozen=True)
class HeldoutSet:
    """What every policy is judged on.

    Attributes:
        windows: [documents, 384 + 128] running text.
        recall: documents by kind.
    """

    windows: Tensor
    recall: dict[str, RecallSet]


def demo_heldout_set(llm: LLM, documents: int, recall_documents: int) -> HeldoutSet:
    """The demo model's held-out windows and recall documents. The same numbers give the same documents."""
    leading_id = llm.config.bos_token_id
    if llm.tokenizer is None or leading_id is None:
        raise UsageError(f"{llm.config.name} has no tokenizer or no leading token, which recall documents need")
    text = heldout_tokens()
    length = PROMPT_LEN + CONTINUATION_LEN
    if llm.config.max_position_embeddings < length or llm.config.vocab_size <= int(text.max()):
        raise UsageError(
            f"--model {llm.config.name} has a context of {llm.config.max_position_embeddings} and a vocabulary of"
            f" {llm.config.vocab_size}; the demo model's held-out set needs {length} and {int(text.max()) + 1}"
        )
    writer = RecallWriter(llm.tokenizer, text, leading_id, RECALL_SEED)
    windows = text_windows(text, documents, length, leading_id)
    return HeldoutSet(windows, {kind: writer.write(kind, recall_documents, PROMPT_LEN) for kind in KINDS})


def budget_rule(eviction: str, budget: float, prompt_len: int, length: int) -> EvictionRule:
    """The rule that keeps `budget` of the prompt's entries: (B/2, B/2), (0, B) or (sinks, B - sinks).

    Raises UsageError for an unknown policy or a budget too small for it.
    """
    if eviction not in RULES:
        raise UsageError(f"--eviction {eviction} is unknown; known policies: {', '.join(RULES)}")
    entries = round(budget * prompt_len)
    heavy = {"h2o": entries // 2, "sink": DEFAULT_SINKS}.get(eviction, 0)
    recent = length if eviction == "full" else entries - heavy
    if recent < 1:
        raise UsageError(
            f"--budget {budget:g} keeps {entries} of {prompt_len} entries, which leaves no recent one for {eviction};"
            " give a larger budget"
        )
    return RULES[eviction](heavy, recent)


def compare(
    llm: LLM, evictions: Sequence[str], budgets: Sequence[float], heldout: HeldoutSet, on_row: Callable[[], None]
) -> list[dict[str, Any]]:
    """One row per policy and budget; the full cache, which has no budget, gets one row."""
    cases = []
    for eviction in evictions:
        for budget in (1.0,) if eviction == "full" else budgets:
            cases.append((budget, budget_rule(eviction, budget, PROMPT_LEN, PROMPT_LEN + CONTINUATION_LEN)))
    rows = []
    for budget, rule in cases:
        rows.append(_row(llm, budget, rule, heldout))
        on_row()
    return rows


def _row(llm: LLM, budget: float, rule: EvictionRule, heldout: HeldoutSet) -> dict[str, Any]:
    text = _score(llm, rule, heldout.windows)
    by_document = text.nll.double().mean(dim=1)
    recall = {
        kind: documents.recall(_score(llm, rule, documents.documents), PROMPT_LEN)
        for kind, documents in heldout.recall.items()
    }
    return {
        "eviction": rule.name,
        "budget": budget,
        "heavy_slots": rule.heavy,
        "recent_slots": rule.recent,
        "perplexity": text.perplexity,
        # Standard error of the perplexity over documents, by the delta method.
        "stderr": text.perplexity * float(by_document.std() / len(by_document) ** 0.5),
        "documents": len(heldout.windows),
        "recall": recall,
    }


def _score(llm: LLM, rule: EvictionRule, documents: Tensor) -> ContinuationScores:
    """Scores documents in one block."""
    engine = llm.load().engine(RunSizes(rule, len(documents), PROMPT_LEN))
    return score_continuations(engine, documents, PROMPT_LEN)
