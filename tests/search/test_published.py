"""The model of FlexGen's and H2O's engines against what was published of them, and the hardware file behind it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.commands import ROOT
from support.planning import T4

from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.search.flexgen_model import FlexgenRun, flexgen_times, whole_tensor_shares
from flexgen_h2o.search.published import FITTED, Comparison, compare, fitted, read_rows, summary, table

ROWS = read_rows(ROOT / "results" / "published_t4.json")
GB = 2**30


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return compare(ROWS, T4)


def test_all_published_rows_are_there(comparisons: list[Comparison]) -> None:
    assert len(comparisons) == 24
    assert sum(entry.row.is_cpu_attention_in_16_bits for entry in comparisons) == 9
    assert sum(entry.row.prefill_s is not None for entry in comparisons) == 6


def test_fitted_constants_alone_explain_what_they_were_fitted_for(comparisons: list[Comparison]) -> None:
    aimed = [entry for entry in comparisons if entry.row.is_cpu_attention_in_16_bits]
    middle, worst = summary([entry.error(entry.shipped) for entry in aimed])
    assert middle <= 0.10 and worst <= 0.25
    for entry in comparisons:
        if entry.row.prefill_s is not None and entry.row.decode_s is not None:
            assert entry.shipped.prefill_s == pytest.approx(entry.row.prefill_s, rel=0.2)
            assert entry.shipped.decode_s == pytest.approx(entry.row.decode_s, rel=0.2)


def test_they_miss_the_rest(comparisons: list[Comparison]) -> None:
    rest = [entry for entry in comparisons if not entry.row.is_cpu_attention_in_16_bits]
    assert summary([entry.error(entry.shipped) for entry in rest])[0] > 0.5


def test_with_three_additions_all_rows_are_explained(comparisons: list[Comparison]) -> None:
    middle, worst = summary([entry.error(entry.added) for entry in comparisons])
    assert middle <= 0.10 and worst <= 0.25


def test_a_row_is_explained_by_the_others(comparisons: list[Comparison]) -> None:
    assert summary([entry.error(entry.left_out) for entry in comparisons])[1] <= 0.30
    for entry in comparisons:
        changed = entry.left_out.throughput_tok_s != entry.added.throughput_tok_s
        assert changed == (entry.row.fits is not None)


@pytest.mark.parametrize("name", FITTED)
def test_the_file_has_the_values_that_fit(name: str) -> None:
    assert T4.rate(name).value == pytest.approx(fitted(ROWS, T4, name).rate(name).value, rel=0.01)
    # Wherever the fit begins.
    moved = replace(T4, rates={**T4.rates, name: replace(T4.rate(name), value=5 * T4.rate(name).value)})
    assert fitted(ROWS, moved, name).rate(name).value == pytest.approx(
        fitted(ROWS, T4, name).rate(name).value, rel=1e-3
    )


def test_the_disk_rate_is_that_of_table_8() -> None:
    cache = 31 * 256 * 512 * 2 * 96 * 12288 * 2  # steps, rows, entries; keys and values, layers, hidden size, bytes
    assert T4.rate("flexgen/effective_disk_read").value == pytest.approx(cache / 7046, rel=0.02)


def test_every_rate_of_the_file_says_where_it_comes_from() -> None:
    for name, rate in T4.rates.items():
        assert rate.source in ("published", "assumed") and rate.reference, name
    assert T4.rate("flexgen/h2d").value == pytest.approx(12.89 * GB, rel=1e-5)
    assert T4.rate("flexgen/attention/decode/cpu").value == 0.0123e12
    assert T4.memory == {"gpu": 15 * GB, "cpu": 204 * GB, "disk": 1500 * GB}
    assert T4.rate("memory/cpu/read/16").source == "assumed"


@pytest.mark.parametrize(
    ("asked", "gpu", "disk"),
    [
        ((20, 80), 1 / 12, 0.0),
        ((10, 90), 0.0, 0.0),
        ((4, 96), 0.0, 0.0),
        ((0, 100), 0.0, 0.0),
        ((100, 0), 1.0, 0.0),
        ((0, 50), 0.0, 0.5),
        ((30, 70), 1 / 12 + 1 / 3, 0.0),
    ],
)
def test_flexgen_gives_whole_tensors(asked: tuple[float, float], gpu: float, disk: float) -> None:
    shares = whole_tensor_shares(Percent(*asked).weights)
    assert shares == pytest.approx((gpu, 1 - gpu - disk, disk))


def test_a_step_by_hand() -> None:
    """52 x 14 rows of opt-30b, 102 entries kept, weights streamed: FlexGen's constants, the terms of their model."""
    run = FlexgenRun(published("opt-30b"), 512, 32, 52, 14, Percent(0, 100, 0, 100, 0, 100), True, kept_entries=102)
    rows, weights = 728, 48 * 12 * 7168**2
    times = flexgen_times(run, T4, additions=False)
    hidden = 48 * 7168 * rows * 2
    h2d = (2 * weights + hidden) / (12.89 * GB)
    compute = 2 * weights * rows / 4.3e12 + 4 * 48 * 7168 * rows * 102 / 0.0123e12
    assert times.step["h2d"] == pytest.approx(h2d, rel=1e-4)
    assert times.step["compute"] == pytest.approx(compute, rel=1e-4)
    assert times.decode_s == pytest.approx(31 * (h2d + compute), rel=1e-4)
    prefill = rows * (512 * 2 * weights / 21.24e12 + 4 * 512**2 * 7168 * 48 / 9.97e12)
    assert times.prefill_s == pytest.approx(prefill, rel=1e-4)
    assert times.throughput_tok_s == pytest.approx(rows * 32 / (times.prefill_s + times.decode_s))


def test_the_table_marks_what_was_fitted(comparisons: list[Comparison]) -> None:
    text = table(comparisons)
    assert len(re.findall(r"fits launch", text)) == 3 and len(re.findall(r"fits dequantise", text)) == 9
    assert text.count("\n| opt-") == 24
    worst = max(comparisons, key=lambda entry: abs(entry.error(entry.shipped)))
    assert f"{worst.error(worst.shipped):+.1%}" in text
