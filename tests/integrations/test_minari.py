"""Datasets of Minari hold what the environments have shown, and what is read from them is what was written."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.episode_data import EpisodeData
from processes import LIMIT

from rlstructs import (
    DictTensor,
    GymEnvInf,
    MissingKeyError,
    NormalizeObservation,
    RandomAgent,
    RL_Batcher,
    SpecError,
    TemporalDictTensor,
    Trajectories,
)
from rlstructs.envs.spaces import flatten_space, nest
from rlstructs.integrations.minari import from_minari, iterate_minari, to_minari, writing
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import VectorReplayBuffer
from rlstructs.testing import Fault, FaultyEnv, create_faulty_envs

BOX = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (32, 32, 3), np.uint8)
OBSERVATIONS = {
    "box": BOX,
    "float64": spaces.Box(-1, np.inf, (2, 2), np.float64),
    "scalar": spaces.Box(0, 1, (), np.float32),
    "discrete": spaces.Discrete(5, start=-2),
    "dict": spaces.Dict({"rewards": BOX, "image": IMAGE, "inner": spaces.Dict({"n": spaces.Discrete(3)})}),
    "tuple": spaces.Tuple([spaces.MultiBinary(4), spaces.Dict({"b": spaces.Box(0, 1, (1,), np.float64)})]),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "several": spaces.Dict({"go": spaces.MultiDiscrete([2, 3]), "pair": spaces.Tuple([BOX, spaces.MultiBinary(2)])}),
}
ABOUT = {
    "algorithm_name": "random", "author": "A. Person", "author_email": "a@example.org", "description": "for a test",
    "code_permalink": "https://example.org/code", "eval_env": "CartPole-v1",
}  # fmt: skip
SPACES = {"observation_space": BOX, "action_space": ACTIONS["discrete"]}

# Minari's.
pytestmark = pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning")


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


class Walks(gymnasium.Env):
    """Episodes of 1 to 9 steps, terminated or truncated by turns; `log` has all that it has shown, by episode."""

    def __init__(self, space=BOX, actions=ACTIONS["discrete"], log=None):
        self.observation_space, self.action_space = space, actions
        self.log, self.n_episodes = [] if log is None else log, 0

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**30)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_episodes += 1
        self.left, seen = 1 + int(self.np_random.integers(9)), self._observe()
        self.log.append({"observations": [seen], "left": [self.left], "actions": [], "steps": [], "options": options})
        return seen, {"at": {"left": self.left}}

    def step(self, action):
        self.left -= 1
        ended, by_turns, seen = self.left == 0, self.n_episodes % 2 == 0, self._observe()
        result = float(self.np_random.random()), ended and by_turns, ended and not by_turns
        episode = self.log[-1]
        episode["observations"].append(seen), episode["left"].append(self.left)
        episode["actions"].append(action), episode["steps"].append(result)
        return seen, *result, {"at": {"left": self.left}}


def walks(observation="box", action="discrete", n_envs=3, n_timesteps=4, create=GymEnvInf, **arguments):
    """A batcher in this process, and the log of each environment."""
    logs = [[] for _ in range(n_envs)]
    space, actions = OBSERVATIONS[observation], ACTIONS[action]

    def create_env(seed):
        envs = [Walks(space, actions, log) for log in logs]
        return create(envs, seed, **({"info_keys": {"at/left": np.int16}} if create is GymEnvInf else {}))

    batcher = RL_Batcher(n_timesteps, lambda: RandomAgent(actions), {}, create_env, {}, 0, 0, **arguments)
    return batcher, logs


def collect(batcher, logs, n_rollouts, infos=None, clear=True):
    """Rollouts after a reset, from which on the environments log anew."""
    if clear:
        [log.clear() for log in logs]  # of the probe
    batcher.reset(**infos or {})
    found = []
    for _ in range(n_rollouts):
        batcher.execute()
        found.append(batcher.get()[0])
    return found


def write(batches, observation="box", action="discrete", dataset_id="test/walks-v0", **options):
    given = {"observation_space": OBSERVATIONS[observation], "action_space": ACTIONS[action], **ABOUT}
    return to_minari(dataset_id, batches, **{**given, **options})


def leaf_rows(space, nested):
    """The value of each leaf in a list of samples, stacked."""
    return [np.stack([np.asarray(leaf.pick(sample)) for sample in nested]) for leaf in flatten_space(space)]


def assert_same_episode(found, log, dataset, n_steps=None):
    """Compares bytes; float64 in the log may be float32 in the dataset."""
    n = len(log["steps"]) if n_steps is None else n_steps
    space, actions = dataset.observation_space, dataset.action_space
    for leaf, wanted in zip(flatten_space(space), leaf_rows(space, log["observations"][: n + 1]), strict=True):
        array = leaf.pick(found.observations)
        assert array.dtype == leaf.space.dtype and array.tobytes() == wanted.astype(array.dtype).tobytes()
        assert all(leaf.space.contains(np.asarray(value)) for value in array)
    for leaf, wanted in zip(flatten_space(actions), leaf_rows(actions, log["actions"][:n]), strict=True):
        array = leaf.pick(found.actions)
        assert array.dtype == leaf.space.dtype and array.tobytes() == wanted.astype(array.dtype).tobytes()
    rewards, terminations, truncations = map(list, zip(*log["steps"][:n], strict=True))
    assert found.rewards.tolist() == np.array(rewards, np.float32).tolist()
    assert found.terminations.tolist() == terminations
    assert found.truncations.tolist() == [*truncations[:-1], truncations[-1] or not terminations[-1]]
    assert found.infos["at"]["left"].tolist() == log["left"][: n + 1]


def played(logs):
    """The logged episodes that have steps, by their rewards, which tell them apart."""
    return sorted((log for of_env in logs for log in of_env if log["steps"]), key=lambda log: log["steps"])


def by_rewards(dataset):
    return sorted(dataset.iterate_episodes(), key=lambda episode: episode.rewards.tolist())


CASES = [(observation, "discrete") for observation in OBSERVATIONS] + [("box", "box"), ("box", "several")]


@pytest.mark.parametrize(("observation", "action"), CASES)
def test_a_dataset_holds_byte_by_byte_what_the_environments_have_shown(observation, action):
    batcher, logs = walks(observation, action)
    with batcher:
        write(iter(collect(batcher, logs, 12)), observation, action)
    loaded, wanted = minari.load_dataset("test/walks-v0"), played(logs)
    assert loaded.total_steps == 12 * 3 * 4 == sum(len(log["steps"]) for log in wanted)
    assert len(loaded) == len(wanted) > 12
    for found, log in zip(by_rewards(loaded), wanted, strict=True):
        assert_same_episode(found, log, loaded)


@pytest.mark.parametrize("most_held", [writing.MOST_HELD, 0])
def test_unfinished_episodes_are_truncated_or_dropped(most_held, monkeypatch):
    monkeypatch.setattr(writing, "MOST_HELD", most_held)  # at 0, episodes are written part by part
    batcher, logs = walks(n_timesteps=2)
    with batcher:
        batches = collect(batcher, logs, 9)
        first = sum(len(log["steps"]) for log in played(logs))
        batches += collect(batcher, logs, 8, clear=False)  # the reset leaves episodes without end, too
    wanted = played(logs)
    is_over = [any(log["steps"][-1][1:]) for log in wanted]
    kept, dropped = write(batches), write(batches, dataset_id="test/dropped-v0", unfinished="drop")
    assert first == 9 * 3 * 2 and is_over.count(False) > 3
    assert len(kept) == len(wanted) and len(dropped) == sum(is_over)
    for found, log in zip(by_rewards(kept), wanted, strict=True):
        assert_same_episode(found, log, kept)
    for found, log in zip(by_rewards(dropped), [log for log in wanted if any(log["steps"][-1][1:])], strict=True):
        assert_same_episode(found, log, dropped)
    for dataset in (kept, dropped):
        counts = [each["total_steps"] for each in dataset.storage.get_episode_metadata(dataset.episode_indices)]
        assert counts == [len(episode) for episode in dataset] and sum(counts) == dataset.total_steps


def pairs_of(observations):
    """What follows on what."""
    return [(before.tobytes(), after.tobytes()) for before, after in itertools.pairwise(observations)]


def test_no_transition_leads_over_a_rollout_that_is_missing():
    batcher, logs = walks(n_timesteps=3)
    with batcher:
        batches = collect(batcher, logs, 12)
    dataset = write(batches[::2])
    really = {pair for log in played(logs) for pair in pairs_of(log["observations"])}
    steps = [pair for episode in dataset for pair in pairs_of(episode.observations)]
    assert len(steps) == dataset.total_steps == 6 * 3 * 3 and set(steps) <= really
    assert all(episode.terminations[-1] or episode.truncations[-1] for episode in dataset)


class Same(gymnasium.Env):
    """Shows the same at each step, and pays the number of the step."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return 0, float(self.t), False, False, {}


def by_hand(batch):
    return Trajectories(batch.info, TemporalDictTensor(dict(batch.trajectories.items()), batch.lengths))


@pytest.mark.parametrize(("change", "expected"), [
    (lambda batch: batch, [[1, 4], [9, 16]]), (lambda batch: batch.clone(), [[1, 4], [9, 16]]), (by_hand, [[1, 16]]),
], ids=["of a batcher", "cloned", "made by hand"])  # fmt: skip
@pytest.mark.parametrize("most_held", [writing.MOST_HELD, 1])
def test_equal_observations_do_not_prove_that_a_rollout_follows(change, expected, most_held, monkeypatch):
    """Made by hand, rollouts do not say what they follow."""
    monkeypatch.setattr(writing, "MOST_HELD", most_held)
    with RL_Batcher.make(Same, None, n_envs=1, n_workers=0, n_timesteps=4, seed=0) as batcher:
        rollouts = (change(each) for i, each in enumerate(batcher.rollouts(n_steps=16)) if i != 1)
        dataset = to_minari("same-v0", rollouts, env=Same, **ABOUT)
    assert [[*episode.rewards[[0, -1]]] for episode in dataset] == expected
    assert all(episode.truncations.nonzero()[0].tolist() == [len(episode) - 1] for episode in dataset)


def make_walks():
    return Walks()


class GivenWalks(Walks):
    """Walks that `RL_Batcher.make` would call with a seed."""

    def __init__(self, seed):
        super().__init__()


@pytest.mark.parametrize("env", [
    Walks, Walks(), make_walks, lambda: Walks(), GivenWalks, lambda seed: GymEnvInf([Walks(), Walks()], seed),
    lambda num_envs: gymnasium.vector.SyncVectorEnv([Walks] * num_envs), GymEnvInf([Walks()], 0),
], ids=["class", "instance", "function", "lambda", "with seed", "VecEnv", "VectorEnv", "made VecEnv"])  # fmt: skip
def test_the_environment_of_a_dataset_may_be_what_make_takes(env):
    batcher, logs = walks()
    with batcher:
        [batch] = collect(batcher, logs, 1)
    dataset = to_minari("made-v0", [batch], env, **ABOUT)
    assert dataset.observation_space == BOX and dataset.action_space == ACTIONS["discrete"]


@pytest.mark.parametrize("env", [
    "CartPole-v1", "CartPole", "gymnasium.envs:CartPole-v1", gymnasium.spec("CartPole-v1"),
    lambda: gymnasium.make("CartPole-v1"), lambda **more: gymnasium.make("CartPole-v1", **more),
], ids=["id", "id without version", "id with a module", "spec", "function", "function of more"])  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"action_space": spaces.Discrete(2)}], ids=["", "a space given"])
def test_a_dataset_names_an_environment_of_the_registry_however_it_is_given(env, more):
    with RL_Batcher.make("CartPole-v1", n_envs=1, n_workers=0, n_timesteps=4, seed=0) as batcher:
        dataset = to_minari("cart-v0", batcher.rollouts(n_steps=8), env=env, **ABOUT, **more)
    assert dataset.spec.env_spec.id == "CartPole-v1"


def test_an_environment_that_was_made_for_a_dataset_is_closed_and_a_given_one_is_not():
    closed = []

    class Closing(Walks):
        def close(self):
            closed.append(self)

    batcher, logs = walks()
    with batcher:
        [batch] = collect(batcher, logs, 1)
    to_minari("a-v0", [batch], Closing, **ABOUT)
    assert len(closed) == 1
    to_minari("b-v0", [batch], Closing(), **ABOUT)
    assert len(closed) == 1


@pytest.mark.parametrize(("env", "message"), [
    (dict, "env makes a dict, which has no observation_space"), ("Nothing-v0", "Nothing"),
    (lambda: None, "env makes a NoneType, which has no observation_space"),
])  # fmt: skip
def test_what_makes_no_environment_is_refused(env, message, datasets):
    batcher, logs = walks()
    with batcher:
        [batch] = collect(batcher, logs, 1)
    with pytest.raises(SpecError, match=message):
        to_minari("no-v0", [batch], env)
    assert list(datasets.iterdir()) == []


def test_rollouts_on_loan_are_copied_and_not_kept():
    batcher, logs = walks(n_timesteps=2)
    seen = []

    def leases():
        batcher.reset()
        for _ in range(20):
            assert all(reference() is None for reference in seen[:-1])
            batcher.execute()
            with batcher.lease() as (trajectories, _):
                yield trajectories
                seen.append(weakref.ref(trajectories))
            del trajectories

    with batcher:
        [log.clear() for log in logs]
        dataset = write(leases())
    for found, log in zip(by_rewards(dataset), played(logs), strict=True):
        assert_same_episode(found, log, dataset)


def test_what_goes_on_is_written_before_it_is_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(writing, "MOST_HELD", 4_000)
    most, end = [], writing.EpisodeJoiner.add

    def add(joiner, batch):
        most.append(sum(episode.nbytes for episode in joiner.going))
        return end(joiner, batch)

    monkeypatch.setattr(writing.EpisodeJoiner, "add", add)
    env_args = {"n_envs": 2, "length": 100_000}
    with RL_Batcher(
        20, RandomAgent, {"action_space": FaultyEnv.action_space}, create_faulty_envs, env_args, 0, 0
    ) as batcher:
        dataset = to_minari("long-v0", batcher.rollouts(n_steps=4000), env=FaultyEnv(), **ABOUT)
    assert [len(episode) for episode in dataset] == [2000, 2000] and 500 < max(most) <= 4_000
    for episode in dataset:
        assert episode.rewards.tolist() == list(range(1, 2001)) and episode.truncations.nonzero()[0].tolist() == [1999]
        assert episode.observations[:, 3].tolist() == list(range(2001))


def test_episodes_go_on_through_normalisation_and_deferred_resets():
    def create(envs, seed):
        return NormalizeObservation(GymEnvInf(envs, seed, defer_resets=True))

    batcher, logs = walks(n_timesteps=2, create=create)
    with batcher:
        dataset = write(collect(batcher, logs, 30))
    assert sorted(map(len, dataset)) == sorted(len(log["steps"]) for log in played(logs))


def test_a_lost_worker_ends_its_episodes_and_invents_nothing():
    faults = [Fault("kill", at="step", count=26, worker=1, generations=[0])]
    env_args, how = {"n_envs": 1, "length": 7, "faults": faults}, {"on_worker_failure": "restart"}
    agent_args = {"action_space": FaultyEnv.action_space}
    with RL_Batcher(5, RandomAgent, agent_args, create_faulty_envs, env_args, 2, 0, **how) as batcher:
        kept = []
        batches = (kept.append(batch) or batch for batch in batcher.rollouts(n_steps=90))
        dataset = to_minari("lost-v0", batches, env=FaultyEnv(), **ABOUT)
    assert dataset.total_steps == sum(int(batch.lengths.sum()) for batch in kept)
    for episode in dataset:
        steps = episode.observations[:, 3].tolist()  # index of the environment, generation, episode, step
        assert steps == list(range(len(episode) + 1)) and len(np.unique(episode.observations[:, :3], axis=0)) == 1
        assert episode.terminations[-1] == (len(episode) == 7) != episode.truncations[-1]


def test_options_of_resets_are_kept():
    batcher, logs = walks(env_info=DictTensor({"level": torch.zeros(1)}))
    with batcher:
        dataset = write(collect(batcher, logs, 3, {"env_info": DictTensor({"level": torch.tensor([0.0, 0.5, 0.25])})}))
    found = [each["options"]["level"] for each in dataset.storage.get_episode_metadata(dataset.episode_indices)]
    assert set(found) == {0.0, 0.5, 0.25} and found[:1] == [dataset_option(logs, dataset[0])]


def dataset_option(logs, episode):
    return next(log["options"]["level"] for log in played(logs) if np.float32(log["steps"][0][0]) == episode.rewards[0])


def test_metadata_are_those_of_minaris_own_function():
    with RL_Batcher.make("CartPole-v1", n_envs=2, n_timesteps=8, seed=0, n_workers=0) as batcher:
        dataset = to_minari("CartPole/x/random-v3", batcher.rollouts(n_steps=64), env="CartPole-v1", **ABOUT)
    theirs = minari.create_dataset_from_buffers(
        "CartPole/x/theirs-v3", [], env="CartPole-v1", jpeg_encoding=False, **ABOUT
    )
    changes = {"dataset_id", "total_steps", "total_episodes", "dataset_size"}
    ours, wanted = dataset.storage.metadata, theirs.storage.metadata
    assert {key: ours[key] for key in ours if key not in changes} == {
        key: wanted[key] for key in wanted if key not in changes
    }
    assert dataset.recover_environment().spec.id == "CartPole-v1" and dataset.total_steps == 64
    assert sorted(minari.list_local_datasets()) == ["CartPole/x/random-v3", "CartPole/x/theirs-v3"]


def test_an_environment_that_no_json_describes_is_not_named():
    batcher, logs = walks()
    with batcher:
        [batch] = collect(batcher, logs, 1)
    gymnasium.register("Minari/Walks-v0", Walks, disable_env_checker=True)
    try:
        with pytest.warns(UserWarning, match="to_minari: the dataset will not name its environment: Callable found"):
            dataset = to_minari("x-v0", [batch], "Minari/Walks-v0", **ABOUT)
    finally:
        del gymnasium.registry["Minari/Walks-v0"]
    assert dataset.env_spec is None and dataset.total_steps == 12


def test_an_error_in_the_middle_leaves_nothing(datasets):
    batcher, logs = walks()
    with batcher:
        batches = collect(batcher, logs, 3)

    def interrupted(error):
        yield from batches
        raise error

    for error in (KeyError("lost"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            write(interrupted(error))
        assert list(datasets.iterdir()) == []
    write(batches)


KILLED = """
import os, signal
import minari
from rlstructs import RL_Batcher
from rlstructs.integrations.minari import to_minari

def batches(batcher):
    for number, batch in enumerate(batcher.rollouts()):
        yield batch
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)

with RL_Batcher.make("CartPole-v1", n_envs=2, n_workers=0, n_timesteps=64, seed=0) as batcher:
    to_minari("killed-v0", batches(batcher), env="CartPole-v1")
"""


def test_a_killed_program_leaves_no_dataset(subprocess_env, quick_programs):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED], env=subprocess_env, timeout=LIMIT)
    assert done.returncode == -signal.SIGKILL and minari.list_local_datasets() == {}


def valid(trajectories, key):
    """The values of a key in valid steps, one array for each row."""
    return [
        row[:n].numpy() for row, n in zip(trajectories.trajectories[key], trajectories.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("observation", "action"), CASES)
def test_what_is_read_is_what_was_collected(observation, action):
    batcher, logs = walks(observation, action)
    with batcher:
        batches = collect(batcher, logs, 8)
    dataset = write(batches, observation, action)
    read = from_minari(dataset, info_keys=["at/left"])
    collected = Trajectories.cat(batches)
    steps = {key: np.concatenate(valid(collected, key)) for key in read.trajectories if key in collected.trajectories}
    assert set(read.trajectories) == set(steps) and {key for key in steps if "at/left" in key}
    ends = {"_observation/done", "_observation/truncated"}  # more of them: what had not ended is truncated
    order = np.argsort(steps["_observation/reward"])
    found = np.concatenate(valid(read, "_observation/reward"))
    for key in steps:
        values = np.concatenate(valid(read, key))
        assert values.dtype == steps[key].dtype and values.shape == steps[key].shape
        if key not in ends:
            assert values[np.argsort(found)].tobytes() == steps[key][order].tobytes(), key
    assert [row[-1] for row in valid(read, "_observation/done")] == [True] * len(dataset)
    again = write([read], observation, action, "test/again-v0")
    assert from_minari("test/again-v0", info_keys=["at/left"]) == read and len(again) == len(dataset)


def test_batches_of_episodes_fill_memories():
    batcher, logs = walks()
    with batcher:
        dataset = write(collect(batcher, logs, 8))
    whole, parts = from_minari(dataset), list(iterate_minari(dataset, 5))
    assert Trajectories.cat(parts) == whole and {len(part) for part in parts[:-1]} == {5}
    some = from_minari(dataset.filter_episodes(lambda episode: bool(episode.terminations[-1])))
    assert 0 < len(some) < len(whole) and set(some.info["episode_id"].tolist()) < set(whole.info["episode_id"].tolist())
    n = dataset.total_steps
    memory, buffer = RandomMemory(memory_size=n, num_envs=1), VectorReplayBuffer(n, 1)
    for name, size, dtype in (("observations", 3, torch.float32), ("actions", 1, torch.int64), ("rewards", 1, None)):
        memory.create_tensor(name, size, dtype or torch.float32)
    for part in parts:
        buffer.add_trajectories(part)
        memory.add_trajectories(part)
    rewards = np.concatenate([episode.rewards for episode in dataset])
    assert np.array_equal(buffer.rew, rewards) and len(buffer) == len(memory) == n
    assert memory.get_tensor_by_name("rewards").flatten().tolist() == rewards.tolist()
    assert np.array_equal(buffer.obs_next, np.concatenate([episode.observations[1:] for episode in dataset]))


def test_a_dataset_that_minari_made_is_read():
    env, buffers = Walks(), []
    for seed in range(4):
        env.reset(seed=seed)
        while not any(env.step(env.action_space.sample())[2:4]):
            pass
        log = env.log[-1]
        names = ("rewards", "terminations", "truncations")
        steps = dict(zip(names, map(list, zip(*log["steps"], strict=True)), strict=True))
        infos = {"at": {"left": np.array(log["left"])}}
        buffers.append(EpisodeBuffer(observations=log["observations"], actions=log["actions"], infos=infos, **steps))
    dataset = minari.create_dataset_from_buffers("own-v0", buffers, **ABOUT, **SPACES)
    read = from_minari("own-v0", info_keys=["at/left"])
    assert read.lengths.tolist() == [len(buffer) for buffer in buffers] and len(dataset) == 4
    for row, buffer in enumerate(buffers):
        assert np.array_equal(valid(read, "observation/frame")[row], buffer.observations[:-1])
        assert np.array_equal(valid(read, "_observation/frame")[row], buffer.observations[1:])
        assert valid(read, "_observation/reward")[row].tolist() == buffer.rewards
        assert valid(read, "_observation/terminated")[row].tolist() == buffer.terminations
        assert np.array_equal(valid(read, "_observation/info/at/left")[row], buffer.infos["at"]["left"][1:])


class Episodes(SimpleNamespace):
    """A dataset of episodes whose arrays need not fit."""

    def iterate_episodes(self):
        return iter(self.episodes)

    def __len__(self):
        return len(self.episodes)


def rows_of(space, n):
    """Samples of a space, nested as Minari reads them."""
    samples = [space.sample() for _ in range(n)]
    return nest(space, iter([np.array([leaf.pick(each) for each in samples]) for leaf in flatten_space(space)]))


NESTED = spaces.Dict(a=BOX, b=spaces.Tuple([spaces.Discrete(3), spaces.Dict(c=BOX)]))


def episode_of(space, action_space, number=7, **counts):
    """An episode of 3 steps, but for those arrays that have other counts."""
    n = {"observations": 4, "actions": 3, "rewards": 3, "terminations": 3, "truncations": 3, "infos": 4} | counts
    return EpisodeData(
        number, rows_of(space, n["observations"]), rows_of(action_space, n["actions"]), np.ones(n["rewards"]),
        np.zeros(n["terminations"], bool), np.ones(n["truncations"], bool),
        {"at": {"left": np.arange(n["infos"])}},
    )  # fmt: skip


@pytest.mark.parametrize(("space", "action_space"), [(BOX, ACTIONS["discrete"]), (NESTED, NESTED)], ids=["", "nested"])
@pytest.mark.parametrize(("name", "count"), [
    ("observations", 3), ("observations", 9), ("actions", 1), ("actions", 5), ("rewards", 5), ("rewards", 2),
    ("terminations", 2), ("terminations", 4), ("truncations", 1), ("truncations", 4), ("infos", 3), ("infos", 5),
    ("actions", 0), ("rewards", 0),
])  # fmt: skip
def test_an_episode_whose_arrays_differ_in_length_is_refused_and_named(space, action_space, name, count):
    good, bad = episode_of(space, action_space, 6), episode_of(space, action_space, **{name: count})
    dataset = Episodes(episodes=[good, bad], observation_space=space, action_space=action_space, id="bad-v0")
    with pytest.raises(SpecError, match="episode 7[, ]"):
        from_minari(dataset, ["at/left"])
    parts = iterate_minari(dataset, 1, ["at/left"])
    assert next(parts).lengths.tolist() == [3]
    with pytest.raises(SpecError, match="episode 7[, ]"):
        next(parts)


def changed(nested, path, change):
    """A copy of what is nested, with one part of it changed, or left out if `change` is None."""
    first, *rest = path
    items = dict(enumerate(nested)) if isinstance(nested, tuple) else dict(nested)
    if rest or change:
        items[first] = changed(items[first], rest, change) if rest else change(items[first])
    else:
        del items[first]
    return tuple(items.values()) if isinstance(nested, tuple) else items


@pytest.mark.parametrize("path", [("a",), ("b", 1), ("b", 1, "c")], ids=str)
@pytest.mark.parametrize("what", ["observations", "actions"])
@pytest.mark.parametrize(("change", "message"), [(lambda array: array[:-1], r"is \("), (None, "cannot be read: ")])
def test_an_array_of_a_nested_space_that_is_short_or_absent_is_named(path, what, change, message):
    if change and path == ("b", 1):
        path = ("b", 0)
    good = episode_of(NESTED, NESTED)
    bad = replace(good, **{what: changed(getattr(good, what), path, change)})
    dataset = Episodes(episodes=[bad], observation_space=NESTED, action_space=NESTED, id="bad-v0")
    key = re.escape(f"from_minari: episode 7, of 3 rewards: {what}{''.join(f'[{step!r}]' for step in path)}")
    with pytest.raises(SpecError, match=rf"{key}\S* {message}"):
        from_minari(dataset)


def test_an_error_says_what_is_wrong(datasets):
    batcher, logs = walks()
    with batcher:
        [batch] = collect(batcher, logs, 1)
    steps = batch.trajectories
    done, seen = steps["_observation/done"], steps["observation/frame"]
    wrong = {
        "no 'observation/frame' in the trajectories": steps.get(["action/action"]),
        r"'observation/frame' is \(3, 4\) bool, expected \(B, T, 3\)": steps.clone().set("observation/frame", done),
        r"'_observation/reward' is \(3, 4, 3\), expected \(B, T\)": steps.clone().set("_observation/reward", seen),
    }
    for message, found in wrong.items():
        with pytest.raises(SpecError, match=f"to_minari: {message}"):
            write([Trajectories(batch.info, found)])
    with pytest.raises(MissingKeyError, match="no 'env_index' in info"):
        write([Trajectories(DictTensor({}), steps)])
    with pytest.raises(TypeError, match="each batch must be Trajectories, got DictTensor"):
        write([batch, batch.info])
    with pytest.raises(SpecError, match="x-v0: there is no episode to write"):
        write([], dataset_id="x-v0")
    with pytest.raises(SpecError, match="dataset_id must be name-v0 or namespace/name-v0, got 'x'"):
        write([batch], dataset_id="x")
    with pytest.raises(SpecError, match="unfinished must be 'truncate' or 'drop', got 'keep'"):
        write([batch], unfinished="keep")
    with pytest.raises(TypeError, match=r"Minari takes no \['authors'\], but \['action_space', .*'author', "):
        write([batch], authors="me")
    with pytest.raises(SpecError, match="needs env, or both observation_space and action_space"):
        to_minari("x-v0", [batch], action_space=ACTIONS["box"])
    with pytest.raises(TypeError, match="env must be an id, an EnvSpec or a gymnasium.Env, got int"):
        to_minari("x-v0", [batch], 3)
    slashed = spaces.Dict({"a/b": BOX})
    with pytest.raises(SpecError, match="Minari cannot hold the key 'a/b'"):
        to_minari("x-v0", [batch], observation_space=slashed, action_space=ACTIONS["box"])
    assert list(datasets.iterdir()) == []
    dataset = write([batch])
    with pytest.raises(SpecError, match="there is a dataset 'test/walks-v0'"):
        write([batch])
    with pytest.raises(MissingKeyError, match=r"episode 0 has no info 'at/b', there is \['left'\]"):
        from_minari(dataset, ["at/b"])
    with pytest.raises(SpecError, match="the dataset 'test/walks-v0' has no episode"):
        from_minari(dataset.filter_episodes(lambda episode: False))
    with pytest.raises(SpecError, match="batch_size must be at least 1, got 0"):
        iterate_minari(dataset, 0)
