"""What does a program gain that changes one line? Steps/s of real trainings on their own environments and on ours.

    python benchmarks/adoption.py [--rows sb3-ppo ...] [--repeats 3] [--steps 8192]

Every row is one training by the package that it is named after, with that package's defaults where it has some, on 16
environments. Its contenders differ in how the environments are run, and nothing else: the package's own ways, and ours.
They take turns, `--repeats` times over, each with new environments and a new model; the table shows medians of steps
per second, start and end not counted. The last line of a row is what the learner allows: how much faster the training
on the package's processes would be if their steps took no time. A row whose package is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlstructs import SharedVectorEnv

N_ENVS, N_WORKERS = 16, 2
# What ours must reach: of the package's own processes, and of the fastest of all its own ways.
MUST_OF_PROCESSES, MUST_OF_FASTEST = 1.5, 0.97
Train = Callable[[Any, int], None]  # environments, steps


@dataclass(frozen=True)
class Row:
    """A training, and the ways of running its environments.

    Attributes:
        modules: what has to be installed.
        envs: makes the environments, by contender. The first is ours; those called "processes" have a process each.
        train: takes these environments that many steps.
    """

    name: str
    modules: tuple[str, ...]
    envs: dict[str, Callable[[], Any]]
    train: Train


def makers(env_id: str) -> list[Callable[[], gymnasium.Env]]:
    return [lambda: gymnasium.make(env_id) for _ in range(N_ENVS)]


def sb3_envs(env_id: str) -> dict[str, Callable[[], Any]]:
    def make(kind: str, **settings: Any) -> Any:
        from stable_baselines3.common import vec_env
        from stable_baselines3.common.env_util import make_vec_env

        from rlstructs.integrations.sb3 import SharedVecEnv

        cls = SharedVecEnv if kind == "SharedVecEnv" else getattr(vec_env, kind)
        return make_vec_env(env_id, N_ENVS, seed=0, vec_env_cls=cls, vec_env_kwargs=settings)

    return {
        "rlstructs": lambda: make("SharedVecEnv", n_workers=N_WORKERS),
        "rlstructs, here": lambda: make("SharedVecEnv", n_workers=0),
        "processes": lambda: make("SubprocVecEnv"),
        "here": lambda: make("DummyVecEnv"),
    }


def sb3_ppo(envs: Any, steps: int) -> None:
    from stable_baselines3 import PPO

    PPO("MlpPolicy", envs, n_steps=128, batch_size=512, n_epochs=4, seed=0, device="cpu").learn(steps)


def sb3_dqn(envs: Any, steps: int) -> None:
    from stable_baselines3 import DQN

    from rlstructs.integrations.sb3 import ReplayBuffer

    own = type(envs).__module__.startswith("rlstructs")
    kwargs = {"replay_buffer_class": ReplayBuffer} if own else {}
    DQN("MlpPolicy", envs, buffer_size=100_000, learning_starts=256, seed=0, device="cpu", **kwargs).learn(steps)


def sb3_sac(envs: Any, steps: int) -> None:
    from stable_baselines3 import SAC

    from rlstructs.integrations.sb3 import ReplayBuffer

    own = type(envs).__module__.startswith("rlstructs")
    kwargs = {"replay_buffer_class": ReplayBuffer} if own else {}
    SAC("MlpPolicy", envs, buffer_size=100_000, learning_starts=256, seed=0, device="cpu", **kwargs).learn(steps)


def gymnasium_envs(env_id: str, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> dict[str, Callable[[], Any]]:
    return {
        "rlstructs": lambda: SharedVectorEnv(makers(env_id), N_WORKERS, autoreset_mode=mode),
        "rlstructs, here": lambda: SharedVectorEnv(makers(env_id), 0, autoreset_mode=mode),
        "processes": lambda: AsyncVectorEnv(makers(env_id), autoreset_mode=mode),
        "here": lambda: SyncVectorEnv(makers(env_id), autoreset_mode=mode),
    }


def loop_ppo(envs: Any, steps: int, n_timesteps: int = 128) -> None:
    """PPO as one loop over a vector environment, in the manner of CleanRL's `ppo.py`: 4 epochs of 4 minibatches."""
    n_in, n_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    actor, critic = (
        torch.nn.Sequential(torch.nn.Linear(n_in, 64), torch.nn.Tanh(), torch.nn.Linear(64, n_out))
        for n_out in (n_actions, 1)
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 2.5e-4, eps=1e-5)
    observation, _ = envs.reset(seed=0)
    for _ in range(steps // (n_timesteps * N_ENVS)):
        rows: list[tuple[torch.Tensor, ...]] = []
        for _ in range(n_timesteps):
            seen = torch.as_tensor(observation)
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=actor(seen))
                action, value = policy.sample(), critic(seen).flatten()
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            done = torch.as_tensor(np.logical_or(terminated, truncated))
            rows.append((seen, action, policy.log_prob(action), value, torch.as_tensor(reward), done))
        learn_ppo(actor, critic, optimizer, [torch.stack(column) for column in zip(*rows, strict=True)])


def learn_ppo(actor: Any, critic: Any, optimizer: Any, columns: list[torch.Tensor]) -> None:
    """The update of `loop_ppo`, on columns (T, N, ...)."""
    seen, actions, log_probs, values, rewards, dones = columns
    advantages, following = torch.zeros(values.shape), torch.zeros(values.shape[1])
    for t in reversed(range(len(rewards) - 1)):
        delta = rewards[t].float() + 0.99 * values[t + 1] * ~dones[t] - values[t]
        advantages[t] = following = delta + 0.99 * 0.95 * following * ~dones[t]
    flat = [tensor.flatten(0, 1) for tensor in (seen, actions, log_probs, advantages, advantages + values)]
    for _ in range(4):
        for rows in torch.randperm(len(flat[0])).chunk(4):
            seen, actions, log_probs, advantages, targets = (tensor[rows] for tensor in flat)
            policy = torch.distributions.Categorical(logits=actor(seen))
            ratio = (policy.log_prob(actions) - log_probs).exp()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -surrogate.mean() - 0.01 * policy.entropy().mean()
            loss = loss + 0.5 * (critic(seen).flatten() - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def tianshou_envs(env_id: str) -> dict[str, Callable[[], Any]]:
    def make(kind: str, **settings: Any) -> Any:
        import tianshou.env

        from rlstructs.integrations.tianshou import WorkerVectorEnv

        cls = WorkerVectorEnv if kind == "WorkerVectorEnv" else getattr(tianshou.env, kind)
        return cls(makers(env_id), **settings)

    return {
        "rlstructs": lambda: make("WorkerVectorEnv", n_workers=N_WORKERS),
        "rlstructs, here": lambda: make("WorkerVectorEnv", n_workers=0),
        "processes": lambda: make("SubprocVectorEnv"),
        "here": lambda: make("DummyVectorEnv"),
    }


def tianshou_collect(envs: Any, steps: int) -> None:
    """A DQN of tianshou: collect a step of every environment, update from 64 rows."""
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.torch_utils import policy_within_training_step

    action_space = envs.action_space[0]
    net = Net(state_shape=envs.observation_space[0].shape, action_shape=action_space.n, hidden_sizes=[64, 64])
    policy = DiscreteQLearningPolicy(model=net, action_space=action_space, eps_training=0.1)
    dqn = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), target_update_freq=320)
    collector = Collector(dqn, envs, VectorReplayBuffer(100_000, N_ENVS))
    collector.reset()
    with policy_within_training_step(policy):
        for _ in range(steps // (10 * N_ENVS)):
            collector.collect(n_step=10 * N_ENVS)
            dqn.update(collector.buffer, 64)


def skrl_ppo(envs: Any, steps: int) -> None:
    """skrl's PPO by its `SequentialTrainer`, over `wrap_env`."""
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.trainers.torch import SequentialTrainer

    def layers(n_in: int, n_out: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(n_in, 64), torch.nn.Tanh(), torch.nn.Linear(64, n_out))

    class Policy(CategoricalMixin, Model):
        def __init__(self, **spaces: Any) -> None:
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.net = layers(self.num_observations, self.num_actions)

        def compute(self, inputs: Any, role: str) -> Any:
            return self.net(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self, **spaces: Any) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = layers(self.num_observations, 1)

        def compute(self, inputs: Any, role: str) -> Any:
            return self.net(inputs["observations"]), {}

    logging.getLogger("skrl").setLevel(logging.WARNING)
    wrapped = wrap_env(envs)
    names = ("observation_space", "state_space", "action_space", "device")
    spaces = {name: getattr(wrapped, name) for name in names}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    memory = RandomMemory(memory_size=128, num_envs=N_ENVS, device=wrapped.device)
    config = PPO_CFG(rollouts=128, learning_epochs=4, mini_batches=4)
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    agent = PPO(models=models, memory=memory, cfg=config, **spaces)
    settings = {"timesteps": steps // N_ENVS, "disable_progressbar": True, "close_environment_at_exit": False}
    SequentialTrainer(env=wrapped, agents=agent, cfg=settings).train()


ROWS = [
    Row("sb3-ppo", ("stable_baselines3",), sb3_envs("CartPole-v1"), sb3_ppo),
    Row("sb3-ppo-halfcheetah", ("stable_baselines3", "mujoco"), sb3_envs("HalfCheetah-v5"), sb3_ppo),
    Row("sb3-dqn", ("stable_baselines3",), sb3_envs("CartPole-v1"), sb3_dqn),
    Row("sb3-sac-halfcheetah", ("stable_baselines3", "mujoco"), sb3_envs("HalfCheetah-v5"), sb3_sac),
    Row("cleanrl-ppo", (), gymnasium_envs("CartPole-v1"), loop_ppo),
    Row("skrl-ppo", ("skrl",), gymnasium_envs("CartPole-v1"), skrl_ppo),
    Row("tianshou-dqn", ("tianshou",), tianshou_envs("CartPole-v1"), tianshou_collect),
]


def time_steps(envs: Any) -> list[float]:
    """A list whose only number is how many seconds the steps of these environments have taken, from now on."""
    spent, step = [0.0], envs.step

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = step(*arguments)
        spent[0] += time.perf_counter() - start
        return result

    envs.step = timed
    return spent


def measure(row: Row, repeats: int, steps: int) -> tuple[dict[str, float], float]:
    """Medians of steps/s, every contender in turn; and what share of the time the package's processes take."""
    speeds: dict[str, list[float]] = {}
    shares = []
    with contextlib.closing(row.envs["here"]()) as envs:
        row.train(envs, 2048)  # imports what the package imports when it trains
    for _ in range(repeats):
        for name, make in row.envs.items():
            torch.manual_seed(0)
            with contextlib.closing(make()) as envs:
                spent, start = time_steps(envs), time.perf_counter()
                row.train(envs, steps)
                seconds = time.perf_counter() - start
                speeds.setdefault(name, []).append(steps / seconds)
                if name == "processes":
                    shares.append(spent[0] / seconds)
    return {name: statistics.median(values) for name, values in speeds.items()}, statistics.median(shares)


def show(row: Row, speeds: dict[str, float], share: float) -> None:
    """One row of the table, and what must hold on it."""
    print(f"{row.name:20} " + " | ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()))
    best = max(speed for name, speed in speeds.items() if name.startswith("rlstructs"))
    fastest = max(speed for name, speed in speeds.items() if not name.startswith("rlstructs"))
    for what, ratio, must in (
        ("its processes", speeds["rlstructs"] / speeds["processes"], MUST_OF_PROCESSES),
        ("the fastest of its own", best / fastest, MUST_OF_FASTEST),
    ):
        print(f"{'':20} {ratio:.2f} of {what}, must {must}: {'ok' if ratio >= must else 'TOO SLOW'}", flush=True)
    print(f"{'':20} {1 / (1 - share):.2f} of its processes if steps took no time at all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8192)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, {N_WORKERS} workers, {N_ENVS} environments; steps/s")
    for row in ROWS:
        if row.name in arguments.rows and all(importlib.util.find_spec(module) for module in row.modules):
            show(row, *measure(row, arguments.repeats, arguments.steps))


if __name__ == "__main__":
    main()
