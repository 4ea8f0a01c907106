"""`Memory`, skrl's interface to the replay store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.memories import files
from rlstructs.memories.from_trajectories import add_steps
from rlstructs.memories.names import find_ends
from rlstructs.memories.tensors import NamedTensors
from rlstructs.replay.claims import Claims, plain_state
from rlstructs.replay.columns import Spec
from rlstructs.replay.from_trajectories import NAMES, take_trajectories
from rlstructs.replay.roles import ENDS
from rlstructs.replay.values import encoded, row_ids


class Memory(NamedTensors, ABC):
    """Named tensors `(memory_size, num_envs, *data)` that hold the newest rows of every environment.

    Methods of skrl's memories take arguments by name, or by position as before skrl 2.

    Args:
        memory_size: rows per environment.
        num_envs: number of environments.
        device: device of batches; None for the library's default. On a GPU the rows are stored there too.
        export: whether to save the memory each time it has filled up.
        export_format: "pt", "npz" or "csv".
        export_directory: folder to save to, in a subfolder `memories`.
        seed: of the random generator; None draws a seed from the library's global generator.
        strict: whether unknown names, None values, numbers that do not fit their tensor's dtype and unknown devices are
            errors. Otherwise the former are skipped and numbers are cast, as in skrl; the default device, with a
            warning in the log, takes the place of one that is unknown.

    Raises:
        TypeError, SpecError: an argument is invalid.
    """

    # Writing

    def add_samples(self, **tensors: Any) -> None:
        """Appends one row for all or some environments, or several rows for a single environment.

        The shape of `observations`, or of the first tensor if they are not given, decides:

        - `(num_envs, ...)`: one row for each environment.
        - `(n, ...)` with n < num_envs: one row for each of the next n environments of the current row.
        - `(n, ...)` with a single environment: n rows.
        - no leading axis: one row for the next environment.

        Args:
            tensors: name -> `(n, *data)` or `(*data)`; single numbers may be given without a data axis.
                Rows of omitted tensors become unwritten. But tensors that the program got by `get_tensor_by_name` or
                `tensors`, or set by `set_tensor_by_name`, keep what it wrote to these rows.

        Raises:
            SpecError: a tensor does not fit; nothing is added. Nor is it if there is no tensor of any of these names.
        """
        if not self.export and self._write_quickly(tensors):
            return
        given = self._check_given(tensors)
        n = self._count_rows(given) if given else 0
        if n == 0:
            return
        lanes, lead = self._choose_lanes(1 if n is None else n)
        specs, rows = self._store().columns.specs, () if n is None else (n,)
        block = {}
        for name, values in given.items():
            if name in specs:
                block[name] = self._check_shape(name, values, rows, specs[name]).reshape(lead + specs[name].shape)
        block |= self._read_next_rows(self._exposed - block.keys(), lanes, lead[1])
        self._write(block, lanes, find_ends(block))

    def _write_quickly(self, tensors: Mapping[str, Any]) -> bool:
        """Writes a row of each environment without conversion; returns False if that is impossible.

        skrl's agents give values for tensors that do not exist, and omit those that they compute later.
        """
        if self._planned:  # they have no bytes yet
            return False
        if self._step_writer.write(tensors) is not None:
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
            if name in self._exposed:
                known[name] = columns.cells[name][:, slot]
            else:
                known[name] = np.full((self.num_envs, *spec.shape), spec.unwritten, spec.dtype)
        return (bool(missing) or len(known) < len(tensors)) and self._step_writer.write(known) is not None

    def _read_next_rows(self, names: Iterable[str], lanes: Any, n_timesteps: int) -> dict[str, Any]:
        """Reads the next rows of these environments, name -> (n, n_timesteps, *data)."""
        columns, heads = self._storage.columns, self._storage.ring.head[lanes]
        first = int(heads[0]) % self.memory_size
        end = first + n_timesteps
        if isinstance(lanes, slice) and end <= self.memory_size and (heads == heads[0]).all():
            return {name: columns.cells[name][:, first:end] for name in names}  # no index goes to a GPU
        steps, names = heads[:, None] + np.arange(n_timesteps), list(names)
        rows = columns.at_steps(np.arange(self.num_envs)[lanes][:, None], steps)
        return dict(zip(names, columns.gather(names, rows), strict=True))

    def _write(self, block: Mapping[str, Any], lanes: Any, done: np.ndarray | None, **more: Any) -> None:
        storage = self._store()
        before = self._n_laps() if self.export else 0
        storage.write(block, lanes, done=done, **more)
        if self.export and self._n_laps() > before:
            self.save(self.export_directory, format=self.export_format)

    def _n_laps(self) -> int:
        """Counts how often every environment has filled all its rows."""
        ring = self._storage.ring
        return int((ring.head - ring.base).min()) // self.memory_size

    def _check_given(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays of the tensors, and of what else says how many rows there are; none if there is no tensor of these."""
        if not tensors:
            raise SpecError("add_samples: needs at least one tensor, got none")
        given = {name: value for name, value in tensors.items() if value is not None}
        if self.strict:
            if unknown := sorted(set(tensors) - set(self._dtypes)):
                raise MissingKeyError(f"add_samples: no tensor(s) {unknown}, there are {self.get_tensor_names()}")
            if nothing := sorted(set(tensors) - set(given)):
                raise SpecError(f"add_samples: {nothing} are None")
        if not given and not self._dtypes.keys().isdisjoint(tensors):
            raise SpecError("add_samples: every tensor is None")
        if self._dtypes.keys().isdisjoint(given):
            return {}
        # Values without a tensor are ignored, except those whose shape gives the number of rows.
        first = "observations" if "observations" in given else next(iter(given))
        return {n: self._convert(n, value) for n, value in given.items() if n in self._dtypes or n == first}

    def _count_rows(self, given: Mapping[str, Any]) -> int | None:
        """Counts the given rows; returns None for a single row without an axis for rows."""
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

    def _choose_lanes(self, n: int) -> tuple[Any, tuple[int, int]]:
        """Chooses the environments that take `n` rows; returns them and the leading axes (environments, rows)."""
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

    def _check_shape(self, name: str, values: Any, rows: tuple[int, ...], spec: Spec) -> Any:
        if values.shape != rows + spec.shape and not (spec.shape == (1,) and values.shape == rows):
            raise SpecError(f"add_samples: {name!r} has shape {tuple(values.shape)}, needed is {rows + spec.shape}")
        return encoded(name, values, spec)

    def add_trajectories(self, batch: Any, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch of `RL_Batcher.get`, each to the environment in `env_index`.

        Args:
            batch: `Trajectories`.
            names: tensor -> key of the trajectories; None for `observations`, `next_observations`,
                `actions`, `rewards`, `terminated` and `truncated`. Missing tensors are created.

        Raises:
            MissingKeyError, SpecError: a tensor does not fit; nothing is added.
        """
        names = NAMES if names is None else names
        add_steps(self, take_trajectories(batch, names, self.num_envs, limit="the memory's num_envs"))

    # Reading

    def sample_by_index(self, names: Sequence[str], indexes: Any, mini_batches: int = 1) -> list[list[Any]]:
        """Copies of the rows with these flat indexes.

        Args:
            names: names of tensors; unknown ones give None.
            indexes: int (n,) in [0, memory_size * num_envs); may have more axes, which the result then has too.
            mini_batches: number of parts, of nearly equal size.

        Returns:
            For each part a list of tensors, in the order of `names`.

        Raises:
            IndexError, SpecError: an index is out of range or not an integer.
        """
        rows = np.atleast_1d(row_ids(indexes, self.memory_size * self.num_envs))
        names = self._check_names(names)
        known = self._drop_unknown(names)
        return self._batches(names, known, self._store().columns.gather(known, rows), len(rows), mini_batches)

    def sample_all(self, names: Sequence[str], mini_batches: int = 1, sequence_length: int = 1) -> list[list[Any]]:
        """Copies of all valid rows, each once: ordered by time, or for sequences by environment.

        Args:
            names: names of tensors; unknown ones give None.
            mini_batches: number of parts, of nearly equal size.
            sequence_length: rows per sequence; parts hold whole sequences. The last one of an environment may be
                shorter.
        """
        names = self._check_names(names)
        check_count("sequence_length", max(sequence_length, 1) if isinstance(sequence_length, int) else sequence_length)
        storage = self._store()
        span = storage.span()
        rows, starts = (span.by_step(), None) if sequence_length <= 1 else span.by_lane(sequence_length)
        known = self._drop_unknown(names)
        return self._batches(names, known, storage.columns.gather(known, rows), rows.size, mini_batches, starts)

    @abstractmethod
    def sample(
        self, names: Sequence[str], batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Draws rows at random: for each mini-batch a list of copies, in the order of `names`."""

    def get_sampling_indexes(self) -> Any:
        """The flat indexes of the last `sample`, int64; None before it."""
        return self.sampling_indexes

    def _check_names(self, names: Sequence[str]) -> list[str]:
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got the string {names!r}")
        if self.strict and (unknown := sorted(set(names) - set(self._dtypes))):
            raise MissingKeyError(f"no tensor(s) {unknown} in this memory, there are {self.get_tensor_names()}")
        return list(names)

    def _drop_unknown(self, names: list[str]) -> list[str]:
        dtypes = self._dtypes
        return [name for name in names if name in dtypes]

    def _batches(
        self,
        names: list[str],
        known: list[str],
        arrays: list[Any],
        n_rows: int,
        mini_batches: int,
        starts: np.ndarray | None = None,
    ) -> list[list[Any]]:
        """Hands arrays over in `mini_batches` parts, each of which begins at one of `starts` if they are given."""
        if isinstance(mini_batches, bool) or not hasattr(mini_batches, "__index__"):
            raise TypeError(f"mini_batches must be an int, got {mini_batches!r}")
        dtypes = [self._dtypes[name] for name in known]
        if mini_batches <= 1:
            return [self._place_by_name(names, known, self.framework.hand_over(arrays, dtypes, self.device))]
        bounds = np.arange(n_rows + 1) if starts is None else np.append(starts, n_rows)
        batches = []
        for part in np.array_split(np.arange(len(bounds) - 1), mini_batches):
            low, high = (bounds[part[0]], bounds[part[-1] + 1]) if part.size else (n_rows, n_rows)
            parts = self.framework.hand_over([array[low:high] for array in arrays], dtypes, self.device)
            batches.append(self._place_by_name(names, known, parts))
        return batches

    @staticmethod
    def _place_by_name(names: list[str], known: list[str], tensors: list[Any]) -> list[Any]:
        """Returns the tensor of each name, None for unknown ones."""
        if len(names) == len(known):
            return tensors
        found = iter(tensors)
        return [next(found) if name in known else None for name in names]

    # Files

    def save(self, directory: str | Path = "", format: str | None = None) -> Path:  # noqa: A002 - skrl's name
        """Saves the memory to a file, completely or not at all, while other threads that add rows wait.

        Args:
            directory: a folder, whose subfolder `memories` gets a new file; or the path of a file that ends in .pt,
                .npz or .csv; "" for `export_directory`.
            format: "pt", "npz" or "csv" (only valid rows, with a .json beside it); None for the ending of the file,
                or "pt" in a folder.

        Returns:
            The path of the file. In a folder its name begins with the time, so that files sort by age.

        Raises:
            SpecError: the format is unknown, or differs from the file's ending.
            OSError: the folder cannot be written to.
        """
        path, format = files.choose_file(self, directory or self.export_directory, format)  # noqa: A001
        with self._hold_locks():
            return files.save(self, path, format)

    def load(self, path: str | Path) -> None:
        """Restores rows, length, cursor and random stream from a file of `save`; creates missing tensors.

        Of a file that skrl's memory wrote it restores the rows: those that are not NaN in every float tensor, the
        first one as the oldest. The random stream goes on.

        Raises:
            FileNotFoundError: there is no such file, or no .json beside a .csv that is not skrl's.
            FileError: the file is damaged, of another version, or of a memory of another size; nothing changes.
        """
        files.load(self, Path(path))

    def _state(self) -> dict[str, Any]:
        """Sizes, dtypes and random state, for the header of a file."""
        name_of = self.framework.dtype_name
        tensors = {name: [name_of(dtype), self._spec(name).shape] for name, dtype in self._dtypes.items()}
        sizes = {"memory_size": self.memory_size, "num_envs": self.num_envs}
        return {**sizes, "tensors": tensors, "rng": plain_state(self._rng)}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        """The arrays that a subclass adds to a file."""
        return {}

    def _plan_more(
        self, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any], claims: Claims
    ) -> Callable[[], None]:
        """Checks what a subclass saved and returns a function that restores it.

        Raises:
            ValueError, KeyError, TypeError: it does not fit.
        """
        return lambda: None

