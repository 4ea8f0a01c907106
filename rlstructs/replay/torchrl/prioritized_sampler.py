"""The prioritised sampler of a `DictTensorReplayBuffer`.

It reduces several priorities of a row to one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.draw.priorities import LEAVES, TREE_LEAVES, Priorities, exponent, importance_weights
from rlstructs.replay.intake.arrays import flat_items, host_array, real_numbers, row_ids
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.rows.lanes import Clock
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.part import check_neutral
from rlstructs.replay.torchrl.samplers import INDEX, MASK, WEIGHT, Arrays, Sampler, State
from rlstructs.replay.torchrl.storages import NO_LIMIT
from rlstructs.workers.public_names import set_module

# torch's median of an even number of values is the lower of the two in the middle.
LOWER_MEDIAN = functools.partial(np.quantile, q=0.5, method="lower")
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "max": np.max,
    "min": np.min,
    "mean": np.mean,
    "median": LOWER_MEDIAN,
    "sum": np.sum,
}


@set_module("rlstructs.replay")
class PrioritizedSampler(Sampler):
    """Draws rows in proportion to (priority + eps) ** alpha.

    A new row gets the largest priority ever set, initially 1. A draw of n takes one row from each n-th of the sum, so a
    batch is in the order of row ids: shuffle it before you split it. Samples have a `priority_weight`, float32: the
    importance weight (p / smallest p) ** -beta, where p is the probability of a row.

    Args:
        max_capacity: at least the largest number of rows of the storage; None for this number.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of weights, at least 0.
        eps: added to priorities.
        dtype, device: change nothing: priorities are float64, on the host.
        reduction: of several priorities of a row to one: "max", "min", "mean", "median" or "sum".
        max_priority_within_buffer: whether a new row gets the largest priority of the present rows instead of the
            largest ever set. This takes longer the more rows there are.
        replacement: must be True: a batch may hold a row twice.

    Raises:
        SpecError: an argument does not fit.
    """

    fields = (WEIGHT,)
    # The row ids of the last write, and their steps: an id alone may refer to the row that was drawn before.
    written: tuple[np.ndarray, np.ndarray] | None = None

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.7,
        beta: float = 0.5,
        eps: float = 1e-8,
        dtype: Any = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: Any = None,
        *,
        replacement: bool = True,
    ) -> None:
        check_neutral(type(self).__name__, {"replacement": replacement}, {"replacement": True})
        self.max_capacity = None if max_capacity is None else check_count("max_capacity", max_capacity)
        self._alpha, self._beta = exponent("alpha", alpha), exponent("beta", beta)
        self.eps, self.reduction = exponent("eps", eps), check_reduction(reduction)
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self._priorities: Priorities | None = None

    @property
    def alpha(self) -> float:
        """Exponent of priorities.

        Setting it keeps the priorities, except that after 0 all of them are 1.
        """
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        alpha = exponent("alpha", alpha)
        if self._priorities is not None:
            self._priorities.set_alpha(alpha)
        if not self._alpha and alpha:
            warnings.warn("alpha was 0: what priorities the rows had is not known, all of them get 1", stacklevel=2)
        self._alpha = alpha

    @property
    def beta(self) -> float:
        """Exponent of weights."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = exponent("beta", beta)
        if self._priorities is not None:
            self._priorities.clock.count_draws()

    @property
    def max_priority(self) -> float:
        """The priority of a new row.

        It is the largest so far, or the largest of the present rows.
        """
        return 1.0 if self._priorities is None else self._priorities.max_priority - self.eps

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Calls `update_priority` of its buffer.

        Args:
            index, priority: see `DictTensorReplayBuffer.update_priority`.
            storage: changes nothing: the buffer knows its storage.

        Raises:
            StateError: it belongs to no buffer.
        """
        if self.owner is None:
            raise StateError(f"update_priority: this {type(self).__name__} belongs to no buffer yet, and has no rows")
        self.owner.update_priority(index, priority)

    def start(self, storage: Storage, max_size: int) -> None:
        is_small = self.max_capacity is not None and self.max_capacity < max_size
        if is_small and max_size < NO_LIMIT:  # priorities grow with the rows
            raise SpecError(f"max_capacity is {self.max_capacity}, the storage has room for {max_size} rows")
        self._priorities = self._create(storage.columns.n_rows, self._alpha, storage.clock)
        super().start(storage, max_size)

    def _create(self, n_rows: int, alpha: float, clock: Clock) -> Priorities:
        settings: Any = {"first": 1.0 + self.eps, "of_present": self.max_priority_within_buffer}
        return Priorities(n_rows, 1, alpha, **settings, clock=clock)

    def _of(self) -> Priorities:
        assert self._priorities is not None, "a sampler is started before it draws"
        return self._priorities

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        view = storage.view()
        rows, fields = self._of().pick(view, n, rng)
        return Selection(rows[:, None], view, {WEIGHT: self._weights(fields[LEAVES])})

    def _weights(self, leaves: np.ndarray) -> np.ndarray:
        return importance_weights(leaves, self._of().tree.minimum, self._beta)

    def drawn(self, picked: Selection) -> None:
        self._of().drawn.remember(picked.view, picked.rows)

    def check(self, priorities: Any, n: int) -> np.ndarray:
        """Converts priorities of n rows to float64 (n,).

        They are `(n, ...)`, or one number for all.

        Raises:
            SpecError: they do not fit, or one is negative or not finite.
        """
        values = real_numbers("priorities", priorities)
        if values.ndim == 0:
            values = np.full(n, values)
        if values.shape[0] != n:
            raise SpecError(f"priorities: {values.shape[0]} came for {n} indexes")
        if not (values >= 0).all() or np.isinf(values).any():  # NaN is not at least 0
            wrong = values[~(values >= 0) | np.isinf(values)][0]
            raise SpecError(f"priorities must be finite and at least 0, got {wrong}")
        return reduce_rows(values, self.reduction)

    def update(self, storage: Storage, index: Any, priorities: Any) -> None:
        """Sets the priorities of rows.

        If a row is repeated, its last priority counts; negative ids are left out.

        Args:
            storage: the rows.
            index: int (n,), row ids. The ids of the last write refer to its rows, others to the rows that were drawn.
            priorities: see `check`.

        Raises:
            SpecError, IndexError: something does not fit; nothing changes.
        """
        rows, view = host_array("index", index).reshape(-1), storage.view()
        if np.ndim(index) > 1 and np.shape(priorities) == np.shape(index):
            priorities = host_array("priorities", priorities).reshape(-1)
        values = self.check(priorities, rows.size)
        if self.written is not None and np.array_equal(rows, self.written[0]):
            steps, is_last = self.written[1], True
            held = (rows >= 0) & (view.steps(rows) == steps) & (steps >= view.low[0])
            rows, values = rows[held], values[held]
        elif not (is_last := self._of().drawn.is_last(rows, view)):
            held = rows >= 0 if rows.dtype.kind == "i" else np.ones(rows.shape, bool)
            rows, values = row_ids(rows[held], storage.columns.n_rows), values[held]
        self._of().update(view, rows, values + self.eps, is_last)

    def cleared(self) -> None:
        self._of().clear()

    def grown(self, n_rows: int) -> None:
        self._of().grow(n_rows)

    def replaced(self, storage: Storage, rows: np.ndarray) -> None:
        self._of().follow(storage.view())
        self._of().replace(rows)

    def state(self) -> dict[str, Any]:
        return {**self._of().state(), "beta": self._beta}

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self._of().arrays().items()}

    def restorer(self, state: State, arrays: Arrays, claims: Claims) -> Callable[[], None]:
        alpha, beta = exponent("alpha", state["alpha"]), exponent("beta", state["beta"])
        if TREE_LEAVES not in arrays:
            raise ValueError("it has no priorities")
        priorities = self._create(claims.n_rows, alpha, self._of().clock).restored(arrays, state, claims)

        def restore() -> None:
            self._alpha, self._beta, self._priorities, self.written = alpha, beta, priorities, None
            priorities.clock.count_draws()

        return restore

    @property
    def nbytes(self) -> int:
        """Bytes of priorities and their bookkeeping."""
        return 0 if self._priorities is None else Priorities.nbytes_of(self._priorities.tree.n_leaves, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "written": None}

    def _shown(self) -> dict[str, Any]:
        return {"alpha": self._alpha, "beta": self._beta, "eps": self.eps, "reduction": self.reduction}


def check_reduction(reduction: str) -> str:
    """Returns the name of a reduction.

    Raises:
        SpecError: there is no such reduction.
    """
    if reduction not in REDUCTIONS:
        raise SpecError(f"reduction must be one of {sorted(REDUCTIONS)}, got {reduction!r}")
    return reduction


def reduce_rows(values: np.ndarray, reduction: str) -> np.ndarray:
    """Reduces float64 (n, ...) to (n,)."""
    axes = tuple(range(1, values.ndim))
    if not len(values):  # numpy has no quantile of no rows over several axes
        return np.zeros(0)
    return np.asarray(REDUCTIONS[reduction](values, axis=axes)) if axes else values


def find_priorities(batch: Any, key: str, sampler: PrioritizedSampler) -> tuple[np.ndarray, np.ndarray]:
    """Finds row ids and priorities in a batch, without padding.

    The ids are (n,), the priorities, from its column `key`, (n, ...).

    Raises:
        MissingKeyError: the batch has no `index`, or no such column.
    """
    flat = flat_items(batch, "update_tensordict_priority")
    if absent := sorted({INDEX, key} - set(flat)):
        raise MissingKeyError(f"update_tensordict_priority: no {absent} in the batch, there are {sorted(flat)}")
    index, priorities = (host_array(name, flat[name]) for name in (INDEX, key))
    mask = host_array(MASK, flat[MASK]).astype(bool) if MASK in sampler.fields and MASK in flat else None
    if index.ndim > 1:  # slices, or rows of several steps that all have the same index: take that of the first step
        index = index.reshape(len(index), -1)[:, 0]
        if mask is None or priorities.ndim == 1:
            return index, priorities
        some = mask.reshape(len(mask), -1).any(axis=1)  # rows of several axes may be padding as a whole
        own = zip(priorities[some], mask[some], strict=True)
        return index[some], np.array([reduce_rows(each[at][None], sampler.reduction)[0] for each, at in own])
    return (index, priorities) if mask is None else (index[mask], priorities[mask])
