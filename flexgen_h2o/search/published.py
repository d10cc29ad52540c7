"""Published throughput on a T4, held against the model of the engines that reached it (search/flexgen_model.py).

Two of the three additions to the fitted constants have a value that is fitted here, to the rows that they decide; each
row is also predicted with a value that was fitted without it. The third and the GPU's memory rate come from elsewhere:

    flexgen/effective_disk_read   FlexGen's table 8: 7046 s of reading the cache in 31 steps of 256 x 512 entries; no
                                  row is fitted, though one (opt-175b, 512 + 32) is of the same size
    flexgen/gpu_memory            the T4's data sheet: 320 GB/s; no row is fitted
    flexgen/launch                fitted to the rows in 16 bits that lie on the GPU
    flexgen/dequantise            fitted to the rows in 4 bits
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.search.flexgen_model import FlexgenRun, FlexgenTimes, flexgen_times
from flexgen_h2o.search.hardware import Hardware

FITTED = ("flexgen/launch", "flexgen/dequantise")
FIT_STEPS = 60


@dataclass(frozen=True)
class Row:
    """A published run and what it took.

    Attributes:
        prefill_s, decode_s: None where only throughput was published.
    """

    run: FlexgenRun
    throughput_tok_s: float
    prefill_s: float | None = None
    decode_s: float | None = None

    @property
    def fits(self) -> str | None:
        """The addition that this row is fitted with, if any."""
        if self.run.compress_weight or self.run.compress_cache:
            return "flexgen/dequantise"
        return "flexgen/launch" if self.run.percent == Percent() else None

    @property
    def is_cpu_attention_in_16_bits(self) -> bool:
        """Whether the fitted constants alone aim at it: opt-30b, attention on the CPU."""
        return self.run.cpu_attention and self.run.config.name == "opt-30b" and self.fits is None


@dataclass(frozen=True)
class Comparison:
    """A row beside three predictions; errors are predicted over published throughput, less one.

    Attributes:
        shipped: with the constants that FlexGen ships alone. added: with the additions. left_out: with additions that
        were fitted without this row.
    """

    row: Row
    shipped: FlexgenTimes
    added: FlexgenTimes
    left_out: FlexgenTimes

    def error(self, times: FlexgenTimes) -> float:
        """Of throughput."""
        return times.throughput_tok_s / self.row.throughput_tok_s - 1


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of published figures."""
    return [_row(values) for values in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def _row(values: Mapping[str, Any]) -> Row:
    run = FlexgenRun(
        config=published(values["model"]),
        prompt_len=values["prompt_len"],
        gen_len=values["gen_len"],
        gpu_batch_size=values["gpu_batch_size"],
        num_gpu_batches=values["num_gpu_batches"],
        percent=Percent(*values["percent"]),
        cpu_attention=values.get("cpu_attention", False),
        compress_weight=values.get("compress_weight", False),
        compress_cache=values.get("compress_cache", False),
        kept_entries=values.get("kept_entries"),
    )
    return Row(run, values["throughput_tok_s"], values.get("prefill_s"), values.get("decode_s"))


def compare(rows: Sequence[Row], hardware: Hardware) -> list[Comparison]:
    """Every row beside its predictions; the hardware's own values of fitted additions are those of all rows."""
    comparisons = []
    for row in rows:
        others = [other for other in rows if other is not row]
        without = fitted(others, hardware, row.fits) if row.fits else hardware
        comparisons.append(
            Comparison(
                row,
                flexgen_times(row.run, hardware, additions=False),
                flexgen_times(row.run, hardware),
                flexgen_times(row.run, without),
            )
        )
    return comparisons


def fitted(rows: Sequence[Row], hardware: Hardware, name: str) -> Hardware:
    """The hardware with the value of an addition that makes the sum of squared log errors of its rows least."""
    own = [row for row in rows if row.fits == name]

    def loss(value: float) -> float:
        changed = _with_rate(hardware, name, value)
        return sum(
            math.log(flexgen_times(row.run, changed).throughput_tok_s / row.throughput_tok_s) ** 2 for row in own
        )

    middle = hardware.rate(name).value
    return _with_rate(hardware, name, _least(loss, middle / 100, middle * 100))


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one minimum is least, by thirds of the logarithm of its argument."""
    left, right = math.log(low), math.log(high)
    for _ in range(FIT_STEPS):
        first, second = left + (right - left) / 3, right - (right - left) / 3
        if loss(math.exp(first)) < loss(math.exp(second)):
            right = second
        else:
            left = first
    return math.exp((left + right) / 2)


def _with_rate(hardware: Hardware, name: str, value: float) -> Hardware:
    rate = replace(hardware.rate(name), value=value)
    return replace(hardware, rates={**hardware.rates, name: rate})


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Median and worst of absolute errors."""
    sizes = [abs(error) for error in errors]
    return median(sizes), max(sizes)


HEADER = (
    "| model | tokens | block | homes and options | published tok/s | fitted constants alone | with additions"
    " | fitted without this row |",
    "|---|---|---|---|---|---|---|---|",
)


def table(comparisons: Sequence[Comparison]) -> str:
    """All errors as a Markdown table; then those of the six logs by phase, and what was added."""
    lines = [*HEADER]
    for entry in comparisons:
        run = entry.row.run
        errors = [f"{entry.error(times):+.1%}" for times in (entry.shipped, entry.added, entry.left_out)]
        if entry.row.fits is None:
            errors[2] = "-"
        elif entry.row.fits:
            errors[1] += f" (fits {entry.row.fits.removeprefix('flexgen/')})"
        lines.append(
            f"| {run.config.name} | {run.prompt_len} + {run.gen_len} | {run.gpu_batch_size} x {run.num_gpu_batches}"
            f" | {_options(run)} | {entry.row.throughput_tok_s:g} | {' | '.join(errors)} |"
        )
    return "\n".join([*lines, "", *_summaries(comparisons), "", *_phases(comparisons)])


def _options(run: FlexgenRun) -> str:
    parts = [str(run.percent)]
    parts += ["CPU attention"] if run.cpu_attention else []
    parts += ["4-bit weights"] if run.compress_weight else []
    parts += ["4-bit KV"] if run.compress_cache else []
    parts += [] if run.kept_entries is None else [f"H2O, {run.kept_entries} entries"]
    return ", ".join(parts)


def _summaries(comparisons: Sequence[Comparison]) -> list[str]:
    aimed = [entry for entry in comparisons if entry.row.is_cpu_attention_in_16_bits]
    cases = (
        ("fitted constants alone, opt-30b in 16 bits with CPU attention", [e.error(e.shipped) for e in aimed]),
        ("fitted constants alone", [e.error(e.shipped) for e in comparisons]),
        ("with additions", [e.error(e.added) for e in comparisons]),
        ("each row left out of its own fit", [e.error(e.left_out) for e in comparisons]),
    )
    lines = ["| what | rows | median error | worst error |", "|---|---|---|---|"]
    for title, errors in cases:
        middle, worst = summary(errors)
        lines.append(f"| {title} | {len(errors)} | {middle:.1%} | {worst:.1%} |")
    return lines


def _phases(comparisons: Sequence[Comparison]) -> list[str]:
    """Prefill and decode of the rows whose phases were published."""
    lines = [
        "| H2O's log | prefill s | predicted, fitted constants alone | decode s | predicted, fitted constants alone |",
        "|---|---|---|---|---|",
    ]
    for entry in comparisons:
        row, times = entry.row, entry.shipped
        if row.prefill_s is not None and row.decode_s is not None:
            run = row.run
            lines.append(
                f"| {run.gpu_batch_size} x {run.num_gpu_batches}, {run.prompt_len} + {run.gen_len}, {run.percent}"
                f" | {row.prefill_s:.0f} | {times.prefill_s:.0f} ({times.prefill_s / row.prefill_s - 1:+.1%})"
                f" | {row.decode_s:.0f} | {times.decode_s:.0f} ({times.decode_s / row.decode_s - 1:+.1%}) |"
            )
    return lines
