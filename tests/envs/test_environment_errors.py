"""Errors that come of environments say of which one, and what gymnasium's order is."""

from __future__ import annotations

from fractions import Fraction

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from helpers import Count, Counting, rollout

from rlstructs import DictTensor, GymEnv, GymEnvInf, GymVectorEnv, RL_Batcher, SharedVectorEnv, SpecError
from rlstructs.replay import Batch, ReplayBuffer

STEP_ORDER = r"step must give 5 values, \(observation, reward, terminated, truncated, info\), got "
RESET_ORDER = r"reset must give 2 values, \(observation, info\), got "
OLD = "gym's old interface: wrap it, for example with shimmy's GymV21CompatibilityV0"


class Answering(Count):
    """Gives of its first step, or reset, something else than it should; or raises in one of its methods."""

    def __init__(self, step=None, reset=None, raises=""):
        super().__init__(9)
        self.answers, self.raises = {"step": step, "reset": reset}, raises

    def _answer(self, call, found):
        if self.raises == call:
            raise ZeroDivisionError("mine")
        return found if self.answers[call] is None else self.answers[call](*found)

    def step(self, action):
        return self._answer("step", super().step(action))

    def reset(self, **arguments):
        return self._answer("reset", super().reset(**arguments))

    def close(self):
        if self.raises == "close":
            raise ZeroDivisionError("mine")


gymnasium.register("Answering-v3", entry_point=Answering)


WRONG_STEPS = {
    "four": (lambda o, r, a, b, i: (o, r, a, i), STEP_ORDER + r"4, \(ndarray, float, bool, dict\); \(observation, "
                                                 "reward, done, info\\) is " + OLD),
    "nothing": (lambda *_: (), STEP_ORDER + r"0, \(\)"),
    "none": (lambda *_: None, STEP_ORDER + "NoneType"),
    "six": (lambda *found: (*found, 1), STEP_ORDER + "6, "),
    "observation": (lambda o, *_: o, STEP_ORDER + r"ndarray of shape \(2,\)"),
    "flag": (lambda o, r, a, b, i: (o, r, np.array([True, False]), b, i),
             r"terminated must be a bool, got array\(\[ True, False\]\)"),
    "cut": (lambda o, r, a, b, i: (o, r, a, np.array([True, False]), i), "truncated must be a bool, got array"),
    "reward": (lambda o, r, a, b, i: (o, [r, r], a, b, i), r"reward must be a number, got \[1.0, 1.0\]"),
    "reward of shape (1,)": (lambda o, r, a, b, i: (o, np.array([r]), a, b, i), r"reward must be a number, got array"),
}  # fmt: skip
WRONG_RESETS = {
    "alone": (lambda o, i: o, RESET_ORDER + r"ndarray of shape \(2,\); an observation alone is " + OLD),
    "none": (lambda *_: None, RESET_ORDER + "NoneType"),
    "three": (lambda o, i: (o, i, 0), RESET_ORDER + r"3, \(ndarray, dict, int\)"),
}


def listed(cls):
    return lambda makes, seed: cls([make() for make in makes], seed)


def vector(cls, **arguments):
    return lambda makes, seed: GymVectorEnv(cls(makes, **arguments), seed)


LISTS = {"GymEnv": listed(GymEnv), "GymEnvInf": listed(GymEnvInf), "shared": vector(SharedVectorEnv, n_workers=0)}


def played(create, makes):
    env = create(makes, 0)
    try:
        env.reset()
        env.step(DictTensor({"action": torch.zeros(len(makes), dtype=torch.int64)}))
    finally:
        env.close()


@pytest.mark.parametrize("create", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(("call", "answer", "message"),
                         [("step", *found) for found in WRONG_STEPS.values()]
                         + [("reset", *found) for found in WRONG_RESETS.values()])  # fmt: skip
def test_an_answer_that_is_not_gymnasiums_is_named_with_its_environment(create, call, answer, message):
    makes = [nine, lambda: Answering(**{call: answer})]
    with pytest.raises(SpecError, match=r"^environment 1( \(Answering\))?: " + message):
        played(create, makes)


@pytest.mark.parametrize("create", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
    ("reward", "terminated", "truncated"), [(1.0, True, None), (1.0, np.bool_(True), 0), (1, 1, None)]
)
def test_flags_that_are_not_bools_end_an_episode(create, reward, terminated, truncated):
    played(create, [nine, lambda: Answering(step=lambda o, r, a, b, i: (o, reward, terminated, truncated, i))])


def test_a_reward_that_becomes_a_float_is_taken_at_the_end_of_an_episode_too():
    answer = lambda o, r, a, b, i: (o, Fraction(1, 2), np.bool_(True), False, i)  # noqa: E731
    with SharedVectorEnv([lambda: Answering(step=answer)], n_workers=0) as envs:
        envs.reset()
        assert envs.step(np.zeros(1, int))[1].tolist() == [0.5]


def test_an_info_that_nobody_wants_may_be_anything():
    played(LISTS["GymEnv"], [lambda: Answering(step=lambda o, r, a, b, i: (o, r, a, b, np.zeros(2)))])


class Parts(Count):
    """Shows a dict."""

    def __init__(self):
        super().__init__(9)
        self.observation_space = gymnasium.spaces.Dict({"at": self.observation_space})

    def reset(self, **arguments):
        observation, info = super().reset(**arguments)
        return {"at": observation}, info

    def step(self, action):
        return None, *super().step(action)[1:]


@pytest.mark.parametrize("create", LISTS.values(), ids=LISTS)
def test_no_observation_where_the_space_has_entries_is_named_with_its_environment(create):
    with pytest.raises(SpecError, match="^environment 0: observation 'at' cannot be read"):
        played(create, [Parts])


def nine():
    return Count(9)


class Old(SyncVectorEnv):
    """As vector environments of gym were."""

    def reset(self, **arguments):
        return super().reset(**arguments)[0]


class OldSteps(SyncVectorEnv):
    def step(self, actions):
        observations, rewards, terminated, _, infos = super().step(actions)
        return observations, rewards, terminated, infos


class Raising(SyncVectorEnv):
    def step(self, actions):
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize(("cls", "message"), [
    (Old, r"^environment \(Old\): " + RESET_ORDER + r"ndarray of shape \(2, 2\); an observation alone is " + OLD),
    (OldSteps, r"^environment \(OldSteps\): " + STEP_ORDER + r"4, .*; \(observation, reward, done, info\) is " + OLD),
])  # fmt: skip
def test_vector_environments_of_the_old_interface_are_named(cls, message):
    with pytest.raises(SpecError, match=message):
        played(vector(cls), [nine, nine])


def test_what_a_vector_environment_raises_names_it():
    with pytest.raises(ZeroDivisionError) as caught:
        played(vector(Raising), [nine, nine])
    assert caught.value.__notes__ == ["raised by environments (Raising) in step"]


@pytest.mark.parametrize("call", ["reset", "step", "close"])
@pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])
@pytest.mark.parametrize("name", ["Answering-v3", "Answering"])
def test_what_an_environment_raises_says_which_one_it_was(call, cls, name):
    def make():
        return gymnasium.make(name, raises=call, disable_env_checker=True) if "-" in name else Answering(raises=call)

    with pytest.raises(ZeroDivisionError, match="^mine") as caught:
        played(listed(cls), [nine, nine, make])
    assert caught.value.__notes__ == [f"raised by environment 2 ({name}) in {call}"]


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.parametrize("call", ["reset", "step", "close"])
def test_a_batcher_says_which_environment_of_which_worker_raised(n_processes, call, start_method):
    def create_env(seed):
        raises = call if seed == 100 * max(0, n_processes - 1) else ""
        return GymEnvInf([Count(9), Answering(raises=raises)], seed)

    seeds = [100 * worker for worker in range(n_processes or 1)]
    batcher = RL_Batcher(3, Counting, {}, create_env, {}, n_processes, seeds, start_method=start_method)
    with pytest.raises(ZeroDivisionError, match="^mine") as caught, batcher:
        batcher.reset()
        rollout(batcher)
    where = {"step": "rollout"}.get(call, call)
    worker = [f"raised in worker 1 during {where!r}"] if n_processes else []
    assert caught.value.__notes__ == [f"raised by environment 1 (Answering) in {call}", *worker]


def test_one_of_several_that_raises_what_another_gave_is_not_blamed_for_it():
    """The answer of the one before is right; that it is looked at again changes nothing."""
    with pytest.raises(ZeroDivisionError) as caught:
        played(listed(GymEnvInf), [lambda: Answering(step=lambda o, r, a, b, i: (o, [r], a, b, i)),
                                   lambda: Answering(raises="step")])  # fmt: skip
    assert caught.value.__notes__ == ["raised by environment 1 (Answering) in step"]


@pytest.mark.parametrize("value", [np.str_("x"), np.bytes_(b"x"), np.void(b"xy"), "x"], ids=repr)
def test_an_info_holds_a_text_of_numpy_as_it_is(value):
    buffer = ReplayBuffer(4)
    row = {"obs": np.zeros(2), "act": 0, "rew": 0.0, "terminated": False, "truncated": False, "obs_next": np.zeros(2)}
    buffer.add(Batch(**row, info={"a": value}))
    assert np.asarray(buffer[0].info.a).item() == np.asarray(value).item()
