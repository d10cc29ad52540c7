"""Texts generated through the evicting cache, of prompts that share a rule."""

from collections.abc import Sequence

from flexgen_h2o.engine.assemble import RunSizes
from flexgen_h2o.engine.generate import KeepsNothing, RunTotals, generate_block
from flexgen_h2o.engine.requests import GenerationOutput, Request
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.llm import LLM
from flexgen_h2o.plan.sampling import SamplingParams


def generate(
    llm: LLM, rule: EvictionRule, requests: Sequence[Request], params: SamplingParams
) -> list[GenerationOutput]:
    """What follows each prompt, in the order of the requests (1 or more), in blocks as large as the model's policy's.

    Raises RuntimeError if the model's numbers are not finite.
    """
    rows = min(llm.policy.block_rows, len(requests))
    engine = llm.load().engine(RunSizes(rule, rows, max(len(request.prompt_ids) for request in requests)))
    outputs = []
    for start in range(0, len(requests), rows):
        block = requests[start : start + rows]
        outputs += generate_block(
            engine, block, params, llm.tokenizer, lambda tokens: None, KeepsNothing(), RunTotals()
        )
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    return outputs
