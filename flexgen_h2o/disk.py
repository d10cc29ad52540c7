"""Files of a run: a folder for KV and hidden states, gone when the run ends."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from flexgen_h2o.extents import Extent, free_disk_bytes, whole_pages
from flexgen_h2o.tiers import gb

LOCK_NAME = "lock"


class RunFolder:
    """`offload_dir/run-*`: one run's files, gone when the run ends.

    A run holds a lock on its folder. Folders whose lock no one holds were left by a run that was killed; they are
    removed when the next run begins.
    """

    def __init__(self, offload_dir: Path):
        offload_dir.mkdir(parents=True, exist_ok=True)
        self.reclaimed = _reclaim(offload_dir)
        self.path = Path(tempfile.mkdtemp(prefix="run-", dir=offload_dir))
        # Locked before it has its name, so that no other run can take it for a dead one's.
        self._lock: IO[str] | None = (self.path / "new-lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / "new-lock").rename(self.path / LOCK_NAME)

    def reserve(self, name: str, nbytes: int) -> Extent:
        """A file of `nbytes`, rounded up to whole pages, whose space is taken at once.

        Raises OSError that says what is needed and what there is.
        """
        nbytes = whole_pages(nbytes)
        path = self.path / name
        path.unlink(missing_ok=True)  # that of other sizes, whose space can be used
        check_space(self.path, nbytes, name)
        with path.open("wb") as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        return Extent(path, 0, nbytes)

    def close(self) -> None:
        """Removes the folder."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reclaim(offload_dir: Path) -> int:
    """Removes what killed runs left behind; returns how many folders that were."""
    count = 0
    for folder in offload_dir.glob("run-*"):
        try:
            with (folder / LOCK_NAME).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
        except OSError:
            continue  # in use, or just being made
    return count


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
