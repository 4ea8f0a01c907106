"""Evaluates a copy of the agent in separate environments, between training rollouts."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

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
    """Returns the number of episodes for each environment, as equal as possible, int64 (n_envs,).

    To take the first `n_episodes` that end would favour short episodes.

    Example:
        >>> quotas(7, 3).tolist()
        [3, 2, 2]
    """
    return np.full(n_envs, n_episodes // n_envs) + (np.arange(n_envs) < n_episodes % n_envs)


class Standing(NamedTuple):
    """The progress of an evaluation: three int64 arrays (N,), a number for each environment.

    Attributes:
        ended: its episodes that have ended, wanted or not.
        waited: the timesteps since its last step, for example of an absent agent; 0 while it steps.
        steps: the timesteps since the evaluation began.
    """

    ended: np.ndarray
    waited: np.ndarray
    steps: np.ndarray


class Evaluation:
    """One worker's part of an evaluation.

    Args:
        create_env: makes E environments for the evaluation; they are closed at the end.
        agent: makes the copy that acts, by `copy_for_evaluation`.
        layout: layout of the batcher's slots.
        seed: seeds the global streams of the evaluation; the worker's own streams do not change.
        n_envs: E.
        max_steps: the most timesteps; None for no end.
        infos: `agent_info` and `env_info`, E rows each, or empty.
        device: where the agent wants observations; None for the CPU.
    """

    def __init__(
        self,
        create_env: Callable[[], RowEnv],
        agent: RL_Agent,
        layout: Layout,
        seed: int,
        n_envs: int,
        max_steps: int | None,
        infos: dict[str, DictTensor],
        device: torch.device | None,
    ) -> None:
        self._infos, self._device, self._max_steps = infos, device, max_steps
        self._ended, self._waited, self._n_steps = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.int64), 0
        self._tracker, self._episodes = EpisodeTracker(), [EpisodeTracker().take()]
        self._streams = PrivateStreams()
        self._progress: Progress | None = None
        own = replace(layout, n_slots=n_envs)
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

    def advance(self, wanted: np.ndarray) -> Standing:
        """Runs up to T more steps of each environment, if episodes are missing.

        `wanted`, int64 (E,), is the number of episodes of each environment.
        """
        if (self._ended < wanted).any() and self._n_steps != self._max_steps:
            self._advance()
        return Standing(self._ended, self._waited, np.full(self._slots.n, self._n_steps))

    def _advance(self) -> None:
        with self._streams():
            if self._progress is None or not self._progress.running.size:
                observation = self._env.reset_rows(self._infos["env_info"])
                self._progress = Progress(observation, np.arange(self._slots.n))
            rows, n_before = self._progress.running, self._n_steps
            acting_agent = ActingAgent(self._agent, self._device, is_cut=self._count_step)
            info = self._infos["agent_info"]
            [self._progress] = acquire(acting_agent, [self._env], [self._slots], [self._progress], info)
        lengths = self._slots.lengths[rows]
        self._n_steps += not self._progress.running.size  # the last step was not counted
        self._waited[rows] = np.where(lengths, 0, self._waited[rows] + self._n_steps - n_before)
        steps = self._slots.lend(None if rows.size == self._slots.n else rows, int(lengths.max()))
        info = DictTensor.trusted({"env_index": torch.from_numpy(rows)})
        self._tracker.add(Trajectories.trusted(info, TemporalDictTensor.trusted(steps, torch.from_numpy(lengths))))
        self._episodes.append(self._tracker.take())
        self._ended += np.bincount(self._episodes[-1]["env_index"].numpy(), minlength=self._slots.n)
        if (failed := self._env.failed_rows).size:
            self._tracker.forget(failed)
            with self._streams():
                self._progress = self._progress.join(*self._env.revive_rows(failed))

    def _count_step(self) -> bool:
        """Counts a timestep; returns whether it is the last one."""
        self._n_steps += 1
        return self._n_steps == self._max_steps

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
    """Seeds an agent if it has a method `seed`.

    Agents that do not derive from `RL_Agent` may lack one.
    """
    if callable(getattr(agent, "seed", None)):
        agent.seed(seed)
