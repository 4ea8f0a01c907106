"""`ReplayBuffer`: tianshou's replay buffer, which knows the episodes of its rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlstructs.checks import check_count, clean_text
from rlstructs.errors import FileError, SpecError
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.draw.ahead import Batches
from rlstructs.replay.draw.packed import PackedWindows
from rlstructs.replay.draw.plan import check_not_packed
from rlstructs.replay.draw.reading import Reading
from rlstructs.replay.intake.arrays import flat_items, host_array
from rlstructs.replay.intake.intake import FILL, GROW
from rlstructs.replay.keep import saving
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.keep.stored import Arrays, Restore
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.spec import Setting
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.editor import Editor, StoredColumns
from rlstructs.replay.tianshou.intake import TransitionIntake
from rlstructs.replay.tianshou.options import THEIRS, Options, check_arguments, check_lane_size, forward, hint_of
from rlstructs.replay.tianshou.reader import Reader
from rlstructs.replay.tianshou.running import Added
from rlstructs.replay.tianshou.table import Table
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, RESERVED
from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from typing_extensions import Self

HDF5 = ".h5"


@set_module("rlstructs.replay")
class ReplayBuffer(Buffer):
    """The newest `size` transitions of one environment, with their episodes.

    Each key of a transition is a column; the first row gives it its dtype and shape. Nested keys are joined with `/`.
    A row id is the slot of a row, in [0, size). Reads return copies. One thread may write while others `sample`.

    Infos stay what the environment said. Their numbers widen (bool, int, float, complex; more bits) while no value is
    lost; those that fit no column of numbers (text, None, lists that grow, dicts that were numbers) become objects, in
    numpy's arrays of objects. Rows without such a key hold 0, or None. `save` writes the objects that JSON can hold.

    Args:
        size: number of rows; 0 for a placeholder that takes none.
        stack_num: how many rows `obs`, `obs_next`, `info` and `policy` are stacked from when they are read; the first
            row of the episode stands for those before it. May be set later.
        ignore_obs_next: do not store `obs_next`: then, and if it is never given, it is the `obs` of the next row, or
            the row's own if none follows.
        save_only_last_obs: observations come as stacks; store the last of each.
        sample_avail: draw only rows that have `stack_num - 1` others before them in their episode.
        random_seed: a generator, an int, or None to draw a seed from torch's global generator.
        framework: library of the samples: "numpy" (a dict of arrays with attributes), "torch" (a `DictTensor` without
            objects, which `get` returns), "jax" or "warp". Row ids and objects are numpy's in any case.
        device: of samples.
        n_step, gamma: how `sample` sums rewards, see there.
        new_keys: whether unknown keys "grow" a column, zero in the rows before, or are an "error".
        missing_keys: whether to "fill" missing keys with zeros, or whether they are an "error".
        compression: "zstd", "zstd:LEVEL", or column -> one of these, compresses columns; see `Memory`.
        path: a folder for the rows, which opens again after a program was killed; see `Memory`.

    Raises:
        TypeError, SpecError: an argument is invalid.

    Example:
        >>> buffer = ReplayBuffer(size=4)
        >>> for t in range(5):
        ...     index, ep_return, ep_len, ep_start = buffer.add(
        ...         {"obs": t, "act": 0, "rew": 1.0, "terminated": t == 2, "truncated": False}
        ...     )
        >>> buffer.obs, buffer.done
        (array([4, 1, 2, 3]), array([False, False,  True, False]))
        >>> buffer.prev([0, 1, 2, 3]), buffer.next([0, 1, 2, 3]), buffer.unfinished_index()
        (array([3, 1, 1, 3]), array([0, 2, 2, 0]), array([0]))
        >>> batch, rows = buffer.sample(0)  # all, in order
        >>> rows, batch.obs, batch.obs_next
        (array([1, 2, 3, 0]), array([1, 2, 3, 4]), array([2, 2, 4, 4]))
    """

    # tianshou's attributes, for programs that read them; other keys of a batch become columns too.
    _reserved_keys, _required_keys_for_add = RESERVED, transitions.REQUIRED
    # Number of lanes, which subclasses set before they call this constructor; whether batches have an axis for them.
    _n_lanes, _is_stacked = 1, False
    _intake: TransitionIntake

    def __init__(
        self,
        size: int | None = None,
        stack_num: int = 1,
        ignore_obs_next: bool = False,
        save_only_last_obs: bool = False,
        sample_avail: bool = False,
        random_seed: np.random.Generator | int | None = 42,
        *,
        framework: str = "numpy",
        device: Any = None,
        n_step: int = 1,
        gamma: float = 0.99,
        new_keys: str = GROW,
        missing_keys: str = FILL,
        compression: Setting = None,
        path: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        check_arguments(type(self).__name__, size, stack_num, unknown)
        lane_size = check_lane_size(size)
        self._options = Options(
            stack_num,
            ignore_obs_next,
            save_only_last_obs,
            sample_avail,
            framework,
            n_step,
            gamma,
            new_keys,
            missing_keys,
            compression,
        )
        capacity = max(lane_size, 1)  # of a placeholder too: no store has none
        where: Any = {"framework": framework, "device": device, "compression": compression, "path": path}
        super().__init__(self._n_lanes, capacity, seed=random_seed, reading=Reading(n_step, gamma), **where)
        self._table = Table(self._storage, lane_size, self._is_stacked)
        self._intake = TransitionIntake(self._table, type(self).__name__, self._options)
        self._reader = Reader(self._table, self._options, self._export, self._stream)
        self._editor = Editor(self._table, self._intake)

    @classmethod
    def from_data(
        cls,
        obs: Any,
        act: Any,
        rew: Any,
        terminated: Any,
        truncated: Any,
        done: Any = None,
        obs_next: Any = None,
        **settings: Any,
    ) -> Self:
        """Makes a full buffer of rows in order, copied.

        The arguments are arrays, nested mappings of arrays, or datasets of HDF5.

        Args:
            obs, act, rew, terminated, truncated: (n, ...).
            done: (n,), where episodes end, truncated if not terminated; None for the ends that the flags mark.
            obs_next: (n, ...), or None.
            settings: of the constructor, except `size`.

        Raises:
            MissingKeyError, SpecError: an array is missing, or does not have n rows.
        """
        given = zip(RESERVED, (obs, act, rew, terminated, truncated, None, obs_next), strict=False)
        arrays = {
            name: value if isinstance(value, torch.Tensor) else host_array(name, value)
            for name, value in flat_items({key: value for key, value in given if value is not None}, "").items()
        }
        transitions.check_required(arrays)
        n = len(transitions.as_column(FLAGS[0], arrays[FLAGS[0]], 1))
        buffer = cls(n, **settings)
        rows = buffer._intake.as_transitions(arrays, "from_data", 1)
        if wrong := [name for name, values in rows.items() if len(values) != n]:
            raise SpecError(f"{wrong[0]!r} has {len(rows[wrong[0]])} rows, 'terminated' has {n}")
        if done is not None:
            ends = transitions.as_flags(DONE, host_array(DONE, done))
            if ends.shape != (n,):
                raise SpecError(f"'done' has shape {ends.shape}, expected ({n},)")
            rows[FLAGS[1]] = rows[FLAGS[1]] | (ends & ~rows[FLAGS[0]])
        if n:
            buffer._intake.fill(rows)
        return buffer

    stack_num: int = forward("_options", "stack_num", "How many rows a read observation consists of.", check_count)
    ignore_obs_next: bool = forward("_options", "ignore_obs_next", "Whether `obs_next` is not stored.")
    save_only_last_obs: bool = forward("_options", "save_only_last_obs", "Whether the last of each stack is stored.")
    sample_avail: bool = forward("_options", "sample_avail", "Whether only rows with whole stacks are drawn.")

    @property
    def options(self) -> dict[str, Any]:
        """The current values of tianshou's settings."""
        return {name: getattr(self._options, name) for name in THEIRS}

    @property
    def maxsize(self) -> int:
        """Capacity in rows."""
        return self._table.maxsize

    _size = property(len)  # tianshou's name

    @property
    def last_index(self) -> np.ndarray:
        """The newest row of each lane, int64 (n_lanes,).

        For an empty lane it is the first slot.
        """
        return self._table.rows().newest()

    @property
    def subbuffer_edges(self) -> np.ndarray:
        """The first row id of each lane, int64 (n_lanes + 1,).

        The last number is the end of the last lane.
        """
        return self._table.edges

    def __repr__(self) -> str:
        shown = [f"{name} {spec.dtype}{list(spec.shape) or ''}" for name, spec in self._specs.items()]
        columns = f": {', '.join(shown)}" if shown else ""
        return f"{type(self).__name__}({len(self)} of {self.maxsize} rows{columns})"

    def add(self, batch: Any, buffer_ids: Any = None) -> Added:
        """Appends one transition to each of some lanes.

        Args:
            batch: a mapping with `obs`, `act`, `rew`, `terminated`, `truncated`, and any other keys; arrays of numbers
                of any library, possibly nested, and `info` of anything. `done` is ignored: it follows from the others.
            buffer_ids: the lane of each row of `batch`, whose arrays have a first axis for them; None for each lane
                once. A repeated lane gets its rows in order. For a buffer of one lane, None if the arrays have no
                such axis, or `[0]` if they have.

        Returns:
            Four arrays with one entry per row: its row id, int64; the return of the episode that ends with it, float64,
            and the length of that episode, int64, both 0 if none ends; and the row id of the oldest present row of its
            episode, int64. Return and length count all rows of the episode, overwritten ones too.

        Raises:
            SpecError, MissingKeyError, IndexError: an argument does not fit; nothing is added.
            StateError: the size is 0.
        """
        return self._intake.add(batch, buffer_ids)

    def update(self, buffer: ReplayBuffer) -> np.ndarray:
        """Appends every row of another buffer, in order, and keeps its episodes.

        Returns:
            The new row ids, int64 (n,); negative ones that indexing refuses for rows without room.

        Raises:
            TypeError, SpecError: it is no other buffer like this, or its rows do not fit; nothing changes.
        """
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"update: needs a ReplayBuffer, got {type(buffer).__name__}")
        return self._editor.append(buffer._editor)

    def reset(self, keep_statistics: bool = False) -> None:
        """Drops every row.

        `keep_statistics` continues the returns and lengths of unfinished episodes.
        """
        self._intake.reset(keep_statistics)

    def __getattr__(self, name: str) -> Any:
        """Returns a whole column, `(maxsize, ...)`, as a read-only numpy array.

        Nested columns are a dict of arrays. `info` and `policy` are empty dicts if they were never stored. Empty rows
        hold zeros, or old values. Later writes may change an array: copy it to keep it. A column without bytes of its
        own, such as next observations that are stored once, is a `LazyColumn`, which gathers the rows that are indexed.
        """
        table: Table | None = self.__dict__.get("_table")
        found = None
        if table is not None:
            view = table.views.get(name)
            if view is not None and table.storage.columns.flat.get(name) is view[0] and table.stand_in is None:
                return view[1]
            if name == DONE and table.columns:
                return table.ends()
            found = None if name.startswith("_") else table.read_whole(table.find, name)
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint_of(name)}")
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RESERVED:  # it would hide the column
            raise AttributeError(f"{name!r} is a column of this buffer; use set_array_at_key or set_batch")
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        """Returns rows as a batch, private copies.

        Observations, infos and policies are stacks of `stack_num`.

        Args:
            index: a row id, a list or array of row ids of any shape, a mask over all row ids, or a slice of the
                rows in order: lane by lane, from the oldest to the newest. Negative ids count from the end.

        Raises:
            SpecError, IndexError: the index is invalid, or a row is empty.
        """
        return self._table.read_whole(self._reader.select, index)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the rows, in the order of row ids."""
        # Without it Python would count indexes up to the first empty row: to the end of the first lane.
        return (self[row] for row in np.sort(self._table.rows().every_row()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Makes an array of one object: this buffer.

        numpy would take the buffer for a sequence otherwise.
        """
        whole = np.empty((), object)
        whole[()] = self
        return whole

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        """Returns one key of some rows, private copies.

        Args:
            index: as for indexing.
            key: the name of an array, or of nested arrays.
            default_value: returned if there is no such key; None for an error.
            stack_num: number of rows, each row after those before it in its episode, on a new axis behind those of
                `index`; the first of the episode stands for missing ones. None for the buffer's own.

        Raises:
            MissingKeyError, SpecError, IndexError: there is no such key, or no such row.
        """
        stack_num = self.stack_num if stack_num is None else check_count("stack_num", stack_num)
        return self._table.read_whole(self._reader.get, index, key, default_value, stack_num)

    def prev(self, index: Any) -> Any:
        """Returns the previous row of each row's episode.

        It is the row itself if there is none; int64 of the shape of `index`.
        """
        return self._reader.step(index, lambda rows, at: rows.prev(at))

    def next(self, index: Any) -> Any:
        """Returns the next row of each row's episode.

        It is the row itself if there is none; int64 of the shape of `index`.
        """
        return self._reader.step(index, lambda rows, at: rows.next(at))

    def unfinished_index(self) -> np.ndarray:
        """Returns the newest rows of unfinished episodes, int64, at most one per lane."""
        with self._storage.lock:
            return self._table.rows().unfinished()

    def get_buffer_indices(self, start: int, stop: int) -> np.ndarray:
        """Lists the rows `[start, stop)` of one lane, int64.

        They go around the end of the lane if `stop` comes first. `start == stop` is empty, unless one episode fills the
        lane and begins, or its remaining rows begin, at `start`.

        Raises:
            SpecError: they are not in one lane.
        """
        return self._reader.list_between(start, stop)

    def sample(
        self,
        batch_size: int | None,
        *,
        packed: bool = False,
        sequence_length: int = 1,
        context: int = 0,
        max_steps: int | None = None,
        states: Mapping[str, str] | None = None,
    ) -> tuple[Any, np.ndarray]:
        """Draws rows and reads them as indexing does.

        With an `n_step` above 1, `rew` is the discounted sum of so many rewards, values from after a step come from
        the last of them, and `discount` is gamma to the number of steps. A subclass may override `sample_indices` and
        `__getitem__`.

        Args:
            batch_size: see `sample_indices`.
            packed: whether to return a `PackedTrajectories` in place of a batch, with a window for each drawn row: that
                row and those after it in its episode. Weights are in its `info`. Buffers of jax and warp return its
                `jax()` and `warp()`.
            sequence_length, context, max_steps, states: of packs, see `RandomMemory.sample`.

        Returns:
            A batch, private copies, and its row ids, int64 (n,); those that were drawn.

        Raises:
            EmptyBufferError, SpecError: see `sample_indices`; or a subclass reads by index where that differs, or
                relabels rows that are to be packed.
        """
        own, by_index, is_own = type(self), self._reads_own, self._draws_own
        if packed:
            windows = PackedWindows.of(sequence_length, context, max_steps, states)
            if is_own:
                raise SpecError(f"sample: {own.__name__} chooses or reads rows in its own way, and has no packs")
            return self._table.read_whole(self._reader.sample_packed, batch_size, windows)
        check_not_packed(context, max_steps, states)
        if is_own:
            return self._table.read_whole(self._reader.sample_by, self, batch_size, by_index)
        return self._table.read_whole(self._reader.sample, batch_size)

    def batches(self, batch_size: int, *, prefetch: int = 2) -> Batches:
        """Makes batches ahead, for ever, by threads; see `RandomMemory.batches`.

        Weights have the exponent `beta` that is set as a batch is handed out. Threads call the reward function of a
        buffer that relabels rows.

        Args:
            batch_size: number of rows, from 1.
            prefetch: how many batches are drawn ahead; 0 for none.

        Returns:
            An iterator over what `sample` returns.

        Raises:
            SpecError: an argument is invalid, or the buffer is of several buffers, or of a subclass that draws or reads
                in its own way.
        """
        if self._draws_own:
            raise SpecError(f"batches: {type(self).__name__} chooses or reads rows in its own way; use its sample")
        return self._reader.batches(batch_size, prefetch)

    @property
    def _reads_own(self) -> bool:
        """Whether a subclass reads rows in its own way."""
        return type(self).__getitem__ is not ReplayBuffer.__getitem__

    @property
    def _draws_own(self) -> bool:
        """Whether a subclass draws or reads rows in its own way."""
        return self._reads_own or type(self).sample_indices is not ReplayBuffer.sample_indices

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Draws rows.

        With `sample_avail` it draws only rows with `stack_num - 1` others before them in their episode.

        Args:
            batch_size: how many, uniformly and with replacement; None for every row once, in random order; 0 for
                every row in order, lane by lane and from the oldest on; below 0 for none.

        Returns:
            Row ids, int64 (n,).

        Raises:
            EmptyBufferError, SpecError: the buffer is empty, or no row has enough others before it.
        """
        return self._reader.sample_indices(batch_size)

    @property
    def _meta(self) -> ArrayDict:
        """The columns under tianshou's name, for programs that change them.

        A value that is set under a name is stored; see `StoredColumns`. Columns that replace all of these include them.
        """
        return StoredColumns(self._editor, self.set_array_at_key)

    @_meta.setter
    def _meta(self, columns: Any) -> None:
        self._editor.set_columns(columns)

    def set_batch(self, batch: Any) -> None:
        """Replaces columns, by copies.

        Args:
            batch: some of the keys that `add` knows, `(maxsize, ...)` each. An empty buffer is full then, the first row
                of each lane its oldest; otherwise the same rows remain, and other columns keep their values.

        Raises:
            SpecError: something does not fit; nothing changes.
        """
        self._editor.set_batch(batch)

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: Any = None) -> None:
        """Sets a column, or some rows of it.

        Args:
            seq: (n, ...).
            key: name of an array, which is added if there is none.
            index: n rows, as for indexing; None for all of the `maxsize`.
            default_value: of a new column in the other rows; None for NaN, which only floats have.

        Raises:
            MissingKeyError: the buffer never had a row, so its columns are unknown.
            TypeError, SpecError, IndexError: something does not fit; nothing changes.
        """
        self._editor.set_array(seq, key, index, default_value)

    def isnull(self) -> Any:
        """Marks NaN: returns a batch of bools, of all rows in order."""
        return self._export(self._editor.find_nulls(), {})

    def hasnull(self) -> bool:
        """Whether a row holds NaN."""
        return self._editor.has_nulls()

    def dropnull(self) -> None:
        """Drops the rows that hold NaN.

        The rows before and after such a row belong to different episodes then.
        """
        self._editor.drop_nulls()

    # Files

    def save_hdf5(self, path: str | Path, compression: str | None = None) -> None:
        """Writes an HDF5 file, atomically; needs the extra `hdf5`.

        `compression` is "gzip", "lzf" or None.
        """
        saving.save(self, Path(path), HDF5, compression)

    @classmethod
    def load_hdf5(cls, path: str | Path, device: Any = None) -> Self:
        """Makes a buffer from a file of `save_hdf5`.

        The next samples are those that would have followed the save. The constructor of a subclass is called if it
        takes the same arguments. Its own attributes are in no file.

        Raises:
            FileNotFoundError, FileError: there is no such file, or it is damaged, or of another version or class.
        """
        return cls._load_new(path, {"device": device})

    @classmethod
    def _load_new(cls, path: str | Path, given: Mapping[str, Any]) -> Self:
        """Makes a buffer of a file.

        `given` are the arguments of the constructor that are in no file.
        """

        def make(own: Mapping[str, Any]) -> Any:
            try:
                return cls._of_settings(own.get("settings"), given)
            except (ImportError, MemoryError):
                raise
            except Exception as error:  # whatever they are
                raise FileError(f"{path}: its settings do not make a {cls.__name__}: {clean_text(error)}") from error

        made: Self = saving.load_new(cls.__name__, make, Path(path), HDF5)
        return made

    @classmethod
    def _of_settings(cls, settings: Any, given: Mapping[str, Any]) -> Self:
        """Makes a buffer with the settings of a file, and others.

        A user's class whose constructor takes other arguments is made by the constructor of ours.
        """
        arguments: dict[str, Any] = {**settings, **given}
        buffer, known = cls.__new__(cls), cls
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError:
            known = next(each for each in cls.__mro__ if each.__module__.startswith("rlstructs."))
        known.__init__(buffer, **arguments)
        return buffer

    def _settings(self) -> dict[str, Any]:
        """Returns the arguments of the constructor that JSON can hold."""
        given = {name: value for name, value in vars(self._options).items() if value is not None}
        return {"size": self._table.lane_size, **given}

    def _state(self) -> dict[str, Any]:
        return {"settings": self._settings()}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        return {**super()._more_arrays(), **self._intake.arrays()}

    def _restorer(self, state: Mapping[str, Any], arrays: Arrays, claims: Claims) -> Restore:
        return self._intake.restorer(arrays, claims)
