"""This engine beside others on the same random checkpoint: in memory, or with the memory and disk of a smaller machine.

    python scripts/compare_engines.py memory --batch 8
    python scripts/compare_engines.py capped --disk-read 200M

Every engine has a process of its own; after loading and a warm-up they take turns. The result goes to results/, each
engine's medians beside the limit that its work has at rates measured alone (policies/hardware/).
scripts/setup_peers.sh installs the others; one that is absent is a row that says so.
"""

import argparse
import contextlib
import math
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from flexgen_h2o.bench.checkpoint import published_checkpoint
from flexgen_h2o.bench.peers import PeerJob, alternate
from flexgen_h2o.direct_io import DirectFile, aligned_bytes
from flexgen_h2o.errors import UsageError
from flexgen_h2o.model_config import published
from flexgen_h2o.platforms import DTYPES
from flexgen_h2o.records import append_record, machine_name
from flexgen_h2o.search.hardware import find_hardware
from flexgen_h2o.search.limits import PhaseWork, resource_seconds

RESULTS = Path(__file__).parent.parent / "results"
ON_DISK = {"percent": [0, 0, 100, 0, 100, 0]}
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def main() -> None:
    args = read_arguments()
    jobs = memory_jobs(args) if args.set == "memory" else capped_jobs(args)
    rows = alternate(list(jobs.values()), args.rounds, before=drop_page_cache)
    for name, job, row in zip(jobs, jobs.values(), rows, strict=True):
        row["name"] = name
        is_ours = row["status"] == "ok" and job.engine == "flexgen_h2o"
        row["limit"] = limits(job, args, row) if is_ours else None
        print(name, row["status"], row["sentence"], row["median"], row["limit"], sep="; ", flush=True)
    ratios = paired_ratios(rows)
    print(f"throughput against {rows[0]['name']}: {ratios}")
    append_record(
        args.output or RESULTS / f"engines_{args.set}.jsonl",
        {
            "name": f"engines beside one another, {args.set}",
            "command": shlex.join(["python", "scripts/compare_engines.py", *sys.argv[1:]]),
            "config": {**vars(args), "output": None},
            "rows": rows,
            "median_ratio_to_first": ratios,
        },
    )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("memory", "capped"))
    parser.add_argument("--model", default="opt-1.3b")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--batch", type=int, help="of all engines (memory: 32), or of this one (capped: 192)")
    parser.add_argument("--unit", type=int, default=16, help="rows of this engine's prefill sub-batches (capped)")
    parser.add_argument(
        "--compressed-batch", type=int, help="also this engine in 4 bits, all in memory, at this batch (capped)"
    )
    parser.add_argument("--prompt-len", type=int)
    parser.add_argument("--gen-len", type=int)
    parser.add_argument("--memory", default="1500M", help="memory limit (capped)")
    parser.add_argument("--disk-read", help="bytes per second from disk, as 200M (capped)")
    parser.add_argument("--peers", help="memory: engines beside this one; capped: ENGINE@BATCH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for each engine in all")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    in_memory = args.set == "memory"
    args.batch = (32 if in_memory else 192) if args.batch is None else args.batch
    args.prompt_len = args.prompt_len or (128 if in_memory else 64)
    args.gen_len = args.gen_len or (16 if in_memory else 32)
    args.peers = args.peers or ("transformers,vllm" if in_memory else "deepspeed_nvme@8,accelerate_disk@1")
    return args


def memory_jobs(args: argparse.Namespace) -> dict[str, PeerJob]:
    """All with the same batch, everything in memory; this engine with the full cache and with H2O."""
    ours = {"full cache": {"eviction": "full"}, "h2o 20 %": {"eviction": "h2o"}}
    jobs = {name: job(args, name, args.batch) for name in args.peers.split(",") if name}
    return {**jobs, **{f"flexgen_h2o, {name}": job(args, "flexgen_h2o", args.batch, o) for name, o in ours.items()}}


def capped_jobs(args: argparse.Namespace) -> dict[str, PeerJob]:
    """Each at its own batch, with the weights on disk."""
    smaller = {"memory_limit": args.memory, "disk_read_limit": args.disk_read}
    jobs = {}
    for peer in filter(None, args.peers.split(",")):
        engine, _, batch = peer.partition("@")
        jobs[engine] = job(args, engine, int(batch or 1), **smaller)
    if args.batch:
        jobs["flexgen_h2o, h2o 20 %"] = job(args, "flexgen_h2o", args.batch, ON_DISK | cut(args, args.batch), **smaller)
    if args.compressed_batch:
        ours = cut(args, args.compressed_batch) | {"compress_weight": True, "compress_cache": True}
        jobs["flexgen_h2o, h2o 20 %, 4 bits"] = job(args, "flexgen_h2o", args.compressed_batch, ours, **smaller)
    return jobs


def cut(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """This engine's options for a block of `batch` rows."""
    return {"eviction": "h2o", "gpu_batch_size": args.unit, "num_gpu_batches": -(-batch // args.unit)}


def job(
    args: argparse.Namespace, engine: str, batch: int, options: dict[str, Any] | None = None, **limited: Any
) -> PeerJob:
    folder = published_checkpoint(args.model, args.dtype)
    return PeerJob(
        *(engine, folder, batch, args.prompt_len, args.gen_len, args.dtype, args.threads),
        timeout_s=args.timeout,
        options=options or {},
        **limited,
    )


def limits(one: PeerJob, args: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """Seconds that each phase would take of every resource at its rate alone, or the reason why there are none.

    The disk's rate is that of a plain read of the same files, here and now.
    """
    try:
        return _limits(one, args, row)
    except (UsageError, OSError, ValueError) as error:  # the measurement itself must not be lost
        return {"reason": str(error)}


def _limits(one: PeerJob, args: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    hardware = find_hardware("auto", machine_name("cpu"))
    if hardware is None:
        return {"reason": "no hardware file: python -m flexgen_h2o.profile_hardware makes one"}
    head_dim, weight_folder = published(args.model).head_dim, row["details"]["weight_folder"]
    found: dict[str, Any] = {"hardware": hardware.name}
    if weight_folder is not None and one.options.get("percent"):
        found["plain_read_bytes_s"] = plain_read_rate(Path(weight_folder))
    for phase, counted in row["repeats"][-1]["work"].items():
        work = PhaseWork.from_json(counted)
        seconds = resource_seconds(work, hardware, one.dtype, head_dim)
        if "disk_read" in seconds:
            cap = in_bytes(args.disk_read) if args.disk_read else math.inf
            seconds["disk_read"] = work.moved["disk_read"] / min(cap, found["plain_read_bytes_s"])
        found[phase] = {"seconds": seconds, "binds": max(seconds, key=lambda name: seconds[name])}
    found["limit_s"] = sum(max(found[phase]["seconds"].values()) for phase in ("prefill", "decode"))
    found["limit_tok_s"] = one.batch * one.gen_len / found["limit_s"]
    return found


def plain_read_rate(folder: Path, trials: int = 5) -> float:
    """Bytes per second of one thread that reads the layers' files past the page cache, one after the other."""
    files = sorted(folder.glob("layer-*.bin"))
    memory = aligned_bytes(max(path.stat().st_size for path in files))
    rates = []
    for _ in range(trials):
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


def paired_ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Throughput over the first engine's, in all and in decode: the median over rounds of the ratio within a round."""
    first = rows[0]["repeats"]
    found = {}
    for row in rows[1:]:
        pairs = list(zip(row["repeats"], first, strict=False))
        if pairs:
            share = row["batch"] / rows[0]["batch"]
            found[row["name"]] = {
                "total": statistics.median(share * _total(b) / _total(a) for a, b in pairs),
                "decode": statistics.median(share * b["decode_s"] / a["decode_s"] for a, b in pairs),
            }
    return found


def _total(repeat: dict[str, Any]) -> float:
    return float(repeat["prefill_s"] + repeat["decode_s"])


def drop_page_cache() -> None:
    """So that no engine finds another's files in memory; where that is not permitted, nothing happens."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


if __name__ == "__main__":
    main()
