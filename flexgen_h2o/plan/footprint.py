"""What compute holds in passing, in bytes, and how work is cut so that it stays small.

The ledger of a run (engine/assemble.py) and the plans of the policy search (search/sizes.py) count by these formulas;
what a caller knows better, such as the padding of a workspace, it adds.
"""

from collections.abc import Iterable

from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import LINKS

# Of each of a link's two pinned buffers, beside a GPU; and of all of them.
STAGING_BYTES = 16 * 2**20
STAGED_BYTES = 2 * STAGING_BYTES * len(LINKS)
# Logits held at once in prefill: rows x heads x queries x n. Large enough for efficient products, small enough that
# memory grows with n and never with its square. On a CPU they should fit its caches; a GPU wants much work at a time.
PREFILL_LOGITS = 2**20
GPU_PREFILL_LOGITS = 2**25
# Sequences and heads are taken apart before their queries are cut in chunks smaller than this.
LEAST_QUERIES = 64
# Elements of KV: what quantising them makes in passing, so many bytes each, stays in the caches.
QUANTISED_AT_ONCE = 2**20
QUANTISING_BYTES = 20
# Of 4-bit weights that are restored at once: on a CPU few, so that they stay in the caches; on a GPU enough to keep it
# busy.
DECODED_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
# Where a CPU restores panels of them (kernels/matrices/quantised_panels.py): so many bytes, in whole panels, which
# are read again while they are in the caches; but at least so many outputs, since x is read anew for each part.
RESTORED_BYTES = 4 * 2**20
RESTORED_OUTPUTS = 512
PANEL_OUTPUTS = 64
# A product's result in panels is allocated anew and then copied to where it belongs; so many bytes stay in the caches.
RESULT_BYTES = 8 * 2**20


def prefill_chunks(rows: int, heads: int, n: int, limit: int) -> tuple[int, int, int]:
    """How many sequences, how many of their heads, and how many queries of those prefill attends to at once.

    Args:
        limit: logits held at once.
    """
    pairs = max(1, limit // (n * min(n, LEAST_QUERIES)))
    rows_at_once = min(rows, max(1, pairs // heads))
    heads_at_once = min(heads, pairs)
    return rows_at_once, heads_at_once, max(1, min(n, limit // (rows_at_once * heads_at_once * n)))


def prefill_attention_bytes(rows: int, heads: int, n: int, head_dim: int, itemsize: int, limit: int) -> int:
    """What attention of a sub-batch takes in prefill: O(chunk x n)."""
    rows_at_once, heads_at_once, queries = prefill_chunks(rows, heads, n, limit)
    pairs = rows_at_once * heads_at_once
    passing = 2 * pairs * (n + queries) * head_dim * itemsize  # keys, values; queries, the chunk's output
    held = rows * heads * n * (head_dim * itemsize + 4)  # output and sums
    return held + passing + pairs * queries * n * (itemsize + 8)


def workspace_needs(
    config: ModelShape, itemsize: int, prefill_tokens: int, group_rows: float, attention_bytes: int
) -> tuple[float, ...]:
    """What takes a workspace, one after the other: a layer of prefill and of decode, then the choice of tokens.

    In a layer, for each token: a norm, queries, keys and values until attention ends; then also attention's output, its
    projection, a norm and the MLP. Each is linear in the rows of a decode group.

    Args:
        attention_bytes: of prefill, as prefill_attention_bytes() says.
    """
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    needs: list[float] = []
    for tokens in (prefill_tokens, group_rows):
        norm = tokens * (hidden * itemsize + 8)
        held = norm + tokens * config.qkv_size * itemsize
        attended = tokens * (queries * itemsize + 4 * config.num_key_value_heads)
        rest = norm * config.norms_held + tokens * (config.intermediate_size + 2 * hidden) * itemsize
        needs += [held + attention_bytes, held + attended + rest]
    return *needs, group_rows * (hidden * itemsize + 8 + config.vocab_size * (itemsize + 4))


def passing_bytes(
    config: ModelShape,
    itemsize: int,
    rows: int,
    prompt_len: int,
    slots: tuple[int, int],
    product_bytes: float,
    travelling: int,
    quantises: bool,
) -> float:
    """What compute allocates and frees beside the workspace: hidden states that come and go, and what fills the KV.

    Args:
        rows: of a sub-batch.
        slots: heavy and recent.
        product_bytes: what products take beside their outputs.
        travelling: hidden states of sub-batches that are on their way to or from their home at once.
        quantises: KV is kept in 4 bits.
    """
    hidden = rows * prompt_len * config.hidden_size * itemsize
    normalised = hidden  # torch's layer normalisation makes its output twice
    keys = config.num_key_value_heads * config.head_dim  # elements of a token's keys
    kept = 2 * rows * keys * sum(slots) * itemsize
    if quantises:
        row = keys * max(slots)
        kept += max(row, min(rows * row, QUANTISED_AT_ONCE)) * QUANTISING_BYTES
    scores = 4 * rows * config.num_key_value_heads * max(prompt_len, sum(slots)) * 4
    activation = 0 if config.activates_in_place else rows * prompt_len * config.intermediate_size * itemsize
    return (1 + travelling) * hidden + max(normalised, kept + scores, activation, product_bytes)


def restored_bytes(shapes: Iterable[tuple[int, int]], itemsize: int) -> int:
    """The largest part of matrices [out, in] in 4 bits that is restored at once on a CPU."""
    largest = 0
    for out, inputs in shapes:
        outputs = min(out, restored_outputs(PANEL_OUTPUTS * inputs * itemsize))
        largest = max(largest, outputs * inputs * itemsize)
    return largest


def restored_outputs(panel_bytes: int) -> int:
    """How many outputs of a matrix in 4 bits are restored at once on a CPU, whose panels have so many bytes."""
    return max(RESTORED_OUTPUTS, PANEL_OUTPUTS * (RESTORED_BYTES // panel_bytes))


def host_passing_bytes(rows: int, heads: int, head_dim: int, slots: int, itemsize: int) -> int:
    """What the CPU needs to attend to a unit, or to repeat a step on one, beside a GPU."""
    passing = rows * heads * 4 * head_dim * itemsize  # queries, keys, values, output
    return passing + rows * heads * slots * (12 + itemsize)  # scores, logits, weights twice
