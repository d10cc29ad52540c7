"""Which entries stay, which are named by local and by global statistics, and which are taken away."""

from __future__ import annotations

from collections.abc import Callable

import torch
from by_hand import attention_of, weights_of
from support.helpers import PEAKED, TinyOpt, random_ids

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.analysis.kept import early_share, heat_map, heavy_only, kept_entries, stayed_share
from flexgen_h2o.evaluation.analysis.local_global import Global, heavy_overlap
from flexgen_h2o.evaluation.analysis.masking import Without, WithoutFirst, WithoutLight, WithoutRandom
from flexgen_h2o.evaluation.plain import walk
from flexgen_h2o.evaluation.plain_policies import PlainH2O
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.kvcache.eviction.full import Full

PROMPT_LEN, LENGTH = 6, 11
RECENT = 2


def logits(*favourites: int) -> torch.Tensor:
    """[heads, n, n]: each head looks at one column all the time."""
    made = torch.zeros(len(favourites), LENGTH, LENGTH)
    for head, column in enumerate(favourites):
        made[head, :, column] = 5.0
    return made


def columns(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def test_a_column_that_is_looked_at_stays_and_the_others_pass() -> None:
    kept = kept_entries(attention_of(logits(2, 3), PROMPT_LEN), PlainH2O(1, RECENT))
    assert kept.shape == (LENGTH - PROMPT_LEN, 1, 2, LENGTH)
    for step, column in enumerate(range(PROMPT_LEN, LENGTH)):
        assert columns(kept[step, 0, 0]) == [2, column - 1, column]
        assert columns(kept[step, 0, 1]) == [3, column - 1, column]
    heavy = heavy_only(kept, PROMPT_LEN, RECENT)
    assert all(columns(of_step[0, 0]) == [2] and columns(of_step[0, 1]) == [3] for of_step in heavy)
    assert early_share(heavy, 3) == 0.5 and early_share(heavy, 4) == 1
    assert stayed_share(heavy) == 1


def test_recent_entries_are_not_counted_as_heavy_and_what_has_just_left_them_is() -> None:
    everything = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    heavy = heavy_only(everything, prompt_len=4, recent=2)
    assert [columns(of_step[0, 0]) for of_step in heavy] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_what_the_text_turns_to_takes_the_place_of_what_it_looked_at() -> None:
    turning = 20 * torch.eye(LENGTH)[None]  # every token of the prompt looks at itself, and what follows at column 6
    turning[0, PROMPT_LEN:] = 0.0
    turning[0, PROMPT_LEN:, 6] = 20.0
    heavy = heavy_only(kept_entries(attention_of(turning, PROMPT_LEN), PlainH2O(1, RECENT)), PROMPT_LEN, RECENT)
    assert columns(heavy[0, 0, 0]) == [0] and columns(heavy[-1, 0, 0]) == [6]
    assert stayed_share(heavy) == 0


def test_a_heat_map_averages_steps_columns_rows_and_heads() -> None:
    kept = torch.zeros(4, 1, 2, 6, dtype=torch.bool)
    kept[:2, 0, 0, 0] = True  # one head, in the first half of the steps
    kept[:, 0, :, 4:] = True
    assert heat_map(kept, 2, 3).tolist() == [[0.25, 0, 1], [0, 0, 1]]
    assert heat_map(kept, 9, 9).shape == (4, 6)  # no more bins than there are steps and columns


LOOKS_BACK, TURNS = [[1.0], [0.9, 0.1], [0.8, 0.1, 0.1]], [[1.0], [0.9, 0.1], [0.0, 1.0, 0.0], [0.0, 1.0, 0, 0]]


def test_local_and_global_statistics_name_the_same_where_the_text_goes_on_as_it_was() -> None:
    assert heavy_overlap(weights_of(LOOKS_BACK), 1, 1) == 1
    assert heavy_overlap(weights_of(TURNS), 1, 1) == 0  # so far the first token, in all the second
    assert heavy_overlap(weights_of(TURNS), 3, 1) == 1
    assert heavy_overlap(weights_of(TURNS), 1, 2) == 1


def test_global_statistics_keep_what_will_be_looked_at() -> None:
    turning = torch.zeros(1, LENGTH, LENGTH)
    turning[0, :PROMPT_LEN, 1], turning[0, PROMPT_LEN:, 3] = 5.0, 9.0
    attention = attention_of(turning, PROMPT_LEN)
    for policy, expected in ((PlainH2O(1, RECENT), 1), (Global(1, RECENT), 3)):
        column, allowed, _ = next(walk(attention, policy))
        assert columns(allowed[0, 0]) == [expected, column - 1, column]


def test_the_heaviest_the_lightest_the_first_or_random_entries_are_taken_away() -> None:
    attention = attention_of(logits(2, 3), PROMPT_LEN)
    kept = {policy.name: policy for policy in (Without(1), WithoutLight(1), WithoutFirst(), WithoutRandom(3))}
    masks = {name: next(walk(attention, policy))[1] for name, policy in kept.items()}
    assert [columns(~head) for head in masks["without the heavy hitters"][0]] == [[2], [3]]
    # The prompt's last token has been seen by one query only.
    assert [columns(~head) for head in masks["without the lightest entries"][0]] == [[5], [5]]
    assert [columns(~head) for head in masks["without the first token"][0]] == [[0], [0]]
    random = masks["without random entries"][0]
    assert [len(columns(~head)) for head in random] == [3, 3] and columns(random[0]) != columns(random[1])
    assert all(head[PROMPT_LEN:].all() for mask in masks.values() for head in mask[0])


def test_with_nothing_taken_away_scores_are_the_full_caches(tiny: Callable[..., TinyOpt]) -> None:
    peaked = tiny("pre_norm", std=PEAKED)
    judge = Judge(LLM(str(peaked.folder), dtype="float32", gpu_batch_size=2), PROMPT_LEN)
    documents = torch.tensor(random_ids(peaked.config, [LENGTH] * 3))
    full = judge.score_all(Full(0, LENGTH), documents).nll
    assert full.shape == (3, LENGTH - PROMPT_LEN)
    assert torch.allclose(judge.score_all(Without(0), documents).nll, full, atol=1e-4)
    assert not torch.allclose(judge.score_all(Without(2), documents).nll, full, atol=1e-2)
    # Alone or among others, a document has the same scores.
    alone, among = judge.score(Without(2), documents[2:]).nll, judge.score_all(Without(2), documents).nll[2:]
    assert torch.allclose(alone, among, atol=1e-4)
