"""Checks that a batcher hands out exactly the transitions of its `FaultyEnv`s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlstructs.structures.arrays import as_array
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.testing.faulty_env import AT, CHECKSUM, ENV_INDEX, EPISODE, GENERATION, LIFE, N_FIELDS, checksum_of
from rlstructs.workers.public_names import set_module

Place = tuple[int, int, int, int]
FIELDS = ("environment", "generation", "episode", "step")


def verify(trajectories: Trajectories) -> None:
    """Checks that each transition of `FaultyEnv`s happened, and followed the one before.

    Args:
        trajectories: from `RL_Batcher.get`; only valid steps are checked.

    Raises:
        AssertionError: one is wrong; the message names the first such transition and its mistake.

    Example:
        >>> from rlstructs import RandomAgent, RL_Batcher
        >>> from rlstructs.testing import FaultyEnv, create_faulty_envs
        >>> with RL_Batcher(
        ...     n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={},
        ...     create_env=create_faulty_envs, env_args={"n_envs": 2}, n_processes=0, seeds=0,
        ... ) as batcher:
        ...     batcher.reset()
        ...     batcher.execute()
        ...     trajectories, _ = batcher.get()
        >>> verify(trajectories)
        >>> trajectories.trajectories["_observation/reward"][1, 2] += 1
        >>> verify(trajectories)
        Traceback (most recent call last):
        AssertionError: trajectory 1, t=2 (environment 1, generation 0, episode 0, step 2): the reward is not the step
    """
    steps = trajectories.trajectories
    valid = as_array(steps.mask(torch.bool))
    seen, after = _Observed.of(steps, "observation/"), _Observed.of(steps, "_observation/")
    found = []
    for message, where in _wrong(trajectories, seen, after):
        times, rows = np.nonzero((where & valid).T)
        if times.size:
            found.append((times[0], rows[0], message))
    if found:
        t, row, message = min(found, key=lambda one: one[:2])
        names = zip(FIELDS, seen.fields[row, t, :CHECKSUM].tolist(), strict=True)
        place = ", ".join(f"{name} {value:g}" for name, value in names)
        raise AssertionError(f"trajectory {row}, t={t} ({place}): {message}")


@dataclass
class _Observed:
    """One side of every transition: `fields` (B, T, 5), flags and rewards (B, T)."""

    fields: np.ndarray
    numbers: np.ndarray
    starts: np.ndarray
    done: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    reward: np.ndarray
    action: np.ndarray

    @classmethod
    def of(cls, steps: TemporalDictTensor, prefix: str) -> _Observed:
        names = ("frame", "initial_state", "done", "terminated", "truncated", "reward", "last_action")
        fields, *rest = (as_array(steps[prefix + name]) for name in names)
        if fields.shape[2:] != (N_FIELDS,):
            raise AssertionError(f"{prefix}frame has shape {fields.shape}, a FaultyEnv's would be (B, T, {N_FIELDS})")
        whole = np.isfinite(fields) & (fields >= 0) & (fields < 1 << 24)
        numbers = np.where(whole, fields, 0).astype(np.int64)
        numbers[(numbers != fields).any(axis=-1)] = -1  # which no checksum matches
        return cls(fields, numbers, *rest)

    def checksums(self, action: np.ndarray) -> np.ndarray:
        """Returns the right checksums for these actions.

        `action` is the previous one plus 1, or 0 after a reset.
        """
        env_index, generation, episode, step = (self.numbers[..., k] for k in range(CHECKSUM))
        return checksum_of(env_index, generation, episode, step, action)


def _wrong(batch: Trajectories, seen: _Observed, after: _Observed) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every possible mistake, and the transitions (B, T) that have it."""
    action = as_array(batch.trajectories["action/action"])
    env_index = as_array(batch.info["env_index"])[:, None]
    mine, theirs = seen.numbers, after.numbers
    led = np.where(seen.starts, 0, seen.action + 1)
    yield "the observation holds what no FaultyEnv gave", mine[..., CHECKSUM] != seen.checksums(led)
    yield "what followed holds what no FaultyEnv gave", theirs[..., CHECKSUM] != after.checksums(action + 1)
    yield "it is of another environment than env_index says", mine[..., ENV_INDEX] != env_index
    same = [ENV_INDEX, GENERATION, EPISODE]
    yield "what followed is of another episode", (mine[..., same] != theirs[..., same]).any(axis=-1)
    yield "what followed is not the next step", mine[..., AT] + 1 != theirs[..., AT]
    yield "the reward is not the step", after.reward != theirs[..., AT]
    yield "last_action is not the action", after.action != action
    yield "initial_state does not say whether this is step 0", seen.starts != (mine[..., AT] == 0)
    yield "initial_state is set after a step", after.starts
    yield "done is not terminated or truncated", after.done != (after.terminated | after.truncated)
    # The first transition of a row has none before it.
    follows, begins = np.ones((2, *after.done.shape), bool)
    follows[:, 1:] = after.done[:, :-1] | (theirs[:, :-1] == mine[:, 1:]).all(axis=-1)
    is_next = mine[:, 1:, EPISODE] == theirs[:, :-1, EPISODE] + 1
    # Of a new life, where an environment has failed in the reset that followed.
    is_next |= (mine[:, 1:, GENERATION] >= theirs[:, :-1, GENERATION] + LIFE) & (mine[:, 1:, EPISODE] == 0)
    begins[:, 1:] = ~after.done[:, :-1] | (seen.starts[:, 1:] & is_next)
    yield "the episode had ended before it, and another has to begin", ~begins
    yield "it is not what followed the transition before", ~follows


@set_module("rlstructs.testing")
class Ledger:
    """Verifies that batches hold every transition exactly once.

    Transitions may be missing only where a worker was replaced, because its successor begins anew, where an
    environment was made anew, and where the batcher was reset; call `Ledger.reset` then.

    Attributes:
        n_transitions: the number of transitions verified.
        generations: environment -> restart number of the worker that its last transition came from.

    Example:
        >>> from rlstructs import RandomAgent, RL_Batcher
        >>> from rlstructs.testing import FaultyEnv, create_faulty_envs
        >>> ledger = Ledger()
        >>> with RL_Batcher(
        ...     n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={},
        ...     create_env=create_faulty_envs, env_args={"n_envs": 2}, n_processes=0, seeds=0,
        ... ) as batcher:
        ...     batcher.reset()
        ...     for _ in range(5):
        ...         batcher.execute()
        ...         ledger.add(batcher.get()[0])
        >>> ledger.n_transitions, ledger.generations
        (40, {0: 0, 1: 0})
    """

    def __init__(self) -> None:
        self.n_transitions = 0
        # Of the next observation: the worker's restart number, the environment's restarts, episode and step.
        self._reached: dict[int, Place] = {}
        self._n_resets = 0
        self._n_resets_known: dict[int, int] = {}

    @property
    def generations(self) -> dict[int, int]:
        return {env_index: reached[0] for env_index, reached in self._reached.items()}

    def reset(self) -> None:
        """Expects every environment to begin a new episode, because the batcher was reset."""
        self._n_resets += 1

    def add(self, trajectories: Trajectories) -> None:
        """Verifies the next batch.

        Raises:
            AssertionError: a transition is wrong, or was handed out before, or one before it is missing.
        """
        verify(trajectories)
        steps, env_index = trajectories.trajectories, as_array(trajectories.info["env_index"]).tolist()
        seen, after = as_array(steps["observation/frame"]), as_array(steps["_observation/frame"])
        done = as_array(steps["_observation/done"])
        for row, length in enumerate(as_array(trajectories.lengths).tolist()):
            if length:
                self._check(row, env_index[row], _place(seen[row, 0]))
                restart, life, episode, step = _place(after[row, length - 1])
                has_ended = bool(done[row, length - 1])
                self._reached[env_index[row]] = restart, life, episode + has_ended, 0 if has_ended else step
                self._n_resets_known[env_index[row]] = self._n_resets
                self.n_transitions += length

    def _check(self, row: int, env_index: int, first: Place) -> None:
        """Raises unless the next trajectory of this environment may begin at `first`."""
        reached = self._reached.get(env_index, (0, 0, 0, 0))
        n_resets = self._n_resets - self._n_resets_known.get(env_index, 0)
        if first == reached:
            return
        message = (
            f"trajectory {row}: environment {env_index} begins with restart, life, episode and step {first}, "
            f"where {reached} comes next"
        )
        if first < reached:
            raise AssertionError(f"{message}: it was handed out before")
        latest = n_resets + (reached[2] if first[:2] == reached[:2] else 0)
        if first[3] or first[2] > latest:
            raise AssertionError(f"{message}: some are missing")


def _place(fields: np.ndarray) -> Place:
    """Restart number, life, episode and step of an observation."""
    generation, episode, step = (int(n) for n in fields[GENERATION : AT + 1])
    return generation % LIFE, generation // LIFE, episode, step
