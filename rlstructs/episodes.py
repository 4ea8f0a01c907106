"""Returns and lengths of the episodes that ended, across rollouts."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.rows import as_array
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories

NEEDED = ("_observation/reward", "_observation/done")


class EpisodeTracker:
    """Adds up rewards per environment until an episode ends.

    Example:
        >>> from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
        >>> rows = TemporalDictTensor({
        ...     "_observation/reward": torch.ones(1, 5),
        ...     "_observation/done": torch.tensor([[False, True, False, False, True]]),
        ... })
        >>> tracker = EpisodeTracker()
        >>> tracker.add(Trajectories(DictTensor({"env_index": torch.tensor([7])}), rows))
        >>> tracker.take()["return"].tolist()
        [2.0, 3.0]
    """

    def __init__(self) -> None:
        # By env_index: of the episode that has not ended yet.
        self._returns, self._lengths = np.zeros(0), np.zeros(0, np.int64)
        self._ended: list[tuple[np.ndarray, ...]] = []
        self._missing: str | None = None

    def reset(self) -> None:
        """Forgets the episodes that have not ended."""
        self._returns[:], self._lengths[:] = 0.0, 0

    def forget(self, env_index: np.ndarray) -> None:
        """Forgets the episodes of these environments that have not ended."""
        known = env_index[env_index < self._returns.size]
        self._returns[known], self._lengths[known] = 0.0, 0

    def add(self, trajectories: Trajectories) -> None:
        """Takes the next steps of each environment; `env_index` in `info` says whose they are."""
        steps, env_index = trajectories.trajectories, as_array(trajectories.info["env_index"])
        self._missing = next((key for key in NEEDED if key not in steps), None)
        if self._missing is None and steps["_observation/reward"].ndim != 2:
            self._missing = "_observation/reward of shape (B, T)"
        if self._missing is not None or not env_index.size:
            return
        if np.unique(env_index).size < env_index.size:  # an environment's rows follow each other in time
            for row in range(env_index.size):
                self.add(trajectories.slice(row))
            return
        self._grow(int(env_index.max()) + 1)
        lengths = as_array(steps.lengths)
        valid = np.arange(steps.n_timesteps()) < lengths[:, None]
        rewards = as_array(steps["_observation/reward"])[valid].astype(np.float64)
        done = as_array(steps["_observation/done"])[valid]
        flags = _flags(done, *(
            as_array(steps[key])[valid] if key in steps else None
            for key in ("_observation/terminated", "_observation/truncated")
        ))  # fmt: skip
        self._add(env_index, lengths, rewards, done, flags)

    def _add(
        self, env_index: np.ndarray, lengths: np.ndarray, rewards: np.ndarray, done: np.ndarray, flags: list[np.ndarray]
    ) -> None:
        firsts = np.cumsum(lengths) - lengths
        # A segment is what one row holds of one episode: it starts with the row, or after an end.
        starts = np.union1d(firsts[lengths > 0], np.flatnonzero(done) + 1)
        starts = starts[starts < rewards.size]
        if not starts.size:
            return
        returns, stops = np.add.reduceat(rewards, starts), np.append(starts[1:], rewards.size)
        sizes, last_steps = stops - starts, stops - 1
        owners = env_index[np.searchsorted(firsts, starts, side="right") - 1]
        changes = owners[1:] != owners[:-1]
        is_first, is_last = np.append(True, changes), np.append(changes, True)
        returns[is_first] += self._returns[owners[is_first]]
        sizes[is_first] += self._lengths[owners[is_first]]
        ends = done[last_steps]
        self._ended.append(
            (returns[ends], sizes[ends], owners[ends], *(flag[last_steps][ends] for flag in flags))
        )
        left = is_last & ~ends
        self._returns[owners[is_last]], self._lengths[owners[is_last]] = 0.0, 0
        self._returns[owners[left]], self._lengths[owners[left]] = returns[left], sizes[left]

    def _grow(self, n_envs: int) -> None:
        missing = n_envs - self._returns.size
        if missing > 0:
            self._returns = np.append(self._returns, np.zeros(missing))
            self._lengths = np.append(self._lengths, np.zeros(missing, np.int64))

    def take(self) -> DictTensor:
        """The episodes that ended since the last call, one row each, and forgets them.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` and `truncated` bool, (K,).

        Raises:
            SpecError: the environment gives no reward or done.
        """
        if self._missing is not None:
            raise SpecError(f"episodes: the trajectories have no {self._missing}")
        ended, self._ended = [_NONE, *self._ended], []
        names = ("return", "length", "env_index", "terminated", "truncated")
        columns = (np.concatenate(column) for column in zip(*ended, strict=True))
        return DictTensor({name: torch.from_numpy(column) for name, column in zip(names, columns, strict=True)})


_NONE = tuple(np.zeros(0, dtype) for dtype in (np.float64, np.int64, np.int64, bool, bool))


def _flags(done: np.ndarray, terminated: np.ndarray | None, truncated: np.ndarray | None) -> list[np.ndarray]:
    """Both flags of each step; what the environment does not tell is taken from the rest."""
    if terminated is None:
        terminated = done if truncated is None else done & ~truncated
    return [terminated, done & ~terminated if truncated is None else truncated]
