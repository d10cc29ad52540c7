"""Files: every run has a folder of its own and leaves nothing in it; weights are written once and never half."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.helpers import GreedyTokens, TinyOpt, pad
from support.placed import BACKENDS, ON_DISK, Case, case_logits, layout_of, opened, run_folders, small_block
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import GB, PAGE, whole_pages
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.memory import extents
from flexgen_h2o.memory import run_folder as disk
from flexgen_h2o.memory.direct_io import read_direct, write_direct
from flexgen_h2o.memory.extents import Extent, free_disk_bytes
from flexgen_h2o.memory.run_folder import RunFolder, cache_key, check_space
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.weights.files import WeightFolder, lay_out
from flexgen_h2o.weights.store import weight_places

Tiny = Callable[..., TinyOpt]
PATIENCE_S = 60


# --- extents ---


@pytest.mark.parametrize("nbytes", [0, 1, 4, PAGE, PAGE + 4, 3 * PAGE])
@pytest.mark.parametrize("offset", [0, PAGE, 5 * PAGE])
def test_what_is_written_is_read_again(tmp_path: Path, nbytes: int, offset: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (offset + nbytes + 10))
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    write_direct(Extent(path, offset, nbytes), source)
    target = torch.zeros_like(source)
    read_direct(target, Extent(path, offset, nbytes))
    assert torch.equal(target, source)
    content = path.read_bytes()
    assert content[:offset] == b"x" * offset and content[offset + nbytes :] == b"x" * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_tensors_of_any_type_go_through_files(tmp_path: Path, dtype: torch.dtype) -> None:
    source = (torch.randn(7, 5) * 100).to(dtype)
    path = tmp_path / "file"
    path.touch()
    write_direct(Extent(path, 0, source.nbytes), source)
    target = torch.empty_like(source)
    read_direct(target, Extent(path, 0, source.nbytes))
    assert torch.equal(target, source) and path.stat().st_size == source.nbytes


@pytest.mark.parametrize("there", [0, 1, 99])
def test_a_file_that_is_too_short_is_named(tmp_path: Path, there: int) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(there))
    with pytest.raises(OSError) as caught:
        read_direct(torch.empty(100, dtype=torch.uint8), Extent(path, 0, 100))
    assert str(path) in str(caught.value) and f"{100 - there} bytes are missing" in str(caught.value)


def test_reads_and_writes_that_come_in_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves at most 2 GB per call, and may always move less than it is asked for."""
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(extents.os, "preadv", lambda fd, views, at: read(fd, [views[0][:7]], at))
    monkeypatch.setattr(extents.os, "pwritev", lambda fd, views, at: write(fd, [views[0][:5]], at))
    path = tmp_path / "file"
    path.touch()
    source, target = torch.arange(101, dtype=torch.uint8), torch.zeros(101, dtype=torch.uint8)
    write_direct(Extent(path, 3, 101), source)
    read_direct(target, Extent(path, 3, 101))
    assert torch.equal(source, target)


def test_pages_are_whole() -> None:
    assert [whole_pages(n) for n in (0, 1, 4095, 4096, 4097)] == [0, PAGE, PAGE, PAGE, 2 * PAGE]


def test_free_space_is_known_of_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert free_disk_bytes(tmp_path / "a" / "b") == pytest.approx(status.f_bavail * status.f_frsize, rel=0.05)


# --- the folder of a run ---


def test_a_run_has_a_locked_folder_while_it_lasts(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "deep" / "offload") as folder:
        assert folder.path.parent == tmp_path / "deep" / "offload" and folder.path.name.startswith("run-")
        extent = folder.reserve("kv", 5000)
        assert extent.path.parent == folder.path and extent.nbytes == 2 * PAGE
        assert extent.path.stat().st_size == 2 * PAGE
        assert extent.path.stat().st_blocks * 512 >= 2 * PAGE  # taken, not sparse
    assert run_folders(tmp_path / "deep" / "offload") == []


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path) as folder:
        folder.reserve("kv", 1)
        raise ZeroDivisionError
    assert run_folders(tmp_path) == []


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.close()
    with RunFolder(tmp_path) as other:
        folder.close()
        assert other.path.exists()


def test_two_runs_do_not_touch_each_other(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as one:
        written = one.reserve("kv", PAGE)
        write_direct(written, torch.full((PAGE,), 7, dtype=torch.uint8))
        with RunFolder(tmp_path) as other:
            assert other.reclaimed == 0 and other.path != one.path
            write_direct(other.reserve("kv", PAGE), torch.full((PAGE,), 9, dtype=torch.uint8))
        assert run_folders(tmp_path) == [one.path]
        assert set(written.path.read_bytes()) == {7}


HOLDER = """
import sys, time
from pathlib import Path
from flexgen_h2o.memory.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.reserve("kv", 10_000)
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that holds a folder below tmp_path, and that folder."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_killed_run_is_removed_by_the_next(
    tmp_path: Path, other_run: tuple[subprocess.Popen[str], Path]
) -> None:
    process, left = other_run
    with RunFolder(tmp_path) as folder:
        assert folder.reclaimed == 0 and left.exists()  # it is still at work
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left.exists()
    with RunFolder(tmp_path) as folder:
        assert folder.reclaimed == 1 and not left.exists()
        assert run_folders(tmp_path) == [folder.path]


def test_what_a_run_leaves_that_is_killed_while_it_removes_its_folder_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, ignore_errors: bool) -> None:
        (folder / disk.LOCK_NAME).unlink()
        raise KeyboardInterrupt

    run = RunFolder(tmp_path)
    run.reserve("kv", 5000)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(disk.shutil, "rmtree", killed)
        run.close()
    assert list(tmp_path.rglob("kv")) != []
    assert disk.reclaim(tmp_path) == 1 and list(tmp_path.iterdir()) == []


def test_what_is_not_a_runs_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "t_0").write_text("precious")
    (tmp_path / "run-of-the-mill").mkdir()  # no lock: it is nobody's run, or one that is just beginning
    with RunFolder(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "t_0", "run-of-the-mill"}


# --- space ---


def pretend_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda folder: nbytes)


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(tmp_path) as folder:
        pretend_free(monkeypatch, GB)
        with pytest.raises(OSError) as caught:
            folder.reserve("kv", 3 * GB)
        for part in ("kv", "3.00 GB", "1.00 GB", str(folder.path)):
            assert part in str(caught.value)
        assert not (folder.path / "kv").exists()
        pretend_free(monkeypatch, 2 * PAGE)
        folder.reserve("kv", 2 * PAGE)
        with pytest.raises(OSError):
            folder.reserve("hidden", 2 * PAGE + 1)  # in whole pages it is three


def test_what_just_fits_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_free(monkeypatch, 10)
    check_space(tmp_path, 10, "x")
    with pytest.raises(OSError):
        check_space(tmp_path, 11, "x")


def test_a_disk_that_is_full_after_all_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else may have taken the space after it was checked."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder(tmp_path) as folder:
        monkeypatch.setattr(disk.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            folder.reserve("kv", PAGE)
    assert run_folders(tmp_path) == []
    store, places = WeightFolder(tmp_path / "weights"), lay_out("page.bin", {"a": 40})
    with pytest.raises(OSError, match="No space"):
        store.write("a", places["a"], torch.ones(10))
    assert store.reserve(places) == {"a"}


# --- weights ---


def test_keys_differ_where_anything_differs() -> None:
    keys = [
        cache_key("a", "b"),
        cache_key("ab"),
        cache_key("a", "b", ""),
        cache_key("b", "a"),
        cache_key("a", torch.float16),
    ]
    assert len(set(keys)) == len(keys) and cache_key("a", "b") == keys[0]
    assert all(key.isalnum() for key in keys)


# --- weights on disk, in whole runs ---


def asked_for(case: Case, folder: Path) -> list[str]:
    """The parameters that a run takes from the checkpoint."""
    from flexgen_h2o.engine.assemble import Runtime

    asked: list[str] = []
    source = case.tiny.source()

    def watched(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        asked.extend(names)
        return source(names)

    store = WeightFolder(folder / "weights")
    platform = replace(case.backend.platform(folder), matrix_layout=layout_of(case.tiny))
    with Runtime(case.tiny.config, torch.float32, case.policy, platform, store) as runtime:
        told: list[int] = []
        runtime.load(watched, told.append)
        assert sum(told) == runtime.weights.nbytes and len(told) == len(case.tiny.config.shapes())
        runtime.engine(case.sizes).run(pad(case.prompts()), 2, GreedyTokens(5))
    return asked


@pytest.mark.parametrize("percent", [ON_DISK, Percent(20, 30, 100, 0, 100, 0)], ids=str)
def test_a_second_run_does_not_read_what_is_on_disk_already(tiny: Tiny, tmp_path: Path, percent: Percent) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), percent)
    on_disk = {name for name, tier in placed(case).items() if tier == "disk"}
    assert set(asked_for(case, tmp_path)) == set(case.tiny.config.shapes())
    assert set(asked_for(case, tmp_path)) == set(case.tiny.config.shapes()) - on_disk
    victim = sorted(on_disk)[1]
    place = weight_places(case.tiny.config, torch.float32, layout_of(case.tiny))[victim]
    with (tmp_path / "weights" / place.file).open("r+b") as file:
        file.seek(place.offset + 3)
        file.write(b"x")
    assert set(asked_for(case, tmp_path)) == set(case.tiny.config.shapes()) - on_disk | {victim}


def placed(case: Case) -> dict[str, str]:
    from flexgen_h2o.plan.placement import place_weights

    return dict(place_weights(case.tiny.config, case.percent.weights))


def test_weights_that_vanish_under_a_run_are_an_error_that_names_the_file(tiny: Tiny, tmp_path: Path) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), Percent(0, 0))
    with opened(case, tmp_path) as runtime:
        assert runtime.weights.folder is not None
        path = runtime.weights.folder.path / "layer-1.bin"
        os.truncate(path, 100)
        with pytest.raises(OSError, match="layer-1.bin"):
            runtime.engine(case.sizes).run(pad(case.prompts()), 3, GreedyTokens(5))


def test_a_disk_without_room_for_the_weights_ends_the_run_before_any_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), ON_DISK)
    pretend_free(monkeypatch, 100_000)
    with pytest.raises(OSError, match="weights needs"), opened(case, tmp_path):
        pass
    assert not (tmp_path / "weights").exists() and run_folders(tmp_path / "offload") == []


def test_two_runs_in_one_folder_give_the_same_as_one(tiny: Tiny, tmp_path: Path) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), ON_DISK, True, BACKENDS["threads"])
    with opened(case, tmp_path) as runtime:
        engine = runtime.engine(case.sizes)
        inner = GreedyTokens(5)

        class Nested(GreedyTokens):
            """Runs a whole other run in the middle of this one."""

            def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
                if steps[0] == 1 and not inner.tokens:
                    with opened(case, tmp_path) as other:
                        other.engine(case.sizes).run(pad(case.prompts(seed=8)), 3, inner)
                return super().choose(requests, steps, logits)

        outer = Nested(5)
        engine.run(pad(case.prompts()), 4, outer)
        assert len(run_folders(tmp_path / "offload")) == 1
    plain = Case(case.tiny, case.block, case.rule, overlap=False)
    with opened(plain, tmp_path) as runtime:
        expected = GreedyTokens(5)
        runtime.engine(plain.sizes).run(pad(case.prompts()), 4, expected)
    assert torch.equal(outer.all_logits(), expected.all_logits())


def test_runs_leave_their_offload_folder_empty(tiny: Tiny, tmp_path: Path) -> None:
    case_logits(Case(tiny(), small_block(), H2O(3, 4), ON_DISK, True, BACKENDS["threads"]), tmp_path)
    assert run_folders(tmp_path / "offload") == []


# --- Ctrl-C ---


def command(folder: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "flexgen_h2o.run", "--model", str(folder / "model"), "--dummy-weights"),
        *("--prompt-len", "100", "--gen-len", "900", "--gpu-batch-size", "4", "--num-gpu-batches", "2"),
        *("--percent", "0", "50", "0", "0", "0", "0", "--offload-dir", str(folder / "offload"), *more),
    ]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "ffn_dim": 256,'
        ' "max_position_embeddings": 1024}'
    )
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_files(folder: Path) -> Path:
    """The run's folder, once its KV file is there."""
    for _ in range(600):
        for path in run_folders(folder / "offload"):
            if (path / "kv").exists():
                return path
        time.sleep(0.05)
    raise AssertionError("the run has not begun")


def test_ctrl_c_leaves_nothing_and_exits_with_130(model_folder: Path) -> None:
    with start(model_folder) as process:
        wait_for_files(model_folder)
        time.sleep(0.3)  # into the generation
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "interrupted" in errors
    assert run_folders(model_folder / "offload") == []


def test_a_run_reclaims_what_a_killed_one_left_and_uses_its_weights(model_folder: Path) -> None:
    with start(model_folder) as process:
        left = wait_for_files(model_folder)
        process.kill()
    written = {path: path.stat().st_mtime_ns for path in (model_folder / ".cache").rglob("*.bin")}
    assert left.exists() and written
    with start(model_folder) as process:
        while left in run_folders(model_folder / "offload"):
            time.sleep(0.02)
            assert process.poll() is None
        wait_for_files(model_folder)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert run_folders(model_folder / "offload") == []
    # The folder of the run is made before the weights are loaded; by the time its file is there they have been.
    assert {path: path.stat().st_mtime_ns for path in written} == written
