"""Recall: does a model still know, from its cut cache, a password that the prompt told it?

A document states three passwords of three words each, then holds ordinary text, then asks. Kinds:

    hot        one password is asked for and answered three times early in the prompt, and once more after it
    before     each password is asked for and answered once in the prompt, and once more after it
    never      the prompt only states the passwords; they are asked for after it
    in_prompt  the prompt only states them and ends with the question, so that only the answer is decoded

All but the last decode the question too, with the cut cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexgen_h2o.evaluation.scores import ContinuationScores
from flexgen_h2o.models.tokenizer import Tokenizer

RecallKind = Literal["hot", "before", "never", "in_prompt"]
KINDS: tuple[RecallKind, ...] = get_args(RecallKind)

NAMES = """
Anna Alice Emma Mary Ruth Sarah Martha Eve Jane Lucy Clara Rosa Nora Ellen Fanny Kate Grace Helen Laura Peter Paul John
James Henry George Edward Thomas David Daniel Samuel Adam Noah Jonah Mark Luke Simon Philip Frank Robert William
Charles Arthur Walter Oliver Victor Hugo Felix Oscar Leo Max
"""

WORDS = """
river window silver garden mountain candle horse bread water stone letter winter summer morning bridge castle ship
anchor island forest apple orange flower honey butter sugar paper pencil table chair mirror lamp clock bell drum violin
piano song dance king queen soldier sailor farmer teacher doctor child mother father brother sister dog cat lion tiger
eagle raven swan fish whale snake spider tree leaf root seed corn wheat barn field meadow valley desert ocean beach
cloud rain snow storm thunder fire smoke ash iron copper gold brass glass wood leather cotton silk wool coat shirt shoe
glove hat ring crown sword shield arrow bow hammer nail wheel cart wagon road street market church school tower wall
gate door key box bag cup plate knife spoon fork bottle barrel basket blanket pillow bed roof floor cellar attic kitchen
parlour green red blue yellow white black purple brown seven nine twelve twenty
"""

# Around a name, and a password.
STATEMENT = ("Remember: the password of", " is")
QUESTION = ("Question: what is the password of", "? Answer: the password of", " is")
END = ".\n"

FACTS_PER_DOCUMENT = 3
WORDS_PER_PASSWORD = 3
SHORT_FILLER, LONG_FILLER = 6, 18  # tokens of text between questions, in the prompt and after it


@dataclass(frozen=True)
class RecallSet:
    """Documents of one kind.

    Attributes:
        documents: [documents, length] int64.
        answers: for each question, the columns of its answer's words, the same in every document.
    """

    documents: Tensor
    answers: tuple[range, ...]

    def answered(self, scores: ContinuationScores, prompt_len: int) -> Tensor:
        """Share of each document's questions whose answer was right in every word: [documents] float64."""
        right = [scores.correct[:, [column - prompt_len for column in answer]].all(dim=1) for answer in self.answers]
        return torch.stack(right).double().mean(dim=0)


def passage(text: NDArray[np.int64], count: int, newline: int, numbers: random.Random) -> list[int]:
    """`count` tokens of running text, the last of them a line end; from the start of a line if one is near."""
    start = numbers.randrange(len(text) - count - 200)
    near = np.flatnonzero(text[start : start + 60] == newline)
    start += int(near[0]) + 1 if len(near) else 0
    return [*text[start : start + count - 1].tolist(), newline]


class RecallWriter:
    """Writes recall documents, with filler from `text` (token ids). The same seed writes the same documents.

    Only names and words of a single token are used, so that all questions are of one length.
    """

    def __init__(self, tokenizer: Tokenizer, text: NDArray[np.int64], leading_id: int, seed: int):
        self._encode = tokenizer.encode_part
        self._random = random.Random(seed)
        self._text = text
        self._leading_id = leading_id
        self._newline = self._encode("\n")[-1]
        self._names = self._single_tokens(NAMES)
        self._words = self._single_tokens(WORDS)

    def _single_tokens(self, words: str) -> list[list[int]]:
        encoded = (self._encode(" " + word) for word in words.split())
        return [ids for ids in encoded if len(ids) == 1]

    def write(self, kind: RecallKind, count: int, prompt_len: int) -> RecallSet:
        """`count` documents whose prompts have exactly `prompt_len` tokens."""
        written = [self._document(kind, prompt_len) for _ in range(count)]
        return RecallSet(torch.tensor([ids for ids, _ in written]), written[0][1])

    def _document(self, kind: RecallKind, prompt_len: int) -> tuple[list[int], tuple[range, ...]]:
        names = self._random.sample(self._names, FACTS_PER_DOCUMENT)
        facts = [(name, sum(self._random.sample(self._words, WORDS_PER_PASSWORD), [])) for name in names]
        ids = [self._leading_id]
        for name, password in facts:
            ids += self._statement(name, password)
        asked = [self._random.choice(facts)] if kind in ("hot", "in_prompt") else self._shuffled(facts)
        for fact in {"hot": asked * 3, "before": self._shuffled(facts)}.get(kind, []):
            ids += [*self._filler(SHORT_FILLER), *self._question(*fact)]
        if kind == "in_prompt":
            return self._close_with_question(ids, asked[0], prompt_len)
        ids += self._filler(prompt_len - len(ids))
        answers = []
        for number, fact in enumerate(asked):
            ids += self._filler(LONG_FILLER) if number else []
            ids += self._question(*fact)
            end = len(ids) - len(self._end())
            answers.append(range(end - WORDS_PER_PASSWORD, end))
        return ids, tuple(answers)

    def _close_with_question(
        self, ids: list[int], fact: tuple[list[int], list[int]], prompt_len: int
    ) -> tuple[list[int], tuple[range, ...]]:
        question = self._question(*fact)[: -len(self._end())]
        asking = len(question) - WORDS_PER_PASSWORD
        ids += self._filler(prompt_len - len(ids) - asking) + question
        return ids, (range(prompt_len, prompt_len + WORDS_PER_PASSWORD),)

    def _shuffled(self, facts: Sequence[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
        return self._random.sample(facts, len(facts))

    def _statement(self, name: list[int], password: list[int]) -> list[int]:
        before, between = map(self._encode, STATEMENT)
        return before + name + between + password + self._end()

    def _question(self, name: list[int], password: list[int]) -> list[int]:
        asking, answering, between = map(self._encode, QUESTION)
        return asking + name + answering + name + between + password + self._end()

    def _end(self) -> list[int]:
        return self._encode(END)

    def _filler(self, count: int) -> list[int]:
        return passage(self._text, count, self._newline, self._random)
