"""Sizes of 4-bit groups; what they hold is said in kernels/four_bits.py. Without torch, for plans and estimates."""

GROUP = 64  # values
LEVELS = 15  # steps between the lowest and the highest code
GROUP_BYTES = 4  # of scale and minimum


def groups_of(dim: int) -> int:
    """Groups of a vector of `dim` values."""
    return -(-dim // GROUP)


def entry_bytes(dim: int) -> int:
    """Bytes of a vector of `dim` values."""
    return -(-dim // 2) + GROUP_BYTES * groups_of(dim)
