"""What H2O's scores cost in prefill: the sums of attention weights by column, in time and in memory.

Time is that of a whole prefill of an engine that keeps H2O's entries, beside two that need no sums: one of the same
buffer (attention sinks, which start with fixed scores) and one of the full cache. Memory is that of a long prompt's
attention in a process of its own.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.bench.models import model_facts, no_padding, random_model
from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.engine.chooser import Greedy
from flexgen_h2o.engine.loop import Engine, PromptBlock
from flexgen_h2o.kvcache.attention import prefill_attention, prefill_attention_bytes
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.sink import Sink
from flexgen_h2o.machine.limits import peak_resident_bytes, resident_bytes
from flexgen_h2o.machine.platform import DTYPES
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.profiling.timing import compute_threads

KEPT_SHARE = 0.1  # heavy and recent entries, each of the prompt
LONG_HEADS, LONG_HEAD_DIM = 4, 64  # of the long prompt's attention


@dataclass(frozen=True)
class PromptSizes:
    """What to measure.

    Attributes:
        config: shape of the model, which may have fewer layers than are usual. Then attention's share is larger: in the
            last layer it is all but alone, since only one token a row goes on.
        rows: prompts of each prefill, one measurement after the other. tokens: of a prompt.
        long_tokens: of the prompt whose memory is measured.
        trials: prefills of each engine, taking turns.
    """

    config: ModelShape
    rows: Sequence[int]
    tokens: int
    long_tokens: int
    dtype: str
    threads: int
    trials: int


def measure(sizes: PromptSizes, advance: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Measures on the CPU.

    Args:
        advance: called after each number of rows.
    Returns: as `--json` prints it: `config`; `worst_added_share`; `prefill`, a row for each number of rows with the
        median seconds `h2o_s`, `sink_s`, `full_s` and `added_share`: what H2O's prefill takes longer than the quicker
        one of the other two, as a share of that; and `memory` of the long prompt: `peak_bytes` of its process,
        `baseline_bytes` of the same before, `workspace_bytes` of attention, `matrix_bytes` that all weights would take
        at once in float32.
    """
    memory = memory_of_long_prompt(sizes.long_tokens, sizes.dtype, sizes.threads)
    prefill = []
    with compute_threads(sizes.threads):
        for rows in sizes.rows:
            prefill.append(_measure_prefill(rows, sizes))
            advance()
    settings = {name: value for name, value in vars(sizes).items() if name not in ("config", "rows")}
    long_shape = {"long_heads": LONG_HEADS, "long_head_dim": LONG_HEAD_DIM}
    return {
        "config": {**model_facts(sizes.config), **settings, **long_shape, "kept_share": 2 * KEPT_SHARE},
        "worst_added_share": max(row["added_share"] for row in prefill),
        "prefill": prefill,
        "memory": memory,
    }


def summary(result: Mapping[str, Any]) -> str:
    """The numbers as a Markdown table and a sentence."""
    config, memory = result["config"], result["memory"]
    lines = [
        f"prefill of {config['tokens']} tokens, {config['model']}'s shape with {config['layers']} layers,"
        f" {config['dtype']}, {config['threads']} threads",
        "| rows | H2O | same buffer without sums | full cache | added by the sums |",
        "|---" * 5 + "|",
    ]
    for row in result["prefill"]:
        times = " | ".join(f"{row[name]:.3f} s" for name in ("h2o_s", "sink_s", "full_s"))
        lines.append(f"| {row['rows']} | {times} | {row['added_share']:+.1%} |")
    lines.append(
        f"attention of {config['long_tokens']} tokens, {LONG_HEADS} heads: the process held"
        f" {memory['peak_bytes'] / GB:.2f} GB at its peak, {memory['baseline_bytes'] / GB:.2f} GB before;"
        f" all weights at once would be {memory['matrix_bytes'] / GB:.2f} GB"
    )
    return "\n".join(lines)


def memory_of_long_prompt(tokens: int, dtype: str, threads: int) -> dict[str, int]:
    """`memory` of measure(): attention of one prompt, with sums, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(attend_to_long_prompt, tokens, dtype, threads).result()


def attend_to_long_prompt(tokens: int, dtype: str, threads: int) -> dict[str, int]:
    """The same in this process, whose peak it reports.

    That is the kernel's high-water mark of the process' own memory. getrusage's would begin with that of the parent.
    """
    torch.set_num_threads(threads)
    before = resident_bytes()
    kind = DTYPES[dtype]
    shape = (1, tokens, LONG_HEADS, LONG_HEAD_DIM)
    query, key, value = (torch.randn(shape).to(kind) for _ in range(3))
    query = query.mul_(LONG_HEAD_DIM**-0.5).unsqueeze(3)  # one query head to a head of keys
    nbytes = prefill_attention_bytes(1, LONG_HEADS, tokens, LONG_HEAD_DIM, kind.itemsize)
    workspace = Workspace(torch.empty(nbytes, dtype=torch.uint8))
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    _, sums = prefill_attention(query, key, value, no_padding(1), True, workspace)
    assert sums is not None and round(float(sums.sum(dtype=torch.float64))) == LONG_HEADS * tokens
    return {
        "peak_bytes": peak_resident_bytes(),
        "baseline_bytes": before,
        "workspace_bytes": nbytes,
        "matrix_bytes": LONG_HEADS * tokens**2 * 4,
    }


def _measure_prefill(rows: int, sizes: PromptSizes) -> dict[str, Any]:
    """A row of `prefill`; a first round warms up."""
    kept = max(1, int(KEPT_SHARE * sizes.tokens))
    rules = {"h2o": H2O(kept, kept), "sink": Sink(kept, kept), "full": Full(0, sizes.tokens)}
    ids = torch.randint(sizes.config.vocab_size, (rows, sizes.tokens), generator=torch.Generator().manual_seed(0))
    block = PromptBlock(ids, torch.zeros(rows, dtype=torch.int64))
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    with _engines(rules, rows, sizes) as engines:
        for trial in range(sizes.trials + 1):
            for name, engine in engines.items():
                spent = engine.run(block, 1, Greedy()).prefill_s
                if trial:
                    seconds[name].append(spent)
    medians = {f"{name}_s": statistics.median(times) for name, times in seconds.items()}
    return {"rows": rows, **medians, "added_share": added_share(medians), "seconds": seconds}


def added_share(medians: Mapping[str, float]) -> float:
    """What H2O's prefill takes longer than the quicker one of those without sums, as a share of that."""
    return medians["h2o_s"] / min(medians["sink_s"], medians["full_s"]) - 1


@contextmanager
def _engines(rules: Mapping[str, EvictionRule], rows: int, sizes: PromptSizes) -> Iterator[dict[str, Engine]]:
    """An engine for each rule, by name; each with weights of its own."""
    with ExitStack() as stack:
        engines = {}
        for name, rule in rules.items():
            runtime = stack.enter_context(random_model(sizes.config, DTYPES[sizes.dtype], rows))
            engines[name] = runtime.engine(RunSizes(rule, rows, sizes.tokens))
        yield engines
