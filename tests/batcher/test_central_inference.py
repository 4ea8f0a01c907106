"""An agent that stays in the trainer, with environments in workers: the same trajectories as without them."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as wrappers
from processes import LIMIT, worker_pids
from vector_envs import Failing, Pair, Process

from rlstructs import DictTensor, GymEnvInf, GymVectorEnv, RL_Agent, RL_Batcher, SharedVectorEnv, SpecError, StateError

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
N_ENVS, N_TIMESTEPS = 7, 40


class Recurrent(RL_Agent):
    """Acts by what it sees and by how often it has acted in the episode, and tells how often it was called."""

    def __init__(self, kind):
        self.kind, self.weight, self.n_calls = kind, torch.linspace(-1, 1, 12, dtype=torch.float64), 0

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        self.n_calls += 1
        n = torch.where(observation["initial_state"], 0, state["n"])
        seen = torch.cat([observation[key].reshape(len(n), -1) for key in sorted(observation.keys())
                          if observation[key].dtype == torch.float32], dim=1)  # fmt: skip
        # Row by row: a product of matrices may round differently with another number of rows.
        value = (seen.double() * self.weight[: seen.shape[1]]).sum(dim=1) + 0.3 * agent_info["bias"]
        value = torch.sin(40 * value + n)
        action = (value > 0).long() if self.kind == "discrete" else value[:, None].float()
        return DictTensor({"action": action, "value": value}), DictTensor({"n": n + 1})


TASKS = {
    "cartpole": (functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=25), "discrete"),
    "pendulum": (functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=13), "continuous"),
    "pair": (Pair, "discrete"),
}


def rollouts(create_env, kind, n_rollouts=3, **arguments):
    """Trajectories of rollouts one after another, and the agent."""
    agent = Recurrent(kind)
    bias = DictTensor({"bias": torch.linspace(-1, 1, N_ENVS)})
    with RL_Batcher(
        N_TIMESTEPS, lambda: agent, {}, create_env, {}, 0, 5, agent_info=bias.slice(0, 1), **arguments
    ) as batcher:  # fmt: skip
        batcher.reset(agent_info=bias)
        found = []
        for _ in range(n_rollouts):
            batcher.execute()
            trajectories, n_running = batcher.get()
            assert n_running == N_ENVS
            found.append(trajectories)
    return found, agent


def central(make, mode, n_workers=2, n_groups=1):
    def create_env(seed):
        envs = SharedVectorEnv([make] * N_ENVS, n_workers, autoreset_mode=mode, n_groups=n_groups)
        return GymVectorEnv(envs, seed)

    return create_env


def here(make):
    return lambda seed: GymEnvInf([make() for _ in range(N_ENVS)], seed)


def steps_of(found, env):
    """All steps of an environment, however they were shared among rollouts."""
    parts = [trajectories.trajectories for trajectories in found]
    return {
        key: torch.cat([steps[key][env, : steps.lengths[env]] for steps in parts]) for key in sorted(parts[0].keys())
    }


def assert_same(found, expected, n_least):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    assert sum(int(part.trajectories["_observation/done"].sum()) for part in found) >= n_least


@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("task", TASKS)
def test_trajectories_are_those_of_environments_in_this_process(task, n_workers, n_groups):
    make, kind = TASKS[task]
    before = worker_pids()
    found, agent = rollouts(central(make, AutoresetMode.SAME_STEP, n_workers, n_groups), kind)
    expected, _ = rollouts(here(make), kind)
    assert_same(found, expected, 15)
    assert agent.n_calls == 3 * N_TIMESTEPS * n_groups + 1  # and once for the specs
    assert worker_pids() == before


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP], ids=lambda mode: mode.name)
def test_groups_may_run_ahead_and_go_as_if_they_did_not(mode):
    make, kind = TASKS["cartpole"]
    create_env = central(make, mode, n_groups=2)
    expected, _ = rollouts(create_env, kind, 5)
    found, agent = rollouts(create_env, kind, 5, run_ahead=1)
    assert_same(found, expected, 15)
    assert agent.n_calls > 5 * N_TIMESTEPS * 2 + 1  # the rollout that nobody asked for any more had been begun


def test_trajectories_are_the_same_when_ended_environments_are_reset_by_mask():
    make, kind = TASKS["cartpole"]
    found, _ = rollouts(central(make, AutoresetMode.DISABLED), kind)
    assert_same(found, rollouts(here(make), kind)[0], 15)


@pytest.mark.parametrize("n_groups", [1, 2, 3])
def test_where_a_step_does_nothing_but_reset_it_is_left_out(n_groups):
    make, kind = TASKS["cartpole"]
    found, _ = rollouts(central(make, AutoresetMode.NEXT_STEP, n_groups=n_groups), kind, 4)
    expected, _ = rollouts(here(make), kind, 4)
    for env in range(N_ENVS):
        ours, theirs = steps_of(found, env), steps_of(expected, env)
        n = len(ours["_observation/done"])
        assert 100 < n < len(theirs["_observation/done"]) and ours["_observation/done"].sum() >= 3
        for key, values in theirs.items():
            assert torch.equal(ours[key], values[:n]), key


def test_an_evaluation_plays_in_workers_of_its_own_and_changes_nothing():
    make, kind = TASKS["cartpole"]
    create_env, bias, pids = central(make, AutoresetMode.SAME_STEP, n_groups=2), torch.zeros(N_ENVS), worker_pids()
    results = []
    for evaluates in (False, True):
        with RL_Batcher(
            N_TIMESTEPS, lambda: Recurrent(kind), {}, create_env, {}, 0, 5,
            agent_info=DictTensor({"bias": torch.zeros(1)}),
        ) as batcher:  # fmt: skip
            batcher.reset(agent_info=DictTensor({"bias": bias}))
            batcher.execute()
            batcher.get()
            if evaluates:
                assert batcher.evaluate(9, seed=1).n_elems() == 9
            batcher.execute()
            results.append(batcher.get()[0])
    assert results[0] == results[1] and worker_pids() == pids


@pytest.mark.parametrize("n_groups", [1, 2])
def test_what_an_environment_raises_is_raised_by_the_batcher_and_nothing_is_left(n_groups):
    before = worker_pids()

    def create_env(seed):
        fns = [Failing] * 3 + [functools.partial(Failing, "step")]
        return GymVectorEnv(SharedVectorEnv(fns, 2, n_groups=n_groups, timeout=LIMIT), seed)

    bias = DictTensor({"bias": torch.zeros(4)})
    with RL_Batcher(4, lambda: Recurrent("discrete"), {}, create_env, {}, 0, 5, bias.slice(0, 1)) as batcher:
        batcher.reset(agent_info=bias)
        batcher.execute()
        with pytest.raises(KeyError, match="lost in step") as caught:
            batcher.get()
        assert caught.value.__notes__[0] == "raised by environment 3 (Failing) in step"
    assert worker_pids() == before


def test_groups_need_environments_that_reset_themselves():
    make, _ = TASKS["cartpole"]
    with (
        SharedVectorEnv([make] * 4, 2, autoreset_mode="Disabled", n_groups=2) as envs,
        pytest.raises(SpecError, match="SharedVectorEnv has groups, of which none can be reset while another is"),
    ):
        GymVectorEnv(envs, 0)


def test_a_wrapper_around_groups_is_stepped_whole():
    make, kind = TASKS["cartpole"]

    def create_env(seed):
        envs = SharedVectorEnv([make] * N_ENVS, 2, autoreset_mode="SameStep", n_groups=2)
        return GymVectorEnv(wrappers.TransformReward(envs, lambda reward: 2 * reward), seed)

    [found], agent = rollouts(create_env, kind, 1)
    assert agent.n_calls == N_TIMESTEPS + 1
    assert set(found.trajectories["_observation/reward"].unique().tolist()) == {2.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("n_groups", [1, 2])
def test_the_agent_may_be_on_a_gpu(n_groups):
    make, kind = TASKS["cartpole"]

    class OnGpu(Recurrent):
        def __init__(self):
            super().__init__(kind)
            self.weight = self.weight.cuda()

        def initial_state(self, agent_info, B):
            return super().initial_state(agent_info, B).to("cuda")

        def __call__(self, state, observation, agent_info, history=None):
            assert observation["frame"].is_cuda and state["n"].is_cuda
            return super().__call__(state, observation, agent_info.to("cuda"))

    bias = DictTensor({"bias": torch.zeros(N_ENVS)})
    found = []
    for create_env in (central(make, AutoresetMode.SAME_STEP, n_groups=n_groups), here(make)):
        with RL_Batcher(
            N_TIMESTEPS, OnGpu, {}, create_env, {}, 0, 5, agent_info=bias.slice(0, 1), device="cuda"
        ) as batcher:
            batcher.reset(agent_info=bias)
            batcher.execute()
            trajectories, _ = batcher.get()
            assert trajectories.trajectories["observation/frame"].is_cuda
            found.append(trajectories.to("cpu"))
    assert found[0] == found[1]


# Groups, stepped by hand


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_groups_that_are_stepped_in_turns_go_as_the_whole_does(n_workers, mode):
    make = TASKS["cartpole"][0]
    with (
        SharedVectorEnv([make] * N_ENVS, n_workers, autoreset_mode=mode, n_groups=3) as ours,
        SharedVectorEnv([make] * N_ENVS, 0, autoreset_mode=mode) as theirs,
    ):
        assert [group.tolist() for group in ours.groups] == [[0, 1, 2], [3, 4], [5, 6]]
        np.testing.assert_array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
        actions = np.random.default_rng(0).integers(2, size=(60, N_ENVS))
        for group in ours.groups:
            ours.send(actions[0][group], group)
        for t in range(60):
            *expected, infos = theirs.step(actions[t])
            for group in ours.groups:
                *stepped, found = ours.recv(env_ids=group)
                assert found["env_id"].tolist() == group.tolist()
                for one, other in zip(stepped, expected, strict=True):
                    np.testing.assert_array_equal(one, other[group], strict=True)
                if "final_obs" in found:
                    for row, k in enumerate(group):
                        if found["_final_obs"][row]:
                            np.testing.assert_array_equal(found["final_obs"][row], infos["final_obs"][k])
                if t < 59:
                    ours.send(actions[t + 1][group], group)
        np.testing.assert_array_equal(ours.step(actions[0])[0], theirs.step(actions[0])[0])


def test_every_worker_has_some_of_each_group():
    with SharedVectorEnv([Process] * 8, 2, n_groups=2) as envs:
        pids = envs.reset()[1]["pid"].tolist()
        assert pids[0] == pids[1] == pids[4] == pids[5] != pids[2] == pids[3] == pids[6] == pids[7]


def test_what_is_wrong_with_groups_is_refused():
    make = TASKS["cartpole"][0]
    for n_groups, words in ((0, "at least 1"), (5, "at most 4")):
        with pytest.raises(SpecError, match=words):
            SharedVectorEnv([make] * 4, 2, n_groups=n_groups)
    with SharedVectorEnv([make] * 4, 2, n_groups=2) as envs:
        envs.reset()
        first, second = envs.groups
        envs.send([0, 0], first)
        with pytest.raises(StateError, match=r"recv: environments \[2, 3\] were not sent"):
            envs.recv(env_ids=second)
        with pytest.raises(SpecError, match="recv: either n or env_ids, got n=2 and env_ids"):
            envs.recv(2, env_ids=first)
        with pytest.raises(SpecError, match="recv: env_ids must lie in 0..3"):
            envs.recv(env_ids=[4])
        assert envs.recv(env_ids=[1])[4]["env_id"].tolist() == [1]
        assert envs.recv()[4]["env_id"].tolist() == [0]
