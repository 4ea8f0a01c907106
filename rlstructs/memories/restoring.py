"""The layout of memories in files, and the restoring of their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError
from rlstructs.files.archives import Reader
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.draw.priorities import DRAWN_ROWS, FOLLOWED_STEPS, TREE_LEAVES
from rlstructs.replay.intake.roles import ENDS
from rlstructs.replay.keep.checks import dtype_called, row_shape, whole
from rlstructs.replay.keep.restoring import (
    EPISODES,
    LENGTHS,
    MORE,
    PACKED,
    RING,
    ROWS,
    SavedArrays,
    check_column,
    count_bytes,
    make_room,
    restore_columns,
)
from rlstructs.replay.keep.saving import Arrays, Contents, Form, Found, require_room
from rlstructs.replay.keep.stored import Stored
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

KIND = "Memory"
# Names of the arrays in a file that are not tensors.
RING_NAME, EPISODES_NAME = "__ring__", "__episodes__"
NAMES = {
    RING: RING_NAME,
    EPISODES: EPISODES_NAME,
    **{MORE + name: name for name in (FOLLOWED_STEPS, DRAWN_ROWS, TREE_LEAVES)},
}
BOOKKEEPING = {
    RING_NAME: np.int64,
    EPISODES_NAME: np.int32,
    FOLLOWED_STEPS: np.int64,
    DRAWN_ROWS: np.int64,
    TREE_LEAVES: np.float64,
}


class StoredTensors(Stored):
    """Base class of memories: tensors in a store."""

    _tensors: Tensors

    def reset(self) -> None:
        """Drops every row."""
        self._storage.clear()


class MemoryForm(Form):
    """Whole tensors `(memory_size, num_envs, *data)` by name, as in skrl's files.

    Other arrays lie beside them.
    """

    has_every_slot = True

    def kind(self, buffer: StoredTensors) -> str:
        return KIND

    def name(self, name: str) -> str:
        if name.startswith((PACKED, LENGTHS)):  # no tensor has such a name
            return f"__{name}__"
        return NAMES.get(name, name.removeprefix(ROWS))

    def group(self, arrays: str, number: int) -> str:
        return arrays

    def write(self, buffer: StoredTensors, arrays: Arrays, dtypes: dict[str, str], state: dict[str, Any]) -> Contents:
        if EPISODES in arrays:
            arrays[EPISODES] = arrays[EPISODES].reshape(-1, 2)
        ordered = sorted(arrays, key=lambda name: (not name.startswith(ROWS), name))  # tensors as in skrl's files
        named = {self.name(name): arrays[name] for name in ordered}
        return named, {self.name(name): dtype for name, dtype in dtypes.items()}, buffer._state()

    def read(self, buffer: StoredTensors, path: Path, arrays: SavedArrays, state: Mapping[str, Any]) -> Found:
        n_slots, n_lanes = check_sizes(buffer._tensors, path, state)
        own = [kind + tensor for tensor in state["tensors"] for kind in (ROWS, PACKED, LENGTHS)]
        stored = {name: self.name(name) for name in (*NAMES, *own)}
        found = arrays.renamed({name: each for name, each in stored.items() if each in arrays.specs})
        dtype, shape = found.specs.get(EPISODES, (None, ()))
        if dtype is not None and shape == (n_slots * n_lanes, 2):
            found.specs[EPISODES] = dtype, (n_slots, n_lanes, 2)
        sizes = {"n_lanes": n_lanes, "capacity": n_slots, "alignment": n_slots, "n_slots": n_slots}
        specs = check_tensors(buffer._tensors, path, state["tensors"])
        for name, spec in specs.items():
            check_column(buffer._storage.columns, found, name, spec, n_slots)
        if EPISODES in found.specs:
            found.check(EPISODES, np.int32, (n_slots, n_lanes, 2))
        elif ends := [name for name in specs if name in ENDS]:
            raise ValueError(f"it has no episodes, but a tensor {ends[0]!r}")
        return found, {**state, **sizes, "own": state}, specs, {}

    def storage(self, buffer: StoredTensors) -> Storage:
        return buffer._tensors.allocate()

    def adopt(self, buffer: StoredTensors, specs: Mapping[str, Spec]) -> None:
        tensors = buffer._tensors
        if any(name in ENDS for name in specs):
            tensors.storage.track_episodes()
        for name, spec in specs.items():
            if name not in tensors.dtypes:
                tensors.dtypes[name] = tensors.find_dtype(name, spec)
            tensors.planned.pop(name, None)  # now that the column is there: other threads look here first


def check_sizes(tensors: Tensors, path: Path, state: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the sizes of the memory in a file.

    Raises FileError if they differ from the sizes of these tensors.
    """
    sizes = whole("memory_size", state["memory_size"], 1), whole("num_envs", state["num_envs"], 1)
    if sizes != tensors.lead:
        held = "memory_size {} and num_envs {}, this memory has {} and {}".format(*sizes, *tensors.lead)
        raise FileError(f"{path}: holds {held}")
    return sizes


def check_complete(tensors: Tensors, path: Path, found: Iterable[str]) -> None:
    """Raises FileError if a file lacks one of the existing tensors."""
    if missing := sorted(set(tensors.dtypes) - set(found)):
        raise FileError(clean_text(f"{path}: has no tensor(s) {missing}, it has {sorted(found)}"))


def check_tensors(tensors: Tensors, path: Path, found: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the specs of the tensors in a file.

    Args:
        tensors: the existing tensors.
        path: the file.
        found: name -> name of the dtype, and shape of a row.

    Raises:
        FileError, ValueError, TypeError: a tensor is missing or does not fit.
    """
    check_complete(tensors, path, found)
    specs = {}
    for name, (dtype, shape) in found.items():
        specs[name] = new = tensors.make_spec(find_dtype(tensors, name, dtype), row_shape(name, shape))
        own = tensors.spec_of(name) if name in tensors.dtypes else new
        if own != new:
            ours = f"in this memory {own.dtype} {own.shape}"
            raise FileError(f"{path}: tensor {name!r} is {new.dtype} {new.shape}, {ours}")
    if not tensors.storage.is_private and (more := sorted(set(specs) - set(tensors.dtypes))):
        held = f"has tensor(s) {more}, this memory, which processes share, has {sorted(tensors.dtypes)}"
        raise FileError(clean_text(f"{path}: {held}: load it into a new memory, and share or feed that"))
    return specs


def find_dtype(tensors: Tensors, name: str, dtype: Any) -> Any:
    """Returns the library's dtype for a dtype's name in a file."""
    return tensors.convert_dtype(name, dtype if dtype == "bfloat16" else dtype_called(name, dtype).name, by_name=True)


def refill(memory: StoredTensors, path: Path, specs: Mapping[str, Spec], reader: Reader) -> None:
    """Drops all rows, and reads whole tensors of another program.

    Its file holds nothing but tensors.

    Raises:
        FileError, ValueError, KeyError, OutOfMemoryError: they do not fit; nothing changes.
    """
    storage, n_slots = memory._storage, memory._tensors.lead[0]
    if storage.columns.compression.max_bytes is not None:  # the file does not say which rows are the oldest
        raise FileError(f"{path}: load it into a memory without max_bytes, and the file that this one saves here")
    arrays = SavedArrays(reader, {ROWS + name: name for name in specs})
    for name, spec in specs.items():
        arrays.check(ROWS + name, spec.dtype, (*memory._tensors.lead, *spec.shape))
    require_room(path, count_bytes(storage, specs, {}, arrays, (n_slots, n_slots)), storage.columns)
    drop_rows = make_room(storage, specs, {}, n_slots)
    memory.reset()
    drop_rows()
    memory._form.adopt(memory, specs)
    restore_columns(storage, arrays, {}, {}, n_slots, storage.ring.counters)


class RowsReader:
    """Reads tensors whose file holds only some rows, as a `Reader` would.

    The other rows are unwritten.

    Args:
        tensors: of the memory.
        specs: name -> spec of each tensor.
        rows: int64 (n,), flat indexes, no two the same.
        values: name -> `(n, *shape)`; may be empty without rows.
        more: further arrays, by name.
    """

    text = ""

    def __init__(
        self,
        tensors: Tensors,
        specs: Mapping[str, Spec],
        rows: np.ndarray,
        values: Mapping[str, np.ndarray],
        more: Mapping[str, np.ndarray],
    ) -> None:
        self._lead, self._specs, self._rows, self._values, self._more = tensors.lead, specs, rows, values, more

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Returns the dtype and shape of an array."""
        if name in self._more:
            return self._more[name].dtype, self._more[name].shape
        return self._specs[name].dtype, (*self._lead, *self._specs[name].shape)

    def verify(self) -> None:
        """Does nothing: the text has been parsed."""

    def read_slots(self, name: str, array: np.ndarray, start: int) -> None:
        """Raises NotImplementedError: no array has the slots of each lane together."""
        raise NotImplementedError

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        """Copies numbers of an array."""
        if name in self._more:
            array[...] = self._more[name].reshape(-1)[first : first + array.size].reshape(array.shape)
            return
        spec = self._specs[name]
        found = array.reshape(math.prod(array.shape[:2]), *spec.shape)
        found[...] = spec.unwritten
        if self._rows.size and array.size:
            at = self._rows - first // math.prod(spec.shape)
            inside = (at >= 0) & (at < len(found))
            found[at[inside]] = self._values[name][inside]
