"""A sampler of a `DictTensorReplayBuffer` that draws rows in proportion to their priorities."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay.claims import Claims
from rlstructs.replay.drawing import Selection
from rlstructs.replay.priorities import TREE_LEAVES, Priorities, exponent, importance_weights
from rlstructs.replay.store import Storage
from rlstructs.replay.torchrl.part import check_neutral
from rlstructs.replay.torchrl.samplers import WEIGHT, Sampler
from rlstructs.replay.values import host_array, real_numbers, row_ids

# Of an even number of values torch's median is the lower of the two in the middle.
LOWER_MEDIAN = functools.partial(np.quantile, q=0.5, method="lower")
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "max": np.max, "min": np.min, "mean": np.mean, "median": LOWER_MEDIAN, "sum": np.sum,
}  # fmt: skip


@set_module("rlstructs.replay")
class PrioritizedSampler(Sampler):
    """In proportion to (priority + eps) ** alpha; a new row has the largest priority ever given, at first 1.

    A draw of n takes one row from each n-th of the sum: a batch is in the order of row ids. Shuffle one that is split.

    Samples have a `priority_weight`, float32: what a row weighs less for being drawn more often than
    the one with the smallest priority that there is, (share of the row / share of that) ** -beta.

    Args:
        max_capacity: at least as many rows as the storage has room for; None for those.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of weights, at least 0.
        eps: what is added to priorities.
        dtype, device: change nothing: priorities are float64, on the host.
        reduction: what becomes of several priorities of a row: "max", "min", "mean", "median" or "sum".
        max_priority_within_buffer: whether a new row gets the largest priority of the rows that are there, in place
            of the largest ever given. To look for it takes longer the more rows there are.
        replacement: True: a batch may hold a row twice.

    Raises:
        SpecError: an argument is not what is needed.
    """

    fields = (WEIGHT,)

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
        self.eps, self.reduction = exponent("eps", eps), checked_reduction(reduction)
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self._priorities: Priorities | None = None

    @property
    def alpha(self) -> float:
        """Exponent of priorities; setting it keeps the priorities, but those given while it was 0 are all 1."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        alpha = exponent("alpha", alpha)
        if self._priorities is not None:
            self._priorities.set_alpha(alpha)
        if not self._alpha and alpha:
            warnings.warn("alpha was 0: what priorities the rows had is not known, all of them get 1", stacklevel=2)
        self._alpha = alpha
        self.version += 1

    @property
    def beta(self) -> float:
        """Exponent of weights."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = exponent("beta", beta)
        self.version += 1

    @property
    def max_priority(self) -> float:
        """The largest priority so far, or of the rows that are there, which a new row gets."""
        return 1.0 if self._priorities is None else self._priorities.max_priority - self.eps

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """As of the buffer that it belongs to.

        Args:
            index, priority: as there.
            storage: changes nothing, as the buffer knows its own.

        Raises:
            StateError: it belongs to none.
        """
        buffer = None if self._owner is None else self._owner()
        if buffer is None:
            raise StateError(f"update_priority: this {type(self).__name__} belongs to no buffer yet, and has no rows")
        buffer.update_priority(index, priority)

    def start(self, storage: Storage, max_size: int) -> None:
        """See `Sampler`."""
        if self.max_capacity is not None and self.max_capacity < max_size:
            raise SpecError(f"max_capacity is {self.max_capacity}, the storage has room for {max_size} rows")
        self._priorities = self._made(storage.columns.n_rows, self._alpha)
        super().start(storage, max_size)

    def _made(self, n_rows: int, alpha: float) -> Priorities:
        return Priorities(n_rows, 1, alpha, first=1.0 + self.eps, of_present=self.max_priority_within_buffer)

    def _of(self) -> Priorities:
        assert self._priorities is not None, "a sampler is started before it draws"
        return self._priorities

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        """See `Sampler`."""
        span = storage.span()
        rows = self._of().draw_rows(span, n, rng)
        return Selection(rows[:, None], span, {WEIGHT: self._weights(rows)})

    def _weights(self, rows: np.ndarray) -> np.ndarray:
        """float32, of the shape of `rows`."""
        tree = self._of().tree
        return importance_weights(tree.values.take(rows), tree.minimum, self._beta)

    def drawn(self, picked: Selection) -> None:
        """See `Sampler`."""
        self._of().drawn.remember(picked.span, picked.rows)

    def checked(self, priorities: Any, n: int) -> np.ndarray:
        """Priorities of n rows, `(n, ...)` or one number for all, as float64 (n,).

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
        return reduced(values, self.reduction)

    def update(self, storage: Storage, index: Any, priorities: Any, steps: np.ndarray | None = None) -> None:
        """Sets the priorities of rows; of equal ones the last counts, negative ones are left out.

        Args:
            storage: where they lie.
            index: int (n,), row ids.
            priorities: as `checked` takes them.
            steps: int64 (n,), which steps the ids mean, where that is known; None for those that they were drawn as.

        Raises:
            SpecError, IndexError: something does not fit; nothing has changed.
        """
        rows, span = host_array("index", index).reshape(-1), storage.span()
        if np.ndim(index) > 1 and np.shape(priorities) == np.shape(index):
            priorities = host_array("priorities", priorities).reshape(-1)
        values = self.checked(priorities, rows.size)
        is_last = steps is not None or self._of().drawn.is_last(rows, span)
        if steps is not None:
            held = (rows >= 0) & (span.steps(rows) == steps) & (steps >= span.low[0])
            rows, values = rows[held], values[held]
        elif not is_last:
            held = rows >= 0 if rows.dtype.kind == "i" else np.ones(rows.shape, bool)
            rows, values = row_ids(rows[held], storage.columns.n_rows), values[held]
        self._of().update(span, rows, values + self.eps, is_last)
        self.version += 1

    def cleared(self) -> None:
        """See `Sampler`."""
        self._of().clear()
        self.version += 1

    def grown(self, n_rows: int) -> None:
        """See `Sampler`."""
        self._of().grow(n_rows)

    def replaced(self, storage: Storage, rows: np.ndarray) -> None:
        """See `Sampler`."""
        self._of().follow(storage.span())
        self._of().replace(rows)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """See `Sampler`."""
        return {**self._of().state(), "beta": self._beta}

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Sampler`."""
        return {name: array.copy() for name, array in self._of().arrays().items()}

    def restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        """See `Sampler`."""
        alpha, beta = exponent("alpha", state["alpha"]), exponent("beta", state["beta"])
        if TREE_LEAVES not in arrays:
            raise ValueError("it has no priorities")
        priorities = self._made(claims.n_rows, alpha).restored(arrays, state, claims)

        def restore() -> None:
            self._alpha, self._beta, self._priorities = alpha, beta, priorities
            self.version += 1

        return restore

    @property
    def nbytes(self) -> int:
        """Bytes of the priorities."""
        return 0 if self._priorities is None else Priorities.nbytes_of(self._priorities.tree.n_leaves, 1)

    def _shown(self) -> dict[str, Any]:
        return {"alpha": self._alpha, "beta": self._beta, "eps": self.eps, "reduction": self.reduction}


def checked_reduction(reduction: str) -> str:
    """`reduction`, if it is one.

    Raises:
        SpecError: it is none.
    """
    if reduction not in REDUCTIONS:
        raise SpecError(f"reduction must be one of {sorted(REDUCTIONS)}, got {reduction!r}")
    return reduction


def reduced(values: np.ndarray, reduction: str) -> np.ndarray:
    """`(n, ...)` as float64 (n,)."""
    axes = tuple(range(1, values.ndim))
    if not len(values):  # numpy has no quantile of no rows over several axes
        return np.zeros(0)
    return np.asarray(REDUCTIONS[reduction](values, axis=axes)) if axes else values


def reduced_inside(values: np.ndarray, inside: np.ndarray, reduction: str) -> np.ndarray:
    """`(n, T, ...)` as float64 (n,): what the steps are reduced to that are `inside`, bool (n, T)."""
    return np.array([reduced(own[at][None], reduction)[0] for own, at in zip(values, inside, strict=True)])
