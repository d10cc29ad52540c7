"""One batch job: lines of prompts in, one line of results out for each, in order."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO

from tqdm import tqdm

from flexgen_h2o.errors import UsageError
from flexgen_h2o.generation import GenerationOutput, Request
from flexgen_h2o.llm import LLM
from flexgen_h2o.prompts import PromptLine, read_prompts, write_line
from flexgen_h2o.sampling import SamplingParams
from flexgen_h2o.weights import weight_bytes

SAMPLE_PROMPTS = (
    "And it came to pass in those days, that",
    "It was a dark and stormy night, and the ship",
    "The captain looked at the sea and said,",
    "She had been so long away from home that",
)

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
    """

    lines: Lines
    name: str
    rereadable: bool = True
    sizes: InputSizes | None = None


def file_source(path: str) -> PromptSource:
    """Prompts of a file; "-" is JSON lines on standard input."""
    if path == "-":
        return PromptSource(lambda: read_prompts(sys.stdin.buffer, is_json=True), "standard input", rereadable=False)

    def lines() -> Iterator[PromptLine]:
        with Path(path).open("rb") as file:
            yield from read_prompts(file, is_json=not path.endswith(".txt"))

    return PromptSource(lines, path)


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
            for request in llm.random_requests(prompt_len, llm.policy.block_rows)
        ),
        "random prompts",
        sizes=InputSizes(prompt_len, llm.policy.block_rows),
    )


class BatchJob:
    """Serves every line of a source and writes one line for each.

    Attributes:
        failed: lines that could not be served, so far.
        unknown_keys: keys of the input that mean nothing here.
    """

    def __init__(self, llm: LLM, params: SamplingParams, source: PromptSource):
        self.llm = llm
        self.params = params
        self.source = source
        self.failed = 0
        self.unknown_keys: set[str] = set()
        self._generated = 0  # tokens, for the progress bar
        self._pending: deque[tuple[PromptLine, str | None]] = deque()  # read and not yet written, with what is wrong

    def measure(self) -> InputSizes:
        """First pass: how long and how many the prompts are. Raises UsageError if there are none."""
        self.llm.check_lengths(self.params, self.llm.prompt_len or 1)
        if self.source.sizes is not None:
            return self.source.sizes
        try:
            return self._measure_lines() if self.source.rereadable else self._peek()
        except OSError as error:
            raise UsageError(f"{self.source.name} cannot be read: {error.strerror or error}") from None

    def _measure_lines(self) -> InputSizes:
        longest = count = lines = 0
        for lines, line in enumerate(self.source.lines(), start=1):
            request = self._request(lines - 1, line)
            if isinstance(request, Request):
                longest = max(longest, len(request.prompt_ids))
                count += 1
        if not lines:
            raise UsageError(f"{self.source.name} has no prompts; give it at least one line")
        return InputSizes(self.llm.prompt_len or longest, count)

    def _peek(self) -> InputSizes:
        """Looks for the first line of what can be read only once, and keeps it."""
        lines = self.source.lines()
        first = next(lines, None)
        if first is None:
            raise UsageError(f"{self.source.name} has no prompts; give it at least one line")
        self.source = replace(self.source, lines=lambda: chain([first], lines))
        limit = self.llm.config.max_position_embeddings - self.params.max_new_tokens
        return InputSizes(self.llm.prompt_len or limit, None)

    def run(self, sizes: InputSizes, output: str | None) -> None:
        """Generates and writes, after the plan has been checked and before anything is loaded.

        Raises UsageError if the plan cannot work or the output cannot be written.
        """
        has_work = sizes.num_prompts != 0
        if has_work:
            self.llm.check_plan(self.params, sizes.prompt_len, sizes.num_prompts)
            self._load()
        with ExitStack() as files:
            # Only now: results of an earlier run outlive one that cannot begin.
            file = sys.stdout if output is None else files.enter_context(_open_output(output))
            if has_work:
                self._generate(file, sizes)
            else:
                deque(self._requests(), maxlen=0)
            self._write_failed(file)

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
        """Second pass: the requests that can be served. Every line that is read becomes pending."""
        for index, line in enumerate(self.source.lines()):
            self.unknown_keys.update(line.unknown_keys)
            request = self._request(index, line)
            if isinstance(request, Request):
                self._pending.append((line, None))
                yield request
            else:
                self._pending.append((line, request))

    def _generate(self, file: IO[str], sizes: InputSizes) -> None:
        with tqdm(total=sizes.num_prompts, unit="prompt", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

            def on_tokens(count: int) -> None:
                self._generated += count
                rate = self._generated / (bar.format_dict["elapsed"] or 1.0)
                bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                bar.update(count / self.params.max_new_tokens)

            outputs = self.llm.stream(self._requests(), self.params, sizes.prompt_len, sizes.num_prompts, on_tokens)
            for done, output in enumerate(outputs, start=1):
                self._write_failed(file)
                line, _ = self._pending.popleft()
                write_line(file, _served(line, output))
                file.flush()
                bar.n = max(bar.n, done)

    def _write_failed(self, file: IO[str]) -> None:
        """Writes the lines at the head of the queue that could not be served."""
        while self._pending and self._pending[0][1] is not None:
            line, error = self._pending.popleft()
            self.failed += 1
            write_line(file, {"id": line.id, "line": line.line, "error": error})

    def _load(self) -> None:
        total = weight_bytes(self.llm.config, self.llm.dtype, self.llm.platform.matrix_layout)
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="weights",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        ) as bar:
            self.llm.load(bar.update)
        if self.llm.unused_keys:
            names = ", ".join(self.llm.unused_keys)
            print(f"warning: the checkpoint has keys that the model does not use: {names}", file=sys.stderr)


def _served(line: PromptLine, output: GenerationOutput) -> dict[str, object]:
    return {
        "id": line.id,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }


def _open_output(path: str) -> IO[str]:
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from None
