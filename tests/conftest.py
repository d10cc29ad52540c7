"""Fixtures that the test files share: tiny models, made once per session and loaded through the package."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

# Without a GPU Triton interprets its kernels. It reads this when it is first imported, which transformers does.
os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))

import pytest
from hypothesis import settings
from support.helpers import TinyOpt, place
from support.tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o.models import registry
from flexgen_h2o.models.checkpoint import open_checkpoint
from flexgen_h2o.profiling import quick
from flexgen_h2o.search.hardware_files import default_folder

torch.set_num_threads(1)  # tensors this small are slower on several

# The same examples each time: a red test must be red again when it is looked at.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Programs that tests start end by signals, also where the tests themselves run under nohup or in the background.

    What a process ignores, the programs that it starts ignore too; what it handles, they do not. So signals that are
    ignored are handled here, by doing nothing.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def known_machine() -> Iterator[None]:
    """On a machine without a hardware file, runs are held against another one rather than measure it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "quick_file", lambda name: default_folder() / "amd-epyc-2-cores.json")
        yield


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
        config = registry.from_folder(folder)
        placed = place(config, dtype, open_checkpoint(folder, config).source())
        return TinyOpt(model, folder, config, placed)

    def make(variant: str = "pre_norm", dtype: torch.dtype = torch.float32, std: float = 0.1) -> TinyOpt:
        return loaded(variant, dtype, std)

    return make
