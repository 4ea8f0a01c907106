"""PPO in environments that wait: each asks a simulator, a process of its own, which answers over a socket.

    python examples/waiting_envs.py
    python examples/waiting_envs.py --threads 0

An answer takes 10 ms on average, now and then much longer. In threads all simulators of a worker are waited for at
once, the policy acts for those that have answered, and a rollout ends after `--deadline` seconds. The last line is the
mean return of `--n-eval` episodes, steps and how fast they were, and the share of steps whose action came from an
earlier update, because their answer was still missing when a rollout ended:

    Chase: score 27.0, 20113 steps, 898 steps/s, 3% by an earlier policy

The same without threads, where one answer is waited for after another:

    Chase: score 26.9, 20480 steps, 69 steps/s, 0% by an earlier policy
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial

import gymnasium
import numpy as np
import torch
from torch import nn

from rlstructs import RL_Batcher, Trajectories, gae, transitions
from rlstructs.integrations.logging import open_log

# A dot moves on a line, and is to stay close to another one. It knows nothing of reinforcement learning.
SIMULATOR = """
import json, random, socket, sys, time

lines = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
mean, rng, dot, target = float(sys.argv[2]), random.Random(), 0.0, 0.0
for line in lines:
    command = json.loads(line)
    if "seed" in command:
        rng.seed(command["seed"])
        dot, target = rng.uniform(-1, 1), rng.uniform(-1, 1)
    else:
        dot = max(-1, min(1, dot + 0.2 * command["move"]))
        target = max(-1, min(1, target + rng.gauss(0, 0.05)))
        time.sleep(rng.expovariate(1 / mean))
    print(json.dumps([dot, target]), file=lines, flush=True)
"""


@dataclass
class Args:
    """What the command line sets."""

    n_steps: int = 20_000
    n_workers: int = 1
    n_envs: int = 16
    n_timesteps: int = 64
    threads: int = 1
    mean: float = 0.01  # seconds of an answer
    deadline: float = 0.4  # seconds of a rollout
    learning_rate: float = 3e-3
    n_eval: int = 16
    seed: int = 0
    track: str = ""  # tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT
    trace: str = ""  # a file for a timeline


class Chase(gymnasium.Env):
    """Moves a dot left, not at all or right, for 30 steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, mean: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", SIMULATOR, str(theirs.fileno()), str(mean)]
            self.simulator = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        with ours:
            self.lines = ours.makefile("rw")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return self.ask(seed=int(self.np_random.integers(2**31))), {}

    def step(self, action):
        self.n_steps += 1
        seen = self.ask(move=int(action) - 1)
        return seen, 1.0 - abs(float(seen[0] - seen[1])), False, self.n_steps == 30, {}

    def ask(self, **command) -> np.ndarray:
        print(json.dumps(command), file=self.lines, flush=True)
        return np.array(json.loads(self.lines.readline()), np.float32)

    def close(self):
        self.simulator.kill()  # first: then a step that still waits for an answer ends
        self.simulator.wait()
        self.lines.close()


def make_network(n_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, n_outputs))


def learn(actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, rollout: Trajectories) -> None:
    """Some epochs of PPO over the steps of a rollout, whose rows may have any length."""
    steps = rollout.trajectories
    with torch.no_grad():
        values = critic(steps["observation/frame"])[..., 0]
        next_values = critic(steps["_observation/frame"])[..., 0]
    advantages, targets = gae(values=values, next_values=next_values, gamma=0.9, lambda_=0.95, **transitions(rollout))
    known = advantages[rollout.mask().bool()]
    steps.set("advantage", (advantages - known.mean()) / known.std())
    steps.set("target", targets)
    for part in rollout.packed().minibatches(128, epochs=4):
        policy = torch.distributions.Categorical(logits=actor(part["observation/frame"]))
        # The probability that the action had when it was chosen, whichever update chose it.
        ratio = (policy.log_prob(part["action/action"]) - part["action/log_prob"]).exp()
        gain = torch.minimum(ratio * part["advantage"], ratio.clamp(0.8, 1.2) * part["advantage"]).mean()
        error = (critic(part["observation/frame"])[..., 0] - part["target"]).square().mean()
        optimizer.zero_grad()
        (0.1 * error - gain - 0.002 * policy.entropy().mean()).backward()
        optimizer.step()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    actor, critic, n_steps, n_late = make_network(3), make_network(1), 0, 0
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], args.learning_rate)
    pace = {"threads": True, "deadline": args.deadline} if args.threads else {}
    with RL_Batcher.make(
        partial(Chase, args.mean), actor, n_envs=args.n_envs, n_workers=args.n_workers, n_timesteps=args.n_timesteps,
        seed=args.seed, **pace,
    ) as batcher, batcher.trace(args.trace), open_log(args.track, vars(args)) as log:  # fmt: skip
        started = time.perf_counter()
        for rollout in batcher.rollouts(n_steps=args.n_steps):
            mask, newest = rollout.mask().bool(), rollout.info["policy_version"].max()
            n_steps += int(rollout.lengths.sum())
            if args.threads:
                n_late += int((rollout.trajectories["policy_version"][mask] < newest).sum())
            learn(actor, critic, optimizer, rollout)
            batcher.update(actor)
            log(batcher.metrics(), n_steps)
        speed = n_steps / (time.perf_counter() - started)
        score = batcher.evaluate(args.n_eval, args.seed + 1)["return"].mean()
    late = f"{n_late / n_steps:.0%} by an earlier policy"
    print(f"Chase: score {score:.1f}, {n_steps} steps, {speed:.0f} steps/s, {late}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
