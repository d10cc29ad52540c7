"""Attention in prefill, over the whole prompt, and in decode, over what the buffer kept."""

import math
from typing import cast

import torch
from torch import Tensor

from flexgen_h2o.kernels import decode
from flexgen_h2o.kvcache.buffer import KVBuffer, Padding
from flexgen_h2o.workspace import ALIGNMENT, Workspace

# Logits held at once in prefill: rows x heads x queries x n. Large enough for efficient products, small enough that
# memory grows with n and never with its square. On a CPU they should fit its caches; a GPU wants much work at a time.
PREFILL_LOGITS = 2**20
GPU_PREFILL_LOGITS = 2**25
# Sequences are taken apart before their queries are cut in chunks smaller than this.
LEAST_QUERIES = 64


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Padding, sum_attention: bool, workspace: Workspace
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a left-padded sub-batch, and what every column received; both in the workspace.

    Sequences and queries are taken in chunks, so memory is O(chunk x n).

    Args:
        query, key, value: [rows, heads, n, head_dim]; queries already scaled.
        padding: where the rows' real tokens begin.
        sum_attention: whether to sum the softmax weights by column (H2O's score after prefill).
    Returns: attention's output [rows, heads, n, head_dim], finite also for pads; and [rows, heads, n] float32, the
        sum over the row's real queries of the weight on each column, or None.
    """
    rows, heads, n, head_dim = query.shape
    # Laid out as the output projection wants it: a token's heads side by side.
    output = workspace.take((rows, n, heads, head_dim), value.dtype).transpose(1, 2)
    sums = workspace.take((rows, heads, n), torch.float32).zero_() if sum_attention else None
    rows_at_once, chunk = prefill_chunks(rows, heads, n, workspace.prefill_logits)
    first_columns = padding.on(query.device)
    for start in _walk(range(0, rows, rows_at_once), query):
        part = slice(start, start + rows_at_once)
        with workspace.frame():
            _attend_rows(
                query[part],
                key[part],
                value[part],
                first_columns[part],
                padding.widest,
                chunk,
                output[part],
                None if sums is None else sums[part],
                workspace,
            )
    return output, sums


def prefill_chunks(rows: int, heads: int, n: int, logits: int | None = None) -> tuple[int, int]:
    """How many sequences, and how many of their queries, prefill attends to at once."""
    limit = PREFILL_LOGITS if logits is None else logits
    rows_at_once = min(rows, max(1, limit // (heads * n * min(n, LEAST_QUERIES))))
    return rows_at_once, max(1, min(n, limit // (rows_at_once * heads * n)))


def _walk(starts: range, tensor: Tensor) -> range:
    """All starts; where tensors have no memory, the last stands for all."""
    return starts[-1:] if tensor.is_meta else starts


def prefill_attention_bytes(
    rows: int, heads: int, n: int, head_dim: int, itemsize: int, logits_at_once: int | None = None
) -> int:
    """What prefill_attention takes of the workspace at its most."""
    rows_at_once, chunk = prefill_chunks(rows, heads, n, logits_at_once)
    logits = rows_at_once * heads * chunk * n
    passing = 4 * rows_at_once * heads * n * head_dim * itemsize  # queries, keys, values, the chunk's output
    held = rows * heads * n * (head_dim * itemsize + 4)  # output and sums
    return held + passing + logits * (2 * itemsize + 8) + 10 * ALIGNMENT


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_columns: Tensor,
    widest_pad: int,
    chunk: int,
    output: Tensor,
    sums: Tensor | None,
    workspace: Workspace,
) -> None:
    """prefill_attention for some rows, `chunk` queries at a time; fills `output` and adds to `sums`."""
    rows, heads, n, head_dim = query.shape
    query, key, value = (_flat_heads(tensor, workspace) for tensor in (query, key, value))
    for start in _walk(range(0, n, chunk), query):
        stop = min(start + chunk, n)
        with workspace.frame():
            shape = (rows * heads, stop - start, stop)
            products = workspace.take(shape, query.dtype)
            torch.bmm(query[:, start:stop], key[:, :stop].transpose(1, 2), out=products)
            is_exact = products.dtype == torch.float32
            logits = products if is_exact else workspace.take(shape, torch.float32).copy_(products)
            _mask_chunk(logits.view(rows, heads, stop - start, stop), start, first_columns, widest_pad)
            weights = torch.softmax(logits, dim=-1, out=workspace.take(shape, torch.float32))
            rounded = weights if is_exact else products.copy_(weights)
            part = workspace.take((rows * heads, stop - start, head_dim), value.dtype)
            torch.bmm(rounded, value[:, :stop], out=part)
            output[:, :, start:stop] = part.view(rows, heads, stop - start, head_dim)
            if sums is None:
                continue
            weights = weights.view(rows, heads, stop - start, stop)
            if start < widest_pad:
                is_real = torch.arange(start, stop, device=query.device) >= first_columns[:, None]
                weights *= is_real[:, None, :, None]
            sums[:, :, :stop] += weights.sum(dim=2)


def _flat_heads(tensor: Tensor, workspace: Workspace) -> Tensor:
    """[rows, heads, n, head_dim] in any layout -> [rows * heads, n, head_dim], contiguous."""
    rows, heads, n, head_dim = tensor.shape
    copy = workspace.take((rows, heads, n, head_dim), tensor.dtype).copy_(tensor)
    return copy.view(rows * heads, n, head_dim)


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

    Adds the weights to the entries' scores where the buffer's rule accumulates, and notes who would be evicted next.

    Args:
        query: [rows, heads, 1, head_dim], already scaled.
        buffer: the unit's KV, the current token included.
    Returns: [rows, heads, 1, head_dim].
    """
    return cast(
        Tensor,
        decode.attend(
            query,
            *(buffer.heavy.keys, buffer.heavy.values, buffer.ring.keys, buffer.ring.values),
            *(buffer.scores, buffer.losers, buffer.heavy_len, buffer.ring_len),
            *(buffer.rule.accumulates, buffer.rule.decay),
        ),
    )
