"""What a run with a policy is expected to take and to hold."""

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_h2o.plan.placement import Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import TimeModel
from flexgen_h2o.search.projection import Projection
from flexgen_h2o.search.sizes import MemoryPlan

Budgets = Mapping[Tier, float | None]  # bytes; None or absent for no limit


@dataclass(frozen=True)
class Found:
    """A policy and what it is expected to do."""

    policy: Policy
    projection: Projection

    @property
    def seconds_per_token(self) -> float:
        """What a search makes least."""
        return self.projection.total_s / self.projection.tokens


def predict(model: TimeModel, policy: Policy) -> Projection:
    """What a run with a policy is expected to take and to hold, in blocks that are full."""
    plan = MemoryPlan(model.job, policy)
    phases = model.achieved(plan)
    seconds = {phase: model.seconds(lanes, policy.overlap) for phase, lanes in phases.items()}
    steps = model.job.gen_len - 1
    lanes = {"prefill": phases["prefill"], "decode": {lane: steps * s for lane, s in phases["decode"].items()}}
    return Projection(
        prefill_s=seconds["prefill"],
        decode_s=steps * seconds["decode"],
        tokens=policy.block_rows * model.job.gen_len,
        lanes=lanes,
        binds={phase: max(found, key=lambda lane: found[lane]) for phase, found in phases.items()},
        memory=plan.lines,
        achieved_percent=tuple(plan.achieved_percent),
    )


def seconds_per_token(model: TimeModel, plan: MemoryPlan) -> float:
    """The same as a prediction's, without the rest of it."""
    phases, policy = model.achieved(plan), plan.policy
    prefill, step = (model.seconds(phases[phase], policy.overlap) for phase in ("prefill", "decode"))
    return (prefill + (model.job.gen_len - 1) * step) / (policy.block_rows * model.job.gen_len)
