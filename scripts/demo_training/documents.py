"""What the model is trained on: windows of text, recall documents, and passages that are repeated.

Each document is made from its own number, so that a run that was interrupted goes on with the documents that an
undisturbed one would have had, and any number of processes may make them.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from demo_training.corpus import LEADING_ID, SPECIAL
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.evaluation.recall import END, NAMES, QUESTION, STATEMENT, WORDS, WORDS_PER_PASSWORD, passage

ANSWER_WEIGHT = 3.0  # in the loss, of an answer's words
GUESS_WEIGHT = 0.3  # of names and passwords that are told for the first time, which nothing foretells
NOISE_WEIGHT = 0.1  # of a random passage that is said for the first time
MOST_FACTS = 6
TEXT_FIRST = 0.3  # of the recall documents begin with text
STATES = 0.6  # how often another fact is stated before the next question, while there is one

Part = tuple[list[int], float]  # token ids, and their weight in the loss


@dataclass(frozen=True)
class Mix:
    """Shares of recall documents and of repeated passages; the rest is text."""

    recall: float
    copy: float


class Documents(Dataset[tuple[Tensor, Tensor]]):
    """Documents by number: (ids, weights in the loss), [length + 1] each.

    Args:
        text: token ids to take windows and filler from.
        length: tokens that a document feeds to the model.
    """

    def __init__(self, tokenizer: Tokenizer, text: NDArray[np.int64], length: int, mix: Mix, seed: int):
        self._text = text
        self._length = length
        self._mix = mix
        self._seed = seed
        self._vocab_size = tokenizer.get_vocab_size()

        def encode(part: str) -> list[int]:
            return list(tokenizer.encode(part, add_special_tokens=False).ids)

        self._newline = encode("\n")[-1]
        self._end = encode(END)
        self._statement = [encode(part) for part in STATEMENT]
        self._question = [encode(part) for part in QUESTION]
        names, words = ([encode(f" {word}") for word in listed.split()] for listed in (NAMES, WORDS))
        self._names = [ids for ids in names if len(ids) == 1]
        self._words = [ids for ids in words if len(ids) == 1]
        if len(self._names) < MOST_FACTS or len(self._words) < WORDS_PER_PASSWORD:
            raise UsageError(
                f"--vocab {self._vocab_size} leaves {len(self._names)} names and {len(self._words)} words of one token,"
                f" and recall documents take {MOST_FACTS} and {WORDS_PER_PASSWORD}; make it larger"
            )

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        numbers = random.Random(f"{self._seed} {number}")
        kind = numbers.random()
        if kind < self._mix.recall:
            parts = self.recall(numbers)
        elif kind < self._mix.recall + self._mix.copy:
            parts = self.copy(numbers)
        else:
            parts = self.window(numbers)
        return self._cut(parts)

    def _cut(self, parts: list[Part]) -> tuple[Tensor, Tensor]:
        ids = [LEADING_ID, *(token for part, _ in parts for token in part)]
        weights = [0.0, *(weight for part, weight in parts for _ in part)]
        return torch.tensor(ids[: self._length + 1]), torch.tensor(weights[: self._length + 1])

    def window(self, numbers: random.Random) -> list[Part]:
        """Running text."""
        start = numbers.randrange(len(self._text) - self._length)
        return [(self._text[start : start + self._length].tolist(), 1.0)]

    def recall(self, numbers: random.Random) -> list[Part]:
        """Facts, text, and questions about the facts, with their answers, until the document is full."""
        is_dense = numbers.random() < 0.5
        waiting = self._facts(numbers)
        known: list[tuple[list[int], list[int]]] = []
        parts = [self._filler(numbers, 5, 60)] if numbers.random() < TEXT_FIRST else []
        while sum(len(part) for part, _ in parts) < self._length:
            if waiting and (not known or numbers.random() < STATES):
                known.append(waiting.pop())
                parts += self._stated(*known[-1])
                continue
            if not is_dense:
                parts.append(self._filler(numbers, 20, 200))
            elif numbers.random() < 0.4:
                parts.append(self._filler(numbers, 4, 24))
            parts += self._asked(*numbers.choice(known))
        return parts

    def copy(self, numbers: random.Random) -> list[Part]:
        """A passage, half the time of random tokens, said again and again, sometimes with other text between."""
        length = numbers.randrange(16, 200)
        if numbers.random() < 0.5:
            said = [numbers.randrange(len(SPECIAL), self._vocab_size) for _ in range(length)]
            parts: list[Part] = [(said, NOISE_WEIGHT)]
        else:
            said = passage(self._text, length, self._newline, numbers)
            parts = [(said, 1.0)]
        while sum(len(part) for part, _ in parts) < self._length:
            parts += [self._filler(numbers, 4, 40)] if numbers.random() < 0.3 else []
            parts.append((said, 1.0))
        return parts

    def _facts(self, numbers: random.Random) -> list[tuple[list[int], list[int]]]:
        names = numbers.sample(self._names, numbers.randint(1, MOST_FACTS))
        return [(name, sum(numbers.sample(self._words, WORDS_PER_PASSWORD), [])) for name in names]

    def _filler(self, numbers: random.Random, least: int, most: int) -> Part:
        return passage(self._text, numbers.randrange(least, most), self._newline, numbers), 1.0

    def _stated(self, name: list[int], password: list[int]) -> list[Part]:
        before, between = self._statement
        return [(before + name + between, 1.0), (password, GUESS_WEIGHT), (self._end, 1.0)]

    def _asked(self, name: list[int], password: list[int]) -> list[Part]:
        asking, answering, between = self._question
        return [
            (asking, 1.0),
            (name, GUESS_WEIGHT),
            (answering + name + between, 1.0),
            (password, ANSWER_WEIGHT),
            (self._end, 1.0),
        ]
