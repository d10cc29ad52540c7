"""What a machine can do: its rates and sizes, as a file keeps them (policies/hardware/*.json) and as a plan asks."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.json_files import read_json
from flexgen_h2o.plan.names import COMPUTING, ITEMSIZES
from flexgen_h2o.plan.placement import TIERS
from flexgen_h2o.search.rates import FOUR_BITS, Rate, rate_from_json, rate_problems

WEIGHT_BYTES = {**ITEMSIZES, FOUR_BITS: 4.5 / 8}  # of an element, with scales and minima
VERSION = 1
COMPARABLE = ("machine", "versions", "git_commit", "settings")  # of two environments, if alike
DEFAULT_OPERATION_S = 2e-4
AGREEMENT = 0.01  # between numbers of a file that say the same thing


@dataclass(frozen=True)
class Hardware:
    """A machine: what `profile_hardware` measured, or what someone wrote down about one that is not here.

    Every lookup raises UsageError that names the file where no rate answers it.

    Attributes:
        device: where compute happens: cpu or cuda.
        cores: processors of the host.
        memory: usable bytes by tier; without a GPU, gpu is absent: it is cpu's.
        rates: by name; search/rates.py lists the names.
        missing: names of rates that could not be measured, each with the reason.
        compute_threads: how many threads compute best while one more streams; None if not measured.
        environment: versions, machine, date and command of a measurement.
        origin: where this comes from, for messages.
    """

    name: str
    device: str
    cores: int
    memory: Mapping[str, int]
    rates: Mapping[str, Rate]
    missing: Mapping[str, str] = field(default_factory=dict)
    compute_threads: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="this machine's measurement", compare=False)

    def gemm_flops(self, dtype: str, rows: float) -> float:
        """FLOP/s of a product of [rows, in] with a weight that is read from memory.

        Between measured rows it is a power of rows: a straight line through the logarithms of both, which is exact
        while the weight's bytes alone take the time. Outside of them it is that of the nearest.
        """
        return _interpolate(self._gemm_points(dtype), rows)

    def fastest_gemm_flops(self, dtype: str) -> float:
        """The most FLOP/s of a product, over all measured rows."""
        return max(value for _, value in self._gemm_points(dtype))

    def _gemm_points(self, dtype: str) -> list[tuple[int, float]]:
        pattern = f"gemm/{dtype}/"
        points = sorted((int(name.rsplit("/", 1)[1]), rate.value) for name, rate in self._named(pattern))
        if not points:
            raise self._lacks(pattern + "ROWS")
        return points

    def weight_bytes_s(self, dtype: str, rows: float) -> float:
        """Bytes of weights that products of `rows` rows take in a second: each element does 2 rows of FLOPs."""
        return self.gemm_flops(dtype, rows) / (2 * rows) * WEIGHT_BYTES[dtype]

    def attention_bytes_s(self, dtype: str, head_dim: int, device: str | None = None) -> float:
        """Bytes of keys and values that decode attention takes in a second, at the nearest head size measured.

        Args:
            device: cpu or cuda; None for the compute device.
        """
        pattern = f"attention/{device or self.device}/{dtype}/"
        found = {int(name.rsplit("/", 1)[1]): rate.value for name, rate in self._named(pattern)}
        if not found:
            raise self._lacks(pattern + "HEAD_DIM")
        return found[min(sorted(found), key=lambda size: abs(math.log(size / head_dim)))]

    def operation_s(self, kind: str) -> float:
        """Fixed seconds of what is done for some rows in one layer, however few they are; a guess if none is known.

        Args:
            kind: "products" of a group of rows, or "attention" of a sub-batch.
        """
        names = (f"operation/{self.device}/{kind}", f"operation/{self.device}")
        return next((self.rates[name].value for name in names if name in self.rates), DEFAULT_OPERATION_S)

    def prefill_s_per_byte(self, width: int) -> float | None:
        """Seconds of a layer of prefill, products with weights apart, for each byte of hidden states; None if unknown.

        Between and beyond measured lengths of prompts it is a straight line: attention grows with their square.
        """
        pattern = f"prefill/{self.device}/"
        points = sorted((int(name.rsplit("/", 1)[1]), 1 / rate.value) for name, rate in self._named(pattern))
        if len(points) < 2:
            return points[0][1] if points else None
        above = next((index for index, (at, _) in enumerate(points[1:-1], 1) if at >= width), len(points) - 1)
        (left, low), (right, high) = points[above - 1 : above + 1]
        return max(0.0, low + (high - low) * (width - left) / (right - left))

    def layer_bytes_s(self) -> float | None:
        """Bytes of hidden states that pass a layer of decode in a second, beside products and attention."""
        return self._known(f"layer/{self.device}")

    def choice_values_s(self) -> float | None:
        """Logits in a second from which next tokens are chosen; None if unknown."""
        return self._known(f"choice/{self.device}")

    def new_bytes_s(self) -> float | None:
        """Bytes of newly allocated memory that are written in a second; None if unknown."""
        return self._known(f"memory/{self.device}/new/{self.cores if self.device == 'cpu' else 1}")

    def _known(self, name: str) -> float | None:
        return self.rates[name].value if name in self.rates else None

    def read_bytes_s(self, device: str | None = None) -> float:
        """Memory bandwidth of a device (None: the compute device), the most over the measured threads."""
        return self._best(f"memory/{device or self.device}/read/").value

    def copy_bytes_s(self, device: str | None = None) -> float:
        """Bytes copied in a second within a device's memory, the most over the measured threads."""
        return self._best(f"memory/{device or self.device}/copy/").value

    def disk_read_bytes_s(self) -> float:
        """Bytes from disk in a second: with O_DIRECT and the best number of requests in flight; else buffered."""
        return self.rates[self.disk_setting("read")].value

    def disk_write_bytes_s(self) -> float:
        """Bytes to disk in a second, likewise."""
        return self.rates[self.disk_setting("write")].value

    @property
    def disk_both_share(self) -> float:
        """Seconds that reading and writing take at once, over those that they take alone, added.

        From 0.5 of a disk that does both as if it were two, to 1 of one that does one at a time; 0 if it is not known.
        """
        for name, reading in self._named("disk_both/read/direct/"):
            in_flight = name.rsplit("/", 1)[1]
            writing = self.rate(f"disk_both/write/direct/{in_flight}")
            alone = [self.rate(f"disk/{direction}/direct/{in_flight}").value for direction in ("read", "write")]
            return min(1.0, max(0.5, 1 / (reading.value / alone[0] + writing.value / alone[1])))
        return 0.0

    def disk_read_cpu_s_per_byte(self) -> float:
        """Processor time of a byte from disk, in the setting of disk_read_bytes_s()."""
        return self.rate(self.disk_setting("read").replace("disk/", "disk_cpu/")).value

    def disk_write_cpu_s_per_byte(self) -> float:
        """Processor time of a byte to disk, in the setting of disk_write_bytes_s()."""
        return self.rate(self.disk_setting("write").replace("disk/", "disk_cpu/")).value

    def disk_setting(self, direction: str) -> str:
        """Name of the fastest rate in a direction, "read" or "write"; a buffered one only if there is no other."""
        for path in ("direct", "buffered"):
            named = self._named(f"disk/{direction}/{path}/")
            if named:
                return max(named, key=lambda pair: pair[1].value)[0]
        raise self._lacks(f"disk/{direction}/direct/IN_FLIGHT")

    def link_bytes_s(self, direction: str, pinned: bool) -> float:
        """Bytes between host and GPU in a second; direction is "h2d" or "d2h"."""
        return self.rate(f"link/{direction}/{'pinned' if pinned else 'pageable'}").value

    def rate(self, name: str) -> Rate:
        """The rate of a name. Raises UsageError if there is none."""
        if name not in self.rates:
            raise self._lacks(name)
        return self.rates[name]

    @property
    def noisy(self) -> list[str]:
        """Names of the rates whose trials differed by more than 10 %."""
        return [name for name, rate in self.rates.items() if rate.noisy]

    def held_against(self, earlier: "Hardware") -> "Hardware":
        """The same, with a measurement of the same machine in view: where both differ by more than the trials of this
        one did, their difference is the spread. A machine may have phases that last longer than a measurement.

        Nothing changes if another machine, program or set of sizes was measured.
        """
        if any(self.environment.get(key) != earlier.environment.get(key) for key in COMPARABLE):
            return self
        rates = {}
        for name, rate in self.rates.items():
            before = earlier.rates.get(name)
            difference = 0.0 if before is None else round(abs(rate.value - before.value) / rate.value, 4)
            rates[name] = replace(rate, spread=max(rate.spread or 0.0, difference))
        return replace(self, rates=rates)

    def _named(self, prefix: str) -> list[tuple[str, Rate]]:
        return [(name, rate) for name, rate in self.rates.items() if name.startswith(prefix)]

    def _best(self, prefix: str) -> Rate:
        named = self._named(prefix)
        if not named:
            raise self._lacks(prefix + "THREADS")
        return max((rate for _, rate in named), key=lambda rate: rate.value)

    def _lacks(self, name: str) -> UsageError:
        known = name.rsplit("/", 1)[0] + "/"
        reason = next((why for other, why in self.missing.items() if other == name or other.startswith(known)), None)
        return UsageError(
            f"{self.origin} has no rate {name}{f' ({reason})' if reason else ''};"
            " measure it with python -m flexgen_h2o.profile_hardware, or write it there"
        )

    def to_json(self) -> dict[str, Any]:
        """As the object of a hardware file."""
        rates: dict[str, Any] = {}
        for name, rate in self.rates.items():
            rates[name] = rate.to_json()
            if (parts := name.split("/"))[0] == "gemm":
                rates[name]["weight_bytes_s"] = float(f"{_weight_bytes_s(parts, rate.value):.5g}")
        rates |= {name: {"value": None, "reason": reason} for name, reason in self.missing.items()}
        return {
            "kind": "hardware",
            "version": VERSION,
            "name": self.name,
            "device": self.device,
            "cores": self.cores,
            "memory_bytes": dict(self.memory),
            "compute_threads": self.compute_threads,
            "rates": rates,
            "environment": dict(self.environment),
        }

    @classmethod
    def from_json(cls, values: Any, origin: str) -> "Hardware":
        """The machine that an object describes.

        Args:
            origin: the file it comes from, for messages now and later.
        Raises UsageError with every mistake found.
        """
        problems = _problems(values)
        if problems:
            raise UsageError(f"{origin}: {problem}" for problem in problems)
        rates = values["rates"]
        return cls(
            name=values["name"],
            device=values["device"],
            cores=values["cores"],
            memory=dict(values["memory_bytes"]),
            rates={name: rate_from_json(rate) for name, rate in rates.items() if rate["value"] is not None},
            missing={name: rate["reason"] for name, rate in rates.items() if rate["value"] is None},
            compute_threads=values.get("compute_threads"),
            environment=values.get("environment") or {},
            origin=origin,
        )


def read_hardware(path: Path) -> Hardware:
    """The machine that a file describes. Raises UsageError with every mistake found in it."""
    return Hardware.from_json(read_json(path, "hardware file"), str(path))


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Writes a machine's file, a rate a line: whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = hardware.to_json()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rate)}" for name, rate in values["rates"].items())
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items() if key != "rates"]
    parts.insert(-1, f' "rates": {{\n{lines}\n }}')
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _interpolate(points: list[tuple[int, float]], at: float) -> float:
    """The value at `at` of a power law between neighbours among `points`, ascending; their ends' values outside."""
    (first, value), *_ = points
    if at <= first:
        return value
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if at <= right:
            share = math.log(at / left) / math.log(right / left)
            return low * (high / low) ** share
    return points[-1][1]


def _weight_bytes_s(parts: list[str], flops: float) -> float:
    return flops / (2 * int(parts[2])) * WEIGHT_BYTES[parts[1]]


def _problems(values: Any) -> list[str]:
    if not isinstance(values, Mapping):
        return ["it must hold one JSON object"]
    needed = ("name", "device", "cores", "memory_bytes", "rates")
    known = {*needed, "kind", "version", "compute_threads", "environment"}
    found = [f"{key!r} is missing" for key in needed if key not in values]
    found += [f"{key!r} is unknown; known ones: {', '.join(sorted(known))}" for key in sorted(set(values) - known)]
    if values.get("kind", "hardware") != "hardware":
        found.append(f"kind is {values['kind']!r}; it must be 'hardware'")
    if values.get("version", VERSION) != VERSION:
        found.append(f"version is {values['version']!r}; this program reads version {VERSION}")
    if not isinstance(values.get("name", ""), str):
        found.append(f"name is {values['name']!r}; it must be a string")
    if values.get("device", "cpu") not in COMPUTING:
        found.append(f"device is {values['device']!r}; it must be one of {', '.join(COMPUTING)}")
    for key in ("cores", "compute_threads"):
        if values.get(key) is not None and not _is_count(values[key]):
            found.append(f"{key} is {values[key]!r}; it must be a whole number of at least 1")
    if not isinstance(values.get("environment") or {}, Mapping):
        found.append("environment must be an object")
    return found + _memory_problems(values) + _all_rate_problems(values.get("rates", {}))


def _memory_problems(values: Mapping[str, Any]) -> list[str]:
    memory = values.get("memory_bytes", {"cpu": 0})
    if not isinstance(memory, Mapping):
        return [f"memory_bytes is {memory!r}; it must be an object of bytes by tier"]
    found = [f"memory_bytes has {tier!r}; tiers are {', '.join(TIERS)}" for tier in memory if tier not in TIERS]
    found += [
        f"memory_bytes of {tier} is {nbytes!r}; it must be a whole number of at least 0"
        for tier, nbytes in memory.items()
        if not (isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= 0)
    ]
    if "cpu" not in memory:
        found.append("memory_bytes of cpu is missing")
    if values.get("device") == "cuda" and "gpu" not in memory:
        found.append("memory_bytes of gpu is missing, and device is cuda")
    return found


def _all_rate_problems(rates: Any) -> list[str]:
    if not isinstance(rates, Mapping):
        return [f"rates is {rates!r}; it must be an object of rates by name"]
    found = []
    for name, rate in rates.items():
        problems = rate_problems(name, rate)
        stated = rate.get("weight_bytes_s") if isinstance(rate, Mapping) else None
        if not problems and stated is not None:
            problems = _weight_rate_problems(name, rate, stated)
        found += problems
    return found


def _weight_rate_problems(name: str, rate: Mapping[str, Any], stated: Any) -> list[str]:
    parts = name.split("/")
    if parts[0] != "gemm":
        return [f"{name}: 'weight_bytes_s' means nothing here; leave it out"]
    follows = _weight_bytes_s(parts, rate["value"])
    if isinstance(stated, int | float) and abs(stated - follows) <= AGREEMENT * follows:
        return []
    return [f"{name}: weight_bytes_s is {stated!r}, and from value and rows follows {follows:.5g}; leave it out"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
