"""HalfCheetah stepped by MuJoCo's own loop over many states: a vectorised environment of one's own in sixty lines.

    pip install 'gymnasium[mujoco]'
    python examples/mujoco_rollout.py --n-envs 64
    python examples/mujoco_rollout.py --n-envs 64 --gymnasium

`mujoco.rollout` takes the states of all environments of a worker and steps them in C; observations are written straight
to where a rollout keeps them. The transitions are those of gymnasium's `HalfCheetah-v5`, which `--gymnasium` steps
instead, one environment after another. It prints at the end how many steps were collected in a second, by random
actions:

    128 HalfCheetahs by mujoco.rollout: 81920 steps, 30000 steps/s
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import gymnasium
import mujoco
import numpy as np
import torch
from mujoco import rollout

from rlstructs import DictTensor, GymEnvInf, RandomAgent, RL_Batcher, VecEnv

ENV_ID = "HalfCheetah-v5"


@dataclass
class Args:
    """What the command line sets."""

    n_processes: int = 2
    n_envs: int = 32
    n_timesteps: int = 64
    n_rollouts: int = 10
    gymnasium: bool = False
    seed: int = 0
    trace: str = ""


class HalfCheetahs:
    """E environments `HalfCheetah-v5`, that begin a new episode as soon as one has ended."""

    frame_skip, max_steps = 5, 1000

    def __init__(self, n_envs: int, seed: int) -> None:
        with gymnasium.make(ENV_ID) as env:
            self.model, self.start = env.unwrapped.model, env.unwrapped.init_qpos.copy()
            self.action_space = env.action_space
        self.rngs = [np.random.default_rng(seed + k) for k in range(n_envs)]
        # Time, positions and velocities, as MuJoCo lines them up.
        self.states = np.zeros((n_envs, mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_FULLPHYSICS)))
        self.stepper, shape = rollout.Rollout(nthread=0), (n_envs, self.frame_skip)
        self.after, self.controls = np.zeros((*shape, self.states.shape[1])), np.zeros((*shape, self.model.nu))
        self.fixed = {"model": [self.model] * n_envs, "data": [mujoco.MjData(self.model)], "nstep": self.frame_skip,
                      "sensordata": np.zeros((*shape, self.model.nsensordata)), "skip_checks": True}  # fmt: skip
        self.dt, self.steps = self.model.opt.timestep * self.frame_skip, np.zeros(n_envs, np.int64)

    def n_envs(self):
        return len(self.states)

    def reset(self, env_info=None):
        self.running = torch.arange(self.n_envs())
        return self.begin(self.running.numpy()), self.running

    def begin(self, which):
        """Starts an episode in some environments; what they show."""
        nq, nv = self.model.nq, self.model.nv
        for k in which:
            noise = [self.rngs[k].uniform(-0.1, 0.1, nq), 0.1 * self.rngs[k].standard_normal(nv)]
            self.states[k] = np.concatenate([[0], self.start + noise[0], noise[1]])
        self.steps[which] = 0
        no = torch.zeros(len(which), dtype=torch.bool)
        return DictTensor({
            "frame": torch.from_numpy(self.states[which, 2:]), "reward": torch.zeros(len(which)), "terminated": no,
            "truncated": no, "done": no, "initial_state": ~no,
        })  # fmt: skip

    def step_into(self, action, rows):
        """Writes what happened; gives which were reset, and what they show now."""
        actions = action["action"].numpy()
        self.controls[:] = actions[:, None]
        self.stepper.rollout(initial_state=self.states, control=self.controls, state=self.after, **self.fixed)
        x_before, self.states[:] = self.states[:, 1].copy(), self.after[:, -1]
        self.steps += 1
        rows["frame"][:] = self.states[:, 2:]
        rows["reward"][:] = (self.states[:, 1] - x_before) / self.dt - 0.1 * np.square(actions).sum(axis=1)
        rows["terminated"][:], rows["initial_state"][:] = False, False
        rows["truncated"][:] = rows["done"][:] = ended = self.steps == self.max_steps
        reset = np.flatnonzero(ended)
        return (reset, self.begin(reset)) if reset.size else None

    def step(self, action):
        none = self.begin(np.zeros(0, np.int64))
        shapes = {key: (self.n_envs(), *tensor.shape[1:]) for key, tensor in none.items()}
        after = DictTensor({key: torch.empty(shapes[key], dtype=tensor.dtype) for key, tensor in none.items()})
        reset = self.step_into(action, {key: tensor.numpy() for key, tensor in after.items()})
        following = after
        if reset is not None:
            following = after.clone()
            for key, tensor in reset[1].items():
                following[key][torch.from_numpy(reset[0])] = tensor
        return (after, self.running), (following, self.running)

    def close(self):
        self.stepper.close()


def create_env(n_envs: int, by_gymnasium: bool, seed: int) -> VecEnv:
    if by_gymnasium:
        return GymEnvInf([gymnasium.make(ENV_ID) for _ in range(n_envs)], seed)
    return HalfCheetahs(n_envs, seed)


def create_agent() -> RandomAgent:
    with gymnasium.make(ENV_ID) as env:
        return RandomAgent(env.action_space)


def main(args: Args) -> None:
    with RL_Batcher(
        args.n_timesteps, create_agent, {}, create_env, {"n_envs": args.n_envs, "by_gymnasium": args.gymnasium},
        args.n_processes, args.seed,
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        batcher.reset()
        n_steps, start = 0, time.perf_counter()
        for _ in range(args.n_rollouts):
            batcher.execute()
            n_steps += batcher.wait()[0]
        speed = n_steps / (time.perf_counter() - start)
        how = "gymnasium" if args.gymnasium else "mujoco.rollout"
        print(f"{batcher.n_elems()} HalfCheetahs by {how}: {n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        kind = {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
