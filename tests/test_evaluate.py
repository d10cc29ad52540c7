"""Judging policies: the documents are what they claim to be, the command is honest, the published numbers hold."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Finished, call, read_jsonl
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o import LLM, evaluate
from flexgen_h2o.checkpoints import DEMO_FOLDER
from flexgen_h2o.errors import UsageError
from flexgen_h2o.evaluation.compare import (
    CONTINUATION_LEN,
    PROMPT_LEN,
    HeldoutSet,
    budget_rule,
    compare,
    demo_heldout_set,
)
from flexgen_h2o.evaluation.heldout import heldout_tokens, text_windows
from flexgen_h2o.evaluation.recall import KINDS, RecallKind, RecallSet, RecallWriter
from flexgen_h2o.evaluation.scoring import ContinuationScores
from flexgen_h2o.tokenizer import Tokenizer, load_tokenizer

STATEMENT = re.compile(r"Remember: the password of (\w+) is (\w+ \w+ \w+)\.\n")
QUESTION = re.compile(r"Question: what is the password of (\w+)\? Answer: the password of (\w+) is (\w+ \w+ \w+)\.\n")
ASKING = re.compile(r"Question: what is the password of (\w+)\? Answer: the password of (\w+) is$")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    assert llm.folder is not None
    tokenizer = load_tokenizer(llm.folder, llm.config)
    assert tokenizer is not None
    return tokenizer


def evaluate_with(*argv: str) -> Finished:
    return call(evaluate, ["compare", *argv])


# --- running text -----------------------------------------------------------------------------------------------


def test_windows_are_pieces_of_the_text_behind_a_leading_token() -> None:
    text = heldout_tokens()
    windows = text_windows(text, 32, 512, leading_id=2)
    assert windows.shape == (32, 512) and windows.dtype == torch.int64
    assert (windows[:, 0] == 2).all()
    whole = text.tobytes()
    places = [whole.find(window[1:].numpy().tobytes()) // 8 for window in windows]
    assert all(place >= 0 for place in places)
    assert places == sorted(set(places)) and places[-1] + 511 <= len(text)
    gaps = np.diff(places)
    assert gaps.max() - gaps.min() <= 1  # spread evenly over the whole of it
    assert places[0] < 10 and len(text) - places[-1] - 511 < 10


def test_the_heldout_text_is_that_of_the_tokenizer(tokenizer: Tokenizer, llm: LLM) -> None:
    text = heldout_tokens()
    assert text.min() >= 0 and text.max() < llm.config.vocab_size
    assert re.search(r"\b(the|and|of)\b", tokenizer.decode(text[1000:1200].tolist()))


# --- recall documents -------------------------------------------------------------------------------------------

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
    recall = RecallSet(torch.zeros(2, 20), (range(12, 15), range(17, 20)))
    correct = torch.ones(2, 10, dtype=torch.bool)
    correct[0, 3] = False  # column 13, in the first answer
    correct[1, 5:7] = False  # columns 15 and 16, between the two
    assert recall.recall(ContinuationScores(torch.zeros(2, 10), correct), prompt_len=10) == 0.75


# --- budgets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eviction", "budget", "sizes"),
    [
        ("h2o", 0.2, (38, 39)),
        ("local", 0.2, (0, 77)),
        ("sink", 0.2, (4, 73)),
        ("full", 0.2, (0, 512)),
        ("h2o", 0.1, (19, 19)),
        ("h2o", 1.0, (192, 192)),
        ("h2o", 1 / 384, (0, 1)),
        ("sink", 5 / 384, (4, 1)),
    ],
)
def test_budgets_are_shares_of_the_prompt_and_equal_for_all(
    eviction: str, budget: float, sizes: tuple[int, int]
) -> None:
    rule = budget_rule(eviction, budget, 384, 512)
    assert (rule.name, rule.heavy, rule.recent) == (eviction, *sizes)


@pytest.mark.parametrize(("eviction", "budget"), [("sink", 4 / 384), ("h2o", 0.001), ("local", 0.001), ("best", 0.2)])
def test_a_budget_or_policy_that_cannot_be_is_refused(eviction: str, budget: float) -> None:
    with pytest.raises(UsageError, match=eviction):
        budget_rule(eviction, budget, 384, 512)


# --- the command ------------------------------------------------------------------------------------------------

ROW_KEYS = "eviction budget perplexity recall documents stderr".split()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    record = tmp_path_factory.mktemp("results") / "new" / "compare.jsonl"
    argv = "--eviction full,h2o,local --documents 2 --recall-documents 2 --json --record".split()
    return evaluate_with(*argv, str(record)), record


def test_compare_reports_a_row_for_each_policy(quick: tuple[Finished, Path]) -> None:
    finished, _ = quick
    assert finished.code == 0 and finished.err == ""
    result = json.loads(finished.out.splitlines()[-1])
    assert (result["model"], result["dtype"]) == ("demo", "float32")
    assert [row["eviction"] for row in result["rows"]] == ["full", "h2o", "local"]
    for row in result["rows"]:
        assert set(ROW_KEYS) <= set(row) and set(row["recall"]) == set(KINDS)
        assert row["documents"] == 2 and row["stderr"] > 0
        assert all(0 <= value <= 1 for value in row["recall"].values())


def test_compare_shows_what_eviction_costs(quick: tuple[Finished, Path]) -> None:
    full, h2o, local = json.loads(quick[0].out.splitlines()[-1])["rows"]
    assert full["perplexity"] < h2o["perplexity"] < local["perplexity"]
    assert full["recall"]["hot"] == h2o["recall"]["hot"] == 1.0 > local["recall"]["hot"]
    assert (full["budget"], h2o["budget"]) == (1.0, 0.2)


def test_a_record_says_how_its_numbers_were_made(quick: tuple[Finished, Path]) -> None:
    finished, path = quick
    (record,) = read_jsonl(path)
    assert record["kind"] == "measurement"
    assert record["command"].startswith("python -m flexgen_h2o.evaluate compare --eviction full,h2o,local")
    assert record["rows"] == json.loads(finished.out.splitlines()[-1])["rows"]
    assert {"torch", "transformers", "numpy", "python"} <= set(record["versions"])
    assert {"cpu", "cores", "threads", "memory_bytes"} <= set(record["machine"])
    assert {"date", "git_commit"} <= set(record)


def test_the_table_has_a_line_for_each_row() -> None:
    row = {"perplexity": 50.0, "recall": {"hot": 1.0, "in_prompt": 0.25}, "heavy_slots": 38, "recent_slots": 39}
    rows: list[dict[str, Any]] = [{**row, "eviction": "full"}, {**row, "eviction": "h2o", "perplexity": 55.0}]
    assert evaluate.table(rows).splitlines() == [
        "| policy | kept entries | perplexity | against full | hot | in prompt |",
        "|---|---|---|---|---|---|",
        "| full | all | 50.0 | +0.0% | 1.00 | 0.25 |",
        "| h2o | 77 | 55.0 | +10.0% | 1.00 | 0.25 |",
    ]
    assert "| h2o | 77 | 55.0 |  |" in evaluate.table(rows[1:])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--documents", "1"], ["--documents is 1", "at least 2"]),
        (["--documents", "x"], ["--documents", "'x'"]),
        (["--recall-documents", "0"], ["--recall-documents is 0", "at least 1"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "float32"]),
        (["--budget", "0"], ["--budget", "'0'"]),
        (["--budget", "0.2,1.5"], ["--budget", "'1.5'"]),
        (["--budget", "nan"], ["--budget", "'nan'"]),
        (["--budget", "0.2,"], ["--budget", "''"]),
        (["--budget", "0.001"], ["--budget 0.001", "larger"]),
        (["--eviction", "best"], ["best", "h2o"]),
        (["--eviction", "h2o,"], ["known policies"]),
        (["--eviction", ""], ["known policies"]),
        (["--model", "/nowhere"], ["/nowhere"]),
        (["--documents"], ["--documents"]),
        (["--misspelt"], ["--misspelt"]),
    ],
)
def test_mistakes_are_refused_before_any_work(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.evaluation.compare._row", None)
    finished = evaluate_with(*argv)
    assert finished.code == 2 and finished.out == "" and len(finished.problems) == 1
    assert all(word in finished.problems[0] for word in words), finished.problems


def test_all_mistakes_are_listed_together() -> None:
    finished = evaluate_with(*"--documents 1 --recall-documents 0 --budget 0,x,1.5,nan --dtype int8".split())
    assert finished.code == 2 and len(finished.problems) == 7


@pytest.mark.parametrize("argv", [["--device", "cpu"], ["--device", "auto"], ["--dtype", "auto"]], ids=" ".join)
def test_device_and_dtype_are_taken_as_run_takes_them(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.evaluation.compare.compare", lambda *_: [])
    finished = evaluate_with(*argv, "--json")
    assert finished.code == 0, finished.err


def test_a_model_without_a_tokenizer_cannot_be_compared(tmp_path: Path) -> None:
    folder = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path / "tiny")
    finished = evaluate_with("--model", str(folder))
    assert finished.code == 2 and "no tokenizer" in finished.problems[0]


@pytest.mark.parametrize("change", ["context", "vocabulary"])
def test_a_model_too_small_for_the_documents_is_refused(tmp_path: Path, change: str) -> None:
    """The demo model with half its positions, or half its tokens."""
    for path in DEMO_FOLDER.iterdir():
        shutil.copy(path, tmp_path)
    key, name, size = {
        "context": ("max_position_embeddings", "model.decoder.embed_positions.weight", 256),
        "vocabulary": ("vocab_size", "model.decoder.embed_tokens.weight", 2048),
    }[change]
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, key: size}))
    tensors = load_file(tmp_path / "model.safetensors")
    rows = size + 2 if change == "context" else size
    save_file({**tensors, name: tensors[name][:rows].clone()}, tmp_path / "model.safetensors")
    finished = evaluate_with(*"--eviction full --documents 2 --recall-documents 1 --model".split(), str(tmp_path))
    assert finished.code == 2 and str(size) in finished.problems[0]


# --- the published numbers --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eviction", "perplexity", "recall"),
    [("full", 50.7, (0.9, 1.0)), ("h2o", 53.7, (0.9, 1.0)), ("sink", 56.3, (0.0, 0.1)), ("local", 74.5, (0.0, 0.1))],
)
def test_published_quality_holds(llm: LLM, eviction: str, perplexity: float, recall: tuple[float, float]) -> None:
    """32 windows and 48 passwords that were asked about three times; 77 of 384 entries kept."""
    assert (PROMPT_LEN, CONTINUATION_LEN) == (384, 128)
    heldout = demo_heldout_set(llm, documents=32, recall_documents=48)
    only_hot = HeldoutSet(heldout.windows, {"hot": heldout.recall["hot"]})
    (row,) = compare(llm, [eviction], [0.2], only_hot, lambda: None)
    assert eviction == "full" or row["heavy_slots"] + row["recent_slots"] == 77
    assert row["perplexity"] == pytest.approx(perplexity, rel=0.02)
    assert recall[0] <= row["recall"]["hot"] <= recall[1]
    assert row["documents"] == 32


@pytest.mark.slow
def test_the_demo_tells_policies_apart(capsys: pytest.CaptureFixture[str]) -> None:
    from flexgen_h2o.demo.__main__ import main

    assert main() == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    verdicts = {line.split()[0]: re.search(r"\b(right|wrong)\b", line.split("'")[-1]) for line in lines}
    found = {name: match and match[1] for name, match in verdicts.items()}
    assert found == {"full": "right", "h2o": "right", "sink": "wrong", "local": "wrong"}
