"""What the tests of plans share: the T4's rates, jobs, budgets."""

from __future__ import annotations

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.placement import Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import CostModel, Lanes
from flexgen_h2o.search.hardware import Hardware, read_hardware
from flexgen_h2o.search.rates import Rate, unit_of
from flexgen_h2o.search.sizes import Job, MemoryPlan
from support.commands import ROOT

T4 = read_hardware(ROOT / "policies" / "hardware" / "t4.json")
T4_MEMORY: dict[Tier, float | None] = {"gpu": 15.0 * GB, "cpu": 204.0 * GB, "disk": 0.0}


def job(
    model: str = "opt-30b", prompt_len: int = 512, gen_len: int = 32, eviction: str = "h2o", device: str = "cuda"
) -> Job:
    """A job whose KV buffer has the default sizes of an eviction policy."""
    heavy, recent = EvictionSpec(eviction).sizes(prompt_len + gen_len)
    return Job(published(model), prompt_len, gen_len, heavy, recent, device=device)


def on_t4(*arguments: object, **named: object) -> CostModel:
    """The cost of a job on the T4."""
    return CostModel(job(*arguments, **named), T4)  # type: ignore[arg-type]


def achieved(model: CostModel, policy: Policy) -> dict[str, Lanes]:
    """Seconds by phase and lane of a policy."""
    return model.achieved(MemoryPlan(model.job, policy))


def machine(device: str = "cuda", **changes: float) -> Hardware:
    """A machine of round rates; changes are by name, with "_" for "/"."""
    rates = {
        "gemm/float16/1": 1e12,
        "gemm/float16/100": 50e12,
        "attention/cuda/float16/64": 400e9,
        "attention/cpu/float16/64": 50e9,
        "memory/cuda/read/1": 500e9,
        "memory/cpu/read/1": 60e9,
        "link/h2d/pinned": 10e9,
        "link/d2h/pinned": 8e9,
        "disk/read/direct/1": 2e9,
        "disk/write/direct/1": 1e9,
        "disk_cpu/read/direct/1": 1e-11,
        "disk_cpu/write/direct/1": 2e-11,
        "operation/cuda": 1e-4,
        "operation/cpu": 1e-4,
    }
    rates |= changes
    known = {name: Rate(value, str(unit_of(name)), "assumed", "made up") for name, value in rates.items()}
    return Hardware("box", device, 4, {"gpu": 4 * GB, "cpu": 32 * GB, "disk": 200 * GB}, known)
