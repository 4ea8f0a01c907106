"""Drawing in proportion to priorities that lie in a sum tree, and follow what is written.

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

# Of a priority to the power of alpha times the number of rows: their sum must be finite.
LARGEST = 1e300
# Share of a number by which powers and roots of it may be off.
ROUNDED = 1e-9
# Names of its arrays in a file.
LEAVES, SYNCED, DRAWN = "__leaves__", "__synced__", "__drawn__"
# How many draws are remembered: a learner seldom gives priorities for one that lies further back.
N_DRAWS = 32
# The step that a row held which another has replaced: none that is ever reached.
REPLACED = np.iinfo(np.int64).max


@dataclass
class Draw:
    """Row ids that were drawn, and which steps they meant: as `span` says, or as `known` has them."""

    rows: np.ndarray
    span: Span | None
    known: np.ndarray | None = None
    in_order: tuple[np.ndarray, np.ndarray] | None = None

    def steps(self) -> np.ndarray:
        """int64, one for each of the rows."""
        if self.known is None:
            assert self.span is not None
            self.known = self.span.steps(self.rows)
        return self.known

    def by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows and their steps, sorted by rows."""
        if self.in_order is None:
            order = np.argsort(self.rows)
            self.in_order = self.rows[order], self.steps()[order]
        return self.in_order

    def had(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Whether these rows held these steps already, bool."""
        if self.span is None:
            return np.zeros(rows.shape, bool)
        lanes, _ = self.span.columns.places(rows)
        return np.asarray(steps < self.span.head[lanes])


def exponent(name: str, value: Any) -> float:
    """`value`, a number or an array of none but one, as a float.

    Raises:
        SpecError: it is no number of at least 0.
    """
    if getattr(value, "ndim", None) == 0:  # a tensor, as schedules of torchrl have it
        value = value.item()
    if not (isinstance(value, (int, float, np.number)) and 0 <= value < np.inf):
        raise SpecError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def limit_of(n_rows: int, alpha: float) -> float:
    """The largest priority of which so many have a finite sum."""
    return float((LARGEST / n_rows) ** min(1.0, 1 / alpha)) if alpha else LARGEST


def largest_of(priorities: np.ndarray, limit: float) -> float:
    """The largest of some priorities, of which there is one at least.

    Raises:
        SpecError: one is above the limit, below 0 or no number.
    """
    largest = float(np.maximum.reduce(priorities))
    if not (np.minimum.reduce(priorities) >= 0 and largest <= limit):  # not true of NaN
        wrong = priorities[~((priorities >= 0) & (priorities <= limit))][0]
        most = f", and here at most {limit:.3g}" if limit < wrong < np.inf else ""
        raise SpecError(f"priorities must be finite and at least 0{most}, got {wrong}")
    return largest


class Prioritised:
    """Priorities of a store's rows; a new row gets the largest priority ever given, at first 1.

    Args:
        n_rows: of the store.
        n_lanes: of the store.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        first: what the very first rows get.
        of_present: whether new rows get the largest priority of those that are there, in place of the largest ever.

    Attributes:
        lock: for who has no other that keeps out who else draws or sets priorities. Held from the look at the store on:
            to an older look than that of the last one, rows that came since would be of a store that was cleared.
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
        self._snapshot = b""  # of the counters that were last followed
        # The latest first; replaced, never changed: it may be copied meanwhile.
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
        """Bytes that one takes."""
        from rlstructs.replay.sum_tree import SumTree

        return SumTree.nbytes_of(n_rows) + 8 * n_lanes

    def follow(self, span: Span) -> None:
        """Gives the rows that were written since the last call their priority."""
        if self._snapshot == span.snapshot:
            return
        self._snapshot = span.snapshot
        if (self.synced < span.low).any() or (self.synced > span.head).any():
            # Lanes were cleared, or wrapped meanwhile.
            self._drop(np.flatnonzero((self.synced < span.low) | (self.synced > span.head)), span)
        rows = span.newer(self.synced)
        self._let_go(rows)
        self.tree.update(rows, np.full(rows.size, self.max_priority**self.alpha))
        self.synced = span.head.copy()

    def _let_go(self, rows: np.ndarray, given: float = 0.0) -> None:
        """Before rows get other priorities, the largest of them `given`: what the largest one is then."""
        if not self.of_present:
            self.max_priority = max(self.max_priority, given)
            return
        leaves, largest = self.tree.values, self.max_priority
        # The root of a power is not quite what the power was of. With alpha 0 leaves do not say what priorities were.
        if self.alpha and rows.size and leaves[rows].max() >= 0.999999 * largest**self.alpha:
            others = np.ones(leaves.size, bool)
            others[rows] = False
            largest = float(leaves.max(where=others, initial=0.0)) ** (1 / self.alpha)
        self.max_priority = max(largest, given) or self.first

    def _drop(self, lanes: np.ndarray, span: Span) -> None:
        columns = span.columns
        rows = columns.rows(lanes[:, None], np.arange(columns.capacity)).ravel()
        self._let_go(rows)
        self.tree.update(rows, np.zeros(rows.size))
        self.synced = self.synced.copy()
        self.synced[lanes] = span.low[lanes]

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """`n` row ids, one from each n-th of the total.

        Raises:
            SpecError: every priority is zero.
        """
        if not self.tree.total > 0:
            raise SpecError("nothing to sample: no row has a priority above zero")
        return self.tree.draw_evenly(n, rng)

    def choose(self, rows: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
        """`n` of these row ids, in proportion.

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
        """Notes what was drawn, so that priorities which come too late can be told."""
        if rows.size:
            self._draws = (Draw(rows, span), *self._draws[: N_DRAWS - 1])

    def is_last(self, rows: np.ndarray, span: Span) -> bool:
        """Whether these are the rows of the last draw, and nothing was written since."""
        if not self._draws:
            return False
        last = self._draws[0]
        if last.span is None or last.span.snapshot != span.snapshot or rows.shape != last.rows.shape:
            return False
        return rows.tobytes() == last.rows.tobytes()  # of the same dtype, as a rule: then several times faster than ==

    def are_of_now(self, rows: np.ndarray, span: Span) -> bool:
        """Whether these can only be rows as they are now: all of them came since the last draw, or they are all.

        So they are where the caller has them from a write. Just the rows of a draw are those that were drawn.
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
        """Sets priorities; those of rows that were overwritten since they were drawn are dropped.

        Args:
            span: what can be drawn now.
            rows: int64 (n,), row ids; of equal ones the last counts.
            priorities: (n,), finite, at least 0.
            is_last: what the method of this name or `are_of_now` says, where it has been asked.

        Raises:
            SpecError: something is not so; nothing has changed.
        """
        if priorities.shape != rows.shape:
            raise SpecError(f"priorities: {priorities.size} came for {rows.size} indexes")
        if not rows.size:
            return
        largest = largest_of(priorities, self._limit)
        powers = priorities**self.alpha
        self.follow(span)
        if not (span.is_settled and is_last):
            same = self._same(span, rows)
            rows, powers, priorities = rows[same], powers[same], priorities[same]
            largest = float(priorities.max(initial=0.0))
        if self.of_present:  # what is given to a row before its last one is never there
            _, last = np.unique(rows[::-1], return_index=True)
            largest = float(priorities[::-1][last].max(initial=0.0))
        self._let_go(rows, largest)
        self.tree.update(rows, powers)

    def _same(self, span: Span, rows: np.ndarray) -> np.ndarray:
        """Which rows hold what they held when they were drawn, bool.

        All rows of one draw were drawn then; others when they were in one of the last draws for the last time.
        Those that were in none are taken for what they hold now.

        Raises:
            SpecError: there is one that was never drawn and holds nothing.
        """
        for draw in self._draws:
            if draw.rows.size == rows.size and (draw.rows == rows).all():
                return span.holds(rows, draw.steps())
        now = span.steps(rows)
        held = span.holds(rows, now)
        meant = self._steps_meant(rows, now, held)
        empty = rows[~(held | (meant >= 0))]
        if (empty := empty[~span.is_reserved(empty)]).size:
            raise SpecError(f"index {empty[0]} holds no row")
        return np.asarray(held & ((meant < 0) | (meant == now)))

    def _steps_meant(self, rows: np.ndarray, now: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Which step each row held when it was last drawn, int64; -1 if that is not known, or is `now`."""
        meant = np.full(rows.size, -1, np.int64)
        if not self._draws:
            return meant
        # What was there before the earliest of them has the same meaning in all.
        unknown = np.flatnonzero(~(held & self._draws[-1].had(rows, now)))
        for draw in self._draws:
            if not unknown.size:
                break
            drawn, steps = draw.by_row()
            at = np.minimum(np.searchsorted(drawn, rows[unknown]), drawn.size - 1)
            same = drawn[at] == rows[unknown]
            meant[unknown[same]] = steps[at[same]]
            unknown = unknown[~same]
        return meant

    def replace(self, rows: np.ndarray) -> None:
        """Says that others have come in the place of these rows: they get the priority of new ones.

        Args:
            rows: int64 (n,), of those that were followed; what was drawn of them before is of no meaning now.
        """
        for draw in self._draws:
            steps = draw.steps().copy()
            steps[np.isin(draw.rows, rows)] = REPLACED
            draw.span, draw.known, draw.in_order = None, steps, None
        self._let_go(rows)
        self.tree.update(rows, np.full(rows.size, self.max_priority**self.alpha))

    def set_alpha(self, alpha: float) -> None:
        """Changes the exponent, and with it what every priority counts; those of 0 are all 1.

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
        """Follows a store of one lane that has room for more rows now."""
        from rlstructs.replay.sum_tree import SumTree

        leaves = np.zeros(n_rows)
        leaves[: self.tree.n_leaves] = self.tree.values
        self.tree = SumTree(n_rows)
        self.tree.fill(leaves)
        self._limit = limit_of(n_rows, self.alpha)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a file needs beside `max_priority`."""
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
        """A new one with what `arrays` gave; if a file has none, every row gets the same priority.

        Args:
            arrays: of the file.
            max_priority: as it was.
            claims: what the file says of the rows; None if that is known to fit.
            alpha: the exponent that priorities had there, and have in the new one; None for this one's.

        Raises:
            ValueError: they do not fit.
        """
        alpha = self.alpha if alpha is None else alpha
        new = Prioritised(self.tree.n_leaves, self.synced.size, alpha, first=self.first, of_present=self.of_present)
        if LEAVES not in arrays:
            return new
        leaves, synced, drawn = arrays[LEAVES], arrays[SYNCED], arrays[DRAWN]
        wanted = (new.tree.values, new.synced)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip((leaves, synced), wanted, strict=True)):
            raise ValueError("its priorities have other shapes")
        new.max_priority, new.synced = new._checked(max_priority, leaves), synced
        if claims is not None:
            _check_rows(leaves, synced, claims)
        _check_draws(drawn, leaves.size)
        new.tree.fill(leaves)
        for rows, steps, _ in np.split(drawn, np.flatnonzero(np.diff(drawn[2])) + 1, axis=1):
            if rows.size and len(new._draws) < N_DRAWS:
                new._draws += (Draw(rows, None, steps),)
        return new

    def _checked(self, max_priority: Any, leaves: np.ndarray) -> float:
        """The largest priority, if it and all of them are what this one could have."""
        most = LARGEST / leaves.size * (1 + ROUNDED)
        is_number = type(max_priority) in (int, float) and 0 < max_priority <= self._limit * (1 + ROUNDED)
        if not is_number or not ((leaves >= 0) & (leaves <= most)).all():  # not true of NaN
            raise ValueError(f"its priorities are not finite and at least 0, here at most {self._limit:.3g}")
        return float(max_priority)


def _check_draws(drawn: np.ndarray, n_rows: int) -> None:
    """Raises ValueError unless these are the draws of some rows, as `Prioritised.arrays` gives them."""
    if drawn.dtype != np.int64 or drawn.ndim != 2 or len(drawn) != 3:
        raise ValueError("its draws have other shapes")
    rows, _, numbers = drawn
    if not ((rows >= 0) & (rows < n_rows) & (numbers >= 0) & (numbers < N_DRAWS)).all() or (np.diff(numbers) < 0).any():
        raise ValueError("its draws are of rows that there are not, or out of order")


def _check_rows(leaves: np.ndarray, synced: np.ndarray, claims: Claims) -> None:
    """Raises ValueError if rows have priorities that are not there."""
    ring = claims.ring
    # Of lanes that were cleared since, or overwritten, all will be dropped.
    followed = (synced >= ring.oldest()) & (synced <= ring.head)
    if (synced < 0).any() or followed[claims.lanes(np.flatnonzero((leaves > 0) & claims.empty()))].any():
        raise ValueError("it has priorities of rows that it has not")
