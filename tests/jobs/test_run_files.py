"""`run` refuses files and sizes that cannot work, and leaves alone what is on the disk."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import IO, Any

import pytest
from support.commands import refused, refused_once, run, write_jsonl
from support.tiny_models import make_tiny_opt, save_tiny_opt


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Hello there"}])


# --- files ------------------------------------------------------------------------------------------------------


def test_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused_once("--input", str(tmp_path / "no.jsonl"))
    assert "is a folder" in refused_once("--input", str(tmp_path))
    assert "is a folder" in refused_once("--input", "")


@pytest.mark.parametrize("name", ["prompts", "prompts.csv", "prompts.jsonl.gz"])
def test_an_input_of_unknown_kind_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    problem = refused_once("--input", str(tmp_path / name))
    assert ".jsonl" in problem and ".txt" in problem


def test_a_pipe_cannot_be_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "--input -" in refused_once("--input", str(tmp_path / "pipe.jsonl"))


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_an_empty_input_is_refused(tmp_path: Path, content: str, suffix: str) -> None:
    path = tmp_path / f"empty{suffix}"
    path.write_text(content)
    assert refused_once("--input", str(path)) == f"{path} has no prompts; give it at least one line"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails")
def test_an_input_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A file that even root cannot read: its first bytes belong to no memory."""
    (tmp_path / "unreadable.txt").symlink_to("/proc/self/mem")
    assert "unreadable.txt" in refused_once("--input", str(tmp_path / "unreadable.txt"))


@pytest.mark.parametrize("flag", ["--input", "--output", "--model", "--path"])
def test_a_name_too_long_for_the_file_system_is_refused(flag: str) -> None:
    others = ["--model", "opt-125m"] if flag == "--path" else []
    refused(flag, "a" * 5000 + ".jsonl", *others)


def test_the_input_is_never_overwritten(prompt_file: str, tmp_path: Path) -> None:
    before = Path(prompt_file).read_bytes()
    (tmp_path / "soft.jsonl").symlink_to(prompt_file)
    os.link(prompt_file, tmp_path / "hard.jsonl")
    for name in ("prompts.jsonl", "soft.jsonl", "hard.jsonl", f"../{tmp_path.name}/prompts.jsonl"):
        assert "is the input file" in refused_once("--input", prompt_file, "--output", str(tmp_path / name))
    assert Path(prompt_file).read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused(prompt_file: str, tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "no" / "out.jsonl", Path(prompt_file) / "out.jsonl"):
        assert "cannot be written" in refused_once("--input", prompt_file, "--output", str(output))


def test_an_output_that_the_system_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *arguments: Any, **settings: Any) -> IO[Any]:
        if path.name == "out.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return io.open(path, *arguments, **settings)  # noqa: UP020 - Path.open is what is being replaced

    monkeypatch.setattr(Path, "open", denied)
    problem = refused_once("--prompt-len", "2", "--gen-len", "1", "--output", str(tmp_path / "out.jsonl"))
    assert "out.jsonl cannot be written: Permission denied" in problem


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_failure_while_running(prompt_file: str) -> None:
    finished = run("--input", prompt_file, "--gen-len", "1", "--output", "/dev/full")
    assert finished.code == 1 and "No space left" in finished.problems[0]


def test_results_of_another_run_survive_a_refusal(prompt_file: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    for argv in (["--cpu-mem", "0.001"], ["--gen-len", "0"], ["--model", str(tmp_path)]):
        refused("--input", prompt_file, "--output", str(output), *argv)
    assert output.read_text() == "precious\n"


def test_results_of_another_run_survive_a_model_that_is_cut_short(tmp_path: Path) -> None:
    folder = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path / "model")
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    file = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6]}])
    assert str(shard) in refused_once("--model", str(folder), "--input", file, "--output", str(output))
    assert output.read_text() == "precious\n"


# --- standard input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        "--prompt-len 8",
        "--hh-size 2 --recent-size 3",
        "--eviction local --recent-size 3",
        "--eviction sink --recent-size 3",
        "--eviction full --prompt-len 8",
    ],
)
def test_standard_input_runs_once_sizes_are_known(sizes: str) -> None:
    stdin = b'{"id": "x", "prompt": "Hello"}\n\n{"prompt_ids": [2, 5]}\n{'
    finished = run("--input", "-", "--gen-len", "2", *sizes.split(), stdin=stdin)
    assert finished.code == 0, finished.err
    assert [line["id"] for line in finished.lines] == ["x", 1, 2]
    assert finished.lines[2]["line"] == 4 and "not JSON" in finished.lines[2]["error"]


@pytest.mark.parametrize("eviction", ["h2o", "local", "sink", "full"])
def test_standard_input_without_sizes_is_refused_with_a_way_out_that_works(eviction: str) -> None:
    problem = refused_once("--input", "-", "--eviction", eviction)
    assert "--prompt-len" in problem
    if eviction != "h2o":
        assert "--hh-size" not in problem  # which would be refused in its turn


def test_sizes_that_depend_on_lengths_do_not_help_standard_input() -> None:
    assert "--prompt-len" in refused_once("--input", "-", "--hh-size", "4", "--recent-ratio", "0.5")


def test_a_prompt_longer_than_the_given_length_is_answered_with_an_error_line() -> None:
    stdin = b'{"prompt_ids": [2, 5, 6]}\n{"prompt_ids": [2, 5, 6, 7]}\n'
    finished = run("--input", "-", "--prompt-len", "3", "--gen-len", "1", stdin=stdin)
    assert "token_ids" in finished.lines[0]
    assert "4 tokens" in finished.lines[1]["error"] and "--prompt-len 3" in finished.lines[1]["error"]


@pytest.mark.parametrize("stdin", [b"", b"\n \n"])
def test_empty_standard_input_is_refused(stdin: bytes) -> None:
    assert "no prompts" in refused_once("--input", "-", "--prompt-len", "8", stdin=stdin)


def test_a_refusal_names_flags_that_were_given() -> None:
    problem = refused_once(*["--input", "-", "--hh-size", "2", "--recent-size", "2", "--gen-len", "600"])
    assert "600" in problem and "512" in problem and "--prompt-len is" not in problem


# --- lengths and memory -----------------------------------------------------------------------------------------


def test_lengths_that_fill_the_context_run_and_one_more_is_refused_naming_both(prompt_file: str) -> None:
    argv = ["--input", prompt_file, "--gen-len", "2", "--prompt-len"]
    assert run(*argv, "510").code == 0
    problem = refused_once(*argv, "511")
    assert all(number in problem for number in ("511", "2", "512"))


@pytest.mark.parametrize("argv", ["--prompt-len 511 --gen-len 2", "--gen-len 512", "--dummy-weights --gen-len 600"])
def test_lengths_with_which_no_prompt_can_be_served_are_refused(argv: str) -> None:
    """Without an input file there is no line to blame: the plan cannot work."""
    assert "512" in " ".join(refused(*argv.split()))


def test_a_budget_of_nothing_is_refused_with_both_numbers(prompt_file: str) -> None:
    problem = refused_once("--cpu-mem", "0", "--input", prompt_file)
    assert re.search(r" needs \d+\.\d\d GB more on cpu than the 0\.00 GB there", problem)
    placed = refused_once("--cpu-mem", "0", "--input", prompt_file, "--percent", *"100 0 100 0 100 0".split())
    assert "0.00 GB can be used" in placed and re.search(r" needs \d+\.\d\d GB", placed)
