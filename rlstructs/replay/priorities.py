"""Priorities of rows in a sum tree, which rows are drawn in proportion to.

Schaul et al., Prioritized Experience Replay (2016): P(i) = p_i^alpha / sum of p_k^alpha, and the weight
(N P(i))^-beta over the largest of them, which is (min_k p_k^alpha / p_i^alpha)^beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.claims import Claims
from rlstructs.replay.copies import lock_that_forks
from rlstructs.replay.span import Span

# Limit of a priority to the power of alpha times the number of rows, so that the sum is finite.
LARGEST = 1e300
# Relative error of powers and roots.
ROUNDED = 1e-9
# Names of the arrays of priorities in a file.
LEAVES, SYNCED, DRAWN = "__leaves__", "__synced__", "__drawn__"
# How many draws are remembered: learners seldom set priorities of older ones.
N_DRAWS = 32
# The step recorded for a drawn row that another has replaced; no real step is as large.
REPLACED = np.iinfo(np.int64).max


@dataclass
class Draw:
    """Row ids that were drawn, and the steps that they held: `known`, or those of `span`."""

    rows: np.ndarray
    span: Span | None
    known: np.ndarray | None = None
    sorted_rows: tuple[np.ndarray, np.ndarray] | None = None

    def steps(self) -> np.ndarray:
        """The steps that the rows held when they were drawn, int64."""
        if self.known is None:
            assert self.span is not None
            self.known = self.span.steps(self.rows)
        return self.known

    def sort_by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows and their steps, sorted by rows."""
        if self.sorted_rows is None:
            order = np.argsort(self.rows)
            self.sorted_rows = self.rows[order], self.steps()[order]
        return self.sorted_rows

    def was_held(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Whether these rows held these steps at the time of the draw, bool."""
        if self.span is None:
            return np.zeros(rows.shape, bool)
        lanes, _ = self.span.columns.places(rows)
        return np.asarray(steps < self.span.head[lanes])


def exponent(name: str, value: Any) -> float:
    """Converts a number, or an array without axes, to a float.

    Raises:
        SpecError: it is not a number of at least 0.
    """
    if getattr(value, "ndim", None) == 0:  # a tensor, which schedules of torchrl return
        value = value.item()
    if not (isinstance(value, (int, float, np.number)) and 0 <= value < np.inf):
        raise SpecError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def limit_of(n_rows: int, alpha: float) -> float:
    """The largest priority allowed, so that `n_rows` of them have a finite sum."""
    return float((LARGEST / n_rows) ** min(1.0, 1 / alpha)) if alpha else LARGEST


def largest_of(priorities: np.ndarray, limit: float) -> float:
    """The largest of one or more priorities.

    Raises:
        SpecError: one is above the limit, negative or NaN.
    """
    largest = float(np.maximum.reduce(priorities))
    if not (np.minimum.reduce(priorities) >= 0 and largest <= limit):  # not true of NaN
        wrong = priorities[~((priorities >= 0) & (priorities <= limit))][0]
        most = f", and here at most {limit:.3g}" if limit < wrong < np.inf else ""
        raise SpecError(f"priorities must be finite and at least 0{most}, got {wrong}")
    return largest


class Prioritised:
    """Priorities of a store's rows; a new row gets the largest priority ever set, initially 1.

    Args:
        n_rows: of the store.
        n_lanes: of the store.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        first: the initial largest priority.
        of_present: whether new rows get the largest priority of the present rows instead of the largest ever.

    Attributes:
        lock: for callers without a lock of their own, held while they draw or set priorities. Take it before the span
            of the store: a span older than the last one would make newer rows look like those of a cleared store.
    """

    def __init__(
        self, n_rows: int, n_lanes: int, alpha: float, *, first: float = 1.0, of_present: bool = False
    ) -> None:
        from rlstructs.replay.sum_tree import SumTree  # warp loads with the first tree

        self.alpha = alpha
        self.max_priority = self.first = first
        self.of_present = of_present
        self.tree = SumTree(n_rows)
        self.synced = np.zeros(n_lanes, np.int64)
        self._snapshot = b""  # the counters of the last `follow`
        # The latest draw first. Replaced and never changed: another thread may copy it.
        self._draws: tuple[Draw, ...] = ()
        self._limit = limit_of(n_rows, alpha)
        self.lock = lock_that_forks()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.lock = lock_that_forks()

    @staticmethod
    def nbytes_of(n_rows: int, n_lanes: int) -> int:
        """Bytes that the priorities of a store take."""
        from rlstructs.replay.sum_tree import SumTree

        return SumTree.nbytes_of(n_rows) + 8 * n_lanes

    def follow(self, span: Span) -> None:
        """Sets the priorities of rows that were written since the last call."""
        if self._snapshot == span.snapshot:
            return
        self._snapshot = span.snapshot
        if (self.synced < span.low).any() or (self.synced > span.head).any():
            # Lanes were cleared, or have wrapped since.
            self._drop(np.flatnonzero((self.synced < span.low) | (self.synced > span.head)), span)
        rows = span.newer(self.synced)
        self._update_max_priority(rows)
        self.tree.update(rows, np.full(rows.size, self.max_priority**self.alpha))
        self.synced = span.head.copy()

    def _update_max_priority(self, rows: np.ndarray, given: float = 0.0) -> None:
        """Updates `max_priority` before rows get new priorities, the largest of which is `given`."""
        if not self.of_present:
            self.max_priority = max(self.max_priority, given)
            return
        leaves, largest = self.tree.values, self.max_priority
        # Powers and roots round. With alpha 0 leaves do not tell priorities.
        if self.alpha and rows.size and leaves[rows].max() >= 0.999999 * largest**self.alpha:
            others = np.ones(leaves.size, bool)
            others[rows] = False
            largest = float(leaves.max(where=others, initial=0.0)) ** (1 / self.alpha)
        self.max_priority = max(largest, given) or self.first

    def _drop(self, lanes: np.ndarray, span: Span) -> None:
        columns = span.columns
        rows = columns.rows(lanes[:, None], np.arange(columns.capacity)).ravel()
        self._update_max_priority(rows)
        self.tree.update(rows, np.zeros(rows.size))
        self.synced = self.synced.copy()
        self.synced[lanes] = span.low[lanes]

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids in proportion to their priorities, one from each n-th of the total.

        Raises:
            SpecError: every priority is zero.
        """
        if not self.tree.total > 0:
            raise SpecError("nothing to sample: no row has a priority above zero")
        return self.tree.draw_evenly(n, rng)

    def choose(self, rows: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` of these row ids in proportion to their priorities.

        Raises:
            SpecError: every priority is zero.
        """
        ends = np.cumsum(self.tree.values[rows])
        if not (ends.size and ends[-1] > 0):
            raise SpecError("nothing to sample: no row has a priority above zero")
        at = np.searchsorted(ends, rng.random(n) * ends[-1], side="right")
        chosen: np.ndarray = rows[np.minimum(at, np.searchsorted(ends, ends[-1]))]
        return chosen

    def remember(self, span: Span, rows: np.ndarray) -> None:
        """Remembers a draw, so that `update` recognises priorities of rows that were overwritten since."""
        if rows.size:
            self._draws = (Draw(rows, span), *self._draws[: N_DRAWS - 1])

    def is_last(self, rows: np.ndarray, span: Span) -> bool:
        """Whether these are the rows of the last draw, with nothing written since."""
        if not self._draws:
            return False
        last = self._draws[0]
        if last.span is None or last.span.snapshot != span.snapshot or rows.shape != last.rows.shape:
            return False
        return rows.tobytes() == last.rows.tobytes()  # several times faster than ==, and dtypes are nearly always equal

    def are_of_now(self, rows: np.ndarray, span: Span) -> bool:
        """Whether the caller means the current content of these rows, for example after writing them.

        True if all were written since the last draw, or if they are all rows of the store; False if they are the rows
        of a draw.
        """
        last = self._draws[0].span if self._draws else None
        if last is None or not rows.size:
            return False
        now, (lanes, _) = span.steps(rows), span.columns.places(rows)
        is_every = rows.size >= span.total and np.unique(rows).size == span.total
        if not is_every and not (now >= last.head[lanes]).all():
            return False
        is_drawn = any(np.array_equal(draw.rows, rows) for draw in self._draws)
        return not is_drawn and bool(span.holds(rows, now).all())

    def update(self, span: Span, rows: np.ndarray, priorities: np.ndarray, is_last: bool = False) -> None:
        """Sets priorities; ignores those of rows that were overwritten after they were drawn.

        Args:
            span: of the store, taken just before.
            rows: int64 (n,), row ids; if one is repeated, its last priority counts.
            priorities: (n,), finite, at least 0.
            is_last: the result of `is_last` or `are_of_now`, if known.

        Raises:
            SpecError: an argument is invalid; nothing changes.
        """
        if priorities.shape != rows.shape:
            raise SpecError(f"priorities: {priorities.size} came for {rows.size} indexes")
        if not rows.size:
            return
        largest = largest_of(priorities, self._limit)
        powers = priorities**self.alpha
        self.follow(span)
        if not (span.is_settled and is_last):
            same = self._find_unchanged(span, rows)
            rows, powers, priorities = rows[same], powers[same], priorities[same]
            largest = float(priorities.max(initial=0.0))
        if self.of_present:  # only the last priority of a repeated row counts
            _, last = np.unique(rows[::-1], return_index=True)
            largest = float(priorities[::-1][last].max(initial=0.0))
        self._update_max_priority(rows, largest)
        self.tree.update(rows, powers)

    def _find_unchanged(self, span: Span, rows: np.ndarray) -> np.ndarray:
        """Which rows still hold what they held when they were drawn, bool.

        If the rows are those of one draw, that draw counts; otherwise the last draw that has a row. A row that is in no
        remembered draw stands for its current content.

        Raises:
            SpecError: a row was never drawn and is empty.
        """
        for draw in self._draws:
            if draw.rows.size == rows.size and (draw.rows == rows).all():
                return span.holds(rows, draw.steps())
        now = span.steps(rows)
        held = span.holds(rows, now)
        meant = self._find_drawn_steps(rows, now, held)
        empty = rows[~(held | (meant >= 0))]
        if (empty := empty[~span.is_reserved(empty)]).size:
            raise SpecError(f"index {empty[0]} holds no row")
        return np.asarray(held & ((meant < 0) | (meant == now)))

    def _find_drawn_steps(self, rows: np.ndarray, now: np.ndarray, held: np.ndarray) -> np.ndarray:
        """The step each row held when it was last drawn, int64; -1 if that is unknown or equal to `now`."""
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
        """Gives rows whose content was replaced the priority of new rows.

        Args:
            rows: int64 (n,), known to `follow`; priorities of earlier draws of them will be ignored.
        """
        for draw in self._draws:
            steps = draw.steps().copy()
            steps[np.isin(draw.rows, rows)] = REPLACED
            draw.span, draw.known, draw.sorted_rows = None, steps, None
        self._update_max_priority(rows)
        self.tree.update(rows, np.full(rows.size, self.max_priority**self.alpha))

    def set_alpha(self, alpha: float) -> None:
        """Changes the exponent and recomputes the tree; with an old exponent of 0 every priority becomes 1.

        Raises:
            SpecError: the largest priority would be too large; nothing has changed.
        """
        n_rows, leaves = self.tree.n_leaves, self.tree.values.copy()
        limit = limit_of(n_rows, alpha)
        if self.max_priority > limit:
            raise SpecError(f"alpha {alpha}: the largest priority is {self.max_priority}, it may be {limit}")
        priorities = leaves ** (1 / self.alpha) if self.alpha else leaves
        self.tree.fill(np.where(leaves > 0, priorities**alpha, 0))
        self.alpha, self._limit = alpha, limit

    def grow(self, n_rows: int) -> None:
        """Makes room for more rows, after a store of one lane has grown."""
        from rlstructs.replay.sum_tree import SumTree

        leaves = np.zeros(n_rows)
        leaves[: self.tree.n_leaves] = self.tree.values
        self.tree = SumTree(n_rows)
        self.tree.fill(leaves)
        self._limit = limit_of(n_rows, self.alpha)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of a file, which needs `max_priority` too."""
        draws = [
            np.stack([draw.rows, draw.steps(), np.full(draw.rows.size, number)])
            for number, draw in enumerate(self._draws)
        ]
        drawn = np.concatenate(draws, axis=1) if draws else np.zeros((3, 0), np.int64)
        return {LEAVES: self.tree.values, SYNCED: self.synced, DRAWN: drawn}

    def restored(
        self,
        arrays: Mapping[str, np.ndarray],
        max_priority: Any,
        claims: Claims | None = None,
        alpha: float | None = None,
    ) -> Prioritised:
        """Creates new priorities from the arrays of a file; if it has none, every row gets the same priority.

        Args:
            arrays: of the file.
            max_priority: of the file.
            claims: the file's counters and columns; None if they are known to fit.
            alpha: exponent in the file and of the new priorities; None for that of this object.

        Raises:
            ValueError: the arrays do not fit.
        """
        alpha = self.alpha if alpha is None else alpha
        new = Prioritised(self.tree.n_leaves, self.synced.size, alpha, first=self.first, of_present=self.of_present)
        if LEAVES not in arrays:
            return new
        leaves, synced, drawn = arrays[LEAVES], arrays[SYNCED], arrays[DRAWN]
        wanted = (new.tree.values, new.synced)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip((leaves, synced), wanted, strict=True)):
            raise ValueError("its priorities have other shapes")
        new.max_priority, new.synced = new._check_max_priority(max_priority, leaves), synced
        if claims is not None:
            _check_rows(leaves, synced, claims)
        _check_draws(drawn, leaves.size)
        new.tree.fill(leaves)
        for rows, steps, _ in np.split(drawn, np.flatnonzero(np.diff(drawn[2])) + 1, axis=1):
            if rows.size and len(new._draws) < N_DRAWS:
                new._draws += (Draw(rows, None, steps),)
        return new

    def _check_max_priority(self, max_priority: Any, leaves: np.ndarray) -> float:
        """Returns `max_priority` as a float; raises ValueError unless it and all leaves are possible values."""
        most = LARGEST / leaves.size * (1 + ROUNDED)
        is_number = type(max_priority) in (int, float) and 0 < max_priority <= self._limit * (1 + ROUNDED)
        if not is_number or not ((leaves >= 0) & (leaves <= most)).all():  # not true of NaN
            raise ValueError(f"its priorities are not finite and at least 0, here at most {self._limit:.3g}")
        return float(max_priority)


def _check_draws(drawn: np.ndarray, n_rows: int) -> None:
    """Raises ValueError unless these are draws in the form of `Prioritised.arrays`."""
    if drawn.dtype != np.int64 or drawn.ndim != 2 or len(drawn) != 3:
        raise ValueError("its draws have other shapes")
    rows, _, numbers = drawn
    if not ((rows >= 0) & (rows < n_rows) & (numbers >= 0) & (numbers < N_DRAWS)).all() or (np.diff(numbers) < 0).any():
        raise ValueError("its draws are of rows that there are not, or out of order")


def _check_rows(leaves: np.ndarray, synced: np.ndarray, claims: Claims) -> None:
    """Raises ValueError if empty rows have priorities."""
    ring = claims.ring
    # Lanes that were cleared or overwritten since do not count: `follow` drops all their priorities.
    followed = (synced >= ring.oldest()) & (synced <= ring.head)
    if (synced < 0).any() or followed[claims.lanes(np.flatnonzero((leaves > 0) & claims.empty()))].any():
        raise ValueError("it has priorities of rows that it has not")
