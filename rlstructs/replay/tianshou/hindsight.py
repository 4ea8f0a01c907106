"""Buffers that relabel samples with goals that were reached later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.draw.plan import Fields, Selection
from rlstructs.replay.draw.reading import discounted, read_sources
from rlstructs.replay.draw.view import AnyView, View
from rlstructs.replay.intake.arrays import as_rows, from_bits, host_array
from rlstructs.replay.tianshou.options import forward, reading_of
from rlstructs.replay.tianshou.reader import Reader
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.transitions import OBS, OBS_NEXT, REW, sources_of, top
from rlstructs.replay.tianshou.vector import VectorReplayBuffer
from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from typing_extensions import Self

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
# Of each drawn row: whether it gets another goal, and the row whose achieved goal that is.
RELABELLED, SOURCES = "relabelled", "sources"
Reward = Callable[[np.ndarray, np.ndarray], Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def check_goals(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises MissingKeyError or SpecError unless observations have two goals of one shape.

    Args:
        shapes: name -> shape of a row.
    """
    for first in (OBS, OBS_NEXT):
        names = [name for name in shapes if top(name) == first]
        goals = [f"{first}/{goal}" for goal in (ACHIEVED, DESIRED)]
        if names and (lacking := [goal for goal in goals if goal not in names]):
            raise MissingKeyError(f"key(s) {lacking} are missing, got {sorted(names)}")
        if names and shapes[goals[0]] != shapes[goals[1]]:
            raise SpecError(f"{goals[0]!r} has shape {shapes[goals[0]]}, {goals[1]!r} has {shapes[goals[1]]}")


class HindsightReader(Reader):
    """Relabels samples.

    Args:
        plain: the reader of the buffer so far.
        compute_reward_fn, horizon, future_k: see `HERReplayBuffer`; may be set.

    Raises:
        TypeError, SpecError: an argument is invalid.
    """

    relabels = True

    def __init__(self, plain: Reader, compute_reward_fn: Reward, horizon: int, future_k: float) -> None:
        super().__init__(plain.table, plain.options, plain.export, plain.stream)
        if not callable(compute_reward_fn):
            raise TypeError(f"compute_reward_fn must be callable, got {compute_reward_fn!r}")
        if not _is_number(future_k) or not future_k >= 1:
            raise SpecError(f"future_k must be a number of at least 1, got {future_k!r}")
        self.compute_reward_fn = compute_reward_fn
        self.horizon, self.future_k = check_count("horizon", horizon), float(future_k)

    def relabelling(self, rows: AnyView, at: np.ndarray) -> Fields:
        assert isinstance(rows, View)
        if not at.size:
            return {}
        relabelled, sources = self._futures(rows, at)
        return {RELABELLED: relabelled, SOURCES: sources}

    def read_drawn(self, picked: Selection) -> dict[str, Any]:
        arrays, rows, at = super().read_drawn(picked), picked.view, picked.rows[:, -1]
        relabelled = picked.fields.get(RELABELLED, np.zeros(0, bool))
        if relabelled.any():
            goals = self._achieved(rows, picked.fields[SOURCES][relabelled])
            for first in (OBS, OBS_NEXT):
                name = f"{first}/{DESIRED}"
                spec = self.table.specs[name]
                values = self.table.storage.columns.converted(name, as_rows(name, goals, spec)[0], spec)
                stacked = arrays[name].ndim > values.ndim
                arrays[name][relabelled] = values[:, None] if stacked else values
            arrays[REW][relabelled] = self._rewards_of(rows, at[relabelled], goals)
        return arrays

    def _futures(self, rows: View, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Marks rows to be relabelled, bool (n,), and chooses their goals.

        Also returns the rows whose achieved goals they get, int64 (n,).
        """
        (_, group), rng = np.unique(rows.episodes_of(at), return_inverse=True), self.stream.generator
        n_groups = int(group.max()) + 1
        # The expected share is exact, even for a single episode.
        n_chosen = int(n_groups * (1 - 1 / self.future_k) + rng.random())
        chosen = np.zeros(n_groups, bool)
        chosen[rng.choice(n_groups, n_chosen, replace=False)] = True
        last = np.lexsort((rows.steps(at), group))[np.cumsum(np.bincount(group)) - 1]  # the latest of each group
        reach = np.minimum(rows.remaining(at[last]) - 1, self.horizon - 1)
        sources = rows.columns.shifted(at[last], np.rint(rng.random(n_groups) * reach).astype(np.int64))
        return chosen[group], sources[group]

    def _achieved(self, rows: View, at: np.ndarray) -> np.ndarray:
        """Returns the goals that are achieved after these rows, (n, ...)."""
        name = f"{OBS_NEXT}/{ACHIEVED}"
        table, sources = self.table, sources_of((name,), tuple(self.table.columns))
        values = read_sources(rows, table.gather, table.columns, sources, at, reading_of())[name]
        return from_bits(values) if self.table.specs[name].is_bfloat16 else np.asarray(values)

    def _rewards_of(self, rows: View, at: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """Computes the rewards of these rows for these goals, in stored form."""
        n_step, gamma = self.options.n_step, self.options.gamma
        window, inside = rows.run(at, n_step)
        achieved = self._achieved(rows, window.reshape(-1))
        given = self.compute_reward_fn(achieved, np.repeat(goals, n_step, axis=0))
        found, spec = host_array("compute_reward_fn", given), self.table.columns[REW]
        if found.shape[:1] != (window.size,) or found.size != window.size * int(np.prod(spec.shape)):
            raise SpecError(f"compute_reward_fn: gave shape {found.shape}, expected {(window.size, *spec.shape)}")
        values, _ = as_rows(REW, found.reshape(*window.shape, *spec.shape), spec)
        rewards = self.table.storage.columns.converted(REW, values, spec)
        if n_step == 1:
            return np.asarray(rewards[:, 0])
        return np.asarray(discounted(REW, rewards, spec, inside, gamma))


@set_module("rlstructs.replay")
class HERReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` whose samples get new goals (hindsight experience replay).

    Andrychowicz et al., Hindsight Experience Replay (2017).

    `obs` holds `achieved_goal` and `desired_goal`, of one shape. In a sample, a share of 1 - 1 / future_k of the
    episodes gets a new goal: one achieved by a step from the episode's last drawn row on, at most `horizon` - 1 steps
    later. All drawn rows of the episode then have this goal in `obs` and `obs_next`, and rewards for it, also in n-step
    sums. `terminated` stays. Stored rows never change: indexing and `get` return them as they were added.

    Args:
        size: number of rows.
        compute_reward_fn: from achieved goals after n steps and desired goals, (n, ...) each, to n rewards.
        horizon: most steps of an episode.
        future_k: one in so many episodes keeps its own goal; at least 1.
        settings: see `ReplayBuffer`.

    Raises:
        TypeError, SpecError: an argument is invalid.

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

    _reader: HindsightReader

    def __init__(
        self, size: int, compute_reward_fn: Reward, horizon: int, future_k: float = 8.0, *args: Any, **settings: Any
    ) -> None:
        super().__init__(size, *args, **settings)
        self._reader = HindsightReader(self._reader, compute_reward_fn, horizon, future_k)
        self._intake.check_shapes = check_goals

    compute_reward_fn: Reward = forward("_reader", "compute_reward_fn", "Computes rewards of goals.")
    horizon: int = forward("_reader", "horizon", "Most steps of an episode.")
    future_k: float = forward("_reader", "future_k", "Number of relabelled episodes for each other one, plus one.")

    @property
    def options(self) -> dict[str, Any]:
        own = {"compute_reward_fn": self.compute_reward_fn, "horizon": self.horizon, "future_k": self.future_k}
        return {**super().options, **own}

    @property
    def future_p(self) -> float:
        """The share of episodes that are relabelled.

        It may be set at any time; `future_k` changes with it.
        """
        return 1 - 1 / self.future_k

    @future_p.setter
    def future_p(self, future_p: float) -> None:
        if not _is_number(future_p) or not 0 <= future_p <= 1:
            raise SpecError(f"future_p must be a number in [0, 1], got {future_p!r}")
        self.future_k = 1 / (1 - float(future_p)) if future_p < 1 else float("inf")

    # Files

    @classmethod
    def load_hdf5(  # type: ignore[override]
        cls, path: str | Path, compute_reward_fn: Reward, device: Any = None
    ) -> Self:
        """Loads a file of `ReplayBuffer.save_hdf5`; the reward function is not in it."""
        return cls._load_new(path, {"compute_reward_fn": compute_reward_fn, "device": device})

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "horizon": self.horizon, "future_k": self.future_k}


@set_module("rlstructs.replay")
class HERVectorReplayBuffer(VectorReplayBuffer, HERReplayBuffer):
    """A `HERReplayBuffer` of several environments, each in a ring of its own.

    Args:
        total_size, buffer_num: see `VectorReplayBuffer`.
        compute_reward_fn, horizon, future_k: see `HERReplayBuffer`.
        settings: see `ReplayBuffer`.

    Example:
        >>> def distance(achieved, desired):
        ...     return -abs(achieved - desired).sum(axis=1)
        >>> HERVectorReplayBuffer(10, 2, compute_reward_fn=distance, horizon=5)
        HERVectorReplayBuffer(0 of 10 rows)
    """
