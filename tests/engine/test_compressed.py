"""4-bit groups compose with everything: every eviction, every home, attention beside the KV or on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.helpers import BLOCKS, PEAKED, Block, TinyOpt, random_forced, random_ids, run_forced
from support.placed import BACKENDS, HOMES, RULES, STEPS, Case, case_logits, opened
from support.reference import ReferenceRule, reference_logits
from support.tiny_models import VARIANTS
from torch import Tensor

from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.kv_shape import UnitShape

Tiny = Callable[..., TinyOpt]
WAYS = {"cache": {"compress_cache": True}, "cache, ring in 16 bits": {"compress_cache": True, "ring_16bit": True}}
WAYS_WITH_WEIGHTS = {
    **WAYS,
    "weights": {"compress_weight": True},
    "weights and cache": {"compress_weight": True, "compress_cache": True},
    "weights and cache, ring in 16 bits": {"compress_weight": True, "compress_cache": True, "ring_16bit": True},
}
PLACES = list(itertools.product(HOMES, BACKENDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed")


def compressed(block: Block, way: str) -> Block:
    return replace(block, policy=replace(block.policy, **WAYS_WITH_WEIGHTS[way]))


def slow_logits(
    tiny_opt: TinyOpt,
    rule: EvictionRule,
    four_bits: str,
    block: Block,
    steps: int,
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    prompts = random_ids(tiny_opt.config, block.lengths)
    forced = random_forced(tiny_opt.config, len(prompts), steps)
    reference = ReferenceRule(rule.name, rule.heavy, rule.recent, four_bits=four_bits)
    rows = [
        reference_logits(weights or tiny_opt.model.state_dict(), tiny_opt.model.config, prompt, row.tolist(), reference)
        for prompt, row in zip(prompts, forced, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_the_reference(tiny: Tiny, rule: EvictionRule, way: str) -> None:
    """A key that lies between two codes may fall to the other one; that moves one row a little, and not the others."""
    tiny_opt, block = tiny("pre_norm", std=PEAKED), BLOCKS["2x4_in_groups_of_4"]
    prompts = random_ids(tiny_opt.config, block.lengths)
    engine = tiny_opt.engine(rule, compressed(block, way).policy, len(prompts))
    found = run_forced(engine, prompts, random_forced(tiny_opt.config, len(prompts), STEPS))
    expected = slow_logits(tiny_opt, rule, "heavy" if "ring" in way else "all", block, STEPS)
    exact = slow_logits(tiny_opt, rule, "none", block, STEPS)
    off = (found - expected).abs().amax(dim=-1)  # [rows, steps + 1]
    assert (off.amax(dim=1) < 1e-4).double().mean() > 0.7
    changed = (expected - exact).abs().max()
    is_rounded = "ring" not in way or rule.heavy > 0
    assert (changed > 0.05) == is_rounded
    assert off.max() < max(0.5 * changed.item(), 1e-4)
    assert torch.equal(off[:, 0] < 1e-4, torch.ones(len(prompts), dtype=torch.bool))  # prefill keeps full precision


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_weights_in_4_bits_logits_are_those_of_the_reference(tiny: Tiny, folder: Path, variant: str) -> None:
    tiny_opt, block, rule = tiny(variant, std=PEAKED), BLOCKS["3x2"], RULES["h2o"]
    case = Case(tiny_opt, compressed(block, "weights"), rule)
    rounded = {
        name: quant.decode(quant.encode_weight(tensor), tensor.shape[1], torch.float32) if tensor.dim() == 2 else tensor
        for name, tensor in tiny_opt.model.state_dict().items()
    }
    expected = slow_logits(tiny_opt, rule, "none", block, STEPS, rounded)
    exact = slow_logits(tiny_opt, rule, "none", block, STEPS)
    found = case_logits(case, folder)
    assert (expected - exact).abs().max() > 0.05
    assert (found - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max().item())


def test_every_matrix_is_in_4_bits(tiny: Tiny, folder: Path) -> None:
    case = Case(tiny("pre_norm"), compressed(BLOCKS["1x1"], "weights"), RULES["h2o"])
    shapes = case.tiny.config.shapes()
    with opened(case, folder) as runtime:
        matrices = sum(shape[0] * entry_bytes(shape[1]) for shape in shapes.values() if len(shape) == 2)
        vectors = sum(4 * shape[0] for shape in shapes.values() if len(shape) == 1)
        held = runtime.weights.nbytes
    assert matrices + vectors <= held <= 1.6 * matrices + vectors  # of matrices this small, padding is a part


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS_WITH_WEIGHTS)
def test_homes_do_not_change_a_bit(tiny: Tiny, folder: Path, rule: str, way: str) -> None:
    tiny_opt, block = tiny("pre_norm", std=PEAKED), compressed(BLOCKS["2x4_in_groups_of_4"], way)
    expected = case_logits(Case(tiny_opt, block, RULES[rule], overlap=False), folder)
    differing = [
        place
        for place in PLACES[list(RULES).index(rule) :: 2]
        if not torch.equal(
            case_logits(Case(tiny_opt, block, RULES[rule], HOMES[place[0]], True, BACKENDS[place[1]]), folder), expected
        )
    ]
    assert differing == []


@pytest.mark.parametrize("head_dim", [1, 5, 63, 64, 65, 80, 128])
def test_bytes_follow_the_formula(head_dim: int) -> None:
    shape = UnitShape(2, 3, head_dim, heavy=4, recent=7, heavy_in_4_bits=True, ring_in_4_bits=True)
    bits = 4 + 32 * -(-head_dim // 64) / head_dim
    entries = 2 * 2 * 3 * 11
    assert shape.kv_bytes(2) == entries * entry_bytes(head_dim)
    assert 0 <= shape.kv_bytes(2) - entries * head_dim * bits / 8 <= entries / 2  # half a byte where dims are odd
    mixed = replace(shape, ring_in_4_bits=False)
    assert mixed.kv_bytes(2) == 2 * 2 * 3 * (4 * entry_bytes(head_dim) + 7 * head_dim * 2)
