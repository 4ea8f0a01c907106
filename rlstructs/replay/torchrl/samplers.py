"""Which rows a `DictTensorReplayBuffer` draws: what every sampler does, any row, or each once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.public_names import set_module
from rlstructs.replay.claims import Claims, flag, whole
from rlstructs.replay.drawing import Selection, Uniform
from rlstructs.replay.span import Span
from rlstructs.replay.store import Storage
from rlstructs.replay.torchrl.part import Part, check_neutral

INDEX, WEIGHT, MASK = "index", "priority_weight", "mask"
UNIFORM = Uniform()


class Sampler(Part):
    """What every sampler does.

    Attributes:
        fields: what it adds to a sample beside the index.
        needs_episodes: whether it must know where episodes end.
        end_key, traj_key: columns that say so beside others; None for none.
        drop_last: whether what is smaller than a batch is not drawn.
        version: raised by whatever changes what would be drawn, but for rows and `position`.
        ran_out: whether a pass over the rows is over.
    """

    fields: tuple[str, ...] = ()
    needs_episodes = False
    end_key: str | None = None
    traj_key: str | None = None
    drop_last = False
    ran_out = False
    version = 0

    def start(self, storage: Storage, max_size: int) -> None:
        """Takes a store as it is now, and forgets the one that it had.

        Raises:
            SpecError: it cannot.
        """
        self.cleared()

    def check_keys(self, names: Collection[str]) -> None:
        """Raises MissingKeyError if `end_key` or `traj_key` is none of these columns."""
        for argument, key in (("end_key", self.end_key), ("traj_key", self.traj_key)):
            if key is not None and key not in names:
                raise MissingKeyError(f"no {key!r}, the {argument} of the sampler; there are {sorted(names)}")

    def plan(self, batch_size: int) -> tuple[int, int]:
        """How many draws make such a batch, and how many rows are read for each."""
        return batch_size, 1

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        """`n` draws of `length` rows each; in `fields` of the result what belongs to them."""
        raise NotImplementedError

    def drawn(self, picked: Selection) -> None:
        """Notes what was handed out."""

    def flat(self, picked: Selection, values: Any) -> Any:
        """Values (n, length, ...) of a draw, of numpy or torch, as rows."""
        return values[:, 0]

    def marks(self, names: Collection[str], stored: Container[str]) -> set[str]:
        """Which of a sample's columns it may have changed, or made where they are not stored."""
        return set()

    def info(self, picked: Selection) -> dict[str, np.ndarray]:
        """What is known of each row that was drawn, the index first."""
        return {INDEX: self.flat(picked, picked.rows).copy()} | {name: picked.fields[name] for name in self.fields}

    def position(self) -> Any:
        """Where in a pass it is; equal to another only if that is the same."""
        return None

    def go_to(self, position: Any) -> None:
        """Goes to where it was."""

    def begin_pass(self) -> None:
        """Begins a pass over the rows."""

    def remains(self, storage: Storage, n: int) -> bool:
        """Whether a batch of `n` is left in this pass."""
        return True

    def cleared(self) -> None:
        """The store has been cleared."""

    def grown(self, n_rows: int) -> None:
        """The store has room for so many rows now."""

    def replaced(self, storage: Storage, rows: np.ndarray) -> None:
        """Others have come in the place of these rows."""

    def reordered(self) -> None:
        """Episodes have been worked out anew."""

    def state(self) -> dict[str, Any]:
        """What a file says of it, as JSON has it."""
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """What a file holds of it."""
        return {}

    def restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        """What restores both, once the rows are there that are claimed; raises ValueError, KeyError or TypeError."""
        return self.cleared

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the rows."""
        return 0


@set_module("rlstructs.replay")
class RandomSampler(Sampler):
    """Every row as likely as any other; one batch may hold a row twice.

    Args:
        replacement: if False, this makes a `SamplerWithoutReplacement`, of whose arguments the others are.
    """

    def __new__(cls, *args: Any, replacement: bool = True, **settings: Any) -> Any:
        return super().__new__(cls) if replacement else SamplerWithoutReplacement(*args, **settings)

    def __init__(self, *, replacement: bool = True) -> None:
        pass

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        """See `Sampler`."""
        span = storage.span()
        return Selection(UNIFORM.draw(span, n, rng)[:, None], span)


class _Order:
    """Steps in the order in which a pass serves them. Two are never equal."""

    def __init__(self, steps: np.ndarray, low: int, length: int) -> None:
        self.steps, self.low = steps, low  # what was the oldest one then
        self.length = length  # how many rows are read for each
        self.replaced: np.ndarray | None = None  # bool, by slot


@set_module("rlstructs.replay")
class SamplerWithoutReplacement(Sampler):
    """Every row once, in random order, and then again.

    A pass is over the rows that are there when it begins: one that is overwritten before its turn is left out,
    and one that comes later waits for the next pass.

    Args:
        drop_last: whether a pass ends before a batch that would be smaller.
        shuffle: whether the order is random; otherwise it is that in which the rows came.
        replacement: False.
    """

    _order: _Order | None = None
    _at = 0

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        check_neutral(type(self).__name__, {"replacement": replacement}, {"replacement": False})
        self.drop_last, self.shuffle = drop_last, shuffle

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        """See `Sampler`."""
        span = storage.span()
        steps = self._served(span, n, length, rng, lambda: int(span.low[0]) + np.arange(span.total))
        if self.drop_last and steps.size < n:
            raise SpecError(f"batch_size is {n}, there are {steps.size} rows, and drop_last drops what is smaller")
        return Selection(span.columns.at_steps(0, steps)[:, None], span)

    def _served(
        self, span: Span, n: int, length: int, rng: np.random.Generator, every: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """The next `n` steps of a pass, fewer at its end; a new one serves those that `every` gives."""
        if self._order is not None and self._order.length != length:
            self.begin_pass()
        steps, at = self._next(span, n)
        if not steps.size or (self.drop_last and steps.size < n):
            order = rng.permutation(every()) if self.shuffle else every()
            self._order, self._at = _Order(order, int(span.low[0]), length), 0
            steps, at = self._next(span, n)
        self._at = at
        self.ran_out = not self._is_left(span, n)
        return steps

    def _next(self, span: Span, n: int) -> tuple[np.ndarray, int]:
        """The next steps that are still there, `n` or as many as are left, and where the others begin."""
        order, at = self._order, self._at
        if order is None:
            return np.zeros(0, np.int64), at
        low = int(span.low[0])
        if low == order.low and order.replaced is None:
            return order.steps[at : at + n], at + n
        found = np.zeros(0, np.int64)
        while found.size < n and at < order.steps.size:
            steps = order.steps[at : at + n - found.size]
            at += steps.size
            found = np.concatenate([found, steps[self._held(order, steps, low, span.columns.capacity)]])
        return found, at

    def _held(self, order: _Order, steps: np.ndarray, low: int, capacity: int) -> np.ndarray:
        held = steps >= low
        if order.replaced is not None:
            held &= ~order.replaced[steps % capacity]
        return np.asarray(held)

    def _is_left(self, span: Span, n: int) -> bool:
        wanted = n if self.drop_last else 1
        return self._next(span, wanted)[0].size == wanted

    def position(self) -> Any:
        """See `Sampler`."""
        return self._order, self._at, self.ran_out

    def go_to(self, position: Any) -> None:
        """See `Sampler`."""
        self._order, self._at, self.ran_out = position

    def begin_pass(self) -> None:
        """See `Sampler`."""
        self._order, self._at, self.ran_out = None, 0, False

    def remains(self, storage: Storage, n: int) -> bool:
        """See `Sampler`."""
        return self._order is None or self._is_left(storage.span(), n)

    def cleared(self) -> None:
        """See `Sampler`."""
        self.begin_pass()

    def replaced(self, storage: Storage, rows: np.ndarray) -> None:
        """See `Sampler`."""
        if self._order is not None:
            if self._order.replaced is None:
                self._order.replaced = np.zeros(storage.columns.capacity, bool)
            self._order.replaced[rows] = True

    def state(self) -> dict[str, Any]:
        """See `Sampler`."""
        order = self._order
        known = {"pass": None, "length": 1} if order is None else {"pass": order.low, "length": order.length}
        return known | {"ran_out": self.ran_out}

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Sampler`."""
        order = self._order
        if order is None:
            return {}
        return {"order": order.steps[self._at :].copy()} | (
            {} if order.replaced is None else {"replaced": order.replaced.copy()}
        )

    def restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        """See `Sampler`."""
        order, ran_out = None, flag("ran_out", state["ran_out"])
        if state["pass"] is not None:
            low = whole("pass", state["pass"], 0, int(claims.ring.oldest()[0]))
            order = _Order(arrays["order"], low, whole("length", state.get("length", 1), 1))  # not in older files
            order.replaced = marks = arrays.get("replaced")
            if order.steps.dtype != np.int64 or order.steps.ndim != 1:
                raise ValueError("its order has another shape")
            if not ((order.steps >= low) & (order.steps < claims.ring.head[0])).all():
                raise ValueError("its order is of rows that there are not")
            if marks is not None and (marks.dtype != bool or marks.shape != (claims.n_rows,)):
                raise ValueError("its order has another shape")
        return lambda: self.go_to((order, 0, ran_out))

    def _shown(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last, "shuffle": self.shuffle}
