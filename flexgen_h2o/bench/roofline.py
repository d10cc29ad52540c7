"""How fast a generation of this engine could have been: its counted work over rates measured alone.

Processor and attention rates are the hardware file's, the disk's is that of a plain read of the same files, or its cap.
"""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.machine.environment import machine_name
from flexgen_h2o.memory.direct_io import DirectFile, aligned_bytes
from flexgen_h2o.plan.work import PhaseWork
from flexgen_h2o.profiling.quick import known_rates
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.limits import resource_seconds
from flexgen_h2o.search.rates import Rate

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
PLAIN_READS = 5


class Rooflines:
    """Limits of generations on this machine. A folder of weights is read once, to know what reading it takes."""

    def __init__(self) -> None:
        self._read_bytes_s: dict[str, float] = {}

    def of(
        self,
        work: Mapping[str, Any],
        dtype: str,
        head_dim: int,
        weight_folder: str | None,
        disk_read: str | None,
        device: str,
    ) -> dict[str, Any]:
        """Seconds that each phase would take of every resource by itself, or the reason why that is not known.

        Args:
            work: by phase, as `PhaseWork.to_json` gives it.
            weight_folder: where weights came from while generating, if from disk.
            disk_read: cap of the disk, as scripts/limit.sh takes it.
            device: where compute happened: cpu or cuda.
        """
        try:
            hardware = known_rates("auto", machine_name(device))
            if hardware is None:
                return {"reason": "no hardware file: python -m flexgen_h2o.profile_hardware makes one"}
            found: dict[str, Any] = {"hardware": hardware.name}
            counted = {phase: PhaseWork.from_json(values) for phase, values in work.items()}
            if weight_folder is not None and any(phase.moved["disk_read"] for phase in counted.values()):
                found["plain_read_bytes_s"] = self._plain_read(weight_folder)
            rate = min(in_bytes(disk_read) if disk_read else math.inf, found.get("plain_read_bytes_s", math.inf))
            for name, phase in counted.items():
                seconds = resource_seconds(phase, hardware, dtype, head_dim)
                if "disk_read" in seconds and math.isfinite(rate):
                    seconds["disk_read"] = phase.moved["disk_read"] / rate
                found[name] = {"seconds": seconds, "binds": max(seconds, key=lambda resource: seconds[resource])}
            found["limit_s"] = sum(max(found[name]["seconds"].values()) for name in counted)
            return found
        except (UsageError, OSError, ValueError) as error:  # the measurement itself must not be lost
            return {"reason": str(error)}

    def _plain_read(self, folder: str) -> float:
        if folder not in self._read_bytes_s:
            self._read_bytes_s[folder] = plain_read_rate(Path(folder))
        return self._read_bytes_s[folder]


def with_slower_disk(hardware: Hardware, read_bytes_s: float) -> Hardware:
    """The same machine with a cap on what its disk reads per second."""
    # Reads that are held back leave the disk to writes.
    rates = {name: rate for name, rate in hardware.rates.items() if not name.startswith("disk_both/")}
    for name, rate in hardware.rates.items():
        if name.startswith("disk/read/") and rate.value > read_bytes_s:
            rates[name] = Rate(read_bytes_s, rate.unit, "assumed", "cap that a benchmark has set")
    return replace(hardware, rates=rates)


def plain_read_rate(folder: Path) -> float:
    """Bytes per second of one thread that reads the layers' files past the page cache, one after the other."""
    files = sorted(folder.glob("layer-*.bin"))
    memory = aligned_bytes(max(path.stat().st_size for path in files))
    rates = []
    for _ in range(PLAIN_READS):
        started, done = time.perf_counter(), 0
        for path in files:
            size = path.stat().st_size
            with DirectFile(path) as file:
                file.read(memory[:size], 0)
            done += size
        rates.append(done / (time.perf_counter() - started))
    return statistics.median(rates)


def in_bytes(amount: str) -> float:
    """A number with K, M or G, as scripts/limit.sh takes it."""
    return float(amount.rstrip("KMG")) * UNITS.get(amount[-1], 1)
