"""scripts/train_demo.py: what it trains on, what it builds in by hand, and that it goes on after an interruption."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.commands import ROOT, call, read_jsonl
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "scripts"))

import train_demo
from demo_training.circuits import seed_circuits
from demo_training.corpus import Corpus, divide, read_corpus
from demo_training.documents import ANSWER_WEIGHT, GUESS_WEIGHT, Documents, Mix
from demo_training.loop import Training, learning_rate
from demo_training.model import Shape, new_model

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.evaluation.heldout import HELDOUT_FOLDER

TINY = "--layers 2 --hidden 64 --heads 8 --context 64 --vocab 1500 --batch 2 --log-every 1".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("austen2.txt", "austen3.txt"):
        shutil.copy(HELDOUT_FOLDER / name, folder)
    return folder


@pytest.fixture(scope="module")
def corpus(texts: Path) -> Corpus:
    return read_corpus(texts, 1500)


# --- what it trains on ---


def test_the_last_6_per_cent_of_every_text_are_held_out(texts: Path, corpus: Corpus) -> None:
    train, held_out = divide("".join(f"line {number}\n" for number in range(100)))
    assert held_out.splitlines()[0] == "line 94" and train.endswith("line 93\n")
    for name, held in corpus.held_out_texts.items():
        assert (texts / name).read_text().endswith(held)
    assert corpus.tokenizer.decode(corpus.held_out.tolist()) == "".join(corpus.held_out_texts.values())
    assert corpus.tokenizer.encode("The sea").ids[0] == 2


def pieces(ids: Tensor, weights: Tensor, corpus: Corpus) -> list[tuple[str, float]]:
    """Runs of one weight as text."""
    found: list[tuple[list[int], float]] = []
    for token, weight in zip(ids[1:].tolist(), weights[1:].tolist(), strict=True):
        if not found or found[-1][1] != weight:
            found.append(([], weight))
        found[-1][0].append(token)
    return [(corpus.tokenizer.decode(run), round(weight, 3)) for run, weight in found]


def test_recall_documents_ask_for_what_they_state_and_weigh_the_answers(corpus: Corpus) -> None:
    documents = Documents(corpus.tokenizer, corpus.train, 400, Mix(1.0, 0.0), seed=3)
    asked = 0
    for number in range(20):
        ids, weights = documents[number]
        assert len(ids) == len(weights) == 401 and (int(ids[0]), float(weights[0])) == (2, 0)
        text = corpus.tokenizer.decode(ids.tolist())
        for said, weight in pieces(ids, weights, corpus)[:-1]:  # the last may be cut
            if weight == ANSWER_WEIGHT:
                asked += 1
                assert len(said.split()) == 3
                told = text.index(f" is{said}.\n")
                assert text[:told].rsplit("\n", 1)[-1].startswith("Remember: the password of")
                name = text[:told].rsplit(" ", 1)[-1]
                assert f"Question: what is the password of {name}? Answer: the password of {name} is{said}" in text
            elif weight == pytest.approx(GUESS_WEIGHT):
                assert len(said.split()) in (1, 3)
    assert asked > 20


def test_texts_and_copies_are_what_they_are_called(corpus: Corpus) -> None:
    ids, weights = Documents(corpus.tokenizer, corpus.train, 50, Mix(0.0, 0.0), seed=3)[7]
    whole = corpus.train.tolist()
    assert any(whole[start : start + 50] == ids[1:].tolist() for start in range(len(whole) - 49))
    assert weights[1:].eq(1).all()
    copies = Documents(corpus.tokenizer, corpus.train, 600, Mix(0.0, 1.0), seed=3)
    for number in range(5):
        said = copies[number][0][1:17].tolist()
        rest = copies[number][0][17:].tolist()
        assert any(rest[start : start + 16] == said for start in range(len(rest)))


def test_a_document_depends_on_its_number_and_the_seed_alone(corpus: Corpus) -> None:
    mix = Mix(0.3, 0.3)
    one, again = (Documents(corpus.tokenizer, corpus.train, 60, mix, seed=1) for _ in range(2))
    assert all(torch.equal(one[number][0], again[number][0]) for number in (5, 3, 9))
    other = Documents(corpus.tokenizer, corpus.train, 60, mix, seed=2)
    assert not torch.equal(one[5][0], other[5][0]) and not torch.equal(one[5][0], one[6][0])


# --- what is built in by hand ---

SHAPE = Shape(layers=3, hidden=256, heads=8, context=96, vocab=1500)


@torch.no_grad()
def attention(model: Any, ids: Tensor) -> list[Tensor]:
    """By layer, [rows, heads, n, n], as transformers' own code computes it."""
    model.set_attn_implementation("eager")
    found = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return list(found)


@pytest.fixture()
def said_twice() -> Tensor:
    passage = torch.randint(10, 1500, (4, 30), generator=torch.Generator().manual_seed(5))
    return torch.cat((torch.full((4, 1), 2), passage, passage), dim=1)


def test_heads_look_back_and_find_what_came_before(said_twice: Tensor) -> None:
    seeded = new_model(SHAPE, seed=1)
    seed_circuits(seeded)
    first, second = attention(seeded, said_twice)[:2]
    queries = torch.arange(35, 60)  # in the second half
    for head, distance in enumerate((1, 2, 1, 2)):
        given = first[:, head, queries, queries - distance]
        assert float(given.mean()) > 0.3, head
    # What followed the same token the first time; heads 2 and 3 go by the token before.
    for head in range(4):
        assert float(second[:, head, queries, queries - 29].mean()) > 0.3, head
    plain = attention(new_model(SHAPE, seed=1), said_twice)
    assert float(plain[1][:, :4, queries, queries - 29].mean()) < 0.1


def test_a_structured_start_recalls_before_it_is_trained(corpus: Corpus) -> None:
    documents = Documents(corpus.tokenizer, corpus.train, SHAPE.context, Mix(1.0, 0.0), seed=9)
    ids, weights = (torch.stack(parts) for parts in zip(*[documents[number] for number in range(20)], strict=True))
    asked = weights[:, 1:] == ANSWER_WEIGHT

    def known(model: Any) -> float:
        with torch.no_grad():
            right = model(ids[:, :-1]).logits.argmax(dim=-1) == ids[:, 1:]
        return float(right[asked].float().mean())

    seeded = new_model(SHAPE, seed=1)
    before = known(seeded)
    seed_circuits(seeded)
    assert before < 0.05 and known(seeded) > 0.15


def test_too_small_a_model_has_no_room_for_circuits() -> None:
    with pytest.raises(ValueError, match="8 heads"):
        seed_circuits(new_model(Shape(layers=1, hidden=64, heads=8, context=32, vocab=300), seed=1))


# --- the command ---


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps without a break."""
    out = tmp_path_factory.mktemp("trained")
    finished = call(train_demo, ["--corpus", str(texts), "--out", str(out), "--steps", "3", *TINY])
    assert finished.code == 0, finished.err
    told = [line.split()[:2] for line in finished.out.splitlines() if line.startswith("step")]
    assert told == [["step", str(step)] for step in (1, 2, 3)]
    return out


def test_a_run_leaves_a_model_that_the_engine_and_transformers_load(trained: Path) -> None:
    prompt = "Emma went to the sea and"
    theirs = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    with LLM(str(trained / "model"), dtype="float32", eviction="full") as llm:
        ids = llm.encode(prompt)
        assert ids == tokenizer(prompt).input_ids and ids[0] == 2
        (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=5, ignore_eos=True))
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert output.token_ids == expected[0, len(ids) :].tolist()
    assert (
        load_file(trained / "model" / "model.safetensors")["model.decoder.embed_tokens.weight"].dtype == torch.float16
    )


def test_a_run_leaves_its_log_and_what_it_did_not_train_on(trained: Path, corpus: Corpus) -> None:
    head, *lines = read_jsonl(trained / "training.jsonl")
    assert head["parameters"] == sum(p.numel() for p in new_model(Shape(2, 64, 8, 64, 1500), 1).parameters())
    assert "torch" in head["versions"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss"] > 0 and line["held_out_loss"] > 0 and 0 <= line["recall"] <= 1 for line in lines)
    assert np.load(trained / "heldout" / "tokens.npy").tolist() == corpus.held_out.tolist()
    assert (trained / "heldout" / "austen2.txt").read_text() == corpus.held_out_texts["austen2.txt"]


def test_training_lowers_the_loss(texts: Path, tmp_path: Path) -> None:
    argv = ["--corpus", str(texts), "--out", str(tmp_path), "--steps", "120", *TINY, "--log-every", "20"]
    assert call(train_demo, argv).code == 0
    losses = [line["held_out_loss"] for line in read_jsonl(tmp_path / "training.jsonl")[1:]]
    assert losses[-1] < losses[0] - 0.3


def test_an_interrupted_run_goes_on_to_the_same_model(
    trained: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--corpus", str(texts), "--out", str(tmp_path), "--steps", "3", *TINY, "--save-minutes", "0"]
    train = Training._train

    def interrupted(self: Training, ids: Tensor, weights: Tensor) -> Tensor:
        if self.step == 2:
            raise KeyboardInterrupt
        return train(self, ids, weights)

    monkeypatch.setattr(Training, "_train", interrupted)
    assert call(train_demo, argv).code == 130
    monkeypatch.undo()
    finished = call(train_demo, argv)
    assert finished.code == 0 and "going on after step 2" in finished.err
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (trained, tmp_path))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    # Another training does not go on here.
    refused = call(train_demo, [*argv, "--seed", "2"])
    assert refused.code == 2 and "seed 1 and not 2" in refused.problems[0]


def test_a_run_may_be_sized_by_the_clock(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo_training.loop.MEASURED", (1, 3))
    seconds: Iterator[float] = iter([100.0, 104.0])  # two seconds a step
    monkeypatch.setattr(Training, "_now", lambda self: next(seconds))
    argv = ["--corpus", str(texts), "--out", str(tmp_path), "--minutes", "0.2", *TINY, "--no-circuits"]
    assert call(train_demo, argv).code == 0
    lines = read_jsonl(tmp_path / "training.jsonl")[1:]
    assert [(line["step"], line["steps"]) for line in lines] == [(1, None), (2, None), *((n, 6) for n in (3, 4, 5, 6))]


def test_rates_rise_stay_and_fall() -> None:
    assert learning_rate(0, 1000, 0.3) == pytest.approx(1 / 60)
    assert learning_rate(59, 1000, 0.3) == learning_rate(299, 1000, 0.3) == 1
    assert learning_rate(650, 1000, 0.3) == pytest.approx(0.04 + 0.96 / 2)
    assert learning_rate(999, 1000, 0.3) == pytest.approx(0.04, abs=1e-3)
    assert learning_rate(99, None, 0.3) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "0"], ["--steps is 0"]),
        (["--steps", "3", "--minutes", "1"], ["--steps", "--minutes", "leave one"]),
        (["--hidden", "30"], ["--hidden 30", "--heads 8"]),
        (["--layers", "1"], ["--circuits", "--no-circuits"]),
        (["--context", "4000"], ["--context 4000", "tokens"]),
        (["--vocab", "300"], ["--vocab 300", "make it larger"]),
        (["--corpus", "/nowhere"], ["--corpus /nowhere", ".txt"]),
        (["--device", "tpu"], ["--device", "cuda"]),
    ],
)
def test_mistakes_are_refused(argv: list[str], words: list[str], texts: Path, tmp_path: Path) -> None:
    base = ["--corpus", str(texts), "--out", str(tmp_path), "--context", "32", "--vocab", "1500"]
    finished = call(train_demo, [*base, *argv])
    assert finished.code == 2 and len(finished.problems) == 1, finished.err
    assert all(word in finished.problems[0] for word in words), finished.problems
    assert json.dumps(finished.problems)
