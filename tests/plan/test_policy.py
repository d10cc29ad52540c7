"""How a block is cut: a sentence for every mistake."""

from __future__ import annotations

import pytest

from flexgen_h2o.plan.policy import Policy


@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(1, 1, 1), Policy(2, 4, 4), Policy(2, 4, 8), Policy(3, 1, 3), Policy(5, 7)],
    ids=str,
)
def test_sound_policies_have_no_problems(policy: Policy) -> None:
    assert policy.problems() == []


def test_a_block_is_its_batches_and_decode_takes_it_whole_unless_told() -> None:
    assert Policy(3, 4).block_rows == Policy(3, 4).group_rows == 12
    assert Policy(3, 4, 6).group_rows == 6


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(0, 1), ["--gpu-batch-size is 0", "at least 1"]),
        (Policy(1, -2), ["--num-gpu-batches is -2", "at least 1"]),
        (Policy(1, 1, 0), ["--decode-batch-size is 0", "at least 1"]),
        (Policy(4, 2, 6), ["--decode-batch-size 6", "multiple", "--gpu-batch-size 4"]),
        (Policy(4, 2, 2), ["--decode-batch-size 2", "multiple", "--gpu-batch-size 4"]),
        (Policy(4, 2, 12), ["--decode-batch-size 12", "larger than the block of 8", "--num-gpu-batches"]),
    ],
    ids=str,
)
def test_each_mistake_of_a_policy_is_one_sentence(policy: Policy, words: list[str]) -> None:
    assert len(policy.problems()) == 1
    assert all(word in policy.problems()[0] for word in words)


def test_all_mistakes_of_a_policy_are_named_at_once() -> None:
    assert len(Policy(0, 0, 0).problems()) == 3
    assert len(Policy(4, 2, 13).problems()) == 2


def test_identities_know_a_policy_by_this_text() -> None:
    """Of what was measured, and of what a run goes on with: another text would make strangers of them."""
    assert repr(Policy()) == (
        "Policy(gpu_batch_size=32, num_gpu_batches=1, decode_batch_size=None, percent=Percent(weights_gpu=100,"
        " weights_cpu=0, cache_gpu=100, cache_cpu=0, hidden_gpu=100, hidden_cpu=0), overlap=True,"
        " cpu_cache_compute=False, pin_weight=True, compress_weight=False, compress_cache=False, ring_16bit=False)"
    )
