"""Memory: what there is, what a run is predicted to need, and what it then takes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace

import psutil
import pytest
from support.commands import environment, ids_file, refused, run

from flexgen_h2o.machine import limits as machine_module
from flexgen_h2o.machine.limits import peak_resident_bytes, usable_memory

OWN = 100  # bytes that the process holds, in what follows
OF_FILES = 30  # and of files that it has mapped: they count among those that are left already


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """machine(membership, files) -> what is usable on a machine with 10,000 bytes free and these cgroup files."""

    def usable(membership: str, files: dict[str, str]) -> int:
        root = tmp_path / "cgroup"
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        monkeypatch.setattr(machine_module, "CGROUP_ROOT", root)
        return usable_memory()

    def path(name: str) -> Path:
        return tmp_path / "membership" if name == "/proc/self/cgroup" else Path(name)

    own = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=OWN + OF_FILES, shared=OF_FILES))
    monkeypatch.setattr(machine_module, "Path", path)
    monkeypatch.setattr(machine_module.psutil, "Process", lambda: own)
    monkeypatch.setattr(machine_module.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    return usable


V1 = "12:cpu,cpuacct:/other\n5:memory:/box\n1:name=systemd:/box\n"


@pytest.mark.parametrize(
    ("membership", "files", "free"),
    [
        pytest.param("", {}, 10_000, id="no cgroup"),
        pytest.param("0::/box\n", {}, 10_000, id="v2 without files"),
        pytest.param("0::/box\n", {"box/memory.max": "3000\n", "box/memory.current": "1200\n"}, 1800, id="v2"),
        pytest.param("0::/box\n", {"box/memory.max": "max\n", "box/memory.current": "12\n"}, 10_000, id="v2, no limit"),
        pytest.param("0::/\n", {"memory.max": "2500\n", "memory.current": "500\n"}, 2000, id="v2, own root"),
        pytest.param(
            "0::/a/b\n",
            {
                "a/b/memory.max": "max\n",
                "a/b/memory.current": "700\n",
                "a/memory.max": "4000\n",
                "a/memory.current": "900\n",
            },
            3100,
            id="v2, limit of a parent",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/b/memory.max": "2000\n",
                "a/b/memory.current": "700\n",
                "a/memory.max": "4000\n",
                "a/memory.current": "3500\n",
            },
            500,
            id="v2, the tightest counts",
        ),
        pytest.param(
            "0::/box\n",
            {
                "box/memory.max": "3000\n",
                "box/memory.current": "2900\n",
                "box/memory.stat": "anon 100\ninactive_file 2000\nactive_file 700\n",
            },
            2100,
            id="v2, page cache gives way",
        ),
        pytest.param(
            V1, {"memory/box/memory.limit_in_bytes": "6000", "memory/box/memory.usage_in_bytes": "1000"}, 5000, id="v1"
        ),
        pytest.param(
            V1,
            {"memory/memory.limit_in_bytes": "6000", "memory/memory.usage_in_bytes": "1000"},
            5000,
            id="v1 in a container, whose own path is not there",
        ),
        pytest.param(
            V1,
            {"memory/box/memory.limit_in_bytes": "9223372036854771712", "memory/box/memory.usage_in_bytes": "1000"},
            10_000,
            id="v1, no limit",
        ),
        pytest.param(
            V1,
            {
                "memory/box/memory.limit_in_bytes": "6000",
                "memory/box/memory.usage_in_bytes": "5000",
                "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 400\n",
            },
            1400,
            id="v1, page cache of the children too",
        ),
        pytest.param(
            "5:memory:/box\n0::/box\n",
            {"memory/box/memory.limit_in_bytes": "6000", "memory/box/memory.usage_in_bytes": "1000"},
            5000,
            id="both versions mounted",
        ),
    ],
)
def test_usable_memory_is_what_the_tightest_limit_leaves(
    machine: Callable[..., int], membership: str, files: dict[str, str], free: int
) -> None:
    assert machine(membership, files) == free + OWN


def test_usable_memory_of_this_machine_is_believable() -> None:
    assert psutil.Process().memory_info().rss < usable_memory() <= psutil.virtual_memory().total


def test_the_peak_outlasts_what_was_freed() -> None:
    size = 256 * 2**20
    before = psutil.Process().memory_info().rss
    block = bytearray(size)
    del block
    assert psutil.Process().memory_info().rss < before + size / 2
    assert peak_resident_bytes() > before + 0.95 * size


# --- predictions ---

MEASURE = """
import sys
import torch
from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.engine.requests import random_requests
from flexgen_h2o.machine.limits import peak_resident_bytes

model, rows, prompt_len, eviction = sys.argv[1] or None, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
llm = LLM(model, eviction=eviction, dtype="float32", dummy_weights=True, gpu_batch_size=rows)
params = SamplingParams(max_new_tokens=4, ignore_eos=True)
prompts = random_requests(llm.config.vocab_size, prompt_len, rows, 0)
llm.generate([list(request.prompt_ids) for request in prompts], params)
print(llm.ledger().peak("cpu"), peak_resident_bytes())
"""


def predicted_and_measured(*case: str) -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, *case]
    child = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    predicted, measured = map(int, child.stdout.split())
    return predicted, measured


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("opt-125m", "8", "128", "h2o"), id="mostly weights"),
        pytest.param(("", "96", "200", "full"), id="mostly cache and working space"),
    ],
)
def test_the_predicted_peak_is_that_which_is_measured(case: tuple[str, ...]) -> None:
    predicted, measured = predicted_and_measured(*case)
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [("opt-125m", "1", "2000", "full"), ("opt-125m", "64", "64", "full"), ("opt-350m", "16", "128", "h2o")]
)
def test_the_predicted_peak_holds_for_other_shapes(case: tuple[str, ...]) -> None:
    predicted, measured = predicted_and_measured(*case)
    assert predicted == pytest.approx(measured, rel=0.15)


# --- refusals ---


class Loading(Exception):
    """The plan was accepted and loading has begun."""


@pytest.fixture
def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise Loading

    monkeypatch.setattr("flexgen_h2o.llm.dummy_source", load)
    # The process' own size grows between two runs in one process, which would blur the comparison of their plans.
    monkeypatch.setattr("flexgen_h2o.llm.process_baseline", lambda dtype: 2**28)


TOO_LARGE = (
    "--model opt-125m --dummy-weights --dtype float32 --prompt-len 300 --gen-len 8 --eviction full --cpu-mem 1.2"
)
IN_MEMORY = "--percent 100 0 100 0 100 0".split()


@pytest.mark.parametrize("sizes", ["1 64", "8 8", "3 20"])
def test_too_little_memory_is_refused_before_loading_with_a_placement_that_fits(sizes: str, never_load: None) -> None:
    rows, count = sizes.split()
    blocks = ("--gpu-batch-size", rows, "--num-gpu-batches", count)
    (problem,) = refused(*TOO_LARGE.split(), *blocks, *IN_MEMORY)
    assert "opt-125m with --percent 100 0 100 0 100 0 needs " in problem and "1.20 GB can be used" in problem
    advice = re.search(r"--percent ([\d .]+) would fit", problem).group(1).split()
    assert len(advice) == 6
    with pytest.raises(Loading):
        run(*TOO_LARGE.split(), *blocks, "--percent", *advice)


def test_where_no_placement_fits_a_block_is_named_that_does(never_load: None) -> None:
    argv = [*TOO_LARGE.split(), *IN_MEMORY, "--disk-mem", "0", "--gpu-batch-size", "64"]
    (problem,) = refused(*argv)
    advice = problem.split("(")[-1].split(")")[0].split()
    assert advice[::2] == ["--gpu-batch-size", "--num-gpu-batches"]
    with pytest.raises(Loading):
        run(*argv, *advice)


def test_a_model_of_which_not_one_row_fits_is_refused_with_other_ways_out(never_load: None) -> None:
    argv = "--model opt-175b --dummy-weights --cpu-mem 3 --gpu-mem 1 --disk-mem 0".split()
    (problem,) = refused(*argv, *IN_MEMORY)
    assert "opt-175b with" in problem and "needs 3" in problem
    assert "4.00 GB can be used" in problem and "smaller model" in problem


def test_a_block_is_charged_for_the_prompts_there_are(tmp_path: Path, never_load: None) -> None:
    """A file of two prompts fits, however large the block might be."""
    with pytest.raises(Loading):
        run(*TOO_LARGE.split(), "--gpu-batch-size", "1000", "--input", ids_file(tmp_path, 3, 3))


def test_a_refusal_does_not_take_the_square_of_the_block(never_load: None) -> None:
    """Twice the sub-batches take twice as many calls more, not four times as many."""

    def calls(sub_batches: int) -> int:
        argv = f"--model opt-125m --dummy-weights --gpu-batch-size 1 --num-gpu-batches {sub_batches} --prompt-len 4"
        made = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            refused(*argv.split(), "--cpu-mem", "0.3", *IN_MEMORY)
        finally:
            sys.setprofile(before)
        return made

    few, twice, four_times = (calls(sub_batches) for sub_batches in (40, 80, 160))
    assert few < twice and four_times - twice < 3 * (twice - few)
