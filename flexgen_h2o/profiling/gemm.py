"""Rate of the products with weights, by rows and precision."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod

import torch

from flexgen_h2o.kernels.matrices import best_layout
from flexgen_h2o.platforms import dtype_name
from flexgen_h2o.profiling.timing import Stopwatch, fill
from flexgen_h2o.workspace import Workspace, padded

# Below this share of float32's rate a 16-bit type is converted in software: computing in it is never of use.
LEAST_NATIVE_SHARE = 0.75


class Products:
    """Products of one precision with weights that lie in memory one behind the other, taken in turn: the engine's.

    Args:
        shape: of a weight, [out, in], whole panels. nbytes: of all weights, at least.
        most_rows: of a product.
        workspace: gives the memory.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        nbytes: int,
        most_rows: int,
        dtype: torch.dtype,
        workspace: Workspace,
        device: torch.device,
    ):
        layout = best_layout(device, dtype, [shape])
        in_memory = layout.storage(shape, dtype).shape
        buffer = workspace.take((layout.buffer_bytes([shape], dtype),), torch.uint8)
        storages = [fill(workspace.take(in_memory, dtype)) for _ in range(weight_count(shape, nbytes, dtype))]
        self._weights = cycle([layout.matrix(storage, shape, dtype, buffer) for storage in storages])
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


def weight_count(shape: tuple[int, int], nbytes: int, dtype: torch.dtype) -> int:
    """How many weights of a shape take at least `nbytes`."""
    return -(-nbytes // (prod(shape) * dtype.itemsize))


def products_bytes(shape: tuple[int, int], nbytes: int, most_rows: int, dtype: torch.dtype) -> int:
    """What Products takes of its workspace."""
    weights = weight_count(shape, nbytes, dtype) * padded(prod(shape) * dtype.itemsize)
    return weights + sum(padded(n * dtype.itemsize) for n in (shape[0], most_rows * shape[1], most_rows * shape[0]))


@dataclass(frozen=True)
class Gemm:
    """The products' rates, as a subject."""

    rows: Sequence[int]
    dtypes: Sequence[torch.dtype]
    shape: tuple[int, int]
    weight_bytes: int
    workspace: Workspace
    stopwatch: Stopwatch

    def trial(self) -> Iterator[tuple[str, float]]:
        """FLOP/s by precision and rows."""
        for dtype in self.dtypes:
            with self.workspace.frame():
                products = Products(
                    self.shape, self.weight_bytes, max(self.rows), dtype, self.workspace, self.stopwatch.device
                )
                for rows in self.rows:
                    name = f"gemm/{dtype_name(dtype)}/{rows}"
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
