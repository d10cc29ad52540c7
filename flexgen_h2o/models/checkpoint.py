"""From what the user calls a model to checked weight files on this machine.

Published files of one family differ in the prefix of their keys, in the name a tied output embedding is stored under,
in shard count and in format. Here every parameter has one name, relative to the decoder (`ModelShape.shapes`).

A folder's content is not trusted: nothing in it is executed, nothing outside it is opened because it says so, and what
headers claim is held against the size of the file before it is used.
"""

import json
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import safe_open
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.models import registry
from flexgen_h2o.models.base import TensorSource
from flexgen_h2o.models.registry import facts_of
from flexgen_h2o.models.safetensors_header import read_header
from flexgen_h2o.plan.model_shape import ModelShape

SETTINGS_FILES = ["*.json", "*.txt", "*.model"]
MOST_INDEX_BYTES = 2**26
MOST_REASON_LETTERS = 200


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `folder` is None for a published size that is run on dummy weights."""

    config: ModelShape
    folder: Path | None


def locate_model(model: str | None, path: str | None, dummy_weights: bool) -> ModelSource:
    """Finds a model: a folder, or a name looked for under `path`, in the Hugging Face cache and on the network.

    Args:
        model: folder, name ("opt-30b", "facebook/opt-30b"), or None for the demo model that ships.
        path: a folder that holds model folders, or is one.
        dummy_weights: weights will be made up, so that a published name needs no files.
    Raises UsageError that names the ways out.
    """
    if model is None:
        return ModelSource(registry.from_folder(DEMO_MODEL, name="demo"), DEMO_MODEL)
    try:
        place = Path(model).expanduser()
        if place.is_dir():
            return ModelSource(registry.from_folder(place), place)
        is_file = place.exists()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"--model {model} cannot be looked for: {error}; give another name") from None
    if is_file:
        raise UsageError(f"--model {model} is a file; it takes a folder in Hugging Face format or a name")
    if model.startswith((".", os.sep, "~")) or model.count("/") > 1:
        raise UsageError(f"--model {model}: there is no such folder")
    if dummy_weights:
        return ModelSource(registry.published(model), None)
    folder = _find_by_name(model, path)
    return ModelSource(registry.from_folder(folder), folder)


def _find_by_name(model: str, path: str | None) -> Path:
    if path is not None:
        try:
            root = Path(path).expanduser()
            folders = [root / model, root / model.rsplit("/", 1)[-1], root] if root.is_dir() else []
            found = [folder for folder in folders if (folder / "config.json").is_file()]
        except (OSError, RuntimeError) as error:
            raise UsageError(f"--path {path} cannot be looked into: {error}; give another folder") from None
        if not folders:
            raise UsageError(f"--path {path}: there is no such folder; give another or leave it out")
        if found:
            return found[0]
    repository = model
    if "/" not in model:
        family, short = registry.find_published(model)  # refuses a name that is none, before any network is asked
        repository = f"{family.owner}/{short}"
    reason = ""
    for local_files_only in (True, False):
        try:
            if snapshot := _snapshot(repository, local_files_only):
                return snapshot
            reason = f"{repository} has none"
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            reason = (str(error).strip() or type(error).__name__).split("\n")[0]
    searched = f"under {path}, " if path else ""
    raise UsageError(
        f"weights of {model} are neither {searched}in the Hugging Face cache nor could they be downloaded ({reason});"
        " give a folder with --model or --path, connect to the network once, or use --dummy-weights"
    )


def _snapshot(repository: str, local_files_only: bool) -> Path | None:
    """The repository's folder in the Hugging Face cache with its weights in it; None if it has no weights.

    Downloads what is missing, with progress, unless told not to. Safetensors are preferred; .bin is the fallback.
    Raises what snapshot_download() does.
    """
    for weights in ("*.safetensors", "*.bin"):
        wanted = [*SETTINGS_FILES, weights]
        folder = Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=local_files_only))
        if any(folder.glob(weights)):
            return folder
    return None


@dataclass(frozen=True)
class Checkpoint:
    """A checked set of files that holds every parameter of a model exactly once.

    Attributes:
        sources: parameter name -> (file, key in that file), in file order.
        unused: keys of the files that the model has no use for.
    """

    sources: Mapping[str, tuple[Path, str]]
    unused: tuple[str, ...]

    def identity(self) -> str:
        """What tells these files from others: names, sizes and times of change."""
        paths = sorted({path.resolve() for path, _ in self.sources.values()})
        return " ".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)

    def source(self) -> TensorSource:
        """Parameters as stored."""
        return lambda names: self.tensors(frozenset(names))

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the wanted parameters as stored, one at a time, in the order of the files."""
        by_file: dict[Path, list[str]] = {}
        for name, (path, _) in self.sources.items():
            if name in wanted:
                by_file.setdefault(path, []).append(name)
        for path, names in by_file.items():
            read = _read_safetensors if path.suffix == ".safetensors" else _read_pickled
            yield from read(path, {name: self.sources[name][1] for name in names})


def _read_safetensors(path: Path, keys: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, key in keys.items():
        # Opened anew for each tensor: pages of a mapped file that were read once would otherwise count as ours.
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
        yield name, tensor


def _read_pickled(path: Path, keys: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name, key in keys.items():
        yield name, stored[key]


def open_checkpoint(folder: Path, config: ModelShape) -> Checkpoint:
    """Finds and checks the weight files of a folder in Hugging Face format, without reading tensors.

    Raises UsageError that names every file that is missing or cut short, every parameter that is missing, stored
    twice or of another shape.
    """
    files, family = _weight_files(folder), facts_of(config.family)
    stored: dict[str, list[tuple[Path, str]]] = {}
    shapes: dict[tuple[Path, str], tuple[int, ...]] = {}
    problems = []
    for path in files:
        try:
            file_shapes = _stored_shapes(path)
        except Exception as error:  # whatever is raised for a broken file, the file is what is wrong
            reason = str(error).splitlines()[0][:MOST_REASON_LETTERS] if str(error) else type(error).__name__
            problems.append(f"weight file {path} cannot be read ({reason}); it may be cut short: fetch it again")
            continue
        for key, shape in file_shapes.items():
            stored.setdefault(family.parameter_name(key), []).append((path, key))
            shapes[path, key] = shape
    if problems:
        raise UsageError(problems)
    return _match(stored, shapes, config, folder)


def _match(
    stored: dict[str, list[tuple[Path, str]]],
    shapes: dict[tuple[Path, str], tuple[int, ...]],
    config: ModelShape,
    folder: Path,
) -> Checkpoint:
    """Pairs what the model needs with what the files hold."""
    for alias, name in config.aliases:
        under_alias = stored.pop(alias, [])
        if name not in stored and under_alias:
            stored[name] = under_alias
    problems = []
    sources = {}
    for name, shape in config.shapes().items():
        found = stored.pop(name, [])
        if not found:
            problems.append(f"{folder}: parameter {name} {list(shape)} is in none of the weight files")
        elif len(found) > 1:
            places = " and ".join(f"{path.name}:{key}" for path, key in found)
            problems.append(f"{folder}: parameter {name} is stored twice: {places}")
        elif shapes[found[0]] != shape:
            problems.append(
                f"{found[0][0]}: {found[0][1]} has shape {list(shapes[found[0]])},"
                f" but config.json makes it {list(shape)}"
            )
        else:
            sources[name] = found[0]
    if problems:
        raise UsageError(problems)
    unused = tuple(key for places in stored.values() for _, key in places)
    in_file_order = sorted(sources.items(), key=lambda item: str(item[1][0]))
    return Checkpoint(dict(in_file_order), unused)


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors before .bin. Raises UsageError if one that is named is absent."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _shards(index)
        if (folder / stem).is_file():
            return [folder / stem]
    raise UsageError(
        f"{folder} holds no weights (model.safetensors, pytorch_model.bin, or an index of shards);"
        " use --dummy-weights to run without"
    )


def _shards(index: Path) -> list[Path]:
    """The files that an index names. Raises UsageError if one lies elsewhere, is of another kind, or is not there."""
    try:
        if index.stat().st_size > MOST_INDEX_BYTES:
            raise ValueError(f"it has more than {MOST_INDEX_BYTES} bytes")
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        strange = [name for name in names if not _is_shard_of(index, name)]
        missing = [] if strange else [name for name in names if not (index.parent / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:MOST_REASON_LETTERS]
        raise UsageError(f"{index} is no index of weight files: {reason}") from None
    if strange:
        raise UsageError(
            f"{index} names {name[:MOST_REASON_LETTERS]!r}, which is no weight file of its folder: fetch the model anew"
            for name in strange
        )
    if missing:
        raise UsageError(f"{index} names {name}, which is not there: fetch it again" for name in missing)
    return [index.parent / name for name in names]


def _is_shard_of(index: Path, name: str) -> bool:
    """Whether an index may name a file: one in its own folder or below, of the index' own kind."""
    path = Path(name)
    kind = Path(index.name.removesuffix(".index.json")).suffix
    return path.suffix == kind and not path.is_absolute() and ".." not in path.parts


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix == ".safetensors":
        return {key: tensor.shape for key, tensor in read_header(path).items() if tensor.is_floating}
    # Without `weights_only` a pickle may run whatever it likes.
    stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(stored, dict):
        raise ValueError(f"it holds {type(stored).__name__} where a mapping of tensors is expected")
    return {
        key: tuple(value.shape)
        for key, value in stored.items()
        if isinstance(key, str) and isinstance(value, Tensor) and value.is_floating_point()
    }
