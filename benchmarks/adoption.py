"""What does a program gain that changes one line? Steps/s of real trainings on their own environments and on ours.

    python benchmarks/adoption.py [--rows sb3-ppo ...] [--n-envs 4 8 16] [--repeats 3] [--steps 8192]

Every row is one training by the package that it is named after, with that package's defaults where it has some, on 4, 8
and 16 environments. Its contenders differ in how the environments are run, and nothing else: the package's own ways,
and ours. They take turns, `--repeats` times over, each with new environments and a new model; speeds are medians of
steps per second, start and end not counted. "same weights" says whether all of these trainings ended with the same
ones, bit for bit. The last line of a row is what the learner allows: how much faster the training on the package's
processes would be if their steps took no time. A row whose package is not installed is left out.

The table at the end has, for each number of environments, how many times as fast ours is as the package's processes,
and as its own way without processes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlstructs import SharedVectorEnv

N_WORKERS = 2
# What ours must reach with 16 environments: of the package's own processes, and of the fastest of all its own ways.
MUST_OF_PROCESSES, MUST_OF_FASTEST, MUST_WITH = 1.5, 0.97, 16
Make = Callable[[int], Any]  # the number of environments -> the environments
Train = Callable[[Any, int], Iterable[torch.Tensor]]  # environments, steps -> the weights at the end


@dataclass(frozen=True)
class Row:
    """A training, and the ways of running its environments.

    Attributes:
        modules: what has to be installed.
        envs: makes so many environments, by contender. The first is ours; those called "processes" have a process each.
        train: takes these environments that many steps, and returns the weights that it has learned.
    """

    name: str
    modules: tuple[str, ...]
    envs: dict[str, Make]
    train: Train


def makers(env_id: str, n_envs: int) -> list[Callable[[], gymnasium.Env]]:
    return [lambda: gymnasium.make(env_id) for _ in range(n_envs)]


def sb3_envs(env_id: str) -> dict[str, Make]:
    def make(n_envs: int, kind: str, **settings: Any) -> Any:
        from stable_baselines3.common import vec_env
        from stable_baselines3.common.env_util import make_vec_env

        from rlstructs.integrations.sb3 import SharedVecEnv

        cls = SharedVecEnv if kind == "SharedVecEnv" else getattr(vec_env, kind)
        return make_vec_env(env_id, n_envs, seed=0, vec_env_cls=cls, vec_env_kwargs=settings)

    return {
        "rlstructs": partial(make, kind="SharedVecEnv", n_workers=N_WORKERS),
        "rlstructs, here": partial(make, kind="SharedVecEnv", n_workers=0),
        "processes": partial(make, kind="SubprocVecEnv"),
        "here": partial(make, kind="DummyVecEnv"),
    }


def sb3_ppo(envs: Any, steps: int) -> Iterable[torch.Tensor]:
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", envs, n_steps=128, batch_size=512, n_epochs=4, seed=0, device="cpu")
    return model.learn(steps).policy.state_dict().values()


def sb3_dqn(envs: Any, steps: int) -> Iterable[torch.Tensor]:
    from stable_baselines3 import DQN

    from rlstructs.integrations.sb3 import ReplayBuffer

    own = type(envs).__module__.startswith("rlstructs")
    kwargs = {"replay_buffer_class": ReplayBuffer} if own else {}
    model = DQN("MlpPolicy", envs, buffer_size=100_000, learning_starts=256, seed=0, device="cpu", **kwargs)
    return model.learn(steps).policy.state_dict().values()


def sb3_sac(envs: Any, steps: int) -> Iterable[torch.Tensor]:
    from stable_baselines3 import SAC

    from rlstructs.integrations.sb3 import ReplayBuffer

    own = type(envs).__module__.startswith("rlstructs")
    kwargs = {"replay_buffer_class": ReplayBuffer} if own else {}
    model = SAC("MlpPolicy", envs, buffer_size=100_000, learning_starts=256, seed=0, device="cpu", **kwargs)
    return model.learn(steps).policy.state_dict().values()


def gymnasium_envs(env_id: str, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> dict[str, Make]:
    return {
        "rlstructs": lambda n: SharedVectorEnv(makers(env_id, n), N_WORKERS, autoreset_mode=mode),
        "rlstructs, here": lambda n: SharedVectorEnv(makers(env_id, n), 0, autoreset_mode=mode),
        "processes": lambda n: AsyncVectorEnv(makers(env_id, n), autoreset_mode=mode),
        "here": lambda n: SyncVectorEnv(makers(env_id, n), autoreset_mode=mode),
    }


def loop_ppo(envs: Any, steps: int, n_timesteps: int = 128) -> Iterable[torch.Tensor]:
    """PPO as one loop over a vector environment, in the manner of CleanRL's `ppo.py`: 4 epochs of 4 minibatches."""
    n_in, n_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    actor, critic = (
        torch.nn.Sequential(torch.nn.Linear(n_in, 64), torch.nn.Tanh(), torch.nn.Linear(64, n_out))
        for n_out in (n_actions, 1)
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 2.5e-4, eps=1e-5)
    observation, _ = envs.reset(seed=0)
    for _ in range(steps // (n_timesteps * envs.num_envs)):
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
    return [*actor.parameters(), *critic.parameters()]


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


def tianshou_envs(env_id: str) -> dict[str, Make]:
    def make(n_envs: int, kind: str, **settings: Any) -> Any:
        import tianshou.env

        from rlstructs.integrations.tianshou import WorkerVectorEnv

        cls = WorkerVectorEnv if kind == "WorkerVectorEnv" else getattr(tianshou.env, kind)
        return cls(makers(env_id, n_envs), **settings)

    return {
        "rlstructs": partial(make, kind="WorkerVectorEnv", n_workers=N_WORKERS),
        "rlstructs, here": partial(make, kind="WorkerVectorEnv", n_workers=0),
        "processes": partial(make, kind="SubprocVectorEnv"),
        "here": partial(make, kind="DummyVectorEnv"),
    }


def tianshou_collect(envs: Any, steps: int) -> Iterable[torch.Tensor]:
    """A DQN of tianshou: collect a step of every environment, update from 64 rows."""
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.torch_utils import policy_within_training_step

    envs.seed(0)
    action_space = envs.action_space[0]
    net = Net(state_shape=envs.observation_space[0].shape, action_shape=action_space.n, hidden_sizes=[64, 64])
    policy = DiscreteQLearningPolicy(model=net, action_space=action_space, eps_training=0.1)
    dqn = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), target_update_freq=320)
    collector = Collector(dqn, envs, VectorReplayBuffer(100_000, len(envs)))
    collector.reset()
    with policy_within_training_step(policy):
        for _ in range(steps // (10 * len(envs))):
            collector.collect(n_step=10 * len(envs))
            dqn.update(collector.buffer, 64)
    return policy.state_dict().values()


def skrl_ppo(envs: Any, steps: int) -> Iterable[torch.Tensor]:
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
    envs.reset(seed=0)
    wrapped = wrap_env(envs)
    names = ("observation_space", "state_space", "action_space", "device")
    spaces = {name: getattr(wrapped, name) for name in names}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    memory = RandomMemory(memory_size=128, num_envs=wrapped.num_envs, device=wrapped.device)
    config = PPO_CFG(rollouts=128, learning_epochs=4, mini_batches=4)
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    agent = PPO(models=models, memory=memory, cfg=config, **spaces)
    settings = {"disable_progressbar": True, "close_environment_at_exit": False}
    SequentialTrainer(env=wrapped, agents=agent, cfg={"timesteps": steps // wrapped.num_envs, **settings}).train()
    return [tensor for model in models.values() for tensor in model.state_dict().values()]


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


class Result(NamedTuple):
    """What a row came to with a number of environments.

    Attributes:
        speeds: medians of steps/s, by contender.
        share: what share of the training's time the package's processes take.
        is_same: whether the weights of all trainings are equal.
    """

    speeds: dict[str, float]
    share: float
    is_same: bool

    def ratio(self, ours: str, theirs: str) -> float:
        return self.speeds[ours] / self.speeds[theirs]


def measure(row: Row, n_envs: int, repeats: int, steps: int) -> Result:
    """Trains with every contender in turn."""
    speeds: dict[str, list[float]] = {}
    shares, digests = [], set()
    with contextlib.closing(row.envs["here"](n_envs)) as envs:
        row.train(envs, 2048)  # imports what the package imports when it trains
    for _ in range(repeats):
        for name, make in row.envs.items():
            torch.manual_seed(0)
            np.random.seed(0)  # tianshou explores by it
            with contextlib.closing(make(n_envs)) as envs:
                spent, start = time_steps(envs), time.perf_counter()
                weights = row.train(envs, steps)
                seconds = time.perf_counter() - start
                digests.add(hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).digest())
                speeds.setdefault(name, []).append(steps / seconds)
                if name == "processes":
                    shares.append(spent[0] / seconds)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return Result(medians, statistics.median(shares), len(digests) == 1)


def show(row: Row, n_envs: int, result: Result) -> None:
    """One row of the table, and what must hold on it."""
    print(f"{row.name}, {n_envs} environments: "
          + " | ".join(f"{name} {speed:,.0f}" for name, speed in result.speeds.items()))  # fmt: skip
    best = max(speed for name, speed in result.speeds.items() if name.startswith("rlstructs"))
    fastest = max(speed for name, speed in result.speeds.items() if not name.startswith("rlstructs"))
    for what, ratio, must in (
        ("its processes", result.ratio("rlstructs", "processes"), MUST_OF_PROCESSES),
        ("the fastest of its own", best / fastest, MUST_OF_FASTEST),
    ):
        verdict = f", must {must}: {'ok' if ratio >= must else 'TOO SLOW'}" if n_envs == MUST_WITH else ""
        print(f"    {ratio:.2f} of {what}{verdict}", flush=True)
    print(f"    {1 / (1 - result.share):.2f} of its processes if steps took no time at all", flush=True)
    print(f"    same weights: {'yes' if result.is_same else 'NO'}", flush=True)


def print_table(results: dict[str, dict[int, Result]], sizes: list[int]) -> None:
    """How many times as fast ours is, as a table of Markdown."""
    shown = ", ".join(map(str, sizes))
    print(f"\n| training | of its processes, with {shown} | of its own way without | ours without | same weights |")
    print("| --- | --- | --- | --- | --- |")
    for name, by_size in results.items():
        found = list(by_size.values())
        columns = [
            " ".join(f"{each.ratio(*pair):.2f}" for each in found)
            for pair in (("rlstructs", "processes"), ("rlstructs", "here"), ("rlstructs, here", "here"))
        ]
        print(f"| {name} | {' | '.join(columns)} | {'yes' if all(each.is_same for each in found) else 'no'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS])
    parser.add_argument("--n-envs", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8192)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, {N_WORKERS} workers; steps/s")
    results: dict[str, dict[int, Result]] = {}
    for row in ROWS:
        if row.name in arguments.rows and all(importlib.util.find_spec(module) for module in row.modules):
            for n_envs in arguments.n_envs:
                result = measure(row, n_envs, arguments.repeats, arguments.steps)
                results.setdefault(row.name, {})[n_envs] = result
                show(row, n_envs, result)
    print_table(results, arguments.n_envs)


if __name__ == "__main__":
    main()
