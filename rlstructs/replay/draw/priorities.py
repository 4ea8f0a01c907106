"""Priorities of rows, in a sum tree, and draws in proportion to them.

Schaul et al., Prioritized Experience Replay (2016): P(i) = p_i^alpha / sum of p_k^alpha. The weight (N P(i))^-beta,
divided by the largest weight, is (min_k p_k^alpha / p_i^alpha)^beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.drawn_rows import DrawnRows
from rlstructs.replay.draw.plan import WINDOW, Fields, Fits, draw_fitting
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.arrays import host_array, real_numbers, row_ids
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.rows.copies import lock_that_forks
from rlstructs.replay.rows.lanes import Clock
from rlstructs.replay.rows.store import Storage

# Limit of a priority to the power of alpha times the number of rows, so that the sum is finite.
LARGEST = 1e300
# Relative error of powers and roots.
ROUNDED = 1e-9
# The field of drawn rows that holds their priorities to the power of alpha.
LEAVES = "leaves"
# Names of the arrays of priorities in a file.
TREE_LEAVES, FOLLOWED_STEPS, DRAWN_ROWS = "__leaves__", "__synced__", "__drawn__"


def exponent(name: str, value: Any) -> float:
    """Converts a number, or an array without axes, to a float.

    Raises:
        SpecError: it is not a number of at least 0.
    """
    if getattr(value, "ndim", None) == 0:  # a tensor, which schedules of torchrl return
        value = value.item()
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not (is_number and 0 <= value < np.inf):
        raise SpecError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def importance_weights(leaves: np.ndarray, smallest: float, beta: float) -> np.ndarray:
    """Computes importance weights, divided by the largest of them, float32.

    Args:
        leaves: priorities to the power of alpha, above 0.
        smallest: the smallest of all rows, or of the batch.
        beta: exponent of weights.
    """
    return np.asarray((smallest / leaves).astype(np.float32) ** np.float32(beta))


def limit_of(n_rows: int, alpha: float) -> float:
    """Returns the largest allowed priority: `n_rows` of them have a finite sum."""
    return float((LARGEST / n_rows) ** min(1.0, 1 / alpha)) if alpha else LARGEST


def largest_of(priorities: np.ndarray, limit: float) -> float:
    """Returns the largest of one or more priorities.

    Raises:
        SpecError: one is above the limit, negative or NaN.
    """
    # The bits of floats above zero are in their order as whole numbers, below those of negative ones and of NaN.
    largest = float(np.maximum.reduce(priorities.view(np.uint64)).view(np.float64))
    if 0 < largest <= limit:
        return largest
    if not (np.minimum.reduce(priorities) >= 0 and np.maximum.reduce(priorities) <= limit):  # not true of NaN
        wrong = priorities[~((priorities >= 0) & (priorities <= limit))][0]
        most = f", and here at most {limit:.3g}" if limit < wrong < np.inf else ""
        raise SpecError(f"priorities must be finite and at least 0{most}, got {wrong}")
    return float(np.maximum.reduce(priorities))


def _require_any(total: float) -> None:
    if not total > 0:
        raise SpecError("nothing to sample: no row has a priority above zero")


class Priorities:
    """Priorities of a store's rows.

    A new row gets the largest priority ever set, initially 1.

    Args:
        n_rows: of the store.
        n_lanes: of the store.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        first: the initial largest priority.
        of_present: whether new rows get the largest priority of the present rows instead of the largest ever.
        clock: of the store; it counts changes of priorities, and of what new rows get.

    Attributes:
        lock: for callers without a lock of their own, held while they draw or set priorities. Take it before the view
            of the store: a view older than the last one would make newer rows look like those of a cleared store.
    """

    def __init__(
        self,
        n_rows: int,
        n_lanes: int,
        alpha: float,
        *,
        first: float = 1.0,
        of_present: bool = False,
        clock: Clock | None = None,
    ) -> None:
        from rlstructs.replay.draw.sum_tree import SumTree  # warp loads with the first tree

        self.alpha = alpha
        self.max_priority = self.first = first
        self.of_present = of_present
        self.tree = SumTree(n_rows)
        self.synced = np.zeros(n_lanes, np.int64)
        self._snapshot = b""  # the counters of the last `follow`
        self.drawn = DrawnRows()
        self.clock = Clock() if clock is None else clock
        self._limit = limit_of(n_rows, alpha)
        self.lock = lock_that_forks()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.lock = lock_that_forks()

    @staticmethod
    def nbytes_of(n_rows: int, n_lanes: int) -> int:
        """Returns the bytes that the priorities of a store take."""
        from rlstructs.replay.draw.sum_tree import SumTree

        return SumTree.nbytes_of(n_rows) + 8 * n_lanes

    def follow(self, view: View) -> None:
        """Sets the priorities of rows that were written since the last call."""
        if self._snapshot == view.snapshot:
            return
        self.clock.count_draws()
        self._snapshot = view.snapshot
        if (self.synced < view.low).any() or (self.synced > view.head).any():
            # Lanes were cleared or have wrapped since.
            self._drop(np.flatnonzero((self.synced < view.low) | (self.synced > view.head)), view)
        rows = view.newer(self.synced)
        self._update_max_priority(rows)
        self.tree.update(rows, np.full(rows.size, self.max_priority**self.alpha))
        self.synced = view.head.copy()

    def _update_max_priority(self, rows: np.ndarray, given: float = 0.0) -> None:
        """Updates `max_priority` before rows get new priorities, the largest of which is `given`."""
        if not self.of_present:
            self.max_priority = max(self.max_priority, given)
            return
        leaves, largest = self.tree.values, self.max_priority
        # The factor allows for rounded powers. With alpha 0, priorities cannot be computed from leaves.
        if self.alpha and rows.size and leaves[rows].max() >= 0.999999 * largest**self.alpha:
            others = np.ones(leaves.size, bool)
            others[rows] = False
            largest = float(leaves.max(where=others, initial=0.0)) ** (1 / self.alpha)
        self.max_priority = max(largest, given) or self.first

    def _drop(self, lanes: np.ndarray, view: View) -> None:
        columns = view.columns
        rows = columns.rows(lanes[:, None], np.arange(columns.capacity)).ravel()
        self._update_max_priority(rows)
        self.tree.update(rows, np.zeros(rows.size))
        self.synced = self.synced.copy()
        self.synced[lanes] = view.low[lanes]

    def pick(
        self, view: View, n: int, rng: np.random.Generator, fits: Fits | None = None, wanted: str = WINDOW
    ) -> tuple[np.ndarray, Fields]:
        """Draws rows in proportion to their priorities.

        Returns:
            The rows, int64 (n,), and `leaves`, their priorities to the power of alpha, float64 (n,).

        Raises:
            SpecError: no row fits, or the priorities of those that do are zero.
        """
        self.follow(view)
        if fits is None and view.is_settled:
            _require_any(self.tree.sums[-1])
            rows, leaves = self.tree.draw_with_values(n, rng)
            return rows, {LEAVES: leaves}
        rows = draw_fitting(
            lambda count: self.draw(count, rng),
            lambda rows: view.has(rows) if fits is None else view.has(rows) & fits(rows),
            n,
            lambda rows, count: self.choose(rows, count, rng),
            view,
            wanted,
        )
        return rows, {LEAVES: self.tree.values.take(rows)}

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids in proportion to their priorities.

        The total of all priorities is divided into `n` equal parts, and each part gives one row.

        Raises:
            SpecError: every priority is zero.
        """
        _require_any(self.tree.sums[-1])
        return self.tree.draw(n, rng)

    def choose(self, rows: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` of these row ids in proportion to their priorities.

        Raises:
            SpecError: every priority is zero.
        """
        ends = np.cumsum(self.tree.values[rows])
        _require_any(ends[-1] if ends.size else 0.0)
        at = np.searchsorted(ends, rng.random(n) * ends[-1], side="right")
        chosen: np.ndarray = rows[np.minimum(at, np.searchsorted(ends, ends[-1]))]
        return chosen

    def set(self, storage: Storage, indexes: Any, priorities: Any, may_be_of_now: bool = False) -> None:
        """Sets the priorities that a program gives; of a repeated row the last counts.

        Args:
            storage: the store.
            indexes: int, row ids, of any library.
            priorities: numbers of the same size, finite, at least 0.
            may_be_of_now: whether ids of rows that were all written since the last draw, or of all rows, refer to the
                rows stored now; otherwise an id refers to the row that it stood for when it was last drawn.

        Raises:
            SpecError, IndexError: an argument is invalid; nothing changes.
        """
        rows, values = host_array("index", indexes).reshape(-1), real_numbers("priorities", priorities).reshape(-1)
        with self.lock:
            view = storage.view()
            is_last = self.drawn.is_last(rows, view)
            if not is_last:
                rows = row_ids(rows, storage.columns.n_rows)
                is_last = may_be_of_now and self.drawn.are_of_now(rows, view)
            self.update(view, rows, values, is_last)

    def update(self, view: View, rows: np.ndarray, priorities: np.ndarray, is_last: bool = False) -> None:
        """Sets priorities; ignores those of rows that were overwritten after they were drawn.

        Args:
            view: of the store, taken just before.
            rows: int64 (n,), row ids; if one is repeated, its last priority counts.
            priorities: (n,), finite, at least 0.
            is_last: whether the ids are known to be those of the last draw, or to refer to the rows stored now.

        Raises:
            SpecError: an argument is invalid; nothing changes.
        """
        if priorities.shape != rows.shape:
            raise SpecError(f"priorities: {priorities.size} came for {rows.size} indexes")
        if not rows.size:
            return
        largest = largest_of(priorities, self._limit)
        self.clock.count_draws()
        powers = priorities**self.alpha
        self.follow(view)
        if not (view.is_settled and is_last):
            same = self.drawn.find_unchanged(view, rows)
            rows, powers, priorities = rows[same], powers[same], priorities[same]
            largest = float(priorities.max(initial=0.0))
        if self.of_present:  # only the last priority of a repeated row counts
            _, last = np.unique(rows[::-1], return_index=True)
            largest = float(priorities[::-1][last].max(initial=0.0))
        self._update_max_priority(rows, largest)
        self.tree.update(rows, powers)

    def replace(self, rows: np.ndarray) -> None:
        """Gives rows whose content was replaced the priority of new rows.

        Args:
            rows: int64 (n,), known to `follow`; priorities of earlier draws of them will be ignored.
        """
        self.clock.count_draws()
        self.drawn.replace(rows)
        self._update_max_priority(rows)
        self.tree.update(rows, np.full(rows.size, self.max_priority**self.alpha))

    def set_alpha(self, alpha: float) -> None:
        """Changes the exponent and recomputes the tree.

        With an old exponent of 0 every priority becomes 1.

        Raises:
            SpecError: the largest priority would be too large; nothing has changed.
        """
        n_rows, leaves = self.tree.n_leaves, self.tree.values.copy()
        limit = limit_of(n_rows, alpha)
        if self.max_priority > limit:
            raise SpecError(f"alpha {alpha}: the largest priority is {self.max_priority}, it may be {limit}")
        self.clock.count_draws()
        priorities = leaves ** (1 / self.alpha) if self.alpha else leaves
        self.tree.fill(np.where(leaves > 0, priorities**alpha, 0))
        self.alpha, self._limit = alpha, limit

    def clear(self) -> None:
        """Gives new rows the initial priority, after the store was cleared."""
        self.clock.count_draws()
        self.max_priority = self.first

    def grow(self, n_rows: int) -> None:
        """Makes room for more rows, after a store of one lane has grown."""
        from rlstructs.replay.draw.sum_tree import SumTree

        self.clock.count_draws()
        leaves = np.zeros(n_rows)
        leaves[: self.tree.n_leaves] = self.tree.values
        self.tree = SumTree(n_rows)
        self.tree.fill(leaves)
        self._limit = limit_of(n_rows, self.alpha)

    def state(self) -> dict[str, float]:
        """Returns the header of a file, beside `arrays`."""
        return {"alpha": self.alpha, "max_priority": self.max_priority}

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a file."""
        return {TREE_LEAVES: self.tree.values, FOLLOWED_STEPS: self.synced, DRAWN_ROWS: self.drawn.array()}

    def restored(
        self,
        arrays: Mapping[str, np.ndarray],
        state: Mapping[str, Any],
        claims: Claims | None = None,
        alpha: float | None = None,
    ) -> Priorities:
        """Creates new priorities from the arrays of a file.

        If it has none, every row gets the same priority.

        Args:
            arrays: of the file.
            state: of the file: `alpha` and `max_priority`.
            claims: the file's counters and columns; None if they are known to fit.
            alpha: exponent of the new priorities, known to be the file's; None for the exponent of this object.

        Raises:
            ValueError: the arrays do not fit.
        """
        power = self.alpha if alpha is None else alpha
        n_rows, n_lanes = self.tree.n_leaves, self.synced.size
        new = Priorities(n_rows, n_lanes, power, first=self.first, of_present=self.of_present, clock=self.clock)
        new.lock = self.lock  # other threads may be waiting for it
        if TREE_LEAVES not in arrays:
            return new
        if alpha is None and state.get("alpha", self.alpha) != self.alpha:
            raise ValueError(f"its priorities are to the power of {state['alpha']}, here alpha is {self.alpha}")
        leaves, synced = arrays[TREE_LEAVES], arrays[FOLLOWED_STEPS]
        wanted = (new.tree.values, new.synced)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip((leaves, synced), wanted, strict=True)):
            raise ValueError("its priorities have other shapes")
        new.max_priority, new.synced = new._check_max_priority(state["max_priority"], leaves), synced
        if claims is not None:
            _check_rows(leaves, synced, claims)
        new.drawn = DrawnRows.restored(arrays[DRAWN_ROWS], leaves.size)
        new.tree.fill(leaves)
        return new

    def _check_max_priority(self, max_priority: Any, leaves: np.ndarray) -> float:
        """Returns `max_priority` as a float, after checking it and the leaves.

        Raises ValueError unless they are possible values.
        """
        most = LARGEST / leaves.size * (1 + ROUNDED)
        is_number = type(max_priority) in (int, float) and 0 < max_priority <= self._limit * (1 + ROUNDED)
        if not is_number or not ((leaves >= 0) & (leaves <= most)).all():  # not true of NaN
            raise ValueError(f"its priorities are not finite and at least 0, here at most {self._limit:.3g}")
        return float(max_priority)


def _check_rows(leaves: np.ndarray, synced: np.ndarray, claims: Claims) -> None:
    """Raises ValueError if empty rows have priorities."""
    ring = claims.ring
    # Lanes that were cleared or have wrapped since do not count: `follow` drops their priorities.
    followed = (synced >= ring.oldest()) & (synced <= ring.head)
    if (synced < 0).any() or followed[claims.lanes(np.flatnonzero((leaves > 0) & claims.empty()))].any():
        raise ValueError("it has priorities of empty rows")
