"""Sweeps: who meets whom with how many rows, what is kept of it, and what is made of that."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench import sweep as sweep_module
from flexgen_h2o.bench.__main__ import main
from flexgen_h2o.bench.grid import Contender, Plan, Setting, contenders
from flexgen_h2o.bench.peers import PeerJob
from flexgen_h2o.bench.report import HEADS, markdown, page
from flexgen_h2o.bench.roofline import Rooflines, with_slower_disk
from flexgen_h2o.bench.sweep import Sweep
from flexgen_h2o.bench.trials import groups, read_records
from flexgen_h2o.plan.work import PhaseWork
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.rates import Rate

SETTING = Setting("opt-125m", 16, 5, "float32", 1)
FACTS = {"command": "python -m flexgen_h2o.bench sweep", "date": "2026-01-02T03:04:05+00:00", "git_dirty": False}
FACTS |= {"git_commit": "0123456789abcdef", "machine": {"cpu": "a processor", "cores": 2, "memory_bytes": 2**34}}


class Machine:
    """Stands for all engines: so many seconds for a batch, or none where it does not fit; keeps who was asked."""

    def __init__(self, seconds: Callable[[PeerJob], float | None]):
        self.seconds = seconds
        self.asked: list[tuple[str, int]] = []

    def alternate(
        self, jobs: Sequence[PeerJob], rounds: int, before: Any, after: Any, together: bool
    ) -> list[dict[str, Any]]:
        statuses = ["ok"] * len(jobs)
        for _ in range(rounds):
            for index, job in enumerate(jobs):
                total_s = self.seconds(job) if statuses[index] == "ok" else None
                if total_s is None:
                    statuses[index] = "out_of_memory"
                    continue
                self.asked.append((job.engine, job.batch))
                steps = [total_s / 8] * 4
                after(
                    index, {"event": "generation", "prefill_s": total_s / 2, "decode_s": total_s / 2, "step_s": steps}
                )
        return [{"status": status, "sentence": "too much"} for status in statuses]


@pytest.fixture(autouse=True)
def no_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep_module, "published_checkpoint", lambda model, dtype: tmp_path)


def swept(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    found: Sequence[Contender],
    batches: Sequence[int] | None,
    known: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    monkeypatch.setattr(sweep_module, "alternate", machine.alternate)
    records: list[dict[str, Any]] = []
    Sweep(Plan([SETTING], found, batches, trials=3, timeout_s=9.0), records.append, known).run()
    return [{**FACTS, **record} for record in records]


# --- rows ---


def test_rows_double_while_they_fit_and_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rate grows up to 32 rows; 64 take twice as long as 32.
    machine = Machine(lambda job: max(1.0, job.batch / 32))
    records = swept(monkeypatch, machine, [Contender("transformers")], None)
    assert machine.asked == [("transformers", rows) for rows in (8, 16, 32, 64, 32, 32, 32)]
    assert [record["config"]["purpose"] for record in records] == ["climb"] * 4 + ["compare"] * 3


def test_rows_end_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda job: None if job.batch > 16 else 1.0)
    records = swept(monkeypatch, machine, [Contender("transformers")], None)
    assert machine.asked == [("transformers", rows) for rows in (8, 16, 16, 16, 16)]
    assert [r["config"]["batch"] for r in records if r["status"] == "out_of_memory"] == [32]


def test_rows_halve_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda job: None if job.batch > 2 else 1.0)
    records = swept(monkeypatch, machine, [Contender("accelerate_disk")], None)
    assert machine.asked == [("accelerate_disk", 2)] * 4
    assert [r["config"]["batch"] for r in records if r["status"] != "ok"] == [8, 4]


def test_an_engine_that_can_do_nothing_is_left_out_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda job: None if job.engine == "vllm" else 1.0)
    records = swept(monkeypatch, machine, [Contender("vllm"), Contender("transformers")], None)
    assert {r["config"]["label"] for r in records if r["config"]["purpose"] == "compare"} == {"transformers"}
    assert [r["config"]["batch"] for r in records if r["config"]["label"] == "vllm"] == [8, 4, 2, 1]


def test_given_rows_are_compared_one_by_one_and_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda job: 1.0)
    swept(monkeypatch, machine, [Contender("transformers"), Contender("deepspeed_nvme", batch=3)], [4, 8])
    assert machine.asked == [("transformers", 4), ("deepspeed_nvme", 3)] * 3 + [("transformers", 8)] * 3


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Contender("transformers"), Contender("vllm")]
    first = swept(monkeypatch, Machine(lambda job: 1.0), found, [4, 8])
    again = Machine(lambda job: 1.0)
    kept = [json.loads(json.dumps(record)) for record in first]  # as a file gives them back
    assert swept(monkeypatch, again, found, [4, 8], kept) == []
    assert swept(monkeypatch, again, found, [4, 8], kept[:-1]) != []
    assert again.asked == [("transformers", 8), ("vllm", 8)] * 3, "a comparison that was cut off is made again, whole"


def test_what_is_known_of_looking_for_the_best_is_used_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first = swept(monkeypatch, Machine(lambda job: 1.0 if job.batch < 32 else None), [Contender("vllm")], None)
    again = Machine(lambda job: 1.0)
    climbs = [record for record in first if record["config"]["purpose"] == "climb"]
    swept(monkeypatch, again, [Contender("vllm")], None, climbs)
    assert again.asked == [("vllm", 16)] * 3


# --- contenders ---


def test_names_stand_for_what_a_project_does_with_large_models() -> None:
    limited, _ = contenders(["accelerate", "deepspeed@8"], ["full"], [16], True, {})
    free, _ = contenders(["accelerate", "deepspeed@8"], ["full"], [16], False, {})
    assert [(c.engine, c.batch) for c in limited] == [("accelerate_disk", None), ("deepspeed_nvme", 8)]
    assert [(c.engine, c.batch) for c in free] == [("accelerate_cpu", None), ("deepspeed_cpu", 8)]


def test_this_engine_takes_part_once_for_each_budget_and_precision() -> None:
    found, problems = contenders(["flexgen_h2o"], ["full", "0.04"], [16, 4], False, {})
    assert not problems
    assert [c.label for c in found] == [
        "flexgen_h2o, full cache",
        "flexgen_h2o, full cache, 4 bits",
        "flexgen_h2o, h2o 4 %",
        "flexgen_h2o, h2o 4 %, 4 bits",
    ]
    assert found[2].options == {"eviction": "h2o", "hh_ratio": "0.02", "recent_ratio": "0.02"}
    assert found[3].options["compress_weight"] and found[3].options["compress_cache"]


def test_every_mistake_of_a_command_is_named() -> None:
    with pytest.raises(UsageError) as error:
        main(["sweep", *"--engines bar,vllm@0 --budget 1.5 --bits 8 --lengths 5 --memory 1T --model opt-7b".split()])
    text = "\n".join(error.value.problems)
    for wrong in ("bar", "vllm@0", "1.5", "'8'", "'5'", "1T", "opt-7b"):
        assert wrong in text


# --- limits ---


def test_a_limit_is_the_largest_of_a_phase_and_a_capped_disk_counts_with_its_cap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "layer-0.bin").write_bytes(bytes(8192))
    rates = {"gemm/float32/8": Rate(100.0, "FLOP/s", "assumed", "made up")}
    rates["disk/read/direct/1"] = Rate(50.0, "byte/s", "assumed", "made up")
    rates["disk_cpu/read/direct/1"] = Rate(1e-9, "s/byte", "assumed", "made up")
    hardware = Hardware(name="here", device="cpu", cores=1, memory={}, rates=rates)
    monkeypatch.setattr("flexgen_h2o.bench.roofline.known_rates", lambda choice, name: hardware)
    work = {phase: PhaseWork() for phase in ("prefill", "decode")}
    work["prefill"].gemm_flops[8] = 700
    work["decode"].gemm_flops[8] = 100
    work["decode"].moved["disk_read"] = 60
    counted = {phase: value.to_json() for phase, value in work.items()}
    found = Rooflines().of(counted, "float32", 64, str(tmp_path), "20", "cpu")
    assert found["limit_s"] == pytest.approx(7 + 60 / 20)
    assert (found["prefill"]["binds"], found["decode"]["binds"]) == ("compute", "disk_read")
    assert with_slower_disk(hardware, 20.0).disk_read_bytes_s() == 20.0


# --- reports ---


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Three trials each of two engines; in the third round the machine was slow for both."""
    seconds = iter([4.0, 2.0, 4.4, 2.0, 40.0, 20.0])
    found = [Contender("transformers"), *contenders(["flexgen_h2o"], ["0.2"], [16], False, {})[0]]
    return swept(monkeypatch, Machine(lambda job: next(seconds)), found, [8])


def test_a_row_has_the_median_the_spread_and_the_ratio_within_rounds(records: list[dict[str, Any]]) -> None:
    (group,) = groups(records)
    peer, ours = group.rows
    assert peer.rate == pytest.approx(8 * 5 / 4.4) and ours.rate == pytest.approx(8 * 5 / 2.0)
    assert ours.range("total_s") == (2.0, 20.0)
    assert ours.ratio == pytest.approx(2.0) and ours.reference == "transformers"  # of 2, 2.2 and 2
    assert peer.ratio is None
    assert ours.step_s == pytest.approx([2.0 / 8] * 4)


def test_what_was_measured_again_counts_once(records: list[dict[str, Any]]) -> None:
    later = [json.loads(json.dumps(record)) for record in records]
    for record in later:
        record["config"]["comparison"] = "9999"
        record["total_s"] = 1.0
    (group,) = groups([*records, *later])
    assert [len(row.trials) for row in group.rows] == [3, 3]
    assert [row.median("total_s") for row in group.rows] == [1.0, 1.0]


def test_another_precision_is_another_row(records: list[dict[str, Any]]) -> None:
    later = [json.loads(json.dumps(record)) for record in records]
    for record in later:
        record["config"] |= {"comparison": "9999", "dtype": "bfloat16"}
    (group,) = groups([*records, *later])
    assert [row.label for row in group.rows if not row.is_ours] == ["transformers, float32", "transformers, bfloat16"]
    assert [row.reference for row in group.rows if row.is_ours] == [
        "transformers, float32",
        "transformers, bfloat16",
    ]


def test_a_table_says_what_stopped_an_engine_and_what_it_stands_on(
    monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]
) -> None:
    failed = swept(monkeypatch, Machine(lambda job: None), [Contender("deepspeed_nvme")], [64])
    text = markdown(groups([*records, *failed]))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {len(HEADS) + 1}
    assert re.search(r"\| flexgen_h2o, h2o 20 % \| 8 \| 1 \| 32 \| 20 \| 2 to 20 \| 3 \| 2.00 x \|", text)
    assert "deepspeed_nvme, 64 rows: out of memory: too much" in text
    assert "2026-01-02" in text and "0123456789" in text and "a processor" in text


class Page(HTMLParser):
    """What a page refers to, and its figures' captions."""

    def __init__(self, text: str):
        super().__init__()
        self.references: list[str] = []
        self.captions: list[str] = []
        self.pictures = 0
        self._in_caption = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        self.pictures += tag == "img"
        if tag == "figcaption":
            self._in_caption = True
            self.captions.append("")

    def handle_data(self, data: str) -> None:
        if self._in_caption:
            self.captions[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in_caption = self._in_caption and tag != "figcaption"


def test_the_page_needs_nothing_else_and_says_units_command_and_date(records: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    from flexgen_h2o.bench.plots import plots

    found = groups(records)
    pictures = plots(found)
    assert {picture.name for picture in pictures} == {"throughput-1", "steps-1"}
    text = page(found, pictures)
    seen = Page(text)
    assert seen.pictures == len(seen.captions) == len(pictures)
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in seen.references)
    assert "url(" not in text and "<script" not in text
    for caption in seen.captions:
        assert re.search("per second|milliseconds|seconds|share", caption)
        assert FACTS["command"] in caption and "2026-01-02" in caption


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser: apt-get install chromium")
def test_a_phone_shows_the_page_without_scrolling_sideways(records: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flexgen_h2o.bench.plots import plots

    found = groups(records)
    (tmp_path / "index.html").write_text(page(found, plots(found)))
    tell = "f.onload=()=>{document.title='w'+f.contentDocument.documentElement.scrollWidth}"
    frame = '<iframe id=f src="index.html" width=390 height=800 style="border:0"></iframe>'
    (tmp_path / "frame.html").write_text(f"{frame}<script>{tell}</script>")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    words = ["--headless", "--no-sandbox", *quiet, "--disable-component-update", "--allow-file-access-from-files"]
    words += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=3000", "--dump-dom"]
    command = ["chromium", *words, (tmp_path / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    width = re.search(r"<title>w(\d+)</title>", shown)
    assert width is not None and int(width[1]) <= 390


def test_pictures_show_all_that_rows_have_something_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    from flexgen_h2o.bench.plots import plots

    found, _ = contenders(["flexgen_h2o", "transformers"], ["full", "0.2"], [16, 4], False, {})
    records = swept(monkeypatch, Machine(lambda job: 1.0 + job.batch / 8), found, [8, 16])
    for record in records:
        if record["config"]["engine"] == "flexgen_h2o":
            record |= {"limit": {"limit_s": 0.5}, "details": {"predicted": {"total_s": 1.1}}}
    pictures = {picture.name: picture.svg for picture in plots(groups(records))}
    assert set(pictures) == {"throughput-1", "frontier-1", "budget-1", "steps-1", "limit-1", "predicted"}
    assert all(svg.lstrip().startswith("<?xml") and "</svg>" in svg for svg in pictures.values())
    again = {picture.name: picture.svg for picture in plots(groups(records))}
    assert again == pictures, "the same rows give the same files"


def test_files_without_records_of_sweeps_are_named(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"name": "bench attention"}\n')
    (tmp_path / "broken.jsonl").write_text('{"name": \n')
    with pytest.raises(UsageError, match="no record of a sweep"):
        read_records([tmp_path / "other.jsonl"])
    with pytest.raises(UsageError, match=r"broken\.jsonl cannot be read"):
        read_records([tmp_path / "broken.jsonl", tmp_path / "absent.jsonl"])


def test_homes_are_given_for_16_bits_and_searched_for_4() -> None:
    found, _ = contenders(["flexgen_h2o"], ["full"], [16, 4], True, {"percent": [0, 0, 100, 0, 100, 0]})
    assert ["percent" in contender.options for contender in found] == [True, False]
    with pytest.raises(UsageError, match="--percent places 16 bits"):
        main(["sweep", "--bits", "4", "--percent", *"0 0 100 0 100 0".split()])
