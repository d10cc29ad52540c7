"""`python -m flexgen_h2o.convert`: writes a model's weights as later runs want them, once."""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.settings import borrowed, setting
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import Flags, Parser
from flexgen_h2o.commands.settings_flags import add_flags, filled_from
from flexgen_h2o.plan.names import COMPUTING_DEVICES
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.run_settings import ModelChoice
from flexgen_h2o.plan.sampling import SamplingParams

DESCRIPTION = """Writes all of a model's weights where runs look for them, in the precision and layout of this machine,
so that no run has to convert or quantise them again. What is there already is not written again: after an interruption
the same command goes on."""
EPILOG = "exit codes: 0 done; 1 failed while writing; 2 unusable arguments, or no room; 130 interrupted."

if TYPE_CHECKING:
    from flexgen_h2o.weights.conversion import Conversion


@dataclass(frozen=True)
class ConvertOptions:
    """Which weights are written, and in which form."""

    model: str | None = borrowed(ModelChoice, "model", text="folder in Hugging Face format or name")
    path: str | None = borrowed(ModelChoice, "path")
    device: str = borrowed(
        ModelChoice, "device", text="auto, cuda or cpu: where runs will compute", known=COMPUTING_DEVICES
    )
    # A text, and no choice: setting_problems() knows precisions, and refuses what is none.
    dtype: str = borrowed(ModelChoice, "dtype", kind="text")
    compress_weight: bool = borrowed(Policy, "compress_weight", text="in 4-bit groups: true or false")
    dummy_weights: bool = borrowed(ModelChoice, "dummy_weights")
    seed: int = borrowed(SamplingParams, "seed", text="of the dummy weights")
    json: bool = setting(False, "given", "print what was done as one JSON object")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(prog="python -m flexgen_h2o.convert", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    add_flags(parser, [ConvertOptions])
    return parser


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found, before anything is written."""
    flags = Flags(build_parser().parse_args(argv))
    options: ConvertOptions = filled_from(flags, ConvertOptions)

    from flexgen_h2o.commands.progress import weights_bar
    from flexgen_h2o.machine.platform import setting_problems
    from flexgen_h2o.models.checkpoint import locate_model
    from flexgen_h2o.weights.conversion import Conversion

    flags.problems += setting_problems(options.device, options.dtype or "auto", {})
    try:
        source = locate_model(options.model, options.path, options.dummy_weights)
    except UsageError as error:
        flags.problems += error.problems
    if flags.problems:
        raise UsageError(flags.problems)
    conversion = Conversion(
        *(source, options.device, options.dtype or "auto", options.compress_weight),
        *(options.dummy_weights, options.seed),
    )
    with weights_bar(conversion.nbytes) as bar:
        conversion.run(bar.update)
    print(json.dumps(conversion.report()) if options.json else _summary(conversion))
    return EXIT_OK


def _summary(conversion: "Conversion") -> str:
    """What was done, for people."""
    from flexgen_h2o.basics.memory_sizes import gb

    report = conversion.report()
    return "\n".join(
        (
            f"{report['model']} in {report['dtype']}, layout {report['layout']}: {report['folder']}",
            f"{report['written']} of {report['parameters']} parameters written, the others were there already",
            f"bytes asked {gb(report['asked_bytes'])}, achieved {gb(report['achieved_bytes'])},"
            f" on disk {gb(report['disk_bytes'])}",
        )
    )


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
