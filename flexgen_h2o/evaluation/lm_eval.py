"""The model as EleutherAI's lm-evaluation-harness sees one: every request goes through the evicting cache.

Needs lm-eval, the extra `eval`. A harness of your own finds the model under the name `flexgen_h2o` once this module has
been imported.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.engine import generate as generation
from flexgen_h2o.evaluation.continuations import Eviction, Request, likelihoods, make_evictions
from flexgen_h2o.evaluation.tasks import Row, task_row
from flexgen_h2o.evaluation.texts import generate
from flexgen_h2o.llm import LLM
from flexgen_h2o.plan.sampling import SamplingParams

DEFAULT_GENERATED = 256  # tokens, where a task does not say; as with lm-eval's own models
RESAMPLED = 1000  # times, for standard errors that no formula gives
SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}
LENGTHS = ("max_gen_toks", "max_new_tokens")


@register_model("flexgen_h2o")
class EvictingLM(TemplateLM):
    """A model with a policy.

    Args:
        model: an LLM, whose weights are loaded once for all policies; or a folder or name to make one of.
        eviction: a policy of `evaluate`. budget: the share of a request's context that it keeps. Of text that is scored
            as a whole, a share of the text.
        settings: of the LLM, where one is made.
    Raises UsageError for a policy that is unknown or has no cache, a budget that is no share, or a model without a
    tokenizer.
    """

    backend = "causal"

    def __init__(self, model: LLM | str | None = None, eviction: str = "h2o", budget: float = 0.2, **settings: Any):
        super().__init__()
        if not 0 < budget <= 1:
            raise UsageError(f"budget is {budget}; it must be a number above 0 and at most 1")
        (self.eviction,) = make_evictions([eviction], [budget])
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        if self.llm.tokenizer is None:
            raise UsageError(f"{self.llm.config.name} has no tokenizer, which tasks need")
        self._tokens = self.llm.tokenizer

    @property
    def eot_token_id(self) -> int:
        ids = self.llm.config.eos_token_ids
        if not ids:
            raise UsageError(f"{self.llm.config.name} has no token that ends a text (eos_token_id in its config.json)")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        leading_id = self.llm.config.bos_token_id
        return self.eot_token_id if leading_id is None else leading_id

    @property
    def max_length(self) -> int:
        return self.llm.config.max_position_embeddings

    @property
    def tokenizer_name(self) -> str:
        return self.llm.config.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Token ids of a text, with the model's leading token unless told otherwise."""
        return self._tokens.encode_part(string) if add_special_tokens is False else self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        """Scores requests that have been tokenised: (what the cache of results goes by, context, continuation)."""
        cut = [self._cut(context, continuation) for _, context, continuation in requests]
        answers = [(one.log_probability, one.is_greedy) for one in likelihoods(self.llm, self.eviction, cut)]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
        """A request that fits the model: what is too long loses its beginning, as with lm-eval's own models."""
        over = max(0, len(context) + len(continuation) - (self.max_length + 1))
        if over >= len(context):
            raise UsageError(
                f"a continuation of {len(continuation)} tokens exceeds {self.llm.config.name}'s context of"
                f" {self.max_length}; leave its task out"
            )
        return Request(context[over:], continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's context; nothing but the first token is prefill."""
        windows = [self._windows(request.args[0]) for request in requests]
        found = iter(likelihoods(self.llm, self.eviction, [window for of_text in windows for window in of_text]))
        totals = [sum(next(found).log_probability for _ in of_text) for of_text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[Request]:
        """The text in windows, each token scored once; the first window has the leading token alone for context."""
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        pairs = [make_disjoint_window(window) for window in windows]
        return [Request(context, continuation, len(context) + len(continuation)) for context, continuation in pairs]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string. As in `run`, the prompt's first token is that of the full cache."""
        alike: dict[str, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(place)
        texts = [""] * len(requests)
        for places in alike.values():
            params = sampling_params(requests[places[0]].args[1])
            prompts = [self._prompt(requests[place].args[0], params) for place in places]
            for place, text in zip(places, self._generated(prompts, params), strict=True):
                texts[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return texts

    def _prompt(self, text: str, params: SamplingParams) -> list[int]:
        """The end of a text that leaves room to generate."""
        room = self.max_length - params.max_new_tokens
        if room < 1:
            raise UsageError(
                f"a task asks for {params.max_new_tokens} tokens, and {self.llm.config.name}'s context has"
                f" {self.max_length}; leave it out"
            )
        return self.tok_encode(text)[-room:]

    def _generated(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[str]:
        longest = max(map(len, prompts)) + params.max_new_tokens
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            groups[self.eviction.rule(len(prompt), longest, self.llm)].append(place)
        texts = [""] * len(prompts)
        for rule, places in groups.items():
            places.sort(key=lambda place: len(prompts[place]))
            requests = [generation.Request(place, prompts[place]) for place in places]
            for output in generate(self.llm, rule, requests, params):
                texts[output.index] = output.text or ""
        return texts


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """lm-eval's settings of generation as this engine's. Raises UsageError for those that it does not know."""
    unknown = set(settings) - {"until", *LENGTHS, *SAMPLING}
    if unknown:
        raise UsageError(
            f"a task asks for {', '.join(sorted(unknown))} in generation, which there is not; leave it out"
        )
    until = settings.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    length = next((settings[name] for name in LENGTHS if name in settings), DEFAULT_GENERATED)
    chosen = {name: settings[name] for name in SAMPLING if name in settings}
    params = SamplingParams(max_new_tokens=int(length), stop=tuple(text for text in stop if text), **chosen)
    if problems := params.problems():
        raise UsageError(problems)
    return params


def load_tasks(names: Sequence[str], include_path: str | None) -> TaskManager:
    """lm-eval's tasks, checked. Raises UsageError for those that are unknown, or whose data cannot be had."""
    if include_path is not None and not Path(include_path).is_dir():
        raise UsageError(
            f"--include-path {include_path} is no folder; it takes one with tasks in lm-eval's YAML format"
        )
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UsageError(
            f"--tasks {','.join(unknown)} is unknown to lm-eval; `lm_eval ls tasks` lists those that it has, and"
            " --include-path takes a folder with others"
        )
    for name in names:
        try:
            manager.load([name])
        except Exception as error:  # whatever the library raises where there is no network, or no such file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # The others would each try for as long to reach the network.
            raise UsageError(
                f"--tasks {name} cannot be loaded ({reason}); if its data is not on this machine, connect to the"
                " network once, or leave it out"
            ) from error
    return manager


def evaluate_tasks(
    llm: LLM, eviction: Eviction, names: Sequence[str], manager: TaskManager, limit: int | None, fewshot: int | None
) -> Row:
    """What a policy comes to on each task.

    Args:
        limit: documents of each task; None for all. fewshot: examples before each question; None as the task says.
    """
    found = simple_evaluate(
        EvictingLM(llm, eviction.name, eviction.budget),
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        num_fewshot=fewshot,
        bootstrap_iters=RESAMPLED,
        log_samples=False,
    )
    return task_row(eviction, found["results"])
