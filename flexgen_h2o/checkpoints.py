"""From what the user calls a model to a folder on this machine."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from flexgen_h2o import model_config
from flexgen_h2o.errors import UsageError
from flexgen_h2o.model_config import ModelConfig

DEMO_FOLDER = Path(__file__).parent / "demo" / "model"
SETTINGS_FILES = ["*.json", "*.txt", "*.model"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `folder` is None for a published size that is run on dummy weights."""

    config: ModelConfig
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
        return ModelSource(replace(model_config.from_folder(DEMO_FOLDER), name="demo"), DEMO_FOLDER)
    if Path(model).is_dir():
        return ModelSource(model_config.from_folder(Path(model)), Path(model))
    if Path(model).exists():
        raise UsageError(f"--model {model} is a file; it takes a folder in Hugging Face format or a name")
    if model.startswith((".", os.sep, "~")) or model.count("/") > 1:
        raise UsageError(f"--model {model}: there is no such folder")
    if dummy_weights:
        return ModelSource(model_config.published(model), None)
    folder = _find_by_name(model, path)
    return ModelSource(model_config.from_folder(folder), folder)


def _find_by_name(model: str, path: str | None) -> Path:
    if path is not None:
        root = Path(path).expanduser()
        if not root.is_dir():
            raise UsageError(f"--path {path}: there is no such folder")
        for folder in (root / model, root / model.rsplit("/", 1)[-1], root):
            if (folder / "config.json").is_file():
                return folder
    repository = model if "/" in model else f"facebook/{model}"
    if "/" not in model:
        model_config.published(model)  # refuses a name that is none, before any network is asked
    for local_files_only in (True, False):
        if snapshot := _snapshot(repository, local_files_only):
            return snapshot
    searched = f"under {path}, " if path else ""
    raise UsageError(
        f"weights of {model} are neither {searched}in the Hugging Face cache nor on a network that can be reached;"
        " give a folder with --model or --path, connect to the network once, or use --dummy-weights"
    )


def _snapshot(repository: str, local_files_only: bool) -> Path | None:
    """The repository's folder in the Hugging Face cache with its weights in it, or None.

    Downloads what is missing, with progress, unless told not to. Safetensors are preferred; .bin is the fallback.
    """
    for weights in ("*.safetensors", "*.bin"):
        try:
            folder = Path(
                snapshot_download(
                    repository, allow_patterns=[*SETTINGS_FILES, weights], local_files_only=local_files_only
                )
            )
        except (OSError, HfHubHTTPError):
            return None
        if any(folder.glob(weights)):
            return folder
    return None
