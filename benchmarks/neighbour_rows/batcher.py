"""Rollouts with no workers beside the plainest one and beside a bare loop, and one step beside gymnasium's.

A bare loop over the same environments draws no actions and keeps nothing: its rows are there to be read, without a
bound.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import gymnasium
import numpy as np
import torch

from neighbour_rows import Call, Iterator, Row
from neighbour_rows.stepping import INFOS, SPACES, UNSHARED, Fake, functions
from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, SharedVectorEnv
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import VectorReplayBuffer


class Agent(RL_Agent):
    """Gives constant actions, and as many other outputs, as much state, history and parameters as it is told to."""

    def __init__(self, state: int = 0, n_outputs: int = 1, history: bool = False, size: int = 1):
        self.state, self.n_outputs, self.history = state, n_outputs, history
        self.network = torch.nn.Linear(size, size)

    def require_history(self) -> bool:
        return self.history

    def initial_state(self, agent_info: Any, B: int) -> DictTensor:
        return DictTensor({"h": torch.zeros(B, self.state)}) if self.state else DictTensor()

    def __call__(self, state: Any, observation: Any, agent_info: Any, history: Any = None) -> Any:
        B = observation.n_elems()
        output = {"action": torch.zeros(B, dtype=torch.int64)}
        output |= {f"o{i}": torch.zeros(B, 4) for i in range(self.n_outputs - 1)}
        return DictTensor(output), DictTensor({"h": state["h"] + 1}) if self.state else state

    def update(self, info: Any) -> None:
        self.network.load_state_dict(info)


def create_env(n_envs: int, seed: int, *args: Any) -> GymEnvInf:
    return GymEnvInf([Fake(*args) for _ in range(n_envs)], seed)


def make_batcher(
    n: int, n_timesteps: int, n_workers: int = 0, env_args: Any = (), agent: Any = None, **kwargs: Any
) -> Any:
    n_envs = n // max(n_workers, 1)
    create = partial(_create_env, env_args)
    return RL_Batcher(
        n_timesteps, Agent, agent or {}, create, {"n_envs": n_envs}, n_processes=n_workers, seeds=0, **kwargs
    )


def _create_env(args: Any, n_envs: int, seed: int) -> GymEnvInf:
    return create_env(n_envs, seed, *args)


def bare(n: int, n_timesteps: int, env_args: Any = ()) -> Call:
    """Steps the same environments, and that is all."""
    envs = [Fake(*env_args) for _ in range(n)]
    for env in envs:
        env.reset()

    def run() -> None:
        for _ in range(n_timesteps):
            for env in envs:
                if env.step(0)[2]:
                    env.reset()

    return run


def rollout(row: Row, n: int, n_timesteps: int, lease: bool = False, **kwargs: Any) -> Call:
    batcher = row.closing(make_batcher(n, n_timesteps, **kwargs))
    batcher.reset()

    def run() -> None:
        batcher.execute()
        if lease:
            with batcher.lease():
                pass
        else:
            batcher.get()

    return run


def features() -> Iterator[Row]:
    """Rollouts of 8 environments and 32 steps, in one group with the plain one."""
    variants: dict[str, Any] = {
        "plain": {},
        "a state of 8": {"agent": {"state": 8}},
        "history": {"agent": {"history": True}},
        "6 outputs": {"agent": {"n_outputs": 6}},
        "debug": {"debug": True},
        "restart": {"on_worker_failure": "restart"},
        "episodes of 20": {"env_args": ("Box 4", "none", 20)},
        "lease": {"lease": True},
    }
    for name, kwargs in variants.items():
        row = Row("execute + get, no workers, 8 x 32", name, {}, "8 x 32")
        row.contenders["ours"] = partial(rollout, row, 8, 32, **kwargs)
        yield row
    for n, n_timesteps in ((1, 32), (64, 32), (256, 32), (8, 1), (8, 5), (8, 128), (8, 1000)):
        row = Row("execute + get, no workers", f"{n} x {n_timesteps}, beside a bare loop", {}, bound=inf)
        row.contenders["ours"] = partial(rollout, row, n, n_timesteps)
        row.contenders["bare"] = partial(bare, n, n_timesteps)
        yield row
    for args in [*((space,) for space in SPACES if space not in UNSHARED), *(("Box 4", info) for info in INFOS)]:
        row = Row("execute + get, no workers, 8 x 32", f"{', '.join(args)}, beside a bare loop", {}, bound=inf)
        row.contenders["ours"] = partial(rollout, row, 8, 32, env_args=args)
        row.contenders["bare"] = partial(bare, 8, 32, args)
        yield row


def one_step() -> Iterator[Row]:
    """T = 1 beside one call of the same agent and one step of gymnasium's vector environments."""
    fns, actions = functions(8), np.zeros(8, np.int64)

    def vector(row: Row, cls: Any, *args: Any) -> Call:
        env = row.closing(cls(fns, *args))
        seen, _ = env.reset()
        agent, state, info = Agent(), DictTensor(), DictTensor()

        def step() -> None:
            agent(state, DictTensor({"frame": torch.from_numpy(seen)}), info)
            env.step(actions)

        return step

    for n_workers, cls in ((0, gymnasium.vector.SyncVectorEnv), (2, gymnasium.vector.AsyncVectorEnv)):
        row = Row("execute + get, 8 x 1", f"{n_workers} workers, beside one step", {}, is_wall_time=bool(n_workers))
        row.contenders["ours"] = partial(rollout, row, 8, 1, n_workers=n_workers)
        row.contenders["gymnasium"] = partial(vector, row, cls)
        yield row
    row = Row("SharedVectorEnv.step, 8", "2 workers", {}, is_wall_time=True)
    row.contenders["ours"] = partial(vector, row, SharedVectorEnv, 2)
    row.contenders["gymnasium"] = partial(vector, row, gymnasium.vector.AsyncVectorEnv)
    yield row


def updates() -> Iterator[Row]:
    for size in (50, 1600):
        state = torch.nn.Linear(size, size).state_dict()
        row = Row("RL_Batcher.update, no workers", f"{size * size * 4 / 1e6:.2f} MB, beside load_state_dict", {})

        def ours(row: Row = row, state: Any = state, size: int = size) -> Call:
            batcher = row.closing(make_batcher(8, 1, agent={"size": size}))
            batcher.reset()
            return lambda: batcher.update(state)

        def theirs(state: Any = state, size: int = size) -> Call:
            network = torch.nn.Linear(size, size)
            return lambda: network.load_state_dict(state)

        row.contenders |= {"ours": ours, "load": theirs}
        yield row


def into_memories() -> Iterator[Row]:
    """Feeding, and adding, beside handing out alone."""
    for n, n_timesteps in ((8, 1), (8, 32), (64, 32)):

        def fed(row: Row, n: int = n, n_timesteps: int = n_timesteps) -> Call:
            batcher = row.closing(make_batcher(n, n_timesteps))
            memory = RandomMemory(memory_size=1000, num_envs=n, device="cpu")
            batcher.feed(memory)
            batcher.reset()
            return lambda: (batcher.execute(), batcher.wait())

        def added(row: Row, store: Any, n: int = n, n_timesteps: int = n_timesteps) -> Call:
            batcher = row.closing(make_batcher(n, n_timesteps))
            batcher.reset()
            return lambda: (batcher.execute(), store.add_trajectories(batcher.get()[0]))

        for name, make in {
            "fed to a memory": fed,
            "added to a memory": lambda row, n=n: added(row, RandomMemory(memory_size=1000, num_envs=n, device="cpu")),
            "added to a VectorReplayBuffer": lambda row, n=n: added(row, VectorReplayBuffer(1000 * n, n)),
        }.items():
            row = Row("execute + get", f"{n} x {n_timesteps}, {name}", {}, bound=2.0)
            row.contenders |= {"ours": partial(make, row), "get": partial(rollout, row, n, n_timesteps)}
            yield row


def rows() -> Iterator[Row]:
    for part in (features, one_step, updates, into_memories):
        yield from part()
