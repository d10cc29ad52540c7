"""Twenty-four things that happen at night: each ends in a sentence, leaves nothing behind, and loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import Finished, read_jsonl, write_jsonl
from support.jobs import ON_DISK, PATIENCE_S, Job, interrupt_in_block, new_job
from support.tiny_models import make_tiny_opt, save_tiny_opt

from flexgen_h2o.engine.generate import generate_block
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.jobs.results import FileResults
from flexgen_h2o.memory import transfer
from flexgen_h2o.memory.transfer import HostCopies, ThreadTransfer

ARGV = (*ON_DISK, *"--gen-len 6 --dtype float32".split())


@pytest.fixture(autouse=True)
def quick_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.basics.folders.CACHE", str(tmp_path / "job" / ".cache"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return new_job(tmp_path / "job", 9, ARGV)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of an undisturbed run."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("undisturbed")
        patch.setattr("flexgen_h2o.basics.folders.CACHE", str(folder / ".cache"))
        undisturbed = new_job(folder / "job", 9, ARGV)
        assert undisturbed.run().code == 0
        return undisturbed.output.read_bytes()


def fails(finished: Finished, code: int, *words: str) -> None:
    """It ended with this code and one sentence that has these words."""
    assert finished.code == code, finished
    sentences = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 and "Traceback" not in finished.err, finished.err
    assert all(word in sentences[0] for word in words), sentences[0]


def goes_on(job: Job, expected: bytes, may_leave: str = "nothing") -> None:
    """Nothing is left behind, and the same command ends with what an undisturbed run gives, and leaves nothing."""
    assert [name for name in job.leftovers() if not name.startswith(may_leave)] == []
    finished = job.run()
    assert finished.code == 0, finished.err
    assert job.output.read_bytes() == expected and job.leftovers() == []


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """No file of this name can be given space."""
    take = os.posix_fallocate

    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(descriptor, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        yield


def after(calls: int, error: BaseException, whole: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises at its call of this number, from 1."""
    count = iter(range(1, 10**6))

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(count) == calls:
            raise error
        return whole(*arguments, **named)

    return counted


# --- disks ----------------------------------------------------------------------------------------------------------


def test_01_disk_full_while_weights_are_written(job: Job, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(monkeypatch, "layer-2.bin"):
        fails(job.run(), 1, "No space left on device", "layer-2.bin")
    goes_on(job, expected)


def test_02_disk_full_while_kv_is_given_its_place(job: Job, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(monkeypatch, "kv"):
        fails(job.run(), 1, "No space left on device", str(job.folder / "offload"), "/kv")
    goes_on(job, expected)


def test_03_disk_full_while_results_are_written(job: Job, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the second block's lines still fit."""
    write, calls = os.write, iter(range(10**6))

    def some(descriptor: int, content: Any) -> int:
        if not job.output.exists() or not os.path.samestat(os.fstat(descriptor), job.output.stat()):
            return write(descriptor, content)
        match next(calls):
            case 1:
                return write(descriptor, bytes(content)[: len(content) // 2])
            case 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", some)
        finished = job.run()
    fails(
        finished, 1, f"{job.output} cannot be written: No space left", "5 prompts are answered", "same command goes on"
    )
    assert len(read_jsonl(job.output)) == 5
    goes_on(job, expected)


@pytest.mark.parametrize("file", ["kv", "layer-"])
def test_04_a_read_that_fails(job: Job, expected: bytes, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run()  # weights are in their files
    read, count = os.preadv, iter(range(10**6))

    def broken(descriptor: int, views: Any, at: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if file in Path(path).name and next(count) == 40:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, views, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        fails(job.run("--restart"), 1, "Input/output error", file)
    goes_on(job, expected)


def weight_file(job: Job) -> Path:
    job.run()
    return max(job.folder.glob(".cache/*/layer-1.bin"))


def test_05_weight_cache_cut_short(job: Job, expected: bytes) -> None:
    path = weight_file(job)
    os.truncate(path, path.stat().st_size // 2)
    finished = job.run("--restart")
    assert finished.code == 0 and "were damaged; they are taken from the model anew" in finished.err
    assert job.output.read_bytes() == expected and job.leftovers() == []


def test_06_weight_cache_with_a_flipped_bit(job: Job, expected: bytes) -> None:
    path = weight_file(job)
    content = bytearray(path.read_bytes())
    at = next(at for at in range(len(content) // 2, len(content)) if content[at])
    content[at] ^= 16
    path.write_bytes(content)
    finished = job.run("--restart")
    assert finished.code == 0 and "1 parameters in" in finished.err and "damaged" in finished.err
    assert job.output.read_bytes() == expected


@pytest.mark.parametrize("fault", ["fails", "dies"])
def test_07_a_copy_worker(job: Job, expected: bytes, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run()
    serve = ThreadTransfer._serve
    with monkeypatch.context() as patch:
        if fault == "fails":
            patch.setattr(HostCopies, "read", after(30, OSError(errno.EIO, "the link went down"), HostCopies.read))
        else:
            patch.setattr(ThreadTransfer, "_serve", lambda self, link: link == "disk_read" or serve(self, link))
            patch.setattr(transfer, "WAIT_LIMIT_S", 0.1)
        fails(job.run("--restart"), 1, "the link went down" if fault == "fails" else "a copy worker has died")
    goes_on(job, expected)


# --- signals, in true processes -------------------------------------------------------------------------------------


def test_08_to_11_signals(tmp_path: Path) -> None:
    """SIGTERM, SIGINT once, SIGINT twice, SIGKILL: four jobs at once, then the same commands again."""
    argv = [*ON_DISK, *"--gen-len 60 --ignore-eos".split()]
    names = ("terminated", "interrupted", "twice", "killed")
    jobs = {name: new_job(tmp_path / name, 60, argv) for name in names}
    processes = {name: job.start() for name, job in jobs.items()}
    undisturbed = new_job(tmp_path / "undisturbed", 60, argv)
    undisturbed.run()
    signals = {
        "terminated": signal.SIGTERM,
        "interrupted": signal.SIGINT,
        "twice": signal.SIGINT,
        "killed": signal.SIGKILL,
    }
    while signals:
        for name in list(signals):
            if jobs[name].has_lines(5):
                processes[name].send_signal(signals.pop(name))
                if name == "twice":
                    time.sleep(0.002)
                    processes[name].send_signal(signal.SIGINT)
        assert all(processes[name].poll() is None for name in signals), "done before it was ended"
        time.sleep(0.01)
    said = {
        name: process.communicate(timeout=PATIENCE_S)[1].decode().splitlines() for name, process in processes.items()
    }
    codes = {name: process.returncode for name, process in processes.items()}
    assert codes == {"terminated": 143, "interrupted": 130, "twice": 130, "killed": -9}
    for name in ("terminated", "interrupted"):
        kept = len(read_jsonl(jobs[name].output))
        assert said[name][-1].startswith(f"{name}; {kept} prompts are answered") and jobs[name].leftovers() == []
    assert said["twice"][-1].startswith("interrupted again") or said["twice"][-1].startswith("interrupted; ")
    for job in jobs.values():
        goes_on(job, undisturbed.output.read_bytes(), may_leave="offload/")


# --- memory and numbers ---------------------------------------------------------------------------------------------


def short_of_memory(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The device has memory for sub-batches of so many rows."""

    def serve(engine: Engine, *arguments: Any) -> Any:
        if engine.policy.gpu_batch_size > rows:
            arguments[3](1000)  # tokens, none of which will be seen
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")
        return generate_block(engine, *arguments)

    monkeypatch.setattr("flexgen_h2o.llm.generate_block", serve)


def test_12_out_of_memory_on_the_device_steps_down_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = "--gpu-batch-size 4 --num-gpu-batches 1 --gen-len 6 --dtype float32".split()
    job, other = new_job(tmp_path / "job", 9, argv), new_job(tmp_path / "other", 9, argv)
    other.run()
    with monkeypatch.context() as patch:
        short_of_memory(patch, 2)
        finished = job.run("--json", "--metrics", str(tmp_path / "run.prom"))
        generated = finished.report["generated_tokens"]
        assert f"flexgen_h2o_tokens_total {generated}.0" in (tmp_path / "run.prom").read_text().splitlines()
        policy = finished.report["policy"]
        assert (policy["gpu_batch_size"], policy["num_gpu_batches"], policy["decode_batch_size"]) == (2, 2, 2)
        assert finished.err.count("out of memory with --gpu-batch-size 4 (CUDA out of memory.") == 1
        assert "going on with --gpu-batch-size 2 --num-gpu-batches 2" in finished.err
    assert job.output.read_bytes() == other.output.read_bytes()  # float32: the cut changes no token
    assert job.run().code == 0  # the flags are those with which it was begun
    with monkeypatch.context() as patch:
        short_of_memory(patch, 1)
        fails(job.run("--restart"), 1, "out of memory with --gpu-batch-size 2", "would fit")
    assert job.leftovers() == []


def test_12_a_job_that_was_stepped_down_goes_on_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_job(tmp_path / "job", 9, "--gpu-batch-size 4 --num-gpu-batches 1 --gen-len 6".split())
    with monkeypatch.context() as patch:
        short_of_memory(patch, 2)
        patch.setattr(Engine, "run", after(2, KeyboardInterrupt(), Engine.run))
        assert job.run().code == 130
        patch.undo()
    assert job.run("--json").report["policy"]["gpu_batch_size"] == 2


def test_13_host_memory_budget(job: Job) -> None:
    fails(job.run("--cpu-mem", "0.01"), 2, "0.01 GB can be used", " needs ")
    assert job.leftovers() == [] and not job.output.exists()


FILLER = 1  # what a tiny model's rows are fed that are done


def poisoned_model(folder: Path, parameter: str, row: int | None) -> Path:
    """A tiny model with a NaN in one parameter, or in one row of it. 3 layers, head and embedding apart."""
    from transformers import OPTConfig, OPTForCausalLM

    model = make_tiny_opt("untied")
    assert isinstance(model, OPTForCausalLM) and isinstance(model.config, OPTConfig)
    save_tiny_opt(model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(parameter)]
    tensors[name][slice(None) if row is None else row] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    return folder


def tiny_job(folder: Path, model: Path) -> Job:
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "in.jsonl", [{"prompt_ids": [5, token]} for token in (20, 21, 77, 22, 23)])
    return Job(folder, ("--model", str(model), *"--gpu-batch-size 5 --gen-len 4 --dtype float32 --ignore-eos".split()))


def test_14_numbers_that_are_not_finite_stop_a_broken_model(tmp_path: Path) -> None:
    model = poisoned_model(tmp_path / "model", "layers.1.fc1.bias", None)
    fails(tiny_job(tmp_path / "job", model).run(), 1, "not finite", "in layer 1", "token 1 of row 0")


def test_14_numbers_that_are_not_finite_spoil_their_own_row_only(tmp_path: Path) -> None:
    sane = save_tiny_opt(make_tiny_opt("untied"), tmp_path / "sane")
    job = tiny_job(tmp_path / "job", poisoned_model(tmp_path / "model", "decoder.embed_tokens.weight", 77))
    finished = job.run()
    assert finished.code == 0 and "1 of the prompts could not be served" in finished.err
    other = tiny_job(tmp_path / "other", sane)
    other.run()
    lines = read_jsonl(job.output)
    assert "in layer 0, at token 1 of row 2" in lines[2]["error"] and lines[2]["line"] == 3
    assert [line for line in lines if "error" not in line] == [
        line for number, line in enumerate(read_jsonl(other.output)) if number != 2
    ]


def test_14_what_a_row_is_fed_that_is_done_spoils_nothing(tmp_path: Path) -> None:
    sane = tiny_job(tmp_path / "sane", save_tiny_opt(make_tiny_opt("untied"), tmp_path / "sane_model"))
    assert sane.run().code == 0
    stop = str(read_jsonl(sane.output)[0]["token_ids"][0])
    expected = tiny_job(tmp_path / "expected", tmp_path / "sane_model")
    expected.run("--stop-token-ids", stop)
    job = tiny_job(tmp_path / "job", poisoned_model(tmp_path / "model", "decoder.embed_tokens.weight", FILLER))
    assert job.run("--stop-token-ids", stop).code == 0
    lines = read_jsonl(expected.output)
    sound = [number for number, line in enumerate(lines) if FILLER not in line["token_ids"]]  # it may be chosen too
    assert [read_jsonl(job.output)[number] for number in sound] == [lines[number] for number in sound]
    assert len(lines[0]["token_ids"]) == 1 and len(sound) >= 2


def test_14_what_was_not_finite_before_an_interruption_is_known_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poisoned_model(tmp_path / "model", "decoder.embed_tokens.weight", 77)
    undisturbed, job = (tiny_job(tmp_path / name, model) for name in ("undisturbed", "job"))
    undisturbed.run()
    job = Job(job.folder, [*job.argv, "--checkpoint-minutes", "0"])
    interrupt_in_block(job, 2, monkeypatch)
    finished = job.run()
    assert "goes on at its token 3" in finished.err and job.output.read_bytes() == undisturbed.output.read_bytes()


def test_15_a_clock_that_jumps(job: Job, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls, jump_s = time.time, iter(range(10**9)), 86400 * 365
    monkeypatch.setattr(time, "time", lambda: clock() + (-1) ** next(calls) * jump_s)
    finished = job.run("--json")
    assert finished.code == 0 and job.output.read_bytes() == expected
    assert 0 < finished.report["total_s"] < jump_s / 2 and finished.report["throughput_tok_s"] > 0


# --- folders and files ----------------------------------------------------------------------------------------------


def test_16_a_second_run_on_the_same_output(job: Job, expected: bytes) -> None:
    """In the same offload folder and the same cache of weights two runs may work at once: see test_disk.py."""
    with FileResults(job.output, False):
        fails(job.run(), 2, "is being written by another run", "give another name")
        fails(job.run("--restart"), 2, "is being written by another run")
    goes_on(job, expected)


@pytest.mark.parametrize("folder", ["offload", ".cache", "results"])
def test_17_a_folder_that_is_read_only(job: Job, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere but where the system refuses it too."""
    make = os.mkdir

    def refuse(path: Any, *arguments: Any, **named: Any) -> None:
        if str(path).startswith(str(job.folder / folder)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        make(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        if folder == "offload":
            fails(job.run(), 2, f"--offload-dir {job.folder / folder}", "Read-only file system", "another folder")
        elif folder == ".cache":
            fails(job.run(), 1, "Read-only file system", str(job.folder / folder))
        else:
            fails(job.run("--output", "/proc/self/out.jsonl"), 2, "--output /proc/self/out.jsonl", "another name")
    assert job.leftovers() == []


@pytest.mark.parametrize("folder", ["offload", ".cache"])
def test_18_a_folder_that_is_gone(job: Job, expected: bytes, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = Engine.run, iter(range(10**6))

    def vanish(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            shutil.rmtree(job.folder / folder)
        return whole(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", vanish)
        fails(job.run(), 1, "No such file or directory", str(job.folder / folder))
    goes_on(job, expected)


@pytest.mark.parametrize("change", ["grown", "same size", "replaced", "gone", "touched"])
def test_19_an_input_that_changes(job: Job, expected: bytes, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = job.input.read_bytes()
    whole, calls = Engine.run, iter(range(10**6))

    def disturb(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            time.sleep(0.02)  # the clock of a file system has coarse ticks
            match change:
                case "grown":
                    job.input.write_bytes(content + b'{"prompt": "late"}\n')
                case "same size":
                    job.input.write_bytes(content.replace(b"prompt 8", b"prompt X"))
                case "replaced":
                    (job.folder / "new").write_bytes(content.replace(b"prompt 8", b"prompt X"))
                    (job.folder / "new").replace(job.input)
                case "gone":
                    job.input.unlink()
                case "touched":
                    job.input.touch()
        return whole(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", disturb)
        finished = job.run()
    if change == "touched":
        assert finished.code == 0 and job.output.read_bytes() == expected
        return
    words = "cannot be read any more" if change == "gone" else "was changed while the job was running"
    fails(finished, 1, f"--input {job.input}", words)
    assert len(read_jsonl(job.output)) == 5  # the block before the change
    if change != "gone":
        assert job.run().code == 2
    job.input.write_bytes(content)
    goes_on(job, expected)


def test_20_an_output_that_cannot_be_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def denied(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path) == str(job.output):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        fails(job.run(), 2, f"--output {job.output} cannot be written: Permission denied", "another name")
    assert job.leftovers() == []


def test_21_a_side_file_that_is_damaged(job: Job, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", after(2, KeyboardInterrupt(), Engine.run))
        job.run()
    content = job.side_file.read_bytes()
    job.side_file.write_bytes(content[:100])
    fails(job.run(), 2, f"{job.side_file} cannot be used", "--restart")
    job.side_file.write_bytes(content)
    goes_on(job, expected)


def test_22_a_shard_of_the_model_that_is_missing(tmp_path: Path) -> None:
    model = save_tiny_opt(make_tiny_opt("pre_norm"), tmp_path / "model", "20KB")
    shard = sorted(model.glob("*-of-*.safetensors"))[1]
    shard.unlink()
    job = tiny_job(tmp_path / "job", model)
    fails(job.run(), 2, shard.name, "which is not there: fetch it again")
    assert job.leftovers() == [] and not job.output.exists()


def test_23_what_a_dead_process_has_locked(job: Job, expected: bytes) -> None:
    """Its folder has a lock file that nobody holds; a folder that it was about to make has none yet."""
    for name in ("run-dead", ".run-dead"):
        (job.folder / "offload" / name).mkdir(parents=True)
        (job.folder / "offload" / name / "kv").write_bytes(bytes(5000))
    (job.folder / "offload" / "run-dead" / "lock").touch()
    assert job.run().code == 0
    assert job.output.read_bytes() == expected and job.leftovers() == []


def test_24_no_space_is_noticed_before_anything_is_loaded(
    job: Job, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("flexgen_h2o.engine.fit.free_disk_bytes", lambda folder: 100_000)
        patch.setattr("flexgen_h2o.models.checkpoint.Checkpoint.source", None)
        fails(job.run(), 2, "of disk", "0.00 GB can be used", "would fit")
    assert not job.output.exists()
    goes_on(job, expected)


def test_every_fault_of_the_table_has_a_test() -> None:
    import re

    numbers: set[int] = set()
    for name in globals():
        if match := re.match(r"test_(\d\d)_(?:to_(\d\d)_)?", name):
            first = int(match[1])
            numbers |= set(range(first, int(match[2] or first) + 1))
    assert numbers == set(range(1, 25))
