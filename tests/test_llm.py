"""The Python interface: what is generated, when it ends, and what is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import pytest
import torch
from support.helpers import dense
from support.reference import ReferenceRule, reference_generate
from support.tiny_models import make_tiny_opt, save_tiny_opt
from transformers import OPTForCausalLM

from flexgen_h2o import LLM, GenerationOutput, SamplingParams
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.llm import DTYPES
from flexgen_h2o.plan.schedule import OUTER

TEXTS = [
    "The captain looked at the sea and said,",
    "And",
    "She had been so long away from home that she could not tell whether",
    "It was",
    "",
]


@pytest.fixture(scope="module")
def demo() -> OPTForCausalLM:
    """transformers' idea of the demo model."""
    return OPTForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def full() -> LLM:
    """The demo model with nothing evicted. Shared, as generate() leaves nothing behind."""
    return LLM(eviction="full", dtype="float32", gpu_batch_size=3)


@pytest.fixture(scope="module")
def no_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tiny model of 100 tokens without a tokenizer: sampled at random it meets every token soon."""
    folder = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path_factory.mktemp("tiny"))
    return LLM(str(folder), eviction="full", dtype="float32")


def tokens(outputs: Sequence[GenerationOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def mixed_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[2, *(numbers.randrange(4, 4096) for _ in range(length - 1))] for length in lengths]


def problems_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(UsageError) as caught:
        call()
    return caught.value.problems


# --- against others ---------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(demo: OPTForCausalLM, full: LLM) -> None:
    """A left-padded batch there, sub-batches of three here."""
    prompts = [full.encode(text) for text in TEXTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[1] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    theirs = demo.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=1)[:, width:]
    ours = tokens(full.generate(TEXTS, SamplingParams(max_new_tokens=24)))
    assert [row + [1] * (24 - len(row)) for row in ours] == theirs.tolist()


@pytest.mark.parametrize(("heavy", "recent", "length"), [(5, 6, 40), (2, 1, 30), (8, 4, 9)])
def test_h2o_tokens_are_those_of_the_slow_reference(demo: OPTForCausalLM, heavy: int, recent: int, length: int) -> None:
    (prompt,) = mixed_prompts(length, seed=length)
    rule = ReferenceRule("h2o", heavy, recent)
    expected = reference_generate(demo.state_dict(), demo.config, prompt, 16, rule)
    llm = LLM(hh_size=heavy, recent_size=recent, dtype="float32")
    assert tokens(llm.generate([prompt], SamplingParams(max_new_tokens=16, ignore_eos=True))) == [expected]


def test_eviction_changes_what_is_generated(full: LLM) -> None:
    """Else the tests of eviction above would say nothing."""
    prompts = mixed_prompts(60, 60, 60)
    params = SamplingParams(max_new_tokens=16)
    evicting = LLM(hh_size=4, recent_size=4, dtype="float32")
    assert tokens(evicting.generate(prompts, params)) != tokens(full.generate(prompts, params))


# --- blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"gpu_batch_size": 1},
        {"gpu_batch_size": 5},
        {"gpu_batch_size": 2, "num_gpu_batches": 3, "decode_batch_size": 2},
        {"gpu_batch_size": 3, "num_gpu_batches": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_how_a_block_is_cut(sizes: dict[str, int], do_sample: bool) -> None:
    prompts = mixed_prompts(5, 30, 1, 17, 17, 8, 40)
    params = SamplingParams(max_new_tokens=12, do_sample=do_sample, temperature=0.9, top_k=50, top_p=0.95, seed=7)
    settings: dict[str, Any] = {"hh_size": 4, "recent_size": 5, "dtype": "float32"}
    expected = LLM(**settings, gpu_batch_size=7).generate(prompts, params)
    found = LLM(**settings, **sizes).generate(prompts, params)
    assert found == expected
    assert [output.index for output in found] == list(range(7))
    assert [output.prompt_token_ids for output in found] == prompts


def test_two_calls_are_two_fresh_models() -> None:
    """The second call is larger, then smaller, than the first, and with other lengths."""
    settings: dict[str, Any] = {"hh_size": 4, "recent_size": 5, "dtype": "float32", "gpu_batch_size": 4}
    params = SamplingParams(max_new_tokens=10, do_sample=True, seed=1)
    used = LLM(**settings)
    for prompts in (mixed_prompts(20, 9), mixed_prompts(5, 50, 3, 8, 30, seed=1), mixed_prompts(12, seed=2)):
        assert used.generate(prompts, params) == LLM(**settings).generate(prompts, params)


def test_an_engine_is_kept_while_sizes_stay() -> None:
    llm = LLM(hh_size=4, recent_size=5)
    llm.generate(mixed_prompts(20, 9), SamplingParams(max_new_tokens=3))
    runtime, engine = llm.runtime, llm._engine
    llm.generate(mixed_prompts(9, 20, seed=1), SamplingParams(max_new_tokens=3))
    assert llm.runtime is runtime and llm._engine is engine


@pytest.mark.slow
def test_memory_stays_flat_over_twenty_calls() -> None:
    llm = LLM(hh_size=20, recent_size=20, dtype="float32")
    process = psutil.Process()
    sizes = []
    for number in range(20):
        llm.generate(mixed_prompts(100 + number % 5, 60, 30, seed=number), SamplingParams(max_new_tokens=6))
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert max(sizes[5:]) - sizes[4] < 8 * 2**20, [size >> 20 for size in sizes]


# --- sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_sampling_that_leaves_one_choice_is_greedy(full: LLM, settings: dict[str, Any]) -> None:
    greedy = full.generate(TEXTS, SamplingParams(max_new_tokens=8))
    assert full.generate(TEXTS, SamplingParams(max_new_tokens=8, do_sample=True, **settings)) == greedy


def test_samples_depend_on_the_seed_and_on_the_place_of_the_prompt(full: LLM) -> None:
    first, again, other = (
        tokens(full.generate(TEXTS[:1] * 4, SamplingParams(max_new_tokens=12, do_sample=True, seed=seed)))
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(map(tuple, first))) == 4


# --- how a row ends ---------------------------------------------------------------------------------------------


def test_one_token_is_one_token(full: LLM) -> None:
    outputs = full.generate(TEXTS, SamplingParams(max_new_tokens=1))
    assert [len(output.token_ids) for output in outputs] == [1] * len(TEXTS)
    assert full.totals.step_s == [[], []]  # two blocks, no decode step in either


def sampled(llm: LLM, **settings: Any) -> list[GenerationOutput]:
    """Sixteen rows of 40 almost uniformly random tokens each."""
    params = SamplingParams(max_new_tokens=40, do_sample=True, temperature=20.0, **settings)
    return llm.generate([[5, 6, 7]] * 16, params)


@pytest.mark.parametrize("stop_id", [0, 1, 57, 99])
def test_a_stop_id_ends_its_row_and_is_kept(no_tokenizer: LLM, stop_id: int) -> None:
    whole = sampled(no_tokenizer, ignore_eos=True)
    stopped = sampled(no_tokenizer, ignore_eos=True, stop_token_ids=(stop_id,))
    assert any(stop_id in row for row in tokens(whole)) and not all(stop_id in row for row in tokens(whole))
    for before, after in zip(whole, stopped, strict=True):
        ends = stop_id in before.token_ids
        length = before.token_ids.index(stop_id) + 1 if ends else 40
        assert after.token_ids == before.token_ids[:length]
        assert after.finish_reason == ("stop" if ends else "length")


def test_eos_ends_a_row_unless_it_is_ignored(no_tokenizer: LLM) -> None:
    (eos,) = no_tokenizer.config.eos_token_ids
    assert tokens(sampled(no_tokenizer)) == tokens(sampled(no_tokenizer, ignore_eos=True, stop_token_ids=(eos,)))
    ignoring = sampled(no_tokenizer, ignore_eos=True)
    assert any(eos in row[:-1] for row in tokens(ignoring))
    assert {(len(output.token_ids), output.finish_reason) for output in ignoring} == {(40, "length")}


def test_a_stop_id_works_beside_eos(no_tokenizer: LLM) -> None:
    (eos,) = no_tokenizer.config.eos_token_ids
    ends = [
        output.token_ids[-1] for output in sampled(no_tokenizer, stop_token_ids=(57,)) if len(output.token_ids) < 40
    ]
    assert {eos, 57} == set(ends)


def test_stops_are_judged_on_generated_tokens_only(full: LLM) -> None:
    """Every prompt begins with eos, which is also bos; this one has it and the stop string inside too."""
    prompt = full.encode("The ship and the sea") + [2, 2] + full.encode("the ship")
    params = SamplingParams(max_new_tokens=6, stop=("ship", "The"), stop_token_ids=(prompt[1],))
    (output,) = full.generate([prompt], params)
    assert output.finish_reason == "length" and len(output.token_ids) == 6


def test_the_loop_ends_when_every_row_has(no_tokenizer: LLM) -> None:
    outputs = sampled(no_tokenizer, stop_token_ids=tuple(range(0, 100, 5)))
    longest = max(len(output.token_ids) for output in outputs)
    assert longest < 40
    assert [len(steps) for steps in no_tokenizer.totals.step_s] == [longest - 1]


def test_a_finished_row_leaves_the_others_as_they_were(full: LLM) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    whole = tokens(full.generate(TEXTS, params))
    stop_id = whole[1][3]
    stopped = tokens(full.generate(TEXTS, SamplingParams(20, ignore_eos=True, stop_token_ids=(stop_id,))))
    expected = [row[: row.index(stop_id) + 1] if stop_id in row else row for row in whole]
    assert stopped == expected and len({len(row) for row in stopped}) > 1


def test_totals_count_what_was_returned(full: LLM) -> None:
    stop_id = full.generate(TEXTS, SamplingParams(max_new_tokens=20))[1].token_ids[3]
    outputs = full.generate(TEXTS, SamplingParams(max_new_tokens=20, stop_token_ids=(stop_id,)))
    assert full.totals.generated_tokens == sum(map(len, tokens(outputs)))
    assert full.totals.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert full.totals.num_prompts == len(TEXTS)


# --- stop strings -----------------------------------------------------------------------------------------------


def cut_by_hand(llm: LLM, ids: list[int], stops: Sequence[str]) -> tuple[list[int], str]:
    """The slow way: the first token with which any stop string is in the text, and the text before the first one."""
    assert llm.tokenizer is not None
    for length in range(1, len(ids) + 1):
        text = llm.tokenizer.decode(ids[:length])
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return ids[:length], text[: min(places)]
    return ids, llm.tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(6))
def test_stop_strings_cut_as_the_slow_way_does(full: LLM, seed: int) -> None:
    """Pieces of sampled text as stop strings: within a token, of many tokens, over borders, two at once."""
    numbers = random.Random(seed)
    settings: dict[str, Any] = {"do_sample": True, "seed": seed, "temperature": 1.3, "ignore_eos": True}
    whole = full.generate(TEXTS, SamplingParams(24, **settings))
    pieces = []
    for output in whole[:2]:
        text = output.text or ""
        start = numbers.randrange(len(text) - 12)
        pieces.append(text[start : start + numbers.randrange(1, 12)])
    stopped = full.generate(TEXTS, SamplingParams(24, stop=tuple(pieces), **settings))
    for before, after in zip(whole, stopped, strict=True):
        assert (after.token_ids, after.text) == cut_by_hand(full, before.token_ids, pieces)
    assert stopped[0].finish_reason == stopped[1].finish_reason == "stop"


def test_a_stop_string_may_be_split_over_several_tokens(full: LLM) -> None:
    (whole,) = full.generate(TEXTS[:1], SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert full.tokenizer is not None and whole.text is not None
    parts = [full.tokenizer.decode([token]) for token in whole.token_ids]
    stop = parts[3][-1] + "".join(parts[4:6]) + parts[6][0]  # from inside one token to inside another
    (output,) = full.generate(TEXTS[:1], SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,)))
    assert output.finish_reason == "stop"
    assert (output.token_ids, output.text) == cut_by_hand(full, whole.token_ids, [stop])
    assert len(output.token_ids) <= 7 and stop not in (output.text or "")


def test_special_tokens_do_not_hide_a_stop_string(full: LLM) -> None:
    """With eos ignored it can stand inside a stop string, where it has no text."""
    from flexgen_h2o.engine.chooser import Sampler
    from flexgen_h2o.engine.requests import Request

    assert full.tokenizer is not None
    first, second = (full.tokenizer.encode_part(text)[0] for text in (" silver", " window"))
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, stop=("r window",))
    sampler = Sampler([Request(0, [2])], params, (2,), 1, full.tokenizer, lambda tokens: None)
    for step, token in enumerate([first, 2, 2, second, 5]):
        logits = torch.zeros(1, 4096).index_fill(1, torch.tensor([token]), 1.0)
        sampler.choose([0], [step], logits)
    output = sampler.output(0, Request(0, [2]))
    assert output.token_ids == [first, 2, 2, second] and output.text == " silve"


def test_text_has_no_special_tokens(full: LLM) -> None:
    outputs = full.generate(TEXTS, SamplingParams(24, do_sample=True, temperature=3.0, ignore_eos=True))
    assert all(output.text is not None and "</s>" not in output.text for output in outputs)


# --- what is refused --------------------------------------------------------------------------------------------


def test_every_prompt_that_cannot_be_served_is_listed(no_tokenizer: LLM) -> None:
    prompts = [[5], "text", [], [100], [-1], [5] * 120, [99]]
    problems = problems_of(lambda: no_tokenizer.generate(prompts, SamplingParams(max_new_tokens=9)))
    assert [problem.split(":")[0] for problem in problems] == [f"prompt {index}" for index in (1, 2, 3, 4, 5)]
    words = ["no tokenizer", "no tokens", "100 is outside the vocabulary of 100", "-1", "120 tokens + 9"]
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [None], 5, None, "\ud800"], ids=repr)
def test_a_prompt_of_a_wrong_type_is_refused(full: LLM, prompt: Any) -> None:
    """A number that is not whole is not rounded, and nothing but UsageError comes out."""
    (problem,) = problems_of(lambda: full.generate([prompt], SamplingParams(max_new_tokens=1)))
    assert problem.startswith("prompt 0: ")


def test_ids_may_come_as_tuples_or_tensors(full: LLM) -> None:
    params = SamplingParams(max_new_tokens=3)
    expected = tokens(full.generate([[2, 5, 9]], params))
    for prompt in ((2, 5, 9), torch.tensor([2, 5, 9]), torch.tensor([2, 5, 9]).numpy()):
        assert tokens(full.generate([prompt], params)) == expected  # type: ignore[list-item]


def test_one_string_is_not_a_list_of_prompts(full: LLM) -> None:
    assert "list" in problems_of(lambda: full.generate("abc"))[0]
    assert full.generate([]) == []


def test_one_stop_string_is_not_taken_letter_by_letter(full: LLM) -> None:
    """Either it is refused, or it means itself."""
    (whole,) = full.generate(TEXTS[:1], SamplingParams(max_new_tokens=8))
    try:
        (output,) = full.generate(TEXTS[:1], SamplingParams(max_new_tokens=8, stop="etaoin"))  # type: ignore[arg-type]
    except UsageError:
        return
    assert output == whole


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "--gen-len is 0"),
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"top_p": 0.0}, "--top-p is 0.0"),
        ({"top_p": 1.1}, "--top-p is 1.1"),
        ({"stop": ("",)}, "--stop is empty"),
    ],
)
def test_wrong_parameters_are_refused(full: LLM, settings: dict[str, Any], words: str) -> None:
    assert words in problems_of(lambda: full.generate([[5]], SamplingParams(**settings)))[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu_batch_size": 0},
        {"num_gpu_batches": 0},
        {"decode_batch_size": 7},
        {"eviction": "best"},
        {"dtype": "int8"},
        {"hh_ratio": 2},
        {"hh_ratio": float("nan")},
        {"hh_ratio": "a tenth"},
        {"recent_size": 0},
        {"cpu_mem": float("nan")},
        {"model": "/nowhere"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any]) -> None:
    problems_of(lambda: LLM(**settings))


def test_all_wrong_settings_are_listed_together() -> None:
    problems = problems_of(lambda: LLM("/nowhere", gpu_batch_size=0, eviction="best", dtype="int8", recent_size=0))
    assert len(problems) == 5


def test_nothing_is_loaded_before_the_plan_has_been_checked() -> None:
    llm = LLM(cpu_mem=0.001)
    assert "can be used" in problems_of(lambda: llm.generate([[5]]))[0]
    assert llm.runtime is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_cache_are_of_the_asked_dtype(dtype: str) -> None:
    llm = LLM(dtype=dtype, hh_size=2, recent_size=2)
    llm.generate([[2, 5, 9]], SamplingParams(max_new_tokens=2))
    assert llm.runtime is not None
    assert {tensor.dtype for tensor in dense(llm.runtime.weights.page(OUTER)).values()} == {DTYPES[dtype]}
    assert llm.kv_cache_bytes == 4 * 8 * 4 * 32 * 2 * DTYPES[dtype].itemsize  # layers, heads, slots, head_dim, K and V
