"""Evaluates a copy of the agent in separate environments, between training rollouts."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstructs.agent import RL_Agent, copy_agent
from rlstructs.envs.row_env import RowEnv
from rlstructs.episodes import EpisodeTracker
from rlstructs.rollout.progress import Progress
from rlstructs.rollout.rollout import ActingAgent, acquire
from rlstructs.seeding import PrivateStreams, seed_global_streams
from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import Slots
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories


def quotas(n_episodes: int, n_envs: int) -> np.ndarray:
    """The number of episodes for each environment, as equal as possible, int64 (n_envs,).

    To take the first `n_episodes` that end would favour short episodes.

    Example:
        >>> quotas(7, 3).tolist()
        [3, 2, 2]
    """
    return np.full(n_envs, n_episodes // n_envs) + (np.arange(n_envs) < n_episodes % n_envs)


class Evaluation:
    """One worker's part of an evaluation.

    Args:
        create_env: makes E environments for the evaluation; they are closed at the end.
        agent: makes the copy that acts, by `copy_for_evaluation`.
        layout: layout of the batcher's slots.
        seed: seeds the global streams of the evaluation; the worker's own streams do not change.
        wanted: int64 (E,), the number of episodes for each environment.
        infos: `agent_info` and `env_info`, E rows each, or empty.
        device: where the agent wants observations; None for the CPU.
    """

    def __init__(
        self,
        create_env: Callable[[], RowEnv],
        agent: RL_Agent,
        layout: Layout,
        seed: int,
        wanted: np.ndarray,
        infos: dict[str, DictTensor],
        device: torch.device | None,
    ) -> None:
        self._left, self._infos, self._device = wanted.copy(), infos, device
        self._tracker, self._episodes = EpisodeTracker(), [EpisodeTracker().take()]
        self._streams = PrivateStreams()
        self._progress: Progress | None = None
        own = replace(layout, n_slots=wanted.size)
        self._slots = Slots(own, mmap.mmap(-1, own.reserved_nbytes))
        with self._streams():
            seed_global_streams(seed, None)
            self._agent = copy_agent(agent)
            seed_agent(self._agent, seed)
            try:
                self._env = create_env()
            except BaseException:
                self._agent.close()
                raise

    def advance(self) -> bool:
        """Runs up to T more steps of each environment; returns whether all wanted episodes have ended."""
        if not self._left.any():
            return True
        with self._streams():
            if self._progress is None or not self._progress.running.size:
                observation = self._env.reset_rows(self._infos["env_info"])
                self._progress = Progress(observation, np.arange(self._slots.n))
            rows = self._progress.running
            acting_agent = ActingAgent(self._agent, self._device)
            self._progress = acquire(acting_agent, self._env, self._slots, self._progress, self._infos["agent_info"])
        lengths = torch.from_numpy(self._slots.lengths[rows])
        steps = self._slots.lend(None if rows.size == self._slots.n else rows, int(lengths.max()))
        info = DictTensor.trusted({"env_index": torch.from_numpy(rows)})
        self._tracker.add(Trajectories.trusted(info, TemporalDictTensor.trusted(steps, lengths)))
        self._keep(self._tracker.take())
        return not self._left.any()

    def _keep(self, ended: DictTensor) -> None:
        """Keeps the wanted episodes of those that ended; episodes of one environment are adjacent."""
        rows = ended["env_index"].numpy()
        numbers = np.arange(rows.size) - np.searchsorted(rows, rows)
        taken = np.flatnonzero(numbers < self._left[rows])
        self._left -= np.bincount(rows[taken], minlength=self._left.size)
        self._episodes.append(ended.index(torch.from_numpy(taken)))

    def close(self) -> dict[str, Any]:
        """Closes agent and environments; returns the columns of `EpisodeTracker.take`, sorted by environment."""
        try:
            self._agent.close()
        finally:
            self._env.close()
        episodes = DictTensor.cat(self._episodes)
        order = torch.argsort(episodes["env_index"], stable=True)
        return dict(episodes.index(order).numpy())


def seed_agent(agent: RL_Agent, seed: int) -> None:
    """Seeds an agent if it has a method `seed`; an agent that does not derive from `RL_Agent` may lack one."""
    if callable(getattr(agent, "seed", None)):
        agent.seed(seed)
