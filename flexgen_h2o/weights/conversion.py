"""A model's weights, written to its folder once and for all."""

from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.kernels.matrices.choice import best_layout
from flexgen_h2o.machine.platform import DTYPES, choose_device, default_dtype, dtype_name
from flexgen_h2o.models.checkpoint import ModelSource, open_checkpoint
from flexgen_h2o.plan.weight_plan import WeightForm
from flexgen_h2o.weights.files import weight_folder
from flexgen_h2o.weights.sources import dummy_origin, dummy_source
from flexgen_h2o.weights.store import Progress, fill_folder, weight_bytes, weight_places


class Conversion:
    """All weights of a model on their way to the folder in which runs look for them.

    Args:
        source: the model.
        device: where runs will compute: "auto", "cuda" or "cpu"; matrices lie as is best there.
        dtype: "auto", or in which is computed.
        compressed: in 4-bit groups.
        dummy_weights: made up from `seed`.
    Raises UsageError if the checkpoint is broken.
    """

    def __init__(self, source: ModelSource, device: str, dtype: str, compressed: bool, dummy_weights: bool, seed: int):
        self.config = source.config
        self.compressed = compressed
        on = choose_device(device)
        self.dtype = default_dtype(on) if dtype == "auto" else DTYPES[dtype]
        self.layout = best_layout(on, self.dtype, self.config.matrix_shapes(), compressed)
        checkpoint = None if dummy_weights or source.folder is None else open_checkpoint(source.folder, self.config)
        origin = dummy_origin(self.config, seed, on.type) if checkpoint is None else checkpoint.identity()
        self.folder = weight_folder(origin, self.dtype, self.layout.name)
        self._tensors = dummy_source(self.config, seed, self.dtype, on) if checkpoint is None else checkpoint.source()
        self._written = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return weight_bytes(self.config, self.dtype, self.layout)

    def run(self, progress: Progress) -> None:
        """Writes what is not there yet, or not whole. Raises UsageError if there is no room for it."""
        places = weight_places(self.config, self.dtype, self.layout)
        try:
            missing = self.folder.reserve(places)
        except OSError as error:
            raise UsageError(str(error)) from error
        progress(sum(place.nbytes for name, place in places.items() if name not in missing))
        self._written = len(missing)
        fill_folder(self.config, self.dtype, self.layout, self.folder, missing, self._tensors, progress)

    def report(self) -> dict[str, Any]:
        """What was written where, and how many bytes were asked for and achieved."""
        places = weight_places(self.config, self.dtype, self.layout)
        return {
            "model": self.config.name,
            "dtype": dtype_name(self.dtype),
            "layout": self.layout.name,
            "folder": str(self.folder.path),
            "parameters": len(places),
            "written": self._written,
            "asked_bytes": self._asked_bytes(),
            "achieved_bytes": self.nbytes,
            "disk_bytes": sum(whole_pages(place.nbytes) for place in places.values()),
        }

    def _asked_bytes(self) -> int:
        """By the formula: in 4-bit groups, 4 + 32 ceil(d / 64) / d bits for each value of what has two dimensions."""
        form = WeightForm(self.config, self.dtype.itemsize, self.compressed)
        return sum(map(form.nbytes, self.config.shapes().values()))
