"""The text that ships with the demo model and that it was not trained on."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HELDOUT_TOKENS = Path(__file__).parent.parent / "demo" / "heldout" / "tokens.npy"


def heldout_tokens() -> NDArray[np.int64]:
    """All held-out tokens in one row, under the demo model's tokenizer."""
    return np.load(HELDOUT_TOKENS).astype(np.int64)


def text_windows(tokens: NDArray[np.int64], count: int, length: int, leading_id: int) -> Tensor:
    """`count` windows, evenly spaced over the text, each with the leading token in front.

    Returns: [count, length] int64.
    """
    starts = np.linspace(3, len(tokens) - length - 2, count).astype(int)
    windows = [[leading_id, *tokens[start : start + length - 1]] for start in starts]
    return torch.from_numpy(np.array(windows, dtype=np.int64))
