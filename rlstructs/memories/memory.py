"""`Memory`, skrl's interface to the replay store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.frameworks.framework import Framework
from rlstructs.memories import formats
from rlstructs.memories.intake import TensorIntake
from rlstructs.memories.restoring import MemoryForm, StoredTensors
from rlstructs.memories.tensors import LiveTensors, Tensors, choose_device
from rlstructs.replay.draw.view import find_starts
from rlstructs.replay.intake.arrays import generator_of, row_ids
from rlstructs.replay.intake.intake import FILL, GROW
from rlstructs.replay.intake.trajectories import Steps
from rlstructs.replay.rows.spec import Setting
from rlstructs.seeding import Stream, generator_state


class Memory(StoredTensors, ABC):
    """Named tensors `(memory_size, num_envs, *data)` that hold the newest rows of every environment.

    Methods of skrl's memories take arguments by name, or by position as before skrl 2.

    Args:
        memory_size: rows per environment.
        num_envs: number of environments.
        device: device of batches; None for the library's default. On a GPU the rows are stored there too.
        export: whether to save the memory each time it has filled up.
        export_format: "pt", "npz" or "csv".
        export_directory: folder to save to, in a subfolder `memories`.
        seed: of the random generator; None draws a seed from the library's global generator. A copy in another process,
            forked or sent to one that is started, draws from a stream of its own, which follows from the seed.
        strict: whether unknown names, None values, numbers that do not fit their tensor's dtype and unknown devices are
            errors. If not, such names and values are skipped and numbers are cast, as in skrl, and the default device
            replaces an unknown one, with a warning in the log.
        compression: "zstd" (or "zstd:LEVEL", from 1, quick, to 22, small; 3 by default) compresses the rows of tensors
            of uint8 and bool with 512 bytes or more per row, or a mapping says so by name, for any dtype. Batches are
            the same. Needs the extra `zstd`. A compressed tensor has no live tensor.
        path: a folder for the rows; None for memory. Tensors with rows of 256 bytes or more are read and written in
            files, which take no memory of the process and have no live tensor; the others are mapped. A folder that a
            program left, or was killed with, opens again with every row that was whole, all episodes ended; priorities
            and the random stream are in files of `save` alone. One memory at a time has it open.

    Raises:
        TypeError, SpecError: an argument is invalid.
        FileError, StateError: the folder is of another memory, or damaged; or it is open already.
    """

    framework: Framework
    _intake: TensorIntake
    _form = MemoryForm()

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
        compression: Setting = None,
        path: str | Path | None = None,
    ) -> None:
        self.memory_size = check_count("memory_size", memory_size)
        self.num_envs = check_count("num_envs", num_envs)
        self.strict = strict
        device = choose_device(type(self).__name__, self.framework, device, strict)
        self._tensors = Tensors(self.framework, self.memory_size, self.num_envs, device, compression, path)
        self._storage = self._tensors.storage
        self._intake = TensorIntake(self._tensors)
        self.export = export
        self.export_format = formats.check_format(export_format)
        self.export_directory = export_directory
        self.sampling_indexes: Any = None
        self._stream = Stream(generator_of(self.framework.draw_seed() if seed is None else seed))

    @property
    def device(self) -> Any:
        """Device of batches."""
        return self._tensors.device

    @device.setter
    def device(self, device: Any) -> None:
        self._tensors.device = device

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors take once rows have been written."""
        return self._tensors.nbytes

    # The next three can be set: subclasses of skrl's memories write to the tensors themselves.

    @property
    def filled(self) -> bool:
        """Whether every environment has filled all its rows."""
        return self._tensors.find_cursor(self._intake.find_step()).is_full

    @filled.setter
    def filled(self, value: bool) -> None:
        self._tensors.set_cursor(is_full=bool(value))

    @property
    def memory_index(self) -> int:
        """The row that is written next.

        It is the row of the furthest environment if they are more than a row apart.
        """
        return self._tensors.find_cursor(self._intake.find_step()).row

    @memory_index.setter
    def memory_index(self, value: int) -> None:
        self._tensors.set_cursor(row=_check_most("memory_index", value, self.memory_size))

    @property
    def env_index(self) -> int:
        """The number of environments whose row `memory_index` is written.

        It is 0 if environments are more than a row apart.
        """
        return self._tensors.find_cursor(self._intake.find_step()).env

    @env_index.setter
    def env_index(self, value: int) -> None:
        self._tensors.set_cursor(env=_check_most("env_index", value, self.num_envs))

    # Tensors

    def create_tensor(self, name: str, size: Any, dtype: Any = None, keep_dimensions: bool = False) -> bool:
        """Adds a tensor.

        Unwritten rows hold NaN if its dtype is a float, zeros otherwise.

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
        return self._tensors.create(name, size, dtype, keep_dimensions)

    def get_tensor_names(self) -> list[str]:
        """Returns the names of all tensors, in alphabetical order."""
        return sorted(self._tensors.dtypes)

    def get_tensor_by_name(self, name: str, keepdim: bool = True) -> Any:
        """Returns the live tensor `(memory_size, num_envs, *data)`; in jax a copy.

        Unwritten rows are included. The tensor is a strided view where small tensors lie side by side in memory: use
        `reshape(-1)` instead of `view(-1)`.

        Args:
            name: name of the tensor.
            keepdim: False for `(memory_size * num_envs, *data)`.

        Raises:
            MissingKeyError: there is no such tensor.
        """
        self._tensors.check_known(name)
        return self._live(name, keepdim)

    def _live(self, name: str, keepdim: bool = True) -> Any:
        return self._tensors.get_live(name, keepdim)

    def set_tensor_by_name(self, name: str, tensor: Any) -> None:
        """Copies values into a tensor, with broadcasting; the same rows stay valid.

        Raises:
            MissingKeyError, SpecError: there is no such tensor, or the value does not fit.
        """
        self._tensors.set_values(name, tensor, self.strict)

    @property
    def tensors(self) -> dict[str, Any]:
        """Name -> live tensor; assignment copies values, like `set_tensor_by_name`.

        Assignment of `(memory_size, num_envs, *data)` to a new name creates a tensor, which subclasses of skrl's
        memories rely on.
        """

        def put(name: str, values: Any) -> None:
            tensors, shape = self._tensors, tuple(getattr(values, "shape", ()))
            if name not in tensors.dtypes and len(shape) > 2 and shape[:2] == tensors.lead:
                dtype = tensors.convert_dtype(name, values.dtype)
                tensors.plan(f"tensor {name!r}", {name: tensors.make_spec(dtype, shape[2:])})
            self.set_tensor_by_name(name, values)

        return LiveTensors(self._tensors.dtypes, self._live, put)

    @property
    def tensors_view(self) -> dict[str, Any]:
        """Name -> live tensor by flat index, `(memory_size * num_envs, *data)`.

        Assignment copies values, like `set_tensor_by_name`.
        """

        def put(name: str, values: Any) -> None:
            self._tensors.check_known(name)
            self.set_tensor_by_name(name, values.reshape((*self._tensors.lead, *values.shape[1:])))

        return LiveTensors(self._tensors.dtypes, lambda name: self._live(name, keepdim=False), put)

    def __getattr__(self, name: str) -> Any:
        tensor = name.removeprefix("_tensor_")
        if tensor != name and "_tensors" in vars(self) and tensor in self._tensors.dtypes:
            return self.get_tensor_by_name(tensor)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def tensors_keep_dimensions(self) -> dict[str, bool]:
        """Name -> False for tensors whose rows have one axis, else True.

        It is for programs written for skrl 1.
        """
        return {name: len(self._tensors.spec_of(name).shape) != 1 for name in self._tensors.dtypes}

    @property
    def all_sequence_indexes(self) -> np.ndarray:
        """Every flat index, one environment after another, int64."""
        return np.arange(self.memory_size * self.num_envs).reshape(self.memory_size, self.num_envs).T.ravel()

    def share_memory(self) -> None:
        """Moves the memory to shared memory, for processes that are started with this object.

        Each environment may be written by one process and read by all. Tensors that are created later stay in the
        process that creates them. Live tensors from before this call no longer follow the memory.

        Raises:
            StateError: the rows lie on a GPU.
        """
        self._tensors.share()

    def make_feed(self) -> TensorIntake:
        """Returns what `RL_Batcher.feed` needs of this memory."""
        self._tensors.allocate()
        self._intake.is_for_one_process = self.export  # writers in other processes would not save it
        return self._intake

    # Writing

    def add_samples(self, **tensors: Any) -> None:
        """Appends one row to all or some environments, or several to one.

        The shape of `observations`, or of the first tensor if they are not given, decides:

        - `(num_envs, ...)`: one row for each environment.
        - `(n, ...)` with n < num_envs: one row for each of the next n environments of the current row.
        - `(n, ...)` with a single environment: n rows.
        - no leading axis: one row for the next environment.

        A call whose names are all unknown adds nothing.

        Args:
            tensors: name -> `(n, *data)` or `(*data)`; single numbers may be given without a data axis.
                Rows of omitted tensors become unwritten. But tensors that the program got by `get_tensor_by_name` or
                `tensors`, or set by `set_tensor_by_name`, keep what the program wrote to these rows.

        Raises:
            SpecError: a tensor does not fit; nothing is added.
        """
        before = self._intake.count_laps() if self.export else None
        if not self._intake.write_quickly(tensors, self.strict):
            self._intake.add_rows(tensors, self.strict, self._storage.write)
        if before is not None:
            self._save_after(before)

    def add_trajectories(self, batch: Any, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch of `RL_Batcher.get`.

        Each step goes to the environment in `env_index`.

        Args:
            batch: `Trajectories`.
            names: tensor -> key of the trajectories; None for `observations`, `next_observations`,
                `actions`, `rewards`, `terminated` and `truncated`, and for `states` and `next_states` if observations
                have a `state`, which only the critic sees, beside their `frame`. Missing tensors are created.

        Raises:
            MissingKeyError, SpecError: a tensor does not fit; nothing is added.
        """
        self._add_steps(self._intake.take(batch, names))

    def _add_steps(self, steps: Steps) -> None:
        steps = self._intake.prepare(steps)
        steps.write(self._intake.convert(steps.values, GROW, FILL), self._write)
        steps.record(self._storage)

    def _write(self, block: Mapping[str, Any], lanes: Any, **marks: Any) -> None:
        """Calls `Storage.write`; with `export`, saves the memory if it has filled up."""
        before = self._intake.count_laps() if self.export else None
        self._storage.write(block, lanes, **marks)
        if before is not None:
            self._save_after(before)

    def _save_after(self, before: int) -> None:
        """Saves the memory if it has filled up since `before` laps."""
        if self._intake.count_laps() > before:
            self.save(self.export_directory, format=self.export_format)

    # Reading

    @abstractmethod
    def sample(
        self, names: Sequence[str], batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[Any]]:
        """Draws rows at random and returns copies.

        For each mini-batch there is a list of tensors, in the order of `names`.
        """

    def get_sampling_indexes(self) -> Any:
        """Returns the flat indexes of the last `sample`, int64; None before it."""
        return self.sampling_indexes

    def sample_by_index(self, names: Sequence[str], indexes: Any, mini_batches: int = 1) -> list[list[Any]]:
        """Copies the rows with these flat indexes.

        Args:
            names: names of tensors; unknown ones give None, with one warning in the log.
            indexes: int (n,) in [0, memory_size * num_envs); may have more axes, which the result then has too.
            mini_batches: number of parts, of nearly equal size.

        Returns:
            For each part a list of tensors, in the order of `names`.

        Raises:
            IndexError, SpecError: an index is out of range or not an integer.
            StateError: another process writes to these rows.
        """
        rows = np.atleast_1d(row_ids(indexes, self.memory_size * self.num_envs))
        names, known = self._tensors.check_names(names, self.strict)
        storage, shape = self._tensors.allocate(), rows.shape
        arrays = storage.read_at(rows.reshape(-1), lambda _, some: storage.columns.gather(known, some))
        if len(shape) != 1:
            arrays = [array.reshape(*shape, *array.shape[1:]) for array in arrays]
        return self._tensors.split(names, known, arrays, mini_batches)

    def sample_all(self, names: Sequence[str], mini_batches: int = 1, sequence_length: int = 1) -> list[list[Any]]:
        """Copies all valid rows, each once.

        They are ordered by time, or for sequences by environment.

        Args:
            names: names of tensors; unknown ones give None, with one warning in the log.
            mini_batches: number of parts, of nearly equal size.
            sequence_length: rows per sequence; parts hold whole sequences. The last one of an environment may be
                shorter.
        """
        names, known = self._tensors.check_names(names, self.strict)
        check_count("sequence_length", max(sequence_length, 1) if isinstance(sequence_length, int) else sequence_length)
        lanes, arrays = self._tensors.copy_all(known, by_lane=sequence_length > 1)
        starts = None if lanes is None else find_starts(lanes, sequence_length)
        return self._tensors.split(names, known, arrays, mini_batches, starts)

    # Files and copies

    def save(self, directory: str | Path = "", format: str | None = None) -> Path:  # noqa: A002 - skrl's name
        """Saves the memory to a file, completely or not at all.

        Threads that add rows wait meanwhile.

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
        path, format = formats.choose_file(self, directory or self.export_directory, format)  # noqa: A001
        with self._hold_locks():
            return formats.save(self, path, format)

    def load(self, path: str | Path) -> None:
        """Restores rows, length, cursor and random stream from a file of `save`.

        Missing tensors are created. Other threads that add rows wait until all is restored.

        From a file that skrl's memory wrote it restores the rows that are not NaN in every float tensor, the first
        as the oldest; the random stream goes on.

        Raises:
            FileNotFoundError: there is no such file, or no .json beside a .csv that is not skrl's.
            FileError: the file is damaged, of another version, or of a memory of another size; nothing changes.
        """
        with self._hold_locks():
            self._storage.counters.check_writable()
            formats.load(self, Path(path))

    def _state(self) -> dict[str, Any]:
        """Returns sizes, dtypes and random state, for the header of a file."""
        sizes = {"memory_size": self.memory_size, "num_envs": self.num_envs}
        own = {"tensors": self._tensors.describe(), "following": self._storage.counters.following().tolist()}
        return {**sizes, **own, "rng": generator_state(self._rng)}


def _check_most(name: str, value: Any, most: int) -> int:
    if check_count(name, value, 0) > most:
        raise SpecError(f"{name} must be at most {most}, got {value}")
    return int(value)
