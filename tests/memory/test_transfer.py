"""Copies between tiers: their order, their errors, their end, and how many bytes they move."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.helpers import PEAKED, Block, GreedyTokens, TinyOpt, pad
from support.placed import (
    BACKENDS,
    MIXED,
    ON_DISK,
    ROUGH,
    Backend,
    Case,
    assert_all_given_back,
    delayed_threads,
    layout_of,
    opened,
    run_folders,
    small_block,
    transfer_threads,
)
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import PAGE, whole_pages
from flexgen_h2o.engine.assemble import Runtime
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.memory import transfer as transfer_module
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.memory.transfer import (
    LINKS,
    CudaTransfer,
    HostCopies,
    InlineTransfer,
    Link,
    ThreadTransfer,
    Ticket,
    Transfer,
)
from flexgen_h2o.plan.model_shape import ParameterShape
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.weights.store import storage_of

Tiny = Callable[..., TinyOpt]
PATIENCE_S = 60
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def threads() -> Iterator[ThreadTransfer]:
    transfer = ThreadTransfer(0.002, seed=3)
    yield transfer
    transfer.close()
    assert transfer_threads() == []


# --- order ---


def test_work_on_a_link_runs_in_the_order_of_submission(threads: ThreadTransfer) -> None:
    done: list[int] = []
    for number in range(30):
        threads.submit("h2d", lambda number=number: done.append(number))  # type: ignore[misc]
    threads.drain()
    assert done == list(range(30))


def test_links_do_not_wait_for_one_another(threads: ThreadTransfer) -> None:
    gate = threading.Event()
    threads.submit("h2d", lambda: _pass(gate))
    threads.submit("d2h", gate.set).wait()  # would never come, were the links one
    threads.drain()


def _pass(gate: threading.Event) -> None:
    if not gate.wait(PATIENCE_S):
        raise TimeoutError("nothing has come")


def test_work_waits_for_what_it_is_told_to_come_after(threads: ThreadTransfer) -> None:
    rng = random.Random(0)
    done: list[int] = []
    tickets: list[Ticket] = []
    after: dict[int, list[int]] = {}
    for number in range(60):
        after[number] = rng.sample(range(number), min(number, 2))
        earlier = [tickets[n] for n in after[number]]
        tickets.append(threads.submit(rng.choice(LINKS), lambda n=number: done.append(n), earlier))  # type: ignore[misc]
    threads.drain()
    assert sorted(done) == list(range(60))
    for number, earlier_ones in after.items():
        assert all(done.index(other) < done.index(number) for other in earlier_ones)


def test_a_ticket_is_ready_only_when_its_work_is_done(threads: ThreadTransfer) -> None:
    for link in LINKS:
        target = torch.zeros(1000)
        threads.submit(link, lambda target=target: threads.copy("h2d", target, torch.ones(1000))).wait()  # type: ignore[misc]
        assert target.sum() == 1000


def test_inline_work_is_done_when_submit_returns() -> None:
    done: list[str] = []
    transfer = InlineTransfer()
    transfer.submit("d2h", lambda: done.append("done"), [Ticket()]).wait()
    assert done == ["done"]
    transfer.drain()
    transfer.close()


# --- errors ---


class DiskOnFire(OSError):
    """An error that nothing in the package raises."""


def fail() -> None:
    raise DiskOnFire("sector 7 is burning")


def test_an_error_surfaces_where_its_ticket_is_waited_for(threads: ThreadTransfer) -> None:
    ticket = threads.submit("disk_read", fail)
    for wait in (ticket.wait, ticket.wait_on_host, ticket.wait):
        with pytest.raises(DiskOnFire, match="sector 7 is burning"):
            wait()


def test_an_error_reaches_whatever_comes_after_it(threads: ThreadTransfer) -> None:
    done: list[str] = []
    failed = threads.submit("disk_read", fail)
    later = threads.submit("h2d", lambda: done.append("h2d"), [failed])
    with pytest.raises(DiskOnFire):
        later.wait()
    assert done == []


def test_drain_raises_an_error_that_nobody_waited_for(threads: ThreadTransfer) -> None:
    threads.submit("d2h", fail)
    for _ in range(20):  # later work must not push the failed ticket out of sight
        threads.submit("d2h", lambda: None)
    with pytest.raises(DiskOnFire):
        threads.drain()


def test_a_link_goes_on_after_an_error(threads: ThreadTransfer) -> None:
    threads.submit("h2d", fail)
    done: list[str] = []
    threads.submit("h2d", lambda: done.append("done")).wait()
    assert done == ["done"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("wait", ["wait", "wait_on_host", "drain"])
def test_a_worker_that_died_is_noticed(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    monkeypatch.setattr(transfer_module, "WAIT_LIMIT_S", 0.05)
    transfer = ThreadTransfer()
    kill(transfer, "h2d")
    ticket = transfer.submit("h2d", lambda: None)
    with pytest.raises(RuntimeError, match="worker has died"):
        transfer.drain() if wait == "drain" else getattr(ticket, wait)()
    transfer.submit("d2h", lambda: None).wait()  # the others live
    within(PATIENCE_S, transfer.close)


def kill(transfer: ThreadTransfer, link: Link) -> None:
    """Ends a worker as nothing in the package does: with something that is no work."""
    transfer._queues[link].put(())  # type: ignore[arg-type]
    transfer._workers[link].join(PATIENCE_S)
    assert not transfer._workers[link].is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_waits_for_a_dead_worker_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "WAIT_LIMIT_S", 0.05)
    transfer = ThreadTransfer()
    kill(transfer, "disk_write")
    written = transfer.submit("disk_write", lambda: None)
    with pytest.raises(RuntimeError, match="worker has died"):
        transfer.submit("disk_read", lambda: None, [written]).wait()
    within(PATIENCE_S, transfer.close)


def test_a_worker_that_is_merely_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch, threads: ThreadTransfer) -> None:
    monkeypatch.setattr(transfer_module, "WAIT_LIMIT_S", 0.01)
    threads.submit("h2d", lambda: time.sleep(0.2)).wait()


def test_a_dead_worker_is_noticed_within_a_minute() -> None:
    assert transfer_module.WAIT_LIMIT_S < 60


# --- the end ---


def within(seconds: float, action: Callable[[], object]) -> None:
    """Runs an action, and fails rather than hang if it does not return."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    runner.join(seconds)
    assert not runner.is_alive(), f"has not ended after {seconds} s"
    if failures:
        raise failures[0]


def test_drain_waits_for_everything(threads: ThreadTransfer) -> None:
    done: list[Link] = []
    for link in LINKS:
        for _ in range(5):
            threads.submit(link, lambda link=link: done.append(link))  # type: ignore[misc]
    threads.drain()
    assert len(done) == 5 * len(LINKS)
    threads.drain()  # and nothing is left to wait for


def test_closing_drops_what_has_not_begun_and_does_not_hang() -> None:
    transfer = ThreadTransfer()
    gate, begun = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        _pass(gate)

    running = transfer.submit("h2d", first)
    waiting = [transfer.submit("h2d", lambda: done.append(1)) for _ in range(100)]
    dependent = transfer.submit("d2h", lambda: done.append(2), [waiting[-1]])

    def open_once_it_closes() -> None:
        while not transfer._closing:
            time.sleep(0.001)
        gate.set()

    assert begun.wait(PATIENCE_S)
    threading.Thread(target=open_once_it_closes, daemon=True).start()
    within(PATIENCE_S, transfer.close)
    assert done == [] and transfer_threads() == []
    running.wait()
    for ticket in (*waiting, dependent):
        with pytest.raises(RuntimeError, match="the run ended"):
            ticket.wait()


def test_closing_twice_is_harmless() -> None:
    transfer = ThreadTransfer()
    within(PATIENCE_S, transfer.close)
    within(PATIENCE_S, transfer.close)


# --- an error ends the run ---


class Failing(ThreadTransfer):
    """Fails one of its copies."""

    def __init__(self, fails_at: int, links: Sequence[Link] = LINKS):
        super().__init__(0.0005, fails_at)
        self.left = fails_at
        self._links = links

    def submit(self, link: Link, work: Callable[[], None], after: Sequence[Ticket] = (), what: object = "") -> Ticket:
        if link in self._links:
            self.left -= 1
        return super().submit(link, fail if self.left == 0 and link in self._links else work, after)


def fails_with(make: Callable[[], Transfer], tiny_opt: TinyOpt, folder: Path, percent: Percent, at_home: bool) -> bool:
    """Runs two blocks with a transfer that may fail; whether it did. Then everything must have been given back."""
    case = Case(tiny_opt, small_block(), H2O(3, 4), percent, True, Backend(False, at_home, make))
    runtimes: list[Runtime] = []

    def run() -> None:
        with opened(case, folder) as runtime:
            runtimes.append(runtime)
            for _ in range(2):
                runtime.engine(case.sizes).run(pad(case.prompts()), 4, GreedyTokens(5))

    try:
        within(PATIENCE_S, run)
        return False
    except DiskOnFire as error:
        assert str(error) == "sector 7 is burning"
        return True
    finally:
        assert_all_given_back(runtimes[0], folder)


def count_copies(tiny_opt: TinyOpt, folder: Path, percent: Percent, at_home: bool, links: Sequence[Link]) -> int:
    """How many copies the run of `fails_with` makes on some links."""
    counters: list[Failing] = []

    def make() -> Failing:
        counters.append(Failing(10**6, links))
        return counters[-1]

    assert not fails_with(make, tiny_opt, folder, percent, at_home)
    return 10**6 - counters[0].left


@pytest.mark.parametrize("at_home", [False, True], ids=["loaded", "at_home"])
@pytest.mark.parametrize("percent", [MIXED, ON_DISK, ROUGH], ids=str)
def test_a_copy_that_fails_anywhere_ends_the_run_with_its_own_error(
    tiny: Tiny, tmp_path: Path, percent: Percent, at_home: bool
) -> None:
    count = count_copies(tiny(), tmp_path, percent, at_home, LINKS)
    points = [1, 2, 3, *random.Random(str(percent)).sample(range(4, count), 10), count]
    for point in points:
        assert fails_with(lambda point=point: Failing(point), tiny(), tmp_path, percent, at_home), point  # type: ignore


@pytest.mark.parametrize("link", LINKS)
def test_a_failure_of_any_link_ends_the_run(tiny: Tiny, tmp_path: Path, link: Link) -> None:
    at_home = link == "host"
    count = count_copies(tiny(), tmp_path, ROUGH, at_home, [link])
    for point in (1, count // 2, count):  # nothing waits for the very last store but the drain at the end
        assert fails_with(lambda point=point: Failing(point, [link]), tiny(), tmp_path, ROUGH, at_home)  # type: ignore


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_ends_the_run(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "WAIT_LIMIT_S", 0.1)
    for link in ("h2d", "d2h", "disk_read", "disk_write"):
        transfer = delayed_threads()
        case = Case(tiny(), small_block(), H2O(3, 4), ROUGH, True, Backend(False, make=lambda: transfer))  # noqa: B023

        def run(case: Case = case, transfer: ThreadTransfer = transfer, link: Link = link) -> None:
            with opened(case, tmp_path) as runtime:
                kill(transfer, link)
                runtime.engine(case.sizes).run(pad(case.prompts()), 4, GreedyTokens(5))

        with pytest.raises(RuntimeError, match="worker has died"):
            within(PATIENCE_S, run)
        assert transfer_threads() == [] and run_folders(tmp_path / "offload") == []


@pytest.mark.parametrize("backend", ["inline", "threads", "one_memory"])
def test_an_error_of_compute_ends_the_run_with_copies_on_their_way(tiny: Tiny, tmp_path: Path, backend: str) -> None:
    class Stumbling(GreedyTokens):
        def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
            if steps[0] == 2:
                raise KeyboardInterrupt
            return super().choose(requests, steps, logits)

    case = Case(tiny(), small_block(), H2O(3, 4), ROUGH, True, BACKENDS[backend])
    with pytest.raises(KeyboardInterrupt), opened(case, tmp_path) as runtime:
        runtime.engine(case.sizes).run(pad(case.prompts()), 5, Stumbling(5))
    assert_all_given_back(runtime, tmp_path)


@pytest.mark.parametrize("percent", [MIXED, ON_DISK, ROUGH, Percent(100, 0, 0, 100, 100, 0)], ids=str)
def test_an_interrupted_block_does_not_spill_into_the_next(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: Percent
) -> None:
    """Ctrl-C in a notebook, then the next call: what was on its way must not arrive in the buffers of that one."""
    slow = Backend(False, make=lambda: ThreadTransfer(0.01, seed=1))
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), percent, True, slow)
    fresh = Case(case.tiny, case.block, case.rule, overlap=False)
    with opened(fresh, tmp_path) as runtime:
        expected = first_logits(runtime.engine(fresh.sizes), case)
    for interrupted_at in (1, 2, 4, 7, 11):
        with opened(case, tmp_path) as runtime:
            engine = runtime.engine(case.sizes)
            with monkeypatch.context() as patch:
                patch.setattr(KVBuffer, "attend", interrupted(interrupted_at))
                with pytest.raises(KeyboardInterrupt):
                    first_logits(engine, case, seed=7)
            assert torch.equal(first_logits(engine, case), expected), interrupted_at


def interrupted(call: int) -> Callable[[KVBuffer, Tensor], Tensor]:
    """KVBuffer.attend, but for Ctrl-C at one of its calls."""
    calls: list[int] = []
    whole = KVBuffer.attend

    def attend(buffer: KVBuffer, query: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return whole(buffer, query)

    return attend


def first_logits(engine: Engine, case: Case, seed: int = 0) -> Tensor:
    chooser = GreedyTokens(5)
    engine.run(pad(case.prompts(seed)), 3, chooser)
    return chooser.all_logits()


def test_after_a_failed_block_the_engine_serves_the_next(tiny: Tiny, tmp_path: Path) -> None:
    """A copy that failed once, say on a network drive, does not spoil what comes after on the same runtime."""
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), ROUGH, True, Backend(False, make=lambda: Failing(100)))
    fresh = Case(case.tiny, case.block, case.rule, overlap=False)
    with opened(case, tmp_path) as runtime, opened(fresh, tmp_path) as other:
        with pytest.raises(DiskOnFire):
            runtime.engine(case.sizes).run(pad(case.prompts()), 5, GreedyTokens(5))
        chooser, expected = GreedyTokens(5), GreedyTokens(5)
        runtime.engine(case.sizes).run(pad(case.prompts()), 5, chooser)
        other.engine(fresh.sizes).run(pad(case.prompts()), 5, expected)
    assert torch.equal(chooser.all_logits(), expected.all_logits())


# --- bytes ---

ITEMSIZE = 4
GEN_LEN = 4


def moved(
    tiny_opt: TinyOpt, block: Block, rule: EvictionRule, percent: Percent, folder: Path, backend: Backend
) -> dict:
    """Bytes by link of one block of GEN_LEN tokens."""
    case = Case(tiny_opt, block, rule, percent, True, backend)
    with opened(case, folder) as runtime:
        runtime.engine(case.sizes).run(pad(case.prompts()), GEN_LEN, GreedyTokens(len(block.lengths)))
        return {link: runtime.transfer.moved[link] for link in LINKS}


TWO_MEMORIES = BACKENDS["threads"]
BLOCK = Block(Policy(2, 2, 4), (8, 5, 3, 2))
WIDTH, ROWS, UNITS = 8, 4, 2


def stored_bytes(tiny_opt: TinyOpt, page: Sequence[ParameterShape], unit: int = 1) -> int:
    """Bytes of parameters in memory; with a unit, each in whole ones."""
    layout = layout_of(tiny_opt)
    sizes = [storage_of(parameter, torch.float32, layout).nbytes for parameter in page]
    return sum(-(-size // unit) * unit for size in sizes)


@pytest.mark.parametrize(("percent", "link"), [(Percent(0, 100), "h2d"), (Percent(0, 0), "disk_read")], ids=str)
def test_weights_stream_once_per_token(tiny: Tiny, tmp_path: Path, percent: Percent, link: Link) -> None:
    counted = moved(tiny(), BLOCK, Full(0, 13), percent, tmp_path, TWO_MEMORIES)
    assert counted.pop(link) == streamed_bytes(tiny(), PAGE if link == "disk_read" else 1)
    assert not any(counted.values())


def streamed_bytes(tiny_opt: TinyOpt, unit: int) -> int:
    """Three layers in two buffers: the first and the last take turns in one, and the second stays in the other."""
    assert tiny_opt.config.num_hidden_layers == 3
    config = tiny_opt.config
    layer = stored_bytes(tiny_opt, config.layer, unit)
    return stored_bytes(tiny_opt, config.outer, unit) + (2 * GEN_LEN + 1) * layer


def kv_numbers(tiny_opt: TinyOpt, slots: int) -> tuple[int, int, int]:
    """Bytes of the block's whole KV; of a token's keys and values in all layers; of all scores and losers."""
    config = tiny_opt.config
    entries = config.num_hidden_layers * ROWS * config.num_attention_heads
    entry = 2 * config.head_dim * ITEMSIZE
    return entries * (slots * (entry + 8) + 4), entries * entry, entries * (slots * 4 + 4)


def test_kv_in_host_memory_is_loaded_whole_and_written_back_as_one_token(tiny: Tiny, tmp_path: Path) -> None:
    slots, steps = 7, GEN_LEN - 1
    counted = moved(tiny(), BLOCK, H2O(3, 4), Percent(100, 0, 0, 100, 100, 0), tmp_path, TWO_MEMORIES)
    whole, token, scores = kv_numbers(tiny(), slots)
    assert counted["h2d"] == steps * whole
    assert counted["d2h"] == whole + steps * (token + scores)
    assert counted["disk_read"] == counted["disk_write"] == 0


def test_kv_on_disk_goes_both_ways_whole(tiny: Tiny, tmp_path: Path) -> None:
    slots, steps = 7, GEN_LEN - 1
    counted = moved(tiny(), BLOCK, H2O(3, 4), Percent(100, 0, 0, 0, 100, 0), tmp_path, TWO_MEMORIES)
    units = UNITS * tiny().config.num_hidden_layers
    whole = units * whole_pages(kv_numbers(tiny(), slots)[0] // units)
    assert counted["disk_read"] == steps * whole
    assert counted["disk_write"] == (1 + steps) * whole
    assert counted["h2d"] == counted["d2h"] == 0


def test_attention_at_home_moves_a_token_each_way(tiny: Tiny, tmp_path: Path) -> None:
    slots, steps = 7, GEN_LEN - 1
    backend = BACKENDS["threads_at_home"]
    counted = moved(tiny(), BLOCK, H2O(3, 4), Percent(100, 0, 0, 100, 100, 0), tmp_path, backend)
    whole, token, _ = kv_numbers(tiny(), slots)
    assert counted["h2d"] == steps * token // 2  # the output
    assert counted["d2h"] == whole + steps * (token + token // 2)  # keys, values and queries


@pytest.mark.parametrize(
    ("hidden", "store", "load"), [((0, 100), "d2h", "h2d"), ((0, 0), "disk_write", "disk_read")], ids=str
)
def test_hidden_states_go_home_between_layers_of_prefill(
    tiny: Tiny, tmp_path: Path, hidden: tuple[int, int], store: Link, load: Link
) -> None:
    config = tiny().config
    counted = moved(tiny(), BLOCK, H2O(3, 4), Percent(100, 0, 100, 0, *hidden), tmp_path, TWO_MEMORIES)
    # After the embedding and after every layer; of the last layer only the last column goes on.
    columns = config.num_hidden_layers * WIDTH + 1
    assert counted[store] == counted[load] == columns * ROWS * config.hidden_size * ITEMSIZE
    assert sum(counted.values()) == 2 * counted[store]


@pytest.mark.parametrize("percent", [Percent(), Percent(0, 100, 0, 100, 0, 100), MIXED], ids=str)
def test_nothing_moves_between_gpu_and_cpu_where_they_are_one(tiny: Tiny, tmp_path: Path, percent: Percent) -> None:
    counted = moved(tiny(), BLOCK, H2O(3, 4), percent, tmp_path, BACKENDS["one_memory"])
    assert counted["h2d"] == counted["d2h"] == 0
    assert (counted["disk_read"] > 0) == (percent == MIXED)


def test_back_ends_count_alike(tiny: Tiny, tmp_path: Path) -> None:
    inline, threads = (
        moved(tiny(), BLOCK, H2O(3, 4), ROUGH, tmp_path, BACKENDS[name]) for name in ("inline", "threads")
    )
    assert inline == threads and all(inline[link] for link in ("h2d", "d2h", "disk_read", "disk_write"))


# --- staging, without and with a GPU ---


class FakeEvent:
    """Remembers whether it was waited for."""

    def __init__(self) -> None:
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True


class StagingOnly(CudaTransfer):
    """The staging of a CudaTransfer, in host memory and without streams."""

    def __init__(self, nbytes: int):
        HostCopies.__init__(self)
        buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
        self._staging = {"h2d": SimpleNamespace(nbytes=nbytes, buffers=buffers, free=[None, None])}  # type: ignore
        self._here = SimpleNamespace(link="h2d")  # type: ignore[assignment]
        self.events: list[FakeEvent] = []

    def _stamp(self) -> FakeEvent:  # type: ignore[override]
        self.events.append(FakeEvent())
        return self.events[-1]


SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 100)


@pytest.mark.parametrize("nbytes", SIZES)
def test_staging_brings_every_byte_to_the_device(nbytes: int) -> None:
    transfer = StagingOnly(16)
    source = torch.arange(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)

    last_out_of: dict[int, int] = {}  # by buffer: which event says that the copy out of it has ended

    def fill(at: slice, staged: Tensor) -> None:
        buffer = staged.data_ptr()
        assert buffer not in last_out_of or transfer.events[last_out_of[buffer]].waited
        last_out_of[buffer] = len(transfer.events)
        staged.copy_(source[at])

    for _ in range(2):  # the second time the buffers have been used
        transfer._to_device(target.zero_(), fill)
        assert torch.equal(target, source)


@pytest.mark.parametrize("nbytes", SIZES)
def test_staging_brings_every_byte_to_the_host(nbytes: int) -> None:
    transfer = StagingOnly(16)
    source = torch.arange(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    emptied: list[slice] = []

    def empty(at: slice, staged: Tensor) -> None:
        emptied.append(at)
        assert transfer.events[len(emptied) - 1].waited  # the part has arrived
        target[at].copy_(staged)

    transfer._to_host(source, empty)
    assert torch.equal(target, source)
    assert len(emptied) == len(transfer.events) == -(-nbytes // 16)


@contextmanager
def cuda_transfer(staging_bytes: int) -> Iterator[CudaTransfer]:
    transfer = CudaTransfer(torch.device("cuda"), staging_bytes)
    try:
        yield transfer
    finally:
        transfer.close()


@needs_cuda
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("nbytes", [4, 4096, 4100, 123_456])
def test_bytes_survive_the_way_to_a_gpu_and_back(nbytes: int, pinned: bool) -> None:
    source = torch.randn(nbytes // 4)
    source = source.pin_memory() if pinned else source
    back = torch.zeros(nbytes // 4, pin_memory=pinned)
    there = torch.zeros(nbytes // 4, device="cuda")
    with cuda_transfer(4096) as transfer:
        up = transfer.submit("h2d", lambda: transfer.copy("h2d", there, source), [transfer.used()])
        transfer.submit("d2h", lambda: transfer.copy("d2h", back, there), [up]).wait_on_host()
        assert torch.equal(back, source)
        assert transfer.moved["h2d"] == transfer.moved["d2h"] == there.nbytes


@needs_cuda
@pytest.mark.parametrize("nbytes", [4, 4096, 4100, 123_456])
def test_bytes_survive_the_way_from_a_gpu_to_a_file_and_back(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(nbytes + 100))
    extent = Extent(path, 100, nbytes)
    source = torch.randn(nbytes // 4, device="cuda")
    target = torch.zeros(nbytes // 4, device="cuda")
    with cuda_transfer(4096) as transfer:
        written = transfer.submit("disk_write", lambda: transfer.write(extent, source), [transfer.used()])
        transfer.submit("disk_read", lambda: transfer.read(target, extent), [transfer.used(), written]).wait()
        assert torch.equal(target, source)
