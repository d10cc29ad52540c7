"""`python -m flexgen_h2o.convert`: writes a model's weights as later runs want them, once."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.command import EXIT_OK, Flags, Parser, run_command

DESCRIPTION = """Writes all of a model's weights where runs look for them, in the precision and layout of this machine,
so that no run has to convert or quantise them again. What is there already is not written again: after an interruption
the same command goes on."""
EPILOG = "exit codes: 0 done; 1 failed while writing; 2 unusable arguments, or no room; 130 interrupted."

if TYPE_CHECKING:
    from flexgen_h2o.weights.conversion import Conversion


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(prog="python -m flexgen_h2o.convert", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--model", help="folder in Hugging Face format or name (default: the demo model)")
    parser.add_argument("--path", help="folder in which a named model is looked for first")
    parser.add_argument("--device", help="auto, cuda or cpu: where runs will compute (default: auto)")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument(
        "--compress-weight", nargs="?", const="true", help="in 4-bit groups: true or false (default: false)"
    )
    parser.add_argument("--dummy-weights", action="store_true", help="random weights: for measuring speed")
    parser.add_argument("--seed", help="of the dummy weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command. Raises UsageError with every mistake found, before anything is written."""
    args = build_parser().parse_args(argv)
    flags = Flags(args)
    device = flags.choice("--device", ("auto", "cuda", "cpu"), "auto")
    compressed = flags.switch("--compress-weight", False)
    seed = flags.whole("--seed", 0)

    from flexgen_h2o.commands.progress import weights_bar
    from flexgen_h2o.machine.platform import setting_problems
    from flexgen_h2o.models.checkpoint import locate_model
    from flexgen_h2o.weights.conversion import Conversion

    flags.problems += setting_problems(device, args.dtype or "auto", {})
    try:
        source = locate_model(args.model, args.path, args.dummy_weights)
    except UsageError as error:
        flags.problems += error.problems
    if flags.problems:
        raise UsageError(flags.problems)
    conversion = Conversion(source, device, args.dtype or "auto", compressed, args.dummy_weights, seed or 0)
    with weights_bar(conversion.nbytes) as bar:
        conversion.run(bar.update)
    print(json.dumps(conversion.report()) if args.json else _summary(conversion))
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
