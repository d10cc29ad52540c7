"""The ledger counts every byte while it is held, gives all of them back, and agrees with what the process holds."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import PEAKED, Block, GreedyTokens, TinyOpt, pad
from support.placed import (
    BACKENDS,
    CPU,
    HOMES,
    ON_DISK,
    ROUGH,
    Case,
    assert_all_given_back,
    largest_lines,
    layout_of,
    opened,
    run_folders,
    small_block,
    transfer_threads,
)

from flexgen_h2o.basics.memory_sizes import GB, whole_pages
from flexgen_h2o.engine import assemble as runtime_module
from flexgen_h2o.engine.assemble import RunSizes, Runtime, predict, workspace_bytes
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory import run_folder as disk
from flexgen_h2o.memory.run_folder import RunFolder
from flexgen_h2o.memory.tiers import BudgetError, Ledger, Stored, Tiers
from flexgen_h2o.plan.model_shape import ParameterShape
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import Percent, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.weights.files import WeightFolder
from flexgen_h2o.weights.store import storage_of, weight_bytes

Tiny = Callable[..., TinyOpt]
ITEMSIZE = 4


# --- the ledger ---


def test_the_ledger_by_hand() -> None:
    ledger = Ledger({"cpu": 100}, joint=False)
    ledger.charge("cpu", "a", 30)
    ledger.charge("cpu", "b", 50)
    ledger.charge("cpu", "a", 20)
    ledger.charge("gpu", "a", 1000)  # no budget, no limit
    account = ledger.accounts["cpu"]
    assert account.entries == {"a": 50, "b": 50} and account.in_use == account.peak == 100
    ledger.release("cpu", "b", 50)
    ledger.charge("cpu", "b", 20)
    assert account.entries == {"a": 50, "b": 20} and account.largest == {"a": 50, "b": 50}
    assert (ledger.peak("cpu"), ledger.peak("gpu"), ledger.peak("disk")) == (100, 1000, 0)
    ledger.release("cpu", "a", 50)
    ledger.release("cpu", "b", 20)
    assert account.entries == {} and account.in_use == 0 and account.peak == 100


def test_what_exceeds_a_budget_is_refused_and_not_counted() -> None:
    ledger = Ledger({"cpu": 3 * GB}, joint=False)
    ledger.charge("cpu", "weights", 2 * GB)
    with pytest.raises(BudgetError) as caught:
        ledger.charge("cpu", "KV cache", GB + 1)
    for part in ("KV cache", "1.00 GB", "cpu", "2.00 GB", "3.00 GB", "weights"):
        assert part in str(caught.value)
    assert ledger.accounts["cpu"].in_use == ledger.peak("cpu") == 2 * GB
    ledger.charge("cpu", "KV cache", GB)  # to the last byte


def test_memory_that_cannot_be_pinned_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: int) -> int:
            raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    tiers = Tiers(torch.device("cuda"), Ledger({}, joint=False))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    stored = tiers.allocate("cpu", "KV", (5000,), torch.uint8, "KV cache", pin=True)
    assert stored.tensor is not None and stored.tensor.nbytes == 5000
    assert tiers.refusal is not None and tiers.refusal.endswith("cannot be pinned: CUDA error: out of memory")
    tiers.release(stored, "KV cache")  # and nothing is unpinned


def test_a_joint_budget_is_shared_by_gpu_and_cpu() -> None:
    ledger = Ledger({"cpu": 100, "gpu": 5}, joint=True)
    ledger.charge("gpu", "a", 60)
    ledger.charge("cpu", "a", 40)
    assert ledger.account("gpu") is ledger.account("cpu") and ledger.peak("cpu") == 100 and ledger.peak("gpu") == 0
    for tier in ("gpu", "cpu"):
        with pytest.raises(BudgetError):
            ledger.charge(tier, "b", 1)  # type: ignore[arg-type]
    ledger.charge("disk", "b", 10**12)
    ledger.release("gpu", "a", 60)
    assert ledger.accounts["cpu"].in_use == 40


def test_separate_budgets_are_separate() -> None:
    ledger = Ledger({"cpu": 100, "gpu": 5, "disk": 7}, joint=False)
    for tier, most in (("cpu", 100), ("gpu", 5), ("disk", 7)):
        ledger.charge(tier, "a", most)  # type: ignore[arg-type]
        with pytest.raises(BudgetError, match=f"on {tier}"):
            ledger.charge(tier, "a", 1)  # type: ignore[arg-type]


def test_what_is_held_is_given_back_whatever_happens() -> None:
    ledger = Ledger({}, joint=True)
    with pytest.raises(ZeroDivisionError), ledger.held("gpu", "a", 10):
        assert ledger.accounts["cpu"].in_use == 10
        raise ZeroDivisionError
    assert ledger.accounts["cpu"].in_use == 0


# --- tensors at home ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_that_lives_elsewhere_cannot_be_used(device: str) -> None:
    tiers = Tiers(torch.device(device), Ledger({}, joint=False))
    assert tiers.reachable == {"gpu"}
    here = tiers.allocate("gpu", "near", (2, 3), torch.float32, "x")
    assert here.resident(tiers.reachable).shape == (2, 3)
    there = tiers.allocate("cpu", "far", (2, 3), torch.float32, "x")
    with pytest.raises(RuntimeError, match="far lives on cpu"):
        there.resident(tiers.reachable)
    with pytest.raises(RuntimeError, match="lives on disk"):
        Stored("file", "disk", (2, 3), torch.float32).resident(frozenset(("gpu", "cpu", "disk")))


def test_where_gpu_and_cpu_are_one_compute_reaches_both() -> None:
    tiers = Tiers(CPU, Ledger({}, joint=True))
    for tier in ("gpu", "cpu"):
        tiers.allocate(tier, "x", (2,), torch.float32, "x").resident(tiers.reachable)  # type: ignore[arg-type]


def test_allocations_are_counted_by_tier_and_line() -> None:
    tiers = Tiers(CPU, Ledger({}, joint=False))
    stored = tiers.allocate("cpu", "x", (3, 5), torch.bfloat16, "line")
    assert stored.nbytes == tiers.ledger.accounts["cpu"].entries["line"] == 30
    tiers.release(stored, "line")
    assert tiers.ledger.accounts["cpu"].in_use == 0


def test_an_allocation_that_fails_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(CPU, Ledger({}, joint=False))

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        tiers.allocate("cpu", "x", (3, 5), torch.float32, "line")
    assert tiers.ledger.accounts["cpu"].in_use == 0


# --- a page that is not there ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_were_not_fetched_cannot_be_used(tiny: Tiny, tmp_path: Path, device: str) -> None:
    """A read buffer holds the page before: used for another, it would be a silent wrong answer."""
    policy = Policy(percent=Percent(0, 100), overlap=False)
    with Runtime(tiny().config, torch.float32, policy, Platform(torch.device(device), {}, False)) as runtime:
        runtime.load(tiny().source(), lambda nbytes: None)
        runtime.weights.fetch(0)
        runtime.weights.page(0)
        with pytest.raises(RuntimeError):
            runtime.weights.page(1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kv_that_was_not_loaded_cannot_be_used(tiny: Tiny, device: str) -> None:
    policy = Policy(2, 2, percent=Percent(100, 0, 0, 100, 100, 0))
    with Runtime(tiny().config, torch.float32, policy, Platform(torch.device(device), {}, False)) as runtime:
        runtime.load(tiny().source(), lambda nbytes: None)
        engine = runtime.engine(RunSizes(H2O(2, 2), 4, 8))
        with pytest.raises((RuntimeError, KeyError)):
            engine.kv.buffer(0, 0)


@pytest.mark.parametrize("hidden", [(0, 100), (0, 0)], ids=["cpu", "disk"])
def test_hidden_states_that_were_not_loaded_cannot_be_used(tiny: Tiny, hidden: tuple[int, int]) -> None:
    policy = Policy(2, 2, percent=Percent(100, 0, 100, 0, *hidden))
    with Runtime(tiny().config, torch.float32, policy, Platform(torch.device("meta"), {}, False)) as runtime:
        runtime.load(tiny().source(), lambda nbytes: None)
        store = runtime.engine(RunSizes(H2O(2, 2), 4, 8)).hidden
        store.put(0, torch.empty(2, 8, 32, device="meta"))
        store.store(0)
        with pytest.raises(RuntimeError, match="not on the device"):
            store.get(0)
        store.load(0)
        assert store.get(0).shape == (2, 8, 32)


# --- what a run holds, by hand ---

BLOCK = Block(Policy(2, 2, 4), (8, 5, 3, 2))
RULE = H2O(3, 4)


def held(tiny_opt: TinyOpt, percent: Percent, folder: Path, overlap: bool = True) -> dict[str, Any]:
    case = Case(tiny_opt, BLOCK, RULE, percent, overlap, BACKENDS["threads"])
    with opened(case, folder) as runtime:
        runtime.engine(case.sizes).run(pad(case.prompts()), 4, GreedyTokens(4))
    assert_all_given_back(runtime, folder)
    lines = largest_lines(runtime.ledger)
    return {tier: {name: size for name, size in held.items() if name != "temporaries"} for tier, held in lines.items()}


def unit_bytes(tiny_opt: TinyOpt) -> int:
    """Keys, values, scores and columns of two rows in one layer."""
    config = tiny_opt.config
    return 2 * config.num_attention_heads * (RULE.slots * (2 * config.head_dim * ITEMSIZE + 8) + 4)


def workspace(tiny_opt: TinyOpt, percent: Percent, overlap: bool) -> int:
    policy = replace(BLOCK.policy, percent=percent, overlap=overlap)
    return workspace_bytes(tiny_opt.config, policy, ITEMSIZE, RunSizes(RULE, 4, 8))


def layer_bytes(tiny_opt: TinyOpt) -> int:
    return padded_bytes(tiny_opt, tiny_opt.config.layer)


def outer_bytes(tiny_opt: TinyOpt) -> int:
    return padded_bytes(tiny_opt, tiny_opt.config.outer)


def padded_bytes(tiny_opt: TinyOpt, page: Sequence[ParameterShape]) -> int:
    """What parameters take on disk, and in read buffers, which are laid out alike: whole pages each."""
    layout = layout_of(tiny_opt)
    stored = [prod(storage_of(parameter, torch.float32, layout).shape) for parameter in page]
    return sum(whole_pages(ITEMSIZE * elements) for elements in stored)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "ahead"])
def test_a_run_with_everything_on_one_tier_holds_what_a_hand_counts(tiny: Tiny, tmp_path: Path, overlap: bool) -> None:
    one, layers, sets = tiny(), tiny().config.num_hidden_layers, 2 if overlap else 1
    weights, kv = weight_bytes(one.config, torch.float32, layout_of(one)), 2 * layers * unit_bytes(one)
    hidden = 4 * 8 * one.config.hidden_size * ITEMSIZE
    homes = {"weights": weights, "KV cache": kv, "hidden states": hidden}
    reading = {
        "weight read buffers": outer_bytes(one) + sets * layer_bytes(one),
        "KV working buffers": sets * whole_pages(unit_bytes(one)),
        "workspace": workspace(one, ON_DISK, overlap),
    }
    on_disk = {
        "weights": outer_bytes(one) + layers * layer_bytes(one),
        "KV cache": 2 * layers * whole_pages(unit_bytes(one)),
        "hidden states": 2 * whole_pages(hidden // 2),
    }
    on_gpu = {**homes, "workspace": workspace(one, Percent(), overlap)}
    assert held(one, Percent(), tmp_path, overlap) == {"gpu": on_gpu, "cpu": {}, "disk": {}}
    assert held(one, HOMES["all_cpu"], tmp_path, overlap) == {"gpu": reading, "cpu": homes, "disk": {}}
    assert held(one, ON_DISK, tmp_path, overlap) == {"gpu": reading, "cpu": {}, "disk": on_disk}


def test_files_take_what_the_ledger_says(tiny: Tiny, tmp_path: Path) -> None:
    case = Case(tiny(), BLOCK, RULE, ON_DISK)
    with opened(case, tmp_path) as runtime:
        runtime.engine(case.sizes)
        (folder,) = run_folders(tmp_path / "offload")
        on_disk = runtime.ledger.accounts["disk"].entries
        assert (folder / "kv").stat().st_size == on_disk["KV cache"]
        assert (folder / "hidden").stat().st_size == on_disk["hidden states"]
        files = (tmp_path / "weights").rglob("*.bin")
        assert sum(path.stat().st_size for path in files) == on_disk["weights"] >= runtime.weights.nbytes


@pytest.mark.parametrize("backend", ["one_memory", "threads", "inline_at_home"])
@pytest.mark.parametrize("percent", [*HOMES.values(), ROUGH], ids=str)
def test_the_prediction_is_what_a_run_holds(tiny: Tiny, tmp_path: Path, percent: Percent, backend: str) -> None:
    case = Case(tiny(), small_block(), RULE, percent, True, BACKENDS[backend])
    platform = replace(case.backend.platform(tmp_path / "offload"), matrix_layout=layout_of(case.tiny))
    predicted = predict(case.tiny.config, torch.float32, case.policy, platform, case.sizes)
    with opened(case, tmp_path) as runtime:
        runtime.engine(case.sizes).run(pad(case.prompts()), 4, GreedyTokens(5))
    assert largest_lines(predicted) == largest_lines(runtime.ledger)


@pytest.mark.parametrize("percent", [*HOMES.values(), ROUGH], ids=str)
def test_achieved_is_what_lies_where(tiny: Tiny, tmp_path: Path, percent: Percent) -> None:
    case = Case(tiny(), small_block(), RULE, percent, True, BACKENDS["threads"])
    with opened(case, tmp_path) as runtime:
        achieved_weights = runtime.achieved_percent()
        assert len(achieved_weights) == 2  # nothing else is there yet
        runtime.engine(case.sizes)
        got = runtime.achieved_percent()
        lines = {tier: dict(runtime.ledger.accounts[tier].entries) for tier in ("gpu", "cpu")}
        total = {"weights": runtime.weights.nbytes, "KV cache": 0, "hidden states": 0}
        rows = (2, 2, 1)
        total["KV cache"] = case.tiny.config.num_hidden_layers * sum(n * unit_bytes(case.tiny) // 2 for n in rows)
        total["hidden states"] = 5 * 14 * case.tiny.config.hidden_size * ITEMSIZE
    expected = [100 * lines[tier].get(line, 0) / total[line] for line in total for tier in lines]
    assert got == pytest.approx(expected) and got[:2] == achieved_weights


def test_engines_of_the_same_sizes_are_one_and_others_take_its_place(tiny: Tiny, tmp_path: Path) -> None:
    case = Case(tiny(), small_block(), RULE, ROUGH, True, BACKENDS["threads"])
    with opened(case, tmp_path) as runtime:
        engine = runtime.engine(case.sizes)
        before = {tier: account.in_use for tier, account in runtime.ledger.accounts.items()}
        assert runtime.engine(case.sizes) is engine
        runtime.engine(RunSizes(Full(0, 200), 5, 100))
        assert runtime.engine(case.sizes) is not engine
        assert {tier: account.in_use for tier, account in runtime.ledger.accounts.items()} == before


def test_closing_twice_is_harmless(tiny: Tiny, tmp_path: Path) -> None:
    case = Case(tiny(), small_block(), RULE, ROUGH, True, BACKENDS["threads"])
    with opened(case, tmp_path) as runtime:
        runtime.engine(case.sizes)
        runtime.close()
    assert_all_given_back(runtime, tmp_path)


# --- whatever fails, everything is given back ---


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> list[Ledger]:
    """The ledgers of all runtimes that are made, also of those that fail while they are made."""
    made: list[Ledger] = []

    def make(budgets: dict[Tier, int | None], joint: bool) -> Ledger:
        made.append(Ledger(budgets, joint))
        return made[-1]

    monkeypatch.setattr(runtime_module, "Ledger", make)
    return made


class Sabotage(Exception):
    """What the tests make things fail with."""


def failing_from(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> list[int]:
    """Has the `call`-th call of something fail. Returns how many calls there were, in a list that grows."""
    calls: list[int] = []
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise Sabotage(name)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, replaced)
    return calls


PLACES = {
    "memory": (Tiers, "allocate"),
    "torch": (torch, "empty"),
    "budget": (Ledger, "charge"),
    "run folder": (RunFolder, "reserve"),
    "weight folder": (WeightFolder, "reserve"),
    "weight file": (WeightFolder, "write"),
    "space": (disk, "check_space"),
}


@pytest.mark.parametrize(("owner", "name"), PLACES.values(), ids=PLACES)
def test_a_failure_at_any_stage_leaves_nothing_behind(
    tiny: Tiny, tmp_path: Path, ledgers: list[Ledger], owner: Any, name: str
) -> None:
    case = Case(tiny(), small_block(), RULE, ROUGH, True, BACKENDS["threads"])
    left = {}
    for call in [*range(1, 30), *range(30, 2000, 37)]:
        with pytest.MonkeyPatch.context() as patch:
            calls = failing_from(patch, owner, name, call)
            with suppress(Sabotage), opened(case, tmp_path / str(call)) as runtime:
                runtime.engine(case.sizes).run(pad(case.prompts()), 2, GreedyTokens(5))
        # There is none yet if the choice of a layout has failed.
        accounts = [item for ledger in ledgers[-1:] for item in ledger.accounts.items()]
        in_use = {tier: account.in_use for tier, account in accounts if account.in_use}
        assert transfer_threads() == [] and run_folders(tmp_path / str(call) / "offload") == []
        if in_use:
            left[call] = in_use
        if len(calls) < call:
            break
    assert left == {}


def test_an_engine_that_does_not_fit_takes_nothing_and_a_smaller_one_works(tiny: Tiny, tmp_path: Path) -> None:
    case = Case(tiny(std=PEAKED), small_block(), RULE, ROUGH, True, BACKENDS["threads"])
    with opened(case, tmp_path, {"gpu": 2_000_000}) as runtime:
        before = {tier: dict(account.entries) for tier, account in runtime.ledger.accounts.items()}
        with pytest.raises(BudgetError, match="on gpu"):
            runtime.engine(RunSizes(Full(0, 5000), 5, 100))
        after = {tier: dict(account.entries) for tier, account in runtime.ledger.accounts.items()}
        runtime.engine(case.sizes).run(pad(case.prompts()), 2, GreedyTokens(5))
    assert after == before
    assert_all_given_back(runtime, tmp_path)


@pytest.mark.parametrize(
    ("tier", "budget", "line"),
    [("gpu", 10_000, "weight read buffers"), ("cpu", 1, Line.BASELINE), ("disk", 10_000, "weights")],
)
def test_a_budget_that_is_too_small_names_what_does_not_fit(
    tiny: Tiny, tmp_path: Path, tier: Tier, budget: int, line: str
) -> None:
    case = Case(tiny(), small_block(), RULE, ROUGH, True, BACKENDS["threads"])
    with pytest.raises(BudgetError) as caught, opened(case, tmp_path, {tier: budget}):
        pass
    assert line in str(caught.value) and f"on {tier}" in str(caught.value)
    assert transfer_threads() == [] and run_folders(tmp_path / "offload") == []


# --- measured ---

CHILD = """
import json, sys
from pathlib import Path
import torch
from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.plan.placement import Percent

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

torch.set_num_threads(1)
model, percent, rows, prompt_len, gen_len, calls = json.loads(sys.argv[1])
llm = LLM(
    model, dummy_weights=True, dtype="float32", device="cpu", percent=Percent(*percent), gpu_batch_size=rows // 2,
    num_gpu_batches=2, offload_dir=Path.home() / "offload",
)
prompts = [[5 + (row * 31 + n * 7) % 900 for n in range(prompt_len)] for row in range(rows)]
resident = []
for _ in range(calls):
    llm.generate(prompts, SamplingParams(max_new_tokens=gen_len, ignore_eos=True))
    resident.append(status("VmRSS"))
account = llm.ledger().accounts["cpu"]
found = {"measured": status("VmHWM"), "ledger": account.peak, "lines": account.largest, "resident": resident}
found["weights"] = llm.runtime.weights.nbytes
llm.close()
print(json.dumps(found | {"closed": status("VmRSS")}))
"""

needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")


def measure(
    home: Path, model: str, percent: Percent, rows: int = 8, prompt_len: int = 128, gen_len: int = 6, calls: int = 1
) -> dict[str, Any]:
    """Runs a model with made-up weights in a process of its own; what it held, and what its ledger said."""
    arguments = json.dumps([model, percent.values, rows, prompt_len, gen_len, calls])
    environment = {"HOME": str(home), "OMP_NUM_THREADS": "1", "PATH": ""}
    found = subprocess.run(
        [sys.executable, "-c", CHILD, arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert found.returncode == 0, found.stderr
    values: dict[str, Any] = json.loads(found.stdout)
    megabytes = {key: values[key] >> 20 for key in ("measured", "ledger", "closed")}
    print(f"{percent}: {megabytes} MB, {values['measured'] / values['ledger']:.3f} of what was predicted")
    return values


@needs_linux
@pytest.mark.parametrize("prompt_len", [pytest.param(16, marks=pytest.mark.slow), 256])
def test_host_memory_is_within_a_tenth_of_the_ledger_with_all_in_memory(tmp_path: Path, prompt_len: int) -> None:
    found = measure(tmp_path, "opt-125m", Percent(), prompt_len=prompt_len)
    assert found["weights"] > 450 * 2**20  # or the baseline would hide an error
    assert 0.9 < found["measured"] / found["ledger"] < 1.1, found


@needs_linux
@pytest.mark.slow
def test_host_memory_is_within_a_tenth_of_the_ledger_with_all_on_disk(tmp_path: Path) -> None:
    found = measure(tmp_path, "opt-125m", ON_DISK)
    assert 0.9 < found["measured"] / found["ledger"] < 1.1, found


@pytest.fixture
def deep_model(tmp_path: Path) -> Iterator[str]:
    """Many small layers: 400 MB of weights, of which two layers are in memory at a time."""
    folder = tmp_path / "model"
    folder.mkdir()
    values = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "num_hidden_layers": 32,
        "num_attention_heads": 8,
        "ffn_dim": 2048,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(values))
    yield str(folder)


@needs_linux
def test_a_model_many_times_larger_than_memory_runs_from_disk_in_what_was_predicted(
    tmp_path: Path, deep_model: str
) -> None:
    found = measure(tmp_path, deep_model, ON_DISK, prompt_len=64)
    assert found["weights"] >= 5 * (found["ledger"] - found["lines"][Line.BASELINE])
    assert found["measured"] <= 1.1 * found["ledger"], found


def test_memory_of_other_sizes_is_given_back_before_more_is_taken(
    tiny: Callable[..., TinyOpt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tiny(), small_block(), H2O(3, 4), Percent())
    make = Runtime._make_engine
    with opened(case, tmp_path) as runtime:
        engine = runtime.engine(case.sizes)  # which others may still know
        memory = [weakref.ref(workspace._storage) for workspace in engine.workspaces]

        def noting(self: Runtime, sizes: RunSizes) -> Engine:
            assert memory and all(storage() is None for storage in memory)
            return make(self, sizes)

        monkeypatch.setattr(Runtime, "_make_engine", noting)
        runtime.engine(replace(case.sizes, prompt_len=case.sizes.prompt_len + 1))


@needs_linux
def test_memory_is_flat_over_calls_and_given_back_at_the_end(tmp_path: Path, deep_model: str) -> None:
    found = measure(tmp_path, deep_model, Percent(0, 50, 0, 50, 0, 50), rows=4, prompt_len=32, gen_len=2, calls=8)
    resident = found["resident"]
    assert resident[-1] - resident[1] < 8 * 2**20, [size >> 20 for size in resident]
    assert found["closed"] < resident[-1] - 0.8 * found["lines"]["weights"]
