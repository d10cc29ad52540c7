"""Copies between tiers: asynchronous, ordered by tickets, counted.

Work is submitted to a link (a direction in which bytes move) and returns a ticket. Work on one link runs in order of
submission; across links it is ordered only by the tickets it is told to wait for. Three back-ends share this interface:

    InlineTransfer   does the work at once, in the caller: nothing overlaps
    ThreadTransfer   a thread per link; optional random delays, so that in tests a missing wait is a wrong answer
    CudaTransfer     a thread and a CUDA stream per link, with events and pinned staging of fixed size
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o.memory.direct_io import read_direct, write_direct
from flexgen_h2o.memory.extents import Extent, as_bytes
from flexgen_h2o.plan.footprint import STAGING_BYTES
from flexgen_h2o.plan.names import LINKS, Link
from flexgen_h2o.plan.timeline import STALL, Timeline

WAIT_LIMIT_S = 30.0  # how long a ticket is waited for before its worker is looked at


class Ticket:
    """A promise that some work has been done. This one is kept: the work is done, or issued before a CUDA event."""

    def __init__(self, event: torch.cuda.Event | None = None):
        self.event = event

    def wait(self) -> None:
        """Returns when what follows may use the result: on CUDA, what follows on the current stream.

        Raises the error with which the work failed.
        """
        self.join()

    def join(self) -> None:
        """The same, for others than compute."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def wait_on_host(self) -> None:
        """Returns when the result is in memory that the host may read. Raises as wait() does."""
        self.join()
        if self.event is not None:
            self.event.synchronize()


class OpenTicket(Ticket):
    """A ticket for work that a thread has yet to do."""

    def __init__(self, worker: threading.Thread, timeline: Timeline):
        super().__init__()
        self._worker = worker
        self._timeline = timeline
        self._issued = threading.Event()
        self._error: BaseException | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the work is done, without an error."""
        return self._issued.is_set() and self._error is None

    def settle(self, event: torch.cuda.Event | None = None, error: BaseException | None = None) -> None:
        """Marks the work as done, or as failed."""
        self.event, self._error = event, error
        self._issued.set()

    def wait(self) -> None:
        if self._issued.is_set():
            return self.join()
        with self._timeline.span(STALL, self._worker.name):
            self.join()

    def join(self) -> None:
        while not self._issued.wait(WAIT_LIMIT_S):
            if not self._worker.is_alive():
                raise RuntimeError("a copy worker has died; the run cannot go on")
        if self._error is not None:
            raise self._error
        super().join()


Work = Callable[[], None]


class Transfer(Protocol):
    """What moves bytes.

    Attributes:
        moved: bytes by link.
        timeline: when links were busy.
        refusal: why some file went through the page cache; None if none did.
    """

    moved: Counter[str]
    timeline: Timeline
    refusal: str | None

    def submit(self, link: Link, work: Work, after: Sequence[Ticket] = (), what: object = "") -> Ticket:
        """Does `work` on a link once all of `after` are done; `what` names it."""

    def used(self) -> Ticket:
        """A ticket for everything that compute has been told so far: a buffer it reads may be overwritten after it."""

    def copy(self, link: Link, target: Tensor, source: Tensor) -> None:
        """Copies between memories; called by work on `link`."""

    def read(self, target: Tensor, extent: Extent) -> None:
        """Reads an extent into a contiguous tensor of as many bytes; called by work on "disk_read"."""

    def write(self, extent: Extent, source: Tensor) -> None:
        """Writes a contiguous tensor to an extent; called by work on "disk_write"."""

    def drain(self) -> None:
        """Waits for all work. Raises the first error among it."""

    def close(self) -> None:
        """Ends the workers; work not yet begun is dropped."""


Location = Tensor | Extent  # where something lives: in memory, or in a file


def start_load(
    transfer: Transfer, target: Tensor, source: Location, after: Sequence[Ticket], what: object = ""
) -> Ticket:
    """Starts to bring what lives at `source` to a tensor on the device."""
    if isinstance(source, Extent):
        extent = source
        return transfer.submit("disk_read", lambda: transfer.read(target, extent), after, what)
    tensor = source
    return transfer.submit("h2d", lambda: transfer.copy("h2d", target, tensor), after, what)


def start_store(
    transfer: Transfer, target: Location, source: Tensor, after: Sequence[Ticket], what: object = ""
) -> Ticket:
    """Starts to put a tensor on the device where it lives."""
    if isinstance(target, Extent):
        extent = target
        return transfer.submit("disk_write", lambda: transfer.write(extent, source), after, what)
    tensor = target
    return transfer.submit("d2h", lambda: transfer.copy("d2h", tensor, source), after, what)


class HostCopies:
    """Copies between tensors in host memory, and between them and files. Tensors without memory (meta) only count."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.moved: Counter[str] = Counter()
        self.timeline = timeline or Timeline()
        self.refusal: str | None = None
        self._counting = threading.Lock()

    def count(self, link: Link, nbytes: int) -> None:
        """Counts bytes that move in a direction."""
        with self._counting:
            self.moved[link] += nbytes

    def copy(self, link: Link, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self.count(link, target.nbytes)

    def read(self, target: Tensor, extent: Extent) -> None:
        self.count("disk_read", target.nbytes)
        if not target.is_meta:
            self.refusal = read_direct(target, extent) or self.refusal

    def write(self, extent: Extent, source: Tensor) -> None:
        self.count("disk_write", source.nbytes)
        if not source.is_meta:
            self.refusal = write_direct(extent, source) or self.refusal


class InlineTransfer(HostCopies):
    """Does all work at once, in the caller."""

    def submit(self, link: Link, work: Work, after: Sequence[Ticket] = (), what: object = "") -> Ticket:
        with self.timeline.span(link, what):
            work()
        return Ticket()

    def used(self) -> Ticket:
        return Ticket()

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class ThreadTransfer(HostCopies):
    """A worker thread per link.

    Args:
        max_delay_s: every piece of work first sleeps up to this long, at random; 0 for none.
        seed: of the delays.
    """

    def __init__(self, max_delay_s: float = 0.0, seed: int = 0, timeline: Timeline | None = None):
        super().__init__(timeline)
        self._max_delay_s = max_delay_s
        self._delays = random.Random(seed)
        self._queues: dict[str, SimpleQueue[tuple[Work, Sequence[Ticket], OpenTicket, object] | None]] = {}
        self._workers: dict[str, threading.Thread] = {}
        self._pending: list[OpenTicket] = []
        self._closing = False
        for link in LINKS:
            self._queues[link] = SimpleQueue()
            self._workers[link] = threading.Thread(
                target=self._serve, args=(link,), name=f"transfer-{link}", daemon=True
            )
            self._workers[link].start()

    def submit(self, link: Link, work: Work, after: Sequence[Ticket] = (), what: object = "") -> Ticket:
        ticket = OpenTicket(self._workers[link], self.timeline)
        self._pending = [other for other in self._pending if not other.succeeded]
        self._pending.append(ticket)
        self._queues[link].put((work, after, ticket, what))
        return ticket

    def used(self) -> Ticket:
        return Ticket()

    def drain(self) -> None:
        pending, self._pending = self._pending, []
        errors = []
        for ticket in pending:
            try:
                ticket.wait_on_host()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._closing = True
        for link in LINKS:
            self._queues[link].put(None)
        for worker in self._workers.values():
            worker.join()

    def _serve(self, link: Link) -> None:
        with torch.inference_mode():
            while (item := self._queues[link].get()) is not None:
                work, after, ticket, what = item
                event, error = None, None
                try:
                    if self._closing:
                        raise RuntimeError("the run ended before this copy began")
                    if self._max_delay_s:
                        time.sleep(self._delays.uniform(0, self._max_delay_s))
                    for earlier in after:
                        earlier.join()
                    with self.timeline.span(link, what):
                        work()
                    event = self._stamp()
                except BaseException as raised:  # whatever it is, it belongs to whoever waits for the ticket
                    error = raised
                del item, work  # and with them the last that is known of what was moved
                ticket.settle(event, error)

    def _stamp(self) -> torch.cuda.Event | None:
        return None


class CudaTransfer(ThreadTransfer):
    """A worker thread and a CUDA stream per link.

    Pageable memory is copied through two pinned buffers of fixed size per link, used in turn: while one is on its way,
    the other is filled. Pinned memory is copied as it is.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES, timeline: Timeline | None = None):
        self._device = device
        self._streams = {link: torch.cuda.Stream(device) for link in LINKS}
        self._staging = {link: _Staging(staging_bytes) for link in LINKS}
        self._here = threading.local()  # which link this thread serves
        super().__init__(timeline=timeline)

    def used(self) -> Ticket:
        return Ticket(self._stamp())

    def drain(self) -> None:
        try:
            super().drain()
        finally:
            # A ticket is settled when its copy has been issued; here the copies themselves are waited for.
            for stream in self._streams.values():
                stream.synchronize()

    def copy(self, link: Link, target: Tensor, source: Tensor) -> None:
        self.count(link, target.nbytes)
        if source.is_cuda:
            # The allocator must not hand the source's memory to compute while the copy is still under way.
            source.record_stream(torch.cuda.current_stream(self._device))
        host = source if target.is_cuda else target
        if target.is_cuda == source.is_cuda or host.is_pinned():
            target.copy_(source, non_blocking=True)
        elif target.is_cuda:
            self._to_device(as_bytes(target), lambda at, staged: staged.copy_(as_bytes(source)[at]))
        else:
            self._to_host(as_bytes(source.contiguous()), lambda at, staged: as_bytes(target)[at].copy_(staged))

    def read(self, target: Tensor, extent: Extent) -> None:
        if not target.is_cuda:
            return super().read(target, extent)
        self.count("disk_read", target.nbytes)
        self.count("h2d", target.nbytes)
        self._to_device(as_bytes(target), lambda at, staged: read_direct(staged, extent.part(at)))

    def write(self, extent: Extent, source: Tensor) -> None:
        if not source.is_cuda:
            return super().write(extent, source)
        self.count("disk_write", source.nbytes)
        self.count("d2h", source.nbytes)
        source.record_stream(torch.cuda.current_stream(self._device))
        self._to_host(as_bytes(source), lambda at, staged: write_direct(extent.part(at), staged))

    def _to_device(self, target: Tensor, fill: Callable[[slice, Tensor], object]) -> None:
        """Moves bytes to the device through the link's pinned buffers; `fill` puts a part of them into one."""
        staging = self._staging[self._here.link]
        for number, at in enumerate(_parts(target.nbytes, staging.nbytes)):
            side = number % 2
            if (event := staging.free[side]) is not None:
                event.synchronize()
            staged = staging.buffers[side][: at.stop - at.start]
            fill(at, staged)
            target[at].copy_(staged, non_blocking=True)
            staging.free[side] = self._stamp()

    def _to_host(self, source: Tensor, empty: Callable[[slice, Tensor], object]) -> None:
        """Moves bytes from the device through the link's pinned buffers; `empty` takes a part out of one."""
        staging = self._staging[self._here.link]
        parts = _parts(source.nbytes, staging.nbytes)
        for number, at in enumerate([*parts, None]):
            # The next part is on its way while the one before is taken out.
            if at is not None:
                if (earlier := staging.free[number % 2]) is not None:
                    earlier.synchronize()
                staging.buffers[number % 2][: at.stop - at.start].copy_(source[at], non_blocking=True)
                staging.free[number % 2] = self._stamp()
            if number:
                before, side = parts[number - 1], (number - 1) % 2
                arrived = staging.free[side]
                assert arrived is not None
                arrived.synchronize()
                empty(before, staging.buffers[side][: before.stop - before.start])

    def _serve(self, link: Link) -> None:
        self._here.link = link
        with torch.cuda.stream(self._streams[link]):
            super()._serve(link)

    def _stamp(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event(blocking=True)  # the host has other work for its processors than to spin
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Staging:
    """Two pinned buffers, and for each the event after which it may be filled again."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.free: list[torch.cuda.Event | None] = [None, None]


def _parts(nbytes: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]
