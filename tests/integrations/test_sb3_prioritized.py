"""Prioritised buffers for Stable-Baselines3: the draws, weights and trainings of one that is written in plain numpy."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common import buffers
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch.nn.functional import smooth_l1_loss

from rlstructs import SpecError
from rlstructs.integrations import sb3

pytestmark = pytest.mark.usefixtures("small_training")
BOX, DISCRETE = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
DICT = spaces.Dict({"a": BOX, "n": DISCRETE})
ALPHA, BETA = 0.7, 0.5


class PlainBuffer(buffers.ReplayBuffer):
    """Stable-Baselines3's buffer with priorities in an array; row ids are `env * buffer_size + pos`."""

    def __init__(self, *settings, alpha, beta, **more):
        super().__init__(*settings, **more)
        self.alpha, self.beta, self.largest = alpha, beta, 1.0
        self.priorities = np.zeros((self.n_envs, self.buffer_size))

    def add(self, *row):
        self.priorities[:, self.pos] = self.largest
        super().add(*row)

    def sample(self, batch_size, env=None):
        powers = np.where(self.priorities > 0, self.priorities**self.alpha, 0).ravel()
        ends = np.cumsum(powers)
        masses = (np.arange(batch_size) + np.random.random(batch_size)) / batch_size * ends[-1]
        rows = np.searchsorted(ends, masses, side="right")
        at = rows % self.buffer_size, rows // self.buffer_size
        weights = (powers[powers > 0].min() / powers[rows]).astype(np.float32) ** np.float32(self.beta)
        return sb3.PrioritizedReplayBufferSamples(
            observations=self.to_torch(self._normalize_obs(self.observations[at], env)),
            actions=self.to_torch(self.actions[at]),
            next_observations=self.to_torch(self._normalize_obs(self.next_observations[at], env)),
            dones=self.to_torch((self.dones[at] * (1 - self.timeouts[at]))[:, None]),
            rewards=self.to_torch(self._normalize_reward(self.rewards[at][:, None], env)),
            weights=self.to_torch(weights[:, None]),
            indices=rows,
        )

    def update_priorities(self, indices, priorities):
        priorities = priorities.detach().numpy().astype(np.float64).ravel()
        self.largest = max(self.largest, priorities.max())
        self.priorities.ravel()[indices] = priorities


class PrioritizedDQN(DQN):
    """The lines of `docs/questions/one_line.md`."""

    def train(self, gradient_steps, batch_size=100):
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self.replay_buffer.beta = 1 - 0.6 * self._current_progress_remaining
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            with torch.no_grad():
                following = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
                targets = batch.rewards + (1 - batch.dones) * self.gamma * following
            values = self.q_net(batch.observations).gather(1, batch.actions.long())
            loss = (batch.weights * smooth_l1_loss(values, targets, reduction="none")).mean()
            self.replay_buffer.update_priorities(batch.indices, (targets - values).abs() + 1e-6)
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        self._n_updates += gradient_steps


def make(observation=BOX, size=30, n_envs=3, **settings):
    cls = sb3.PrioritizedDictReplayBuffer if isinstance(observation, spaces.Dict) else sb3.PrioritizedReplayBuffer
    return cls(size, observation, DISCRETE, "cpu", n_envs, **{"alpha": ALPHA, "beta": BETA, **settings})


def fill(many, n, observation=BOX, n_envs=3, seed=0):
    """Adds the same n rows of each environment to several buffers."""
    rng = np.random.default_rng(seed)

    def observe():
        a, number = rng.normal(size=(n_envs, 3)).astype(np.float32), rng.integers(3, size=n_envs)
        return {"a": a, "n": number} if isinstance(observation, spaces.Dict) else a

    seen = observe()
    for _ in range(n):
        following, done = observe(), rng.random(n_envs) < 0.3
        infos, actions = [{"TimeLimit.truncated": bool(rng.random() < 0.5)} for _ in done], rng.integers(3, size=n_envs)
        for buffer in many:
            buffer.add(copy.copy(seen), copy.copy(following), actions, 2.0 * done, done, infos)
        seen = following


def sample(buffer, n=16, seed=5, **settings):
    np.random.seed(seed)
    return buffer.sample(n, **settings)


def assert_same(found, wanted):
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            assert torch.allclose(one, other, rtol=1e-5) if name == "weights" else torch.equal(one, other), name
        else:
            assert np.array_equal(one, other), name


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("n", [4, 37])
def test_rows_are_drawn_and_weighed_by_their_priorities(n, optimize):
    ours = make(optimize_memory_usage=optimize)
    plain = PlainBuffer(30, BOX, DISCRETE, "cpu", 3, alpha=ALPHA, beta=BETA)
    rng = np.random.default_rng(1)
    for step in range(6):
        fill([ours, plain], n, seed=step)
        for draw in range(3):
            found, wanted = (sample(buffer, seed=draw) for buffer in (ours, plain))
            assert_same(found, wanted)
            priorities = torch.tensor(rng.exponential(size=(16, 1)), requires_grad=True)
            for buffer in (ours, plain):
                buffer.update_priorities(found.indices, priorities)


def test_observations_that_are_dicts():
    ours, theirs = make(DICT), buffers.DictReplayBuffer(30, DICT, DISCRETE, "cpu", 3)
    fill([ours, theirs], 13, DICT)
    batch = sample(ours)
    at = batch.indices % 10, batch.indices // 10
    for key in DICT.spaces:
        assert np.array_equal(batch.observations[key], theirs.observations[key][at])
        assert np.array_equal(batch.next_observations[key], theirs.next_observations[key][at])


def test_a_normalising_wrapper_normalises_samples():
    envs = VecNormalize(make_vec_env("Pendulum-v1", 3))
    with contextlib.closing(envs):
        envs.reset()
        envs.step(np.ones((3, 1)))
        ours, plain = make(), PlainBuffer(30, BOX, DISCRETE, "cpu", 3, alpha=ALPHA, beta=BETA)
        fill([ours, plain], 6)
        assert_same(sample(ours, env=envs), sample(plain, env=envs))


def test_priorities_of_overwritten_rows_are_ignored():
    ours = make(size=12)
    fill([ours], 4)
    batch = sample(ours, 12)
    fill([ours], 4)
    ours.update_priorities(batch.indices, np.full(12, 100.0))
    assert set(sample(ours, 12).indices) == set(range(12))  # all are new, and alike
    assert sample(ours).weights.unique().tolist() == [1.0]


def test_a_copy_a_pickle_and_a_reset():
    ours = make()
    fill([ours], 13)
    ours.update_priorities(np.arange(30), np.arange(30.0))
    ours.beta = 0.9
    for again in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert (again.alpha, again.beta) == (ALPHA, 0.9)
        assert_same(sample(again), sample(ours))
        again.update_priorities([3], [1e6])
        assert set(sample(again).indices) != set(sample(ours).indices)
    ours.reset()
    fill([ours], 2)
    assert ours.size() == 2
    assert sample(ours).weights.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("indices", "priorities", "error", "words"),
    [
        ([0, 1], [1.0, np.nan], SpecError, "priorities must be finite and at least 0, got nan"),
        ([0], [-1.0], SpecError, "priorities must be finite and at least 0, got -1.0"),
        ([0, 1], [1.0], SpecError, "priorities: 1 came for 2 indexes"),
        ([30], [1.0], IndexError, r"index 30 is not in \[0, 30\)"),
        ([0.5], [1.0], SpecError, "index must hold integers, got float64"),
    ],
)
def test_a_wrong_update_is_an_error_and_changes_nothing(indices, priorities, error, words):
    ours = make()
    fill([ours], 13)
    with pytest.raises(error, match=words):
        ours.update_priorities(np.array(indices), torch.tensor(priorities))
    assert sample(ours).weights.unique().tolist() == [1.0]


def test_wrong_exponents_and_empty_buffers_are_errors():
    with pytest.raises(SpecError, match="alpha must be a number of at least 0, got -1"):
        make(alpha=-1)
    with pytest.raises(SpecError, match="beta must be a number of at least 0, got nan"):
        make().beta = float("nan")
    with pytest.raises(SpecError, match="nothing to sample"):
        make().sample(3)


def test_dqn_trains_as_with_the_plain_buffer_on_dummy_vec_env(tmp_path):
    def train(replay_buffer_class, vec_env_cls):
        with contextlib.closing(make_vec_env("CartPole-v1", 4, seed=3, vec_env_cls=vec_env_cls)) as envs:
            model = PrioritizedDQN(
                "MlpPolicy", envs, seed=0, learning_starts=40, buffer_size=160, batch_size=32, device="cpu",
                replay_buffer_class=replay_buffer_class, replay_buffer_kwargs={"alpha": 0.6, "beta": 0.4},
            ).learn(240)  # fmt: skip
            model.save_replay_buffer(tmp_path / "buffer")
            model.load_replay_buffer(tmp_path / "buffer")
            model.learn(40, reset_num_timesteps=False)
            buffer = model.replay_buffer
        rows = [getattr(buffer, name) for name in ("observations", "next_observations", "actions", "rewards", "dones")]
        return rows, [parameter.detach() for parameter in model.policy.parameters()]

    wanted_rows, wanted = train(PlainBuffer, DummyVecEnv)
    rows, found = train(sb3.PrioritizedReplayBuffer, sb3.SharedVecEnv)
    assert all(np.array_equal(one, other) for one, other in zip(rows, wanted_rows, strict=True))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))
