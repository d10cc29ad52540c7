"""What only a GPU can decide: float16 on CUDA against float32 on the CPU, for every home. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.helpers import TinyOpt, largest_difference, random_forced, random_ids, run_forced
from torch import Tensor

from flexgen_h2o.engine.assemble import RunSizes, Runtime
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.transfer import CudaTransfer
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.weights.files import WeightFolder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HOMES = {
    "gpu": Percent(),
    "cpu": Percent(0, 100, 0, 100, 0, 100),
    "disk": Percent(0, 0, 0, 0, 0, 0),
    "mixed": Percent(30, 40, 50, 20, 60, 40),
    "halves": Percent(50, 50, 50, 50, 50, 50),
}
RULES: tuple[EvictionRule, ...] = (Full(0, 60), H2O(4, 6), Local(0, 7), Sink(4, 5))
LENGTHS = (40, 1, 17, 2, 33, 8, 25)
STEPS = 8
# float16 rounds to 11 bits. Against the spread of the logits; where rounding tips an eviction one logit may differ by
# more, so the mean is held to a bound too, and the largest only where nothing is evicted.
LARGEST, MEAN = 0.03, 0.005

Tiny = Callable[..., TinyOpt]


def cuda_logits(tiny: TinyOpt, rule: EvictionRule, policy: Policy, folder: Path, staging_bytes: int = 4096) -> Tensor:
    """Logits of forced decoding on the GPU in float16. Staging is so small that every tensor takes several parts."""
    device = torch.device("cuda")
    platform = Platform(
        device, {}, joint=False, offload_dir=folder, make_transfer=lambda: CudaTransfer(device, staging_bytes)
    )
    with Runtime(tiny.config, torch.float16, policy, platform, WeightFolder(folder / "weights")) as runtime:
        runtime.load(tiny.source(), lambda nbytes: None)
        engine = runtime.engine(RunSizes(rule, len(LENGTHS), max(LENGTHS)))
        prompts = random_ids(tiny.config, LENGTHS)
        return run_forced(engine, prompts, random_forced(tiny.config, len(LENGTHS), STEPS)).cpu()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("attention", ["gpu", "cpu"])
def test_float16_on_the_gpu_equals_float32_on_the_cpu(
    tiny: Tiny, tmp_path: Path, homes: str, attention: str, rule: EvictionRule
) -> None:
    exact = tiny("pre_norm")
    prompts = random_ids(exact.config, LENGTHS)
    forced = random_forced(exact.config, len(LENGTHS), STEPS)
    expected = run_forced(exact.engine(rule, Policy(2, 4), len(LENGTHS)), prompts, forced)
    policy = Policy(2, 4, 4, HOMES[homes], cpu_cache_compute=attention == "cpu")
    found = cuda_logits(exact, rule, policy, tmp_path)
    spread = expected.std().item()
    assert (found - expected).abs().mean().item() <= MEAN * spread
    if rule.name == "full":
        assert largest_difference(found, expected) <= LARGEST * spread


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("pin_weight", [False, True])
def test_overlap_changes_no_bit(tiny: Tiny, tmp_path: Path, homes: str, pin_weight: bool) -> None:
    exact = tiny("pre_norm")
    runs = [
        cuda_logits(
            exact, H2O(4, 6), Policy(2, 4, 4, HOMES[homes], overlap=on, pin_weight=pin_weight), tmp_path / str(on)
        )
        for on in (False, True)
    ]
    assert torch.equal(*runs)
