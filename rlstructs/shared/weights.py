"""Sends the updates of `RL_Batcher.update` to workers, through shared memory.

The trainer writes an update once for all workers, into a free region of the arena. A worker's tensors are views of the
region, which it maps privately: nobody else sees what it writes to them. A region is overwritten only after every
worker has got a later update and holds no tensor of this one, so their values never change.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from rlstructs.workers.arena import SharedArena
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.messages import Future
from rlstructs.workers.pickling import Unpickler

# Bytes: every tensor starts at a multiple of this.
ALIGNMENT = 64

# The dtype of an entry of /proc/self/pagemap, and masks of its bits: the page is in memory or in swap; the page is
# not a private copy.
PAGE_ENTRY = np.dtype(np.uint64)
PRESENT, FILE_BACKED = np.uint64(3 << 62), np.uint64(1 << 61)
# The number of regions that a worker keeps mapped.
N_MAPS = 4

Place = tuple[int, torch.Size, torch.dtype, bool, bool]  # offset, shape, dtype, parameter, gradient


@dataclass(frozen=True)
class Parcel:
    """An update as bytes.

    Attributes:
        tensors: the offset of each tensor, with the tensor on the CPU or its bytes (n,).
        nbytes: bytes of all tensors and the gaps between them.
        pickled: the pickled object, with a `Place` in place of each tensor.
    """

    tensors: Sequence[tuple[int, torch.Tensor | np.ndarray]]
    nbytes: int
    pickled: bytes

    @classmethod
    def of(cls, info: Any) -> Parcel:
        """Makes the parcel of an object that can be pickled."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(info)
        tensors = [(offset, tensor.detach().cpu()) for offset, tensor in pickler.tensors if tensor.numel()]
        return cls(tensors, pickler.nbytes, file.getvalue())

    def as_bytes(self) -> Parcel:
        """Returns a parcel with bytes in place of tensors.

        Some transports take only numpy arrays.
        """
        tensors = [
            (offset, tensor if isinstance(tensor, np.ndarray) else _bytes_of(tensor)) for offset, tensor in self.tensors
        ]
        return Parcel(tensors, self.nbytes, self.pickled)

    def write(self, region: np.ndarray) -> None:
        """Writes the tensors, then the pickled object."""
        self.write_tensors(region)
        region[self.nbytes : self.nbytes + len(self.pickled)] = np.frombuffer(self.pickled, np.uint8)

    def write_tensors(self, region: np.ndarray) -> None:
        """Writes the tensors."""
        for offset, tensor in self.tensors:
            if isinstance(tensor, np.ndarray):
                region[offset : offset + tensor.size] = tensor
            else:
                _view(region, offset, tensor.shape, tensor.dtype).copy_(tensor)


class Packer:
    """Packs objects one after another.

    Pickling a state dict takes longer than copying the weights of a small network. So the pickle of a state dict is
    kept for all that differ from it only in their numbers.
    """

    def __init__(self) -> None:
        self._signature: Any = None
        self._kept: tuple[list[int], int, bytes] = [], 0, b""  # of a parcel: offsets, `nbytes`, `pickled`

    def pack(self, info: Any) -> Parcel:
        """Makes the parcel of an object; returns a `Parcel` unchanged.

        Raises if the object cannot be pickled.
        """
        if isinstance(info, Parcel):
            return info
        signature = _sign(info)
        if signature is not None and signature == self._signature:
            offsets, nbytes, pickled = self._kept
            values = [tensor.detach().cpu() for tensor in info.values() if tensor.numel()]
            return Parcel(list(zip(offsets, values, strict=True)), nbytes, pickled)
        parcel = Parcel.of(info)
        if signature is not None and len(parcel.tensors) == sum(tensor.numel() > 0 for tensor in info.values()):
            self._signature = signature
            self._kept = [offset for offset, _ in parcel.tensors], parcel.nbytes, parcel.pickled
        return parcel


def _sign(info: Any) -> Any:
    """Describes a flat dict of tensors, without their numbers.

    None for any other object.
    """
    kind = type(info)
    if kind not in (dict, OrderedDict) or len({id(tensor) for tensor in info.values()}) < len(info):
        return None
    parts: list[Any] = [kind]
    for key, tensor in info.items():
        if type(key) is not str or not _is_plain(tensor):
            return None
        parts.append((key, type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad))
    try:
        parts.append(pickle.dumps(getattr(info, "__dict__", None)))  # where a module's state dict keeps versions
    except Exception:
        return None
    return parts


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an object, and replaces its tensors by places."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0
        self._places: dict[int, Place] = {}

    def persistent_id(self, obj: Any) -> Place | None:
        if not _is_plain(obj):
            return None
        if id(obj) not in self._places:
            parameter = type(obj) is torch.nn.Parameter
            self._places[id(obj)] = (self.nbytes, obj.shape, obj.dtype, parameter, obj.requires_grad)
            self.tensors.append((self.nbytes, obj))
            # At least one byte, because the place identifies the tensor.
            self.nbytes += _round_up(max(1, obj.numel() * obj.element_size()), ALIGNMENT)
        return self._places[id(obj)]


def _is_plain(obj: Any) -> bool:
    """Whether shape, dtype and numbers describe all of a tensor.

    False for sparse and quantised tensors, and for other objects.
    """
    is_tensor = type(obj) is torch.Tensor or type(obj) is torch.nn.Parameter
    return is_tensor and obj.layout == torch.strided and not obj.is_quantized


class _Unpacker(Unpickler):
    def __init__(self, file: io.BytesIO, region: np.ndarray) -> None:
        super().__init__(file)
        self._region = region
        self._found: dict[Place, torch.Tensor] = {}

    def persistent_load(self, place: Place) -> torch.Tensor:
        if place not in self._found:
            offset, shape, dtype, parameter, gradient = place
            if shape.numel():
                tensor = _view(self._region, offset, shape, dtype)
            else:
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
            self._found[place] = torch.nn.Parameter(tensor, gradient) if parameter else tensor.requires_grad_(gradient)
        return self._found[place]


@dataclass(frozen=True)
class Packed:
    """The place of an update, all that crosses the pipe.

    Attributes:
        version: the number of updates so far, including this one.
        offset: where its region begins in the arena, in bytes.
        nbytes: bytes of its tensors, which come first.
        n_pickled: bytes of the pickled object, which follows.
    """

    version: int
    offset: int
    nbytes: int
    n_pickled: int

    @property
    def end(self) -> int:
        """The offset at which the next region may begin."""
        return self.offset + _round_up(self.nbytes + self.n_pickled, mmap.ALLOCATIONGRANULARITY)


class Outbox:
    """The trainer's end: writes updates.

    Args:
        arena: the arena to write to.
        n_pending: the most updates that may lack a worker's reply when the next one is written.
        settle: waits for the replies to requests.

    Attributes:
        version: the number of updates so far.
    """

    def __init__(self, arena: SharedArena, n_pending: int, settle: Callable[[list[Future]], None]) -> None:
        self._arena, self._n_pending, self._settle, self.version = arena, n_pending, settle, 0
        self._written: list[tuple[Packed, list[Future]]] = []
        self._packer = Packer()

    def pack(self, info: Any) -> Packed:
        """Writes an object, or a `Parcel` of one, into the arena.

        Raises:
            Exception: it cannot be pickled; nothing is written.
        """
        parcel = self._packer.pack(info)  # may raise, so it comes before writing
        packed = self._find_place(parcel.nbytes, len(parcel.pickled))
        self._arena.resize(packed.end)
        parcel.write(np.frombuffer(self._arena.map(), np.uint8, packed.end - packed.offset, packed.offset))
        return packed

    def record_sent(self, packed: Packed, asked: list[Future]) -> None:
        """Records that workers were sent this update; they reply with what `Inbox.held_versions` returns."""
        self._written.append((packed, asked))
        self.version = packed.version

    def read_last(self) -> Parcel | None:
        """Copies the last update; None if there was none."""
        if not self._written:
            return None
        packed = self._written[-1][0]
        raw = np.frombuffer(self._arena.map(), np.uint8, packed.nbytes + packed.n_pickled, packed.offset)
        tensors, pickled = raw[: packed.nbytes].copy(), raw[packed.nbytes :].tobytes()
        return Parcel([(0, tensors)] if packed.nbytes else [], packed.nbytes, pickled)

    def forget(self, workers: Collection[int]) -> None:
        """Forgets the requests to workers that were replaced.

        The new workers have got the last update.
        """
        for _, asked in self._written:
            for each in asked:
                if each.index in workers:
                    each.value = None

    def _find_place(self, nbytes: int, n_pickled: int) -> Packed:
        """Finds a free place in the arena.

        Waits while too many updates are unanswered.
        """
        if len(self._written) > self._n_pending:
            self._settle(self._written[-self._n_pending - 1][1])
        self._written = [written for written in self._written if self._may_be_read(written[0])]
        place = Packed(self.version + 1, 0, nbytes, n_pickled)
        for packed, _ in sorted(self._written, key=lambda written: written[0].offset):
            if place.end <= packed.offset:
                break
            place = dataclasses.replace(place, offset=packed.end)
        return place

    def _may_be_read(self, packed: Packed) -> bool:
        """Whether workers may still read an update.

        True for the last one, and while a worker may hold tensors of it.
        """
        replies = [asked for other, asked in self._written if other.version >= packed.version]
        return packed.version == self.version or not any(
            all(each.value is not None and packed.version not in each.value for each in asked) for asked in replies
        )


class LocalUpdate(NamedTuple):
    """An update for an agent in this process.

    Attributes:
        version: the number of updates so far, including this one.
        tensors: the bytes of its tensors, which nobody else writes to.
        pickled: see `Parcel`.
    """

    version: int
    tensors: np.ndarray
    pickled: bytes


class LocalOutbox:
    """The trainer's end for an agent in the same process.

    Updates are copied, not shared.

    Attributes:
        version: the number of updates so far.
    """

    def __init__(self) -> None:
        self.version, self._packer = 0, Packer()
        self._last: LocalUpdate | None = None
        self._spare = np.zeros(0, np.uint8)  # memory of the update before the last one

    def pack(self, info: Any) -> LocalUpdate:
        """Copies an object, or a `Parcel` of one; raises if it cannot be pickled."""
        parcel = self._packer.pack(info)
        if self._spare.size != parcel.nbytes:
            self._spare = np.zeros(parcel.nbytes, np.uint8)  # exact states keep what lies between tensors
        parcel.write_tensors(self._spare)
        return LocalUpdate(self.version + 1, self._spare, parcel.pickled)

    def record_sent(self, packed: LocalUpdate, asked: list[Future]) -> None:
        """Records that the agent was sent this update."""
        self._spare = np.zeros(0, np.uint8) if self._last is None else self._last.tensors
        self._last, self.version = packed, packed.version

    def read_last(self) -> Parcel | None:
        """Copies the last update; None if there was none."""
        if self._last is None:
            return None
        _, tensors, pickled = self._last
        return Parcel([(0, tensors.copy())] if tensors.size else [], tensors.size, pickled)

    def forget(self, workers: Collection[int]) -> None:
        """Does nothing: the job of this process is never replaced."""


class Inbox:
    """A worker's end: reads updates.

    Args:
        arena: the arena that the trainer writes to.
    """

    def __init__(self, arena: SharedArena) -> None:
        self._arena, self.version = arena, 0
        self._regions: dict[int, weakref.ref[np.ndarray]] = {}
        # Mappings by offset and size, kept because mapping memory and touching it takes as long as copying it.
        self._maps: dict[tuple[int, int], mmap.mmap] = {}

    def unpack(self, packed: Packed | LocalUpdate) -> Any:
        """Returns the object that was packed, with private tensors on the CPU."""
        if isinstance(packed, LocalUpdate):
            self.version = packed.version
            return _Unpacker(io.BytesIO(packed.pickled), packed.tensors.copy()).load()
        # A private mapping is copied on write: an agent may write to its weights.
        raw = np.frombuffer(self._map(packed.offset, packed.end - packed.offset), np.uint8)
        self._regions[packed.version] = weakref.ref(raw)
        pickled = raw[packed.nbytes : packed.nbytes + packed.n_pickled].tobytes()
        self.version = packed.version
        return _Unpacker(io.BytesIO(pickled), raw).load()

    def _map(self, offset: int, nbytes: int) -> mmap.mmap:
        """Maps a region privately with its present content.

        A mapping that still has this content is used again.
        """
        place = offset, nbytes
        found = self._maps.pop(place, None)
        if found is None or _is_written(found):
            found = self._arena.map_privately(*place)
        self._maps[place] = found
        while len(self._maps) > N_MAPS:
            del self._maps[next(iter(self._maps))]
        return found

    def held_versions(self) -> tuple[int, ...]:
        """Returns the versions of updates whose tensors are still alive."""
        self._regions = {version: region for version, region in self._regions.items() if region() is not None}
        return tuple(self._regions)


def _is_written(private: mmap.mmap) -> bool:
    """Whether this process has written to a private mapping; True if that is unknown."""
    first = np.frombuffer(private, np.uint8).ctypes.data // mmap.PAGESIZE
    n_bytes = -(-len(private) // mmap.PAGESIZE) * PAGE_ENTRY.itemsize
    try:
        # An interrupt between `open` and `with` would leave the file open.
        with defer_interrupt(), open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first * PAGE_ENTRY.itemsize)
            entries = np.frombuffer(file.read(n_bytes), PAGE_ENTRY)
    except OSError:
        return True
    return entries.nbytes < n_bytes or bool((((entries & PRESENT) != 0) & ((entries & FILE_BACKED) == 0)).any())


def _view(region: np.ndarray, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    # Each tensor has its own storage, because autograd counts changes per storage.
    part = region[offset : offset + shape.numel() * dtype.itemsize]
    return torch.from_numpy(part).view(dtype).view(shape)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
