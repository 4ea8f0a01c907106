"""Returns and lengths of episodes, added up across rollouts."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.structures.arrays import arrays_of, find_true
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories

# The columns that `take` returns.
NAMES = ("return", "length", "env_index", "terminated", "truncated")
# The keys of steps that `EpisodeTracker` reads; RAW is the reward before `NormalizeReward`.
REWARD, RAW, DONE = "_observation/reward", "_observation/raw_reward", "_observation/done"
FLAGS = ("_observation/terminated", "_observation/truncated")
NAMES_OF_STEPS = (REWARD, RAW, DONE, *FLAGS)
# The number of latest episodes to keep if nobody takes them; older ones are dropped to save memory.
N_KEPT = 100_000
# Each rollout adds a block of small arrays. This many blocks are joined into one, which takes a tenth of the memory.
N_BLOCKS = 256


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
        # Of the episodes that have not ended yet, indexed by env_index.
        self._returns, self._lengths = np.zeros(0), np.zeros(0, np.int64)
        self._ended: list[tuple[np.ndarray, ...]] = []
        self._n_ended = 0
        self.n_dropped = 0  # episodes that were dropped because nobody took them
        # The number of episodes that ended since `take_means`, and the sums of their returns and lengths.
        self._sums = _NO_SUMS
        self._missing: str | None = None

    def forget(self, env_index: np.ndarray) -> None:
        """Forgets the episodes of these environments that have not ended."""
        known = env_index[env_index < self._returns.size]
        self._returns[known], self._lengths[known] = 0.0, 0

    def add(self, trajectories: Trajectories) -> None:
        """Adds the next steps of each environment; `env_index` in `info` names the environments."""
        steps, env_index = trajectories.trajectories._tensors, trajectories.info._tensors["env_index"].numpy()
        lengths = trajectories.trajectories.lengths.numpy()
        needed = (RAW if RAW in steps else REWARD, DONE)
        found = arrays_of(steps, needed)
        self._missing = next((key for key in needed if key not in found), None)
        if self._missing is None:
            self._missing = next((f"{key} of shape (B, T)" for key in needed if found[key].ndim != 2), None)
        if self._missing is not None or not env_index.size:
            return
        ascending = bool((env_index[1:] > env_index[:-1]).all())
        if not ascending and np.unique(env_index).size < env_index.size:
            # An environment has several rows, the earliest first.
            for row in range(env_index.size):
                self.add(trajectories.slice(row))
            return
        self._grow(int(env_index.max()) + 1)
        rewards, done = (found[key] for key in needed)
        n_timesteps = done.shape[1]
        # The last column stays 0: every row has a segment after its last end, which may be empty.
        padded = np.zeros((env_index.size, n_timesteps + 1))
        padded[:, :-1] = rewards
        shortest = int(lengths.min())
        if shortest < n_timesteps:
            padding = np.arange(shortest, n_timesteps) >= lengths[:, None]
            padded[:, shortest:-1][padding] = 0
            done = done.copy()
            done[:, shortest:][padding] = False
        rows, times = find_true(done)
        if not rows.size:  # the usual case where episodes are long
            self._returns[env_index] += padded.sum(axis=1)
            self._lengths[env_index] += lengths
            return
        flags = {name: flag[rows, times].astype(bool) for name, flag in arrays_of(steps, FLAGS).items()}
        terminated, truncated = (flags.get(name) for name in FLAGS)
        self._add(env_index, lengths, padded, rows, times, _flags(terminated, truncated, rows.size))

    def _add(
        self,
        env_index: np.ndarray,
        lengths: np.ndarray,
        rewards: np.ndarray,
        rows: np.ndarray,
        times: np.ndarray,
        flags: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Adds rewards (B, T+1) with the ends of K episodes.

        Rewards are 0 in the padding; the ends are at `rows` and `times`.
        """
        n_ends = np.bincount(rows, minlength=env_index.size)
        # Episodes divide the rows into B + K segments: in each row those that ended, then one that has not.
        last = np.arange(env_index.size) + n_ends.cumsum()
        ended = np.ones(env_index.size + rows.size, bool)
        ended[last] = False
        stops, starts = np.empty(ended.size, np.int64), np.zeros(ended.size, np.int64)
        stops[ended], stops[last] = times + 1, lengths
        starts[1:] = stops[:-1]
        first = last - n_ends
        starts[first] = 0
        of_row = np.repeat(np.arange(env_index.size), n_ends + 1)
        returns = np.add.reduceat(rewards.reshape(-1), of_row * rewards.shape[1] + starts)
        sizes = stops - starts
        returns[first] += self._returns[env_index]
        sizes[first] += self._lengths[env_index]
        self._returns[env_index], self._lengths[env_index] = returns[last], sizes[last]
        self._keep((returns[ended], sizes[ended], env_index[rows], *flags))

    def _keep(self, block: tuple[np.ndarray, ...]) -> None:
        n, returns, lengths = self._sums
        self._sums = n + block[0].size, returns + float(block[0].sum()), lengths + int(block[1].sum())
        self._ended.append(block)
        self._n_ended += block[0].size
        if len(self._ended) >= N_BLOCKS or self._n_ended > 2 * N_KEPT:
            n = min(self._n_ended, max(N_KEPT, block[0].size))
            self._ended = [tuple(np.concatenate(column)[-n:].copy() for column in zip(*self._ended, strict=True))]
            self.n_dropped += self._n_ended - n
            self._n_ended = n

    def _grow(self, n_envs: int) -> None:
        missing = n_envs - self._returns.size
        if missing > 0:
            self._returns = np.append(self._returns, np.zeros(missing))
            self._lengths = np.append(self._lengths, np.zeros(missing, np.int64))

    def take(self) -> DictTensor:
        """Returns and forgets the episodes that ended since the last call.

        One row each.

        If nobody takes them, at least the latest `N_KEPT` are kept, and all that the last `add` brought.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` and `truncated` bool, (K,).

        Raises:
            SpecError: the trajectories have no reward or done of shape (B, T).
        """
        if self._missing is not None:
            raise SpecError(f"episodes: the trajectories have no {self._missing}")
        ended, self._ended, self._n_ended = [_NONE, *self._ended], [], 0
        columns = (np.concatenate(column) for column in zip(*ended, strict=True))
        return DictTensor({name: torch.from_numpy(column) for name, column in zip(NAMES, columns, strict=True)})

    def take_means(self) -> dict[str, float]:
        """Returns the number of episodes since the last call, and their means.

        Counts also those that `take` has returned.

        Returns:
            `episode/count`, and unless that is 0 `episode/return` and `episode/length`; empty where steps do not tell.
        """
        if self._missing is not None:
            return {}
        (n, returns, lengths), self._sums = self._sums, _NO_SUMS
        means = {"episode/return": returns / n, "episode/length": lengths / n} if n else {}
        return {"episode/count": float(n), **means}

    def peek(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the episodes that `take` would return, without forgetting them."""
        self._ended = [tuple(np.concatenate(column) for column in zip(_NONE, *self._ended, strict=True))]
        return {name: torch.tensor(column, device="cpu") for name, column in zip(NAMES, self._ended[0], strict=True)}

    def put(self, episodes: dict[str, torch.Tensor], n_dropped: int) -> None:
        """Restores what `peek` returned, and forgets the episodes that have not ended."""
        block = tuple(episodes[name].detach().cpu().numpy().copy() for name in NAMES)
        self._ended, self._n_ended, self.n_dropped = [block], block[0].size, n_dropped
        self.forget(np.arange(self._returns.size))


_NO_SUMS = (0, 0.0, 0)
_NONE = tuple(np.zeros(0, dtype) for dtype in (np.float64, np.int64, np.int64, bool, bool))


def _flags(terminated: np.ndarray | None, truncated: np.ndarray | None, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns both flags of n steps that ended an episode.

    A missing flag is the opposite of the other.

    Without both, all of the episodes terminated.
    """
    if terminated is None:
        terminated = np.ones(n, bool) if truncated is None else ~truncated
    return terminated, ~terminated if truncated is None else truncated
