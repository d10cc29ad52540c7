"""Rate of the products with weights, by rows and precision."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from math import prod

import torch
from torch import Tensor

from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.layout import MatrixLayout, Storage
from flexgen_h2o.machine.platform import default_dtype, dtype_name
from flexgen_h2o.memory.workspace import Workspace, padded
from flexgen_h2o.plan.footprint import PANEL_OUTPUTS
from flexgen_h2o.profiling.timing import Stopwatch, fill
from flexgen_h2o.search.rates import FOUR_BITS

# Below this share of float32's rate a 16-bit type is converted in software: computing in it is never of use.
LEAST_NATIVE_SHARE = 0.75


@dataclass(frozen=True)
class WeightSet:
    """Weights that products take in turn, as the engine keeps them.

    Attributes:
        shape: of each, [out, in], whole panels. nbytes: of all, at least.
        dtype: in which is computed.
        in_4_bits: they are kept in 4-bit groups.
    """

    shape: tuple[int, int]
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    in_4_bits: bool = False

    @cached_property
    def layout(self) -> MatrixLayout:
        """The engine's, for this device and precision."""
        return best_layout(self.device, self.dtype, [self.shape], self.in_4_bits)

    @property
    def storage(self) -> Storage:
        """Of one weight."""
        return self.layout.storage(self.shape, self.dtype)

    @property
    def buffer_bytes(self) -> int:
        """What the layout works in."""
        return self.layout.buffer_bytes([self.shape], self.dtype)

    @property
    def count(self) -> int:
        """How many weights take at least `nbytes`."""
        return -(-self.nbytes // self.storage.nbytes)

    def panel(self) -> Tensor:
        """A panel's outputs, which every layout keeps apart from the next, of random numbers in the layout."""
        shape = (PANEL_OUTPUTS, self.shape[1])
        storage = self.layout.storage(shape, self.dtype)
        encoded = torch.empty(storage.shape, dtype=storage.dtype, device=self.device)
        self.layout.encode(encoded, fill(torch.empty(shape, dtype=self.dtype, device=self.device)))
        return encoded


def weight_sets(
    shape: tuple[int, int], nbytes: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> dict[str, WeightSet]:
    """Weights of each precision by its name among rates, and weights in 4 bits."""
    sets = {dtype_name(dtype): WeightSet(shape, nbytes, dtype, device) for dtype in dtypes}
    return {**sets, FOUR_BITS: WeightSet(shape, nbytes, default_dtype(device), device, in_4_bits=True)}


class Products:
    """The engine's products with weights that lie in memory one behind the other, taken in turn.

    Args:
        most_rows: of a product.
        workspace: gives the memory.
    """

    def __init__(self, weights: WeightSet, most_rows: int, workspace: Workspace):
        shape, dtype, storage = weights.shape, weights.dtype, weights.storage
        buffer = workspace.take((weights.buffer_bytes,), torch.uint8)
        storages = [workspace.take(storage.shape, storage.dtype) for _ in range(weights.count)]
        panel = weights.panel()
        for memory in storages:
            memory.unflatten(0, (-1, len(panel))).copy_(panel)
        self._weights = cycle([weights.layout.matrix(memory, shape, dtype, buffer) for memory in storages])
        self._bias = fill(workspace.take(shape[:1], dtype))
        self._x = fill(workspace.take((most_rows, shape[1]), dtype))
        self._out = workspace.take((most_rows, shape[0]), dtype)
        self._elements = prod(shape)

    def multiply(self, rows: int) -> None:
        """A product of so many rows with the next weight."""
        next(self._weights).product(self._x[:rows], self._bias, self._out[:rows])

    def flops(self, rows: int) -> int:
        """What multiply() computes."""
        return 2 * rows * self._elements


def products_bytes(weights: WeightSet, most_rows: int) -> int:
    """What Products takes of its workspace."""
    out, inputs = weights.shape
    elements = (out, most_rows * inputs, most_rows * out)
    return (
        padded(weights.buffer_bytes)
        + weights.count * padded(weights.storage.nbytes)
        + sum(padded(count * weights.dtype.itemsize) for count in elements)
    )


@dataclass(frozen=True)
class Gemm:
    """The products' rates, as a subject."""

    rows: Sequence[int]
    weights: Mapping[str, WeightSet]
    workspace: Workspace
    stopwatch: Stopwatch

    def trial(self) -> Iterator[tuple[str, float]]:
        """FLOP/s by precision of the weights and rows."""
        for kind, weights in self.weights.items():
            with self.workspace.frame():
                products = Products(weights, max(self.rows), self.workspace)
                for rows in self.rows:
                    name = f"gemm/{kind}/{rows}"
                    yield name, self._rate(name, products, rows)

    def _rate(self, name: str, products: Products, rows: int) -> float:
        return products.flops(rows) / self.stopwatch.seconds(name, lambda: products.multiply(rows))


def native_dtypes(device: torch.device) -> list[torch.dtype]:
    """The precisions worth computing in: on a CPU, float16 only where the processor multiplies it."""
    both = [torch.float32, torch.bfloat16]
    if device.type == "cuda":
        return [torch.float16, *both]
    seconds = {dtype: _square_product_s(dtype) for dtype in (torch.float32, torch.float16)}
    is_native = LEAST_NATIVE_SHARE * seconds[torch.float16] < seconds[torch.float32]
    return [*both, torch.float16] if is_native else both


def _square_product_s(dtype: torch.dtype, size: int = 512) -> float:
    """Seconds of a small product on the CPU, the shortest of several."""
    x = fill(torch.empty(size, size, dtype=dtype))
    stopwatch = Stopwatch(torch.device("cpu"), 0.0)
    return min(stopwatch.seconds("product", lambda: torch.mm(x, x)) for _ in range(5))
