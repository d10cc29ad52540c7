"""The model inside lm-eval, against lm-eval's own of the same folder. Needs the extra `eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import call

pytest.importorskip("lm_eval")

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from flexgen_h2o import LLM, SamplingParams, evaluate
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.evaluation.lm_eval import EvictingLM, sampling_params

TASKS = Path(__file__).parent / "tasks"
PASSAGE = "Remember: the password of Emma is silver river garden.\nAnd the king went down to the house of the Lord. "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", gpu_batch_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    return HFLM(pretrained=str(DEMO_MODEL), dtype="float32", device="cpu", batch_size=8)


def instances(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=arg) for arg in args]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, float], dict[str, Any]]:
    """What the command finds, by policy and budget."""
    argv = f"tasks --tasks passwords,passwords_written --include-path {TASKS} --eviction full,h2o --budget 0.2,0.04"
    finished = call(evaluate, [*argv.split(), "--json"])
    assert finished.code == 0, finished.err
    result = json.loads(finished.out.splitlines()[-1])
    assert (result["model"], result["budget_of"], result["limit"]) == ("demo", "context", None)
    return {(row["eviction"], row["budget"]): row["tasks"] for row in result["rows"]}


def test_the_full_cache_scores_a_task_exactly_as_transformers_does(
    rows: dict[tuple[str, float], dict[str, Any]], theirs: HFLM
) -> None:
    manager = TaskManager(include_path=str(TASKS))
    expected = simple_evaluate(
        theirs, tasks=["passwords", "passwords_written"], task_manager=manager, bootstrap_iters=100
    )["results"]
    found = rows["full", 1.0]
    assert set(rows) == {("full", 1.0), ("h2o", 0.2), ("h2o", 0.04)}
    for metric in ("acc", "acc_norm"):
        assert found["passwords"][metric]["value"] == expected["passwords"][f"{metric},none"]
        assert found["passwords"][metric]["stderr"] == pytest.approx(expected["passwords"][f"{metric}_stderr,none"])
    written = found["passwords_written"]["exact_match"]["value"]
    assert written == expected["passwords_written"]["exact_match,none"] == 1


def test_a_budget_of_4_per_cent_scores_otherwise(rows: dict[tuple[str, float], dict[str, Any]]) -> None:
    full, fifth, least = rows["full", 1.0], rows["h2o", 0.2], rows["h2o", 0.04]
    assert least["passwords"]["acc"]["value"] < full["passwords"]["acc"]["value"]
    assert least["passwords_written"]["exact_match"]["value"] < fifth["passwords_written"]["exact_match"]["value"]


PAIRS = [
    (PASSAGE * 3, "silver river garden"),
    (PASSAGE, " and"),
    ("", "In the beginning God created the heaven"),
    ("Emma ", "Woodhouse"),  # a space before the continuation belongs to it
    (PASSAGE * 40, " and the king"),  # longer than the context
]


def test_likelihoods_are_transformers(llm: LLM, theirs: HFLM) -> None:
    expected = theirs.loglikelihood(instances(*PAIRS), disable_tqdm=True)
    found = EvictingLM(llm, "full").loglikelihood(instances(*PAIRS), disable_tqdm=True)
    assert [one[1] for one in found] == [one[1] for one in expected]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-3)


def test_whole_texts_are_scored_in_windows_of_the_context(llm: LLM, theirs: HFLM) -> None:
    texts = [PASSAGE, PASSAGE * 40]
    found = EvictingLM(llm, "full").loglikelihood_rolling(instances(*[(text,) for text in texts]))
    # Theirs scores the leading token, which the tokenizer adds, as if it were text; so its windows lie otherwise.
    bare = HFLM(pretrained=str(DEMO_MODEL), dtype="float32", device="cpu", batch_size=8, add_bos_token=False)
    bare.tok_encode = lambda text, **_: llm.tokenizer.encode_part(text)  # type: ignore[union-attr]
    expected = bare.loglikelihood_rolling(instances(*[(text,) for text in texts]), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)
    evicting = EvictingLM(llm, "local", 0.1).loglikelihood_rolling(instances(*[(text,) for text in texts]))
    assert evicting[1] < found[1] - 10


def test_generation_stops_where_the_task_says(llm: LLM) -> None:
    settings = {"until": [".", ""], "max_gen_toks": 12, "do_sample": False}
    prompts = [PASSAGE + "\nAnd", "It was", PASSAGE * 40]
    found = EvictingLM(llm, "full").generate_until(instances(*[(prompt, settings) for prompt in prompts]))
    params = SamplingParams(12, stop=(".",))
    ids = [
        llm.encode(prompt)[-(512 - 12) :] if len(prompt) < 2000 else llm.tokenizer.encode(prompt)[-500:]
        for prompt in prompts
    ]  # type: ignore[union-attr]
    with LLM(eviction="full", dtype="float32") as other:
        assert found == [output.text for output in other.generate(ids, params)]
    assert all("." not in text for text in found)


def test_settings_of_generation_are_taken_or_refused() -> None:
    params = sampling_params({"until": "\n", "do_sample": True, "temperature": 0.5, "top_k": 3})
    assert params == SamplingParams(256, True, 0.5, 3, stop=("\n",))
    with pytest.raises(UsageError, match="num_beams"):
        sampling_params({"num_beams": 4})
    with pytest.raises(UsageError, match="temperature"):
        sampling_params({"temperature": -1.0})


def test_a_harness_finds_the_model_by_its_name() -> None:
    from lm_eval.api.registry import get_model

    lm = get_model("flexgen_h2o").create_from_arg_string("eviction=local,budget=0.5,dtype=float32,gpu_batch_size=2")
    assert (lm.eviction.name, lm.eviction.budget, lm.max_length, lm.llm.policy.block_rows) == ("local", 0.5, 512, 2)


@pytest.mark.parametrize(("eviction", "budget"), [("oracle", 0.2), ("best", 0.2), ("h2o", 0.0), ("h2o", 1.5)])
def test_a_policy_that_cannot_be_carried_out_is_refused(eviction: str, budget: float) -> None:
    with pytest.raises(UsageError):
        EvictingLM(None, eviction, budget)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tasks", "nonsense"], ["nonsense", "--include-path"]),
        (["--limit", "0"], ["--limit is 0"]),
        (["--num-fewshot", "x"], ["--num-fewshot"]),
        (["--eviction", "oracle"], ["oracle", "leave it out"]),
        (["--eviction", "best"], ["known policies"]),
        (["--include-path", "/nowhere"], ["--include-path /nowhere"]),
        (["--ring-16bit"], ["--compress-cache"]),
    ],
)
def test_mistakes_are_refused_before_any_work(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "load", None)
    finished = call(evaluate, ["tasks", *argv])
    assert finished.code == 2 and len(finished.problems) == 1, finished.err
    assert all(word in finished.problems[0] for word in words), finished.problems


def test_without_data_the_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: TaskManager, names: list[str]) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(TaskManager, "load", fails)
    finished = call(evaluate, ["tasks", "--tasks", "copa,rte"])
    assert finished.code == 2
    assert "--tasks copa" in finished.problems[0] and "no route to host" in finished.problems[0]
