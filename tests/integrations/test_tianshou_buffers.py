"""tianshou's `Collector` and algorithms come to the same with these buffers as with tianshou's own."""

from __future__ import annotations

import copy
import pickle

import gymnasium
import numpy as np
import pytest
import tianshou.data as theirs
import torch
from gymnasium import spaces
from tianshou.algorithm import DQN, PPO, SAC
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector
from tianshou.env import DummyVectorEnv
from tianshou.utils.net import continuous, discrete
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step

import rlstructs.integrations.tianshou as ours
from rlstructs import replay

pytestmark = pytest.mark.usefixtures("small_training")
N_ENVS = 4


def make_net(**settings):
    return Net(hidden_sizes=[16], **settings)


def make_dqn():
    net = make_net(state_shape=4, action_shape=2)
    policy = DiscreteQLearningPolicy(model=net, action_space=spaces.Discrete(2), eps_training=0.2)
    settings = {"gamma": 0.9, "n_step_return_horizon": 3, "target_update_freq": 2}
    return "CartPole-v1", DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), **settings), None


def make_ppo():
    net = make_net(state_shape=4)
    actor = discrete.DiscreteActor(preprocess_net=net, action_shape=2)
    critic = discrete.DiscreteCritic(preprocess_net=net)
    policy = DiscreteActorPolicy(actor=actor, action_space=spaces.Discrete(2))
    settings = {"critic": critic, "optim": AdamOptimizerFactory(lr=1e-3), "recompute_advantage": True}
    return "CartPole-v1", PPO(policy=policy, **settings), {"batch_size": 32, "repeat": 2}


def make_sac():
    net, space = make_net(state_shape=3), gymnasium.make("Pendulum-v1").action_space
    actor = continuous.ContinuousActorProbabilistic(
        preprocess_net=net, action_shape=1, unbounded=True, conditioned_sigma=True
    )
    of_critic = make_net(state_shape=3, action_shape=1, concat=True)
    settings = {"critic": continuous.ContinuousCritic(preprocess_net=of_critic), "n_step_return_horizon": 2}
    settings |= {f"{name}_optim": AdamOptimizerFactory(lr=1e-3) for name in ("policy", "critic")}
    return "Pendulum-v1", SAC(policy=SACPolicy(actor=actor, action_space=space), **settings), None


BUFFERS = {
    "vector": lambda package, _: package.VectorReplayBuffer(1000, N_ENVS),
    "prioritised": lambda package, _: package.PrioritizedVectorReplayBuffer(1000, N_ENVS, alpha=0.6, beta=0.4),
    "cached": lambda package, plain: package.CachedReplayBuffer(plain.ReplayBuffer(1000), N_ENVS, 300),
}


def train(make_algorithm, buffer):
    """The weights after some updates, each from all rows, and a batch of these rows."""
    torch.manual_seed(0)
    np.random.seed(0)
    name, algorithm, on_policy = make_algorithm()
    envs = DummyVectorEnv([lambda: gymnasium.make(name) for _ in range(N_ENVS)])
    envs.seed(0)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=120)
    with policy_within_training_step(algorithm.policy):
        for _ in range(3):
            if on_policy:
                algorithm.update(buffer, **on_policy)
                collector.reset_buffer(keep_statistics=True)
            else:
                algorithm.update(buffer, 0)
            collector.collect(n_episode=N_ENVS)
    batch, _ = buffer.sample(0)
    rows = [np.asarray(batch[key]) for key in ("obs", "act", "rew", "terminated", "truncated", "obs_next")]
    return [parameter.detach().numpy() for parameter in algorithm.parameters()], rows


@pytest.mark.parametrize("make_algorithm", [make_dqn, make_ppo, make_sac])
@pytest.mark.parametrize("kind", BUFFERS)
def test_collector_and_algorithm_come_to_the_same(kind, make_algorithm):
    wanted = train(make_algorithm, BUFFERS[kind](theirs, theirs))
    found = train(make_algorithm, BUFFERS[kind](ours, replay))
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
        Collector(make_dqn()[1], DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * N_ENVS), other)


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
    collector = Collector(make_dqn()[1], DummyVectorEnv([Goals] * N_ENVS), buffer)
    collector.collect(n_step=400, random=True, reset_before_collect=True)
    batch, _ = buffer.sample(200)
    relabelled = batch.obs["desired_goal"][:, 0] != 5
    assert 0.5 < relabelled.mean() < 1
    rewards = reward(batch.obs_next["achieved_goal"], batch.obs["desired_goal"])
    assert np.array_equal(batch.rew[relabelled], rewards[relabelled])
