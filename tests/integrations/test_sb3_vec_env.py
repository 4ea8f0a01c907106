"""`SharedVecEnv` gives Stable-Baselines3 what its `DummyVecEnv` gives, for every call and kind of observation."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from types import ModuleType
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import walks
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, VecVideoRecorder

from rlstructs.integrations.sb3 import SharedVecEnv
from rlstructs.testing import Fault, FaultyEnv
from rlstructs.workers import WorkerCrashed

pytestmark = pytest.mark.usefixtures("small_training")
BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "box": BOX,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "discrete": spaces.Discrete(5),
    "dict": spaces.Dict({"a": BOX, "image": spaces.Box(0, 255, (4, 4, 1), np.uint8), "n": spaces.Discrete(3)}),
}


class Walks(walks.Walks):
    """Rewards tell the actions."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(action) + 0.25, *rest

    def die(self):
        return self.death


def pair(kind="box", n=5, n_workers=2, wrap=Monitor):
    fns = [lambda k=k: wrap(Walks(SPACES[kind], k)) for k in range(n)]
    return DummyVecEnv(fns), SharedVecEnv(fns, n_workers)


def assert_same(found, wanted):
    if isinstance(wanted, dict):
        assert isinstance(found, dict)
        wanted = {key: value for key, value in wanted.items() if key != "episode" or not isinstance(value, dict)}
        found = {key: value for key, value in found.items() if key != "episode" or not isinstance(value, dict)}
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("kind", SPACES)
def test_every_step_and_reset_is_that_of_dummy_vec_env(kind, n_workers):
    theirs, ours = pair(kind, n_workers=n_workers)
    with contextlib.closing(ours):
        for envs in (theirs, ours):
            envs.seed(7)
            envs.set_options([{"level": k} for k in range(5)])
        assert_same(ours.reset(), theirs.reset())
        assert_same(ours.reset_infos, theirs.reset_infos)
        for step in range(40):
            actions = np.arange(step, step + 5) % 2
            assert_same(ours.step(actions), theirs.step(actions))
            assert_same(ours.reset_infos, theirs.reset_infos)
        for envs in (theirs, ours):
            envs.set_options({"level": 9})
        assert_same(ours.reset(), theirs.reset())
        assert_same(ours.reset_infos, theirs.reset_infos)


def test_attributes_and_methods_of_some_or_all_environments():
    theirs, ours = pair()
    with contextlib.closing(ours):
        for indices in (None, 1, [3, 1, 1], range(2, 4), []):
            for call in (
                lambda envs, at=indices: envs.get_attr("number", at),
                lambda envs, at=indices: envs.env_method("add", 10, b=5, indices=at),
                lambda envs, at=indices: envs.env_is_wrapped(Monitor, at),
                lambda envs, at=indices: envs.env_is_wrapped(gymnasium.wrappers.TimeLimit, at),
            ):
                assert call(ours) == call(theirs)
        for envs in (theirs, ours):
            envs.set_attr("extra", 5, [0, 2])
            envs.set_attr("more", "x")
        assert ours.get_attr("extra", [2, 0]) == theirs.get_attr("extra", [2, 0]) == [5, 5]
        assert ours.get_attr("more") == ["x"] * 5
        assert [ours.has_attr(name) for name in ("more", "extra", "none")] == [True, False, False]
        with pytest.raises(AttributeError, match="extra"):
            ours.get_attr("extra", 1)
        assert ours.get_attr("number", 1) == [1]  # the error has changed nothing
        assert_same(list(ours.get_images()), list(theirs.get_images()))
        assert_same(ours.render(), theirs.render())
        assert ours.render_mode == theirs.render_mode


def test_a_worker_that_dies_is_an_error_and_no_hang():
    _, ours = pair()
    with contextlib.closing(ours):
        ours.reset()
        with pytest.raises(WorkerCrashed, match="exit code 3"):
            ours.env_method("die", indices=4)


@pytest.mark.parametrize("cls", [SharedVecEnv, partial(SharedVecEnv, n_workers=2)], ids=["default", "two workers"])
def test_ppo_has_the_same_transitions_and_weights_as_on_dummy_vec_env(cls):
    def train(vec_env_cls):
        with contextlib.closing(make_vec_env("CartPole-v1", 4, seed=3, vec_env_cls=vec_env_cls)) as envs:
            model = PPO("MlpPolicy", VecNormalize(envs), n_steps=32, n_epochs=2, seed=0, device="cpu").learn(256)
        rows = model.rollout_buffer  # of the last rollout
        seen = [rows.observations, rows.actions, rows.rewards, rows.episode_starts]
        return [*seen, *(parameter.detach().numpy() for parameter in model.policy.parameters())]

    wanted = train(DummyVecEnv)
    assert all(np.array_equal(found, other) for found, other in zip(train(cls), wanted, strict=True))


class Filmed(Walks):
    """Says how fast it is to be shown."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 17, "own": [1]}


@pytest.mark.parametrize("n_workers", [0, 1])
def test_metadata_are_those_of_the_environment_also_for_a_video(tmp_path, n_workers, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", ModuleType("moviepy"))  # writes the video, and need not be there
    theirs, ours = DummyVecEnv([lambda: Filmed(BOX, 0)]), SharedVecEnv([lambda: Filmed(BOX, 0)], n_workers)
    with contextlib.closing(ours):
        assert ours.metadata == theirs.metadata == Filmed.metadata and ours.render_mode == theirs.render_mode
        assert ours.get_attr("metadata") == theirs.get_attr("metadata")
        assert VecVideoRecorder(ours, str(tmp_path), lambda step: False).frames_per_sec == 17


@pytest.mark.parametrize("n_workers", [0, 2])
def test_an_environment_that_fails_is_truncated_and_made_anew(n_workers):
    faults = [Fault("raise", count=3, env_index=1, error=KeyError("lost"))]
    fns = [partial(FaultyEnv, faults, env_index=k, length=100) for k in range(3)]
    with contextlib.closing(SharedVecEnv(fns, n_workers, on_env_failure="restart", max_env_restarts=1)) as envs:
        envs.reset()
        for _ in range(3):
            seen, rewards, dones, infos = envs.step(np.zeros(3, int))
        assert dones.tolist() == [False, True, False] and rewards.tolist() == [3, 0, 3]
        assert infos[1]["TimeLimit.truncated"] and infos[1]["env_failure"] == "KeyError: 'lost'"
        assert infos[1]["terminal_observation"][3] == 2 and seen[1, 3] == 0 and "env_failure" not in infos[0]
        for _ in range(2):
            seen, *_ = envs.step(np.zeros(3, int))
        assert seen[:, 3].tolist() == [5, 2, 5]
        with pytest.raises(KeyError, match="lost"):
            envs.step(np.zeros(3, int))
