"""The Python interface: prompts in, generated text out, block by block."""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flexgen_h2o.checkpoints import locate_model
from flexgen_h2o.engine import Engine, pad_prompts, unit_shapes
from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import RULES, EvictionRule
from flexgen_h2o.policy import EvictionSpec, Policy
from flexgen_h2o.sampling import SamplingParams, choose_tokens
from flexgen_h2o.tiers import GB, MemoryPlan, gb, plan_memory, usable_memory
from flexgen_h2o.tokenizer import Tokenizer, load_tokenizer
from flexgen_h2o.weights import Weights, dummy_weights, load_weights, open_checkpoint, weight_bytes

Prompt = str | Sequence[int]
FinishReason = Literal["stop", "length"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason


@dataclass
class RunTotals:
    """What the last call of stream() or generate() has done so far. Times are measured."""

    num_prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    evictions: int = 0  # entries dropped, over all rows, layers and heads
    step_s: list[list[float]] = field(default_factory=list)  # of each block


class LLM:
    """An OPT model that generates with an evicting KV cache of fixed size.

    Weights are loaded at the first generate(), after all sizes have been checked.

    Args:
        model: a folder in Hugging Face format, a name such as "opt-30b", or None for the demo model that ships.
        path: where to look for a named model before the Hugging Face cache.
        eviction: "h2o", "full", "local" or "sink".
        hh_ratio, recent_ratio: heavy and recent entries as shares of prompt + generated tokens (h2o: 0.1 each).
        hh_size, recent_size, sink_size: the same in entries.
        gpu_batch_size, num_gpu_batches, decode_batch_size: how a block is cut; see `Policy`.
        prompt_len: the longest prompt to expect; None takes the longest that is given.
        dtype: "auto", "float32", "bfloat16" or "float16".
        memory_gb: memory budget in GB (2**30 bytes); None for all that is usable.
        dummy_weights: random weights, for measuring speed without a checkpoint.
        seed: of the dummy weights and of random prompts.
    Raises UsageError with every mistake found.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        path: str | None = None,
        eviction: str = "h2o",
        hh_ratio: float | str | None = None,
        recent_ratio: float | str | None = None,
        hh_size: int | None = None,
        recent_size: int | None = None,
        sink_size: int | None = None,
        gpu_batch_size: int | None = None,
        num_gpu_batches: int = 1,
        decode_batch_size: int | None = None,
        prompt_len: int | None = None,
        dtype: str = "auto",
        memory_gb: float | None = None,
        dummy_weights: bool = False,
        seed: int = 0,
    ):
        self.eviction = EvictionSpec(eviction, hh_ratio, recent_ratio, hh_size, recent_size, sink_size)
        self.policy = Policy(
            Policy.gpu_batch_size if gpu_batch_size is None else gpu_batch_size,
            num_gpu_batches,
            decode_batch_size,
        )
        problems = self.eviction.problems() + self.policy.problems()
        if dtype not in ("auto", *DTYPES):
            problems.append(f"--dtype {dtype!r} is unknown; known ones: auto, {', '.join(DTYPES)}")
        try:
            source = locate_model(model, path, dummy_weights)
        except UsageError as error:
            problems += error.problems
        if problems:
            raise UsageError(problems)
        self.config = source.config
        self.folder = source.folder
        self.uses_dummy_weights = dummy_weights
        self.seed = seed
        self.prompt_len = prompt_len
        self.budget = usable_memory() if memory_gb is None else int(memory_gb * GB)
        self.device = torch.device("cpu")
        self.dtype = _default_dtype() if dtype == "auto" else DTYPES[dtype]
        self.tokenizer: Tokenizer | None = None if source.folder is None else load_tokenizer(source.folder, self.config)
        self.weights: Weights | None = None
        self.unused_keys: tuple[str, ...] = ()
        self.load_s = 0.0
        self.totals = RunTotals()
        self._engine: Engine | None = None
        self._engine_key: tuple[EvictionRule, int] | None = None

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[GenerationOutput]:
        """Generates for every prompt, in order. A prompt is text or a sequence of token ids.

        Raises UsageError that lists every prompt and parameter that cannot be served.
        """
        params = params or SamplingParams()
        if isinstance(prompts, str):
            raise UsageError("prompts is one string; pass a list of prompts")
        if not prompts:
            return []
        problems, requests = [], []
        for index, prompt in enumerate(prompts):
            try:
                ids = self.encode(prompt)
                self.check_prompt(ids, params.max_new_tokens)
                requests.append(Request(index, ids))
            except ValueError as error:
                problems.append(f"prompt {index}: {error}")
        if problems:
            raise UsageError(problems)
        prompt_len = self.prompt_len or max(len(request.prompt_ids) for request in requests)
        return list(self.stream(requests, params, prompt_len, len(requests)))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError if it is text and there is no tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, so a text prompt cannot be read; give prompt_ids")
        return self.tokenizer.encode(prompt)

    def check_prompt(self, ids: Sequence[int], gen_len: int) -> None:
        """Raises ValueError if the model cannot generate `gen_len` tokens after this prompt."""
        if not ids:
            raise ValueError("prompt has no tokens")
        wrong = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}")
        context = self.config.max_position_embeddings
        if len(ids) + gen_len > context:
            raise ValueError(
                f"prompt of {len(ids)} tokens + {gen_len} to generate exceed the context of {context};"
                " shorten the prompt or --gen-len"
            )
        if self.prompt_len is not None and len(ids) > self.prompt_len:
            raise ValueError(f"prompt of {len(ids)} tokens is longer than --prompt-len {self.prompt_len}")

    def rule(self, prompt_len: int, gen_len: int) -> EvictionRule:
        """The eviction rule with its sizes, for prompts of up to `prompt_len` tokens."""
        return RULES[self.eviction.name](*self.eviction.sizes(prompt_len + gen_len))

    def check_plan(self, params: SamplingParams, prompt_len: int, num_prompts: int | None = None) -> MemoryPlan:
        """Checks sizes and memory before anything is loaded. Raises UsageError with every mistake found.

        Args:
            prompt_len: the longest prompt, in tokens.
            num_prompts: how many prompts there are, if known: a block is never larger.
        """
        problems = params.problems()
        context = self.config.max_position_embeddings
        if prompt_len < 1:
            problems.append(f"--prompt-len is {prompt_len}; it must be at least 1")
        elif prompt_len + params.max_new_tokens > context:
            problems.append(
                f"--prompt-len {prompt_len} + --gen-len {params.max_new_tokens} exceed {self.config.name}'s context"
                f" of {context} tokens; shorten one of them"
            )
        if params.stop and self.tokenizer is None:
            problems.append("--stop needs a tokenizer, and the model has none; use --stop-token-ids")
        if problems:
            raise UsageError(problems)
        plan = self._memory_plan(params, prompt_len, self._block_rows(num_prompts))
        if plan.total > self.budget:
            raise UsageError(self._does_not_fit(plan, params, prompt_len, num_prompts))
        return plan

    def load(self, progress: Callable[[int], None] = lambda placed: None) -> Weights:
        """Loads the weights, or returns them if they are. `progress` is told how many bytes have just been placed."""
        if self.weights is None:
            started = time.perf_counter()
            if self.uses_dummy_weights or self.folder is None:
                self.weights = dummy_weights(self.config, self.dtype, self.device, self.seed, progress)
            else:
                checkpoint = open_checkpoint(self.folder, self.config)
                self.unused_keys = checkpoint.unused
                self.weights = load_weights(checkpoint, self.config, self.dtype, self.device, progress)
            self.load_s = time.perf_counter() - started
        return self.weights

    def stream(
        self,
        requests: Iterable[Request],
        params: SamplingParams,
        prompt_len: int,
        num_prompts: int | None = None,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[GenerationOutput]:
        """Yields outputs in the order of the requests, a block at a time. Requests have been checked.

        Args:
            prompt_len: the longest prompt; with max_new_tokens it sizes the KV cache of the whole run.
            num_prompts: how many requests there are, if known.
            on_tokens: told how many tokens have just been generated.
        """
        self.check_plan(params, prompt_len, num_prompts)
        self.totals = RunTotals()
        engine = self._prepare_engine(self.rule(prompt_len, params.max_new_tokens), self._block_rows(num_prompts))
        source = iter(requests)
        while block := list(itertools.islice(source, self.policy.block_rows)):
            yield from self._run_block(engine, block, params, on_tokens)

    def random_requests(self, prompt_len: int, num_prompts: int) -> list[Request]:
        """Prompts of random token ids, special tokens left out: for measuring speed."""
        numbers = random.Random(self.seed)
        first = min(4, self.config.vocab_size - 1)
        return [
            Request(index, [numbers.randrange(first, self.config.vocab_size) for _ in range(prompt_len)])
            for index in range(num_prompts)
        ]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of keys and values that the KV cache of the last run holds; 0 before one."""
        return 0 if self._engine is None else self._engine.kv_cache_bytes

    def full_kv_cache_bytes(self, prompt_len: int, gen_len: int, num_prompts: int | None = None) -> int:
        """Bytes of keys and values that the full cache would hold for the same block."""
        full = RULES["full"](0, prompt_len + gen_len)
        units = unit_shapes(self.config, full, self.policy, self._block_rows(num_prompts))
        return self.config.num_hidden_layers * sum(unit.kv_bytes(self.dtype.itemsize) for unit in units)

    def _run_block(
        self, engine: Engine, block: list[Request], params: SamplingParams, on_tokens: Callable[[int], None]
    ) -> Iterator[GenerationOutput]:
        sampler = _Sampler(block, params, self.config.eos_token_ids, self.config.filler_token_id, self.tokenizer)
        sampler.on_tokens = on_tokens
        prompts = pad_prompts([request.prompt_ids for request in block], self.config.filler_token_id)
        times = engine.run(prompts, params.max_new_tokens, sampler)
        self.totals.prefill_s += times.prefill_s
        self.totals.decode_s += times.decode_s
        self.totals.step_s.append(times.step_s)
        heads = self.config.num_hidden_layers * self.config.num_attention_heads
        for row, request in enumerate(block):
            output = sampler.output(row, request)
            # The last token is never fed back, so it never enters the cache.
            entered = len(request.prompt_ids) + len(output.token_ids) - 1
            self.totals.evictions += heads * max(0, entered - engine.rule.slots)
            self.totals.num_prompts += 1
            self.totals.prompt_tokens += len(request.prompt_ids)
            self.totals.generated_tokens += len(output.token_ids)
            yield output

    def _block_rows(self, num_prompts: int | None) -> int:
        rows = self.policy.block_rows
        return rows if num_prompts is None else max(1, min(rows, num_prompts))

    def _prepare_engine(self, rule: EvictionRule, rows: int) -> Engine:
        """The engine of the last call if it has these sizes, else a new one in its place."""
        weights = self.load()
        if self._engine is None or self._engine_key != (rule, rows):
            self._engine = None  # its buffers go before the new ones come
            self._engine = Engine(self.config, weights, rule, self.policy, rows)
            self._engine_key = (rule, rows)
        return self._engine

    def _memory_plan(self, params: SamplingParams, prompt_len: int, rows: int) -> MemoryPlan:
        rule = self.rule(prompt_len, params.max_new_tokens)
        units = unit_shapes(self.config, rule, self.policy, rows)
        itemsize = self.dtype.itemsize
        weights = weight_bytes(self.config, itemsize)
        return plan_memory(self.config, itemsize, weights, units, prompt_len, min(rows, self.policy.group_rows))

    def _does_not_fit(self, plan: MemoryPlan, params: SamplingParams, prompt_len: int, num_prompts: int | None) -> str:
        """A sentence with both numbers and the way out."""
        needs = f"{self.config.name} needs {plan}, but {gb(self.budget)} can be used; "
        rows = self._block_rows(num_prompts)
        fitting = (
            smaller
            for smaller in range(rows - 1, 0, -1)
            if self._memory_plan(params, prompt_len, smaller).total <= self.budget
        )
        largest = next(fitting, None)
        if largest is None:
            return needs + "take a smaller model, a shorter --prompt-len and --gen-len, or a machine with more memory"
        return needs + f"a block of {largest} rows (--gpu-batch-size {largest} --num-gpu-batches 1) would fit"


class _Sampler:
    """Chooses the tokens of one block and keeps what was chosen."""

    def __init__(
        self,
        block: Sequence[Request],
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        filler: int,
        tokenizer: Tokenizer | None,
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
        self.on_tokens: Callable[[int], None] = lambda tokens: None

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
        self.on_tokens(added)
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
        tokens = self._tokens[row]
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens)
        if text is not None:
            starts = [text.find(stop) for stop in self._params.stop if stop in text]
            text = text[: min(starts, default=len(text))]
        reason: FinishReason = "stop" if self._stopped[row] else "length"
        return GenerationOutput(request.index, list(request.prompt_ids), tokens, text, reason)


def _default_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it, else float32."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has_bfloat16 = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if has_bfloat16 else torch.float32
