"""What a job needs to go on after it was interrupted: a side file, OUT.job, beside its output OUT.

The side file is replaced whenever a block's lines are on the device, so it never promises a line that could be lost.
What lies in OUT beyond the bytes that it names, such as a half-written line, is dropped when the job goes on.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.llm import LLM
from flexgen_h2o.machine.platform import dtype_name
from flexgen_h2o.memory.run_folder import cache_key, replace_file
from flexgen_h2o.plan.placement import Percent
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.sampling import SamplingParams

FORMAT = 1
READ_BYTES = 2**20

Settings = Mapping[str, Any]  # by name, as people know it: everything that the results depend on


@dataclass(frozen=True)
class Progress:
    """How far a job has come.

    Attributes:
        lines: prompts of the input that are answered, in its order; blank lines apart.
        failed: those of them that could not be served.
        tokens: generated.
        output_bytes, output_crc: length and CRC-32 of their lines in the output.
        is_finished: all prompts are answered.
    """

    lines: int = 0
    failed: int = 0
    tokens: int = 0
    output_bytes: int = 0
    output_crc: int = 0
    is_finished: bool = False

    @property
    def served(self) -> int:
        return self.lines - self.failed


@dataclass(frozen=True)
class JobRecord:
    """The content of a side file.

    Attributes:
        settings: everything that the results depend on but the policy.
        asked: fields of the policy that the job was begun with.
        policy: fields of the one it goes on with, which differs where a device ran out of memory.
        prompt_len, num_prompts: sizes of the whole input.
    """

    settings: Settings
    asked: dict[str, Any]
    policy: dict[str, Any]
    prompt_len: int
    num_prompts: int
    progress: Progress = field(default_factory=Progress)

    def digest(self) -> str:
        """Names what the results depend on, the policy apart."""
        parts = [self.settings, self.prompt_len, self.num_prompts]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def side_file(output: Path) -> Path:
    """Where it is kept how far the job of an output has come."""
    return output.with_name(output.name + ".job")


def checkpoint_folder(output: Path) -> Path:
    """Where a block of the job may be saved before it is done."""
    return output.with_name(output.name + ".checkpoint")


def remove_checkpoint(output: Path) -> None:
    """Removes what was saved of a block, if anything was."""
    shutil.rmtree(checkpoint_folder(output), ignore_errors=True)


def write_record(path: Path, record: JobRecord) -> None:
    """Replaces a side file."""
    body = asdict(record)
    replace_file(path, json.dumps({"format": FORMAT, "checksum": _checksum(body), "job": body}).encode())


def read_record(path: Path) -> JobRecord | None:
    """What a side file says; None if there is none. Raises UsageError if it is not what was written."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this version knows {FORMAT}")
        body = content["job"]
        if content["checksum"] != _checksum(body):
            raise ValueError("its checksum is wrong")
        if set(body["policy"]) != {setting.name for setting in fields(Policy)}:
            raise ValueError("its policy is that of another version")
        return JobRecord(**{**body, "progress": Progress(**body["progress"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{path} cannot be used ({reason or type(error).__name__}), so it is not known how far the job has come;"
            " put back a good copy, or begin again with --restart"
        ) from None


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def stored_policy(stored: JobRecord | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the policy that a job goes on with; none where there is no job to go on with.

    Args:
        given: fields of a policy that are asked for. Raises UsageError if the job was begun with others.
    """
    if stored is None:
        return {}
    way_out = "leave it out, give another --output, or begin again with --restart"
    plain = {name: list(value.values) if isinstance(value, Percent) else value for name, value in given.items()}
    problems = [
        f"--{name.replace('_', '-')} is {_shown(value)}, and the job was begun with {_shown(stored.asked[name])};"
        f" {way_out}"
        for name, value in plain.items()
        if stored.asked[name] != value
    ]
    if problems:
        raise UsageError(problems)
    return {**stored.policy, "percent": Percent(*stored.policy["percent"])}


def setting_differences(stored: JobRecord, settings: Settings) -> list[str]:
    """A sentence for everything that is not as it was when the job began."""
    way_out = "give another --output, or begin again with --restart"
    found = []
    for name in {**stored.settings, **settings}:
        then, now = stored.settings.get(name), settings.get(name)
        if then == now:
            continue
        if isinstance(now, dict) or isinstance(then, dict):  # an identity that tells people nothing
            found.append(f"{name} has changed since the job was begun; put back what it was, {way_out}")
        else:
            found.append(f"{name} is {_shown(now)}, and the job was begun with {_shown(then)}; {way_out}")
    return found


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value) or "not given"
    return {"None": "not given", "True": "true", "False": "false"}.get(str(value), str(value))


class InputFile:
    """An input file as it was found, to which a job is held for as long as it lasts."""

    def __init__(self, path: Path):
        self.path = path
        self._seen = self._status()
        self.size, self.sha256 = self._content()

    def identity(self) -> dict[str, Any]:
        """What tells this content from any other."""
        return {"bytes": self.size, "sha256": self.sha256}

    def check(self) -> None:
        """Raises RuntimeError if the content is not what it was."""
        try:
            status = self._status()
            if status == self._seen or self._content() == (self.size, self.sha256):
                self._seen = status  # untouched, or touched and the same
                return
        except OSError as error:
            raise RuntimeError(
                f"--input {self.path} cannot be read any more ({error.strerror}); bring it back, and the same command"
                " goes on"
            ) from None
        raise RuntimeError(
            f"--input {self.path} was changed while the job was running; put back what it was and the same command"
            " goes on, or begin again with --restart"
        )

    def _status(self) -> tuple[int, ...]:
        status = self.path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _content(self) -> tuple[int, str]:
        size, digest = 0, hashlib.sha256()
        with self.path.open("rb") as file:
            while part := file.read(READ_BYTES):
                size += len(part)
                digest.update(part)
        return size, digest.hexdigest()


def crc_of(descriptor: int, nbytes: int) -> int | None:
    """CRC-32 of a file's first bytes; None if it is shorter."""
    crc = at = 0
    while at < nbytes:
        part = os.pread(descriptor, min(READ_BYTES, nbytes - at), at)
        if not part:
            return None
        at += len(part)
        crc = zlib.crc32(part, crc)
    return crc


def job_settings(llm: LLM, params: SamplingParams, given: InputFile, prompt_len: int) -> dict[str, Any]:
    """Everything that the results of a job depend on but the policy, by the name that people know it by."""
    rule = llm.rule(prompt_len, params.max_new_tokens)
    parameters = "".join(f", {name}={value}" for name, value in llm.eviction.parameters.items())
    checkpoint = llm.checkpoint()
    weights = f"dummy {llm.seed}" if checkpoint is None else checkpoint.identity()
    sampling = {name: value for name, value in asdict(params).items() if name != "max_new_tokens"}
    settings = {
        "--input": given.identity(),
        "--model": llm.config.name,
        "the files of --model": {"sha256": cache_key(llm.config.identity, weights, *_tokenizer_files(llm.folder))},
        "--dummy-weights": llm.uses_dummy_weights,
        "--device": llm.device.type,
        "--dtype": dtype_name(llm.dtype),
        "the layout of matrices": llm.platform.matrix_layout.name,
        "--prompt-len": llm.prompt_len,
        "--gen-len": params.max_new_tokens,
        "--eviction": f"{rule.name} with {rule.heavy} heavy and {rule.recent} recent entries{parameters}",
        **{f"--{name.replace('_', '-')}": value for name, value in sampling.items()},
    }
    read_back: dict[str, Any] = json.loads(json.dumps(settings))  # as a side file returns them
    return read_back


def _tokenizer_files(folder: Path | None) -> list[str]:
    """What tells the settings of a model's folder from others."""
    if folder is None:
        return []
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".txt", ".model"))
    return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
