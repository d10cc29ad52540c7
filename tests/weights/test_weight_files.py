"""Weights on disk: whole or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import PAGE
from flexgen_h2o.memory import run_folder as disk
from flexgen_h2o.memory.direct_io import read_direct, write_direct
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.models.registry import published
from flexgen_h2o.weights import files as weight_files
from flexgen_h2o.weights.files import INDEX, WeightFolder, WeightPlace, lay_out, weight_folder
from flexgen_h2o.weights.sources import dummy_origin

TEN = lay_out("page.bin", {"a": 40})


def stored(folder: WeightFolder, place: WeightPlace) -> Tensor:
    """The bytes of a parameter and those up to the end of its last page."""
    extent = folder.extent(place)
    target = torch.empty(extent.nbytes, dtype=torch.uint8)
    read_direct(target, extent)
    return target


def test_parameters_of_a_page_lie_one_behind_the_other_at_whole_pages() -> None:
    places = lay_out("p", {"a": 1, "b": PAGE, "c": PAGE + 1, "d": 0})
    assert [place.offset for place in places.values()] == [0, PAGE, 2 * PAGE, 4 * PAGE]


def test_weights_are_there_once_they_are_written(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "deep" / "weights")
    tensors = {"a": torch.randn(3, 5), "b.bias": torch.randn(7), "large": torch.randn(3 * PAGE + 1)}
    places = lay_out("page.bin", {name: tensor.nbytes for name, tensor in tensors.items()})
    assert folder.reserve(places) == set(tensors)
    for name in reversed(tensors):  # in any order
        folder.write(name, places[name], tensors[name])
    again = WeightFolder(folder.path)
    assert again.reserve(places) == set()
    for name, tensor in tensors.items():
        assert stored(again, places[name])[: tensor.nbytes].view(torch.float32).equal(tensor.flatten())
    assert again.present_bytes(places) == PAGE + PAGE + 13 * PAGE


def test_weights_that_are_not_contiguous_are_written_as_they_read(tmp_path: Path) -> None:
    folder, places = WeightFolder(tmp_path), lay_out("page.bin", {"a": 48})
    tensor = torch.arange(12.0).view(3, 4).T
    folder.write("a", places["a"], tensor)
    assert stored(folder, places["a"])[:48].view(torch.float32).equal(tensor.flatten())


@pytest.mark.parametrize("size", [0, 1, 39])
def test_a_file_that_is_cut_short_is_missing(tmp_path: Path, size: int) -> None:
    folder = WeightFolder(tmp_path)
    folder.write("a", TEN["a"], torch.ones(10))
    with (tmp_path / "page.bin").open("r+b") as file:
        file.truncate(size)
    assert folder.reserve(TEN) == {"a"}
    folder.write("a", TEN["a"], torch.ones(10))
    assert folder.reserve(TEN) == set()


@pytest.mark.parametrize("at", [0, 20, 39])
def test_a_flipped_bit_is_found_and_mended(tmp_path: Path, at: int) -> None:
    folder = WeightFolder(tmp_path)
    folder.write("a", TEN["a"], torch.ones(10))
    content = bytearray((tmp_path / "page.bin").read_bytes())
    content[at] ^= 1
    (tmp_path / "page.bin").write_bytes(content)
    assert folder.reserve(TEN) == {"a"}
    folder.write("a", TEN["a"], torch.ones(10))
    assert folder.reserve(TEN) == set()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"a": 3}', '{"a": ["page.bin", 0, 40]}', '{"a": [1, 2, 3, 4]}']
)
def test_an_index_that_makes_no_sense_promises_nothing(tmp_path: Path, text: str) -> None:
    folder = WeightFolder(tmp_path)
    folder.write("a", TEN["a"], torch.ones(10))
    (tmp_path / INDEX).write_text(text)
    assert folder.reserve(TEN) == {"a"}
    folder.write("a", TEN["a"], torch.ones(10))
    assert folder.reserve(TEN) == set()


def test_another_layout_is_another_parameter(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path)
    folder.write("a", TEN["a"], torch.ones(10))
    assert folder.reserve(lay_out("page.bin", {"z": PAGE, "a": 40})) == {"z", "a"}


def test_an_interrupted_write_leaves_nothing_that_is_taken_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WeightFolder(tmp_path)

    def interrupted(extent: Extent, source: Tensor) -> None:
        extent.path.write_bytes(bytes(extent.nbytes // 2))
        raise KeyboardInterrupt

    monkeypatch.setattr(weight_files, "write_direct", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.write("a", TEN["a"], torch.ones(10))
    assert folder.reserve(TEN) == {"a"}


WRITER = """
import os, signal, sys
from pathlib import Path
import torch
from flexgen_h2o.weights import files as weight_files

def killed(extent, source):
    os.kill(os.getpid(), signal.SIGKILL)

weight_files.write_direct = killed
place = weight_files.lay_out("page.bin", {"a": 40})["a"]
weight_files.WeightFolder(Path(sys.argv[1])).write("a", place, torch.ones(10))
"""


def test_what_a_killed_write_has_left_is_written_over(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    folder = WeightFolder(tmp_path)
    assert folder.reserve(TEN) == {"a"}
    folder.write("a", TEN["a"], torch.ones(10))
    assert folder.reserve(TEN) == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, "lock", "page.bin"]


def test_a_reader_never_takes_half_a_parameter_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs may start on the same model at once."""
    folder = WeightFolder(tmp_path)
    seen: list[set[str]] = []

    def watched(extent: Extent, source: Tensor) -> None:
        seen.append(folder.reserve(TEN))
        write_direct(extent, source)
        seen.append(folder.reserve(TEN))

    monkeypatch.setattr(weight_files, "write_direct", watched)
    folder.write("a", TEN["a"], torch.ones(10))
    assert seen == [{"a"}, {"a"}] and folder.reserve(TEN) == set()


def test_what_another_run_has_written_stays_in_the_index(tmp_path: Path) -> None:
    places = lay_out("page.bin", {"a": 40, "b": 40})
    one, other = WeightFolder(tmp_path), WeightFolder(tmp_path)
    one.write("a", places["a"], torch.ones(10))
    other.write("b", places["b"], torch.zeros(10))
    assert set(json.loads((tmp_path / INDEX).read_text())) == {"a", "b"}
    assert one.reserve(places) == set()


def test_a_parameter_is_read_if_it_is_what_was_written(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path)
    target = torch.zeros(PAGE, dtype=torch.uint8)
    assert folder.promised(TEN) == [] and not folder.read("a", TEN["a"], target)
    folder.write("a", TEN["a"], torch.ones(10))
    assert folder.promised(TEN) == ["a"] and folder.promised(lay_out("page.bin", {"a": 44})) == []
    assert folder.read("a", TEN["a"], target)
    assert target[:40].view(torch.float32).equal(torch.ones(10))
    content = bytearray((tmp_path / "page.bin").read_bytes())
    content[39] ^= 1
    (tmp_path / "page.bin").write_bytes(content)
    assert folder.promised(TEN) == ["a"] and not folder.read("a", TEN["a"], target)
    (tmp_path / "page.bin").unlink()
    assert not folder.read("a", TEN["a"], target)


FIRST_NAME = "229328b38e0049be3a8b"
ORIGIN = {"model": "opt-125m", "seed": 0, "device_type": "cpu", "dtype": torch.float32, "layout": "plain"}


def folder_of(model: str, seed: int, device_type: str, dtype: torch.dtype, layout: str) -> Path:
    return weight_folder(dummy_origin(published(model), seed, device_type), dtype, layout).path


@pytest.mark.parametrize(
    "other",
    [
        {"model": "opt-350m"},
        {"seed": 1},
        {"device_type": "cuda"},
        {"dtype": torch.bfloat16},
        {"layout": "4-bit strips"},
    ],
    ids=str,
)
def test_a_folder_is_named_by_all_that_its_weights_depend_on(other: dict[str, Any]) -> None:
    folders = [folder_of(**values) for values in (ORIGIN, ORIGIN, {**ORIGIN, **other})]  # type: ignore[arg-type]
    assert folders[0] == folders[1] != folders[2]


def test_folders_of_earlier_versions_are_found_again() -> None:
    """The name of a folder of made-up weights, as earlier versions of the same layout wrote it."""
    assert folder_of(**ORIGIN).name == FIRST_NAME  # type: ignore[arg-type]


def test_only_missing_weights_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = WeightFolder(tmp_path)
    places = lay_out("page.bin", {"a": 8 * PAGE, "b": 4 * PAGE})
    folder.write("a", places["a"], torch.ones(2 * PAGE))
    monkeypatch.setattr(disk, "free_disk_bytes", lambda path: 4 * PAGE)
    assert folder.reserve(places) == {"b"}
    monkeypatch.setattr(disk, "free_disk_bytes", lambda path: 4 * PAGE - 1)
    with pytest.raises(OSError, match="weights needs"):
        folder.reserve(places)
