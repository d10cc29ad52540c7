"""Memory for what a layer computes in passing: allocated once, handed out like a stack.

Tensors as wide as a layer's would otherwise be allocated and freed many times per layer. On a CPU each of them is then
new memory, whose pages the system has to clear first; and what an allocator keeps beside what is in use, no ledger can
foresee.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes of a workspace."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Workspace:
    """A piece of memory from which tensors are taken.

    Args:
        storage: [n] uint8, the memory.
        prefill_logits: how many logits prefill attention may hold at once; None for what suits a CPU.
    """

    def __init__(self, storage: Tensor, prefill_logits: int | None = None):
        self.prefill_logits = prefill_logits
        self._storage = storage
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. It is valid until the frame in which it was taken ends."""
        nbytes = prod(shape) * dtype.itemsize
        start = self._used
        self._used += padded(nbytes)
        if self._used > self._storage.nbytes:
            raise RuntimeError(f"a workspace of {self._storage.nbytes} bytes is too small: {self._used} are needed")
        return self._storage[start : start + nbytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Takes everything back."""
        self._used = 0

    def close(self) -> None:
        """Lets go of the memory, whoever still knows the workspace."""
        self._storage = self._storage.new_empty(0)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Takes back, at its end, what was taken inside."""
        start = self._used
        try:
            yield
        finally:
            self._used = start
