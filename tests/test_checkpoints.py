"""From a model's name to its folder, with and without a network; published names need none for dummy weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from commands import ids_file, refused, run
from tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o import checkpoints
from flexgen_h2o.checkpoints import DEMO_FOLDER, locate_model
from flexgen_h2o.errors import UsageError

WAYS_OUT = ["--model or --path", "network", "--dummy-weights"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path_factory.mktemp("models") / "any name at all")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def problem_of(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    (problem,) = caught.value.problems
    assert len(problem.splitlines()) == 1
    return problem


def copy_weights(folder: Path, to: Path, *, as_bin: bool = False) -> Path:
    """A checkpoint folder at another place, as published before safetensors if asked for."""
    to.mkdir(parents=True)
    shutil.copy(folder / "config.json", to)
    if as_bin:
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), to / "pytorch_model.bin")
    else:
        shutil.copy(folder / "model.safetensors", to)
    return to


def cached(cache: Path, repository: str, folder: Path, **kind: Any) -> Path:
    """The checkpoint in the cache, as if it had been downloaded."""
    root = cache / ("models--" + repository.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    return copy_weights(folder, root / "snapshots" / ("0" * 40), **kind)


# --- folders ----------------------------------------------------------------------------------------------------


def test_without_a_name_the_demo_model_is_meant() -> None:
    source = locate_model(None, None, False)
    assert (source.config.name, source.folder) == ("demo", DEMO_FOLDER)


def test_a_folder_is_taken_whatever_its_name(tiny_folder: Path) -> None:
    source = locate_model(str(tiny_folder), None, False)
    assert source.folder == tiny_folder and source.config.name == "any name at all"
    assert source.config.hidden_size == 32


def test_a_folder_named_like_a_published_size_is_that_folder(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_weights(tiny_folder, tmp_path / "opt-30b")
    monkeypatch.chdir(tmp_path)
    assert locate_model("opt-30b", None, False).config.hidden_size == 32


@pytest.mark.parametrize("model", ["./no", "/no/such/folder", "~/no", "a/b/c", "../no"])
def test_a_folder_that_is_not_there_is_refused_without_asking_the_network(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "snapshot_download", None)
    assert model in problem_of(lambda: locate_model(model, None, False))


@pytest.fixture
def home(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with models/mine in it. A shell leaves the tilde of --model=~/models/mine to the program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return copy_weights(tiny_folder, tmp_path / "models" / "mine").parent.parent


def test_path_may_begin_with_a_tilde(home: Path) -> None:
    assert locate_model("mine", "~/models", False).folder == home / "models" / "mine"


def test_a_model_may_begin_with_a_tilde(home: Path) -> None:
    assert locate_model("~/models/mine", None, False).folder == home / "models" / "mine"


def test_a_file_is_no_model(tiny_folder: Path) -> None:
    assert "is a file" in problem_of(lambda: locate_model(str(tiny_folder / "config.json"), None, False))


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model_type": "llama"}', '{"num_attention_heads": 7}'])
def test_a_folder_without_a_usable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    problem = problem_of(lambda: locate_model(str(tmp_path), None, False))
    assert str(tmp_path) in problem


def test_a_folder_without_weights_runs_on_dummy_weights_only(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    argv = ["--model", str(tmp_path), "--gen-len", "2", "--input", ids_file(tmp_path, 3)]
    (problem,) = refused(*argv)
    assert str(tmp_path) in problem and "--dummy-weights" in problem
    assert run(*argv, "--dummy-weights").code == 0


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["opt-999", "gpt2", "OPT-125M", "facebook", ""])
def test_a_name_that_is_none_is_refused_with_the_known_ones(model: str, cache: Path) -> None:
    problem = problem_of(lambda: locate_model(model, None, False))
    assert "opt-125m" in problem


@pytest.mark.parametrize("model", ["opt-125m", "facebook/opt-6.7b", "someone/opt-finetuned"])
def test_a_known_name_without_network_has_three_ways_out(model: str, cache: Path) -> None:
    problem = problem_of(lambda: locate_model(model, None, False))
    assert model in problem and all(way in problem for way in WAYS_OUT)


@pytest.mark.parametrize("model", ["some one/model x", "-/x", "a/b--c", "a/.."])
def test_a_name_that_no_repository_can_have_is_no_traceback(model: str, cache: Path) -> None:
    assert model in problem_of(lambda: locate_model(model, None, False))


def test_the_command_says_the_same(cache: Path) -> None:
    (problem,) = refused("--model", "opt-125m")
    assert all(way in problem for way in WAYS_OUT)


@pytest.mark.parametrize("model", ["opt-1.3b", "facebook/opt-1.3b"])
def test_published_names_need_no_files_for_dummy_weights(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "snapshot_download", None)
    source = locate_model(model, None, True)
    assert source.folder is None and (source.config.num_hidden_layers, source.config.hidden_size) == (24, 2048)
    assert "opt-125m" in problem_of(lambda: locate_model("opt-2b", None, True))


# --- under --path -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["opt-125m", "facebook/opt-125m", ""])
@pytest.mark.parametrize("model", ["opt-125m", "facebook/opt-125m"])
def test_weights_are_found_under_path(tiny_folder: Path, tmp_path: Path, place: str, model: str, cache: Path) -> None:
    if place == "facebook/opt-125m" and model == "opt-125m":
        pytest.skip("a name without an owner does not say in whose folder to look")
    folder = copy_weights(tiny_folder, tmp_path / "models" / place)
    assert locate_model(model, str(tmp_path / "models"), False).folder == folder


def test_path_comes_before_the_cache(tiny_folder: Path, tmp_path: Path, cache: Path) -> None:
    in_cache = cached(cache, "facebook/opt-125m", tiny_folder)
    folder = copy_weights(tiny_folder, tmp_path / "models" / "opt-125m")
    assert locate_model("opt-125m", str(tmp_path / "models"), False).folder == folder
    assert locate_model("opt-125m", None, False).folder == in_cache


def test_what_is_not_under_path_is_looked_for_in_the_cache(tiny_folder: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "models").mkdir()
    problem = problem_of(lambda: locate_model("opt-125m", str(tmp_path / "models"), False))
    assert f"under {tmp_path / 'models'}" in problem and all(way in problem for way in WAYS_OUT)
    in_cache = cached(cache, "facebook/opt-125m", tiny_folder)
    assert locate_model("opt-125m", str(tmp_path / "models"), False).folder == in_cache


def test_a_path_that_is_not_there_is_refused() -> None:
    assert "/nowhere" in problem_of(lambda: locate_model("opt-125m", "/nowhere", False))


# --- the cache and the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
def test_weights_in_the_cache_are_used_without_a_network(
    tiny_folder: Path, tmp_path: Path, cache: Path, as_bin: bool
) -> None:
    cached(cache, "facebook/opt-125m", tiny_folder, as_bin=as_bin)
    argv = ["--gen-len", "3", "--dtype", "float32", "--input", ids_file(tmp_path, 3)]
    by_name, by_folder = run("--model", "opt-125m", *argv), run("--model", str(tiny_folder), *argv)
    assert by_name.code == 0 and by_name.lines == by_folder.lines


def test_settings_without_weights_in_the_cache_are_not_enough(tiny_folder: Path, cache: Path) -> None:
    folder = cached(cache, "facebook/opt-125m", tiny_folder)
    (folder / "model.safetensors").unlink()
    assert "neither" in problem_of(lambda: locate_model("opt-125m", None, False))


def test_what_is_missing_is_downloaded_after_the_cache_has_been_asked(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, list[str]]] = []

    def download(repository: str, allow_patterns: list[str], local_files_only: bool) -> str:
        assert repository == "facebook/opt-125m"
        asked.append((local_files_only, allow_patterns))
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        return str(tiny_folder)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    assert locate_model("opt-125m", None, False).folder == tiny_folder
    assert [local for local, _ in asked] == [True, False]
    assert "*.safetensors" in asked[1][1] and "*.bin" not in asked[1][1]  # not both kinds of a large model


def test_the_folder_in_use_is_never_written_to(tiny_folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_folder.iterdir()}
    run("--model", str(tiny_folder), "--gen-len", "2", "--input", ids_file(tmp_path, 3))
    assert {path.name: path.stat().st_mtime_ns for path in tiny_folder.iterdir()} == before
    assert json.loads((tiny_folder / "config.json").read_text())["hidden_size"] == 32
