"""Samplers of slices.

A slice is a run of consecutive steps of one episode. It is drawn without looking at every row:

    starts   s0       s1            s2      s3         the steps with which episodes begin, of valid rows
    rows   ----|-------|-------------|-------|-----    the oldest episode may lack its start, the newest may go on
             low                                head

Each start has the sum of the weights of all episodes before it, so that bisection finds the episode of a random number.
A draw only updates both for the rows that were written since the last draw.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.draw.priorities import LEAVES
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.roles import ENDS, ends_among
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.part import ANY, check_neutral, join_key
from rlstructs.replay.torchrl.prioritized_sampler import PrioritizedSampler
from rlstructs.replay.torchrl.samplers import INDEX, MASK, WEIGHT, Sampler, SamplerWithoutReplacement
from rlstructs.workers.public_names import set_module

AUTO = "auto"
WINDOW, TRAJECTORY = MEASURES = ("window", "trajectory")
# Arguments of torchrl's slice samplers without a meaning here, and the values that are accepted.
NEUTRAL = {
    "compile": ANY,
    "use_gpu": ANY,
    "step_key": ANY,
    "span": False,
    "fragmented": False,
    "ends": None,
    "trajectories": None,
    "end_keys": None,
    "replacement": True,
}
INSIDE = "inside"  # field of a selection, bool (n, length): which steps of each slice are not padding
DONE = ("done", "dones")


@set_module("rlstructs.replay")
class SliceSampler(Sampler):
    """Draws an episode, then a slice of it.

    No slice mixes episodes, or the newest rows with the oldest. A batch of `batch_size` steps is `(batch_size, ...)`,
    one slice after the other. The last step of each slice is marked as truncated and done, even if its episode goes on.
    A batch has all of `truncated`, `terminated` and `done`, even if not all are stored; if only `done` is stored, an
    episode that is done has terminated.

    Args:
        num_slices: number of slices in a batch; or
        slice_len: number of steps of a slice.
        end_key: a further column that ends an episode where it is true, beside `terminated`, `truncated` and `done`.
        traj_key: a column that begins an episode where it changes; None for `collector/traj_ids` or `episode`, if
            there is one.
        strict_length: whether shorter episodes are left out; otherwise each is a slice, and the batch is shorter.
        pad_output: whether such slices repeat their last step to full length, and `mask` says which steps count.
        per: "trajectory" if all episodes are equally likely, as in torchrl, and all slices of one; "window" if all
            slices are, so that long episodes are drawn more often.
        truncated_key: the column that marks the last steps, together with the `done` beside it; "auto" for the one
            beside the other ends; None for none.
        cache_values: changes nothing: ends of episodes are noted when rows are written, and never looked up again.
        init_key: a column that marks the first step of each slice, if it exists; None for none.
        replacement: False creates a `SliceSamplerWithoutReplacement` instead.
        others: further arguments of torchrl's. `compile` and `use_gpu` change nothing; `span`, `ends`, `trajectories`,
            `end_keys` and `fragmented`, which do not exist here, must be None or False.

    Raises:
        TypeError: none or both of `num_slices` and `slice_len` are given.
        SpecError: an argument does not fit.
    """

    needs_episodes = True

    def __new__(cls, *args: Any, replacement: bool = True, **settings: Any) -> Any:
        return super().__new__(cls if replacement or cls is not SliceSampler else SliceSamplerWithoutReplacement)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        traj_key: Any = None,
        strict_length: bool = True,
        pad_output: bool = False,
        per: str = TRAJECTORY,
        truncated_key: Any = AUTO,
        cache_values: bool = False,
        init_key: Any = "is_init",
        **others: Any,
    ) -> None:
        check_neutral(type(self).__name__, others, NEUTRAL)
        if (num_slices is None) == (slice_len is None):
            raise TypeError("a SliceSampler needs num_slices or slice_len, and not both")
        if pad_output and strict_length:
            raise SpecError("pad_output needs strict_length=False: slices of full length have no padding")
        self.num_slices = None if num_slices is None else check_count("num_slices", num_slices)
        self.slice_len = None if slice_len is None else check_count("slice_len", slice_len)
        self.end_key, self.traj_key, self.truncated_key, self.init_key = (
            None if key is None else join_key(key) for key in (end_key, traj_key, truncated_key, init_key)
        )
        self.strict_length, self.pad_output, self.per = strict_length, pad_output, per
        self.fields = (*type(self).fields, MASK) if pad_output else type(self).fields
        self._slices = Slices(per, strict_length)

    def plan(self, batch_size: int) -> tuple[int, int]:
        """Returns the number of draws for a batch, and rows of each.

        Raises:
            SpecError: the batch is not made of whole slices.
        """
        name, size = ("num_slices", self.num_slices) if self.slice_len is None else ("slice_len", self.slice_len)
        assert size is not None
        if batch_size % size:
            raise SpecError(f"batch_size counts steps: {batch_size} cannot be divided by {name}, {size}")
        parts = batch_size // size
        return (size, parts) if self.slice_len is None else (parts, size)

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        view = storage.view()
        rows, inside = self._slices.draw(view, n, length, rng)
        return Selection(rows, view, {INSIDE: inside})

    def flat(self, picked: Selection, values: Any) -> Any:
        values = values.reshape(-1, *values.shape[2:])
        if self.pad_output or self.strict_length:
            return values
        at = picked.fields[INSIDE].reshape(-1)
        return values[torch.from_numpy(at) if isinstance(values, torch.Tensor) else at]

    def info(self, picked: Selection) -> dict[str, np.ndarray]:
        inside = picked.fields[INSIDE]
        known = {INDEX: self.flat(picked, picked.rows).copy()}
        if MASK in self.fields:
            known[MASK] = inside.reshape(-1).copy()
        if WEIGHT in self.fields:
            weights = np.broadcast_to(picked.fields[WEIGHT][:, None], inside.shape)
            known[WEIGHT] = np.array(self.flat(picked, weights))
        return known

    def marks(self, names: Collection[str], stored: Container[str]) -> set[str]:
        found = {key for key in (self.init_key, self.truncated_key) if key is not None and key != AUTO}
        if self.truncated_key is None:
            return found
        own = [] if self.truncated_key == AUTO else [f"{parent_of(self.truncated_key)}{last}" for last in ENDS]
        more = [] if self.end_key is None or self.end_key.rpartition("/")[2] not in DONE else [self.end_key]
        ends = {name for name in (*ends_among(names), *own, *more) if name in names}
        return found | {name for name in ends if name not in stored or name.rpartition("/")[2] != "terminated"}

    def firsts(self, picked: Selection) -> np.ndarray:
        """Marks rows of a batch that are the first of a slice, bool (n,)."""
        first = np.zeros_like(picked.fields[INSIDE])
        first[:, 0] = True
        return np.asarray(self.flat(picked, first))

    def lasts(self, picked: Selection) -> np.ndarray:
        """Marks rows of a batch that are the last of a slice, bool (n,)."""
        last = picked.fields[INSIDE].copy()
        last[:, :-1] &= ~last[:, 1:]
        return np.asarray(self.flat(picked, last))

    def cleared(self) -> None:
        super().cleared()
        self._slices.forget()

    def _shown(self) -> dict[str, Any]:
        size = {"num_slices": self.num_slices} if self.slice_len is None else {"slice_len": self.slice_len}
        kept = {"strict_length": self.strict_length, "pad_output": self.pad_output, "per": self.per}
        return size | kept | super()._shown()


@set_module("rlstructs.replay")
class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices of episodes in proportion to their first rows' priorities.

    A slice begins with a row that is followed by enough rows of its episode; without `strict_length`, also with the
    first row of a shorter episode. Every step of a slice has the `priority_weight` of its first row.

    Args:
        max_capacity, alpha, beta, eps, reduction, dtype, max_priority_within_buffer: see `PrioritizedSampler`.
        num_slices, slice_len, end_key, traj_key, strict_length, pad_output, truncated_key, init_key: see
            `SliceSampler`.
    """

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.7,
        beta: float = 0.5,
        eps: float = 1e-8,
        dtype: Any = None,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        **slices: Any,
    ) -> None:
        PrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        if "per" in slices:
            raise TypeError("per: priorities say where slices begin")
        SliceSampler.__init__(self, per=WINDOW, **slices)

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        view = storage.view()

        def fits(rows: np.ndarray) -> np.ndarray:
            fit = view.remaining(rows) >= length
            return fit if self.strict_length else fit | (view.depths(rows) == 0)

        rows, fields = self._of().pick(view, n, rng, fits, f"episode of {length} steps")
        around, inside = view.run(rows, length)
        return Selection(around, view, {INSIDE: inside, WEIGHT: self._weights(fields[LEAVES])})


@set_module("rlstructs.replay")
class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws one slice of every episode, in random order, and then begins again.

    A pass is over the episodes that exist when it begins, the unfinished one included. The slice of an episode is one
    of its windows, each with equal probability. An episode is left out if it has no slice any more when its turn comes.

    Args:
        drop_last: whether a pass ends before a batch that would have fewer slices.
        shuffle: whether the order is random; otherwise it is the order of the episodes in the buffer.
        replacement: must be False.
        num_slices, slice_len, end_key, traj_key, strict_length, pad_output, truncated_key, init_key: as of
            `SliceSampler`.

    Example:
        >>> from rlstructs.replay import DictTensorReplayBuffer
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, shuffle=False)
        >>> buffer = DictTensorReplayBuffer(sampler=sampler, batch_size=4)
        >>> rows = buffer.extend({"x": torch.arange(6), "done": torch.tensor([0, 1, 0, 1, 0, 1])})
        >>> [batch["x"].tolist() for batch in buffer]
        [[0, 1, 2, 3], [4, 5]]
    """

    def __init__(
        self, *, drop_last: bool = False, shuffle: bool = True, replacement: bool = False, **slices: Any
    ) -> None:
        if "per" in slices:
            raise TypeError("per: every trajectory gives one slice")
        SamplerWithoutReplacement.__init__(self, drop_last, shuffle, replacement=replacement)
        SliceSampler.__init__(self, per=TRAJECTORY, **slices)

    def draw(self, storage: Storage, n: int, length: int, rng: np.random.Generator) -> Selection:
        view = storage.view()
        latest = self._take(view, n, length, rng, lambda: self._latest(view, length))
        if not latest.size:
            raise SpecError(f"nothing to sample: no episode of {length} steps is stored")
        if self.drop_last and latest.size < n:
            there = f"there are {latest.size} episodes of {length} steps"
            raise SpecError(f"a batch is of {n} slices, {there}, and drop_last drops smaller batches")
        first = latest - view.depths(view.columns.at_steps(0, latest))
        rows, inside = view.run(view.columns.at_steps(0, rng.integers(first, latest + 1)), length)
        return Selection(rows, view, {INSIDE: inside})

    def _latest(self, view: View, length: int) -> np.ndarray:
        """Finds the latest first step of a slice of each episode.

        Returns int64 (n_episodes,).
        """
        low = int(view.low[0])
        begins = np.flatnonzero(view.depths(view.every_row()) == 0)
        bounds = np.unique(np.concatenate([[0], begins, [view.total]]))
        first, n_steps = bounds[:-1], np.diff(bounds)
        latest = np.maximum(n_steps - length, 0) + first
        return np.asarray(low + (latest[n_steps >= length] if self.strict_length else latest))

    def reordered(self) -> None:
        self.begin_pass()


def parent_of(name: str) -> str:
    """Returns the name of a column without its last part.

    "next/" for `next/done`, "" for `done`.
    """
    return name[: name.rfind("/") + 1]


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
