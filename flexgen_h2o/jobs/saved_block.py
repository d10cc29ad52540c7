"""Saving a block between two of its steps, so that hours of work on it are not lost.

    FOLDER/current.json    which step was saved, its tokens and faults, and the checksums of
    FOLDER/step-N/layer-M  the KV of all units of a layer, as it lies at home

current.json is replaced once everything else is on the device, so there is a whole checkpoint at every moment, or none.
What follows a step depends on nothing else: random numbers are a hash of the prompt's index and the step.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from flexgen_h2o.engine.block import BlockStart, PromptBlock, RowFault
from flexgen_h2o.engine.chooser import Sampler
from flexgen_h2o.engine.loop import Engine
from flexgen_h2o.engine.requests import Request
from flexgen_h2o.kvcache.cache import Unit
from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.memory.direct_io import REQUEST_BYTES, aligned_bytes, read_direct, write_direct
from flexgen_h2o.memory.extents import Extent, host_bytes
from flexgen_h2o.memory.run_folder import check_space, replace_file, sync_folder
from flexgen_h2o.plan.schedule import cut_block

CURRENT = "current.json"


class DamagedError(Exception):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class _Block:
    """What is being generated."""

    requests: Sequence[Request]
    prompts: PromptBlock
    engine: Engine
    sampler: Sampler

    @property
    def layers(self) -> list[list[Unit]]:
        """The units that this block uses, by layer."""
        return [layer[: len(self.unit_rows)] for layer in self.engine.kv.units]

    @property
    def unit_rows(self) -> Sequence[slice]:
        policy = self.engine.policy
        return cut_block(self.prompts.rows, policy.gpu_batch_size, policy.group_rows).unit_rows


class BlockCheckpoint:
    """A BlockKeeper that saves to a folder.

    Args:
        seconds: how long what has been done may be at risk; None to save nothing, and only bring back what is there.
        job: names everything that the results depend on but the policy.
        say: told, in a sentence, what could not be saved or brought back: a reason to go on without.
    """

    def __init__(self, folder: Path, seconds: float | None, job: str, say: Callable[[str], None]):
        self._folder = folder
        self._seconds = seconds
        self._job = job
        self._say = say
        self._saved_at = time.monotonic()
        self._block: _Block | None = None

    def restore(
        self, block: Sequence[Request], prompts: PromptBlock, engine: Engine, sampler: Sampler
    ) -> BlockStart | None:
        self._block = _Block(block, prompts, engine, sampler)
        self._saved_at = time.monotonic()
        try:
            saved = self._read_current()
            if saved is None or saved["block"] != self._identity():
                return None
            self._read_layers(saved)
            next_ids = torch.tensor(saved["next_ids"], dtype=torch.int64).view(-1, 1)
            start = BlockStart(
                saved["step"], next_ids, {row: RowFault(*fault) for row, *fault in saved.get("faults", ())}
            )
            sampler.resume(saved["tokens"])
        except (OSError, DamagedError) as error:
            self._say(f"what was saved of a block in {self._folder} cannot be used ({error}): the block begins again")
            return None
        self._say(f"a block of {len(block)} prompts goes on at its token {start.step + 1}")
        return start

    def step_done(self, reached: BlockStart) -> None:
        if self._seconds is None or time.monotonic() - self._saved_at < self._seconds:
            return
        try:
            self._save(reached)
        except OSError as error:
            kept = "; what was saved of it before stays" if self._clean_up() else ""
            self._say(f"the block could not be saved in {self._folder}: {error}; the run goes on{kept}")
        self._saved_at = time.monotonic()

    def discard(self) -> None:
        """Forgets what was saved: the block is done, and its results are safe."""
        self._block = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _identity(self) -> str:
        """Names the block, and everything that its results depend on."""
        assert self._block is not None
        indices = [request.index for request in self._block.requests]
        return f"{self._job} {self._block.engine.policy} {indices[0]} {indices[-1]} {len(indices)}"

    def _save(self, reached: BlockStart) -> None:
        assert self._block is not None
        self._block.engine.transfer.drain()  # every unit is at home, and nothing moves
        self._folder.mkdir(exist_ok=True)
        old = {path.name for path in self._folder.glob("step-*")}
        folder = self._folder / f"step-{reached.step - 1}"
        shutil.rmtree(folder, ignore_errors=True)
        check_space(self._folder, sum(map(_nbytes, sum(self._block.layers, []))), "a checkpoint of the block")
        folder.mkdir()
        shards = []
        for number, layer in enumerate(self._block.layers):
            with (folder / f"layer-{number}").open("wb") as file:
                shards.append(_write_layer(file, layer))
        sync_folder(folder)
        body = {
            "block": self._identity(),
            "step": reached.step,
            "next_ids": reached.next_ids.flatten().tolist(),
            "faults": [(row, fault.step, fault.layer) for row, fault in reached.faults.items()],
            "tokens": self._block.sampler.tokens,
            "folder": folder.name,
            "shards": shards,
        }
        text = json.dumps(body)
        replace_file(self._folder / CURRENT, json.dumps({"checksum": zlib.crc32(text.encode()), "body": text}).encode())
        sync_folder(self._folder)
        for name in old - {folder.name}:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _clean_up(self) -> bool:
        """Removes all but the last whole checkpoint. Returns whether there is one of this block."""
        try:
            whole = self._read_current()
        except (OSError, DamagedError):
            whole = None
        if whole is None or whole["block"] != self._identity():
            shutil.rmtree(self._folder, ignore_errors=True)
            return False
        for path in self._folder.glob("step-*"):
            if path.name != whole["folder"]:
                shutil.rmtree(path, ignore_errors=True)
        return True

    def _read_current(self) -> dict[str, Any] | None:
        try:
            content = json.loads((self._folder / CURRENT).read_bytes())
            if zlib.crc32(content["body"].encode()) != content["checksum"]:
                raise ValueError
            body: dict[str, Any] = json.loads(content["body"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(f"{CURRENT} is damaged") from None
        return body

    def _read_layers(self, saved: dict[str, Any]) -> None:
        """Brings the KV of every unit to its home, as that of the last step that was saved."""
        assert self._block is not None
        paddings = [Padding(self._block.prompts.first_columns[rows]) for rows in self._block.unit_rows]
        columns_seen = self._block.prompts.width + saved["step"] - 1
        for number, layer in enumerate(self._block.layers):
            path = self._folder / saved["folder"] / f"layer-{number}"
            with path.open("rb") as file:
                if _read_layer(file, layer) != saved["shards"][number]:
                    raise DamagedError(f"{path.name} is not what was written")
            for unit, padding in zip(layer, paddings, strict=True):
                unit.columns_seen = columns_seen
                if unit.buffer is not None:
                    unit.buffer.resume(padding, columns_seen)


def _nbytes(unit: Unit) -> int:
    return unit.place.nbytes


def _write_layer(file: IO[bytes], units: Sequence[Unit]) -> list[int]:
    """Writes the memory of units one behind the other. Returns how many bytes that were, and their checksum."""
    nbytes = crc = 0
    for unit in units:
        for part in _parts(unit):
            content = memoryview(host_bytes(_fetched(part)))
            file.write(content)
            nbytes, crc = nbytes + len(content), zlib.crc32(content, crc)
    file.flush()
    os.fsync(file.fileno())
    return [nbytes, crc]


def _read_layer(file: IO[bytes], units: Sequence[Unit]) -> list[int]:
    """Fills the memory of units; the reverse of _write_layer, with the same result for the same bytes."""
    nbytes = crc = 0
    for unit in units:
        for part in _parts(unit):
            passing = aligned_bytes(part.nbytes)
            content = memoryview(host_bytes(passing))
            if file.readinto(content) != part.nbytes:  # type: ignore[attr-defined]
                raise DamagedError("it is cut short")
            nbytes, crc = nbytes + len(content), zlib.crc32(content, crc)
            if isinstance(part, Extent):
                write_direct(part, passing)
            else:
                part.copy_(passing)
    return [nbytes, crc]


def _parts(unit: Unit) -> Iterator[Tensor | Extent]:
    """A unit's memory, wherever it is, in parts that may be held in memory once more."""
    place = unit.place
    for start in range(0, place.nbytes, REQUEST_BYTES):
        at = slice(start, min(start + REQUEST_BYTES, place.nbytes))
        yield place.part(at) if isinstance(place, Extent) else place[at]


def _fetched(part: Tensor | Extent) -> Tensor:
    if isinstance(part, Extent):
        passing = aligned_bytes(part.nbytes)
        read_direct(passing, part)
        return passing
    return part.cpu()
