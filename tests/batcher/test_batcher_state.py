"""`RL_Batcher.state_dict` and `load_state_dict`: a new batcher goes on where another one stopped."""

from __future__ import annotations

import copy
import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from helpers import create_gym, rollout, through_file

from rlstructs import (
    ClosedError,
    DictTensor,
    NormalizeObservation,
    NormalizeReward,
    RandomAgent,
    RL_Batcher,
    SpecError,
    StateError,
)


class Told(RandomAgent):
    """Says what `update` told it, and its seed."""

    def __init__(self, action_space):
        super().__init__(action_space)
        self.told, self.given_seed = 0, 0

    def __call__(self, state, observation, agent_info, history=None):
        output, state = super().__call__(state, observation, agent_info)
        n = observation.n_elems()
        output.set("told", torch.full((n,), self.told))
        output.set("seed", torch.full((n,), self.given_seed))
        return output, state

    def update(self, info):
        self.told = info

    def seed(self, seed):
        super().seed(seed)
        self.given_seed = seed


def create(env_id, seed, n_envs=2, wrap=True, autoreset=True):
    env = create_gym(env_id, n_envs, seed, autoreset, max_episode_steps=30)
    return NormalizeReward(NormalizeObservation(env)) if wrap else env


def made(n_processes=2, n_timesteps=20, seeds=3, env_id="CartPole-v1", agent_seeds=None, on="raise", **env_args):
    space = gymnasium.spaces.Discrete(2) if env_id == "CartPole-v1" else gymnasium.spaces.Box(-2, 2, (1,))
    args = {"env_id": env_id, **env_args}
    return RL_Batcher(
        n_timesteps, Told, {"action_space": space}, create, args, n_processes, seeds, agent_seeds=agent_seeds,
        on_worker_failure=on,
    )  # fmt: skip


def same(a, b):
    """Whether two states are equal, but for the time that went by."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(key == "seconds" or same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


def starts(trajectories):
    """The first observations of episodes, a set."""
    steps = trajectories.trajectories
    mask = steps["observation/initial_state"] & steps.mask().bool()
    return {tuple(frame) for frame in steps["observation/frame"][mask].tolist()}


@pytest.mark.parametrize("n_processes", [0, 1, 2])
@pytest.mark.parametrize("seeds", ["int", "list"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_new_batcher_goes_on(n_processes, seeds, env_id):
    n_workers = max(1, n_processes)
    arguments = {
        "n_processes": n_processes, "env_id": env_id, "wrap": False, "agent_seeds": list(range(n_workers)),
        "seeds": 3 if seeds == "int" else [100 * worker for worker in range(n_workers)],
    }  # fmt: skip
    with made(**arguments) as batcher:
        batcher.update(7)
        batcher.update(8)
        batcher.reset()
        before = [rollout(batcher)[0] for _ in range(4)]
        state = through_file(batcher.state_dict())
        assert state["weights_version"] == 2
        episodes, stats = batcher.episodes(), batcher.stats()
    assert episodes.n_elems() > 0
    found = []
    for _ in range(2):
        with made(**arguments) as batcher:
            batcher.load_state_dict(state)
            with pytest.raises(StateError, match="there was no reset"):
                batcher.execute()
            assert same(batcher.state_dict() | {"workers": 0}, state | {"workers": 0})
            assert batcher.episodes() == episodes
            now = batcher.stats()
            for old, new in zip(stats["workers"], now["workers"], strict=True):
                assert new["steps"] == old["steps"] == 4 * 20 * 2
                assert new["environment_seconds"] == old["environment_seconds"] > 0
                assert new["waiting_seconds"] >= 0
            batcher.reset()
            after = [rollout(batcher)[0] for _ in range(2)]
            assert batcher.stats()["workers"][0]["steps"] == 6 * 20 * 2
            assert (after[0].trajectories["action/told"] == 0).all()  # agents are not in it
            found.append(after)
    assert found[0] == found[1]
    # Neither what environments show nor what agents do comes again.
    assert not starts(found[0][0]) & {start for trajectories in before for start in starts(trajectories)}
    for trajectories in before:
        assert not torch.equal(trajectories.trajectories["action/action"], found[0][0].trajectories["action/action"])
        assert (trajectories.trajectories["action/seed"] != found[0][0].trajectories["action/seed"]).all()


@pytest.mark.parametrize("n_processes", [0, 2])
def test_statistics_go_on(n_processes):
    with made(n_processes) as batcher:
        batcher.reset()
        rollout(batcher)
        rollout(batcher)
        known, state = batcher.statistics(), through_file(batcher.state_dict())
    with made(n_processes) as batcher:
        batcher.load_state_dict(state)
        assert batcher.statistics().keys() == known.keys()
        for name, moments in batcher.statistics().items():
            assert moments.count == known[name].count and np.array_equal(moments.variance, known[name].variance)
        batcher.reset()
        steps = rollout(batcher)[0].trajectories
        n = batcher.n_elems()
        frames = batcher.statistics()["observation/frame"]
        n_starts = int(steps["observation/initial_state"].sum())
        assert known["observation/frame"].count + n * 20 + n_starts <= frames.count
        assert batcher.statistics()["return"].count == known["return"].count + n * 20
        deviation = np.sqrt(known["observation/frame"].variance + 1e-8)
        first = steps["observation/frame"][:, 0].numpy() * deviation + known["observation/frame"].mean
        assert (np.abs(first) < 0.05 + 1e-6).all()  # where CartPole begins


def test_an_update_that_was_made_before_stays():
    with made(wrap=False) as batcher:
        batcher.update(5)
        batcher.load_state_dict(batcher.state_dict())
        batcher.reset()
        assert (rollout(batcher)[0].trajectories["action/told"] == 5).all()
        assert batcher.state_dict()["weights_version"] == 1


def test_an_own_older_state_can_be_loaded_again_and_again():
    with made() as batcher:
        batcher.reset()
        rollout(batcher)
        state, found = batcher.state_dict(), []
        for _ in range(2):
            batcher.load_state_dict(state)
            batcher.reset()
            found.append([rollout(batcher)[0] for _ in range(2)])
        assert found[0] == found[1]
        assert state["workers"][0]["stream"] == 0 and batcher.state_dict()["workers"][0]["stream"] == 1


def test_streams_and_counters_of_replaced_workers_go_on():
    with made(on="restart") as batcher:
        batcher.reset()
        os.kill(batcher.stats()["workers"][1]["pid"], signal.SIGKILL)
        while not batcher.stats()["restarts"]:
            rollout(batcher)
        state = through_file(batcher.state_dict())
        n_lost = batcher.stats()["lost_rollouts"]
    assert [worker["stream"] for worker in state["workers"]] == [0, 1]
    with made(on="restart") as batcher:
        batcher.load_state_dict(state)
        assert [worker["stream"] for worker in batcher.state_dict()["workers"]] == [1, 2]
        assert batcher.stats()["restarts"] == 1 and batcher.stats()["lost_rollouts"] == n_lost
        batcher.reset()
        rollout(batcher)
        os.kill(batcher.stats()["workers"][0]["pid"], signal.SIGKILL)
        while batcher.stats()["restarts"] == 1:
            rollout(batcher)
        assert [worker["stream"] for worker in batcher.state_dict()["workers"]] == [2, 2]
        assert (rollout(batcher)[0].lengths == 20).all()


def test_a_worker_that_died_before_is_replaced():
    with made(on="restart") as batcher:
        batcher.reset()
        rollout(batcher)
        state = batcher.state_dict()
        os.kill(batcher.stats()["workers"][0]["pid"], signal.SIGKILL)
        batcher.load_state_dict(state)
        batcher.reset()
        assert (rollout(batcher)[0].lengths == 20).all()
        assert batcher.stats()["restarts"] == 1
        assert all(worker["stream"] >= 1 for worker in batcher.state_dict()["workers"])


def test_when_it_may_be_asked_for():
    batcher = made(wrap=False)
    with batcher:
        state = batcher.state_dict()
        batcher.reset()
        batcher.execute()
        with pytest.raises(StateError, match="^load_state_dict: a rollout is under way, call get or wait first$"):
            batcher.load_state_dict(state)
        assert same(batcher.state_dict() | {"workers": 0}, state | {"workers": 0})
        with batcher.lease(), pytest.raises(StateError, match="^load_state_dict: a rollout is leased"):
            batcher.load_state_dict(state)
    with pytest.raises(ClosedError, match="^state_dict: the batcher is closed$"):
        batcher.state_dict()


def test_a_state_is_private_memory():
    with made() as batcher:
        batcher.reset()
        rollout(batcher)
        rollout(batcher)
        state = batcher.state_dict()
        kept = copy.deepcopy(state)
        for tensor in [*state["episodes"].values(), *state["statistics"]["return"].values()]:
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        assert same(batcher.state_dict(), kept) and not same(state, kept)
        batcher.load_state_dict(kept)
        kept["statistics"]["return"]["m2"].zero_()
        assert batcher.statistics()["return"].m2 > 0


OTHERS = [
    ({"n_processes": 1}, "^load_state_dict: n_processes is 2 in the state, in this batcher it is 1$"),
    ({"n_envs": 3}, "^load_state_dict: n_envs is 2 in the state, in this batcher it is 3$"),
    ({"seeds": 4}, "^load_state_dict: seeds is .* in the state, in this batcher it is "),
    ({"agent_seeds": [1, 2]}, r"^load_state_dict: agent_seeds is None in the state, in this batcher it is \[1, 2\]$"),
    (
        {"env_id": "Pendulum-v1"},
        r"^load_state_dict: observation/frame is 'float32 .4,.' in the state, in this batcher it is 'float32 .3,.'$",
    ),
    ({"wrap": False}, "^load_state_dict: observation/raw_reward is .* in the state, in this batcher it is 'missing'$"),
]


@pytest.mark.parametrize(("arguments", "message"), OTHERS, ids=[next(iter(arguments)) for arguments, _ in OTHERS])
def test_the_state_of_another_batcher_says_what_differs(arguments, message):
    with made() as batcher:
        state = batcher.state_dict()
    with made(**arguments) as other:
        other.reset()
        before = other.state_dict()
        with pytest.raises(SpecError, match=message):
            other.load_state_dict(state)
        assert same(other.state_dict(), before)
        rollout(other)  # no reset is needed


def test_what_may_differ():
    with made(n_processes=0, n_timesteps=20, on="raise") as batcher:
        state = batcher.state_dict()
    with made(n_processes=1, n_timesteps=7, on="restart") as other:
        other.load_state_dict(state)
        other.reset()
        assert (rollout(other)[0].lengths == 7).all()


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(state):
        for key in path:
            state = state[key]
        state[last] = value

    return change


WRONG = {
    "format": put("format", "rlstructs.Memory"),
    "version": put("version", 2),
    "version of text": put("version", "1"),
    "no version": lambda state: state.pop("version"),
    "no batcher": lambda state: state.pop("batcher"),
    "batcher is a list": put("batcher", []),
    "no workers": lambda state: state.pop("workers"),
    "unknown key": put("more", 1),
    "a key that is no text": put(3, 1),
    "negative version of weights": put("weights_version", -1),
    "bool": put("weights_version", True),
    "float": put("weights_version", 1.0),
    "negative steps": put("steps", -1),
    "too few workers": put("workers", []),
    "worker without stream": lambda state: state["workers"][0].pop("stream"),
    "negative stream": put("workers", 0, "stream", -1),
    "stream of text": put("workers", 0, "stream", "1"),
    "NaN seconds": put("workers", 0, "seconds", float("nan")),
    "infinite seconds": put("workers", 0, "seconds", float("inf")),
    "statistics missing": lambda state: state["statistics"].pop("return"),
    "statistics of more": put("statistics", "observation/other", {}),
    "statistics of another shape": put("statistics", "observation/frame", "mean", torch.zeros(3, dtype=torch.float64)),
    "statistics of float32": put("statistics", "observation/frame", "mean", torch.zeros(4)),
    "statistics that are NaN": put("statistics", "return", "mean", torch.tensor(np.nan)),
    "negative variance": put("statistics", "return", "m2", torch.tensor(-1.0, dtype=torch.float64)),
    "negative count": put("statistics", "return", "count", -1),
    "statistics as a list": put("statistics", "return", "m2", 0.0),
    "episodes of different lengths": put("episodes", "return", torch.zeros(999, dtype=torch.float64)),
    "episodes of 2 dimensions": put("episodes", "return", torch.zeros(1, 1, dtype=torch.float64)),
    "episodes of no environment": put("episodes", {
        "return": torch.zeros(1, dtype=torch.float64), "length": torch.ones(1, dtype=torch.int64),
        "env_index": torch.full((1,), 4), "terminated": torch.ones(1, dtype=torch.bool),
        "truncated": torch.zeros(1, dtype=torch.bool),
    }),
    "dropped as a tensor": put("dropped_episodes", torch.tensor(0)),
}  # fmt: skip


@pytest.fixture(scope="module")
def running():
    with made(n_processes=0) as batcher:
        batcher.reset()
        rollout(batcher)
        yield batcher


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_state_changes_nothing(running, change):
    before = running.state_dict()
    state = copy.deepcopy(before)
    change(state)
    with pytest.raises(SpecError, match="^load_state_dict: "):
        running.load_state_dict(state)
    assert same(running.state_dict(), before)
    rollout(running)


@pytest.mark.parametrize("state", [None, [], {}, "state", DictTensor(), {"format": None}])
def test_what_is_no_state_is_refused(running, state):
    with pytest.raises(SpecError, match=r"^load_state_dict: needs what RL_Batcher.state_dict gave, got "):
        running.load_state_dict(state)
    rollout(running)
