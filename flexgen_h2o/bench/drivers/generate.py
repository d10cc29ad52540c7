"""transformers' generate with the time of the first token, for the engines that are a transformers model."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.bench.drivers.common import Generation


class TokenTimes:
    """A streamer: generate() hands it the prompt, and then the tokens of each step as soon as they are chosen."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: Any) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def first_token(self) -> float:
        return self.stamps[1]  # the prompt comes before


def generate(model: Any, prompts: NDArray[np.int64], gen_len: int, device: str = "cpu") -> Generation:
    """Greedy generation of exactly `gen_len` tokens: without end tokens nothing ends a row, and nothing is masked.

    Args:
        device: where the model computes. Tokens reach the streamer in host memory, so that a GPU's times are whole.
    """
    import torch

    ids = torch.from_numpy(prompts).to(device)
    model.generation_config.eos_token_id = None
    times = TokenTimes()
    # No inference_mode around it, as in the documentation: generate() sets no_grad itself, and parameters that hooks
    # make in inference mode require no gradient, for which torch's matmul copies weights (accelerate: prefill x 4).
    started = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=gen_len,
        do_sample=False,
        streamer=times,
    )
    ended = time.perf_counter()
    tokens, step_s = output[:, ids.shape[1] :].tolist(), np.diff(times.stamps[1:]).tolist()
    return Generation(tokens, times.first_token - started, ended - times.first_token, {"step_s": step_s})
