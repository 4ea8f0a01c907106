"""`Tensors`: the named tensors of a memory, their store, and batches.

A tensor is `(memory_size, num_envs, *data)`. A flat index is `row * num_envs + env`. Each environment is a lane of the
store with a head of its own, so environments may be at different rows.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError, StateError
from rlstructs.frameworks.framework import NOT_NUMPYS, Framework
from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.intake.arrays import as_whole, cast_freely, encoded, find_marks, from_bits, host_array
from rlstructs.replay.intake.roles import ENDS
from rlstructs.replay.rows.blocks import InStep
from rlstructs.replay.rows.episodes import BYTES_PER_ROW
from rlstructs.replay.rows.folder import make_storage
from rlstructs.replay.rows.lanes import REWRITES, SLOT
from rlstructs.replay.rows.on_device import TensorColumns
from rlstructs.replay.rows.spec import Setting, Spec
from rlstructs.replay.rows.store import Storage

LOG = logging.getLogger("rlstructs")


class Cursor(NamedTuple):
    """The index of the next row to write.

    Attributes:
        is_full: whether every environment has filled all its rows.
        row: the next row; that of the furthest environment if they are more than a row apart.
        env: number of environments that have this row already; 0 if they are more than a row apart.
    """

    is_full: bool
    row: int
    env: int

    def count_rows(self, memory_size: int, num_envs: int) -> np.ndarray:
        """Counts the rows that each environment has up to here, int64 (num_envs,)."""
        return np.asarray(memory_size * self.is_full + self.row + (np.arange(num_envs) < self.env))


class Tensors:
    """Named tensors in a store.

    Args:
        framework: the library of the tensors.
        memory_size: rows per environment.
        num_envs: number of environments.
        device: the library's device of batches, which decides where the rows lie.
        compression, path: which tensors are compressed, and a folder for the rows; see `Memory`.

    Attributes:
        lead: the first two axes of every tensor, memory_size and num_envs.
        dtypes: name -> dtype of the library, in order of creation.
        storage: the store; `allocate` makes its columns.
        planned: name -> spec of the tensors that are not allocated yet; the first use allocates them.
        exposed: names of the tensors that the program got or set: it may write to rows before it adds them.
    """

    def __init__(
        self, framework: Framework, memory_size: int, num_envs: int, device: Any, compression: Setting, path: Any
    ) -> None:
        self.framework, self.device, self.lead = framework, device, (memory_size, num_envs)
        self.dtypes: dict[str, Any] = {}
        self.planned: dict[str, Spec] = {}
        self.exposed: set[str] = set()
        self._unmissed: set[str] = set()  # names without a tensor that need no warning, or have had it
        self._own_dtypes: dict[np.dtype, Any] = {}  # dtype of numpy -> the library's, which takes time to find
        self._available: int | None = None  # bytes, when the first of the planned tensors was
        self._live: dict[tuple[str, bool], tuple[Any, Any]] = {}  # arrays that programs got, and the columns below them
        where = framework.device_of_rows(device)
        columns = None if where is None else TensorColumns(num_envs, memory_size, SLOT, where)
        self.storage = make_storage("Memory", num_envs, memory_size, SLOT, columns, compression, path)
        self.dtypes |= {name: self.find_dtype(name, spec) for name, spec in self.storage.columns.specs.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors take once rows have been written."""
        planned = self.storage.columns.nbytes_per_row(self.planned)
        untracked = self.storage.episodes is None and any(name in ENDS for name in self.planned)
        return self.storage.nbytes + self.storage.columns.n_rows * (planned + BYTES_PER_ROW * untracked)

    def allocate(self) -> Storage:
        """Returns the store, after allocating the tensors that are not allocated yet."""
        if self.planned:
            with self.storage.lock:
                planned = dict(self.planned)
                self.storage.add_columns(planned)
                if any(name in ENDS for name in planned):
                    self.storage.track_episodes()
                for name in planned:  # after the columns are there: other threads look here first
                    del self.planned[name]
        return self.storage

    def share(self) -> None:
        """Moves the store to shared memory; see `Memory.share_memory`."""
        self.allocate().share()
        self._live.clear()  # it would keep the memory of before

    # Creation

    def create(self, name: str, size: Any, dtype: Any, keep_dimensions: bool) -> bool:
        """Adds a tensor; see `Memory.create_tensor`."""
        if size is None:
            self._unmissed.add(name)
            return False
        named = self.convert_dtype(name, dtype)
        shape = _as_shape(size) if keep_dimensions else (n_elements(size),)
        if name not in self.dtypes:
            self.plan(f"tensor {name!r}", {name: self.make_spec(named, shape)})
            return True
        if shape != self.spec_of(name).shape:
            raise SpecError(f"tensor {name!r} exists with rows of shape {self.spec_of(name).shape}, not {shape}")
        if dtype is not None and named != self.dtypes[name]:
            raise SpecError(f"tensor {name!r} exists with dtype {self.dtypes[name]}, not {named}")
        return False

    def convert_dtype(self, name: str, dtype: Any, by_name: bool = False) -> Any:
        """Converts the dtype of a new tensor, or its name, to the library's.

        Raises:
            SpecError: the store does not support the dtype, or no tensor may have this name.
        """
        _check_name(name)
        try:
            named = self.framework.dtype_from_name(dtype) if by_name else self.framework.dtype(dtype)
            self.make_spec(named, ())
        except SpecError as error:
            raise SpecError(f"tensor {name!r}: {error}") from error
        except TypeError as error:
            raise SpecError(f"tensor {name!r}: dtype {dtype} is not supported: {error}") from error
        return named

    def make_spec(self, dtype: Any, shape: tuple[int, ...]) -> Spec:
        """Makes the spec of the column that stores a tensor of this dtype.

        Raises:
            SpecError: columns cannot store it.
        """
        host = self.framework.host_dtype(dtype)
        if host is None:
            return Spec(np.dtype(np.int16), shape, is_bfloat16=True)
        if host.kind not in "biufc" or host.isbuiltin == NOT_NUMPYS:
            raise SpecError(f"dtype {dtype} is not supported; expected a bool, integer, float or complex number")
        return Spec(host, shape)

    def find_dtype(self, name: str, spec: Spec) -> Any:
        """The library's dtype of a tensor that a column of this spec stores."""
        return self.convert_dtype(name, "bfloat16" if spec.is_bfloat16 else spec.dtype.name, by_name=True)

    def plan(self, owner: str, specs: Mapping[str, Spec]) -> None:
        """Adds tensors, which the first use allocates.

        Raises:
            OutOfMemoryError: there is too little memory for them, beside those that are not allocated yet.
        """
        columns = self.storage.columns
        needed = sum(columns.nbytes_of(*each) for each in (*self.planned.items(), *specs.items())) * columns.n_rows
        available = self._available if self.planned else None
        if available is None or needed > available // 2:  # small tensors need not ask the system again
            available = self._available = columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"{owner}: {needed:,} bytes are needed, {available:,} are available")
        for name, spec in specs.items():
            self.planned[name], self.dtypes[name] = spec, self.find_dtype(name, spec)

    def spec_of(self, name: str) -> Spec:
        """Returns the spec of a tensor."""
        return self.planned.get(name) or self.storage.columns.specs[name]

    def describe(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the dtype and shape of each tensor, for a file's header."""
        name_of = self.framework.dtype_name
        return {name: (name_of(dtype), self.spec_of(name).shape) for name, dtype in self.dtypes.items()}

    # Content

    def check_known(self, name: str) -> None:
        """Raises MissingKeyError if there is no tensor of this name."""
        if name not in self.dtypes:
            raise MissingKeyError(f"no tensor {name!r} in this memory, there are {sorted(self.dtypes)}")

    def get_live(self, name: str, keepdim: bool = True) -> Any:
        """Returns a tensor over the store's memory; a copy in jax."""
        columns = self.allocate().columns
        if not columns.is_in_memory(name):
            reading = "read its rows by sample, sample_all or sample_by_index, and write them by set_tensor_by_name"
            where = "compressed" if columns.is_compressed(name) else "in a file"
            raise StateError(f"{name!r} is {where}, and has no live tensor: {reading}")
        self._expose(name)
        flat, (kept, live) = columns.flat[name], self._live.get((name, keepdim), (None, None))
        if kept is flat:
            return live
        rows = columns.cells[name].swapaxes(0, 1) if keepdim else flat
        # A copy has no half-written row; and a kept tensor must not be one of inference mode.
        with self.storage.lock, torch.inference_mode(False):
            live = self.framework.live_array(rows, self.dtypes[name], repr(name), columns.shared_storage(name))
        if self.framework.has_live_arrays:
            self._live[name, keepdim] = flat, live
        return live

    def set_values(self, name: str, tensor: Any, strict: bool) -> None:
        """Copies values into a tensor; see `Memory.set_tensor_by_name`."""
        self.check_known(name)
        columns, spec = self.allocate().columns, self.spec_of(name)
        self.storage.counters.check_writable()
        values = encoded(name, self.convert_values(name, tensor, strict), spec)
        shape = (*self.lead, *spec.shape)
        try:
            if values.shape != shape:
                values = values.expand(shape) if isinstance(values, torch.Tensor) else np.broadcast_to(values, shape)
        except (ValueError, RuntimeError) as error:
            raise SpecError(f"{name!r} has shape {tuple(values.shape)}, expected {shape}") from error
        values = columns.check(name, values, self.lead)
        with self.storage.lock, self.storage.clock.counting(REWRITES):
            columns.put_cells(name, slice(None), slice(None), values.swapaxes(0, 1))
        self._expose(name)
        if name in ENDS:
            done = find_ends(columns.cells)
            assert done is not None
            self.storage.rebuild_episodes(done)

    def _expose(self, name: str) -> None:
        if name not in self.exposed:
            self.exposed.add(name)
            self.storage.clock.expose()

    def convert_values(self, name: str, value: Any, strict: bool) -> Any:
        """Casts a value to a tensor's dtype, as a numpy array.

        A value is returned unchanged if its device and dtype are the tensor's. Real numbers are cast, as in skrl. If
        `strict`, only floats may lose precision: 1.0 can be a bool, 0.5 cannot.
        """
        if name not in self.dtypes:
            return host_array(name, value)
        columns, spec = self.storage.columns, self.spec_of(name)
        own = None if columns.on_host else columns.own(self.framework.to_torch(value), spec)
        cast = as_whole if strict else cast_freely
        return cast(host_array(name, value), spec) if own is None else own

    def read_numbers(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Copies rows to the host by flat index, `(n, *data)`; bfloat16 becomes float32."""
        columns = self.storage.columns
        values = columns.host(name, columns.gather([name], rows)[0])
        return from_bits(values) if columns.specs[name].is_bfloat16 else values

    # Batches

    def check_names(self, names: Sequence[str], strict: bool) -> tuple[list[str], list[str]]:
        """Returns the names as a list, and the known ones among them.

        Raises:
            TypeError: a string is given for a list.
            MissingKeyError: a name is unknown, if `strict`.
        """
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got the string {names!r}")
        dtypes = self.dtypes
        known = [name for name in names if name in dtypes]
        if strict and len(known) < len(names):
            unknown = sorted(set(names) - set(dtypes))
            raise MissingKeyError(f"no tensor(s) {unknown} in this memory, there are {sorted(dtypes)}")
        if len(known) < len(names):
            self._warn_of(set(names) - set(dtypes) - self._unmissed)
        return list(names), known

    def _warn_of(self, unknown: set[str]) -> None:
        """Warns once of names without a tensor.

        There is no warning of a name that was created with a size of None.
        """
        if unknown:
            self._unmissed |= unknown
            there, text = sorted(self.dtypes), "no tensor(s) %s in this memory, there are %s: None takes their place"
            LOG.warning(f"{text}; with strict=True that is an error", sorted(unknown), there)

    def copy_all(self, names: Sequence[str], by_lane: bool) -> tuple[np.ndarray | None, list[Any]]:
        """Copies all valid rows of some tensors, sorted by step or by lane.

        Threads of this process wait meanwhile.

        Returns:
            `by_lane` the lane of each row, int64 (n,), otherwise None; and `(n, *data)` of each tensor. They lack the
            rows that other processes have overwritten meanwhile.
        """
        storage, columns = self.allocate(), self.storage.columns

        def list_rows() -> np.ndarray:
            return view.by_lane(1)[0] if by_lane else view.by_step()

        with storage.lock:
            steps = (view := storage.view()).steps_of_all
            # Lanes are nearly always in step.
            arrays = columns.copy_steps(names, *steps, by_lane) if steps else columns.gather(names, list_rows())
            is_current = storage.is_current(view)  # as nearly always
            stale = None if is_current else storage.find_overwritten(Selection(list_rows()[:, None], view))
        if stale is not None:
            arrays = [array[~stale] for array in arrays]
        if not by_lane:
            return None, arrays
        lanes = columns.lanes(list_rows()) if steps is None else np.repeat(np.arange(columns.n_lanes), steps[1])
        return lanes if stale is None else lanes[~stale], arrays

    def split(
        self, names: list[str], known: list[str], arrays: list[Any], mini_batches: int, starts: np.ndarray | None = None
    ) -> list[list[Any]]:
        """Hands arrays over in parts of nearly equal size.

        Args:
            names: the names asked for; unknown ones give None.
            known: names of the arrays.
            arrays: `(n, *data)`, which nobody else holds.
            mini_batches: number of parts; one for numbers below 1.
            starts: the rows that a part may begin with, int64; None for all.
        """
        if isinstance(mini_batches, bool) or not hasattr(mini_batches, "__index__"):
            raise TypeError(f"mini_batches must be an int, got {mini_batches!r}")
        if mini_batches <= 1:
            return [self._hand_over(names, known, arrays)]
        n_rows = len(arrays[0]) if arrays else 0
        n_parts = n_rows if starts is None else len(starts)
        size, n_larger = divmod(n_parts, mini_batches)  # the first ones are larger by one, as in `numpy.array_split`
        at = [number * size + min(number, n_larger) for number in range(mini_batches + 1)]
        bounds = at if starts is None else np.append(starts, n_rows)[at].tolist()
        return [
            self._hand_over(names, known, [array[low:high] for array in arrays])
            for low, high in itertools.pairwise(bounds)
        ]

    def _hand_over(self, names: list[str], known: list[str], arrays: list[Any]) -> list[Any]:
        """Returns the library's array of each name, None for unknown ones."""
        made = self.framework.hand_over(arrays, [self.dtypes[name] for name in known], self.device)
        if len(names) == len(known):
            return made
        found = iter(made)
        return [next(found) if name in known else None for name in names]

    def hand_over_one(self, array: np.ndarray) -> Any:
        """Hands over an array that belongs to no tensor, and that nobody else holds."""
        dtypes = self._own_dtypes
        if array.dtype not in dtypes:
            dtypes[array.dtype] = self.framework.dtype(array.dtype)
        return self.framework.hand_over([array], [dtypes[array.dtype]], self.device)[0]

    # Cursor

    def find_cursor(self, step: InStep) -> Cursor:
        """Finds where the next row is written.

        `step` says which environments have as many rows as the others.
        """
        row, env, heads = step.head, step.n_ahead, self.storage.ring.head
        if row is None:
            low, high = int(heads.min()), int(heads.max())
            row, env = (high, 0) if high - low > 1 else (low, int((heads > low).sum()))
        return Cursor(step.count_least() >= self.lead[0], row % self.lead[0], env)

    def set_cursor(self, **changes: Any) -> None:
        """Makes the rows up to a new cursor valid.

        If the cursor moves back, all other rows are dropped.

        Args:
            changes: attributes of the cursor that change.
        """
        storage, lanes = self.allocate(), np.arange(self.lead[1])
        cursor = self.find_cursor(InStep(storage.ring))
        now, then = cursor.count_rows(*self.lead), cursor._replace(**changes).count_rows(*self.lead)
        head = storage.ring.head
        starts_anew = np.ptp(head) > 1 or bool((then < now).any())
        first, counts = (0, then) if starts_anew else (head[:, None], then - now)
        steps = first + np.zeros((lanes.size, 1), np.int64) + np.arange(counts.max())
        found = storage.columns.gather(self.dtypes, storage.columns.at_steps(lanes[:, None], steps))
        if starts_anew:
            storage.clear()
        if counts.any():
            block = dict(zip(self.dtypes, found, strict=True))
            storage.write(block, lengths=counts, done=find_ends(block))

    def __getstate__(self) -> dict[str, Any]:
        device = self.framework.device_name(self.device)  # jax's and warp's belong to a process
        return {**vars(self), "device": device, "_live": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.device = self.framework.device(self.device)


class LiveTensors(dict[str, Any]):
    """Live tensors by name, in order of creation.

    `Memory.tensors` and `Memory.tensors_view` return them.

    Args:
        names: names of the tensors.
        get: returns the tensor of a name.
        put: copies values into the tensor of a name.
    """

    def __init__(self, names: Iterable[str], get: Callable[[str], Any], put: Callable[[str, Any], None]) -> None:
        super().__init__((name, get(name)) for name in names)
        self._get, self._put = get, put

    def __setitem__(self, name: str, values: Any) -> None:
        """Copies values into a tensor.

        Raises:
            MissingKeyError, SpecError: there is no such tensor and none can be created, or the values do not fit.
        """
        self._put(name, values)
        super().__setitem__(name, self._get(name))  # for jax, whose array is a copy

    def __reduce__(self) -> Any:
        # Copies and pickles are independent of the memory; torch.load accepts an OrderedDict.
        return OrderedDict, (), None, None, iter(self.items())


def choose_device(owner: str, framework: Framework, device: Any, strict: bool) -> Any:
    """Returns the library's device for a name.

    For an unknown name it is the default device, as in skrl, unless `strict`.
    """
    try:
        return framework.device(device)
    except SpecError as error:
        if strict:
            raise
        LOG.warning("%s: %s; the default device takes its place", owner, error)
        return framework.device(None)


def find_ends(block: Mapping[str, Any]) -> np.ndarray | None:
    """Marks the rows (n, T) that end an episode, bool.

    None if no tensor says so.
    """
    return find_marks({name: block[name] for name in ENDS if name in block})


def _check_name(name: Any) -> None:
    """Raises SpecError unless a tensor may have this name.

    Files keep other arrays under names like __ring__.
    """
    if not isinstance(name, str) or not name or (len(name) > 4 and name.startswith("__") and name.endswith("__")):
        raise SpecError(f"a tensor's name must be a string that does not begin and end with '__', got {name!r}")


def _as_shape(size: Any) -> tuple[int, ...]:
    if not isinstance(size, (tuple, list)):
        raise SpecError(f"size must be a tuple or a list to keep its dimensions, got {size!r}")
    return tuple(check_count("size", n) for n in size)


def n_elements(size: Any) -> int:
    """Counts the numbers in a row of this size.

    The size is an int, a list of ints, whose product counts, or a space. A Discrete space has one number, its value;
    Dict and Tuple spaces have the sum of their members.

    Raises:
        TypeError, SpecError: the size is something else.
    """
    if isinstance(size, (tuple, list)):
        return math.prod(check_count("size", n) for n in size)
    if isinstance(size, (bool, int, np.integer, float, str)):
        return check_count("size", size)
    return check_count("size", _n_elements_of_space(size))


def _n_elements_of_space(space: Any) -> int:
    from gymnasium import spaces

    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)):
        return math.prod(space.shape)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        members = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return sum(_n_elements_of_space(member) for member in members)
    if isinstance(space, spaces.Space):
        try:
            return int(spaces.flatdim(space))
        except (NotImplementedError, ValueError) as error:
            raise SpecError(f"size: the space {space} has no fixed number of elements") from error
    raise TypeError(f"size must be an int, a list of ints, a gymnasium space or None, got {space!r}")
