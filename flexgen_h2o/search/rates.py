"""One rate of a machine, the names that rates have, and the unit that goes with each name.

    gemm/DTYPE/ROWS                    FLOP/s   products on the compute device: [ROWS, in] . [out, in] of DTYPE; int4
                                                stands for weights in 4-bit groups, multiplied in the default precision
    attention/DEVICE/DTYPE/HEAD_DIM    byte/s   decode attention, in bytes of keys and values; DTYPE may be int4
    memory/DEVICE/read/THREADS         byte/s   bytes read
    memory/DEVICE/copy/THREADS         byte/s   bytes copied, each read once and written once
    memory/DEVICE/new/THREADS          byte/s   bytes of newly allocated memory written for the first time
    prefill/DEVICE/PROMPT_LEN          byte/s   hidden states, of the default precision, through a layer of prefill,
                                                products with weights apart
    layer/DEVICE                       byte/s   the same of decode, products, attention and fixed time apart
    choice/DEVICE                      value/s  logits from which next tokens are chosen
    operation/DEVICE[/WHAT]            s/layer  fixed time in one layer: products of some rows, or attention of a
                                                sub-batch; both, where nothing is said
    link/DIRECTION/KIND                byte/s   h2d or d2h, from or to pinned or pageable host memory
    disk/DIRECTION/PATH/IN_FLIGHT      byte/s   read or write, direct or buffered, requests in flight
    disk_both/DIRECTION/PATH/IN_FLIGHT byte/s   the same while as many requests are in flight the other way
    disk_cpu/DIRECTION/PATH/IN_FLIGHT  s/byte   processor time that this takes
    threads/THREADS/STREAM/WHAT        FLOP/s or byte/s   gemm or stream: products on so many threads while one more
                                                thread streams from disk, or copies memory

THREADS of a GPU is 1.

Names that begin with `flexgen/` are no rates of a machine: they say how fast FlexGen's engine was on one, as its
authors fitted them (search/flexgen_model.py), and nothing else uses them:

    flexgen/h2d                        byte/s   weights, hidden states and 4-bit KV to the GPU
    flexgen/d2h/WHAT                   byte/s   cache or hidden, to host memory
    flexgen/disk_read                  byte/s
    flexgen/disk_write/WHAT            byte/s   cache or hidden
    flexgen/gemm/PHASE                 FLOP/s   prefill or decode
    flexgen/attention/prefill          FLOP/s
    flexgen/attention/decode/DEVICE    FLOP/s
    flexgen/effective_disk_read        byte/s   three additions of this project to the fitted constants
    flexgen/gpu_memory                 byte/s
    flexgen/launch                     s/layer  of one sub-batch
    flexgen/dequantise                 value/s
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FOUR_BITS = "int4"  # the name of that precision among rates
SOURCES = ("measured", "published", "assumed")
NOISY_SPREAD = 0.1
LEAST_TRIALS = 5

_DTYPE = "(float32|bfloat16|float16)"
_COUNT = "[1-9][0-9]*"
_DEVICE = "(cpu|cuda)"
UNITS = {
    rf"gemm/({_DTYPE}|int4)/{_COUNT}": "FLOP/s",
    rf"attention/{_DEVICE}/({_DTYPE}|int4)/{_COUNT}": "byte/s",
    rf"memory/{_DEVICE}/(read|copy|new)/{_COUNT}": "byte/s",
    rf"prefill/{_DEVICE}/{_COUNT}": "byte/s",
    rf"layer/{_DEVICE}": "byte/s",
    rf"choice/{_DEVICE}": "value/s",
    rf"operation/{_DEVICE}(/(products|attention))?": "s/layer",
    r"link/(h2d|d2h)/(pinned|pageable)": "byte/s",
    rf"disk/(read|write)/(direct|buffered)/{_COUNT}": "byte/s",
    rf"disk_both/(read|write)/direct/{_COUNT}": "byte/s",
    rf"disk_cpu/(read|write)/(direct|buffered)/{_COUNT}": "s/byte",
    rf"threads/{_COUNT}/(disk|copy)/gemm": "FLOP/s",
    rf"threads/{_COUNT}/(disk|copy)/stream": "byte/s",
    r"flexgen/(h2d|disk_read|effective_disk_read|gpu_memory)": "byte/s",
    r"flexgen/(d2h|disk_write)/(cache|hidden)": "byte/s",
    r"flexgen/gemm/(prefill|decode)": "FLOP/s",
    rf"flexgen/attention/(prefill|decode/{_DEVICE})": "FLOP/s",
    r"flexgen/launch": "s/layer",
    r"flexgen/dequantise": "value/s",
}


def unit_of(name: str) -> str | None:
    """The unit of the rate of a name; None if no rate has such a name."""
    return next((unit for pattern, unit in UNITS.items() if re.fullmatch(pattern, name)), None)


@dataclass(frozen=True)
class Rate:
    """How much of something happens in a second, or how long something takes.

    Attributes:
        value: in `unit`; the median, where it was measured.
        source: "measured", "published" or "assumed"; the latter two with a `reference` that says where or why.
        spread: interquartile range over median, of the trials. trials: how many.
    """

    value: float
    unit: str
    source: str = "measured"
    reference: str | None = None
    spread: float | None = None
    trials: int | None = None

    @property
    def noisy(self) -> bool:
        """Whether the trials differed by more than 10 %."""
        return self.spread is not None and self.spread > NOISY_SPREAD

    def to_json(self) -> dict[str, Any]:
        """As an object of a hardware file."""
        fields: dict[str, Any] = {"value": self.value, "unit": self.unit, "source": self.source}
        if self.reference is not None:
            fields["reference"] = self.reference
        if self.spread is not None:
            fields["spread"] = self.spread
        if self.trials is not None:
            fields["trials"] = self.trials
        if self.source == "measured":
            fields["noisy"] = self.noisy
        return fields


def rate_problems(name: str, values: Any) -> list[str]:
    """What is wrong with an object of a hardware file that stands for a rate; a sentence each."""
    unit = unit_of(name)
    if unit is None:
        return [f"rate {name!r} is unknown; see search/rates.py for the names"]
    if not isinstance(values, Mapping):
        return [f"{name} is {values!r}; it must be an object with value, unit and source"]
    if values.get("value") is None:
        return (
            [] if _is_text(values.get("reason")) else [f"{name} has no value; give one, or a reason why there is none"]
        )
    found = []
    if not _is_number(values["value"]) or values["value"] <= 0:
        found.append(f"{name}: value is {values['value']!r}; it must be a number above 0")
    if values.get("unit") != unit:
        found.append(f"{name}: unit is {values.get('unit')!r}; it must be {unit!r}")
    found += [f"{name}: {problem}" for problem in _source_problems(values)]
    known = {"value", "unit", "source", "reference", "spread", "trials", "noisy", "weight_bytes_s"}
    found += [f"{name}: {key!r} means nothing here; leave it out" for key in sorted(set(values) - known)]
    return found


def _source_problems(values: Mapping[str, Any]) -> list[str]:
    source: Any = values.get("source")
    spread: Any = values.get("spread")
    trials: Any = values.get("trials")
    if source not in SOURCES:
        return [f"source is {source!r}; it must be one of {', '.join(SOURCES)}"]
    if source != "measured":
        return [] if _is_text(values.get("reference")) else [f"a rate that is {source} needs a reference"]
    found = []
    if not _is_number(spread) or spread < 0:
        found.append(f"spread is {spread!r}; what was measured needs one, a number of at least 0")
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < LEAST_TRIALS:
        found.append(f"trials is {trials!r}; what was measured needs at least {LEAST_TRIALS}")
    if not found and "noisy" in values and values["noisy"] is not (spread > NOISY_SPREAD):
        found.append(f"noisy is {values['noisy']!r}, and the spread is {spread}; above {NOISY_SPREAD} it is noisy")
    return found


def rate_from_json(values: Mapping[str, Any]) -> Rate:
    """The rate of an object in which rate_problems() finds nothing wrong."""
    fields = ("unit", "source", "reference", "spread", "trials")
    return Rate(float(values["value"]), **{name: values[name] for name in fields if name in values})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
