"""The documents that policies are judged on: windows of running text, and recall documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.evaluation.documents import HeldoutSet
from flexgen_h2o.evaluation.recall import KINDS, RecallSet, RecallWriter
from flexgen_h2o.llm import LLM

HELDOUT_FOLDER = Path(__file__).parent.parent / "demo" / "heldout"
PROMPT_LEN, CONTINUATION_LEN = 384, 128
RECALL_SEED = 4242


@dataclass(frozen=True)
class HeldoutSizes:
    """How many documents, and how long.

    Attributes:
        documents: windows of running text. recall_documents: of each kind of recall. Either may be 0.
    """

    documents: int
    recall_documents: int
    prompt_len: int = PROMPT_LEN
    continuation_len: int = CONTINUATION_LEN


def heldout_set(llm: LLM, sizes: HeldoutSizes, text: str | None = None) -> HeldoutSet:
    """Documents for a model: the same sizes give the same documents.

    Args:
        text: a file, of text or (.npy) of token ids; None for the text that ships with the demo model.
    Raises UsageError if they cannot be made, or are not for this model.
    """
    leading_id = llm.config.bos_token_id
    if leading_id is None:
        raise UsageError(f"{llm.config.name} has no leading token (bos_token_id in its config.json), which texts need")
    length = sizes.prompt_len + sizes.continuation_len
    context = llm.config.max_position_embeddings
    if length > context:
        raise UsageError(
            f"prompt of {sizes.prompt_len} + {sizes.continuation_len} to score exceed {llm.config.name}'s context of"
            f" {context} tokens; shorten --prompt-len or --continuation-len"
        )
    tokens = _tokens(llm, text)
    if len(tokens) < length + 5:
        raise UsageError(f"the text has {len(tokens)} tokens, and a document takes {length}; give a longer --text")
    windows = text_windows(tokens, sizes.documents, length, leading_id)
    recall = {}
    if sizes.recall_documents:
        recall = _recall(llm, tokens, leading_id, sizes)
    return HeldoutSet(sizes.prompt_len, windows, recall)


def _recall(llm: LLM, tokens: NDArray[np.int64], leading_id: int, sizes: HeldoutSizes) -> dict[str, RecallSet]:
    if llm.tokenizer is None:
        raise UsageError(f"{llm.config.name} has no tokenizer, which recall documents need")
    writer = RecallWriter(llm.tokenizer, tokens, leading_id, RECALL_SEED)
    sets: dict[str, RecallSet] = {kind: writer.write(kind, sizes.recall_documents, sizes.prompt_len) for kind in KINDS}
    longest = max(recall.documents.shape[1] for recall in sets.values())
    if longest > llm.config.max_position_embeddings:
        raise UsageError(
            f"recall documents of {longest} tokens exceed {llm.config.name}'s context of"
            f" {llm.config.max_position_embeddings}; shorten --prompt-len"
        )
    return sets


def _tokens(llm: LLM, text: str | None) -> NDArray[np.int64]:
    """The text in one row of token ids."""
    try:
        if text is not None and text.endswith(".npy"):
            tokens = np.load(text, allow_pickle=False).astype(np.int64).reshape(-1)
        elif text is None and llm.folder == DEMO_MODEL:
            tokens = heldout_tokens()
        else:
            tokens = np.array(list(_encoded(llm, text)), dtype=np.int64)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--text {text} cannot be read: {error}; give a text file, or a .npy file of token ids"
        ) from None
    wrong = tokens[(tokens < 0) | (tokens >= llm.config.vocab_size)]
    if len(wrong):
        raise UsageError(
            f"--text has token id {wrong[0]}, which is outside {llm.config.name}'s vocabulary of"
            f" {llm.config.vocab_size}; give a text of this model's tokenizer"
        )
    return tokens


def _encoded(llm: LLM, text: str | None) -> Iterator[int]:
    if llm.tokenizer is None:
        raise UsageError(f"{llm.config.name} has no tokenizer to read text with; give token ids, --text FILE.npy")
    files = sorted(HELDOUT_FOLDER.glob("*.txt")) if text is None else [Path(text)]
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            yield from llm.tokenizer.encode_part(line)


def heldout_tokens() -> NDArray[np.int64]:
    """All of the text that ships and that the demo model was not trained on, under its tokenizer."""
    return np.load(HELDOUT_FOLDER / "tokens.npy").astype(np.int64)


def text_windows(tokens: NDArray[np.int64], count: int, length: int, leading_id: int) -> Tensor:
    """`count` windows, evenly spaced over the text, each with the leading token in front.

    Returns: [count, length] int64.
    """
    starts = np.linspace(3, len(tokens) - length - 2, count).astype(int)
    windows = [[leading_id, *tokens[start : start + length - 1]] for start in starts]
    return torch.from_numpy(np.array(windows, dtype=np.int64).reshape(count, length))
