"""Names that rooms share: precisions, devices, links, lanes, lines of the ledger."""

from typing import Literal, get_args

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
DTYPES = tuple(ITEMSIZES)

COMPUTING = ("cpu", "cuda")  # devices
COMPUTING_DEVICES = ("auto", "cuda", "cpu")  # as flags name them
DEVICES = (*COMPUTING_DEVICES, "meta")  # the last computes nothing

# Directions in which bytes move; "host" is what the CPU computes beside a GPU.
Link = Literal["h2d", "d2h", "disk_read", "disk_write", "host"]
LINKS: tuple[Link, ...] = get_args(Link)
MOVES: tuple[Link, ...] = ("disk_read", "disk_write", "h2d", "d2h")
COMPUTE = "compute"
LANES = (COMPUTE, *MOVES)  # what a report says of


class Line:
    """Lines of the ledger, and of plans."""

    BASELINE = "process baseline"
    WEIGHTS = "weights"
    READ_BUFFERS = "weight read buffers"
    DECODING = "weights being decoded"
    KV_CACHE = "KV cache"
    WORKING_BUFFERS = "KV working buffers"
    HIDDEN_STATES = "hidden states"
    WORKSPACE = "workspace"
    TEMPORARIES = "temporaries"
    STAGING = "pinned staging"
