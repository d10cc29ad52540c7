"""Runs one engine in this process: `python -m flexgen_h2o.bench.drivers ENGINE --checkpoint FOLDER ...`.

Loads, warms up, generates `--repeats` times and prints one JSON line. With `--serve` it prints a JSON line when it is
ready, then reads a line from standard input for each generation and answers with a JSON line, until the input ends.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from flexgen_h2o.bench.drivers.common import (
    ENGINES,
    EngineAbsent,
    EngineRefused,
    Loaded,
    Settings,
    StartAgain,
    prepare_process,
    random_prompts,
)
from flexgen_h2o.bench.drivers.meter import as_values, metered
from flexgen_h2o.bench.paths import OFFLOAD
from flexgen_h2o.bench.rows import result_row

SEED, WARM_UP_SEED = 1234, 4321
WARM_UP_TOKENS = 4
FIRST_TOKENS = 8  # how many of row 0 are reported


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    prepare_process(args.threads)
    try:
        with _own_output() as out, _offload_folder(args.offload_dir) as folder:
            settings = _settings(args, folder)
            return _serve(settings, out) if args.serve else _run_once(settings, args.repeats, out)
    except StartAgain as again:
        # The last --options count.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--options", json.dumps(again.options)])


def build_parser() -> argparse.ArgumentParser:
    """Flags of one engine's job."""
    parser = argparse.ArgumentParser(prog="python -m flexgen_h2o.bench.drivers", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder in Hugging Face format")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--prompt-len", type=int, required=True)
    parser.add_argument("--gen-len", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16", help="float32, bfloat16, float16 or int8")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where compute happens")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--offload-dir", type=Path, help="empty folder for files of the run")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of what this engine alone takes")
    parser.add_argument("--serve", action="store_true", help="generate once for each line of standard input")
    return parser


def _settings(args: argparse.Namespace, offload_dir: Path) -> Settings:
    names = ("engine", "batch", "prompt_len", "gen_len", "dtype", "threads", "options", "device")
    values = {name: getattr(args, name) for name in names}
    return Settings(checkpoint=args.checkpoint.resolve(), offload_dir=offload_dir, **values)


def _run_once(settings: Settings, repeats: int, out: TextIO) -> int:
    """Everything in one go; prints the result row."""
    events: list[dict[str, Any]] = []
    _run(settings, events.append, range(repeats))
    values = {**vars(settings), "checkpoint": settings.checkpoint.name}
    values.pop("offload_dir")
    row = result_row(values, events, repeats)
    print(json.dumps(row), file=out, flush=True)
    return 0 if row["status"] == "ok" else 1


def _serve(settings: Settings, out: TextIO) -> int:
    """One generation for each line of standard input; prints an event for each step."""

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    _run(settings, emit, sys.stdin)
    return 0


def _run(settings: Settings, emit: Callable[[dict[str, Any]], None], requests: Iterable[Any]) -> None:
    """Loads, warms up and generates once for each request. What goes wrong is an event too: the last one."""
    try:
        with metered() as usage:
            started = time.perf_counter()
            loaded: Loaded = importlib.import_module(ENGINES[settings.engine].module).load(settings)
            load_s = time.perf_counter() - started
            _measure(settings, loaded, WARM_UP_SEED, min(WARM_UP_TOKENS, settings.gen_len))
        ready = {"load_s": round(load_s, 3), "load_peak_anonymous_bytes": usage.peak_anonymous_bytes}
        emit({"event": "ready", **ready, "versions": _versions(settings.engine), "details": dict(loaded.details)})
        for _ in requests:
            emit({"event": "generation", **_measure(settings, loaded, SEED, settings.gen_len)})
        loaded.close()
        emit({"event": "end", "status": "ok", "sentence": ""})
    except StartAgain:
        raise
    except Exception as error:
        status, sentence = _reason(error)
        if status == "failed":
            traceback.print_exc()
        emit({"event": "end", "status": status, "sentence": sentence})


def _measure(settings: Settings, loaded: Loaded, seed: int, gen_len: int) -> dict[str, Any]:
    """One generation: times, what it used, and the proof that it gave what was asked for."""
    vocab_size = settings.model_config()["vocab_size"]
    prompts = random_prompts(seed, settings.batch, settings.prompt_len, vocab_size)
    with metered() as usage:
        generation = loaded.generate(prompts, gen_len)
    rows = generation.token_ids
    lengths = sorted({len(row) for row in rows})
    if len(rows) != settings.batch or lengths != [gen_len]:
        raise RuntimeError(f"asked for {settings.batch} x {gen_len} tokens, got {len(rows)} rows of {lengths}")
    return {
        "prefill_s": generation.prefill_s,
        "decode_s": generation.decode_s,
        "generated_tokens": sum(map(len, rows)),
        "first_tokens": [int(token) for token in rows[0][:FIRST_TOKENS]],
        "tokens_digest": sha256(np.array(rows, np.int64).tobytes()).hexdigest()[:16],
        **as_values(usage),
        **generation.counted,
    }


def _reason(error: Exception) -> tuple[str, str]:
    """(status, sentence) of what stopped an engine."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, EngineAbsent):
        return "absent", text
    if isinstance(error, EngineRefused):
        return "refused", text
    no_memory = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory")
    if isinstance(error, MemoryError) or any(words in text for words in no_memory):
        return "out_of_memory", f"an allocation failed: {text}"
    return "failed", f"{type(error).__name__}: {text}"


def _versions(engine: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in ENGINES[engine].packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@contextmanager
def _offload_folder(given: Path | None) -> Iterator[Path]:
    """The given folder, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    OFFLOAD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OFFLOAD) as folder:
        yield Path(folder)


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """Standard output for our lines alone: what libraries print goes to standard error."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(ours), "w", encoding="utf-8") as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
