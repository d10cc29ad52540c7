"""Whatever files a folder brings, OPT's leading `</s>` is there once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.models.registry import from_folder
from flexgen_h2o.models.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["Hello there", " leading space", "", "two\nlines", "\u00e9\u00e8 \u4e2d", "trailing "]
PARTS = [[43, 563, 82, 425]]  # "Hello there"


def settings(**changes: Any) -> str:
    """The demo's tokenizer_config.json with changes; None takes a key out."""
    values = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text()) | changes
    return json.dumps({key: value for key, value in values.items() if value is not None})


def one_file(folder: Path, **changes: Any) -> Path:
    """A folder with tokenizer.json."""
    shutil.copy(DEMO_MODEL / "config.json", folder)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(settings(**changes))
    return folder


def two_files(folder: Path, **changes: Any) -> Path:
    """The same vocabulary as OPT's own folders have it: vocab.json and merges.txt."""
    shutil.copy(DEMO_MODEL / "config.json", folder)
    whole = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in whole["added_tokens"]}
    (folder / "vocab.json").write_text(json.dumps({**whole["model"]["vocab"], **added}))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text(settings(tokenizer_class="GPT2Tokenizer", **changes))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder, from_folder(folder))
    assert tokenizer is not None
    return tokenizer


FOLDERS = {
    "one file, told to add it": lambda folder: one_file(folder, add_bos_token=True),
    "one file that adds it, untold": lambda folder: one_file(folder, add_bos_token=None),
    "two files, told to add it": lambda folder: two_files(folder, add_bos_token=True),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_leading_token_is_neither_lost_nor_doubled(tmp_path: Path, kind: str) -> None:
    tokenizer = load(FOLDERS[kind](tmp_path))
    expected = load(DEMO_MODEL)
    assert tokenizer.encode("Hello there") == [2, 43, 563, 82, 425]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == 2 and 2 not in ids[1:]
        assert ids[1:] == tokenizer.encode_part(text) == expected.encode_part(text)


def test_a_tokenizer_that_has_no_leading_token_gets_none(tmp_path: Path) -> None:
    assert load(two_files(tmp_path, add_bos_token=False)).encode("Hello there") == PARTS[0]


def test_the_id_of_the_leading_token_is_that_of_the_model(tmp_path: Path) -> None:
    folder = one_file(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "bos_token_id": 0}))
    assert load(folder).encode("Hello there")[:2] == [0, 43]


@pytest.mark.parametrize("kind", FOLDERS)
def test_texts_come_back(tmp_path: Path, kind: str) -> None:
    tokenizer = load(FOLDERS[kind](tmp_path))
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


def test_a_tail_counts_tokens_that_show() -> None:
    tokenizer = load(DEMO_MODEL)
    ids = tokenizer.encode_part("Hello there, sailor")
    assert tokenizer.decode_tail([*ids, 2, 1, 2], 2) == tokenizer.decode(ids[-2:])
    assert tokenizer.decode_tail([2, *ids], 100) == "Hello there, sailor"
    assert tokenizer.decode_tail([2, 2], 3) == ""


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings())
    assert load_tokenizer(tmp_path, from_folder(tmp_path)) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2"])
def test_a_broken_tokenizer_is_refused_and_its_folder_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = one_file(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(folder)
    (problem,) = caught.value.problems
    assert str(folder) in problem and len(problem.splitlines()) == 1


def test_a_folder_of_the_old_kind_generates_the_same(tmp_path: Path) -> None:
    folder = two_files(tmp_path, add_bos_token=True)
    shutil.copy(DEMO_MODEL / "model.safetensors", folder)
    params = SamplingParams(max_new_tokens=6)
    old, new = (LLM(model, dtype="float32").generate(["The captain"], params) for model in (str(folder), None))
    assert old == new
