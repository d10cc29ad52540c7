"""One block's generation: requests in, tokens chosen, outputs out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexgen_h2o.sampling import SamplingParams, choose_tokens
from flexgen_h2o.tokenizer import Tokenizer

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
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason


class Sampler:
    """A TokenChooser for one block: chooses by the sampling parameters and keeps what was chosen.

    Args:
        block: the requests, in the order of the block's rows.
        eos_token_ids: ids that end a text unless eos is ignored.
        filler: what finished rows are fed.
        on_tokens: told how many tokens have just been generated.
    """

    def __init__(
        self,
        block: Sequence[Request],
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        filler: int,
        tokenizer: Tokenizer | None,
        on_tokens: Callable[[int], None],
    ):
        self._params = params
        self._indices = torch.tensor([request.index for request in block])
        self._stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._filler = filler
        self._tokenizer = tokenizer
        # A token that shows has at least one byte, so a stop string lies within this many of them.
        self._tail = max((len(text.encode()) for text in params.stop), default=0)
        self._tokens: list[list[int]] = [[] for _ in block]
        self._stopped = [False] * len(block)
        self._on_tokens = on_tokens

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        chosen = choose_tokens(logits, self._params, self._indices[rows], step).tolist()
        added = 0
        for offset, row in enumerate(range(rows.start, rows.stop)):
            if self._stopped[row]:
                chosen[offset] = self._filler
                continue
            self._tokens[row].append(chosen[offset])
            self._stopped[row] = self._ends_row(row)
            added += 1
        self._on_tokens(added)
        return torch.tensor(chosen, device=logits.device)

    def finished(self) -> bool:
        return all(self._stopped)

    def _ends_row(self, row: int) -> bool:
        tokens = self._tokens[row]
        if tokens[-1] in self._stop_ids:
            return True
        if not self._params.stop or self._tokenizer is None:
            return False
        tail = self._tokenizer.decode_tail(tokens, self._tail)
        return any(text in tail for text in self._params.stop)

    def output(self, row: int, request: Request) -> GenerationOutput:
        """What was generated for one row."""
        tokens = self._tokens[row]
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens)
        if text is not None:
            starts = [text.find(stop) for stop in self._params.stop if stop in text]
            text = text[: min(starts, default=len(text))]
        reason: FinishReason = "stop" if self._stopped[row] else "length"
        return GenerationOutput(request.index, list(request.prompt_ids), tokens, text, reason)


class NoChoice:
    """The TokenChooser of a dry run: logits without memory leave nothing to choose by."""

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)

    def finished(self) -> bool:
        return False
