"""Checkpoints of published shapes with random weights, in Hugging Face format, so that every engine can load the same.

The weights are those that `--dummy-weights` makes: normal with standard deviation 0.02, norm weights around 1, each
tensor from a seed of its own.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flexgen_h2o.bench.paths import CACHE
from flexgen_h2o.machine.platform import DTYPES
from flexgen_h2o.models.registry import facts_of, published
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.weights.sources import dummy_source

SHARD_BYTES = 512 * 2**20
SPECIAL_TOKENS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}


def published_checkpoint(model: str, dtype: str, root: Path = CACHE) -> Path:
    """The folder `<root>/<model>-<dtype>` of a published size, such as ("opt-1.3b", "bfloat16"); made if absent.

    Raises UsageError for a name that is none, KeyError for an unknown dtype.
    """
    config = published(model)
    folder = root / f"{config.name}-{dtype}"
    if not folder.is_dir():
        write_checkpoint(config, dtype, folder)
    return folder


def write_checkpoint(
    config: ModelShape, dtype: str, folder: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a checkpoint with random weights. It appears under its name once it is complete.

    Holds one shard in memory. If another process has made the folder meanwhile, that one stays.

    Args:
        dtype: float32, bfloat16 or float16.
        shard_bytes: the most that a file of weights holds, unless a single tensor is larger.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        _write_weights(config, DTYPES[dtype], part, seed, shard_bytes)
        special = {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_ids[0],
            "pad_token_id": config.pad_token_id,
        }
        _write_json(
            part / "config.json", {**facts_of(config.family).config_values(config), **special, "torch_dtype": dtype}
        )
        _write_json(part / "generation_config.json", special)
        _write_tokenizer(config.vocab_size, config.max_position_embeddings, part)
        part.chmod(0o755)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_weights(config: ModelShape, dtype: torch.dtype, folder: Path, seed: int, shard_bytes: int) -> None:
    """Shards, each of whole tensors, and their index."""
    source = dummy_source(config, seed, dtype, torch.device("cpu"))
    tensors = source(list(config.shapes()))
    files, total = [], 0
    for number, shard in enumerate(_shards(tensors, facts_of(config.family).checkpoint_key, shard_bytes)):
        save_file(shard, folder / f"{number}", metadata={"format": "pt"})
        files.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    places = {}
    for number, keys in enumerate(files):
        # Only now is it known how many there are.
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.rename(folder / f"{number}", folder / name)
        places.update(dict.fromkeys(keys, name))
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _shards(
    tensors: Iterator[tuple[str, Tensor]], key_of: Callable[[str], str], shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[key_of(name)] = tensor
        held += tensor.nbytes
    yield shard


def _write_tokenizer(vocab_size: int, most_tokens: int, folder: Path) -> None:
    """A byte-pair vocabulary without merges: converters ask for a tokenizer, though no text is ever read."""
    words = {f"t{token}": token for token in range(len(SPECIAL_TOKENS), vocab_size)}
    _write_json(folder / "vocab.json", {**SPECIAL_TOKENS, **words})
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    _write_json(folder / "special_tokens_map.json", special)
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": most_tokens, "add_bos_token": True}
    _write_json(folder / "tokenizer_config.json", {**settings, **special})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
