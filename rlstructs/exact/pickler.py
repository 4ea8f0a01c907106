"""Pickles environments and agents: tensors as bytes beside the pickle, simulators by their adapters."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from rlstructs.exact.adapters import find_adapter
from rlstructs.workers import pickling

STORAGE = "storage"
# Spaces of frames are large arrays of one number. Higher levels take longer and save little.
LEVEL = 1


class Pickled(NamedTuple):
    """A pickled object.

    Attributes:
        data: the pickle, compressed, uint8.
        storages: the memory of its tensors, uint8 each.
    """

    data: np.ndarray
    storages: list[np.ndarray]

    def as_tensors(self) -> dict[str, Any]:
        """Converts to a dict of tensors, which `torch.load(weights_only=True)` reads."""
        return {
            "pickled": torch.from_numpy(self.data),
            "storages": [torch.from_numpy(storage) for storage in self.storages],
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Any]) -> Pickled:
        """The pickle of what `as_tensors` returned; may share its memory."""
        return cls(_as_bytes(tensors["pickled"]), [_as_bytes(storage) for storage in tensors["storages"]])


def dumps(thing: Any, tokens: Mapping[int, Any] | None = None) -> Pickled:
    """Pickles an object by value, as cloudpickle does.

    Tensors that share memory still do when they are unpickled.

    Args:
        thing: the object.
        tokens: by the `id` of an object in it, what `loads` will call `resolve` with in place of that object.

    Raises:
        Exception: something in it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, tokens or {})
    pickler.dump(thing)
    data = bytearray(zlib.compress(file.getbuffer(), LEVEL))
    return Pickled(np.frombuffer(data, np.uint8), pickler.read_storages())


def loads(pickled: Pickled, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Makes a new object from a pickle of `dumps`.

    Runs code of whoever made the pickle.

    Args:
        pickled: the pickle.
        resolve: returns the object for a token; see `dumps`.
    """
    return _Unpickler(pickled, resolve).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    def __init__(self, file: io.BytesIO, tokens: Mapping[int, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tokens = tokens
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address of the object in C

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, torch.UntypedStorage):
            return STORAGE, self._number(thing), None, str(thing.device)
        if isinstance(thing, torch.storage.TypedStorage):
            storage = thing._untyped_storage
            return STORAGE, self._number(storage), thing.dtype, str(storage.device)
        return self._tokens.get(id(thing))

    def _number(self, storage: torch.UntypedStorage) -> int:
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def reducer_override(self, thing: Any) -> Any:
        adapter = find_adapter(type(thing))
        if adapter is not None:
            return adapter.load, (adapter.save(thing),)
        ezpickle = sys.modules.get("gymnasium.utils.ezpickle")
        if ezpickle is not None and isinstance(thing, ezpickle.EzPickle):
            # Its own way makes a new environment and drops the state.
            return copyreg.__newobj__, (type(thing),), dict(vars(thing)), None, None, _set_attributes  # type: ignore[attr-defined]
        return super().reducer_override(thing)

    def read_storages(self) -> list[np.ndarray]:
        """Copies the memory of all tensors."""
        return [_bytes_of(storage) for _, storage in self._storages.values()]


class _Unpickler(pickling.Unpickler):
    def __init__(self, pickled: Pickled, resolve: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(zlib.decompress(pickled.data.data)))
        self._bytes, self._resolve = pickled.storages, resolve
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, token: Any) -> Any:
        if token[0] != STORAGE:
            if self._resolve is None:
                raise pickle.UnpicklingError(f"nothing stands for {token[0]!r}")
            return self._resolve(token)
        _, number, dtype, device = token
        if number not in self._storages:
            self._storages[number] = _make_storage(self._bytes[number], device)
        storage = self._storages[number]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    vars(thing).update(attributes)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    """Copies the bytes of a storage on any device."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return raw.cpu().clone().numpy()


def _make_storage(raw: np.ndarray, device: str) -> torch.UntypedStorage:
    return torch.tensor(raw, dtype=torch.uint8, device=device).untyped_storage()


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()
