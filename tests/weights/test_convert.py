"""Weights that are written once: whole, resumed after an interruption, and found by the runs that follow."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Finished, call, environment
from support.helpers import TinyOpt, dense

from flexgen_h2o import LLM, convert
from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.memory import run_folder as disk
from flexgen_h2o.plan.model_shape import full_name
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.schedule import OUTER
from flexgen_h2o.weights.files import WeightFolder

Tiny = Callable[..., TinyOpt]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are kept."""
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "weights"))
    return tmp_path / "weights"


def converted(*argv: str) -> dict[str, Any]:
    finished = call(convert, [*argv, "--json"])
    assert finished.code == 0, finished
    return json.loads(finished.out)


def refused(*argv: str) -> list[str]:
    finished = call(convert, argv)
    assert finished.code == 2 and finished.out == "", finished
    return finished.problems


def parameters(llm: LLM) -> dict[str, torch.Tensor]:
    """All parameters as compute gets them."""
    weights = llm.load().weights
    found = {}
    for page in range(OUTER, llm.config.num_hidden_layers):
        weights.fetch(page)
        found |= {full_name(page, name): t.clone() for name, t in dense(weights.page(page)).items()}
        weights.release(page)
    return found


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parameters that runs read from the checkpoint from now on."""
    asked: list[str] = []

    def source(checkpoint: Any) -> Callable[[Sequence[str]], Any]:
        return lambda names: asked.extend(names) or checkpoint.tensors(frozenset(names))

    monkeypatch.setattr("flexgen_h2o.models.checkpoint.Checkpoint.source", source)
    return asked


@pytest.mark.parametrize("compress", ["false", "true"])
@pytest.mark.parametrize("variant", ["pre_norm", "post_norm_projected", "untied"])
def test_what_was_converted_is_what_runs_use(
    tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch, variant: str, compress: str
) -> None:
    tiny_opt = tiny(variant)
    model = ["--model", str(tiny_opt.folder), "--dtype", "float32", "--compress-weight", compress]
    report = converted(*model)
    names = set(tiny_opt.config.shapes())
    assert report["written"] == report["parameters"] == len(names)
    assert Path(report["folder"]).parent == cache
    asked = recorded(monkeypatch)
    expected = tiny_opt.weights.flat()
    for percent in ("100 0", "0 0", "50 25"):
        gpu, cpu = map(int, percent.split())
        policy = {"percent": Percent(gpu, cpu), "compress_weight": compress == "true"}
        with LLM(str(tiny_opt.folder), dtype="float32", device="cpu", **policy) as llm:
            found = parameters(llm)
        assert asked == [] and found.keys() == names
        for name, tensor in expected.items():
            is_4_bit = compress == "true" and tensor.dim() == 2
            kept = quant.decode(quant.encode_weight(tensor), tensor.shape[1], tensor.dtype) if is_4_bit else tensor
            assert torch.equal(found[name], kept), name
    assert converted(*model)["written"] == 0


def test_a_run_without_compression_takes_nothing_of_it(
    tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny().folder)
    converted("--model", folder, "--dtype", "float32", "--compress-weight")
    asked = recorded(monkeypatch)
    for dtype, compress, expected in (("float32", False, True), ("bfloat16", True, True), ("float32", True, False)):
        asked.clear()
        with LLM(folder, dtype=dtype, device="cpu", compress_weight=compress) as llm:
            llm.load()
        assert bool(asked) == expected


@pytest.mark.parametrize("done", [0, 1, 17])
def test_an_interrupted_conversion_goes_on(tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    model = ["--model", str(tiny().folder), "--dtype", "float32", "--compress-weight"]
    write, written = WeightFolder.write, []

    def stopped(self: WeightFolder, name: str, *rest: Any) -> None:
        if len(written) == done:
            raise KeyboardInterrupt
        written.append(name)
        write(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(WeightFolder, "write", stopped)
        interrupted = call(convert, model)
    assert interrupted.code == 130 and interrupted.err == "interrupted\n"
    report = converted(*model)
    assert report["written"] == report["parameters"] - done
    assert converted(*model)["written"] == 0


KILLED = """
import os, signal, sys
from flexgen_h2o import convert
from flexgen_h2o.basics import folders
from flexgen_h2o.weights import files as weight_files
folders.CACHE = sys.argv[1]
write_direct, count = weight_files.write_direct, 0

def killing(extent, source):
    global count
    count += 1
    if count == 9:
        os.kill(os.getpid(), signal.SIGKILL)  # after the file has grown, before its bytes are there
    return write_direct(extent, source)

weight_files.write_direct = killing
convert.main(sys.argv[2:])
"""


def test_a_killed_conversion_goes_on(tiny: Tiny, cache: Path) -> None:
    model = ["--model", str(tiny().folder), "--dtype", "float32", "--compress-weight"]
    child = [sys.executable, "-c", KILLED, str(cache), *model]
    assert subprocess.run(child, env=environment(), check=False).returncode == -signal.SIGKILL
    report = converted(*model)
    assert report["written"] == report["parameters"] - 8


def test_what_was_damaged_is_written_again(tiny: Tiny, cache: Path) -> None:
    model = ["--model", str(tiny().folder), "--compress-weight"]
    folder = Path(converted(*model)["folder"])
    with (folder / "layer-0.bin").open("r+b") as file:
        file.write(bytes([file.read(1)[0] ^ 1]) if file.seek(0) else b"\x01\x02\x03")
    assert converted(*model)["written"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_those_of_the_formula(cache: Path, dtype: str) -> None:
    """Of the demo model, whose sizes are whole groups and strips, but for the position table's 514 rows."""
    report = converted("--compress-weight", "--dtype", dtype)
    itemsize = 2 if dtype == "bfloat16" else 4
    hidden, ffn, layers, vocabulary, positions = 256, 1024, 4, 4096, 514
    two_dimensional = layers * (4 * hidden * hidden + 2 * hidden * ffn) + (vocabulary + positions) * hidden
    vectors = layers * (9 * hidden + ffn) + 2 * hidden
    bits = 4 + 32 / 64
    assert report["asked_bytes"] == two_dimensional * bits / 8 + vectors * itemsize
    assert report["achieved_bytes"] == pytest.approx(report["asked_bytes"], rel=0.01)
    assert report["achieved_bytes"] <= report["disk_bytes"] < report["achieved_bytes"] + 68 * 4096
    plain = converted("--dtype", dtype)
    assert plain["asked_bytes"] == (two_dimensional + vectors) * itemsize
    assert plain["achieved_bytes"] >= plain["asked_bytes"] and plain["folder"] != report["folder"]
    files = sum(path.stat().st_size for path in Path(report["folder"]).glob("*.bin"))
    assert files == pytest.approx(report["disk_bytes"], abs=4096 * 8)


def test_dummy_weights_are_those_of_their_seed(cache: Path) -> None:
    reports = [converted("--dummy-weights", "--seed", seed) for seed in ("0", "1", "0")]
    assert [report["written"] > 0 for report in reports] == [True, True, False]
    assert reports[0]["folder"] == reports[2]["folder"] != reports[1]["folder"]


def test_the_summary_says_where_and_how_much(tiny: Tiny, cache: Path) -> None:
    finished: Finished = call(convert, ["--model", str(tiny().folder), "--compress-weight"])
    assert finished.code == 0 and finished.err == ""
    assert str(cache) in finished.out and "asked" in finished.out and "achieved" in finished.out


def test_every_mistake_is_named_at_once(cache: Path) -> None:
    problems = refused(
        "--device", "tpu", "--dtype", "int8", "--seed", "-1", "--compress-weight", "maybe", "--model", "x"
    )
    assert len(problems) == 5
    for word in ("tpu", "int8", "-1", "maybe", "x"):
        assert any(word in problem for problem in problems)
    assert not cache.exists()


def test_a_full_disk_is_refused_before_anything_is_written(
    tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda path: 4096)
    (problem,) = refused("--model", str(tiny().folder))
    assert "weights needs" in problem and str(cache) in problem
    assert not cache.exists()
