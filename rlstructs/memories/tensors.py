"""Named tensors over a store: what a memory has, before rows are written and drawn.

A tensor is `(memory_size, num_envs, *data)`. A flat index is `row * num_envs + env`. Each environment is
a lane of the store with a head of its own, so that environments need not be in step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError
from rlstructs.frameworks.framework import OF_OTHERS, Framework
from rlstructs.memories.names import check_name, checked_format, ends_of
from rlstructs.memories.spaces import n_elements
from rlstructs.replay.columns import SLOT, Columns, Spec
from rlstructs.replay.copies import CopiedWhole
from rlstructs.replay.device_columns import TensorColumns
from rlstructs.replay.episodes import BYTES_PER_ROW
from rlstructs.replay.roles import ENDS
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.store import Storage
from rlstructs.replay.values import as_whole, encoded, generator_of, host_array


class LiveTensors(dict[str, Any]):
    """Tensors by name, in the order in which they were made.

    Args:
        names: of the tensors.
        get: what gives the one of a name.
        put: what copies values into it.
    """

    def __init__(self, names: Iterable[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> None:
        super().__init__((name, get(name)) for name in names)
        self._get, self._put = get, put

    def __setitem__(self, name: str, values: Any) -> None:
        """Copies values into a tensor.

        Raises:
            MissingKeyError, SpecError: there is no such tensor and they make none, or they do not fit.
        """
        self._put(name, values)
        super().__setitem__(name, self._get(name))  # jax has a copy

    def __reduce__(self) -> Any:
        # What is copied or saved has nothing to do with the memory any more, and torch loads it.
        return OrderedDict, (), None, None, iter(self.items())


class NamedTensors(CopiedWhole):
    """The tensors of a memory, and which of their rows are there; see `Memory` for the arguments."""

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
        self.device = self.framework.device(device)
        self.export = export
        self.export_format = checked_format(export_format)
        self.export_directory = export_directory
        self.strict = strict
        self.sampling_indexes: Any = None
        self._rng = generator_of(self.framework.new_seed() if seed is None else seed)
        self._dtypes: dict[str, Any] = {}
        # Tensors that were asked for; they get their bytes when one is first needed.
        self._planned: dict[str, Spec] = {}
        # Tensors that the program has taken or set: it may write to rows of them before they are added.
        self._own: set[str] = set()
        where = self.framework.device_of_rows(self.device)
        columns: Columns | None = None
        if where is not None:
            columns = TensorColumns(self.num_envs, self.memory_size, SLOT, where)
        self._storage = Storage(self.num_envs, self.memory_size, order=SLOT, columns=columns)
        self._write_step: Callable[[Mapping[str, Any]], bool] = _never

    # What is there

    def __len__(self) -> int:
        """Valid rows, over all environments."""
        return len(self._storage)

    @property
    def nbytes(self) -> int:
        """Bytes that the memory takes once it is written to."""
        rows = self.memory_size * self.num_envs
        planned = sum(spec.nbytes for spec in self._planned.values())
        untracked = self._storage.episodes is None and any(name in ENDS for name in self._planned)
        return self._storage.nbytes + rows * (planned + BYTES_PER_ROW * untracked)

    # These three may be set: classes derived from skrl's memories do, that write to the tensors by themselves.

    @property
    def filled(self) -> bool:
        """Whether every environment has wrapped."""
        return bool(self._storage.ring.is_full().all())

    @filled.setter
    def filled(self, value: bool) -> None:
        self._move(bool(value), self.memory_index, self.env_index)

    @property
    def memory_index(self) -> int:
        """The row that is written next; while environments are more than a row apart, the furthest one's."""
        low, high = self._heads()
        return (high if high - low > 1 else low) % self.memory_size

    @memory_index.setter
    def memory_index(self, value: int) -> None:
        self._move(self.filled, _up_to("memory_index", value, self.memory_size), self.env_index)

    @property
    def env_index(self) -> int:
        """How many environments have been written in that row, while all are within one row; else 0."""
        low, high = self._heads()
        return int((self._storage.ring.head > low).sum()) if high - low == 1 else 0

    @env_index.setter
    def env_index(self, value: int) -> None:
        self._move(self.filled, self.memory_index, _up_to("env_index", value, self.num_envs))

    def _move(self, filled: bool, memory_index: int, env_index: int) -> None:
        """Makes what lies in the tensors up to there the rows of the memory, or, further back, the only ones."""
        storage, lanes, (low, high) = self._store(), np.arange(self.num_envs), self._heads()
        now = self.memory_size * self.filled + self.memory_index + (lanes < self.env_index)
        then = self.memory_size * filled + memory_index + (lanes < env_index)
        starts_anew = high - low > 1 or bool((then < now).any())
        first, counts = (0, then) if starts_anew else (storage.ring.head[:, None], then - now)
        slots = (first + np.zeros((lanes.size, 1), np.int64) + np.arange(counts.max())) % self.memory_size
        found = storage.columns.gather(self._dtypes, storage.columns.rows(lanes[:, None], slots))
        if starts_anew:
            storage.clear()
        if counts.any():
            block = dict(zip(self._dtypes, found, strict=True))
            storage.write(block, lengths=counts, done=ends_of(block, slots.shape))

    def _heads(self) -> tuple[int, int]:
        head = self._storage.ring.head
        return int(head.min()), int(head.max())

    @property
    def tensors(self) -> dict[str, Any]:
        """Name -> tensor, as `get_tensor_by_name`; what is put under a name is copied, as by `set_tensor_by_name`.

        Put under a new name, `(memory_size, num_envs, *data)` makes a tensor: derived classes do, that make theirs.
        """
        return LiveTensors(self._dtypes, self._live, self._put)

    def _put(self, name: str, values: Any) -> None:
        shape = tuple(getattr(values, "shape", ()))
        if name not in self._dtypes and len(shape) > 2 and shape[:2] == (self.memory_size, self.num_envs):
            check_name(name)
            self._add(name, self._dtype(name, values.dtype), shape[2:])
        self.set_tensor_by_name(name, values)

    @property
    def tensors_view(self) -> dict[str, Any]:
        """Name -> tensor by flat index, `(memory_size * num_envs, *data)`; otherwise as `tensors`."""

        def put(name: str, values: Any) -> None:
            self._check_name(name)
            self.set_tensor_by_name(name, values.reshape((self.memory_size, self.num_envs, *values.shape[1:])))

        return LiveTensors(self._dtypes, lambda name: self._live(name, keepdim=False), put)

    @property
    def tensors_keep_dimensions(self) -> dict[str, bool]:
        """Name -> whether rows have other than one axis; of skrl before its version 2."""
        return {name: len(self._spec(name).shape) != 1 for name in self._dtypes}

    @property
    def all_sequence_indexes(self) -> np.ndarray:
        """Every flat index, one environment after another, int64."""
        return np.arange(self.memory_size * self.num_envs).reshape(self.memory_size, self.num_envs).T.ravel()

    def get_tensor_names(self) -> list[str]:
        """Names in alphabetical order."""
        return sorted(self._dtypes)

    def get_tensor_by_name(self, name: str, keepdim: bool = True) -> Any:
        """The live tensor `(memory_size, num_envs, *data)`, unwritten rows included; in jax a copy of it.

        Args:
            name: of the tensor.
            keepdim: False for the tensor by flat index, as `tensors_view` has it.

        Raises:
            MissingKeyError: there is no such tensor.
        """
        self._check_name(name)
        return self._live(name, keepdim)

    def _live(self, name: str, keepdim: bool = True) -> Any:
        rows = self._rows_of(name) if keepdim else self._store().columns.flat[name]
        self._own.add(name)
        return self.framework.live(rows, self._dtypes[name], repr(name))

    def set_tensor_by_name(self, name: str, tensor: Any) -> None:
        """Copies into a tensor, with broadcasting. Which rows are valid does not change.

        Raises:
            MissingKeyError, SpecError: there is no such tensor, or the value does not fit.
        """
        self._check_name(name)
        columns, spec = self._store().columns, self._spec(name)
        values = encoded(name, self._taken(name, tensor), spec)
        shape = (self.memory_size, self.num_envs, *spec.shape)
        try:
            values = values.expand(shape) if isinstance(values, torch.Tensor) else np.broadcast_to(values, shape)
        except (ValueError, RuntimeError) as error:
            raise SpecError(f"{name!r} has shape {tuple(values.shape)}, needed is {shape}") from error
        values = columns.check(name, values, shape[:2])
        columns.put_cells(name, slice(None), slice(None), values.swapaxes(0, 1))
        self._own.add(name)
        if name in ENDS:
            self._storage.rebuild_episodes(self._ends_by_slot())

    def _rows_of(self, name: str) -> Any:
        return self._store().columns.cells[name].swapaxes(0, 1)

    def _ends_by_slot(self) -> np.ndarray:
        done = ends_of(self._storage.columns.cells, (self.num_envs, self.memory_size))
        assert done is not None
        return done

    def _check_name(self, name: str) -> None:
        if name not in self._dtypes:
            raise MissingKeyError(f"no tensor {name!r} in this memory, there are {self.get_tensor_names()}")

    # Making tensors

    def create_tensor(self, name: str, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
        """Adds a tensor: NaN in unwritten rows if it is a float one, zeros otherwise.

        Args:
            name: of the tensor.
            size: numbers per row: an int, a list of them (their product), a gymnasium space, or None for
                no tensor at all.
            dtype: one of the library's; None for its default float.
            keep_dimensions: whether rows have the shape `size` rather than one axis.

        Returns:
            Whether one was added: False for a size of None, or a tensor that is there already.

        Raises:
            TypeError, SpecError: size or dtype are not what is needed, or the tensor is there with others.
            OutOfMemoryError: the memory would not fit into what the machine has.
        """
        if size is None:
            return False
        check_name(name)
        shape = _kept(size) if keep_dimensions else (n_elements(size),)
        named = self._dtype(name, dtype)
        if name in self._dtypes:
            self._check_same(name, shape, None if dtype is None else named)
            return False
        self._add(name, named, shape)
        return True

    def _dtype(self, name: str, dtype: Any) -> Any:
        """The framework's own name of a dtype, of which columns can be.

        Raises:
            SpecError: there is none; names the tensor.
        """
        return self._checked_dtype(name, self.framework.dtype, dtype)

    def _dtype_named(self, name: str, dtype: torch.dtype) -> Any:
        """The same of a dtype of torch's."""
        return self._checked_dtype(name, self.framework.named, str(dtype).removeprefix("torch."))

    def _checked_dtype(self, name: str, convert: Callable[[Any], Any], dtype: Any) -> Any:
        try:
            named = convert(dtype)
            spec_of(self.framework, named, ())
        except SpecError as error:
            raise SpecError(f"tensor {name!r}: {error}") from error
        except TypeError as error:
            raise SpecError(f"tensor {name!r}: dtype {dtype} is not supported: {error}") from error
        return named

    def _add(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        spec = spec_of(self.framework, dtype, shape)
        self._check_room(f"tensor {name!r}", [spec])
        self._planned[name], self._dtypes[name] = spec, dtype
        self._write_step = _never  # until there is room for it

    def _check_room(self, owner: str, specs: Iterable[Spec]) -> None:
        """Raises OutOfMemoryError unless such tensors fit beside those that have yet to take their memory."""
        columns = self._storage.columns
        needed = sum(spec.nbytes for spec in (*self._planned.values(), *specs)) * columns.n_rows
        available = columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"{owner}: {needed:,} bytes are needed, {available:,} are available")

    def _check_same(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        spec = self._spec(name)
        if shape != spec.shape:
            raise SpecError(f"tensor {name!r} is there with rows of shape {spec.shape}, not {shape}")
        if dtype is not None and dtype != self._dtypes[name]:
            raise SpecError(f"tensor {name!r} is there with dtype {self._dtypes[name]}, not {dtype}")

    def _spec(self, name: str) -> Spec:
        return self._planned[name] if name in self._planned else self._storage.columns.specs[name]

    def _store(self) -> Storage:
        """The storage, with all tensors that were asked for."""
        if not self._planned:
            return self._storage
        for name in list(self._planned):
            self._storage.columns.add(name, self._planned[name])
            del self._planned[name]
            if name in ENDS:
                self._storage.track_episodes()
        self._find_writer()
        return self._storage

    def _find_writer(self) -> None:
        """Has steps written at once that need no more than to be copied."""
        if self._storage.columns.on_host and not self._planned:
            self._write_step = StepWriter(self._storage, tuple(name for name in ENDS if name in self._dtypes)).write

    def share_memory(self) -> None:
        """Moves tensors and indexes to memory that processes share which are started with this object.

        Each environment may be written by one process, while any read. Tensors that are created later
        stay with the process that creates them; what was got of a tensor before is no longer what lies in it.

        Raises:
            StateError: the rows lie on a GPU.
        """
        self._store().share()

    def reset(self) -> None:
        """Drops every row."""
        self._storage.clear()

    def _taken(self, name: str, value: Any) -> Any:
        """A value as it is, if it lies where the rows do and has the tensor's dtype; else as an array of numpy.

        skrl casts whatever comes. Here only the precision of floats may be lost: 1.0 is a bool, and 0.5 is none.
        """
        if name not in self._dtypes:
            return host_array(name, value)
        columns, spec = self._storage.columns, self._spec(name)
        own = None if columns.on_host else columns.own(self.framework.tensor_of(value), spec)
        return as_whole(host_array(name, value), spec) if own is None else own

    def _locks(self) -> Sequence[Any]:
        return [self._storage.lock]

    def _content(self) -> Any:
        return self._storage._content()

    def __getstate__(self) -> dict[str, Any]:
        # Devices of jax and warp belong to their process.
        device = self.framework.name_of_device(self.device)
        return {**super().__getstate__(), "device": device, "_write_step": _never}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self.device = self.framework.device(self.device)
        self._find_writer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_tensor_") and name.removeprefix("_tensor_") in vars(self).get("_dtypes", ()):
            return self.get_tensor_by_name(name.removeprefix("_tensor_"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _never(tensors: Mapping[str, Any]) -> bool:
    return False


def _up_to(name: str, value: Any, most: int) -> int:
    if check_count(name, value, 0) > most:
        raise SpecError(f"{name} must be at most {most}, got {value}")
    return int(value)


def _kept(size: Any) -> tuple[int, ...]:
    if not isinstance(size, (tuple, list)):
        raise SpecError(f"size must be a tuple or a list to keep its dimensions, got {size!r}")
    return tuple(check_count("size", n) for n in size)


def spec_of(framework: Framework, dtype: Any, shape: tuple[int, ...]) -> Spec:
    """How a column of this dtype is stored."""
    host = framework.host_dtype(dtype)
    if host is None:
        return Spec(np.dtype(np.int16), shape, is_bfloat16=True)
    if host.kind not in "biufc" or host.isbuiltin == OF_OTHERS:
        raise SpecError(f"dtype {dtype} is not supported; needed is a bool, an integer, a float or a complex number")
    return Spec(host, shape)
