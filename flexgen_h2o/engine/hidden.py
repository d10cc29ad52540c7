"""Hidden states of a block in prefill, at their homes between layers. (In decode they are small and stay in place.)"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.memory.run_folder import RunFolder
from flexgen_h2o.memory.tiers import Stored, Tiers
from flexgen_h2o.memory.transfer import Ticket, Transfer, start_load, start_store
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import Tier


@dataclass
class Place:
    """One group's hidden states, [rows, n, hidden_size].

    Attributes:
        home: memory of the most they may take, where compute cannot reach it; extent: the same on disk.
        on_device: they themselves, where compute can use them.
        stored: done when they are at home.
    """

    home: Stored | None = None
    extent: Extent | None = None
    on_device: Tensor | None = None
    shape: torch.Size = torch.Size()
    loaded: Ticket = field(default_factory=Ticket)
    stored: Ticket = field(default_factory=Ticket)


class HiddenStore:
    """Hidden states of all groups.

    Args:
        homes: the tier of each prefill group's.
        elements: the most that each may have.
    """

    def __init__(
        self,
        homes: Sequence[Tier],
        elements: Sequence[int],
        dtype: torch.dtype,
        tiers: Tiers,
        transfer: Transfer,
        run_folder: RunFolder | None,
    ):
        self._dtype = dtype
        self._tiers = tiers
        self._transfer = transfer
        self._homes: list[Stored] = []
        self._places: list[Place] = []
        self._leaving = Ticket()  # of the last that was sent home
        self._disk_bytes = 0
        try:
            self._make_places(homes, elements, run_folder)
        except BaseException:
            self.close()
            raise

    def _make_places(self, homes: Sequence[Tier], elements: Sequence[int], run_folder: RunFolder | None) -> None:
        sizes = [
            whole_pages(count * self._dtype.itemsize) if tier == "disk" else 0
            for tier, count in zip(homes, elements, strict=True)
        ]
        self._tiers.ledger.charge("disk", Line.HIDDEN_STATES, sum(sizes))
        self._disk_bytes = sum(sizes)
        file = Extent(Path(), 0, self._disk_bytes)
        if run_folder is not None and self._disk_bytes:
            file = run_folder.reserve("hidden", self._disk_bytes)
        for tier, count, extent in zip(homes, elements, file.cut(sizes), strict=True):
            self._places.append(self._make_place(tier, count, extent))

    def _make_place(self, tier: Tier, elements: int, extent: Extent) -> Place:
        if tier == "disk":
            return Place(extent=extent)
        if tier in self._tiers.reachable:
            # What compute returns stays where it is; it is counted as if it had been allocated here.
            self._tiers.ledger.charge(tier, Line.HIDDEN_STATES, elements * self._dtype.itemsize)
            self._homes.append(Stored(Line.HIDDEN_STATES, tier, (elements,), self._dtype))
            return Place()
        home = self._tiers.allocate(tier, Line.HIDDEN_STATES, (elements,), self._dtype, Line.HIDDEN_STATES, pin=True)
        self._homes.append(home)
        return Place(home=home)

    def begin(self) -> None:
        """Starts a new block: what the last one left, and how its copies ended, is forgotten."""
        self._leaving = Ticket()
        for place in self._places:
            place.on_device, place.loaded, place.stored = None, Ticket(), Ticket()

    def put(self, group: int, hidden: Tensor) -> None:
        """Keeps what was computed, on the device until store() is called."""
        self._places[group].on_device = hidden

    def get(self, group: int) -> Tensor:
        """What was last put or loaded, on the device."""
        place = self._places[group]
        place.loaded.wait()
        if place.on_device is None:
            raise RuntimeError(f"hidden states of group {group} are not on the device")
        return place.on_device

    def store(self, group: int) -> None:
        """Starts to bring a group's hidden states home, and lets go of them on the device."""
        place, source = self._places[group], self.get(group)
        if place.home is None and place.extent is None:
            return
        place.shape, place.on_device = source.shape, None
        source = source.contiguous()
        after = [self._transfer.used(), place.stored]
        self._hold_back()
        place.stored = start_store(self._transfer, self._home(place), source, after, f"store hidden, group {group}")
        self._leaving = place.stored

    def load(self, group: int) -> None:
        """Starts to bring a group's hidden states to the device."""
        place = self._places[group]
        if place.on_device is not None:
            return
        target = torch.empty(place.shape, dtype=self._dtype, device=self._tiers.device)
        place.on_device = target
        after = [self._transfer.used(), place.stored]
        place.loaded = start_load(self._transfer, target, self._home(place), after, f"load hidden, group {group}")

    def _hold_back(self) -> None:
        """Waits for what was sent home before: who ran far ahead of the copies would fill the device."""
        self._leaving.wait()
        self._leaving.wait_on_host()

    def close(self) -> None:
        """Gives all bytes back."""
        for home in self._homes:
            self._tiers.release(home, Line.HIDDEN_STATES)
        self._tiers.ledger.release("disk", Line.HIDDEN_STATES, self._disk_bytes)
        self._homes, self._places, self._disk_bytes = [], [], 0

    def _home(self, place: Place) -> Tensor | Extent:
        """The part of a group's home that its hidden states take now."""
        elements = prod(place.shape)
        if place.home is not None and place.home.tensor is not None:
            return place.home.tensor[:elements].view(place.shape)
        assert place.extent is not None
        return place.extent.part(slice(0, elements * self._dtype.itemsize))
