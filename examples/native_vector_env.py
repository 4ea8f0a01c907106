"""Collects from environments that are vectorised themselves: gymnasium's CartPole, or one of numpy alone.

    python examples/native_vector_env.py --env-id CartPole-v1 --n-envs 1024
    python examples/native_vector_env.py --env-id reach --n-envs 1024

prints a line for each rollout, and at the end how many episodes there were; without --env-id it is reach:

    rollout 1: 2048 trajectories of up to 128 steps
    ...
    25854 episodes, mean length 48.0
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch

from rlstructs import DictTensor, GymVectorEnv, RandomAgent, RL_Batcher


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "reach"
    n_processes: int = 2
    n_envs: int = 1024
    n_timesteps: int = 128
    n_rollouts: int = 5
    seed: int = 0
    trace: str = ""


class Reach:
    """E points on a line that are pushed left or right until they are a metre away, or 200 steps have passed.

    `step_into` writes straight to where a rollout keeps observations; `step` is for whoever wants tensors.
    """

    max_steps = 200

    def __init__(self, n_envs: int, seed: int) -> None:
        self._n, self._random = n_envs, np.random.default_rng(seed)
        self._at, self._speed, self._steps = np.zeros(n_envs), np.zeros(n_envs), np.zeros(n_envs, np.int64)

    def n_envs(self):
        return self._n

    def reset(self, env_info):
        return self._begin(np.arange(self._n)), torch.arange(self._n)

    def step_into(self, action, rows):
        """Writes what happened; gives which were reset, and what they show now."""
        self._speed += 0.01 * (2 * action["action"].numpy() - 1)
        self._at += self._speed
        self._steps += 1
        self._show(rows, slice(None))
        terminated, truncated = abs(self._at) > 1, self._steps == self.max_steps
        rows["terminated"][:], rows["truncated"][:] = terminated, truncated
        rows["done"][:] = done = terminated | truncated
        rows["reward"][:], rows["initial_state"][:] = terminated, False
        reset = np.flatnonzero(done)
        return (reset, self._begin(reset)) if reset.size else None

    def step(self, action):
        rows = {key: tensor.numpy() for key, tensor in self._empty(self._n).items()}
        reset = self.step_into(action, rows)
        after = following = DictTensor.from_numpy(rows)
        if reset is not None:
            following = after.clone()
            for key, tensor in reset[1].items():
                following[key][torch.from_numpy(reset[0])] = tensor
        return (after, torch.arange(self._n)), (following, torch.arange(self._n))

    def close(self):
        pass

    def _begin(self, which):
        """Starts an episode in some environments; what they show."""
        self._at[which] = self._random.uniform(-0.1, 0.1, which.size)
        self._speed[which] = self._steps[which] = 0
        first = self._empty(which.size)
        self._show({key: tensor.numpy() for key, tensor in first.items()}, which)
        return first

    def _show(self, rows, which):
        rows["frame"][:, 0], rows["frame"][:, 1] = self._at[which], self._speed[which]

    def _empty(self, n):
        flags = {key: torch.zeros(n, dtype=torch.bool) for key in ("terminated", "truncated", "done")}
        starts = {"initial_state": torch.ones(n, dtype=torch.bool)}
        return DictTensor({"frame": torch.zeros(n, 2), "reward": torch.zeros(n), **flags, **starts})


def create_env(env_id: str, n_envs: int, seed: int) -> Reach | GymVectorEnv:
    if env_id == "reach":
        return Reach(n_envs, seed)
    envs = gymnasium.make_vec(env_id, num_envs=n_envs, vectorization_mode="vector_entry_point")
    return GymVectorEnv(envs, seed)


def create_agent(env_id: str) -> RandomAgent:
    return RandomAgent(gymnasium.spaces.Discrete(2) if env_id == "reach" else gymnasium.make(env_id).action_space)


def main(args: Args) -> None:
    with RL_Batcher(
        args.n_timesteps, create_agent, {"env_id": args.env_id},
        create_env, {"env_id": args.env_id, "n_envs": args.n_envs}, args.n_processes, args.seed,
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        batcher.reset()
        for number in range(1, args.n_rollouts + 1):
            batcher.execute()
            with batcher.lease() as (trajectories, _):
                steps = trajectories.trajectories
                print(f"rollout {number}: {steps.n_elems()} trajectories of up to {steps.n_timesteps()} steps")
        episodes = batcher.episodes()
    print(f"{episodes.n_elems()} episodes, mean length {episodes['length'].double().mean():.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
