"""How much of each thing is measured: in full, or quickly at the start of a run that has no hardware file."""

from dataclasses import dataclass

MB = 2**20


@dataclass(frozen=True)
class Settings:
    """Sizes of a measurement.

    Attributes:
        trials: of every rate; each in another pass over all subjects. A first pass is discarded.
        least_s: work shorter than this is repeated until it takes this long.
        rows: of products.
        all_dtypes: products and attention in every precision that is not emulated; else in the device's default alone.
        weight_shape: of one weight, [out, in]. weight_bytes: of all of them in a precision: more than any cache holds.
        steps: of decode. prompt_lens: of prefill. tokens: of a sub-batch there.
        head_dims: of attention. kv_bytes: of its keys and values. slots: of its buffer.
        memory_bytes: read in one trial; half of them are copied to the other half. new_bytes: written in one.
        file_bytes: of the test file, all of which is read or written in one trial. passing_bytes: of the memory that
            they pass through.
        in_flight: numbers of requests in flight that are tried.
        buffered: whether the page cache is measured too.
        link_bytes: copied between host and GPU in one trial.
        split_s: how long products run beside a stream, in one trial; 0 to leave the split of threads unmeasured.
    """

    trials: int
    least_s: float
    rows: tuple[int, ...]
    all_dtypes: bool
    weight_shape: tuple[int, int]
    weight_bytes: int
    steps: int
    prompt_lens: tuple[int, ...]
    tokens: int
    head_dims: tuple[int, ...]
    kv_bytes: int
    slots: int
    memory_bytes: int
    new_bytes: int
    file_bytes: int
    passing_bytes: int
    in_flight: tuple[int, ...]
    buffered: bool
    link_bytes: int
    split_s: float


# The weight is fc2 of OPT-1.3b: of so many inputs that a product is arithmetic and reading the weight, and its result
# next to nothing. What results cost is part of what a layer takes beside its products.
FULL = Settings(
    trials=9,
    least_s=0.1,
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    all_dtypes=True,
    weight_shape=(2048, 8192),
    weight_bytes=256 * MB,
    steps=16,
    prompt_lens=(64, 256, 1024),
    tokens=2048,
    head_dims=(64, 128),
    kv_bytes=256 * MB,
    slots=512,
    memory_bytes=1024 * MB,
    new_bytes=32 * MB,
    file_bytes=1024 * MB,
    passing_bytes=256 * MB,
    in_flight=(1, 2, 4),
    buffered=True,
    link_bytes=256 * MB,
    split_s=0.3,
)
QUICK = Settings(
    trials=5,
    least_s=0.05,
    rows=(1, 8, 32, 128, 512, 2048),
    all_dtypes=False,
    weight_shape=(2048, 8192),
    weight_bytes=256 * MB,
    steps=8,
    prompt_lens=(64, 512),
    tokens=1024,
    head_dims=(64, 128),
    kv_bytes=128 * MB,
    slots=512,
    memory_bytes=512 * MB,
    new_bytes=32 * MB,
    file_bytes=256 * MB,
    passing_bytes=128 * MB,
    in_flight=(2,),
    buffered=False,
    link_bytes=128 * MB,
    split_s=0,
)
