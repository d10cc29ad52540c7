"""The rates that a run is held against where nobody has profiled the machine: measured quickly, once."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.machine.environment import environment
from flexgen_h2o.profiling.profile import measure
from flexgen_h2o.profiling.settings import QUICK
from flexgen_h2o.search.hardware import Hardware, read_hardware, write_hardware
from flexgen_h2o.search.hardware_files import find_hardware


def known_rates(choice: str, name: str) -> Hardware | None:
    """The machine that a run is held against, as far as it has been measured; None where auto finds nothing.

    Args:
        choice: "auto" for this machine, or what else find_hardware() takes.
        name: of this machine.
    Raises UsageError if what is asked for is not there.
    """
    if choice != "auto":
        return find_hardware(choice, name)
    return _if_sound(lambda: find_hardware("auto", name)) or _if_sound(
        lambda: read_hardware(quick_file(name)) if quick_file(name).exists() else None
    )


def _if_sound(read: Callable[[], Hardware | None]) -> Hardware | None:
    """What was measured earlier; None if nothing was, or by a version that kept it otherwise, which is said."""
    try:
        return read()
    except UsageError as error:
        print(f"note: rates of this machine are not used: {error}", file=sys.stderr)
        return None


def find_or_measure(choice: str, name: str, device: torch.device, folder: Path) -> Hardware | None:
    """known_rates(), or this machine's measured in about ten seconds; what it says goes to standard error.

    Args:
        device: where compute happens.
        folder: on the disk that runs use; it need not exist.
    Returns: None where auto finds nothing and there is no room to measure, or nothing computes (meta).
    """
    found = known_rates(choice, name)
    if found is not None or device.type == "meta":
        return found
    print(f"note: {name} has no hardware file; measuring it quickly, once", file=sys.stderr)
    try:
        measured = measure(QUICK, device, folders.nearest_parent(folder), name, environment())
        write_hardware(quick_file(name), measured)
    except (UsageError, OSError) as error:
        print(f"note: limits will be missing: {error}", file=sys.stderr)
        return None
    print(f"note: kept in {quick_file(name)}; python -m flexgen_h2o.profile_hardware measures more", file=sys.stderr)
    return measured


def quick_file(name: str) -> Path:
    """Where a quick measurement of a machine is kept."""
    return Path(folders.CACHE).expanduser() / "hardware" / f"{name}.json"
