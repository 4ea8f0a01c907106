"""Buffers that pretend, as rows are read, that what was reached later was the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.public_names import set_module
from rlstructs.replay.columns import Spec
from rlstructs.replay.given import as_rows
from rlstructs.replay.reading import Reading, discounted, read_sources
from rlstructs.replay.snapshot import AnySnapshot, Snapshot
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.transitions import OBS, OBS_NEXT, REW, top
from rlstructs.replay.tianshou.vector import VectorReplayBuffer
from rlstructs.replay.values import from_bits, host_array

if TYPE_CHECKING:
    from typing_extensions import Self

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
Reward = Callable[[np.ndarray, np.ndarray], Any]


@set_module("rlstructs.replay")
class HERReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose samples are relabelled: Andrychowicz et al., Hindsight Experience Replay (2017).

    `obs` holds `achieved_goal` and `desired_goal`, of one shape. Of the episodes that are in a sample a share of
    1 - 1 / future_k gets a new goal: what is achieved after one of the steps from its last drawn row on, at most
    `horizon` - 1 after that. All rows of the episode that were drawn have that goal then, in `obs` and `obs_next`, and
    rewards that fit it, those of an n-step sum too. `terminated` stays. What is stored never changes: indexing and
    `get` give what was added.

    Args:
        size: how many rows.
        compute_reward_fn: from achieved goals after n steps and desired goals, (n, ...) each, to n rewards.
        horizon: most steps of an episode.
        future_k: how many relabelled episodes come for one that is not, plus one; at least 1.
        settings: as of `ReplayBuffer`.

    Raises:
        TypeError, SpecError: an argument is not what is needed.

    Example:
        >>> def reached(achieved, desired):
        ...     return (achieved == desired).all(axis=1).astype(float)
        >>> buffer = HERReplayBuffer(10, reached, horizon=3, future_k=1e9)
        >>> for t in range(3):
        ...     obs, after = ({"achieved_goal": [float(x)], "desired_goal": [9.0]} for x in (t, t + 1))
        ...     row = {"obs": obs, "obs_next": after, "act": 0, "rew": 0.0, "terminated": False, "truncated": t == 2}
        ...     _ = buffer.add(row)
        >>> batch, rows = buffer.sample(0)
        >>> batch.obs.desired_goal.ravel(), batch.rew
        (array([3., 3., 3.]), array([0., 0., 1.]))
        >>> buffer[:].obs.desired_goal.ravel()
        array([9., 9., 9.])
    """

    def __init__(
        self,
        size: int,
        compute_reward_fn: Reward,
        horizon: int,
        future_k: float = 8.0,
        *args: Any,
        **settings: Any,
    ) -> None:
        super().__init__(size, *args, **settings)
        if not callable(compute_reward_fn):
            raise TypeError(f"compute_reward_fn must be callable, got {compute_reward_fn!r}")
        if isinstance(future_k, bool) or not isinstance(future_k, (int, float, np.number)) or not future_k >= 1:
            raise SpecError(f"future_k must be a number of at least 1, got {future_k!r}")
        self.compute_reward_fn = compute_reward_fn
        self.horizon, self.future_k = check_count("horizon", horizon), float(future_k)

    @property
    def options(self) -> dict[str, Any]:
        own = {"compute_reward_fn": self.compute_reward_fn, "horizon": self.horizon, "future_k": self.future_k}
        return {**super().options, **own}

    @property
    def future_p(self) -> float:
        """The share of episodes that are relabelled; may be set at any time, and `future_k` with it."""
        return 1 - 1 / self.future_k

    @future_p.setter
    def future_p(self, future_p: float) -> None:
        if isinstance(future_p, bool) or not isinstance(future_p, (int, float, np.number)) or not 0 <= future_p <= 1:
            raise SpecError(f"future_p must be a number in [0, 1], got {future_p!r}")
        self.future_k = 1 / (1 - float(future_p)) if future_p < 1 else float("inf")

    @property
    def _is_as_indexed(self) -> bool:
        return False

    def _checked(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        for first in (OBS, OBS_NEXT):
            names = [name for name in rows if top(name) == first]
            goals = [f"{first}/{goal}" for goal in (ACHIEVED, DESIRED)]
            if names and (lacking := [goal for goal in goals if goal not in names]):
                raise MissingKeyError(f"key(s) {lacking} are missing, got {sorted(names)}")
            if names and rows[goals[0]].shape != rows[goals[1]].shape:
                shapes = [tuple(rows[goal].shape[2:]) for goal in goals]
                raise SpecError(f"{goals[0]!r} has shape {shapes[0]}, {goals[1]!r} has {shapes[1]}")
        return super()._checked(rows, unknown, missing)

    def _check_columns(self, specs: Mapping[str, Spec]) -> None:
        super()._check_columns(specs)
        for first in (OBS, OBS_NEXT):
            goals = [specs.get(f"{first}/{goal}") for goal in (ACHIEVED, DESIRED)]
            shapes = {None if goal is None else goal.shape for goal in goals}
            if any(top(name) == first for name in specs) and (None in shapes or len(shapes) > 1):
                raise ValueError(f"{first!r} has not two goals of one shape")

    def _read(self, rows: AnySnapshot, frames: np.ndarray) -> dict[str, Any]:
        assert isinstance(rows, Snapshot)
        arrays = super()._read(rows, frames)
        at = frames[:, -1]
        if not at.size:
            return arrays
        relabelled, sources = self._futures(rows, at)
        if relabelled.any():
            goals = self._achieved(rows, sources[relabelled])
            for first in (OBS, OBS_NEXT):
                name = f"{first}/{DESIRED}"
                values, _ = as_rows(name, goals, self._known_specs[name])
                values = self._storage.columns.converted(name, values, self._known_specs[name])
                stacked = arrays[name].ndim > values.ndim
                arrays[name][relabelled] = values[:, None] if stacked else values
            arrays[REW][relabelled] = self._rewarded(rows, at[relabelled], goals)
        return arrays

    def _futures(self, rows: Snapshot, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these rows are relabelled, bool (n,), and the rows whose achieved goals are theirs, int64 (n,)."""
        _, group = np.unique(rows.episodes_of(at), return_inverse=True)
        n_groups = int(group.max()) + 1
        # In the mean the share that it should be, of a single episode too.
        n_chosen = int(n_groups * self.future_p + self._rng.random())
        chosen = np.zeros(n_groups, bool)
        chosen[self._rng.choice(n_groups, n_chosen, replace=False)] = True
        last = np.lexsort((rows.span.steps(at), group))[np.cumsum(np.bincount(group)) - 1]  # of each group, its latest
        reach = np.minimum(rows.following(at[last]), self.horizon - 1)
        sources = rows.shifted(at[last], np.rint(self._rng.random(n_groups) * reach).astype(np.int64))
        return chosen[group], sources[group]

    def _achieved(self, rows: Snapshot, at: np.ndarray) -> np.ndarray:
        """What is achieved after these rows, (n, ...)."""
        name = f"{OBS_NEXT}/{ACHIEVED}"
        values = read_sources(rows, self._specs, {name: self._look().sources[name]}, at, Reading())[name]
        return from_bits(values) if self._known_specs[name].is_bfloat16 else np.asarray(values)

    def _rewarded(self, rows: Snapshot, at: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """The rewards of these rows if these are their goals, as their column holds them."""
        n_step, gamma = self._reading.n_step, self._reading.gamma
        window, inside, _ = rows.n_step(at, n_step)
        achieved = self._achieved(rows, window.reshape(-1))
        found = host_array("compute_reward_fn", self.compute_reward_fn(achieved, np.repeat(goals, n_step, axis=0)))
        spec = self._specs[REW]
        if found.shape[:1] != (window.size,) or found.size != window.size * int(np.prod(spec.shape)):
            raise SpecError(f"compute_reward_fn: gave shape {found.shape}, needed is {(window.size, *spec.shape)}")
        values, _ = as_rows(REW, found.reshape(*window.shape, *spec.shape), spec)
        rewards = self._storage.columns.converted(REW, values, spec)
        if n_step == 1:
            return np.asarray(rewards[:, 0])
        return np.asarray(discounted(REW, rewards, spec, inside, gamma))

    # Files

    @classmethod
    def load_hdf5(  # type: ignore[override]
        cls, path: str | Path, compute_reward_fn: Reward, device: Any = None
    ) -> Self:
        """As of `ReplayBuffer`; the function is in no file."""
        return cls._loaded(path, {"compute_reward_fn": compute_reward_fn, "device": device})

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "horizon": self.horizon, "future_k": self.future_k}


@set_module("rlstructs.replay")
class HERVectorReplayBuffer(VectorReplayBuffer, HERReplayBuffer):
    """A `HERReplayBuffer` of several environments, each in a ring of its own.

    Args:
        total_size, buffer_num: as of `VectorReplayBuffer`.
        compute_reward_fn, horizon, future_k: as of `HERReplayBuffer`.
        settings: as of `ReplayBuffer`.

    Example:
        >>> def distance(achieved, desired):
        ...     return -abs(achieved - desired).sum(axis=1)
        >>> HERVectorReplayBuffer(10, 2, compute_reward_fn=distance, horizon=5)
        HERVectorReplayBuffer(0 of 10 rows)
    """
