"""The three tiers: where tensors lie, how many bytes they take, and the ledger that counts them.

    gpu   the memory of the compute device
    cpu   host memory
    disk  files

Without an accelerator the gpu and cpu tiers are one memory, with one budget, and nothing is copied between them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import gb
from flexgen_h2o.memory.direct_io import aligned_bytes
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.plan.placement import TIERS, Tier, reachable


class BudgetError(RuntimeError):
    """An allocation would exceed a budget; the message names the buffer, both numbers and the largest holders."""


@dataclass
class Account:
    """Bytes of one memory.

    Attributes:
        budget: the most it may hold; None for no limit.
        entries: what it holds, by name.
        largest: the most that each name has held.
    """

    budget: int | None = None
    entries: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    in_use: int = 0
    peak: int = 0


class Ledger:
    """Counts every buffer by tier and name. Tiers that share a memory share an account.

    Args:
        budgets: bytes per tier; None or absent for no limit. With `joint`, gpu's and cpu's are one, under "cpu".
        joint: whether the gpu and cpu tiers are one memory.
    """

    def __init__(self, budgets: dict[Tier, int | None], joint: bool):
        self.joint = joint
        self.accounts: dict[Tier, Account] = {tier: Account(budgets.get(tier)) for tier in TIERS}

    def account(self, tier: Tier) -> Account:
        """The account that pays for a tier."""
        return self.accounts["cpu" if self.joint and tier == "gpu" else tier]

    def charge(self, tier: Tier, name: str, nbytes: int) -> None:
        """Counts bytes that are about to be allocated. Raises BudgetError if they exceed the budget."""
        account = self.account(tier)
        if not nbytes:
            return
        if account.budget is not None and account.in_use + nbytes > account.budget:
            largest = sorted(account.entries.items(), key=lambda entry: -entry[1])[:3]
            holders = ", ".join(f"{holder} {gb(size)}" for holder, size in largest)
            raise BudgetError(
                f"{name} needs {gb(nbytes)} on {tier}, where {gb(account.in_use)} of the budget of {gb(account.budget)}"
                f" are taken ({holders or 'nothing yet'})"
            )
        account.entries[name] = account.entries.get(name, 0) + nbytes
        account.largest[name] = max(account.largest.get(name, 0), account.entries[name])
        account.in_use += nbytes
        account.peak = max(account.peak, account.in_use)

    def release(self, tier: Tier, name: str, nbytes: int) -> None:
        """Counts bytes that have been given back."""
        account = self.account(tier)
        if not nbytes:
            return
        account.entries[name] -= nbytes
        account.in_use -= nbytes
        if not account.entries[name]:
            del account.entries[name]

    @contextmanager
    def held(self, tier: Tier, name: str, nbytes: int) -> Iterator[None]:
        """Counts bytes for as long as the context lasts."""
        self.charge(tier, name, nbytes)
        try:
            yield
        finally:
            self.release(tier, name, nbytes)

    def peak(self, tier: Tier) -> int:
        """The most bytes that the tier's own account has held."""
        return self.accounts[tier].peak


@dataclass(frozen=True)
class Stored:
    """A tensor at home on a tier. In memory it is a tensor; on disk, an extent of a file.

    Compute takes it through `resident()`, which refuses a tensor that does not live where it is needed.
    """

    name: str
    tier: Tier
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    extent: Extent | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> Tensor | Extent:
        """Where it lives, to be copied from there."""
        place = self.tensor if self.extent is None else self.extent
        assert place is not None
        return place

    def resident(self, tiers: frozenset[Tier]) -> Tensor:
        """The tensor, for use on a device that can reach `tiers`. Raises RuntimeError if it lives elsewhere."""
        if self.tier not in tiers or self.tensor is None:
            raise RuntimeError(
                f"{self.name} lives on {self.tier} and was used where only {sorted(tiers)} can be reached"
            )
        return self.tensor


class Tiers:
    """Allocates on the three tiers and counts what it allocates.

    Args:
        device: the compute device: cuda, cpu or meta.
        ledger: pays for everything.

    Attributes:
        refusal: why some host memory is not pinned that was to be; None if all is.
    """

    def __init__(self, device: torch.device, ledger: Ledger):
        self.device = device
        self.ledger = ledger
        self.refusal: str | None = None
        self._pinned: set[int] = set()  # addresses

    @property
    def reachable(self) -> frozenset[Tier]:
        """The tiers that compute works on without a copy."""
        return reachable(self.ledger.joint)

    def memory_device(self, tier: Tier) -> torch.device:
        """Where torch allocates a tier's tensors."""
        on_host = tier == "cpu" and self.device.type == "cuda"
        return torch.device("cpu") if on_host else self.device

    def allocate(
        self, tier: Tier, name: str, shape: tuple[int, ...], dtype: torch.dtype, line: str, pin: bool = False
    ) -> Stored:
        """An uninitialised tensor in memory, on gpu or cpu.

        Args:
            line: of the ledger, for it.
            pin: beside a GPU, take pinned host memory, from which copies need no staging.
        """
        nbytes = prod(shape) * dtype.itemsize
        self.ledger.charge(tier, line, nbytes)
        try:
            tensor = self._empty(tier, shape, dtype, pin)
        except BaseException:
            self.ledger.release(tier, line, nbytes)
            raise
        return Stored(name, tier, shape, dtype, tensor=tensor)

    def _empty(self, tier: Tier, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> Tensor:
        tensor = self._unregistered(tier, shape, dtype)
        if pin and tier == "cpu" and self.device.type == "cuda" and tensor.nbytes:
            # Pinned in place: torch's own allocator of pinned memory rounds up to the next power of two.
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
                self._pinned.add(tensor.data_ptr())
            except RuntimeError as error:  # copies then go through pinned staging
                self.refusal = f"{gb(tensor.nbytes)} of host memory cannot be pinned: {str(error).splitlines()[0]}"
                with suppress(RuntimeError):  # the next kernel is told of that error once more
                    torch.zeros(1, device=self.device)
        return tensor

    def _unregistered(self, tier: Tier, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        device = self.memory_device(tier)
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        # In huge pages where it is large: read and filled from disk faster, and aligned for direct I/O.
        return aligned_bytes(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def release(self, stored: Stored, line: str) -> None:
        """Gives a tensor's bytes back; the caller drops its last reference."""
        self.ledger.release(stored.tier, line, stored.nbytes)
        if stored.tensor is not None and stored.tensor.data_ptr() in self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(stored.tensor.data_ptr()))
            self._pinned.remove(stored.tensor.data_ptr())
