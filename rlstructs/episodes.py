"""Returns and lengths of the episodes that ended, across rollouts."""

from __future__ import annotations

import numpy as np
import torch

from rlstructs.errors import SpecError
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
        self._open: dict[int, tuple[float, int]] = {}
        self._ended: list[tuple[float, int, int, bool, bool]] = []
        self._missing: str | None = None

    def reset(self) -> None:
        """Forgets the episodes that have not ended."""
        self._open.clear()

    def add(self, trajectories: Trajectories) -> None:
        """Takes the next steps of each environment; `env_index` in `info` says whose they are."""
        steps, env_index = trajectories.trajectories, trajectories.info["env_index"].tolist()
        self._missing = next((key for key in NEEDED if key not in steps), None)
        if self._missing is None and steps["_observation/reward"].ndim != 2:
            self._missing = "_observation/reward of shape (B, T)"
        if self._missing is not None or not env_index:
            return
        valid = steps.mask(torch.bool).cpu()
        rewards = steps["_observation/reward"].cpu()[valid].double().numpy()
        done = steps["_observation/done"].cpu()[valid].numpy()
        flags = _flags(done, *(
            steps[key].cpu()[valid].numpy() if key in steps else None
            for key in ("_observation/terminated", "_observation/truncated")
        ))  # fmt: skip
        lengths = steps.lengths.cpu().numpy()
        firsts = np.cumsum(lengths) - lengths
        # A segment is what one row holds of one episode: it starts with the row, or after an end.
        starts = np.union1d(firsts[lengths > 0], np.flatnonzero(done) + 1)
        starts = starts[starts < rewards.size]
        if not starts.size:
            return
        sums = np.add.reduceat(rewards, starts)
        stops = np.append(starts[1:], rewards.size)
        owners = np.searchsorted(firsts, starts, side="right") - 1
        for owner, start, stop, total in zip(owners, starts, stops, sums, strict=True):
            self._segment(env_index[owner], float(total), int(stop - start), int(stop) - 1, done, flags)

    def _segment(
        self, env: int, total: float, length: int, last: int, done: np.ndarray, flags: list[np.ndarray]
    ) -> None:
        before, steps = self._open.pop(env, (0.0, 0))
        if done[last]:
            self._ended.append(
                (before + total, steps + length, env, bool(flags[0][last]), bool(flags[1][last]))
            )
        else:
            self._open[env] = before + total, steps + length

    def take(self) -> DictTensor:
        """The episodes that ended since the last call, one row each, and forgets them.

        Returns:
            `return` float64, `length` int64, `env_index` int64, `terminated` and `truncated` bool, (K,).

        Raises:
            SpecError: the environment gives no reward or done.
        """
        if self._missing is not None:
            raise SpecError(f"episodes: the trajectories have no {self._missing}")
        ended, self._ended = self._ended, []
        columns = list(zip(*ended, strict=True)) or [()] * 5
        dtypes = (torch.float64, torch.int64, torch.int64, torch.bool, torch.bool)
        names = ("return", "length", "env_index", "terminated", "truncated")
        return DictTensor(
            {n: torch.tensor(c, dtype=d) for n, c, d in zip(names, columns, dtypes, strict=True)}
        )


def _flags(done: np.ndarray, terminated: np.ndarray | None, truncated: np.ndarray | None) -> list[np.ndarray]:
    """Both flags of each step; what the environment does not tell is taken from the rest."""
    if terminated is None:
        terminated = done if truncated is None else done & ~truncated
    return [terminated, done & ~terminated if truncated is None else truncated]
