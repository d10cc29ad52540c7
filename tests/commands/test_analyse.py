"""`evaluate analyse`: what it reports, records, draws and refuses."""

from __future__ import annotations

import builtins
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import Finished, call, read_jsonl
from support.tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o import evaluate
from flexgen_h2o.evaluation.analysis.catalogue import ANALYSES
from flexgen_h2o.evaluation.analysis.findings import Finding, Row, by_layer, markdown

QUICK = "--documents 2 --prompt-len 40 --continuation-len 24".split()
WITHOUT_EXTRAS = ",".join(name for name in ANALYSES if name != "diversity")


def analyse_with(*argv: str) -> Finished:
    return call(evaluate, ["analyse", *argv])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """All analyses that need no extra, in small; and the folder of what was written."""
    folder = tmp_path_factory.mktemp("found")
    files = ["--record", str(folder / "record.jsonl"), "--findings", str(folder / "findings.md")]
    finished = analyse_with("--analyses", WITHOUT_EXTRAS, *QUICK, "--budget", "0.25", "--json", *files)
    assert finished.code == 0, finished.err
    assert finished.err == ""
    result: dict[str, Any] = json.loads(finished.out.splitlines()[-1])
    return result, folder


def test_every_analysis_reports_what_it_was_made_with(quick: tuple[dict[str, Any], Path]) -> None:
    result, _ = quick
    assert (result["model"], result["dtype"], result["documents"], result["budget"]) == ("demo", "float32", 2, 0.25)
    assert (result["prompt_len"], result["continuation_len"]) == (40, 24)
    assert list(result["analyses"]) == WITHOUT_EXTRAS.split(",")
    by_layers = [found["layers"] for found in result["analyses"].values() if "layers" in found]
    assert len(by_layers) >= 4 and all(len(layers) == 4 for layers in by_layers)


def test_what_is_known_of_the_demo_model_is_found(quick: tuple[dict[str, Any], Path]) -> None:
    """Its card: layer 1 rests on the first token, and is the sparsest; recent entries alone are not enough."""
    found = quick[0]["analyses"]
    first = [layer["first_token"] for layer in found["sparsity"]["layers"]]
    sparse = [layer["sparse"] for layer in found["sparsity"]["layers"]]
    assert first[1] > 0.4 and max(first) == first[1] and max(sparse) == sparse[1]
    rows = {row["eviction"]: row for row in found["parts"]["rows"]}
    assert rows["full"]["perplexity"] < rows["h2o"]["perplexity"] < rows["local"]["perplexity"]
    assert rows["h2o"]["entries"] == 10
    assert found["kept"]["heavy"] == 5 and found["kept"]["recent"] == 5
    four_bits = {(row["eviction"], row["bits"]): row["perplexity"] for row in found["four_bits"]["rows"]}
    assert four_bits["full", 4] != four_bits["full", 16] == pytest.approx(rows["full"]["perplexity"])
    masked = {row["name"]: row["removed"] for row in found["masking"]["rows"]}
    assert masked == {
        "full": 0,
        "without the heavy hitters": 4,
        "without random entries": 4,
        "without the lightest entries": 4,
        "without the first token": 1,
    }


def test_a_record_is_the_result_with_how_it_was_made(quick: tuple[dict[str, Any], Path]) -> None:
    result, folder = quick
    (record,) = read_jsonl(folder / "record.jsonl")
    assert (record["kind"], record["name"]) == ("measurement", "evaluate analyse")
    assert record["command"].startswith("python -m flexgen_h2o.evaluate analyse --analyses sparsity,")
    assert record["analyses"] == result["analyses"] and {"torch", "python"} <= set(record["versions"])


def test_the_page_has_a_table_for_each_finding_and_a_command_that_makes_it_anew(
    quick: tuple[dict[str, Any], Path],
) -> None:
    page = (quick[1] / "findings.md").read_text()
    sections = page.split("\n## ")
    assert len(sections) == 1 + len(ANALYSES) - 1
    for name, section in zip(WITHOUT_EXTRAS.split(","), sections[1:], strict=True):
        assert ("**In agreement**" in section) != ("**Not in agreement**" in section)
        assert "| | demo | the paper |" in section and "The paper: " in section
        command = section.strip().splitlines()[-1].strip("`")
        assert shlex.split(command)[:4] == ["python", "-m", "flexgen_h2o.evaluate", "analyse"]
        args = evaluate.build_parser().parse_args(shlex.split(command)[3:])
        assert (args.analyses, args.documents, args.budget) == (name, "2", "0.25")
        assert args.findings is None and args.record is None


def test_a_finding_is_told_as_it_came_out() -> None:
    finding = Finding("Title", "it is so (section 1)", [Row("share", "3 %", "> 95 %")], False, "3 % are below 95 %")
    lines = markdown(finding, "demo", "python x").splitlines()
    assert lines[0] == "## Title" and "| share | 3 % | > 95 % |" in lines and lines[-1] == "`python x`"
    assert "**Not in agreement**: 3 % are below 95 %." in lines
    assert by_layer([0.5, 0.123], ".1f") == "0.5, 0.1"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--analyses", "sparsity,nonsense"], ["nonsense", "known analyses", "submodular"]),
        (["--analyses", ""], ["known analyses"]),
        (["--budget", "0.2,0.1"], ["--budget has 2 numbers", "one"]),
        (["--budget", "0.001"], ["--budget 0.001", "larger"]),
        (["--documents", "1"], ["--documents is 1"]),
        (["--prompt-len", "10", "--continuation-len", "5"], ["15 tokens", "at least 20"]),
        (["--findings", "/nowhere/findings.md"], ["--findings /nowhere/findings.md"]),
        (["--eviction", "h2o"], ["--eviction"]),
    ],
)
def test_mistakes_are_refused_before_any_work(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.evaluation.analysis.catalogue.analyse", None)
    argv = argv if "--analyses" in argv else ["--analyses", "sparsity", *argv]
    finished = analyse_with(*argv)
    assert finished.code == 2 and finished.out == "" and len(finished.problems) == 1, finished.err
    assert all(word in finished.problems[0] for word in words), finished.problems


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("sacrebleu", ["analyse", "--analyses", "diversity"]),
        ("sacrebleu", ["analyse"]),
        ("lm_eval", ["tasks"]),
    ],
)
def test_what_needs_an_extra_names_it(module: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == module:
            raise ImportError(name)
        return true_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    finished = call(evaluate, argv)
    assert finished.code == 2 and "flexgen_h2o[eval]" in finished.problems[0], finished.err


def test_another_model_and_another_text_can_be_analysed(tmp_path: Path) -> None:
    """Gelu, no final norm's scale, odd sizes: the analyses are of OPT, not of the demo model."""
    folder = save_tiny_opt(make_tiny_opt("galactica", std=0.3), tmp_path / "tiny")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(4, 100, 300))
    text = ["--model", str(folder), "--text", str(tmp_path / "ids.npy")]
    finished = analyse_with("--analyses", WITHOUT_EXTRAS, *QUICK, *text, "--json")
    assert finished.code == 0, finished.err
    assert len(json.loads(finished.out.splitlines()[-1])["analyses"]["mlp"]["layers"]) == 3
    pytest.importorskip("sacrebleu")
    finished = analyse_with("--analyses", "diversity", *QUICK, *text)
    assert finished.code == 2 and "no tokenizer" in finished.problems[0]


def test_every_analysis_has_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sacrebleu")
    finished = analyse_with(*QUICK, "--plot", str(tmp_path / "plot.svg"))
    assert finished.code == 0, finished.err
    drawing = (tmp_path / "plot.svg").read_text()
    assert drawing.startswith("<?xml") and len(drawing) > 50_000
