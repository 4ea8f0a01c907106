"""Every memory takes trajectories of Dict and Tuple actions and observations."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from rlstructs import DictTensor, RandomAgent, RL_Agent, RL_Batcher
from rlstructs.envs import GymEnv
from rlstructs.errors import MissingKeyError
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

BOX = Box(-1, 1, (2,), np.float32)
ACTIONS = {
    "Dict": (Dict({"left": Discrete(3), "right": BOX}), {"left", "right"}),
    "nested Dict": (Dict({"arm": Dict({"grip": Discrete(3), "turn": BOX}), "go": BOX}), {"arm/grip", "arm/turn", "go"}),
    "Tuple": (Tuple((Discrete(3), BOX)), {"0", "1"}),
    "Tuple in a Dict": (Dict({"a": Tuple((BOX, Discrete(2))), "action": BOX}), {"a/0", "a/1", "action"}),
    "plain": (BOX, None),
}
OBSERVATIONS = {"Box": (BOX, None), "Dict": (Dict({"image": BOX, "speed": Box(0, 9, (1,))}), {"image", "speed"})}


class Nested(gymnasium.Env):
    """Shows where it is, as its space wants it; an episode has three steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._seen(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self._t += 1
        return self._seen(), float(self._t), self._t == 3, False, {}

    def _seen(self):
        frame = np.full(2, self._t / 10, np.float32)
        if isinstance(self.observation_space, Box):
            return frame
        return {"image": frame, "speed": frame[:1]}


class TellsMore(RL_Agent):
    """Puts out a value and its logits beside a random action."""

    def __init__(self, space):
        self._inner = RandomAgent(space)

    def initial_state(self, agent_info, B):
        return self._inner.initial_state(agent_info, B)

    def __call__(self, state, observation, agent_info=None, history=None):
        output, state = self._inner(state, observation, agent_info, history)
        n = len(observation)
        more = {"value": torch.ones(n), "logits": torch.zeros(n, 3), "action_mean": torch.zeros(n, 2)}
        return DictTensor({**dict(output.items()), **more}), state


def trajectories_of(observation_space, action_space):
    def env(n_envs, seed):
        return GymEnv([Nested(observation_space, action_space) for _ in range(n_envs)], seed=seed)

    with RL_Batcher(n_timesteps=4, create_agent=TellsMore, agent_args={"space": action_space}, create_env=env,
                    env_args={"n_envs": 2}, n_processes=0, seeds=[0]) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        batch, _ = batcher.get()
        return batch


def memory(framework):
    import importlib

    pytest.importorskip({"torch": "torch", "jax": "jax", "warp": "warp"}[framework])
    return importlib.import_module(f"rlstructs.memories.{framework}").RandomMemory(memory_size=16, num_envs=2)


def read_memory(made):
    names = made.get_tensor_names()
    return dict(zip(names, made.sample(names, batch_size=5)[0], strict=True))


SURFACES = {
    "skrl torch": (lambda: memory("torch"), "actions", "observations", read_memory),
    "skrl jax": (lambda: memory("jax"), "actions", "observations", read_memory),
    "skrl warp": (lambda: memory("warp"), "actions", "observations", read_memory),
    "plain": (lambda: ReplayBuffer(32), "act", "obs", lambda made: made.sample(5)[0]),
    "prioritised": (lambda: PrioritizedReplayBuffer(32, 0.5, 0.5), "act", "obs", lambda made: made.sample(5)[0]),
    "vector": (lambda: VectorReplayBuffer(32, 2), "act", "obs", lambda made: made.sample(5)[0]),
    "prioritised vector": (
        lambda: PrioritizedVectorReplayBuffer(32, 2, alpha=0.5, beta=0.5), "act", "obs", lambda made: made.sample(5)[0],
    ),
    "cached": (lambda: CachedReplayBuffer(ReplayBuffer(32), 2, 8), "act", "obs", lambda made: made.sample(5)[0]),
    "chunks": (lambda: ChunkReplayBuffer(64, 0, n_lanes=2), "actions", "observations",
               lambda made: made.sample(3, 2).data),
    "prioritised chunks": (lambda: ChunkReplayBuffer(64, 0, enable_prioritized=True, n_lanes=2), "actions",
                           "observations", lambda made: made.sample(3, 2, "prioritized").data),
    "torchrl": (lambda: DictTensorReplayBuffer(storage=LazyTensorStorage(64)), "action/action", "observation/frame",
                lambda made: made.sample(3)),
}  # fmt: skip


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("observations", OBSERVATIONS)
@pytest.mark.parametrize("actions", ACTIONS)
def test_memories_take_nested_actions_and_observations(surface, observations, actions):
    space, inside = ACTIONS[actions]
    shown, parts = OBSERVATIONS[observations]
    make, act, obs, read = SURFACES[surface]
    trajectories = trajectories_of(shown, space)
    made = make()
    for _ in range(2):
        made.add_trajectories(trajectories)
    assert len(made) > 0
    names = set(read(made))  # of all arrays, joined
    if surface == "torchrl":  # which keeps all keys as they are
        assert names >= {key for key in trajectories.trajectories.keys() if key.startswith("action/")}  # noqa: SIM118
        return
    for name, nested in ((act, inside), (obs, parts)):
        wanted = {name} if nested is None else {f"{name}/{part}" for part in nested}
        assert {each for each in names if each == name or each.startswith(f"{name}/")} == wanted
    assert not any("value" in name or "logits" in name or "mean" in name for name in names)


@pytest.mark.parametrize("actions", ACTIONS)
def test_what_is_written_of_nested_actions_is_what_was_done(actions):
    space, inside = ACTIONS[actions]
    trajectories = trajectories_of(BOX, space)
    steps = trajectories.trajectories
    buffer = VectorReplayBuffer(32, 2)
    buffer.add_trajectories(trajectories)
    torches = memory("torch")
    torches.add_trajectories(trajectories)
    for part in inside or {""}:
        end = f"/{part}" if part else ""
        expected = steps[f"action/action{end}"].numpy()
        for lane in range(2):
            n = int(steps.lengths[lane])
            rows = buffer.get(np.arange(16 * lane, 16 * lane + n), f"act{end}")
            assert np.array_equal(np.reshape(rows, expected[lane, :n].shape), expected[lane, :n])
            live = torches.get_tensor_by_name(f"actions{end}")[:n, lane].numpy()
            assert np.array_equal(live.reshape(expected[lane, :n].shape), expected[lane, :n])


def test_names_that_are_given_stand_for_what_is_nested_too():
    trajectories = trajectories_of(*(each[0] for each in (OBSERVATIONS["Dict"], ACTIONS["Dict"])))
    names = {"done_so": "action/action", "seen": "observation/frame", "v": "action/value"}
    made = memory("torch")
    made.add_trajectories(trajectories, names)
    wanted = ["done_so/left", "done_so/right", "seen/image", "seen/speed", "v"]
    assert made.get_tensor_names() == wanted
    rows = DictTensorReplayBuffer(storage=LazyTensorStorage(64))
    rows.add_trajectories(trajectories, names)
    assert sorted(name for name in rows.sample(2).keys() if name != "index") == wanted  # noqa: SIM118
    with pytest.raises(MissingKeyError, match=r"^add_trajectories: no \['action/nothing'\] in the trajectories,"):
        memory("torch").add_trajectories(trajectories, {"a": "action/nothing"})
    chunk = ChunkReplayBuffer(64, 0, n_lanes=2)
    for tag, dtype in {"actions/left": np.int64, "observations/image": np.float32, "rewards": np.float32}.items():
        chunk.setup_entry(tag, dtype)
    chunk.add_trajectories(trajectories)
    batch = chunk.sample(2, 1).data
    assert sorted(batch) == ["actions/left", "observations/image", "rewards"]
    assert batch["actions/left"].dtype == np.int64
