"""A run without memory: nothing is computed, every byte is counted, and no time is made up."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import call
from support.helpers import GreedyTokens, TinyOpt, pad
from support.placed import BACKENDS, HOMES, ROUGH, Case, largest_lines, layout_of, opened, run_folders, small_block

from flexgen_h2o import run as run_command
from flexgen_h2o.engine import loop as engine_module
from flexgen_h2o.engine.assemble import Runtime
from flexgen_h2o.engine.chooser import NoChoice
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.transfer import LINKS
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import Percent, place_weights
from flexgen_h2o.plan.schedule import FetchWeights, LoadCache, LoadHidden, Operation, Step, Zigzag

Tiny = Callable[..., TinyOpt]
META = torch.device("meta")
HALF = 2  # bytes of a float16


# --- beside a real run ---


def dry(case: Case, gen_len: int = 0) -> Runtime:
    """The case on a device without memory; with a gen_len, every step of it is walked."""
    platform = Platform(META, {}, case.backend.joint, matrix_layout=layout_of(case.tiny))
    with Runtime(case.tiny.config, torch.float32, case.policy, platform) as runtime:
        runtime.load(case.tiny.source(), lambda nbytes: None)
        engine = runtime.engine(case.sizes)
        if gen_len:
            engine.walk(pad(case.prompts()), range(gen_len), NoChoice())
    return runtime


@pytest.mark.parametrize("backend", ["one_memory", "threads", "inline_at_home"])
@pytest.mark.parametrize("percent", [*HOMES.values(), ROUGH], ids=str)
def test_a_dry_run_counts_what_a_real_run_holds_and_moves(
    tiny: Tiny, tmp_path: Path, percent: Percent, backend: str
) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), percent, True, BACKENDS[backend])
    with opened(case, tmp_path) as real:
        real.engine(case.sizes).run(pad(case.prompts()), 4, GreedyTokens(5))
    walked = dry(case, 4)
    assert largest_lines(walked.ledger) == largest_lines(real.ledger)
    assert {link: walked.transfer.moved[link] for link in LINKS} == {link: real.transfer.moved[link] for link in LINKS}
    for tier in ("gpu", "cpu", "disk"):
        own = [runtime.ledger.accounts[tier].largest.get(Line.BASELINE, 0) for runtime in (walked, real)]  # type: ignore[index]
        assert walked.ledger.peak(tier) - own[0] == real.ledger.peak(tier) - own[1]  # type: ignore[arg-type]


def test_a_few_steps_stand_for_all(tiny: Tiny) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), ROUGH, True, BACKENDS["threads"])
    platform = Platform(META, {}, False, matrix_layout=layout_of(case.tiny))
    with Runtime(case.tiny.config, torch.float32, case.policy, platform) as runtime:
        runtime.load(case.tiny.source(), lambda nbytes: None)
        times = runtime.engine(case.sizes).walk(pad(case.prompts()), [0, 1, 2, 40], NoChoice())
    assert len(times.step_s) == 3
    assert largest_lines(runtime.ledger) == largest_lines(dry(case, 4).ledger)


def test_a_dry_run_touches_no_file(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "weights"))
    finished = call(
        run_command,
        [
            *("--device", "meta", "--model", str(tiny().folder), "--percent", *"0 0 0 0 0 0".split(), "--gen-len", "4"),
            *("--prompt-len", "9", "--offload-dir", str(tmp_path / "offload"), "--json"),
        ],
    )
    assert finished.code == 0, finished.err
    assert list(tmp_path.iterdir()) == [] and run_folders(tmp_path / "offload") == []


# --- what is not where it is used ---


def forget(monkeypatch: pytest.MonkeyPatch, is_forgotten: Callable[[Operation], bool]) -> None:
    """Makes the engine's schedule leave operations out."""

    class Forgetful(Zigzag):
        def walk(self, step: Step) -> Iterator[Operation]:
            yield from (operation for operation in Zigzag.walk(self, step) if not is_forgotten(operation))

    monkeypatch.setattr(engine_module, "Zigzag", Forgetful)


@pytest.mark.parametrize("left_out", [FetchWeights, LoadCache, LoadHidden])
def test_a_schedule_that_forgets_to_load_something_fails_the_dry_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, left_out: type
) -> None:
    forget(monkeypatch, lambda operation: isinstance(operation, left_out))
    case = Case(tiny(), small_block(), H2O(3, 4), Percent(0, 100, 0, 100, 0, 100), True, BACKENDS["threads"])
    with pytest.raises((RuntimeError, KeyError)):
        dry(case, 3)


def test_a_schedule_that_forgets_one_page_fails_the_dry_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read buffer then holds another page of the same shape: nothing else would be wrong with it."""
    forget(monkeypatch, lambda operation: operation == FetchWeights(2))
    case = Case(tiny(), small_block(), H2O(3, 4), Percent(0, 100), False, BACKENDS["threads"])
    with pytest.raises(RuntimeError):
        dry(case, 2)


# --- the command ---


def command(model: str, percent: str, *more: str) -> list[str]:
    return ["--device", "meta", "--model", model, "--percent", *percent.split(), "--json", *more]


def weights_by_hand(config: ModelShape, percent: Percent, itemsize: int = HALF) -> dict[str, int]:
    found = {"gpu": 0, "cpu": 0, "disk": 0}
    homes = place_weights(config, percent.weights)
    for name, shape in config.shapes().items():
        found[homes[name]] += itemsize * math.prod(shape)
    return found


def parameters(layers: int, hidden: int) -> int:
    """Of a published size: 12 h^2 + 13 h per layer, the two embeddings and the last norm."""
    return layers * (12 * hidden**2 + 13 * hidden) + (50272 + 2050) * hidden + 2 * hidden


def assert_measures_nothing(report: dict[str, Any]) -> None:
    assert report["measured"] is False and report["device"] == "meta"
    for key in ("load_s", "prefill_s", "decode_s", "total_s", "throughput_tok_s", "decode_tok_s"):
        assert report[key] is None, key
    for phase in report["phases"].values():
        assert phase["seconds"] is None and not any((phase["busy_s"] or {}).values())
    assert report["num_prompts"] == report["generated_tokens"] == 0


def assert_counts_by_hand(report: dict[str, Any], model: str, percent: Percent, rows: int, slots: int) -> None:
    """Weights and KV of a float16 run, counted from the sizes of table 1 of the OPT paper."""
    config, memory = published(model), report["memory"]
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    assert memory["weights_bytes"] == HALF * parameters(layers, hidden)
    by_tier = weights_by_hand(config, percent)
    assert {tier: memory["ledger"][tier].get("weights", 0) for tier in by_tier} == by_tier
    keys_and_values = layers * rows * slots * hidden * 2 * HALF
    assert memory["kv_cache_bytes"] == keys_and_values
    kv = sum(memory["ledger"][tier].get("KV cache", 0) for tier in by_tier)
    state = layers * rows * heads * (slots * 8 + 4)
    units = layers * -(-rows // report["policy"]["gpu_batch_size"])
    assert keys_and_values + state <= kv <= keys_and_values + state + 4096 * units  # whole pages on disk
    assert memory["ledger_peak_bytes"]["gpu"] == memory["gpu_peak_bytes"] > 0


def test_the_command_counts_and_measures_nothing(tmp_path: Path) -> None:
    percent = Percent(20, 50, 30, 30, 0, 100)
    argv = command("opt-1.3b", str(percent), "--prompt-len", "100", "--gen-len", "20", "--gpu-batch-size", "4")
    sizes = ["--num-gpu-batches", "3", "--hh-size", "10", "--recent-size", "14", "--dtype", "float16"]
    finished = call(run_command, [*argv, *sizes])
    assert finished.code == 0, finished.err
    assert_measures_nothing(finished.report)
    assert_counts_by_hand(finished.report, "opt-1.3b", percent, 12, 24)
    full = 24 * 12 * 120 * 2048 * 2 * HALF
    assert finished.report["memory"]["full_kv_cache_bytes"] == full
    for got, asked in zip(finished.report["achieved_percent"], percent.values, strict=True):
        assert got == pytest.approx(asked, abs=8)


def test_the_report_for_people_names_no_time_and_no_speed() -> None:
    argv = [word for word in command("opt-125m", "100 0 100 0 100 0", "--prompt-len", "16") if word != "--json"]
    finished = call(run_command, argv)
    assert finished.code == 0, finished.err
    assert "tok/s" not in finished.out and "measured:" not in finished.out, finished.out


def test_a_dry_run_is_bound_by_the_budgets_that_are_given_alone() -> None:
    argv = command("opt-66b", "100 0 100 0 100 0", "--prompt-len", "16", "--gen-len", "2", "--gpu-batch-size", "1")
    assert call(run_command, argv).code == 0  # whatever this machine has
    refused = call(run_command, [*argv, "--gpu-mem", "100"])
    assert refused.code == 2 and "100.00 GB" in refused.problems[0]


def test_what_means_nothing_in_a_dry_run_is_named_and_not_done(tmp_path: Path) -> None:
    """A job's own command may be tried first, whatever is left of an earlier run."""
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    output = tmp_path / "out.jsonl"
    output.write_text("of an earlier run\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    idle = {"--output": output, "--metrics": tmp_path / "run.prom", "--trace": tmp_path / "trace.json"}
    argv = [word for flag, path in idle.items() for word in (flag, str(path))]
    argv += [*"--restart --strict --checkpoint-minutes 1".split(), "--input", str(tmp_path / "in.jsonl")]
    finished = call(run_command, [*argv, "--device", "meta", "--json"])
    assert finished.code == 0, finished.err
    notes = [line for line in finished.err.splitlines() if "means nothing in a dry run" in line]
    assert len(notes) == len(idle) + 3
    assert output.read_text() == "of an earlier run\n" and sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dry_run_is_of_no_machine_unless_one_is_named(dtype: str) -> None:
    argv = ["--device", "meta", "--dtype", dtype, "--prompt-len", "16", "--gen-len", "4", "--json"]
    percent = ["--percent", *"100 0 100 0 100 0".split()]
    assert call(run_command, [*argv, *percent]).report["predicted"] is None
    named = call(run_command, [*argv, *percent, "--hardware", "amd-epyc-2-cores"]).report
    assert named["predicted"]["kind"] == "projection"


def test_a_dry_run_refuses_what_a_run_refuses() -> None:
    for more in (["--prompt-len", "2048"], ["--percent", *"60 60 0 0 0 0".split()], ["--gen-len", "0"]):
        assert call(run_command, [*command("opt-125m", "100 0 100 0 100 0"), *more]).code == 2, more


@pytest.mark.slow
def test_opt_175b_on_a_16_gb_card(tmp_path: Path) -> None:
    percent = Percent(0, 50, 0, 0, 0, 100)
    argv = [
        *command("opt-175b", str(percent), "--gpu-mem", "15", "--cpu-mem", "204", "--disk-mem", "1500"),
        *("--gpu-batch-size", "32", "--num-gpu-batches", "8", "--offload-dir", str(tmp_path / "offload")),
    ]
    finished = subprocess.run(
        [sys.executable, "-m", "flexgen_h2o.run", *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert_measures_nothing(report)
    prompt_and_generated = 512 + 32
    assert report["eviction"]["heavy_slots"] == report["eviction"]["recent_slots"] == prompt_and_generated // 10
    assert_counts_by_hand(report, "opt-175b", percent, 256, 2 * (prompt_and_generated // 10))
    for tier, budget in (("gpu", 15), ("cpu", 204), ("disk", 1500)):
        assert report["memory"]["ledger_peak_bytes"][tier] <= budget * 2**30
    assert list(tmp_path.iterdir()) == []
