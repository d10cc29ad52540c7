"""Tiny OPT models with random weights, one for each architecture that a config.json can ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}

# What each variant changes in BASE; what neither names is transformers' default, which is that of opt-125m.
VARIANTS: dict[str, dict[str, Any]] = {
    "pre_norm": {"num_hidden_layers": 3},
    "post_norm_projected": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},  # as opt-350m
    "no_bias": {"enable_bias": False},
    "no_affine": {"layer_norm_elementwise_affine": False},
    "gelu": {"activation_function": "gelu"},
    "gelu_new": {"activation_function": "gelu_new", "hidden_size": 48, "ffn_dim": 192},
    "untied": {"tie_word_embeddings": False},
    "odd_vocab": {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 7},
    "no_final_norm": {"_remove_final_layer_norm": True},
    "galactica": {
        "enable_bias": False,
        "activation_function": "gelu",
        "hidden_size": 48,
        "ffn_dim": 80,
        "num_hidden_layers": 3,
        "bos_token_id": 0,
    },
}


def tiny_config(variant: str) -> OPTConfig:
    """The configuration of one variant."""
    return OPTConfig(**{**BASE, **VARIANTS[variant]})


def make_tiny_opt(variant: str, seed: int = 0, std: float = 0.1) -> OPTForCausalLM:
    """A float32 model in eval mode with every parameter random: normal(std), norm weights 1 + normal(std).

    Biases and the pad token's row are random too: with zeros there, a test cannot see that they are ignored.
    The same seed gives the same weights, whatever the state of torch's own generator, which stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        config = tiny_config(variant)
        model = OPTForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith("layer_norm.weight"):
                parameter.add_(1.0)
    return model.eval()


def save_tiny_opt(model: OPTForCausalLM, folder: str | Path, max_shard_size: int | str = "5GB") -> Path:
    """Save as a folder in Hugging Face format, in shards of at most `max_shard_size` (bytes or "20KB")."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)
