"""One block's generation: requests in, tokens chosen, outputs out."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from flexgen_h2o.engine.block import BlockStart, PromptBlock, RowFault, pad_prompts
from flexgen_h2o.engine.loop import BlockTimes, Engine
from flexgen_h2o.engine.sampling import SamplingParams, choose_tokens
from flexgen_h2o.models.tokenizer import Tokenizer
from flexgen_h2o.search.limits import PhaseWork

FinishReason = Literal["stop", "length"]
KEPT_BLOCKS = 100  # whose times are kept one by one


@dataclass(frozen=True)
class Request:
    """One prompt, ready to run. `index` is its place in the whole input, on which its random numbers depend."""

    index: int
    prompt_ids: Sequence[int]


@dataclass(frozen=True)
class GenerationOutput:
    """What was generated for one prompt.

    Attributes:
        index: the prompt's place in the input.
        prompt_token_ids: the prompt as the model saw it.
        token_ids: generated ids, eos included; what follows a stop string is left out.
        text: without special tokens and from a stop string on cut off; None where there is no tokenizer.
        finish_reason: "stop" at eos, a stop id or a stop string; "length" at the end of max_new_tokens.
        error: why there is nothing to show for this prompt, and no token id; None if all went well.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None


def random_requests(vocab_size: int, prompt_len: int, count: int, seed: int) -> Iterator[Request]:
    """Prompts of random token ids, special tokens left out: for measuring speed."""
    numbers = random.Random(seed)
    first = min(4, vocab_size - 1)
    for index in range(count):
        yield Request(index, [numbers.randrange(first, vocab_size) for _ in range(prompt_len)])


class Sampler:
    """A TokenChooser for one block: chooses by the sampling parameters and keeps what was chosen.

    Args:
        block: the requests, in the order of the block's rows.
        eos_token_ids: ids that end a text unless eos is ignored.
        filler: what finished rows are fed.
        on_tokens: told how many tokens have just been generated.
    """

    def __init__(
        self,
        block: Sequence[Request],
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        filler: int,
        tokenizer: Tokenizer | None,
        on_tokens: Callable[[int], None],
    ):
        self._params = params
        self._indices = torch.tensor([request.index for request in block])
        self._stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._filler = filler
        self._tokenizer = tokenizer
        # A token that shows has at least one byte, so a stop string lies within this many of them.
        self._tail = max((len(text.encode()) for text in params.stop), default=0)
        self._tokens: list[list[int]] = [[] for _ in block]
        self._stopped = [False] * len(block)
        self._on_tokens = on_tokens

    @property
    def tokens(self) -> list[list[int]]:
        """What was chosen so far, by row."""
        return self._tokens

    def resume(self, tokens: Sequence[Sequence[int]]) -> None:
        """Goes on after tokens that another sampler has chosen for the same block."""
        self._tokens = [list(row) for row in tokens]
        self._stopped = [self._ends_row(row) for row in range(len(tokens))]

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        chosen = choose_tokens(logits, self._params, self._indices[rows], step).tolist()
        added = 0
        for offset, row in enumerate(range(rows.start, rows.stop)):
            if self._stopped[row]:
                chosen[offset] = self._filler
                continue
            self._tokens[row].append(chosen[offset])
            self._stopped[row] = self._ends_row(row)
            added += 1
        self._on_tokens(added)
        return torch.tensor(chosen, device=logits.device)

    def finished(self) -> bool:
        return all(self._stopped)

    def _ends_row(self, row: int) -> bool:
        tokens = self._tokens[row]
        if tokens[-1] in self._stop_ids:
            return True
        if not self._params.stop or self._tokenizer is None:
            return False
        tail = self._tokenizer.decode_tail(tokens, self._tail)
        return any(text in tail for text in self._params.stop)

    def output(self, row: int, request: Request) -> GenerationOutput:
        """What was generated for one row."""
        tokens = self._tokens[row]
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens)
        if text is not None:
            starts = [text.find(stop) for stop in self._params.stop if stop in text]
            text = text[: min(starts, default=len(text))]
        reason: FinishReason = "stop" if self._stopped[row] else "length"
        return GenerationOutput(request.index, list(request.prompt_ids), tokens, text, reason)


class NoChoice:
    """The TokenChooser of a dry run: logits without memory leave nothing to choose by."""

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        return torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)

    def finished(self) -> bool:
        return False


class Greedy:
    """A TokenChooser that takes the most likely token, as long as it is asked."""

    def choose(self, step: int, rows: slice, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def finished(self) -> bool:
        return False


@dataclass
class RunTotals:
    """What a run has done so far. Times are measured.

    Attributes:
        decoded_tokens: those of generated_tokens that did not come from prefill.
        evictions: entries dropped, over all rows, layers and heads.
        heavy_entries: entries that are not in the ring at the end, over all rows, layers and heads.
        step_s: of each of the last blocks.
    """

    num_prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    evictions: int = 0
    heavy_entries: int = 0
    step_s: list[list[float]] = field(default_factory=list)
    work: dict[str, PhaseWork] = field(default_factory=lambda: {"prefill": PhaseWork(), "decode": PhaseWork()})

    def add_times(self, times: BlockTimes) -> None:
        """Adds a block's times and work."""
        self.prefill_s += times.prefill_s
        self.decode_s += times.decode_s
        self.step_s = [*self.step_s[1 - KEPT_BLOCKS :], times.step_s]
        for phase, work in times.work.items():
            self.work[phase].add(work)

    def add_output(self, output: GenerationOutput, before: int, engine: Engine) -> None:
        """Adds a row; `before` of its tokens were generated by another run."""
        generated = len(output.token_ids) - before
        heads = engine.config.num_hidden_layers * engine.config.num_attention_heads
        # The last token is never fed back, so it never enters the cache.
        entered = len(output.prompt_token_ids) + len(output.token_ids) - 1
        rule = engine.kv.rule
        self.evictions += heads * max(0, entered - rule.slots)
        self.heavy_entries += heads * max(0, min(entered, rule.slots) - rule.recent)
        self.num_prompts += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.generated_tokens += generated
        self.decoded_tokens += generated if before else generated - 1


class BlockKeeper(Protocol):
    """Saves a block between its steps, so that it need not begin again after an interruption."""

    def restore(
        self, block: Sequence[Request], prompts: PromptBlock, engine: Engine, sampler: Sampler
    ) -> BlockStart | None:
        """Brings back what was saved of this block, if anything was: KV to its homes, tokens to the sampler."""

    def step_done(self, reached: BlockStart) -> None:
        """Saves the block given to restore(), if it is time to."""


class KeepsNothing:
    """The BlockKeeper of a run that begins its blocks again."""

    def restore(
        self, block: Sequence[Request], prompts: PromptBlock, engine: Engine, sampler: Sampler
    ) -> BlockStart | None:
        return None

    def step_done(self, reached: BlockStart) -> None:
        pass


def generate_block(
    engine: Engine,
    block: Sequence[Request],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    on_tokens: Callable[[int], None],
    keeper: BlockKeeper,
    totals: RunTotals,
) -> list[GenerationOutput]:
    """Generates for the requests of one block, in their order, and adds what was done to `totals`.

    Raises RuntimeError if the model's numbers are not finite for any of several requests.
    """
    config = engine.config
    sampler = Sampler(block, params, config.eos_token_ids, config.filler_token_id, tokenizer, on_tokens)
    prompts = pad_prompts([request.prompt_ids for request in block], config.filler_token_id)
    start = keeper.restore(block, prompts, engine, sampler)
    before = [len(tokens) for tokens in sampler.tokens]
    times = engine.run(prompts, params.max_new_tokens, sampler, start, keeper.step_done)
    totals.add_times(times)
    # A row that is done goes on being computed with the others, and what comes of it is no answer any more.
    faults = {row: fault for row, fault in times.faults.items() if fault.step < len(sampler.tokens[row])}
    if len(faults) == len(block) > 1:
        raise RuntimeError(f"no prompt can be served: {_explained(min(faults.items()))}")
    outputs = []
    for row, request in enumerate(block):
        if row in faults:
            reason = _explained((row, faults[row]))
            outputs.append(GenerationOutput(request.index, list(request.prompt_ids), [], None, "stop", reason))
        else:
            outputs.append(sampler.output(row, request))
            totals.add_output(outputs[-1], before[row], engine)
    return outputs


def _explained(fault: tuple[int, RowFault]) -> str:
    row, (step, layer) = fault[0], (fault[1].step, fault[1].layer)
    place = "in the choice of the token" if layer is None else f"in layer {layer}"
    return (
        f"the model's numbers are not finite (NaN or infinity) {place}, at token {step + 1} of row {row} of its block;"
        " use a wider --dtype, or fetch the weights again"
    )
