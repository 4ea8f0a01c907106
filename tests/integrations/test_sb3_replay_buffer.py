"""Stable-Baselines3's replay buffers over our store: the same samples, and the same training, as with its own."""

from __future__ import annotations

import contextlib
import gc
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rlstructs.errors import FileError, SpecError
from rlstructs.integrations import sb3
from rlstructs.replay import Compression
from rlstructs.workers.limits import available_bytes

pytestmark = pytest.mark.usefixtures("small_training")
BOX = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS = {
    "float32": BOX,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
    "discrete": spaces.Discrete(5),
    "bits": spaces.MultiBinary(4),
    "dict": spaces.Dict({"a": BOX, "n": spaces.Discrete(3)}),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "float64": spaces.Box(-1, 1, (2, 1), np.float64),
    "several": spaces.MultiDiscrete([2, 3]),
}


def pair(observation, action, n_envs=3, size=30, **settings):
    name = "DictReplayBuffer" if isinstance(observation, spaces.Dict) else "ReplayBuffer"
    return [getattr(module, name)(size, observation, action, "cpu", n_envs, **settings) for module in (buffers, sb3)]


def batch(space, n):
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


def rows(observation, action, n_envs, n, seed=0):
    """n steps of all environments, whose observations follow on each other unless the episode ends."""
    rng = np.random.default_rng(seed)
    observation.seed(seed), action.seed(seed)
    seen = batch(observation, n_envs)
    for _ in range(n):
        following, done = batch(observation, n_envs), rng.random(n_envs) < 0.3
        infos = [{"TimeLimit.truncated": bool(rng.random() < 0.5)} if end else {} for end in done]
        yield seen, following, batch(action, n_envs), rng.normal(size=n_envs), done, infos
        seen = following


def fill(both, observation, action, n):
    for row in rows(observation, action, both[0].n_envs, n):
        for buffer in both:
            buffer.add(*row)


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            one, other = {"": one}, {"": other}
        for key in other or ():
            assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key])


def sample(buffer, **settings):
    np.random.seed(5)
    return buffer.sample(64, **settings)


IMAGE = spaces.Box(0, 255, (1, 30, 30), np.uint8)


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("observation", [IMAGE, spaces.Dict({"image": IMAGE, "x": BOX})], ids=["box", "dict"])
@pytest.mark.parametrize("prefix", ["", "Prioritized"])
def test_compressed_buffers_draw_the_rows_of_raw_ones(prefix, observation, optimize):
    name = f"{prefix}{'Dict' if isinstance(observation, spaces.Dict) else ''}ReplayBuffer"
    settings = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    raw, packed = both = [
        getattr(sb3, name)(30, observation, ACTIONS["discrete"], "cpu", 3, compression=each, **settings)
        for each in (None, "zstd:1")
    ]
    for n in (4, 37):
        fill(both, observation, ACTIONS["discrete"], n)
        for each in (packed, pickle.loads(pickle.dumps(packed))):
            found, wanted = sample(each), sample(raw)
            for one, other in zip(found, wanted, strict=True):
                for key in other if isinstance(other, dict) else [] if other is None else [...]:
                    np.testing.assert_array_equal(np.asarray(one[key]), np.asarray(other[key]))
    columns = packed._storage.columns
    assert (
        {name for name in columns.specs if columns.is_compressed(name)}
        == {name for name in columns.specs if columns.specs[name].nbytes >= 512}
        != set()
    )


def test_a_limit_of_bytes_leaves_the_newest_rows():
    limit = Compression("zstd:1", max_bytes=3 * 20 * 900)
    buffer = sb3.ReplayBuffer(300, IMAGE, ACTIONS["discrete"], "cpu", 3, compression=limit)
    for number, row in enumerate(rows(IMAGE, ACTIONS["discrete"], 3, 200)):
        row[0][:, 0, 0, 0] = number
        buffer.add(*row)
        numbers = sample(buffer).observations[:, 0, 0, 0].int()
        assert numbers.max() <= number and numbers.min() >= number - 20
    assert buffer._storage.columns.nbytes < 2 * limit.max_bytes + 100_000


@pytest.mark.parametrize("n", [4, 10, 37])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_samples_are_those_of_theirs(observation, action, n):
    observation, action = OBSERVATIONS[observation], ACTIONS[action]
    both = pair(observation, action)
    fill(both, observation, action, n)
    theirs, ours = both
    assert (ours.pos, ours.full, ours.size(), ours.buffer_size) == (theirs.pos, theirs.full, theirs.size(), 10)
    assert_same(sample(ours), sample(theirs))
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        wanted, found = getattr(theirs, name), getattr(ours, name)
        wanted, found = (wanted, found) if isinstance(wanted, dict) else ({"": wanted}, {"": found})
        held = slice(None) if ours.full else slice(ours.pos)
        assert all(np.array_equal(found[key][held], wanted[key][held]) for key in wanted)


@pytest.mark.parametrize("settings", [{}, {"handle_timeout_termination": False}])
@pytest.mark.parametrize("kind", ["float32", "image", "dict"])
def test_observations_that_are_stored_once_are_the_same(kind, settings):
    observation, action = OBSERVATIONS[kind], ACTIONS["discrete"]
    theirs, _ = pair(observation, action, **settings)
    _, ours = pair(observation, action, **settings) if kind == "dict" else (None, None)
    cls = sb3.DictReplayBuffer if kind == "dict" else sb3.ReplayBuffer
    ours = cls(30, observation, action, "cpu", 3, optimize_memory_usage=True, **settings)
    fill([theirs, ours], observation, action, 37)
    assert_same(sample(ours), sample(theirs))


@pytest.mark.parametrize("n", [2, 10, 37])
@pytest.mark.parametrize("settings", [{"n_steps": 1}, {"n_steps": 3, "gamma": 0.9}, {"n_steps": 12}])
def test_n_step_returns_are_those_of_theirs(settings, n):
    observation, action = OBSERVATIONS["float32"], ACTIONS["discrete"]
    theirs = buffers.NStepReplayBuffer(30, observation, action, "cpu", 3, **settings)
    both = [sb3.NStepReplayBuffer(30, observation, action, "cpu", 3, optimize, **settings) for optimize in (0, 1)]
    fill([theirs, *both], observation, action, n)
    envs = VecNormalize(make_vec_env("CartPole-v1", 1), norm_obs=False)
    envs.ret_rms.var = np.array(4.0)
    for ours in both:
        assert_same(sample(ours), sample(theirs))
        assert_same(sample(ours, env=envs), sample(theirs, env=envs))
    with pytest.raises(SpecError, match="n_steps must be at least 1, got 0"):
        sb3.NStepReplayBuffer(30, observation, action, n_steps=0)
    with pytest.raises(SpecError, match=r"gamma must be in \[0, 1\], got 2"):
        sb3.NStepReplayBuffer(30, observation, action, gamma=2)


def test_infos_may_be_anything_where_timeouts_are_not_handled():
    both = pair(BOX, ACTIONS["box"], handle_timeout_termination=False)
    for *row, _ in rows(BOX, ACTIONS["box"], 3, 12):
        for buffer in both:
            buffer.add(*row, {"final_info": None})  # as gymnasium's vector environments give them
    assert_same(sample(both[1]), sample(both[0]))


def test_attributes_are_views_that_write_through():
    both = pair(BOX, ACTIONS["box"])
    fill(both, BOX, ACTIONS["box"], 4)
    for buffer in both:
        buffer.dones[2] = True
        buffer.rewards[1, 2] = 50
    assert_same(sample(both[1]), sample(both[0]))


def test_rows_are_dropped_copied_and_pickled():
    observation, action = OBSERVATIONS["dict"], ACTIONS["box"]
    both = pair(observation, action)
    fill(both, observation, action, 13)
    again = pickle.loads(pickle.dumps(both[1]))
    assert_same(sample(again), sample(both[0]))
    for buffer in both:
        buffer.reset()
    fill(both, observation, action, 3)
    assert both[1].size() == 3
    assert_same(sample(both[1]), sample(both[0]))
    assert again.size() == 10


def test_a_normalising_wrapper_normalises_samples():
    envs = VecNormalize(make_vec_env("Pendulum-v1", 2))
    with contextlib.closing(envs):
        envs.reset()
        for _ in range(5):
            envs.step(np.zeros((2, 1)))
        both = pair(envs.observation_space, envs.action_space, n_envs=2)
        fill(both, envs.observation_space, envs.action_space, 6)
        assert_same(sample(both[1], env=envs), sample(both[0], env=envs))


def test_too_large_a_buffer_warns():
    image = spaces.Box(0, 255, (4000, 4000, 3), np.uint8)
    size = int(1.02 * available_bytes() / 2 / 48_000_000) + 1  # two images a row
    with pytest.warns(UserWarning, match=r"a full ReplayBuffer takes [\d.]+ GB, [\d.]+ GB are available"):
        sb3.ReplayBuffer(size, image, ACTIONS["box"])


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize(("algorithm", "env_id"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1")])
def test_a_training_gives_the_same_transitions_and_weights(algorithm, env_id, optimize, tmp_path):
    def train(replay_buffer_class, vec_env_cls, **settings):
        with contextlib.closing(make_vec_env(env_id, 4, seed=3, vec_env_cls=vec_env_cls)) as envs:
            model = algorithm(
                "MlpPolicy", envs, seed=0, learning_starts=40, buffer_size=400, batch_size=32, device="cpu",
                replay_buffer_class=replay_buffer_class, **settings,
            ).learn(160)  # fmt: skip
            model.save_replay_buffer(tmp_path / "buffer")
            model.load_replay_buffer(tmp_path / "buffer")
            model.learn(40, reset_num_timesteps=False)
        buffer = model.replay_buffer
        names = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
        rows = [getattr(buffer, name)[: buffer.size()] for name in names]
        return [*rows, *(parameter.detach().numpy() for parameter in model.policy.parameters())]

    wanted = train(buffers.ReplayBuffer, DummyVecEnv)
    found = train(sb3.ReplayBuffer, sb3.SharedVecEnv, optimize_memory_usage=optimize)
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("debug", ["0", "1"])
def test_rows_without_a_timeout_have_none_whatever_was_there(debug, monkeypatch):
    monkeypatch.setenv("RLSTRUCTS_DEBUG", debug)
    buffer = sb3.ReplayBuffer(2, BOX, spaces.Discrete(2), "cpu")

    def add():
        buffer.add(np.zeros((1, 3)), np.ones((1, 3)), np.zeros((1, 1)), np.zeros(1), np.ones(1), [{}])

    add(), add()
    assert buffer.sample(5).dones.tolist() == [[1.0]] * 5
    buffer.timeouts[:] = 1
    add(), add()
    assert buffer.sample(5).dones.tolist() == [[1.0]] * 5


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("n", [7, 14])  # some, and more than there is room for
def test_a_buffer_in_a_folder_opens_again_with_its_rows_and_timeouts(optimize, n, tmp_path):
    image = spaces.Box(0, 255, (16, 20, 1), np.uint8)

    def make(path):
        return sb3.ReplayBuffer(20, image, spaces.Discrete(2), "cpu", 2, optimize_memory_usage=optimize, path=path)

    def add(buffer, start, n):
        for t in range(start, start + n):
            before, after = (np.full((2, 16, 20, 1), value, np.uint8) for value in (t, t + 1 if t % 3 else 200))
            infos = [{"TimeLimit.truncated": t % 3 == 0}, {}]
            buffer.add(before, after, np.zeros((2, 1)), np.full(2, t), np.full(2, t % 3 == 0), infos)

    kept, buffer = make(None), make(tmp_path / "rows")
    for start in (0, n):
        add(kept, start, n), add(buffer, start, n)
        del buffer
        gc.collect()
        buffer = make(tmp_path / "rows")
        assert (buffer.pos, buffer.full) == (kept.pos, kept.full)
        for name in ("observations", "next_observations", "rewards", "dones", "timeouts"):
            found, wanted = (getattr(each, name)[: kept.size()] for each in (buffer, kept))
            np.testing.assert_array_equal(found, wanted)
        np.random.seed(1)
        one = buffer.sample(30)
        np.random.seed(1)
        assert all(torch.equal(mine, other) for mine, other in zip(one[:5], kept.sample(30)[:5], strict=True))
    del buffer
    gc.collect()
    with pytest.raises(FileError, match="holds columns .* are linked"):
        sb3.ReplayBuffer(20, image, spaces.Discrete(2), "cpu", 2, not optimize, path=tmp_path / "rows")
