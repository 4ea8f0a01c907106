r"""Deep Q-learning on Atari games, from stacks of frames that the memory stores once, and compressed if it is told to.

    pip install ale-py opencv-python-headless zstandard
    python examples/dqn_atari.py --compress

Preparation of frames as in Mnih et al. (2015): an action for four frames of the game, 84x84 grey, stacks of four, the
sign of rewards. Double Q-learning, n-step targets and priorities as in `dqn.py`. Workers stack the frames that they act
on; the memory gets each frame once, and makes stacks of those that it draws. `--compress` changes neither draws nor
results: a step of Pong takes about 220 bytes in place of 7,100. `--prefetch 2` draws and decodes two batches ahead, by
the priorities of two updates before. `--track` is as in `dqn.py`. It prints the mean return of `--n-eval` games, the
number of steps, how fast the training was, and what the memory takes:

    ALE/Pong-v5: score S, N steps, V steps/s, M MB
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher
from rlstructs.integrations.logging import open_log
from rlstructs.replay import PrioritizedVectorReplayBuffer


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "ALE/Pong-v5"
    compress: bool = False
    prefetch: int = 0
    max_frames: int = 108_000  # of a game, half an hour of it
    n_steps: int = 100_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 4
    n_timesteps: int = 16
    memory_size: int = 100_000
    n_before: int = 2_000
    n_updates: int = 16
    n_between_copies: int = 500
    batch_size: int = 32
    n_step: int = 3
    gamma: float = 0.99
    learning_rate: float = 1e-4
    last_epsilon: float = 0.05
    n_eval: int = 5
    seed: int = 0
    track: str = ""
    trace: str = ""


class QNetwork(nn.Module):
    """The values of all actions for stacks of frames, uint8 (B, 4, 84, 84)."""

    def __init__(self, n_actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
            nn.Linear(512, n_actions),
        )  # fmt: skip

    def forward(self, stacks: torch.Tensor) -> torch.Tensor:
        return self.layers(stacks / 255)


class Policy(RL_Agent):
    """Takes the best action, or with the probability `epsilon` of `agent_info` any; keeps the last four frames."""

    def __init__(self, network: QNetwork) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        return DictTensor({"stack": torch.zeros(B, 4, 84, 84, dtype=torch.uint8), "is_new": torch.ones(B, 1)})

    def __call__(self, state, observation, agent_info, history=None):
        frame = observation["frame"][:, None]
        is_new = (state["is_new"] > 0)[..., None, None]
        # As the memory stacks them: before the first frame of an episode stands the first one.
        stack = torch.where(is_new, frame.expand(-1, 4, -1, -1), torch.cat([state["stack"][:, 1:], frame], dim=1))
        values = self.network(stack)
        best = values.argmax(dim=1)
        explores = torch.rand(len(best)) < agent_info["epsilon"]
        action = torch.where(explores, torch.randint_like(best, values.shape[1]), best)
        return DictTensor({"action": action}), DictTensor({"stack": stack, "is_new": torch.zeros(len(best), 1)})

    def update(self, info):
        self.network.load_state_dict(info)


def make(env_id: str, max_frames: int) -> gymnasium.Env:
    env = gymnasium.make(env_id, frameskip=1, max_num_frames_per_episode=max_frames)
    return gymnasium.wrappers.TransformReward(gymnasium.wrappers.AtariPreprocessing(env), np.sign)


def create_env(n_envs: int, seed: int, **game) -> GymEnvInf:
    return GymEnvInf([make(**game) for _ in range(n_envs)], seed)


class Learner:
    """Improves a network from what is in a memory."""

    def __init__(self, network: QNetwork, memory: PrioritizedVectorReplayBuffer, args: Args) -> None:
        self.network, self.target, self.memory, self.args = network, copy.deepcopy(network), memory, args
        self.optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
        self.batches, self.n_updates = memory.batches(args.batch_size, prefetch=args.prefetch), 0

    def learn(self) -> float:
        """One update; its loss."""
        batch, rows = next(self.batches)
        with torch.no_grad():
            best = self.network(batch["obs_next"]).argmax(dim=1, keepdim=True)
            # Gamma to the number of steps that there were up to the end of the episode.
            discounts = batch["discount"] * ~batch["terminated"]
            following = self.target(batch["obs_next"]).gather(1, best)[:, 0]
            targets = (batch["rew"] + discounts * following).float()
        values = self.network(batch["obs"]).gather(1, batch["act"][:, None])[:, 0]
        losses = nn.functional.smooth_l1_loss(values, targets, reduction="none")
        loss = (batch["weight"] * losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.memory.update_weight(rows, (values.detach() - targets).abs() + 1e-3)
        if self.n_updates % self.args.n_between_copies == 0:
            self.target.load_state_dict(self.network.state_dict())
        self.n_updates += 1
        return loss.item()


def main(args: Args) -> QNetwork:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the workers need the other cores
    try:
        import ale_py
    except ImportError as error:
        raise SystemExit(f"{error}: Atari games need pip install ale-py opencv-python-headless") from error
    gymnasium.register_envs(ale_py)
    game = {"env_id": args.env_id, "max_frames": args.max_frames}
    with make(**game) as env:
        network = QNetwork(int(env.action_space.n))
    with contextlib.ExitStack() as stack:
        batcher = stack.enter_context(RL_Batcher(
            args.n_timesteps, Policy, {"network": network}, create_env, {"n_envs": args.n_envs, **game},
            args.n_processes, args.seed, agent_info=DictTensor({"epsilon": torch.zeros(1)}),
        ))  # fmt: skip
        track = stack.enter_context(contextlib.closing(open_log(args.track, vars(args))))
        if args.trace:
            stack.enter_context(batcher.trace(args.trace))
        n_all, n_steps, losses = batcher.n_elems(), 0, {}
        memory = PrioritizedVectorReplayBuffer(
            args.memory_size, n_all, alpha=0.6, beta=0.4, stack_num=4, ignore_obs_next=True, n_step=args.n_step,
            gamma=args.gamma, framework="torch", random_seed=args.seed, compression="zstd" if args.compress else None,
        )  # fmt: skip
        batcher.feed(memory)
        learner, start = Learner(network, memory, args), time.perf_counter()
        stack.enter_context(learner.batches)
        batcher.reset(agent_info=DictTensor({"epsilon": torch.ones(n_all)}))
        with tqdm(total=args.n_steps, unit=" steps", unit_scale=True) as bar:
            while n_steps < args.n_steps:
                epsilon = max(1 - 5 * n_steps / args.n_steps, args.last_epsilon)  # falls in the first fifth
                batcher.execute(agent_info=DictTensor({"epsilon": torch.full((n_all,), epsilon)}))
                if n_steps >= max(args.n_before, 1):  # while the workers act
                    losses = {"loss": sum(learner.learn() for _ in range(args.n_updates)) / args.n_updates}
                n_new, _ = batcher.wait()
                batcher.update(network.state_dict())
                n_steps += n_new
                episodes = batcher.episodes()
                returns = {"return": episodes["return"].mean().item()} if len(episodes) else {}
                track({**returns, **batcher.metrics(), **losses}, n_steps)
                bar.set_postfix(losses, refresh=False)
                bar.update(n_new)
        speed = n_steps / (time.perf_counter() - start)
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"epsilon": torch.zeros(n_all)}))
    score, size = f"{episodes['return'].mean():.1f}", f"{memory.nbytes / 1e6:.0f} MB"
    print(f"{args.env_id}: score {score}, {n_steps} steps, {speed:.0f} steps/s, {size}")
    return network


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        how = {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"default: {value!r}", **how)
    main(Args(**vars(parser.parse_args())))
