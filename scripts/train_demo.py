"""Trains a small OPT model such as the one that ships: python scripts/train_demo.py --corpus TEXTS --out FOLDER

TEXTS is a folder of .txt files; the sources of the shipped model's are in flexgen_h2o/demo/heldout/SOURCES.md. FOLDER
gets `model/` in Hugging Face format (float16) and `heldout/`, the last 6 % of every text, which is not trained on, as
flexgen_h2o/demo has them; `training.jsonl`, the log; and `training.pt`, from which the same command goes on after an
interruption. The same command makes the same model on the same machine.

On a CPU the shape and the recipe are those of the shipped model (4.3 M parameters), with induction heads built in by
hand, whose attention sinks come by themselves: about an hour on two cores. With --device cuda the model is larger
(24 M), begins at random, and is trained for as many steps as --minutes allow.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_training.corpus import Corpus, read_corpus
from demo_training.documents import Mix
from demo_training.loop import Recipe, Training, append_line
from demo_training.model import Shape, save_model

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import Flags, Parser
from flexgen_h2o.machine.environment import environment

SMALL = Recipe(
    shape=Shape(layers=4, hidden=256, heads=8, context=512, vocab=4096),
    steps=6000,
    minutes=60.0,
    batch=8,
    matrix_rate=0.005,
    other_rate=0.001,
    hold=0.3,
    mix=Mix(recall=0.26, copy=0.07),
    circuits=True,
    seed=1,
)
LARGE = replace(
    SMALL,
    shape=Shape(layers=6, hidden=512, heads=8, context=1024, vocab=8192),
    steps=None,
    minutes=5.0,
    batch=64,
    matrix_rate=0.01,
    other_rate=0.002,
    circuits=False,
)
WORKERS = 6  # processes that make documents for a GPU


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--corpus", required=True, metavar="FOLDER", help="text files (.txt, UTF-8) to train on")
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="where the model goes, and what is needed to go on"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cpu)")
    parser.add_argument("--steps", help=f"of training (default: {SMALL.steps} on a CPU; on a GPU by --minutes)")
    parser.add_argument(
        "--minutes", help=f"as many steps as take so long, in place of --steps (GPU: {LARGE.minutes:g})"
    )
    parser.add_argument(
        "--circuits",
        action=argparse.BooleanOptionalAction,
        help="begin with induction heads that are built in by hand (default: on a CPU)",
    )
    parser.add_argument("--seed", help="of weights and documents (default: 1)")
    parser.add_argument("--batch", help="documents of a step")
    for name in ("layers", "hidden", "heads", "context", "vocab"):
        parser.add_argument(f"--{name}", help="size of the model, in place of the recipe's")
    parser.add_argument("--log-every", help="steps between two lines of the log (default: 50)")
    parser.add_argument("--save-minutes", help="minutes between two saves (default: 4)")
    return parser


def main(argv: list[str]) -> int:
    """Trains, and writes the model. Raises UsageError with every mistake found."""
    args = build_parser().parse_args(argv)
    flags = Flags(args)
    device = torch.device(flags.choice("--device", ("cpu", "cuda"), "cpu"))
    recipe = read_recipe(flags, args, SMALL if device.type == "cpu" else LARGE)
    log_every = flags.whole("--log-every", 1) or 50
    save_minutes = flags.real("--save-minutes", 0.0)
    if device.type == "cuda" and not torch.cuda.is_available():
        flags.problems.append("--device cuda: there is no GPU that can be used; use --device cpu")
    if flags.problems:
        raise UsageError(flags.problems)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(Path(args.corpus), recipe.shape.vocab)
    check_sizes(corpus, recipe.shape)
    training = Training(recipe, corpus, device, out, WORKERS if device.type == "cuda" else 0)
    if training.step:
        print(f"going on after step {training.step}", file=sys.stderr)
    else:
        append_line(out / "training.jsonl", {"parameters": training.model.num_parameters(), **environment()})

    def tell(line: dict[str, Any]) -> None:
        append_line(out / "training.jsonl", line)
        print("  ".join(f"{key} {value:.4g}" for key, value in line.items() if value is not None), flush=True)

    training.run(tell, log_every, 60 * (4.0 if save_minutes is None else save_minutes))
    (out / "model").mkdir(exist_ok=True)
    save_model(training.model, corpus.tokenizer, out / "model")
    save_held_out(corpus, out / "heldout")
    return EXIT_OK


def read_recipe(flags: Flags, args: argparse.Namespace, recipe: Recipe) -> Recipe:
    """The recipe with what the flags change in it."""
    sizes = {name: flags.whole(f"--{name}", 1) for name in ("layers", "hidden", "heads", "context", "vocab")}
    shape = replace(recipe.shape, **{name: size for name, size in sizes.items() if size is not None})
    if shape.hidden % shape.heads:
        flags.problems.append(f"--hidden {shape.hidden} is no multiple of --heads {shape.heads}; change one of them")
    steps, minutes = flags.whole("--steps", 1), flags.real("--minutes", 0.01)
    if steps is not None and minutes is not None:
        flags.problems.append("--steps and --minutes both say how long to train; leave one of them out")
    circuits = recipe.circuits if args.circuits is None else args.circuits
    if circuits and (shape.layers < 2 or shape.heads < 8):
        flags.problems.append(
            f"--circuits takes 2 layers of 8 heads or more, and the model has {shape.layers} of {shape.heads};"
            " use --no-circuits"
        )
    return replace(
        recipe,
        shape=shape,
        steps=recipe.steps if steps is None and minutes is None else steps,
        minutes=recipe.minutes if minutes is None else minutes,
        batch=flags.whole("--batch", 1) or recipe.batch,
        circuits=circuits,
        seed=recipe.seed if (seed := flags.whole("--seed", 0)) is None else seed,
    )


def check_sizes(corpus: Corpus, shape: Shape) -> None:
    """Raises UsageError if there is too little text for the model."""
    least = 2 * shape.context + 400  # a window, or a passage and where it may begin
    if min(len(corpus.train), len(corpus.held_out)) < least:
        raise UsageError(
            f"--corpus has {len(corpus.train)} tokens to train on and {len(corpus.held_out)} to hold out; each must be"
            f" at least {least} for --context {shape.context}"
        )
    found = corpus.tokenizer.get_vocab_size()
    if found < shape.vocab:
        raise UsageError(
            f"--corpus gives a vocabulary of {found} tokens, and --vocab is {shape.vocab}; make it smaller"
        )


def save_held_out(corpus: Corpus, folder: Path) -> None:
    """The held-out text, as text and as token ids."""
    folder.mkdir(exist_ok=True)
    for name, text in corpus.held_out_texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    np.save(folder / "tokens.npy", corpus.held_out.astype(np.uint16))


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
