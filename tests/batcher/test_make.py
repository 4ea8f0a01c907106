"""`RL_Batcher.make`, `rollouts` and iteration: every kind of environment and agent gives what the long form gives."""

from __future__ import annotations

import inspect
import re
from contextlib import closing
from functools import partial

import gymnasium
import pytest
import torch
from gymnasium import spaces

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    ModuleAgent,
    NormalizeObservation,
    RandomAgent,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
    StateError,
    make_vec,
)
from rlstructs.rollout.makers import Makers

CARTPOLE = "CartPole-v1"


def one():
    return gymnasium.make(CARTPOLE)


def many(n_envs, seed):
    return GymEnvInf([one() for _ in range(n_envs)], seed)


def normalized(n_envs, seed):
    return NormalizeObservation(many(n_envs, seed))


def native(num_envs):
    return gymnasium.make_vec(CARTPOLE, num_envs, vectorization_mode="vector_entry_point")


class Counting(RandomAgent):
    """Random actions of CartPole; counts the agents that were made."""

    def __init__(self):
        super().__init__(spaces.Discrete(2))


def first_of(batcher):
    with batcher:
        return next(iter(batcher))


@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_short_form_gives_what_the_long_form_gives(n_workers):
    n_envs = 4 // max(1, n_workers)
    long = RL_Batcher(20, Counting, {}, many, {"n_envs": n_envs}, n_workers, 3)
    with long:
        long.reset()
        long.execute()
        wanted, _ = long.get()
    found = [
        first_of(RL_Batcher.make(env, agent, n_envs=4, n_workers=n_workers, n_timesteps=20, seed=3))
        for env in (CARTPOLE, gymnasium.spec(CARTPOLE), one, many)
        for agent in (None, Counting, Counting(), RandomAgent, lambda action_space: RandomAgent(action_space))
    ]
    assert all(each == wanted for each in found)


@pytest.mark.parametrize("env", [native, normalized], ids=["VectorEnv", "wrapped"])
def test_vectorised_environments_tell_their_spaces_to_agents(env):
    found = first_of(RL_Batcher.make(env, torch.nn.Linear(4, 2), n_envs=4, n_workers=2, n_timesteps=5, seed=0))
    assert found.trajectories["action/log_prob"].shape == (4, 5)


def test_arguments_reach_the_environments_and_the_batcher():
    batcher = RL_Batcher.make(
        CARTPOLE, n_envs=3, n_workers=1, n_timesteps=8, env_args={"max_episode_steps": 4}, run_ahead=1, timeout=60
    )
    found = first_of(batcher)
    assert found.trajectories["_observation/truncated"][:, 3].all()


def test_workers_share_the_environments_evenly():
    with RL_Batcher.make(CARTPOLE, n_envs=6, n_workers=3, n_timesteps=2) as batcher:
        assert (batcher.n_elems(), len(batcher.stats()["workers"])) == (6, 3)
        assert repr(batcher) == "<RL_Batcher of 6 environments: there was no reset>"
    assert repr(batcher) == "<RL_Batcher of 6 environments: closed>"
    with RL_Batcher.make(CARTPOLE, n_envs=5, n_timesteps=2) as batcher:
        assert 5 % len(batcher.stats()["workers"]) == 0
    with pytest.raises(SpecError, match="n_envs must be a multiple of n_workers, got 5 environments for 2 workers"):
        RL_Batcher.make(CARTPOLE, n_envs=5, n_workers=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env": "CartPole-v99"}, SpecError, "CartPole-v99: .*v99"),
        ({"env": 3}, TypeError, "env must be an id of gymnasium's registry or a function, got int"),
        ({"env": CARTPOLE, "agent": 3}, TypeError, "agent must be an RL_Agent, a torch.nn.Module or a function, got"),
        ({"env": CARTPOLE, "agent": dict}, TypeError, "agent must make an RL_Agent or a torch.nn.Module, got dict"),
        ({"env": CARTPOLE, "env_args": [1]}, TypeError, "env_args must be a mapping"),
        ({"env": CARTPOLE, "n_envs": 0}, SpecError, "n_envs must be at least 1"),
        ({"env": CARTPOLE, "agent": torch.nn.Linear(4, 3)}, SpecError, r"must return a tensor \(.*, 2\) or a dist"),
        ({"env": lambda: many(3, 0)}, SpecError, "it made 3 environments for a worker that needs 4"),
        ({"env": lambda seed: None}, TypeError, "must return"),
        ({"env": many(2, 0)}, TypeError, "a function, got .*; give a function that makes it"),
        ({"n_env": 8}, TypeError, r"RL_Batcher\.make\(\) got .* argument 'n_env'\. Did you mean 'n_envs'\?"),
        ({"timout": 8}, TypeError, r"'timout'\. Did you mean 'timeout'\?"),
        ({"seeds": 8}, TypeError, r"RL_Batcher\.make\(\) has seed= in the place of seeds="),
        ({"n_processes": 8}, TypeError, "has n_workers= in the place of n_processes="),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        RL_Batcher.make(**{"env": CARTPOLE, "n_envs": 4, "n_workers": 1, "n_timesteps": 2, **arguments})


def test_rollouts_end_with_the_steps_and_go_on_where_they_stopped():
    with RL_Batcher.make(CARTPOLE, n_envs=4, n_workers=2, n_timesteps=10, seed=1) as batcher:
        parts = [*batcher.rollouts(n_steps=41), *batcher.rollouts(40)]
        for trajectories in batcher:
            parts.append(trajectories)
            break
    with RL_Batcher.make(CARTPOLE, n_envs=4, n_workers=2, n_timesteps=10, seed=1) as batcher:
        whole = list(batcher.rollouts(160))
    assert len(whole) == 4 and parts == whole


def test_rollouts_reset_environments_that_have_all_ended():
    def ending(n_envs, seed):
        return GymEnv([gymnasium.make(CARTPOLE, max_episode_steps=3) for _ in range(n_envs)], seed)

    with RL_Batcher.make(ending, n_envs=2, n_workers=1, n_timesteps=8, seed=0) as batcher:
        lengths = [rollout.lengths.tolist() for rollout in batcher.rollouts(12)]
    assert lengths == [[3, 3], [3, 3]]


def test_rollouts_refuse_what_is_no_number_of_steps_and_a_closed_batcher():
    batcher = RL_Batcher.make(CARTPOLE, n_envs=2, n_workers=0, n_timesteps=2)
    with batcher, pytest.raises(SpecError, match="n_steps must be at least 1"):
        next(batcher.rollouts(0))
    with pytest.raises(StateError, match="closed"):
        next(iter(batcher))


def test_a_network_acts_with_the_weights_of_its_last_update():
    network = torch.nn.Linear(4, 2)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(torch.tensor([100.0, 0.0]))
    with RL_Batcher.make(CARTPOLE, network, n_envs=4, n_workers=2, n_timesteps=5) as batcher:
        before = next(iter(batcher))
        with torch.no_grad():
            network.bias.copy_(torch.tensor([0.0, 100.0]))
        batcher.update(network)
        after = next(iter(batcher))
        episodes = batcher.evaluate(4, seed=1)
    assert (before.trajectories["action/action"] == 0).all() and (after.trajectories["action/action"] == 1).all()
    assert isinstance(episodes, DictTensor) and len(episodes) == 4


def test_gymnasium_checks_one_environment_of_a_worker_and_not_those_that_are_made_with_it():
    def is_checked(env):
        return "PassiveEnvChecker" in str(env)

    makers = Makers(partial(gymnasium.make, "CartPole-v1"), None, 3)
    with closing(makers.create_env(seed=0)) as made:
        assert [is_checked(env) for env in made._envs] == [True, False, False]
    told = Makers(partial(gymnasium.make, "CartPole-v1", disable_env_checker=False), None, 2)
    with closing(told.create_env(seed=0)) as made:
        assert all(is_checked(env) for env in made._envs)


class Reaching(gymnasium.Env):
    """The reward is the action, which has to be within its bounds."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype("f4"), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ZeroDivisionError(action)
        return self.np_random.uniform(-1, 1, 2).astype("f4"), action[0], False, False, {}


class Wide(torch.nn.Linear):
    """Draws far beyond the bounds."""

    def forward(self, frame):
        return torch.distributions.Normal(super().forward(frame), 3.0)


def groups(n_envs):
    return SharedVectorEnv([Reaching] * n_envs, n_workers=0, autoreset_mode="SameStep", n_groups=2)


@pytest.mark.parametrize(
    "env", [Reaching, lambda n_envs: gymnasium.vector.SyncVectorEnv([Reaching] * n_envs), groups],
    ids=["single", "vector", "groups"],
)  # fmt: skip
def test_clipped_actions_reach_environments_and_rollouts_keep_what_was_drawn(env):
    network = Wide(2, 1)
    with RL_Batcher.make(env, network, n_envs=4, n_workers=0, n_timesteps=9, seed=0, clip_actions=True) as batcher:
        steps = next(iter(batcher)).trajectories
    drawn = steps["action/action"][..., 0]
    assert (drawn.abs() > 1).any() and torch.equal(drawn.clamp(-1, 1), steps["_observation/reward"])
    log_prob = network(steps["observation/frame"]).log_prob(steps["action/action"])[..., 0]
    torch.testing.assert_close(steps["action/log_prob"], log_prob.detach())
    with RL_Batcher.make(env, network, n_envs=4, n_workers=0, n_timesteps=9, seed=0) as batcher:
        with pytest.raises(ZeroDivisionError):
            next(iter(batcher))


def test_only_environments_of_gymnasium_clip_actions():
    with pytest.raises(SpecError, match="clip_actions: needs gymnasium's environments, got a NormalizeObservation"):
        RL_Batcher.make(normalized, n_envs=2, n_workers=0, clip_actions=True)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_mean_for_a_box_is_warned_of_once(n_workers):
    with pytest.warns(UserWarning, match="so that nothing explores: return a distribution") as caught:
        RL_Batcher.make(Reaching, torch.nn.Linear(2, 1), n_envs=2, n_workers=n_workers).close()
    assert [warning.filename for warning in caught] == [__file__]


class Noisy(torch.nn.Linear):
    def forward(self, frame):
        mean = super().forward(frame)
        return torch.normal(mean, 0.1) if self.training else mean


def test_noise_of_the_network_itself_and_agents_of_ones_own_are_not_warned_of():
    for agent in (Wide(2, 1), ModuleAgent(Noisy(2, 1), Reaching.action_space, training=True), None):
        RL_Batcher.make(Reaching, agent, n_envs=2, n_workers=0).close()
    RL_Batcher.make(CARTPOLE, torch.nn.Linear(4, 2), n_envs=2, n_workers=0).close()


class Several:
    """The face of a PettingZoo environment."""

    possible_agents = ("a", "b", "c")

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        return {}, {}


class Slots:
    """Three slots of each environment."""

    agents = Several.possible_agents

    def __init__(self, n_envs):
        self.n_envs = lambda: 3 * n_envs


def test_environments_of_several_agents_are_told_of_parallel_envs_and_of_slots():
    hint = r"Several.*, an environment of several agents: .*ParallelEnvs\(\[make, ...\], seed\).*n_envs .* counts slots"
    for make in (
        lambda: RL_Batcher.make(Several, n_envs=2, n_workers=0), lambda: GymEnvInf([Several()], 0),
        lambda: RL_Batcher(2, Counting, {}, lambda seed: Several(), {}, 0, 0),
        lambda: SharedVectorEnv([Several], 0),
    ):  # fmt: skip
        with pytest.raises((TypeError, SpecError), match=hint):
            make()
    with pytest.raises(SpecError, match=r"made 6 environments for a worker that needs 2 \(n_envs counts slots"):
        RL_Batcher.make(Slots, n_envs=2, n_workers=0)


OTHER_WORDS = {
    "n_workers": (lambda: RL_Batcher(2, Counting, {}, many, {}, n_workers=0), "RL_Batcher() has n_processes="),
    "seed": (lambda: RL_Batcher(2, Counting, {}, many, {}, 0, seed=0), "RL_Batcher() has seeds="),
    "n_processes": (lambda: SharedVectorEnv([one], n_processes=0), "SharedVectorEnv() has n_workers="),
    "seeds": (lambda: SharedVectorEnv([one], seeds=0), "SharedVectorEnv() has seed="),
    "num_envs": (lambda: SharedVectorEnv(num_envs=2), "SharedVectorEnv() has env_fns="),
    "n_envs": (lambda: make_vec(CARTPOLE, n_envs=2), "make_vec() has num_envs="),
    "n_processes of make_vec": (lambda: make_vec(CARTPOLE, n_processes=2), "make_vec() has n_workers="),
    "seeds of GymEnvInf": (lambda: GymEnvInf([one()], seeds=0), "GymEnvInf() has seed="),
    "seeds of GymEnv": (lambda: GymEnv([one()], seeds=0), "GymEnv() has seed="),
    "seeds of GymVectorEnv": (lambda: GymVectorEnv(native(1), seeds=0), "GymVectorEnv() has seed="),
}


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_the_word_of_another_constructor_is_answered_with_ones_own(name):
    call, words = OTHER_WORDS[name]
    with pytest.raises(TypeError, match=f"^{re.escape(words)} in the place of {name.split(' ')[0]}="):
        call()
    assert "n_processes" in inspect.signature(RL_Batcher).parameters
