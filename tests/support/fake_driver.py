"""An engine that computes nothing and behaves as its option `does` says. What it can do wrong, peers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.bench.drivers.common import EngineAbsent, EngineRefused, Generation, Loaded, Settings, StartAgain

MB = 2**20
FOREVER_S = 3600  # whoever waits for the end of it has not ended it


def load(settings: Settings) -> Loaded:
    options = settings.chosen(does="answer", when="loading")
    (settings.offload_dir / "weights.dat").write_bytes(b"0" * MB)
    print("a library says hello", flush=True)
    behave = BEHAVIOURS[options["does"]]
    calls = 0

    def generate(prompts: NDArray[np.int64], gen_len: int) -> Generation:
        nonlocal calls
        calls += 1
        print("and something to each batch", flush=True)
        if options["when"] == "generating" and calls > 1:  # the first call is the warm-up
            behave()
        rows = (prompts.sum(axis=1, keepdims=True) + np.arange(gen_len)) % settings.model_config()["vocab_size"]
        if options["does"] == "stop_early":
            rows = rows[:, :-1]
        return Generation(rows.tolist(), 0.25, 0.5)

    if options["when"] == "loading":
        behave()
    return Loaded(generate, {"process": os.getpid()})


def refuse() -> None:
    raise EngineRefused("fake cannot do that")


def lack() -> None:
    raise EngineAbsent("fake is not installed: pip install flexgen_h2o[bench]")


def fail_to_allocate() -> None:
    raise MemoryError("no room for 8 bytes")


def take_memory() -> None:
    held = bytearray(400 * MB)
    time.sleep(FOREVER_S)
    del held


def hang() -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
    time.sleep(FOREVER_S)


def crash() -> None:
    raise IndexError("list index out of range")


def exit_silently() -> None:
    print("about to go", file=sys.stderr, flush=True)
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_again() -> None:
    raise StartAgain({"does": "answer"})


BEHAVIOURS = {
    "answer": lambda: None,
    "stop_early": lambda: None,
    "refuse": refuse,
    "lack": lack,
    "fail_to_allocate": fail_to_allocate,
    "take_memory": take_memory,
    "hang": hang,
    "crash": crash,
    "exit_silently": exit_silently,
    "be_killed": be_killed,
    "start_again": start_again,
}
