"""What decides how a text goes on."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o.engine.requests import FinishReason, GenerationOutput, Request
from flexgen_h2o.engine.sampling import choose_tokens
from flexgen_h2o.models.tokenizer import Tokenizer
from flexgen_h2o.plan.sampling import SamplingParams


class TokenChooser(Protocol):
    """Decides what each row goes on with: a sampler, or a text that is being scored."""

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        """The next token of some rows.

        Args:
            requests: by row, which of the chooser's requests it serves.
            steps: by row, tokens chosen for it before this one.
            logits: [rows, vocab_size] float32.
        Returns: [rows] int64.
        """

    def finished(self) -> Sequence[int]:
        """The requests that need no further token."""


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
        self._stopped: dict[int, None] = {}  # a set that keeps the order
        self._on_tokens = on_tokens

    @property
    def tokens(self) -> list[list[int]]:
        """What was chosen so far, by row."""
        return self._tokens

    def resume(self, tokens: Sequence[Sequence[int]]) -> None:
        """Goes on after tokens that another sampler has chosen for the same block."""
        self._tokens = [list(row) for row in tokens]
        self._stopped = {row: None for row in range(len(tokens)) if self._ends_row(row)}

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        chosen = choose_tokens(logits, self._params, self._indices[list(requests)], steps).tolist()
        added = 0
        for offset, row in enumerate(requests):
            if row in self._stopped:
                chosen[offset] = self._filler
                continue
            self._tokens[row].append(chosen[offset])
            if self._ends_row(row):
                self._stopped[row] = None
            added += 1
        self._on_tokens(added)
        return torch.tensor(chosen, device=logits.device)

    def finished(self) -> Sequence[int]:
        return list(self._stopped)

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
        reason: FinishReason = "stop" if row in self._stopped else "length"
        return GenerationOutput(request.index, list(request.prompt_ids), tokens, text, reason)


class NoChoice:
    """The TokenChooser of a dry run: logits without memory leave nothing to choose by."""

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)

    def finished(self) -> Sequence[int]:
        return ()


class Greedy:
    """A TokenChooser that takes the most likely token, as long as it is asked."""

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def finished(self) -> Sequence[int]:
        return ()
