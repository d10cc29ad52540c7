"""Where benchmarks keep what they make: checkpoints, compiled ops, files of a run."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CACHE = Path("~/.cache/flexgen_h2o/bench").expanduser()
OFFLOAD = CACHE / "offload"
