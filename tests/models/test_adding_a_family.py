"""Adding a family of models: one file, and one line of registration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dummy_family import next_logits

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.models import registry
from flexgen_h2o.plan.placement import Percent

CONFIG = {"model_type": "dummy", "layers": 3, "width": 32, "heads": 4, "words": 50}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    home = registry.Home("support.dummy_family:DummyModels", "support.dummy_family:Dummy")
    monkeypatch.setitem(registry.HOMES, "dummy", home)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = registry.from_dict(CONFIG, "dummy").shapes()
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("homes", ["memory", "disk"])
def test_a_family_generates_what_its_definition_says(
    folder: Path, weights: dict[str, torch.Tensor], homes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(folder / "cache"))
    placed: dict[str, Any] = {} if homes == "memory" else {"percent": Percent(0, 0, 0, 0, 0, 0)}
    with LLM(
        str(folder),
        eviction="full",
        dtype="float32",
        gpu_batch_size=2,
        num_gpu_batches=2,
        offload_dir=folder / "offload",
        **placed,
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text = list(prompt)
        for token in output.token_ids:
            logits = next_logits(weights, 3, 4, text)
            assert token == int(logits.argmax())
            text.append(token)
    assert len({tuple(output.token_ids) for output in outputs}) > 1  # else nothing depends on the prompt


def test_a_family_is_planned_for_by_name_without_files() -> None:
    shape = registry.published("nobody/dummy-small", layers=2)
    assert (shape.name, shape.num_hidden_layers, shape.head_elements) == ("dummy-small", 2, 50 * 32)
    with pytest.raises(UsageError, match="opt-175b, dummy-small"):
        registry.published("dummy-large")


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="model_type is 'mamba'; only 'opt', 'dummy' models are supported"):
        registry.from_dict({"model_type": "mamba"}, "x")
