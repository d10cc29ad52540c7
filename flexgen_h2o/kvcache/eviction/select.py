"""Choosing the entries with the highest scores."""

from torch import Tensor


def choose_heavy(scores: Tensor, heavy: int) -> Tensor:
    """Indices of the `heavy` highest scores, ties to the lower index, in ascending order, empty entries last.

    Args:
        scores: [rows, heads, n] float32; -inf marks an entry that does not exist.
        heavy: how many to choose; at most n.
    Returns: [rows, heads, heavy] int64.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :heavy]
    is_empty = scores.gather(-1, order).isneginf()
    place = order + is_empty * scores.shape[-1]
    return order.gather(-1, place.argsort(dim=-1))
