"""Attention in prefill, over the whole prompt. That of decode is in kernels/decode.py."""

import math

import torch
from torch import Tensor

from flexgen_h2o.kvcache.padding import Padding
from flexgen_h2o.memory.workspace import ALIGNMENT, Workspace
from flexgen_h2o.plan import footprint
from flexgen_h2o.plan.footprint import PREFILL_LOGITS

# Queries attend to a prefix of the keys, which ends at one of so many columns at most. oneDNN makes code for every
# shape that it meets, and keeps it: with a shape for every chunk, a long prompt's took 3 GB.
PREFIXES = 16


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Padding,
    sum_attention: bool,
    workspace: Workspace,
    query_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a left-padded sub-batch, and what every column received; both in the workspace.

    Sequences, heads and queries are taken in chunks, so memory is O(chunk x n).

    Args:
        query: [rows, n, heads, query heads that share a key head, head_dim], already scaled.
        key, value: [rows, heads, n, head_dim].
        padding: where the rows' real tokens begin.
        sum_attention: whether to sum the softmax weights by column (H2O's score after prefill).
        query_weights: [n] float32, how much each column counts in the sums as a query; None if all count alike.
    Returns: attention's output, of the shape of the queries, finite also for pads; and [rows, heads, n] float32, the
        sum over the row's real queries of the weight on each column, or None.
    """
    rows, heads, n, head_dim = key.shape
    if query.shape[3] != 1:
        raise NotImplementedError("query heads that share a key head")
    # Laid out as the output projection wants it: a token's heads side by side.
    output_by_token = workspace.take(tuple(query.shape), value.dtype)
    query, output = (tensor.flatten(2, 3).transpose(1, 2) for tensor in (query, output_by_token))
    sums = workspace.take((rows, heads, n), torch.float32).zero_() if sum_attention else None
    rows_at_once, heads_at_once, queries = prefill_chunks(rows, heads, n, workspace.prefill_logits)
    first_columns = padding.on(query.device)
    counts = _query_counts(n, first_columns, query_weights) if sum_attention else first_columns
    for row in _walk(range(0, rows, rows_at_once), query):
        for head in _walk(range(0, heads, heads_at_once), query):
            part = (slice(row, row + rows_at_once), slice(head, head + heads_at_once))
            _attend_part(
                query[part],
                key[part],
                value[part],
                first_columns[part[0]],
                padding.widest,
                counts[part[0]],
                queries,
                output[part],
                None if sums is None else sums[part],
                workspace,
            )
    return output_by_token, sums


def prefill_chunks(rows: int, heads: int, n: int, logits: int | None = None) -> tuple[int, int, int]:
    """How many sequences, how many of their heads, and how many queries of those prefill attends to at once."""
    return footprint.prefill_chunks(rows, heads, n, PREFILL_LOGITS if logits is None else logits)


def _walk(starts: range, tensor: Tensor) -> range:
    """All starts; where tensors have no memory, the last stands for all."""
    return starts[-1:] if tensor.is_meta else starts


def prefill_attention_bytes(
    rows: int, heads: int, n: int, head_dim: int, itemsize: int, logits_at_once: int | None = None
) -> int:
    """What prefill_attention takes of the workspace at its most."""
    limit = PREFILL_LOGITS if logits_at_once is None else logits_at_once
    return footprint.prefill_attention_bytes(rows, heads, n, head_dim, itemsize, limit) + 10 * ALIGNMENT


def _attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_columns: Tensor,
    widest_pad: int,
    counts: Tensor,
    queries: int,
    output: Tensor,
    sums: Tensor | None,
    workspace: Workspace,
) -> None:
    """prefill_attention for some rows and heads, `queries` at a time; fills `output` and adds to `sums`."""
    n = query.shape[2]
    # As many columns as there are chunks of queries between the ends of two prefixes.
    step = -(-n // (PREFIXES * queries)) * queries
    for first in _walk(range(0, n, step), query):
        stop = min(first + step, n)
        with workspace.frame():
            # Contiguous: oneDNN would copy them for every product, and transposed ones slowly.
            keys, values = (_copy(tensor[:, :, :stop], workspace) for tensor in (key, value))
            for start in _walk(range(first, stop, queries), query):
                chunk = slice(start, min(start + queries, stop))
                with workspace.frame():
                    _attend_chunk(
                        query[:, :, chunk],
                        keys,
                        values,
                        start,
                        first_columns,
                        widest_pad,
                        counts,
                        output[:, :, chunk],
                        None if sums is None else sums[:, :, :stop],
                        workspace,
                    )


def _attend_chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    first_columns: Tensor,
    widest_pad: int,
    counts: Tensor,
    output: Tensor,
    sums: Tensor | None,
    workspace: Workspace,
) -> None:
    """Attention of queries [rows, heads, queries, head_dim], the first at column `start`, to keys that end after them.

    Args:
        keys, values: [rows, heads, keys, head_dim], contiguous.
        counts: [rows, n], how much each column counts as a query; not read without sums.
        output: [rows, heads, queries, head_dim], filled. sums: [rows, heads, keys], added to.
    """
    rows, heads, queries, head_dim = query.shape
    pairs, columns = rows * heads, keys.shape[2]
    shape = (pairs, queries, columns)
    products = workspace.take(shape, query.dtype)
    flat_keys, flat_values = (tensor.view(pairs, columns, head_dim) for tensor in (keys, values))
    torch.bmm(_copy(query, workspace).view(pairs, queries, head_dim), flat_keys.transpose(1, 2), out=products)
    is_exact = products.dtype == torch.float32
    logits = products if is_exact else workspace.take(shape, torch.float32).copy_(products)
    _mask_chunk(logits.view(rows, heads, queries, columns), start, first_columns, widest_pad)
    weights = torch.softmax(logits, dim=-1, out=workspace.take(shape, torch.float32))
    rounded = weights if is_exact else products.copy_(weights)
    part = workspace.take((pairs, queries, head_dim), values.dtype)
    torch.bmm(rounded, flat_values, out=part)
    output.copy_(part.view(output.shape))
    if sums is not None:
        # Weights are still in the caches. A row of counts adds up what every column has received.
        chunk_counts = counts[:, None, start : start + queries].expand(rows, heads, queries)
        sums.view(pairs, 1, columns).baddbmm_(chunk_counts.reshape(pairs, 1, queries), weights)


def _query_counts(n: int, first_columns: Tensor, query_weights: Tensor | None) -> Tensor:
    """How much each column counts as a query in the sums: [rows, n] float32, 0 for pads."""
    is_real = (torch.arange(n, device=first_columns.device) >= first_columns[:, None]).float()
    return is_real if query_weights is None else is_real.mul_(query_weights.to(first_columns.device))


def _copy(tensor: Tensor, workspace: Workspace) -> Tensor:
    """A contiguous copy in the workspace."""
    return workspace.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _mask_chunk(logits: Tensor, start: int, first_columns: Tensor, widest_pad: int) -> None:
    """Masks future keys and pad keys, in place. A pad query keeps itself, lest its softmax be NaN.

    Args:
        logits: [rows, heads, queries, keys]; query i stands at column start + i, and keys begin at column 0.
    """
    queries, keys = logits.shape[2:]
    device = logits.device
    future = torch.ones(queries, keys - start, dtype=torch.bool, device=device).triu(1)
    logits[..., start:].masked_fill_(future, -math.inf)
    pads = min(widest_pad, keys)
    if pads:
        columns = torch.arange(pads, device=device)
        is_pad = columns < first_columns[:, None]  # [rows, pads]
        is_self = columns == torch.arange(start, start + queries, device=device)[:, None]  # [queries, pads]
        logits[..., :pads].masked_fill_((is_pad[:, None] & ~is_self)[:, None], -math.inf)
