"""The interface of skrl's memories over the one replay store.

A tensor is `(memory_size, num_envs, *data)`. A flat index is `row * num_envs + env`. Each environment is
a lane of the store with a head of its own, so that environments need not be in step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError
from rlstructs.memories import files, trajectories
from rlstructs.memories.framework import Framework, encoded, host_array, spec_of
from rlstructs.memories.names import ENDS, check_name, ends_of
from rlstructs.memories.spaces import n_elements
from rlstructs.replay.columns import SLOT, Columns, Spec
from rlstructs.replay.episodes import BYTES_PER_ROW
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.storage import Storage, check_size
from rlstructs.replay.tensor_columns import TensorColumns


class Memory(ABC):
    """Named tensors `(memory_size, num_envs, *data)` in which the newest rows of every environment are kept.

    Args:
        memory_size: rows per environment.
        num_envs: environments.
        device: where batches are wanted; None for the library's default one. On a GPU the rows lie there too.
        export: whether the memory is saved each time that it has filled.
        export_format: "pt", "npz" or "csv".
        export_directory: where to; a folder `memories` is made there.
        seed: of the random generator; None takes one from the library's global generator.
        strict: whether names without a tensor, and values that are None, are errors rather than skipped.

    Raises:
        TypeError, SpecError: an argument is not what is needed.
    """

    framework: Framework

    def __init__(
        self,
        *,
        memory_size: int,
        num_envs: int = 1,
        device: Any = None,
        export: bool = False,
        export_format: str = "pt",
        export_directory: str | Path = "",
        seed: int | None = None,
        strict: bool = False,
    ) -> None:
        self.memory_size = check_size("memory_size", memory_size)
        self.num_envs = check_size("num_envs", num_envs)
        self.device = self.framework.device(device)
        self.export = export
        self.export_format = files.checked_format(export_format)
        self.export_directory = export_directory
        self.strict = strict
        self.sampling_indexes: Any = None
        self._rng = np.random.default_rng(self.framework.new_seed() if seed is None else seed)
        self._dtypes: dict[str, Any] = {}
        # Tensors that were asked for; they get their bytes when one is first needed.
        self._planned: dict[str, Spec] = {}
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

    @property
    def filled(self) -> bool:
        """Whether every environment has wrapped."""
        return bool(self._storage.ring.is_full().all())

    @property
    def memory_index(self) -> int:
        """The row that is written next; while environments are more than a row apart, the furthest one's."""
        low, high = self._heads()
        return (high if high - low > 1 else low) % self.memory_size

    @property
    def env_index(self) -> int:
        """How many environments have been written in that row, while all are within one row; else 0."""
        low, high = self._heads()
        return int((self._storage.ring.head > low).sum()) if high - low == 1 else 0

    def _heads(self) -> tuple[int, int]:
        head = self._storage.ring.head
        return int(head.min()), int(head.max())

    @property
    def tensors(self) -> dict[str, Any]:
        """Name -> tensor, as `get_tensor_by_name`."""
        return {name: self.get_tensor_by_name(name) for name in self.get_tensor_names()}

    @property
    def tensors_view(self) -> dict[str, Any]:
        """Name -> tensor by flat index, `(memory_size * num_envs, *data)`."""
        flat = self._store().columns.flat
        return {name: self.framework.live(flat[name], self._dtypes[name], repr(name)) for name in self._dtypes}

    @property
    def all_sequence_indexes(self) -> np.ndarray:
        """Every flat index, one environment after another, int64."""
        return np.arange(self.memory_size * self.num_envs).reshape(self.memory_size, self.num_envs).T.ravel()

    def get_tensor_names(self) -> tuple[str, ...]:
        """Names in alphabetical order."""
        return tuple(sorted(self._dtypes))

    def get_tensor_by_name(self, name: str) -> Any:
        """The live tensor `(memory_size, num_envs, *data)`, unwritten rows included; in jax a copy of it.

        Raises:
            MissingKeyError: there is no such tensor.
        """
        self._check_name(name)
        return self.framework.live(self._rows_of(name), self._dtypes[name], repr(name))

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
            raise MissingKeyError(f"no tensor {name!r} in this memory, there are {list(self.get_tensor_names())}")

    # Making tensors

    def create_tensor(self, name: str, *, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
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
        named = self.framework.dtype(dtype)
        if name in self._dtypes:
            self._check_same(name, shape, None if dtype is None else named)
            return False
        self._add(name, named, shape)
        return True

    def _add(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        spec = spec_of(self.framework, dtype, shape)
        columns = self._storage.columns
        needed, available = spec.nbytes * columns.n_rows, columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"tensor {name!r}: {needed:,} bytes are needed, {available:,} are available")
        self._planned[name], self._dtypes[name] = spec, dtype
        self._write_step = _never  # until there is room for it

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
        if self._storage.columns.on_host:
            self._write_step = StepWriter(self._storage, tuple(name for name in ENDS if name in self._dtypes)).write
        return self._storage

    def share_memory(self) -> None:
        """Moves tensors and indexes to memory that processes share which are started with this object.

        Each environment may be written by one process, while any read. Tensors that are created later
        stay with the process that creates them.

        Raises:
            StateError: the rows lie on a GPU.
        """
        self._store().share()

    def reset(self) -> None:
        """Drops every row."""
        self._storage.clear()

    # Writing

    def add_samples(self, **tensors: Any) -> None:
        """Appends a row of every environment, of some of them, or several rows of the only one.

        What `observations`, or else the first tensor, is decides: `(num_envs, ...)` is a row of each
        environment; with fewer, `(n, ...)`, of the next n in the row that is being filled; `(n, ...)`
        with a single environment is n rows of it; a row without that axis is one of the next environment.

        Args:
            tensors: name -> `(n, *data)` or `(*data)`, a number per row may come without its axis.
                Tensors that are left out get unwritten rows.

        Raises:
            SpecError: something does not fit; the memory is as it was.
        """
        if not self.export and self._write_step(tensors):
            return
        given = self._given(tensors)
        n = self._n_rows_given(given)
        if n == 0:
            return
        lanes, lead = self._place(1 if n is None else n)
        specs, rows = self._store().columns.specs, () if n is None else (n,)
        block = {}
        for name, values in given.items():
            if name in specs:
                block[name] = self._shaped(name, values, rows, specs[name]).reshape(lead + specs[name].shape)
        if not block:
            known = list(self.get_tensor_names())
            raise MissingKeyError(f"none of {sorted(tensors)} is a tensor of this memory, there are {known}")
        self._write(block, lanes, ends_of(block, lead))

    def _write(self, block: Mapping[str, Any], lanes: Any, done: np.ndarray | None, **more: Any) -> None:
        storage = self._store()
        before = self._laps() if self.export else 0
        storage.write(block, lanes, done=done, **more)
        if self.export and self._laps() > before:
            self.save(self.export_directory, format=self.export_format)

    def _laps(self) -> int:
        ring = self._storage.ring
        return int((ring.head - ring.base).min()) // self.memory_size

    def _taken(self, name: str, value: Any) -> Any:
        """A value as it is, if it lies where the rows do and has the tensor's dtype; else as an array of numpy."""
        columns = self._storage.columns
        if not columns.on_host and name in self._dtypes:
            own = columns.own(self.framework.tensor_of(value), self._spec(name))
            if own is not None:
                return own
        return host_array(name, value)

    def _given(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        if not tensors:
            raise SpecError("add_samples: needs at least one tensor, got none")
        given = {name: self._taken(name, value) for name, value in tensors.items() if value is not None}
        if self.strict:
            if unknown := sorted(set(tensors) - set(self._dtypes)):
                raise MissingKeyError(f"add_samples: no tensor(s) {unknown}, there are {list(self.get_tensor_names())}")
            if nothing := sorted(set(tensors) - set(given)):
                raise SpecError(f"add_samples: {nothing} are None")
        if not given:
            raise SpecError("add_samples: every tensor is None")
        return given

    def _n_rows_given(self, given: Mapping[str, Any]) -> int | None:
        """How many rows come; None for one without an axis for them."""
        name = "observations" if "observations" in given else next(iter(given))
        values = given[name]
        n_data_axes = len(self._spec(name).shape) if name in self._dtypes else 1
        if values.ndim == n_data_axes + 1:
            return len(values)
        if values.ndim == 1 and name in self._dtypes and self._spec(name).shape == (1,) and len(values) != 1:
            return len(values)
        if values.ndim == n_data_axes:
            return None
        raise SpecError(f"add_samples: {name!r} has shape {tuple(values.shape)}, needed is (n, *data) or (*data)")

    def _place(self, n: int) -> tuple[Any, tuple[int, int]]:
        """The environments that `n` rows go to, and the axes (n environments, n rows) they make."""
        if n == self.num_envs:
            return slice(None), (n, 1)
        if self.num_envs == 1:
            return slice(None), (1, n)
        if n > self.num_envs:
            raise SpecError(f"add_samples: {n} rows are more than the {self.num_envs} environments")
        head = self._storage.ring.head
        behind = np.flatnonzero(head == head.min())
        if n > len(behind):
            raise SpecError(f"add_samples: {n} rows do not fit, {len(behind)} environments are left in this row")
        return behind[:n], (n, 1)

    def _shaped(self, name: str, values: Any, rows: tuple[int, ...], spec: Spec) -> Any:
        if values.shape != rows + spec.shape and not (spec.shape == (1,) and values.shape == rows):
            raise SpecError(f"add_samples: {name!r} has shape {tuple(values.shape)}, needed is {rows + spec.shape}")
        return encoded(name, values, spec)

    def add_trajectories(self, batch: Any, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of what `RL_Batcher.get` gives; the lane of a row is its `env_index`.

        Args:
            batch: `Trajectories`.
            names: tensor -> key of the trajectories; None for `observations`, `next_observations`,
                `actions`, `rewards`, `terminated` and `truncated`. Tensors that are missing are made.

        Raises:
            MissingKeyError, SpecError: something does not fit; the memory is as it was.
        """
        trajectories.add(self, batch, names)

    # Reading

    def sample_by_index(self, names: Sequence[str], *, indexes: Any, mini_batches: int = 1) -> list[list[Any]]:
        """The rows with these flat indexes, private copies.

        Args:
            names: of tensors; those that there are not give None.
            indexes: int (n,), in [0, memory_size * num_envs).
            mini_batches: into how many parts, of nearly the same size.

        Returns:
            For each part a list with the tensors, in the order of names.

        Raises:
            IndexError, SpecError: an index is out of range, or no integer.
        """
        rows = self._checked_rows(indexes)
        names = self._checked_names(names)
        known = self._known(names)
        return self._batches(names, known, self._store().columns.gather(known, rows), rows.size, mini_batches)

    def sample_all(
        self, names: Sequence[str], *, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Every valid row exactly once: by time, or, for sequences, one environment after another.

        Args:
            names: of tensors; those that there are not give None.
            mini_batches: into how many parts, of nearly the same size.
            sequence_length: parts hold whole sequences of so many rows; an environment's last may be shorter.
        """
        names = self._checked_names(names)
        check_size("sequence_length", max(sequence_length, 1) if isinstance(sequence_length, int) else sequence_length)
        storage = self._store()
        span = storage.span()
        rows, starts = (span.by_step(), None) if sequence_length <= 1 else span.by_lane(sequence_length)
        known = self._known(names)
        return self._batches(names, known, storage.columns.gather(known, rows), rows.size, mini_batches, starts)

    @abstractmethod
    def sample(
        self, names: Sequence[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Rows drawn at random, private copies: for each mini-batch a list in the order of `names`."""

    def get_sampling_indexes(self) -> Any:
        """The flat indexes of the last `sample`, int64; None before it."""
        return self.sampling_indexes

    def _checked_names(self, names: Sequence[str]) -> list[str]:
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got the string {names!r}")
        if self.strict and (unknown := sorted(set(names) - set(self._dtypes))):
            raise MissingKeyError(f"no tensor(s) {unknown} in this memory, there are {list(self.get_tensor_names())}")
        return list(names)

    def _known(self, names: list[str]) -> list[str]:
        dtypes = self._dtypes
        return [name for name in names if name in dtypes]

    def _checked_rows(self, indexes: Any) -> np.ndarray:
        rows = host_array("indexes", indexes)
        if rows.dtype.kind not in "iu" and rows.size:
            raise SpecError(f"indexes must be integers, got {rows.dtype}")
        rows = rows.reshape(-1).astype(np.int64)
        n_rows = self.memory_size * self.num_envs
        if rows.size and (rows.min() < 0 or rows.max() >= n_rows):
            wrong = rows[(rows < 0) | (rows >= n_rows)][0]
            raise IndexError(f"indexes must be in [0, {n_rows}), got {wrong}")
        return rows

    def _batches(
        self,
        names: list[str],
        known: list[str],
        arrays: list[Any],
        n_rows: int,
        mini_batches: int,
        starts: np.ndarray | None = None,
    ) -> list[list[Any]]:
        """Hands arrays over in parts; a part begins only at one of `starts`, if they are given."""
        dtypes = [self._dtypes[name] for name in known]
        if mini_batches <= 1:
            return [self._in_order(names, known, self.framework.hand_over(arrays, dtypes, self.device))]
        bounds = np.arange(n_rows + 1) if starts is None else np.append(starts, n_rows)
        batches = []
        for part in np.array_split(np.arange(len(bounds) - 1), mini_batches):
            low, high = (bounds[part[0]], bounds[part[-1] + 1]) if part.size else (n_rows, n_rows)
            parts = self.framework.hand_over([array[low:high] for array in arrays], dtypes, self.device)
            batches.append(self._in_order(names, known, parts))
        return batches

    @staticmethod
    def _in_order(names: list[str], known: list[str], tensors: list[Any]) -> list[Any]:
        """A tensor for each name, None where there is no such tensor."""
        if len(names) == len(known):
            return tensors
        found = iter(tensors)
        return [next(found) if name in known else None for name in names]

    # Files

    def save(self, directory: str | Path = "", *, format: str = "pt") -> Path:  # noqa: A002 - skrl's name
        """Writes all to a file in `directory`/memories, whole or not at all.

        Args:
            directory: "" for `export_directory`.
            format: "pt", "npz" or "csv" (valid rows only, with a .json beside it).

        Returns:
            The file. Its name begins with the time, so that names sort by it.

        Raises:
            SpecError: no such format.
            OSError: the directory cannot be written to.
        """
        return files.save(self, directory or self.export_directory, files.checked_format(format))

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote: rows, length, cursor and random stream. Missing tensors are made.

        Raises:
            FileError: the file is damaged, of another version, or of a memory of another size; the memory
                is as it was.
        """
        files.load(self, Path(path))

    def _state(self) -> dict[str, Any]:
        """What a file says of this memory beside its arrays."""
        name_of = self.framework.name_of
        tensors = {name: [name_of(dtype), self._spec(name).shape] for name, dtype in self._dtypes.items()}
        sizes = {"memory_size": self.memory_size, "num_envs": self.num_envs}
        return {**sizes, "tensors": tensors, "rng": self._rng.bit_generator.state}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        """What else a file holds."""
        return {}

    def _checked_more(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> Callable[[], None]:
        """What restores it; raises ValueError, KeyError or TypeError if it does not fit."""
        return lambda: None

    def __getstate__(self) -> dict[str, Any]:
        # Devices of jax and warp belong to their process.
        return {**vars(self), "device": self.framework.name_of_device(self.device), "_write_step": _never}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.device = self.framework.device(self.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_tensor_") and name.removeprefix("_tensor_") in vars(self).get("_dtypes", ()):
            return self.get_tensor_by_name(name.removeprefix("_tensor_"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _never(tensors: Mapping[str, Any]) -> bool:
    return False


def _kept(size: Any) -> tuple[int, ...]:
    if not isinstance(size, (tuple, list)):
        raise SpecError(f"size must be a tuple or a list to keep its dimensions, got {size!r}")
    return tuple(check_size("size", n) for n in size)
