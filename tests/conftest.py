"""Fixtures that the test files share: tiny models, made once per session and loaded through the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import TinyOpt, place
from hypothesis import settings
from tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o import model_config
from flexgen_h2o.checkpoints import open_checkpoint
from flexgen_h2o.weights import checkpoint_source

torch.set_num_threads(1)  # tensors this small are slower on several

# The same examples each time: a red test must be red again when it is looked at.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyOpt]:
    """tiny(variant, dtype, std) -> a tiny model, and its checkpoint as the package has loaded it. Cached."""

    @functools.cache
    def saved(variant: str, std: float) -> tuple[torch.nn.Module, Path]:
        model = make_tiny_opt(variant, std=std)
        # Shards so small that every model is cut into several.
        return model, save_tiny_opt(model, tmp_path_factory.mktemp(variant), "20KB")

    @functools.cache
    def loaded(variant: str, dtype: torch.dtype, std: float) -> TinyOpt:
        model, folder = saved(variant, std)
        config = model_config.from_folder(folder)
        placed = place(config, dtype, checkpoint_source(open_checkpoint(folder, config)))
        return TinyOpt(model, folder, config, placed)

    def make(variant: str = "pre_norm", dtype: torch.dtype = torch.float32, std: float = 0.1) -> TinyOpt:
        return loaded(variant, dtype, std)

    return make
