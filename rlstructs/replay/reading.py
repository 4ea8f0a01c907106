"""From drawn rows to what a sample holds: n-step targets and stacks of frames are made when rows are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count, check_gamma
from rlstructs.errors import SpecError, StateError
from rlstructs.replay import expand
from rlstructs.replay.columns import Spec
from rlstructs.replay.roles import is_after, is_observation, is_reward, source_of
from rlstructs.replay.span import Span
from rlstructs.replay.store import Storage

# The column of gamma to the number of steps, which n-step samples have beside those that are stored.
DISCOUNT = "discount"


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        n_step: rewards become the discounted sum of so many steps, up to the end of the episode or the newest
            row; what comes after a step comes from the last of them.
        gamma: discount per step.
        stack_num: observations become the last so many of their episode, its first one repeated before that,
            on a new axis in front of their own.
        stack_keys: which observations; None for all.

    Raises:
        TypeError, SpecError: a number is not what is needed.
    """

    n_step: int = 1
    gamma: float = 0.99
    stack_num: int = 1
    stack_keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_count("n_step", self.n_step)
        check_count("stack_num", self.stack_num)
        check_gamma(self.gamma)

    @property
    def is_plain(self) -> bool:
        """Whether rows are read as they are stored."""
        return self.n_step == self.stack_num == 1

    def read(
        self, storage: Storage, span: Span, names: Sequence[str], rows: np.ndarray, discount: str = DISCOUNT
    ) -> dict[str, Any]:
        """What these columns hold for these rows.

        Args:
            storage: where they lie.
            span: the counters as they were when they were drawn.
            names: of columns.
            rows: int64, of any shape.
            discount: the name of gamma to the number of steps.

        Returns:
            name -> `(*rows.shape, *shape)`, stacked ones `(*rows.shape, stack_num, *shape)`; and `discount`,
            float32 `rows.shape`, if n_step is above 1.
        """
        if self.is_plain:
            return dict(zip(names, storage.gather(names, rows), strict=True))
        episodes = storage.episodes
        if episodes is None:
            raise StateError("nothing says where episodes end")
        anchors = rows.reshape(-1)
        window, counts = expand.n_step(span, episodes, anchors, self.n_step)
        last = window.rows[:, -1]
        arrays: dict[str, Any] = {}
        for name in names:
            if self.n_step > 1 and is_reward(name):
                [rewards] = storage.gather([name], window.rows)
                arrays[name] = discounted(name, rewards, storage.columns.specs[name], window.mask, self.gamma)
            else:
                arrays[name] = self._stacked(storage, span, name, last if is_after(name) else anchors)
        arrays = {name: array.reshape(*rows.shape, *array.shape[1:]) for name, array in arrays.items()}
        if self.n_step > 1:
            arrays[discount] = (self.gamma**counts).astype(np.float32).reshape(rows.shape)
        return arrays

    def earliest(self, storage: Storage, span: Span, rows: np.ndarray) -> np.ndarray:
        """The first row that is read for each of these, of the same shape."""
        if self.stack_num == 1 or storage.episodes is None:
            return rows
        frames = expand.stack(span, storage.episodes, rows.reshape(-1), self.stack_num).rows
        return frames[:, 0].reshape(rows.shape)

    def stacks(self, name: str) -> bool:
        """Whether a column is read in stacks."""
        is_meant = is_observation(name) if self.stack_keys is None else name in self.stack_keys
        return self.stack_num > 1 and is_meant

    def _stacked(self, storage: Storage, span: Span, name: str, rows: np.ndarray) -> Any:
        if not self.stacks(name) or storage.episodes is None:
            return storage.gather([name], rows)[0]
        source = source_of(name)
        frames = expand.stack(span, storage.episodes, rows, self.stack_num).rows
        if source is None or source not in storage.columns.specs:
            return storage.gather([name], frames)[0]
        # What was seen last comes after the step; what was seen before it, up to the step itself.
        [before] = storage.gather([source], frames[:, 1:])
        [after] = storage.gather([name], rows[:, None])
        return (np.concatenate if isinstance(after, np.ndarray) else torch.cat)([before, after], 1)


def discounted(name: str, rewards: Any, spec: Spec, inside: np.ndarray, gamma: float) -> Any:
    """The sum over t of gamma^t rewards (B, n, ...) where inside (B, n), of numpy or torch as they are.

    Raises:
        SpecError: they are no floats.
    """
    is_bits = spec.is_bfloat16
    if not is_bits and spec.dtype.kind not in "fc":
        raise SpecError(f"n_step: {name!r} is {spec.dtype}; discounted sums need a float")
    stored = rewards if isinstance(rewards, torch.Tensor) else torch.from_numpy(rewards)
    numbers = stored.view(torch.bfloat16) if is_bits else stored
    factors = torch.from_numpy(gamma ** np.arange(inside.shape[1]) * inside).to(stored.device)
    factors = factors.reshape(*factors.shape, *(1,) * (stored.ndim - 2))
    # What lies outside may be NaN, which times zero is NaN.
    summed = torch.where(factors > 0, numbers * factors, 0).sum(dim=1).to(numbers.dtype).view(stored.dtype)
    return summed if stored is rewards else summed.numpy()
