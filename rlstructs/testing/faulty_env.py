"""`FaultyEnv`: an environment that counts its steps and fails on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.envs.gym_env import GymEnv, GymEnvInf
from rlstructs.testing.faults import CLOSE, INIT, RESET, STEP, Damage, Fault
from rlstructs.workers.public_names import set_module

# Indexes of the numbers in an observation.
ENV_INDEX, GENERATION, EPISODE, AT, CHECKSUM = range(5)
N_FIELDS = 5
# The generation is the worker's restart number, plus this number for each time that the environment was made anew.
LIFE = 4096
N_ACTIONS = 5

Numbers = TypeVar("Numbers", int, np.ndarray)


def checksum_of(env_index: Numbers, generation: Numbers, episode: Numbers, step: Numbers, action: Numbers) -> Numbers:
    """The last number of an observation, below 2**24, so that float32 holds it exactly.

    Args:
        env_index, generation, episode, step: of the observation.
        action: the one before the observation, plus 1; 0 after a reset.
    """
    total = env_index * 0  # 0 of the same type: int, or int64 array
    for part in (env_index, generation, episode, step, action):
        total = (total * 1_103_515_245 + part + 12_345) % 2_147_483_647
    return total % (1 << 24)


@set_module("rlstructs.testing")
class FaultyEnv(gymnasium.Env):  # type: ignore[misc]
    """Counts its steps, and fails where its faults say so.

    An observation is float32 (5,): `[index of the environment, generation, episode, step, checksum]`,
    where the checksum is `checksum_of` the others and the action. Step s of an episode gives reward s; the last step is
    `length`. From this `verify` and `Ledger` can tell whether a transition has really happened.

    Args:
        faults: what goes wrong.
        worker: index of the worker it runs in.
        generation: restart number of that worker, how many were in its place before; and 4096 for each time that this
            environment was made anew.
        env_index: its index among all environments.
        length: of each episode, in steps.
        truncates: whether episodes are truncated at their end, not terminated.

    Example:
        >>> env = FaultyEnv([Fault("raise", at="step", count=2, error=KeyError("lost"))], env_index=7)
        >>> env.reset()[0][:4].tolist()
        [7.0, 0.0, 0.0, 0.0]
        >>> env.step(0)[1]
        1.0
        >>> env.step(0)
        Traceback (most recent call last):
        KeyError: 'lost'
    """

    action_space = spaces.Discrete(N_ACTIONS)
    observation_space = spaces.Box(0, 1 << 24, (N_FIELDS,), np.float32)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        worker: int = 0,
        generation: int = 0,
        env_index: int = 0,
        length: int = 10,
        truncates: bool = False,
    ) -> None:
        where = {"worker": worker, "env_index": env_index, "generation": generation}
        self.faults = [fault for fault in faults if fault.concerns(**where)]
        self.generation, self.env_index = generation, env_index
        self.length, self.truncates = length, truncates
        self.episode, self.steps = -1, 0
        self.damage = Damage()
        self._counts = {INIT: 0, RESET: 0, STEP: 0, CLOSE: 0}
        try:
            self._strike(INIT)
        except BaseException:
            self.damage.end()  # nobody can call `close`
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts the next episode; ignores the seed, because nothing is random."""
        self.episode, self.steps = self.episode + 1, 0
        return self._spoil(self._observation(0), self._strike(RESET)), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Counts one more step."""
        self.steps += 1
        faults = self._strike(STEP)
        ended = self.steps >= self.length
        observation = self._spoil(self._observation(int(action) + 1), faults)
        reward = float("nan") if "nan" in faults else float(self.steps)
        return observation, reward, ended and not self.truncates, ended and self.truncates, {}

    def close(self) -> None:
        """Ends the processes that faults have started."""
        try:
            self._strike(CLOSE)
        finally:
            self.damage.end()

    def _strike(self, at: str) -> list[str]:
        """Carries out the faults of this call; returns their kinds."""
        self._counts[at] += 1
        struck = [fault for fault in self.faults if fault.strikes(at, self._counts[at])]
        for fault in struck:
            self.damage.do(fault)
        return [fault.kind for fault in struck]

    def _observation(self, action: int) -> np.ndarray:
        fields = self.env_index, self.generation, self.episode, self.steps
        return np.array([*fields, checksum_of(*fields, action)], np.float32)

    @staticmethod
    def _spoil(observation: np.ndarray, faults: list[str]) -> np.ndarray:
        if "nan" in faults:
            observation = np.full_like(observation, np.nan)
        return np.append(observation, np.float32(0)) if "shape" in faults else observation


def create_faulty_envs(
    n_envs: int,
    seed: int,
    faults: Sequence[Fault] = (),
    *,
    length: int = 10,
    truncates: bool = False,
    autoreset: bool = True,
) -> GymEnv:
    """Makes the environments of one worker; a `create_env` for `RL_Batcher`.

    Args:
        n_envs: how many.
        seed: the seed that a batcher with one int as `seeds` gives to a worker; it says which worker this is. Any
            other int means worker 0.
        faults: as for `FaultyEnv`.
        length: of each episode, in steps.
        truncates: whether episodes are truncated at their end.
        autoreset: whether to make a `GymEnvInf`; otherwise a `GymEnv`.

    Example:
        >>> from rlstructs import RandomAgent, RL_Batcher
        >>> arguments = {"n_envs": 2, "faults": [Fault("raise", at="step", count=3, worker=1, error=OSError("gone"))]}
        >>> with RL_Batcher(
        ...     n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={},
        ...     create_env=create_faulty_envs, env_args=arguments, n_processes=2, seeds=0,
        ... ) as batcher:
        ...     batcher.reset()
        ...     batcher.execute()
        ...     batcher.get()
        Traceback (most recent call last):
        OSError: gone
        raised by environment 0 (FaultyEnv) in step
        raised in worker 1 during 'rollout'
    """
    worker, generation = getattr(seed, "worker_index", 0), getattr(seed, "restart_number", 0)
    generation += LIFE * getattr(seed, "life", 0)
    envs: list[gymnasium.Env] = []
    try:
        for k in range(n_envs):
            env_index = worker * n_envs + k
            envs.append(
                FaultyEnv(
                    faults,
                    worker=worker,
                    generation=generation,
                    env_index=env_index,
                    length=length,
                    truncates=truncates,
                )
            )
    except BaseException:
        for env in envs:  # they may have children
            env.close()
        raise
    return (GymEnvInf if autoreset else GymEnv)(envs, seed)
