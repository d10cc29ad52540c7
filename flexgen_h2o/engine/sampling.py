"""Choosing the next token from logits: greedy, or sampled with numbers that depend on nothing but the request.

The uniform number for a token is a hash of (seed, prompt index, step), so that neither the split into sub-batches nor
the order in which they run changes what is sampled.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexgen_h2o.plan.sampling import SamplingParams


def choose_tokens(logits: Tensor, params: SamplingParams, prompt_indices: Tensor, steps: Sequence[int]) -> Tensor:
    """The next token of each row.

    Args:
        logits: [rows, vocab_size] float32.
        prompt_indices: [rows] int64 on the CPU, each row's index in the whole input.
        steps: by row, tokens generated so far.
    Returns: [rows] int64.
    """
    if params.is_greedy:
        return logits.argmax(dim=-1)
    # Below the row's maximum, so that no temperature, however small, makes an infinity of it.
    relative = logits - logits.max(dim=-1, keepdim=True).values
    kept = _filter(relative / params.temperature, params)
    cumulative = kept.double().softmax(dim=-1).cumsum(dim=-1)
    numbers = uniform_numbers(params.seed, prompt_indices.numpy(), np.asarray(steps))
    uniform = torch.from_numpy(numbers).to(logits.device)
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


def uniform_numbers(seed: int, indices: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each index and its step.

    From a counter hash: the finaliser of SplitMix64, Steele et al. 2014.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.full(indices.shape, seed, np.int64).astype(np.uint64))
        state = _mix(state + indices.astype(np.uint64))
        state = _mix(state + steps.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
