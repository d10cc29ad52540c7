"""scripts/limit.sh: a smaller machine for a command. Needs control groups that this process may change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

pytestmark = pytest.mark.xdist_group("control groups")
SCRIPT = ROOT / "scripts" / "limit.sh"
MB = 2**20


def limited(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, cwd=cwd, timeout=60)


def allocate(megabytes: int) -> list[str]:
    return [sys.executable, "-c", f"x = bytearray({megabytes} * 2**20); print('held')"]


def can_limit() -> bool:
    return limited("200M", "--", "true").returncode == 0


needs_groups = pytest.mark.skipif(not can_limit(), reason="control groups cannot be changed here")


@needs_groups
def test_what_fits_runs_and_its_peak_is_told() -> None:
    done = limited("300M", "--", *allocate(150))
    assert done.returncode == 0 and done.stdout == "held\n"
    peak = int(done.stderr.split("at most ")[1].split(" of 300 MB")[0])
    assert 150 <= peak <= 200


@needs_groups
def test_what_does_not_fit_is_killed_and_that_is_said() -> None:
    done = limited("200M", "--", *allocate(400))
    assert done.returncode == 137 and done.stdout == ""
    assert "killed 1 process" in done.stderr


@needs_groups
def test_the_page_cache_counts(tmp_path: Path) -> None:
    # Written inside: pages of a file belong to whoever touched them first.
    done = limited("64M", "--", "bash", "-c", f"head -c 100M /dev/zero > {tmp_path}/file && wc -c < {tmp_path}/file")
    assert done.returncode == 0 and done.stdout.strip() == str(100 * MB)  # the cache gives way
    peak = int(done.stderr.split("at most ")[1].split(" of 64 MB")[0])
    assert 30 <= peak <= 64


@needs_groups
def test_the_exit_code_and_standard_streams_are_the_commands() -> None:
    done = limited("100M", "--", "bash", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n") and done.stderr.startswith("err\n")


@needs_groups
def test_nothing_is_left_behind() -> None:
    before = set(Path("/sys/fs/cgroup").rglob("limit-*"))
    limited("100M", "--", "bash", "-c", "sleep 30 & exit 0")
    assert set(Path("/sys/fs/cgroup").rglob("limit-*")) == before


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "use: scripts/limit.sh"),
        (["100M"], "use: scripts/limit.sh"),
        (["0", "--", "true"], "'0' is no amount"),
        (["-5", "--", "true"], "-5 is no option"),
        (["1.5G", "--", "true"], "'1.5G' is no amount"),
        (["lots", "--", "true"], "'lots' is no amount"),
        (["1G", "--disk-read", "fast", "--", "true"], "'fast' is no amount"),
        (["1G", "2G", "--", "true"], "too many"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(words: list[str], part: str) -> None:
    done = limited(*words)
    assert done.returncode == 2 and part in done.stderr and len(done.stderr.splitlines()) == 1
