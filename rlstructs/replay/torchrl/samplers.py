"""Samplers of a `DictTensorReplayBuffer`: base class, random, and without replacement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.draw.plan import Selection, Uniform
from rlstructs.replay.draw.view import View
from rlstructs.replay.keep.checks import Claims, flag, whole
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.part import Part, check_neutral
from rlstructs.workers.public_names import set_module

INDEX, WEIGHT, MASK = "index", "priority_weight", "mask"
UNIFORM = Uniform()
# The state of a sampler in a file: as JSON, and as arrays.
State = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]


class Sampler(Part):
    """Base class of the samplers.

    Attributes:
        fields: names that it adds to a sample beside the index.
        needs_episodes: whether it has to know where episodes end.
        end_key, traj_key: further columns that say where episodes end and begin; None for none.
        drop_last: whether the last rows of a pass, fewer than a batch, are left out.
        ran_out: whether a pass over the rows is over.
    """

    fields: tuple[str, ...] = ()
    needs_episodes = False
    end_key: str | None = None
    traj_key: str | None = None
    drop_last = False
    ran_out = False

    def start(self, storage: Storage, max_size: int) -> None:
        """Begins to draw from a store, as it is now.

        Raises:
            SpecError: it cannot.
        """
        self.cleared()

    def check_keys(self, names: Collection[str]) -> None:
        """Raises MissingKeyError if `end_key` or `traj_key` is not among these columns."""
        for argument, key in (("end_key", self.end_key), ("traj_key", self.traj_key)):
            if key is not None and key not in names:
                raise MissingKeyError(f"no {key!r}, the {argument} of the sampler; there are {sorted(names)}")

    def plan(self, batch_size: int) -> tuple[int, int]:
        """Returns the number of draws for a batch, and rows of each."""
        return batch_size, 1

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        """Makes `n` draws of `length` rows each.

        The `fields` of the result have a value for each draw.
        """
        raise NotImplementedError

    def drawn(self, picked: Selection) -> None:
        """Records the draws that are handed out."""

    def flat(self, picked: Selection, values: Any) -> Any:
        """Converts values (n, length, ...) of draws to rows of a batch.

        They are arrays of numpy or torch.
        """
        return values[:, 0]

    def marks(self, names: Collection[str], stored: Container[str]) -> set[str]:
        """Lists the columns of a sample that it may have changed.

        It may also have added them because they are not stored.
        """
        return set()

    def info(self, picked: Selection) -> dict[str, np.ndarray]:
        """Returns facts about each row of a batch, the index first."""
        return {INDEX: self.flat(picked, picked.rows).copy()} | {name: picked.fields[name] for name in self.fields}

    def position(self) -> Any:
        """Returns the place in a pass.

        Two places are equal only if they are the same.
        """
        return None

    def go_to(self, position: Any) -> None:
        """Goes to a place in a pass."""

    def begin_pass(self) -> None:
        """Begins a pass over the rows."""

    def remains(self, storage: Storage, n: int) -> bool:
        """Whether this pass has another batch of `n` draws."""
        return True

    # Events, which its buffer reports

    def cleared(self) -> None:
        """Is called after the store was cleared."""

    def grown(self, n_rows: int) -> None:
        """Is called after the store has got room for `n_rows` rows."""

    def replaced(self, storage: Storage, rows: np.ndarray) -> None:
        """Is called after these rows were overwritten by others."""

    def reordered(self) -> None:
        """Is called after episodes were recomputed."""

    def state(self) -> dict[str, Any]:
        """Returns its state for a file, as JSON."""
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns its arrays for a file."""
        return {}

    def restorer(self, state: State, arrays: Arrays, claims: Claims) -> Callable[[], None]:
        """Checks both, and returns a function that restores them after the rows.

        Raises:
            ValueError, KeyError, TypeError: they do not fit.
        """
        return self.cleared

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the rows."""
        return 0


@set_module("rlstructs.replay")
class RandomSampler(Sampler):
    """Draws every row with equal probability; a batch may hold a row twice.

    Args:
        replacement: False creates a `SamplerWithoutReplacement` instead, from the other arguments.
    """

    def __new__(cls, *args: Any, replacement: bool = True, **settings: Any) -> Any:
        return super().__new__(cls) if replacement else SamplerWithoutReplacement(*args, **settings)

    def __init__(self, *, replacement: bool = True) -> None:
        pass

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        view = storage.view()
        return Selection(UNIFORM.draw(view, n, rng)[:, None], view)


@dataclass(eq=False)
class _Order:
    """The order of the steps of a pass; two are never equal.

    Attributes:
        steps: int64 (n,).
        low: the oldest step when the pass began.
        length: number of rows that are read for each step.
        replaced: bool (capacity,), the slots of rows that were replaced since; None for none.
    """

    steps: np.ndarray
    low: int
    length: int
    replaced: np.ndarray | None = None


@set_module("rlstructs.replay")
class SamplerWithoutReplacement(Sampler):
    """Draws every row once, in random order, and then begins again.

    A pass is over the rows that exist when it begins: a row that is overwritten before its turn is left out, and one
    that is written later waits for the next pass.

    Args:
        drop_last: whether a pass ends before a batch that would be smaller.
        shuffle: whether the order is random; otherwise rows are drawn in the order in which they were written.
        replacement: must be False.
    """

    _order: _Order | None = None
    _at = 0

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        check_neutral(type(self).__name__, {"replacement": replacement}, {"replacement": False})
        self.drop_last, self.shuffle = drop_last, shuffle

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        view = storage.view()
        steps = self._take(view, n, length, rng, lambda: int(view.low[0]) + np.arange(view.total))
        if self.drop_last and steps.size < n:
            raise SpecError(f"batch_size is {n}, there are {steps.size} rows, and drop_last drops smaller batches")
        return Selection(view.columns.at_steps(0, steps)[:, None], view)

    def _take(
        self, view: View, n: int, length: int, rng: np.random.Generator, list_steps: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Takes the next `n` steps of a pass, fewer at its end.

        A new pass is over the steps that `list_steps` returns.
        """
        if self._order is not None and self._order.length != length:
            self.begin_pass()
        steps, at = self._next(view, n)
        if not steps.size or (self.drop_last and steps.size < n):
            order = rng.permutation(list_steps()) if self.shuffle else list_steps()
            self._order, self._at = _Order(order, int(view.low[0]), length), 0
            steps, at = self._next(view, n)
        self._at = at
        self.ran_out = not self._is_left(view, n)
        return steps

    def _next(self, view: View, n: int) -> tuple[np.ndarray, int]:
        """Finds the next `n` steps whose rows still exist.

        There may be fewer at the end of the pass. Also returns the place after them.
        """
        order, at, found = self._order, self._at, np.zeros(0, np.int64)
        if order is None:
            return found, at
        low = int(view.low[0])
        if low == order.low and order.replaced is None:
            return order.steps[at : at + n], at + n
        while found.size < n and at < order.steps.size:
            steps = order.steps[at : at + n - found.size]
            at += steps.size
            held = steps >= low
            if order.replaced is not None:
                held &= ~order.replaced[steps % view.columns.capacity]
            found = np.concatenate([found, steps[held]])
        return found, at

    def _is_left(self, view: View, n: int) -> bool:
        wanted = n if self.drop_last else 1
        return self._next(view, wanted)[0].size == wanted

    def position(self) -> Any:
        return self._order, self._at, self.ran_out

    def go_to(self, position: Any) -> None:
        self._order, self._at, self.ran_out = position

    def begin_pass(self) -> None:
        self.go_to((None, 0, False))

    def remains(self, storage: Storage, n: int) -> bool:
        return self._order is None or self._is_left(storage.view(), n)

    def cleared(self) -> None:
        self.begin_pass()

    def replaced(self, storage: Storage, rows: np.ndarray) -> None:
        if self._order is not None:
            if self._order.replaced is None:
                self._order.replaced = np.zeros(storage.columns.capacity, bool)
            self._order.replaced[rows] = True

    def state(self) -> dict[str, Any]:
        order = self._order
        known = {"pass": None, "length": 1} if order is None else {"pass": order.low, "length": order.length}
        return known | {"ran_out": self.ran_out}

    def arrays(self) -> dict[str, np.ndarray]:
        if self._order is None:
            return {}
        arrays = {"order": self._order.steps[self._at :], "replaced": self._order.replaced}
        return {name: array.copy() for name, array in arrays.items() if array is not None}

    def restorer(self, state: State, arrays: Arrays, claims: Claims) -> Callable[[], None]:
        order, ran_out = None, flag("ran_out", state["ran_out"])
        if state["pass"] is not None:
            low = whole("pass", state["pass"], 0, int(claims.ring.oldest()[0]))
            length = whole("length", state.get("length", 1), 1)  # older files lack it
            order = _Order(arrays["order"], low, length, arrays.get("replaced"))
            steps, marks = order.steps, order.replaced
            is_ours = marks is None or (marks.dtype == bool and marks.shape == (claims.n_rows,))
            if steps.dtype != np.int64 or steps.ndim != 1 or not is_ours:
                raise ValueError("its order has another dtype or shape")
            if not ((steps >= low) & (steps < claims.ring.head[0])).all():
                raise ValueError("its order names rows that it does not hold")
        return lambda: self.go_to((order, 0, ran_out))

    def _shown(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last, "shuffle": self.shuffle}
