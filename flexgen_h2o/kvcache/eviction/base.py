"""What an eviction policy is: a rule about scores.

The buffer keeps, beside the `recent` newest entries, the `heavy` entries with the highest scores, so a policy says only
what score an entry starts with and how attention changes it. Higher is kept.

What people are told of a policy comes from its class: the first line of its docstring, its parameters, which are its
fields beside the sizes, and what sizes its regions.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.basics.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Entries:
    """What is known of entries that have just been computed. `heads` are those of keys.

    Attributes:
        layer: which they belong to.
        keys, values: [rows, heads, n, head_dim].
        positions: [rows, n] true positions (real tokens before each); negative for pads.
        attention_sums: [rows, heads, n] attention each entry has received so far, float32; None for an entry that has
            not been attended to, or where the rule does not accumulate.
    """

    layer: int
    keys: "Tensor"
    values: "Tensor"
    positions: "Tensor"
    attention_sums: "Tensor | None" = None


@dataclass(frozen=True)
class EvictionRule:
    """Sizes of the two regions of the KV buffer, in entries per row and head, and the rule that fills them.

    Attributes:
        heavy: slots for entries chosen by score; 0 or more.
        recent: slots for the newest entries, the current one included; at least 1.
        accumulates: whether attention weights are added to scores. Where not, prefill need not sum them.
        decay: what a score is multiplied with in each step before the step's weight is added.
        name: of the policy.
        heavy_by: the fields of EvictionSpec that give the size of the heavy region; none where there is no such region.
        recent_by: those that give the size of the recent one; none where it is the whole sequence.
    """

    heavy: int
    recent: int
    decay: float = setting(1.0, "real", "what a score keeps of itself in each step of decode", least=0, most=1)
    name: ClassVar[str]
    accumulates: ClassVar[bool] = False
    heavy_by: ClassVar[tuple[str, ...]] = ("hh_ratio", "hh_size")
    recent_by: ClassVar[tuple[str, ...]] = ("recent_ratio", "recent_size")

    @property
    def sizes(self) -> tuple[int, int]:
        """Slots of the heavy region and of the ring."""
        return self.heavy, self.recent

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    def query_weights(self, n: int) -> "Tensor | None":
        """How much each of a prompt's `n` columns counts as a query in the sums of attention; None if all count alike.

        Returns: [n] float32, 0 or more; the last column is the prompt's last token.
        """
        return None

    def at_layer(self, layer: int, layers: int) -> "EvictionRule":
        """The rule of one of so many layers, whose sizes may be others; those of all layers together are as asked."""
        return self

    def initial_scores(self, entries: Entries) -> "Tensor":
        """Scores of entries that have just been computed: float32, broadcastable to [rows, heads, n]."""
        if entries.attention_sums is not None:
            return entries.attention_sums
        rows, n = entries.positions.shape
        return entries.positions.new_zeros(rows, 1, n).float()
