"""Finds copies and computation that touch the same memory without an order between them.

Whether a missing wait gives a wrong answer is a matter of luck, and some waits matter on a GPU alone. So here all work
is done at once, in the caller, and beside it the order that was promised is kept as sets: who may rely on whose work
being done. An access to memory that others have touched, without being ordered after them, is a race on some machine,
whatever came out on this one.

The rules are those of `flexgen_h2o.memory.transfer`: work on one link runs in order; across links, and between links
and compute, only tickets order. Waiting for a ticket orders what the device does next; memory that a plain operation of
the host touches needs `wait_on_host`, since a copy may be under way when its ticket is ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexgen_h2o.memory.direct_io import read_direct, write_direct
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.memory.transfer import LINKS, Link, Ticket
from flexgen_h2o.plan.timeline import Timeline

Memory = int | Path  # the address of a storage, or a file


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of a memory, from `start` to before `stop`."""

    memory: Memory
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.stop <= self.stop


@dataclass
class Actor:
    """Compute, or one piece of work on a link, and what it is ordered after.

    Attributes:
        number: of the work, from 1; 0 is compute.
        moment: the last moment of compute that it is ordered after.
        works: work that is done for whatever the device does next. on_host: that is done for the host as well.
    """

    number: int
    moment: int = 0
    works: set[int] = field(default_factory=set)
    on_host: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Access:
    """Who touched a piece of memory last.

    Attributes:
        moment: of compute, if it was compute.
        is_async: a copy, which goes on after its ticket is ready; else the host itself did it.
    """

    actor: int
    moment: int
    is_async: bool
    what: str


class TrackedTicket(Ticket):
    """A promise, and everything that keeping it implies."""

    def __init__(self, detector: RaceDetector, moment: int, works: frozenset[int]):
        super().__init__()
        self._detector = detector
        self.moment = moment
        self.works = works

    def join(self) -> None:
        actor = self._detector.actor
        actor.moment = max(actor.moment, self.moment)
        actor.works |= self.works

    def wait_on_host(self) -> None:
        self.join()
        self._detector.actor.on_host |= self.works


class RaceDetector(TorchDispatchMode):
    """A transfer that does all work at once and notes every race. Enter it around the computation.

    Attributes:
        races: a sentence each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.timeline = Timeline()
        self.refusal: str | None = None
        self._storages: set[int] = set()  # addresses of all memory that has been seen
        self.races: list[str] = []
        self.compute = Actor(0)
        self.actor = self.compute
        self._last_on_link = {link: Actor(-1) for link in LINKS}
        self._all_done: set[int] = set()  # when drain() last returned
        self._all_seen = 0  # the moment of compute up to which its results have been read
        self._count = 0
        self._writes: dict[Memory, dict[Span, Access]] = {}
        self._reads: dict[Memory, dict[tuple[Span, int], Access]] = {}  # the last by every actor
        self._alive: list[Any] = []  # storages, so that no address is ever used twice
        self._paused = False

    # --- the interface of a transfer ---

    def submit(self, link: Link, work: Callable[[], None], after: Sequence[Ticket] = (), what: object = "") -> Ticket:
        before = self._last_on_link[link]
        self._count += 1
        moment = max(before.moment, self._all_seen)
        actor = Actor(self._count, moment, before.works | self._all_done, set(self._all_done))
        with self._acting(actor):
            for ticket in after:
                ticket.wait()
            work()
        actor.works.add(actor.number)
        self._last_on_link[link] = actor
        return TrackedTicket(self, actor.moment, frozenset(actor.works))

    def used(self) -> Ticket:
        return TrackedTicket(self, self.actor.moment, frozenset(self.actor.works))

    def copy(self, link: Link, target: Tensor, source: Tensor) -> None:
        self.moved[link] += target.nbytes
        self._touch(self._span(source), f"{link} from", is_write=False, is_async=True)
        last = self._writes.get(self._span(target).memory, {}).get(self._span(target))
        made_here = last is not None and last.actor == self.actor.number
        self._touch(self._span(target), f"{link} to", is_write=True, is_async=True)
        with self._pause():
            target.copy_(source)
        if link == "d2h" and made_here:
            # Memory that was made for this copy is not pinned: the copy waits for itself, and for all before it.
            self.actor.on_host |= self.actor.works

    def read(self, target: Tensor, extent: Extent) -> None:
        self.moved["disk_read"] += target.nbytes
        self._touch(_file_span(extent), "read of", is_write=False)
        self._touch(self._span(target), "disk read to", is_write=True, is_async=True)
        with self._pause():
            read_direct(target, extent)

    def write(self, extent: Extent, source: Tensor) -> None:
        self.moved["disk_write"] += source.nbytes
        self._touch(self._span(source), "disk write from", is_write=False, is_async=True)
        self._touch(_file_span(extent), "write of", is_write=True)
        with self._pause():
            write_direct(extent, source)

    def drain(self) -> None:
        self._all_done = set(range(1, self._count + 1))
        self.compute.works |= self._all_done
        self.compute.on_host |= self._all_done

    def close(self) -> None:
        pass

    def read_results(self) -> None:
        """Compute's results have been read on the host: whatever is submitted from now on comes after them."""
        self._all_seen = self.compute.moment

    # --- what operations touch ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        if self.actor is self.compute:
            self.compute.moment += 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {self._span(tensor).memory for tensor in inputs}
        fresh = [tensor for tensor in outputs if self._span(tensor).memory not in known]
        self._alive += [tensor.untyped_storage() for tensor in fresh if not tensor.is_mkldnn]
        changed = _changed(func, args, kwargs or {})
        if outputs and not fresh and not changed:
            return result  # a view: it touches nothing
        on_device = self.actor is self.compute
        for tensor in inputs:
            is_write = any(tensor is other for other in changed)
            self._touch(self._span(tensor), str(func), is_write, is_async=on_device)
        for tensor in fresh:
            self._touch(self._span(tensor), str(func), is_write=True, is_async=on_device)
        return result

    def _touch(self, span: Span, what: str, is_write: bool, is_async: bool = False) -> None:
        if span.start == span.stop:
            return
        access = Access(self.actor.number, self.actor.moment, is_async, what)
        writes, reads = self._writes.setdefault(span.memory, {}), self._reads.setdefault(span.memory, {})
        earlier = [other for at, other in writes.items() if at.overlaps(span)]
        if is_write:
            earlier += [other for (at, _), other in reads.items() if at.overlaps(span)]
            # What this write covers is ordered before it, or has just been found not to be.
            self._writes[span.memory] = {at: other for at, other in writes.items() if not span.covers(at)} | {
                span: access
            }
            self._reads[span.memory] = {key: other for key, other in reads.items() if not span.covers(key[0])}
        else:
            reads[span, access.actor] = access
        self.races += [f"{access} is not ordered after {other}" for other in earlier if not self._after(access, other)]

    def _after(self, access: Access, earlier: Access) -> bool:
        if earlier.actor == access.actor:
            return True
        if earlier.actor == 0:
            return earlier.moment <= self.actor.moment
        # A copy that is under way is done for other copies and for compute, not for what the host does itself.
        is_for_host = earlier.is_async and not access.is_async
        return earlier.actor in (self.actor.on_host if is_for_host else self.actor.works)

    def _span(self, tensor: Tensor) -> Span:
        """The bytes from the first to the last element of a tensor, or of what a packed tensor lies over."""
        if tensor.is_mkldnn:
            start, nbytes = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
            memory = max((known for known in self._storages if known <= start), default=start)
            return Span(memory, start - memory, start - memory + nbytes)
        storage = tensor.untyped_storage()
        memory = storage.data_ptr()
        self._storages.add(memory)
        if not tensor.numel():
            return Span(memory, 0, 0)
        start = tensor.storage_offset() * tensor.itemsize
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(memory, start, start + (reach + 1) * tensor.itemsize)

    @contextmanager
    def _acting(self, actor: Actor) -> Iterator[None]:
        before, self.actor = self.actor, actor
        try:
            yield
        finally:
            self.actor = before

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def _file_span(extent: Extent) -> Span:
    return Span(extent.path, extent.offset, extent.offset + extent.nbytes)


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    changed = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return [value for value in changed if isinstance(value, Tensor)]
