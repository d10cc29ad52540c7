"""How many bytes the KV of a unit takes, at home and in the buffers through which it is used."""

from dataclasses import dataclass

from flexgen_h2o.basics.memory_sizes import whole_huge_pages, whole_pages
from flexgen_h2o.plan.four_bit_sizes import entry_bytes
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.schedule import cut_block, places

ALIGNMENT = 4  # bytes; of scores, the widest elements


def aligned(nbytes: int) -> int:
    """Bytes rounded up to where the next of a unit's tensors may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class UnitShape:
    """Sizes of one unit's buffer.

    Attributes:
        heavy_in_4_bits, ring_in_4_bits: how a region keeps its entries; else in the compute precision.
    """

    rows: int
    heads: int
    head_dim: int
    heavy: int
    recent: int
    heavy_in_4_bits: bool = False
    ring_in_4_bits: bool = False

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values, where an element of the compute precision takes `itemsize`."""
        return 2 * sum(self.region_bytes(itemsize))

    def region_bytes(self, itemsize: int) -> tuple[int, int]:
        """Bytes of keys, or of values, in the heavy region and in the ring."""
        whole, quantised = self.head_dim * itemsize, entry_bytes(self.head_dim)
        pairs = self.rows * self.heads
        return (
            pairs * self.heavy * (quantised if self.heavy_in_4_bits else whole),
            pairs * self.recent * (quantised if self.ring_in_4_bits else whole),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of scores (float32) and columns (int32) of every slot, and of the losers (int32)."""
        return self.rows * self.heads * (self.slots * 8 + 4)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the whole buffer."""
        return 2 * sum(map(aligned, self.region_bytes(itemsize))) + self.state_bytes


def unit_shapes(config: ModelShape, slots: tuple[int, int], policy: Policy, rows: int) -> list[UnitShape]:
    """The buffers that one layer needs for a block of `rows` rows; `slots`: heavy and recent."""
    units = cut_block(rows, policy.gpu_batch_size, policy.group_rows).unit_rows
    return [
        UnitShape(
            rows=unit.stop - unit.start,
            heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            heavy=slots[0],
            recent=slots[1],
            heavy_in_4_bits=policy.cache_in_4_bits[0],
            ring_in_4_bits=policy.cache_in_4_bits[1],
        )
        for unit in units
    ]


def working_bytes(unit_bytes: int, look_ahead: int, joint: bool) -> int:
    """Bytes of the buffers on the device that units of so many bytes are loaded into, one after the other.

    In one piece; where files are read into them, of whole huge pages.
    """
    nbytes = places(look_ahead) * whole_pages(unit_bytes)
    return whole_huge_pages(nbytes) if joint else nbytes
