"""Where parameters come from: a checkpoint, or a generator of random numbers."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.plan.model_config import ModelConfig

# Standard deviation of made-up weights: OPT's own initialisation.
DUMMY_STD = 0.02

TensorSource = Callable[
    [Sequence[str]], Iterator[tuple[str, Tensor]]
]  # yields the tensors of the given names, once each


def checkpoint_source(checkpoint: Checkpoint) -> TensorSource:
    """Parameters as stored in a checkpoint."""
    return lambda names: checkpoint.tensors(frozenset(names))


def dummy_source(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> TensorSource:
    """Random parameters: normal with standard deviation 0.02, norm weights around 1.

    Each depends on the seed, its own name and the kind of device that makes it, so that a parameter is the same
    wherever it is placed.
    """
    shapes = config.shapes()

    def make(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            own_seed = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big")
            tensor = torch.empty(shapes[name], dtype=dtype, device=device)
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            if not tensor.is_meta:
                tensor.normal_(mean, DUMMY_STD, generator=torch.Generator(device).manual_seed(own_seed))
            yield name, tensor

    return make
