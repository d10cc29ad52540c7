"""Where things live changes nothing: logits are those of a run in memory, to the last bit."""

from __future__ import annotations

import functools
import itertools
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.helpers import BLOCKS, PEAKED, Block, ForcedTokens, GreedyTokens, TinyOpt, pad, random_ids, run_block
from support.placed import (
    BACKENDS,
    FIFTIES,
    HOMES,
    MIXED,
    ON_DISK,
    ROUGH,
    RULES,
    Backend,
    Case,
    assert_all_given_back,
    case_logits,
    delayed_threads,
    opened,
    small_block,
)
from support.races import RaceDetector
from support.tiny_models import VARIANTS
from torch import Tensor

from flexgen_h2o.engine.hidden import HiddenStore
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.memory.transfer import InlineTransfer
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy

Tiny = Callable[..., TinyOpt]
Choice = tuple[str, str, bool]  # homes, back-end, overlap
CHOICES: list[Choice] = list(itertools.product(HOMES, BACKENDS, (False, True)))
# Every variant, block and rule meets two of the choices here; which ones moves on by one, so that all of them come up.
COVERING = [
    (variant, block, rule, [CHOICES[(2 * number) % len(CHOICES)], CHOICES[(2 * number + 1) % len(CHOICES)]])
    for number, (variant, block, rule) in enumerate(itertools.product(VARIANTS, BLOCKS, RULES))
]


@pytest.fixture(scope="module")
def in_memory(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Tensor]:
    """Logits of a variant, block and rule with everything in one memory and nothing loaded ahead. Cached."""
    folder = tmp_path_factory.mktemp("in_memory")

    @functools.cache
    def logits(variant: str, block: str, rule: str) -> Tensor:
        case = Case(tiny(variant, std=PEAKED), BLOCKS[block], RULES[rule], overlap=False)
        return case_logits(case, folder)

    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all runs; weights on disk are written once per model."""
    return tmp_path_factory.mktemp("homes")


def differing(
    tiny_opt: TinyOpt, block: Block, rule: EvictionRule, choices: list[Choice], expected: Tensor, folder: Path
) -> list[Choice]:
    """The choices with which any bit of the logits is another."""
    found = []
    for homes, backend, overlap in choices:
        case = Case(tiny_opt, block, rule, HOMES[homes], overlap, BACKENDS[backend])
        if not torch.equal(case_logits(case, folder), expected):
            found.append((homes, backend, overlap))
    return found


@pytest.mark.parametrize(("variant", "block", "rule", "choices"), COVERING)
def test_homes_do_not_change_a_bit(
    tiny: Tiny,
    in_memory: Callable[..., Tensor],
    folder: Path,
    variant: str,
    block: str,
    rule: str,
    choices: list[Choice],
) -> None:
    expected = in_memory(variant, block, rule)
    assert expected.isfinite().all()
    assert differing(tiny(variant, std=PEAKED), BLOCKS[block], RULES[rule], choices, expected, folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_home_of_all_changes_a_bit(
    tiny: Tiny, in_memory: Callable[..., Tensor], folder: Path, variant: str, block: str, rule: str
) -> None:
    expected = in_memory(variant, block, rule)
    assert differing(tiny(variant, std=PEAKED), BLOCKS[block], RULES[rule], CHOICES, expected, folder) == []


def test_the_covering_choice_leaves_no_value_out() -> None:
    met = [choice for *_, choices in COVERING for choice in choices]
    assert set(met) == set(CHOICES)
    for backend, overlap in itertools.product(BACKENDS, (False, True)):
        rules = {rule for _, _, rule, choices in COVERING if any(c[1:] == (backend, overlap) for c in choices)}
        assert rules == set(RULES), (backend, overlap)


def random_percent(rng: random.Random) -> Percent:
    values = []
    for _ in range(3):
        gpu = rng.choice((0, 100, rng.randint(0, 100)))
        values += [gpu, rng.choice((0, 100 - gpu, rng.randint(0, 100 - gpu)))]
    return Percent(*values)


def random_rule(rng: random.Random, length: int) -> EvictionRule:
    heavy, recent = rng.randint(0, 8), rng.randint(1, 10)
    return rng.choice((Full(0, length), H2O(heavy, recent), Local(0, recent), Sink(max(1, heavy), recent)))


def random_case(tiny_opt: TinyOpt, draw: int) -> Case:
    rng = random.Random(draw)
    batch, batches = rng.randint(1, 3), rng.randint(1, 4)
    rows = rng.randint(1, batch * batches)
    lengths = tuple(rng.randint(1, 24) for _ in range(rows))
    policy = Policy(batch, batches, batch * rng.randint(1, batches))
    backend = Backend(
        rng.random() < 0.2,
        rng.random() < 0.5,
        lambda: delayed_threads(draw, rng.choice((0.0, 0.0002, 0.002))),
    )
    return Case(
        tiny_opt, Block(policy, lengths), random_rule(rng, max(lengths) + STEPS_DRAWN + 1), random_percent(rng), True,
        backend,
    )  # fmt: skip


STEPS_DRAWN = 4


@pytest.mark.parametrize(
    "draw", [pytest.param(n, marks=[] if n < 15 else [pytest.mark.slow], id=str(n)) for n in range(100)]
)
def test_looking_ahead_over_slow_links_changes_nothing(tiny: Tiny, folder: Path, draw: int) -> None:
    variant = ("pre_norm", "post_norm_projected", "untied", "galactica")[draw % 4]
    case = random_case(tiny(variant, std=PEAKED), draw)
    inline = Backend(False, case.backend.attend_at_home, InlineTransfer)
    plain = Case(case.tiny, case.block, case.rule, case.percent, False, inline)
    expected = case_logits(plain, folder, STEPS_DRAWN)
    assert torch.equal(case_logits(case, folder, STEPS_DRAWN), expected)


# --- more than one block on an engine ---


@pytest.mark.parametrize("percent", [MIXED, ON_DISK, FIFTIES, ROUGH], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_block_with_fewer_rows_is_as_on_a_fresh_engine(
    tiny: Tiny, folder: Path, backend: str, percent: Percent
) -> None:
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), percent, True, BACKENDS[backend])
    blocks = [case.prompts(), case.prompts(seed=5)[:3], random_ids(case.tiny.config, (14, 14, 1, 3, 2), 6)]
    with opened(case, folder) as runtime:
        got = [first_tokens(runtime.engine(case.sizes), prompts) for prompts in blocks]
    for prompts, logits in zip(blocks, got, strict=True):
        with opened(Case(case.tiny, case.block, case.rule, overlap=False), folder) as fresh:
            assert torch.equal(logits, first_tokens(fresh.engine(case.sizes), prompts))


def first_tokens(engine: object, prompts: list[list[int]], steps: int = 4) -> Tensor:
    """Logits of greedy decoding: [rows, steps, vocab_size]."""
    chooser = GreedyTokens(len(prompts))
    run_block(engine, prompts, steps, chooser)  # type: ignore[arg-type]
    return chooser.all_logits()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_early_stop_leaves_the_engine_as_it_was(tiny: Tiny, folder: Path, backend: str, steps: int) -> None:
    """What was on its way when the block ended must not end up in the next block."""
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), ROUGH, True, BACKENDS[backend])
    with opened(case, folder) as runtime:
        engine = runtime.engine(case.sizes)
        stopping = GreedyTokens(len(case.prompts()), steps)
        run_block(engine, case.prompts(), 9, stopping)
        after = first_tokens(engine, case.prompts(seed=3))
    with opened(Case(case.tiny, case.block, case.rule, overlap=False), folder) as fresh:
        expected = first_tokens(fresh.engine(case.sizes), case.prompts())
        assert len(stopping.tokens) == steps
        assert torch.equal(stopping.all_logits(), expected[:, :steps])
        assert torch.equal(after, first_tokens(fresh.engine(case.sizes), case.prompts(seed=3)))
    assert_all_given_back(runtime, folder)


def test_who_runs_ahead_of_slow_copies_does_not_fill_the_device(
    tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more hidden states of sub-batches are there at once than are counted."""
    there: list[weakref.ref[Tensor]] = []
    most = 0
    put, load = HiddenStore.put, HiddenStore.load

    def note(store: HiddenStore, group: int) -> None:
        nonlocal most
        there.append(weakref.ref(store._places[group].on_device))  # type: ignore[arg-type]
        most = max(most, len({id(hidden) for ref in there if (hidden := ref()) is not None and len(hidden) > 1}))

    def noted_put(store: HiddenStore, group: int, hidden: Tensor) -> None:
        put(store, group, hidden)
        note(store, group)

    def noted_load(store: HiddenStore, group: int) -> None:
        load(store, group)
        note(store, group)

    monkeypatch.setattr(HiddenStore, "put", noted_put)
    monkeypatch.setattr(HiddenStore, "load", noted_load)
    policy, backend = Policy(1, 8), Backend(True, make=lambda: delayed_threads(3, 0.005))
    case = Case(tiny(), Block(policy, (12,) * 8), H2O(3, 4), Percent(100, 0, 100, 0, 0, 0), True, backend)
    with opened(case, folder) as runtime:
        runtime.engine(case.sizes).run(pad(case.prompts()), 2, GreedyTokens(8))
        assert 1 < most <= 1 + runtime.policy.travelling_hidden


@pytest.mark.parametrize("percent", [MIXED, ON_DISK, FIFTIES, ROUGH], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_is_prefill_alone(tiny: Tiny, folder: Path, backend: str, percent: Percent) -> None:
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), percent, True, BACKENDS[backend])
    plain = Case(case.tiny, case.block, case.rule, overlap=False)
    assert torch.equal(case_logits(case, folder, steps=0), case_logits(plain, folder, steps=0))


def test_engines_of_several_sizes_follow_one_another_on_a_runtime(tiny: Tiny, folder: Path) -> None:
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), ROUGH, True, BACKENDS["threads"])
    smaller = Case(case.tiny, Block(case.block.policy, (6, 3)), Local(0, 3), ROUGH, True, BACKENDS["threads"])
    with opened(case, folder) as runtime:
        for each in (case, smaller, case):
            logits = first_tokens(runtime.engine(each.sizes), each.prompts())
            with opened(Case(each.tiny, each.block, each.rule, overlap=False), folder) as fresh:
                assert torch.equal(logits, first_tokens(fresh.engine(each.sizes), each.prompts()))
    assert_all_given_back(runtime, folder)


# --- order, whatever the timing ---


def races(case: Case, folder: Path) -> list[str]:
    """Races of two blocks on one engine, the first of which stops early, with weights on their way."""
    detector = RaceDetector()
    watched = Case(
        case.tiny, case.block, case.rule, case.percent, case.overlap,
        Backend(False, case.backend.attend_at_home, lambda: detector),
    )  # fmt: skip
    with opened(watched, folder) as runtime:
        engine = runtime.engine(watched.sizes)
        with detector:
            for prompts, steps in ((watched.prompts(), 2), (watched.prompts(seed=3)[:4], 3)):
                chooser = GreedyTokens(len(prompts), steps)
                engine.run(pad(prompts), 6, chooser)
                detector.read_results()
    assert detector.moved["h2d"] + detector.moved["disk_read"] or case.percent == Percent()
    return detector.races


SPREAD_OUT = [
    *(HOMES[name] for name in ("all_cpu", "all_disk", "mixed", "fifties")),
    ROUGH,
    Percent(0, 50, 0, 50, 0, 50),
]


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("at_home", [False, True], ids=["loaded", "at_home"])
@pytest.mark.parametrize("percent", SPREAD_OUT, ids=str)
def test_whatever_touches_the_same_memory_is_ordered(
    tiny: Tiny, folder: Path, percent: Percent, at_home: bool, overlap: bool
) -> None:
    backend = Backend(False, at_home)
    one_unit = small_block(gpu_batch_size=5, num_gpu_batches=1, decode_batch_size=5)
    by_row = Block(Policy(1, 3, 1), (5, 2, 6))
    for variant, block in (("pre_norm", small_block()), ("pre_norm", one_unit), ("untied", by_row)):
        case = Case(tiny(variant, std=PEAKED), block, H2O(3, 4), percent, overlap, backend)
        assert races(case, folder)[:3] == []


def test_the_detector_sees_a_copy_that_nobody_waits_for() -> None:
    detector = RaceDetector()
    home, here = torch.ones(8), torch.zeros(8)
    with detector:
        here += 1
        detector.submit("h2d", lambda: detector.copy("h2d", here, home), [detector.used()])
        here += 1
    assert len(detector.races) == 1 and "h2d to" in detector.races[0]


def test_the_detector_sees_a_buffer_that_is_overwritten_while_in_use() -> None:
    detector = RaceDetector()
    home, here = torch.ones(8), torch.zeros(8)
    with detector:
        before = detector.used()
        (here + 1).sum()
        detector.submit("h2d", lambda: detector.copy("h2d", here, home), [before])
    assert len(detector.races) == 1


def test_the_detector_is_content_with_what_was_waited_for() -> None:
    detector = RaceDetector()
    home, here = torch.ones(8), torch.zeros(8)
    with detector:
        here += 1
        ticket = detector.submit("h2d", lambda: detector.copy("h2d", here, home), [detector.used()])
        ticket.wait()
        here += 1
        back = detector.submit("d2h", lambda: detector.copy("d2h", home, here), [detector.used()])
        detector.submit("h2d", lambda: detector.copy("h2d", here, home), [back])
    assert detector.races == []


def test_forced_tokens_reach_every_step(tiny: Tiny, folder: Path) -> None:
    """The comparison above would hold of nothing at all, were logits never written."""
    case = Case(tiny(std=PEAKED), small_block(), H2O(3, 4), ROUGH, True, BACKENDS["threads"])
    chooser = ForcedTokens(case.forced())
    with opened(case, folder) as runtime:
        run_block(runtime.engine(case.sizes), case.prompts(), 7, chooser)
    assert len(chooser.logits) == 7 and chooser.all_logits().isfinite().all()
