"""`python -m flexgen_h2o.profile_hardware`: measures this machine and writes what commands plan with."""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.basics import folders
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import borrowed, setting
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import Flags, Parser, unwritable
from flexgen_h2o.commands.settings_flags import add_flags, filled_from
from flexgen_h2o.plan.names import COMPUTING_DEVICES
from flexgen_h2o.plan.run_settings import ModelChoice
from flexgen_h2o.search.hardware import Hardware, read_hardware, write_hardware
from flexgen_h2o.search.hardware_files import default_folder
from flexgen_h2o.search.hardware_summary import summary

DESCRIPTION = """Measures this machine: products, decode attention, memory, links, disk and threads; in less than two
minutes, best while nothing else runs."""
EPILOG = """A rate is the median of its trials. Its spread is their interquartile range over the median, or the change
since the measurement that the file held before, if that is larger; above 10 % the rate is marked as noisy.
exit codes: 0 done; 1 failed while measuring; 2 unusable arguments, or no room; 130 interrupted."""


@dataclass(frozen=True)
class ProfileOptions:
    """What is measured, and where it is written."""

    name: str | None = setting(None, "text", "of the machine", shown="its processor or GPU, and the number of cores")
    output: str | None = setting(
        None, "text", "default: NAME.json where other commands look for it", short="-o", metavar="FILE"
    )
    device: str = borrowed(ModelChoice, "device", text="auto, cuda or cpu", known=COMPUTING_DEVICES)
    folder: str | None = setting(
        None, "text", "on the disk to measure", shown="where runs put their offloaded files", metavar="DIR"
    )
    quick: bool = setting(False, "given", "fewer sizes, in about ten seconds")
    json: bool = setting(False, "given", "print the file's object, the last line")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="python -m flexgen_h2o.profile_hardware", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False
    )
    add_flags(parser, [ProfileOptions])
    return parser


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found."""
    flags = Flags(build_parser().parse_args(argv))
    options: ProfileOptions = filled_from(flags, ProfileOptions)
    if options.output is not None and (problem := unwritable("--output", Path(options.output), is_replaced=True)):
        flags.problems.append(problem)

    from tqdm import tqdm

    from flexgen_h2o.machine.environment import default_name, environment, slug
    from flexgen_h2o.machine.platform import choose_device, setting_problems
    from flexgen_h2o.profiling.profile import measure
    from flexgen_h2o.profiling.settings import FULL, QUICK

    flags.problems += setting_problems(options.device, "auto", {})
    if flags.problems:
        raise UsageError(flags.problems)
    device = choose_device(options.device)
    surroundings = {**environment(), "command": shlex.join(["python", "-m", "flexgen_h2o.profile_hardware", *argv])}
    name = options.name or default_name(surroundings["machine"], device.type)
    output = Path(options.output) if options.output else default_folder() / f"{slug(name)}.json"
    earlier = _earlier(output, is_ours=options.output is None)
    folder = (
        folders.nearest_parent(Path(folders.OFFLOAD)) if options.folder is None else Path(options.folder).expanduser()
    )
    with tqdm(file=sys.stderr, disable=not sys.stderr.isatty(), bar_format="{desc} {percentage:3.0f}% {bar}") as bar:

        def advance(title: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description_str(f"{title:24}", refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        hardware = measure(QUICK if options.quick else FULL, device, folder, name, surroundings, advance)
    if earlier is not None:
        hardware = hardware.held_against(earlier)
    write_hardware(output, hardware)
    print(f"written to {output}", file=sys.stderr)
    print(json.dumps(hardware.to_json()) if options.json else summary(hardware))
    return EXIT_OK


def _earlier(output: Path, is_ours: bool) -> Hardware | None:
    """What was measured before, to say how far the two are apart; None if there is nothing that can be read.

    Args:
        is_ours: nobody but this command has put the file there, so that it may be replaced whatever it is.
    """
    try:
        return read_hardware(output) if output.exists() else None
    except UsageError as error:
        if not is_ours:
            raise
        print(f"note: what is replaced cannot be compared with: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
