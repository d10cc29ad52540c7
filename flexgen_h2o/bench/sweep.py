"""Engines beside one another over a grid of work: each in its own process, taking turns, a record for every trial.

Where the rows are left open, each contender first looks for its best: from FIRST_BATCH rows it doubles them as long as
they fit and gain LEAST_GAIN, or halves them until they fit, one generation each. Then all meet, each at its own best.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flexgen_h2o.bench.grid import CLIMB, COMPARE, OURS, Contender, Entry, Plan, Setting
from flexgen_h2o.bench.peers import PeerJob, alternate
from flexgen_h2o.bench.published_models import published_checkpoint
from flexgen_h2o.bench.roofline import Rooflines, in_bytes
from flexgen_h2o.machine.limits import usable_memory
from flexgen_h2o.models.registry import from_folder

FIRST_BATCH = 8
LEAST_GAIN = 1.05
MOST_BATCH = 4096
TOGETHER_SHARE = 0.8  # of the usable memory: what engines may take that are loaded at once

Record = dict[str, Any]


class Sweep:
    """A plan as it is carried out.

    Args:
        keep: is given every record as soon as it is made.
        known: records of before; what they answer is not measured again.
        advance: called with a contender's label after each generation.
    """

    def __init__(
        self,
        plan: Plan,
        keep: Callable[[Record], None],
        known: Sequence[Record] = (),
        advance: Callable[[str], None] = lambda label: None,
    ):
        self._plan = plan
        self._keep = keep
        self._known = known
        self._advance = advance
        self._rooflines = Rooflines()

    def run(self) -> None:
        """All settings, one after the other."""
        for setting in self._plan.settings:
            comparisons = self._plan.comparisons()
            if self._plan.batches is None:
                best = [(c, c.batch or self.best_batch(setting, c)) for c in self._plan.contenders]
                comparisons = [[(c, batch) for c, batch in best if batch is not None]]
            for entries in comparisons:
                self.compare(setting, entries)

    def compare(self, setting: Setting, entries: Sequence[Entry]) -> None:
        """Contenders beside one another, each with its rows, unless all of that is known."""
        keys = {key_of(setting, *entry) for entry in entries}
        done = [r for r in self._known if r["config"]["purpose"] == COMPARE and key_of_record(r) in keys]
        if is_complete(done, keys, self._plan.trials):
            for record in done:
                self._advance(record["config"]["label"])
            return
        self._measure(setting, entries, self._plan.trials, COMPARE)

    def best_batch(self, setting: Setting, contender: Contender) -> int | None:
        """The rows with which a contender is fastest; None if it cannot do even one."""
        rates = {FIRST_BATCH: self._rate(setting, contender, FIRST_BATCH)}
        batch = FIRST_BATCH
        while rates[batch] is None and batch > 1:
            batch //= 2
            rates[batch] = self._rate(setting, contender, batch)
        while batch >= FIRST_BATCH and 2 * batch <= MOST_BATCH:
            before = rates[batch]
            rates[2 * batch] = after = self._rate(setting, contender, 2 * batch)
            if before is None or after is None or after < LEAST_GAIN * before:
                break
            batch *= 2
        found = {rows: rate for rows, rate in rates.items() if rate is not None}
        return max(found, key=lambda rows: found[rows], default=None)

    def _rate(self, setting: Setting, contender: Contender, batch: int) -> float | None:
        """Tokens per second of one generation; None if the contender cannot do it."""
        key = key_of(setting, contender, batch)
        records = [r for r in self._known if r["config"]["purpose"] == CLIMB and key_of_record(r) == key]
        records = records[-1:] or self._measure(setting, [(contender, batch)], 1, CLIMB)
        rate: float | None = records[-1]["throughput_tok_s"]
        return rate

    def _measure(self, setting: Setting, entries: Sequence[Entry], trials: int, purpose: str) -> list[Record]:
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        jobs = [self._job(setting, *entry) for entry in entries]
        records: list[Record] = []

        def keep(contender: Contender, batch: int, said: Mapping[str, Any]) -> None:
            trial = sum(record["config"]["label"] == contender.label for record in records)
            config = {**config_of_trial(setting, contender, batch), "purpose": purpose, "trial": trial}
            config |= {"trials": trials, "comparison": started}
            record = {"name": f"sweep: {contender.label}", "config": config, **said}
            records.append(record)
            self._keep(record)
            self._advance(contender.label)

        def after(index: int, event: Mapping[str, Any] | None) -> None:
            if event is not None and event["event"] == "generation":
                keep(*entries[index], self._trial(setting, *entries[index], event))

        rows = alternate(jobs, trials, drop_page_cache, after, fits_together(setting, jobs))
        for entry, row in zip(entries, rows, strict=True):
            if row["status"] != "ok":
                keep(*entry, {**NOTHING, "status": row["status"], "sentence": row["sentence"]})
        return records

    def _job(self, setting: Setting, contender: Contender, batch: int) -> PeerJob:
        return PeerJob(
            contender.engine,
            checkpoint(setting),
            batch,
            setting.prompt_len,
            setting.gen_len,
            contender.dtype(setting),
            setting.threads,
            timeout_s=self._plan.timeout_s,
            memory_limit=setting.memory,
            disk_read_limit=setting.disk_read,
            options={**contender.options, **policy_options(setting, contender, batch)},
            device=setting.device,
        )

    def _trial(self, setting: Setting, contender: Contender, batch: int, event: Mapping[str, Any]) -> Record:
        """What a generation says, as a record keeps it."""
        total_s = event["prefill_s"] + event["decode_s"]
        record = {
            **NOTHING,
            "status": "ok",
            "sentence": "",
            **{name: value for name, value in event.items() if name not in ("event", "work")},
            "total_s": total_s,
            "throughput_tok_s": batch * setting.gen_len / total_s,
        }
        if setting.gen_len > 1 and event["decode_s"] > 0:
            record["decode_tok_s"] = batch * (setting.gen_len - 1) / event["decode_s"]
        if contender.engine == OURS and "work" in event:
            record["limit"] = self._rooflines.of(
                event["work"],
                setting.dtype,
                from_folder(checkpoint(setting)).head_dim,
                event["details"]["weight_folder"],
                setting.disk_read,
                setting.device,
            )
        return record


NOTHING: Record = dict.fromkeys(("prefill_s", "decode_s", "total_s", "throughput_tok_s", "decode_tok_s"))


def policy_options(setting: Setting, contender: Contender, batch: int) -> dict[str, Any]:
    """How this engine cuts and places a block: in one piece in this machine's memory, or as its policy search says."""
    if contender.engine != OURS:
        return {}
    cap = {} if setting.disk_read is None else {"disk_read_bytes_s": in_bytes(setting.disk_read)}
    if "percent" in contender.options:
        unit = int(contender.options.get("gpu_batch_size", batch))
        return {"gpu_batch_size": unit, "num_gpu_batches": -(-batch // unit), **cap}
    if setting.memory is None and setting.device == "cpu":
        return {"gpu_batch_size": batch}
    return {"policy": "auto", **cap}


def config_of_trial(setting: Setting, contender: Contender, batch: int) -> dict[str, Any]:
    """What was asked for, as a record says it."""
    asked = {name: value for name, value in vars(setting).items() if name != "dtype"}
    return {
        **asked,
        "engine": contender.engine,
        "label": contender.label,
        "dtype": contender.dtype(setting),
        "batch": batch,
        "budget": contender.budget,
        "bits": contender.bits,
        "options": dict(contender.options),
    }


def key_of(setting: Setting, contender: Contender, batch: int) -> str:
    """What tells trials of one thing from those of another."""
    return repr(sorted(config_of_trial(setting, contender, batch).items()))


def key_of_record(record: Mapping[str, Any]) -> str:
    """The same of a trial that was kept."""
    own = ("purpose", "trial", "trials", "comparison")
    return repr(sorted((name, value) for name, value in record["config"].items() if name not in own))


def is_complete(records: Sequence[Record], keys: set[str], trials: int) -> bool:
    """Whether every contender has all its trials, or has said why not."""
    statuses: dict[str, list[str]] = {key: [] for key in keys}
    for record in records:
        statuses[key_of_record(record)].append(record["status"])
    return all(len(found) >= trials or set(found) - {"ok"} for found in statuses.values())


def checkpoint(setting: Setting) -> Path:
    """The folder that all engines load: made with random weights for the name of a published size."""
    folder = Path(setting.model)
    return folder if folder.is_dir() else published_checkpoint(setting.model, setting.dtype)


def fits_together(setting: Setting, jobs: Sequence[PeerJob]) -> bool:
    """Whether all engines can be in memory at once. Each takes its limit, or somewhat more than its weights."""
    if setting.memory is not None:
        needed = len(jobs) * in_bytes(setting.memory)
    else:
        needed = 1.3 * sum(sum(file.stat().st_size for file in job.checkpoint.glob("*.safetensors")) for job in jobs)
    return needed < TOGETHER_SHARE * usable_memory()


def drop_page_cache() -> None:
    """So that no engine finds another's files in memory; where that is not permitted, nothing happens."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
