"""Reads rows for samples.

There are n-step returns, stacks of frames, and keys that are made of stored columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.checks import check_count, check_gamma
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.draw.view import AnyView, View
from rlstructs.replay.intake.roles import is_after, is_observation, is_reward, source_of
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

# The key of gamma to the number of steps in n-step samples.
DISCOUNT = "discount"
# Where a key is read: in the drawn row, in the last of the n steps from it, or in the row after those; or its
# discounted sum over the n steps.
ANCHOR, LAST, NEXT, SUM = "anchor", "last", "next", "sum"


class Source(NamedTuple):
    """The way to read a key of a sample.

    Attributes:
        columns: one, or several, whose flags are joined by "or".
        place: `ANCHOR`, `LAST`, `NEXT` or `SUM`.
        is_stacked: whether it becomes a stack, unless the reading has none or it is summed.
        seen: the column of all frames of a stack except the last; None for the same column.
    """

    columns: tuple[str, ...]
    place: str = ANCHOR
    is_stacked: bool = False
    seen: str | None = None


@dataclass(frozen=True)
class Reading:
    """The settings for reading rows.

    Attributes:
        n_step: rewards become the discounted sum of so many steps, up to the end of the episode or the newest row; what
            comes after a step is read in the last of them.
        gamma: discount per step.
        stack_num: observations become the last so many of their episode, the first one repeated before that, on a new
            axis in front of their own.
        stack_keys: the columns that are stacked; None for all observations.

    Raises:
        TypeError, SpecError: a number is invalid.
    """

    n_step: int = 1
    gamma: float = 0.99
    stack_num: int = 1
    stack_keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_count("n_step", self.n_step)
        check_count("stack_num", self.stack_num)
        check_gamma(self.gamma)

    @property
    def is_plain(self) -> bool:
        """Whether rows are read as they are stored."""
        return self.n_step == self.stack_num == 1

    def read(
        self, storage: Storage, view: View, names: Sequence[str], rows: np.ndarray, discount: str = DISCOUNT
    ) -> dict[str, Any]:
        """Reads columns by the usual meaning of their names; see `read_sources`.

        Args:
            storage: the store.
            view: the rows at the time of the draw.
            names: of columns.
            rows: int64, of any shape.
            discount: the key of gamma to the number of steps.

        Raises:
            StateError: the store does not track episodes, and rows are not read as they are stored.
        """
        if self.is_plain:
            return dict(zip(names, storage.gather(names, rows), strict=True))
        if storage.episodes is None:
            raise StateError("nothing says where episodes end")
        specs = storage.columns.specs
        sources = _find_sources(self.stack_num, self.stack_keys, tuple(names), tuple(specs))
        return read_sources(view, storage.gather, specs, sources, rows, self, discount=discount)

    def earliest(self, view: View, rows: np.ndarray) -> np.ndarray:
        """Returns the first row that is read for each of these.

        The result has the same shape.
        """
        if self.stack_num == 1 or view.episodes is None:
            return rows
        return view.frames(rows.reshape(-1), self.stack_num)[:, 0].reshape(rows.shape)

    def stacks(self, name: str) -> bool:
        """Whether a column is read in stacks."""
        if self.stack_num == 1:
            return False
        return is_observation(name) if self.stack_keys is None else name in self.stack_keys


# Copies rows of some columns: from their names, and row ids of any shape.
Gather = Callable[[Sequence[str], np.ndarray], list[Any]]
# What is read for each anchor: its place, and whether a row, a stack, or a stack without its first row; see `_Places`.
_Where = tuple[str, str]
ROW, STACK, NEWER = "row", "stack", "newer"
# The columns that are gathered at once, and from where.
_Group = tuple[tuple[str, ...], list[_Where]]


class _Key(NamedTuple):
    """A key of a sample.

    It has the place as it is read, and which of the columns that are gathered from where are its own.
    """

    key: str
    source: Source
    where: _Where
    columns: tuple[int, ...]
    before: int  # which of the columns of `NEWER` is its `seen`


class Sources(dict[str, Source]):
    """The way to read each key of a sample.

    It is immutable, so that everything computed from it is computed once.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__(sources)
        self._groups: dict[tuple[int, int], tuple[list[_Group], list[_Key]]] = {}

    def group(self, n_step: int, stack_num: int) -> tuple[list[_Group], list[_Key]]:
        """Groups the columns that are gathered at once.

        So a compressed row is decoded once, however many stacks it is in.
        """
        found = self._groups.get((n_step, stack_num))
        if found is not None:
            return found
        columns_of: dict[_Where, dict[str, int]] = {}
        keys, groups = [], dict[tuple[str, ...], list[_Where]]()
        for key, source in self.items():
            place = source.place if n_step > 1 or source.place == NEXT else ANCHOR
            is_stacked = stack_num > 1 and source.is_stacked and source.seen is None and place != SUM
            where = place, STACK if is_stacked else ROW
            group, before = columns_of.setdefault(where, {}), 0
            columns = tuple(group.setdefault(column, len(group)) for column in source.columns)
            if source.seen is not None and place != SUM:
                group = columns_of.setdefault((place, NEWER), {})
                before = group.setdefault(source.seen, len(group))
            keys.append(_Key(key, source, where, columns, before))
        for where, group in columns_of.items():
            groups.setdefault(tuple(group), []).append(where)
        found = self._groups[n_step, stack_num] = list(groups.items()), keys
        return found


@lru_cache
def _find_sources(
    stack_num: int, stack_keys: tuple[str, ...] | None, names: tuple[str, ...], stored: tuple[str, ...]
) -> Sources:
    """Finds the way to read columns by the usual meaning of their names.

    `stored` has the names of all stored columns.
    """
    reading, found = Reading(stack_num=stack_num, stack_keys=stack_keys), {}
    for name in names:
        place = SUM if is_reward(name) else LAST if is_after(name) else ANCHOR
        is_stacked = reading.stacks(name)
        before = source_of(name) if is_stacked else None
        found[name] = Source((name,), place, is_stacked, before if before in stored else None)
    return Sources(found)


def read_sources(
    view: AnyView,
    gather: Gather,
    specs: Mapping[str, Spec],
    sources: Sources,
    at: np.ndarray,
    reading: Reading,
    frames: np.ndarray | None = None,
    discount: str = DISCOUNT,
) -> dict[str, Any]:
    """Reads the keys of a sample, private memory.

    Args:
        view: the rows that are there.
        gather: copies rows of some columns.
        specs: of the columns.
        sources: key -> how it is read.
        at: int64, of any shape, row ids.
        reading: the n steps and stacks.
        frames: int64 (n, stack_num), the row ids of the stacks of `at` if they are known.
        discount: the key of gamma to the number of steps.

    Returns:
        key -> `(*at.shape, *shape)`, stacked ones `(*at.shape, stack_num, *shape)`; and `discount`, gamma to the number
        of steps, float32 `at.shape`, if n_step is above 1.

    Raises:
        SpecError: what is to be summed is no float.
    """
    places, n_step = _Places(view, at.reshape(-1), reading, frames), reading.n_step
    groups, keys = sources.group(n_step, reading.stack_num)
    gathered: dict[_Where, list[Any]] = {}
    for names, wheres in groups:
        rows = [places.find(*where) for where in wheres]
        if len(rows) == 1:
            gathered[wheres[0]] = gather(names, rows[0])
            continue
        found, start = gather(names, np.concatenate([each.reshape(-1) for each in rows])), 0
        for where, each in zip(wheres, rows, strict=True):
            end = start + each.size
            gathered[where] = [array[start:end].reshape(*each.shape, *array.shape[1:]) for array in found]
            start = end
    arrays: dict[str, Any] = {}
    for key, source, where, columns, before in keys:
        array = gathered[where][columns[0]]
        for other in columns[1:]:
            array = np.logical_or(array, gathered[where][other])
        arrays[key] = array
        if where[0] == SUM:
            arrays[key] = discounted(key, array, specs[key], places.inside, reading.gamma)
        elif source.seen is not None:
            join: Any = np.concatenate if isinstance(array, np.ndarray) else torch.cat
            arrays[key] = join([gathered[where[0], NEWER][before], array[:, None]], 1)
    if n_step > 1:
        arrays[discount] = (reading.gamma ** places.inside.sum(axis=1)).astype(np.float32)
    if not at.ndim:
        return {k: array[0, ...] for k, array in arrays.items()}
    return arrays if at.ndim == 1 else {k: array.reshape((*at.shape, *array.shape[1:])) for k, array in arrays.items()}


class _Places:
    """The rows that are read for each anchor; each kind is found once."""

    def __init__(self, view: AnyView, anchors: np.ndarray, reading: Reading, frames: np.ndarray | None) -> None:
        self._view, self._stack_num = view, reading.stack_num
        self._last = LAST if reading.n_step > 1 else ANCHOR
        self._found = {(ANCHOR, ROW): anchors}
        if frames is not None:
            self._found[ANCHOR, STACK] = frames
        if reading.n_step > 1:
            window, self.inside = view.run(anchors, reading.n_step)
            self._found |= {(SUM, ROW): window, (LAST, ROW): window[:, -1]}

    def find(self, place: str, form: str) -> np.ndarray:
        """Finds row ids (n,), windows (n, n_step) of `SUM`, or stacks (n, stack_num).

        Stacks of the form `NEWER` lack their first rows.
        """
        found = self._found.get((place, form))
        if found is not None:
            return found
        if form == ROW:
            found = self._view.next(self.find(self._last, ROW))
        elif form == NEWER:
            found = self.find(place, STACK)[:, 1:]
        elif place == NEXT:  # those of the rows before, one further
            frames, rows = self.find(self._last, STACK), self.find(NEXT, ROW)[:, None]
            found = np.where(rows == frames[:, -1:], frames, np.concatenate([frames[:, 1:], rows], axis=1))
        else:
            found = self._view.frames(self.find(place, ROW), self._stack_num)
        self._found[place, form] = found
        return found


def discounted(name: str, rewards: Any, spec: Spec, inside: np.ndarray, gamma: float) -> Any:
    """Computes the discounted sums of rewards, (B, ...).

    They are a numpy array or tensor like the rewards.

    Args:
        name: of the column, for messages.
        rewards: (B, n, ...), as the column stores them.
        spec: of the column.
        inside: bool (B, n), which steps count.
        gamma: discount per step.

    Raises:
        SpecError: the rewards are no floats.
    """
    is_bits = spec.is_bfloat16
    if not is_bits and spec.dtype.kind not in "fc":
        raise SpecError(f"n_step: {name!r} is {spec.dtype}; discounted sums need a float")
    stored = rewards if isinstance(rewards, torch.Tensor) else torch.from_numpy(rewards)
    numbers = stored.view(torch.bfloat16) if is_bits else stored
    factors = torch.from_numpy(gamma ** np.arange(inside.shape[1]) * inside).to(stored.device)
    factors = factors.reshape(*factors.shape, *(1,) * (stored.ndim - 2))
    # Rewards outside may be NaN, and NaN times zero is NaN.
    summed = torch.where(factors > 0, numbers * factors, 0).sum(dim=1).to(numbers.dtype).view(stored.dtype)
    return summed if stored is rewards else summed.numpy()
