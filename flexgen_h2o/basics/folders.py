"""Where this package keeps things, unless told otherwise."""

from pathlib import Path

OFFLOAD = "~/flexgen_h2o_offload"  # files of a run, gone when it ends
DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"  # the model that ships
CACHE = "~/.cache/flexgen_h2o"  # weights, and rates of this machine, for later runs


def nearest_parent(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.expanduser().resolve()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())
