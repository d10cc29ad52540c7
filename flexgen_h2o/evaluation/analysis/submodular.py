"""How near greedy eviction comes to the best that could have been kept (H2O, section 4, theorem 4.4, appendix D).

Two questions, on prompts so short that everything can be tried:

- Evicting one entry at a time, none of which comes back, how much attention do the kept entries receive, beside the
  best way to evict? The paper bounds the greedy one from below by 1 - 1/e of the best, less an error.
- The bound assumes that what a set of entries is worth is submodular: an entry adds less to a larger set. The attention
  that a set receives is a sum, for which that holds as an equality. What counts in the end is attention's output; for
  how near a set brings it to that of all entries, it need not hold.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer
from flexgen_h2o.evaluation.analysis.kept import kept_entries
from flexgen_h2o.evaluation.analysis.subject import Result, Subject
from flexgen_h2o.evaluation.plain_policies import PlainH2O

BOUND = 1 - 1 / math.e
PROMPT_LEN, LENGTH, ENTRIES, RECENT = 12, 20, 6, 3  # of the prompts on which every way to evict is tried
SET_LEN, SET_ENTRIES = 10, 3  # of those on which every set is tried
DOCUMENTS = 8
TINY = 1e-6  # a difference that rounding makes


def kept_weight(weights: Tensor, kept: Tensor, prompt_len: int) -> Tensor:
    """What the tokens after the prompt would give to the entries that were kept for them, if all had been kept.

    Args:
        weights: [rows, heads, n, n]. kept: bool [n - prompt_len, rows, heads, n].
    Returns: [rows, heads], the mean over tokens.
    """
    return (weights[:, :, prompt_len:] * kept.permute(1, 2, 0, 3)).sum(dim=-1).mean(dim=-1)


@dataclass(frozen=True)
class EvictionPaths:
    """All ways to evict on texts of one length.

    Attributes:
        states: for each token after the prompt, [sets, entries] the columns that may be kept for it, its own the last.
        before: for each of them but the first, [sets, ways] numbers of the sets of the token before that a set may come
            from; ways that do not exist repeat the first.
    """

    states: list[Tensor]
    before: list[Tensor]


def eviction_paths(prompt_len: int, length: int, entries: int) -> EvictionPaths:
    """All ways to keep `entries` entries (at most prompt_len + 1) at a time.

    A token's own entry is always kept for it, and what was evicted does not come back. Beside its own, the first token
    after the prompt may keep any of the prompt's.
    """
    states = [
        [(*others, column) for others in itertools.combinations(range(column), entries - 1)]
        for column in range(prompt_len, length)
    ]
    before = [_ways_into(now, earlier) for earlier, now in itertools.pairwise(states)]
    return EvictionPaths([torch.tensor(of_column) for of_column in states], before)


def _ways_into(states: Sequence[tuple[int, ...]], earlier: Sequence[tuple[int, ...]]) -> Tensor:
    """[states, ways] numbers of the earlier sets that each set may come from."""
    number = {state: index for index, state in enumerate(earlier)}
    own = earlier[0][-1]
    ways = []
    for *others, _ in states:
        # The set before had these and one more, which was evicted; the own entry of that token was among them.
        evicted = [own] if own not in others else [column for column in range(own) if column not in others]
        ways.append([number[tuple(sorted((*others, column)))] for column in evicted])
    most = max(map(len, ways))
    return torch.tensor([way + way[:1] * (most - len(way)) for way in ways])


def best_kept_weight(weights: Tensor, paths: EvictionPaths) -> Tensor:
    """The most that kept_weight() can be, over all ways to evict: [batch, n, n] -> [batch]."""
    prompt_len = int(paths.states[0][0, -1])
    collected = torch.zeros(len(weights), 1, device=weights.device)
    for step, states in enumerate(paths.states):
        received = weights[:, prompt_len + step][:, states].sum(dim=-1)  # [batch, sets]
        collected = received + (collected[:, paths.before[step - 1]].amax(dim=-1) if step else 0)
    return collected.amax(dim=1) / len(paths.states)


def set_values(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What every set of entries is worth to a query: how much nearer it brings attention's output to that of all.

    1 for all entries and 0 for none: 1 - |output of the set - output of all|² / |output of all|².

    Args:
        query: [batch, head_dim], scaled. keys, values: [batch, n, head_dim].
    Returns: [batch, 2 ** n], where set number s has entry i if bit i of s is set.
    """
    n = keys.shape[1]
    numbers = torch.arange(2**n, device=keys.device)
    has = (numbers[:, None] >> torch.arange(n, device=keys.device)) & 1 == 1  # [sets, n]
    powers = (keys @ query[:, :, None]).squeeze(2).softmax(dim=-1)[:, None] * has
    outputs = (powers / powers.sum(dim=-1, keepdim=True).clamp(min=1e-30)) @ values  # [batch, sets, head_dim]
    all_kept = outputs[:, -1:]
    return 1 - (outputs - all_kept).square().sum(dim=-1) / all_kept.square().sum(dim=-1)


def diminishing_share(worth: Tensor) -> float:
    """For which share of the sets an entry adds no more once another has been added: 1 if the worth is submodular.

    f(S + a) + f(S + b) >= f(S + a + b) + f(S), for all sets S and pairs of entries outside of it.

    Args:
        worth: [batch, 2 ** n], as set_values() numbers sets.
    """
    n = worth.shape[1].bit_length() - 1
    numbers = torch.arange(2**n, device=worth.device)
    held = total = 0
    for a, b in itertools.combinations(range(n), 2):
        neither = numbers[(numbers >> a & 1 == 0) & (numbers >> b & 1 == 0)]
        gain = worth[:, neither | 1 << a] + worth[:, neither | 1 << b]
        held += int((gain >= worth[:, neither | 1 << a | 1 << b] + worth[:, neither] - TINY).sum())
        total += gain.numel()
    return held / total


def greedy_worth(worth: Tensor, entries: int) -> Tensor:
    """What a set is worth to which the best entry is added, one after the other: [batch, 2 ** n] -> [batch]."""
    n = worth.shape[1].bit_length() - 1
    chosen = torch.zeros(len(worth), dtype=torch.int64, device=worth.device)
    for _ in range(entries):
        with_each = chosen[:, None] | 1 << torch.arange(n, device=worth.device)
        gained = worth.gather(1, with_each).masked_fill(with_each == chosen[:, None], -torch.inf)
        chosen = with_each.gather(1, gained.argmax(dim=1, keepdim=True)).squeeze(1)
    return worth.gather(1, chosen[:, None]).squeeze(1)


def best_worth(worth: Tensor, entries: int) -> Tensor:
    """The most that a set of so many entries is worth: [batch, 2 ** n] -> [batch]."""
    sets = [number for number in range(worth.shape[1]) if number.bit_count() == entries]
    return worth[:, sets].amax(dim=1)


def analyse(subject: Subject) -> Result:
    """Ratios and shares by layer, over the beginnings of a few documents."""
    documents = subject.windows[:DOCUMENTS]
    ratios = _eviction_ratios(subject, documents[:, :LENGTH])
    sets = _set_worths(subject, documents[:, :SET_LEN])
    return {
        "bound": BOUND,
        "eviction": {"prompt_len": PROMPT_LEN, "tokens": LENGTH - PROMPT_LEN, "entries": ENTRIES, "layers": ratios},
        "sets": {"tokens": SET_LEN, "entries": SET_ENTRIES, "layers": sets},
    }


def _eviction_ratios(subject: Subject, documents: Tensor) -> list[Result]:
    """Attention received by what H2O and what only the recent entries keep, over the best."""
    found: list[dict[str, list[Tensor]]] = [{"h2o": [], "local": []} for _ in range(subject.layers)]
    paths = eviction_paths(PROMPT_LEN, LENGTH, ENTRIES)
    for reading in subject.readings(documents, PROMPT_LEN):
        weights = reading.weights()
        best = best_kept_weight(weights.flatten(0, 1), paths).view(weights.shape[:2])
        for name, sizes in {"h2o": (ENTRIES - RECENT, RECENT), "local": (0, ENTRIES)}.items():
            kept = kept_entries(reading.attention, PlainH2O(*sizes)).to(weights.device)
            found[reading.layer][name].append(kept_weight(weights, kept, PROMPT_LEN) / best)
    return [
        {
            name: {"mean": float(torch.cat(parts).mean()), "least": float(torch.cat(parts).min())}
            for name, parts in both.items()
        }
        for both in found
    ]


def _set_worths(subject: Subject, documents: Tensor) -> list[Result]:
    """Whether the worth of sets to the last token's query is submodular, and what adding greedily comes to."""
    worths: list[list[Tensor]] = [[] for _ in range(subject.layers)]
    for reading in subject.readings(documents, SET_LEN):
        attention = reading.attention
        query, keys, values = (t.flatten(0, 1).double() for t in (attention.queries, attention.keys, reading.values))
        worths[reading.layer].append(set_values(query[:, -1], keys, values))
    rows = []
    for parts in worths:
        worth = torch.cat(parts)
        ratio = greedy_worth(worth, SET_ENTRIES) / best_worth(worth, SET_ENTRIES)
        rows.append(
            {
                "diminishing": diminishing_share(worth),
                "greedy_mean": float(ratio.mean()),
                "greedy_least": float(ratio.min()),
            }
        )
    return rows


def finding(result: Result) -> Finding:
    paths, sets = result["eviction"]["layers"], result["sets"]["layers"]
    least = min(row["h2o"]["least"] for row in paths)
    rows = [
        Row(
            f"attention that {name} keeps over the most that any eviction does, by layer: {which}",
            by_layer((row[policy][which] for row in paths), ".2f"),
            "at least 0.63, less an error" if (policy, which) == ("h2o", "least") else "",
        )
        for policy, name in {"h2o": "h2o", "local": "recent entries only"}.items()
        for which in ("mean", "least")
    ]
    rows += [
        Row(
            "sets of entries, by layer, for which what an entry adds to attention's output diminishes",
            by_layer(row["diminishing"] for row in sets),
            "all, by assumption",
        ),
        Row(
            "output of the set chosen entry by entry over that of the best: mean",
            by_layer((row["greedy_mean"] for row in sets), ".2f"),
        ),
        Row(
            "output of the set chosen entry by entry over that of the best: least",
            by_layer((row["greedy_least"] for row in sets), ".2f"),
            "at least 0.63, by assumption",
        ),
    ]
    return Finding(
        "Greedy eviction is near the best",
        "under the assumption that attention is submodular, greedy eviction keeps at least 1 - 1/e = 0.63 of what the"
        " best set would, less an error (theorem 4.4)",
        rows,
        least >= result["bound"],
        f"the least ratio of attention kept by h2o to the most that any eviction keeps is {least:.2f}; it had to be"
        " 0.63 for every document, layer and head",
    )


def draw(axes: Any, result: Result) -> None:
    """Ratios by layer, and the bound."""
    layers = result["eviction"]["layers"]
    for offset, name in enumerate(("h2o", "local")):
        axes.bar(
            [number + 0.4 * offset - 0.2 for number in range(len(layers))],
            [row[name]["mean"] for row in layers],
            width=0.4,
            label=name,
        )
    axes.axhline(result["bound"], color="black", linestyle="--", label="1 - 1/e")
    axes.set(xlabel="layer", ylabel="attention kept over the best possible", ylim=(0, 1.05))
    axes.legend(fontsize="small")
