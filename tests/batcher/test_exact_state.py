"""`state_dict(exact=True)`: another batcher goes on, bit for bit, as the one that was saved."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import signal
import threading

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Count, rollout, through_file
from processes import wait_until_gone

from rlstructs import (
    Checkpoint,
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    NormalizeObservation,
    NormalizeReward,
    RL_Agent,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
    StateError,
    masked_dicttensor,
)
from rlstructs.envs import stepping
from rlstructs.memories.torch import RandomMemory


class Drawing(RL_Agent):
    """Acts by a recurrent state, the last update and five random streams, and records all of them."""

    def __init__(self, seed=0):
        self.own, self.weight, self.n_calls = np.random.default_rng(seed), torch.zeros(1), 0
        self.shared = self.weight.view(1, 1)

    def initial_state(self, agent_info, B):
        return DictTensor({"h": torch.zeros(B)})

    def __call__(self, state, observation, agent_info, history=None):
        n = observation.n_elems()
        state = masked_dicttensor(state, self.initial_state(agent_info, n), observation["initial_state"])
        self.n_calls += 1
        drawn = self.own.random() + random.random() + np.random.rand() + torch.rand(n) + self.shared[0]
        h = state["h"] * 0.9 + drawn + self.n_calls
        action = (h * 1000).long() % 2
        return DictTensor({"action": action, "h": h, "told": self.weight.expand(n)}), DictTensor({"h": h})

    def update(self, info):
        self.weight[:] = info

    def seed(self, seed):
        self.own = np.random.default_rng(seed)


def create(seed, n_envs=2, wrap=True, kind=GymEnvInf, **arguments):
    env = kind([gymnasium.make("CartPole-v1", max_episode_steps=30) for _ in range(n_envs)], seed, **arguments)
    return NormalizeReward(NormalizeObservation(env)) if wrap else env


def made(n_processes=2, run_ahead=0, n_timesteps=16, create_env=create, agent=Drawing, agent_args=None, **arguments):
    env_args = arguments.pop("env_args", {})
    return RL_Batcher(
        n_timesteps, agent, agent_args or {}, create_env, env_args, n_processes, arguments.pop("seeds", 3),
        run_ahead=run_ahead, **arguments,
    )  # fmt: skip


def go_on(batcher, n=4):
    """The next rollouts with an update between them, and all else that a batcher tells but for times."""
    found = []
    for number, trajectories in enumerate(itertools.islice(batcher.rollouts(), n)):
        found.append(trajectories)
        batcher.update(10.0 + number)
    metrics = {key: value for key, value in batcher.metrics().items() if key[-7:] not in ("_second", "g_share")}
    moments = {name: (m.count, m.mean.tolist(), m.m2.tolist()) for name, m in batcher.statistics().items()}
    workers = [(w["steps"], w["restarts"], w["lost_rollouts"]) for w in batcher.stats()["workers"]]
    return found, batcher.episodes(), metrics, moments, workers, batcher.policy_version


def check_it_goes_on_again(batcher):
    """Whether a batcher that is brought back to its state does what it did from there."""
    state = batcher.state_dict(exact=True)
    expected = go_on(batcher)
    batcher.load_state_dict(state)
    assert go_on(batcher) == expected


@pytest.mark.parametrize(
    ("n_processes", "run_ahead", "is_under_way"), [(0, 0, False), (0, 1, True), (2, 0, True), (2, 1, False)]
)
def test_another_batcher_goes_on_bit_for_bit(n_processes, run_ahead, is_under_way):
    with made(n_processes, run_ahead) as batcher:
        batcher.update(1.0)
        batcher.reset()
        for number in range(4):
            rollout(batcher)
            batcher.update(2.0 + number)
        if is_under_way:
            batcher.execute()
        state = through_file(batcher.state_dict(exact=True))
        expected = go_on(batcher)
    assert expected[0][0].trajectories["_observation/done"].any() and expected[1].n_elems() > 0
    assert {each["method"] for each in state["exact"]["environments"]} == {"pickle"}
    with made(n_processes, run_ahead) as other:
        other.load_state_dict(state)
        assert go_on(other) == expected


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_saved_batcher_goes_on_as_if_it_had_not_been_asked(run_ahead):
    found = []
    for is_asked in (False, True):
        with made(0, run_ahead) as batcher:
            batcher.reset()
            rollout(batcher)
            batcher.execute()
            states = [batcher.state_dict(exact=True) for _ in range(2 * is_asked)]
            found.append(go_on(batcher))
    assert found[0] == found[1]
    assert torch.equal(*(state["exact"]["jobs"][0]["pickled"] for state in states))


def test_it_is_loaded_in_the_place_of_what_a_batcher_has_done():
    with made(0) as batcher:
        batcher.reset()
        rollout(batcher)
        check_it_goes_on_again(batcher)


class Raising(Count):
    """Raises in its fifth step in the worker with index 1, and not in that worker's successors."""

    def __init__(self, seed):
        super().__init__(100)
        self.fails = seed.restart_number == 0 and seed.worker_index == 1

    def step(self, action):
        if self.fails and self.steps == 4:
            raise OSError("lost")
        return super().step(action)


def test_it_is_loaded_in_the_place_of_a_rollout_ahead_that_has_failed():
    def create_env(seed):
        return GymEnvInf([Raising(seed)], seed)

    with RL_Batcher(4, Drawing, {}, create_env, {}, 2, 0, on_worker_failure="restart", run_ahead=1) as batcher:
        batcher.reset()
        state = batcher.state_dict(exact=True)
        for _ in range(2):
            assert rollout(batcher)[0].lengths.tolist() == [4, 4]
            batcher.load_state_dict(state)
        assert [rollout(batcher)[0].lengths.tolist() for _ in range(2)] == [[4, 4], [4, 0]]


def in_groups(seed, n_envs=4, n_groups=2, mode="SameStep", env="CartPole-v1", n_workers=0):
    fns = [lambda: gymnasium.make(env, max_episode_steps=30)] * n_envs
    envs = SharedVectorEnv(fns, n_workers, n_groups=n_groups, autoreset_mode=mode)
    return GymVectorEnv(envs, seed)


GROUPS = {
    "same step": {"n_processes": 0},
    "next step, three uneven groups": {"n_processes": 0, "env_args": {"mode": "NextStep", "n_envs": 5, "n_groups": 3}},
    "run-ahead": {"n_processes": 0, "run_ahead": 1, "env_args": {"env": "Acrobot-v1"}},
    "workers with run-ahead": {"n_processes": 2, "run_ahead": 1},
}


@pytest.mark.parametrize("name", GROUPS)
def test_environments_in_groups_go_on_bit_for_bit(name, tmp_path):
    arguments = {"create_env": in_groups, **GROUPS[name]}
    with made(**arguments) as batcher:
        batcher.reset()
        rollout(batcher)
        rollout(batcher)
        Checkpoint(tmp_path, batcher=batcher, rng=False).save(1)
        state = through_file(batcher.state_dict(exact=True))
        expected = go_on(batcher)
        batcher.load_state_dict(state)
        assert go_on(batcher) == expected
    steps = [trajectories.trajectories for trajectories in expected[0]]
    assert any(each["_observation/done"].any() for each in steps)
    assert not steps[0]["observation/initial_state"][:, 0].all()
    with made(**arguments) as other:
        other.load_state_dict(state)
        assert go_on(other) == expected
    with made(**arguments) as restored:
        assert Checkpoint(tmp_path, batcher=restored, rng=False).restore() == 1
        assert go_on(restored) == expected


def test_environments_in_groups_begin_new_episodes_where_they_cannot_be_brought_back():
    arguments = {"n_processes": 0, "create_env": in_groups, "env_args": {"n_workers": 2}}
    with made(**arguments) as batcher:
        batcher.reset()
        rollout(batcher)
        with pytest.warns(UserWarning, match="all environments of worker 0 begin new episodes"):
            state = through_file(batcher.state_dict(exact="best"))
        batcher.load_state_dict(state)
        expected = go_on(batcher)
    with made(**arguments) as other:
        other.load_state_dict(state)
        assert go_on(other) == expected
    first = expected[0][0].trajectories
    assert first["observation/initial_state"][:, 0].all() and first.lengths.tolist() == [16] * 4


def test_a_successor_goes_on_with_environments_in_groups():
    arguments = {"create_env": in_groups, "on_worker_failure": "restart"}
    with made(**arguments) as batcher:
        batcher.reset()
        rollout(batcher)
        os.kill(pid := batcher.stats()["workers"][1]["pid"], signal.SIGKILL)
        wait_until_gone([pid])
        rollout(batcher)
        rollout(batcher)
        state = through_file(batcher.state_dict(exact=True))
        expected = go_on(batcher)
        batcher.load_state_dict(state)
        assert go_on(batcher) == expected
    assert expected[4][1][1] == 1


def test_successors_of_workers_go_on_too():
    def lose_one(batcher, index):
        os.kill(pid := batcher.stats()["workers"][index]["pid"], signal.SIGKILL)
        wait_until_gone([pid])
        batcher.update(5.0)
        assert batcher.stats()["workers"][index]["pid"] != pid

    with made(on_worker_failure="restart") as batcher:
        batcher.update(3.0)
        batcher.reset()
        rollout(batcher)
        lose_one(batcher, 1)
        rollout(batcher)
        state = through_file(batcher.state_dict(exact=True))
        lose_one(batcher, 0)
        expected = go_on(batcher, 2)
    with made(on_worker_failure="restart") as other:
        other.load_state_dict(state)
        assert [worker["restarts"] for worker in other.stats()["workers"]] == [0, 1]
        lose_one(other, 0)
        found = go_on(other, 2)
    assert found[0] == expected[0] and found[1] == expected[1] and found[4] == expected[4]


def test_a_worker_that_dies_while_the_state_is_taken_is_replaced():
    with made(on_worker_failure="restart") as batcher:
        batcher.reset()
        batcher.execute()
        os.kill(batcher.stats()["workers"][0]["pid"], signal.SIGKILL)
        state = batcher.state_dict(exact=True)
        expected = go_on(batcher)
    with made(on_worker_failure="restart") as other:
        other.load_state_dict(state)
        found = go_on(other)
        assert found[:4] == expected[:4] and other.stats()["restarts"] == 1


@pytest.mark.parametrize("order", ["feed, load", "load, feed"])
@pytest.mark.parametrize("n_rollouts", [1, 12])
def test_workers_go_on_to_write_to_a_memory(tmp_path, n_rollouts, order):
    """The saved memory holds what was handed out; a rollout that workers have written waits, and is not in it."""

    def draw(memory):
        return memory.sample(memory.get_tensor_names(), 64, 3) if len(memory) else []

    def draws_of(batcher, memory):
        found = [draw(memory)]
        for _ in range(9):
            batcher.execute()
            found.append(draw(memory))
            batcher.wait()
            found.append(draw(memory))
        return found

    def make_memory():
        return RandomMemory(16 * 8, 4, seed=3)

    with made(2, 1, env_args={"wrap": False}) as batcher:
        batcher.feed(memory := make_memory())
        batcher.reset()
        for _ in range(n_rollouts):
            batcher.execute()
            batcher.wait()
        state = batcher.state_dict(exact=True)
        memory.save(tmp_path / "memory.npz")
        expected = draws_of(batcher, memory)
    with made(2, 1, env_args={"wrap": False}) as other:
        memory = make_memory()
        memory.load(tmp_path / "memory.npz")
        for step in order.split(", "):
            other.feed(memory) if step == "feed" else other.load_state_dict(state)
        found = draws_of(other, memory)
    for step, (one, another) in enumerate(zip(expected, found, strict=True)):
        assert len(one) == len(another), step
        for tensors in zip(one, another, strict=True):
            assert all(torch.equal(*pair) for pair in zip(*tensors, strict=True)), step


@pytest.mark.parametrize("n_before", [0, 6])
def test_a_memory_shows_no_row_that_nobody_has_written(n_before):
    """The state is of a batcher that fed none; the other one has played some rollouts before it fed this memory."""
    with made(1, 1, env_args={"wrap": False}) as batcher:
        batcher.reset()
        rollout(batcher)
        state = batcher.state_dict(exact=True)  # a rollout waits
    with made(1, 1, env_args={"wrap": False}) as other:
        if n_before:
            other.reset()
        for _ in range(n_before):
            rollout(other)
        other.feed(memory := RandomMemory(100, 2))
        other.load_state_dict(state)
        counts = []
        for _ in range(3):
            rollout(other)
            counts.append(len(memory))
        assert counts == [0, 2 * 16, 4 * 16]  # the one that waited is in no memory
        [[versions, *_]] = memory.sample_all(memory.get_tensor_names())
    shared = memory._storage.counters.shared
    assert shared[2].tolist() == [2 * 16] * 2 and len(memory) == len(versions) == 4 * 16


def test_an_update_of_before_does_not_reach_successors():
    with made(1) as batcher:
        batcher.reset()
        rollout(batcher)
        state = batcher.state_dict(exact=True)
        expected = go_on(batcher, 3)
    with made(1, on_worker_failure="restart") as other:
        other.update(5.0)
        other.reset()
        rollout(other)
        other.load_state_dict(state)
        assert "update" not in other._engine._supervisor._lasting
        assert go_on(other, 3)[0] == expected[0]


def test_before_a_reset_it_is_loaded_like_any_other():
    with made(0) as batcher:
        batcher.update(4.0)
        state = through_file(batcher.state_dict(exact=True))
        expected = go_on(batcher)
    with made(0) as other:
        other.load_state_dict(state)
        with pytest.raises(StateError, match="there was no reset"):
            other.execute()
        assert go_on(other) == expected


def test_environments_that_have_ended_stay_so():
    with made(0, n_timesteps=20, env_args={"kind": GymEnv, "wrap": False}) as batcher:
        batcher.reset()
        _, n_running = rollout(batcher)
        while n_running == 2:
            _, n_running = rollout(batcher)
        state = batcher.state_dict(exact=True)
        expected = go_on(batcher)
        batcher.reset()
        while rollout(batcher)[1]:
            pass
        ended = batcher.state_dict(exact=True)
    with made(0, n_timesteps=20, env_args={"kind": GymEnv, "wrap": False}) as other:
        other.load_state_dict(state)
        assert go_on(other) == expected
        other.reset()
        rollout(other)
        while rollout(other)[1]:
            pass
        other.load_state_dict(ended)
        with pytest.raises(StateError, match="every environment has ended"):
            other.execute()


def test_when_it_may_be_taken():
    with made(0, env_args={"wrap": False}) as batcher:
        batcher.reset()
        batcher.execute()
        with batcher.lease():
            state = batcher.state_dict(exact=True)
        expected = go_on(batcher)
        batcher.load_state_dict(state)
        assert go_on(batcher) == expected
        with pytest.raises(SpecError, match="^state_dict: exact must be False, True or 'best', got 'yes'$"):
            batcher.state_dict(exact="yes")


def test_after_the_first_workers_were_awaited_the_others_come_next():
    with made(2, 0, env_args={"wrap": False}) as batcher:
        batcher.reset()
        batcher.execute()
        first = batcher.get(min_workers=1)[0].info["env_index"].tolist()
        state = batcher.state_dict(exact=True)
    with made(2, 0, env_args={"wrap": False}) as other:
        other.load_state_dict(state)
        trajectories, _ = rollout(other)
    assert trajectories.info["env_index"].tolist() == [0, 1, 2, 3]
    begins = trajectories.trajectories["observation/initial_state"][:, 0]
    assert all(begins[row] for row in range(4) if row not in first)


class Locked(gymnasium.Env):
    """Counts, and cannot be pickled."""

    def __init__(self):
        self.count, self.lock = Count(7), threading.Lock()
        self.action_space, self.observation_space = Count.action_space, Count.observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.offset = float(self.np_random.random()) if seed is not None else getattr(self, "offset", 0.0)
        self.count.episode = -1
        return self._shift(self.count.reset())

    def step(self, action):
        return self._shift(self.count.step(action))

    def _shift(self, result):
        return (result[0] + np.float32(self.offset), *result[1:])


class Own(Locked):
    """Has a state of its own."""

    def get_state(self):
        return {"offset": self.offset, "steps": self.count.steps, "rng": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.offset, self.count.steps = state["offset"], state["steps"]
        self.count.episode, self.np_random.bit_generator.state = 0, state["rng"]


class Forgetful(Own):
    """Its own state lacks the step."""

    def set_state(self, state):
        super().set_state({**state, "steps": self.count.steps})


def create_of(seed, env, **arguments):
    return GymEnvInf([env() for _ in range(2)], seed, **arguments)


METHODS = {"get_state": {"env": Own}, "replay": {"env": Locked, "episode_seeds": True},
           "after another": {"env": Forgetful, "episode_seeds": True}}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_environments_that_cannot_be_pickled(name):
    arguments = {"n_processes": 0, "create_env": create_of, "env_args": METHODS[name], "n_timesteps": 10}
    with made(**arguments) as batcher:
        batcher.reset()
        rollout(batcher)
        state = through_file(batcher.state_dict(exact=True))
        expected = go_on(batcher)
    method = "get_state" if name == "get_state" else "replay"
    assert [each["method"] for each in state["exact"]["environments"]] == [method] * 2
    with made(**arguments) as other:
        other.load_state_dict(state)
        assert go_on(other) == expected


def test_an_episode_without_an_end_keeps_no_more_actions_than_can_be_played_again(monkeypatch):
    monkeypatch.setattr(stepping, "MOST_ACTIONS", 50)
    monkeypatch.setattr(stepping, "BLOCK", 16)

    def endless():
        env = Locked()
        env.count = Count(10**9)
        return env

    arguments = {"n_processes": 0, "create_env": create_of, "env_args": {"env": endless, "episode_seeds": True}}
    with made(n_timesteps=10, **arguments) as batcher:
        batcher.reset()
        for _ in range(5):
            rollout(batcher)
        state = through_file(batcher.state_dict(exact=True))
        expected, _ = rollout(batcher)
        with pytest.raises(SpecError, match=r"replay: its episode has more than .* steps, whose actions are not kept"):
            batcher.state_dict(exact=True)
        with pytest.warns(UserWarning, match="all environments of worker 0 begin new episodes"):
            batcher.state_dict(exact="best")
        env = batcher._engine.pool._job.env
        assert [sum(1 for _ in single.episode.actions) for single in env.single_envs()] == [0, 0]
        batcher.load_state_dict(state)
        assert rollout(batcher)[0] == expected


ACTIONS = {
    "ints": list(range(40)), "large ints": [2**70] * 40, "floats": [0.1 * n for n in range(40)], "bools": [True] * 40,
    "numbers": [np.int64(n) for n in range(40)], "arrays": list(np.arange(80, dtype=np.float32).reshape(40, 2)),
    "arrays of two shapes": [np.zeros(1 + n % 2) for n in range(40)], "dicts": [{"a": n} for n in range(40)],
    "mixed": [n if n % 2 else float(n) for n in range(40)], "texts": ["go"] * 40,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_that_are_packed_are_the_same_ones(name, monkeypatch):
    monkeypatch.setattr(stepping, "BLOCK", 16)
    packed = stepping.Actions()
    for action in ACTIONS[name]:
        packed.append(action)
    found = list(pickle.loads(pickle.dumps(packed)))
    assert len(packed) == len(found) == 40
    for one, other in zip(found, ACTIONS[name], strict=True):
        assert type(one) is type(other) and np.array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


def test_an_environment_that_no_method_fits_is_named():
    arguments = {"n_processes": 0, "create_env": create_of, "env_args": {"env": Locked}, "n_timesteps": 10}
    with made(**arguments) as batcher:
        batcher.reset()
        rollout(batcher)
        with pytest.raises(SpecError, match=r"environment 0 \(Locked\) cannot be brought back: pickle: .*_thread.lock"):
            batcher.state_dict(exact=True)
        with pytest.warns(UserWarning, match="all environments of worker 0 begin new episodes"):
            state = through_file(batcher.state_dict(exact="best"))
        rollout(batcher)
    assert {each["method"] for each in state["exact"]["environments"]} == {"new episode"}
    with made(**arguments) as other:
        other.load_state_dict(state)
        trajectories, _ = rollout(other)
        assert trajectories.trajectories["observation/initial_state"][:, 0].all()
        assert other.episodes()["length"].max() <= 7


class Unpicklable(Drawing):
    """Holds a lock."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class WithState(Unpicklable):
    """Says itself what its state is."""

    def get_state(self):
        return self.own, self.weight, self.n_calls

    def set_state(self, state):
        self.own, self.weight, self.n_calls = state
        self.shared = self.weight.view(1, 1)


def test_agents_that_cannot_be_pickled_say_what_their_state_is():
    with made(0, agent=Unpicklable) as batcher:
        batcher.reset()
        with pytest.raises(SpecError, match="agent: Unpicklable cannot be pickled: .* or define Unpicklable.get_state"):
            batcher.state_dict(exact=True)
        rollout(batcher)
    with made(0, agent=WithState) as batcher:
        batcher.reset()
        rollout(batcher)
        check_it_goes_on_again(batcher)


def test_the_exact_state_of_another_batcher_says_what_differs():
    with made(0) as batcher:
        batcher.reset()
        state = batcher.state_dict(exact=True)
        expected = go_on(batcher, 2)
    for arguments, message in (
        ({"n_timesteps": 8}, "n_timesteps is 16 in the exact state, in this batcher it is 8"),
        ({"run_ahead": 1}, "run_ahead is 0 in the exact state, in this batcher it is 1"),
        ({"seeds": 4}, "make the batcher with seeds=3"),
    ):
        with made(0, **arguments) as other, pytest.raises(SpecError, match=message):
            other.load_state_dict(state)
    broken = {**state, "exact": {**state["exact"], "trainer": {"pickled": torch.zeros(3, dtype=torch.uint8)}}}
    with made(0) as other:
        for wrong in (broken, {**state, "exact": {}}, {**state, "exact": None}):
            with pytest.raises(SpecError, match="^load_state_dict: the exact part"):
                other.load_state_dict(wrong)
        other.load_state_dict(state)
        assert go_on(other, 2) == expected


def test_equal_weights_of_workers_are_saved_once():
    def create_agent():
        agent = Drawing()
        agent.large = torch.arange(100_000.0)
        return agent

    with made(2, agent=create_agent) as batcher:
        batcher.reset()
        file = io.BytesIO()
        torch.save(batcher.state_dict(exact=True), file)
    assert 400_000 < len(file.getvalue()) < 700_000
