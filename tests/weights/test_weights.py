"""Checkpoints: every published spelling is read, every broken one is named, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.helpers import BLOCKS, PEAKED, PlacedWeights, TinyOpt, dense, largest_difference, oracle_logits, place
from support.placed import BACKENDS, ROUGH, RULES, Case, case_logits, layout_of, opened
from support.tiny_models import VARIANTS, make_tiny_opt
from torch import Tensor

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import PAGE, whole_pages
from flexgen_h2o.engine.assemble import Runtime
from flexgen_h2o.kernels import four_bits as quant
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.kernels.matrices.plain import PlainLayout
from flexgen_h2o.models.checkpoint import open_checkpoint
from flexgen_h2o.models.registry import from_dict, from_folder, published
from flexgen_h2o.plan.model_shape import ModelShape, full_name
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.schedule import OUTER
from flexgen_h2o.weights.sources import dummy_source
from flexgen_h2o.weights.store import weight_bytes, weight_places

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def tied(tiny: Callable[..., TinyOpt]) -> TinyOpt:
    return tiny("post_norm_projected")


def bare(tiny_opt: TinyOpt) -> Tensors:
    """The parameters, named relative to the decoder."""
    stored = tiny_opt.model.state_dict()
    named = {name.removeprefix("model.decoder."): tensor.clone() for name, tensor in stored.items()}
    return {name: named[name] for name in tiny_opt.config.shapes()}


def write(folder: Path, tensors: Tensors, *, shards: int = 0, pickled: bool = False) -> Path:
    """One file, or `shards` files and an index."""
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for shard in range(max(1, shards)):
        file = f"{stem}-{shard}.{suffix}" if shards else f"{stem}.{suffix}"
        part = {name: tensors[name].contiguous() for name in names[shard :: max(1, shards)]}
        weight_map |= dict.fromkeys(part, file)
        (torch.save if pickled else save_file)(part, folder / file)
    if shards:
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, config: ModelShape, dtype: torch.dtype = torch.float32) -> PlacedWeights:
    return place(config, dtype, open_checkpoint(folder, config).source())


def assert_holds(weights: PlacedWeights, expected: Tensors) -> None:
    found = weights.flat()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --- every spelling ---


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize("prefix", ["model.decoder.", "decoder.", ""])
def test_every_prefix_format_and_cut_is_read(
    tied: TinyOpt, tmp_path: Path, prefix: str, shards: int, pickled: bool
) -> None:
    tensors = bare(tied)
    write(tmp_path, {prefix + name: t for name, t in tensors.items()}, shards=shards, pickled=pickled)
    assert open_checkpoint(tmp_path, tied.config).unused == ()
    assert_holds(load(tmp_path, tied.config), tensors)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_saves_is_read(tiny: Callable[..., TinyOpt], variant: str) -> None:
    tiny_opt = tiny(variant)
    assert open_checkpoint(tiny_opt.folder, tiny_opt.config).unused == ()
    assert_holds(tiny_opt.weights, bare(tiny_opt))
    itemsize = 4
    assert tiny_opt.weights.nbytes == weight_bytes(tiny_opt.config, torch.float32, PlainLayout())
    assert tiny_opt.weights.nbytes == itemsize * sum(p.numel() for p in tiny_opt.model.parameters())


def test_a_tied_tensor_may_be_stored_under_the_name_of_the_head(tied: TinyOpt, tmp_path: Path) -> None:
    tensors = bare(tied)
    stored = {f"model.decoder.{name}": t for name, t in tensors.items() if name != "embed_tokens.weight"}
    write(tmp_path, {**stored, "lm_head.weight": tensors["embed_tokens.weight"]})
    assert_holds(load(tmp_path, tied.config), tensors)


def test_a_tied_tensor_may_be_stored_under_both_names(tied: TinyOpt, tmp_path: Path) -> None:
    tensors = bare(tied)
    write(tmp_path, {**tensors, "lm_head.weight": torch.zeros_like(tensors["embed_tokens.weight"])})
    assert_holds(load(tmp_path, tied.config), tensors)  # the embedding's name wins


def test_an_untied_head_is_a_parameter_of_its_own(tiny: Callable[..., TinyOpt], tmp_path: Path) -> None:
    untied = tiny("untied")
    tensors = bare(untied)
    assert not torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
    write(tmp_path, tensors)
    assert_holds(load(tmp_path, untied.config), tensors)
    write(tmp_path, {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(UsageError, match="lm_head.weight"):
        open_checkpoint(tmp_path, untied.config)


def test_safetensors_are_preferred_to_pickles(tied: TinyOpt, tmp_path: Path) -> None:
    tensors = bare(tied)
    write(tmp_path, {name: torch.zeros_like(t) for name, t in tensors.items()}, pickled=True)
    write(tmp_path, tensors)
    assert_holds(load(tmp_path, tied.config), tensors)


def test_unused_keys_are_listed(tied: TinyOpt, tmp_path: Path) -> None:
    extra = {"model.decoder.version": torch.zeros(1), "score.weight": torch.zeros(2, 2)}
    write(tmp_path, {**bare(tied), **extra}, shards=2)
    assert sorted(open_checkpoint(tmp_path, tied.config).unused) == sorted(extra)
    assert_holds(load(tmp_path, tied.config), bare(tied))


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_parameters_are_converted_once(
    tied: TinyOpt, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, pickled: bool
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in bare(tied).items()}
    write(tmp_path, tensors, pickled=pickled)
    weights = load(tmp_path, tied.config, wanted)
    assert_holds(weights, {name: tensor.to(wanted) for name, tensor in tensors.items()})
    assert {tensor.dtype for tensor in weights.flat().values()} == {wanted}
    assert weights.nbytes == weight_bytes(tied.config, wanted, PlainLayout())


def test_progress_is_told_every_byte_once(tied: TinyOpt, tmp_path: Path) -> None:
    write(tmp_path, bare(tied), shards=3)
    told: list[int] = []
    source = open_checkpoint(tmp_path, tied.config).source()
    weights = place(tied.config, torch.bfloat16, source, told.append)
    assert len(told) == len(tied.config.shapes()) and sum(told) == weights.nbytes


def test_loaded_weights_do_not_need_the_files_any_more(tied: TinyOpt, tmp_path: Path) -> None:
    """A tensor that were still mapped would change with its file."""
    for pickled in (False, True):
        folder = write(tmp_path / str(pickled), bare(tied), pickled=pickled)
        weights = load(folder, tied.config)
        for path in folder.iterdir():
            path.write_bytes(bytes(path.stat().st_size))  # in place, so that a mapping sees it
        assert_holds(weights, bare(tied))


# --- broken ones ---


def refusal(folder: Path, config: ModelShape) -> list[str]:
    with pytest.raises(UsageError) as caught:
        open_checkpoint(folder, config)
    return caught.value.problems


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_shard_that_is_cut_short_is_named(tied: TinyOpt, tmp_path: Path, share: float, pickled: bool) -> None:
    write(tmp_path, bare(tied), shards=3, pickled=pickled)
    shard = next(path for path in tmp_path.iterdir() if "-1." in path.name)
    content = shard.read_bytes()
    shard.write_bytes(content[: int(len(content) * share)])
    problems = refusal(tmp_path, tied.config)
    assert len(problems) == 1 and str(shard) in problems[0]


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_every_shard_that_is_not_there_is_named(tied: TinyOpt, tmp_path: Path, pickled: bool) -> None:
    write(tmp_path, bare(tied), shards=4, pickled=pickled)
    gone = [path for path in tmp_path.iterdir() if "-1." in path.name or "-3." in path.name]
    for path in gone:
        path.unlink()
    problems = refusal(tmp_path, tied.config)
    assert len(problems) == 2
    assert all(any(path.name in problem for problem in problems) for path in gone)


def test_every_missing_parameter_is_named(tied: TinyOpt, tmp_path: Path) -> None:
    tensors = bare(tied)
    gone = ["layers.1.fc2.bias", "embed_positions.weight"]
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if name not in gone})
    problems = refusal(tmp_path, tied.config)
    assert len(problems) == 2
    assert all(any(name in problem for problem in problems) for name in gone)


def test_a_wrong_shape_is_named_with_both(tied: TinyOpt, tmp_path: Path) -> None:
    write(tmp_path, {**bare(tied), "layers.0.fc1.weight": torch.zeros(128, 33)})
    (problem,) = refusal(tmp_path, tied.config)
    assert all(word in problem for word in ("layers.0.fc1.weight", "[128, 33]", "[128, 32]"))


def test_a_transposed_tensor_of_the_right_size_is_refused(tied: TinyOpt, tmp_path: Path) -> None:
    tensors = bare(tied)
    write(tmp_path, {**tensors, "layers.0.fc1.weight": tensors["layers.0.fc1.weight"].T})
    assert len(refusal(tmp_path, tied.config)) == 1


def test_a_parameter_stored_twice_is_named_with_both_places(tied: TinyOpt, tmp_path: Path) -> None:
    tensors = bare(tied)
    again = {"model.decoder.layers.0.fc1.bias": tensors["layers.0.fc1.bias"]}
    write(tmp_path, {**tensors, **again}, shards=2)
    (problem,) = refusal(tmp_path, tied.config)
    assert "layers.0.fc1.bias" in problem and "model.decoder.layers.0.fc1.bias" in problem and "twice" in problem


class Malicious:
    """Runs a command when it is unpickled without care."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_not_run(tied: TinyOpt, tmp_path: Path, zipped: bool) -> None:
    victim = tmp_path / "victim"
    trapped = {**bare(tied), "trap": Malicious(victim)}
    torch.save(trapped, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with contextlib.suppress(Exception):  # how it is refused is the next test's matter
        load(tmp_path, tied.config)
    assert not victim.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_named(tied: TinyOpt, tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    trap = {"trap": Malicious(tmp_path / "victim")}
    torch.save({**bare(tied), **trap}, path, _use_new_zipfile_serialization=zipped)
    (problem,) = refusal(tmp_path, tied.config)
    assert str(path) in problem


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["x"]}}',
        '{"weight_map": {}}',
    ],
)
def test_a_broken_index_is_refused(tied: TinyOpt, tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refusal(tmp_path, tied.config)


def test_a_file_that_is_no_checkpoint_is_refused(tied: TinyOpt, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
        (problem,) = refusal(tmp_path, tied.config)
        assert name in problem


def test_a_folder_without_weights_is_refused_with_a_way_out(tied: TinyOpt, tmp_path: Path) -> None:
    (problem,) = refusal(tmp_path, tied.config)
    assert str(tmp_path) in problem and "--dummy-weights" in problem


# --- made-up weights ---


@pytest.mark.parametrize("variant", ["pre_norm", "no_bias", "no_affine", "untied"])
def test_dummy_weights_fill_every_parameter_at_random(tiny: Callable[..., TinyOpt], variant: str) -> None:
    config = tiny(variant).config
    told: list[int] = []
    weights = place(config, torch.float32, dummy_source(config, 3, torch.float32, CPU), told.append)
    tensors = weights.flat()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == config.shapes()
    assert sum(told) == weights.nbytes
    for name, tensor in tensors.items():
        assert tensor.std().item() == pytest.approx(0.02, rel=0.5), name
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        assert tensor.mean().item() == pytest.approx(centre, abs=0.015), name
    assert len({tensor.flatten()[0].item() for tensor in tensors.values()}) == len(tensors)


def test_dummy_weights_are_those_of_their_seed(tied: TinyOpt) -> None:
    one, again, other = (
        place(tied.config, torch.float32, dummy_source(tied.config, seed, torch.float32, CPU)).flat()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


# --- 4-bit groups ---


def four_bits(tiny_opt: TinyOpt, percent: Percent, backend: str) -> Case:
    block = replace(BLOCKS["3x2"], policy=replace(BLOCKS["3x2"].policy, compress_weight=True))
    return Case(tiny_opt, block, RULES["h2o"], percent, True, BACKENDS[backend])


def in_4_bits(matrix: Tensor) -> Tensor:
    return quant.decode(quant.encode_weight(matrix), matrix.shape[1], matrix.dtype)


def page_tensors(runtime: Runtime) -> dict[str, Tensor]:
    """All parameters as compute gets them, page by page through the read buffers."""
    found = {}
    for page in range(OUTER, runtime.config.num_hidden_layers):
        runtime.weights.fetch(page)
        found |= {full_name(page, name): t.clone() for name, t in dense(runtime.weights.page(page)).items()}
        runtime.weights.release(page)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["pre_norm", "post_norm_projected", "untied"])
def test_what_is_two_dimensional_is_kept_in_4_bits_wherever_it_lives(
    tiny: Callable[..., TinyOpt], tmp_path: Path, variant: str, backend: str
) -> None:
    tiny_opt = tiny(variant)
    for number, percent in enumerate((Percent(), Percent(0, 100), Percent(0, 0), ROUGH)):
        with opened(four_bits(tiny_opt, percent, backend), tmp_path / str(number)) as runtime:
            got = page_tensors(runtime)
            stored = runtime.weights.nbytes
            assert stored == weight_bytes(tiny_opt.config, torch.float32, layout_of(tiny_opt, compressed=True))
        for name, tensor in bare(tiny_opt).items():
            assert torch.equal(got[name], in_4_bits(tensor) if tensor.dim() == 2 else tensor), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_in_4_bits_are_those_of_the_decoded_model(
    tiny: Callable[..., TinyOpt], tmp_path: Path, backend: str
) -> None:
    tiny_opt = tiny(std=PEAKED)
    decoded = make_tiny_opt("pre_norm", std=PEAKED)
    with torch.no_grad():
        for tensor in decoded.parameters():
            if tensor.dim() == 2:
                tensor.copy_(in_4_bits(tensor))
    case = replace(four_bits(tiny_opt, ROUGH, backend), rule=RULES["full"])
    logits = case_logits(case, tmp_path)
    forced = case.forced()
    for row, prompt in enumerate(case.prompts()):
        assert largest_difference(logits[row], oracle_logits(decoded, prompt, forced[row].tolist())) < 2e-4


@pytest.mark.parametrize("name", ["opt-1.3b", "opt-6.7b", "opt-30b"])
def test_on_disk_4_bits_are_little_more_than_a_quarter_of_16(name: str) -> None:
    config = published(name)
    sizes = {}
    for compressed in (False, True):
        layout = best_layout(CPU, torch.bfloat16, config.matrix_shapes(), compressed)
        places = weight_places(config, torch.bfloat16, layout)
        sizes[compressed] = sum(whole_pages(place.nbytes) for place in places.values())
    assert sizes[True] <= 0.29 * sizes[False]
    formula = sum(
        prod(shape) * (4 + 32 * -(-shape[1] // 64) / shape[1]) / 8 if len(shape) == 2 else 2 * prod(shape)
        for shape in config.shapes().values()
    )
    assert weight_bytes(config, torch.bfloat16, layout) == pytest.approx(formula, rel=0.01)
    assert sizes[True] == pytest.approx(formula, rel=0.01)


def test_what_the_folder_holds_is_not_asked_of_the_source(
    tiny: Callable[..., TinyOpt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_opt = tiny()
    with opened(four_bits(tiny_opt, Percent(0, 0), "threads"), tmp_path) as runtime:
        expected = page_tensors(runtime)
    asked: list[str] = []
    source = tiny_opt.source()
    monkeypatch.setattr(TinyOpt, "source", lambda self: lambda names: asked.extend(names) or source(names))
    for percent in (Percent(), Percent(0, 100), ROUGH, Percent(0, 0)):
        with opened(four_bits(tiny_opt, percent, "threads"), tmp_path) as runtime:
            got = page_tensors(runtime)
        assert asked == []
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    file = next(tmp_path.rglob("layer-1.bin"))
    content = bytearray(file.read_bytes())
    content[-PAGE] ^= 1  # of the last parameter
    file.write_bytes(content)
    with opened(four_bits(tiny_opt, Percent(), "threads"), tmp_path) as runtime:
        got = page_tensors(runtime)
    assert asked == ["layers.1.fc2.weight"]
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


# --- memory ---

LOADER = """
import sys
from pathlib import Path
import torch
from flexgen_h2o.models.registry import from_folder
from flexgen_h2o.models.checkpoint import open_checkpoint
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.machine.platform import Platform
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.engine.assemble import Runtime


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

torch.set_num_threads(1)
torch.empty(1000).copy_(torch.ones(1000, dtype=torch.float16))
folder = Path(sys.argv[1])
config = from_folder(folder)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = status("VmRSS")
checkpoint = open_checkpoint(folder, config)
checked = status("VmHWM")
dtype, cpu = getattr(torch, sys.argv[2]), torch.device("cpu")
platform = Platform(cpu, matrix_layout=best_layout(cpu, dtype, config.matrix_shapes(), sys.argv[3] == "4-bit"))
runtime = Runtime(config, dtype, Policy(), platform)
runtime.load(checkpoint.source(), lambda nbytes: None)
print(checked - before, status("VmHWM") - before, runtime.weights.nbytes)
"""


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of float32 in two shards, the largest tensor 16 MB."""
    folder = tmp_path_factory.mktemp("big")
    values = {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "max_position_embeddings": 1024,
    }
    config = from_dict(values, "x")
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {f"model.decoder.{name}": torch.full(shape, 0.5) for name, shape in config.shapes().items()}
    return write(folder, tensors, shards=2)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("bits", ["all bits", "4-bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_the_placed_bytes_and_one_tensor(big_checkpoint: Path, dtype: str, bits: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", LOADER, str(big_checkpoint), dtype, bits], capture_output=True, text=True, check=True
    )
    checked, peak, placed = map(int, child.stdout.split())
    config = from_folder(big_checkpoint)
    largest = 4 * max(torch.Size(shape).numel() for shape in config.shapes().values())
    slack = 16 * 2**20  # libraries that are loaded at the first product among it
    layout = best_layout(CPU, getattr(torch, dtype), config.matrix_shapes(), bits == "4-bit")
    assert placed == weight_bytes(config, getattr(torch, dtype), layout)
    assert checked < slack  # checking reads no tensors
    assert peak <= placed + largest + slack
