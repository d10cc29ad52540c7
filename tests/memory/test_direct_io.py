"""Direct I/O against plain reads and writes: around pages and requests, with odd addresses, where it is refused."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.basics.memory_sizes import HUGE_PAGE, PAGE, whole_huge_pages
from flexgen_h2o.memory import direct_io
from flexgen_h2o.memory.direct_io import DirectFile, aligned_bytes, read_direct, write_direct
from flexgen_h2o.memory.extents import Extent

REQUEST = 4 * PAGE  # small, so that files of some pages take several requests
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, REQUEST - 1, REQUEST, REQUEST + 1, 3 * REQUEST, 3 * REQUEST + PAGE + 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("direct")


def random_file(path: Path, nbytes: int) -> bytes:
    content = os.urandom(nbytes)
    path.write_bytes(content)
    return content


def random_bytes(nbytes: int, address: int = 0) -> torch.Tensor:
    """[nbytes] uint8, at an address that is `address` more than a whole page."""
    return aligned_bytes(nbytes + address)[address:].random_(0, 256)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system that does not know O_DIRECT."""
    plain_open = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return plain_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, PAGE, 5, PAGE - 1, REQUEST + 3])
@pytest.mark.parametrize("address", [0, 4])
def test_reads_what_a_plain_read_reads(folder: Path, nbytes: int, offset: int, address: int) -> None:
    content = random_file(folder / "file", offset + nbytes + 11)
    target = random_bytes(nbytes, address)
    with DirectFile(folder / "file", request_bytes=REQUEST) as file:
        file.read(target, offset)
    assert as_bytes(target) == content[offset : offset + nbytes]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, PAGE, 5])
@pytest.mark.parametrize("address", [0, 4])
def test_writes_what_a_plain_write_writes(folder: Path, nbytes: int, offset: int, address: int) -> None:
    content = random_file(folder / "file", offset + nbytes + 11)
    source = random_bytes(nbytes, address)
    with DirectFile(folder / "file", writes=True, request_bytes=REQUEST) as file:
        file.write(offset, source)
        file.sync()
    expected = content[:offset] + as_bytes(source) + content[offset + nbytes :]
    assert (folder / "file").read_bytes() == expected


@given(
    offset=st.integers(0, 3 * PAGE),
    nbytes=st.integers(0, 3 * REQUEST),
    workers=st.sampled_from([0, 1, 4]),
    is_refused=st.booleans(),
)
def test_any_range_comes_back(folder: Path, offset: int, nbytes: int, workers: int, is_refused: bool) -> None:
    (folder / "file").write_bytes(b"")
    source, target = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    pool = ThreadPoolExecutor(workers) if workers else None
    with pytest.MonkeyPatch.context() as patch:
        if is_refused:
            refuse_direct(patch)
        with DirectFile(folder / "file", writes=True, request_bytes=REQUEST) as file:
            assert file.is_direct is not is_refused
            file.write(offset, source, pool)
            file.read(target, offset, pool)
    if pool is not None:
        pool.shutdown()
    assert torch.equal(source, target)


def test_extents_of_any_type(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    source = torch.randn(3, 1000).to(torch.bfloat16)
    write_direct(Extent(path, PAGE, source.nbytes), source)
    target = torch.empty_like(source)
    read_direct(target, Extent(path, PAGE, source.nbytes))
    assert torch.equal(source, target)


def test_inference_tensors_are_filled_from_threads(tmp_path: Path) -> None:
    content = random_file(tmp_path / "file", 2 * REQUEST)
    with (
        torch.inference_mode(),
        ThreadPoolExecutor(2) as pool,
        DirectFile(tmp_path / "file", request_bytes=REQUEST) as file,
    ):
        target = torch.zeros(2 * REQUEST + 4, dtype=torch.uint8)[4:]
        file.read(target, 0, pool)
    assert as_bytes(target) == content


@pytest.mark.parametrize("there", [0, 5, PAGE, PAGE + 5, REQUEST, REQUEST + PAGE + 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_file_that_is_too_short_is_named(
    tmp_path: Path, there: int, workers: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.bin"
    random_file(path, there)
    if is_refused:
        refuse_direct(monkeypatch)
    target = aligned_bytes(3 * REQUEST)
    pool = ThreadPoolExecutor(workers) if workers else None
    with DirectFile(path, request_bytes=REQUEST) as file, pytest.raises(OSError) as caught:
        file.read(target, 0, pool)
    assert str(caught.value) == f"{path} ends at byte {there}; {3 * REQUEST - there} bytes are missing"


def test_a_refusal_is_told_and_the_page_cache_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random_file(tmp_path / "file", 2 * PAGE)
    refuse_direct(monkeypatch)
    target = aligned_bytes(2 * PAGE)
    with DirectFile(tmp_path / "file") as file:
        assert not file.is_direct and file.refusal is not None
        assert "O_DIRECT" in file.refusal and str(tmp_path) in file.refusal
        file.read(target, 0)
    assert as_bytes(target) == content


def test_a_refusal_may_come_with_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random_file(tmp_path / "file", 2 * PAGE)
    with DirectFile(tmp_path / "file") as file:
        plain = os.preadv

        def refusing(descriptor: int, *rest: Any) -> int:
            if descriptor == file._direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return plain(descriptor, *rest)

        monkeypatch.setattr(os, "preadv", refusing)
        target = aligned_bytes(2 * PAGE)
        file.read(target, 0)
        assert as_bytes(target) == content and not file.is_direct


def test_short_counts_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random_file(tmp_path / "file", 3 * PAGE)
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: plain(fd, [views[0][:PAGE]], at))
    target = aligned_bytes(3 * PAGE)
    read_direct(target, Extent(tmp_path / "file", 0, 3 * PAGE))
    assert as_bytes(target) == content


def test_a_count_that_is_no_whole_page_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A direct request cannot go on from inside a page; the ordinary descriptor can, and the next request is direct."""
    content, real = random_file(tmp_path / "f", 4 * PAGE), os.preadv
    with DirectFile(tmp_path / "f", request_bytes=2 * PAGE) as file:
        if not file.is_direct:
            pytest.skip("the file system refuses O_DIRECT")
        used = []

        def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            used.append((descriptor == file._direct, offset))
            return real(descriptor, [buffers[0][:PAGE]], offset) - (100 if len(used) == 1 else 0)

        monkeypatch.setattr(os, "preadv", preadv)
        target = aligned_bytes(4 * PAGE)
        file.read(target, 0)
        assert as_bytes(target) == content
        assert file.is_direct and file.refusal is None
        assert used[:2] == [(True, 0), (False, PAGE - 100)] and (True, 2 * PAGE) in used


def test_other_errors_keep_their_number_and_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    random_file(path, PAGE)

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with DirectFile(path) as file, pytest.raises(OSError, match="Input/output error") as caught:
        file.read(aligned_bytes(PAGE), 0)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DirectFile(tmp_path / "nowhere")


def test_the_page_cache_is_left_alone_where_it_is_wanted(tmp_path: Path) -> None:
    content = random_file(tmp_path / "file", PAGE)
    with DirectFile(tmp_path / "file", direct=False) as file:
        assert not file.is_direct and file.refusal is None
        target = torch.empty(PAGE, dtype=torch.uint8)
        file.drop_cache()
        file.read(target, 0)
    assert as_bytes(target) == content


def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    with DirectFile(tmp_path / "file") as file:
        assert len(os.listdir("/proc/self/fd")) == before + 2
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 5])
@pytest.mark.parametrize("alignment", [64, PAGE, 3 * PAGE])
def test_memory_is_aligned(nbytes: int, alignment: int) -> None:
    memory = aligned_bytes(nbytes, alignment)
    assert memory.shape == (nbytes,) and memory.dtype == torch.uint8 and memory.is_contiguous()
    assert nbytes == 0 or memory.data_ptr() % alignment == 0
    memory.fill_(1)


def test_requests_are_as_large_as_they_may_be() -> None:
    pieces = [(at.start, at.stop) for at in direct_io._cut(5, 3 * REQUEST + 9, REQUEST)]
    assert pieces == [
        (5, PAGE),
        (PAGE, PAGE + REQUEST),
        (PAGE + REQUEST, PAGE + 2 * REQUEST),
        (PAGE + 2 * REQUEST, 3 * REQUEST),
        (3 * REQUEST, 3 * REQUEST + 9),
    ]
    assert [(at.start, at.stop) for at in direct_io._cut(5, 9, REQUEST)] == [(5, 9)]


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, 0), (1, 1), (3 * HUGE_PAGE // 4, 3 * HUGE_PAGE // 4), (3 * HUGE_PAGE // 4 + 1, HUGE_PAGE)]
    + [(HUGE_PAGE, HUGE_PAGE), (HUGE_PAGE + 1, HUGE_PAGE + 1), (5 * HUGE_PAGE - PAGE, 5 * HUGE_PAGE)],
)
def test_buffers_are_whole_huge_pages_unless_that_adds_a_third_or_more(nbytes: int, expected: int) -> None:
    assert whole_huge_pages(nbytes) == expected
