"""transformers: everything in memory, `model.generate`."""

from functools import partial

from flexgen_h2o.bench.drivers.common import Loaded, Settings, torch_dtype
from flexgen_h2o.bench.drivers.generate import generate


def load(settings: Settings) -> Loaded:
    """The model as from_pretrained makes it, with its default attention."""
    import torch
    from transformers import AutoModelForCausalLM

    settings.chosen()
    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.checkpoint, dtype=torch_dtype(settings.dtype)).eval()
    model.to(settings.device)
    return Loaded(partial(generate, model, device=settings.device), {"attention": model.config._attn_implementation})
