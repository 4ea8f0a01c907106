"""`SharedVectorEnv` gives what gymnasium's `SyncVectorEnv` gives."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate
from gymnasium.wrappers import vector as wrappers
from helpers import Count
from processes import LIMIT, worker_pids
from vector_envs import Basket, Echo, Gate, Process, Same, Telling

from rlstructs import ClosedError, SharedVectorEnv, SpecError, StateError, WorkerTimeout

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
        assert ours == theirs or ours != ours


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
    for name in ("metadata", "render_mode", "num_envs", "spec", "env_fns"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("single_observation_space", "observation_space", "single_action_space", "action_space"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("env_fns", [makers("CartPole-v1", 4), [Basket] * 4], ids=["cartpole", "nested"])
def test_a_copy_of_one_in_this_process_goes_on_by_itself(env_fns, n_groups):
    ours, theirs = twins(env_fns, 0, AutoresetMode.SAME_STEP, n_groups=n_groups)
    assert_same_steps(ours, theirs, 30)
    copies = deepcopy(ours), deepcopy(theirs)
    for _ in range(40):
        action = theirs.action_space.sample()
        assert_same(copies[0].step(action), copies[1].step(action))
    assert_same(ours.step(action), theirs.step(action))


@pytest.mark.parametrize("n_workers", [1, 3])
def test_it_gives_the_same_however_the_work_is_shared(n_workers, start_method):
    ours, theirs = twins([Basket] * 4, n_workers, AutoresetMode.SAME_STEP, start_method=start_method)
    with ours:
        assert assert_same_steps(ours, theirs, 50) > 20


@pytest.mark.parametrize(
    "arguments",
    [{"shared_memory": False}, {"shared_memory": True, "context": None}, {"context": "spawn", "daemon": False}],
    ids=str,
)
def test_it_takes_the_arguments_that_gymnasiums_takes(arguments):
    ours, theirs = twins([Basket] * 2, 1, AutoresetMode.SAME_STEP, **arguments)
    with ours:
        assert assert_same_steps(ours, theirs, 20) > 2


class Wide(gymnasium.Env):
    """Observes numbers up to a bound."""

    action_space = spaces.Discrete(2)

    def __init__(self, high, dtype=np.float32):
        self.observation_space = spaces.Dict({"x": spaces.Box(-high, high, (2,), dtype)})
        self.high = high

    def reset(self, *, seed=None, options=None):
        return {"x": np.full(2, -self.high, np.float32)}, {}

    def step(self, action):
        return {"x": np.full(2, self.high * action, np.float32)}, 1.0, bool(action), False, {}


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_bounds_of_observations_may_differ_where_that_is_said(n_workers):
    env_fns = [functools.partial(Wide, high) for high in (1, 2, 3)]
    one = Wide(9).observation_space
    for mode in ("different", (batch_space(one, 3), one)):
        ours = SharedVectorEnv(env_fns, n_workers, observation_mode=mode)
        theirs = SyncVectorEnv(env_fns, observation_mode=mode)
        with ours:
            assert ours.observation_space == theirs.observation_space
            assert ours.single_observation_space == theirs.single_observation_space
            assert_same_steps(ours, theirs, 20)
    with pytest.raises(SpecError, match="observation_space of environment 1 is .*, not .*observation_mode=.same"):
        SharedVectorEnv([*env_fns[:2], env_fns[0]], n_workers)
    with pytest.raises(RuntimeError, match="observation_space of environment 3 is .*shapes and dtypes must be equal"):
        SharedVectorEnv([*env_fns, lambda: Wide(1, np.float64)], n_workers, observation_mode="different")


def test_no_more_environments_run_at_once_than_that():
    with SharedVectorEnv([Basket] * 4, 3, max_concurrency=1) as env:
        env.reset()
        assert len(worker_pids()) == 1


@pytest.mark.parametrize(("n_groups", "n_workers"), [(2, 2), (3, 2), (7, 1), (2, 0)])
def test_it_gives_the_same_as_a_whole_when_it_has_groups(n_groups, n_workers):
    ours, theirs = twins([Basket] * 7, n_workers, AutoresetMode.SAME_STEP, n_groups=n_groups)
    with ours:
        assert assert_same_steps(ours, theirs, 50) > 20
        mask = np.arange(7) % 3 == 1
        for env in (ours, theirs):
            env.set_attr("gain", list(range(7)))
        assert_same(ours.call("doubled", 4), theirs.call("doubled", 4))
        assert ours.get_attr("gain") == tuple(range(7))
        assert_same(*(env.reset(seed=list(range(7)), options={"reset_mask": mask.copy()}) for env in (ours, theirs)))
        assert_same(*(env.step(ours.action_space.seed(1) and ours.action_space.sample()) for env in (ours, theirs)))


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
        (spaces.Dict({"a": spaces.Text(4), "b": spaces.Discrete(2)}), [{"a": ("a", "b", "c"), "b": np.arange(3) % 2}]),
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
        wrong = "has shape|has dtype .* cannot hold"
        with ours, pytest.raises(expected.type, match=f"^environment 1: observation {wrong}"):
            ours.reset()
            ours.step([0, 0])


class Giving(gymnasium.Env):
    """Observes what it is told to."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space, observation):
        self.observation_space, self.observation = observation_space, observation

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        return self.observation, 0.0, False, False, {}


BYTES, NUMBER = spaces.Box(0, 255, (2,), np.uint8), spaces.Box(-1, 1, (1,))


@pytest.mark.parametrize(
    ("space", "value", "seen"),
    [
        (BYTES, np.array([3, 4]), [3, 4]), (BYTES, [3, 4], [3, 4]), (BYTES, np.array([3.0, 4.0]), [3, 4]),
        (spaces.Box(0, 1, (2,), np.bool_), [0, 1], [False, True]), (spaces.Discrete(3), 2.0, 2),
        (spaces.Discrete(3), np.array([2]), 2), (NUMBER, 0.5, [0.5]), (NUMBER, np.array([[0.5]]), [0.5]),
        (BYTES, np.array([300, 4]), None), (BYTES, [-1, 4], None), (BYTES, [0.5, 4], None), (BYTES, [np.nan, 4], None),
        (spaces.MultiBinary(2), np.array([300, 0]), None), (spaces.MultiBinary(2), np.array([200, 0], np.uint8), None),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_any_type_are_taken_if_none_is_changed_by_that_of_the_space(space, value, seen):
    # AsyncVectorEnv takes them all, and makes 44 of 300 in a uint8.
    with SharedVectorEnv([functools.partial(Giving, space, space.sample()), lambda: Giving(space, value)], 0) as env:
        if seen is None:
            wrong = "has dtype .*, and values that the space's .* cannot hold"
            with pytest.raises(SpecError, match=f"^environment 1: observation {wrong}"):
                env.reset()
        else:
            for observations in (env.reset()[0], env.step([0, 0])[0]):
                assert observations.dtype == space.dtype and observations[1].tolist() == seen


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)])
def test_arrays_without_numbers_are_observed(shape):
    space = spaces.Dict({"none": spaces.Box(-1, 1, shape), "count": spaces.Discrete(2)})
    ours, theirs = twins([functools.partial(Giving, space, space.sample())] * 3, 0)
    with ours:
        assert_same_steps(ours, theirs, 2)


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_stepping_an_environment_that_has_ended_is_refused_when_nothing_resets_it(n_workers):
    with SharedVectorEnv(makers("CartPole-v1", 4), n_workers, autoreset_mode=AutoresetMode.DISABLED) as env:
        env.reset(seed=0)
        for _ in range(200):
            observations, _, terminations, _, _ = env.step(np.array([0, 1, 0, 1]))
            if terminations.any():
                break
        which = np.flatnonzero(terminations).tolist()
        with pytest.raises(StateError, match=rf"step: environments \[{which[0]}.*\] have ended, reset them by reset"):
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
        for wrong in (1.5, "abc", [1, 2.0, 3]):
            with pytest.raises(TypeError, match="reset: seed must be an int, or ints and None, got"):
                env.reset(seed=wrong)
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
        ours.call_async("get_wrapper_attr", name="gain")
        assert ours.call_wait() == (1.0, 2.0, 3.0)
        for name, call in {
            "absent": lambda env: env.get_attr("absent"), "doubled": lambda env: env.call("doubled"),
        }.items():  # fmt: skip
            with pytest.raises((AttributeError, TypeError)) as expected:
                call(theirs)
            with pytest.raises(type(expected.value), match="absent|missing 1 required positional") as caught:
                call(ours)
            assert caught.value.__notes__[0] == f"raised by environment 0 (Basket) in {name}"
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
                if env.autoreset_mode is AutoresetMode.DISABLED and (stepped[2] | stepped[3]).any():
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


def test_statistics_of_environments_that_a_mask_leaves_out_go_on():
    # Over SyncVectorEnv they are lost: it takes the mask out of the options before the wrapper has looked at it.
    with SharedVectorEnv([Basket] * 4, 2, autoreset_mode=AutoresetMode.DISABLED) as env:
        wrapped = wrappers.RecordEpisodeStatistics(env)
        wrapped.reset(seed=0)
        lengths, n_ended = np.zeros(4, int), 0
        for _ in range(50):
            *_, terminations, truncations, infos = wrapped.step(env.action_space.sample())
            lengths += 1
            ended = terminations | truncations
            if ended.any():
                assert infos["episode"]["l"][ended].tolist() == lengths[ended].tolist()
                n_ended, lengths = n_ended + ended.sum(), np.where(ended, 0, lengths)
                wrapped.reset(options={"reset_mask": ended})
        assert n_ended > 20


def test_infos_of_every_number_type_come_as_they_are():
    with SharedVectorEnv([Telling] * 2, 1) as env:
        told = env.reset()[1]["told"]
    assert_same(told[1], list(Telling.told))
    assert np.isnan(told[1].pop()) and len(told[1]) > 15


@pytest.mark.parametrize(("n_workers", "n_groups"), [(0, 1), (2, 1), (1, 2)])
def test_an_environment_that_is_given_again_and_again_is_copied(n_workers, n_groups):
    # In AsyncVectorEnv every process has its own.
    env = Basket()
    for env_fn in (lambda: env, lambda: gymnasium.wrappers.TimeLimit(env, 5)):
        ours = SharedVectorEnv([env_fn] * 4, n_workers, n_groups=n_groups)
        theirs = SyncVectorEnv([lambda env_fn=env_fn: deepcopy(env_fn()) for _ in range(4)])
        with ours:
            assert_same_steps(ours, theirs, 20)


def test_what_cannot_be_copied_has_to_be_made_by_each():
    env = Basket()
    env.odd = (i for i in range(3))
    with pytest.raises(SpecError, match="env_fns: <Basket.* is given twice and cannot be copied") as caught:
        SharedVectorEnv([Basket, lambda: env, lambda: env], 0)
    assert caught.value.__notes__[0] == "raised by environment 2 in its constructor"


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_an_environment_may_change_and_keep_the_action_that_it_gets(n_workers):
    class Halving(Echo):
        def step(self, action):
            action *= 0.5
            return super().step(action)

    with SharedVectorEnv([functools.partial(Halving, spaces.Box(-1, 1, (2,)))] * 2, n_workers) as env:
        env.reset()
        actions = np.ones((2, 2), np.float32)
        env.step(actions)
        assert (actions == 1).all()
        actions[:] = 9
        env.send(actions[:1], [1])
        env.recv()
        assert [[kept.tolist() for kept in some] for some in env.get_attr("kept")] == [
            [[0.5, 0.5]], [[0.5, 0.5], [4.5, 4.5]]
        ]  # fmt: skip
        assert (actions == 9).all()


class Sharing(gymnasium.Env):
    """Writes into what it is given, its infos into a dict of its class, and its observations into an array of that."""

    observation_space, action_space = spaces.Box(0, 100, (2,)), spaces.Box(-1, 1, (1,))
    info, seen = {"of": {"at": np.zeros(1)}}, np.zeros(3, np.float32)

    def reset(self, *, seed=None, options=None):
        self.goal = np.zeros(1)
        return np.zeros(2), {}

    def aim(self, goal, *, by=None):
        self.goal = goal
        if by:
            by.append(1)
        return by

    def step(self, action):
        action *= 2
        self.goal += action
        self.seen[:] = self.info["goal"] = self.info["of"]["at"][0] = float(self.goal[0])
        return self.seen[1:], 0.0, False, False, self.info


def test_environments_of_one_worker_share_nothing_that_they_are_given_or_give():
    # As in AsyncVectorEnv, whose processes have one each.
    with SharedVectorEnv([Sharing] * 3, 1) as env:
        env.reset()
        env.set_attr("goal", np.array([10.0]))
        assert env.step([np.ones(1)] * 3)[4]["goal"].tolist() == [12, 12, 12]
        env.call("aim", np.array([20.0]))
        for goals in ([22, 24, 26], [24, 28, 32]):
            observations, *_, infos = env.step(np.array([[1.0], [2.0], [3.0]]))
            assert infos["goal"].tolist() == infos["of"]["at"].ravel().tolist() == goals
            assert observations.tolist() == [[goal, goal] for goal in goals]
        assert env.call("aim", np.zeros(1), by=[0]) == ([0, 1],) * 3


# The order of calls


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_only_one_thing_is_asked_for_at_a_time(n_workers):
    env = SharedVectorEnv([Basket] * 2, n_workers)
    action = env.action_space.sample()
    asks = {
        "reset": env.reset_async, "step": lambda: env.step_async(action), "call": lambda: env.call_async("gain"),
        "send": lambda: env.send(action),
    }  # fmt: skip
    waits = {"reset": env.reset_wait, "step": env.step_wait, "call": env.call_wait, "send": env.recv}
    env.reset()
    for asked, ask in asks.items():
        for wait in waits.values():
            with pytest.raises(gymnasium.error.NoAsyncCallError, match="^(.*_wait|recv): nothing was ask") as caught:
                wait()
            assert isinstance(caught.value, StateError)
        ask()
        others = {name: other for name, other in asks.items() if (name, asked) != ("send", "send")}
        others |= {"render": env.render, "set_attr": lambda: env.set_attr("gain", 1.0)}
        pending = gymnasium.error.AlreadyPendingCallError
        for other in others.values():
            with pytest.raises(pending, match=f": {asked} is under way, call .* first") as caught:
                other()
            assert isinstance(caught.value, StateError) and caught.value.name == asked
        for name, wait in waits.items():
            if name != asked:
                with pytest.raises(gymnasium.error.NoAsyncCallError, match=": nothing was asked for"):
                    wait()
        waits[asked]()
    env.close()
    for call in (*asks.values(), *waits.values(), env.render):
        with pytest.raises(gymnasium.error.ClosedEnvironmentError, match=": the environment is closed") as caught:
            call()
        assert isinstance(caught.value, ClosedError)


@pytest.fixture
def gate(tmp_path):
    """The path of a pipe at which steps of a `Gate` wait, and what opens it once."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)

    def let_through():
        with open(path, "wb"):
            pass

    return path, let_through


def test_a_step_that_was_waited_for_in_vain_can_be_waited_for_again(gate):
    path, let_through = gate
    with SharedVectorEnv([functools.partial(Gate, path)] * 2, 2) as env:
        env.reset()
        env.step_async([1, 0])
        for _ in range(2):
            with pytest.raises(WorkerTimeout, match="no reply within 0.01 s to 'step' from worker") as caught:
                env.step_wait(timeout=0.01)
            assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, multiprocessing.TimeoutError)
        let_through()
        assert env.step_wait()[0].tolist() == [[1], [1]]
        env.reset_async()
        assert env.reset_wait(timeout=LIMIT)[0].tolist() == [[0], [0]]
        env.call_async("steps")
        assert env.call_wait(timeout=LIMIT) == (1, 1)


def test_an_interrupted_step_can_be_waited_for(gate):
    path, let_through = gate
    with SharedVectorEnv([functools.partial(Gate, path)] * 2, 2) as env:
        env.reset()

        def interrupt(*_):
            if env._order.pending is None:  # the step has yet to be sent
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            else:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                env.step([1, 0])
        finally:
            signal.signal(signal.SIGALRM, before)
        let_through()
        assert env.step_wait()[0].tolist() == [[1], [1]] and env.step([1, 1])[0].tolist() == [[2], [2]]


# The first that are ready


def test_the_first_environments_that_are_ready_are_received(gate):
    path, let_through = gate
    with SharedVectorEnv([functools.partial(Gate, path)] * 5, 2) as env:
        env.reset()
        env.send([1, 1, 0, 1, 1])  # the last of the first worker's three waits
        seen = []
        for n in (1, 2, 1):
            observations, rewards, terminations, truncations, infos = env.recv(n)
            assert observations.shape == (n, 1) and rewards.tolist() == [1.0] * n
            assert not (terminations | truncations).any()
            seen += infos["env_id"].tolist()
        assert sorted(seen) == [0, 1, 3, 4]
        env.send([1, 1], [4, 3])
        assert env.recv(2)[0].tolist() == [[2], [2]]
        env.send([1], [0])
        with pytest.raises(WorkerTimeout, match=r"no reply within .* from worker\(s\) 0 "):
            env.recv(1, timeout=0.01)
        let_through()
        observations, *_, infos = env.recv()
        assert infos["env_id"].tolist() == [0, 2] and observations.tolist() == [[2], [1]]
        assert env.step([1] * 5)[0].tolist() == [[3], [2], [2], [3], [3]]


def test_all_environments_that_are_ready_are_received(gate, start_method):
    path, let_through = gate
    with SharedVectorEnv([functools.partial(Gate, path)] * 4, 4, start_method=start_method) as env:
        env.reset()
        env.send([1, 0, 1, 1])
        seen = []
        while len(seen) < 3:
            observations, rewards, *_, infos = env.recv(min_envs=1)
            ready = infos["env_id"].tolist()
            assert ready == sorted(ready) and observations.tolist() == [[1]] * len(ready) and len(rewards) == len(ready)
            seen += ready
        assert sorted(seen) == [0, 2, 3]
        env.send([1, 1], [3, 0])
        assert env.recv(timeout=LIMIT, min_envs=2)[4]["env_id"].tolist() == [0, 3]
        env.send([1], [2])
        assert env.recv(timeout=LIMIT, min_envs=1)[4]["env_id"].tolist() == [2]
        for _ in range(2):
            with pytest.raises(WorkerTimeout, match=r"no reply within .* from worker\(s\) 1 "):
                env.recv(timeout=0.01, min_envs=1)
        let_through()
        observations, *_, infos = env.recv(min_envs=4)  # all that were sent
        assert infos["env_id"].tolist() == [1] and observations.tolist() == [[1]]


def test_after_the_timeout_those_that_are_ready_are_received(gate):
    path, let_through = gate
    with SharedVectorEnv([functools.partial(Gate, path)] * 3, 3) as env:
        env.reset()
        env.send([1, 0, 1])
        seen = []
        while len(seen) < 2:
            with contextlib.suppress(WorkerTimeout):  # none was ready
                seen += env.recv(timeout=0.01, min_envs=3)[4]["env_id"].tolist()
        assert sorted(seen) == [0, 2]
        let_through()
        assert env.recv()[4]["env_id"].tolist() == [1]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8, np.float64])
def test_actions_under_way_may_differ_in_their_types(gate, dtype):
    path, let_through = gate
    with SharedVectorEnv([functools.partial(Gate, path)] * 4, 1) as env:
        env.reset()
        env.send([0], [0])  # waits, and so do those after it
        env.send(np.array([1, 1], dtype), [1, 3])
        env.send(np.array([1], np.int16), [2])
        let_through()
        given = repr(dtype(1))
        assert env.recv()[4]["action"].tolist() == ["0", given, "np.int16(1)", given]


def info_of(infos, row):
    """One environment's part of infos."""
    return {
        key: info_of(value, row) if isinstance(value, dict) else value[row]
        for key, value in infos.items()
        if not key.startswith("_") and infos.get(f"_{key}", [False] * 99)[row]
    }


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_every_environment_that_is_sent_by_itself_goes_its_own_way(n_workers, mode):
    rng = np.random.default_rng(0)
    theirs = [SyncVectorEnv([Basket], autoreset_mode=mode) for _ in range(5)]
    with SharedVectorEnv([Basket] * 5, n_workers, autoreset_mode=mode) as env:
        env.reset(seed=3)
        for k, other in enumerate(theirs):
            other.reset(seed=3 + k)
        waiting, actions = list(range(5)), [None] * 5
        for _ in range(200):
            sent = rng.permutation(waiting)[: rng.integers(len(waiting) + 1)].tolist()
            if sent:
                batch = env.action_space.sample()
                for row, k in enumerate(sent):
                    actions[k] = {key: values[row : row + 1] for key, values in batch.items()}
                env.send({key: values[: len(sent)] for key, values in batch.items()}, sent)
            n_out = 5 - len(waiting) + len(sent)
            if not n_out:
                continue
            n = int(rng.integers(1, n_out + 1))
            *stepped, infos = env.recv(n) if rng.random() < 0.5 else env.recv(min_envs=n)
            ready = infos["env_id"].tolist()
            assert ready == sorted(ready)
            waiting = [k for k in waiting if k not in sent] + ready
            rows = list(iterate(env.observation_space, stepped[0]))
            for row, k in enumerate(ready):
                *expected, expected_infos = theirs[k].step(actions[k])
                assert_same(rows[row], next(iterate(theirs[k].observation_space, expected[0])))
                for ours, other in zip(stepped[1:], expected[1:], strict=True):
                    assert_same(ours[row], other[0])
                assert_same(info_of(infos, row), info_of(expected_infos, 0))


@pytest.mark.parametrize("n_workers", N_WORKERS)
def test_what_cannot_be_sent_or_received_is_refused(n_workers):
    with SharedVectorEnv(makers("CartPole-v1", 3, max_episode_steps=1), n_workers, autoreset_mode="Disabled") as env:
        with pytest.raises(gymnasium.error.ResetNeeded, match="send: call reset first"):
            env.send([0], [1])
        env.reset()
        for wrong in ([3], [-1], [0, 0], [], [[0]], [0.5], 1):
            with pytest.raises(SpecError, match="send: env_ids must"):
                env.send([0], wrong)
        with pytest.raises(SpecError, match="actions: needs one for each of 2 environments, got 3"):
            env.send([0, 0, 0], [0, 1])
        env.send([0, 1], [0, 2])
        with pytest.raises(StateError, match=r"send: environments \[2\] were sent and not received"):
            env.send([0, 1], [1, 2])
        for wrong, kind in ((3, "recv: 3 environments are wanted, 2 were sent"), (0, "n must be at least 1")):
            with pytest.raises(SpecError, match=kind):
                env.recv(wrong)
        for wrong in ({"n": 1, "min_envs": 1}, {"env_ids": [0], "min_envs": 1}):
            with pytest.raises(SpecError, match="recv: min_envs is given, and n=.*: give one of them"):
                env.recv(**wrong)
        with pytest.raises(SpecError, match="min_envs must be at least 1"):
            env.recv(min_envs=0)
        assert env.recv()[4]["env_id"].tolist() == [0, 2]
        with pytest.raises(StateError, match=r"send: environments \[2\] have ended"):
            env.send([0, 1], [1, 2])
        env.reset(options={"reset_mask": np.array([False, False, True])})
        env.send([0, 1], [1, 2])
        assert env.recv(2)[4]["env_id"].tolist() == [1, 2]


def test_many_can_be_sent_one_by_one_before_any_is_received():
    with SharedVectorEnv([functools.partial(Echo, spaces.Box(-1, 1, (2000,), np.float64))] * 300, 1) as env:
        env.reset()
        for action in (np.zeros((1, 2000)), [np.zeros(2000).tolist()]):  # through shared memory, and not
            for k in range(300):
                env.send(action, [k])
            assert env.recv()[4]["env_id"].tolist() == list(range(300))


# Workers


def test_environments_are_shared_in_order_and_workers_are_as_many_as_cores():
    with SharedVectorEnv([Process] * 5, 2) as env:
        pids = env.reset()[1]["pid"].tolist()
        assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] and os.getpid() not in pids
    with SharedVectorEnv([Process] * 2, 0) as env:
        assert env.reset()[1]["pid"].tolist() == [os.getpid()] * 2
    with SharedVectorEnv([Process] * 200) as env:
        assert len(set(env.reset()[1]["pid"].tolist())) == min(200, len(os.sched_getaffinity(0)))


@pytest.mark.usefixtures("own_preload")
def test_workers_draw_different_numbers_and_have_no_torch():
    with SharedVectorEnv([Process] * 4, 4) as env:
        infos = env.reset()[1]
        assert len(set(infos["drawn"].tolist())) == 4 and not infos["torch"].any()


def test_an_entry_point_keeps_its_state_between_the_environments_that_a_worker_makes(monkeypatch):
    made = []
    spec = gymnasium.envs.registration.EnvSpec("Made-v0", lambda: (made.append(0), Count(len(made)))[1])
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    make = functools.partial(gymnasium.make, "Made-v0", disable_env_checker=True)
    with SharedVectorEnv([make, lambda: gymnasium.make(make().spec, disable_env_checker=True)], 1) as env:
        env.reset()
        ends = np.array([env.step([0, 0])[2] for _ in range(3)])
    assert ends.argmax(axis=0).tolist() == [0, 2]  # the first ends after one step, the third that was made after three


@pytest.mark.usefixtures("own_preload")
@pytest.mark.parametrize("entry_point", [Count, lambda: Count(3)], ids=["class", "lambda"])
def test_registered_classes_are_imported_by_the_workers_that_make_them(entry_point, monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Torch-v0", entry_point, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)  # helpers.py, where Count is, imports torch
    with SharedVectorEnv([Process] * 2, 2) as env:
        assert not env.reset()[1]["torch"].any()
    arguments = {"length": 3} if entry_point is Count else {}
    with SharedVectorEnv([lambda: gymnasium.make("Torch-v0", **arguments)] * 2, 2) as env:
        assert env.reset()[0].tolist() == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (([],), SpecError, "env_fns: needs at least one"),
        (([Basket, 3],), TypeError, r"env_fns\[1\] must be a function"),
        (([Basket] * 2, -1), SpecError, "n_workers must be at least 0"),
        (([Basket] * 2, 1.0), TypeError, "n_workers must be an int"),
        (([Basket, lambda held=(i for i in range(3)): held], 2), TypeError, r"env_fns\[1\] cannot be sent to a worker"),
        (([Basket, gymnasium.Env], 0), SpecError, "whose observation_space is a gymnasium.Space, got Env where it is"),
        (([int], 0), SpecError, "whose observation_space is a gymnasium.Space, got int where it is None"),
        (([Basket, Same], 2), SpecError, "env_fns: observation_space of environment 1 is .*, not .*"),
        (([Basket, Same], 2), RuntimeError, "observation_space of environment 1 is .*mode=.same"),
        (([Basket, Same], 0), SpecError, "env_fns: observation_space of environment 1 is .*, not .*"),
        (([functools.partial(Echo, spaces.Discrete(n)) for n in (2, 2, 3)], 2), SpecError, "action_space of en.* 2 is"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_what_is_wrong_with_an_argument_is_refused_and_nothing_is_left(arguments, kind, words):
    before = worker_pids()
    with pytest.raises(kind, match=words):
        SharedVectorEnv(*arguments)
    for wrong in (
        {"timeout": 0}, {"autoreset_mode": "Sometimes"}, {"start_method": "magic"}, {"context": "magic"},
        {"start_method": "spawn", "context": "fork"}, {"observation_mode": "other"}, {"max_concurrency": 0},
        {"observation_mode": (Basket.observation_space, 3)},
    ):  # fmt: skip
        with pytest.raises(SpecError):
            SharedVectorEnv([Basket], 1, **wrong)
    assert worker_pids() == before


@pytest.mark.parametrize(("n_envs", "n_groups", "n_workers"), [(1, 1, 1), (3, 1, 3), (4, 2, 2)])
def test_there_are_at_most_as_many_workers_as_environments(n_envs, n_groups, n_workers):
    with SharedVectorEnv([Basket] * n_envs, 7, n_groups=n_groups) as envs:
        envs.reset(seed=0)
        assert len(envs._host.pids) == n_workers
