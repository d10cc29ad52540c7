"""Which hardware file a run is held against, and where new ones go."""

from pathlib import Path

from flexgen_h2o.basics import folders
from flexgen_h2o.search.hardware import Hardware, read_hardware

ROOT = Path(__file__).parent.parent.parent
INSTALLED = ROOT / "flexgen_h2o" / "hardware_files"  # policies/hardware, where there is no source tree


def default_folder() -> Path:
    """Where hardware files go: in the source tree that this is run from; else where quick measurements are, too."""
    if (ROOT / "setup.py").exists():
        return ROOT / "policies" / "hardware"
    return Path(folders.CACHE).expanduser() / "hardware"


def _known(name: str) -> Path | None:
    """The file of a name: this user's, or one that is installed with the package."""
    paths = (folder / f"{name}.json" for folder in (default_folder(), INSTALLED))
    return next((path for path in paths if path.exists()), None)


def find_hardware(choice: str, name: str) -> Hardware | None:
    """The machine that a run is held against.

    Args:
        choice: "auto" for the file of this machine, if there is one; the name of a file in the default folder; or a
            path.
        name: of this machine.
    Raises UsageError if what is asked for is not there.
    """
    path = _known(name if choice == "auto" else choice)
    if choice == "auto":
        return None if path is None else read_hardware(path)
    return read_hardware(path or Path(choice))
