"""Remembers the contents of drawn rows until their new priorities arrive.

Rows may be overwritten in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.view import View

# How many draws are remembered: learners seldom set priorities of older ones.
N_DRAWS = 32
# The step recorded for a drawn row that another has replaced; no real step is as large.
REPLACED = np.iinfo(np.int64).max


@dataclass(slots=True)
class Draw:
    """Drawn row ids, and the steps they stood for: `known`, or those of `view`."""

    rows: np.ndarray
    view: View | None
    known: np.ndarray | None = None
    sorted_rows: tuple[np.ndarray, np.ndarray] | None = None

    def steps(self) -> np.ndarray:
        """Returns the steps of the rows at the time of the draw, int64."""
        if self.known is None:
            assert self.view is not None
            self.known = self.view.steps(self.rows)
        return self.known

    def sort_by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and their steps, sorted by rows."""
        if self.sorted_rows is None:
            order = np.argsort(self.rows)
            self.sorted_rows = self.rows[order], self.steps()[order]
        return self.sorted_rows

    def was_held(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Marks rows that already held these steps at the draw, bool."""
        if self.view is None:
            return np.zeros(rows.shape, bool)
        return np.asarray(steps < self.view.head[self.view.columns.lanes(rows)])


class DrawnRows:
    """The latest draws of a store."""

    def __init__(self) -> None:
        # The latest draw first. Replaced and never changed: another thread may copy it.
        self._draws: tuple[Draw, ...] = ()

    def remember(self, view: View, rows: np.ndarray) -> None:
        """Remembers a draw of rows of any shape.

        `find_unchanged` needs it to recognise rows that were overwritten since.
        """
        if rows.size:  # a copy, because the caller may write to the rows
            self._draws = (Draw(rows.flatten(), view), *self._draws[: N_DRAWS - 1])

    def is_last(self, rows: np.ndarray, view: View) -> bool:
        """Whether these are the rows of the last draw, with nothing written since."""
        if not self._draws:
            return False
        last = self._draws[0]
        if last.view is None or last.view.snapshot != view.snapshot or rows.shape != last.rows.shape:
            return False
        return rows.tobytes() == last.rows.tobytes()  # several times faster than ==, and dtypes are nearly always equal

    def are_of_now(self, rows: np.ndarray, view: View) -> bool:
        """Whether these ids refer to the rows that are stored now.

        The caller may have written them just before. True if all were written since the last draw, or if they are all
        rows of the store; False if they are the rows of a draw.
        """
        last = self._draws[0].view if self._draws else None
        if last is None or not rows.size:
            return False
        now, lanes = view.steps(rows), view.columns.lanes(rows)
        is_every = rows.size >= view.total and np.count_nonzero(np.bincount(rows)) == view.total
        if not is_every and not (now >= last.head[lanes]).all():
            return False
        is_drawn = any(np.array_equal(draw.rows, rows) for draw in self._draws)
        return not is_drawn and bool(view.holds(rows, now).all())

    def find_unchanged(self, view: View, rows: np.ndarray) -> np.ndarray:
        """Marks rows with the same content as when they were drawn, bool.

        If the rows are those of one draw, that draw counts; otherwise the last draw that has a row. A row that is in no
        remembered draw stands for its current content.

        Raises:
            SpecError: a row was never drawn and is empty.
        """
        for draw in self._draws:
            if draw.rows.size == rows.size and (draw.rows == rows).all():
                return view.holds(rows, draw.steps())
        now = view.steps(rows)
        held = view.holds(rows, now)
        meant = self._find_drawn_steps(rows, now, held)
        empty = rows[~(held | (meant >= 0))]
        if empty.size and (empty := empty[~view.is_taken(empty)]).size:
            raise SpecError(f"index {empty[0]} holds no row")
        return np.asarray(held & ((meant < 0) | (meant == now)))

    def _find_drawn_steps(self, rows: np.ndarray, now: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Finds the step of each row when it was last drawn, int64.

        It is -1 where it is unknown or equal to `now`.
        """
        meant = np.full(rows.size, -1, np.int64)
        if not self._draws:
            return meant
        # Rows written before the earliest draw mean the same in all draws.
        unknown = np.flatnonzero(~(held & self._draws[-1].was_held(rows, now)))
        for draw in self._draws:
            if not unknown.size:
                break
            drawn, steps = draw.sort_by_row()
            at = np.minimum(np.searchsorted(drawn, rows[unknown]), drawn.size - 1)
            same = drawn[at] == rows[unknown]
            meant[unknown[same]] = steps[at[same]]
            unknown = unknown[~same]
        return meant

    def replace(self, rows: np.ndarray) -> None:
        """Records that these rows were replaced by others."""
        for draw in self._draws:
            steps = draw.steps().copy()
            steps[np.isin(draw.rows, rows)] = REPLACED
            draw.view, draw.known, draw.sorted_rows = None, steps, None

    def array(self) -> np.ndarray:
        """Returns all draws for a file, int64 (3, n).

        The three are row ids, steps and the number of the draw.
        """
        draws = [
            np.stack([draw.rows, draw.steps(), np.full(draw.rows.size, number)])
            for number, draw in enumerate(self._draws)
        ]
        return np.concatenate(draws, axis=1) if draws else np.zeros((3, 0), np.int64)

    @classmethod
    def restored(cls, drawn: np.ndarray, n_rows: int) -> DrawnRows:
        """Creates the draws of a file, for a store of `n_rows` rows.

        Raises:
            ValueError: they are not what `array` gave.
        """
        _check_draws(drawn, n_rows)
        new = cls()
        for rows, steps, _ in np.split(drawn, np.flatnonzero(np.diff(drawn[2])) + 1, axis=1):
            if rows.size and len(new._draws) < N_DRAWS:
                new._draws += (Draw(rows, None, steps),)
        return new


def _check_draws(drawn: np.ndarray, n_rows: int) -> None:
    """Raises ValueError unless these are draws in the form of `DrawnRows.array`."""
    if drawn.dtype != np.int64 or drawn.ndim != 2 or len(drawn) != 3:
        raise ValueError("its draws have other shapes")
    rows, _, numbers = drawn
    if not ((rows >= 0) & (rows < n_rows) & (numbers >= 0) & (numbers < N_DRAWS)).all() or (np.diff(numbers) < 0).any():
        raise ValueError("its draws are of unknown rows, or out of order")
