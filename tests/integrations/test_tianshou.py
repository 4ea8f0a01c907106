"""`WorkerVectorEnv` gives tianshou what its `DummyVectorEnv` gives, for every call and kind of observation."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from processes import LIMIT
from tianshou.algorithm import DQN
from tianshou.algorithm.algorithm_base import Policy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import AsyncCollector, Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, VectorEnvNormObs
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step
from vector_envs import Gate
from waits import RECORD, Recorder
from walks import BOX, SPACES, SeededWalks, Walks, assert_same

from rlstructs.errors import ClosedError, SpecError, StateError
from rlstructs.integrations.tianshou import WorkerVectorEnv
from rlstructs.testing import Fault, FaultyEnv
from rlstructs.workers import WorkerCrashed, WorkerTimeout

ACTIONS = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "dict": spaces.Dict({"left": spaces.Discrete(3), "right": BOX}),
}


def pair(kind="box", action="discrete", n_workers=0, cls=Walks, **waits):
    fns = [lambda k=k: cls(SPACES[kind], k, copy.deepcopy(ACTIONS[action])) for k in range(5)]
    return DummyVectorEnv(fns), WorkerVectorEnv(fns, n_workers, **waits)


def of_both(envs, call):
    theirs, ours = (call(each) for each in envs)
    assert_same(ours, theirs)
    return theirs


def sample(space, n):
    """n actions of a space, in the form that tianshou hands to a vectorised environment."""
    actions = [space.sample() for _ in range(n)]
    return np.array(actions) if isinstance(space, spaces.Dict) else np.stack(actions)


CASES = [*((kind, "discrete", 0) for kind in SPACES), ("box", "box", 0), ("dict", "dict", 0), ("dict", "dict", 2)]


@pytest.mark.parametrize("kind, action, n_workers", CASES)
def test_every_step_and_reset_is_that_of_dummy_vector_env(kind, action, n_workers):
    envs, rng = pair(kind, action, n_workers=n_workers), np.random.default_rng(0)
    with contextlib.closing(envs[1]):
        assert len(envs[1]) == 5
        assert of_both(envs, lambda each: each.seed(7)) == [[7], [8], [9], [10], [11]]
        of_both(envs, lambda each: each.reset(options={"level": 1}))
        space, ended = envs[0].action_space[0], np.zeros(5, bool)
        for _ in range(40):
            ids = rng.permutation(5)[: rng.integers(1, 6)] if rng.random() < 0.5 else np.arange(5)
            if (again := np.flatnonzero(ended)).size:
                again = rng.permutation(again)
                of_both(envs, lambda each, again=again: each.reset(again, seed=int(again[0])))
            actions = sample(space, len(ids))
            _, _, terminated, truncated, _ = of_both(
                envs, lambda each, actions=actions, ids=ids: each.step(actions, ids)
            )
            ended[:] = False
            ended[ids] = terminated | truncated
        of_both(envs, lambda each: each.reset(2))
        of_both(envs, lambda each: each.reset())


def test_attributes_images_and_seeds_are_those_of_dummy_vector_env():
    envs = pair()
    ours = envs[1]
    with contextlib.closing(ours):
        for ids in (None, 1, [3, 1], np.array([2])):
            of_both(envs, lambda each, ids=ids: each.get_env_attr("number", ids))
        for each in envs:
            each.set_env_attr("number", 9, [2, 0])
            each.set_env_attr("extra", 5, 1)
        of_both(envs, lambda each: each.get_env_attr("number"))
        with pytest.raises(AttributeError, match="extra"):
            ours.get_env_attr("extra", 2)
        of_both(envs, lambda each: each.get_env_attr("extra", 1))
        of_both(envs, lambda each: each.render())
        of_both(envs, lambda each: each.seed([3, None, 4, 5, 6])[0])
        of_both(envs, lambda each: [each.action_space[k].sample() for k in (0, 2, 3, 4)])
        assert [space.shape for space in ours.observation_space] == [(3,)] * 5
        assert not ours.is_closed
    assert ours.is_closed
    with pytest.raises(ClosedError):
        ours.reset()
    envs = pair(cls=SeededWalks)
    with contextlib.closing(envs[1]):
        of_both(envs, lambda each: each.seed(5))
        of_both(envs, lambda each: each.get_env_attr("number"))


def test_attributes_are_set_inside_wrappers():
    with contextlib.closing(WorkerVectorEnv([lambda: gymnasium.Wrapper(Walks())], 0)) as envs:
        envs.set_env_attr("number", 7)
        assert envs.get_env_attr("number") == [7] and envs.render()[0].max() == 7


def test_misuse_and_a_dead_worker_are_errors():
    _, ours = pair(n_workers=1)
    with contextlib.closing(ours):
        ours.seed(0)
        with pytest.raises(SpecError, match="each of 5 environments, got 4"):
            ours.step(np.zeros(4, int))
        with pytest.raises(SpecError, match=r"each once, got \[1, 1\]"):
            ours.reset([1, 1])
        while not (ended := np.logical_or(*ours.step(np.zeros(5, int))[2:4])).any():
            pass
        with pytest.raises(StateError, match="have ended"):
            ours.step(np.zeros(5, int))
        ours.reset(np.flatnonzero(ended))
        ours.step(np.zeros(5, int))
        with pytest.raises(WorkerCrashed, match="exit code 3"):
            ours.get_env_attr("death", 4)
    with pytest.raises(TypeError, match="arrays or a Dict"):
        WorkerVectorEnv([lambda: Walks(spaces.Tuple([BOX, BOX]))], 0)


@pytest.mark.parametrize("waits", [{"wait_num": 2}, {"timeout": 5.0}, {"wait_num": 4, "timeout": 5.0}])
@pytest.mark.parametrize("kind", ["box", "dict"])
def test_steps_in_this_process_are_ready_at_once_where_steps_need_not_wait_for_all(kind, waits):
    # A `DummyVectorEnv` that does not wait returns every other one of them.
    envs, rng = pair(kind, **waits), np.random.default_rng(0)
    with contextlib.closing(envs[1]):
        assert envs[1].is_async
        of_both(envs, lambda each: each.seed(7))
        of_both(envs, lambda each: each.reset())
        for _ in range(40):
            ids = np.sort(rng.permutation(5)[: rng.integers(1, 6)])
            actions = sample(envs[0].action_space[0], len(ids))
            _, _, terminated, truncated, infos = of_both(
                envs, lambda each, actions=actions, ids=ids: each.step(actions, ids)
            )
            assert [info["env_id"] for info in infos] == ids.tolist()
            assert (envs[1].ready_id, envs[1].waiting_id) == ([0, 1, 2, 3, 4], [])
            if (again := ids[terminated | truncated]).size:
                of_both(envs, lambda each, again=again: each.reset(again))


@pytest.fixture
def gate(tmp_path):
    """The path of a pipe at which steps of a `Gate` wait, and what opens it once."""
    os.mkfifo(path := tmp_path / "gate")
    return str(path), lambda: path.write_bytes(b"")


def stepped(envs, action, ids=None):
    """Steps; the number of steps that each environment has made, by environment."""
    observations, *_, infos = envs.step(action, ids)
    return {info["env_id"]: int(row[0]) for info, row in zip(infos, observations, strict=True)}


def test_a_step_returns_as_many_as_it_waits_for(gate):
    path, let_through = gate
    with contextlib.closing(WorkerVectorEnv([partial(Gate, path)] * 4, wait_num=3)) as envs:
        envs.reset()
        assert stepped(envs, np.array([1, 0, 1, 1])) == {0: 1, 2: 1, 3: 1}
        assert (envs.waiting_id, envs.ready_id) == ([1], [0, 2, 3])
        assert stepped(envs, np.array([1, 1, 1]), [3, 2, 0]) == {0: 2, 2: 2, 3: 2}
        with pytest.raises(StateError, match=r"environments \[1\] were sent and not received"):
            envs.step(np.array([1]), 1)
        assert envs.reset([2, 0])[0].tolist() == [[0], [0]] and envs.waiting_id == [1]
        let_through()
        assert stepped(envs, None) == {1: 1}
        stepped(envs, np.array([1, 0, 1, 1]))
        let_through()
        assert envs.reset()[0].tolist() == [[0]] * 4  # waits for the step, and drops its result
        assert (envs.waiting_id, envs.ready_id) == ([], [0, 1, 2, 3])
        with pytest.raises(StateError, match="nothing was asked for"):
            envs.step(None)


def test_a_step_returns_what_is_ready_in_time_and_goes_on_waiting_for_one(gate):
    path, let_through = gate
    with contextlib.closing(WorkerVectorEnv([partial(Gate, path)] * 3, timeout=0.01)) as envs:
        envs.reset()
        seen = stepped(envs, np.array([1, 0, 1]))
        while len(seen) < 2:
            seen |= stepped(envs, None)
        assert seen == {0: 1, 2: 1}
        thread = threading.Thread(target=let_through)
        thread.start()
        assert stepped(envs, None) == {1: 1}
        thread.join()


def test_a_worker_that_is_late_is_an_error_however_long_a_step_may_wait(gate):
    path, _ = gate
    fns = [partial(Gate, path)] * 2
    with pytest.raises(WorkerTimeout):  # in the constructor or the reset, where other programs hold the cores
        with contextlib.closing(WorkerVectorEnv(fns, timeout=LIMIT, worker_timeout=2.0)) as envs:
            envs.reset()
            envs.step(np.array([0, 0]))


@pytest.mark.parametrize(
    "waits, match",
    [
        ({"wait_num": 0}, "wait_num must be at least 1"),
        ({"wait_num": 3}, "wait_num must be at most 2"),
        ({"timeout": 0}, "timeout must be above 0"),
    ],
)
def test_waits_that_cannot_be_are_refused(waits, match):
    with pytest.raises(SpecError, match=match):
        WorkerVectorEnv([Walks] * 2, **waits)


class Counter(Policy):
    """Acts at random, with a state: `AsyncCollector` fails without one."""

    def forward(self, batch, state=None, **_):
        n = len(batch.obs)
        state = np.zeros((n, 1), np.int64) if state is None else state + 1
        return Batch(act=np.random.default_rng(int(state.sum())).integers(1000, size=n), state=state)


def test_async_collector_fills_its_buffer_with_what_the_environments_wrote_down(tmp_path):
    policy = Counter(action_space=Recorder.action_space)
    fns = [partial(Recorder, tmp_path, 0.001 * (1 + 9 * (k == 2))) for k in range(4)]
    with contextlib.closing(WorkerVectorEnv(fns, wait_num=2, timeout=0.005)) as envs:
        buffer = VectorReplayBuffer(4000, 4)
        with pytest.warns(UserWarning, match="async setting"):
            collector = AsyncCollector(policy, envs, buffer)
        collector.reset()
        with policy_within_training_step(policy):
            for _ in range(4):
                assert collector.collect(n_step=60).n_collected_steps >= 60
        collector.reset(reset_buffer=False)
        assert envs.waiting_id == []
    assert sum(len(each) for each in buffer.buffers) >= 240
    for own in buffer.buffers:
        record = np.fromfile(tmp_path / str(int(own.obs[0, 0])), RECORD)[: len(own)]
        rows = own[np.arange(len(own))]
        assert (rows.obs_next[:, 1:] == np.stack([record[name] for name in ("n", "chain", "episode")], 1)).all()
        assert (rows.act == record["action"]).all() and (rows.rew == record["reward"]).all()
        assert (rows.done == record["done"]).all()
        assert (rows.obs[1:, :3] == rows.obs_next[:-1, :3]).all()


def train(make_envs):
    """A short training by DQN, an evaluation that ends with fewer environments than it began with, and the buffer."""
    np.random.seed(0)
    torch.manual_seed(0)
    fns = [lambda: gymnasium.make("CartPole-v1")] * 4
    with contextlib.closing(make_envs(fns)) as envs:
        net = Net(state_shape=4, action_shape=2, hidden_sizes=[16])
        policy = DiscreteQLearningPolicy(model=net, action_space=spaces.Discrete(2), eps_training=0.2)
        dqn = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), n_step_return_horizon=2, target_update_freq=10)
        buffer = VectorReplayBuffer(400, 4)
        collector = Collector(dqn, envs, buffer, exploration_noise=True)
        envs.seed(3)
        collector.reset()
        collector.collect(n_step=64, random=True)
        with policy_within_training_step(policy):
            for _ in range(10):
                collector.collect(n_step=16)
                dqn.update(buffer, 32)
        normed = VectorEnvNormObs(envs)
        evaluated = Collector(dqn, normed).collect(n_episode=6, reset_before_collect=True)
    batch = buffer[np.arange(224)]  # what no row holds is there in tianshou's buffer, too
    weights = [parameter.detach().numpy() for parameter in net.parameters()]
    rows = [np.asarray(batch[key]) for key in ("obs", "act", "rew", "terminated", "truncated", "obs_next")]
    return [*weights, *rows, evaluated.returns, evaluated.lens, normed.obs_rms.mean]


def test_dqn_collects_the_same_rows_and_learns_the_same_weights_as_on_dummy_vector_env():
    wanted, found = train(DummyVectorEnv), train(partial(WorkerVectorEnv, n_workers=2))
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("n_workers", [0, 2])
def test_an_environment_that_fails_is_truncated_and_made_anew_at_its_reset(n_workers):
    faults = [Fault("raise", count=3, env_index=1, error=KeyError("lost"))]
    fns = [partial(FaultyEnv, faults, env_index=k, length=100) for k in range(3)]
    with contextlib.closing(WorkerVectorEnv(fns, n_workers, on_env_failure="restart")) as envs:
        envs.reset()
        for ids in (None, [0, 1], [1, 2]):
            seen, rewards, terminated, truncated, infos = envs.step(np.zeros(3 if ids is None else 2, int), ids)
        assert truncated.tolist() == [True, False] and rewards.tolist() == [0, 2] and not terminated.any()
        assert infos[0]["env_failure"] == "KeyError: 'lost'" and "env_failure" not in infos[1]
        assert seen[:, 3].tolist() == [2, 2]
        with pytest.raises(StateError, match="have ended"):
            envs.step(np.zeros(3, int))
        assert envs.reset([1])[0][:, 3].tolist() == [0]
        assert envs.step(np.zeros(3, int))[0][:, 3].tolist() == [3, 1, 3]
