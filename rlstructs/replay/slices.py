"""Slices: runs of consecutive steps of one episode, drawn without looking at every row.

    starts   s0       s1            s2      s3         the steps with which episodes begin, as far as rows are there
    rows   ----|-------|-------------|-------|-----    the oldest may have lost its start, the newest may go on
             low                                head

Beside each start lies how much all episodes before it weigh, so that a number below the sum of all weights
finds its episode by bisection. Both follow the head: a draw costs what was written since the last one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.episodes import Episodes
from rlstructs.replay.span import Span

WINDOW, TRAJECTORY = MEASURES = ("window", "trajectory")


class Slices:
    """Draws slices from the rows of a store of one lane.

    Args:
        per: every "window" of the wanted length is as likely as any other, or every "trajectory" is, and
            then every window in it.
        strict: whether slices are never shorter; otherwise an episode that is too short is one slice.

    Raises:
        SpecError: `per` is something else.

    Example:
        >>> from rlstructs.replay.store import Storage
        >>> from rlstructs.replay.columns import Spec
        >>> storage = Storage(1, 10)
        >>> storage.columns.add("x", Spec(np.dtype(np.int64)))
        >>> episodes = storage.track_episodes()
        >>> storage.write({"x": np.arange(6)[None]}, done=np.array([[False, True, False, False, False, True]]))
        >>> rows, mask = Slices().draw(storage.span(), episodes, 3, 4, np.random.default_rng(0))
        >>> rows.tolist(), mask.all()
        ([[2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]], np.True_)
    """

    def __init__(self, per: str = WINDOW, strict: bool = True) -> None:
        if per not in MEASURES:
            raise SpecError(f"per must be one of {MEASURES}, got {per!r}")
        self.per, self.strict = per, strict
        self._length = 0  # for which weights are known
        # Starts that are there lie at [_first, _end), and beside each how much the episodes before it weigh.
        self._starts = self._before = np.zeros(0, np.int64)
        self.forget()

    def forget(self) -> None:
        """Looks at every row again when next something is drawn."""
        self._first = self._end = 0
        self._low = self._head = 0
        self._snapshot = b""

    def draw(
        self, span: Span, episodes: Episodes, n: int, length: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """`n` slices of `length` steps.

        Args:
            span: every row that is there.
            episodes: of its lane.

        Returns:
            Row ids (n, length), and which of them count, bool (n, length); those that do not repeat the last.

        Raises:
            SpecError: no episode is that long.
        """
        self._follow(span, episodes, length)
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
        return window(span, first + number, np.minimum(n_steps, length), length)

    def _weight(self, n_steps: Any) -> Any:
        """How much an episode of so many steps weighs, int64."""
        if self.per == TRAJECTORY:
            return np.where(n_steps >= (self._length if self.strict else 1), 1, 0)
        return np.maximum(n_steps - self._length + 1, np.where(n_steps > 0, 0 if self.strict else 1, 0))

    def _follow(self, span: Span, episodes: Episodes, length: int) -> None:
        if length != self._length:
            self._length = length
            self._weigh(self._first + 1)
        if span.snapshot == self._snapshot:
            return
        low, head = int(span.low[0]), int(span.head[0])
        if not low <= self._head <= head:  # all that was known is gone
            self._first = self._end = 0
            self._head = low
        rows = span.newer(np.array([self._head]))
        self._append(self._head + np.flatnonzero(episodes.begin(rows)))
        self._first += int(np.searchsorted(self._starts[self._first : self._end], low, side="right"))
        self._low, self._head, self._snapshot = low, head, span.snapshot

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
        """Works out what the episodes before each start from the `new`-th on weigh."""
        if new <= self._first < self._end:
            self._before[self._first] = 0
            new = self._first + 1
        if new < self._end:
            weights = self._weight(np.diff(self._starts[new - 1 : self._end]))
            self._before[new : self._end] = self._before[new - 1] + np.cumsum(weights)


def window(span: Span, steps: np.ndarray, counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Row ids (n, length): so many rows of a single lane from each step on, then the last again; and a mask of them.

    Args:
        span: every row that is there.
        steps: int64 (n,).
        counts: int64 (n,), at least 1.
        length: of every window.
    """
    index = np.arange(length)
    mask = index < counts[:, None]
    offsets = index if mask.all() else np.minimum(index, counts[:, None] - 1)
    return span.columns.at_steps(0, steps[:, None] + offsets), mask
