"""Rates of what a CPU does in a layer beside the products with weights, of this engine as it runs.

What grows with the rows is measured with products that take no time; what is fixed, with real products so small that
they take next to none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flexgen_h2o.engine.assemble import RunSizes, Runtime
from flexgen_h2o.engine.block import PromptBlock
from flexgen_h2o.engine.chooser import Greedy
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.layout import MatrixLayout
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import Attend, Choose, Finish, Project
from flexgen_h2o.plan.timeline import Span
from flexgen_h2o.profiling.free_matrices import FreeLayout

CPU = torch.device("cpu")
HEAD_DIM = 64
WIDE, FEW_LAYERS = 1024, 3  # of a model whose layers have much to do
NARROW, MANY_LAYERS = 64, 32  # of one whose layers have little
VOCABULARY = published("opt-125m").vocab_size
ROWS = 64  # of a decode step, for what grows with the rows to show
KEPT_SHARE = 0.1  # of a prompt, heavy and recent entries each
WARM_UP = 1  # decode steps that are not counted


@dataclass(frozen=True)
class Layers:
    """What layers do beside their products, as a subject.

    Attributes:
        dtype: the default one.
        prompt_lens: of prefill. tokens: of a sub-batch there, or one prompt's if that is longer.
        steps: of decode.
    """

    dtype: torch.dtype
    prompt_lens: Sequence[int]
    tokens: int
    steps: int

    def trial(self) -> Iterator[tuple[str, float]]:
        """Fixed seconds in a layer; logits, and bytes of hidden states, in a second."""
        narrow = model(NARROW, MANY_LAYERS, NARROW)
        layout = best_layout(CPU, self.dtype, narrow.matrix_shapes())
        spans = self._decode(narrow, layout, 1)
        products, attention = (
            seconds_of(spans, kinds) / MANY_LAYERS / self.steps for kinds in ((Project, Finish), (Attend,))
        )
        yield "operation/cpu/products", products
        yield "operation/cpu/attention", attention
        wide = model(WIDE, FEW_LAYERS, VOCABULARY)
        spans = self._decode(wide, free_layout(wide, self.dtype), ROWS)
        seconds = seconds_of(spans, (Project, Finish)) / FEW_LAYERS / self.steps
        # The two were measured apart, and differ by little where the machine is unquiet.
        yield "layer/cpu", ROWS * WIDE * self.dtype.itemsize / max(seconds - products, 0.1 * seconds)
        yield "choice/cpu", ROWS * VOCABULARY * self.steps / seconds_of(spans, (Choose,))
        for length in self.prompt_lens:
            yield f"prefill/cpu/{length}", self._prefill(length)

    def _decode(self, config: ModelShape, layout: MatrixLayout, rows: int) -> list[Span]:
        """What compute did in decode steps."""
        with opened(config, self.dtype, layout, rows) as runtime:
            run(runtime.engine(RunSizes(H2O(2, 2), rows, 4)), rows, 4, WARM_UP + self.steps)
            spans = runtime.timeline.spans
            # Not every operation tells its step: the warm-up is over when it has chosen its last token.
            chosen = (
                at for at, span in enumerate(spans) if isinstance(span.work, Choose) and span.work.step == WARM_UP
            )
            return spans[max(chosen) + 1 :]

    def _prefill(self, length: int) -> float:
        """Bytes of hidden states that pass a layer in a second."""
        config = model(WIDE, FEW_LAYERS, NARROW)
        rows, kept = max(1, self.tokens // length), max(1, int(KEPT_SHARE * length))
        with opened(config, self.dtype, free_layout(config, self.dtype), rows) as runtime:
            engine = runtime.engine(RunSizes(H2O(kept, kept), rows, length))
            run(engine, rows, length, 0)
            runtime.timeline.spans.clear()  # what was done in memory that had never been used
            run(engine, rows, length, 0)
            # Of the last layer's results only one token of a row goes on.
            whole = [span for span in runtime.timeline.spans if getattr(span.work, "layer", -1) < FEW_LAYERS - 1]
            seconds = seconds_of(whole, (Project, Attend, Finish)) / (FEW_LAYERS - 1)
        return rows * length * WIDE * self.dtype.itemsize / seconds


def model(width: int, layers: int, vocabulary: int) -> ModelShape:
    """A model's shape, like a published one's."""
    return published(
        "opt-125m",
        name=f"of width {width}",
        vocab_size=vocabulary,
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_DIM,
        ffn_dim=4 * width,
    )


def free_layout(config: ModelShape, dtype: torch.dtype) -> FreeLayout:
    """Products that take no time, in place of those of a run."""
    return FreeLayout(best_layout(CPU, dtype, config.matrix_shapes()))


@contextmanager
def opened(config: ModelShape, dtype: torch.dtype, layout: MatrixLayout, rows: int) -> Iterator[Runtime]:
    """A model in memory, for blocks of one sub-batch."""
    platform = Platform(CPU, baseline=0, matrix_layout=layout, keeps_spans=True)
    with Runtime(config, dtype, Policy(gpu_batch_size=rows), platform) as runtime:
        shapes = config.shapes()
        runtime.load(
            lambda names: ((name, torch.ones(shapes[name], dtype=dtype)) for name in names), lambda placed: None
        )
        yield runtime


def run(engine: Engine, rows: int, length: int, steps: int) -> None:
    """Prefill of a block, and decode steps."""
    block = PromptBlock(torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    engine.run(block, 1 + steps, Greedy())


def seconds_of(spans: Sequence[Span], kinds: tuple[type, ...]) -> float:
    """Seconds of computations of some kinds."""
    return sum(span.end_s - span.start_s for span in spans if span.lane == "compute" and isinstance(span.work, kinds))
