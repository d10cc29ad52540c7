"""The model that is trained, transformers' own OPT, and what training needs of it."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from demo_training.corpus import LEADING_ID, PAD_ID, SPECIAL


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    hidden: int
    heads: int
    context: int
    vocab: int


def new_model(shape: Shape, seed: int) -> OPTForCausalLM:
    """A model with random weights, in float32."""
    torch.manual_seed(seed)
    model = OPTForCausalLM._from_config(_config(shape), attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight") or ".fc" in name and name.endswith("weight"):
                parameter.normal_(0, 0.5 * parameter.shape[1] ** -0.5)
            if name.endswith(("out_proj.weight", "fc2.weight")):
                parameter *= 0.2  # every layer begins as a small change of the stream
    return model


def _config(shape: Shape) -> OPTConfig:
    return OPTConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        word_embed_proj_dim=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        ffn_dim=4 * shape.hidden,
        max_position_embeddings=shape.context,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        bos_token_id=LEADING_ID,
        eos_token_id=LEADING_ID,
        pad_token_id=PAD_ID,
    )


def logits(model: OPTForCausalLM, ids: Tensor) -> Tensor:
    """[rows, n] -> [rows, n, vocab_size], products in bfloat16, sums and what they add up to in float32."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        return model(ids, use_cache=False).logits


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy in nats, the mean by weight: [rows, n, vocab_size], [rows, n], [rows, n] -> []."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def save_model(model: OPTForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A folder in Hugging Face format, in float16."""
    state = {name: tensor.detach().half().cpu() for name, tensor in model.state_dict().items()}
    half = OPTForCausalLM._from_config(model.config, dtype=torch.float16)
    half.load_state_dict(state)
    half.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[LEADING_ID],
        "eos_token": SPECIAL[LEADING_ID],
        "pad_token": SPECIAL[PAD_ID],
        "unk_token": SPECIAL[3],
        "add_bos_token": True,
        "model_max_length": model.config.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
