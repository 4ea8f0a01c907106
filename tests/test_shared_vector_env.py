"""`SharedVectorEnv` gives what gymnasium's `SyncVectorEnv` gives."""

from __future__ import annotations

import functools
import itertools
import os

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from vector_envs import Basket, Echo, Process, Same

from rlstructs import ClosedError, SharedVectorEnv, SpecError, StateError

MODES = list(AutoresetMode)
N_WORKERS = [0, 2]


def make(env_id, **arguments):
    if env_id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.make(env_id, **arguments)


def makers(env_id, n, **arguments):
    return [functools.partial(make, env_id, **arguments)] * n


def assert_same(ours, theirs):
    """Asserts that two values are equal: their types, dtypes and order too."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert ours.dtype == object
        assert_same(list(ours), list(theirs))
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, strict=True)
    else:
        assert ours == theirs


def twins(env_fns, n_workers, mode=AutoresetMode.NEXT_STEP, **arguments):
    return SharedVectorEnv(env_fns, n_workers, autoreset_mode=mode, **arguments), SyncVectorEnv(
        env_fns, autoreset_mode=mode
    )


def assert_same_steps(ours, theirs, n_steps, seed=0):
    """Steps both alike; in mode DISABLED what has ended is reset. How many episodes ended."""
    actions = ours.action_space
    actions.seed(seed)
    assert_same(ours.reset(seed=seed), theirs.reset(seed=seed))
    n_ended = 0
    for _ in range(n_steps):
        action = actions.sample()
        stepped = ours.step(action)
        assert_same(stepped, theirs.step(action))
        ended = stepped[2] | stepped[3]
        n_ended += ended.sum()
        if ours.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            assert_same(*(env.reset(options={"reset_mask": ended.copy(), "of": "mine"}) for env in (ours, theirs)))
    return n_ended


TASKS = {
    "cartpole": (makers("CartPole-v1", 5), 1000, 200),
    "pendulum": (makers("Pendulum-v1", 3, max_episode_steps=70), 1000, 40),
    "nested": ([Basket] * 5, 400, 300),
    "pong": (makers("ALE/Pong-v5", 2, max_episode_steps=75), 400, 8),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("n_workers", N_WORKERS)
@pytest.mark.parametrize("task", TASKS)
def test_it_gives_what_gymnasium_gives(task, n_workers, mode):
    env_fns, n_steps, least_ended = TASKS[task]
    ours, theirs = twins(env_fns, n_workers, mode)
    with ours:
        assert assert_same_steps(ours, theirs, n_steps) > least_ended
    theirs.close()
    for name in ("metadata", "render_mode", "num_envs", "spec"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("single_observation_space", "observation_space", "single_action_space", "action_space"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("n_workers", [1, 3])
def test_it_gives_the_same_however_the_work_is_shared(n_workers, start_method):
    ours, theirs = twins([Basket] * 4, n_workers, AutoresetMode.SAME_STEP, start_method=start_method)
    with ours:
        assert assert_same_steps(ours, theirs, 50) > 20


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_seeds_of_all_kinds_and_masked_resets_are_gymnasiums(n_workers):
    ours, theirs = twins([Basket] * 4, n_workers)
    mask = np.array([True, False, False, True])
    with ours:
        resets = [{"seed": 5}, {"seed": [3, 1, 4, 1]}, {"seed": [None, 7, 7, 8], "options": {"a": 1}}, {}]
        resets += [{"seed": 9, "options": {"reset_mask": mask}}, {"options": {"reset_mask": mask, "a": 2}}]
        for arguments in resets:
            copies = [{**arguments, "options": dict(arguments.get("options", {})) or None} for _ in range(2)]
            if arguments:
                assert_same(*(env.reset(**copy) for env, copy in zip((ours, theirs), copies, strict=True)))
            else:  # seeds that nobody knows: the streams go on from one that both know
                assert_same(*(env.reset(seed=1) and env.reset() for env in (ours, theirs)))
            action = ours.action_space.sample()
            for _ in range(20):
                assert_same(ours.step(action), theirs.step(action))
        assert_same(ours.np_random_seed, theirs.np_random_seed)
        assert [rng.random() for rng in ours.np_random] == [rng.random() for rng in theirs.np_random]


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_the_callers_options_are_left_as_they_are(n_workers):
    mask = np.array([False, True])
    options = {"reset_mask": mask, "deep": {"er": [1]}}

    class Changing(Basket):
        def reset(self, *, seed=None, options=None):
            result = super().reset(seed=seed, options=repr(options))
            if options:
                options["deep"]["er"].append(2)
                options.clear()
            return result

    with SharedVectorEnv([Changing] * 2, n_workers) as env:
        env.reset()
        env.reset(options=options)
        assert options == {"reset_mask": mask, "deep": {"er": [1]}} and mask.tolist() == [False, True]
        assert env.get_attr("given") == (["None"], ["None", "{'deep': {'er': [1]}}"])
        env.reset(options={"deep": {"er": [1]}})
        assert [given[-1] for given in env.get_attr("given")] == ["{'deep': {'er': [1]}}"] * 2


@pytest.mark.parametrize("n_workers", N_WORKERS)
@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Discrete(3), [[0, 2, 1], np.array([0, 2, 1]), np.array([0, 2, 1], np.int32), (2, 2, 2)]),
        (spaces.Discrete(3), [np.array([[0], [1], [2]]), np.array([0.0, 1.0, 2.0]), np.array([True, False, True])]),
        (
            spaces.Box(-1, 1, (2,), np.float32),
            [np.ones((3, 2), np.float32), np.ones((3, 2)) / 3, np.ones((3, 2), np.float16), [[1, 2]] * 3,
             np.asfortranarray(np.arange(6.0).reshape(3, 2)), np.ones((3, 5)), np.ones((3, 2), np.longdouble)],
        ),
        (spaces.MultiDiscrete([2, 3]), [np.array([[0, 1], [1, 2], [0, 0]]), [(0, 1)] * 3]),
        (spaces.MultiBinary((2, 2)), [np.ones((3, 2, 2), np.int8), np.ones((3, 2, 2), bool)]),
        (spaces.Box(-1, 1, (), np.float64), [np.ones(3), np.ones(3, np.float32)]),
        (
            spaces.Tuple([spaces.Discrete(3), spaces.Dict({"a": spaces.Box(0, 1, (2,))})]),
            [(np.array([0, 1, 2]), {"a": np.ones((3, 2), np.float32)}), (np.arange(3), {"a": np.zeros((3, 2))}),
             ([0, 1, 2], {"a": np.ones((3, 2), np.float32), "b": 1})],
        ),
        (spaces.Text(4), [("a", "bc", "def"), ["", "a", "b"]]),
        (spaces.Dict({"a": spaces.Text(4), "b": spaces.Discrete(2)}), [{"a": ("a", "b", "c"), "b": np.array([0, 1, 0])}]),
    ],
    ids=str,
)  # fmt: skip
def test_environments_get_the_actions_that_gymnasium_gives_them(space, actions, n_workers):
    ours, theirs = twins([functools.partial(Echo, space)] * 3, n_workers)
    with ours:
        assert_same(ours.reset(), theirs.reset())
        for action in (*actions, ours.action_space.sample()):
            assert_same(ours.step(action), theirs.step(action))


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_actions_that_are_no_batch_are_refused_and_nothing_is_stepped(n_workers):
    with SharedVectorEnv([functools.partial(Echo, spaces.Discrete(3))] * 3, n_workers) as env:
        env.reset()
        for actions in ([0, 1], np.zeros(4, np.int64), np.zeros((0, 3))):
            with pytest.raises(SpecError, match="actions: needs one for each of 3 environments, got"):
                env.step(actions)
        with pytest.raises(TypeError, match="Unable to iterate"):
            env.step(1)
        env.step([0, 1, 2])
        assert [len(kept) for kept in env.get_attr("kept")] == [1, 1, 1]


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_a_final_observation_is_what_it_was_though_the_reset_writes_into_the_same_array(n_workers):
    with SharedVectorEnv([Same] * 2, n_workers, autoreset_mode="SameStep") as env:
        env.reset()
        env.step([0, 0])
        observations, _, _, _, infos = env.step([0, 0])
        assert observations.tolist() == [[4, 4], [4, 4]]
        assert [final.tolist() for final in infos["final_obs"]] == [[3, 3], [3, 3]]
        assert infos["final_info"]["array"].tolist() == [[3], [3]] and infos["final_info"]["number"].tolist() == [3, 3]
        assert infos["array"].tolist() == [[4], [4]] and infos["number"].tolist() == [4, 4]


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_observations_are_copies_unless_views_are_wanted(n_workers):
    for copy in (True, False):
        with SharedVectorEnv([Basket] * 2, n_workers, copy=copy) as env:
            kept, _ = env.reset(seed=0)
            before = kept["frame"].copy()
            after, *_ = env.step(env.action_space.sample())
            assert np.shares_memory(kept["frame"], after["frame"]) is not copy
            assert np.array_equal(kept["frame"], before) is copy
        assert after["parts"][2].shape == (2, 2)  # readable when the environment is closed


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_observations_that_do_not_fit_the_space_are_refused_as_gymnasium_does(n_workers):
    class Wrong(gymnasium.Env):
        observation_space = spaces.Box(-1, 1, (3,), np.float32)
        action_space = spaces.Discrete(2)

        def __init__(self, value):
            self.value = value

        def reset(self, *, seed=None, options=None):
            return np.zeros(3, np.float32), {}

        def step(self, action):
            return self.value, 0.0, False, False, {}

    good = [0.5, 0.5, 0.25]
    for value in (np.zeros(3), good, np.zeros(3, np.int64)):
        ours, theirs = twins([functools.partial(Wrong, good), functools.partial(Wrong, value)], n_workers)
        with ours:
            assert_same(*(env.reset() and env.step([0, 0]) for env in (ours, theirs)))
    for value in (np.zeros(2), np.zeros((3, 1)), np.zeros(3, complex), 1.0, None, "abc", np.zeros((0, 3))):
        ours, theirs = twins([functools.partial(Wrong, good), functools.partial(Wrong, value)], n_workers)
        with ours, pytest.raises((ValueError, TypeError)) as expected:
            theirs.reset()
            theirs.step([0, 0])
        ours, _ = twins([functools.partial(Wrong, good), functools.partial(Wrong, value)], n_workers)
        with ours, pytest.raises(expected.type, match="has shape|Cannot cast") as caught:
            ours.reset()
            ours.step([0, 0])
        assert caught.value.__notes__[0] == "raised by environment 1"


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_stepping_an_environment_that_has_ended_is_refused_when_nothing_resets_it(n_workers):
    with SharedVectorEnv(makers("CartPole-v1", 4), n_workers, autoreset_mode=AutoresetMode.DISABLED) as env:
        env.reset(seed=0)
        for _ in range(200):
            observations, _, terminations, _, _ = env.step(np.array([0, 1, 0, 1]))
            if terminations.any():
                break
        which = np.flatnonzero(terminations).tolist()
        with pytest.raises(StateError, match=rf"step: environments \[{which[0]}.* have ended, reset them by reset_mask"):
            env.step(np.array([0, 1, 0, 1]))
        again, _ = env.reset(options={"reset_mask": terminations})
        assert np.array_equal(again[~terminations], observations[~terminations])
        env.step(np.array([0, 1, 0, 1]))


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_what_is_wrong_with_a_reset_is_refused_and_nothing_is_reset(n_workers):
    with SharedVectorEnv([Basket] * 3, n_workers) as env:
        with pytest.raises(gymnasium.error.ResetNeeded, match="step: call reset first"):
            env.step(env.action_space.sample())
        mask = np.array([True, False, True])
        with pytest.raises(StateError, match=r"reset: environments \[1\] were never reset, reset_mask must name them"):
            env.reset(options={"reset_mask": mask})
        assert env.get_attr("given") == ([], [], [])
        env.reset()
        for wrong, kind in (
            ([True, False, True], TypeError), (mask.astype(int), TypeError), (mask[:2], ValueError),
            (np.zeros(3, bool), ValueError), (mask[None], ValueError),
        ):  # fmt: skip
            with pytest.raises(kind, match="reset: reset_mask must"):
                env.reset(options={"reset_mask": wrong})
        with pytest.raises(SpecError, match="reset: needs a seed for each of 3 environments, got 2"):
            env.reset(seed=[1, 2])
        assert env.get_attr("given") == ([None], [None], [None])


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_calls_and_attributes_are_gymnasiums(n_workers):
    ours, theirs = twins([functools.partial(Basket, render_mode="rgb_array")] * 3, n_workers)
    with ours:
        for env in (ours, theirs):
            env.reset(seed=0)
            env.set_attr("gain", [1.0, 2.0, 3.0])
            env.set_attr("note", "same")
        action = ours.action_space.sample()
        assert_same(ours.step(action), theirs.step(action))
        for call in (
            lambda env: env.call("doubled", 4, plus=1), lambda env: env.get_attr("gain"), lambda env: env.render(),
            lambda env: env.get_attr("note"), lambda env: env.call("gain"), lambda env: env.get_attr("render"),
        ):  # fmt: skip
            assert_same(call(ours), call(theirs))
        for call in (lambda env: env.get_attr("absent"), lambda env: env.call("doubled")):
            with pytest.raises((AttributeError, TypeError)) as expected:
                call(theirs)
            with pytest.raises(type(expected.value), match="absent|missing 1 required positional") as caught:
                call(ours)
            assert caught.value.__notes__[0] == "raised by environment 0"
            assert ours.get_attr("gain") == (1.0, 2.0, 3.0)
        with pytest.raises(SpecError, match="set_attr: needs a value for each of 3 environments, got 2"):
            ours.set_attr("gain", [1.0, 2.0])
        for name in ("reset", "step", "close"):
            with pytest.raises(ValueError, match=f"call: '{name}' is a method of the vectorised environment"):
                ours.call(name)
        assert_same(ours.step(action), theirs.step(action))


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_a_call_that_cannot_be_made_changes_nothing(n_workers):
    with SharedVectorEnv([Basket] * 2, n_workers) as env:
        env.reset()
        if n_workers:
            with pytest.raises(TypeError, match="pickle"):
                env.call("doubled", (i for i in range(3)))
            with pytest.raises(TypeError, match="pickle"):
                env.set_attr("gain", [1.0, (i for i in range(3))])
        assert env.get_attr("gain") == (1.0, 1.0)


WRAPPERS = {
    "statistics": ("CartPole-v1", wrappers.RecordEpisodeStatistics),
    "info list": ("CartPole-v1", lambda env: wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(env))),
    "normalised observation": ("CartPole-v1", wrappers.NormalizeObservation),
    "normalised reward": ("Pendulum-v1", wrappers.NormalizeReward),
    "clipped reward": ("Pendulum-v1", lambda env: wrappers.ClipReward(env, -1, 0)),
    "transformed reward": ("CartPole-v1", lambda env: wrappers.TransformReward(env, lambda reward: reward * 3)),
    "clipped action": ("Pendulum-v1", wrappers.ClipAction),
    "rescaled action": ("Pendulum-v1", lambda env: wrappers.RescaleAction(env, -1.0, 1.0)),
    "flat": ("CartPole-v1", wrappers.FlattenObservation),
    "flat basket": ("", wrappers.FlattenObservation),
    "filtered": ("", lambda env: wrappers.FilterObservation(env, ["frame", "count"])),
    "reshaped": ("CartPole-v1", lambda env: wrappers.ReshapeObservation(env, (2, 2))),
    "dtype": ("CartPole-v1", lambda env: wrappers.DtypeObservation(env, np.float64)),
    "rescaled": ("Pendulum-v1", lambda env: wrappers.RescaleObservation(env, 0.0, 1.0)),
    "transformed": ("CartPole-v1", lambda env: wrappers.TransformObservation(env, lambda rows: rows + 1)),
    "vectorised": (
        "CartPole-v1",
        lambda env: wrappers.VectorizeTransformObservation(
            env, gymnasium.wrappers.TransformObservation, func=lambda row: row * 2, observation_space=None
        ),
    ),
    "torch": ("Pendulum-v1", lambda env: wrappers.NumpyToTorch(env)),
    "video": ("CartPole-v1", lambda env: wrappers.RecordVideo(env, "videos")),
    "window": ("CartPole-v1", lambda env: wrappers.HumanRendering(env)),
    "single": ("CartPole-v1", gymnasium.wrappers.TimeAwareObservation),
}


def run_wrapped(env, wrapper):
    """What a wrapped environment gives, or what it refuses."""
    results = []
    try:
        wrapped = wrapper(env)
        wrapped.action_space.seed(0)
        for _ in range(2):
            results.append(wrapped.reset(seed=0, options={}))
            for _ in range(40):
                action = wrapped.action_space.sample()
                if "Torch" in repr(wrapped):
                    import torch

                    action = torch.as_tensor(action)
                *stepped, infos = wrapped.step(action)
                results.append((*stepped, without_times(infos)))
                if env.autoreset_mode is AutoresetMode.DISABLED and (ended := np.asarray(stepped[2] | stepped[3])).any():
                    results.append(wrapped.reset(seed=1))
    except Exception as error:
        refusal = str(error).split("\n")[0].replace("SharedVectorEnv", "SyncVectorEnv")
        results.append((type(error), refusal.replace(SharedVectorEnv.__module__, SyncVectorEnv.__module__)))
    return results


def without_times(infos):
    if isinstance(infos, list):
        return [without_times(info) for info in infos]
    return {key: without_times(value) if isinstance(value, dict) else value for key, value in infos.items()
            if key not in ("t", "_t")}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # gymnasium's own, of wrappers that it means for one environment
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", WRAPPERS)
def test_gymnasiums_wrappers_do_the_same_on_it(name, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env_id, wrapper = WRAPPERS[name]
    env_fns = [functools.partial(make, env_id, max_episode_steps=15) if env_id else Basket] * 3
    ours, theirs = twins(env_fns, 2, mode)
    with ours:
        assert_same(run_wrapped(ours, wrapper), run_wrapped(theirs, wrapper))
    theirs.close()
