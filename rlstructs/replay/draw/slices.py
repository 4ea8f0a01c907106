"""Draws slices, which are consecutive steps of one episode, without looking at every row.

    starts   s0       s1            s2      s3         the steps with which episodes begin, of valid rows
    rows   ----|-------|-------------|-------|-----    the oldest episode may lack its start, the newest may go on
             low                                head

Each start has the sum of the weights of all episodes before it, so that bisection finds the episode of a random number.
A draw only updates both for the rows that were written since the last draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.view import View

WINDOW, TRAJECTORY = MEASURES = ("window", "trajectory")


class Slices:
    """Draws slices from the rows of a store of one lane.

    Args:
        per: "window" if all windows of the wanted length are equally likely; "trajectory" if all episodes are, and
            all windows in one.
        strict: whether slices are never shorter; otherwise an episode that is too short is one slice.

    Raises:
        SpecError: `per` is invalid.

    Example:
        >>> from rlstructs.replay.rows.store import Storage
        >>> from rlstructs.replay.rows.spec import Spec
        >>> storage = Storage(1, 10)
        >>> storage.columns.add("x", Spec(np.dtype(np.int64)))
        >>> _ = storage.track_episodes()
        >>> storage.write({"x": np.arange(6)[None]}, done=np.array([[False, True, False, False, False, True]]))
        >>> rows, mask = Slices().draw(storage.view(), 3, 4, np.random.default_rng(0))
        >>> rows.tolist(), mask.all()
        ([[2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]], np.True_)
    """

    def __init__(self, per: str = WINDOW, strict: bool = True) -> None:
        if per not in MEASURES:
            raise SpecError(f"per must be one of {MEASURES}, got {per!r}")
        self.per, self.strict = per, strict
        self._length = 0  # of the slices that the weights are for
        # Valid starts are at [_first, _end), each with the weight of the episodes before it.
        self._starts = self._before = np.zeros(0, np.int64)
        self.forget()

    def forget(self) -> None:
        """Makes the next draw look at every row again."""
        self._first = self._end = 0
        self._low = self._head = 0
        self._seen: tuple[bytes, int] = b"", 0

    def draw(self, view: View, n: int, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws `n` slices of `length` steps.

        Args:
            view: all valid rows, of one lane.
            n: number of slices.
            length: steps of each.
            rng: the generator.

        Returns:
            Row ids (n, length), and a mask of those that count, bool (n, length); the others repeat the last row.

        Raises:
            SpecError: no episode is that long.
        """
        self._follow(view, length)
        starts, before = self._starts[self._first : self._end], self._before[self._first : self._end]
        oldest = int(self._weight((starts[0] if starts.size else self._head) - self._low))
        total = oldest
        if starts.size:
            total += int(before[-1] - before[0]) + int(self._weight(self._head - starts[-1]))
        if not total:
            raise SpecError(f"nothing to sample: no episode of {length} steps is stored")
        number = rng.integers(total, size=n)
        if starts.size:
            number += before[0] - oldest
            at = np.searchsorted(before, number, side="right")  # the start after each slice's episode's
            first = np.where(at > 0, starts[at - 1], self._low)
            behind = np.where(at < starts.size, starts[np.minimum(at, starts.size - 1)], self._head)
            number -= np.where(at > 0, before[at - 1], before[0] - oldest)
        else:
            first, behind = np.full(n, self._low), np.full(n, self._head)
        n_steps = behind - first
        if self.per == TRAJECTORY:
            number = rng.integers(np.maximum(n_steps - length, 0) + 1)
        return view.run(view.columns.at_steps(0, first + number), length)

    def _weight(self, n_steps: Any) -> Any:
        """Returns the weight of an episode with `n_steps` steps, int64."""
        if self.per == TRAJECTORY:
            return np.where(n_steps >= (self._length if self.strict else 1), 1, 0)
        return np.maximum(n_steps - self._length + 1, np.where(n_steps > 0, 0 if self.strict else 1, 0))

    def _follow(self, view: View, length: int) -> None:
        if length != self._length:
            self._length = length
            self._weigh(self._first + 1)
        seen = view.snapshot, view.edits
        if seen == self._seen:
            return
        if seen[1] != self._seen[1]:
            self.forget()
        low, head = int(view.low[0]), int(view.head[0])
        if not low <= self._head <= head:  # all known rows are gone
            self._first = self._end = 0
            self._head = low
        rows = view.newer(np.array([self._head]))
        self._append(self._head + np.flatnonzero(view.begin(rows)))
        self._first += int(np.searchsorted(self._starts[self._first : self._end], low, side="right"))
        self._low, self._head, self._seen = low, head, seen

    def _append(self, found: np.ndarray) -> None:
        n_held = self._end - self._first
        if self._end + found.size > self._starts.size:
            size = max(64, 2 * (n_held + found.size))
            held = slice(self._first, self._end)
            for name in ("_starts", "_before"):
                moved = np.zeros(size, np.int64)
                moved[:n_held] = getattr(self, name)[held]
                setattr(self, name, moved)
            self._first, self._end = 0, n_held
        new = self._end
        self._end += found.size
        self._starts[new : self._end] = found
        self._weigh(new)

    def _weigh(self, new: int) -> None:
        """Computes the weights of the episodes before each start from the `new`-th on."""
        if new <= self._first < self._end:
            self._before[self._first] = 0
            new = self._first + 1
        if new < self._end:
            weights = self._weight(np.diff(self._starts[new - 1 : self._end]))
            self._before[new : self._end] = self._before[new - 1] + np.cumsum(weights)
