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
from flexgen_h2o.kernels.matrices import best_layout
from flexgen_h2o.model_config import ModelConfig, published
from flexgen_h2o.placement import Percent, place_weights
from flexgen_h2o.platforms import DTYPES, choose_device
from flexgen_h2o.policy import EvictionSpec
from flexgen_h2o.records import append_record, machine_name
from flexgen_h2o.schedule import cut_block
from flexgen_h2o.search.hardware import find_hardware
from flexgen_h2o.search.limits import PhaseWork, decode_work, prefill_flops, resource_seconds
from flexgen_h2o.weights import weight_places

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
        row["limit"] = limits(job, args, row["details"]["weight_folder"]) if is_ours else None
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
    args.batch = args.batch or (32 if in_memory else 192)
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
    units = -(-args.batch // args.unit)
    ours = {**ON_DISK, "eviction": "h2o", "gpu_batch_size": args.unit, "num_gpu_batches": units}
    jobs = {}
    for peer in filter(None, args.peers.split(",")):
        engine, _, batch = peer.partition("@")
        jobs[engine] = job(args, engine, int(batch or 1), **smaller)
    return {**jobs, "flexgen_h2o, h2o 20 %": job(args, "flexgen_h2o", args.batch, ours, **smaller)}


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


def limits(one: PeerJob, args: argparse.Namespace, weight_folder: str | None) -> dict[str, Any] | None:
    """Seconds that each phase would take of every resource at its rate alone; None without a hardware file.

    The disk's rate is that of a plain read of the same files, here and now.
    """
    hardware = find_hardware("auto", machine_name("cpu"))
    if hardware is None:
        return None
    config = published(args.model)
    found: dict[str, Any] = {"hardware": hardware.name}
    if weight_folder is not None:
        found["plain_read_bytes_s"] = plain_read_rate(Path(weight_folder))
    for phase, work in phase_work(one, config, args).items():
        try:
            seconds = resource_seconds(work, hardware, one.dtype, config.head_dim)
        except UsageError as error:  # the measurement itself must not be lost
            return {"reason": str(error)}
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


def phase_work(one: PeerJob, config: ModelConfig, args: argparse.Namespace) -> dict[str, PhaseWork]:
    """Counted work: products, KV, and the weights that have to come from disk in every pass."""
    unit = int(one.options.get("gpu_batch_size", one.batch))
    shape = cut_block(one.batch, unit, -(-one.batch // unit) * unit)
    rows = [group.rows.stop - group.rows.start for group in shape.prefill_groups]
    spec = EvictionSpec(one.options.get("eviction", "h2o"))
    slots = spec.sizes(one.prompt_len + one.gen_len)
    columns = range(one.prompt_len + 1, one.prompt_len + one.gen_len)
    prefill = PhaseWork(prefill_flops(config, rows, one.prompt_len))
    decode = decode_work(config, [one.batch], slots, columns, DTYPES[one.dtype].itemsize)
    streamed = layer_bytes_on_disk(one, config)
    prefill.moved["disk_read"], decode.moved["disk_read"] = streamed, streamed * (one.gen_len - 1)
    return {"prefill": prefill, "decode": decode}


def layer_bytes_on_disk(one: PeerJob, config: ModelConfig) -> int:
    """Bytes of the layers' weights that are read from disk in a pass. What lies outside the layers stays in memory."""
    dtype = DTYPES[one.dtype]
    layout = best_layout(choose_device("cpu"), dtype, config.matrix_shapes())
    homes = place_weights(config, Percent(*one.options.get("percent", Percent().values)).weights)
    places = weight_places(config, dtype, layout)
    return sum(place.nbytes for name, place in places.items() if homes[name] == "disk" and name.startswith("layers."))


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
