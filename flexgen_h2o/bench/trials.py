"""Records of sweeps, put together: the trials of one contender at one piece of work are a row."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.bench.grid import COMPARE, OURS

SETTING = ("model", "prompt_len", "gen_len", "threads", "device", "memory", "disk_read")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """The trials of a contender with so many rows, in one comparison.

    Attributes:
        trials: records of generations, in order; empty if the contender could not do it.
        sentence: why it could not, or stopped.
        pairs: each trial's throughput over that of the comparison's reference in the same round.
        reference: its label; None for itself.
    """

    config: Mapping[str, Any]
    trials: Sequence[Record]
    status: str
    sentence: str
    pairs: Sequence[float] = ()
    reference: str | None = None

    @property
    def label(self) -> str:
        return str(self.config["label"])

    @property
    def batch(self) -> int:
        return int(self.config["batch"])

    @property
    def is_ours(self) -> bool:
        return bool(self.config["engine"] == OURS)

    @cached_property
    def rate(self) -> float | None:
        """Generated tokens per second, prefill and decode together."""
        return self.median("throughput_tok_s")

    def values(self, field: str) -> list[float]:
        """A number of each trial that has it."""
        return [float(trial[field]) for trial in self.trials if trial.get(field) is not None]

    def median(self, field: str) -> float | None:
        values = self.values(field)
        return statistics.median(values) if values else None

    def range(self, field: str) -> tuple[float, float] | None:
        """The least and the largest."""
        values = self.values(field)
        return (min(values), max(values)) if values else None

    @cached_property
    def ratio(self) -> float | None:
        """Throughput over the reference's, the median of the ratios within a round."""
        return statistics.median(self.pairs) if self.pairs else None

    @cached_property
    def limit_share(self) -> float | None:
        """The least time that the counted work could take at rates measured alone, over the time it took."""
        shares = [
            trial["limit"]["limit_s"] / trial["total_s"]
            for trial in self.trials
            if "limit_s" in (trial.get("limit") or {})
        ]
        return statistics.median(shares) if shares else None

    @cached_property
    def predicted_s(self) -> float | None:
        """What the policy search's model expected; a projection."""
        for trial in self.trials:
            found = (trial.get("details") or {}).get("predicted")
            if found is not None:
                return float(found["total_s"])
        return None

    @cached_property
    def peak_gb(self) -> float | None:
        peak = self.range("peak_anonymous_bytes")
        return None if peak is None else peak[1] / GB

    @cached_property
    def step_s(self) -> list[float]:
        """Seconds of each decode step, the median over trials; empty where they are not known."""
        steps = [trial["step_s"] for trial in self.trials if trial.get("step_s")]
        return [statistics.median(column) for column in zip(*steps, strict=True)] if steps else []


@dataclass(frozen=True)
class Group:
    """All rows of one setting: the same work on the same machine.

    Attributes:
        facts: date, commit, machine, versions and commands of its records.
    """

    setting: Mapping[str, Any]
    rows: Sequence[Row]
    facts: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Such as "opt-1.3b, 64 + 32 tokens, 1500M of memory"."""
        setting = self.setting
        parts = [f"{Path(setting['model']).name}, {setting['prompt_len']} + {setting['gen_len']} tokens"]
        if setting["device"] != "cpu":
            parts.append("on a GPU")
        if setting["memory"]:
            parts.append(f"{setting['memory']} of memory")
        if setting["disk_read"]:
            parts.append(f"disk at {setting['disk_read']}/s")
        return ", ".join(parts)

    def best(self) -> list[Row]:
        """For each contender the row with the most tokens per second; one that could do nothing is left out."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if row.rate is not None and row.rate > (found[row.label].rate or 0.0 if row.label in found else 0.0):
                found[row.label] = row
        return list(found.values())


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records of sweeps in files, in their order; others are passed over.

    Raises UsageError for a file that cannot be read, a line that is none, or if there is nothing.
    """
    paths, problems = list(paths), []
    records: list[Record] = []
    for path in paths:
        try:
            records += trials_in(path)
        except UsageError as error:
            problems += error.problems
    if not records and not problems:
        problems.append(f"{', '.join(map(str, paths))}: no record of a sweep is there; bench sweep makes them")
    if problems:
        raise UsageError(problems)
    return records


def trials_in(path: Path) -> list[Record]:
    """The records of sweeps in a file. Raises UsageError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [record for line in lines if line.strip() and is_trial(record := json.loads(line))]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as records, one JSON object a line: {error}") from None


def is_trial(record: Any) -> bool:
    """Whether a record is of a sweep."""
    return isinstance(record, dict) and str(record.get("name", "")).startswith("sweep: ") and "config" in record


def groups(records: Sequence[Record]) -> list[Group]:
    """Rows by setting, in the order of the records. What was measured again counts once: the last time."""
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        by_setting.setdefault(json.dumps([record["config"][name] for name in SETTING]), []).append(record)
    return [
        Group({name: own[0]["config"][name] for name in SETTING}, list(_rows(_told_apart(own))), _facts(own))
        for own in by_setting.values()
    ]


def _told_apart(records: Sequence[Record]) -> Sequence[Record]:
    """The same with the precision in the label of a contender that was measured in several."""
    precisions: dict[str, set[str]] = {}
    for record in records:
        precisions.setdefault(record["config"]["label"], set()).add(record["config"]["dtype"])

    def labelled(config: Mapping[str, Any]) -> Mapping[str, Any]:
        label = config["label"]
        return config if len(precisions[label]) == 1 else {**config, "label": f"{label}, {config['dtype']}"}

    return [{**record, "config": labelled(record["config"])} for record in records]


def _rows(records: Sequence[Record]) -> Iterable[Row]:
    """One for each contender and batch: of its last comparison, or where it met no other, of its last climb."""
    found: dict[tuple[str, int], dict[tuple[bool, str], list[Record]]] = {}
    for record in records:
        config = record["config"]
        rank = (config["purpose"] == COMPARE, config["comparison"])
        found.setdefault((config["label"], config["batch"]), {}).setdefault(rank, []).append(record)
    references = _references(records)
    for runs in found.values():
        last = runs[max(runs)]
        trials = [record for record in last if record["status"] == "ok"]
        reference = references.get(last[0]["config"]["comparison"], [])
        label = reference[0]["config"]["label"] if reference else None
        own = last[0]["config"]["label"] == label
        by_trial = {record["config"]["trial"]: record for record in reference}
        pairs = [
            trial["throughput_tok_s"] / by_trial[trial["config"]["trial"]]["throughput_tok_s"]
            for trial in trials
            if trial["config"]["trial"] in by_trial and not own
        ]
        status, sentence = last[-1]["status"], last[-1]["sentence"]
        yield Row(last[0]["config"], trials, status, sentence, pairs, None if own or not pairs else label)


def _references(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Of each comparison, the trials of the fastest engine beside this one."""
    by_comparison: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        config = record["config"]
        if config["purpose"] == COMPARE and config["engine"] != OURS and record["status"] == "ok":
            by_comparison.setdefault(config["comparison"], {}).setdefault(config["label"], []).append(record)
    return {
        name: max(engines.values(), key=lambda own: statistics.median(r["throughput_tok_s"] for r in own))
        for name, engines in by_comparison.items()
    }


def _facts(records: Sequence[Record]) -> dict[str, Any]:
    """What the records say of how they came about; of the last one where they differ."""
    last = records[-1]
    versions: dict[str, str] = {}
    for record in records:
        versions |= {name: found for name, found in (record.get("versions") or {}).items() if found}
    return {
        "date": last["date"][:10],
        "commit": (last["git_commit"] or "unknown")[:10] + (" with changes" if last["git_dirty"] else ""),
        "machine": last["machine"],
        "versions": versions,
        "commands": sorted({record["command"] for record in records}),
    }
