"""Does a cut cache make generated text repeat itself? (H2O, appendix C.1: Self-BLEU.)

Self-BLEU: Zhu et al. 2018, arXiv 1802.01886. Distinct n-grams: Li et al. 2016, arXiv 1510.03055.
"""

from collections.abc import Sequence
from typing import Any

from flexgen_h2o.engine.requests import Request
from flexgen_h2o.evaluation.analysis.findings import Finding, Row
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.texts import generate
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.plan.sampling import SamplingParams

ORDERS = (1, 2, 3)  # of the n-grams that are counted
TEMPERATURE = 0.8  # a small model's greedy texts soon run in circles, whatever it keeps


def check_sacrebleu() -> str | None:
    """What keeps Self-BLEU from being computed, if anything."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError:
        return (
            "the analysis `diversity` needs sacrebleu, which is not installed: pip install 'flexgen_h2o[eval]', or name"
            " the others with --analyses"
        )
    return None


def self_bleu(texts: Sequence[str]) -> float:
    """How alike texts are: the mean over texts of each one's BLEU, of 1, against all others. Lower is more diverse."""
    from sacrebleu import sentence_bleu

    scores = [
        sentence_bleu(text, [*texts[:index], *texts[index + 1 :]]).score / 100 for index, text in enumerate(texts)
    ]
    return sum(scores) / len(scores)


def distinct(tokens: Sequence[Sequence[int]], order: int) -> float:
    """Share of different ones among the n-grams within each text, the mean over texts. Higher is more diverse."""
    shares = []
    for text in tokens:
        grams = [tuple(text[start : start + order]) for start in range(len(text) - order + 1)]
        shares.append(len(set(grams)) / len(grams) if grams else 0.0)
    return sum(shares) / len(shares)


def analyse(subject: Subject) -> Result:
    """Sampled texts of one length after every prompt, by policy: Self-BLEU and distinct n-grams."""
    heavy, recent = subject.entries // 2, subject.entries - subject.entries // 2
    rules = (Full(0, subject.length), H2O(heavy, recent), Local(0, subject.entries))
    rows = []
    for rule in rules:
        outputs = _generate(subject, rule)
        rows.append(
            {
                "eviction": rule.name,
                "self_bleu": self_bleu([text for text, _ in outputs]),
                "distinct": {str(order): distinct([ids for _, ids in outputs], order) for order in ORDERS},
                "example": outputs[0][0],
            }
        )
    return {
        "texts": len(subject.windows),
        "tokens": subject.length - subject.prompt_len,
        "temperature": TEMPERATURE,
        "rows": rows,
    }


def _generate(subject: Subject, rule: EvictionRule) -> list[tuple[str, list[int]]]:
    """(text, token ids) after each prompt."""
    length = subject.length - subject.prompt_len
    params = SamplingParams(length, do_sample=True, temperature=TEMPERATURE, ignore_eos=True)
    prompts = subject.windows[:, : subject.prompt_len].tolist()
    requests = [Request(index, prompt) for index, prompt in enumerate(prompts)]
    outputs = generate(subject.llm, rule, requests, params)
    return [(output.text or "", output.token_ids) for output in outputs]


def finding(result: Result) -> Finding:
    full, h2o, local = result["rows"]
    paper = {"full": "0.0057", "h2o": "0.0051", "local": "0.0436"}
    return Finding(
        "Text generated with H2O is as diverse",
        "Self-BLEU over 100 XSUM prompts is 0.0057 with the full cache, 0.0051 with H2O, 0.0436 with recent entries"
        " only (appendix C.1, LLaMA-7B); lower is more diverse",
        [
            Row(
                f"{row['eviction']}: Self-BLEU; distinct 1-, 2-, 3-grams of a text",
                f"{row['self_bleu']:.4f}; " + ", ".join(f"{value:.2f}" for value in row["distinct"].values()),
                paper[row["eviction"]],
            )
            for row in result["rows"]
        ],
        h2o["self_bleu"] <= 1.1 * full["self_bleu"] and h2o["self_bleu"] < local["self_bleu"],
        "Self-BLEU with H2O had to be at most 1.1 times the full cache's, and below that of recent entries only",
    )


def draw(axes: Any, result: Result) -> None:
    """Self-BLEU by policy."""
    axes.bar([row["eviction"] for row in result["rows"]], [row["self_bleu"] for row in result["rows"]])
    axes.set(ylabel="Self-BLEU, lower is more diverse")
