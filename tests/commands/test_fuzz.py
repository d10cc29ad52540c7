"""Files and command lines that nobody would write: a sentence each, never a traceback.

By default a few examples of each; FUZZ_SECONDS=600 pytest -m slow tests/test_fuzz.py (or scripts/fuzz.sh) searches for
that long, with other examples each time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.commands import Finished, run, write_jsonl
from support.tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import settings_of
from flexgen_h2o.commands.run_options import KINDS, read_flags
from flexgen_h2o.jobs.formats import bounded_lines, read_prompts
from flexgen_h2o.jobs.record import JobRecord, Progress, read_record, write_record
from flexgen_h2o.jobs.saved_block import BlockCheckpoint
from flexgen_h2o.models import registry
from flexgen_h2o.models.checkpoint import open_checkpoint
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.policy_files import policy_fields
from flexgen_h2o.weights.files import WeightFolder, lay_out

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))

# --- what is broken -------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes, head: int = 4000) -> bytes:
    """A file's content, changed in a few places, most of them near its beginning."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(len(changed), head) - 1)) | st.integers(0, max(0, len(changed) - 1)))
        match draw(st.sampled_from(("set", "put", "cut", "drop", "repeat"))):
            case "set":
                part = draw(st.binary(min_size=1, max_size=9))
                changed[at : at + len(part)] = part
            case "put":
                changed[at:at] = draw(
                    st.binary(min_size=1, max_size=9) | st.sampled_from((b"-", b"9" * 25, b'"', b"[", b"{"))
                )
            case "cut":
                del changed[at:]
            case "drop":
                del changed[at : at + draw(st.integers(1, 40))]
            case "repeat":
                changed[at:at] = changed[at : at + draw(st.integers(1, 40))]
    return bytes(changed)


def with_values(values: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A JSON object with some of its values replaced by others."""
    keys = st.dictionaries(st.sampled_from(sorted(values)) | st.text(max_size=8), json_values, min_size=1, max_size=3)
    return keys.map(lambda others: json.dumps({**values, **others}).encode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, stored in every way: whole, in shards with an index, and pickled."""
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    tiny = make_tiny_opt("pre_norm")
    save_tiny_opt(tiny, folder)
    save_tiny_opt(tiny, folder / "shards", "20KB")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


def opens(folder: Path) -> None:
    """A folder is refused in sentences, or every tensor of it can be read."""
    try:
        config = registry.from_folder(folder)
        checkpoint = open_checkpoint(folder, config)
    except UsageError as error:
        assert error.problems and all(len(problem) < 2000 for problem in error.problems)
        return
    for name, tensor in checkpoint.tensors(set(checkpoint.sources)):
        assert tuple(tensor.shape) == config.shapes()[name]
        tensor.float().sum()


Target = Callable[[st.DataObject], None]


def targets(model: Path, folder: Path) -> dict[str, Target]:
    """One attempt on each kind of file, by name."""
    folder.mkdir(exist_ok=True)
    files = {name: (model / name).read_bytes() for name in ("config.json", "model.safetensors", "pytorch_model.bin")}
    index = "model.safetensors.index.json"
    config_values = json.loads(files["config.json"])
    policy = policy_fields(Policy())
    write_record(folder / "job", JobRecord({"--seed": 1}, policy, policy, 5, 9, Progress(3, 1, 8, 90, 7)))
    record = (folder / "job").read_bytes()
    weights = WeightFolder(folder / "weights")
    places = lay_out("page.bin", {"a": 64, "b": 5000})
    for name, place in places.items():
        weights.write(name, place, torch.arange(place.nbytes, dtype=torch.uint8))
    weight_index = (folder / "weights" / "index.json").read_bytes()

    def model_file(name: str) -> Target:
        def attempt(data: st.DataObject) -> None:
            shutil.rmtree(folder / "model", ignore_errors=True)
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_bytes(files["config.json"])
            strategy = damaged(files[name])
            if name == "config.json":
                (folder / "model" / "model.safetensors").symlink_to(model / "model.safetensors")
                strategy = strategy | with_values(config_values)
            (folder / "model" / name).write_bytes(data.draw(strategy))
            opens(folder / "model")

        return attempt

    def index_file(data: st.DataObject) -> None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        shutil.copytree(model / "shards", folder / "model")
        content = (model / "shards" / index).read_bytes()
        strategy = (
            damaged(content)
            | with_values({"weight_map": {}})
            | with_values(json.loads(content)["weight_map"]).map(lambda values: b'{"weight_map": ' + values + b"}")
        )
        (folder / "model" / index).write_bytes(data.draw(strategy))
        opens(folder / "model")

    def prompts(data: st.DataObject) -> None:
        raw = data.draw(st.binary(max_size=200) | damaged(b'{"id": 1, "prompt": "a"}\n{"prompt_ids": [1, 2]}\n'))
        (folder / "prompts").write_bytes(raw)
        with (folder / "prompts").open("rb") as file:
            lines = list(read_prompts(bounded_lines(file), data.draw(st.booleans())))
        assert all((line.prompt is None) != (line.error is None) for line in lines)
        json.dumps([line.id for line in lines], allow_nan=False)

    def side_file(data: st.DataObject) -> None:
        (folder / "job").write_bytes(data.draw(damaged(record) | with_values(json.loads(record))))
        try:
            assert isinstance(read_record(folder / "job"), JobRecord)
        except UsageError as error:
            assert "--restart" in error.problems[0]

    def checkpoint_file(data: st.DataObject) -> None:
        (folder / "checkpoint").mkdir(exist_ok=True)
        body = json.dumps({"checksum": 1, "body": "{}"}).encode()
        (folder / "checkpoint" / "current.json").write_bytes(data.draw(damaged(body) | json_values.map(_as_json)))
        said: list[str] = []
        keeper = BlockCheckpoint(folder / "checkpoint", None, "job", said.append)
        assert keeper.restore([], None, None, None) is None and len(said) == 1  # type: ignore[arg-type]

    def weight_cache(data: st.DataObject) -> None:
        strategy = damaged(weight_index) | with_values(json.loads(weight_index)) | json_values.map(_as_json)
        (folder / "weights" / "index.json").write_bytes(data.draw(strategy))
        missing = weights.reserve(places)
        assert missing <= set(places)
        for name in weights.promised(places):
            weights.read(name, places[name], torch.empty(-(-places[name].nbytes // 4096) * 4096, dtype=torch.uint8))

    return {
        **{name: model_file(name) for name in files},
        index: index_file,
        "prompts": prompts,
        "side file": side_file,
        "block checkpoint": checkpoint_file,
        "weight cache": weight_cache,
    }


def _as_json(value: object) -> bytes:
    return json.dumps(value).encode()


NAMES = (
    "config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "prompts",
    "side file",
    "block checkpoint",
    "weight cache",
)


def attempts(target: Target, count: int, own_seed: int) -> None:
    """Tries `count` examples."""

    @seed(own_seed)
    @settings(
        max_examples=count, derandomize=False, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        target(data)

    attempt()


@pytest.mark.parametrize("name", NAMES)
def test_files_are_read_or_refused(name: str, model: Path, tmp_path: Path) -> None:
    attempts(targets(model, tmp_path / "fuzz")[name], 60, own_seed=1)


@pytest.mark.slow
def test_files_are_read_or_refused_for_as_long_as_asked(model: Path, tmp_path: Path) -> None:
    """Takes turns, so that each kind gets its share of the time."""
    all_targets = targets(model, tmp_path / "fuzz")
    end, own_seed = time.monotonic() + FUZZ_SECONDS, time.time_ns()
    print(f"seed {own_seed}")
    while time.monotonic() < end:
        for target in all_targets.values():
            attempts(target, 100, own_seed)
        own_seed += 1


# --- command lines --------------------------------------------------------------------------------------------------

FLAG_NAMES = [known.flag for kind in KINDS for known in settings_of(kind).values()]
WORDS = "-1 0 1 2 0.5 1e999 nan inf -inf 999999999999999999999999 true maybe auto h2o full x opt-125m cuda"
VALUES = ["", " ", "100 0", *WORDS.split(), *"/ /dev/null ~ no/such/file.jsonl \udcff 💥 -- -".split(" ")]


def command_line(numbers: random.Random, folder: Path) -> list[str]:
    """A few flags with values that may fit them or not."""
    words: list[str] = []
    for _ in range(numbers.choice((1, 1, 2, 3, 5))):
        flag = numbers.choice(FLAG_NAMES)
        if numbers.random() < 0.1:
            flag = flag[:-1] + numbers.choice("xX-= ")
        words.append(flag)
        if numbers.random() < 0.9:
            words += numbers.choice(VALUES).split(" ") if numbers.random() < 0.2 else [numbers.choice(VALUES)]
    # So that what is well-formed runs quickly, and writes where nothing is lost.
    return [*words, "--gen-len", "1", "--input", str(folder / "in.jsonl"), "--offload-dir", str(folder / "offload")]


def is_answered(finished: Finished) -> None:
    """It has ended as a command should, whatever it was given."""
    assert finished.code in (0, 1, 2), finished
    assert "Traceback" not in finished.err
    if finished.code == 2:
        assert finished.problems and all(problem.strip() for problem in finished.problems)
        assert finished.out == ""


def try_command_lines(folder: Path, count: int, own_seed: int) -> int:
    """Runs generated command lines; returns how many were refused."""
    write_jsonl(folder / "in.jsonl", [{"prompt_ids": [5, 6]}, "{"])
    numbers = random.Random(own_seed)
    refused = 0
    for _ in range(count):
        argv = command_line(numbers, folder)
        try:
            finished = run(*argv)
        except BaseException as error:
            raise AssertionError(f"{argv} ends in {type(error).__name__}: {error}") from error
        is_answered(finished)
        refused += finished.code == 2
    return refused


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, where relative names may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_malformed_command_lines_are_answered(nowhere: Path) -> None:
    assert try_command_lines(nowhere, 150, own_seed=1) > 75


@pytest.mark.slow
def test_a_thousand_malformed_command_lines_are_answered(nowhere: Path) -> None:
    assert try_command_lines(nowhere, 1000, own_seed=2) > 500


def test_flags_of_the_fuzzer_are_those_of_the_command() -> None:
    with pytest.raises(UsageError):
        read_flags(["--no-such-flag"])
    assert {"--input", "--restart", "--metrics"} <= set(FLAG_NAMES)
