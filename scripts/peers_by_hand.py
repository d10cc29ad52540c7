"""Checks the benchmark's drivers against each peer's own documented example, on the same checkpoint and prompts.

Driver and example run in processes of their own and take turns; each trial is one whole generation of batch x gen_len
tokens. One line for each peer goes to results/. A ratio driver / example well above 1 would mean that the driver holds
the peer back.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexgen_h2o.bench.drivers import deepspeed_ops
from flexgen_h2o.bench.drivers.__main__ import SEED
from flexgen_h2o.bench.drivers.common import ENGINES, random_prompts
from flexgen_h2o.bench.paths import ROOT
from flexgen_h2o.bench.peers import PAUSE_S, PeerJob, PeerProcess

RESULTS = ROOT / "results" / "peers_by_hand.jsonl"
Generate = Callable[[], list[list[int]]]


def transformers_example(args: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """transformers, "Text generation": from_pretrained, then generate. The guide's text is token ids here."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype))
    ids = torch.tensor(prompts)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def generate() -> list[list[int]]:
        generated_ids = model.generate(**inputs, max_new_tokens=args.gen_len, do_sample=False)
        new: list[list[int]] = generated_ids[:, args.prompt_len :].tolist()
        return new

    return generate


def ctranslate2_example(args: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """CTranslate2, "Transformers: OPT": Generator.generate_batch with max_length, in which the prompt counts."""
    return ctranslate2_generate(args, prompts, max_length=args.prompt_len + args.gen_len)


def ctranslate2_advice(args: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """The same with what the reference of generate_batch advises for long prompts; the prompt does not count then."""
    return ctranslate2_generate(args, prompts, max_length=args.gen_len, include_prompt_in_result=False)


def ctranslate2_generate(args: argparse.Namespace, prompts: list[list[int]], **settings: Any) -> Generate:
    import ctranslate2
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    folder = f"{args.checkpoint}-ctranslate2-{args.dtype}"
    generator = ctranslate2.Generator(folder, compute_type=args.dtype, intra_threads=args.threads)
    skipped = args.prompt_len if settings.get("include_prompt_in_result", True) else 0

    def generate() -> list[list[int]]:
        start_tokens = [tokenizer.convert_ids_to_tokens(row) for row in prompts]
        results = generator.generate_batch(start_tokens, **settings)
        return [result.sequences_ids[0][skipped : skipped + args.gen_len] for result in results]

    return generate


def deepspeed_example(args: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """transformers, "DeepSpeed: non-Trainer integration", the configuration for offload to host memory."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    deepspeed_ops.prepare([deepspeed_ops.COMMUNICATION])
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    hidden = AutoConfig.from_pretrained(args.checkpoint).hidden_size
    deepspeed.init_distributed("gloo")
    ds_config = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        },
        "steps_per_print": 2000,
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }
    switch = HfDeepSpeedConfig(ds_config)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype))
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    engine.module.eval()
    ids = torch.tensor(prompts)

    def generate() -> list[list[int]]:
        assert switch is not None  # it must live as long as the model
        with torch.no_grad():
            outputs = engine.module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.gen_len, do_sample=False
            )
        new: list[list[int]] = outputs[:, args.prompt_len :].tolist()
        return new

    return generate


def vllm_example(args: argparse.Namespace, prompts: list[list[int]]) -> Generate:
    """vLLM, "Offline inference": LLM.generate, with the two settings that its page on CPUs asks for."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{args.threads - 1}"
    from vllm import LLM, SamplingParams

    llm = LLM(model=args.checkpoint, dtype=args.dtype)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=args.gen_len)

    def generate() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": row} for row in prompts], sampling_params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


# name: (engine of the driver, dtype, example)
EXAMPLES: dict[str, tuple[str, str, Callable[[argparse.Namespace, list[list[int]]], Generate]]] = {
    "transformers": ("transformers", "bfloat16", transformers_example),
    "ctranslate2": ("ctranslate2", "int8", ctranslate2_example),
    "ctranslate2, as its reference advises": ("ctranslate2", "int8", ctranslate2_advice),
    "deepspeed_cpu": ("deepspeed_cpu", "bfloat16", deepspeed_example),
    "vllm": ("vllm", "bfloat16", vllm_example),
}


def main() -> None:
    args = build_parser().parse_args()
    if args.example:
        serve_example(args)
        return
    # Here, because an example may run where there is no torch of ours.
    from flexgen_h2o.bench.published_models import published_checkpoint
    from flexgen_h2o.machine.environment import append_record

    args.checkpoint = str(published_checkpoint(args.model, "bfloat16"))
    for name in args.peers or EXAMPLES:
        record = compare(args, name)
        print(json.dumps({key: record[key] for key in ("name", "median", "ratio_driver_to_example", "same_tokens")}))
        append_record(args.output, record)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="*", choices=EXAMPLES, help="all of them if left out")
    parser.add_argument("--model", default="opt-125m", help="published size; weights are random")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--example", choices=EXAMPLES, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    return parser


def compare(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Driver and example of one peer in turns."""
    engine, dtype, _ = EXAMPLES[name]
    shape = {"batch": args.batch, "prompt_len": args.prompt_len, "gen_len": args.gen_len, "threads": args.threads}
    trials = []
    with PeerProcess(PeerJob(engine, Path(args.checkpoint), **shape, dtype=dtype)) as driver:
        assert driver.start(), driver.row(1)["sentence"]
        example = start_example(args, name)
        example_load_s = json.loads(read_line(example))["load_s"]
        for trial in range(args.trials):
            # Each goes first every other time.
            for who in ("driver", "example")[:: 1 if trial % 2 == 0 else -1]:
                time.sleep(PAUSE_S)
                if who == "driver":
                    by_driver = driver.generate()
                    assert by_driver is not None, driver.row(1)["sentence"]
                else:
                    by_example = ask(example)
            driver_s = by_driver["prefill_s"] + by_driver["decode_s"]
            trials.append({"driver_s": driver_s, "example_s": by_example["seconds"]})
        assert example.stdin is not None
        example.stdin.close()
        example.wait(30)
    row = driver.row(args.trials)
    return {
        "name": f"driver beside documented example: {name}",
        "command": f"python scripts/peers_by_hand.py --peers '{name}' --model {args.model} --batch {args.batch}"
        f" --prompt-len {args.prompt_len} --gen-len {args.gen_len} --threads {args.threads} --trials {args.trials}",
        "config": {"engine": engine, "model": args.model, "dtype": dtype, **shape},
        "peer_versions": row["versions"],
        "load_s": {"driver": row["load_s"], "example": example_load_s},
        "trials": trials,
        "median": {key: statistics.median(trial[key] for trial in trials) for key in ("driver_s", "example_s")},
        "ratio_driver_to_example": statistics.median(trial["driver_s"] / trial["example_s"] for trial in trials),
        "generated_tokens": {"driver": by_driver["generated_tokens"], "example": by_example["generated_tokens"]},
        "same_tokens": by_driver["first_tokens"] == by_example["first_tokens"],
    }


def start_example(args: argparse.Namespace, name: str) -> subprocess.Popen[str]:
    engine, dtype, _ = EXAMPLES[name]
    environment = ENGINES[engine].environment
    python = sys.executable if environment is None else str(ROOT / environment / "bin" / "python")
    flags = {
        "--example": name,
        "--dtype": dtype,
        "--checkpoint": args.checkpoint,
        "--batch": args.batch,
        "--prompt-len": args.prompt_len,
        "--gen-len": args.gen_len,
        "--threads": args.threads,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    return subprocess.Popen(
        [python, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"},
    )


def ask(example: subprocess.Popen[str]) -> dict[str, Any]:
    assert example.stdin is not None
    example.stdin.write("generate\n")
    example.stdin.flush()
    answer: dict[str, Any] = json.loads(read_line(example))
    return answer


def read_line(example: subprocess.Popen[str]) -> str:
    """The next line that is an object: libraries print others."""
    assert example.stdout is not None
    return next(line for line in example.stdout if line.startswith("{"))


def serve_example(args: argparse.Namespace) -> None:
    """In a process of its own: loads, warms up, then one generation for each line of standard input."""
    vocab_size = json.loads((Path(args.checkpoint) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = random_prompts(SEED, args.batch, args.prompt_len, vocab_size).tolist()
    started = time.perf_counter()
    generate = EXAMPLES[args.example][2](args, prompts)
    load_s = time.perf_counter() - started
    generate()  # before it says that it is ready, or the driver's first trial would run beside it
    print(json.dumps({"load_s": load_s}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        rows = generate()
        seconds = time.perf_counter() - started
        count, first = sum(map(len, rows)), [int(token) for token in rows[0][:8]]
        print(json.dumps({"seconds": seconds, "generated_tokens": count, "first_tokens": first}), flush=True)


if __name__ == "__main__":
    main()
