"""Measuring: work is counted right, trials become rates, all that was asked for is measured. No speed is judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB, whole_pages
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.layout import Matrix, MatrixLayout
from flexgen_h2o.kernels.matrices.panels import PanelLayout, PanelMatrix
from flexgen_h2o.kernels.matrices.plain import PlainLayout, PlainMatrix
from flexgen_h2o.kernels.matrices.quantised_panels import QuantisedPanelMatrix
from flexgen_h2o.kernels.matrices.quantised_rows import QuantisedRowMatrix
from flexgen_h2o.machine.platform import default_dtype
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.schedule import Attend, Choose, Finish, Project
from flexgen_h2o.plan.timeline import Timeline
from flexgen_h2o.profiling import disk, layers, profile
from flexgen_h2o.profiling.attention import attention_bytes, full_buffer, unit_shape
from flexgen_h2o.profiling.disk import Disk, TestFile, check_folder
from flexgen_h2o.profiling.free_matrices import FreeLayout
from flexgen_h2o.profiling.gemm import Gemm, Products, WeightSet, native_dtypes, products_bytes, weight_sets
from flexgen_h2o.profiling.memory import Memory, NewMemory
from flexgen_h2o.profiling.settings import FULL, QUICK
from flexgen_h2o.profiling.threads import Stream, best_threads, candidates, copy_step, disk_step
from flexgen_h2o.profiling.timing import Stopwatch, Subject, collect, compute_threads, fill, summarise
from flexgen_h2o.search.rates import Rate

CPU = torch.device("cpu")


def workspace(nbytes: int) -> Workspace:
    return Workspace(torch.empty(nbytes, dtype=torch.uint8))


# --- timing ---


def test_the_median_and_the_interquartile_range() -> None:
    rate = summarise("memory/cpu/read/1", [1.0, 9.0, 10.0, 11.0, 500.0])
    assert (rate.value, rate.spread, rate.trials, rate.noisy) == (10.0, pytest.approx(0.2), 5, True)
    assert (rate.unit, rate.source) == ("byte/s", "measured")
    assert not summarise("memory/cpu/read/1", [9.8, 9.9, 10.0, 10.1, 10.2]).noisy


def test_trials_take_turns_and_the_first_pass_is_discarded() -> None:
    order: list[str] = []
    progress: list[tuple[str, int, int]] = []

    def subject(title: str, rates: list[str]) -> Subject:
        def trial() -> Iterator[tuple[str, float]]:
            order.append(title)
            for rate in rates:
                yield rate, float(len(order))

        return Subject(title, trial)

    subjects = [subject("a", ["gemm/float32/1", "gemm/float32/2"]), subject("b", ["memory/cpu/read/1"])]
    rates = collect(subjects, 5, lambda *told: progress.append(told))
    assert order == ["a", "b"] * 6
    assert progress == [(order[done], done, 12) for done in range(12)]
    # Its trials came 3rd, 5th, 7th, 9th and 11th; the 1st was discarded.
    assert {name: rate.value for name, rate in rates.items()} == {
        "gemm/float32/1": 7.0,
        "gemm/float32/2": 7.0,
        "memory/cpu/read/1": 8.0,
    }


def test_short_work_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, calls = Stopwatch(CPU, 0.02), []
    monkeypatch.setattr("flexgen_h2o.profiling.timing.time.perf_counter", lambda: 0.002 * len(calls))

    def work() -> None:
        calls.append(1)

    stopwatch.seconds("work", work)  # warms up, and finds out how often
    assert len(calls) == 2
    calls.clear()
    assert stopwatch.seconds("work", work) == pytest.approx(0.002)
    assert len(calls) == 10


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="stop"), compute_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError("stop")
    assert torch.get_num_threads() == before


def test_memory_is_filled_with_numbers_of_any_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = fill(torch.full((3, 400_001), torch.nan, dtype=dtype))
        assert tensor.isfinite().all() and 0.9 < tensor.float().std() < 1.1
    assert fill(torch.empty(0)).numel() == 0


# --- products and attention ---


PRECISIONS = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "in_4_bits"), PRECISIONS)
def test_products_take_all_weights_in_turn(
    dtype: torch.dtype, in_4_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    for kind in (PlainMatrix, PanelMatrix, QuantisedRowMatrix, QuantisedPanelMatrix):
        product = kind.product

        def noted(self: Matrix, *rest: torch.Tensor, product: Callable[..., torch.Tensor] = product) -> torch.Tensor:
            taken.append(id(self))
            return product(self, *rest)

        monkeypatch.setattr(kind, "product", noted)
    own_bytes = 64 * entry_bytes(32) if in_4_bits else 64 * 32 * dtype.itemsize
    weights = WeightSet((64, 32), 4 * own_bytes - 1, dtype, CPU, in_4_bits)
    products = Products(weights, 8, workspace(products_bytes(weights, 8)))  # just enough
    for _ in range(8):
        products.multiply(5)
    assert len(set(taken)) == 4 and taken[:4] == taken[4:]
    assert products.flops(5) == 2 * 5 * 64 * 32


@pytest.mark.parametrize("in_4_bits", [False, True])
def test_the_product_is_that_of_the_layers(in_4_bits: bool) -> None:
    weights = WeightSet((128, 32), 1, torch.float32, CPU, in_4_bits)
    products = Products(weights, 3, workspace(2**17))
    products.multiply(3)
    weight, bias, x = next(products._weights), products._bias, products._x
    engines = best_layout(CPU, torch.float32, [(128, 32)], in_4_bits).name
    assert weights.layout.name == engines and ("4-bit" in engines) == in_4_bits
    dense = weight.dense()
    assert 0.9 < dense.std() < 1.1 and torch.equal(dense[:64], dense[64:])
    assert torch.allclose(products._out, torch.nn.functional.linear(x, dense, bias), atol=1e-4)


def test_weights_in_4_bits_are_measured_in_the_precision_of_a_run() -> None:
    sets = weight_sets((64, 32), 2**12, [torch.float32, torch.bfloat16], CPU)
    assert list(sets) == ["float32", "bfloat16", "int4"] and sets["int4"].dtype == default_dtype(CPU)
    needed = max(products_bytes(weights, 4) for weights in sets.values())
    names = [name for name, value in Gemm((1, 4), sets, workspace(needed), Stopwatch(CPU, 0.0)).trial() if value > 0]
    assert names == [f"gemm/{kind}/{rows}" for kind in sets for rows in (1, 4)]


@pytest.mark.parametrize("owner", [PlainLayout(), PanelLayout()])
def test_a_free_matrix_handles_results_as_another_layout_does(owner: MatrixLayout) -> None:
    rows, out = 300, 64
    layout = FreeLayout(owner)
    assert layout.result_bytes(rows, out, 2) == owner.result_bytes(rows, out, 2)
    storage = layout.storage((out, 10**6), torch.bfloat16)
    assert storage.nbytes == 2
    matrix = layout.matrix(torch.empty(storage.shape), (out, 10**6), torch.bfloat16, torch.empty(0))
    output = torch.full((rows, out), torch.nan, dtype=torch.bfloat16)
    assert matrix.product(torch.empty(rows, 0), None, output) is output and not output.any()
    assert matrix.rows(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 10**6)


def test_layers_are_timed_by_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's: Project takes 1 s, Finish 2, Attend 4, Choose 8; more if there are many rows."""
    add = Timeline.add

    def noted(self: Timeline, lane: str, work: object, start_s: float, end_s: float) -> None:
        seconds = {Project: 1.0, Finish: 2.0, Attend: 4.0, Choose: 8.0}.get(type(work), 0.0)
        many = getattr(work, "group", None)
        if many is not None and many.rows.stop == layers.ROWS:
            seconds *= 10
        add(self, lane, work, 0.0, seconds)

    monkeypatch.setattr(Timeline, "add", noted)
    rates = dict(layers.Layers(torch.float32, (4, 16), tokens=32, steps=3).trial())
    assert rates["operation/cpu/products"] == 3 and rates["operation/cpu/attention"] == 4
    assert rates["layer/cpu"] == layers.ROWS * layers.WIDE * 4 / (30 - 3)
    assert rates["choice/cpu"] == layers.ROWS * layers.VOCABULARY / 80
    assert rates["prefill/cpu/4"] == rates["prefill/cpu/16"] == 32 * layers.WIDE * 4 / (1 + 2 + 4)


def test_new_memory_is_written_before_anything_else() -> None:
    subject = NewMemory(2**16, 3, 2)
    found = [next(subject.trial()) for _ in range(3)]
    assert {name for name, _ in found} == {"memory/cpu/new/2"} and min(rate for _, rate in found) > 0


def test_float16_is_left_out_or_not() -> None:
    assert native_dtypes(CPU)[:2] == [torch.float32, torch.bfloat16]
    assert set(native_dtypes(torch.device("cuda"))) == {torch.float32, torch.bfloat16, torch.float16}


def test_attention_reads_a_buffer_that_is_full() -> None:
    shape = unit_shape(64, 512, 3 * 2**22, 2)  # a row of bfloat16: 32 heads x 512 slots x 64 x 2 x 2 bytes = 4 MB
    assert (shape.rows, shape.heads, shape.slots, shape.kv_bytes(2)) == (3, 32, 512, 3 * 2**22)
    buffer = full_buffer(shape, torch.bfloat16, torch.empty(shape.nbytes(2), dtype=torch.uint8))
    assert (buffer.heavy_len, buffer.ring_len) == (256, 256)
    query = (torch.randn(3, 32, 1, 64) * 64**-0.5).to(torch.bfloat16)
    keys, values = (
        torch.cat([getattr(part, name) for part in (buffer.heavy, buffer.ring)], 2).float()
        for name in ("keys", "values")
    )
    expected = torch.softmax(query.float() @ keys.transpose(2, 3), -1) @ values
    assert torch.allclose(buffer.attend(query).float(), expected, atol=0.01)
    assert buffer.scores.sum().item() == pytest.approx(3 * 32, rel=1e-3)
    assert attention_bytes([64, 128], [torch.bfloat16], 512, 3 * 2**22) >= shape.nbytes(2)


def test_memory_is_measured_by_threads() -> None:
    memory = Memory(2**16, (1, 2), workspace(2**16), Stopwatch(CPU, 0.0))
    assert [name for name, value in memory.trial() if value > 0] == [
        f"memory/cpu/{kind}/{threads}" for threads in (1, 2) for kind in ("read", "copy")
    ]


# --- disk ---

FILE_BYTES, AT_ONCE = 3 * 2**20 + 4096, 2**20


def test_the_test_file_is_written_random_and_has_no_name(tmp_path: Path) -> None:
    with TestFile(tmp_path, FILE_BYTES, AT_ONCE) as file:
        assert list(tmp_path.iterdir()) == []
        content = torch.empty(FILE_BYTES, dtype=torch.uint8)
        file.buffered.read(content, 0)
        counts = content.bincount(minlength=256) / FILE_BYTES
        assert counts.max() < 1.1 / 256 and counts.min() > 0.9 / 256
        before = file.memory.clone()
        file.shuffle()
        assert (before != file.memory).float().mean() > 0.5


def test_every_way_to_the_disk_is_measured(tmp_path: Path) -> None:
    with TestFile(tmp_path, FILE_BYTES, AT_ONCE) as file:
        if not file.direct.is_direct:
            pytest.skip("the file system refuses O_DIRECT")
        subject = Disk(file, (1, 4), buffered=True)
        names = [name for name, value in subject.trial() if value > 0]
        assert subject.missing() == {}
    ways = [
        f"{kind}/{direction}/{path}"
        for kind in ("disk", "disk_cpu")
        for direction in ("read", "write")
        for path in ("direct/1", "direct/4", "buffered/1")
    ]
    assert sorted(names) == sorted([*ways, "disk_both/read/direct/1", "disk_both/write/direct/1"])


def test_both_directions_at_once_stop_when_one_is_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TestFile(tmp_path, FILE_BYTES, AT_ONCE) as file:
        if not file.direct.is_direct:
            pytest.skip("the file system refuses O_DIRECT")
        moved: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
        middle, all_read = whole_pages(FILE_BYTES // 2), threading.Event()
        read, write = file.direct.read, file.direct.write

        def noted_read(target: Tensor, offset: int, pool: Any) -> None:
            moved["read"].append((offset, offset + target.nbytes))
            read(target, offset, pool)
            if offset + target.nbytes == middle:
                all_read.set()

        def noted_write(offset: int, source: Tensor, pool: Any) -> None:
            assert all_read.wait(60)  # the slower one
            time.sleep(0.05)
            moved["write"].append((offset, offset + source.nbytes))
            write(offset, source, pool)

        monkeypatch.setattr(file.direct, "read", noted_read)
        monkeypatch.setattr(file.direct, "write", noted_write)
        rates = dict(Disk(file, (2, 4), buffered=False)._both(2))
    assert list(rates) == ["disk_both/read/direct/2", "disk_both/write/direct/2"]
    assert rates["disk_both/read/direct/2"] > rates["disk_both/write/direct/2"] > 0
    assert moved["read"][0][0] == 0 and moved["read"][-1][1] == middle == moved["write"][0][0]
    assert moved["write"][-1][1] < FILE_BYTES


def test_where_direct_io_is_refused_the_page_cache_stands_in(tmp_path: Path) -> None:
    with TestFile(tmp_path, FILE_BYTES, AT_ONCE) as file:
        file.direct.refusal = "no O_DIRECT here"
        subject = Disk(file, (1, 2), buffered=False)
        assert {name.split("/")[2] for name, _ in subject.trial()} == {"buffered"}
        missing = subject.missing()
    assert len(missing) == 10 and set(missing.values()) == {"the file system of the test file refuses O_DIRECT"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_when_writing_the_file_fails(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(disk.os, "posix_fallocate", fail)
    with pytest.raises(type(error)):
        TestFile(tmp_path, FILE_BYTES, AT_ONCE)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_or_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda folder: GB // 2)
    with pytest.raises(UsageError) as caught:
        check_folder(tmp_path, GB)
    assert caught.value.problems == [
        f"the test file needs 1.00 GB of disk, and {tmp_path} has 0.50 GB left; give another --folder or free some"
    ]
    with pytest.raises(UsageError, match="no folder that can be written to"):
        check_folder(tmp_path / "nowhere", 1)


def test_too_little_memory_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "usable_memory", lambda: GB // 2)
    with pytest.raises(UsageError, match="of cpu memory, of which 0.50 GB are usable; give --quick") as caught:
        profile.measure(FULL, CPU, tmp_path, "small", {})
    assert len(caught.value.problems) == 1


# --- threads ---


def test_a_stream_runs_until_it_is_left_and_its_errors_come_through(tmp_path: Path) -> None:
    with TestFile(tmp_path, FILE_BYTES, AT_ONCE) as file:
        for step in (disk_step(file), copy_step(file)):
            with Stream(step) as stream:
                time.sleep(0.01)
            moved = stream.moved
            assert moved > 0 and not stream.is_alive()
            time.sleep(0.01)
            assert stream.moved == moved

    def fail(number: int) -> int:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"), Stream(fail):
        pass
    assert not any(thread.name == "profile-stream" for thread in threading.enumerate())


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (2, 1)), (4, (4, 3, 2)), (64, (64, 63, 32))])
def test_which_splits_are_tried(cores: int, counts: tuple[int, ...]) -> None:
    assert candidates(cores) == counts


@pytest.mark.parametrize(
    ("figures", "best"),
    [
        ({2: (100, 1.0), 1: (90, 2.0)}, 1),  # 180 against 100
        ({2: (100, 1.0), 1: (50, 1.5)}, 2),
        ({2: (100, 1.0), 1: (103, 1.0)}, 2),  # a tie: more threads
        ({}, None),
    ],
)
def test_the_best_split_gives_most_of_both(figures: dict[int, tuple[float, float]], best: int | None) -> None:
    rates = {}
    for threads, (flops, moved) in figures.items():
        rates[f"threads/{threads}/disk/gemm"] = Rate(flops, "FLOP/s")
        rates[f"threads/{threads}/disk/stream"] = Rate(moved, "byte/s")
    assert best_threads(rates) == best


# --- settings ---


@pytest.mark.parametrize("settings", [FULL, QUICK], ids=["full", "quick"])
def test_settings_measure_memory_and_not_caches(settings: profile.Settings) -> None:
    assert settings.trials >= 5 and settings.rows[0] == 1
    assert settings.weight_bytes >= 2**28 and settings.kv_bytes >= 2**27 and settings.memory_bytes >= 2**29
