"""How weights should lie in memory: rates of one product by rows, over layouts and ways to multiply.

    row-major     torch.addmm on [out, in], as checkpoints have it
    transposed    torch.addmm on [in, out]
    panels        the engine's layout, multiplied by oneDNN (flexgen_h2o/kernels/matrices.py)
    oneDNN's own  the same product over memory that oneDNN packed and allocated itself
    inductor      torch.compile with freezing, which packs weights for oneDNN too

Weights are larger than any cache; the ways take turns. The result goes to results/gemm_layouts.jsonl.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from flexgen_h2o.bench.attention import take_turns
from flexgen_h2o.direct_io import aligned_bytes
from flexgen_h2o.kernels import onednn
from flexgen_h2o.kernels.matrices import PanelLayout
from flexgen_h2o.platforms import DTYPES
from flexgen_h2o.records import append_record

RESULTS = Path(__file__).parent.parent / "results" / "gemm_layouts.jsonl"
WEIGHT_BYTES = 512 * 2**20
Multiply = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--shape", type=int, nargs=2, default=(8192, 2048), metavar=("OUT", "IN"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    dtype, shape = DTYPES[args.dtype], (args.shape[0], args.shape[1])
    count = max(1, WEIGHT_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    weights = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(count)]
    bias = torch.randn(shape[0]).to(dtype)
    rows = []
    with torch.inference_mode():
        ways = make_ways(weights, bias)
        for threads, count_of_rows in itertools.product(args.threads, args.rows):
            torch.set_num_threads(threads)
            x = torch.randn(count_of_rows, shape[1]).to(dtype)
            rates = measure(ways, x, shape, args.trials)
            rows.append({"threads": threads, "rows": count_of_rows, "gflop_s": rates})
            print(threads, count_of_rows, {way: round(rate, 1) for way, rate in rates.items()}, flush=True)
    command = shlex.join(["python", "scripts/compare_layouts.py", *sys.argv[1:]])
    config = {**vars(args), "output": None}
    append_record(args.output, {"name": "layouts of weights", "command": command, "config": config, "rows": rows})


def make_ways(weights: list[Tensor], bias: Tensor) -> dict[str, Iterator[Multiply]]:
    """For each way, its products with the weights, taken in turn without end."""
    transposed = [weight.t().contiguous() for weight in weights]
    panels, packed = [in_panels(weight) for weight in weights], [onednn.pack(weight) for weight in weights]
    products: dict[str, list[Multiply]] = {
        "row-major": [lambda x, w=weight: torch.addmm(bias, x, w.t()) for weight in weights],
        "transposed": [lambda x, w=weight: torch.addmm(bias, x, w) for weight in transposed],
        "panels": [lambda x, p=panel: p.product(x, bias, x.new_empty(x.shape[0], p.shape[0])) for panel in panels],
        "oneDNN's own": [lambda x, p=own: onednn.linear(x, p, bias) for own in packed],
    }
    if (compiled := inductor(weights[0], bias)) is not None:
        # One weight: compiling takes long. It is as large as a quarter of the caches of many processors, so with few
        # rows this way may look better than it is.
        products["inductor"] = [compiled]
    return {way: itertools.cycle(all_products) for way, all_products in products.items()}


def in_panels(weight: Tensor):
    """The engine's matrix, in the engine's kind of memory."""
    layout, shape = PanelLayout(), (weight.shape[0], weight.shape[1])
    in_memory = layout.storage_shape(shape, weight.dtype)
    storage = aligned_bytes(torch.Size(in_memory).numel() * weight.itemsize).view(weight.dtype).view(in_memory)
    layout.encode(storage, weight)
    return layout.matrix(storage, shape)


def inductor(weight: Tensor, bias: Tensor) -> Multiply | None:
    """The product as torch.compile makes it; None where it cannot compile."""
    import torch._dynamo.config
    import torch._inductor.config

    torch._inductor.config.freezing = True
    torch._dynamo.config.recompile_limit = 100  # it compiles anew for every number of rows and threads
    module = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype).eval()
    module.load_state_dict({"weight": weight, "bias": bias})
    compiled = torch.compile(module, dynamic=False)
    try:
        compiled(torch.zeros(1, weight.shape[1], dtype=weight.dtype))
    except Exception as error:  # whatever keeps it from compiling is the answer
        print(f"inductor: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return compiled


def measure(ways: dict[str, Iterator[Multiply]], x: Tensor, shape: tuple[int, int], trials: int) -> dict[str, float]:
    """GFLOP/s of each way, the median of trials in which they take turns."""
    flops = 2 * x.shape[0] * shape[0] * shape[1]
    repeats = max(1, int(2e9 // flops))

    def multiply(products: Iterator[Multiply]) -> None:
        for _ in range(repeats):
            next(products)(x)

    seconds = take_turns({way: partial(multiply, products) for way, products in ways.items()}, trials)
    return {way: repeats * flops / taken / 1e9 for way, taken in seconds.items()}


if __name__ == "__main__":
    main()
