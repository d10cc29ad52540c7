"""Where parameters come from that no checkpoint holds: a generator of random numbers."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from flexgen_h2o.models.base import TensorSource
from flexgen_h2o.plan.model_shape import ModelShape

# Standard deviation of made-up weights: OPT's own initialisation.
DUMMY_STD = 0.02


def dummy_origin(config: ModelShape, seed: int, device_type: str) -> str:
    """What tells made-up weights from others: they depend on the seed and on the kind of device that makes them."""
    return f"dummy {config.identity} {seed} {device_type}"


def dummy_source(config: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> TensorSource:
    """Random parameters: normal with standard deviation 0.02, norm weights around 1.

    Each depends on the seed, its own name and the kind of device that makes it, so that a parameter is the same
    wherever it is placed.
    """
    parameters = config.parameters()

    def make(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            own_seed = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big")
            tensor = torch.empty(parameters[name].shape, dtype=dtype, device=device)
            if not tensor.is_meta:
                tensor.normal_(
                    parameters[name].mean, DUMMY_STD, generator=torch.Generator(device).manual_seed(own_seed)
                )
            yield name, tensor

    return make
