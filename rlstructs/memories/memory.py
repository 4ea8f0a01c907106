"""The interface of skrl's memories over the one replay store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.memories import files
from rlstructs.memories.names import check_name, ends_of
from rlstructs.memories.tensors import NamedTensors, spec_of
from rlstructs.replay.blocks import as_slice, rounds
from rlstructs.replay.claims import Claims, plain_state
from rlstructs.replay.columns import Spec
from rlstructs.replay.from_trajectories import NAMES, STEP_ENDS, STEP_START, _padded, lanes_of, named_steps
from rlstructs.replay.roles import ENDS
from rlstructs.replay.values import encoded, host_array
from rlstructs.structures.trajectories import Trajectories


class Memory(NamedTensors, ABC):
    """Named tensors `(memory_size, num_envs, *data)` in which the newest rows of every environment are kept.

    What skrl has takes its arguments by name, or by place as skrl did before its version 2.

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

    # Writing

    def add_samples(self, **tensors: Any) -> None:
        """Appends a row of every environment, of some of them, or several rows of the only one.

        What `observations`, or else the first tensor, is decides: `(num_envs, ...)` is a row of each
        environment; with fewer, `(n, ...)`, of the next n in the row that is being filled; `(n, ...)`
        with a single environment is n rows of it; a row without that axis is one of the next environment.

        Args:
            tensors: name -> `(n, *data)` or `(*data)`, a number per row may come without its axis.
                Tensors that are left out get unwritten rows; but what `get_tensor_by_name` or `tensors` have
                given, or `set_tensor_by_name` has set, keeps what lies there, which the program may have written.

        Raises:
            SpecError: something does not fit; the memory is as it was.
        """
        if not self.export and self._write_quickly(tensors):
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
            known = self.get_tensor_names()
            raise MissingKeyError(f"none of {sorted(tensors)} is a tensor of this memory, there are {known}")
        block |= self._lying_there(self._own - block.keys(), lanes, lead[1])
        self._write(block, lanes, ends_of(block, lead))

    def _write_quickly(self, tensors: Mapping[str, Any]) -> bool:
        """Writes them if it is plain that they fit; whether it did. skrl's agents give what there is no tensor of, or
        leave out what they compute later."""
        if self._write_step(tensors):
            return True
        if self.strict:
            return False
        known = {name: value for name, value in tensors.items() if value is not None and name in self._dtypes}
        missing = self._dtypes.keys() - known.keys()
        if missing.intersection(ENDS) or not known:
            return False
        columns, slot = self._storage.columns, int(self._storage.ring.head[0]) % self.memory_size
        for name in missing:
            spec = self._spec(name)
            if name in self._own:
                known[name] = columns.cells[name][:, slot]
            else:
                known[name] = np.full((self.num_envs, *spec.shape), spec.unwritten, spec.dtype)
        return (bool(missing) or len(known) < len(tensors)) and self._write_step(known)

    def _lying_there(self, names: Iterable[str], lanes: Any, n_timesteps: int) -> dict[str, Any]:
        """What lies in the next rows of these environments, name -> (n, n_timesteps, *data)."""
        columns, heads = self._storage.columns, self._storage.ring.head[lanes]
        first = int(heads[0]) % self.memory_size
        end = first + n_timesteps
        if isinstance(lanes, slice) and end <= self.memory_size and (heads == heads[0]).all():
            return {name: columns.cells[name][:, first:end] for name in names}  # no index goes to a GPU
        slots = (heads[:, None] + np.arange(n_timesteps)) % self.memory_size
        rows, names = columns.rows(np.arange(self.num_envs)[lanes][:, None], slots), list(names)
        return dict(zip(names, columns.gather(names, rows), strict=True))

    def _write(self, block: Mapping[str, Any], lanes: Any, done: np.ndarray | None, **more: Any) -> None:
        storage = self._store()
        before = self._laps() if self.export else 0
        storage.write(block, lanes, done=done, **more)
        if self.export and self._laps() > before:
            self.save(self.export_directory, format=self.export_format)

    def _laps(self) -> int:
        ring = self._storage.ring
        return int((ring.head - ring.base).min()) // self.memory_size

    def _given(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        if not tensors:
            raise SpecError("add_samples: needs at least one tensor, got none")
        given = {name: value for name, value in tensors.items() if value is not None}
        if self.strict:
            if unknown := sorted(set(tensors) - set(self._dtypes)):
                raise MissingKeyError(f"add_samples: no tensor(s) {unknown}, there are {self.get_tensor_names()}")
            if nothing := sorted(set(tensors) - set(given)):
                raise SpecError(f"add_samples: {nothing} are None")
        if not given:
            raise SpecError("add_samples: every tensor is None")
        # What there is no tensor of is not looked at, but for the one that says how many rows come.
        first = "observations" if "observations" in given else next(iter(given))
        return {n: self._taken(n, value) for n, value in given.items() if n in self._dtypes or n == first}

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
        add(self, batch, names)

    # Reading

    def sample_by_index(self, names: Sequence[str], indexes: Any, mini_batches: int = 1) -> list[list[Any]]:
        """The rows with these flat indexes, private copies.

        Args:
            names: of tensors; those that there are not give None.
            indexes: int (n,), or of more axes, which the tensors then have too; in [0, memory_size * num_envs).
            mini_batches: into how many parts, of nearly the same size.

        Returns:
            For each part a list with the tensors, in the order of names.

        Raises:
            IndexError, SpecError: an index is out of range, or no integer.
        """
        rows = self._checked_rows(indexes)
        rows = rows.reshape(np.shape(indexes) or -1)
        names = self._checked_names(names)
        known = self._known(names)
        return self._batches(names, known, self._store().columns.gather(known, rows), len(rows), mini_batches)

    def sample_all(self, names: Sequence[str], mini_batches: int = 1, sequence_length: int = 1) -> list[list[Any]]:
        """Every valid row exactly once: by time, or, for sequences, one environment after another.

        Args:
            names: of tensors; those that there are not give None.
            mini_batches: into how many parts, of nearly the same size.
            sequence_length: parts hold whole sequences of so many rows; an environment's last may be shorter.
        """
        names = self._checked_names(names)
        check_count("sequence_length", max(sequence_length, 1) if isinstance(sequence_length, int) else sequence_length)
        storage = self._store()
        span = storage.span()
        rows, starts = (span.by_step(), None) if sequence_length <= 1 else span.by_lane(sequence_length)
        known = self._known(names)
        return self._batches(names, known, storage.columns.gather(known, rows), rows.size, mini_batches, starts)

    @abstractmethod
    def sample(
        self, names: Sequence[str], batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Rows drawn at random, private copies: for each mini-batch a list in the order of `names`."""

    def get_sampling_indexes(self) -> Any:
        """The flat indexes of the last `sample`, int64; None before it."""
        return self.sampling_indexes

    def _checked_names(self, names: Sequence[str]) -> list[str]:
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got the string {names!r}")
        if self.strict and (unknown := sorted(set(names) - set(self._dtypes))):
            raise MissingKeyError(f"no tensor(s) {unknown} in this memory, there are {self.get_tensor_names()}")
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
        if isinstance(mini_batches, bool) or not hasattr(mini_batches, "__index__"):
            raise TypeError(f"mini_batches must be an int, got {mini_batches!r}")
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

    def save(self, directory: str | Path = "", format: str | None = None) -> Path:  # noqa: A002 - skrl's name
        """Writes all to a file, whole or not at all: one in `directory`/memories, or the one that is named.

        Args:
            directory: "" for `export_directory`; or the name of a file, which ends in .pt, .npz or .csv and is no
                directory.
            format: "pt", "npz" or "csv" (valid rows only, with a .json beside it); None for what a file's name ends
                in, or "pt".

        Returns:
            The file. In a directory its name begins with the time, so that names sort by it.

        Raises:
            SpecError: no such format, or not the one that the file's name ends in.
            OSError: the directory cannot be written to.
        """
        path, format = files.target(self, directory or self.export_directory, format)  # noqa: A001
        with self._hold_locks():
            return files.save(self, path, format)

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
        return {**sizes, "tensors": tensors, "rng": plain_state(self._rng)}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        """What else a file holds."""
        return {}

    def _checked_more(
        self, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any], claims: Claims
    ) -> Callable[[], None]:
        """What restores it; raises ValueError, KeyError or TypeError if it does not fit."""
        return lambda: None


def add(memory: Memory, batch: Trajectories, names: Mapping[str, str] | None) -> None:
    """Appends the valid steps of a batch, whole or not at all."""
    if not isinstance(batch, Trajectories):
        raise TypeError(f"add_trajectories: needs Trajectories, got {type(batch).__name__}")
    steps = batch.trajectories
    names = named_steps(NAMES if names is None else names, list(steps.keys()))
    for key in names.values():
        if key not in steps:
            raise MissingKeyError(f"add_trajectories: no {key!r} in the trajectories, there are {sorted(steps.keys())}")
    lanes, lengths = lanes_of(batch, memory.num_envs, "add_trajectories"), host_array("lengths", steps.lengths)
    shapes = {name: _row_shape(memory, name, tuple(steps[key].shape)) for name, key in names.items()}
    lead = (len(lanes), steps.n_timesteps())
    columns, block, missing = memory._storage.columns, {}, {}
    for name, key in names.items():
        if name in memory._dtypes:
            spec = memory._spec(name)
        else:
            check_name(name)
            missing[name] = memory._dtype_named(name, steps[key].dtype)
            spec = spec_of(memory.framework, missing[name], shapes[name])
        own = columns.own(steps[key], spec)
        rows = encoded(name, _padded(host_array(name, steps[key]), spec, lengths) if own is None else own, spec)
        block[name] = columns.converted(name, rows.reshape(*lead, *shapes[name]), spec)
    memory._check_room("add_trajectories", [spec_of(memory.framework, missing[name], shapes[name]) for name in missing])
    for name, dtype in missing.items():
        memory._add(name, dtype, shapes[name])
    ends = [host_array(key, steps[key]).astype(bool) for key in STEP_ENDS if key in steps]
    done = np.logical_or.reduce([*ends, np.zeros(lead, bool) if (own := ends_of(block, lead)) is None else own])
    starts = host_array(STEP_START, steps[STEP_START]).astype(bool) if STEP_START in steps else None
    for rows in rounds(lanes):
        every = isinstance(rows, slice)
        part = lengths if every else lengths[rows]
        memory._write(
            block if every else {name: array[rows] for name, array in block.items()},
            as_slice(lanes if every else lanes[rows]),
            done if every else done[rows],
            lengths=None if (part == lead[1]).all() else part,
            starts=None if starts is None else starts if every else starts[rows],
        )


def _row_shape(memory: Memory, name: str, given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a row of this tensor: its own, if it has as many numbers; else that of the values."""
    found = given[2:] or (1,)
    if name not in memory._dtypes:
        return found
    shape = memory._spec(name).shape
    if np.prod(found, dtype=int) != np.prod(shape, dtype=int):
        raise SpecError(f"add_trajectories: {name!r} has rows of shape {given[2:]}, the tensor's are {shape}")
    return shape
