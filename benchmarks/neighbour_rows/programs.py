"""Whole loops as their authors wrote them, over our buffers and over their own.

At most as long as over their own; tianshou's Collector with 16 environments and more at most 0.9 times as long.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from gymnasium import spaces

import rlstructs.integrations.sb3 as sb3_ours
import rlstructs.integrations.tianshou as tianshou_ours
import rlstructs.replay
from neighbour_rows import Call, Iterator, Row, both, peer
from neighbour_rows.skrl import SK, advantages
from rlstructs.memories.torch import RandomMemory


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def tianshou_collector() -> Iterator[Row]:
    data = peer("tianshou.data")
    envs_module = peer("tianshou.env")
    reinforce = peer("tianshou.algorithm.modelfree.reinforce")

    def make(module: Any, n: int) -> Call:
        envs = envs_module.DummyVectorEnv([cartpole] * n)
        policy = reinforce.DiscreteActorPolicy(actor=torch.nn.Linear(4, 2), action_space=spaces.Discrete(2))
        single = module if module is data else rlstructs.replay
        buffer = single.ReplayBuffer(20_000) if n == 1 else module.VectorReplayBuffer(20_000, n)
        collector = data.Collector(policy, envs, buffer)
        collector.reset()
        return lambda: collector.collect(n_step=40 * n, random=True)

    for n in (1, 8, 16, 32):
        contenders = both(lambda module, n=n: make(module, n), tianshou_ours, data, "tianshou")
        yield Row("tianshou's Collector, 40 steps", f"{n} CartPoles", contenders, bound=0.9 if n >= 16 else 1.0)


PPO = {
    "observations": 60,
    "states": None,
    "actions": 8,
    "rewards": 1,
    "terminated": 1,
    "truncated": 1,
    "log_prob": 1,
    "values": 1,
    "returns": 1,
    "advantages": 1,
}
READ = ["observations", "states", "actions", "log_prob", "values", "returns", "advantages"]


def skrl_ppo(cls: Any, n_envs: int, n_rows: int, time_out: bool, recurrent: bool) -> Call:
    """One rollout and one update of skrl's PPO, as its memory sees them: 5 epochs of 4 batches, each read once."""
    memory = cls(memory_size=n_rows, num_envs=n_envs, device="cpu")
    for name, size in PPO.items():
        memory.create_tensor(
            name, size=size, dtype=torch.bool if name in ("terminated", "truncated") else torch.float32
        )
    names = list(READ)
    if recurrent:
        memory.create_tensor("rnn_policy_0", size=(1, 64), dtype=torch.float32, keep_dimensions=True)
        names.append("rnn_policy_0")
    steps = []
    for t in range(n_rows):
        step = {
            name: torch.rand(n_envs, size)
            for name, size in PPO.items()
            if size and name not in ("returns", "advantages")
        }
        step |= {"states": None, "next_states": None, "next_observations": torch.rand(n_envs, 60)}
        step |= {
            "terminated": torch.rand(n_envs, 1) < 0.01,
            "truncated": torch.full((n_envs, 1), time_out and t == n_rows - 1),
        }
        if recurrent:
            step["rnn_policy_0"] = torch.rand(1, n_envs, 64).transpose(0, 1)
        steps.append(step)
    length = {"sequence_length": 8} if recurrent else {}

    def update() -> None:
        for step in steps:
            memory.add_samples(**step)
        advantages(memory, n_rows)
        batches = memory.sample_all(names, mini_batches=4, **length)
        for _ in range(5):
            for batch in batches:
                for tensor in batch:
                    if tensor is not None:
                        tensor.sum()

    return update


def skrl_sac(cls: Any, n_envs: int, n_rows: int) -> Call:
    """A step of skrl's SAC: rows of all environments in, a batch out."""
    memory = cls(
        memory_size=n_rows, num_envs=n_envs, device="cpu", **({} if cls is RandomMemory else {"replacement": True})
    )
    sizes = {"observations": 17, "actions": 6, "rewards": 1, "next_observations": 17, "terminated": 1, "truncated": 1}
    for name, size in sizes.items():
        memory.create_tensor(
            name, size=size, dtype=torch.bool if name in ("terminated", "truncated") else torch.float32
        )
    given = {name: torch.rand(n_envs, size) for name, size in sizes.items()}
    given |= {
        "terminated": torch.zeros(n_envs, 1, dtype=torch.bool),
        "truncated": torch.zeros(n_envs, 1, dtype=torch.bool),
    }
    for _ in range(100):
        memory.add_samples(**given)
    return lambda: (memory.add_samples(**given), memory.sample(list(sizes), batch_size=256))


def skrl_programs() -> Iterator[Row]:
    for n_envs, n_rows in ((16, 128), (64, 128), (256, 64), (4096, 24)):
        for time_out in (False, True):
            make = lambda cls, n=n_envs, r=n_rows, t=time_out: skrl_ppo(cls, n, r, t, False)
            variant = f"{n_envs} x {n_rows}{', all time out together' if time_out else ''}"
            yield Row("skrl's PPO, its memory", variant, both(make, RandomMemory, SK, "skrl"), bound=1.0)
        make = lambda cls, n=n_envs, r=n_rows: skrl_ppo(cls, n, r, False, True)
        yield Row("skrl's PPO_RNN, its memory", f"{n_envs} x {n_rows}", both(make, RandomMemory, SK, "skrl"), bound=1.0)
        make = lambda cls, n=n_envs: skrl_sac(cls, n, max(128, 100_000 // n))
        yield Row("skrl's SAC, its memory", f"{n_envs}", both(make, RandomMemory, SK, "skrl"), bound=1.0)


def sb3_programs() -> Iterator[Row]:
    sb3 = peer("stable_baselines3")
    buffers = peer("stable_baselines3.common.buffers")
    sb3.common.utils.set_random_seed(0)

    def learn(module: Any, algorithm: str, env: str, **kwargs: Any) -> Call:
        def run() -> None:
            model = getattr(sb3, algorithm)(
                "MlpPolicy",
                env,
                learning_starts=100,
                buffer_size=10_000,
                replay_buffer_class=module.ReplayBuffer,
                seed=0,
                device="cpu",
                **kwargs,
            )
            model.learn(400)

        return run

    for algorithm, env in (("DQN", "CartPole-v1"), ("SAC", "Pendulum-v1")):
        contenders = both(lambda m, a=algorithm, e=env: learn(m, a, e), sb3_ours, buffers, "sb3")
        yield Row(f"SB3's {algorithm}, 400 steps", env, contenders, bound=1.0)


def cleanrl_dqn(module: Any) -> Call:
    """The loop of CleanRL's dqn.py: a step, a row in, a batch out every tenth step."""
    env = gymnasium.vector.SyncVectorEnv([cartpole])
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84), torch.nn.ReLU(), torch.nn.Linear(84, 2)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=2.5e-4)
    buffer = module.ReplayBuffer(
        10_000, env.single_observation_space, env.single_action_space, "cpu", handle_timeout_termination=False
    )
    seen, _ = env.reset(seed=0)
    state: dict[str, Any] = {"seen": seen, "t": 0}

    def run() -> None:
        for _ in range(100):
            state["t"] += 1
            with torch.no_grad():
                actions = network(torch.tensor(state["seen"])).argmax(1).numpy()
            following, rewards, terminated, _, infos = env.step(actions)
            buffer.add(state["seen"], following, actions, rewards, terminated, [infos])
            state["seen"] = following
            if state["t"] > 128 and state["t"] % 10 == 0:
                data = buffer.sample(128)
                with torch.no_grad():
                    target = data.rewards.flatten() + 0.99 * network(data.next_observations).max(1)[0] * (
                        1 - data.dones.flatten()
                    )
                loss = torch.nn.functional.mse_loss(
                    target, network(data.observations).gather(1, data.actions).squeeze()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return run


def torchrl_dqn(index: int) -> Call:
    """The loop of torchrl's DQN around its buffer: 16 rows in, 4 batches of 128 out, a loss of each."""
    from neighbour_rows.torchrl import make_buffer, nested

    buffer, rows_ = make_buffer(index, 100_000, 128), nested(16)
    network = torch.nn.Linear(17, 6)
    buffer.extend(nested(1000))

    def run() -> None:
        buffer.extend(rows_)
        for _ in range(4):
            batch = buffer.sample()
            loss = (
                (network(batch["o0"]) - batch["next", "reward"] - 0.99 * network(batch["next", "o0"]).detach())
                .pow(2)
                .mean()
            )
            loss.backward()

    return run


def rows() -> Iterator[Row]:
    yield from tianshou_collector()
    yield from skrl_programs()
    yield from sb3_programs()
    buffers = peer("stable_baselines3.common.buffers")
    yield Row("CleanRL's DQN, 100 steps", "CartPole", both(cleanrl_dqn, sb3_ours, buffers, "sb3"), bound=1.0)
    yield Row("torchrl's DQN, an update", "16 rows in, 4 batches out", both(torchrl_dqn, 0, 1, "torchrl"), bound=1.0)
