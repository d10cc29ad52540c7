"""The KV of a whole block: every unit at its home, brought to compute and put back.

A unit whose home compute can reach is used where it lies. Any other is loaded into one of a few working buffers on the
device, one more than the look-ahead. What goes back after a decode step is small: the new token's key and value, with
which the home repeats the overwriting that compute has done, and the scores. Units on disk are written whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.memory.run_folder import RunFolder
from flexgen_h2o.memory.tiers import Stored, Tiers
from flexgen_h2o.memory.transfer import Ticket, Transfer, start_load, start_store
from flexgen_h2o.plan.kv_shape import UnitShape, working_bytes
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import Tier
from flexgen_h2o.plan.schedule import LoadCache, places


@dataclass
class Unit:
    """One unit at home.

    Attributes:
        buffer: its memory, where the home is in memory.
        extent: its place in a file, where the home is on disk.
        columns_seen: columns that have entered it.
        stored: done when the home holds what compute has last done to it.
    """

    tier: Tier
    buffer: KVBuffer | None = None
    extent: Extent | None = None
    columns_seen: int = 0
    stored: Ticket = field(default_factory=Ticket)

    @property
    def place(self) -> Tensor | Extent:
        """Where it lives, to be copied from and to."""
        place = self.extent if self.buffer is None else self.buffer.storage
        assert place is not None
        return place


@dataclass
class WorkingBuffer:
    """A buffer on the device that units are loaded into, one after the other."""

    buffer: KVBuffer
    loaded: Ticket = field(default_factory=Ticket)
    free: list[Ticket] = field(default_factory=list)  # when all of these are done, it may be overwritten


class KVCache:
    """All units of a block.

    Args:
        shapes: the units of one layer, but for their slots, which are as the rule says for each layer.
        homes: the tier of each unit, by layer and sub-batch.
        look_ahead: units that are loaded ahead of the one in use.
        attend_at_home: compute attention of units in host memory there, on the CPU, rather than load them.
    """

    def __init__(
        self,
        shapes: Sequence[UnitShape],
        homes: Sequence[Sequence[Tier]],
        rule: EvictionRule,
        dtype: torch.dtype,
        tiers: Tiers,
        transfer: Transfer,
        run_folder: RunFolder | None,
        look_ahead: int,
        attend_at_home: bool = False,
    ):
        self.rules = [rule.at_layer(layer, len(homes)) for layer in range(len(homes))]
        self._shapes = [[replace(unit, heavy=own.heavy, recent=own.recent) for unit in shapes] for own in self.rules]
        self._dtype = dtype
        self._tiers = tiers
        self._transfer = transfer
        self._attend_at_home = attend_at_home
        self._allocated: list[tuple[Stored, str]] = []
        self._disk_bytes = 0
        self._padding: list[Padding] = []
        self.units: list[list[Unit]] = []
        self._working: list[WorkingBuffer] = []
        try:
            self._make_homes(homes, run_folder)
            needs_working = any(not self._in_reach(unit) for layer in self.units for unit in layer)
            self._working = self._make_working(look_ahead) if needs_working else []
        except BaseException:
            self.close()
            raise
        self._in_use: dict[tuple[int, int], WorkingBuffer] = {}
        self._turn = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values at home; scores and columns apart."""
        return sum(shape.kv_bytes(self._dtype.itemsize) for layer in self._shapes for shape in layer)

    def sizes(self) -> Iterator[tuple[Tier, int]]:
        """Home and bytes of every unit."""
        for layer, shapes in zip(self.units, self._shapes, strict=True):
            for unit, shape in zip(layer, shapes, strict=True):
                yield unit.tier, shape.nbytes(self._dtype.itemsize)

    def begin(self, paddings: Sequence[Padding]) -> None:
        """Starts a new block, with the padding of each of its units; there may be fewer than the cache was made for."""
        self._padding = list(paddings)
        self._in_use = {}
        # Nothing is under way between blocks, and what failed in the last one does not concern this one.
        for unit in (unit for layer in self.units for unit in layer):
            unit.stored = Ticket()
        for working in self._working:
            working.loaded, working.free = Ticket(), []

    def attends_at_home(self, layer: int, unit: int) -> bool:
        """Whether decode attention of this unit runs on the CPU, beside its KV."""
        here = self.units[layer][unit]
        return self._attend_at_home and here.tier == "cpu" and not self._in_reach(here)

    def load(self, layer: int, unit: int) -> None:
        """Starts to bring a unit to the device, if it has to be brought."""
        here = self.units[layer][unit]
        if self._in_reach(here) or self.attends_at_home(layer, unit):
            return
        working = self._next_working(layer, unit)
        after = [here.stored, *working.free]
        working.buffer.resume(self._padding[unit], here.columns_seen)
        target = self._unit_storage(working, layer, unit, here.buffer is None)
        working.loaded = start_load(self._transfer, target, here.place, after, LoadCache(layer, unit))

    def empty(self, layer: int, unit: int) -> KVBuffer:
        """An empty buffer on the device, for prefill to fill with this unit's KV."""
        here = self.units[layer][unit]
        here.columns_seen = 0
        if self._in_reach(here):
            assert here.buffer is not None
            buffer = here.buffer
        else:
            working = self._next_working(layer, unit)
            for ticket in working.free:
                ticket.wait()
            working.loaded = Ticket()
            buffer = working.buffer
        buffer.reset(self._padding[unit])
        return buffer

    def buffer(self, layer: int, unit: int) -> KVBuffer:
        """A unit's KV on the device, loaded."""
        here = self.units[layer][unit]
        if self._in_reach(here):
            assert here.buffer is not None
            return here.buffer
        working = self._in_use[layer, unit]
        working.loaded.wait()
        return working.buffer

    def store_filled(self, layer: int, unit: int) -> None:
        """Starts to put back a unit that prefill has filled."""
        here = self.units[layer][unit]
        buffer = self.buffer(layer, unit)
        here.columns_seen = buffer.columns_seen
        if not self._in_reach(here):
            self._store_whole(layer, unit)

    def store_step(self, layer: int, unit: int, keys: Tensor, values: Tensor) -> None:
        """Starts to put back what a decode step has changed: its token's [rows, heads, 1, head_dim] keys and values.

        The home repeats what compute did with them; then it takes over the scores.
        """
        here = self.units[layer][unit]
        column = here.columns_seen
        here.columns_seen += 1
        if self._in_reach(here):
            return
        if here.buffer is None:
            self._store_whole(layer, unit)
            return
        working = self._in_use.pop((layer, unit))
        home, padding, before = here.buffer, self._padding[unit], here.stored
        scores, losers = working.buffer.scores, working.buffer.losers
        # Copies: the workspace in which they were computed is soon used again.
        keys, values = keys.clone(), values.clone()

        def repeat() -> None:
            before.wait_on_host()
            host_keys, host_values = self._to_host(keys), self._to_host(values)
            home.resume(padding, column)
            home.append(host_keys, host_values, column)
            home.scores.copy_(self._to_host(scores))
            home.losers.copy_(self._to_host(losers))

        here.stored = self._transfer.submit(
            "d2h", repeat, [self._transfer.used(), before], _named("store", layer, unit)
        )
        working.free = [here.stored, self._transfer.used()]

    def attend_at_home(
        self, layer: int, unit: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Ticket]:
        """Decode attention of a unit on the CPU; the arguments are [rows, heads, 1, head_dim] on the device.

        Returns: the output there, of the same shape, and the ticket that says when it is.
        """
        here = self.units[layer][unit]
        home, padding, column, before = here.buffer, self._padding[unit], here.columns_seen, here.stored
        assert home is not None
        here.columns_seen += 1
        # Copies: the workspace in which they were computed is soon used again.
        query, keys, values = query.clone(), keys.clone(), values.clone()
        output = torch.empty_like(query)

        def attend() -> None:
            before.wait_on_host()
            host_query, host_keys, host_values = (self._to_host(tensor) for tensor in (query, keys, values))
            home.resume(padding, column)
            home.append(host_keys, host_values, column)
            self._transfer.copy("h2d", output, home.attend(host_query))

        here.stored = self._transfer.submit(
            "host", attend, [self._transfer.used(), before], _named("attend", layer, unit)
        )
        return output, here.stored

    def close(self) -> None:
        """Gives all bytes back."""
        for stored, line in self._allocated:
            self._tiers.release(stored, line)
        self._tiers.ledger.release("disk", Line.KV_CACHE, self._disk_bytes)
        self._allocated, self.units, self._working, self._in_use, self._disk_bytes = [], [], [], {}, 0

    def _store_whole(self, layer: int, unit: int) -> None:
        here = self.units[layer][unit]
        working = self._in_use.pop((layer, unit))
        after = [self._transfer.used(), here.stored]
        source = self._unit_storage(working, layer, unit, here.buffer is None)
        here.stored = start_store(self._transfer, here.place, source, after, _named("store", layer, unit))
        working.free = [here.stored]

    def _unit_storage(self, working: WorkingBuffer, layer: int, unit: int, on_disk: bool) -> Tensor:
        """The part of a working buffer's memory that a unit takes, in whole pages if it lives on disk.

        The last unit may be smaller than the others.
        """
        nbytes = self._shapes[layer][unit].nbytes(self._dtype.itemsize)
        return working.buffer.storage[: whole_pages(nbytes) if on_disk else nbytes]

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._tiers.memory_device("cpu"))
        self._transfer.copy("d2h", host, tensor)
        return host

    def _in_reach(self, unit: Unit) -> bool:
        return unit.tier in self._tiers.reachable

    def _next_working(self, layer: int, unit: int) -> WorkingBuffer:
        working = self._working[self._turn % len(self._working)]
        self._turn += 1
        self._in_use[layer, unit] = working
        working.buffer.serve(self._largest(layer), self.rules[layer], layer)
        return working

    def _largest(self, layer: int) -> UnitShape:
        return max(self._shapes[layer], key=lambda shape: shape.rows)

    def _make_homes(self, homes: Sequence[Sequence[Tier]], run_folder: RunFolder | None) -> None:
        extent_bytes = [
            whole_pages(shape.nbytes(self._dtype.itemsize))
            for tiers, shapes in zip(homes, self._shapes, strict=True)
            for tier, shape in zip(tiers, shapes, strict=True)
            if tier == "disk"
        ]
        on_disk = sum(extent_bytes)
        self._tiers.ledger.charge("disk", Line.KV_CACHE, on_disk)
        self._disk_bytes = on_disk
        file = Extent(Path(), 0, on_disk)
        if run_folder is not None and on_disk:
            file = run_folder.reserve("kv", on_disk)
        extents = file.cut(extent_bytes)
        self.units = [self._make_layer(layer, tiers, extents) for layer, tiers in enumerate(homes)]

    def _make_layer(self, layer: int, homes: Sequence[Tier], extents: Iterator[Extent]) -> list[Unit]:
        """The units of one layer. Those on one tier in memory lie in one piece."""
        sizes = [shape.nbytes(self._dtype.itemsize) for shape in self._shapes[layer]]
        pieces = {
            tier: self._allocate(
                tier, sum(size for size, home in zip(sizes, homes, strict=True) if home == tier), Line.KV_CACHE
            )
            for tier in set(homes) - {"disk"}
        }
        units = []
        for shape, tier, size in zip(self._shapes[layer], homes, sizes, strict=True):
            if tier == "disk":
                units.append(Unit(tier, extent=next(extents)))
            else:
                storage, pieces[tier] = pieces[tier][:size], pieces[tier][size:]
                units.append(Unit(tier, KVBuffer(shape, self.rules[layer], self._dtype, storage, layer)))
        return units

    def _make_working(self, look_ahead: int) -> list[WorkingBuffer]:
        """Buffers for the largest unit, in one piece, which has the better chance of huge pages."""
        nbytes = max(self._largest(layer).nbytes(self._dtype.itemsize) for layer in range(len(self._shapes)))
        storage = self._allocate(
            "gpu", working_bytes(nbytes, look_ahead, self._tiers.ledger.joint), Line.WORKING_BUFFERS
        )
        nbytes = whole_pages(nbytes)
        parts = storage[: places(look_ahead) * nbytes].split(nbytes)
        shape, rule = self._shapes[0][0], self.rules[0]  # until they serve a unit
        return [WorkingBuffer(KVBuffer(shape, rule, self._dtype, part)) for part in parts]

    def _allocate(self, tier: Tier, nbytes: int, line: str) -> Tensor:
        stored = self._tiers.allocate(tier, line, (nbytes,), torch.uint8, line, pin=True)
        self._allocated.append((stored, line))
        return stored.resident(frozenset((tier,)))


def _named(work: str, layer: int, unit: int) -> str:
    """Work on a unit, as a trace names it."""
    return f"{work} layer {layer}, unit {unit}"
