"""How tokens are to be chosen: plain data, checked in one place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_h2o.basics.settings import setting

DEFAULT_GEN_LEN = 32


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names are those of transformers' GenerationConfig, where it has them.

    Attributes:
        max_new_tokens: tokens per prompt, at most.
        do_sample: sample instead of taking the most likely token. The next three matter only with it.
        temperature: logits are divided by it; 0 is greedy.
        top_k: only the k most likely tokens; 0 is all.
        top_p: only the most likely tokens whose probabilities sum to at least this.
        seed: of the random numbers.
        stop: strings that end a row; `text` ends before the string, `token_ids` with the token that completes it.
        stop_token_ids: ids that end a row, like eos.
        ignore_eos: go on after eos.
    """

    max_new_tokens: int = setting(
        DEFAULT_GEN_LEN,
        "whole",
        "tokens to generate per prompt",
        shown=DEFAULT_GEN_LEN,
        topic="results",
        flag="--gen-len",
        least=1,
    )
    do_sample: bool = setting(False, "given", "sample instead of taking the likeliest token", topic="sampling")
    temperature: float = setting(1.0, "real", "default 1; 0 is greedy", topic="sampling")
    top_k: int = setting(0, "whole", "only the k likeliest tokens", shown="0, all", topic="sampling")
    top_p: float = setting(1.0, "real", "only the likeliest tokens that sum to p", shown=1, topic="sampling")
    seed: int = setting(
        0, "whole", "of sampling, dummy weights and random prompts", shown=0, topic="sampling", most=2**63 - 1
    )
    stop: tuple[str, ...] = setting((), "repeated", "string that ends a text; may be repeated", topic="sampling")
    stop_token_ids: tuple[int, ...] = setting((), "wholes", "token ids that end a text", topic="sampling", metavar="ID")
    ignore_eos: bool = setting(False, "given", "go on after the end-of-text token", topic="sampling")

    def __post_init__(self) -> None:
        stop: str | Sequence[str] = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def problems(self) -> list[str]:
        """Every mistake, a sentence each; empty if there is none."""
        found = []
        if self.max_new_tokens < 1:
            found.append(f"--gen-len is {self.max_new_tokens}; it must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(f"--temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            found.append(f"--top-k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"--top-p is {self.top_p}; it must be above 0 and at most 1")
        if not -(2**63) <= self.seed < 2**63:
            found.append(f"--seed is {self.seed}; it must fit 64 bits")
        if any(not text for text in self.stop):
            found.append("--stop is empty; every text contains it")
        if any(_is_broken(text) for text in self.stop):
            found.append("--stop is no text: its bytes are not UTF-8, so nothing that is generated would contain it")
        return found

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0 or self.top_k == 1


def _is_broken(text: str) -> bool:
    """Whether a string holds half a surrogate pair, or a byte of a command line that is not UTF-8."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)
