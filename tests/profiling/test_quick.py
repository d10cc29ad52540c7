"""A machine without a hardware file is measured once, and found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.profiling import quick
from flexgen_h2o.search.hardware import Hardware, read_hardware
from flexgen_h2o.search.hardware_files import default_folder

CPU = torch.device("cpu")
ELSEWHERE = read_hardware(default_folder() / "amd-epyc-2-cores.json")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The folders that were measured; a measurement gives another machine's rates."""
    folders: list[Path] = []

    def measure(settings: Any, device: torch.device, folder: Path, name: str, environment: Any) -> Hardware:
        folders.append(folder)
        return ELSEWHERE

    monkeypatch.setattr(quick, "quick_file", lambda name: tmp_path / "kept" / f"{name}.json")
    monkeypatch.setattr(quick, "measure", measure)
    return folders


def test_a_machine_is_measured_once(measured: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = quick.find_or_measure("auto", "no-such-box", CPU, tmp_path / "not" / "yet")
    assert first is not None and measured == [tmp_path]
    said = capsys.readouterr().err
    assert "no-such-box" in said and str(tmp_path / "kept" / "no-such-box.json") in said
    again = quick.find_or_measure("auto", "no-such-box", CPU, tmp_path)
    assert again is not None and again.rates == first.rates and len(measured) == 1
    assert capsys.readouterr().err == ""


def test_what_another_version_has_kept_is_measured_anew(
    measured: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept" / "no-such-box.json"
    kept.parent.mkdir()
    kept.write_text('{"version": 99}')
    found = quick.find_or_measure("auto", "no-such-box", CPU, tmp_path)
    assert found is not None and len(measured) == 1 and str(kept) in capsys.readouterr().err
    assert quick.known_rates("auto", "no-such-box") is not None


def test_so_is_what_a_profile_of_another_version_has_kept(
    measured: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a source tree both lie in one folder."""
    monkeypatch.setattr("flexgen_h2o.search.hardware_files.ROOT", tmp_path)
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path))
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "no-such-box.json").write_text("{}")
    assert quick.find_or_measure("auto", "no-such-box", CPU, tmp_path) is not None and len(measured) == 1
    assert "are not used" in capsys.readouterr().err


def test_a_dry_run_measures_nothing(measured: list[Path], tmp_path: Path) -> None:
    assert quick.find_or_measure("auto", "no-such-box", torch.device("meta"), tmp_path) is None
    assert measured == []


def test_what_was_asked_for_by_name_is_never_measured(measured: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-box"):
        quick.find_or_measure("no-such-box", "no-such-box", CPU, tmp_path)
    assert measured == []


def test_without_room_there_are_no_limits(
    measured: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Hardware:
        raise UsageError("measuring needs 3 GB")

    monkeypatch.setattr(quick, "measure", refuse)
    assert quick.find_or_measure("auto", "no-such-box", CPU, tmp_path) is None
    assert "measuring needs 3 GB" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
