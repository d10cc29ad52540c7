"""The training itself: steps of two optimisers over documents by number, and a file from which it goes on."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import OPTForCausalLM

from demo_training.circuits import seed_circuits
from demo_training.corpus import LEADING_ID, Corpus
from demo_training.documents import ANSWER_WEIGHT, Documents, Mix
from demo_training.model import Shape, logits, new_model, weighted_loss
from flexgen_h2o.basics.errors import UsageError

WARM_UP = 60  # steps
LEAST_RATE = 0.04  # of the highest, at the end
JUDGED = 8  # held-out documents of either kind
MEASURED = (20, 50)  # steps between which is timed how long one takes
BETAS, EPSILON = (0.9, 0.97), 1e-10


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Everything on which its weights depend, beside the corpus.

    Attributes:
        steps: None for as many as `minutes` allow.
        batch: documents of a step.
        matrix_rate: highest learning rate of the layers' matrices (Muon, Jordan et al. 2024); other_rate: of all
            other parameters (AdamW).
        hold: share of the steps before the rates begin to fall, along a cosine.
        circuits: begin with the structured start.
    """

    shape: Shape
    steps: int | None
    minutes: float
    batch: int
    matrix_rate: float
    other_rate: float
    hold: float
    mix: Mix
    circuits: bool
    seed: int


class Training:
    """A model on its way, from the start or from where a run was interrupted.

    Args:
        folder: where the file `training.pt` is, and stays.
        workers: processes that make documents; 0 for none.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, device: torch.device, folder: Path, workers: int):
        self.recipe = recipe
        self.device = device
        self._folder = folder
        self._workers = workers
        length = recipe.shape.context
        self._documents = Documents(corpus.tokenizer, corpus.train, length, recipe.mix, recipe.seed)
        self._judged_text = _windows(corpus.held_out, length).to(device)
        asked = Documents(corpus.tokenizer, corpus.held_out, length, Mix(1.0, 0.0), recipe.seed + 1)
        self._judged_recall = [parts.to(device) for parts in _first(asked, JUDGED)]
        self.model = new_model(recipe.shape, recipe.seed)
        if recipe.circuits:
            seed_circuits(self.model)
        self.model.train()
        self.model.to(device)  # type: ignore[arg-type]
        self._optimisers = _optimisers(self.model, recipe, device)
        self.step = 0
        self.steps = recipe.steps
        self._go_on()

    @property
    def _file(self) -> Path:
        return self._folder / "training.pt"

    def _go_on(self) -> None:
        """Takes up what was saved, if anything was. Raises UsageError if that was another training."""
        if not self._file.exists():
            return
        saved = torch.load(self._file, map_location=self.device, weights_only=True)
        if saved["recipe"] != asdict(self.recipe):
            raise UsageError(
                f"--out {self._folder} holds a training with other settings"
                f" ({_differences(saved['recipe'], self.recipe)}); give another folder, or the same settings"
            )
        self.step, self.steps = saved["step"], saved["steps"]
        self.model.load_state_dict(saved["model"])
        for optimiser, state in zip(self._optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)

    def save(self) -> None:
        """Leaves all that is needed to go on; what was saved before stays until then."""
        part = self._file.with_suffix(".part")
        torch.save(
            {
                "recipe": asdict(self.recipe),
                "step": self.step,
                "steps": self.steps,
                "model": self.model.state_dict(),
                "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            },
            part,
        )
        os.replace(part, self._file)

    def run(self, tell: Callable[[dict[str, Any]], None], tell_every: int, save_every_s: float) -> None:
        """Trains to the end.

        Args:
            tell: told a line of the log every `tell_every` steps, and at the end.
            save_every_s: seconds between two saves.
        """
        started = saved = time.perf_counter()
        first, marks = self.step, {}
        for ids, weights in self._batches():
            loss = self._train(ids.to(self.device), weights.to(self.device))
            self.step += 1
            done = self.step - first
            if self.steps is None and done in MEASURED:
                marks[done] = self._now()
                self._settle_steps(marks)
            if self.step % tell_every == 0 or self.step == self.steps:
                seconds = time.perf_counter() - started
                tell({**self._told(float(loss)), "tokens_s": done * ids.shape[0] * (ids.shape[1] - 1) / seconds})
            if time.perf_counter() - saved > save_every_s:
                self.save()
                saved = time.perf_counter()
            if self.step == self.steps:
                break
        self.save()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _settle_steps(self, marks: dict[int, float]) -> None:
        """How many steps there will be, once it is known how long one takes."""
        if len(marks) == len(MEASURED):
            first, last = MEASURED
            seconds = (marks[last] - marks[first]) / (last - first)
            self.steps = max(self.step + 1, int(60 * self.recipe.minutes / seconds))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Documents from the first that has not been trained on."""
        batch = self.recipe.batch
        first, last = self.step, self.steps
        numbers = itertools.count(first) if last is None else iter(range(first, last))
        batches = ([step * batch + row for row in range(batch)] for step in numbers)
        return iter(DataLoader(self._documents, batch_sampler=batches, num_workers=self._workers))

    def _train(self, ids: Tensor, weights: Tensor) -> Tensor:
        """One step over [batch, length + 1] documents. Returns its loss."""
        rate = learning_rate(self.step, self.steps, self.recipe.hold)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * group["highest"]
        loss = weighted_loss(logits(self.model, ids[:, :-1]), ids[:, 1:], weights[:, 1:])
        loss.backward()
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def _told(self, loss: float) -> dict[str, Any]:
        """The log's line: loss of the last step, and of held-out text; share of passwords' words that are known."""
        text = self._judged_text
        ids, weights = self._judged_recall
        held_out = weighted_loss(logits(self.model, text[:, :-1]), text[:, 1:], torch.ones_like(text[:, 1:]))
        right = logits(self.model, ids[:, :-1]).argmax(dim=-1) == ids[:, 1:]
        asked = weights[:, 1:] == ANSWER_WEIGHT
        return {
            "step": self.step,
            "steps": self.steps,
            "loss": loss,
            "held_out_loss": float(held_out),
            "recall": float(right[asked].float().mean()) if bool(asked.any()) else None,
        }


def learning_rate(step: int, steps: int | None, hold: float) -> float:
    """Share of the highest rate at a step: up in a line, level, then down along a cosine."""
    rising = min(1.0, (step + 1) / WARM_UP)
    done = 0.0 if steps is None else step / steps
    if done < hold:
        return rising
    falling = 0.5 * (1 + math.cos(math.pi * (done - hold) / (1 - hold)))
    return rising * (LEAST_RATE + (1 - LEAST_RATE) * falling)


def _optimisers(model: OPTForCausalLM, recipe: Recipe, device: torch.device) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.01),
        torch.optim.AdamW(
            others, lr=recipe.other_rate, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=device.type == "cuda"
        ),
    ]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["highest"] = group["lr"]
    return optimisers


def _first(documents: Documents, count: int) -> list[Tensor]:
    """Ids and weights of the first documents, [count, length + 1] each."""
    pairs = [documents[number] for number in range(count)]
    return [torch.stack(parts) for parts in zip(*pairs, strict=True)]


def _windows(tokens: np.ndarray[Any, np.dtype[np.int64]], length: int) -> Tensor:
    """Evenly spaced windows of text, [JUDGED, length + 1], the leading token in front."""
    starts = np.linspace(0, len(tokens) - length - 1, JUDGED).astype(int)
    return torch.tensor([[LEADING_ID, *tokens[start : start + length]] for start in starts])


def _differences(saved: dict[str, Any], recipe: Recipe) -> str:
    now = asdict(recipe)
    return ", ".join(f"{key} {saved.get(key)} and not {value}" for key, value in now.items() if saved.get(key) != value)


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Adds a line of JSON to a log."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
