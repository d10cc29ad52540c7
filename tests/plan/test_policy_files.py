"""Policies in files: what is written is read again, and every mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.policy_files import policy_from_json, policy_to_json, read_policy, write_policy

POLICY = Policy(8, 72, 144, Percent(18.8, 81.2, 0, 100, 0, 100), True, True, False, True, True, True)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_policy(tmp_path / "a.json", POLICY, {"model": "opt-30b"})
    assert read_policy(tmp_path / "a.json") == POLICY
    assert json.loads((tmp_path / "a.json").read_text())["about"] == {"model": "opt-30b"}
    assert policy_from_json({}, "here") == Policy()
    assert policy_from_json(policy_to_json(Policy()), "here") == Policy()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"percent": [1, 2, 3]}, "percent is [1, 2, 3]; it must be six numbers"),
        ({"percent": [60, 60, 0, 0, 0, 0]}, "60 + 60 per cent of the weights"),
        ({"gpu_batch_size": "8"}, "gpu_batch_size is '8'; it must be a whole number"),
        ({"gpu_batch_size": 0}, "--gpu-batch-size is 0; it must be at least 1"),
        ({"num_gpu_batches": True}, "num_gpu_batches is True; it must be a whole number"),
        ({"overlap": 1}, "overlap is 1; it must be true or false"),
        ({"rows": 3}, "'rows' is unknown"),
        ({"kind": "hardware"}, "kind is 'hardware'; it must be 'policy'"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        policy_from_json({**policy_to_json(Policy()), **change}, "file.json")
    assert any(text.startswith("file.json: ") and problem in text for text in refused.value.problems)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        policy_from_json({"overlap": 1, "rows": 2, "percent": None}, "file.json")
    assert len(refused.value.problems) == 3


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name in ("broken.json", "list.json", "absent.json"):
        with pytest.raises(UsageError, match=name):
            read_policy(tmp_path / name)


def test_the_policies_that_come_along_can_be_read() -> None:
    found = sorted((ROOT / "policies").glob("*.json"))
    assert found
    for path in found:
        assert not read_policy(path).problems()
