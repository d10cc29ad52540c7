"""Where the real tokens of left-padded rows begin."""

import torch
from torch import Tensor


class Padding:
    """Where the real tokens of left-padded rows begin.

    Args:
        first_columns: [rows] int64 on the CPU, the column of each row's first real token.
    """

    def __init__(self, first_columns: Tensor):
        self.rows = len(first_columns)
        self.earliest = int(first_columns.min())
        self.widest = int(first_columns.max())
        self._on_device = {first_columns.device.type: first_columns}

    def on(self, device: torch.device) -> Tensor:
        """The first columns, [rows] int64, on a device; copied there once."""
        if device.type not in self._on_device:
            self._on_device[device.type] = next(iter(self._on_device.values())).to(device)
        return self._on_device[device.type]
