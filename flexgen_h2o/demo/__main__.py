"""`python -m flexgen_h2o.demo`: what a model still knows with most of its KV cache gone.

The shipped model is told a password, asked for it three times, given some two hundred tokens of a novel, and asked
again. Every policy answers the same prompt; all but the full cache keep a fifth of its entries.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import Parser
from flexgen_h2o.kvcache.eviction.spec import DEFAULT_SINKS
from flexgen_h2o.plan.sampling import SamplingParams

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

NOVEL = Path(__file__).parent / "heldout" / "austen5.txt"
NOVEL_CHARACTERS = 800  # about two hundred tokens
FACTS = """Remember: the password of Emma is silver window river.
Remember: the password of Thomas is honey tower sailor.
"""
QUESTION = "Question: what is the password of Emma? Answer: the password of Emma is"
ANSWER = " silver window river."
GEN_LEN = 6
KEPT = 0.2
# policy -> what it keeps
POLICIES = {
    "full": "everything",
    "h2o": "heavy hitters and recent entries",
    "sink": "the first four entries and recent ones",
    "local": "recent entries",
}


def prompt() -> str:
    """The whole prompt: facts, three questions with answers, a page of text, the question."""
    asked = "".join(f"{QUESTION}{ANSWER}\n" for _ in range(3))
    text = NOVEL.read_text(encoding="utf-8")
    start = text.index("\n", len(text) // 4)
    page = text[start : start + NOVEL_CHARACTERS].rsplit(".", 1)[0].strip() + ".\n"
    return FACTS + asked + page + QUESTION


def policy_model(eviction: str, entries: int) -> "LLM":
    """The demo model with an eviction policy that keeps `entries` entries per row and head."""
    from flexgen_h2o.llm import LLM

    if eviction == "full":
        return LLM(eviction="full", dtype="float32")
    heavy = {"h2o": entries // 2, "sink": DEFAULT_SINKS}.get(eviction, 0)
    hh_size = heavy if eviction == "h2o" else None
    return LLM(eviction=eviction, hh_size=hh_size, recent_size=entries - heavy, dtype="float32")


def main(argv: Sequence[str] = ()) -> int:
    """Prints the answers of all policies. Raises UsageError for flags: there are none but --help."""
    Parser(prog="python -m flexgen_h2o.demo", description=__doc__, allow_abbrev=False).parse_args(argv)
    # Loading torch takes a second, which --help need not wait for.
    from flexgen_h2o.llm import LLM

    text = prompt()
    print(text.splitlines()[0])
    print("... asked and answered three times, then a page of Jane Austen, then:")
    print(f"{QUESTION} ...\n")
    length = len(LLM(eviction="full").encode(text)) + GEN_LEN
    for eviction, kept in POLICIES.items():
        with policy_model(eviction, int(KEPT * length)) as llm:
            output = llm.generate([text], SamplingParams(max_new_tokens=GEN_LEN))[0]
            slots = llm.rule(len(output.prompt_token_ids), GEN_LEN).slots
            kv_bytes = llm.kv_cache_bytes
        answer = (output.text or "").split("\n")[0].strip()
        verdict = "right" if answer == ANSWER.strip() else "wrong"
        size = f"{slots} entries, {kv_bytes:,} bytes of KV"
        print(f"{eviction:6}{size:>37}: {answer!r:28} {verdict} (keeps {kept})")
    return EXIT_OK


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
