"""How weights should lie in memory: rates of one product by rows, over layouts and ways to multiply.

    row-major     torch.addmm on [out, in], as checkpoints have it
    transposed    torch.addmm on [in, out]
    panels        the engine's layout, multiplied by oneDNN (flexgen_h2o/kernels/matrices/panels.py)
    oneDNN's own  the same product over memory that oneDNN packed and allocated itself
    inductor      torch.compile with freezing, which packs weights for oneDNN too
    4-bit codes   strips of 4-bit groups, multiplied with the codes (kernels/matrices/quantised_panels.py)
    4-bit panels  the same, restored to panels
    4-bit rows    entries of 4-bit groups, restored by torch (kernels/matrices/quantised_rows.py)
    torch's int4  torch's own product with packed 4-bit groups of 64, for bfloat16

All ways have the same number of weights, in 16 or 32 bits larger than any cache, and take turns. The result goes to
results/gemm_layouts.jsonl.
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
from flexgen_h2o.kernels import onednn
from flexgen_h2o.kernels.matrices.layout import MatrixLayout
from flexgen_h2o.kernels.matrices.panels import PanelLayout
from flexgen_h2o.kernels.matrices.quantised_panels import QuantisedPanelLayout
from flexgen_h2o.kernels.matrices.quantised_rows import QuantisedRowLayout
from flexgen_h2o.machine.environment import append_record
from flexgen_h2o.machine.platform import DTYPES
from flexgen_h2o.memory.direct_io import aligned_bytes

RESULTS = Path(__file__).parent.parent / "results" / "gemm_layouts.jsonl"
WEIGHT_BYTES = 512 * 2**20
MOST_CODE_ROWS = 2**20  # that are multiplied with codes here; the engine stops earlier
Multiply = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--shape", type=int, nargs=2, default=(8192, 2048), metavar=("OUT", "IN"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ways", nargs="+", help="those to compare (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    dtype, shape = DTYPES[args.dtype], (args.shape[0], args.shape[1])
    count = max(1, WEIGHT_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    weights = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(count)]
    bias = torch.randn(shape[0]).to(dtype)
    rows = []
    with torch.inference_mode():
        ways = make_ways(weights, bias, args.ways)
        for threads, count_of_rows in itertools.product(args.threads, args.rows):
            torch.set_num_threads(threads)
            x = torch.randn(count_of_rows, shape[1]).to(dtype)
            rates = measure(ways, x, shape, args.trials)
            rows.append({"threads": threads, "rows": count_of_rows, "gflop_s": rates})
            print(threads, count_of_rows, {way: round(rate, 1) for way, rate in rates.items()}, flush=True)
    command = shlex.join(["python", "scripts/compare_layouts.py", *sys.argv[1:]])
    config = {**vars(args), "output": None}
    append_record(args.output, {"name": "layouts of weights", "command": command, "config": config, "rows": rows})


def make_ways(weights: list[Tensor], bias: Tensor, wanted: list[str] | None) -> dict[str, Iterator[Multiply]]:
    """For each way, its products with the weights, taken in turn without end."""
    makers: dict[str, Callable[[], list[Multiply]]] = {
        "row-major": lambda: [lambda x, w=weight: torch.addmm(bias, x, w.t()) for weight in weights],
        "transposed": lambda: [lambda x, w=w: torch.addmm(bias, x, w) for w in (w.t().contiguous() for w in weights)],
        "panels": lambda: in_layout(PanelLayout(), weights, bias),
        "oneDNN's own": lambda: [lambda x, p=p: onednn.linear(x, p, bias) for p in map(onednn.pack, weights)],
        # One weight: compiling takes long. It is as large as a quarter of the caches of many processors, so with few
        # rows this way may look better than it is.
        "inductor": lambda: inductor(weights[0], bias),
        "4-bit codes": lambda: in_layout(QuantisedPanelLayout(code_rows=MOST_CODE_ROWS), weights, bias),
        "4-bit panels": lambda: in_layout(QuantisedPanelLayout(code_rows=0), weights, bias),
        "4-bit rows": lambda: in_layout(QuantisedRowLayout(), weights, bias),
        "torch's int4": lambda: torch_int4(weights, bias),
    }
    products = {way: make() for way, make in makers.items() if wanted is None or way in wanted}
    return {way: itertools.cycle(all_products) for way, all_products in products.items() if all_products}


def in_layout(layout: MatrixLayout, weights: list[Tensor], bias: Tensor) -> list[Multiply]:
    """Products with the engine's matrices, in the engine's kind of memory."""
    shape, dtype = (weights[0].shape[0], weights[0].shape[1]), weights[0].dtype
    in_memory, buffer = layout.storage(shape, dtype), aligned_bytes(layout.buffer_bytes([shape], dtype))
    layout.prepare([shape], dtype)
    products = []
    for weight in weights:
        storage = in_memory.over(aligned_bytes(in_memory.nbytes))
        layout.encode(storage, weight)
        matrix = layout.matrix(storage, shape, dtype, buffer)
        products.append(lambda x, m=matrix: m.product(x, bias, x.new_empty(x.shape[0], m.shape[0])))
    return products


def torch_int4(weights: list[Tensor], bias: Tensor) -> list[Multiply]:
    """Products of torch's packed 4-bit groups; none where it does not offer them. Random codes are as good as any."""
    aten, (out, inputs) = torch.ops.aten, weights[0].shape
    if weights[0].dtype != torch.bfloat16 or not hasattr(aten, "_weight_int4pack_mm_for_cpu"):
        return []
    products = []
    for _ in weights:
        packed = aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (out, inputs), dtype=torch.int32), 1)
        ranges = torch.randn(inputs // 64, out, 2).to(torch.bfloat16)
        products.append(lambda x, p=packed, r=ranges: aten._weight_int4pack_mm_for_cpu(x, p, 64, r).add_(bias))
    return products


def inductor(weight: Tensor, bias: Tensor) -> list[Multiply]:
    """The product as torch.compile makes it; none where it cannot compile."""
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
        return []
    return [compiled]


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
