"""Recall documents: they ask for what the prompt has told, and only the password's words count as the answer."""

from __future__ import annotations

import re

import pytest
import torch

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.heldout import heldout_tokens
from flexgen_h2o.evaluation.recall import KINDS, RecallKind, RecallSet, RecallWriter
from flexgen_h2o.evaluation.scores import ContinuationScores
from flexgen_h2o.models.tokenizer import Tokenizer, load_tokenizer

STATEMENT = re.compile(r"Remember: the password of (\w+) is (\w+ \w+ \w+)\.\n")
QUESTION = re.compile(r"Question: what is the password of (\w+)\? Answer: the password of (\w+) is (\w+ \w+ \w+)\.\n")
ASKING = re.compile(r"Question: what is the password of (\w+)\? Answer: the password of (\w+) is$")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    llm = LLM(dtype="float32")
    assert llm.folder is not None
    tokenizer = load_tokenizer(llm.folder, llm.config)
    assert tokenizer is not None
    return tokenizer


COUNT, LENGTH = 12, 384


@pytest.fixture(scope="module")
def sets(tokenizer: Tokenizer) -> dict[str, RecallSet]:
    writer = RecallWriter(tokenizer, heldout_tokens(), 2, seed=5)
    return {kind: writer.write(kind, COUNT, LENGTH) for kind in KINDS}


def halves(tokenizer: Tokenizer, ids: torch.Tensor) -> tuple[str, str]:
    """The text of a document's prompt and of what follows it."""
    return tokenizer.decode(ids[:LENGTH].tolist()), tokenizer.decode(ids[LENGTH:].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_state_three_passwords_and_end_where_they_should(
    sets: dict[str, RecallSet], tokenizer: Tokenizer, kind: str
) -> None:
    for ids in sets[kind].documents:
        prompt, following = halves(tokenizer, ids)
        facts = STATEMENT.findall(prompt)
        assert ids[0] == 2 and prompt.startswith("Remember") and len(dict(facts)) == 3
        assert STATEMENT.findall(following) == []
        if kind == "in_prompt":
            assert ASKING.search(prompt)
        else:
            assert prompt.endswith("\n") and following.startswith("Question:")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_columns_of_the_password_and_of_nothing_else(
    sets: dict[str, RecallSet], tokenizer: Tokenizer, kind: str
) -> None:
    recall = sets[kind]
    for ids in recall.documents:
        facts = dict(STATEMENT.findall(halves(tokenizer, ids)[0]))
        assert len(recall.answers) == {"hot": 1, "before": 3, "never": 3, "in_prompt": 1}[kind]
        names = []
        for answer in recall.answers:
            before = tokenizer.decode(ids[: answer.start].tolist())
            asked = ASKING.search(before)
            assert asked is not None and asked[1] == asked[2]
            assert tokenizer.decode(ids[answer.start : answer.stop].tolist()) == " " + facts[asked[1]]
            assert tokenizer.decode(ids[answer.stop :].tolist()).startswith(".\n") or kind == "in_prompt"
            names.append(asked[1])
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("kind", "asked_before"), [("hot", 3), ("before", 3), ("never", 0), ("in_prompt", 0)], ids=lambda value: str(value)
)
def test_prompts_have_the_questions_of_their_kind(
    sets: dict[str, RecallSet], tokenizer: Tokenizer, kind: str, asked_before: int
) -> None:
    for ids in sets[kind].documents:
        prompt, following = halves(tokenizer, ids)
        facts = dict(STATEMENT.findall(prompt))
        earlier, later = QUESTION.findall(prompt), QUESTION.findall(following)
        assert len(earlier) == asked_before
        assert all(name == again and facts[name] == words for name, again, words in earlier + later)
        if kind == "hot":
            assert {name for name, _, _ in earlier} == {name for name, _, _ in later} and len(later) == 1
        if kind == "before":
            assert {name for name, _, _ in earlier} == {name for name, _, _ in later} == set(facts)
        if kind == "never":
            assert {name for name, _, _ in later} == set(facts)


def test_enough_text_lies_between_the_last_question_and_the_end_of_a_hot_prompt(
    sets: dict[str, RecallSet], tokenizer: Tokenizer
) -> None:
    """More than a cache of a fifth of the prompt holds; else recency alone would do."""
    for ids in sets["hot"].documents:
        prompt = halves(tokenizer, ids)[0]
        behind = prompt[[match.end() for match in QUESTION.finditer(prompt)][-1] :]
        assert len(tokenizer.encode_part(behind)) > LENGTH // 5


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_those_of_their_seed(tokenizer: Tokenizer, kind: RecallKind) -> None:
    one, again, other = (RecallWriter(tokenizer, heldout_tokens(), 2, s).write(kind, 3, LENGTH) for s in (1, 1, 2))
    assert torch.equal(one.documents, again.documents) and one.answers == again.answers
    assert not torch.equal(one.documents, other.documents)
    assert len({tuple(row) for row in one.documents.tolist()}) == 3


def test_an_answer_counts_only_if_every_word_is_right() -> None:
    recall = RecallSet(torch.zeros(3, 20), (range(12, 15), range(17, 20)))
    correct = torch.ones(3, 10, dtype=torch.bool)
    correct[0, 3] = False  # column 13, in the first answer
    correct[1, 5:7] = False  # columns 15 and 16, between the two
    correct[2, [2, 9]] = False  # a word of each
    assert recall.answered(ContinuationScores(torch.zeros(3, 10), correct), prompt_len=10).tolist() == [0.5, 1.0, 0.0]
