"""The rate of decode attention, at sizes that say nothing about speed: what is measured, and how it is told."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import call, read_jsonl

from flexgen_h2o.bench import __main__ as command
from flexgen_h2o.bench import attention
from flexgen_h2o.bench.attention import Grid, measure, summary, unit_shape
from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kernels import native

TINY = ("--head-dim", "20,64", "--slots", "16,33", "--threads", "1", "--megabytes", "1", "--trials", "1")
GB = 2**30


def entry_bytes(row: dict[str, Any]) -> int:
    """Of a key and a value, in a precision that torch has."""
    return 2 * row["head_dim"] * getattr(torch, row["dtype"]).itemsize


def test_the_object_that_is_printed() -> None:
    finished = call(command, ["attention", *TINY, "--dtype", "float16,float32", "--json"])
    assert finished.code == 0, finished.err
    result = json.loads(finished.out.splitlines()[-1])
    rows = result["rows"]
    assert all(row["times_float16"] is None for row in rows)
    assert all(row["entries_s"] == pytest.approx(row["gb_s"] * GB / entry_bytes(row)) for row in rows)
    sizes = [(row["dtype"], row["head_dim"], row["slots"], row["threads"]) for row in rows]
    assert sizes == list(product(("float16", "float32"), (20, 64), (16, 33), (1,)))
    assert all(row["gb_s"] > 0 and row["torch_gb_s"] > 0 for row in rows)
    if native.library() is None:
        assert result["path"] == "torch" and result["worst_share"] is None
        return
    assert result["path"] == f"native, {native.best_path(20)}, native, {native.best_path(64)}"
    assert all(row["share"] == pytest.approx(row["gb_s"] / row["stream_gb_s"]) for row in rows)
    assert result["worst_share"] == min(row["share"] for row in rows)


def test_a_table_without_json_and_a_record_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "attention.jsonl"
    argv = ["attention", *TINY[:-2], "--trials", "5", "--dtype", "bfloat16", "--record", str(file)]
    finished = call(command, argv)
    assert finished.code == 0, finished.err
    assert finished.out.count("| bfloat16 |") == 4
    (record,) = read_jsonl(file)
    assert record["name"] == "bench attention" and record["kind"] == "measurement"
    assert record["command"] == " ".join(["python -m flexgen_h2o.bench", *argv])
    assert record["config"]["kv_bytes"] == 2**20 and record["config"]["trials"] == 5
    assert len(record["rows"]) == 4 and "worst_share" in record and "versions" in record


def test_4_bits_are_held_against_float16() -> None:
    finished = call(command, ["attention", *TINY, "--dtype", "4-bit", "--json"])
    assert finished.code == 0, finished.err
    rows = json.loads(finished.out.splitlines()[-1])["rows"]
    assert [row["dtype"] for row in rows] == ["4-bit"] * 4
    for row in rows:
        size = 2 * quant.entry_bytes(row["head_dim"])
        assert row["entries_s"] == pytest.approx(row["gb_s"] * GB / size)
        assert row["times_float16"] > 0 and row["torch_gb_s"] > 0


def test_every_mistake_is_named() -> None:
    finished = call(
        command,
        ["attention", "--dtype", "int8", "--head-dim", "0", "--slots", "1,x", "--threads", "99999", "--trials", "0"],
    )
    assert finished.code == 2 and finished.out == ""
    flags = ["--dtype", "--head-dim", "--slots", "--slots", "--threads", "--trials"]
    assert [problem.split()[0] for problem in finished.problems] == flags
    # A record wants a median.
    few = call(command, ["attention", "--trials", "3", "--record", "x"])
    assert few.code == 2 and "--trials is 3" in few.problems[0]
    assert call(command, ["attention", "--json", "--wrong"]).code == 2
    assert call(command, []).code == 2


@pytest.mark.parametrize(("head_dim", "slots", "itemsize"), [(64, 128, 2), (80, 2048, 2), (128, 512, 4), (3, 7, 2)])
def test_a_unit_has_no_less_memory_than_asked_for(head_dim: int, slots: int, itemsize: int) -> None:
    shape = unit_shape(head_dim, slots, 2**29, itemsize)
    one_row = shape.kv_bytes(itemsize) // shape.rows
    assert 2**29 <= shape.kv_bytes(itemsize) < 2**29 + one_row
    assert shape.slots == slots and shape.heavy == slots // 2


def test_the_turns_are_taken_in_order_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(attention.time, "perf_counter", lambda: float(next(clock)))
    calls: list[str] = []
    durations = iter([50, 50, 1, 7, 2, 9, 6, 8])

    def work(name: str) -> None:
        calls.append(name)
        for _ in range(next(durations)):
            next(clock)

    medians = attention.take_turns({"a": lambda: work("a"), "b": lambda: work("b")}, trials=3)
    assert calls == ["a", "b"] * 4
    assert medians == {"a": 3.0, "b": 9.0}


def test_the_rate_counts_the_bytes_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"attention": 0.5, "torch": 2.0, "stream": 0.25, "h2o": 1.0, "window": 0.8, "float16": 4.0}
    monkeypatch.setattr(attention, "take_turns", lambda calls, trials: {name: seconds[name] for name in calls})
    row, compressed = measure(Grid(("float16", "4-bit"), (64,), (32,), (1,), 2**18, 5))["rows"]
    # 32 heads of 64 make a row of 2 x 32 slots x 2048 elements of 2 bytes: one row.
    assert row["gb_s"] == 2**18 / 0.5 / GB and row["torch_gb_s"] == 2**18 / 2.0 / GB
    assert row["bookkeeping_share"] == pytest.approx(0.25)
    assert row["entries_s"] == 32 * 32 / 0.5 and row["times_float16"] is None
    # 36 bytes an entry: 4 rows have 2^18 bytes or more. An eighth of the time, for four times the entries.
    assert compressed["entries_s"] == 4 * 32 * 32 / 0.5 and compressed["times_float16"] == 4 * 4.0 / 0.5
    assert compressed["gb_s"] == 4 * 32 * 32 * 72 / 0.5 / GB
    assert compressed["torch_gb_s"] == 32 * 32 * 72 / 2.0 / GB  # a single row
    if native.library() is not None:
        assert row["stream_gb_s"] == 2**18 / 0.25 / GB and row["share"] == 0.5


def test_threads_are_as_before_afterwards_and_the_table_can_do_without_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention.native, "library", lambda: None)
    monkeypatch.setattr(attention.KVBuffer, "attend", lambda buffer, query: query)
    monkeypatch.setattr(attention.KVBuffer, "append", lambda *_: None)
    before = torch.get_num_threads()
    result = measure(Grid(("float32",), (16,), (8,), (1,), 2**12, 1))
    assert torch.get_num_threads() == before
    (row,) = result["rows"]
    assert result["path"] == "torch"
    assert row["share"] is None and row["stream_gb_s"] is None and result["worst_share"] is None
    lines = summary(result).splitlines()
    assert len({line.count("|") for line in lines[1:]}) == 1
