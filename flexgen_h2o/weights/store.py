"""Model weights at their homes, and the buffers through which they are read.

Compute asks for a page: the parameters of one decoder layer, or those outside the layers. What compute cannot reach at
its home is copied into read buffers on the device, one set more than the look-ahead; they are allocated once.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.basics.memory_sizes import whole_pages
from flexgen_h2o.kernels.matrices.layout import Matrix, MatrixLayout, Storage
from flexgen_h2o.memory.direct_io import aligned_bytes
from flexgen_h2o.memory.extents import Extent
from flexgen_h2o.memory.tiers import Stored, Tiers
from flexgen_h2o.memory.transfer import Ticket, Transfer, start_load
from flexgen_h2o.models.base import Parameters, TensorSource
from flexgen_h2o.plan.model_shape import OUTER, Kind, ModelShape, ParameterShape, full_name
from flexgen_h2o.plan.names import Line
from flexgen_h2o.plan.placement import Tier, WeightHomes, small_first
from flexgen_h2o.plan.schedule import FetchWeights, places
from flexgen_h2o.weights.files import WeightFolder, WeightPlace, lay_out

Progress = Callable[[int], None]  # told how many bytes have just been placed


def storages(config: ModelShape, dtype: torch.dtype, layout: MatrixLayout) -> dict[str, Storage]:
    """What memory every parameter takes."""
    return {name: storage_of(parameter, dtype, layout) for name, parameter in config.parameters().items()}


def storage_of(parameter: ParameterShape, dtype: torch.dtype, layout: MatrixLayout) -> Storage:
    """What memory a parameter takes."""
    own_layout, shape = layout_of(parameter.kind, layout), parameter.shape
    return Storage(shape, dtype) if own_layout is None else own_layout.storage((shape[0], shape[1]), dtype)


def layout_of(kind: Kind, layout: MatrixLayout) -> MatrixLayout | None:
    """How a parameter lies where matrices lie in a layout; None for a vector, which is stored as it is."""
    return {"matrix": layout, "table": layout.tables, "vector": None}[kind]


def weight_bytes(config: ModelShape, dtype: torch.dtype, layout: MatrixLayout) -> int:
    """Bytes of all parameters at home."""
    return sum(storage.nbytes for storage in storages(config, dtype, layout).values())


def weight_places(config: ModelShape, dtype: torch.dtype, layout: MatrixLayout) -> dict[str, WeightPlace]:
    """Where every parameter would lie on disk: a file for each page."""
    places: dict[str, WeightPlace] = {}
    for page in range(OUTER, config.num_hidden_layers):
        sizes = {
            full_name(page, parameter.name): storage_of(parameter, dtype, layout).nbytes
            for parameter in small_first(config.page(page))
        }
        places |= lay_out("outer.bin" if page == OUTER else f"layer-{page}.bin", sizes)
    return places


def fill_folder(
    config: ModelShape,
    dtype: torch.dtype,
    layout: MatrixLayout,
    folder: WeightFolder,
    missing: Container[str],
    source: TensorSource,
    progress: Progress,
) -> None:
    """Writes those parameters that are missing in a folder. Memory: one tensor, as it is and encoded."""
    places, parameters = weight_places(config, dtype, layout), config.parameters()
    for name, tensor in source([name for name in places if name in missing]):
        parameter = parameters[name]
        encoded = _encoded(tensor, storage_of(parameter, dtype, layout), layout_of(parameter.kind, layout))
        folder.write(name, places[name], encoded)
        progress(places[name].nbytes)


def _encoded(tensor: Tensor, storage: Storage, layout: MatrixLayout | None) -> Tensor:
    """A parameter as it lies in memory, on its way to disk."""
    target = storage.over(aligned_bytes(storage.nbytes))
    _encode(tensor, target, layout)
    return target


def _encode(tensor: Tensor, target: Tensor, layout: MatrixLayout | None) -> None:
    # A copy even where nothing is converted: the checkpoint's file must not stay mapped.
    if layout is None:
        target.copy_(tensor)
    else:
        layout.encode(target, tensor)


@dataclass
class ReadBuffer:
    """Memory on the device for one page's parameters, in one piece, laid out as the page's file.

    Attributes:
        memory: [n] uint8, of the file's bytes from `start` on; None where everything is in reach at home.
        storage: by name relative to the page.
        parameters: what is in it, for compute.
        page: which one was last fetched.
        loaded: done when what was last fetched is here.
        free: done when it may be overwritten.
    """

    memory: Tensor | None = None
    start: int = 0
    storage: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, Tensor | Matrix] = field(default_factory=dict)
    page: int | None = None
    loaded: list[Ticket] = field(default_factory=list)
    free: Ticket = field(default_factory=Ticket)


class WeightStore:
    """All parameters of a model, each at home.

    Args:
        homes: the tier of every parameter.
        look_ahead: pages that are fetched ahead of the one in use.
        layout: how matrices lie, at home and in the buffers.
        folder: files for what lives on disk. What is in them already is read from there whatever its home is. None
            where nothing is read or written (meta).
        pin: beside a GPU, keep what lives in host memory in pinned memory.
    """

    def __init__(
        self,
        config: ModelShape,
        dtype: torch.dtype,
        homes: WeightHomes,
        tiers: Tiers,
        transfer: Transfer,
        look_ahead: int,
        layout: MatrixLayout,
        folder: WeightFolder | None = None,
        pin: bool = False,
    ):
        self.config = config
        self.dtype = dtype
        self.homes = homes
        self.layout = layout
        self._tiers = tiers
        self._transfer = transfer
        self.folder = folder
        self._pin = pin
        self._stored: dict[str, Stored] = {}
        self._resident: dict[str, Tensor | Matrix] = {}
        self._pages: dict[int, Parameters] = {}  # those that have been asked for
        self._disk_bytes = 0
        self._allocated: list[tuple[Stored, str]] = []
        self._decoding_buffer = torch.empty(0, dtype=torch.uint8)
        self._outer_buffer = ReadBuffer()
        self._layer_buffers: list[ReadBuffer] = []
        self._places = weight_places(config, dtype, layout)
        self._storages = storages(config, dtype, layout)
        self._shapes = config.parameters()
        try:
            if tiers.device.type != "meta":
                layout.prepare(config.matrix_shapes(), dtype)
            self._decoding_buffer = self._make_decoding_buffer()
            self._make_buffers(places(look_ahead))
        except BaseException:
            self.close()
            raise

    def _make_decoding_buffer(self) -> Tensor:
        """What the layout works in, for all matrices and tables."""
        shapes = self.config.matrix_shapes(), self.config.table_shapes()
        layouts = self.layout, self.layout.tables
        nbytes = max(layout.buffer_bytes(those, self.dtype) for layout, those in zip(layouts, shapes, strict=True))
        stored = self._tiers.allocate("gpu", Line.DECODING, (nbytes,), torch.uint8, Line.DECODING)
        self._allocated.append((stored, Line.DECODING))
        return stored.resident(self._tiers.reachable)

    def _make_buffers(self, turns: int) -> None:
        layers = range(self.config.num_hidden_layers)
        self._outer_buffer = self._make_buffer([OUTER])
        self._layer_buffers = [self._make_buffer(layers[turn::turns]) for turn in range(turns)]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters at home."""
        return sum(stored.nbytes for stored in self._stored.values())

    def sizes(self) -> Iterator[tuple[Tier, int]]:
        """Home and bytes of every parameter."""
        return ((tier, self._places[name].nbytes) for name, tier in self.homes.items())

    def load(self, source: TensorSource, progress: Progress) -> None:
        """Places every parameter. Peak memory is the placed bytes plus one tensor; on its way to disk, plus two.

        What is in the folder already is not asked of the source. Raises OSError if there is no room for the rest.
        """
        on_disk = {name: self._places[name] for name, tier in self.homes.items() if tier == "disk"}
        disk_bytes = sum(whole_pages(place.nbytes) for place in on_disk.values())
        self._tiers.ledger.charge("disk", Line.WEIGHTS, disk_bytes)
        self._disk_bytes = disk_bytes
        missing = set(self.homes)
        if self.folder is not None:
            in_memory = {name: place for name, place in self._places.items() if name not in on_disk}
            missing = self.folder.reserve(on_disk) | set(in_memory)
            missing -= {name for name in self.folder.promised(in_memory) if self._read_home(name, self.folder)}
        for name in self.homes:
            if name not in missing:
                if name in on_disk:
                    self._store_on_disk(name)
                progress(self._stored[name].nbytes)
        for name, tensor in source([name for name in self.homes if name in missing]):
            self._place(name, tensor)
            progress(self._stored[name].nbytes)

    def _place(self, name: str, tensor: Tensor) -> None:
        """Puts a parameter where it lives."""
        if self.homes[name] == "disk":
            if self.folder is not None:
                encoded = _encoded(tensor, self._storages[name], self._layout_of(name))
                self.folder.write(name, self._places[name], encoded)
            self._store_on_disk(name)
        else:
            _encode(tensor, self._allocate(name), self._layout_of(name))

    def _layout_of(self, name: str) -> MatrixLayout | None:
        return layout_of(self._shapes[name].kind, self.layout)

    def _allocate(self, name: str) -> Tensor:
        """Memory for a parameter at its home, which is not the disk, and whose content compute will see there."""
        tier, storage = self.homes[name], self._storages[name]
        stored = self._tiers.allocate(tier, name, storage.shape, storage.dtype, Line.WEIGHTS, pin=self._pin)
        self._allocated.append((stored, Line.WEIGHTS))
        self._stored[name] = stored
        if tier in self._tiers.reachable:
            self._resident[name] = self._usable(name, stored.resident(self._tiers.reachable))
        assert stored.tensor is not None
        return stored.tensor

    def _read_home(self, name: str, folder: WeightFolder) -> bool:
        """Fills a parameter's home in memory from the folder; False if what is there is not what was written."""
        place = self._places[name]
        passing = aligned_bytes(whole_pages(place.nbytes))
        if not folder.read(name, place, passing):
            return False
        self._allocate(name).copy_(self._storages[name].over(passing[: place.nbytes]))
        return True

    def _usable(self, name: str, storage: Tensor) -> Tensor | Matrix:
        """A parameter as compute takes it, in memory on the device."""
        layout, shape = self._layout_of(name), self._shapes[name].shape
        if layout is None:
            return storage
        return layout.matrix(storage, (shape[0], shape[1]), self.dtype, self._decoding_buffer)

    def _store_on_disk(self, name: str) -> None:
        place, folder = self._places[name], self.folder
        extent = Extent(Path(), place.offset, whole_pages(place.nbytes)) if folder is None else folder.extent(place)
        storage = self._storages[name]
        self._stored[name] = Stored(name, "disk", storage.shape, storage.dtype, extent=extent)

    def fetch(self, page: int) -> None:
        """Starts to bring a page to the device, as far as it is not there."""
        buffer = self._buffer(page)
        if buffer.page == page:
            return  # it is still there, as is always so for what lies outside the layers
        buffer.page, buffer.loaded = page, []
        away = [(name, self._stored[full_name(page, name)]) for name in buffer.storage]
        for name, stored in away:
            if stored.tier == "cpu" and stored.tier not in self._tiers.reachable:
                target = buffer.storage[name]
                buffer.loaded.append(
                    start_load(self._transfer, target, stored.place, [buffer.free], FetchWeights(page))
                )
        for extent in _joined(stored.extent for _, stored in away if stored.extent is not None):
            assert buffer.memory is not None
            start = extent.offset - buffer.start
            target = buffer.memory[start : start + extent.nbytes]
            buffer.loaded.append(start_load(self._transfer, target, extent, [buffer.free], FetchWeights(page)))

    def page(self, page: int) -> Parameters:
        """A page's parameters on the device; those that had to be fetched have arrived."""
        buffer = self._buffer(page)
        if buffer.storage and buffer.page != page:
            raise RuntimeError(f"weights of page {page} are used before they were fetched")
        for ticket in buffer.loaded:
            ticket.wait()
        if page not in self._pages:
            self._pages[page] = self._parameters(page)
        return self._pages[page]

    def _parameters(self, page: int) -> Parameters:
        """Where a page's parameters are whenever they are on the device: at home, or in the page's read buffer."""
        buffer = self._buffer(page)
        tensors: dict[str, Tensor] = {}
        matrices: dict[str, Matrix] = {}
        for name in self.config.page_shapes(page):
            found = self._resident.get(full_name(page, name))
            if found is None:
                found = buffer.parameters[name]
            if isinstance(found, Tensor):
                tensors[name] = found
            else:
                matrices[name] = found
        return Parameters(tensors, matrices)

    def release(self, page: int) -> None:
        """Says that compute has been told all it is to do with a page: its read buffer may be overwritten then."""
        self._buffer(page).free = self._transfer.used()

    def forget(self) -> None:
        """Takes what lies in the read buffers for lost, after a copy may have failed."""
        for buffer in (self._outer_buffer, *self._layer_buffers):
            buffer.page, buffer.loaded = None, []

    def close(self) -> None:
        """Gives all bytes back. Files of weights stay for later runs."""
        for stored, line in self._allocated:
            self._tiers.release(stored, line)
        if self._disk_bytes:
            self._tiers.ledger.release("disk", Line.WEIGHTS, self._disk_bytes)
        self._allocated, self._stored, self._resident, self._pages = [], {}, {}, {}
        self._layer_buffers, self._outer_buffer = [], ReadBuffer()
        self._decoding_buffer = torch.empty(0, dtype=torch.uint8)
        self._disk_bytes = 0

    def _buffer(self, page: int) -> ReadBuffer:
        return self._outer_buffer if page == OUTER else self._layer_buffers[page % len(self._layer_buffers)]

    def _make_buffer(self, pages: Sequence[int]) -> ReadBuffer:
        """A buffer for those parameters that compute cannot reach at home on any of the pages that will use it."""
        parameters_of_page = small_first(self.config.page(pages[0])) if pages else []
        away = [
            name
            for name in (parameter.name for parameter in parameters_of_page)
            if any(self.homes[full_name(page, name)] not in self._tiers.reachable for page in pages)
        ]
        if not away:
            return ReadBuffer()
        places = {name: self._places[full_name(pages[0], name)] for name in away}
        start = places[away[0]].offset
        nbytes = places[away[-1]].offset + whole_pages(places[away[-1]].nbytes) - start
        stored = self._tiers.allocate("gpu", Line.READ_BUFFERS, (nbytes,), torch.uint8, Line.READ_BUFFERS)
        self._allocated.append((stored, Line.READ_BUFFERS))
        memory = stored.resident(self._tiers.reachable)
        storage: dict[str, Tensor] = {}
        parameters: dict[str, Tensor | Matrix] = {}
        for name, place in places.items():
            of_page = full_name(pages[0], name)
            part = memory[place.offset - start : place.offset - start + place.nbytes]
            storage[name] = self._storages[of_page].over(part)
            parameters[name] = self._usable(of_page, storage[name])
        return ReadBuffer(memory, start, storage, parameters)


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Extents in ascending order, those that touch made one: the larger a request, the better."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and joined[-1].path == extent.path and joined[-1].offset + joined[-1].nbytes == extent.offset:
            last = joined.pop()
            extent = Extent(last.path, last.offset, last.nbytes + extent.nbytes)
        joined.append(extent)
    return joined
