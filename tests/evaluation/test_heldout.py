"""Documents: windows are pieces of the text, and a text that is not for the model is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import TinyOpt

from flexgen_h2o import LLM
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.evaluation.heldout import (
    CONTINUATION_LEN,
    PROMPT_LEN,
    HeldoutSizes,
    heldout_set,
    heldout_tokens,
    text_windows,
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32")


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


def test_two_hundred_windows_do_not_overlap() -> None:
    starts = np.linspace(3, len(heldout_tokens()) - 512 - 2, 200).astype(int)
    assert np.diff(starts).min() >= 511


def test_the_heldout_text_is_that_of_the_tokenizer(llm: LLM) -> None:
    text = heldout_tokens()
    assert text.min() >= 0 and text.max() < llm.config.vocab_size
    assert llm.tokenizer is not None
    assert re.search(r"\b(the|and|of)\b", llm.tokenizer.decode(text[1000:1200].tolist()))


def test_a_set_has_what_its_sizes_say(llm: LLM) -> None:
    whole = heldout_set(llm, HeldoutSizes(3, 2))
    assert whole.windows.shape == (3, PROMPT_LEN + CONTINUATION_LEN) and whole.length == 512
    assert {kind: len(recall.documents) for kind, recall in whole.recall.items()} == dict.fromkeys(whole.recall, 2)
    assert len(whole.recall) == 4
    short = heldout_set(llm, HeldoutSizes(3, 0, prompt_len=100, continuation_len=20))
    assert short.windows.shape == (3, 120) and short.recall == {} and short.prompt_len == 100
    only_recall = heldout_set(llm, HeldoutSizes(0, 2))
    assert only_recall.windows.shape[0] == 0 and only_recall.length >= 384


def test_text_of_a_file_is_read_by_the_tokenizer(llm: LLM, tmp_path: Path) -> None:
    lines = [f"It was the {n}th day, and the captain looked at the sea.\n" for n in range(30)]
    (tmp_path / "text.txt").write_text("".join(lines))
    (window,) = heldout_set(llm, HeldoutSizes(1, 0, 40, 10), str(tmp_path / "text.txt")).windows
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(window[1:].tolist()) in "".join(lines)
    ids = heldout_tokens()[:500].astype(np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    (window,) = heldout_set(llm, HeldoutSizes(1, 0, 40, 10), str(tmp_path / "ids.npy")).windows
    assert window[1:].numpy().tobytes() in ids.astype(np.int64).tobytes()


def test_another_model_reads_the_text_that_ships_with_its_own_tokenizer(tmp_path: Path, llm: LLM) -> None:
    """A copy of the demo model, which is not known to be one, finds the same words."""
    for path in DEMO_MODEL.iterdir():
        shutil.copy(path, tmp_path)
    copy = LLM(str(tmp_path), dtype="float32")
    first, its_first = (heldout_set(model, HeldoutSizes(2, 0)).windows[0] for model in (llm, copy))
    assert torch.equal(first[:300], its_first[:300])


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (None, "none.txt", ["none.txt", "No such file"]),
        (b"\xff\xfe\x00\xd8", "bad.txt", ["bad.txt", "cannot be read"]),
        (b"no array", "bad.npy", ["bad.npy", "cannot be read"]),
        (b"A few words.\n", "short.txt", ["512", "longer --text"]),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(
    llm: LLM, tmp_path: Path, content: bytes | None, name: str, words: list[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        heldout_set(llm, HeldoutSizes(2, 0), str(tmp_path / name))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_token_ids_of_another_vocabulary_are_refused(llm: LLM, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(4000, 5000))
    with pytest.raises(UsageError, match=r"4096.*4096"):
        heldout_set(llm, HeldoutSizes(2, 0), str(tmp_path / "ids.npy"))


def test_documents_longer_than_the_context_are_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"500 \+ 13.*512"):
        heldout_set(llm, HeldoutSizes(2, 0, 500, 13))
    assert heldout_set(llm, HeldoutSizes(2, 0, 500, 12)).length == 512
    with pytest.raises(UsageError, match="recall documents"):
        heldout_set(llm, HeldoutSizes(0, 1, 480, 2))


def test_a_model_without_a_tokenizer_takes_token_ids_and_no_recall(
    tiny: Callable[..., TinyOpt], tmp_path: Path
) -> None:
    llm = LLM(str(tiny("pre_norm").folder), dtype="float32")
    sizes = HeldoutSizes(2, 0, 10, 5)
    with pytest.raises(UsageError, match="no tokenizer"):
        heldout_set(llm, sizes)
    np.save(tmp_path / "ids.npy", np.arange(99))
    assert heldout_set(llm, sizes, str(tmp_path / "ids.npy")).windows.shape == (2, 15)
    with pytest.raises(UsageError, match="no tokenizer"):
        heldout_set(llm, HeldoutSizes(2, 1, 10, 5), str(tmp_path / "ids.npy"))
