"""`run` answers every line of its input, in order, and reports what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.commands import Finished, ids_file, read_jsonl, refused, run, write_jsonl
from support.tiny_models import make_tiny_opt, save_tiny_opt

TWO_ROWS = "--gpu-batch-size 2 --num-gpu-batches 1".split()  # in a block
LAYERS, HEADS, HEAD_DIM, PARAMETERS = 4, 8, 32, 4_339_712  # of the demo model

PHASE = {"seconds", "limit_s", "busy_s", "binds", "no_limit"}
REPORT: dict[str, set[str]] = {
    "eviction": {"name", "heavy_slots", "recent_slots", "evictions"},
    "memory": {
        "gpu_peak_bytes",
        "cpu_peak_bytes",
        "disk_peak_bytes",
        "weights_bytes",
        "kv_cache_bytes",
        "full_kv_cache_bytes",
        "ledger_peak_bytes",
        "ledger",
    },
    "io": {"disk_read_bytes", "disk_write_bytes", "h2d_bytes", "d2h_bytes"},
    "phases": {"prefill", "decode"},
}
REPORT_KEYS = [
    "model",
    "policy",
    "eviction",
    "num_prompts",
    "prompt_tokens",
    "generated_tokens",
    "load_s",
    "prefill_s",
    "decode_s",
    "total_s",
    "throughput_tok_s",
    "decode_tok_s",
    "memory",
    "io",
    "achieved_percent",
    "phases",
    "predicted",
    "measured",
]
# Beyond the contract: without them two reports cannot be told apart.
ADDED_KEYS = ["dtype", "device", "dummy_weights", "kernels"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a tokenizer: 100 tokens, a context of 128."""
    return str(save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path_factory.mktemp("tiny") / "no-tokenizer"))


def run_ok(*argv: str) -> Finished:
    finished = run(*argv, "--dtype", "float32")
    assert finished.code == 0, finished.err
    return finished


# --- lines in, lines out ----------------------------------------------------------------------------------------

BAD_LINES: list[tuple[object, str]] = [
    ("{", "not JSON"),
    ({"id": "none"}, "no prompt"),
    ({"id": "both", "prompt": "a", "prompt_ids": [5]}, "both"),
    ({"prompt": 5}, "string"),
    ({"prompt_ids": [5, "6"]}, "whole numbers"),
    ({"prompt_ids": []}, "no tokens"),
    ({"prompt_ids": [5, 4096]}, "token id 4096 is outside the vocabulary of 4096"),
    ({"prompt_ids": [-1]}, "token id -1"),
    ({"prompt_ids": [10**30]}, "outside the vocabulary"),
    ({"prompt_ids": [5] * 511}, "511 tokens + 2 to generate exceed the context of 512"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "nul \0"}', "not JSON"),
    ({"id": {}, "prompt": "a"}, "id must be"),
]


def test_each_bad_line_gets_its_own_error_and_the_job_goes_on(tmp_path: Path) -> None:
    """Good lines stand between all bad ones, and blocks of two end among them."""
    lines: list[object] = [{"id": "first", "prompt": "Hello"}]
    for bad, _ in BAD_LINES:
        lines += [bad, "", {"prompt": "Hello"}]
    finished = run_ok("--input", write_jsonl(tmp_path / "in.jsonl", lines), "--gen-len", "2", *TWO_ROWS)
    assert len(finished.lines) == 1 + 2 * len(BAD_LINES)
    answers, errors = finished.lines[::2], finished.lines[1::2]
    assert {tuple(answer["token_ids"]) for answer in answers} == {tuple(answers[0]["token_ids"])}
    for number, (error, (_, words)) in enumerate(zip(errors, BAD_LINES, strict=True)):
        assert set(error) == {"id", "line", "error"}
        assert words in error["error"] and error["line"] == 3 * number + 2
    assert f"{len(BAD_LINES)} of the prompts could not be served" in finished.err


@pytest.mark.parametrize("bad", [(0, 1, 2), (4,), (1, 3, 5, 7), (2, 3, 4, 5), (0, 8), tuple(range(9)), ()], ids=str)
@pytest.mark.parametrize("sizes", ["1 1", "2 1", "2 2", "32 1"])
def test_results_come_in_the_order_of_the_input(tmp_path: Path, bad: tuple[int, ...], sizes: str) -> None:
    lines = [{"id": n, "prompt_ids": [] if n in bad else [2, 20 + n]} for n in range(9)]
    rows, units = sizes.split()
    argv = ["--gen-len", "2", "--gpu-batch-size", rows, "--num-gpu-batches", units]
    finished = run_ok("--input", write_jsonl(tmp_path / "in.jsonl", lines), *argv)
    assert [line["id"] for line in finished.lines] == list(range(9))
    assert tuple(line["id"] for line in finished.lines if "error" in line) == bad


def test_answers_do_not_depend_on_their_neighbours(tmp_path: Path) -> None:
    """Mixed lengths in one block against a block for each; sizes of the cache are given, as they follow the longest."""
    argv = ["--gen-len", "8", "--hh-size", "3", "--recent-size", "4", "--input", ids_file(tmp_path, 3, 20, 1, 11, 7)]
    together, alone = run_ok(*argv), run_ok(*argv, *"--gpu-batch-size 1 --num-gpu-batches 1".split())
    assert together.lines == alone.lines


def test_a_result_line_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    (line,) = run_ok("--input", write_jsonl(tmp_path / "in.jsonl", [{"prompt": "The captain looked"}])).lines
    assert list(line) == ["id", "text", "token_ids", "finish_reason"]
    assert len(line["token_ids"]) == 32 and line["finish_reason"] == "length" and isinstance(line["text"], str)


def test_a_bad_line_is_an_error_of_the_job_only_with_strict(tmp_path: Path) -> None:
    argv = ["--input", write_jsonl(tmp_path / "in.jsonl", ["{", {"prompt": "a"}]), "--gen-len", "1"]
    assert run(*argv).code == 0
    strict = run(*argv, "--strict")
    assert strict.code == 1 and len(strict.lines) == 2
    good = write_jsonl(tmp_path / "good.jsonl", [{"prompt": "a"}])
    assert run("--input", good, "--gen-len", "1", "--strict").code == 0


def test_a_job_of_nothing_but_bad_lines_loads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.models.checkpoint.Checkpoint.source", None)
    argv = ["--input", write_jsonl(tmp_path / "in.jsonl", ["{", "}"]), "--json"]
    finished = run(*argv)
    assert finished.code == 0 and [line["line"] for line in finished.lines] == [1, 2]
    assert finished.report["num_prompts"] == 0 and finished.report["throughput_tok_s"] is None
    assert run(*argv, "--strict").code == 1


def test_half_a_surrogate_pair_spoils_its_own_line_only(tmp_path: Path) -> None:
    """JSON can escape what is no text; a tokenizer cannot read it."""
    lines = ['{"prompt": "\\ud800"}', {"prompt": "Hello"}]
    finished = run("--input", write_jsonl(tmp_path / "in.jsonl", lines), "--gen-len", "1")
    assert finished.code == 0
    assert "error" in finished.lines[0] and "token_ids" in finished.lines[1]


def test_prompt_and_generated_tokens_fill_the_context_exactly(tiny_folder: str, tmp_path: Path) -> None:
    finished = run_ok("--model", tiny_folder, "--gen-len", "8", "--input", ids_file(tmp_path, 5, 119))
    assert "error" not in finished.lines[0]
    lines = [{"prompt_ids": [5] * 120}, {"prompt_ids": [5] * 121}]
    finished = run_ok(
        "--model", tiny_folder, "--gen-len", "8", "--ignore-eos", "--input", write_jsonl(tmp_path / "in.jsonl", lines)
    )
    assert len(finished.lines[0]["token_ids"]) == 8
    assert "121 tokens + 8 to generate exceed the context of 128" in finished.lines[1]["error"]


def test_keys_that_mean_nothing_are_named_once(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "max_tokens": 3}, {"prompt": "b", "max_tokens": 4, "Temperature": 1}, {"best_of": 2}]
    finished = run("--input", write_jsonl(tmp_path / "in.jsonl", lines), "--gen-len", "1")
    assert finished.err.count("mean nothing here: Temperature, best_of, max_tokens") == 1


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfHello there\r\n\r\nHello there\nbad \xff\n")
    finished = run_ok("--input", str(tmp_path / "in.txt"), "--gen-len", "3")
    assert finished.lines[0]["token_ids"] == finished.lines[1]["token_ids"]
    assert finished.lines[2]["line"] == 4 and "0xff" in finished.lines[2]["error"]


def test_results_go_to_the_output_file_and_the_report_to_the_screen(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old\n" * 100)
    argv = ["--input", ids_file(tmp_path, 3, 4), "--gen-len", "2"]
    finished = run_ok(*argv, "--output", str(output), "--json")
    assert finished.lines == [] and len(finished.out.splitlines()) == 1
    assert read_jsonl(output) == run_ok(*argv).lines


# --- models without a tokenizer ---------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_takes_ids_and_returns_no_text(tiny_folder: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6]}, {"prompt": "words"}])
    finished = run_ok("--model", tiny_folder, "--input", file, "--gen-len", "3")
    assert finished.lines[0]["text"] is None and len(finished.lines[0]["token_ids"]) >= 1
    assert "no tokenizer" in finished.lines[1]["error"] and "prompt_ids" in finished.lines[1]["error"]


def test_what_needs_a_tokenizer_is_refused_without_one(tiny_folder: str, tmp_path: Path) -> None:
    (problem,) = refused("--model", tiny_folder)
    assert "--input" in problem and "--prompt-len" in problem
    (problem,) = refused("--model", tiny_folder, "--input", ids_file(tmp_path, 3), "--stop", "x")
    assert "--stop-token-ids" in problem


# --- prompts that are made up -----------------------------------------------------------------------------------


def test_without_input_sample_prompts_are_answered() -> None:
    finished = run_ok("--gen-len", "1", "--json")
    assert finished.report["num_prompts"] == len(finished.lines) == 4
    assert all(line["text"] is not None for line in finished.lines)


@pytest.mark.parametrize("argv", ["--prompt-len 20", "--prompt-len 20 --dummy-weights --seed 3"])
def test_random_prompts_fill_one_block(argv: str) -> None:
    finished = run_ok(
        *argv.split(), *["--gen-len", "2", "--gpu-batch-size", "3", "--num-gpu-batches", "2", "--ignore-eos", "--json"]
    )
    report = finished.report
    assert (report["num_prompts"], report["prompt_tokens"], report["generated_tokens"]) == (6, 120, 12)
    assert report["dummy_weights"] == ("dummy" in argv)


def test_random_prompts_and_dummy_weights_are_those_of_the_seed() -> None:
    argv = ["--dummy-weights", "--prompt-len", "8", "--gen-len", "4", "--gpu-batch-size", "3", "--seed"]
    assert run_ok(*argv, "1").lines == run_ok(*argv, "1").lines != run_ok(*argv, "2").lines


def test_random_prompts_of_a_default_length_leave_room_to_generate(tiny_folder: str) -> None:
    argv = ["--model", tiny_folder, "--dummy-weights", *TWO_ROWS, "--gen-len", "28", "--json"]
    assert run_ok(*argv).report["prompt_tokens"] == 2 * 100


def test_a_published_size_runs_on_dummy_weights() -> None:
    argv = "--model facebook/opt-125m --dummy-weights --prompt-len 4 --gen-len 2 --ignore-eos --json --dtype bfloat16"
    report = run(*argv.split(), *TWO_ROWS).report
    assert (report["model"], report["dummy_weights"], report["generated_tokens"]) == ("opt-125m", True, 4)
    parameters = 125_239_296
    padding = report["memory"]["weights_bytes"] - 2 * parameters
    assert padding in (0, 2 * 32 * 768)  # of the embeddings, to whole panels


# --- the report -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Prompts of 4 and 9 tokens, 6 generated for each, 2 heavy and 3 recent entries."""
    argv = ["--gen-len", "6", "--hh-size", "2", "--recent-size", "3", "--ignore-eos", "--json", "--input"]
    return run_ok(*argv, ids_file(tmp_path_factory.mktemp("report"), 4, 9)).report


def test_the_report_has_exactly_the_keys_of_the_contract(small_report: dict[str, Any]) -> None:
    assert sorted(small_report) == sorted(REPORT_KEYS + ADDED_KEYS)
    assert {name: set(small_report[name]) for name in REPORT} == REPORT
    for phase in small_report["phases"].values():
        assert set(phase) == PHASE
        assert set(phase["busy_s"]) == {"compute", "disk_read", "disk_write", "h2d", "d2h"}
    assert small_report["predicted"]["kind"] == "projection" and small_report["measured"] is True


def test_rates_follow_from_tokens_and_times(small_report: dict[str, Any]) -> None:
    prefill, decode = small_report["prefill_s"], small_report["decode_s"]
    assert prefill > 0 and decode > 0 and small_report["load_s"] > 0
    assert small_report["total_s"] == pytest.approx(prefill + decode)
    assert small_report["throughput_tok_s"] == pytest.approx(12 / (prefill + decode))
    assert small_report["decode_tok_s"] == pytest.approx(10 / decode)  # the first of each row comes from prefill
    assert [small_report["phases"][name]["seconds"] for name in ("prefill", "decode")] == [prefill, decode]


def test_tokens_are_counted_without_pads(small_report: dict[str, Any]) -> None:
    assert (small_report["num_prompts"], small_report["prompt_tokens"]) == (2, 4 + 9)
    assert small_report["generated_tokens"] == 12


def test_bytes_follow_from_slots(small_report: dict[str, Any]) -> None:
    memory, per_entry = small_report["memory"], LAYERS * 2 * HEADS * HEAD_DIM * 2 * 4  # 2 rows; K and V; 4 bytes
    assert memory["kv_cache_bytes"] == (2 + 3) * per_entry
    assert memory["full_kv_cache_bytes"] == (9 + 6) * per_entry
    assert memory["weights_bytes"] == 4 * PARAMETERS
    assert memory["cpu_peak_bytes"] > memory["weights_bytes"] + memory["kv_cache_bytes"]
    assert memory["gpu_peak_bytes"] == memory["disk_peak_bytes"] == 0


def test_evictions_are_those_of_a_count_by_hand(small_report: dict[str, Any]) -> None:
    """The last token is never fed back: 4 + 5 and 9 + 5 entries come into 5 slots, in each layer and head."""
    assert small_report["eviction"] == {
        "name": "h2o",
        "heavy_slots": 2,
        "recent_slots": 3,
        "evictions": LAYERS * HEADS * ((4 + 5 - 5) + (9 + 5 - 5)),
    }


@pytest.mark.parametrize(
    ("argv", "heavy", "recent", "evictions"),
    [
        ("", 1, 1, 16),  # a tenth of 10 + 9 each
        ("--prompt-len 21", 3, 3, 12),  # a tenth of 21 + 9 each
        ("--hh-ratio 0.35 --recent-ratio 0.2", 6, 3, 9),
        ("--hh-ratio 0.2", 3, 3, 12),
        ("--eviction local --recent-size 17", 0, 17, 1),
        ("--eviction local --recent-size 18", 0, 18, 0),
        ("--eviction sink --recent-size 5", 4, 5, 9),
        ("--eviction sink --recent-size 5 --sink-size 1", 1, 5, 12),
        ("--eviction full", 0, 19, 0),
        ("--hh-ratio 1 --recent-ratio 1", 0, 19, 0),
        ("--hh-ratio 0.8 --recent-ratio 0.5", 10, 9, 0),  # together at most all
    ],
)
def test_sizes_follow_prompt_plus_generated(tmp_path: Path, argv: str, heavy: int, recent: int, evictions: int) -> None:
    """A prompt of 10 tokens and 9 generated: 18 entries come in."""
    argv = f"{argv} --gen-len 9 --ignore-eos --json --input {ids_file(tmp_path, 10)}"
    finished = run_ok(*argv.split())
    found = finished.report["eviction"]
    if "--hh-ratio" in argv and heavy == 0:  # how the two regions share the whole does not matter
        assert found["heavy_slots"] + found["recent_slots"] == recent
    else:
        assert (found["heavy_slots"], found["recent_slots"]) == (heavy, recent)
    assert found["evictions"] == LAYERS * HEADS * evictions
    assert ("evicted nothing" in finished.err) == (evictions == 0 and "full" not in argv)


def test_a_last_block_that_is_not_full_is_counted_once(tmp_path: Path) -> None:
    file = ids_file(tmp_path, 3, 3, 3, 3, 3, 3, 3)
    argv = "--gen-len 2 --ignore-eos --gpu-batch-size 2 --num-gpu-batches 2 --hh-size 1 --recent-size 2 --json --input"
    report = run_ok(*argv.split(), file).report
    assert (report["num_prompts"], report["prompt_tokens"], report["generated_tokens"]) == (7, 21, 14)
    assert report["eviction"]["evictions"] == LAYERS * HEADS * 7
    assert report["memory"]["kv_cache_bytes"] == LAYERS * 4 * HEADS * 3 * HEAD_DIM * 2 * 4  # a block of 4 rows
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2, "decode_batch_size": 4, "percent": [100, 0, 100, 0, 100, 0]}
    assert policy.items() <= report["policy"].items()


def test_one_token_needs_no_decode(tmp_path: Path) -> None:
    finished = run_ok("--gen-len", "1", "--json", "--input", ids_file(tmp_path, 5, 3))
    assert [len(line["token_ids"]) for line in finished.lines] == [1, 1]
    report = finished.report
    assert report["decode_s"] == 0 and report["decode_tok_s"] is None
    assert report["throughput_tok_s"] == pytest.approx(2 / report["prefill_s"])


def test_tokens_after_a_stop_are_not_counted(tmp_path: Path) -> None:
    argv = ["--gen-len", "9", "--ignore-eos", "--json", "--input", ids_file(tmp_path, 6)]
    tokens = run_ok(*argv).lines[0]["token_ids"]
    stopped = run_ok(*argv, "--stop-token-ids", str(tokens[2]))
    expected = tokens[: tokens.index(tokens[2]) + 1]
    assert stopped.lines[0]["token_ids"] == expected and stopped.lines[0]["finish_reason"] == "stop"
    assert stopped.report["generated_tokens"] == len(expected)


def test_the_summary_for_people_has_the_numbers_of_the_report(tmp_path: Path) -> None:
    argv = ["--gen-len", "6", "--hh-size", "2", "--recent-size", "3", "--ignore-eos", "--input"]
    summary = run_ok(*argv, ids_file(tmp_path, 4, 9)).out
    for words in ("2 prompts, 13 tokens in, 12 out", "h2o, 2 heavy + 3 recent of 15 entries", "416 entries evicted"):
        assert words in summary
    assert "33% of the full cache" in summary and "tok/s" in summary and "measured: " in summary


def test_dummy_weights_are_named_in_the_summary() -> None:
    assert (
        "with dummy weights"
        in run_ok(*["--dummy-weights", "--prompt-len", "4", "--gen-len", "1", "--gpu-batch-size", "1"]).out
    )


@pytest.mark.parametrize(
    ("argv", "is_said"),
    [
        ("--hh-size 20 --recent-size 4", False),  # nothing is evicted, but most entries have left the ring
        ("--hh-size 20 --recent-size 40", True),
        ("--eviction local --recent-size 4", True),  # what leaves the ring is gone
    ],
)
def test_where_the_ring_keeps_all_no_entry_is_in_4_bits_and_that_is_said(
    tmp_path: Path, argv: str, is_said: bool
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": list(range(10, 22))}])
    finished = run("--input", path, "--gen-len", "4", "--compress-cache", "--ring-16bit", *argv.split())
    assert finished.code == 0 and ("none is in 4 bits" in finished.err) == is_said


def test_keys_of_a_checkpoint_that_are_not_used_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "score.weight": next(iter(tensors.values())).clone()}, folder / "model.safetensors")
    finished = run_ok("--model", str(folder), "--gen-len", "1", "--input", ids_file(tmp_path, 3))
    assert "score.weight" in finished.err
