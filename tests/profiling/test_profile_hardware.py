"""`python -m flexgen_h2o.profile_hardware`: a valid file comes out, nothing else stays, mistakes are sentences."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import call

from flexgen_h2o import profile_hardware
from flexgen_h2o.machine.environment import default_name
from flexgen_h2o.profiling import disk, settings
from flexgen_h2o.profiling.disk import Disk
from flexgen_h2o.search.hardware import Hardware, read_hardware, write_hardware
from flexgen_h2o.search.hardware_summary import summary

TINY = replace(
    settings.FULL,
    least_s=0.0,
    trials=5,
    rows=(1, 8),
    weight_shape=(64, 32),
    weight_bytes=2**14,
    steps=2,
    prompt_lens=(4, 16),
    tokens=32,
    new_bytes=2**16,
    kv_bytes=2**21,
    slots=16,
    memory_bytes=2**18,
    file_bytes=2**20,
    passing_bytes=2**19,
    split_s=0.002,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here measures more than a blink's worth."""
    monkeypatch.setattr(settings, "QUICK", TINY)
    monkeypatch.setattr(settings, "FULL", TINY)


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """A folder with one for the test file in it."""
    (tmp_path / "disk").mkdir()
    return tmp_path


def measure(scene: Path, *argv: str) -> tuple[Hardware, str]:
    output = scene / "small.json"
    finished = call(
        profile_hardware, ["--quick", "--device", "cpu", "--folder", str(scene / "disk"), "-o", str(output), *argv]
    )
    assert finished.code == 0, finished.err
    assert os.listdir(scene / "disk") == [] and sorted(os.listdir(scene)) == ["disk", "small.json"]
    return read_hardware(output), finished.out


def test_a_file_comes_out_and_nothing_else_stays(scene: Path) -> None:
    hardware, out = measure(scene, "--name", "Small Machine")
    assert hardware.name == "Small Machine" and hardware.device == "cpu" and hardware.cores == os.cpu_count()
    assert out == summary(hardware) + "\n"
    assert set(hardware.memory) == {"cpu", "disk"} and min(hardware.memory.values()) > 2**20
    assert "--quick" in hardware.environment["command"]
    assert hardware.environment["settings"]["slots"] == TINY.slots
    assert {"date", "machine", "versions", "git_commit", "spread"} <= set(hardware.environment)
    for dtype in ("float32", "bfloat16", "int4"):
        assert hardware.gemm_flops(dtype, 4) > 0 and hardware.attention_bytes_s(dtype, 64) > 0
    assert min(hardware.prefill_s_per_byte(8) or 0, hardware.layer_bytes_s() or 0) > 0
    assert min(hardware.choice_values_s() or 0, hardware.new_bytes_s() or 0) > 0
    assert min(hardware.operation_s("products"), hardware.operation_s("attention")) > 0
    assert all(rate.trials == 5 and rate.source == "measured" for rate in hardware.rates.values())
    assert min(hardware.read_bytes_s(), hardware.copy_bytes_s(), hardware.disk_read_bytes_s()) > 0
    assert min(hardware.disk_write_bytes_s(), hardware.disk_read_cpu_s_per_byte()) > 0
    assert hardware.compute_threads is not None and 1 <= hardware.compute_threads <= hardware.cores
    assert not any(name.startswith("link/") for name in hardware.rates)


def test_what_is_there_already_is_replaced_and_compared(scene: Path) -> None:
    first, _ = measure(scene)
    write_hardware(
        scene / "small.json",
        replace(first, rates={name: replace(rate, value=100 * rate.value) for name, rate in first.rates.items()}),
    )
    second, _ = measure(scene)
    assert second.noisy == list(second.rates)


def test_a_file_that_is_no_hardware_file_is_not_overwritten(scene: Path) -> None:
    (scene / "small.json").write_text("precious")
    finished = call(profile_hardware, ["--folder", str(scene / "disk"), "-o", str(scene / "small.json")])
    assert finished.code == 2 and "is no JSON" in finished.problems[0]
    assert (scene / "small.json").read_text() == "precious"


def test_json_is_what_the_file_holds(scene: Path) -> None:
    hardware, out = measure(scene, "--json")
    values = json.loads(out.splitlines()[-1])
    assert Hardware.from_json(values, "output") == hardware
    assert hardware.name.endswith(f"-{os.cpu_count()}-cores")


def test_where_direct_io_is_refused_the_file_says_why(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_open = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    hardware, _ = measure(scene)
    assert hardware.disk_setting("read") == "disk/read/buffered/1"
    values = json.loads((scene / "small.json").read_text())["rates"]["disk/read/direct/2"]
    assert values == {"value": None, "reason": "the file system of the test file refuses O_DIRECT"}


def test_an_interrupt_leaves_nothing(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(subject: Disk) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Disk, "trial", interrupted)
    finished = call(profile_hardware, ["--folder", str(scene / "disk"), "-o", str(scene / "small.json")])
    assert (finished.code, finished.out, finished.err) == (130, "", "interrupted\n")
    assert os.listdir(scene / "disk") == [] and os.listdir(scene) == ["disk"]


def test_a_full_disk_is_one_sentence(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda folder: 0)
    finished = call(profile_hardware, ["--folder", str(scene / "disk"), "-o", str(scene / "small.json")])
    assert (finished.code, finished.out, len(finished.problems)) == (2, "", 1)
    assert "of disk" in finished.problems[0] and str(scene / "disk") in finished.problems[0]
    assert os.listdir(scene) == ["disk"]


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (["--device", "tpu"], ["--device is 'tpu'; it must be one of auto, cuda, cpu"]),
        (["--folder", "nowhere"], ["--folder nowhere is no folder that can be written to; give another one"]),
        (["--output", "nowhere/file.json", "--device", "meta"], ["--device is 'meta'", "--output nowhere/file.json"]),
        (["--fast"], ["unrecognized arguments: --fast; see --help"]),
    ],
)
def test_mistakes_are_sentences(
    argv: list[str], problems: list[str], scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene)
    finished = call(profile_hardware, argv)
    assert (finished.code, finished.out) == (2, "")
    assert len(finished.problems) == len(problems)
    for said, expected in zip(finished.problems, problems, strict=True):
        assert said.startswith(expected)


def test_without_a_name_for_it_the_file_goes_among_the_policies(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.search.hardware_files.ROOT", scene)
    (scene / "setup.py").touch()
    finished = call(profile_hardware, ["--name", "My Box", "--folder", str(scene / "disk")])
    path = scene / "policies" / "hardware" / "my-box.json"
    assert finished.code == 0 and read_hardware(path).name == "My Box"
    path.write_text('{"version": 99}')
    again = call(profile_hardware, ["--name", "My Box", "--folder", str(scene / "disk")])
    assert again.code == 0 and read_hardware(path).name == "My Box" and "cannot be compared" in again.err


def test_names_of_machines() -> None:
    machine = {"cpu": "AMD EPYC", "gpu": "Tesla T4", "cores": 8}
    assert default_name(machine, "cpu") == "amd-epyc-8-cores"
    assert default_name(machine, "cuda") == "tesla-t4-8-cores"
