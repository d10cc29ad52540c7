"""JSON files that people name."""

import json
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError


def read_json(path: Path, what: str) -> Any:
    """A file's content. Raises UsageError in a sentence.

    Args:
        what: it is, such as "policy file".
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give another {what}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error}); give another {what}") from error
