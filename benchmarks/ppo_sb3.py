"""What `examples/ppo.py` does, by Stable-Baselines3: the same environments, layers, hyperparameters and evaluation.

    python benchmarks/ppo_sb3.py [--seed 0] [--n-steps 200000] [--dummy]

Environments run in a process each (`SubprocVecEnv`), or, with `--dummy`, all in this one (`DummyVecEnv`). The last line
is as that of the example. Needs `stable_baselines3`. What it has no arguments for is as it is there: first weights are
orthogonal in every layer (here in the last), advantages are normalised in each minibatch (here in the rollout), the
learning rate is that of a rollout's end (here of its beginning), statistics of observations and rewards change with
every step (here with every rollout), and collecting has the critic and the advantages in it (here they are among the
learning).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from ppo import Args


class Clock(BaseCallback):
    """Seconds of collecting."""

    seconds, _start = 0.0, 0.0

    def _on_rollout_start(self) -> None:
        self._start = time.perf_counter()

    def _on_rollout_end(self) -> None:
        self.seconds += time.perf_counter() - self._start

    def _on_step(self) -> bool:
        return True


def create_model(args: Args, kind: type[VecEnv], learning_rate: Callable[[float], float]) -> PPO:
    """A PPO on new environments, with the hyperparameters of the example."""
    envs = make_vec_env(args.env_id, args.n_processes * args.n_envs, args.seed, vec_env_cls=kind)
    return PPO(
        "MlpPolicy", VecNormalize(envs, gamma=args.gamma), learning_rate=learning_rate, n_steps=args.n_timesteps,
        batch_size=args.minibatch_size, n_epochs=args.n_epochs, gamma=args.gamma, gae_lambda=args.gae_lambda,
        clip_range=args.clip, ent_coef=args.entropy_weight, vf_coef=0.5, max_grad_norm=0.5, seed=args.seed,
        device="cpu",
    )  # fmt: skip


def main(options: argparse.Namespace) -> None:
    args = Args(seed=options.seed, n_steps=options.n_steps)
    torch.set_num_threads(1)
    kind = DummyVecEnv if options.dummy else SubprocVecEnv
    model = create_model(args, kind, lambda left: args.learning_rate * left)
    envs = model.get_vec_normalize_env()
    clock, start = Clock(), time.perf_counter()
    model.learn(args.n_steps, callback=clock)
    seconds = time.perf_counter() - start
    envs.training = envs.norm_reward = False
    returns, _ = evaluate_policy(model, envs, args.n_eval, deterministic=True, return_episode_rewards=True)
    envs.close()
    speed = model.num_timesteps / seconds
    print(f"{args.env_id}: score {np.mean(returns):.1f}, {model.num_timesteps} steps, {speed:.0f} steps/s, "
          f"{clock.seconds / seconds:.0%} of the time waiting for rollouts")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n-steps", type=int, default=Args.n_steps)
    parser.add_argument("--dummy", action="store_true")
    main(parser.parse_args())
