"""The compiled parts of DeepSpeed. `python -m flexgen_h2o.bench.drivers.deepspeed_ops` builds them.

DeepSpeed compiles each when it is first used, which takes minutes on a small machine: longer than a measurement may
wait. A build that was killed leaves a lock file, and every later process waits for it to go, for ever.
"""

import os
import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from flexgen_h2o.bench.paths import CACHE

COMMUNICATION = "deepspeed_shm_comm"
FILES = ("pin_memory", "async_io")


def build_folder() -> Path:
    """Where they are kept: a folder of our own for each pair of versions and each environment.

    No other build mixes in; and what was compiled against another environment's headers would be compiled anew.
    """
    environment = sha256(sys.prefix.encode()).hexdigest()[:8]
    return CACHE / f"torch_extensions-torch-{version('torch')}-deepspeed-{version('deepspeed')}-{environment}"


def is_built(names: Iterable[str]) -> bool:
    """Whether these libraries are there. Needs the packages torch and deepspeed."""
    return all((build_folder() / name / f"{name}.so").is_file() for name in names)


def prepare(names: Iterable[str], device: str = "cpu") -> None:
    """Has this process find what is built, compile for the device with one job, and not wait for builds that died."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ["MAX_JOBS"] = "1"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder())
    build_folder().mkdir(parents=True, exist_ok=True)
    for name in names:
        remove_stale_lock(build_folder() / name / "lock")


def load_communication() -> None:
    """Loads the op that every process of DeepSpeed on a CPU has; compiles it if it is not built."""
    prepare([COMMUNICATION])
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()


def load_file_access() -> None:
    """Loads the op that reads files, for this whole process; compiles it if it is not built."""
    prepare(FILES)
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    class WithoutDebugSymbols(AsyncIOBuilder):
        # The compiler spends much of its time and memory on them.
        def cxx_args(self) -> list[str]:
            return [argument for argument in super().cxx_args() if argument != "-g"]

    # DeepSpeed keeps what is loaded by name, so its own builder finds this one.
    WithoutDebugSymbols().load()


def remove_stale_lock(lock: Path) -> None:
    """Removes torch's lock file if no process has it open: its holder keeps it open until the build ends."""
    if lock.exists() and not _is_open(lock):
        lock.unlink(missing_ok=True)


def _is_open(path: Path) -> bool:
    wanted = os.path.realpath(path)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == wanted:
                return True
        except OSError:  # the process has ended, or belongs to someone else
            continue
    return False


if __name__ == "__main__":
    load_communication()
    load_file_access()
