"""The result of one engine's job as plain data, whether it worked or not."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

STATUSES = ("ok", "refused", "out_of_memory", "timeout", "absent", "failed")


def result_row(
    job: Mapping[str, Any], events: Sequence[Mapping[str, Any]], repeats: int, stopped: tuple[str, str] | None = None
) -> dict[str, Any]:
    """One row.

    Args:
        job: what was asked for; its entries open the row.
        events: what the engine's process has said: `ready`, a `generation` for each repeat, `end`.
        repeats: how many generations make it complete.
        stopped: (status, sentence) of an engine that could not say itself why it ended.
    Returns: the job, `status` (one of STATUSES), `sentence`, what `ready` tells, `repeats` with times and usage of
        each, and `median` over them: prefill_s, decode_s, total_s, throughput_tok_s, decode_tok_s.
    """
    ready = next((dict(event) for event in events if event["event"] == "ready"), {})
    ready.pop("event", None)
    runs = [{key: value for key, value in event.items() if key != "event"} for event in events if _is_run(event)]
    end = next((event for event in events if event["event"] == "end"), None)
    if stopped is not None:
        status, sentence = stopped
    elif end is not None and end["status"] != "ok":
        status, sentence = end["status"], end["sentence"]
    elif len(runs) < repeats:
        status, sentence = "failed", f"ended after {len(runs)} of {repeats} generations without a reason"
    else:
        status, sentence = "ok", f"{len(runs)} generations of {job['batch']} x {job['gen_len']} tokens"
    row = {**job, "status": status, "sentence": sentence, **ready, "repeats": runs}
    return {**row, "median": _medians(runs, job["batch"], job["gen_len"])}


def _is_run(event: Mapping[str, Any]) -> bool:
    return bool(event["event"] == "generation")


def _medians(runs: Sequence[Mapping[str, Any]], batch: int, gen_len: int) -> dict[str, float | None]:
    if not runs:
        return {}
    totals = [run["prefill_s"] + run["decode_s"] for run in runs]
    # The first token of each row comes from prefill.
    decode = [batch * (gen_len - 1) / run["decode_s"] for run in runs if run["decode_s"] > 0]
    return {
        "prefill_s": statistics.median(run["prefill_s"] for run in runs),
        "decode_s": statistics.median(run["decode_s"] for run in runs),
        "total_s": statistics.median(totals),
        "throughput_tok_s": statistics.median(batch * gen_len / total for total in totals),
        "decode_tok_s": statistics.median(decode) if decode and gen_len > 1 else None,
    }
