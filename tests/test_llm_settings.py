"""The keywords of the Python interface: those of the dataclasses that they fill, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o import LLM
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.kvcache.eviction.smooth import Smooth
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy


def test_settings_that_there_are_not_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        LLM(hh_ration=0.1, promptlen=5)
    first, second = caught.value.problems
    assert "'hh_ration'" in first and "'hh_ratio'" in first
    assert "'promptlen'" in second and "'prompt_len'" in second


def test_every_setting_is_a_keyword() -> None:
    eviction = {"eviction": "sink", "hh_ratio": None, "recent_ratio": None, "hh_size": None, "recent_size": 4}
    memory = {"gpu_mem": 1, "cpu_mem": 1.5, "disk_mem": 1, "offload_dir": Path("offload")}
    model = {"path": None, "device": "cpu", "dtype": "float32", "dummy_weights": True}
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 3, "percent": Percent(), "overlap": False}
    llm = LLM(None, **eviction, sink_size=2, **memory, **model, prompt_len=9, seed=3, trace=True, **policy)
    assert llm.rule(90, 10).slots == 6 and llm.policy == Policy(2, 3, overlap=False)
    assert (llm.prompt_len, llm.seed, llm.uses_dummy_weights) == (9, 3, True)
    assert llm.platform.offload_dir == Path("offload") and llm.platform.keeps_spans
    assert llm.platform.budgets["disk"] == 2**30


def test_parameters_of_an_eviction_policy_reach_its_rule() -> None:
    llm = LLM(eviction="smooth:decay=0.9,pooled=5")
    assert llm.rule(80, 20) == Smooth(10, 10, decay=0.9, pooled=5)
    assert LLM(eviction="smooth").rule(80, 20) == Smooth(10, 10)


def test_parameters_that_cannot_be_are_listed_with_the_other_mistakes() -> None:
    with pytest.raises(UsageError) as caught:
        LLM(eviction="smooth:decay=7", gpu_batch_size=0)
    assert len(caught.value.problems) == 2
