"""Model weights: found in a checkpoint or made up, checked, and placed.

Published OPT files differ in the prefix of their keys, in the name a tied output embedding is stored under, in shard
count and in format. Here every parameter has one name, relative to the decoder (`model_config.ModelConfig.shapes`).
"""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexgen_h2o.errors import UsageError
from flexgen_h2o.model_config import ModelConfig

# Standard deviation of made-up weights: OPT's own initialisation.
DUMMY_STD = 0.02

Progress = Callable[[int], None]  # told how many bytes have just been placed


@dataclass(frozen=True)
class Weights:
    """All parameters of a model, each at home in memory.

    Attributes:
        outer: what lies outside the decoder layers (embeddings, final norm, output projection).
        layers: one mapping per decoder layer, named relative to it.
    """

    outer: Mapping[str, Tensor]
    layers: tuple[Mapping[str, Tensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in (self.outer, *self.layers) for tensor in part.values())


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all parameters at `itemsize` bytes each."""
    return itemsize * sum(_count(shape) for shape in config.shapes().values())


def load_weights(
    checkpoint: "Checkpoint",
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Weights:
    """Reads every parameter once, converting to `dtype`. Peak memory is the placed bytes plus one tensor."""
    placed = {}
    for name, tensor in checkpoint.tensors():
        # A copy even where nothing is converted: the file must not stay mapped.
        placed[name] = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
        progress(placed[name].nbytes)
    return _by_layer(placed, config)


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int, progress: Progress
) -> Weights:
    """Random parameters: normal with standard deviation 0.02, norm weights around 1."""
    generator = torch.Generator(device).manual_seed(seed)
    placed = {}
    for name, shape in config.shapes().items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        tensor = torch.empty(shape, dtype=dtype, device=device)
        placed[name] = tensor.normal_(mean, DUMMY_STD, generator=generator)
        progress(tensor.nbytes)
    return _by_layer(placed, config)


def _by_layer(placed: dict[str, Tensor], config: ModelConfig) -> Weights:
    layers = tuple(
        {name: placed[f"layers.{layer}.{name}"] for name in config.layer_shapes()}
        for layer in range(config.num_hidden_layers)
    )
    return Weights({name: placed[name] for name in config.outer_shapes()}, layers)


@dataclass(frozen=True)
class Checkpoint:
    """A checked set of files that holds every parameter of a model exactly once.

    Attributes:
        sources: parameter name -> (file, key in that file), in file order.
        unused: keys of the files that the model has no use for.
    """

    sources: Mapping[str, tuple[Path, str]]
    unused: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter as stored, one at a time."""
        by_file: dict[Path, list[str]] = {}
        for name, (path, _) in self.sources.items():
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


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Finds and checks the weight files of a folder in Hugging Face format, without reading tensors.

    Raises UsageError that names every file that is missing or cut short, every parameter that is missing, stored
    twice or of another shape.
    """
    files = _weight_files(folder)
    stored: dict[str, list[tuple[Path, str]]] = {}
    shapes: dict[tuple[Path, str], tuple[int, ...]] = {}
    problems = []
    for path in files:
        try:
            file_shapes = _stored_shapes(path)
        except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"weight file {path} cannot be read ({reason}); it may be cut short: fetch it again")
            continue
        for key, shape in file_shapes.items():
            stored.setdefault(_parameter_name(key), []).append((path, key))
            shapes[path, key] = shape
    if problems:
        raise UsageError(problems)
    return _match(stored, shapes, config, folder)


def _match(
    stored: dict[str, list[tuple[Path, str]]],
    shapes: dict[tuple[Path, str], tuple[int, ...]],
    config: ModelConfig,
    folder: Path,
) -> Checkpoint:
    """Pairs what the model needs with what the files hold."""
    if config.tie_word_embeddings:
        # Tied embeddings are stored under either name, or under both.
        head = stored.pop("lm_head.weight", [])
        if "embed_tokens.weight" not in stored and head:
            stored["embed_tokens.weight"] = head
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


def _parameter_name(key: str) -> str:
    return key.removeprefix("model.").removeprefix("decoder.")


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
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (index.parent / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is no index of weight files: {type(error).__name__}: {error}") from None
    if missing:
        raise UsageError(f"{index} names {name}, which is not there: fetch it again" for name in missing)
    return [index.parent / name for name in names]


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(stored, dict):
        raise ValueError(f"it holds {type(stored).__name__} where a mapping of tensors is expected")
    return {key: tuple(value.shape) for key, value in stored.items() if isinstance(value, Tensor)}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
