"""scripts/fetch_corpus.py: what is made of the packages' files. Nothing is fetched here."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import pytest
from support.commands import ROOT, call

sys.path.insert(0, str(ROOT / "scripts"))

import fetch_corpus
from fetch_corpus import chapters, cleaned, novels, strings


def serialised(lines: list[str | None]) -> bytes:
    """A vector of strings as R writes it; None is a missing one, of length -1."""
    parts = [b"X\n\x00\x00\x00\x03", struct.pack(">ii", 16, len(lines))]
    for line in lines:
        raw = b"" if line is None else line.encode()
        parts.append(struct.pack(">ii", 0x00040009, -1 if line is None else len(raw)) + raw)
    return b"".join(parts)


def test_vectors_of_strings_are_read_and_missing_ones_are_empty() -> None:
    assert strings(serialised(["It is a truth", "", None, "“universally”"])) == [
        "It is a truth",
        "",
        "",
        "“universally”",
    ]
    assert strings(b"X\n no strings here") == []
    assert strings(serialised(["cut", "short"])[:-6]) == ["cut"]


def test_novels_are_the_long_ones_among_the_records() -> None:
    long_one, short_one = [f"line {number}" for number in range(1200)], ["title", "author"]
    records = [zlib.compress(serialised(list(lines))) for lines in (short_one, long_one, short_one)]
    database = b"".join(struct.pack(">i", len(record)) + record for record in records)
    assert list(novels(database)) == ["\n".join(long_one)]


def test_a_chapter_is_a_paragraph_without_numbers() -> None:
    output = """
bible(KJV) [Gen1:1]>
Ge1:1 In the beginning God created the heaven and the {earth}.
Ge1:2 And the earth was without form,
     and void.
1Ch2:1 These are the <sons> of Israel.
bible(KJV) [Re22:21]>
"""
    assert chapters(output).split("\n\n") == [
        "In the beginning God created the heaven and the earth. And the earth was without form, and void.",
        "These are the sons of Israel.",
    ]


def test_text_is_cleaned() -> None:
    text = "“It is_ so—as I\r\nsaid,”\n\n  \nshe   wrote.\n"
    assert cleaned(text) == '"It is so--as I said,"\nshe wrote.\n'


def test_what_cannot_be_fetched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_corpus, "DEBIAN", ("no-such-package-there-is",))
    monkeypatch.setenv("PATH", str(tmp_path))
    finished = call(fetch_corpus, ["--out", str(tmp_path / "texts")])
    assert finished.code == 1 and "there is no apt-get" in finished.problems[0]
    fails = tmp_path / "apt-get"
    fails.write_text("#!/bin/sh\necho 'E: Unable to locate package' >&2\nexit 100\n")
    fails.chmod(0o755)
    finished = call(fetch_corpus, ["--out", str(tmp_path / "texts")])
    assert finished.code == 1 and "Unable to locate package" in finished.problems[0]
