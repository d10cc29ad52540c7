"""Progress bars on standard error, where that is a terminal."""

import sys

from tqdm import tqdm


def weights_bar(nbytes: int) -> "tqdm[None]":
    """A bar for so many bytes of weights."""
    return tqdm(
        total=nbytes, unit="B", unit_scale=True, desc="weights", file=sys.stderr, disable=not sys.stderr.isatty()
    )
