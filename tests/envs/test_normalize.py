"""`NormalizeObservation` and `NormalizeReward`: the statistics are those of all that happened, each counted once."""

from __future__ import annotations

import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from helpers import Count, create_counts, create_gym, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnvInf,
    GymVectorEnv,
    MissingKeyError,
    NormalizeObservation,
    NormalizeReward,
    RandomAgent,
    RL_Agent,
    RL_Batcher,
    SpecError,
)
from rlstructs.moments import Moments
from rlstructs.testing import check_env

GAMMA, EPSILON = 0.9, 1e-8
SPACES = {"CartPole-v1": gymnasium.spaces.Discrete(2), "Pendulum-v1": gymnasium.spaces.Box(-2, 2, (1,))}


def normalized(env, gamma=GAMMA, clip=10.0):
    return NormalizeReward(NormalizeObservation(env, clip=clip), gamma=gamma, clip=clip)


def create(env_id, seed, n_envs=2, kind="inf", wrap=True, clip=10.0, limit=30):
    if kind in ("inf", "leaving"):
        env = create_gym(env_id, n_envs, seed, kind == "inf", max_episode_steps=limit)
    else:
        fns = [lambda: gymnasium.make(env_id, max_episode_steps=limit)] * n_envs
        env = GymVectorEnv(SyncVectorEnv(fns, autoreset_mode=kind), seed)
    return normalized(env, clip=clip) if wrap else env


def batcher_of(env_id, n_processes=0, n_timesteps=20, seeds=3, **env_args):
    args = {"env_id": env_id, **env_args}
    return RL_Batcher(n_timesteps, RandomAgent, {"action_space": SPACES[env_id]}, create, args, n_processes, seeds)


class Model:
    """What statistics have to hold, gathered from raw trajectories one step at a time."""

    def __init__(self, n_timesteps, gamma=GAMMA):
        self.n_timesteps, self.gamma, self.observations, self.returns = n_timesteps, gamma, [], []
        self.running, self.n_ends, self.n_idle = {}, {}, {}

    def add(self, trajectories):
        steps = {key: tensor.numpy() for key, tensor in trajectories.trajectories.items()}
        for row, env in enumerate(trajectories.info["env_index"].tolist()):
            for t in range(int(trajectories.lengths[row])):
                if steps["observation/initial_state"][row, t]:
                    self.observations.append(steps["observation/frame"][row, t])
                self.observations.append(steps["_observation/frame"][row, t])
                self.running[env] = self.running.get(env, 0.0) * self.gamma + steps["_observation/reward"][row, t]
                self.returns.append(self.running[env])
                if steps["_observation/done"][row, t]:
                    self.running[env] = 0.0
                    self.n_ends[env] = self.n_ends.get(env, 0) + 1
            self.n_idle[env] = self.n_idle.get(env, 0) + self.n_timesteps - int(trajectories.lengths[row])

    def begin(self, following, resets_later):
        """Takes the first observations that are seen in the rollout after, if they were made before it."""
        for row, env in enumerate(following.info["env_index"].tolist()):
            is_first = bool(following.trajectories["observation/initial_state"][row, 0])
            if is_first and not (resets_later and self.n_ends.get(env, 0) > self.n_idle.get(env, 0)):
                self.observations.append(following.trajectories["observation/frame"][row, 0].numpy())

    def check(self, statistics):
        for name, rows in (("observation/frame", self.observations), ("return", self.returns)):
            rows, found = np.asarray(rows, np.float64), statistics[name]
            assert found.count == len(rows)
            np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(found.variance, rows.var(axis=0), rtol=1e-5, atol=1e-7)


KINDS = [
    *((n_processes, kind) for n_processes in (0, 1, 2) for kind in ("inf", "NextStep")),
    *((2, kind) for kind in ("leaving", "SameStep", "Disabled")),
]


@pytest.mark.parametrize("env_id", SPACES)
@pytest.mark.parametrize(("n_processes", "kind"), KINDS)
def test_statistics_are_those_of_every_observation_and_every_return(env_id, n_processes, kind):
    model, n_running = Model(20), 0
    with (
        batcher_of(env_id, n_processes, kind=kind, wrap=False) as raw,
        batcher_of(env_id, n_processes, kind=kind) as batcher,
    ):
        for _ in range(4):
            if not n_running:
                raw.reset()
                batcher.reset()
            (seen, n_running), (given, _) = rollout(raw), rollout(batcher)
            assert torch.equal(given.lengths, seen.lengths)
            assert torch.equal(given.trajectories["action/action"], seen.trajectories["action/action"])
            assert torch.equal(given.trajectories["_observation/raw_reward"], seen.trajectories["_observation/reward"])
            model.add(seen)
        assert torch.equal(batcher.episodes()["return"], raw.episodes()["return"])
        if kind != "leaving":
            model.begin(rollout(raw)[0], resets_later=kind == "NextStep")
        model.check(batcher.statistics())


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 9), st.booleans(), st.floats(0, 1),
    st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_statistics_are_numpys_for_any_episodes(lengths, n_timesteps, autoreset, gamma, n_rollouts):
    def create_env(seed, wrap):
        env = create_counts([lengths], seed, autoreset)
        return normalized(env, gamma) if wrap else env

    model, n_running = Model(n_timesteps, gamma), 0
    made = [
        RL_Batcher(n_timesteps, RandomAgent, {"action_space": Count.action_space}, create_env, {"wrap": wrap}, 0, [0])
        for wrap in (False, True)
    ]
    with made[0] as raw, made[1] as batcher:
        for _ in range(n_rollouts):
            if not n_running:
                raw.reset()
                batcher.reset()
            (seen, n_running), _ = rollout(raw), rollout(batcher)
            model.add(seen)
        if autoreset:
            model.begin(rollout(raw)[0], resets_later=False)
        model.check(batcher.statistics())


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.parametrize("kind", ["inf", "SameStep", "NextStep"])
def test_a_rollout_is_normalised_by_what_all_workers_knew_before_it(n_processes, kind):
    settings = {"kind": kind, "limit": 7, "clip": 1.5}
    with (
        batcher_of("Pendulum-v1", n_processes, wrap=False, kind=kind, limit=7) as raw,
        batcher_of("Pendulum-v1", n_processes, **settings) as batcher,
    ):
        raw.reset()
        batcher.reset()
        last = None
        for turn in range(4):
            known = batcher.statistics()
            (seen, _), (given, _) = rollout(raw), rollout(batcher)
            raws = {key: tensor.double().numpy() for key, tensor in seen.trajectories.items()}
            steps = {key: tensor.numpy() for key, tensor in given.trajectories.items()}
            if turn:
                frames, returns = known["observation/frame"], known["return"]
                mask = seen.trajectories.mask().bool().numpy()
                wanted = (raws["_observation/frame"] - frames.mean) / np.sqrt(frames.variance + EPSILON)
                close(steps["_observation/frame"][mask], wanted[mask].clip(-1.5, 1.5))
                assert raws["_observation/truncated"][mask].any()  # the true final ones, too
                wanted = raws["_observation/reward"] / np.sqrt(returns.variance + EPSILON)
                close(steps["_observation/reward"][mask], wanted[mask].clip(-1.5, 1.5))
                if kind != "NextStep":  # normalised once, with the rollout in which it was made
                    assert np.array_equal(steps["observation/frame"][:, 0], last)
            last = steps["_observation/frame"][:, -1].copy()
            if kind != "NextStep":
                assert not steps["_observation/done"][:, -1].any()


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_the_first_rollout_goes_by_what_the_worker_has_seen_itself():
    with (
        batcher_of("Pendulum-v1", 2, n_envs=1, wrap=False, limit=100) as raw,
        batcher_of("Pendulum-v1", 2, n_envs=1, limit=100, clip=None) as batcher,
    ):
        raw.reset()
        batcher.reset()
        (seen, _), (given, _) = rollout(raw), rollout(batcher)
        for row in range(2):
            frames = seen.trajectories["observation/frame"][row].double()
            for t in range(1, 20):
                until = frames[: t + 1]
                wanted = (frames[t] - until.mean(0)) / torch.sqrt(until.var(0, correction=0) + EPSILON)
                torch.testing.assert_close(
                    given.trajectories["observation/frame"][row, t], wanted.float(), rtol=1e-4, atol=1e-5
                )


class Leaning(RL_Agent):
    """Goes where the observation leans: what it does depends on how that is normalised."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": (observation["frame"].sum(-1) > 0).long()}), DictTensor()


@pytest.mark.parametrize("n_processes", [0, 1, 2])
def test_an_evaluation_goes_by_what_is_known_and_adds_nothing(n_processes):
    args = {"env_id": "CartPole-v1", "limit": 200}
    with RL_Batcher(20, Leaning, {}, create, args, n_processes, 3) as batcher:
        batcher.reset()
        rollout(batcher)
        rollout(batcher)
        known = batcher.statistics()
        found = batcher.evaluate(2 * max(1, n_processes), [10 * (w + 1) for w in range(max(1, n_processes))])
        assert_same_statistics(batcher.statistics(), known)
        for worker in range(max(1, n_processes)):
            env = create("CartPole-v1", 10 * (worker + 1), limit=200)
            env.load_statistics(known, frozen=True)
            rewards, (observation, _) = [[], []], env.reset()
            while not all(any(done for _, done in steps) for steps in rewards):
                action, _ = Leaning()(None, observation, None)
                (after, _), (observation, _) = env.step(action)
                for k in range(2):
                    rewards[k].append((float(after["raw_reward"][k]), bool(after["done"][k])))
            lengths = [next(t + 1 for t, (_, done) in enumerate(steps) if done) for steps in rewards]
            mine = (found["env_index"] // 2 == worker).numpy()
            assert found["length"].numpy()[mine].tolist() == lengths
            assert found["return"].numpy()[mine].tolist() == [float(length) for length in lengths]
            assert all(moments.count == 0 for moments in env.take_statistics().values())
            env.close()


def assert_same_statistics(a, b):
    assert a.keys() == b.keys()
    for name, moments in a.items():
        assert moments.count == b[name].count
        assert np.array_equal(moments.mean, b[name].mean) and np.array_equal(moments.m2, b[name].m2)


@pytest.mark.parametrize("n_processes", [0, 2])
def test_the_same_seeds_give_the_same_bits(n_processes):
    found = []
    for _ in range(2):
        with batcher_of("Pendulum-v1", n_processes) as batcher:
            batcher.reset()
            rollouts = [rollout(batcher)[0] for _ in range(3)]
            found.append((rollouts, batcher.statistics()))
    assert found[0][0] == found[1][0]
    assert_same_statistics(found[0][1], found[1][1])


def test_a_worker_that_is_replaced_gets_what_is_known_and_its_lost_part_is_not_there():
    def counts(seed):
        return normalized(GymEnvInf([Count(50), Count(50)], seed), clip=1e9)

    with RL_Batcher(
        4, RandomAgent, {"action_space": Count.action_space}, counts, {}, 2, 0, on_worker_failure="restart"
    ) as batcher:
        batcher.reset()
        rollout(batcher)
        known = batcher.statistics()
        assert known["return"].count == 4 * 4 and known["observation/frame"].count == 4 * 5
        batcher.execute()
        os.kill(batcher.stats()["workers"][1]["pid"], signal.SIGKILL)
        trajectories, _ = batcher.get()
        n_lost = int((trajectories.lengths == 0).sum())
        now = batcher.statistics()
        assert now["return"].count == known["return"].count + 4 * (4 - n_lost)
        if not n_lost:  # it had replied: it is replaced with the next rollout
            rollout(batcher)
            now = batcher.statistics()
        trajectories, _ = rollout(batcher)
        assert batcher.stats()["restarts"] == 1 and (trajectories.lengths == 4).all()
        seen = trajectories.trajectories
        last = now["observation/frame"]
        wanted = ((np.array([0.0, 4.0]) - last.mean) / np.sqrt(last.variance + EPSILON)).astype(np.float32)
        assert seen["_observation/frame"][2:, 3].tolist() == [wanted.tolist()] * 2
        count = batcher.statistics()["observation/frame"].count
        assert count == last.count + 4 * 4 + 2  # with the first observations of its successor


class Plain:
    """A `VecEnv` of one's own, without rows; every second step ends an episode of environment 0."""

    def __init__(self):
        self.t = 0

    def n_envs(self):
        return 2

    def rows(self, frame, reward, done):
        return DictTensor({"x": torch.tensor(frame), "k": torch.zeros(2, dtype=torch.int64),
                           "reward": torch.tensor(reward), "done": torch.tensor(done)})  # fmt: skip

    def reset(self, env_info=None):
        self.t = 0
        return self.rows([[0.0], [0.0]], [0.0, 0.0], [False, False]), torch.arange(2)

    def step(self, action):
        self.t += 1
        ended, t = self.t % 2 == 0, float(self.t)
        after = self.rows([[t], [10 * t]], [1.0, 2.0], [ended, False])
        following = self.rows([[0.0], [10 * t]], [0.0, 2.0], [False, False]) if ended else after
        return (after, torch.arange(2)), (following, torch.arange(2))

    def close(self):
        pass


def test_an_environment_of_ones_own_is_counted_once_too():
    env = normalized(Plain(), gamma=0.5)
    env.reset()
    for _ in range(3):
        env.step(DictTensor())
    found = env.take_statistics()
    frames = np.array([0, 0, 1, 10, 2, 20, 0, 3, 30])
    assert found["observation/x"].count == 9 and np.isclose(found["observation/x"].variance, frames.var()).all()
    returns = np.array([1, 2, 1.5, 3, 1, 3.5])
    assert found["return"].count == 6 and np.isclose(found["return"].variance, returns.var())
    assert {name: moments.count for name, moments in env.take_statistics().items()} == {"observation/x": 0, "return": 0}


def test_outside_of_a_batcher_it_goes_by_all_that_it_has_seen():
    env = normalized(DeviceEnv(create_gym("Pendulum-v1", 4, 0), "cpu", "cpu"))
    observation, _ = env.reset()
    assert env.action_space == SPACES["Pendulum-v1"]
    frames = []
    for _ in range(200):
        _, (observation, _) = env.step(DictTensor({"action": torch.zeros(4, 1)}))
        frames.append(observation["frame"])
        assert observation["reward"].dtype == observation["raw_reward"].dtype == torch.float32
    assert torch.stack(frames[100:]).std() < 2.0  # the last of them start new episodes, after final ones
    assert DeviceEnv(env, "cpu", "cpu").take_statistics()["observation/frame"].count == 4 * 202
    env.close()


@pytest.mark.parametrize("kind", ["inf", "leaving", "NextStep", "SameStep"])
def test_it_does_what_rollouts_rely_on(kind):
    check_env(create, {"env_id": "CartPole-v1", "kind": kind, "limit": 9})


def test_what_cannot_be_normalised_is_said():
    cartpole = create_gym("CartPole-v1", 2, 0)
    with pytest.raises(SpecError, match=r"^epsilon must be above 0 and finite, got 0$"):
        NormalizeObservation(cartpole, epsilon=0)
    with pytest.raises(SpecError, match=r"^clip must be above 0"):
        NormalizeReward(cartpole, clip=-1.0)
    with pytest.raises(SpecError, match=r"^gamma must lie in \[0, 1\], got 1.5$"):
        NormalizeReward(cartpole, gamma=1.5)
    for name in ("gamma", "epsilon", "clip"):
        for value in (True, np.True_, "0.9"):
            with pytest.raises(TypeError, match=rf"^{name} must be a number, got "):
                NormalizeReward(cartpole, **{name: value})
    with pytest.raises(TypeError, match=r"^clip must be a number, got 'no'$"):
        NormalizeObservation(cartpole, clip="no")
    with pytest.raises(TypeError, match=r"^NormalizeObservation needs a VecEnv, such as GymEnvInf, got TimeLimit$"):
        NormalizeObservation(gymnasium.make("CartPole-v1"))
    with pytest.raises(SpecError, match=r"^keys must be several names, got the string 'frame'$"):
        NormalizeObservation(cartpole, keys="frame")
    with pytest.raises(SpecError, match=r"has no floating-point \['pixels'\]"):
        NormalizeObservation(cartpole, keys=["pixels"])
    with pytest.raises(SpecError, match=r"^NormalizeObservation: 'observation/frame' is normalised twice$"):
        NormalizeObservation(NormalizeReward(NormalizeObservation(cartpole))).take_statistics()
    with pytest.raises(SpecError, match=r"gives 'raw_reward' already$"):
        NormalizeReward(NormalizeReward(cartpole))
    with pytest.raises(MissingKeyError, match=r"there are none of 'return', only of \['observation/frame'\]"):
        NormalizeReward(cartpole).load_statistics({"observation/frame": Moments.none((4,))})
    with pytest.raises(SpecError, match=r"'observation/frame' has shape \(3,\), expected \(4,\)"):
        NormalizeObservation(cartpole).load_statistics({"observation/frame": Moments.none((3,))})
    cartpole.close()
    lake = create_gym("FrozenLake-v1", 1, 0)
    with pytest.raises(SpecError, match=r"^NormalizeObservation: the observation is not floating-point"):
        NormalizeObservation(lake)
    lake.close()


class Diverging(Count):
    """Shows NaN in its third step."""

    def _observation(self):
        shown = super()._observation()
        return shown if self.steps < 3 else shown * np.float32(np.nan)


def test_a_value_that_is_not_finite_is_not_counted():
    env = NormalizeObservation(GymEnvInf([Diverging(9)], 0))
    env.reset()
    env.step(DictTensor({"action": torch.tensor([0])}))
    env.step(DictTensor({"action": torch.tensor([0])}))
    with pytest.raises(SpecError, match=r"^environment: 'observation/frame' has values that are not finite"):
        env.step(DictTensor({"action": torch.tensor([0])}))


@pytest.mark.parametrize("n_processes", [0, 2])
def test_without_them_there_are_no_statistics(n_processes):
    with batcher_of("CartPole-v1", n_processes, wrap=False) as batcher:
        batcher.reset()
        rollout(batcher)
        assert batcher.statistics() == {}


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_batcher_shares_the_statistics_of_an_environment_of_ones_own(n_processes, is_moved):
    def create_env(seed):
        env = normalized(Plain(), gamma=0.5)
        return DeviceEnv(env, "cpu", "cpu") if is_moved else env

    with RL_Batcher(3, RandomAgent, {"action_space": Count.action_space}, create_env, {}, n_processes, 0) as batcher:
        assert {name: moments.count for name, moments in batcher.statistics().items()} == {
            "observation/x": 0, "return": 0,
        }  # fmt: skip
        batcher.reset()
        rollout(batcher)
        found, frames = batcher.statistics(), np.array([0, 0, 1, 10, 2, 20, 0, 3, 30])
        assert found["observation/x"].count == 9 * max(1, n_processes)
        assert np.isclose(found["observation/x"].variance, frames.var())
        assert np.isclose(found["return"].variance, np.var([1, 2, 1.5, 3, 1, 3.5]))
        batcher.load_state_dict(batcher.state_dict())
        batcher.reset()
        mean, deviation = found["observation/x"].mean, np.sqrt(found["observation/x"].variance)
        first = rollout(batcher)[0].trajectories["observation/x"][:, 0]
        close(first.numpy(), np.broadcast_to(-mean / deviation, first.shape).astype(np.float32))
