"""What a stretch of work used: processor time, bytes from the disk, and the most memory that was held meanwhile."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INTERVAL_S = 0.05


class Usage:
    """Filled when the stretch ends. Bytes and seconds of this process, all of its threads."""

    def __init__(self) -> None:
        self.cpu_user_s = self.cpu_system_s = 0.0
        self.disk_read_bytes = self.peak_anonymous_bytes = 0


@contextmanager
def metered() -> Iterator[Usage]:
    """Measures what runs inside. Anonymous memory is what the process holds itself: mapped files do not count."""
    usage, ended = Usage(), threading.Event()

    def sample() -> None:
        usage.peak_anonymous_bytes = max(usage.peak_anonymous_bytes, anonymous_bytes())

    def watch() -> None:
        while not ended.wait(INTERVAL_S):
            sample()

    sample()
    watcher = threading.Thread(target=watch, daemon=True)
    before, read_before = os.times(), _disk_read_bytes()
    watcher.start()
    try:
        yield usage
    finally:
        after = os.times()
        usage.cpu_user_s, usage.cpu_system_s = after.user - before.user, after.system - before.system
        usage.disk_read_bytes = _disk_read_bytes() - read_before
        ended.set()
        watcher.join()
        sample()


def anonymous_bytes() -> int:
    """Anonymous memory of this process now."""
    return _field("/proc/self/status", "RssAnon:") * 1024


def _disk_read_bytes() -> int:
    return _field("/proc/self/io", "read_bytes:")


def _field(path: str, name: str) -> int:
    """A number of a /proc file; 0 where there is no such file, or it may not be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def as_values(usage: Usage) -> dict[str, Any]:
    """The fields of a result row."""
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in vars(usage).items()}
