"""tianshou's `Collector` and policies come to the same with these buffers as with tianshou's own."""

from __future__ import annotations

import copy
import pickle

import gymnasium
import numpy as np
import pytest
import tianshou.data as theirs
import torch
from gymnasium import spaces
from tianshou.data import Collector
from tianshou.env import DummyVectorEnv
from tianshou.policy import DQNPolicy, PPOPolicy, RandomPolicy, SACPolicy
from tianshou.utils.net import continuous, discrete
from tianshou.utils.net.common import ActorCritic, Net

import rlstructs.integrations.tianshou as ours
from rlstructs import replay

pytestmark = pytest.mark.usefixtures("small_training")
N_ENVS = 4


def adam(module):
    return torch.optim.Adam(module.parameters(), 1e-3)


def make_dqn():
    net = Net(4, 2, hidden_sizes=[16])
    policy = DQNPolicy(net, adam(net), 0.9, estimation_step=3, target_update_freq=2)
    policy.set_eps(0.2)
    return "CartPole-v1", policy, {}


def make_ppo():
    net = Net(4, hidden_sizes=[16])
    actor, critic = discrete.Actor(net, 2), discrete.Critic(net)
    optimizer, categorical = adam(ActorCritic(actor, critic)), torch.distributions.Categorical
    policy = PPOPolicy(actor, critic, optimizer, categorical, action_scaling=False, recompute_advantage=True)
    return "CartPole-v1", policy, {"batch_size": 32, "repeat": 2}


def make_sac():
    actor = continuous.ActorProb(Net(3, hidden_sizes=[16]), 1, unbounded=True, conditioned_sigma=True)
    critics = [continuous.Critic(Net(3, 1, hidden_sizes=[16], concat=True)) for _ in range(2)]
    space = gymnasium.make("Pendulum-v1").action_space
    one, two = critics
    policy = SACPolicy(actor, adam(actor), one, adam(one), two, adam(two), action_space=space, estimation_step=2)
    return "Pendulum-v1", policy, {}


BUFFERS = {
    "vector": lambda package, _: package.VectorReplayBuffer(1000, N_ENVS),
    "prioritised": lambda package, _: package.PrioritizedVectorReplayBuffer(1000, N_ENVS, alpha=0.6, beta=0.4),
    "cached": lambda package, plain: package.CachedReplayBuffer(plain.ReplayBuffer(1000), N_ENVS, 300),
}


def train(make_policy, buffer):
    """The weights after some updates, each from all rows, and a batch of these rows."""
    torch.manual_seed(0)
    np.random.seed(0)
    name, policy, settings = make_policy()
    envs = DummyVectorEnv([lambda: gymnasium.make(name) for _ in range(N_ENVS)])
    envs.seed(0)
    collector = Collector(policy, envs, buffer, exploration_noise=True)
    collector.collect(n_step=120)
    for _ in range(3):
        policy.update(0, buffer, **settings)
        if settings:
            collector.reset_buffer(keep_statistics=True)
        collector.collect(n_episode=N_ENVS)
    batch, _ = buffer.sample(0)
    rows = [np.asarray(batch[key]) for key in ("obs", "act", "rew", "terminated", "truncated", "obs_next")]
    return [parameter.detach().numpy() for parameter in policy.parameters()], rows


@pytest.mark.parametrize("make_policy", [make_dqn, make_ppo, make_sac])
@pytest.mark.parametrize("kind", BUFFERS)
def test_collector_and_policy_come_to_the_same(kind, make_policy):
    wanted = train(make_policy, BUFFERS[kind](theirs, theirs))
    found = train(make_policy, BUFFERS[kind](ours, replay))
    assert all(np.array_equal(*pair) for pair in zip(found[1], wanted[1], strict=True))
    # Importance weights are float64 in tianshou, and float32 here.
    close = {"rtol": 1e-4, "atol": 1e-6} if kind == "prioritised" else {"rtol": 0, "atol": 0}
    for one, other in zip(found[0], wanted[0], strict=True):
        np.testing.assert_allclose(one, other, **close)


@pytest.mark.parametrize("kind", BUFFERS)
def test_copies_and_files_are_taken_too(kind, tmp_path):
    buffer = BUFFERS[kind](ours, replay)
    wanted = train(make_dqn, buffer)[1]
    buffer.save_hdf5(tmp_path / "buffer.h5")
    loaded = type(buffer).load_hdf5(tmp_path / "buffer.h5")
    for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), loaded):
        assert type(other) is type(buffer)
        batch, _ = other.sample(0)
        rows = [np.asarray(batch[key]) for key in ("obs", "act", "rew", "terminated", "truncated", "obs_next")]
        assert all(np.array_equal(*pair) for pair in zip(rows, wanted, strict=True))
        _, policy, _ = make_dqn()
        Collector(policy, DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * N_ENVS), other)


class Goals(gymnasium.Env):
    """Walks on a line towards a goal."""

    observation_space = spaces.Dict(
        {name: spaces.Box(-9, 9, (1,)) for name in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = spaces.Discrete(2)

    def observe(self):
        here = np.array([self.place], np.float32)
        return {"observation": here, "achieved_goal": here, "desired_goal": np.full(1, 5, np.float32)}

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return self.observe(), {}

    def step(self, action):
        self.place += 1 if action else -1
        return self.observe(), -1.0, abs(self.place) > 2, False, {}


def test_hindsight_is_collected_and_relabelled():
    def reward(achieved, desired):
        return (achieved == desired)[..., 0].astype(np.float32)

    buffer = ours.HERVectorReplayBuffer(800, N_ENVS, compute_reward_fn=reward, horizon=50, future_k=8)
    Collector(RandomPolicy(), DummyVectorEnv([Goals] * N_ENVS), buffer).collect(n_step=400, random=True)
    batch, _ = buffer.sample(200)
    relabelled = batch.obs["desired_goal"][:, 0] != 5
    assert 0.5 < relabelled.mean() < 1
    rewards = reward(batch.obs_next["achieved_goal"], batch.obs["desired_goal"])
    assert np.array_equal(batch.rew[relabelled], rewards[relabelled])
