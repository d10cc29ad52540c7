"""Inputs as data: whatever the bytes, a line is answered or says what is wrong with it, in memory that stays flat."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import read_jsonl, run, write_jsonl

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.engine.block import PromptBlock
from flexgen_h2o.engine.loop import BlockTimes, Engine
from flexgen_h2o.jobs.job import BatchJob, file_source
from flexgen_h2o.jobs.results import open_results


def answers(folder: Path, lines: list[object], *argv: str) -> list[dict[str, Any]]:
    """What is written for these lines."""
    file = write_jsonl(folder / "in.jsonl", lines)
    finished = run("--input", file, "--output", str(folder / "out.jsonl"), "--gen-len", "2", "--restart", *argv)
    assert finished.code == 0, finished.err
    assert "Traceback" not in finished.err
    return read_jsonl(folder / "out.jsonl")


def test_prompts_of_any_character_are_served(tmp_path: Path) -> None:
    texts = ["", "\\u0000", "a\0b", "\0", "\x7f\x1b[31m", "\u202e\ufeff", "\U0001f600" * 5, "e\u0301", "\r", "\ufffe"]
    lines = answers(tmp_path, [{"id": text, "prompt": text} for text in texts])
    assert [line["id"] for line in lines] == texts
    assert all("token_ids" in line for line in lines)


def test_lines_of_ten_megabytes_are_told_from_prompts(tmp_path: Path) -> None:
    long = "a" * 10_000_000
    lines = answers(
        tmp_path,
        [{"prompt": long}, {"prompt_ids": [5] * 2_000_000}, {"id": 3, "prompt": "a", "x": long}, long, {"prompt": "a"}],
    )
    assert "10,000,000 characters has at least" in lines[0]["error"] and "512" in lines[0]["error"]
    assert "2000000 tokens" in lines[1]["error"]
    assert [("token_ids" in line) for line in lines] == [False, False, True, False, True]
    assert max(len(json.dumps(line)) for line in lines) < 1000


def test_a_text_just_short_enough_to_count_is_counted(tmp_path: Path) -> None:
    """Its tokens are more than the context has, though its length does not give that away."""
    (line,) = answers(tmp_path, [{"prompt": "?" * 8000}])
    assert "tokens + 2 to generate exceed the context of 512" in line["error"]


def test_invalid_utf8_and_nul_bytes_are_named_by_line(tmp_path: Path) -> None:
    lines = answers(
        tmp_path,
        [{"prompt": "a"}, b'{"prompt": "\xc3\x28"}', b'{"prompt": "\0"}', b"\0\0", b"\xff\xfe\x00", {"prompt": "b"}],
    )
    assert [line.get("line") for line in lines] == [None, 2, 3, 4, 5, None]
    assert "byte 12 is 0xc3" in lines[1]["error"]


def test_ids_given_twice_are_answered_twice_and_named_once(tmp_path: Path) -> None:
    lines = [{"id": name, "prompt_ids": [5, 6]} for name in ("a", "b", "a", "c", "b", "a", 1, "1")]
    file = write_jsonl(tmp_path / "in.jsonl", lines)
    finished = run("--input", file, "--gen-len", "1")
    assert [line["id"] for line in finished.lines] == ["a", "b", "a", "c", "b", "a", 1, "1"]
    (note,) = [line for line in finished.err.splitlines() if "same id" in line]
    assert ("lines 1 and 3" in note and "'a'" in note) or ("lines 2 and 5" in note and "'b'" in note)
    assert "and 1 other ids" in note


def test_ids_that_differ_are_not_called_the_same(tmp_path: Path) -> None:
    names: list[object] = [1, "1", 1.5, None, "None", "", " ", "a\0", "a"]
    file = write_jsonl(tmp_path / "in.jsonl", [{"id": name, "prompt_ids": [5]} for name in names])
    assert "same id" not in run("--input", file, "--gen-len", "1").err


def generated_lines(count: int, seed: int) -> Iterator[bytes]:
    """Lines that are wrong in one way or another: good ones with bytes changed, cut, doubled or put in."""
    numbers = random.Random(seed)
    good = [
        b'{"id": "x", "prompt": "Hello there"}',
        b'{"id": 7, "prompt_ids": [2, 17, 33]}',
        b'{"prompt": "\\u00e9\\ud83d\\ude00", "more": {"a": [1, 2, null, true]}}',
    ]
    pieces = [
        b"\0",
        b"\xff",
        b'"',
        b"\\",
        b"\\ud800",
        b"{",
        b"]",
        b",",
        b"1e999",
        b"NaN",
        b"-1",
        b"9" * 30,
        b"\r",
        b"null",
    ]
    for _ in range(count):
        line = bytearray(numbers.choice(good))
        for _ in range(numbers.randrange(1, 5)):
            at = numbers.randrange(len(line))
            match numbers.randrange(4):
                case 0:
                    line[at : at + 1] = numbers.choice(pieces)
                case 1:
                    line[at] = numbers.choice([byte for byte in range(256) if byte != 10])
                case 2:
                    del line[at:]
                case 3:
                    line[at:at] = line[: numbers.randrange(len(line) + 1)]
            line = line or bytearray(b"{")
        yield bytes(line)


def test_three_hundred_malformed_lines_are_answered_each(tmp_path: Path) -> None:
    raw = [line if line.strip() else b"{" for line in generated_lines(300, seed=5)]
    lines = answers(tmp_path, list(raw), "--gpu-batch-size", "64")
    assert len(lines) == len(raw)
    wrong = [(line["line"], line["error"]) for line in lines if "error" in line]
    assert len(wrong) > 200 and all(isinstance(error, str) and error for _, error in wrong)
    assert [number for number, _ in wrong] == [number for number, line in enumerate(lines, 1) if "error" in line]


# --- many -----------------------------------------------------------------------------------------------------------


def instant(engine: Engine, block: PromptBlock, gen_len: int, chooser: Any, *_: object) -> BlockTimes:
    """An engine that likes one token best, in no time."""
    import torch

    logits = torch.zeros(block.rows, engine.config.vocab_size)
    logits[:, 77] = 1
    for step in range(gen_len):
        chooser.choose(range(block.rows), [step] * block.rows, logits)
    return BlockTimes(0.0, [0.0], {}, {})


@pytest.mark.parametrize("kind", ["good", "bad", "mixed"])
def test_memory_does_not_grow_with_the_number_of_prompts(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python holds at its peak over 8,000 prompts is what it holds over 1,000, but for eight bytes each."""
    monkeypatch.setattr(Engine, "run", instant)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    lines = {"good": [b'{"prompt_ids": [5, 6]}'], "bad": [b'{"prompt_ids": [5, 99999]}', b"{"]}
    lines["mixed"] = lines["good"] + lines["bad"]

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"\n".join(lines[kind] * (count // len(lines[kind]))))
        llm = LLM(gpu_batch_size=256, dtype="float32")
        with llm, open_results(str(tmp_path / f"{count}.out"), True) as results:
            job = BatchJob(llm, SamplingParams(max_new_tokens=1), file_source(str(path)), results)
            tracemalloc.start()
            job.run(job.measure())
            held = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert len(read_jsonl(tmp_path / f"{count}.out")) == count // len(lines[kind]) * len(lines[kind])
        return held

    peak(500)  # what is loaded once
    small, large = peak(1000), peak(8000)
    assert large < small + 7000 * 8 * 4 + 100_000


@pytest.mark.slow
def test_a_hundred_thousand_prompts_leave_memory_flat(tmp_path: Path) -> None:
    """A true run of the demo model, a token each."""
    import psutil

    numbers = random.Random(3)
    with (tmp_path / "in.jsonl").open("w") as file:
        for number in range(100_000):
            ids = (
                [5] * 600
                if number % 100 == 7
                else [numbers.randrange(10, 4000) for _ in range(numbers.randrange(1, 9))]
            )
            file.write(json.dumps({"id": number, "prompt_ids": ids}) + "\n")
    held: list[int] = []
    serve = Engine.run

    def watched(*arguments: Any, **named: Any) -> Any:
        held.append(psutil.Process().memory_info().rss)
        return serve(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", watched)
        argv = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        assert run(*argv, "--gen-len", "1", "--gpu-batch-size", "256").code == 0
    assert sum(1 for _ in (tmp_path / "out.jsonl").open()) == 100_000
    settled = held[len(held) // 10]
    assert max(held[len(held) // 10 :]) < 1.01 * settled
