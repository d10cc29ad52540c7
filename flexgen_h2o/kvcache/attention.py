"""Attention in prefill, over the whole prompt, and in decode, over what the buffer kept."""

import math

import torch
from torch import Tensor

from flexgen_h2o.kvcache.buffer import KVBuffer, Padding

# Logits held at once in prefill: rows x heads x queries x n. Large enough for efficient products, small enough that
# memory grows with n and never with its square.
PREFILL_LOGITS = 1024 * 1024
# Sequences are taken apart before their queries are cut in chunks smaller than this.
LEAST_QUERIES = 64


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Padding, sum_attention: bool
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a left-padded sub-batch, and what every column received.

    Sequences and queries are taken in chunks, so memory is O(chunk x n).

    Args:
        query, key, value: [rows, heads, n, head_dim]; queries already scaled.
        padding: where the rows' real tokens begin.
        sum_attention: whether to sum the softmax weights by column (H2O's score after prefill).
    Returns: attention's output [rows, heads, n, head_dim], finite also for pads; and [rows, heads, n] float32, the
        sum over the row's real queries of the weight on each column, or None.
    """
    rows, heads, n, _ = query.shape
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    sums = torch.zeros(rows, heads, n, device=query.device) if sum_attention else None
    first_columns = padding.on(query.device)
    # Tensors without memory need no chunks.
    limit = rows * heads * n * n if query.is_meta else PREFILL_LOGITS
    rows_at_once = min(rows, max(1, limit // (heads * n * min(n, LEAST_QUERIES))))
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        _attend_rows(
            query[part],
            key[part].contiguous(),
            value[part].contiguous(),
            first_columns[part],
            padding.widest,
            max(1, min(n, limit // (rows_at_once * heads * n))),
            output[part],
            None if sums is None else sums[part],
        )
    return output, sums


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_columns: Tensor,
    widest_pad: int,
    chunk: int,
    output: Tensor,
    sums: Tensor | None,
) -> None:
    """prefill_attention for some rows, `chunk` queries at a time; fills `output` and adds to `sums`."""
    n = query.shape[2]
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        logits = (query[:, :, start:stop] @ key[:, :, :stop].transpose(2, 3)).float()
        _mask_chunk(logits, start, first_columns, widest_pad)
        weights = logits.softmax(dim=-1)  # [rows, heads, stop - start, stop]
        output[:, :, start:stop] = weights.to(value.dtype) @ value[:, :, :stop]
        if sums is None:
            continue
        if start < widest_pad:
            is_real = torch.arange(start, stop, device=query.device) >= first_columns[:, None]
            weights = weights * is_real[:, None, :, None]
        sums[:, :, :stop] += weights.sum(dim=2)


def _mask_chunk(logits: Tensor, start: int, first_columns: Tensor, widest_pad: int) -> None:
    """Masks future keys and pad keys, in place. A pad query keeps itself, lest its softmax be NaN.

    Args:
        logits: [rows, heads, queries, keys]; query i stands at column start + i, and keys end at the last query.
    """
    queries, keys = logits.shape[2:]
    device = logits.device
    future = torch.ones(queries, queries, dtype=torch.bool, device=device).triu(1)
    logits[..., start:].masked_fill_(future, -math.inf)
    pads = min(widest_pad, keys)
    if pads:
        columns = torch.arange(pads, device=device)
        is_pad = columns < first_columns[:, None]  # [rows, pads]
        is_self = columns == torch.arange(start, start + queries, device=device)[:, None]  # [queries, pads]
        logits[..., :pads].masked_fill_((is_pad[:, None] & ~is_self)[:, None], -math.inf)


def decode_attention(query: Tensor, buffer: KVBuffer) -> Tensor:
    """Attention of each row's current token to the live entries, with one softmax over both regions.

    Adds the weights to the entries' scores where the buffer's rule accumulates.

    Args:
        query: [rows, heads, 1, head_dim], already scaled.
        buffer: the unit's KV, the current token included.
    Returns: [rows, heads, 1, head_dim].
    """
    regions = [(buffer.ring, buffer.ring_len)]
    if buffer.heavy_len:
        regions.insert(0, (buffer.heavy, buffer.heavy_len))
    live = [region.live(length) for region, length in regions]
    logits = torch.cat([_dot_keys(query, keys) for keys, _ in live], dim=-1).float()
    logits.masked_fill_(buffer.live_scores().isneginf(), -math.inf)
    weights = logits.softmax(dim=-1)  # [rows, heads, live slots]
    if buffer.rule.accumulates:
        buffer.accumulate(weights)
    parts = weights.to(query.dtype).split([length for _, length in regions], dim=-1)
    output = _weigh_values(parts[0], live[0][1])
    for part, (_, values) in zip(parts[1:], live[1:], strict=True):
        output = output + _weigh_values(part, values)
    return output


def _dot_keys(query: Tensor, keys: Tensor) -> Tensor:
    """[rows, heads, 1, head_dim] . [rows, heads, slots, head_dim] -> [rows, heads, slots].

    Keys times query and not the other way round: the matrix is then read in the order in which it lies.
    """
    rows, heads, slots, head_dim = keys.shape
    vectors = query.reshape(rows * heads, head_dim, 1)
    return torch.bmm(keys.reshape(rows * heads, slots, head_dim), vectors).view(rows, heads, slots)


def _weigh_values(weights: Tensor, values: Tensor) -> Tensor:
    """[rows, heads, slots] . [rows, heads, slots, head_dim] -> [rows, heads, 1, head_dim]."""
    rows, heads, slots, head_dim = values.shape
    flat = weights.reshape(rows * heads, 1, slots)
    return torch.bmm(flat, values.reshape(rows * heads, slots, head_dim)).view(rows, heads, 1, head_dim)
