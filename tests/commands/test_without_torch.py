"""What needs no torch does not load it: help, and refusals of what is wrong with flags."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import ROOT, environment

SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
finally:
    print("loaded:", *{"torch", "transformers", "matplotlib"}.intersection(sys.modules), file=sys.stderr)
"""
HELPS = [
    "flexgen_h2o.run",
    "flexgen_h2o.policy_search",
    "flexgen_h2o.profile_hardware",
    "flexgen_h2o.convert",
    "flexgen_h2o.demo",
    "flexgen_h2o.evaluate",
    "flexgen_h2o.evaluate compare",
    "flexgen_h2o.evaluate analyse",
    "flexgen_h2o.evaluate tasks",
    "flexgen_h2o.bench",
    "flexgen_h2o.bench attention",
    "flexgen_h2o.bench sweep",
]


def ended(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, which says last what it has loaded."""
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", HELPS)
def test_help_loads_no_torch(words: str) -> None:
    code, out, err = ended(*words.split(), "--help")
    assert code == 0 and out.startswith("usage:") and err.splitlines()[-1] == "loaded:", err


@pytest.mark.parametrize(
    "argv",
    [
        "--gen-len 0",
        "--misspelt",
        "--percent 60 60 0 0 0 0",
        "--top-p 2 --do-sample",
        "--input nowhere.jsonl --policy nowhere.json",
        "--eviction lru",
        "--eviction sink --hh-ratio 0.1",
        "--eviction full:decay=1",
        "--eviction h2o:decay=2",
        "--eviction local --recent-size 0",
    ],
)
def test_a_mistake_in_flags_of_run_is_told_without_torch(argv: str) -> None:
    code, out, err = ended("flexgen_h2o.run", *argv.split())
    assert code == 2 and out == "" and err.startswith("error: ")
    assert err.splitlines()[-1] == "loaded:", err


def test_what_is_loaded_would_be_seen() -> None:
    code, _, err = ended("flexgen_h2o.convert", "--model", "/nowhere")
    assert code == 2 and "torch" in err.splitlines()[-1].split()
