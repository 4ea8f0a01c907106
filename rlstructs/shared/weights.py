"""What `RL_Batcher.update` sends: any object, through shared memory, its tensors as views of it.

It is written once, for all workers, into a region of the arena that nobody else reads. A worker maps that region for
itself alone: what it writes to a tensor, nobody else sees. A region is written again only when every worker has moved
on to a later update and holds no tensor of this one: a value is what it was at the call, whatever either side does.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import pickle
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from workers.arena import SharedArena
from workers.messages import Asked
from workers.pickling import Unpickler

# Bytes: every tensor starts at a multiple of this.
ALIGNMENT = 64

# Of a page in /proc/self/pagemap: it is in memory, or was swapped out; and it is the file's own, no copy.
PAGE_ENTRY = np.dtype(np.uint64)
THERE, OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
# How many regions a worker keeps mapped.
N_MAPS = 4

Place = tuple[int, torch.Size, torch.dtype, bool, bool]  # offset, shape, dtype, parameter, gradient


@dataclass(frozen=True)
class Parcel:
    """An update as bytes.

    Attributes:
        tensors: each on the CPU, or its bytes (n,), and the offset at which it is to lie.
        nbytes: of all tensors, gaps between them counted.
        pickled: the rest, with places where tensors were.
    """

    tensors: Sequence[tuple[int, torch.Tensor | np.ndarray]]
    nbytes: int
    pickled: bytes

    @classmethod
    def of(cls, info: Any) -> Parcel:
        """Any object that can be pickled."""
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(info)
        tensors = [(offset, tensor.detach().cpu()) for offset, tensor in packer.tensors if tensor.numel()]
        return cls(tensors, packer.nbytes, file.getvalue())

    def as_bytes(self) -> Parcel:
        """The same with bytes in the place of tensors, to be sent by those who know arrays of numpy only."""
        tensors = [(offset, tensor if isinstance(tensor, np.ndarray) else _bytes_of(tensor))
                   for offset, tensor in self.tensors]  # fmt: skip
        return Parcel(tensors, self.nbytes, self.pickled)

    def write(self, region: np.ndarray) -> None:
        """Writes all of it, the tensors first."""
        for offset, tensor in self.tensors:
            if isinstance(tensor, np.ndarray):
                region[offset : offset + tensor.size] = tensor
            else:
                _view(region, offset, tensor.shape, tensor.dtype).copy_(tensor)
        region[self.nbytes : self.nbytes + len(self.pickled)] = np.frombuffer(self.pickled, np.uint8)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Puts places in a pickle where tensors were."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0
        self._places: dict[int, Place] = {}

    def persistent_id(self, obj: Any) -> Place | None:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or not _has_plain_bytes(obj):
            return None
        if id(obj) not in self._places:
            parameter = type(obj) is torch.nn.Parameter
            self._places[id(obj)] = (self.nbytes, obj.shape, obj.dtype, parameter, obj.requires_grad)
            self.tensors.append((self.nbytes, obj))
            # At least one step: places tell tensors apart, empty ones too.
            self.nbytes += _up(max(1, obj.numel() * obj.element_size()), ALIGNMENT)
        return self._places[id(obj)]


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether its numbers, and nothing else, are what it is: not so of sparse and quantised ones."""
    return tensor.layout == torch.strided and not tensor.is_quantized


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
            self._found[place] = (
                torch.nn.Parameter(tensor, gradient) if parameter else tensor.requires_grad_(gradient)
            )
        return self._found[place]


@dataclass(frozen=True)
class Packed:
    """Where an update lies; all that is sent of it.

    Attributes:
        version: how many updates there were, this one counted.
        offset: of its region in the arena, in bytes.
        nbytes: of its tensors, which come first.
        n_pickled: bytes of the rest, which follows.
    """

    version: int
    offset: int
    nbytes: int
    n_pickled: int

    @property
    def end(self) -> int:
        """Where another region may begin."""
        return self.offset + _up(self.nbytes + self.n_pickled, mmap.ALLOCATIONGRANULARITY)


class Outbox:
    """The trainer's end.

    Args:
        arena: where updates are written.
        n_pending: how many may be on their way before one is waited for.
        settle: waits for what was asked.

    Attributes:
        version: how many updates there were.
    """

    def __init__(self, arena: SharedArena, n_pending: int, settle: Callable[[list[Asked]], None]) -> None:
        self._arena, self._n_pending, self._settle, self.version = arena, n_pending, settle, 0
        self._written: list[tuple[Packed, list[Asked]]] = []

    def pack(self, info: Any) -> Packed:
        """Writes `info`, or what a `Parcel` was made of, into the arena.

        Raises:
            Exception: `info` cannot be pickled; nothing was written.
        """
        parcel = info if isinstance(info, Parcel) else Parcel.of(info)  # what fails, fails before anything is written
        packed = self._place(parcel.nbytes, len(parcel.pickled))
        self._arena.resize(packed.end)
        parcel.write(np.frombuffer(self._arena.map(), np.uint8, packed.end - packed.offset, packed.offset))
        return packed

    def sent(self, packed: Packed, asked: list[Asked]) -> None:
        """It is an update: workers were told of it, and reply with what `Inbox.held` says."""
        self._written.append((packed, asked))
        self.version = packed.version

    def forget(self, workers: Collection[int]) -> None:
        """In the place of these are others, who were told of the last update."""
        for _, asked in self._written:
            for each in asked:
                if each.index in workers:
                    each.value = None

    def _place(self, nbytes: int, n_pickled: int) -> Packed:
        """Where nothing lies that somebody reads."""
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
        """Whether it is the last one, or there is a worker that has not said that it has nothing of it."""
        replies = [asked for other, asked in self._written if other.version >= packed.version]
        return packed.version == self.version or not any(
            all(each.value is not None and packed.version not in each.value for each in asked) for asked in replies
        )


class Inbox:
    """A worker's end.

    Args:
        arena: where updates are written.
    """

    def __init__(self, arena: SharedArena) -> None:
        self._arena, self.version = arena, 0
        self._regions: dict[int, weakref.ref[np.ndarray]] = {}
        # By offset and size. To map memory and touch it first takes as long as to copy it.
        self._maps: dict[tuple[int, int], mmap.mmap] = {}

    def unpack(self, packed: Packed) -> Any:
        """What was packed, with tensors that are this process's own, on the CPU."""
        # Copy on write: an agent may do with its weights what it likes.
        raw = np.frombuffer(self._map(packed.offset, packed.end - packed.offset), np.uint8)
        self._regions[packed.version] = weakref.ref(raw)
        pickled = raw[packed.nbytes : packed.nbytes + packed.n_pickled].tobytes()
        self.version = packed.version
        return _Unpacker(io.BytesIO(pickled), raw).load()

    def _map(self, offset: int, nbytes: int) -> mmap.mmap:
        """A region, mapped for this process alone, as it is now."""
        place = offset, nbytes
        found = self._maps.pop(place, None)
        if found is None or _is_written(found):
            found = self._arena.map_privately(*place)
        self._maps[place] = found
        while len(self._maps) > N_MAPS:
            del self._maps[next(iter(self._maps))]
        return found

    def held(self) -> tuple[int, ...]:
        """The updates of which tensors are still there."""
        self._regions = {version: region for version, region in self._regions.items() if region() is not None}
        return tuple(self._regions)


def _is_written(private: mmap.mmap) -> bool:
    """Whether this process has written to memory that it mapped for itself, or that cannot be told."""
    first = np.frombuffer(private, np.uint8).ctypes.data // mmap.PAGESIZE
    n_bytes = -(-len(private) // mmap.PAGESIZE) * PAGE_ENTRY.itemsize
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first * PAGE_ENTRY.itemsize)
            entries = np.frombuffer(file.read(n_bytes), PAGE_ENTRY)
    except OSError:
        return True
    return entries.nbytes < n_bytes or bool((((entries & THERE) != 0) & ((entries & OF_FILE) == 0)).any())


def _view(region: np.ndarray, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    # Of a storage of its own: autograd counts the changes of all that share one together.
    part = region[offset : offset + shape.numel() * dtype.itemsize]
    return torch.from_numpy(part).view(dtype).view(shape)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
