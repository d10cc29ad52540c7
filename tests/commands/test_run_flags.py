"""`run` refuses what cannot work: exit 2, a sentence for each mistake, before anything is read or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.commands import refused, refused_once, run, write_jsonl

from flexgen_h2o.commands.flags import Flags
from flexgen_h2o.commands.run_options import build_parser, read_flags

CONTRACT_FLAGS = [
    "--model",
    "--path",
    "--offload-dir",
    "--prompt-len",
    "--gen-len",
    "--gpu-batch-size",
    "--num-gpu-batches",
    "--percent",
    "--pin-weight",
    "--cpu-cache-compute",
    "--compress-weight",
    "--compress-cache",
    "--overlap",
    "--hh-ratio",
    "--recent-ratio",
    "--hh-size",
    "--recent-size",
    "--eviction",
    "--sink-size",
    "--decode-batch-size",
    "--policy",
    "--hardware",
    "--gpu-mem",
    "--cpu-mem",
    "--disk-mem",
    "--device",
    "--dtype",
    "--ring-16bit",
    "--input",
    "--output",
    "--strict",
    "--json",
    "--dummy-weights",
    "--ignore-eos",
    "--seed",
    "--do-sample",
    "--temperature",
    "--top-k",
    "--top-p",
    "--stop",
    "--stop-token-ids",
    "--trace",
    "--restart",
    "--checkpoint-minutes",
    "--metrics",
]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Hello there"}])


def test_every_flag_of_the_contract_is_known() -> None:
    known = build_parser()._option_string_actions
    assert [flag for flag in CONTRACT_FLAGS if flag not in known] == []
    assert set(known) - set(CONTRACT_FLAGS) == {"-h", "--help"}


def test_help_names_every_flag_and_says_what_ratios_are_shares_of() -> None:
    finished = run("--help")
    assert finished.code == 0
    assert [flag for flag in CONTRACT_FLAGS if flag not in finished.out] == []
    assert "prompt + generated" in finished.out and "shares of the prompt" in " ".join(finished.out.split())


@pytest.mark.parametrize("device", ["tpu", "", "cpu:0"])
def test_an_unknown_device_is_refused(device: str) -> None:
    problem = refused_once("--device", device)
    assert repr(device) in problem and "auto, cuda, cpu, meta" in problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_what_is() -> None:
    problem = refused_once("--device", "cuda")
    assert "no GPU" in problem and "--device cpu" in problem and "--device meta" in problem


@pytest.mark.parametrize(
    "flag", ["--overlap", "--pin-weight", "--cpu-cache-compute", "--compress-weight", "--compress-cache"]
)
@pytest.mark.parametrize("value", ["1", "yes", ""])
def test_switches_are_true_or_false(flag: str, value: str) -> None:
    problem = refused_once(flag, value)
    assert problem.startswith(f"{flag} is {value!r}") and "true or false" in problem


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("100 0 100 0 100", ["5 numbers", "six"]),
        ("1 2 3 4 5 6 7", ["7 numbers", "six"]),
        ("60 50 100 0 100 0", ["60 + 50", "weights", "100"]),
        ("0 0 60 50 100 0", ["60 + 50", "cache", "100"]),
        ("0 0 0 0 60 50", ["60 + 50", "hidden", "100"]),
        ("101 0 100 0 100 0", ["101", "between 0 and 100"]),
        ("x 0 100 0 100 0", ["'x'", "at least 0"]),
        ("nan 0 100 0 100 0", ["'nan'", "at least 0"]),
    ],
)
def test_percentages_that_cannot_be_are_refused(numbers: str, words: list[str]) -> None:
    problem = refused_once("--percent", *numbers.split())
    assert all(word in problem for word in words)


WHOLE = ["0", "-1", "1.5", "ten", "", "nan", "inf", "1e3", "9" * 5000]
AT_LEAST_ONE = ["--prompt-len", "--gen-len", "--gpu-batch-size", "--num-gpu-batches", "--decode-batch-size"]


@pytest.mark.parametrize("value", WHOLE, ids=lambda value: value[:8])
@pytest.mark.parametrize("flag", AT_LEAST_ONE)
def test_counts_are_whole_numbers_from_one(flag: str, value: str) -> None:
    problem = refused_once(flag, value)
    assert problem.startswith(f"{flag} is ") and value in problem and "at least 1" in problem


@pytest.mark.parametrize("value", WHOLE[1:], ids=lambda value: value[:8])
@pytest.mark.parametrize(
    ("flag", "least", "others"),
    [
        ("--hh-size", 0, []),
        ("--recent-size", 1, []),
        ("--sink-size", 1, ["--eviction", "sink"]),
        ("--top-k", 0, ["--do-sample"]),
        ("--stop-token-ids", 0, []),
    ],
)
def test_other_whole_numbers_name_their_limit(flag: str, least: int, others: list[str], value: str) -> None:
    problem = refused_once(flag, value, *others)
    assert problem.startswith(f"{flag} is ") and value in problem and f"at least {least}" in problem


@pytest.mark.parametrize("flag", ["--recent-size", "--sink-size"])
def test_regions_that_must_hold_an_entry_cannot_be_empty(flag: str) -> None:
    assert "at least 1" in refused_once(flag, "0", "--eviction", "sink")


@pytest.mark.parametrize("value", ["-0.1", "1.1", "101", "nan", "inf", "1/0", "", "x"])
@pytest.mark.parametrize("flag", ["--hh-ratio", "--recent-ratio"])
def test_ratios_lie_between_0_and_1(flag: str, value: str) -> None:
    problem = refused_once(flag, value)
    assert problem.startswith(f"{flag} is {value!r}") and "between 0 and 1" in problem


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x", ""])
@pytest.mark.parametrize("flag", ["--gpu-mem", "--cpu-mem", "--temperature"])
def test_amounts_are_finite_and_not_negative(flag: str, value: str) -> None:
    problem = refused_once(flag, value, "--do-sample")
    assert problem.startswith(f"{flag} is {value!r}") and "at least 0" in problem


@pytest.mark.parametrize("value", ["0", "-0.5", "1.01", "nan", "inf", "", "x"])
def test_top_p_is_above_0_and_at_most_1(value: str, prompt_file: str) -> None:
    problem = refused_once("--top-p", value, "--do-sample", "--input", prompt_file)
    assert problem.startswith("--top-p is ") and value.strip("0.") in problem


@pytest.mark.parametrize("value", ["-1", str(2**63), "x", "1.5", ""])
def test_seeds_fit_63_bits(value: str) -> None:
    assert value in refused_once("--seed", value)


@pytest.mark.parametrize(
    ("flag", "value", "known"),
    [("--eviction", "oracle", "h2o, full, local, sink"), ("--dtype", "int8", "float32"), ("--eviction", "", "h2o")],
)
def test_unknown_names_are_answered_with_the_known_ones(flag: str, value: str, known: str) -> None:
    problem = refused_once(flag, value)
    assert repr(value) in problem and known in problem


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hh-ratio", "0.1", "--hh-size", "4"], ["--hh-ratio", "--hh-size", "twice"]),
        (["--recent-ratio", "0.1", "--recent-size", "4"], ["--recent-ratio", "--recent-size", "twice"]),
        (["--recent-ratio", "0"], ["--recent-ratio is 0", "--recent-size 1"]),
        (["--hh-ratio", "0"], ["--hh-ratio is 0", "--recent-ratio"]),
        (["--hh-size", "0"], ["--hh-size is 0"]),
        (["--sink-size", "4"], ["--sink-size", "h2o"]),
        (["--eviction", "full", "--hh-ratio", "0.1"], ["--hh-ratio", "full"]),
        (["--eviction", "full", "--recent-size", "3"], ["--recent-size", "full"]),
        (["--eviction", "local", "--hh-size", "3"], ["--hh-size", "local"]),
        (["--eviction", "sink", "--hh-ratio", "0.1"], ["--hh-ratio", "sink"]),
        (["--gpu-batch-size", "4", "--decode-batch-size", "6", "--num-gpu-batches", "2"], ["6", "multiple", "4"]),
        (
            "--gpu-batch-size 4 --num-gpu-batches 1 --decode-batch-size 8".split(),
            ["8", "4 x 1", "--num-gpu-batches"],
        ),
        (["--top-k", "5"], ["--top-k", "--do-sample"]),
        (["--top-p", "0.5"], ["--top-p", "--do-sample"]),
        (["--temperature", "0.7"], ["--temperature", "--do-sample"]),
        (["--promptlen=5"], ["--promptlen=5", "--help"]),
        (["--gen", "5"], ["--gen", "--help"]),
        (["stray"], ["stray", "--help"]),
        (["--gen-len"], ["--gen-len", "--help"]),
    ],
)
def test_flags_that_do_not_go_together_are_refused(argv: list[str], words: list[str]) -> None:
    text = " ".join(refused(*argv))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("value", ["0", "0.0", "0e0"])
def test_temperature_0_is_greedy_without_do_sample(value: str, prompt_file: str) -> None:
    assert run("--temperature", value, "--input", prompt_file, "--gen-len", "1").code == 0


@pytest.mark.parametrize(
    "argv",
    [
        "--hh-ratio 0 --recent-ratio 0.5",
        "--hh-size 0 --recent-size 1",
        "--hh-ratio 1 --recent-ratio 1",
        "--hh-size 1000000000 --recent-size 1000000000",
        "--hh-ratio 0.2 --recent-size 3",
        "--eviction sink --sink-size 1 --recent-ratio 0.5",
        "--do-sample --top-k 0 --top-p 1 --temperature 0",
        "--do-sample --top-k 1000000 --seed 0",
        "--do-sample --seed 9223372036854775807",
        "--gpu-batch-size 2 --num-gpu-batches 4 --decode-batch-size 4",
        "--stop-token-ids 0 1 4095 --ignore-eos",
        "--device cpu --dtype float16",
        "--gpu-mem 4 --cpu-mem 0",
    ],
)
def test_edges_that_make_sense_run(argv: str, prompt_file: str) -> None:
    finished = run(*argv.split(), "--input", prompt_file, "--gen-len", "3", "--json")
    assert finished.code == 0 and finished.report["num_prompts"] == 1


def test_eviction_policies_are_described_whatever_else_is_asked() -> None:
    finished = run("--eviction", "help", "--gen-len", "0")
    assert finished.code == 0 and finished.err == ""
    assert [line.split()[0] for line in finished.out.splitlines()] == ["h2o", "full", "local", "sink", "smooth"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("smooth:window=5", ["'window'", "decay, pooled, age_power", "--eviction help"]),
        ("smooth:decay=2", ["decay is '2'", "at most 1"]),
        ("full:decay=1", ["full has no parameters"]),
    ],
)
def test_parameters_of_a_policy_that_cannot_be_are_refused(text: str, words: list[str]) -> None:
    problem = refused_once("--eviction", text)
    assert problem.startswith("--eviction ") and all(word in problem for word in words)


@pytest.mark.parametrize(
    ("eviction", "instead"),
    [
        ("h2o", ", or --hh-size and --recent-size"),
        ("smooth", ", or --hh-size and --recent-size"),
        ("local", ", or --recent-size"),
        ("sink", ", or --recent-size"),
        ("full", ""),
    ],
)
def test_prompts_that_can_be_read_only_once_need_sizes(eviction: str, instead: str) -> None:
    problem = refused_once("--input", "-", "--eviction", eviction)
    assert problem == f"--input - can be read only once: give --prompt-len{instead}"


def test_all_mistakes_are_listed_together() -> None:
    problems = refused(
        *[
            "--gen-len",
            "0",
            "--hh-ratio",
            "2",
            "--gpu-batch-size",
            "x",
            "--temperature",
            "hot",
            "--seed",
            "-1",
            "--percent",
            "100",
            "0",
            "--device",
            "tpu",
        ],
        *[
            "--eviction",
            "best",
            "--input",
            "nowhere.jsonl",
            "--output",
            "nowhere/out.jsonl",
            "--top-k",
            "3",
            "--misspelt",
        ],
    )
    flags = "--gen-len --hh-ratio --gpu-batch-size --temperature --seed --percent --device --eviction --input --output"
    for flag in [*flags.split(), "--top-k", "--misspelt"]:
        assert any(problem.startswith(flag) for problem in problems), flag
    assert len(problems) == len(set(problems))


@pytest.mark.parametrize("argv", [["--top-p", "1.5", "--do-sample"], ["--stop", ""]])
def test_mistakes_in_sampling_are_listed_with_the_others(argv: list[str]) -> None:
    problems = refused("--gen-len", "0", *argv)
    assert any(problem.startswith(argv[0]) for problem in problems)


def test_a_mistake_in_sampling_is_found_even_if_no_prompt_can_be_served(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "bad.jsonl", ["{"])
    assert "--top-p" in refused_once("--top-p", "1.5", "--do-sample", "--input", file)


def test_a_mistake_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.models.checkpoint.Checkpoint.source", None)
    monkeypatch.setattr("flexgen_h2o.llm.locate_model", None)
    refused("--gen-len", "0")


def test_a_path_that_is_not_looked_at_is_not_silently_ignored() -> None:
    refused_once("--path", "/nowhere", "--gen-len", "1")


def test_a_stop_id_outside_the_vocabulary_is_refused(prompt_file: str) -> None:
    assert "4096" in refused_once("--stop-token-ids", "4096", "--input", prompt_file)


@pytest.mark.parametrize("flag", ["--gpu-batch-size", "--num-gpu-batches"])
def test_a_block_larger_than_a_machine_word_is_no_traceback(flag: str, prompt_file: str) -> None:
    finished = run(flag, str(10**30), "--gen-len", "1", "--input", prompt_file)
    assert finished.code in (0, 2)


@pytest.mark.parametrize("value", ["1e300", "1e308"])
def test_a_budget_larger_than_any_memory_is_no_traceback(value: str, prompt_file: str) -> None:
    finished = run("--cpu-mem", value, "--gpu-mem", value, "--gen-len", "1", "--input", prompt_file)
    assert finished.code in (0, 2)


def test_ratios_are_read_as_decimals() -> None:
    options = read_flags(["--hh-ratio", "0.35"])
    assert options.llm["hh_ratio"] * 180 == 63


def test_a_flag_counts_as_given_whatever_its_value() -> None:
    flags = Flags(build_parser().parse_args(["--temperature", "0"]))
    assert flags.given("--temperature") and not flags.given("--top-k") and not flags.given("--json")
