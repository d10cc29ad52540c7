"""Hardware files: what is written is read again, every mistake is named, lookups are what one computes by hand."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.machine.environment import slug
from flexgen_h2o.search import hardware_files as hardware_module
from flexgen_h2o.search.hardware import Hardware, read_hardware, write_hardware
from flexgen_h2o.search.hardware_files import default_folder, find_hardware
from flexgen_h2o.search.hardware_summary import summary
from flexgen_h2o.search.rates import Rate, unit_of

GEMM = "gemm/bfloat16/{}"


def measured(value: float, unit: str, spread: float = 0.02) -> Rate:
    return Rate(value, unit, spread=spread, trials=5)


def machine(**changes: Any) -> Hardware:
    """A small machine, measured."""
    rates = {
        GEMM.format(1): measured(1e10, "FLOP/s"),
        GEMM.format(16): measured(16e10, "FLOP/s"),
        GEMM.format(256): measured(32e10, "FLOP/s"),
        "attention/cpu/bfloat16/64": measured(16e9, "byte/s"),
        "attention/cpu/bfloat16/128": measured(18e9, "byte/s"),
        "memory/cpu/read/1": measured(20e9, "byte/s"),
        "memory/cpu/read/2": measured(30e9, "byte/s", spread=0.11),
        "memory/cpu/copy/2": measured(15e9, "byte/s"),
        "disk/read/direct/1": measured(2e9, "byte/s"),
        "disk/read/direct/4": measured(2.5e9, "byte/s"),
        "disk/read/buffered/1": measured(9e9, "byte/s"),
        "disk/write/buffered/1": measured(1e9, "byte/s"),
        "disk_cpu/read/direct/1": measured(1e-11, "s/byte"),
        "disk_cpu/read/direct/4": measured(4e-11, "s/byte"),
        "disk_cpu/read/buffered/1": measured(9e-11, "s/byte"),
        "disk_cpu/write/buffered/1": measured(8e-11, "s/byte"),
        "threads/2/disk/gemm": measured(9e10, "FLOP/s"),
        "threads/2/disk/stream": measured(1.5e9, "byte/s"),
    }
    fields: dict[str, Any] = {
        "name": "small",
        "device": "cpu",
        "cores": 2,
        "memory": {"cpu": 2**34, "disk": 2**36},
        "rates": rates,
        "missing": {"disk/write/direct/1": "the file system refuses"},
        "compute_threads": 1,
        "environment": {"date": "2024-01-01", "machine": {"cpu": "small"}},
    }
    return Hardware(**{**fields, **changes})


# --- files ---


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "small.json"
    write_hardware(path, machine())
    assert read_hardware(path) == machine()
    assert read_hardware(path).origin == str(path)
    assert [file.name for file in path.parent.iterdir()] == ["small.json"]


def test_a_file_has_a_rate_a_line(tmp_path: Path) -> None:
    write_hardware(tmp_path / "small.json", machine())
    text = (tmp_path / "small.json").read_text()
    assert json.loads(text) == machine().to_json()
    line = next(line for line in text.splitlines() if '"memory/cpu/read/2"' in line)
    rate = json.loads(line.strip().rstrip(",").split(": ", 1)[1])
    assert rate == {
        "value": 3e10,
        "unit": "byte/s",
        "source": "measured",
        "spread": 0.11,
        "trials": 5,
        "noisy": True,
    }


def test_weight_bytes_stand_beside_flops() -> None:
    # 2 x 16 FLOPs per element of 2 bytes: 1.6e11 / 32 x 2
    assert machine().to_json()["rates"][GEMM.format(16)]["weight_bytes_s"] == pytest.approx(1e10)
    assert machine().weight_bytes_s("bfloat16", 16) == pytest.approx(1e10)


def test_a_file_by_hand(tmp_path: Path) -> None:
    rate = {"value": 21.24e12, "unit": "FLOP/s", "source": "published", "reference": "FlexGen, cost_model.py"}
    values = {
        "name": "t4",
        "device": "cuda",
        "cores": 32,
        "memory_bytes": {"gpu": 15 * 2**30, "cpu": 204 * 2**30, "disk": 0},
        "rates": {
            "gemm/float16/1024": rate,
            "link/h2d/pinned": {"value": 12e9, "unit": "byte/s", "source": "assumed", "reference": "PCIe 3.0 x16"},
        },
    }
    (tmp_path / "t4.json").write_text(json.dumps(values))
    hardware = read_hardware(tmp_path / "t4.json")
    assert hardware.link_bytes_s("h2d", pinned=True) == 12e9
    assert [hardware.gemm_flops("float16", rows) for rows in (1, 1024, 10**6)] == [21.24e12] * 3
    assert hardware.rates["gemm/float16/1024"].reference == "FlexGen, cost_model.py"
    assert hardware.compute_threads is None and not hardware.noisy
    assert Hardware.from_json(hardware.to_json(), "again") == hardware


DELETE = object()
MISTAKES: list[tuple[tuple[str, ...], Any, str]] = [
    (("name",), DELETE, "'name' is missing"),
    (("name",), 3, "name is 3; it must be a string"),
    (("nmae",), "x", "'nmae' is unknown; known ones: "),
    (("kind",), "policy", "kind is 'policy'; it must be 'hardware'"),
    (("version",), 7, "version is 7; this program reads version 1"),
    (("device",), "tpu", "device is 'tpu'; it must be one of cpu, cuda"),
    (("device",), "cuda", "memory_bytes of gpu is missing, and device is cuda"),
    (("cores",), 0, "cores is 0; it must be a whole number of at least 1"),
    (("cores",), True, "cores is True; it must be a whole number of at least 1"),
    (("compute_threads",), 1.5, "compute_threads is 1.5; it must be a whole number of at least 1"),
    (("environment",), "here", "environment must be an object"),
    (("memory_bytes",), 5, "memory_bytes is 5; it must be an object of bytes by tier"),
    (("memory_bytes", "cpu"), DELETE, "memory_bytes of cpu is missing"),
    (("memory_bytes", "tape"), 5, "memory_bytes has 'tape'; tiers are gpu, cpu, disk"),
    (("memory_bytes", "disk"), -1, "memory_bytes of disk is -1; it must be a whole number of at least 0"),
    (("rates",), DELETE, "'rates' is missing"),
    (("rates",), [], "rates is []; it must be an object of rates by name"),
    (("rates", "gemm/int8/1"), {}, "rate 'gemm/int8/1' is unknown; see search/rates.py for the names"),
    (("rates", "gemm/float32/0"), {}, "rate 'gemm/float32/0' is unknown"),
    (("rates", GEMM.format(1)), 5, "gemm/bfloat16/1 is 5; it must be an object with value, unit and source"),
    (("rates", GEMM.format(1), "value"), "fast", "gemm/bfloat16/1: value is 'fast'; it must be a number above 0"),
    (("rates", GEMM.format(1), "value"), 0, "gemm/bfloat16/1: value is 0; it must be a number above 0"),
    (("rates", GEMM.format(1), "value"), math.inf, "gemm/bfloat16/1: value is inf; it must be a number above 0"),
    (("rates", GEMM.format(1), "value"), None, "gemm/bfloat16/1 has no value; give one, or a reason why"),
    (("rates", GEMM.format(1), "unit"), "byte/s", "gemm/bfloat16/1: unit is 'byte/s'; it must be 'FLOP/s'"),
    (("rates", GEMM.format(1), "unit"), DELETE, "gemm/bfloat16/1: unit is None; it must be 'FLOP/s'"),
    (("rates", GEMM.format(1), "source"), "rumour", "source is 'rumour'; it must be one of measured, published, as"),
    (("rates", GEMM.format(1), "source"), "published", "gemm/bfloat16/1: a rate that is published needs a reference"),
    (("rates", GEMM.format(1), "spread"), DELETE, "gemm/bfloat16/1: spread is None; what was measured needs one"),
    (("rates", GEMM.format(1), "spread"), -0.1, "gemm/bfloat16/1: spread is -0.1; what was measured needs one"),
    (("rates", GEMM.format(1), "trials"), 4, "gemm/bfloat16/1: trials is 4; what was measured needs at least 5"),
    (("rates", GEMM.format(1), "noisy"), True, "gemm/bfloat16/1: noisy is True, and the spread is 0.02; above 0.1"),
    (("rates", GEMM.format(1), "speed"), 1, "gemm/bfloat16/1: 'speed' means nothing here; leave it out"),
    (("rates", GEMM.format(1), "weight_bytes_s"), 5, "weight_bytes_s is 5, and from value and rows follows 1e+10"),
    (("rates", "memory/cpu/read/1", "weight_bytes_s"), 5, "'weight_bytes_s' means nothing here; leave it out"),
]


def with_mistakes(*mistakes: tuple[tuple[str, ...], Any, str]) -> dict[str, Any]:
    values = copy.deepcopy(machine().to_json())
    for keys, value, _ in mistakes:
        target = values
        for key in keys[:-1]:
            target = target[key]
        if value is DELETE:
            del target[keys[-1]]
        else:
            target[keys[-1]] = value
    return values


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[2][:40])
def test_a_mistake_is_named(mistake: tuple[tuple[str, ...], Any, str]) -> None:
    with pytest.raises(UsageError) as caught:
        Hardware.from_json(with_mistakes(mistake), "small.json")
    (problem,) = caught.value.problems
    assert problem.startswith("small.json: ") and mistake[2] in problem


def test_all_mistakes_are_named_at_once() -> None:
    chosen = [mistake for mistake in MISTAKES if mistake[0] in (("name",), ("cores",), ("nmae",), ("kind",))]
    chosen = list({mistake[0]: mistake for mistake in chosen}.values())
    with pytest.raises(UsageError) as caught:
        Hardware.from_json(with_mistakes(*chosen), "small.json")
    assert len(caught.value.problems) == len(chosen) == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is no JSON"), ("[]", "it must hold one JSON object"), (None, "cannot be read: No such file")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        read_hardware(path)
    assert str(path) in str(caught.value)


# --- lookups ---


@pytest.mark.parametrize(
    ("rows", "flops"),
    [
        (1, 1e10),
        (4, 4e10),  # halfway to 16 in the logarithm: 1e10 x 16 ** 0.5
        (16, 16e10),
        (64, 16e10 * 2**0.5),  # halfway to 256, where the rate doubles
        (256, 32e10),
        (0.5, 1e10),  # outside: the nearest
        (4096, 32e10),
    ],
)
def test_products_between_measured_rows(rows: float, flops: float) -> None:
    assert machine().gemm_flops("bfloat16", rows) == pytest.approx(flops)


def test_lookups() -> None:
    small = machine()
    assert small.attention_bytes_s("bfloat16", 64) == 16e9
    assert [small.attention_bytes_s("bfloat16", size) for size in (32, 80, 96, 256)] == [16e9, 16e9, 18e9, 18e9]
    assert (small.read_bytes_s(), small.copy_bytes_s()) == (30e9, 15e9)
    assert (small.disk_read_bytes_s(), small.disk_read_cpu_s_per_byte()) == (2.5e9, 4e-11)
    assert (small.disk_write_bytes_s(), small.disk_write_cpu_s_per_byte()) == (1e9, 8e-11)
    assert small.noisy == ["memory/cpu/read/2"]
    assert small.disk_both_share == 0
    more = {"disk/write/direct/1": 1e9, "disk_both/read/direct/1": 1.2e9, "disk_both/write/direct/1": 0.7e9}
    rates = {**small.rates, **{name: measured(rate, "byte/s") for name, rate in more.items()}}
    assert replace(small, rates=rates).disk_both_share == pytest.approx(1 / (1.2 / 2 + 0.7 / 1))


@pytest.mark.parametrize(
    ("lookup", "name"),
    [
        (lambda hardware: hardware.gemm_flops("float16", 1), "gemm/float16/ROWS"),
        (lambda hardware: hardware.attention_bytes_s("float32", 64), "attention/cpu/float32/HEAD_DIM"),
        (lambda hardware: hardware.attention_bytes_s("bfloat16", 64, "cuda"), "attention/cuda/bfloat16/HEAD_DIM"),
        (lambda hardware: hardware.read_bytes_s("cuda"), "memory/cuda/read/THREADS"),
        (lambda hardware: hardware.link_bytes_s("d2h", pinned=False), "link/d2h/pageable"),
        (lambda hardware: hardware.rate("disk/write/direct/1"), "disk/write/direct/1 (the file system refuses)"),
    ],
)
def test_a_rate_that_is_not_there_is_named_with_its_file(lookup: Any, name: str) -> None:
    hardware = Hardware.from_json(machine().to_json(), "small.json")
    with pytest.raises(UsageError, match=re.escape(f"small.json has no rate {name}; measure it")):
        lookup(hardware)


# --- against an earlier measurement ---


def test_what_changed_since_is_noisy() -> None:
    changed = {**machine().rates, GEMM.format(16): measured(12.8e10, "FLOP/s")}
    del changed[GEMM.format(1)]
    held = machine().held_against(machine(rates=changed))
    assert held.rates[GEMM.format(16)].spread == pytest.approx(0.2) and held.rates[GEMM.format(16)].value == 16e10
    assert held.noisy == [GEMM.format(16), "memory/cpu/read/2"]
    assert held.rates[GEMM.format(1)] == machine().rates[GEMM.format(1)]


@pytest.mark.parametrize("key", ["machine", "versions", "git_commit", "settings"])
def test_what_is_not_comparable_is_not_compared(key: str) -> None:
    environment = {**machine().environment, key: "another"}
    other = machine(rates={name: measured(1.0, rate.unit) for name, rate in machine().rates.items()})
    assert machine().held_against(other) != machine()
    assert machine(environment=environment).held_against(other) == machine(environment=environment)


# --- names and words ---


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("gemm/float16/4096", "FLOP/s"),
        ("threads/12/copy/stream", "byte/s"),
        ("disk_cpu/write/direct/2", "s/byte"),
        ("gemm/float16", None),
        ("gemm/float16/01", None),
        ("Gemm/float16/1", None),
        ("link/h2d/pinned/1", None),
    ],
)
def test_units(name: str, unit: str | None) -> None:
    assert unit_of(name) == unit


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("AMD EPYC 2 cores", "amd-epyc-2-cores"),
        ("Intel(R) Xeon(R) @ 2.00GHz", "intel-r-xeon-r-2-00ghz"),
        ("/", "machine"),
    ],
)
def test_names_of_files(text: str, name: str) -> None:
    assert slug(text) == name


def test_the_summary_has_every_rate_and_what_is_noisy() -> None:
    lines = summary(machine()).splitlines()
    for name in machine().rates:
        assert sum(line.split()[0] == name for line in lines) == 1
    assert [line.split()[0] for line in lines if line.endswith("noisy")] == ["memory/cpu/read/2"]
    assert "160.000 GFLOP/s" in summary(machine()) and "9.313 GB/s of weights" in summary(machine())
    assert "not measured: disk/write/direct/1: the file system refuses" in summary(machine())


def test_nothing_here_needs_torch() -> None:
    modules = [f"flexgen_h2o.search.{path.stem}" for path in (ROOT / "flexgen_h2o" / "search").glob("hardware*.py")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "hardware").glob("*.json")), ids=lambda path: path.stem)
def test_files_that_come_with_the_package_are_valid(path: Path) -> None:
    assert read_hardware(path).name


# --- which file a run is held against ---


def test_what_is_installed_without_a_source_tree_knows_the_machines_that_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=hardware_module.ROOT, check=True, env=environment, capture_output=True)
    for name, value in (("ROOT", tmp_path), ("INSTALLED", tmp_path / "flexgen_h2o" / "hardware_files")):
        monkeypatch.setattr(hardware_module, name, value)
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "cache"))
    t4 = find_hardware("t4", "my-box")
    assert t4 is not None and t4.name == "t4" and find_hardware("auto", "my-box") is None
    write_hardware(default_folder() / "my-box.json", replace(t4, name="my-box"))
    mine = find_hardware("auto", "my-box")
    assert mine is not None and mine.name == "my-box" and (tmp_path / "cache" / "hardware" / "my-box.json").exists()


def test_a_run_finds_its_machine_by_name_another_by_its_name_and_any_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_module, "ROOT", tmp_path)
    (tmp_path / "setup.py").touch()
    assert find_hardware("auto", "my-box") is None
    folder = default_folder()
    assert folder == tmp_path / "policies" / "hardware"
    rates = {"gemm/bfloat16/8": Rate(1e9, "FLOP/s", "assumed", "made up")}
    for name in ("my-box", "t4"):
        write_hardware(folder / f"{name}.json", Hardware(name, "cpu", 2, {"cpu": 1}, rates))
    write_hardware(tmp_path / "elsewhere.json", Hardware("elsewhere", "cpu", 2, {"cpu": 1}, rates))
    found = [find_hardware(choice, "my-box") for choice in ("auto", "t4", str(tmp_path / "elsewhere.json"))]
    assert [one.name for one in found if one is not None] == ["my-box", "t4", "elsewhere"]
    with pytest.raises(UsageError, match="nowhere"):
        find_hardware("nowhere", "my-box")
