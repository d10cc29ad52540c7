"""The second of two equal generations in one process, so that nothing in it is compiled, tried or touched for the first
time: python scripts/warm_run.py FLAGS

FLAGS are those of `python -m flexgen_h2o.run`, with --prompt-len and --percent; the report is that of its --json, whose
"io" counts both, and loading.
"""

import json
import sys

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.run_options import read_flags
from flexgen_h2o.engine.requests import random_requests
from flexgen_h2o.jobs.report import run_report
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.environment import machine_name
from flexgen_h2o.profiling.quick import known_rates


def main(argv: list[str]) -> int:
    """Generates twice for one block of random prompts. Raises UsageError with every mistake found."""
    options = read_flags(argv)
    if options.prompt_len is None or options.searches or options.input is not None:
        raise UsageError("a block of random prompts is generated for: give --prompt-len and --percent, and no --input")
    params = options.params
    with LLM(**options.llm) as llm:
        rows = llm.policy.block_rows
        prompts = list(random_requests(llm.config.vocab_size, options.prompt_len, rows, llm.seed))
        for _ in range(2):
            for _ in llm.stream(prompts, params, options.prompt_len, rows):
                pass
        rates = known_rates(options.hardware or "auto", machine_name(llm.device.type))
        report = run_report(llm, params, options.prompt_len, rows, rates)
    print(json.dumps(report))
    return EXIT_OK


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
