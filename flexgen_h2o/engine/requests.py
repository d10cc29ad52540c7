"""What is asked for, one prompt at a time, and what comes of it."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt, ready to run. `index` is its place in the whole input, on which its random numbers depend."""

    index: int
    prompt_ids: Sequence[int]


@dataclass(frozen=True)
class GenerationOutput:
    """What was generated for one prompt.

    Attributes:
        index: the prompt's place in the input.
        prompt_token_ids: the prompt as the model saw it.
        token_ids: generated ids, eos included; what follows a stop string is left out.
        text: without special tokens and from a stop string on cut off; None where there is no tokenizer.
        finish_reason: "stop" at eos, a stop id or a stop string; "length" at the end of max_new_tokens.
        error: why there is nothing to show for this prompt, and no token id; None if all went well.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None


def random_requests(vocab_size: int, prompt_len: int, count: int, seed: int) -> Iterator[Request]:
    """Prompts of random token ids, special tokens left out: for measuring speed."""
    numbers = random.Random(seed)
    first = min(4, vocab_size - 1)
    for index in range(count):
        yield Request(index, [numbers.randrange(first, vocab_size) for _ in range(prompt_len)])


def as_ids(prompt: object) -> list[int]:
    """A sequence of token ids as a list. Raises ValueError if it is something else."""
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
        raise ValueError(f"prompt is {type(prompt).__name__}; it must be text or a sequence of token ids")
    ids = list(prompt)
    wrong = [token for token in ids if not isinstance(token, Integral) or isinstance(token, bool)]
    if wrong:
        raise ValueError(f"prompt holds {wrong[0]!r} where a token id is expected")
    return [int(token) for token in ids]
