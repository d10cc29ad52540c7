"""accelerate: weights are brought to each module before it computes, by `cpu_offload` or `disk_offload`."""

import json
from functools import partial
from typing import Any

from flexgen_h2o.bench.drivers.common import Loaded, Settings, absent, torch_dtype
from flexgen_h2o.bench.drivers.generate import generate


def load(settings: Settings) -> Loaded:
    """The stock calls. On a CPU, cpu_offload moves nothing: what it costs is its hooks."""
    import torch

    try:
        import accelerate
    except ImportError:
        raise absent("accelerate") from None
    settings.chosen()
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    if settings.engine == "accelerate_cpu":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(settings.checkpoint, dtype=torch_dtype(settings.dtype)).eval()
        accelerate.cpu_offload(model, execution_device=device)
    else:
        _write_offload_folder(settings)
        model = _empty_model(settings)
        accelerate.disk_offload(model, settings.offload_dir, execution_device=device)
    return Loaded(partial(generate, model, device=settings.device), {"attention": model.config._attn_implementation})


def _empty_model(settings: Settings) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(settings.checkpoint)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(settings.dtype)).eval()
    model.tie_weights()
    return model


def _write_offload_folder(settings: Settings) -> None:
    """Writes the weights where disk_offload finds them, in the dtype of compute, a file of the checkpoint at a time.

    disk_offload itself would write them from a model in memory, which a machine that needs it does not hold. It takes
    a folder in which they are already; the result is the same.
    """
    from accelerate.utils import offload_state_dict
    from safetensors.torch import load_file

    dtype = torch_dtype(settings.dtype)
    index = json.loads((settings.checkpoint / "model.safetensors.index.json").read_text(encoding="utf-8"))
    for name in sorted(set(index["weight_map"].values())):
        tensors = {key: tensor.to(dtype) for key, tensor in load_file(settings.checkpoint / name).items()}
        # As in a model's own state, tied weights are there under both names.
        embeddings = tensors.get("model.decoder.embed_tokens.weight")
        if embeddings is not None and settings.model_config().get("tie_word_embeddings", True):
            tensors["lm_head.weight"] = embeddings
        offload_state_dict(settings.offload_dir, tensors)
