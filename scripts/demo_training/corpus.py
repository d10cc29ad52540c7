"""A folder of text files as token ids: what is trained on, and the last 6 % of every file, which is not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.evaluation.recall import NAMES, QUESTION, STATEMENT, WORDS

HELD_OUT = 0.06
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
PAD_ID, LEADING_ID = 1, 2  # OPT's: </s> begins every text and also ends it
# How often names and words of the recall documents are told to the tokenizer, so that each becomes one token.
TOLD = 400


@dataclass(frozen=True)
class Corpus:
    """Text for a model.

    Attributes:
        train, held_out: token ids, all files one after another, without special tokens.
        held_out_texts: by file name, the text of held_out.
    """

    tokenizer: Tokenizer
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    held_out_texts: dict[str, str]


def read_corpus(folder: Path, vocab_size: int) -> Corpus:
    """The text files (.txt, UTF-8) of a folder, and a tokenizer made from them.

    Raises UsageError if there are none, or they cannot be read.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise UsageError(f"--corpus {folder} has no .txt files; give a folder with the texts to train on")
    try:
        parts = {file.name: divide(file.read_text(encoding="utf-8")) for file in files}
    except (OSError, ValueError) as error:
        raise UsageError(f"--corpus {folder} cannot be read: {error}; give files of UTF-8 text") from None
    train = [part for part, _ in parts.values()]
    held_out = {name: part for name, (_, part) in parts.items()}
    tokenizer = make_tokenizer(train, vocab_size)
    return Corpus(tokenizer, encode(tokenizer, train), encode(tokenizer, held_out.values()), held_out)


def divide(text: str) -> tuple[str, str]:
    """What is trained on, and what is held out; cut at a line end."""
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
    return text[:cut], text[cut:]


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE that puts </s> before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    told = " ".join([*(NAMES.split() + WORDS.split()), *STATEMENT, *QUESTION] * TOLD)
    lines = (line for text in texts for line in text.split("\n"))
    tokenizer.train_from_iterator([*lines, told], trainer)
    leading = SPECIAL[LEADING_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{leading} $A", special_tokens=[(leading, LEADING_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int64]:
    """Texts as ids, line by line, as a long text would be too slow."""
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
    return np.array([token for line in encoded for token in line.ids], dtype=np.int64)
