"""Fixed time of what is done in a layer, however few rows it is done for."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexgen_h2o.block_work import PromptBlock
from flexgen_h2o.generation import NoChoice
from flexgen_h2o.kernels.matrices import best_layout
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.model_config import ModelConfig
from flexgen_h2o.platforms import Platform
from flexgen_h2o.policy import Policy
from flexgen_h2o.runtime import RunSizes, Runtime
from flexgen_h2o.weight_sources import dummy_source

# With so many layers of so little work, what a step does outside of them and the work itself are next to nothing.
LAYERS, WIDTH, VOCABULARY = 32, 64, 64
PROMPT_LEN = 4
RULE = H2O(2, 2)
OPERATIONS = 2  # of a layer in such a step: products, and attention of the only sub-batch


@dataclass(frozen=True)
class Operations:
    """The fixed time of an operation, as a subject.

    Measured where nothing else takes time: decode steps of this engine with one row of a model of narrow layers, each
    of which makes its products and attends once. Half of a layer is the time of one of these two.
    """

    device: torch.device
    dtype: torch.dtype
    steps: int

    def trial(self) -> Iterator[tuple[str, float]]:
        """Seconds of an operation in one layer."""
        config = ModelConfig(
            "narrow",
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=1,
            ffn_dim=4 * WIDTH,
        )
        layout = best_layout(self.device, self.dtype, config.matrix_shapes())
        platform = Platform(self.device, joint=self.device.type == "cpu", baseline=0, matrix_layout=layout)
        with Runtime(config, self.dtype, Policy(gpu_batch_size=1), platform) as runtime:
            runtime.load(dummy_source(config, 0, self.dtype, self.device), lambda placed: None)
            engine = runtime.engine(RunSizes(RULE, 1, PROMPT_LEN))
            block = PromptBlock(torch.zeros(1, PROMPT_LEN, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            step_s = engine.run(block, self.steps + 2, NoChoice()).step_s
        # The first step warms up.
        yield f"operation/{self.device.type}", statistics.fmean(step_s[1:]) / LAYERS / OPERATIONS
