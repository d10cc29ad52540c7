"""The one exception type for mistakes that the person who runs a job can mend."""

from collections.abc import Iterable


class UsageError(ValueError):
    """One or more mistakes in flags, files or sizes, found before the work began.

    Each entry of `problems` is one sentence that names the value, the limit and a way out.
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def add_note(error: BaseException, note: str) -> None:
    """Has a command say more than the error itself; as BaseException.add_note does from Python 3.11 on."""
    error.__dict__.setdefault("__notes__", []).append(note)


def notes_of(error: BaseException) -> list[str]:
    """What add_note() has added."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes
