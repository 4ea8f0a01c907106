"""`NamedTensors`, the base class of memories: creates tensors and gives access to them.

A tensor is `(memory_size, num_envs, *data)`. A flat index is `row * num_envs + env`. Each environment is a lane of the
store with a head of its own, so environments may be at different rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError
from rlstructs.frameworks.dtypes import dtype_name
from rlstructs.frameworks.framework import NOT_NUMPYS, Framework
from rlstructs.memories.live_tensors import LiveTensors
from rlstructs.memories.names import check_format, check_name, find_ends
from rlstructs.memories.spaces import n_elements
from rlstructs.replay.columns import SLOT, Spec
from rlstructs.replay.copies import CopiedWhole
from rlstructs.replay.device_columns import TensorColumns
from rlstructs.replay.episodes import BYTES_PER_ROW
from rlstructs.replay.roles import ENDS
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.store import Storage
from rlstructs.replay.values import as_whole, cast_freely, encoded, generator_of, host_array

LOG = logging.getLogger("rlstructs")


class NamedTensors(CopiedWhole):
    """The tensors and the cursor of a memory; see `Memory` for its arguments."""

    framework: Framework

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: Any = None,
        export: bool = False,
        export_format: str = "pt",
        export_directory: str | Path = "",
        *,
        seed: int | None = None,
        strict: bool = False,
    ) -> None:
        self.memory_size = check_count("memory_size", memory_size)
        self.num_envs = check_count("num_envs", num_envs)
        self.strict = strict
        self.device = self._choose_device(device)
        self.export = export
        self.export_format = check_format(export_format)
        self.export_directory = export_directory
        self.sampling_indexes: Any = None
        self._rng = generator_of(self.framework.draw_seed() if seed is None else seed)
        self._dtypes: dict[str, Any] = {}
        # Tensors that were created but not allocated, which happens at the first use.
        self._planned: dict[str, Spec] = {}
        # Tensors that the program got or set: it may write to rows before it adds them.
        self._exposed: set[str] = set()
        where = self.framework.device_of_rows(self.device)
        columns = None if where is None else TensorColumns(self.num_envs, self.memory_size, SLOT, where)
        self._storage = Storage(self.num_envs, self.memory_size, order=SLOT, columns=columns)
        self._step_writer = StepWriter(self._storage, ENDS)

    def _choose_device(self, device: Any) -> Any:
        """The library's own device; the default one of a name that it does not know, as in skrl, unless `strict`."""
        try:
            return self.framework.device(device)
        except SpecError as error:
            if self.strict:
                raise
            LOG.warning("%s: %s; the default device takes its place", type(self).__name__, error)
            return self.framework.device(None)

    # Content

    def __len__(self) -> int:
        """Number of valid rows, over all environments."""
        return len(self._storage)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors take once rows have been written."""
        rows = self.memory_size * self.num_envs
        planned = sum(spec.nbytes for spec in self._planned.values())
        untracked = self._storage.episodes is None and any(name in ENDS for name in self._planned)
        return self._storage.nbytes + rows * (planned + BYTES_PER_ROW * untracked)

    # The next three can be set, for subclasses of skrl's memories, which write to the tensors themselves.

    @property
    def filled(self) -> bool:
        """Whether every environment has filled all its rows."""
        return bool(self._storage.ring.is_full().all())

    @filled.setter
    def filled(self, value: bool) -> None:
        self._set_cursor(bool(value), self.memory_index, self.env_index)

    @property
    def memory_index(self) -> int:
        """The next row to be written; the one of the furthest environment if they are more than a row apart."""
        low, high = self._least_and_most_head()
        return (high if high - low > 1 else low) % self.memory_size

    @memory_index.setter
    def memory_index(self, value: int) -> None:
        self._set_cursor(self.filled, _check_most("memory_index", value, self.memory_size), self.env_index)

    @property
    def env_index(self) -> int:
        """Number of environments whose `memory_index` is written; 0 if they are more than a row apart."""
        low, high = self._least_and_most_head()
        return int((self._storage.ring.head > low).sum()) if high - low == 1 else 0

    @env_index.setter
    def env_index(self, value: int) -> None:
        self._set_cursor(self.filled, self.memory_index, _check_most("env_index", value, self.num_envs))

    def _set_cursor(self, filled: bool, memory_index: int, env_index: int) -> None:
        """Adds the rows in the tensors up to a new cursor; drops all others if the cursor moves back."""
        storage, lanes, (low, high) = self._store(), np.arange(self.num_envs), self._least_and_most_head()
        now = self.memory_size * self.filled + self.memory_index + (lanes < self.env_index)
        then = self.memory_size * filled + memory_index + (lanes < env_index)
        starts_anew = high - low > 1 or bool((then < now).any())
        first, counts = (0, then) if starts_anew else (storage.ring.head[:, None], then - now)
        steps = first + np.zeros((lanes.size, 1), np.int64) + np.arange(counts.max())
        found = storage.columns.gather(self._dtypes, storage.columns.at_steps(lanes[:, None], steps))
        if starts_anew:
            storage.clear()
        if counts.any():
            block = dict(zip(self._dtypes, found, strict=True))
            storage.write(block, lengths=counts, done=find_ends(block))

    def _least_and_most_head(self) -> tuple[int, int]:
        head = self._storage.ring.head
        return int(head.min()), int(head.max())

    @property
    def tensors(self) -> dict[str, Any]:
        """Name -> live tensor; assignment copies values, like `set_tensor_by_name`.

        Assignment of `(memory_size, num_envs, *data)` to a new name creates a tensor, which subclasses of skrl's
        memories rely on.
        """
        return LiveTensors(self._dtypes, self._live, self._put)

    def _put(self, name: str, values: Any) -> None:
        shape = tuple(getattr(values, "shape", ()))
        if name not in self._dtypes and len(shape) > 2 and shape[:2] == (self.memory_size, self.num_envs):
            check_name(name)
            self._plan_tensor(name, self._dtype(name, values.dtype), shape[2:])
        self.set_tensor_by_name(name, values)

    @property
    def tensors_view(self) -> dict[str, Any]:
        """Name -> live tensor by flat index, `(memory_size * num_envs, *data)`; assignment copies values."""

        def put(name: str, values: Any) -> None:
            self._check_name(name)
            self.set_tensor_by_name(name, values.reshape((self.memory_size, self.num_envs, *values.shape[1:])))

        return LiveTensors(self._dtypes, lambda name: self._live(name, keepdim=False), put)

    @property
    def tensors_keep_dimensions(self) -> dict[str, bool]:
        """Name -> whether rows have more or fewer axes than one; for programs written for skrl 1."""
        return {name: len(self._spec(name).shape) != 1 for name in self._dtypes}

    @property
    def all_sequence_indexes(self) -> np.ndarray:
        """Every flat index, one environment after another, int64."""
        return np.arange(self.memory_size * self.num_envs).reshape(self.memory_size, self.num_envs).T.ravel()

    def get_tensor_names(self) -> list[str]:
        """Names in alphabetical order."""
        return sorted(self._dtypes)

    def get_tensor_by_name(self, name: str, keepdim: bool = True) -> Any:
        """The live tensor `(memory_size, num_envs, *data)`, unwritten rows included; a copy in jax.

        Args:
            name: name of the tensor.
            keepdim: False for `(memory_size * num_envs, *data)`.

        Raises:
            MissingKeyError: there is no such tensor.
        """
        self._check_name(name)
        return self._live(name, keepdim)

    def _live(self, name: str, keepdim: bool = True) -> Any:
        rows = self._rows_of(name) if keepdim else self._store().columns.flat[name]
        self._exposed.add(name)
        return self.framework.live_array(rows, self._dtypes[name], repr(name))

    def set_tensor_by_name(self, name: str, tensor: Any) -> None:
        """Copies values into a tensor, with broadcasting; the same rows stay valid.

        Raises:
            MissingKeyError, SpecError: there is no such tensor, or the value does not fit.
        """
        self._check_name(name)
        columns, spec = self._store().columns, self._spec(name)
        values = encoded(name, self._convert(name, tensor), spec)
        shape = (self.memory_size, self.num_envs, *spec.shape)
        try:
            values = values.expand(shape) if isinstance(values, torch.Tensor) else np.broadcast_to(values, shape)
        except (ValueError, RuntimeError) as error:
            raise SpecError(f"{name!r} has shape {tuple(values.shape)}, needed is {shape}") from error
        values = columns.check(name, values, shape[:2])
        columns.put_cells(name, slice(None), slice(None), values.swapaxes(0, 1))
        self._exposed.add(name)
        if name in ENDS:
            self._storage.rebuild_episodes(self._ends_by_slot())

    def _rows_of(self, name: str) -> Any:
        return self._store().columns.cells[name].swapaxes(0, 1)

    def _ends_by_slot(self) -> np.ndarray:
        done = find_ends(self._storage.columns.cells)
        assert done is not None
        return done

    def _check_name(self, name: str) -> None:
        if name not in self._dtypes:
            raise MissingKeyError(f"no tensor {name!r} in this memory, there are {self.get_tensor_names()}")

    # Creation of tensors

    def create_tensor(self, name: str, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
        """Adds a tensor: NaN in unwritten rows if it is a float one, zeros otherwise.

        Args:
            name: name of the tensor.
            size: numbers per row: an int, a list of ints (their product), a gymnasium space, or None to create no
                tensor.
            dtype: a dtype of the library; None for its default float.
            keep_dimensions: whether rows have the shape `size`; if not, they have one axis.

        Returns:
            Whether a tensor was added: False for a size of None, or if the tensor exists already.

        Raises:
            TypeError, SpecError: size or dtype is invalid, or the tensor exists with another size or dtype.
            OutOfMemoryError: the machine has too little memory for the tensor.
        """
        if size is None:
            return False
        check_name(name)
        shape = _as_shape(size) if keep_dimensions else (n_elements(size),)
        named = self._dtype(name, dtype)
        if name in self._dtypes:
            self._check_same(name, shape, None if dtype is None else named)
            return False
        self._plan_tensor(name, named, shape)
        return True

    def _dtype(self, name: str, dtype: Any) -> Any:
        """Converts a dtype to the library's.

        Raises:
            SpecError: the store does not support it; the message names the tensor.
        """
        return self._convert_dtype(name, self.framework.dtype, dtype)

    def _dtype_named(self, name: str, dtype: torch.dtype) -> Any:
        """Converts a dtype of torch to the library's; see `_dtype`."""
        return self._convert_dtype(name, self.framework.dtype_from_name, dtype_name(dtype))

    def _convert_dtype(self, name: str, convert: Callable[[Any], Any], dtype: Any) -> Any:
        try:
            named = convert(dtype)
            spec_of(self.framework, named, ())
        except SpecError as error:
            raise SpecError(f"tensor {name!r}: {error}") from error
        except TypeError as error:
            raise SpecError(f"tensor {name!r}: dtype {dtype} is not supported: {error}") from error
        return named

    def _plan_tensor(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        spec = spec_of(self.framework, dtype, shape)
        self._check_room(f"tensor {name!r}", [spec])
        self._planned[name], self._dtypes[name] = spec, dtype

    def _check_room(self, owner: str, specs: Iterable[Spec]) -> None:
        """Raises OutOfMemoryError unless these tensors fit beside those that are not allocated yet."""
        columns = self._storage.columns
        needed = sum(spec.nbytes for spec in (*self._planned.values(), *specs)) * columns.n_rows
        available = columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"{owner}: {needed:,} bytes are needed, {available:,} are available")

    def _check_same(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        spec = self._spec(name)
        if shape != spec.shape:
            raise SpecError(f"tensor {name!r} exists with rows of shape {spec.shape}, not {shape}")
        if dtype is not None and dtype != self._dtypes[name]:
            raise SpecError(f"tensor {name!r} exists with dtype {self._dtypes[name]}, not {dtype}")

    def _spec(self, name: str) -> Spec:
        return self._planned[name] if name in self._planned else self._storage.columns.specs[name]

    def _store(self) -> Storage:
        """The store, after allocating the tensors that are not allocated yet."""
        if not self._planned:
            return self._storage
        for name in list(self._planned):
            self._storage.add_columns({name: self._planned[name]})
            del self._planned[name]
            if name in ENDS:
                self._storage.track_episodes()
        return self._storage

    def share_memory(self) -> None:
        """Moves the memory to shared memory, for processes that are started with this object.

        Each environment may be written by one process and read by all. Tensors that are created later stay in the
        process that creates them. Live tensors that were got before no longer follow the memory.

        Raises:
            StateError: the rows lie on a GPU.
        """
        self._store().share()

    def reset(self) -> None:
        """Drops every row."""
        self._storage.clear()

    def _convert(self, name: str, value: Any) -> Any:
        """Returns a value unchanged if its device and dtype are the tensor's; otherwise as a numpy array.

        Real numbers are cast, as in skrl. If `strict`, only floats may lose precision: 1.0 can be a bool, 0.5 cannot.
        """
        if name not in self._dtypes:
            return host_array(name, value)
        columns, spec = self._storage.columns, self._spec(name)
        own = None if columns.on_host else columns.own(self.framework.to_torch(value), spec)
        cast = as_whole if self.strict else cast_freely
        return cast(host_array(name, value), spec) if own is None else own

    def _locks(self) -> Sequence[Any]:
        return [self._storage.lock]

    def _content(self) -> Any:
        return self._storage._content()

    def __getstate__(self) -> dict[str, Any]:
        # Devices of jax and warp belong to their process.
        device = self.framework.device_name(self.device)
        return {**super().__getstate__(), "device": device}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self.device = self.framework.device(self.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_tensor_") and name.removeprefix("_tensor_") in vars(self).get("_dtypes", ()):
            return self.get_tensor_by_name(name.removeprefix("_tensor_"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _check_most(name: str, value: Any, most: int) -> int:
    if check_count(name, value, 0) > most:
        raise SpecError(f"{name} must be at most {most}, got {value}")
    return int(value)


def _as_shape(size: Any) -> tuple[int, ...]:
    if not isinstance(size, (tuple, list)):
        raise SpecError(f"size must be a tuple or a list to keep its dimensions, got {size!r}")
    return tuple(check_count("size", n) for n in size)


def spec_of(framework: Framework, dtype: Any, shape: tuple[int, ...]) -> Spec:
    """The spec of the column that stores a tensor of this dtype.

    Raises:
        SpecError: columns cannot store it.
    """
    host = framework.host_dtype(dtype)
    if host is None:
        return Spec(np.dtype(np.int16), shape, is_bfloat16=True)
    if host.kind not in "biufc" or host.isbuiltin == NOT_NUMPYS:
        raise SpecError(f"dtype {dtype} is not supported; needed is a bool, an integer, a float or a complex number")
    return Spec(host, shape)
