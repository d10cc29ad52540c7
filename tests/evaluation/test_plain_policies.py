"""The plain path against the evicting cache, and its policies against what they say, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from support.helpers import PEAKED, TinyOpt, random_ids
from torch import Tensor

from flexgen_h2o import LLM
from flexgen_h2o.evaluation.plain import LayerAttention, PlainPolicy
from flexgen_h2o.evaluation.plain_policies import Mean, Oracle, PlainH2O, Pyramid, Random, TopK, TopKHeavy
from flexgen_h2o.evaluation.scoring import Judge
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.local import Local

# --- a whole model ---

PROMPT_LEN, TOKENS = 20, 12
LENGTH = PROMPT_LEN + TOKENS


@pytest.fixture(scope="module")
def peaked(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny("pre_norm", std=PEAKED)


@pytest.fixture(scope="module")
def judge(peaked: TinyOpt) -> Judge:
    return Judge(LLM(str(peaked.folder), dtype="float32"), PROMPT_LEN)


@pytest.fixture(scope="module")
def documents(peaked: TinyOpt) -> Tensor:
    return torch.tensor(random_ids(peaked.config, [LENGTH] * 4))


@pytest.mark.parametrize("sizes", [(3, 4), (0, 5), (1, 1), (10, 3), (4, 25), (40, 3)], ids=str)
def test_h2o_is_the_same_on_both_paths(judge: Judge, documents: Tensor, sizes: tuple[int, int]) -> None:
    on_cache, plain = judge.score(H2O(*sizes), documents), judge.score(PlainH2O(*sizes), documents)
    assert torch.allclose(on_cache.nll, plain.nll, atol=1e-4)


@pytest.mark.parametrize("variant", ["post_norm_projected", "galactica"])
def test_both_paths_agree_for_other_architectures(tiny: Callable[..., TinyOpt], variant: str) -> None:
    model = tiny(variant, std=PEAKED)
    judge = Judge(LLM(str(model.folder), dtype="float32"), PROMPT_LEN)
    documents = torch.tensor(random_ids(model.config, [LENGTH] * 3))
    on_cache, plain = judge.score(H2O(3, 4), documents), judge.score(PlainH2O(3, 4), documents)
    assert torch.allclose(on_cache.nll, plain.nll, atol=1e-4)


def test_prompts_are_computed_anew_for_other_documents(judge: Judge, documents: Tensor) -> None:
    others = documents.flip(0)
    for batch in (documents, others, documents):
        assert torch.allclose(judge.score(TopK(40), batch).nll, judge.score(Full(0, LENGTH), batch).nll, atol=1e-4)


@pytest.mark.parametrize("policy", [Mean(0, 5), Random(0, 5), Oracle(0, 5), Pyramid(0, 5, 3)], ids=lambda p: p.name)
def test_without_heavy_entries_only_the_recent_ones_are_left(
    judge: Judge, documents: Tensor, policy: PlainPolicy
) -> None:
    assert torch.allclose(judge.score(policy, documents).nll, judge.score(Local(0, 5), documents).nll, atol=1e-4)


# --- one layer, against a slow account ---

ROWS, HEADS, COLUMNS, HEAD_DIM = 2, 3, 30, 8


@pytest.fixture(scope="module")
def attention() -> LayerAttention:
    generator = torch.Generator().manual_seed(11)
    query, key = (torch.randn(ROWS, HEADS, COLUMNS, HEAD_DIM, generator=generator) for _ in range(2))
    return LayerAttention(1, PROMPT_LEN, query, key)


def slow_weights(attention: LayerAttention, row: int, head: int, column: int) -> list[float]:
    """What a query gives every column up to its own, everything kept."""
    query = attention.queries[row, head, column]
    logits = [float(query @ attention.keys[row, head, c]) for c in range(column + 1)]
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def walk(policy: PlainPolicy, attention: LayerAttention) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(column, mask, weights) of every token after the prompt, the policy being told each."""
    policy.begin(attention)
    for column in range(attention.prompt_len, COLUMNS):
        logits = attention.queries[:, :, column, None] @ attention.keys[:, :, : column + 1].transpose(2, 3)
        mask = policy.allowed(column, logits[:, :, 0])
        weights = logits[:, :, 0].masked_fill(~mask, -torch.inf).softmax(dim=-1)
        policy.observe(column, weights)
        yield column, mask, weights


def pairs() -> Iterator[tuple[int, int]]:
    return ((row, head) for row in range(ROWS) for head in range(HEADS))


def test_sums_and_weights_are_those_of_every_query_by_itself(attention: LayerAttention) -> None:
    sums, weights = attention.prompt_sums(), attention.weights(5, 9)
    assert weights.shape == (ROWS, HEADS, 4, 9)
    for row, head in pairs():
        by_query = [slow_weights(attention, row, head, column) for column in range(PROMPT_LEN)]
        for column in range(PROMPT_LEN):
            expected = sum(query[column] for query in by_query[column:])
            assert float(sums[row, head, column]) == pytest.approx(expected, rel=1e-4)
        for query in range(4):
            padded = by_query[5 + query] + [0.0] * (8 - 5 - query)
            assert weights[row, head, query].tolist() == pytest.approx(padded, abs=1e-6)


def kept_by_scores(
    attention: LayerAttention, heavy: int, recent: int, score: Callable[[int, int, int, int], float]
) -> Iterator[tuple[int, int, int, set[int]]]:
    """What a slow account keeps: score(row, head, column, now), where columns before `now` have attended."""
    for row, head in pairs():
        left = sorted(range(PROMPT_LEN - recent), key=lambda c, at=(row, head): (-score(*at, c, PROMPT_LEN), c))
        kept = set(left[:heavy])
        for column in range(PROMPT_LEN, COLUMNS):
            leaving = column - recent
            lowest = min(kept, key=lambda c, at=(row, head, column): score(*at[:2], c, at[2]))
            if score(row, head, leaving, column) > score(row, head, lowest, column):
                kept = kept - {lowest} | {leaving}
            yield row, head, column, kept | set(range(leaving + 1, column + 1))


def test_mean_keeps_what_has_received_most_per_token_since(attention: LayerAttention) -> None:
    policy = Mean(4, 3)
    found = list(walk(policy, attention))
    given = {column: weights for column, _, weights in found}

    def score(row: int, head: int, column: int, now: int) -> float:
        prompt = [slow_weights(attention, row, head, query)[column] for query in range(column, min(now, PROMPT_LEN))]
        decoded = [float(given[query][row, head, column]) for query in range(max(PROMPT_LEN, column), now)]
        return sum(prompt + decoded) / (now - column)

    for row, head, column, kept in kept_by_scores(attention, 4, 3, score):
        mask = found[column - PROMPT_LEN][1][row, head]
        assert set(mask.nonzero().flatten().tolist()) == kept, (row, head, column)


def test_the_oracle_keeps_what_will_be_looked_at(attention: LayerAttention) -> None:
    def score(row: int, head: int, column: int, now: int) -> float:
        return sum(slow_weights(attention, row, head, query)[column] for query in range(now, COLUMNS))

    found = list(walk(Oracle(4, 3), attention))
    for row, head, column, kept in kept_by_scores(attention, 4, 3, score):
        mask = found[column - PROMPT_LEN][1][row, head]
        assert set(mask.nonzero().flatten().tolist()) == kept, (row, head, column)


def test_random_keeps_as_many_as_h2o_and_others_in_every_layer_and_head(attention: LayerAttention) -> None:
    masks = [mask for _, mask, _ in walk(Random(6, 3), attention)]
    assert all((mask.sum(dim=-1) == 9).all() for mask in masks)
    again = [mask for _, mask, _ in walk(Random(6, 3), attention)]
    assert all(torch.equal(*pair) for pair in zip(masks, again, strict=True))
    other_layer = LayerAttention(0, PROMPT_LEN, attention.queries, attention.keys)
    first = next(walk(Random(6, 3), other_layer))[1]
    assert len({tuple(head.tolist()) for mask in (first, masks[0]) for row in mask for head in row}) == 2 * ROWS * HEADS
    # Old entries leave for younger ones: an entry's chance does not depend on its age.
    assert not torch.equal(masks[0][..., :10], masks[-1][..., :10])


def test_top_k_attends_to_the_highest_logits(attention: LayerAttention) -> None:
    for column, mask, _ in walk(TopK(5), attention):
        for row, head in pairs():
            weights = slow_weights(attention, row, head, column)
            best = sorted(range(column + 1), key=lambda c, weights=weights: -weights[c])[:5]
            assert set(mask[row, head].nonzero().flatten().tolist()) == set(best)


def test_top_k_with_heavy_hitters_attends_to_both(attention: LayerAttention) -> None:
    received = attention.prompt_sums()
    for column, mask, weights in walk(TopKHeavy(4, 3), attention):
        received = torch.cat((received, torch.zeros(ROWS, HEADS, 1)), dim=-1)
        for row, head in pairs():
            heavy = received[row, head].topk(4).indices.tolist()
            alone = slow_weights(attention, row, head, column)
            others = sorted((c for c in range(column + 1) if c not in heavy), key=lambda c, a=alone: -a[c])
            assert set(mask[row, head].nonzero().flatten().tolist()) == {*heavy, *others[:3]}
        received += weights


@pytest.mark.parametrize(
    ("heavy", "layers", "slope", "expected"),
    [
        (38, 4, 0.5, [57, 44, 32, 19]),
        (38, 4, 0.0, [38, 38, 38, 38]),
        (10, 1, 0.5, [10]),
        (1, 4, 0.5, [2, 1, 0, 1]),
        (7, 4, -0.5, [4, 6, 8, 10]),
    ],
)
def test_a_pyramid_has_more_below_and_as_many_in_all(
    heavy: int, layers: int, slope: float, expected: list[int]
) -> None:
    policy = Pyramid(heavy, 1, layers, slope)
    found = [policy.heavy_of(layer) for layer in range(layers)]
    assert sum(found) == heavy * layers
    assert found == pytest.approx(expected, abs=1)


def test_a_pyramid_without_a_slope_is_h2o(judge: Judge, documents: Tensor) -> None:
    flat, steep, h2o = (
        judge.score(p, documents).nll for p in (Pyramid(4, 3, 3, 0.0), Pyramid(4, 3, 3), PlainH2O(4, 3))
    )
    assert torch.equal(flat, h2o) and not torch.allclose(steep, h2o, atol=1e-3)
