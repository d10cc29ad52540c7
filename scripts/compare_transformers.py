"""Decode throughput in memory beside transformers' generate: same random weights, prompts, dtype, batch and threads.

Both engines run in this process and alternate; each trial is one whole generation. The result goes to results/ with
the limit that the machine sets for a decode step.
"""

import argparse
import statistics
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from flexgen_h2o.layers import Parameters
from flexgen_h2o.llm import LLM
from flexgen_h2o.platforms import DTYPES
from flexgen_h2o.records import append_record
from flexgen_h2o.sampling import SamplingParams
from flexgen_h2o.schedule import OUTER

RESULTS = Path(__file__).parent.parent / "results" / "decode_against_transformers.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-1.3b", help="published size, with dummy weights")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()

    engines = {
        "full cache": LLM(args.model, dummy_weights=True, dtype=args.dtype, eviction="full", gpu_batch_size=args.batch),
        "h2o 20 %": LLM(args.model, dummy_weights=True, dtype=args.dtype, gpu_batch_size=args.batch),
    }
    first = engines["full cache"]
    runtime = first.load()
    for llm in engines.values():
        llm.runtime = runtime
    peer = transformers_model(first)
    requests = list(first.random_requests(args.prompt_len, args.batch))
    ids = torch.tensor([request.prompt_ids for request in requests])
    params = SamplingParams(max_new_tokens=args.gen_len, ignore_eos=True)
    decoded = args.batch * (args.gen_len - 1)

    trials: dict[str, list[dict[str, float]]] = {name: [] for name in ("transformers", *engines)}
    for trial in range(args.trials + 1):
        # The first round warms up, with few tokens.
        steps = args.gen_len if trial else 3
        round_times = {"transformers": time_transformers(peer, ids, steps)}
        for name, llm in engines.items():
            list(
                llm.stream(requests, SamplingParams(max_new_tokens=steps, ignore_eos=True), args.prompt_len, args.batch)
            )
            round_times[name] = (llm.totals.prefill_s, llm.totals.decode_s)
        if trial:
            for name, (prefill_s, decode_s) in round_times.items():
                trials[name].append({"prefill_s": prefill_s, "decode_s": decode_s, "decode_tok_s": decoded / decode_s})
                print(
                    f"trial {trial} {name}: prefill {prefill_s:.2f} s, decode {decoded / decode_s:.1f} tok/s",
                    flush=True,
                )
    medians = {name: statistics.median(t["decode_tok_s"] for t in runs) for name, runs in trials.items()}
    ratios = {name: paired_ratio(trials[name], trials["transformers"]) for name in engines}
    limit = decode_step_limit(first, args.batch)
    print(f"medians {medians}; against transformers {ratios}; limit of a step {limit}")
    append_record(
        args.output,
        {
            "name": "decode throughput in memory beside transformers' generate",
            "command": f"python scripts/compare_transformers.py --model {args.model} --dtype {args.dtype}"
            f" --batch {args.batch} --prompt-len {args.prompt_len} --gen-len {args.gen_len} --trials {args.trials}",
            "config": {**vars(args), "output": None, "params": repr(params)},
            "trials": trials,
            "median_decode_tok_s": medians,
            "median_ratio_to_transformers": ratios,
            "limit": limit,
        },
    )


def transformers_model(llm: LLM) -> OPTForCausalLM:
    """transformers' OPT on the same weights."""
    config = llm.config
    settings = OPTConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        ffn_dim=config.ffn_dim,
        max_position_embeddings=config.max_position_embeddings,
        do_layer_norm_before=config.do_layer_norm_before,
        word_embed_proj_dim=config.word_embed_proj_dim,
    )
    with torch.device("meta"):
        model = OPTForCausalLM(settings)
    weights = llm.load().weights
    state = {f"model.decoder.{name}": tensor for name, tensor in _dense(weights.page(OUTER)).items()}
    for index, layer in enumerate(weights.page(index) for index in range(config.num_hidden_layers)):
        state |= {f"model.decoder.layers.{index}.{name}": tensor for name, tensor in _dense(layer).items()}
    state["lm_head.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def time_transformers(model: OPTForCausalLM, ids: Tensor, gen_len: int) -> tuple[float, float]:
    """Seconds of prefill (up to the first token) and of decode."""
    stamps: list[float] = []

    def note(_: Tensor, scores: Tensor) -> Tensor:
        stamps.append(time.perf_counter())
        return scores

    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=gen_len,
        min_new_tokens=gen_len,
        do_sample=False,
        logits_processor=[note],
    )
    ended = time.perf_counter()
    return stamps[0] - started, ended - stamps[0]


def paired_ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Median over trials of our decode throughput over theirs in the same round."""
    return statistics.median(a["decode_tok_s"] / b["decode_tok_s"] for a, b in zip(ours, theirs, strict=True))


def decode_step_limit(llm: LLM, rows: int) -> dict[str, Any]:
    """The larger of weight bytes over read bandwidth and FLOPs over GEMM rate, both measured here and now."""
    weights, layers = llm.load().weights, range(llm.config.num_hidden_layers)
    memory = torch.zeros(2**27)  # 512 MB, more than any cache holds
    read_rate = _median_rate(memory.sum, memory.nbytes)
    rows_in = torch.randn(2048, 2048).to(llm.dtype)
    matrix = torch.randn(8192, 2048).to(llm.dtype)
    flops = 2 * rows_in.shape[0] * matrix.numel()
    gemm_rate = _median_rate(lambda: torch.nn.functional.linear(rows_in, matrix), flops)
    elements = (
        sum(prod(m.shape) for layer in layers for m in weights.page(layer).matrices.values())
        + llm.config.vocab_size * llm.config.hidden_size
    )
    seconds = {
        "weights_s": elements * llm.dtype.itemsize / read_rate,
        "gemm_s": 2 * rows * elements / gemm_rate,
    }
    return {
        **seconds,
        "read_bytes_s": read_rate,
        "gemm_flop_s": gemm_rate,
        "limit_s": max(seconds.values()),
        "limit_tok_s": rows / max(seconds.values()),
    }


def _dense(parameters: Parameters) -> dict[str, Tensor]:
    """All parameters as torch has them, matrices row-major."""
    return {**parameters.tensors, **{name: matrix.dense() for name, matrix in parameters.matrices.items()}}


def _median_rate(work: Any, amount: float) -> float:
    times = []
    for _ in range(7):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return amount / statistics.median(times)


if __name__ == "__main__":
    main()
