"""How fast texts are scored token by token, beside a loop over transformers with past_key_values at batch 1.

All score the same windows of the demo model's held-out text, 384 tokens of prompt and 128 after it, in float32, and
take turns. A rate is documents a second; the loop scores fewer of them. The result goes to results/scoring.jsonl.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.heldout import HeldoutSizes, heldout_set
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.smooth import Smooth
from flexgen_h2o.machine.environment import append_record

RESULTS = Path(__file__).parent.parent / "results" / "scoring.jsonl"
LOOP = "transformers, batch 1"
KEPT = (38, 39)


@torch.inference_mode()
def loop_nll(model: Any, document: Tensor, prompt_len: int) -> Tensor:
    """Negative log-likelihood of every token after the prompt, one forward pass each: [tokens]."""
    output = model(document[None, :prompt_len], use_cache=True)
    nll = []
    for token in document[prompt_len:]:
        nll.append(-output.logits[0, -1].float().log_softmax(dim=-1)[token])
        output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
    return torch.stack(nll)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--loop-documents", type=int, default=4)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with LLM(dtype="float32", gpu_batch_size=args.documents) as llm:
        heldout = heldout_set(llm, HeldoutSizes(args.documents, 0))
        judge = Judge(llm, heldout.prompt_len)
        model = OPTForCausalLM.from_pretrained(llm.folder, dtype=torch.float32).eval()
        few = heldout.windows[: args.loop_documents]
        check(judge, model, few)
        ways: dict[str, tuple[Callable[[], Any], int]] = {
            LOOP: (lambda: [loop_nll(model, document, heldout.prompt_len) for document in few], len(few))
        }
        rules: tuple[EvictionRule, ...] = (Full(0, heldout.length), H2O(*KEPT), Smooth(*KEPT))
        for rule in rules:
            ways[rule.name] = (partial(judge.score, rule, heldout.windows), args.documents)
        rates = take_turns(ways, args.trials)
    rows = [summary(name, rates) for name in ways]
    for row in rows:
        print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else str(value) for key, value in row.items()))
    command = shlex.join(["python", "scripts/compare_scoring.py", *sys.argv[1:]])
    sizes = {"documents": args.documents, "loop_documents": args.loop_documents, "threads": args.threads}
    append_record(args.output, {"name": "scoring", "command": command, "model": "demo", **sizes, "rows": rows})


def check(judge: Judge, model: Any, documents: Tensor) -> None:
    """Both ways find the same."""
    expected = torch.stack([loop_nll(model, document, judge.prompt_len) for document in documents])
    found = judge.score(Full(0, documents.shape[1]), documents).nll
    assert torch.allclose(found, expected, atol=1e-3), (found - expected).abs().max()


def take_turns(ways: dict[str, tuple[Callable[[], Any], int]], trials: int) -> dict[str, list[float]]:
    """Documents a second of each way, by trial; a first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for trial in range(trials + 1):
        for name, (score, documents) in ways.items():
            started = time.perf_counter()
            score()
            if trial:
                rates[name].append(documents / (time.perf_counter() - started))
    return rates


def summary(name: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """A way's medians; ratios are paired by trial."""

    def against(other: str) -> float:
        return statistics.median(own / its for own, its in zip(rates[name], rates[other], strict=True))

    return {
        "way": name,
        "documents_s": statistics.median(rates[name]),
        "against_loop": against(LOOP),
        "against_h2o": against("h2o"),
        "trials": rates[name],
    }


if __name__ == "__main__":
    main()
