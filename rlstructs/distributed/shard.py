"""`Shard`: the memory of some of the environments, in one actor of a `RayReplay`."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.distributed.cluster import Columns
from rlstructs.errors import FileError
from rlstructs.memories.torch import PrioritizedMemory
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.trajectories import STATES, Steps
from rlstructs.replay.rows.spec import Setting
from rlstructs.structures.arrays import raw_of, tensor_of

# The columns that describe drawn rows.
INDEX, LEAF, MASK, IS_FIRST, DISCOUNT = "index", "leaf", "mask", "is_first", "discount"
# The columns of steps besides their values; the slash keeps these names apart from those of tensors.
LENGTHS, LANES, DONE, STARTS, FIRST_STEPS = "/lengths", "/lanes", "/done", "/starts", "/first_steps"
DATA = "data"  # the column of a file
FORMAT = "npz"

# A kind of draw: the number of consecutive rows, and whether they must be of one episode.
Kind = tuple[int, bool]
ROW: Kind = (1, False)
# The most kinds, besides single rows, for which reports sum up priorities.
N_KINDS = 8
# A difference of two sums may be a rounding error if it is below this share of the larger one.
EXACT = 1e-6

Dtypes = dict[str, torch.dtype]


class ShardSample(NamedTuple):
    """Rows that a shard has drawn.

    Attributes:
        dtypes: of the tensors, by name.
        columns: the tensors by name, and the columns that describe the rows, with a "/" before their names.
    """

    dtypes: Dtypes
    columns: Columns


class ShardFile(NamedTuple):
    """The bytes of a shard's file."""

    columns: Columns


def columns_of(steps: Steps) -> Columns:
    """Returns the columns to send to a shard for these steps.

    Values by name, and the arrays that describe the steps.
    """
    marks = {
        LENGTHS: steps.lengths,
        LANES: steps.lanes,
        DONE: steps.done,
        STARTS: steps.starts,
        FIRST_STEPS: steps.first_steps,
    }
    return {**steps.values, **{name: each for name, each in marks.items() if each is not None}}


@dataclass(frozen=True)
class ShardSettings:
    """The settings that shards are made from; picklable.

    Attributes:
        memory_size: rows of each environment.
        alpha: exponent of priorities.
        names: see `Memory.add_trajectories`.
        compression: see `Memory`.
    """

    memory_size: int
    alpha: float
    names: Mapping[str, str]
    compression: Setting = None

    def build(self, num_envs: int, seed: int) -> Shard:
        """Makes a shard; see `Shard`."""
        return Shard(self, num_envs, seed)


class ShardMemory(PrioritizedMemory):
    """A memory that also sums its priorities, for draws from several memories."""

    # The last result of `_find_whole`, with what it was for.
    _found: tuple[tuple[int, bytes, int], np.ndarray] | None = None

    def sum_priorities(self, kinds: Sequence[Kind]) -> tuple[dict[Kind, float], float]:
        """Sums up priorities to the power of alpha.

        Args:
            kinds: the kinds of draws, besides single rows.

        Returns:
            For each kind the sum over the rows that a draw may begin with; and the smallest power of all rows.
        """
        self._priorities.follow(self._storage.view())
        tree = self._priorities.tree
        return {ROW: float(tree.total), **{kind: self._sum(*kind) for kind in kinds}}, float(tree.minimum)

    def _sum(self, length: int, is_whole: bool) -> float:
        """Sums the priorities of rows that a draw of this kind may begin with."""
        store, tree = self._storage, self._priorities.tree
        view = store.view(length)
        if is_whole and store.episodes is not None:
            return float(tree.values[self._find_whole(view)].sum())
        # Only the last rows of each environment, which are few, cannot begin a draw.
        total = float(tree.total) - float(tree.values[store.view().newer(view.high)].sum())
        return total if total > EXACT * tree.total else float(tree.values[view.every_row()].sum())

    def _find_whole(self, view: View) -> np.ndarray:
        """Returns the ids of rows that begin a window of one episode.

        Windows have the length of `view`; the result is kept until rows or episodes change.
        """
        wanted = view.length, view.snapshot, view.edits
        if self._found is None or self._found[0] != wanted:
            every = view.every_row()
            self._found = wanted, every[view.remaining(every) >= view.length]
        return self._found[1]

    @property
    def largest(self) -> float:
        """The priority of new rows: the largest one so far.

        It is that of all shards, as far as this one knows.
        """
        return self._priorities.max_priority

    @largest.setter
    def largest(self, largest: float) -> None:
        self._priorities.max_priority = max(largest, self._priorities.max_priority)

    def add_steps(self, steps: Steps) -> None:
        """Appends steps of trajectories."""
        self._add_steps(steps)

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        found: torch.dtype = self._tensors.dtypes[name]
        return found

    def describe_sample(self) -> Columns:
        """The columns that describe the rows of the last `sample`."""
        picked = self._last_selection()
        known = {MASK: self.get_sampling_mask(), DISCOUNT: self.get_sampling_discounts()}
        if IS_FIRST in picked.fields:
            known[IS_FIRST] = self.get_sampling_is_first()
        rows = self.get_sampling_indexes().numpy()
        # A row's index grows by the number of rows each time that it is overwritten.
        index = rows + self._storage.view().steps(rows) // self.memory_size * self._storage.columns.n_rows
        return {INDEX: index, LEAF: picked.fields["leaves"], **{name: each.numpy() for name, each in known.items()}}

    def update_sampled(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of sampled rows, unless they were overwritten meanwhile.

        `index` is the one that `describe_sample` returned.

        Raises:
            IndexError: an index is of a row that was not written yet.
        """
        turns, rows = np.divmod(index, self._storage.columns.n_rows)
        view = self._storage.view()
        steps = view.steps(rows)
        found = steps // self.memory_size
        if (turns > found).any() or (steps < 0).any():
            raise IndexError("update_priorities: an index is not from a sample")
        held = (turns == found) & view.holds(rows, steps)
        self._priorities.update(view, rows[held], priorities[held], is_last=True)


class Shard:
    """The job of a shard's actor: answers the requests of a `RayReplay`.

    Args:
        settings: the settings of its memory.
        num_envs: the number of its environments.
        seed: seeds its draws.
    """

    def __init__(self, settings: ShardSettings, num_envs: int, seed: int) -> None:
        self._settings, self._num_envs, self._seed = settings, num_envs, seed
        self._memory = self._make_memory()
        self._loaded: ShardMemory | None = None
        self._kinds: deque[Kind] = deque(maxlen=N_KINDS)

    def report(self) -> dict[str, Any]:
        """Reports on the memory.

        Returns:
            `rows`: their number. `sums` and `least`: see `ShardMemory.sum_priorities`. `largest`: the priority of new
            rows. `nbytes`: its size in bytes. `dtypes`: of the tensors, by name; empty without rows.
        """
        memory = self._memory
        sums, least = memory.sum_priorities(self._kinds)
        held = memory.get_tensor_names() if len(memory) else []
        names = [name for key in self._settings.names for name in held if _is_of(name, key)]
        dtypes = {name: memory.dtype_of(name) for name in names}
        return {
            "rows": len(memory),
            "sums": sums,
            "least": least,
            "largest": memory.largest,
            "nbytes": memory.nbytes,
            "dtypes": dtypes,
        }

    def add_kind(self, kind: Kind) -> None:
        """Makes reports sum up priorities for one more kind of draw."""
        if kind != ROW and kind not in self._kinds:
            self._kinds.append(kind)

    def extend(self, dtypes: Dtypes, largest: float, columns: Columns) -> None:
        """Appends the steps of trajectories.

        Args:
            dtypes: of the tensors, by name.
            largest: the largest priority that any shard has reported.
            columns: what `columns_of` returned.
        """
        values = {name: tensor_of(np.array(columns[name]), dtype) for name, dtype in dtypes.items()}
        n_timesteps = int(next(iter(values.values())).shape[1])
        self._memory.largest = largest
        marks = columns[LENGTHS], columns[LANES], columns.get(DONE), columns.get(STARTS), columns.get(FIRST_STEPS)
        self._memory.add_steps(Steps(values, n_timesteps, *marks))

    def sample(self, names: Sequence[str], n: int, settings: Mapping[str, Any]) -> ShardSample:
        """Draws rows or sequences.

        Args:
            names: the names of the tensors.
            n: the number of rows or sequences.
            settings: more arguments of `RandomMemory.sample`.
        """
        [tensors] = self._memory.sample(names, batch_size=n, **settings)
        found = dict(zip(names, tensors, strict=True))
        columns = {name: raw_of(tensor) for name, tensor in found.items()}
        columns |= {f"/{name}": column for name, column in self._memory.describe_sample().items()}
        return ShardSample({name: tensor.dtype for name, tensor in found.items()}, columns)

    def update_priorities(self, columns: Columns) -> None:
        """Sets the `priority` of each `index`."""
        self._memory.update_sampled(columns[INDEX], columns["priority"])

    def save(self) -> ShardFile:
        """Returns the memory's file."""
        with tempfile.TemporaryDirectory() as folder:
            data = self._memory.save(folder, format=FORMAT).read_bytes()
        return ShardFile({DATA: np.frombuffer(data, np.uint8)})

    def load(self, columns: Columns) -> None:
        """Reads a file into a new memory, which `use_loaded` then puts into use.

        Raises:
            FileError: the file is damaged, or lacks a tensor.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"memory.{FORMAT}"
            columns[DATA].tofile(path)
            memory = self._make_memory()
            memory.load(path)
        held, needed = memory.get_tensor_names(), self._settings.names.keys() - STATES.keys()
        missing = sorted(key for key in needed if not any(_is_of(name, key) for name in held))
        if len(memory) and missing:
            raise FileError(f"{path}: has no tensor(s) {missing}")
        self._loaded = memory

    def use_loaded(self) -> None:
        """Continues with the memory that `load` read."""
        assert self._loaded is not None
        self._memory, self._loaded = self._loaded, None

    def drop_loaded(self) -> None:
        """Discards the memory that `load` read."""
        self._loaded = None

    def close(self) -> None:
        """Does nothing: the memory ends with its actor."""

    def _make_memory(self) -> ShardMemory:
        settings = self._settings
        return ShardMemory(
            memory_size=settings.memory_size,
            num_envs=self._num_envs,
            alpha=settings.alpha,
            seed=self._seed,
            device="cpu",
            compression=settings.compression,
        )


def _is_of(name: str, key: str) -> bool:
    """Whether a tensor belongs to this key of `ShardSettings.names`.

    It has the key's name, or is an entry below it.
    """
    return name == key or name.startswith(f"{key}/")
