"""Other engines, each in a process of its own: loaded once, told to generate, ended with everything it left.

    row = run_peer(PeerJob("ctranslate2", folder, batch=8, prompt_len=128, gen_len=32, dtype="int8"))
    rows = alternate([PeerJob("transformers", ...), PeerJob("flexgen_h2o", ...)], rounds=5)

Whatever happens to an engine is a row, see `rows.result_row`: that it refuses the job, runs out of memory, takes too
long or is not installed is a result like any other. Prompts are the same for all, greedy, and no token ends a row.
"""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench.drivers.common import ENGINES
from flexgen_h2o.bench.paths import OFFLOAD, ROOT
from flexgen_h2o.bench.rows import result_row

GRACE_S = 10.0  # for a process to end by itself before it is killed
PAUSE_S = 0.3  # OpenMP's threads go on spinning for up to 0.2 s after an engine's last product
ERRORS = "stderr.txt"
LIMITED = "the kernel killed"  # scripts/limit.sh says so when its memory limit was met


@dataclass(frozen=True)
class PeerJob:
    """What one engine is to do.

    Attributes:
        engine: a name of `drivers.common.ENGINES`.
        checkpoint: folder in Hugging Face format.
        batch, prompt_len, gen_len: rows, and tokens of each.
        dtype: float32, bfloat16, float16 or int8.
        threads: of compute.
        repeats: generations that run_peer measures, after a warm-up.
        offload_dir: where engines put files; each run has a folder of its own in it, removed at its end.
        memory_limit, disk_read_limit: bytes (per second), with K, M or G, as scripts/limit.sh takes them; the page
            cache counts, and the limited disk is that of offload_dir.
        timeout_s: seconds that loading, warm-up and all generations of this engine may take together.
        options: what this engine alone takes, such as {"hh_ratio": 0.1} for flexgen_h2o.
        device: where compute happens: cpu or cuda.
    """

    engine: str
    checkpoint: Path
    batch: int
    prompt_len: int
    gen_len: int
    dtype: str = "bfloat16"
    threads: int = os.cpu_count() or 1
    repeats: int = 1
    offload_dir: Path = OFFLOAD
    memory_limit: str | None = None
    disk_read_limit: str | None = None
    timeout_s: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def description(self) -> dict[str, Any]:
        """What a row says about the job."""
        left_out = ("offload_dir", "repeats")
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**values, "checkpoint": self.checkpoint.name, "options": dict(self.options)}


def run_peer(job: PeerJob, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Loads, warms up, generates `job.repeats` times and ends. Returns the row."""
    with PeerProcess(job, command) as peer:
        peer.start()
        for _ in range(job.repeats):
            peer.generate()
    return peer.row(job.repeats)


def alternate(
    jobs: Sequence[PeerJob],
    rounds: int,
    before: Callable[[], None] = lambda: None,
    after: Callable[[int, dict[str, Any] | None], None] = lambda index, event: None,
    together: bool = True,
) -> list[dict[str, Any]]:
    """Lets each engine generate once a round, so that all see the same state of the machine.

    An engine that stops is left out of later rounds. Returns a row for each job.

    Args:
        before: called before every generation.
        after: called after it, with the job's index and what the engine said of it and of itself; None if it stopped.
        together: all engines are loaded once and stay in memory; else each is loaded anew for every generation.
    """
    with ExitStack() as stack:
        peers = [stack.enter_context(PeerProcess(job)) for job in jobs]
        if together:
            for peer in peers:
                peer.start()
        for _ in range(rounds):
            for index, peer in enumerate(peers):
                if not together and not peer.has_stopped:
                    peer.start()
                if peer.is_running:
                    time.sleep(PAUSE_S)
                    before()
                    event = peer.generate()
                    after(index, None if event is None else {**peer.facts, **event})
                if not together:
                    peer.close()
    return [peer.row(rounds) for peer in peers]


class PeerProcess:
    """One engine's process: start(), generate() as often as wanted, close(), row(). None of them raises for the engine.

    Args:
        command: of the process, in place of this package's own driver.
    """

    def __init__(self, job: PeerJob, command: Sequence[str] | None = None):
        self.job = job
        self._command = driver_command(job) if command is None else list(command)
        self._left_s = job.timeout_s
        self._events: list[dict[str, Any]] = []
        self._stopped: tuple[str, str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._folder: Path | None = None
        self._kills_before = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What the engine said of itself when it was ready."""
        return next((dict(event) for event in reversed(self._events) if event["event"] == "ready"), {})

    @property
    def has_stopped(self) -> bool:
        """Whether it has ended by itself, or was ended for taking too long."""
        return self._stopped is not None or any(event["event"] == "end" for event in self._events)

    def start(self) -> bool:
        """Loads and warms up. Returns whether the engine is ready. Once closed, it may be started again."""
        self._left_s, self._lines = self.job.timeout_s, queue.Queue()
        environment = ENGINES[self.job.engine].environment if self.job.engine in ENGINES else None
        if environment is not None and not (ROOT / environment / "bin" / "python").exists():
            self._stopped = "absent", f"{environment} is not there: scripts/setup_peers.sh {self.job.engine} makes it"
            return False
        self.job.offload_dir.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.job.engine}-", dir=self.job.offload_dir))
        self._kills_before = _kernel_kills()
        with (self._folder / ERRORS).open("w") as errors:
            self._process = subprocess.Popen(
                [*_limits(self.job), *self._command, "--offload-dir", str(self._folder / "offload")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,  # a group of its own, which can be ended as a whole
            )
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        return self._next_event("loading") is not None

    def generate(self) -> dict[str, Any] | None:
        """One generation: times in seconds and usage, or None if the engine has stopped."""
        if self._process is None:
            return None
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: what it left to read tells why
            self._process.stdin.write("generate\n")
            self._process.stdin.flush()
        return self._next_event("generating")

    def close(self) -> None:
        """Ends the process with all that it started, and removes its files."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._end(GRACE_S)

    def row(self, repeats: int) -> dict[str, Any]:
        """The result so far, complete after `repeats` generations."""
        return result_row(self.job.description(), self._events, repeats, self._stopped)

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_event(self, doing: str) -> dict[str, Any] | None:
        """What the process says next. None, with the reason kept, if that is its end, or it ends, or takes too long."""
        started = time.monotonic()
        try:
            line = self._lines.get(timeout=max(self._left_s, 0.0))
        except queue.Empty:
            self._stopped = "timeout", f"ended after {self.job.timeout_s:g} s in all, while {doing}"
            self._end(0.0)
            return None
        self._left_s -= time.monotonic() - started
        if line is None:
            self._stopped = self._reason(doing)
            self._end(0.0)
            return None
        event = _parsed(line)
        self._events.append(event)
        if event["event"] != "end":
            return event
        self._end(GRACE_S)
        return None

    def _reason(self, doing: str) -> tuple[str, str]:
        """(status, sentence) of a process that ended without a word."""
        assert self._process is not None and self._folder is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.returncode
        text = (self._folder / ERRORS).read_text(encoding="utf-8", errors="replace")
        said = [line.strip() for line in text.splitlines() if line.strip()]
        if any(LIMITED in line for line in said[-3:]):
            return "out_of_memory", f"killed by the kernel within {self.job.memory_limit} while {doing}"
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL) and _kernel_kills() > self._kills_before:
            return "out_of_memory", f"killed by the kernel, which had no memory left, while {doing}"
        last = said[-1] if said else "nothing on standard error"
        return "failed", f"ended with code {code} while {doing}: {last}"

    def _end(self, grace_s: float) -> None:
        if self._process is not None:
            _end_group(self._process, grace_s)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _read(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    """Hands over what a process says, line by line, and None at its end."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def driver_command(job: PeerJob) -> list[str]:
    """The command that serves this job. Raises UsageError for an engine that there is not."""
    if job.engine not in ENGINES:
        raise UsageError(f"engine {job.engine!r} is unknown; known ones: {', '.join(ENGINES)}")
    environment = ENGINES[job.engine].environment
    python = sys.executable if environment is None else str(ROOT / environment / "bin" / "python")
    flags = {
        "--checkpoint": job.checkpoint.resolve(),
        "--batch": job.batch,
        "--prompt-len": job.prompt_len,
        "--gen-len": job.gen_len,
        "--dtype": job.dtype,
        "--threads": job.threads,
        "--device": job.device,
        "--options": json.dumps(dict(job.options)),
    }
    words = [str(word) for flag in flags.items() for word in flag]
    return [python, "-m", "flexgen_h2o.bench.drivers", job.engine, "--serve", *words]


def _parsed(line: str) -> dict[str, Any]:
    """An event; a failure in place of a line that is none."""
    try:
        event: dict[str, Any] = json.loads(line)
        event["event"]
    except (ValueError, KeyError, TypeError):
        return {"event": "end", "status": "failed", "sentence": f"answered {line.strip()[:80]!r}, which is no event"}
    return event


def _limits(job: PeerJob) -> list[str]:
    """The words in front of a command that give it a smaller machine."""
    if job.memory_limit is None and job.disk_read_limit is None:
        return []
    # A limit of the disk alone still names an amount of memory: all there is.
    memory = job.memory_limit or str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    disk = [] if job.disk_read_limit is None else ["--disk-read", job.disk_read_limit]
    return ["bash", str(ROOT / "scripts" / "limit.sh"), memory, *disk, "--"]


def _end_group(process: subprocess.Popen[str], grace_s: float) -> None:
    """Waits for the process to end, then asks its whole group to, then kills what is left of it."""
    for wait_s, signal_number in ((grace_s, signal.SIGTERM), (GRACE_S, signal.SIGKILL)):
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        # Also after the process itself has ended: its children may not have.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _kernel_kills() -> int:
    """How many processes the kernel has killed so far for want of memory; 0 where it does not count them."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
