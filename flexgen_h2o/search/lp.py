"""The shares of weights, cache and hidden states that take the least time per token, as a linear program.

FlexGen (Sheng et al. 2023, arXiv 2303.06865), section 4.3, solves one for each size of the block. Here time and memory
are divided by the number of sub-batches, whose reciprocal `y` is a variable too: bytes and seconds are each
proportional to weights alone, or to the sub-batches alone, so that with weights' shares times y in place of the shares
the program stays linear (Charnes & Cooper 1962). With y free it finds the best size of the block, or a bound on every
size in a range; with y fixed, the best shares for one size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pulp

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.plan.placement import TIERS, Percent, Shares, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import Split, TimeModel
from flexgen_h2o.search.sizes import Job, passing_bytes, workspace_needs

SCALE = 1000  # of the reciprocal of the number of sub-batches: solvers allow errors of 1e-7
NOTHING: Shares = (0.0, 0.0, 0.0)
PARTS = ("weights", "cache", "hidden")
VARIABLES = tuple((part, tier) for part in PARTS for tier in range(3))
# Seconds per GB above a budget, where a program may exceed it: what is scarce is dear.
RELAXED_COSTS: Mapping[Tier, float] = {"gpu": 1e8, "cpu": 1e7, "disk": 1e6}
ABSENT_COST = 1e9  # of a tier that is not there

Variable = tuple[str, int]  # of PARTS, and index of a tier
LpShares = Mapping[Variable, Any]  # pulp's variables


@dataclass(frozen=True)
class Candidate:
    """A way to cut and compute a block, of which shares and size are to be found.

    Attributes:
        policy: everything but sizes of the block and percent.
        groups: in which decode takes the block.
    """

    policy: Policy
    groups: int = 1


@dataclass(frozen=True)
class Linear:
    """fixed + per_unit * units, each a constant (key None) and a coefficient for every share."""

    fixed: Mapping[Variable | None, float]
    per_unit: Mapping[Variable | None, float]


@dataclass(frozen=True)
class Optimum:
    """The shares that take the least time.

    Attributes:
        seconds: per sub-batch of a block, prefill and decode.
        units: sub-batches of a block.
        excess: GB above each tier's budget; empty where the program had to keep them.
    """

    seconds: float
    units: float
    split: Split
    excess: Mapping[Tier, float]


@dataclass(frozen=True)
class Program:
    """The linear program of a candidate.

    Args:
        budgets: bytes by tier; None or absent for no limit.
        on_disk: what may be there: some of PARTS.
    """

    model: TimeModel
    candidate: Candidate
    budgets: Mapping[Tier, float | None]
    on_disk: Sequence[str] = PARTS

    @property
    def job(self) -> Job:
        return self.model.job

    def solve(self, least: float, most: float, relaxed: bool = False) -> Optimum | None:
        """The optimum over blocks of `least` to `most` sub-batches; None if no shares fit the budgets.

        Args:
            relaxed: budgets may be exceeded, at a cost above all else: to find what is missing.
        If the two differ, nothing takes less time, but the optimum itself may take a little more than it says.
        """
        exact = int(least) if least == most else None
        problem, inverse, shares = self._begin(least, most)
        prefill, step = pulp.LpVariable("prefill", 0), pulp.LpVariable("step", 0)
        excess = {tier: pulp.LpVariable(f"excess_{tier}", 0) for tier in self.job.tiers if relaxed}
        problem += (
            prefill
            + (self.job.gen_len - 1) * step
            + pulp.lpSum(self.relaxed_cost(tier) * variable for tier, variable in excess.items())
        )
        for phase, seconds in (("prefill", prefill), ("decode", step)):
            for lane in self._times(phase, exact):
                problem += seconds >= _scaled(lane, shares, inverse)
        self._add_budgets(problem, exact, shares, inverse, excess)
        if problem.solve(pulp.PULP_CBC_CMD(msg=False)) != pulp.LpStatusOptimal:
            return None
        units = SCALE / inverse.value()
        values = {key: max(0.0, variable.value()) for key, variable in shares.items()}
        split = Split(*(_normalised([values[part, tier] for tier in range(3)]) for part in PARTS))
        time = prefill.value() + (self.job.gen_len - 1) * step.value()
        return Optimum(time, units, split, {tier: variable.value() * units for tier, variable in excess.items()})

    def relaxed_cost(self, tier: Tier) -> float:
        """Seconds for a GB above a tier's budget."""
        return RELAXED_COSTS[tier] if self.budgets.get(tier) != 0 else ABSENT_COST

    def most_units(self, least: float, most: float) -> float:
        """The most sub-batches of a block that fit the budgets, between two numbers; 0 if even the least do not."""
        problem, inverse, shares = self._begin(least, most)
        problem += inverse
        self._add_budgets(problem, None, shares, inverse, {})
        return SCALE / inverse.value() if problem.solve(pulp.PULP_CBC_CMD(msg=False)) == pulp.LpStatusOptimal else 0.0

    def _begin(self, least: float, most: float) -> tuple[pulp.LpProblem, pulp.LpVariable, LpShares]:
        """A program with the reciprocal of the number of sub-batches, scaled, and shares: of weights, times that."""
        problem = pulp.LpProblem("shares", pulp.LpMinimize)
        inverse = pulp.LpVariable("y", SCALE / most, SCALE / least)
        shares = {key: pulp.LpVariable(f"{key[0]}_{TIERS[key[1]]}", 0) for key in VARIABLES}
        self._add_shares(problem, shares, inverse)
        return problem, inverse, shares

    def _add_budgets(
        self,
        problem: pulp.LpProblem,
        units: int | None,
        shares: LpShares,
        inverse: pulp.LpVariable,
        excess: Mapping[Tier, pulp.LpVariable],
    ) -> None:
        """Every tier's bytes within its budget, or above it by so many GB."""
        for tier, nbytes in self._memory(units):
            budget = self.budgets.get(tier)
            if budget is not None:
                problem += _scaled(nbytes, shares, inverse, GB) <= budget / GB / SCALE * inverse + excess.get(tier, 0)

    def _add_shares(self, problem: pulp.LpProblem, shares: LpShares, inverse: pulp.LpVariable) -> None:
        """Shares sum to 1; where gpu and cpu are one memory, nothing is on cpu."""
        for part in PARTS:
            problem += pulp.lpSum(shares[part, tier] for tier in range(3)) == (inverse if part == "weights" else 1)
            if self.job.joint:
                problem += shares[part, 1] == 0
            if part not in self.on_disk:
                problem += shares[part, 2] == 0

    # --- terms, found by asking what each share costs alone ---

    def _times(self, phase: str, units: int | None) -> list[Linear]:
        """Seconds of a phase's lanes."""
        policy, groups = self.candidate.policy, self.candidate.groups
        rows = None if units is None else self.group_rows(units)
        count = groups if rows is None or units is None else units * policy.gpu_batch_size / rows

        def lanes(split: Split, at: float) -> dict[str, float]:
            if rows is None:
                return self.model.phases(policy, split, at, None, count)[phase]
            # Group sizes are those of the whole block, whatever size is asked about.
            return self.model.phases(policy, split, at, rows, count)[phase]

        if units is None:
            return _lines(lanes, 1, 2)
        return _lines(lanes, units, units)

    def _memory(self, units: int | None) -> list[tuple[Tier, Linear]]:
        """Bytes on each tier, none of which may exceed its budget; the device's for everything that takes a workspace.

        Args:
            units: sub-batches whose decode groups size the workspaces; None for as many as are asked about.
        """
        keys: list[Tier] = []

        def lanes(split: Split, at: float) -> dict[str, float]:
            policy, groups = self.candidate.policy, self.candidate.groups
            rows = at * policy.gpu_batch_size / groups if units is None else self.group_rows(units)
            found = self.held_bytes(split, at, rows)
            keys[:] = [tier for tier, needs in found.items() for _ in needs]
            return {f"{tier} {index}": need for tier, needs in found.items() for index, need in enumerate(needs)}

        lines = _lines(lanes, 1, 2)
        return list(zip(keys, lines, strict=True))

    def group_rows(self, units: int) -> int:
        """Rows of a decode group of a block of so many sub-batches: whole sub-batches."""
        return self.candidate.policy.gpu_batch_size * -(-units // min(units, self.candidate.groups))

    def held_bytes(self, split: Split, units: float, group_rows: float) -> dict[Tier, list[float]]:
        """Bytes by tier, of which the largest count; whole tensors and units are made of them later."""
        job, policy, config = self.job, self.candidate.policy, self.job.config
        layer, outer = job.layer_bytes(policy.compress_weight), job.outer_bytes(policy.compress_weight)
        buffers = 1 + policy.look_ahead
        unit = job.unit_bytes(policy, policy.gpu_batch_size)
        parts = {
            "weights": config.num_hidden_layers * layer + outer,
            "cache": config.num_hidden_layers * units * unit,
            "hidden": units * job.hidden_bytes(policy.gpu_batch_size, job.prompt_len),
        }
        held: dict[Tier, float] = {tier: 0.0 for tier in job.tiers}
        for index, tier in enumerate(TIERS):
            held[job.account(tier)] += sum(getattr(split, part)[index] * size for part, size in parts.items())
        held["cpu"] += job.host_bytes(policy)
        # Buffers for what is not in reach: whole, in truth, as soon as anything is not; here in proportion, so that no
        # policy holds less than is said.
        away = {part: 1 - getattr(split, part)[0] for part in PARTS}
        if job.joint:
            away = {part: getattr(split, part)[2] for part in PARTS}
        on_device = float(job.gpu_baseline + job.decoding_bytes(policy))
        on_device += passing_bytes(job, replace(policy, percent=Percent()), group_rows)
        on_device += away["weights"] * buffers * layer + away["cache"] * buffers * unit
        on_device += away["hidden"] * buffers * job.hidden_bytes(policy.gpu_batch_size, job.prompt_len)
        found = {tier: [nbytes] for tier, nbytes in held.items()}
        device = job.account("gpu")
        workspaces = [policy.groups_in_flight * need for need in workspace_needs(job, policy, group_rows)]
        # The embeddings, nearly all that lies outside the layers, go whole to where the greater part of it should be.
        outside = (0.0, outer * (2 * away["weights"] - 1))
        found[device] = [held[device] + on_device + space + rest for space in workspaces for rest in outside]
        return found


def _scaled(
    linear: Linear, shares: LpShares, inverse: pulp.LpVariable, divisor: float = 1.0
) -> pulp.LpAffineExpression:
    """A linear function, divided by the number of sub-batches."""
    terms = [linear.fixed[None] / divisor / SCALE * inverse, linear.per_unit[None] / divisor]
    for key in VARIABLES:
        value = linear.fixed[key] / SCALE if key[0] == "weights" else linear.per_unit[key]
        if value:
            terms.append(value / divisor * shares[key])
    return pulp.lpSum(terms)


def _lines(function: Callable[[Split, float], dict[str, float]], first: float, second: float) -> list[Linear]:
    """The linear functions that a function of shares and sub-batches consists of.

    If `first` equals `second`, all of it is counted per sub-batch or as fixed, as lp needs it at that number alone.
    """
    nothing = Split(NOTHING, NOTHING, NOTHING)
    at_first = _coefficients(function, nothing, first)
    if first == second:
        return [
            Linear(
                {key: value if key is not None and key[0] == "weights" else 0.0 for key, value in line.items()},
                {key: value / first for key, value in line.items()},
            )
            for line in at_first
        ]
    at_second = _coefficients(function, nothing, second)
    lines = []
    for low, high in zip(at_first, at_second, strict=True):
        slopes = {key: (high[key] - low[key]) / (second - first) for key in low}
        lines.append(Linear({key: low[key] - first * slopes[key] for key in low}, slopes))
    return lines


def _coefficients(
    function: Callable[[Split, float], dict[str, float]], nothing: Split, units: float
) -> list[dict[Variable | None, float]]:
    """For each value of the function: its constant, and what it gains when one share alone is 1."""
    constants = function(nothing, units)
    found: list[dict[Variable | None, float]] = [{None: value} for value in constants.values()]
    for part, tier in VARIABLES:
        share: Shares = (float(tier == 0), float(tier == 1), float(tier == 2))
        alone = replace(nothing, **{part: share})
        for line, name, value in zip(found, constants, function(alone, units).values(), strict=True):
            line[part, tier] = value - constants[name]
    return found


def _normalised(values: list[float]) -> Shares:
    total = sum(values)
    return values[0] / total, values[1] / total, values[2] / total
