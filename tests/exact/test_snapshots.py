"""`rlstructs.exact`: environments in the middle of their episodes are brought back."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from helpers import Count

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    NormalizeObservation,
    NormalizeReward,
    SpecError,
)
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.snapshots import bring_back, register, take_state
from rlstructs.exact.env_state import Actions
from rlstructs.exact.methods import find_difference
from rlstructs.exact.pickler import dumps, loads

# The table on the page about exact resumption.
PICKLED = [
    "CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1",
    "Blackjack-v1", "FrozenLake-v1", "CliffWalking-v1", "Taxi-v4",
    "ALE/Pong-v5", "ALE/Breakout-v5", "ALE/SpaceInvaders-v5", "ALE/MontezumaRevenge-v5",
    "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5", "Reacher-v5",
]  # fmt: skip
REPLAYED = ["LunarLander-v3", "BipedalWalker-v3"]
N_STEPS = 500


def make(env_id, **arguments):
    if env_id.startswith("ALE/"):
        import ale_py  # noqa: F401 - registers
    return gymnasium.make(env_id, **arguments)


def check_round_trip(make_env, n_before=57, n_after=N_STEPS, method="pickle"):
    """Whether a copy that is restored in mid-episode shows the same as the environment, and as an untouched twin."""
    env, twin = make_env(), make_env()
    actions = Actions(row_env(env), None)
    action = [actions.draw(np.arange(env.n_envs())) for _ in range(n_before + n_after)]
    for each in (env, twin):
        each.reset(DictTensor())
        for at in range(n_before):
            each.step(action[at])
    state = take_state(env, make_env)
    assert set(state.methods) == {method}
    copy = bring_back(state, make_env)
    for at in range(n_before, n_before + n_after):
        expected = env.step(action[at])
        for other in (copy, twin):
            found = other.step(action[at])
            assert found[0][0] == expected[0][0] and found[1][0] == expected[1][0], at
    for each in (env, twin, copy):
        each.close()


@pytest.mark.parametrize("env_id", [*PICKLED, *REPLAYED])
def test_environments_make_the_round_trip(env_id):
    is_replayed = env_id in REPLAYED
    if is_replayed:
        pytest.importorskip("Box2D")
    check_round_trip(lambda: GymEnvInf([make(env_id)], 3, episode_seeds=is_replayed),
                     method="replay" if is_replayed else "pickle")  # fmt: skip


def atari():
    env = make("ALE/Pong-v5", frameskip=1)
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env, noop_max=5), 4)


def wrapped():
    env = wrappers.RecordEpisodeStatistics(make("Pendulum-v1", max_episode_steps=40))
    return wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.DelayObservation(env, 2)))


WRAPPED = {
    "atari": lambda: GymEnvInf([atari()], 1),
    "wrappers": lambda: GymEnvInf([wrapped(), wrapped()], 1),
    "normalised": lambda: NormalizeReward(NormalizeObservation(GymEnvInf([make("CartPole-v1")] , 2))),
    "on a device": lambda: DeviceEnv(GymEnvInf([make("CartPole-v1") for _ in range(2)], 2), "cpu", "cpu"),
    "sync": lambda: GymVectorEnv(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync"), 4),
    "vector": lambda: GymVectorEnv(
        gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point"), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_and_vector_environments_make_the_round_trip(name):
    check_round_trip(WRAPPED[name], n_after=60)


class Walk:
    """A vectorised environment of a user."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seed=0):
        self.rng, self.at = np.random.default_rng(seed), np.zeros(3, np.float32)

    def n_envs(self):
        return 3

    def reset(self, env_info):
        self.at[:] = 0
        return self._show(), torch.arange(3)

    def step(self, action):
        self.at += action["action"].numpy() - 0.5 + self.rng.random(3, np.float32)
        return ((shown := self._show()), torch.arange(3)), (shown, torch.arange(3))

    def close(self):
        pass

    def _show(self):
        return DictTensor({"frame": torch.tensor(self.at)})


def test_a_vectorised_environment_of_a_user_makes_the_round_trip():
    check_round_trip(Walk, n_after=20)


class Around:
    """A vectorised environment of a user's, around one of the library's."""

    def __init__(self, env):
        self.env, self.action_space = env, env.action_space

    def n_envs(self):
        return self.env.n_envs()

    def reset(self, env_info):
        return self.env.reset(env_info)

    def step(self, action):
        return self.env.step(action)

    def close(self):
        self.env.close()


def several_parts(n=3):
    """CartPoles that show two arrays."""
    return [wrappers.TimeAwareObservation(make("CartPole-v1"), flatten=False) for _ in range(n)]


AROUND = {
    "GymEnv": lambda: GymEnv(several_parts(), 2),
    "GymEnvInf": lambda: GymEnvInf(several_parts(), 2),
    "normalised": lambda: NormalizeReward(NormalizeObservation(GymEnvInf(several_parts(), 2))),
    "vector": lambda: GymVectorEnv(gymnasium.vector.SyncVectorEnv([lambda: several_parts(1)[0]] * 3), 2),
}


@pytest.mark.parametrize("name", AROUND)
def test_an_environment_of_a_user_around_one_of_the_library_makes_the_round_trip(name):
    n_before = 3 if name == "GymEnv" else 57  # later all have ended
    check_round_trip(lambda: Around(AROUND[name]()), n_before, n_after=5 if name == "GymEnv" else 60)


def test_agents_of_pettingzoo_make_the_round_trip():
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    from rlstructs.integrations.pettingzoo import ParallelEnvs

    check_round_trip(lambda: ParallelEnvs([spread.parallel_env] * 2, 5), n_after=60)


def test_what_draws_from_global_streams_is_compared_with_the_same_numbers():
    class Global(Count):
        def step(self, action):
            result = super().step(action)
            return result[0] + np.float32(np.random.random()), *result[1:]

    env = GymEnvInf([Global(5)], 0)
    env.reset()
    before = np.random.get_state()[1].copy()
    assert take_state(env, lambda: None).methods == ["pickle"]
    assert (np.random.get_state()[1] == before).all()


class Dropping(Count):
    """Its pickle lacks the step, as those of many environments lack all of their state."""

    def __getstate__(self):
        return {**vars(self), "steps": 0}


def test_an_environment_whose_pickle_drops_its_state_is_not_pickled():
    env = GymEnvInf([Dropping(9)], 0)
    env.reset()
    env.step(DictTensor({"action": torch.zeros(1, dtype=torch.int64)}))
    with pytest.raises(SpecError, match=r"^environment 0 \(Dropping\) cannot be brought back: pickle: steps is lost; "):
        take_state(env, lambda: GymEnvInf([Dropping(9)], 0))


def test_a_replay_that_shows_something_else_is_refused():
    class Remembering(Count):
        """Goes on to count episodes, whatever the seed, and cannot be pickled."""

        def __init__(self, length):
            super().__init__(length)
            self.generator = itertools.count(), (x for x in ())

    def make_env():
        return GymEnvInf([Remembering(3)], 0, episode_seeds=True)

    env = make_env()
    env.reset()
    for _ in range(4):
        env.step(DictTensor({"action": torch.zeros(1, dtype=torch.int64)}))
    with pytest.raises(SpecError, match=r"replay: after 1 steps it shows something else"):
        take_state(env, make_env)


def test_environments_that_have_ended_are_brought_back_as_they_ended():
    def make_env():
        return GymEnv([Count(2), Count(50)], 0)

    env = make_env()
    env.reset()
    action = DictTensor({"action": torch.zeros(2, dtype=torch.int64)})
    env.step(action)
    env.step(action)
    copy = loads(dumps(env))
    one = DictTensor({"action": torch.zeros(1, dtype=torch.int64)})
    assert copy.step(one)[0][0] == env.step(one)[0][0]


class World:
    """A simulator that cannot be pickled."""

    def __init__(self, at):
        self.at, self.rows = at, (row for row in ())


class InWorld(Count):
    def __init__(self, length):
        super().__init__(length)
        self.world = World(0)

    def step(self, action):
        self.world.at += 1
        result = super().step(action)
        return result[0] + self.world.at, *result[1:]


def test_a_simulator_of_a_user_is_saved_by_its_adapter(monkeypatch):
    monkeypatch.setattr("rlstructs.exact.pickler._adapters", {})
    register(World, lambda world: world.at, World)
    check_round_trip(lambda: GymEnvInf([InWorld(5), InWorld(6)], 0), n_after=20)
    with pytest.raises(TypeError, match="^register: load must be a function, got None$"):
        register(World, lambda world: world.at, None)


class BulletClient:
    """Named as that of PyBullet: all that it holds is the number of a simulator."""

    __module__ = "pybullet_utils.bullet_client"
    connected = 0

    def __init__(self):
        BulletClient.connected += 1

    def disconnect(self):
        BulletClient.connected -= 1


class InBullet(Count):
    def __init__(self, length):
        super().__init__(length)
        self.client = BulletClient()

    def close(self):
        self.client.disconnect()


def test_a_client_of_pybullet_is_not_copied_but_its_episode_is_played_again():
    def make_env():
        return GymEnvInf([InBullet(9)], 0, episode_seeds=True)

    check_round_trip(make_env, n_before=5, n_after=20, method="replay")
    env = make_env()
    env.reset()
    before = BulletClient.connected
    assert take_state(env, make_env).methods == ["replay"] and BulletClient.connected == before
    copied = GymEnvInf([InBullet(9)], 0)
    copied.reset()
    with pytest.raises(
        SpecError, match="PyBullet's client is only the number of a simulator, which a copy would share"
    ):
        take_state(copied, lambda: GymEnvInf([InBullet(9)], 0))


def test_tensors_that_share_memory_still_do():
    module = torch.nn.Linear(2, 3)
    thing = {"module": module, "view": module.weight.detach()[1:], "half": torch.ones(2, dtype=torch.bfloat16)}
    copy = loads(dumps(thing))
    assert torch.equal(copy["module"].weight, module.weight) and copy["half"].dtype is torch.bfloat16
    copy["view"].fill_(7)
    assert (copy["module"].weight[1:] == 7).all() and not (module.weight == 7).any()


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": [1, 2.0]}, {"a": [1, 2.0]}, None),
        ({"a": [1, 2.0]}, {"a": [1, 3.0]}, "['a'][1]"),
        ({"a": [1]}, {"a": [1, 2]}, "['a']"),
        ({"a": 1}, {}, "['a']"),
        ({"a": object()}, {}, None),
        ({"a": np.nan}, {"a": np.nan}, None),
        (torch.tensor([np.nan, 1]), torch.tensor([np.nan, 1]), None),
        (torch.tensor([np.nan, 1]), torch.tensor([np.nan, 2]), "Tensor"),
        (np.random.default_rng(0), np.random.default_rng(0), None),
        (np.random.default_rng(0), np.random.default_rng(1), "['state']['state']"),
        (Count(3), Count(4), "length"),
    ],
)
def test_differences_are_found(one, other, path):
    assert find_difference(one, other) == path
