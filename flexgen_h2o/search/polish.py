"""Small steps from a policy that fits to a better one, in whole tensors and units.

A linear program knows shares only: what rounding leaves over of a budget, or takes too much, is found out here, policy
by policy, with the times and bytes that these really have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import TimeModel
from flexgen_h2o.search.lp import PARTS
from flexgen_h2o.search.predict import Budgets, Found, predict, seconds_per_token
from flexgen_h2o.search.sizes import MemoryPlan

FIRST_STEP, LAST_STEP = 8.0, 0.1  # per cent
LEAST_GAIN = 1e-6
MOST_TRIES = 5000


@dataclass(frozen=True)
class Freedom:
    """What steps may change.

    Attributes:
        may_resize: the number of sub-batches, up to `most_rows` rows.
        on_disk: what may go to disk: some of PARTS.
    """

    may_resize: bool
    most_rows: int
    on_disk: Sequence[str] = PARTS


def polish(model: TimeModel, budgets: Budgets, found: Found, freedom: Freedom, deeply: bool = False) -> Found:
    """The best that steps lead to: a share moved from one tier to another, a few sub-batches more or fewer.

    Args:
        deeply: take two steps at once too, of which one makes room for the other.
    """
    policy, seconds, tries = found.policy, found.seconds_per_token, 0
    step = FIRST_STEP
    while step >= LAST_STEP and tries < MOST_TRIES:
        better = None
        for neighbour in _neighbours(policy, step, freedom, model.job.joint, deeply):
            plan = MemoryPlan(model.job, neighbour)
            tries += 1
            if neighbour.block_rows > max(freedom.most_rows, policy.block_rows) or not _fits(plan, budgets):
                continue
            tried = seconds_per_token(model, plan)
            if tried < seconds * (1 - LEAST_GAIN):
                better, seconds = neighbour, tried
                break
        if better is None:
            step /= 2
        else:
            policy = better
    return found if policy is found.policy else Found(policy, predict(model, policy))


def _fits(plan: MemoryPlan, budgets: Budgets) -> bool:
    peaks = plan.peaks()
    return all(budget is None or peaks[tier] <= budget for tier, budget in budgets.items())


def _neighbours(policy: Policy, step: float, freedom: Freedom, joint: bool, deeply: bool) -> Iterator[Policy]:
    sizes = list(_sizes(policy, step)) if freedom.may_resize else [policy]
    for sized in sizes:
        for percent in (policy.percent, *_percents(policy.percent, step, freedom.on_disk, joint)):
            yield replace(sized, percent=percent)
    if deeply:
        for one in _percents(policy.percent, step, freedom.on_disk, joint):
            for other in (step, step / 4):
                for percent in _percents(one, other, freedom.on_disk, joint):
                    yield replace(policy, percent=percent)


def _sizes(policy: Policy, step: float) -> Iterator[Policy]:
    """The policy, and the same with other numbers of sub-batches or of groups."""
    yield policy
    units, groups = policy.num_gpu_batches, -(-policy.block_rows // policy.group_rows)
    few = max(1, int(units * step / 100))
    sizes = [(size, groups) for size in {units - few, units - 1, units + 1, units + few}]
    if policy.groups_in_flight > 1:
        sizes += [(units, 2 * groups), (units, groups // 2)]
    for size, count in sizes:
        if size > 0 and count > 0:
            sized = replace(policy, num_gpu_batches=size, decode_batch_size=None)
            rows = policy.gpu_batch_size * -(-size // min(size, count))
            yield replace(sized, decode_batch_size=None if rows == sized.group_rows else rows)


def _percents(percent: Percent, step: float, on_disk: Sequence[str], joint: bool) -> Iterator[Percent]:
    """What comes of moving up to `step` per cent of one thing from one tier to another."""
    values = percent.values
    for part, first in zip(PARTS, (0, 2, 4), strict=True):
        tiers = [0, *([] if joint else [1]), *([2] if part in on_disk else [])]
        shares = (values[first], values[first + 1], round(100 - values[first] - values[first + 1], 6))
        for source in tiers:
            for target in tiers:
                moved = min(step, shares[source])
                if source == target or moved <= 0:
                    continue
                changed = list(shares)
                changed[source] -= moved
                changed[target] += moved
                gpu, disk = round(changed[0], 1), round(changed[2], 1)
                pair = (gpu, round(max(0.0, 100 - gpu - disk), 1))
                yield Percent(*(*values[:first], *pair, *values[first + 2 :]))
