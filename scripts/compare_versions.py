"""Do two versions compute the same? Tokens, logits, ledger bytes, reports and job files of forty runs, side by side.

    python scripts/compare_versions.py record FOLDER --checkout DIR [--python PYTHON]   carries out all runs
    python scripts/compare_versions.py compare FOLDER OTHER                             what differs, a line each
    python scripts/compare_versions.py finish FOLDER --checkout DIR [--python PYTHON]   ends the job that FOLDER left

Only what users see is used: the commands, their reports and files. `record` also leaves a job that was killed, which
`finish` goes on with in another version. Times, rates that were measured, paths and versions are not compared.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = ["--hh-size", "5", "--recent-size", "6"]
BLOCK = ["--gpu-batch-size", "2", "--num-gpu-batches", "3"]
IN_MEMORY = ["--percent", "100", "0", "100", "0", "100", "0"]
ON_DISK = ["--percent", "0", "0", "0", "0", "0", "0"]
MIXED = ["--percent", "50", "20", "30", "30", "50", "0"]
FLOAT32 = ["--dtype", "float32"]
TEXTS = ["--input", "texts.jsonl", "--gen-len", "12"]
IDS = ["--input", "ids.jsonl", "--gen-len", "14"]
ALL_IN_4_BITS = ["--compress-weight", "--compress-cache"]
DRY = ["--device", "meta", "--hardware", "t4", "--gpu-mem", "15", "--cpu-mem", "204", "--disk-mem", "1500"]
OPT_7B = ["--model", "opt-6.7b", "--prompt-len", "128", "--gen-len", "16", *DRY, "--gpu-batch-size", "16"]

RUNS: dict[str, list[str]] = {
    "full": [*TEXTS, "--eviction", "full", *IN_MEMORY, *BLOCK, *FLOAT32],
    "h2o by ratios": [*TEXTS, "--hh-ratio", "0.2", "--recent-ratio", "0.1", *IN_MEMORY, *BLOCK, *FLOAT32],
    "h2o by sizes": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32],
    "h2o, one heavy": [*TEXTS, "--hh-size", "1", "--recent-size", "1", *IN_MEMORY, *BLOCK, *FLOAT32],
    "local": [*TEXTS, "--eviction", "local", "--recent-size", "7", *IN_MEMORY, *BLOCK, *FLOAT32],
    "sink": [*TEXTS, "--eviction", "sink", "--sink-size", "3", "--recent-size", "5", *IN_MEMORY, *BLOCK, *FLOAT32],
    "smooth": [*TEXTS, "--eviction", "smooth", *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32],
    "bfloat16": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, "--dtype", "bfloat16"],
    "bfloat16, full": [*TEXTS, "--eviction", "full", *IN_MEMORY, *BLOCK, "--dtype", "bfloat16"],
    "one block": [*TEXTS, *SIZES, *IN_MEMORY, "--gpu-batch-size", "16", "--num-gpu-batches", "1", *FLOAT32],
    "decode in parts": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, "--decode-batch-size", "4", *FLOAT32],
    "rows alone": [*TEXTS, *SIZES, *IN_MEMORY, "--gpu-batch-size", "1", "--num-gpu-batches", "1", *FLOAT32],
    "everything on disk": [*TEXTS, *SIZES, *ON_DISK, *BLOCK, *FLOAT32],
    "everything on disk, nothing ahead": [*TEXTS, *SIZES, *ON_DISK, *BLOCK, "--overlap", "false", *FLOAT32],
    "weights on disk": [*TEXTS, *SIZES, "--percent", "0", "0", "100", "0", "100", "0", *BLOCK, *FLOAT32],
    "KV on disk": [*TEXTS, *SIZES, "--percent", "100", "0", "0", "0", "100", "0", *BLOCK, *FLOAT32],
    "KV on disk, full": [*TEXTS, "--eviction", "full", "--percent", "100", "0", "0", "0", "100", "0", *BLOCK, *FLOAT32],
    "hidden states on disk": [*TEXTS, *SIZES, "--percent", "100", "0", "100", "0", "0", "0", *BLOCK, *FLOAT32],
    "mixed homes": [*TEXTS, *SIZES, *MIXED, *BLOCK, *FLOAT32],
    "mixed homes, smooth": [*TEXTS, "--eviction", "smooth", *SIZES, *MIXED, *BLOCK, *FLOAT32],
    "mixed homes, sink": [*TEXTS, "--eviction", "sink", "--recent-size", "6", *MIXED, *BLOCK, *FLOAT32],
    "mixed homes, bfloat16": [*TEXTS, *SIZES, *MIXED, *BLOCK, "--dtype", "bfloat16"],
    "weights in 4 bits": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--compress-weight"],
    "KV in 4 bits": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--compress-cache"],
    "KV in 4 bits, ring whole": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--compress-cache", "--ring-16bit"],
    "all in 4 bits": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, "--dtype", "bfloat16", *ALL_IN_4_BITS],
    "all in 4 bits, mixed homes": [*TEXTS, *SIZES, *MIXED, *BLOCK, *FLOAT32, *ALL_IN_4_BITS],
    "all in 4 bits, full, on disk": [*TEXTS, "--eviction", "full", *ON_DISK, *BLOCK, *FLOAT32, *ALL_IN_4_BITS],
    "token ids": [*IDS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--ignore-eos"],
    "sampled": [*IDS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--do-sample", "--temperature", "0.8", "--seed", "7"],
    "sampled from a few": [*IDS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--do-sample", "--top-k", "9", "--top-p", "0.8"],
    "stopped": [*TEXTS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--stop", "the", "--stop", ","],
    "stopped by ids": [*IDS, *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--stop-token-ids", "17", "42", "300", "11"],
    "lines that fail": ["--input", "failing.jsonl", *SIZES, *IN_MEMORY, *BLOCK, *FLOAT32, "--gen-len", "5"],
    "dummy weights": ["--model", "opt-125m", "--dummy-weights", "--prompt-len", "20", "--gen-len", "4", *IN_MEMORY]
    + ["--gpu-batch-size", "2", "--num-gpu-batches", "2", "--hh-ratio", "0.1", "--recent-ratio", "0.1"],
    "dry run, CPU and disk": [*OPT_7B, "--num-gpu-batches", "6", "--percent", "20", "50", "0", "100", "0", "100"],
    "dry run, CPU attention": [*OPT_7B, "--num-gpu-batches", "6", "--percent", "10", "90", "0", "100", "0", "100"]
    + ["--cpu-cache-compute", "--hh-ratio", "0.1", "--recent-ratio", "0.1"],
    "dry run, 4 bits": [*OPT_7B, "--num-gpu-batches", "4", "--percent", "30", "70", "20", "80", "0", "100"]
    + ALL_IN_4_BITS,
    "dry run, found by the search": [*OPT_7B[:6], *DRY, "--hh-ratio", "0.1", "--recent-ratio", "0.1"],
    "dry run, opt-350m": ["--model", "opt-350m", "--prompt-len", "64", "--gen-len", "8", *DRY, *BLOCK, *MIXED],
}
SEARCHES: dict[str, list[str]] = {
    "search, opt-30b": ["--model", "opt-30b", "--hardware", "t4", "--gpu-mem", "15", "--cpu-mem", "204"],
    "search, flexgen's engine": ["--model", "opt-30b", "--hardware", "t4", "--engine-model", "flexgen"],
    "search, opt-6.7b in 4 bits": ["--model", "opt-6.7b", "--hardware", "t4", "--compress-weight", "on"],
}

# Of reports: what was timed or depends on what else the process holds, and what follows from it.
TIMED = ("load_s", "prefill_s", "decode_s", "total_s", "throughput_tok_s", "decode_tok_s", "phases")
HELD = ("gpu_peak_bytes", "cpu_peak_bytes", "ledger_peak_bytes", "process baseline")

DRIVER = """
import contextlib, hashlib, io, json, sys, torch
from flexgen_h2o import policy_search, run
runs, searches = json.load(open(sys.argv[1]))
argmax, sample, digest = torch.Tensor.argmax, torch.searchsorted, None
def noted(way):
    def call(tensor, *args, **kwargs):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return way(tensor, *args, **kwargs)
    return call
torch.Tensor.argmax, torch.searchsorted = noted(argmax), noted(sample)
threads = torch.get_num_threads()
for commands, command in ((runs, run), (searches, policy_search)):
    for name, argv in commands.items():
        torch.set_num_threads(threads)
        digest, said = hashlib.sha256(), io.StringIO()
        with contextlib.redirect_stdout(said):
            code = command.main(argv)
        report = json.loads(said.getvalue().splitlines()[-1])
        print(json.dumps({"name": name, "code": code, "report": report, "logits": digest.hexdigest()}), flush=True)
"""


def write_inputs(folder: Path) -> None:
    """Prompts of different lengths, as text and as token ids, and lines that cannot be served."""
    words = "in those days the captain looked at the sea and said nothing of what he had seen there before".split()
    texts = [" ".join(words[row % 7 : row % 7 + 2 + (5 * row) % 13]) for row in range(9)]
    ids = [[5 + (31 * row + 17 * place) % 900 for place in range(1 + (7 * row) % 24)] for row in range(11)]
    lines = {
        "texts": [{"prompt": text} for text in texts],
        "ids": [{"id": 10 + n, "prompt_ids": r} for n, r in enumerate(ids)],
    }
    lines["failing"] = [
        {"prompt": texts[0]},
        {"nothing": 1},
        {"prompt_ids": [10**6]},
        {"prompt": texts[1]},
        {"id": True},
    ]
    lines["job"] = [{"prompt": text} for text in texts * 12]
    for name, values in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def run_all(folder: Path, checkout: Path, python: str) -> None:
    """Carries out RUNS and SEARCHES in one process and notes what came of them."""
    commands: dict[str, list[str]] = {}
    for number, (name, words) in enumerate(RUNS.items()):
        is_dry = "--device" in words
        hardware = [] if "--hardware" in words else ["--hardware", "amd-epyc-2-cores"]
        commands[name] = [*words, *hardware, "--json", "--offload-dir", "offload"]
        commands[name] += [] if is_dry else ["--output", f"out-{number}.jsonl"]
    searches = {name: [*words, "--json"] for name, words in SEARCHES.items()}
    (folder / "commands.json").write_text(json.dumps([commands, searches]), encoding="utf-8")
    done = _python(folder, checkout, python, ["-c", DRIVER, "commands.json"], stdout=subprocess.PIPE)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    results = {}
    for row in rows:
        output = folder / f"out-{list(RUNS).index(row['name'])}.jsonl" if row["name"] in RUNS else None
        lines = output.read_text(encoding="utf-8") if output is not None and output.exists() else None
        side = output.with_name(output.name + ".job") if output is not None else None
        job = json.loads(side.read_text(encoding="utf-8"))["job"] if side is not None and side.exists() else None
        if job is not None:
            job["settings"].pop("the files of --model")  # each checkout has its own
        results[row["name"]] = {**row, "report": comparable(row["report"]), "lines": lines, "job": job}
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"{len(results)} runs recorded in {folder}")


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what differs from run to run."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(each) for key, each in value.items() if key not in HELD}
        return value

    timed = TIMED if report.get("measured", False) else ()
    report = {key: value for key, value in report.items() if key not in timed}
    if "hardware" in report:  # of a search: where the file lies
        report["hardware"].pop("origin")
    if timed:
        report["predicted"] = None if report.get("predicted") is None else "projected"
    found: dict[str, Any] = kept(report)
    return found


def _python(
    folder: Path, checkout: Path, python: str, words: list[str], **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *words], check=True, text=True, cwd=folder, env=_environment(folder, checkout), **options
    )


def _environment(folder: Path, checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "2"}


JOB = [
    "--input",
    "job.jsonl",
    "--output",
    "job-out.jsonl",
    "--model",
    "model",
    "--gen-len",
    "40",
    *SIZES,
    *MIXED,
    *BLOCK,
]
JOB += [*FLOAT32, "--hardware", "amd-epyc-2-cores", "--offload-dir", "offload", "--checkpoint-minutes", "0"]
LEFT = ("job-out.jsonl", "job-out.jsonl.job", "job-out.jsonl.checkpoint")


def run_jobs(folder: Path, checkout: Path, python: str) -> None:
    """A job that nothing interrupts, and the same one killed in the middle of a block."""
    shutil.copytree(checkout / "flexgen_h2o" / "demo" / "model", folder / "model")
    for name in ("whole", "killed"):
        place = folder / name
        place.mkdir()
        for needed in ("job.jsonl", "model", "home"):
            (place / needed).symlink_to(folder / needed)
    _python(folder / "whole", checkout, python, ["-m", "flexgen_h2o.run", *JOB], stdout=subprocess.DEVNULL)
    place = folder / "killed"
    with subprocess.Popen([python, "-m", "flexgen_h2o.run", *JOB], cwd=place, env=_environment(place, checkout)) as job:
        while job.poll() is None and not (lines_done(place) >= 12 and (place / LEFT[2] / "current.json").exists()):
            time.sleep(0.01)
        if job.poll() is not None:
            sys.exit("error: the job ended before it could be killed; give it more prompts")
        job.send_signal(signal.SIGKILL)
    print(f"a job was killed after {lines_done(place)} prompts")


def lines_done(place: Path) -> int:
    """How many prompts of a job are answered, by its side file."""
    try:
        return int(json.loads((place / LEFT[1]).read_text(encoding="utf-8"))["job"]["progress"]["lines"])
    except (OSError, ValueError, KeyError):
        return 0


def finish(folder: Path, checkout: Path, python: str) -> list[str]:
    """Goes on with the killed job; what differs from the whole one."""
    place = folder / "finished"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "killed", place, symlinks=True)
    before = lines_done(place)
    said = _python(
        place, checkout, python, ["-m", "flexgen_h2o.run", *JOB], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    found = [] if "goes on at its token" in said.stderr else ["no block went on where it was saved"]
    found += [] if f"{before} prompts have been answered" in said.stderr else ["the job did not go on"]
    for name in LEFT[:2]:
        digests = {
            part: hashlib.sha256((folder / part / name).read_bytes()).hexdigest() for part in ("whole", "finished")
        }
        found += [f"{name} is not what the whole job left"] if len(set(digests.values())) > 1 else []
    print(f"the job went on after {before} prompts")
    return found


def differences(one: Any, other: Any, where: str) -> list[str]:
    """A line for each value that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{where} > {key}")]
    return [] if one == other else [f"{where}: {str(one)[:100]} and {str(other)[:100]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare", "finish"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    folder, checkout = args.folder.resolve(), args.checkout.resolve()
    if args.verb == "record":
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "home").mkdir(parents=True)
        write_inputs(folder)
        run_all(folder, checkout, args.python)
        run_jobs(folder, checkout, args.python)
        return 0
    if args.verb == "finish":
        found = finish(folder, checkout, args.python)
    else:
        one, other = (json.loads((each / "results.json").read_text(encoding="utf-8")) for each in (folder, args.other))
        found = differences(one, other, "run")
        print(f"{len(one)} and {len(other)} runs")
    print("\n".join(found) or "all equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
