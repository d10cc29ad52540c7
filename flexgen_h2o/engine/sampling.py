"""Choosing the next token from logits: greedy, or sampled with numbers that depend on nothing but the request.

The uniform number for a token is a hash of (seed, prompt index, step), so that neither the split into sub-batches nor
the order in which they run changes what is sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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

    max_new_tokens: int = 32
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

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


def choose_tokens(logits: Tensor, params: SamplingParams, prompt_indices: Tensor, step: int) -> Tensor:
    """The next token of each row.

    Args:
        logits: [rows, vocab_size] float32.
        prompt_indices: [rows] int64 on the CPU, each row's index in the whole input.
        step: tokens generated so far.
    Returns: [rows] int64.
    """
    if params.is_greedy:
        return logits.argmax(dim=-1)
    # Below the row's maximum, so that no temperature, however small, makes an infinity of it.
    relative = logits - logits.max(dim=-1, keepdim=True).values
    kept = _filter(relative / params.temperature, params)
    cumulative = kept.double().softmax(dim=-1).cumsum(dim=-1)
    uniform = torch.from_numpy(uniform_numbers(params.seed, prompt_indices.numpy(), step)).to(logits.device)
    # In order of ids, not of probability: two tokens that nearly tie would trade places between one split and another.
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def _filter(logits: Tensor, params: SamplingParams) -> Tensor:
    """Sets to -inf what top-k and top-p leave out. [rows, vocab_size] -> the same."""
    if params.top_k:
        kth = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= params.top_p)
        logits = logits.masked_fill(dropped, -math.inf)
    return logits


def uniform_numbers(seed: int, indices: NDArray[np.int64], step: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each index, from a counter hash (the finaliser of SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(np.full(indices.shape, seed, np.int64).astype(np.uint64))
        state = _mix(state + indices.astype(np.uint64))
        state = _mix(state + np.uint64(step))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
