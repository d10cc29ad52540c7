"""Reading prompts: every line becomes a prompt or says what is wrong with it."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.jobs.formats import PromptLine, bounded_lines, json_line, read_prompts


def parse(*lines: bytes) -> list[PromptLine]:
    return list(read_prompts(io.BytesIO(b"\n".join(lines)), is_json=True))


def one(line: bytes) -> PromptLine:
    (parsed,) = parse(line)
    return parsed


def test_text_and_ids_are_read_with_their_names() -> None:
    lines = parse(b'{"id": "a", "prompt": "some text"}', b'{"id": 7.5, "prompt_ids": [2, 0, 5]}', b'{"prompt": ""}')
    assert lines == [
        PromptLine(1, "a", "some text"),
        PromptLine(2, 7.5, [2, 0, 5]),
        PromptLine(3, 2, ""),
    ]


def test_without_an_id_a_line_is_called_by_its_place_among_the_prompts() -> None:
    lines = parse(b"", b'{"prompt": "a"}', b"   ", b"{", b'{"prompt": "b"}')
    assert [(line.line, line.id) for line in lines] == [(2, 0), (4, 1), (5, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", ["not JSON"]),
        (b'{"prompt": "a"', ["not JSON"]),
        (b"plain text", ["not JSON"]),
        (b'"text"', ["str", "object"]),
        (b"[1, 2]", ["list", "object"]),
        (b"3", ["int", "object"]),
        (b"null", ["object"]),
        (b"{}", ["no prompt", "prompt_ids", "none"]),
        (b'{"id": 3, "text": "a"}', ["no prompt", "prompt_ids", "id, text"]),
        (b'{"prompt": "a", "prompt_ids": [1]}', ["both", "prompt_ids"]),
        (b'{"prompt": null, "prompt_ids": [1]}', ["both", "prompt_ids"]),
        (b'{"prompt": 3}', ["prompt is int", "string"]),
        (b'{"prompt": null}', ["prompt is", "string"]),
        (b'{"prompt": ["a"]}', ["prompt is list", "string"]),
        (b'{"prompt_ids": "1 2"}', ["prompt_ids", "whole numbers"]),
        (b'{"prompt_ids": null}', ["prompt_ids", "whole numbers"]),
        (b'{"prompt_ids": [1, "2"]}', ["prompt_ids", "whole numbers"]),
        (b'{"prompt_ids": [1, 2.0]}', ["prompt_ids", "whole numbers"]),
        (b'{"prompt_ids": [1, NaN]}', ["not JSON", "NaN"]),
        (b'{"prompt_ids": [1, true]}', ["prompt_ids", "whole numbers"]),
        (b'{"prompt_ids": [[1]]}', ["prompt_ids", "whole numbers"]),
        (b'{"id": [1], "prompt": "a"}', ["id must be"]),
        (b'{"id": {"a": 1}, "prompt": "a"}', ["id must be"]),
        (b'{"prompt": "\xff\xfe"}', ["UTF-8", "byte 12", "0xff"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"prompt_ids": [' + b"9" * 5000 + b"]}", ["not JSON"]),
    ],
)
def test_a_line_that_cannot_be_used_says_why(line: bytes, words: list[str]) -> None:
    parsed = one(line)
    assert parsed.prompt is None and parsed.error is not None
    assert all(word in parsed.error for word in words), parsed.error


def test_a_wrong_line_keeps_the_name_it_gave_itself() -> None:
    assert one(b'{"id": "mine", "prompt": 3}').id == "mine"
    assert one(b'{"id": [1], "prompt": "a"}').id == 0  # a name that cannot be used


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_an_id_that_json_cannot_write_is_refused(number: bytes) -> None:
    """Python reads and writes these words, but they are no JSON: the line of the result could not be read."""
    parsed = one(b'{"id": ' + number + b', "prompt": "a"}')
    json.dumps(parsed.id, allow_nan=False)
    assert parsed.error is not None


@pytest.mark.parametrize("identity", ["x", 3, -2, 1.5, None])
def test_scalar_ids_come_back_as_they_were(identity: object) -> None:
    assert one(json.dumps({"id": identity, "prompt": "a"}).encode()).id == identity


def test_unknown_keys_are_named_even_on_a_wrong_line() -> None:
    assert one(b'{"prompt": "a", "max_tokens": 3, "Prompt": 1}').unknown_keys == ("max_tokens", "Prompt")
    assert one(b'{"max_tokens": 3}').unknown_keys == ("max_tokens",)
    assert one(b'{"id": 1, "prompt_ids": [3]}').unknown_keys == ()


@pytest.mark.parametrize("is_json", [True, False], ids=["jsonl", "txt"])
def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_prompt(is_json: bool) -> None:
    rows = ['{"prompt": "a"}', '{"prompt": "b"}'] if is_json else ["a", "b"]
    raw = ("\ufeff" + "\r\n".join(rows) + "\r\n").encode()
    assert [line.prompt for line in read_prompts(io.BytesIO(raw), is_json)] == ["a", "b"]


def test_only_the_first_line_may_begin_with_a_byte_order_mark() -> None:
    assert [line.prompt for line in read_prompts(io.BytesIO("a\n\ufeffb\n".encode()), False)] == ["a", "\ufeffb"]


@pytest.mark.parametrize("is_json", [True, False], ids=["jsonl", "txt"])
def test_a_file_of_nothing_but_a_byte_order_mark_has_no_prompts(is_json: bool) -> None:
    assert list(read_prompts(io.BytesIO(b"\xef\xbb\xbf\n"), is_json)) == []


def test_text_lines_are_prompts_as_they_are() -> None:
    raw = b'  two  spaces \n\n{"prompt": "no JSON here"}\n\t\nnul \0 and \xe2\x80\xa8 stay\nlast'
    lines = list(read_prompts(io.BytesIO(raw), is_json=False))
    expected = ["  two  spaces ", '{"prompt": "no JSON here"}', "nul \0 and \u2028 stay", "last"]
    assert [line.prompt for line in lines] == expected
    assert [line.line for line in lines] == [1, 3, 5, 6]


def test_invalid_utf8_spoils_its_own_line_only() -> None:
    lines = list(read_prompts(io.BytesIO(b"good\nbad \xc3\x28\ngood too\n"), is_json=False))
    assert [line.prompt for line in lines] == ["good", None, "good too"]
    assert lines[1].error == "line is not UTF-8: byte 4 is 0xc3"


@given(st.binary(max_size=60), st.booleans())
def test_whatever_the_bytes_every_line_is_a_prompt_or_an_error(raw: bytes, is_json: bool) -> None:
    lines = list(read_prompts(io.BytesIO(raw), is_json))
    assert all((line.prompt is None) == (line.error is not None) for line in lines)
    assert [line.line for line in lines] == sorted({line.line for line in lines})


@given(st.text())
def test_written_lines_are_ascii_and_come_back(text: str) -> None:
    line = json_line({"id": 1, "text": text})
    assert line.isascii() and line.count("\n") == 1
    assert json.loads(line) == {"id": 1, "text": text}


def test_half_a_surrogate_pair_is_written_escaped() -> None:
    assert json.loads(json_line({"text": "\ud800"}))["text"] == "\ud800"


@given(st.binary(max_size=200), st.integers(1, 12))
def test_lines_are_those_of_the_file_but_cut_where_they_are_too_long(raw: bytes, most: int) -> None:
    assert list(bounded_lines(io.BytesIO(raw), most)) == [line[: most + 1] for line in io.BytesIO(raw)]


@pytest.mark.parametrize("is_json", [True, False], ids=["jsonl", "txt"])
def test_a_line_that_is_too_long_is_an_error_and_the_next_is_read(is_json: bool) -> None:
    rows = [b'{"prompt": "%s"}' % (b"a" * size) if is_json else b"a" * size for size in (3, 100, 3)]
    lines = list(read_prompts(bounded_lines(io.BytesIO(b"\n".join(rows)), 50), is_json, 50))
    assert [line.prompt for line in lines] == ["aaa", None, "aaa"]
    assert [line.line for line in lines] == [1, 2, 3]
    assert lines[1].error == "line has more than 50 bytes; no prompt may be longer"


def test_messages_stay_short_whatever_the_keys() -> None:
    line = one(json.dumps({"k" * 10_000 + str(n): 1 for n in range(1000)}).encode())
    assert line.error is not None and len(line.error) < 1000 and "..." in line.error
    assert sum(map(len, line.unknown_keys)) < 1000


def test_an_id_that_is_nested_as_deep_as_can_be_is_refused() -> None:
    depth = 900
    assert "id must be" in str(one(b'{"id": ' + b"[" * depth + b"]" * depth + b', "prompt": "a"}').error)
