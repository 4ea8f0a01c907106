"""Writers of a `DictTensorReplayBuffer`: they decide where new rows are stored."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.intake.arrays import from_bits, host_array
from rlstructs.replay.intake.roles import is_reward
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.part import Part, check_neutral, join_key
from rlstructs.replay.torchrl.prioritized_sampler import check_reduction, reduce_rows
from rlstructs.workers.public_names import set_module

# Number of the lowest rows that are kept in order; after these are used up, the next ones are searched for.
N_LOWEST = 1024
NO_ROWS = np.zeros(0, np.int64)
Block = Mapping[str, Any]
Marks = np.ndarray | None
# Row ids of new rows, and of those that they replaced.
Written = tuple[np.ndarray, np.ndarray]


class Writer(Part):
    """Base class of the writers.

    Attributes:
        is_plain: whether it only appends rows.
        keeps_order: whether rows with consecutive ids were written one after another.
    """

    is_plain = False
    keeps_order = True

    def check(self, values: Block, n: int, specs: Mapping[str, Any]) -> None:
        """Raises the errors that `write` would raise, before anything changes.

        Args:
            values: name -> (n, ...), as they were given.
            n: number of rows.
            specs: of the columns; empty before the first rows.
        """

    def write(self, storage: Storage, block: Block, n: int, done: Marks, starts: Marks) -> Written:
        """Writes rows to a store of one lane that has room for them.

        Args:
            storage: the store.
            block: name -> (1, n, ...), in the form that columns take.
            n: number of rows.
            done, starts: bool (1, n); see `Storage.write`.

        Returns:
            The row ids, int64 (n,), -1 for rows that were not kept; and the row ids of replaced rows.
        """
        raise NotImplementedError

    def refuse(self) -> None:
        """Raises StateError if nothing may be changed."""

    def changed(self) -> None:
        """Is called after something else has changed the store."""


def to_host(columns: Columns, name: str, values: Any) -> np.ndarray:
    """Copies values of a column to host memory, if they are on a device."""
    return values if isinstance(values, np.ndarray) else columns.host(name, values)


def _separate_episodes(storage: Storage, rows: np.ndarray) -> None:
    """Makes each of these rows an episode of its own.

    The store has one lane.
    """
    episodes, newest = storage.episodes, len(storage) - 1
    if episodes is None or (episodes.begin(rows) & episodes.end(rows)).all():
        return
    every = np.arange(newest + 1)
    ends = np.zeros((1, storage.columns.capacity), bool)
    # A row before the start of another episode ends its own, even if it is not marked as an end.
    ends[0, : newest + 1] = episodes.end(every)
    ends[0, :newest] |= episodes.begin(every[1:])
    ends[0, rows] = True
    ends[0, rows[rows > 0] - 1] = True
    storage.rebuild_episodes(ends)


def _append(storage: Storage, block: Block, n: int, done: Marks, starts: Marks) -> np.ndarray:
    """Appends rows to a store of one lane, and returns their ids.

    The id is -1 for rows that the last ones overwrote.
    """
    head, capacity = int(storage.ring.head[0]), storage.columns.capacity
    storage.write(block, done=done, starts=starts)
    rows = storage.columns.at_steps(0, head + np.arange(n))
    rows[: max(n - capacity, 0)] = -1
    return rows


@set_module("rlstructs.replay")
class RoundRobinWriter(Writer):
    """Appends rows; in a full buffer each overwrites the oldest one.

    If there are more rows than the buffer has room for, the last are kept.

    Args:
        compilable: changes nothing, as nothing is compiled.
        others: torchrl's argument `track_generations`, which must be False.
    """

    is_plain = True

    def __init__(self, compilable: bool = False, **others: Any) -> None:
        check_neutral(type(self).__name__, others, {"track_generations": False})

    def write(self, storage: Storage, block: Block, n: int, done: Marks, starts: Marks) -> Written:
        return _append(storage, block, n, done, starts), NO_ROWS


@set_module("rlstructs.replay")
class ImmutableWriter(Writer):
    """Refuses every change; also called `ImmutableDatasetWriter`.

    Args:
        compilable: changes nothing, as nothing is compiled.
    """

    def __init__(self, compilable: bool = False) -> None:
        pass

    def check(self, values: Block, n: int, specs: Mapping[str, Any]) -> None:
        self.refuse()

    def refuse(self) -> None:
        raise StateError("this buffer cannot be changed: its writer is an ImmutableWriter")


@set_module("rlstructs.replay")
class MaxValueWriter(Writer):
    """Keeps the rows of the highest rank.

    In a full buffer a row replaces the lowest one if it is higher. The rows have no order: each is an episode of its
    own.

    Args:
        rank_key: the column of the rank; None for the reward, `next/reward` if there are two.
        reduction: of several numbers of a row to one: "sum", "max", "min", "mean" or "median".
        compilable: changes nothing, as nothing is compiled.

    Example:
        >>> from rlstructs.replay import DictTensorReplayBuffer, ListStorage
        >>> buffer = DictTensorReplayBuffer(storage=ListStorage(2), writer=MaxValueWriter("score"))
        >>> buffer.extend({"score": [3.0, 1.0, 1.0, 2.0]})
        tensor([ 0, -1, -1,  1])
    """

    keeps_order = False

    def __init__(self, rank_key: Any = None, reduction: str = "sum", compilable: bool = False) -> None:
        self.rank_key = None if rank_key is None else join_key(rank_key)
        self.reduction = check_reduction(reduction)
        self._ranks: np.ndarray | None = None  # float64 by row id, for every row or more; None if not known
        self._lowest: list[tuple[float, int]] = []  # a heap of (rank, row): all that are not above `_bound`
        self._bound = (-np.inf, -1)

    def check(self, values: Block, n: int, specs: Mapping[str, Any]) -> None:
        self._rank(values)

    def _key(self, names: Any) -> str:
        found = [name for name in names if is_reward(name)] if self.rank_key is None else [self.rank_key]
        found = ["next/reward"] if "next/reward" in found else found
        if len(found) != 1:
            raise SpecError(f"rank_key must be given: the reward is one of {sorted(found) or sorted(names)}")
        if found[0] not in names:
            raise MissingKeyError(f"no {found[0]!r} to rank rows by, there are {sorted(names)}")
        return found[0]

    def _rank(self, values: Block) -> np.ndarray:
        """Computes the ranks of rows, float64 (n,)."""
        key = self._key(values)
        array = host_array(key, values[key])
        if array.dtype.kind not in "biuf":
            raise SpecError(f"{key!r} holds {array.dtype}, rows cannot be ranked by it")
        ranks = reduce_rows(array.astype(np.float64), self.reduction)
        if np.isnan(ranks).any():
            raise SpecError(f"{key!r} ranks a row as NaN")
        return ranks

    def write(self, storage: Storage, block: Block, n: int, done: Marks, starts: Marks) -> Written:
        ranks = self._rank_columns(storage, {name: values[0] for name, values in block.items()})
        known = self._find_ranks(storage)
        room = min(n, storage.columns.n_rows - len(storage))
        rows = np.full(n, -1)
        if room:
            every = np.ones((1, room), bool)
            first = {name: values[:, :room] for name, values in block.items()}
            rows[:room] = _append(storage, first, room, every, None)
            n_rows = len(storage)
            if n_rows > known.size:
                known = np.append(known, np.full(n_rows, np.inf))  # so that an empty row is never the lowest
            known[n_rows - room : n_rows] = ranks[:room]
            self._ranks, self._lowest = known, []
        taken = self._choose_places(known, ranks, room) if room < n else {}
        if taken:
            targets, sources = np.array(list(taken), np.int64), np.array(list(taken.values()), np.int64)
            rows[:room][np.isin(rows[:room], targets)] = -1  # a later one of these rows has replaced it
            rows[sources] = targets
            storage.put({name: values[0][sources] for name, values in block.items()}, targets)
            _separate_episodes(storage, targets)
        return rows, np.array(list(taken), np.int64)

    def _choose_places(self, known: np.ndarray, ranks: np.ndarray, since: int) -> dict[int, int]:
        """Chooses the rows that new rows replace; updates the known ranks.

        Row id -> number of the new row that replaces it. New rows count from the `since`-th on.
        """
        taken: dict[int, int] = {}
        self._refill(known)
        above = since + np.flatnonzero(ranks[since:] > self._lowest[0][0])
        for at, rank in zip(above.tolist(), ranks[above].tolist(), strict=True):
            lowest, row = self._lowest[0]
            if rank <= lowest:  # an earlier new row has raised the lowest
                continue
            known[row], taken[row] = rank, at
            if (rank, row) <= self._bound:
                heapq.heapreplace(self._lowest, (rank, row))
            else:
                heapq.heappop(self._lowest)
                self._refill(known)
        return taken

    def _refill(self, known: np.ndarray) -> None:
        """Finds the lowest rows, by rank and then by row id.

        Does nothing if some are known.
        """
        if self._lowest:
            return
        n = min(N_LOWEST, known.size)
        largest = np.partition(known, n - 1)[n - 1]
        below, equal = np.flatnonzero(known < largest), np.flatnonzero(known == largest)
        rows = np.concatenate([below, equal[: n - below.size]])
        self._lowest = sorted(zip(known[rows].tolist(), rows.tolist(), strict=True))
        self._bound = self._lowest[-1]

    def _find_ranks(self, storage: Storage) -> np.ndarray:
        """Returns the ranks of the rows in the store.

        They are read again after something else has changed it.
        """
        if self._ranks is None:
            key = self._key(storage.columns.specs)
            [values] = storage.gather([key], np.arange(len(storage)))  # rows fill the slots from the first one on
            self._ranks, self._lowest = self._rank_columns(storage, {key: values}), []
        return self._ranks

    def _rank_columns(self, storage: Storage, values: Block) -> np.ndarray:
        """Computes the ranks of rows in the form that columns have."""
        key = self._key(values)
        held = to_host(storage.columns, key, values[key])
        numbers = from_bits(np.ascontiguousarray(held)) if storage.columns.specs[key].is_bfloat16 else held
        return self._rank({key: numbers})

    def changed(self) -> None:
        self._ranks, self._lowest = None, []

    def _shown(self) -> dict[str, Any]:
        return {"rank_key": self.rank_key, "reduction": self.reduction}


TensorDictRoundRobinWriter = RoundRobinWriter
TensorDictMaxValueWriter = MaxValueWriter
ImmutableDatasetWriter = ImmutableWriter
