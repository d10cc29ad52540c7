"""Random matrices, what 4-bit groups keep of them, and products beside float64."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_h2o.kernels import four_bits as quant


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kept(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What 4-bit groups keep of a matrix, rounded once to the precision of compute."""
    return quant.decode(quant.encode_weight(weight), weight.shape[1], dtype)


def assert_is_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Sums in float32, rounded once to the result's precision."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().T + 1
    bound = torch.finfo(got.dtype).eps * exact.abs() + x.shape[1] * torch.finfo(torch.float32).eps * scale
    assert ((got.double() - exact).abs() <= bound).all()
