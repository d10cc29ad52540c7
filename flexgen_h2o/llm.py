"""The Python interface: prompts in, generated text out, block by block."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import filled
from flexgen_h2o.engine.assemble import RunSizes, Runtime
from flexgen_h2o.engine.block import PromptBlock
from flexgen_h2o.engine.chooser import NoChoice
from flexgen_h2o.engine.fit import check_fit, is_out_of_memory, lighter_plan, smaller_sub_batches
from flexgen_h2o.engine.generate import BlockKeeper, KeepsNothing, RunTotals, generate_block
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.engine.requests import GenerationOutput, Request, as_ids
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kvcache.eviction.base import EvictionRule
from flexgen_h2o.kvcache.eviction.registry import load
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec
from flexgen_h2o.machine.limits import process_baseline
from flexgen_h2o.machine.platform import (
    DTYPES,
    Platform,
    choose_device,
    default_dtype,
    setting_problems,
    taken_on_gpu,
    tier_budgets,
)
from flexgen_h2o.memory.tiers import Ledger
from flexgen_h2o.models.base import TensorSource
from flexgen_h2o.models.checkpoint import Checkpoint, locate_model, open_checkpoint
from flexgen_h2o.models.tokenizer import Tokenizer, load_tokenizer
from flexgen_h2o.plan.kv_shape import unit_shapes
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import place_weights
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.run_settings import MemoryBudgets, ModelChoice
from flexgen_h2o.plan.sampling import SamplingParams
from flexgen_h2o.plan.schedule import telling_steps
from flexgen_h2o.weights.files import WeightFolder, weight_folder
from flexgen_h2o.weights.sources import dummy_origin, dummy_source
from flexgen_h2o.weights.store import weight_places

Prompt = str | Sequence[int]
OUT_OF_MEMORY = "out of memory"


def _parts_of(settings: dict[str, Any]) -> tuple[ModelChoice, MemoryBudgets, EvictionSpec, Policy]:
    """Settings of LLM by what they are about. Raises UsageError for what is no setting of it."""
    kinds = (ModelChoice, MemoryBudgets, EvictionSpec, Policy)
    choice, budgets, eviction, policy = filled("LLM", settings, kinds, also=("prompt_len", "seed", "trace"))
    return choice, budgets, eviction, policy


class LLM:
    """A model that generates with an evicting KV cache of fixed size.

    Weights are loaded at the first generate(), after all sizes have been checked.

    Args:
        model: a folder in Hugging Face format, a name such as "opt-30b", or None for the demo model that ships.
        prompt_len: the longest prompt to expect; None takes the longest that is given.
        seed: of the dummy weights and of random prompts.
        trace: keep what every resource did when, for `timeline.write_trace`.
        settings: fields of `ModelChoice` (path, device, dtype, ...), of `MemoryBudgets` (gpu_mem, ...), of
            `EvictionSpec` (eviction, hh_ratio, ...), and of `Policy`: how a block is cut (gpu_batch_size, ...) and
            where things live (percent, ...).

    Attributes:
        totals: what the last call of stream() or generate() has done so far.
        notes: what people should know of what has been done, a sentence each.
    Raises UsageError with every mistake found.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prompt_len: int | None = None,
        seed: int = 0,
        trace: bool = False,
        **settings: Any,
    ):
        choice, budgets, self.eviction, self.policy = _parts_of({"model": model, **settings})
        problems = self.eviction.problems() + self.policy.problems()
        problems += setting_problems(choice.device, choice.dtype, budgets.by_tier)
        try:
            source = locate_model(model, choice.path, choice.dummy_weights or choice.device == "meta")
        except UsageError as error:
            problems += error.problems
        if problems:
            raise UsageError(problems)
        self.config = source.config
        self.folder = source.folder
        self.uses_dummy_weights = choice.dummy_weights
        self.seed = seed
        self.prompt_len = prompt_len
        self.device = choose_device(choice.device)
        self.dtype = default_dtype(self.device) if choice.dtype == "auto" else DTYPES[choice.dtype]
        self.platform = Platform(
            self.device,
            tier_budgets(self.device, budgets.gpu_mem, budgets.cpu_mem, budgets.disk_mem),
            joint=self.device.type == "cpu",
            offload_dir=Path(budgets.offload_dir).expanduser(),
            baseline=process_baseline(self.dtype),
            gpu_baseline=taken_on_gpu(self.device),
            matrix_layout=best_layout(
                self.device, self.dtype, self.config.matrix_shapes(), self.policy.compress_weight
            ),
            keeps_spans=trace,
        )
        self.tokenizer: Tokenizer | None = None if source.folder is None else load_tokenizer(source.folder, self.config)
        self.runtime: Runtime | None = None
        self.unused_keys: tuple[str, ...] = ()
        self.load_s = 0.0
        self.totals = RunTotals()
        self.notes: list[str] = []
        self._engine: Engine | None = None

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
        """Token ids of a prompt. Raises ValueError if it is neither text nor ids, or there is no tokenizer for it."""
        if not isinstance(prompt, str):
            return as_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, so a text prompt cannot be read; give prompt_ids")
        self.tokenizer.check(prompt, self.config.max_position_embeddings)
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
        return self.eviction.rule(prompt_len + gen_len)

    def check_plan(self, params: SamplingParams, prompt_len: int, num_prompts: int | None = None) -> None:
        """Checks sizes and memory before anything is loaded. Raises UsageError with every mistake found.

        Args:
            prompt_len: the longest prompt, in tokens.
            num_prompts: how many prompts there are, if known: a block is never larger.
        """
        self.check_lengths(params, prompt_len)
        sizes = self._run_sizes(params, prompt_len, num_prompts)
        check_fit(self.config, self.dtype, self.policy, self.platform, sizes, self._on_disk_already())

    def _on_disk_already(self) -> dict[str, int]:
        """Bytes on disk, by line of the ledger, that this run finds there, or has put there itself."""
        if self.runtime is not None:
            return dict(self.runtime.ledger.accounts["disk"].entries)
        homes = place_weights(self.config, self.policy.percent.weights)
        return {Line.WEIGHTS: self.kept_weight_bytes({name for name, home in homes.items() if home == "disk"})}

    def kept_weight_bytes(self, names: Collection[str] | None = None) -> int:
        """Bytes of this model's weights that an earlier run has left on disk: of all, or of some parameters."""
        folder = None if names is not None and not names else self._weight_folder(self.checkpoint())
        if folder is None:
            return 0
        places = weight_places(self.config, self.dtype, self.platform.matrix_layout)
        return folder.present_bytes({name: place for name, place in places.items() if names is None or name in names})

    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, checked; None where weights are made up or none are needed."""
        if self.uses_dummy_weights or self.folder is None or self.device.type == "meta":
            return None
        return open_checkpoint(self.folder, self.config)

    def check_lengths(self, params: SamplingParams, prompt_len: int = 1) -> None:
        """Checks what does not depend on the prompts but their length. Raises UsageError with every mistake found."""
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
        wrong = [token for token in params.stop_token_ids if not 0 <= token < self.config.vocab_size]
        if wrong:
            problems.append(
                f"--stop-token-ids {' '.join(map(str, wrong))} is outside {self.config.name}'s vocabulary of"
                f" {self.config.vocab_size}; no text would ever stop there"
            )
        if problems:
            raise UsageError(problems)

    def load(self, progress: Callable[[int], None] = lambda placed: None) -> Runtime:
        """Loads the weights, if they are not. `progress` is told how many bytes have just been placed."""
        if self.runtime is None:
            started = time.perf_counter()
            checkpoint = self.checkpoint()
            self.unused_keys = () if checkpoint is None else checkpoint.unused
            folder = self._weight_folder(checkpoint)
            runtime = Runtime(self.config, self.dtype, self.policy, self.platform, folder)
            try:
                runtime.load(self._weight_source(checkpoint), progress)
            except BaseException:
                runtime.close()
                raise
            self.runtime = runtime
            self.notes += [] if folder is None else folder.notes()
            self.load_s = time.perf_counter() - started
        return self.runtime

    def close(self) -> None:
        """Gives back memory, threads and files. What is generated next loads the weights again."""
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _weight_source(self, checkpoint: Checkpoint | None) -> TensorSource:
        if checkpoint is not None:
            return checkpoint.source()
        return dummy_source(self.config, self.seed, self.dtype, self.device)

    def _weight_folder(self, checkpoint: Checkpoint | None) -> WeightFolder | None:
        """Where this model's weights are kept on disk; None where none are needed."""
        if self.device.type == "meta":
            return None
        origin = dummy_origin(self.config, self.seed, self.device.type)
        if checkpoint is not None:
            origin = checkpoint.identity()
        return weight_folder(origin, self.dtype, self.platform.matrix_layout.name)

    def dry_run(self, params: SamplingParams, prompt_len: int, num_prompts: int | None = None) -> None:
        """Walks prefill, the first two decode steps and the last, for one block on a device without memory."""
        self.check_plan(params, prompt_len, num_prompts)
        self.totals = RunTotals()
        rows = self._block_rows(num_prompts)
        self._engine = engine = self.load().engine(self._run_sizes(params, prompt_len, num_prompts))
        ids = torch.zeros(rows, prompt_len, dtype=torch.int64)
        block = PromptBlock(ids, torch.zeros(rows, dtype=torch.int64))
        engine.walk(block, telling_steps(params.max_new_tokens), NoChoice())

    def stream(
        self, requests: Iterable[Request], params: SamplingParams, prompt_len: int, num_prompts: int | None = None
    ) -> Iterator[GenerationOutput]:
        """Yields outputs in the order of the requests, a block at a time. The arguments are those of blocks()."""
        return itertools.chain.from_iterable(self.blocks(requests, params, prompt_len, num_prompts))

    def blocks(
        self,
        requests: Iterable[Request],
        params: SamplingParams,
        prompt_len: int,
        num_prompts: int | None = None,
        on_tokens: Callable[[int], None] = lambda tokens: None,
        keeper: BlockKeeper | None = None,
    ) -> Iterator[list[GenerationOutput]]:
        """Yields the outputs of a block at a time, in the order of the requests. Requests have been checked.

        Args:
            prompt_len: the longest prompt; with max_new_tokens it sizes the KV cache of the whole run.
            num_prompts: how many requests there are, if known.
            on_tokens: told how many tokens have just been generated.
            keeper: saves blocks between their steps.
        """
        self.check_plan(params, prompt_len, num_prompts)
        self.totals = RunTotals()
        sizes = self._run_sizes(params, prompt_len, num_prompts)
        source = iter(requests)
        while block := list(itertools.islice(source, self.policy.block_rows)):
            yield self._serve(block, params, sizes, on_tokens, keeper or KeepsNothing())

    def _serve(
        self,
        block: Sequence[Request],
        params: SamplingParams,
        sizes: RunSizes,
        on_tokens: Callable[[int], None],
        keeper: BlockKeeper,
    ) -> list[GenerationOutput]:
        """A block's outputs. Where the device runs out of memory, smaller sub-batches are tried, once in a run."""
        told: list[int] = []

        def tell(tokens: int) -> None:
            told.append(tokens)
            on_tokens(tokens)

        try:
            runtime = self.load()
            self._engine = runtime.engine(sizes)
            if (refusal := runtime.tiers.refusal) is not None and refusal not in self.notes:
                self.notes.append(refusal)
            return generate_block(self._engine, block, params, self.tokenizer, tell, keeper, self.totals)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).split("\n", 1)[0] or "no memory left"
        # Outside of the handler: inside it, the memory of the failed attempt is still referred to.
        self._step_down(reason, sizes)
        on_tokens(-sum(told))  # they are generated once more
        return self._serve(block, params, sizes, on_tokens, keeper)

    def _step_down(self, reason: str, sizes: RunSizes) -> None:
        """Cuts the same block into smaller sub-batches. Raises RuntimeError if that has been done or cannot be."""
        self.close()
        asked, smaller = self.policy, smaller_sub_batches(self.policy)
        failed = f"{OUT_OF_MEMORY} with --gpu-batch-size {asked.gpu_batch_size} ({reason})"
        if smaller is None or any(note.startswith(OUT_OF_MEMORY) for note in self.notes):
            raise RuntimeError(f"{failed}. {lighter_plan(self.config, self.dtype, asked, self.platform, sizes)}")
        self.policy = smaller
        self.notes.append(
            f"{failed}; going on with --gpu-batch-size {smaller.gpu_batch_size} --num-gpu-batches"
            f" {smaller.num_gpu_batches} --decode-batch-size {smaller.group_rows}"
        )

    def ledger(self) -> Ledger | None:
        """What the run holds and has held on each tier; None before weights are loaded."""
        return None if self.runtime is None else self.runtime.ledger

    def moved_bytes(self, link: str) -> int:
        """Bytes that have moved in a direction so far: h2d, d2h, disk_read or disk_write."""
        return 0 if self.runtime is None else self.runtime.transfer.moved[link]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of keys and values that the KV cache of the last run holds; 0 before one."""
        return 0 if self._engine is None else self._engine.kv.kv_bytes

    def full_kv_cache_bytes(self, prompt_len: int, gen_len: int, num_prompts: int | None = None) -> int:
        """Bytes of keys and values that the full cache would hold for the same block."""
        full = load("full")(0, prompt_len + gen_len)
        units = unit_shapes(self.config, full.sizes, self.policy, self._block_rows(num_prompts))
        return self.config.num_hidden_layers * sum(unit.kv_bytes(self.dtype.itemsize) for unit in units)

    def _block_rows(self, num_prompts: int | None) -> int:
        rows = self.policy.block_rows
        return rows if num_prompts is None else max(1, min(rows, num_prompts))

    def _run_sizes(self, params: SamplingParams, prompt_len: int, num_prompts: int | None) -> RunSizes:
        rule = self.rule(prompt_len, params.max_new_tokens)
        return RunSizes(rule, self._block_rows(num_prompts), prompt_len)
