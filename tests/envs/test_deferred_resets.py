"""`GymEnvInf(defer_resets=True)`: an environment that ends waits for the next rollout, and the others do not wait."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Count, Counting, rollout

from rlstructs import DeviceEnv, DictTensor, GymEnvInf, NormalizeObservation, NormalizeReward, RandomAgent, RL_Batcher

LENGTHS = (3, 10, 5)


def create_env(seed, wrap=None):
    env = GymEnvInf([Count(length) for length in LENGTHS], seed, defer_resets=True)
    return env if wrap is None else wrap(env)


def deferring(n_processes=2, n_timesteps=4, create_env=create_env, **arguments):
    return RL_Batcher(n_timesteps, Counting, {}, create_env, {}, n_processes, 0, **arguments)


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("n_processes", [0, 2])
def test_slots_end_with_their_episode_and_the_next_rollout_begins_another(n_processes, run_ahead):
    with deferring(n_processes, run_ahead=run_ahead) as batcher:
        batcher.reset()
        at = [(0, 0)] * len(LENGTHS)  # of each environment its episode and step, by a loop of its own
        for _ in range(9):
            trajectories, n_running = rollout(batcher)
            assert n_running == len(LENGTHS) * max(1, n_processes)
            steps = trajectories.trajectories
            for row in range(n_running):
                episode, step = at[row % len(LENGTHS)]
                n = min(4, LENGTHS[row % len(LENGTHS)] - step)
                assert trajectories.lengths[row] == n
                seen = [[episode, step + t] for t in range(n)]
                assert steps["observation/frame"][row, :n].tolist() == seen
                assert steps["observation/initial_state"][row, :n].tolist() == [s == 0 for _, s in seen]
                assert steps["action/n"][row, :n].tolist() == [s for _, s in seen]  # the agent's state, begun anew
                after = [[episode, s + 1] for _, s in seen]
                assert steps["_observation/frame"][row, :n].tolist() == after
                done = step + n == LENGTHS[row % len(LENGTHS)]
                assert steps["_observation/done"][row, :n].tolist() == [False] * (n - 1) + [done]
            at = [(e + 1, 0) if s + 4 >= n else (e, s + 4) for (e, s), n in zip(at, LENGTHS, strict=True)]


def test_episodes_are_those_of_resets_in_the_same_step():
    def episodes(defers):
        def create_env(seed):
            envs = [gymnasium.make("CartPole-v1") for _ in range(4)]
            return GymEnvInf(envs, seed, defer_resets=defers)

        agent_args = {"action_space": gymnasium.spaces.Discrete(1)}  # always left
        with RL_Batcher(64, RandomAgent, agent_args, create_env, {}, 2, 3) as batcher:
            batcher.reset()
            for _ in range(24 if defers else 4):
                rollout(batcher)
            found = batcher.episodes()
        rows = zip(found["env_index"].tolist(), found["length"].tolist(), strict=True)
        lengths = {}
        for env_index, length in rows:
            lengths.setdefault(env_index, []).append(length)
        return {env_index: own[:20] for env_index, own in lengths.items()}

    assert episodes(True) == episodes(False)


def test_infos_reach_the_episodes_that_begin():
    info = {"env_info": DictTensor({"length": torch.tensor([1])}), "agent_info": DictTensor({"k": torch.zeros(1)})}
    with deferring(2, **info) as batcher:
        lengths = DictTensor({"length": torch.tensor([2, 3, 4] * 2)})
        batcher.reset(agent_info=DictTensor({"k": torch.arange(6.0)}), env_info=lengths)
        for _ in range(3):
            trajectories, _ = rollout(batcher)
            assert trajectories.lengths.tolist() == [2, 3, 4] * 2
            assert trajectories.info["agent_info/k"].tolist() == list(range(6))


@pytest.mark.parametrize("n_processes", [0, 2])
def test_it_can_be_normalised(n_processes):
    def wrapped(seed):
        return NormalizeReward(NormalizeObservation(create_env(seed)))

    with deferring(n_processes, create_env=wrapped) as batcher:
        batcher.reset()
        n_steps, raw = 0, []
        for _ in range(6):
            trajectories, _ = rollout(batcher)
            mask = trajectories.mask(torch.bool)
            n_steps += int(mask.sum())
            raw += trajectories.trajectories["_observation/raw_reward"][mask].tolist()
        statistics = batcher.statistics()
        n_begun = max(1, n_processes) * sum(begun(length, 6, 4) for length in LENGTHS)
        assert statistics["return"].count == n_steps and statistics["observation/frame"].count == n_steps + n_begun
        assert set(raw) == {float(step) for step in range(1, max(LENGTHS) + 1)}


def begun(length, n_rollouts, n_timesteps):
    """How many episodes of so many steps begin within so many rollouts."""
    rollouts_each = -(-length // n_timesteps)
    return -(-n_rollouts // rollouts_each)


@pytest.mark.parametrize("n_processes", [0, 2])
def test_agents_begin_without_gradients(n_processes):
    class Noting(Counting):
        def initial_state(self, agent_info, B):
            return DictTensor({"has_gradients": torch.full((B,), torch.is_grad_enabled())})

        def __call__(self, state, observation, agent_info, history=None):
            return DictTensor({"action": torch.zeros(len(LENGTHS))[: state.n_elems()].long(), **state}), state

    with RL_Batcher(4, Noting, {}, create_env, {}, n_processes, 0) as batcher:
        batcher.reset()
        for _ in range(4):
            assert not rollout(batcher)[0].trajectories["action/has_gradients"].any()


def test_an_evaluation_gives_as_many_episodes_of_each():
    with deferring(2) as batcher:
        batcher.reset()
        lengths = batcher.evaluate(12, 5)["length"]
        assert sorted(lengths.tolist()) == sorted(LENGTHS * 4)


def test_what_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="defer_resets must be a bool, got 1"):
        GymEnvInf([Count(3)], 0, defer_resets=1)


def test_below_what_hides_it_it_is_as_gym_env():
    def create_env(seed):
        return NormalizeReward(DeviceEnv(GymEnvInf([Count(3), Count(10)], seed, defer_resets=True), "cpu", "cpu"))

    with deferring(1, create_env=create_env) as batcher:
        batcher.reset()
        assert [rollout(batcher)[1] for _ in range(3)] == [1, 1, 0]


def test_it_may_be_used_without_a_batcher():
    env = create_env(0)
    env.reset()
    for _ in range(3):
        (_, before), (_, running) = env.step(DictTensor({"action": torch.zeros(len(LENGTHS), dtype=torch.int64)}))
    assert before.tolist() == [0, 1, 2] and running.tolist() == [1, 2]
    which, rows = env.revive_rows()
    assert which.tolist() == [0] and rows["frame"].tolist() == [[1, 0]]
    np.testing.assert_array_equal(rows["initial_state"], [True])
    assert env.step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))[0][1].tolist() == [0, 1, 2]


class Longer(gymnasium.Env):
    """Observes 0, k, 2k, 3k in its k-th episode."""

    observation_space, action_space, k = gymnasium.spaces.Box(-99, 99, (1,)), gymnasium.spaces.Discrete(2), 0

    def reset(self, *, seed=None, options=None):
        self.k, self.t = self.k + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t * self.k, np.float32), 0.0, self.t == 3, False, {}


def test_first_observations_are_normalised_by_what_is_known_as_the_rollout_begins():
    def create_env(seed):
        return NormalizeObservation(GymEnvInf([Longer()], seed, defer_resets=True))

    with deferring(0, create_env=create_env) as batcher:
        batcher.reset()
        for number in range(4):
            known = batcher.statistics()["observation/frame"]
            first = rollout(batcher)[0].trajectories["observation/frame"][0, 0].item()
            if number:
                np.testing.assert_allclose(first, -known.mean[0] / np.sqrt(known.variance[0]), rtol=1e-4)
