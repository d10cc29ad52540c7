"""Files of a run: a folder for KV and hidden states, gone when the run ends."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import gb, whole_pages
from flexgen_h2o.memory.extents import Extent, free_disk_bytes

LOCK_NAME = "lock"
LOOSE = ".run-"  # prefix of a folder that is not locked: not yet, or no longer


class RunFolder:
    """`offload_dir/run-*`: one run's files, gone when the run ends.

    A run holds a lock on its folder. Folders whose lock no one holds were left by a run that was killed; they are
    removed when the next run begins. Raises UsageError if there can be no such folder.
    """

    def __init__(self, offload_dir: Path):
        try:
            offload_dir.mkdir(parents=True, exist_ok=True)
            # One run at a time: a folder without a lock is that of a run which died while it made it.
            with _locked_folder(offload_dir):
                self.reclaimed = _reclaim(offload_dir)
                begun = Path(tempfile.mkdtemp(prefix=LOOSE, dir=offload_dir))
                self._lock: IO[str] | None = (begun / LOCK_NAME).open("w")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.path = begun.rename(offload_dir / f"run-{begun.name.removeprefix(LOOSE)}")
        except OSError as error:
            raise UsageError(
                f"--offload-dir {offload_dir} cannot hold the files of a run: {error.strerror}; give another folder"
            ) from None

    def reserve(self, name: str, nbytes: int) -> Extent:
        """A file of `nbytes`, rounded up to whole pages, whose space is taken at once.

        Raises OSError that says what is needed and what there is.
        """
        nbytes = whole_pages(nbytes)
        path = self.path / name
        path.unlink(missing_ok=True)  # that of other sizes, whose space can be used
        check_space(self.path, nbytes, name)
        with path.open("wb") as file:
            take_space(file, 0, nbytes)
        return Extent(path, 0, nbytes)

    def close(self) -> None:
        """Removes the folder."""
        if self._lock is not None:
            _remove(self.path)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder itself: it needs no file, and goes with the process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def reclaim(offload_dir: Path) -> int:
    """Removes what killed runs left behind, if there is such a folder; returns how many folders that were."""
    if not offload_dir.is_dir():
        return 0
    with _locked_folder(offload_dir):
        return _reclaim(offload_dir)


def _reclaim(offload_dir: Path) -> int:
    """Removes what killed runs left behind; returns how many folders that were."""
    count = 0
    for folder in offload_dir.glob(LOOSE + "*"):  # of a run that was killed while it made or removed its folder
        shutil.rmtree(folder, ignore_errors=True)
        count += 1
    for folder in offload_dir.glob("run-*"):
        try:
            with (folder / LOCK_NAME).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
                count += 1
        except OSError:
            continue  # in use, or nobody's run
    return count


def _remove(folder: Path) -> None:
    """Removes a run's folder. Who is killed meanwhile leaves one that the next run knows, though its lock is gone."""
    loose = folder.with_name(f"{LOOSE}{folder.name}")
    with suppress(OSError):  # it is gone, or what is in it shall go at least
        folder = folder.rename(loose)
    shutil.rmtree(folder, ignore_errors=True)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file as a whole: after a crash at any moment it has either the old content or the new.

    Which of the two is certain only once its folder has been synchronised.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the device."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_space(file: IO[bytes], offset: int, nbytes: int) -> None:
    """Makes sure that bytes of a file can be written. Raises OSError that names the file."""
    try:
        if nbytes:
            os.posix_fallocate(file.fileno(), offset, nbytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None


def check_space(folder: Path, nbytes: int, what: str) -> None:
    """Raises OSError if a folder's file system has no room for `nbytes` more."""
    free = free_disk_bytes(folder)
    if nbytes > free:
        raise OSError(
            f"{what} needs {gb(nbytes)} of disk, and {folder} has {gb(free)} left; choose another folder or free some"
        )


def cache_key(*parts: object) -> str:
    """A short name for whatever the parts describe; equal parts give equal names."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:20]
