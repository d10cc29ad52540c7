"""Holds the models of both engines against published figures, and writes the tables of results/t4.md.

    python scripts/check_published.py [-o results/t4.md]

Every number is a projection beside a published one; nothing is measured here.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.engine.assemble import predict as ledger_of
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.models.registry import published
from flexgen_h2o.plan.footprint import STAGED_BYTES
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.search.cost_model import LANES, CostModel
from flexgen_h2o.search.hardware import Hardware, read_hardware
from flexgen_h2o.search.published import compare, read_rows, table
from flexgen_h2o.search.search import Found, predict, search
from flexgen_h2o.search.simulate import simulate
from flexgen_h2o.search.sizes import DEFAULT_BASELINE, Job

ROOT = Path(__file__).parent.parent
BUDGETS = {"gpu": 15.0 * GB, "cpu": 204.0 * GB, "disk": 0.0}
# What a well-made kernel or copy reaches of the rate of its lane alone, elsewhere.
DERATED = dict.fromkeys(LANES, 0.85)


@dataclass(frozen=True)
class Case:
    """A workload on opt-30b: tokens to generate, rows of the authors' block, limits in tok/s, their published tok/s."""

    gen_len: int
    rows: int
    limit: float
    searched_limit: float
    authors: float


CASES = (Case(32, 728, 22.0, 23.3, 12.7), Case(512, 416, 78.5, 118, 18.83), Case(1024, 264, 57.4, 98, 13.82))


def models(case: Case, hardware: Hardware) -> tuple[CostModel, CostModel]:
    """At the machine's rates, and derated."""
    heavy, recent = EvictionSpec().sizes(512 + case.gen_len)
    job = Job(published("opt-30b"), 512, case.gen_len, heavy, recent)
    return CostModel(job, hardware), CostModel(job, hardware, DERATED)


def authors_block(case: Case) -> Policy:
    """Their rows, all weights streamed, the cache in host memory."""
    return Policy(8, case.rows // 8, None, Percent(0, 100, 0, 100, 0, 100), cpu_cache_compute=True)


def dry_run_peaks(job: Job, policy: Policy) -> Mapping[str, int]:
    """Peak bytes by tier that the run's own ledger counts on a device without memory."""
    rule = H2O(job.heavy, job.recent)
    platform = Platform(torch.device("meta"), {}, joint=False, baseline=DEFAULT_BASELINE)
    ledger = ledger_of(job.config, torch.float16, policy, platform, RunSizes(rule, policy.block_rows, job.prompt_len))
    peaks = {tier: ledger.peak(tier) for tier in ("gpu", "cpu", "disk")}  # type: ignore[arg-type]
    return {**peaks, "cpu": peaks["cpu"] + STAGED_BYTES}


def t4_lines(hardware: Hardware) -> Iterator[str]:
    """This engine on the T4, opt-30b in 16 bits, H2O at 20 %, prefill before decode."""
    yield (
        "| tokens | rows | policy | projected tok/s | limit | of it | simulated | derated to 0.85 | authors published"
        " | dry run GB, gpu + cpu |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case in CASES:
        model, derated = models(case, hardware)
        given = authors_block(case)
        for found, limit in (
            (Found(given, predict(model, given)), case.limit),
            (search(model, BUDGETS), case.searched_limit),
        ):
            speed, policy = found.projection.throughput_tok_s, found.policy
            peaks = dry_run_peaks(model.job, policy)
            yield (
                f"| 512 + {case.gen_len} | {policy.block_rows} | {policy.gpu_batch_size} x {policy.num_gpu_batches},"
                f" groups of {policy.group_rows}, {policy.percent} | {speed:.1f} | {limit:g} | {speed / limit:.0%}"
                f" | {simulate(model, policy).projection.throughput_tok_s:.1f}"
                f" | {predict(derated, policy).throughput_tok_s:.1f} | {case.authors:g}"
                f" | {peaks['gpu'] / GB:.2f} + {peaks['cpu'] / GB:.1f} |"
            )


def main() -> None:
    """Prints the tables, and writes them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="a Markdown file")
    output = parser.parse_args().output
    hardware = read_hardware(ROOT / "policies" / "hardware" / "t4.json")
    text = "\n".join(
        [
            "# One T4 of 16 GB: published figures beside projections",
            "",
            "Nothing here was measured: published throughput stands beside what a model computes from the rates of"
            " `policies/hardware/t4.json`. Made by `scripts/check_published.py`.",
            "",
            "## FlexGen's and H2O's own engine",
            "",
            "Errors are predicted over published throughput, less one. The fitted constants are those that FlexGen's"
            " authors ship; the additions, and which rows they are fitted to, are in"
            " `flexgen_h2o/search/published.py`. Decode attends to as many entries as the prompt has, which is what"
            " the authors timed.",
            "",
            table(compare(read_rows(ROOT / "results" / "published_t4.json"), hardware)),
            "",
            "## This engine, opt-30b in 16 bits, 20 % of the cache kept",
            "",
            "Rates are what the machine allows, several of them assumed; no run of this engine on a T4 stands behind"
            " them. Budgets: 15 GB on the GPU, 204 GB in host memory, no disk. The limits of searched policies count"
            " 19 % of the weights on the GPU.",
            "",
            *t4_lines(hardware),
            "",
        ]
    )
    print(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
