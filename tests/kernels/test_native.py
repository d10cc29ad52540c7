"""The native library: only one of this version is taken."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from flexgen_h2o.kernels import native


@pytest.fixture
def uncached() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def fake(sizes: int) -> SimpleNamespace:
    """Something like a library whose structures have these sizes."""

    class Function(SimpleNamespace):
        def __call__(self) -> int:
            return sizes

    names = ("decode_attention", "read_only", "enter", "best_path", "sizes")
    return SimpleNamespace(**{f"flexgen_h2o_{name}": Function() for name in names})


OURS = ctypes.sizeof(native.Attention) << 32 | ctypes.sizeof(native.Entry)


@pytest.mark.parametrize(("sizes", "is_taken"), [(OURS, True), (OURS + 8, False), (OURS + (8 << 32), False)])
def test_a_library_of_another_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, uncached: None, sizes: int, is_taken: bool
) -> None:
    library = fake(sizes)
    monkeypatch.setattr(native.Path, "glob", lambda self, pattern: [native.Path("_native.so")])
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: library)
    assert (native.library() is library) is is_taken


def test_a_library_that_cannot_be_loaded_is_left_alone(monkeypatch: pytest.MonkeyPatch, uncached: None) -> None:
    def refuse(path: str) -> None:
        raise OSError("undefined symbol: GOMP_parallel")

    monkeypatch.setattr(native.ctypes, "CDLL", refuse)
    assert native.library() is None and native.best_path(64) is None
