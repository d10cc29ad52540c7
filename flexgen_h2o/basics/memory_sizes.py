"""Units of memory and of files. Without torch, which plans do not need."""

GB = 2**30  # bytes, everywhere
MOST_GB = 10**9  # that a budget may have
PAGE = 4096  # bytes; extents begin at whole pages
HUGE_PAGE = 2 * 2**20  # bytes; of x86-64, and of arm64 with small pages of 4096


def gb(count: float) -> str:
    """Bytes in GB of 2**30, for people."""
    return f"{count / GB:.2f} GB"


def whole_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def whole_huge_pages(nbytes: int) -> int:
    """Bytes rounded up to whole huge pages, unless that added a third or more.

    So large is a buffer in host memory that files are read into. Measured on a virtual disk, with requests of 1.6 MB:
    3.7 GB/s into huge pages, 1.4 GB/s into scattered small ones.
    """
    rounded = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    return rounded if 3 * rounded < 4 * nbytes else nbytes
