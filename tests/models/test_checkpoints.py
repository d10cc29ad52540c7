"""From a model's name to its folder, with and without a network; published names need none for dummy weights."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.commands import ids_file, refused, run
from support.tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.models import checkpoint as checkpoints
from flexgen_h2o.models import registry
from flexgen_h2o.models.checkpoint import locate_model, open_checkpoint
from flexgen_h2o.models.safetensors_header import read_header

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
    assert (source.config.name, source.folder) == ("demo", DEMO_MODEL)


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


def test_what_stopped_a_download_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, allow_patterns: list[str], local_files_only: bool) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        raise OSError(28, "No space left on device", "/cache")

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    problem = problem_of(lambda: locate_model("opt-125m", None, False))
    assert "No space left on device" in problem and "not here" not in problem


def test_the_folder_in_use_is_never_written_to(tiny_folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_folder.iterdir()}
    run("--model", str(tiny_folder), "--gen-len", "2", "--input", ids_file(tmp_path, 3))
    assert {path.name: path.stat().st_mtime_ns for path in tiny_folder.iterdir()} == before
    assert json.loads((tiny_folder / "config.json").read_text())["hidden_size"] == 32


# --- files that nobody vouches for ------------------------------------------------------------------------------------


def refusal_of(folder: Path) -> str:
    """The sentences with which a folder's weights are refused."""
    with pytest.raises(UsageError) as caught:
        open_checkpoint(folder, registry.from_folder(folder))
    assert all(len(problem.splitlines()) == 1 and len(problem) < 1000 for problem in caught.value.problems)
    return " ".join(caught.value.problems)


class Boom:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", ["torch", "plain"])
def test_a_pickle_that_would_run_code_is_refused(tiny_folder: Path, tmp_path: Path, kind: str, protocol: int) -> None:
    import torch

    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny_folder / "config.json", folder)
    marker = tmp_path / "it has run"
    stored = {"model.decoder.embed_tokens.weight": Boom(marker)}
    if kind == "torch":
        torch.save(stored, folder / "pytorch_model.bin", pickle_protocol=protocol)
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(stored, protocol))
    assert "pytorch_model.bin cannot be read" in refusal_of(folder)
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False) if kind == "torch" else pickle.loads(
        (folder / "pytorch_model.bin").read_bytes()
    )
    assert marker.exists()  # so it would have, without the check


@pytest.mark.parametrize("name", ["evil", "tokenizer"])
def test_code_in_a_model_folder_is_not_run(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    folder = copy_weights(tiny_folder, tmp_path / "model")
    for path in DEMO_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    marker = tmp_path / "it has run"
    (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\nclass EvilFast(Evil): pass\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": [f"{name}.Evil", f"{name}.EvilFast"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "auto_map": auto_map, "tokenizer_class": "Evil"})
    )
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": f"{name}.Evil", "AutoModelForCausalLM": f"{name}.Evil"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    finished = run("--model", str(folder), "--gen-len", "1", "--input", ids_file(tmp_path, 3))
    assert finished.code in (0, 2) and "Traceback" not in finished.err
    assert not marker.exists()


@pytest.fixture
def sharded(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder whose index names its one file, and secret weights beside the folder."""
    folder = copy_weights(tiny_folder, tmp_path / "model")
    shutil.copy(folder / "model.safetensors", tmp_path / "secret.safetensors")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    return folder


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "/etc/passwd",
        "ABSOLUTE",
        "part-1.bin",
        "config.json",
        "",
        ".",
        "..",
        "a\0b.safetensors",
        "n" * 5000 + ".safetensors",
        3,
        None,
        ["part-1.safetensors"],
    ],
)
def test_an_index_may_name_weight_files_of_its_folder_only(sharded: Path, tmp_path: Path, name: object) -> None:
    name = str(tmp_path / "secret.safetensors") if name == "ABSOLUTE" else name
    write_index(sharded, {"weight_map": {"model.decoder.embed_tokens.weight": name}})
    problem = refusal_of(sharded)
    assert "index.json" in problem
    if isinstance(name, str) and "secret" in name:
        assert "no weight file of its folder" in problem


def test_an_index_that_names_its_own_files_is_followed_through_links(sharded: Path, tmp_path: Path) -> None:
    """As in the Hugging Face cache, where every file of a snapshot is a link to a blob elsewhere."""
    (tmp_path / "blobs").mkdir()
    (sharded / "part-1.safetensors").rename(tmp_path / "blobs" / "0abc")
    (sharded / "part-1.safetensors").symlink_to(tmp_path / "blobs" / "0abc")
    write_index(sharded, {"weight_map": {"anything": "part-1.safetensors"}})
    assert open_checkpoint(sharded, registry.from_folder(sharded)).sources


@pytest.mark.parametrize("content", [[], 3, {}, {"weight_map": []}, {"weight_map": None}, {"weight_map": {}}])
def test_an_index_that_is_none_is_refused(sharded: Path, content: object) -> None:
    write_index(sharded, content)
    assert refusal_of(sharded)


def test_an_index_nested_without_end_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": ' + "[" * 100_000)
    assert "no index of weight files" in refusal_of(sharded)


def with_header(path: Path, change: Callable[[dict[str, Any]], object] | None, length: int | None = None) -> None:
    """Writes a safetensors file anew with its header changed, its tensors as they were."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    changed = None if change is None else change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content[8 + size :])


def entry(header: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = header["model.decoder.layers.1.fc1.bias"]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: entry(h).update(data_offsets=[0, 10**15]), "bytes"),
        (lambda h: entry(h).update(data_offsets=[-4, 508]), "data_offsets"),
        (lambda h: entry(h).update(data_offsets=[512, 0]), "data_offsets"),
        (lambda h: entry(h).update(data_offsets=[0]), "data_offsets"),
        (lambda h: entry(h).update(data_offsets=[0.0, 512.0]), "data_offsets"),
        (lambda h: entry(h).update(data_offsets="0-512"), "data_offsets"),
        (lambda h: entry(h).update(data_offsets=[0, 512]), "was expected"),
        (lambda h: entry(h).update(shape=[2**40, 2**40]), "which its shape"),
        (lambda h: entry(h).update(shape=[-128]), "shape"),
        (lambda h: entry(h).update(shape=[True] * 7), "shape"),
        (lambda h: entry(h).update(shape=[128] + [1] * 100), "shape"),
        (lambda h: entry(h).update(dtype="F31"), "dtype"),
        (lambda h: entry(h).update(dtype=["F32"]), "dtype"),
        (lambda h: entry(h).pop("shape"), "lacks"),
        (lambda h: h.update(extra={"dtype": "F32", "shape": [], "data_offsets": [0, 4]}), "was expected"),
        (lambda h: h.update(extra=7), "lacks"),
        (lambda h: b"[]", "not an object"),
        (lambda h: b"[" * 100_000, "nested"),
        (lambda h: b'{"a": 1, "a": 2}', "twice"),
        (lambda h: b"{", ""),
        (lambda h: b"\xff", ""),
        (lambda h: b"", ""),
    ],
)
def test_a_header_is_held_against_the_file(
    tiny_folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    folder = copy_weights(tiny_folder, tmp_path / "model")
    with_header(folder / "model.safetensors", change)
    problem = refusal_of(folder)
    assert "model.safetensors cannot be read" in problem and words in problem


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, 10**7])
def test_a_header_longer_than_the_file_is_not_read(tiny_folder: Path, tmp_path: Path, length: int) -> None:
    folder = copy_weights(tiny_folder, tmp_path / "model")
    with_header(folder / "model.safetensors", None, length)
    assert f"would have {length} bytes" in refusal_of(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 5000])
def test_a_file_of_any_length_is_refused_or_whole(tiny_folder: Path, tmp_path: Path, size: int) -> None:
    folder = copy_weights(tiny_folder, tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:size])
    assert "cannot be read" in refusal_of(folder)
    (folder / "model.safetensors").write_bytes(content + bytes(4))
    assert "for them" in refusal_of(folder)


def test_weights_that_are_no_numbers_with_a_point_are_not_taken(tiny_folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = copy_weights(tiny_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.decoder.layers.1.fc1.bias"
    save_file({**tensors, name: tensors[name].to(torch.int64)}, folder / "model.safetensors")
    assert "layers.1.fc1.bias" in refusal_of(folder)


def test_headers_say_what_the_library_says(tiny_folder: Path) -> None:
    from safetensors import safe_open

    path = tiny_folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        expected = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert {key: tensor.shape for key, tensor in read_header(path).items()} == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 10**30},
        {"ffn_dim": "9" * 10_000},
        {"activation_function": ["relu"]},
        {"activation_function": {}},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": [[2]]},
        {"model_type": ["opt"]},
        {"tie_word_embeddings": "yes" * 10_000},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_config_that_asks_for_the_impossible_is_refused(
    tiny_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = copy_weights(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    assert len(problem_of(lambda: locate_model(str(folder), None, False))) < 1000
