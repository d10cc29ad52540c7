"""How the tests drive the engine, and the oracle that runs a row alone through transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from flexgen_h2o.engine.assemble import RunSizes, Runtime
from flexgen_h2o.engine.block import PromptBlock, pad_prompts
from flexgen_h2o.engine.loop import BlockTimes, Engine
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kvcache.buffer import KVBuffer
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.models.base import Parameters, TensorSource
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import OUTER
from flexgen_h2o.weights.store import Progress

IN_MEMORY = Platform(torch.device("cpu"))


@dataclass(frozen=True)
class PlacedWeights:
    """All parameters of a model in memory, as the package has placed them.

    Attributes:
        outer: what lies outside the layers. layers: one mapping per layer, named relative to it.
    """

    outer: Parameters
    layers: tuple[Parameters, ...]
    nbytes: int

    def flat(self) -> dict[str, Tensor]:
        """By full name."""
        layers = [
            (f"layers.{n}.{name}", tensor)
            for n, layer in enumerate(self.layers)
            for name, tensor in dense(layer).items()
        ]
        return {**dense(self.outer), **dict(layers)}


def dense(parameters: Parameters) -> dict[str, Tensor]:
    """All parameters as plain tensors, by name."""
    return {**parameters.tensors, **{name: matrix.dense() for name, matrix in parameters.matrices.items()}}


def place(
    config: ModelShape, dtype: torch.dtype, source: TensorSource, progress: Progress = lambda nbytes: None
) -> PlacedWeights:
    """Places parameters in memory through the package, matrices row-major."""
    runtime = Runtime(config, dtype, Policy(), IN_MEMORY)
    runtime.load(source, progress)
    store = runtime.weights
    return PlacedWeights(
        store.page(OUTER), tuple(store.page(layer) for layer in range(config.num_hidden_layers)), store.nbytes
    )


@dataclass(frozen=True)
class TinyOpt:
    """One model twice: transformers' and, loaded from its folder, the package's."""

    model: Any
    folder: Path
    config: ModelShape
    weights: PlacedWeights

    def source(self) -> TensorSource:
        """The parameters, for a runtime to load."""
        tensors = self.weights.flat()
        return lambda names: ((name, tensors[name]) for name in names)

    def engine(self, rule: EvictionRule, policy: Policy, rows: int) -> Engine:
        """An engine with everything in memory."""
        dtype = dense(self.weights.outer)["embed_positions.weight"].dtype
        layout = best_layout(IN_MEMORY.device, dtype, self.config.matrix_shapes())
        runtime = Runtime(self.config, dtype, policy, replace(IN_MEMORY, matrix_layout=layout))
        runtime.load(self.source(), lambda nbytes: None)
        return runtime.engine(RunSizes(rule, rows, self.config.max_position_embeddings))


def new_workspace(nbytes: int = 2**24) -> Workspace:
    """A workspace that is filled with NaN, lest something count on zeros."""
    return Workspace(torch.full((nbytes // 4,), torch.nan).view(torch.uint8))


def buffers(engine: Engine) -> list[list[KVBuffer]]:
    """The buffer of every unit, by layer and sub-batch, where all are in memory."""
    found = [[unit.buffer for unit in layer] for layer in engine.kv.units]
    return cast("list[list[KVBuffer]]", found)


# Standard deviation of weights with which attention prefers some tokens by far. With less, the scores that a
# prompt has summed are so alike that hardly any entry is ever replaced in decode, and no test would see that.
PEAKED = 0.3


@dataclass(frozen=True)
class Block:
    """How a block is cut, and the lengths of its prompts."""

    policy: Policy
    lengths: tuple[int, ...]


BLOCKS = {
    "1x1": Block(Policy(1, 1, 1), (7,)),
    "3x2": Block(Policy(3, 2), (5, 1, 12, 3, 20, 9)),
    # The last unit has one row only, and decode computes two units at a time.
    "2x4_in_groups_of_4": Block(Policy(2, 4, 4), (40, 1, 17, 2, 33, 8, 25)),
}


class ForcedTokens:
    """A TokenChooser that goes on with given tokens and keeps the logits.

    Attributes:
        forced: [rows, steps] the tokens; after the last, whatever the logits like best.
        logits: by step, [rows, vocab_size] each.
    """

    def __init__(self, forced: Tensor):
        self.forced = forced
        self.logits: list[Tensor] = []

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        step, rows = steps[0], list(requests)
        assert set(steps) == {step}  # rows of a block that begin together
        if step == len(self.logits):
            self.logits.append(torch.full((len(self.forced), logits.shape[-1]), torch.nan))
        self.logits[step][rows] = logits
        return self.forced[rows, step] if step < self.forced.shape[1] else logits.argmax(dim=-1)

    def finished(self) -> Sequence[int]:
        return ()

    def all_logits(self) -> Tensor:
        """[rows, steps, vocab_size]."""
        return torch.stack(self.logits, dim=1)


class GreedyTokens(ForcedTokens):
    """Goes on with the most likely token, for good or until `steps` are done.

    Attributes:
        tokens: by step, [rows] each.
    """

    def __init__(self, rows: int, steps: int | None = None):
        super().__init__(torch.empty(rows, 0, dtype=torch.int64))
        self.steps = steps
        self.tokens: list[Tensor] = []

    def choose(self, requests: Sequence[int], steps: Sequence[int], logits: Tensor) -> Tensor:
        chosen = super().choose(requests, steps, logits)
        if steps[0] == len(self.tokens):
            self.tokens.append(torch.full((len(self.forced),), -1))
        self.tokens[steps[0]][list(requests)] = chosen
        return chosen

    def finished(self) -> Sequence[int]:
        is_done = self.steps is not None and len(self.tokens) >= self.steps
        return range(len(self.forced)) if is_done else ()


def random_ids(config: ModelShape, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token ids, one list for each length."""
    rng = random.Random(seed)
    return [[rng.randrange(config.vocab_size) for _ in range(length)] for length in lengths]


def random_forced(config: ModelShape, rows: int, steps: int, seed: int = 1) -> Tensor:
    """[rows, steps] random token ids."""
    return torch.tensor(random_ids(config, [steps] * rows, seed), dtype=torch.int64).view(rows, steps)


def run_forced(engine: Engine, prompts: Sequence[Sequence[int]], forced: Tensor) -> Tensor:
    """Logits after the prompt and after each forced token: [rows, steps + 1, vocab_size]."""
    chooser = ForcedTokens(forced)
    run_block(engine, prompts, forced.shape[1] + 1, chooser)
    return chooser.all_logits()


def run_block(engine: Engine, prompts: Sequence[Sequence[int]], gen_len: int, chooser: ForcedTokens) -> BlockTimes:
    return engine.run(pad(prompts), gen_len, chooser)


def pad(prompts: Sequence[Sequence[int]], filler: int = 1) -> PromptBlock:
    return pad_prompts(prompts, filler)


@torch.no_grad()
def oracle_logits(model: Any, prompt: Sequence[int], following: Sequence[int]) -> Tensor:
    """transformers' logits after the prompt and after each following token: [len(following) + 1, vocab_size].

    One row, no padding and no cache: with everything kept, a cache changes nothing.
    """
    logits = model(torch.tensor([[*prompt, *following]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float()


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; NaN anywhere is infinitely far."""
    return (a - b).abs().nan_to_num(torch.inf).max().item()
