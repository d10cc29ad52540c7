"""One batch job: lines of prompts in, one line of results out for each, in order."""

import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.progress import weights_bar
from flexgen_h2o.engine.requests import GenerationOutput, Request, random_requests
from flexgen_h2o.jobs.formats import JsonScalar, PromptLine, bounded_lines, read_prompts
from flexgen_h2o.jobs.metrics import MetricsFile
from flexgen_h2o.jobs.pace import Pace
from flexgen_h2o.jobs.record import InputFile, JobRecord, job_settings, setting_differences
from flexgen_h2o.jobs.results import Results
from flexgen_h2o.jobs.saved_block import BlockCheckpoint
from flexgen_h2o.llm import LLM
from flexgen_h2o.memory.run_folder import reclaim
from flexgen_h2o.plan.policy_files import policy_fields
from flexgen_h2o.plan.sampling import SamplingParams
from flexgen_h2o.weights.store import weight_bytes

SAMPLE_PROMPTS = (
    "And it came to pass in those days, that",
    "It was a dark and stormy night, and the ship",
    "The captain looked at the sea and said,",
    "She had been so long away from home that",
)

MOST_UNKNOWN_KEYS = 20  # that are named in a warning

Lines = Callable[[], Iterator[PromptLine]]


@dataclass(frozen=True)
class InputSizes:
    """How long and how many the prompts are.

    Attributes:
        prompt_len: the longest prompt, in tokens, or the limit that was given.
        num_prompts: prompts that can be served; None if the input can be read only once.
    """

    prompt_len: int
    num_prompts: int | None


@dataclass(frozen=True)
class PromptSource:
    """Where the prompts come from.

    Attributes:
        lines: starts reading from the first line; may be called once if not `rereadable`.
        name: for messages.
        sizes: of the prompts, where they are known without reading.
        file: where they are read from, if it is a file.
    """

    lines: Lines
    name: str
    rereadable: bool = True
    sizes: InputSizes | None = None
    file: InputFile | None = None


def file_source(path: str) -> PromptSource:
    """Prompts of a file; "-" is JSON lines on standard input."""
    if path == "-":
        stdin = sys.stdin.buffer
        return PromptSource(
            lambda: read_prompts(bounded_lines(stdin), is_json=True), "standard input", rereadable=False
        )

    def lines() -> Iterator[PromptLine]:
        with Path(path).open("rb") as file:
            yield from read_prompts(bounded_lines(file), is_json=not path.endswith(".txt"))

    try:
        return PromptSource(lines, path, file=InputFile(Path(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; give another file") from None


def sample_source() -> PromptSource:
    """The built-in prompts."""
    return PromptSource(
        lambda: (PromptLine(index + 1, index, text) for index, text in enumerate(SAMPLE_PROMPTS)),
        "sample prompts",
    )


def random_source(llm: LLM, prompt_len: int) -> PromptSource:
    """One block of prompts of random tokens."""
    return PromptSource(
        lambda: (
            PromptLine(request.index + 1, request.index, list(request.prompt_ids))
            for request in random_requests(llm.config.vocab_size, prompt_len, llm.policy.block_rows, llm.seed)
        ),
        "random prompts",
        sizes=InputSizes(prompt_len, llm.policy.block_rows),
    )


@dataclass(frozen=True)
class PendingLine:
    """A line that has been read: what it calls itself, its number, and why it cannot be served if it cannot."""

    id: JsonScalar
    line: int
    error: str | None

    def failure(self) -> dict[str, object]:
        """What is written for a prompt that cannot be served."""
        return {"id": self.id, "line": self.line, "error": self.error}


class BatchJob:
    """Serves every line of a source and writes one line for each.

    Args:
        results: where the lines go. If an earlier run of the same job has left some there, this one goes on after them.
        checkpoint_s: how many seconds of work on a block may be lost; None for the whole of it.
        metrics: kept up to date while the job runs.

    Attributes:
        unknown_keys: keys of the input that mean nothing here.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        source: PromptSource,
        results: Results,
        checkpoint_s: float | None = None,
        metrics: MetricsFile | None = None,
    ):
        self.llm = llm
        self.params = params
        self.source = source
        self.results = results
        self.unknown_keys: set[str] = set()
        self._checkpoint_s = checkpoint_s
        self._metrics = metrics
        self._pending: deque[PendingLine] = deque()  # read and not yet written
        self._notes_said = 0

    @property
    def failed(self) -> int:
        """Prompts that could not be served, so far."""
        return self.results.progress.failed

    def measure(self) -> InputSizes:
        """First pass: how long and how many the prompts are, unless an earlier run of the job has noted that.

        Raises UsageError if there are none, or this is not the job that the results belong to.
        """
        self.llm.check_lengths(self.params, self.llm.prompt_len or 1)
        if self.source.sizes is not None:
            return self.source.sizes
        stored = self.results.stored
        if stored is not None and self.source.file is not None:
            settings = job_settings(self.llm, self.params, self.source.file, stored.prompt_len)
            if problems := setting_differences(stored, settings):
                raise UsageError(problems)
            return InputSizes(stored.prompt_len, stored.num_prompts)
        try:
            return self._measure_lines() if self.source.rereadable else self._peek()
        except OSError as error:
            raise UsageError(f"{self.source.name} cannot be read: {error.strerror or error}") from None

    def _measure_lines(self) -> InputSizes:
        longest = count = lines = 0
        names = array("Q")
        for lines, line in enumerate(self.source.lines(), start=1):
            names.append(_hash_of(line))
            request = self._request(lines - 1, line)
            if isinstance(request, Request):
                longest = max(longest, len(request.prompt_ids))
                count += 1
        if not lines:
            raise UsageError(f"{self.source.name} has no prompts; give it at least one line")
        self._warn_of_duplicates(names)
        return InputSizes(self.llm.prompt_len or max(1, longest), count)

    def _warn_of_duplicates(self, hashes: Sequence[int]) -> None:
        """Says which name is given twice; results are then told apart by their order alone."""
        values, counts = np.unique(np.asarray(hashes, dtype=np.uint64), return_counts=True)
        repeated = values[counts > 1]
        if not len(repeated):
            return
        found = (line for line in self.source.lines() if _hash_of(line) == repeated[0])
        first, second = islice(found, 2)
        more = f", and {len(repeated) - 1} other ids are repeated" if len(repeated) > 1 else ""
        print(
            f"note: lines {first.line} and {second.line} have the same id, {str(first.id)[:40]!r}{more};"
            " results come in the order of the input",
            file=sys.stderr,
        )

    def _peek(self) -> InputSizes:
        """Looks for the first line of what can be read only once, and keeps it."""
        lines = self.source.lines()
        first = next(lines, None)
        if first is None:
            raise UsageError(f"{self.source.name} has no prompts; give it at least one line")
        self.source = replace(self.source, lines=lambda: chain([first], lines))
        limit = self.llm.config.max_position_embeddings - self.params.max_new_tokens
        return InputSizes(self.llm.prompt_len or limit, None)

    def run(self, sizes: InputSizes) -> None:
        """Generates and writes, after the plan has been checked and before anything is loaded.

        Raises UsageError if the plan cannot work or the output cannot be written.
        """
        stored = self.results.stored
        if self.llm.platform.offload_dir is not None:
            reclaim(self.llm.platform.offload_dir)  # of a run that was killed, also where there is nothing left to do
        if stored is not None and stored.progress.is_finished:
            done = stored.progress.lines
            _say(f"all {done} prompts have been answered, so nothing is written; --restart begins again")
            return
        if stored is not None:
            _say(f"{stored.progress.lines} prompts have been answered; going on from there")
        has_work = sizes.num_prompts is None or sizes.num_prompts > self.results.progress.served
        if has_work:
            self.llm.check_plan(self.params, sizes.prompt_len, sizes.num_prompts)
            self._load()
        record = self._record(sizes)
        # Only now: results of an earlier run outlive one that cannot begin.
        self.results.begin(record)
        if has_work:
            self._generate(record, sizes)
        else:
            deque(self._requests(), maxlen=0)  # each is written as it is read
        self._commit(is_finished=True)

    def _record(self, sizes: InputSizes) -> JobRecord:
        """What the job is, for a run that goes on with it."""
        stored, file = self.results.stored, self.source.file
        if stored is not None:
            return stored
        settings = {} if file is None else job_settings(self.llm, self.params, file, sizes.prompt_len)
        policy = policy_fields(self.llm.policy)
        return JobRecord(settings, policy, policy, sizes.prompt_len, sizes.num_prompts or 0)

    def _commit(self, is_finished: bool = False) -> None:
        """Makes sure of the lines written so far, if they come from the input that the job was begun with."""
        if self.source.file is not None:
            self.source.file.check()
        self.results.commit(policy_fields(self.llm.policy), is_finished)

    def _request(self, index: int, line: PromptLine) -> Request | str:
        """The request that a line makes, or what is wrong with it."""
        if line.prompt is None:
            return line.error or "line has no prompt"
        try:
            ids = self.llm.encode(line.prompt)
            self.llm.check_prompt(ids, self.params.max_new_tokens)
        except ValueError as error:
            return str(error)
        return Request(index, ids)

    def _requests(self) -> Iterator[Request]:
        """Second pass: the requests that can be served, of lines that have no answer yet. What is read is pending."""
        for index, line in islice(enumerate(self.source.lines()), self.results.progress.lines, None):
            if len(self.unknown_keys) < MOST_UNKNOWN_KEYS:
                self.unknown_keys.update(line.unknown_keys)
            request = self._request(index, line)
            error = None if isinstance(request, Request) else request
            self._pending.append(PendingLine(line.id, line.line, error))
            if isinstance(request, Request):
                yield request
            else:
                self._write_failed()

    def _generate(self, record: JobRecord, sizes: InputSizes) -> None:
        pace = Pace(sizes.num_prompts, self.results.progress, self.params.max_new_tokens)
        keeper = self._keeper(record)
        with tqdm(
            total=sizes.num_prompts,
            initial=pace.served,
            unit="prompt",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        ) as bar:

            def on_tokens(count: int) -> None:
                pace.tokens(count)
                bar.set_postfix_str(f"{pace.tokens_per_s:.1f} tok/s", refresh=False)
                bar.update(int(pace.prompts) - bar.n)
                self._report(pace)

            blocks = self.llm.blocks(
                self._requests(), self.params, sizes.prompt_len, sizes.num_prompts, on_tokens, keeper
            )
            for outputs in blocks:
                self._write_block(outputs)
                self._commit()
                if keeper is not None:
                    keeper.discard()
                pace.block_done(self.results.progress)
                bar.update(int(pace.prompts) - bar.n)
                self._say_notes()
            self._write_failed()
            self._report(pace, now=True)

    def _keeper(self, record: JobRecord) -> BlockCheckpoint | None:
        folder = self.results.checkpoint_folder
        if folder is None:
            return None
        return BlockCheckpoint(folder, self._checkpoint_s, record.digest(), _say)

    def _write_block(self, outputs: Sequence[GenerationOutput]) -> None:
        """Writes the lines of a block, and those between them that could not be served."""
        for output in outputs:
            self._write_failed()
            line = self._pending.popleft()
            if output.error is not None:
                self.results.write(replace(line, error=output.error).failure())
            else:
                self.results.write(
                    {
                        "id": line.id,
                        "text": output.text,
                        "token_ids": output.token_ids,
                        "finish_reason": output.finish_reason,
                    }
                )

    def _write_failed(self) -> None:
        """Writes the lines at the head of the queue that could not be served."""
        while self._pending and self._pending[0].error is not None:
            self.results.write(self._pending.popleft().failure())

    def _say_notes(self) -> None:
        for note in self.llm.notes[self._notes_said :]:
            _say(note)
        self._notes_said = len(self.llm.notes)

    def _report(self, pace: Pace, now: bool = False) -> None:
        if self._metrics is None or not (now or self._metrics.is_due()):
            return
        try:
            self._metrics.write(pace, self.results.progress, self.llm)
        except OSError as error:
            _say(f"no metrics from here on, they cannot be written: {error.strerror or error}")
            self._metrics = None

    def _load(self) -> None:
        total = weight_bytes(self.llm.config, self.llm.dtype, self.llm.platform.matrix_layout)
        with weights_bar(total) as bar:
            self.llm.load(bar.update)
        self._say_notes()
        if self.llm.unused_keys:
            names = ", ".join(self.llm.unused_keys)
            print(f"warning: the checkpoint has keys that the model does not use: {names}", file=sys.stderr)


def _say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def _hash_of(line: PromptLine) -> int:
    """A number that stands for a line's id; equal ids have equal ones."""
    name = f"{type(line.id).__name__} {line.id}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
