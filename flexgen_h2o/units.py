"""Units of memory and of files. Without torch, which plans do not need."""

GB = 2**30  # bytes, everywhere
PAGE = 4096  # bytes; extents begin at whole pages


def whole_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
