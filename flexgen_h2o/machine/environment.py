"""What a measurement depends on beside its own settings: machine, versions, commit; and where it is kept."""

import json
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parent.parent.parent


def slug(text: str) -> str:
    """A text as part of a file name: small letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "machine"


def default_name(machine: Mapping[str, Any], device: str) -> str:
    """A machine's name from what environment() says of it, such as "amd-epyc-2-cores"."""
    processor = machine["gpu"] if device == "cuda" else machine["cpu"]
    return slug(f"{processor} {machine['cores']} cores")


def environment() -> dict[str, Any]:
    """What a measurement depends on beside its own settings: machine, versions, commit."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "flexgen_h2o", "scripts")),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers", "numpy")},
        },
    }


def machine() -> dict[str, Any]:
    """Processor, GPU and memory of this machine."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_name(device: str) -> str:
    """The name of this machine's hardware file."""
    return default_name(machine(), device)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends one measurement to a file under results/, with the environment it was made in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "measurement", **environment(), **record}) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
