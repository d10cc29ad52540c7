"""Rates of the links between host memory and a GPU, by direction and by kind of host memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flexgen_h2o.profiling.timing import Stopwatch, fill


class Links:
    """The links' rates, as a subject; only beside a GPU.

    Args:
        nbytes: copied at once, and held three times: on the device, pinned and pageable.
    """

    def __init__(self, nbytes: int, stopwatch: Stopwatch):
        self._stopwatch = stopwatch
        self._on_device = fill(torch.empty(nbytes // 4, device=stopwatch.device))
        self._on_host = {
            "pinned": fill(torch.empty(nbytes // 4, pin_memory=True)),
            "pageable": fill(torch.empty(nbytes // 4)),
        }

    def trial(self) -> Iterator[tuple[str, float]]:
        """Bytes per second in each direction."""
        for kind, on_host in self._on_host.items():
            for direction, target, source in (
                ("h2d", self._on_device, on_host),
                ("d2h", on_host, self._on_device),
            ):
                name = f"link/{direction}/{kind}"
                yield name, self._rate(name, target, source)

    def _rate(self, name: str, target: Tensor, source: Tensor) -> float:
        seconds = self._stopwatch.seconds(name, lambda: target.copy_(source, non_blocking=True))
        return target.nbytes / seconds
