"""Finds the ends and starts of episodes from a buffer's columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.intake.arrays import encoded, find_marks, host_array
from rlstructs.replay.intake.roles import ends_among
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.given_rows import GivenRows
from rlstructs.replay.torchrl.samplers import Sampler
from rlstructs.replay.torchrl.slice_samplers import AUTO, DONE, SliceSampler, parent_of

# torchrl's columns of trajectory ids: where the id changes, an episode begins.
TRAJECTORY_IDS = ("collector/traj_ids", "episode")


class EpisodeMarks:
    """Finds where episodes end and begin.

    Args:
        store: the rows.
        sampler: its `end_key` and `traj_key` are further columns with ends and starts.

    Attributes:
        are_known: whether any column or batch has said where episodes end.
    """

    def __init__(self, store: Storage, sampler: Sampler) -> None:
        self._store, self.sampler, self.are_known = store, sampler, False

    def end_keys(self, names: Collection[str]) -> list[str]:
        """Lists the columns that end an episode where they are true."""
        more, ends = self.sampler.end_key, ends_among(names)
        return ends if more is None or more in ends or more not in names else [*ends, more]

    def id_keys(self, names: Collection[str]) -> list[str]:
        """Lists the columns that begin an episode where they change."""
        own = self.sampler.traj_key
        return [name for name in (TRAJECTORY_IDS if own is None else (own,)) if name in names]

    def are_in(self, names: Collection[str]) -> bool:
        """Whether one of these columns says where episodes end or begin."""
        return bool(self.end_keys(names) or self.id_keys(names))

    def are_changed(self, block: Mapping[str, Any], rows: np.ndarray) -> bool:
        """Whether new values of rows would change ends or starts of episodes.

        `block` has the values (n, ...) by column.
        """
        names, columns = [*self.end_keys(block), *self.id_keys(block)], self._store.columns
        held = self._store.gather(names, rows)
        return any(
            not np.array_equal(to_host(columns, name, block[name]), to_host(columns, name, values))
            for name, values in zip(names, held, strict=True)
        )

    def find(self, block: Mapping[str, Any], rows: GivenRows) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Marks ends and starts of episodes in rows about to be written.

        Returns bool (1, n) each; None for nowhere.

        Args:
            block: name -> (1, n, ...), the rows in the form that columns take.
            rows: the rows as they were given.
        """
        own = find_marks({name: block[name] for name in self.end_keys(block)})
        done = [marks for marks in (rows.done, None if own is None else own[0]) if marks is not None]
        starts = [] if rows.starts is None else [rows.starts]
        for name in self.id_keys(block):
            ids = to_host(self._store.columns, name, block[name][0])
            changes = _find_changes(ids)
            if n_rows := len(self._store):
                newest = self._store.view().row_ids(np.array([n_rows - 1]))
                changes[0] = (self._read_ids(name, newest)[0] != ids[0]).any()
            starts.append(changes)
        self.are_known |= bool(done or starts)
        return _join(done), _join(starts)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Marks rows that end an episode, and rows with a new id.

        Every row is marked, the oldest first; bool (n,) each.
        """
        rows, specs = self._store.view().every_row(), self._store.columns.specs
        ends = find_marks({name: self._store.gather([name], rows)[0] for name in self.end_keys(specs)}, 1)
        changes = np.zeros(rows.size, bool)
        for name in self.id_keys(specs):
            changes |= _find_changes(self._read_ids(name, rows))
        return np.zeros(rows.size, bool) if ends is None else ends, changes

    def recompute(self, ends: np.ndarray, changes: np.ndarray) -> None:
        """Recomputes all episodes after columns, or the sampler, have changed.

        It takes the result of `read` before the change.
        """
        rows = self._store.view().every_row()
        # Episodes that began for another reason, as each trajectory of a batch does, still begin there.
        begins = self._store.track_episodes().begin(rows) & ~changes
        begins[1:] &= ~ends[:-1]
        done, changed = self.read()
        done[:-1] |= (begins | changed)[1:]
        by_slot = np.zeros((1, self._store.columns.capacity), bool)
        by_slot[0, rows] = done
        self._store.rebuild_episodes(by_slot)
        self.sampler.reordered()

    def _read_ids(self, name: str, rows: np.ndarray) -> np.ndarray:
        return to_host(self._store.columns, name, self._store.gather([name], rows)[0])


def to_host(columns: Columns, name: str, values: Any) -> np.ndarray:
    """Copies values of a column to host memory, if they are on a device."""
    return values if isinstance(values, np.ndarray) else columns.host(name, values)


def _join(marks: list[np.ndarray]) -> np.ndarray | None:
    """Joins marks by "or", bool (1, n); None if there are none."""
    return np.asarray(np.logical_or.reduce(marks))[None] if marks else None


def _find_changes(ids: np.ndarray) -> np.ndarray:
    """Marks rows that differ from the one before, bool (n,).

    The first row is not marked.
    """
    changes = np.zeros(len(ids), bool)
    changes[1:] = (ids[1:] != ids[:-1]).any(axis=tuple(range(1, ids.ndim)))
    return changes


TRUNCATED, TERMINATED = "truncated", "terminated"


def put(
    values: dict[str, Any],
    picked: Selection,
    sampler: SliceSampler,
    specs: Mapping[str, Spec],
    beside: tuple[int, ...],
) -> dict[str, np.ndarray]:
    """Marks the first and last rows of slices, with the sampler's keys.

    The last ones are marked as truncated and done. Programs that use ends ask for `terminated`, `truncated` and `done`:
    ends without a column are added.

    Args:
        values: the columns, name -> `(n, ...)`, changed in place.
        picked: the drawn slices.
        sampler: drew them.
        specs: of the columns.
        beside: further axes of an added end, if no end is stored.

    Returns:
        The ends without a column, name -> `(n, ...)`.
    """
    if sampler.init_key in values:
        _mark(values, sampler.init_key, sampler.firsts(picked), specs)
    if sampler.truncated_key is None:
        return {}
    lasts, ends = sampler.lasts(picked), ends_among(values)
    truncations = [name for name in ends if name.rpartition("/")[2] == TRUNCATED]
    parent = parent_of((truncations or ends or ["next/"])[0])
    key = f"{parent}{TRUNCATED}" if sampler.truncated_key == AUTO else sampler.truncated_key
    prefix = parent_of(key)
    own = [f"{prefix}{last}" for last in DONE]
    dones = [name for name in (*own, *(f"{parent}{last}" for last in DONE)) if name in values]
    if sampler.end_key in values and sampler.end_key.rpartition("/")[2] in DONE:
        dones.append(sampler.end_key)
    made = {}
    if not ({key, f"{prefix}{TERMINATED}"} <= values.keys() and any(name in values for name in own)):
        made = _make_absent(values, lasts, key, ends, beside)
    for name in dict.fromkeys((key, *dones) if key in values else dones):
        _mark(values, name, lasts, specs)
    return made


def _make_absent(
    values: Mapping[str, Any], lasts: np.ndarray, key: str, ends: list[str], beside: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Makes the ends beside `key` that have no column.

    The last rows of slices are marked in them.
    """
    prefix = parent_of(key)
    dones = [name for last in DONE if (name := f"{prefix}{last}") in values]
    terminated = f"{prefix}{TERMINATED}"
    stored = [name for name in (key, *dones, terminated) if name in values]
    like = (stored or ends)[:1]
    shape = (len(lasts), *(np.shape(values[like[0]])[1:] if like else beside))
    known = {name: _truth(name, values[name], shape) for name in stored}
    marks, nowhere = _spread(lasts, shape), np.zeros(shape, bool)
    cut, over = known.get(key, nowhere), known.get(terminated)
    if over is None:  # an episode that is done and not truncated has terminated
        over = known[dones[0]] & ~cut if dones else nowhere
    made = {terminated: over, key: marks}
    if not dones:
        made = {f"{prefix}{DONE[0]}": marks | cut | over} | made
    return {name: np.array(array) for name, array in made.items() if name not in values}


def _truth(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Marks values of a column that are not zero, bool of this shape."""
    marks = host_array(name, values) != 0
    return marks if marks.shape == shape else _spread(marks.any(axis=tuple(range(1, marks.ndim))), shape)


def _spread(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcasts values of rows, `(n,)`, over the further axes of a shape."""
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _mark(values: dict[str, Any], name: str, rows: np.ndarray, specs: Mapping[str, Spec]) -> None:
    """Makes a column true in some rows, bool (n,), where it is zero."""
    at = torch.from_numpy(rows) if isinstance(values[name], torch.Tensor) else rows
    one = encoded(name, np.ones(()), specs[name]).item()
    if specs[name].dtype.kind == "b":
        values[name][at] = one
        return
    marked = values[name][at]  # it may hold other numbers than 0 and 1
    marked[marked == 0] = one
    values[name][at] = marked
