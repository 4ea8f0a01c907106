"""What `RL_Batcher.update` sends: any object, its tensors through shared memory.

The tensors are written once, for all workers, and each worker takes private copies: a value is what it
was at the call, whatever either side does with it later.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch

from workers.arena import SharedArena
from workers.start import uninterrupted

# Bytes: every tensor starts at a multiple of this.
ALIGNMENT = 64

Place = tuple[int, torch.Size, torch.dtype, bool, bool]  # offset, shape, dtype, parameter, gradient


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Puts places in a pickle where tensors were."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0
        self._places: dict[int, Place] = {}

    def persistent_id(self, obj: Any) -> Place | None:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout != torch.strided:
            return None
        if id(obj) not in self._places:
            parameter = type(obj) is torch.nn.Parameter
            self._places[id(obj)] = (self.nbytes, obj.shape, obj.dtype, parameter, obj.requires_grad)
            self.tensors.append((self.nbytes, obj))
            self.nbytes += -(-obj.numel() * obj.element_size() // ALIGNMENT) * ALIGNMENT
        return self._places[id(obj)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arena: SharedArena) -> None:
        super().__init__(file)
        self._arena = arena
        self._found: dict[Place, torch.Tensor] = {}

    def persistent_load(self, place: Place) -> torch.Tensor:
        if place not in self._found:
            _, shape, dtype, parameter, gradient = place
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                tensor.copy_(_view(self._arena, place[0], tensor))
            self._found[place] = (
                torch.nn.Parameter(tensor, gradient) if parameter else tensor.requires_grad_(gradient)
            )
        return self._found[place]


def pack(info: Any, arena: SharedArena) -> bytes:
    """Writes the tensors of `info` into the arena; the rest, as bytes for `unpack`.

    Raises:
        Exception: `info` cannot be pickled; nothing was written.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(info)
    # On the host first: what fails, fails before anything is written.
    tensors = [(offset, tensor.detach().cpu()) for offset, tensor in packer.tensors if tensor.numel()]
    if packer.nbytes:
        arena.resize(packer.nbytes)
    with uninterrupted():  # successors of workers read what is there
        for offset, tensor in tensors:
            _view(arena, offset, tensor).copy_(tensor)
    return file.getvalue()


def unpack(data: bytes, arena: SharedArena) -> Any:
    """What was packed, with tensors of its own, on the CPU."""
    return _Unpacker(io.BytesIO(data), arena).load()


def _view(arena: SharedArena, offset: int, like: torch.Tensor) -> torch.Tensor:
    raw = torch.frombuffer(arena.map(), dtype=torch.uint8, offset=offset, count=like.numel() * like.element_size())
    return raw.view(like.dtype).view(like.shape)
