"""Reads transitions: with computed `obs_next` and `done`, sums over n steps, and stacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstructs.replay.columns import Spec
from rlstructs.replay.reading import DISCOUNT, discounted
from rlstructs.replay.snapshot import Rows
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS, OBS_NEXT, REW, STACKED, top

# Rows to read from: the drawn rows, the last of the n steps from there, or the row after that.
ANCHORS, LAST, NEXT = "anchors", "last", "next"


@dataclass(frozen=True)
class How:
    """How transitions are read.

    Attributes:
        stack_num: number of rows of a stack, on a new axis in front of those of a row.
        n_step: rewards become the discounted sum of so many steps, up to the end of the episode or the newest
            row; values from after a step come from the last of them.
        gamma: discount per step.
        stacked: keys that are stacked; None for all.
    """

    stack_num: int = 1
    n_step: int = 1
    gamma: float = 1.0
    stacked: Collection[str] | None = STACKED


def read(
    rows: Rows,
    specs: Mapping[str, Spec],
    names: Iterable[str],
    at: np.ndarray,
    how: How,
    frames: np.ndarray | None = None,
) -> dict[str, Any]:
    """Reads some rows, to private memory.

    Args:
        rows: the snapshot that they are from.
        specs: of the columns.
        names: keys of a batch, stored or computed.
        at: int64, of any shape: their row ids.
        how: how to read them.
        frames: int64 (n, how.stack_num), the rows of their stacks, if known.

    Returns:
        Name -> `(*at.shape, *shape)`, stacked ones `(*at.shape, stack_num, *shape)`; and `discount`, gamma to the
        number of steps, float32 `at.shape`, if `how.n_step` is above 1.
    """
    places = _Places(rows, at.reshape(-1), how, frames)
    arrays: dict[str, Any] = dict.fromkeys(names)  # in their order
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        if name == REW and how.n_step > 1:
            [rewards] = rows.gather([name], places.window)
            arrays[name] = discounted(name, rewards, specs[name], places.inside, how.gamma)
        elif name != DONE:
            groups.setdefault(places.kind_of(name, specs), []).append(name)
    for (kind, is_stacked), group in groups.items():
        stored = [OBS + name[len(OBS_NEXT) :] for name in group] if kind == NEXT else group
        arrays.update(zip(group, rows.gather(stored, places.of(kind, is_stacked)), strict=True))
    if DONE in arrays:
        arrays[DONE] = np.logical_or(*_flags(rows, arrays, places))
    if how.n_step > 1:
        arrays[DISCOUNT] = (how.gamma**places.counts).astype(np.float32)
    if at.ndim == 1:
        return arrays
    return {name: array.reshape((*at.shape, *array.shape[1:])) for name, array in arrays.items()}


def _flags(rows: Rows, arrays: Mapping[str, Any], places: _Places) -> list[Any]:
    if all(flag in arrays for flag in FLAGS):
        return [arrays[flag] for flag in FLAGS]
    return rows.gather(FLAGS, places.of(LAST, places.is_stacked(DONE)))


class _Places:
    """The rows to read from; each kind is computed once."""

    def __init__(self, rows: Rows, anchors: np.ndarray, how: How, frames: np.ndarray | None) -> None:
        self._rows, self._how = rows, how
        self._rows_at = {ANCHORS: anchors, LAST: anchors}
        self._frames: dict[str, np.ndarray] = {} if frames is None else {ANCHORS: frames, LAST: frames}
        if how.n_step > 1:
            self.window, self.inside, self.counts = rows.n_step(anchors, how.n_step)
            self._rows_at[LAST] = self.window[:, -1]
            self._frames.pop(LAST, None)

    def kind_of(self, name: str, specs: Mapping[str, Spec]) -> tuple[str, bool]:
        """The kind of rows that a key is read from, and whether it is stacked."""
        first = top(name)
        is_stacked = self.is_stacked(first)
        if first == OBS_NEXT:
            return (LAST if name in specs else NEXT), is_stacked
        return (LAST if name in FLAGS else ANCHORS), is_stacked

    def is_stacked(self, first: str) -> bool:
        """Whether keys that begin with this name are stacked."""
        return self._how.stack_num > 1 and (self._how.stacked is None or first in self._how.stacked)

    def of(self, kind: str, is_stacked: bool) -> np.ndarray:
        """The rows (n,) of this kind, or their stacks (n, stack_num)."""
        if kind not in self._rows_at:
            self._rows_at[kind] = self._rows.next(self._rows_at[LAST])
        if not is_stacked:
            return self._rows_at[kind]
        if kind not in self._frames:
            if kind == NEXT and LAST in self._frames:
                self._frames[kind] = self._following(self._frames[LAST], self._rows_at[NEXT])
            else:
                self._frames[kind] = self._rows.frames(self._rows_at[kind], self._how.stack_num)
        return self._frames[kind]

    def _following(self, frames: np.ndarray, after: np.ndarray) -> np.ndarray:
        """The stacks of the next rows: shifted by one, or the same where there is none."""
        further = np.concatenate([frames[:, 1:], after[:, None]], axis=1)
        return np.where((after == frames[:, -1])[:, None], frames, further)
