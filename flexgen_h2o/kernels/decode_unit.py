"""What decode attention, and the entry of a token, work on."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class DecodeUnit:
    """One layer's KV of some rows. `heads` are those of keys.

    Attributes:
        heavy_keys, heavy_values: [rows, heads, heavy slots, head_dim]; the first `heavy_len` are live. In 4 bits
            (uint8) they are the entries of four_bits.encode(), [rows, heads, heavy slots, entry bytes].
        ring_keys, ring_values: the same of the ring; the first `ring_len` are live.
        scores: [rows, heads, heavy + ring slots] float32, -inf where a slot is empty.
        columns: [rows, heads, heavy + ring slots] int32, -1 where a slot is empty.
        losers: [rows, heads] int32, the heavy slot with the lowest score, the lower one of equals.
        accumulates: attention makes of live scores decay * score + weight.
    """

    heavy_keys: Tensor
    heavy_values: Tensor
    ring_keys: Tensor
    ring_values: Tensor
    scores: Tensor
    columns: Tensor
    losers: Tensor
    heavy_len: int
    ring_len: int
    accumulates: bool = False
    decay: float = 1.0

    @property
    def heavy_slots(self) -> int:
        return self.heavy_keys.shape[2]

    @property
    def ring_slots(self) -> int:
        return self.ring_keys.shape[2]

    @property
    def pairs(self) -> int:
        """Rows times heads."""
        return self.scores.shape[0] * self.scores.shape[1]

    def first_rows(self, rows: int) -> "DecodeUnit":
        """The same memory, of the first rows alone."""
        return replace(
            self,
            heavy_keys=self.heavy_keys[:rows],
            heavy_values=self.heavy_values[:rows],
            ring_keys=self.ring_keys[:rows],
            ring_values=self.ring_values[:rows],
            scores=self.scores[:rows],
            columns=self.columns[:rows],
            losers=self.losers[:rows],
        )

    @property
    def regions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values of both regions."""
        return self.heavy_keys, self.heavy_values, self.ring_keys, self.ring_values
