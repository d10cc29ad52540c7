"""Walks the block schedule (plan/schedule.py) over the resources of a machine, without computing anything.

Every resource is a lane that does one thing at a time. An operation starts when its lane is free and what it needs is
there: weights in a read buffer that its last page has left, KV in a working buffer, the attention of its group. What
the cost model takes for granted, that everything overlaps which can, is here found out operation by operation; and what
it leaves out, the first page of weights that nothing hides, is here.

Prefill, the first two decode steps and the last are walked; the second and the last stand for those between them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flexgen_h2o.plan.placement import Tier, reachable, spread
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import (
    OUTER,
    Attend,
    BlockShape,
    Choose,
    Embed,
    EndStep,
    FetchWeights,
    Finish,
    Group,
    LoadCache,
    LoadHidden,
    Operation,
    Phase,
    Project,
    ReleaseWeights,
    StoreCache,
    StoreHidden,
    cut_block,
    places,
    telling_steps,
    zigzag,
)
from flexgen_h2o.plan.timeline import Span
from flexgen_h2o.search.cost_model import CostModel, TimeModel
from flexgen_h2o.search.flexgen_model import FlexgenCost, combine
from flexgen_h2o.search.operations import OperationTimes
from flexgen_h2o.search.projection import Projection
from flexgen_h2o.search.sizes import MemoryPlan


@dataclass(frozen=True)
class Simulation:
    """What a walk found out. Nothing in it was measured.

    Attributes:
        spans: of the steps that were walked, for timeline.write_trace().
    """

    projection: Projection
    spans: tuple[Span, ...]


def simulate(model: TimeModel, policy: Policy) -> Simulation:
    """Walks the schedule of a policy on the machine, and with the engine, of a model."""
    steps = telling_steps(model.job.gen_len)
    shape = cut_block(policy.block_rows, policy.gpu_batch_size, policy.group_rows)
    layers = model.job.config.num_hidden_layers
    operations = zigzag(shape.steps(steps), layers, policy.look_ahead, policy.groups_in_flight)
    if isinstance(model, FlexgenCost):
        lanes = _walk_in_turns(model, policy, operations)
    else:
        assert isinstance(model, CostModel)
        lanes = _Walk(model, policy, shape).run(operations)
    return Simulation(_projection(model, policy, lanes, steps), tuple(lanes.spans))


@dataclass
class _Lanes:
    """When each lane is free, what it has done, and when each step of the schedule ended."""

    free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)
    step_ends_s: list[float] = field(default_factory=list)

    def occupy(self, lane: str, work: object, after_s: float, seconds: float) -> float:
        """Takes a lane for so long, as soon as it is free and not before `after_s`; returns when it is done."""
        if not seconds:
            return after_s
        start = max(self.free_s[lane], after_s)
        self.free_s[lane] = end = start + seconds
        self.spans.append(Span(lane, work, start, end))
        return end

    def squeeze_in(self, lane: str, work: object, after_s: float, seconds: float) -> float:
        """Takes a lane at once for something small, whatever else is on it, which that delays; returns the end."""
        self.free_s[lane] = max(self.free_s[lane], after_s) + seconds
        self.spans.append(Span(lane, work, after_s, after_s + seconds))
        return after_s + seconds

    def busy(self, start_s: float, end_s: float) -> dict[str, float]:
        """Seconds that each lane was busy between two times."""
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            found[span.lane] += max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
        return dict(found)


def _projection(model: TimeModel, policy: Policy, lanes: _Lanes, steps: list[int]) -> Projection:
    """Prefill, and all decode steps by those that were walked."""
    ends = lanes.step_ends_s
    seconds = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    count = model.job.gen_len - 1
    decode_s, first = 0.0, ends[0]
    if count:
        # The second step and the last stand for all but the first.
        later = seconds[2:] or [0.0]
        decode_s = seconds[1] + (count - 1) * (later[0] + later[-1]) / 2
    walked = {"prefill": lanes.busy(0.0, first), "decode": lanes.busy(first, ends[-1])}
    scale = decode_s / (ends[-1] - first) if count else 0.0
    busy = {"prefill": walked["prefill"], "decode": {lane: scale * s for lane, s in walked["decode"].items()}}
    plan = MemoryPlan(model.job, policy)
    return Projection(
        prefill_s=first,
        decode_s=decode_s,
        tokens=policy.block_rows * model.job.gen_len,
        lanes=busy,
        binds={phase: max(found, key=lambda lane: found[lane], default="") for phase, found in busy.items()},
        memory=plan.lines,
        achieved_percent=tuple(plan.achieved_percent),
    )


def _walk_in_turns(model: FlexgenCost, policy: Policy, operations: Iterable[Operation]) -> _Lanes:
    """FlexGen's engine: each layer of a step takes its share of the lanes, in decode first of what goes to the GPU."""
    lanes = _Lanes()
    layers = model.job.config.num_hidden_layers
    phases = model.lanes(policy)
    now, phase = 0.0, "prefill"
    for operation in operations:
        match operation:
            case Project(group=group):
                phase = group.phase
            case ReleaseWeights(page) if page != OUTER:
                own = {lane: seconds / layers for lane, seconds in phases[phase].items()}
                start = now + (own["h2d"] if phase == "decode" else 0.0)
                for lane, seconds in own.items():
                    lanes.occupy(lane, operation, now if lane == "h2d" else start, seconds)
                now += combine(own, is_prefill=phase == "prefill")
            case EndStep():
                lanes.step_ends_s.append(now)
    return lanes


@dataclass
class _PageBuffer:
    """A place on the device for a page of weights."""

    page: int | None = None
    loaded_s: float = 0.0
    free_s: float = 0.0


@dataclass
class _GroupState:
    """A group between its projections and the end of its layer."""

    arrives_s: float = 0.0  # the last of its attention that is computed on the CPU


class _Walk:
    """This engine. Times of tensors are those when they are where they are needed."""

    def __init__(self, model: CostModel, policy: Policy, shape: BlockShape):
        job = model.job
        self.policy, self.shape = policy, shape
        self.times = OperationTimes(model, policy)
        self.lanes = _Lanes()
        self.shared_bytes = 0.0  # that have passed host memory in this step
        self.now_s = 0.0  # when the loop issues its next operation
        self.is_joint = job.joint
        layers, units = job.config.num_hidden_layers, len(shape.unit_rows)
        homes = spread(layers * units, policy.percent.cache)
        self.cache_homes = [homes[start : start + units] for start in range(0, len(homes), units)]
        self.hidden_homes = spread(units, policy.percent.hidden)
        self.pages = [_PageBuffer() for _ in range(places(policy.look_ahead))]
        self.outer = _PageBuffer()
        self.working_free_s = [0.0] * places(policy.look_ahead)
        self.turn = 0
        self.in_use: dict[tuple[int, int], int] = {}
        self.unit_loaded_s: dict[tuple[int, int], float] = {}
        self.unit_stored_s: dict[tuple[int, int], float] = defaultdict(float)
        self.hidden_loaded_s: dict[int, float] = defaultdict(float)
        self.hidden_stored_s: dict[int, float] = defaultdict(float)
        self.hidden_left_s = 0.0  # when the last of them was at home
        self.groups: dict[tuple[Phase, int], _GroupState] = {}

    def run(self, operations: Iterable[Operation]) -> _Lanes:
        """Walks all operations."""
        for operation in operations:
            match operation:
                case FetchWeights(page):
                    self._fetch(page, operation)
                case ReleaseWeights(page):
                    self._page(page).free_s = self.lanes.free_s["compute"]
                case LoadCache(layer, unit):
                    self._load_cache(layer, unit, operation)
                case StoreCache(layer, unit, group):
                    self._store_cache(layer, unit, group, operation)
                case LoadHidden(group):
                    self._load_hidden(group, operation)
                case StoreHidden(group):
                    self._store_hidden(group, operation)
                case Attend():
                    self._attend(operation)
                case Project(layer, group):
                    self.groups[group.key] = _GroupState()
                    self._issue("products", operation)
                    self._compute(operation, max(self._page(layer).loaded_s, self.hidden_loaded_s[group.index]))
                case Finish(layer, group):
                    # The loop itself waits for what the CPU computes beside the GPU.
                    self.now_s = max(self.now_s, self.groups.pop(group.key).arrives_s)
                    self._compute(operation, self._page(layer).loaded_s)
                case Embed() | Choose():
                    self._compute(operation, max(self.outer.loaded_s, self.hidden_loaded_s[operation.group.index]))
                case EndStep():
                    self._end_step()
        return self.lanes

    def _issue(self, kind: str, operation: Operation) -> None:
        """The loop takes its time to say what is to be done, and where it computes itself, to do even the least."""
        lane = "compute" if self.is_joint else "issue"
        self.now_s = self.lanes.occupy(lane, operation, self.now_s, self.times.issue_s(kind))

    def _compute(self, operation: Operation, ready_s: float) -> None:
        seconds = self.times.compute_s(operation, self.shape)
        end = self.lanes.occupy("compute", operation, max(self.now_s, ready_s), seconds)
        if self.is_joint:
            self.now_s = max(self.now_s, end)

    def _page(self, page: int) -> _PageBuffer:
        return self.outer if page == OUTER else self.pages[page % len(self.pages)]

    def _fetch(self, page: int, work: Operation) -> None:
        buffer = self._page(page)
        if buffer.page != page:
            buffer.page = page
            after = max(self.now_s, buffer.free_s)
            buffer.loaded_s = self._move("load", work, after, self.times.page_bytes(page))

    def _attend(self, work: Attend) -> None:
        unit, in_prefill = work.unit, work.group.phase == "prefill"
        tier, key = self.cache_homes[work.layer][unit], (work.layer, unit)
        if not in_prefill and self._attends_at_home(tier):
            seconds, nbytes = self.times.host_attention(unit, work.step, self.shape)
            after = max(self.lanes.free_s["compute"], self.unit_stored_s[key])
            sent = self._move("store", work, after, {"cpu": self.times.query_bytes(unit, self.shape)}, small=True)
            self.unit_stored_s[key] = end = self.lanes.occupy("host", work, sent, seconds)
            self.shared_bytes += nbytes
            arrived = self._move("load", work, end, {"cpu": self.times.output_bytes(unit, self.shape)}, small=True)
            state = self.groups[work.group.key]
            state.arrives_s = max(state.arrives_s, arrived)
            return
        ready = self.unit_loaded_s.get(key, 0.0)
        if in_prefill and not self._in_reach(tier):
            ready = self.working_free_s[self._take_working(key)]
        self._issue("attention", work)
        self._compute(work, ready)

    def _load_cache(self, layer: int, unit: int, work: Operation) -> None:
        tier, key = self.cache_homes[layer][unit], (layer, unit)
        if self._in_reach(tier) or self._attends_at_home(tier):
            return
        after = max(self.now_s, self.unit_stored_s[key], self.working_free_s[self._take_working(key)])
        self.unit_loaded_s[key] = self._move("load", work, after, {tier: self.times.unit_bytes(unit, self.shape)})

    def _store_cache(self, layer: int, unit: int, group: Group, work: Operation) -> None:
        tier, key, in_prefill = self.cache_homes[layer][unit], (layer, unit), group.phase == "prefill"
        if self._in_reach(tier) or (not in_prefill and self._attends_at_home(tier)):
            return
        whole = in_prefill or tier == "disk"
        nbytes = self.times.unit_bytes(unit, self.shape) if whole else self.times.entry_bytes(unit, self.shape)
        after = max(self.lanes.free_s["compute"], self.unit_stored_s[key])
        self.unit_stored_s[key] = stored = self._move("store", work, after, {tier: nbytes})
        self.working_free_s[self.in_use.pop(key)] = stored

    def _load_hidden(self, group: Group, work: Operation) -> None:
        tier = self.hidden_homes[group.index]
        if not self._in_reach(tier):
            after = max(self.now_s, self.hidden_stored_s[group.index])
            nbytes = self.times.hidden_bytes(group)
            self.hidden_loaded_s[group.index] = self._move("load", work, after, {tier: nbytes})

    def _store_hidden(self, group: Group, work: Operation) -> None:
        tier = self.hidden_homes[group.index]
        if not self._in_reach(tier):
            self.now_s = max(self.now_s, self.hidden_left_s)  # one at a time is on its way home
            after = max(self.lanes.free_s["compute"], self.hidden_stored_s[group.index])
            nbytes = self.times.hidden_bytes(group)
            self.hidden_stored_s[group.index] = self._move("store", work, after, {tier: nbytes})
            self.hidden_left_s = self.hidden_stored_s[group.index]

    def _take_working(self, key: tuple[int, int]) -> int:
        """The next working buffer on the device, for a unit."""
        self.in_use[key] = self.turn % len(self.working_free_s)
        self.turn += 1
        return self.in_use[key]

    def _attends_at_home(self, tier: Tier) -> bool:
        return self.policy.attends_at_home(tier, self.is_joint)

    def _in_reach(self, tier: Tier) -> bool:
        return tier in reachable(self.is_joint)

    def _move(
        self, direction: str, work: Operation, after_s: float, nbytes: Mapping[Tier, float], small: bool = False
    ) -> float:
        """Moves bytes from or to tiers, the link to the GPU and the disk at once; returns when all are there."""
        end = after_s
        for lane, seconds, shared in self.times.moves(direction, nbytes):
            if lane == "processor":  # what a disk costs the processor that computes
                self.lanes.occupy("compute", work, after_s, seconds)
                continue
            take = self.lanes.squeeze_in if small else self.lanes.occupy
            end = max(end, take(lane, work, after_s, seconds))
            self.shared_bytes += shared
        if not self.policy.overlap:
            # Nothing else goes on meanwhile.
            self.now_s = self.lanes.free_s["compute"] = max(end, self.lanes.free_s["compute"])
        return end

    def _end_step(self) -> None:
        """All rows have their token, and it goes to the host. Host memory is shared by all that went on in the step."""
        ends = self.lanes.step_ends_s
        end = self.lanes.free_s["compute"]
        if self.shared_bytes and not self.is_joint:
            seconds = self.times.host_memory_s(self.shared_bytes)
            start = ends[-1] if ends else 0.0
            self.lanes.spans.append(Span("host_memory", "all of a step", start, start + seconds))
            end = max(end, start + seconds)
        ends.append(end)
        self.now_s = self.lanes.free_s["compute"] = end
        self.shared_bytes = 0.0
