"""What a sweep compares, as plain data: settings that all engines share, and the contenders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from flexgen_h2o.bench.drivers.common import ENGINES

OURS = "flexgen_h2o"
FULL = "full"
CLIMB, COMPARE = "climb", "compare"  # what a generation is for: looking for the best rows, or beside others
BITS = (16, 4)
# Names of a project stand for what it does with a model that does not fit: (with a memory limit, without).
OFFLOADING = {"accelerate": ("accelerate_disk", "accelerate_cpu"), "deepspeed": ("deepspeed_nvme", "deepspeed_cpu")}
OWN_DTYPE = {"ctranslate2": "int8"}  # it computes OPT in no other precision of interest on a CPU


@dataclass(frozen=True)
class Setting:
    """What all engines of a comparison are asked, and the machine that they have.

    Attributes:
        model: a published size, or a folder in Hugging Face format.
        prompt_len, gen_len: tokens of every row.
        device: where compute happens: cpu or cuda.
        memory, disk_read: bytes (per second) that an engine may take, as scripts/limit.sh takes them; None for all.
    """

    model: str
    prompt_len: int
    gen_len: int
    dtype: str
    threads: int
    device: str = "cpu"
    memory: str | None = None
    disk_read: str | None = None


@dataclass(frozen=True)
class Contender:
    """An engine as it takes part.

    Attributes:
        engine: a name of `drivers.common.ENGINES`.
        batch: its own number of rows; None for those of the sweep.
        budget: of this engine's KV cache: "full", or a share of prompt + generated tokens such as "0.2".
        bits: of this engine's weights and KV: 16 or 4.
        options: what its driver alone takes.
    """

    engine: str
    batch: int | None = None
    budget: str | None = None
    bits: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As tables and plots call it."""
        parts = [self.engine]
        if self.budget is not None:
            parts.append("full cache" if self.budget == FULL else f"h2o {float(Decimal(self.budget) * 100):g} %")
        if self.bits == 4:
            parts.append("4 bits")
        if self.engine in OWN_DTYPE:
            parts.append(OWN_DTYPE[self.engine])
        return ", ".join(parts)

    def dtype(self, setting: Setting) -> str:
        """What it computes in."""
        return OWN_DTYPE.get(self.engine, setting.dtype)


Entry = tuple[Contender, int]  # with so many rows


@dataclass(frozen=True)
class Plan:
    """A whole sweep.

    Attributes:
        batches: rows to compare at; None to look for each contender's best.
        trials: generations of each contender in a comparison.
        timeout_s: that one engine's process may take for all of them.
    """

    settings: Sequence[Setting]
    contenders: Sequence[Contender]
    batches: Sequence[int] | None
    trials: int
    timeout_s: float

    def comparisons(self) -> list[list[Entry]]:
        """The comparisons that are known beforehand. A contender with rows of its own takes part in the first."""
        return [
            [(c, c.batch or batch) for c in self.contenders if number == 0 or c.batch is None]
            for number, batch in enumerate(self.batches or ())
        ]


def contenders(
    engines: Sequence[str], budgets: Sequence[str], bits: Sequence[int], is_limited: bool, own: Mapping[str, Any]
) -> tuple[list[Contender], list[str]]:
    """The contenders that a command names, and what is wrong with the names, a sentence each.

    Args:
        engines: names, each with `@ROWS` if it has rows of its own.
        budgets, bits: of this engine, which takes part once for each pair.
        is_limited: with a memory limit, engines offload to disk.
        own: more options of this engine in 16 bits, such as where things live.
    """
    found: list[Contender] = []
    problems = [problem for budget in budgets if (problem := budget_problem(budget))]
    for word in engines:
        name, _, rows = word.partition("@")
        engine = OFFLOADING[name][0 if is_limited else 1] if name in OFFLOADING else name
        if engine not in ENGINES:
            known = ", ".join(sorted({*ENGINES, *OFFLOADING}))
            problems.append(f"--engines has {name!r}; known ones: {known}")
        elif rows and not (rows.isdigit() and int(rows) > 0):
            problems.append(f"--engines has {word!r}; after @ comes a number of rows of at least 1")
        elif problems:
            continue
        elif engine == OURS:
            batch = int(rows) if rows else None
            own_of = {16: own, 4: {}}
            found += [ours(budget, count, batch, own_of[count]) for budget in budgets for count in bits]
        else:
            found.append(Contender(engine, int(rows) if rows else None))
    return found, problems


def ours(budget: str, bits: int, batch: int | None, own: Mapping[str, Any]) -> Contender:
    """This engine with a budget."""
    options: dict[str, Any] = {"eviction": "full"}
    if budget != FULL:
        half = str(Decimal(budget) / 2)
        options = {"eviction": "h2o", "hh_ratio": half, "recent_ratio": half}
    if bits == 4:
        options |= {"compress_weight": True, "compress_cache": True}
    return Contender(OURS, batch, budget, bits, {**options, **own})


def budget_problem(budget: str) -> str | None:
    """What is wrong with a budget, if anything."""
    if budget == FULL:
        return None
    try:
        share = Decimal(budget)
    except InvalidOperation:
        share = Decimal(0)
    if share.is_finite() and 0 < share <= 1:
        return None
    return f"--budget has {budget!r}; each must be 'full' or a share above 0 and at most 1, such as 0.2"
