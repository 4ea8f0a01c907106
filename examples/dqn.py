"""Deep Q-learning with double and dueling networks, n-step targets and prioritised replay.

    python examples/dqn.py --seed 1

Workers act, and write to the memory, while the learner draws from it. It shows a progress bar, and prints at the end
the mean return of `--n-eval` episodes in which no action is random, and how fast the training was:

    CartPole-v1: score 500.0, 150016 steps, 904 steps/s

`--plot curve.png` draws the returns of the training, `--track tensorboard:runs/dqn` keeps its metrics there; either
needs `pip install -e '.[plot]'`. With `--track wandb:PROJECT` or `--track trackio:PROJECT` they go to these
services, whose package is needed. `--checkpoint FOLDER` saves the training every minute, at its end, and at SIGTERM,
which then ends it; run again it goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from dataclasses import dataclass

import gymnasium
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import Checkpoint, DictTensor, GymEnvInf, RL_Agent, RL_Batcher
from rlstructs.integrations.logging import open_log
from rlstructs.memories.torch import PrioritizedMemory

COLUMNS = ["observations", "actions", "rewards", "next_observations", "terminated"]


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_steps: int = 150_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 4
    n_timesteps: int = 16
    memory_size: int = 50_000
    n_before: int = 1_000
    n_updates: int = 16
    n_between_copies: int = 200
    batch_size: int = 128
    n_step: int = 3
    gamma: float = 0.99
    learning_rate: float = 1e-3
    last_epsilon: float = 0.05
    n_eval: int = 100
    seed: int = 0
    plot: str = ""
    track: str = ""
    checkpoint: str = ""
    trace: str = ""


class QNetwork(nn.Module):
    """The value of every action, as that of the observation and what the action adds to it (Wang et al., 2016)."""

    def __init__(self, n_inputs: int, n_actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.value, self.advantages = nn.Linear(128, 1), nn.Linear(128, n_actions)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = self.layers(observations)
        advantages = self.advantages(features)
        return self.value(features) + advantages - advantages.mean(dim=-1, keepdim=True)


class Policy(RL_Agent):
    """Takes the best action, or with the probability `epsilon` of `agent_info` any."""

    def __init__(self, network: QNetwork) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        values = self.network(observation["frame"])
        best = values.argmax(dim=1)
        explores = torch.rand(len(best)) < agent_info["epsilon"]
        return DictTensor({"action": torch.where(explores, torch.randint_like(best, values.shape[1]), best)}), state

    def update(self, info):
        self.network.load_state_dict(info)


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def create_network(env_id: str) -> QNetwork:
    with gymnasium.make(env_id) as env:
        if not isinstance(env.action_space, gymnasium.spaces.Discrete):
            raise SystemExit(f"{env_id}: --env-id needs a Discrete action space, got {env.action_space}: try sac.py")
        return QNetwork(env.observation_space.shape[0], int(env.action_space.n))


class Learner:
    """Improves a network from what is in a memory."""

    def __init__(self, network: QNetwork, memory: PrioritizedMemory, args: Args) -> None:
        self.network, self.target, self.memory, self.args = network, copy.deepcopy(network), memory, args
        self.optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
        self.n_updates = 0

    def learn(self) -> float:
        """One update; its loss."""
        args, memory = self.args, self.memory
        [[observations, actions, rewards, following, terminated]] = memory.sample(
            COLUMNS, batch_size=args.batch_size, n_step=args.n_step, gamma=args.gamma
        )
        with torch.no_grad():
            best = self.network(following).argmax(dim=1, keepdim=True)
            # Gamma to the number of steps that there were up to the end of the episode.
            discounts = memory.get_sampling_discounts()[:, None] * ~terminated
            targets = rewards + discounts * self.target(following).gather(1, best)
        values = self.network(observations).gather(1, actions)
        losses = nn.functional.smooth_l1_loss(values, targets, reduction="none")[:, 0]
        loss = (memory.get_sampling_weights() * losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        errors = (values.detach() - targets)[:, 0].abs()
        memory.update_priorities(memory.get_sampling_indexes(), errors + 1e-3)
        if self.n_updates % args.n_between_copies == 0:
            self.target.load_state_dict(self.network.state_dict())
        self.n_updates += 1
        return loss.item()

    def state_dict(self) -> dict[str, object]:
        kept = {name: getattr(self, name).state_dict() for name in ("network", "target", "optimizer")}
        return {**kept, "n_updates": self.n_updates}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.n_updates = state.pop("n_updates")
        for name, kept in state.items():
            getattr(self, name).load_state_dict(kept)

    def anneal(self, share: float) -> None:
        """Sets the learning rate, and the exponent of the weights, for this share of the training."""
        self.optimizer.param_groups[0]["lr"] = self.args.learning_rate * (1 - share)
        self.memory.beta = 0.4 + 0.6 * share


class Log:
    """A progress bar, and metrics for `--track` and a learning curve where they are asked for."""

    n_steps = property(lambda self: self.kept["n_steps"])

    def __init__(self, args: Args) -> None:
        # Before the first rollout: who lacks a package or a folder is to know it now.
        self.track = open_log(args.track, vars(args))
        self.figure = optional("matplotlib.figure").Figure(figsize=(9, 5)) if args.plot else None
        if self.figure is not None:
            self.figure.savefig(args.plot)
        self.bar = tqdm(total=args.n_steps, unit=" steps", unit_scale=True)
        self.path, self.start = args.plot, time.perf_counter()
        self.kept = {"n_steps": 0, "steps": [], "returns": [], "curve": []}  # of episodes; means of the latest 100

    def add(self, n_steps: int, episodes: DictTensor, scalars: dict[str, float]) -> None:
        self.kept["n_steps"] += n_steps
        self.kept["returns"] += episodes["return"].tolist()
        self.kept["steps"] += [self.n_steps] * episodes.n_elems()
        scalars = {"return": torch.tensor(self.kept["returns"][-100:]).mean().item(), **scalars}
        self.kept["curve"].append((self.n_steps, scalars["return"]))
        self.bar.set_postfix_str(f"return {scalars['return']:.1f}", refresh=False)
        self.bar.total = max(self.bar.total, self.n_steps)  # the last rollout is a whole one
        self.bar.update(n_steps)
        self.track(scalars, self.n_steps)

    def close(self) -> float:
        """Writes what there is to write; steps/s of the training."""
        speed = self.bar.n / (time.perf_counter() - self.start)
        self.bar.close()
        self.track.close()
        if self.figure is not None:
            axes = self.figure.subplots()
            axes.plot(self.kept["steps"], self.kept["returns"], ".", markersize=2, label="an episode")
            axes.plot(*zip(*self.kept["curve"], strict=True), label="mean of 100")
            axes.legend()
            axes.set(xlabel="steps", ylabel="return")
            self.figure.savefig(self.path)
        return speed


def optional(module: str, install: str = "--plot needs pip install matplotlib"):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(f"{error}: {install}") from error


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for networks this small more are slower, and the workers need the cores
    network = create_network(args.env_id)
    with RL_Batcher(
        args.n_timesteps, Policy, {"network": network}, create_env, {"env_id": args.env_id, "n_envs": args.n_envs},
        args.n_processes, args.seed, agent_info=DictTensor({"epsilon": torch.zeros(1)}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        n_all = batcher.n_elems()
        size = max(args.memory_size // n_all, args.n_timesteps)
        memory = PrioritizedMemory(memory_size=size, num_envs=n_all, device="cpu")
        batcher.feed(memory)
        learner, losses = Learner(network, memory, args), {}
        checkpoint = Checkpoint(args.checkpoint, batcher=batcher, memory=memory, model=learner, extra=log.kept)
        if checkpoint.restore() is None:
            batcher.reset(agent_info=DictTensor({"epsilon": torch.ones(n_all)}))
        with checkpoint.preemption():
            while log.n_steps < args.n_steps:
                share = log.n_steps / args.n_steps
                epsilon = max(1 - 5 * share, args.last_epsilon)  # falls in the first fifth
                batcher.execute(agent_info=DictTensor({"epsilon": torch.full((n_all,), epsilon)}))
                if log.n_steps >= max(args.n_before, 1):  # while the workers act
                    learner.anneal(share)
                    losses = {"loss": sum(learner.learn() for _ in range(args.n_updates)) / args.n_updates}
                n_steps, _ = batcher.wait()
                batcher.update(network.state_dict())
                log.add(n_steps, batcher.episodes(), {**batcher.metrics(), **losses})
                checkpoint.save_if_due(log.n_steps)
        speed = log.close()
        checkpoint.save(log.n_steps)
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"epsilon": torch.zeros(n_all)}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
