"""Where the rows go that come to a `DictTensorReplayBuffer`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay.roles import is_reward
from rlstructs.replay.store import Storage
from rlstructs.replay.torchrl.part import Part, check_neutral, joined
from rlstructs.replay.torchrl.prioritized_sampler import checked_reduction, reduced
from rlstructs.replay.values import from_bits, host_array

# How many of the lowest rows are kept in order; those of many are looked for again when these are used up.
N_LOWEST = 1024


class Writer(Part):
    """What every writer does.

    Attributes:
        is_plain: whether it appends what comes.
        keeps_order: whether rows that follow one another came one after another.
    """

    is_plain = False
    keeps_order = True

    def check(self, values: Mapping[str, Any], n: int, specs: Mapping[str, Any]) -> None:
        """Raises what `write` would, before anything has changed.

        Args:
            values: name -> (n, ...), as they were given.
            n: how many rows.
            specs: of the columns; none yet before the first rows.
        """

    def write(
        self, storage: Storage, block: Mapping[str, Any], n: int, done: np.ndarray | None, starts: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Writes n rows to a store of one lane that has room for them.

        Args:
            block: name -> (1, n, ...), as columns take them.
            done, starts: bool (1, n), as `Storage.write` takes them.

        Returns:
            The row id of each, int64 (n,), -1 of what was not kept; and those of rows that were replaced.
        """
        raise NotImplementedError

    def refuse(self) -> None:
        """Raises StateError if nothing may be changed."""

    def changed(self) -> None:
        """The store has been cleared, filled from a file, or written to by someone else."""


def _separate_episodes(storage: Storage, rows: np.ndarray) -> None:
    """Makes each of these rows of a store of one lane, whose slots are its row ids, an episode of its own."""
    episodes, newest = storage.episodes, len(storage) - 1
    if episodes is None or (episodes.begin(rows) & episodes.end(rows)).all():
        return
    every = np.arange(newest + 1)
    ends = np.zeros((1, storage.columns.capacity), bool)
    # The last row before another episode ends its own, whether or not it said so.
    ends[0, : newest + 1] = episodes.end(every)
    ends[0, :newest] |= episodes.begin(every[1:])
    ends[0, rows] = True
    ends[0, rows[rows > 0] - 1] = True
    storage.rebuild_episodes(ends)


def _append(
    storage: Storage, block: Mapping[str, Any], n: int, done: np.ndarray | None, starts: np.ndarray | None
) -> np.ndarray:
    head, capacity = int(storage.ring.head[0]), storage.columns.capacity
    storage.write(block, done=done, starts=starts)
    rows = storage.columns.at_steps(0, head + np.arange(n))
    rows[: max(n - capacity, 0)] = -1
    return rows


NONE = np.zeros(0, np.int64)


@set_module("rlstructs.replay")
class RoundRobinWriter(Writer):
    """Appends rows; when there is no room left, each takes the place of the oldest one.

    Of more rows at once than there is room for the last are kept.

    Args:
        compilable: changes nothing, as nothing is compiled.
        others: of torchrl's arguments `track_generations`, which must be False.
    """

    is_plain = True

    def __init__(self, compilable: bool = False, **others: Any) -> None:
        check_neutral(type(self).__name__, others, {"track_generations": False})

    def write(
        self, storage: Storage, block: Mapping[str, Any], n: int, done: np.ndarray | None, starts: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Writer`."""
        return _append(storage, block, n, done, starts), NONE


@set_module("rlstructs.replay")
class ImmutableWriter(Writer):
    """Refuses every change; also called `ImmutableDatasetWriter`.

    Args:
        compilable: changes nothing, as nothing is compiled.
    """

    def __init__(self, compilable: bool = False) -> None:
        pass

    def check(self, values: Mapping[str, Any], n: int, specs: Mapping[str, Any]) -> None:
        """See `Writer`."""
        self.refuse()

    def refuse(self) -> None:
        """See `Writer`."""
        raise StateError("this buffer cannot be changed: its writer is an ImmutableWriter")


@set_module("rlstructs.replay")
class MaxValueWriter(Writer):
    """Keeps the rows of the highest rank: where there is no room, one takes the place of the lowest if it is higher.

    What it keeps has no order: every row counts as an episode of its own.

    Args:
        rank_key: the column of the rank; None for the reward, that of the next step if there are two.
        reduction: what becomes of several numbers of a row: "sum", "max", "min", "mean" or "median".
        compilable: changes nothing, as nothing is compiled.

    Example:
        >>> from rlstructs.replay import DictTensorReplayBuffer, ListStorage
        >>> buffer = DictTensorReplayBuffer(storage=ListStorage(2), writer=MaxValueWriter("score"))
        >>> buffer.extend({"score": [3.0, 1.0, 1.0, 2.0]})
        tensor([ 0, -1, -1,  1])
    """

    keeps_order = False

    def __init__(self, rank_key: Any = None, reduction: str = "sum", compilable: bool = False) -> None:
        self.rank_key = None if rank_key is None else joined(rank_key)
        self.reduction = checked_reduction(reduction)
        self._ranks: np.ndarray | None = None  # float64, by row id, at least as many as rows; None: to be looked up
        self._lowest: list[tuple[float, int]] = []  # a heap of (rank, row), all that are not above `_bound`
        self._bound = (-np.inf, -1)

    def check(self, values: Mapping[str, Any], n: int, specs: Mapping[str, Any]) -> None:
        """See `Writer`."""
        self._ranks_of(values, n, specs)

    def _key(self, names: Any) -> str:
        found = [name for name in names if is_reward(name)] if self.rank_key is None else [self.rank_key]
        found = ["next/reward"] if "next/reward" in found else found
        if len(found) != 1:
            raise SpecError(f"rank_key must be given: the reward is one of {sorted(found) or sorted(names)}")
        if found[0] not in names:
            raise MissingKeyError(f"no {found[0]!r} to rank rows by, there are {sorted(names)}")
        return found[0]

    def _ranks_of(self, values: Mapping[str, Any], n: int, specs: Mapping[str, Any]) -> np.ndarray:
        """float64 (n,)."""
        key = self._key(values)
        array = host_array(key, values[key])
        if array.dtype.kind not in "biuf":
            raise SpecError(f"{key!r} holds {array.dtype}, rows cannot be ranked by it")
        ranks = reduced(array.astype(np.float64), self.reduction)
        if np.isnan(ranks).any():
            raise SpecError(f"{key!r} ranks a row as NaN")
        return ranks

    def write(
        self, storage: Storage, block: Mapping[str, Any], n: int, done: np.ndarray | None, starts: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Writer`."""
        ranks = self._of_columns(storage, {name: values[0] for name, values in block.items()}, n)
        self._look(storage)
        assert self._ranks is not None
        room = min(n, storage.columns.n_rows - len(storage))
        rows = np.full(n, -1)
        if room:
            every = np.ones((1, room), bool)
            first = {name: values[:, :room] for name, values in block.items()}
            rows[:room] = _append(storage, first, room, every, None)
            self._keep(ranks[:room], len(storage))
        taken = self._places(ranks, room) if room < n else {}
        if taken:
            targets, sources = np.array(list(taken), np.int64), np.array(list(taken.values()), np.int64)
            rows[:room][np.isin(rows[:room], targets)] = -1  # a later one has taken its place at once
            rows[sources] = targets
            for name, values in block.items():
                storage.put(name, targets, values[0][sources])
            _separate_episodes(storage, targets)
        return rows, np.array(list(taken), np.int64)

    def _keep(self, ranks: np.ndarray, n_rows: int) -> None:
        """Notes the ranks of the rows that were appended last, `n_rows` with them."""
        assert self._ranks is not None
        if n_rows > self._ranks.size:
            self._ranks = np.append(self._ranks, np.full(n_rows, np.inf))  # what is no row is never the lowest
        self._ranks[n_rows - ranks.size : n_rows] = ranks
        self._lowest = []

    def _places(self, ranks: np.ndarray, since: int) -> dict[int, int]:
        """Row id -> which of the new rows, from the `since`-th on, takes its place."""
        assert self._ranks is not None
        taken: dict[int, int] = {}
        self._refill()
        above = since + np.flatnonzero(ranks[since:] > self._lowest[0][0])
        for at, rank in zip(above.tolist(), ranks[above].tolist(), strict=True):
            lowest, row = self._lowest[0]
            if rank <= lowest:  # what came before it has raised the lowest
                continue
            self._ranks[row], taken[row] = rank, at
            if (rank, row) <= self._bound:
                heapq.heapreplace(self._lowest, (rank, row))
            else:
                heapq.heappop(self._lowest)
                self._refill()
        return taken

    def _refill(self) -> None:
        """Looks for the lowest rows, by rank and then by row id, if none are known."""
        if self._lowest:
            return
        assert self._ranks is not None
        n = min(N_LOWEST, self._ranks.size)
        largest = np.partition(self._ranks, n - 1)[n - 1]
        below, equal = np.flatnonzero(self._ranks < largest), np.flatnonzero(self._ranks == largest)
        rows = np.concatenate([below, equal[: n - below.size]])
        self._lowest = sorted(zip(self._ranks[rows].tolist(), rows.tolist(), strict=True))
        self._bound = self._lowest[-1]

    def _look(self, storage: Storage) -> None:
        """Looks up the ranks of the rows that are there, if they are not known."""
        if self._ranks is not None:
            return
        rows = np.arange(len(storage))  # nothing has been appended beyond the last slot
        key = self._key(storage.columns.specs)
        [values] = storage.gather([key], rows)
        self._ranks, self._lowest = self._of_columns(storage, {key: values}, rows.size), []

    def _of_columns(self, storage: Storage, values: Mapping[str, Any], n: int) -> np.ndarray:
        """The ranks of rows as columns hold them."""
        key = self._key(values)
        given = values[key]  # of numpy, too, before the first rows are written
        held = given if isinstance(given, np.ndarray) else storage.columns.host(key, given)
        numbers = from_bits(np.ascontiguousarray(held)) if storage.columns.specs[key].is_bfloat16 else held
        return self._ranks_of({key: numbers}, n, storage.columns.specs)

    def changed(self) -> None:
        """See `Writer`."""
        self._ranks, self._lowest = None, []

    def _shown(self) -> dict[str, Any]:
        return {"rank_key": self.rank_key, "reduction": self.reduction}


TensorDictRoundRobinWriter = RoundRobinWriter
TensorDictMaxValueWriter = MaxValueWriter
ImmutableDatasetWriter = ImmutableWriter
