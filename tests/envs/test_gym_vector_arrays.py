"""`GymVectorEnv` around vector environments of tensors, of jax's arrays, and with infos and final observations of every
form."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers import Count

from rlstructs import DeviceEnv, DictTensor, GymVectorEnv, RL_Agent, RL_Batcher, SpecError
from rlstructs.testing import check_env

MODES = list(AutoresetMode)
SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
N_ENVS = 3


def jax_array(array):
    return pytest.importorskip("jax").numpy.asarray(array)


# What makes an array of a library, and what is done to an action that only an array of this library can do.
LIBRARIES = {
    "numpy": (np.array, lambda action: np.minimum(action, 1)),
    "torch": (torch.tensor, lambda action: action.clamp(max=1).numpy()),
    "jax": (jax_array, lambda action: np.asarray(action.at[:].min(1))),
}
if torch.cuda.is_available():
    LIBRARIES["cuda"] = functools.partial(torch.tensor, device="cuda"), lambda action: action.clamp(max=1).cpu().numpy()
every_library = pytest.mark.parametrize("library", LIBRARIES)


class Walk(gymnasium.vector.VectorEnv):
    """Adds each action, at most 1, to a position; environment k ends after k + 2 steps.

    Args:
        mode: how it resets.
        library: whose arrays it takes and gives.
        infos: makes infos of the final positions of all, and which have ended.
        is_nested: whether it gives dicts of tuples.
    """

    def __init__(self, mode, library="numpy", infos=None, is_nested=False):
        self.num_envs, self.metadata = N_ENVS, {"autoreset_mode": mode}
        self.mode, self.is_nested, self.given = mode, is_nested, []
        self.is_plain = infos is None
        self.infos = infos or (stacked if mode is SAME else lambda *_: {})
        self.made, self.cut = LIBRARIES[library]
        move, at = spaces.Box(-5, 5, (2,), np.float32), spaces.Box(-99, 99, (2,), np.float32)
        self.single_observation_space = spaces.Dict(more=spaces.Tuple([spaces.Discrete(9), at])) if is_nested else at
        self.single_action_space = spaces.Dict(move=move, jump=spaces.Discrete(2)) if is_nested else move

    def observed(self, at, steps):
        at, steps = self.made(at), self.made(steps)
        return {"more": (steps, at)} if self.is_nested else at

    def reset(self, *, seed=None, options=None):
        mask = np.ones(N_ENVS, bool) if not options else options["reset_mask"]
        if not options:
            self.at, self.steps = np.zeros((N_ENVS, 2), np.float32), np.zeros(N_ENVS, np.int64)
        self.at[mask], self.steps[mask], self.due = 0, 0, np.zeros(N_ENVS, bool)
        return self.observed(self.at, self.steps), {} if self.is_plain else None

    def step(self, actions):
        self.given.append(actions)
        moved = self.cut(actions["move"] if self.is_nested else actions)
        self.at, self.steps = self.at + moved, self.steps + 1
        self.at[self.due], self.steps[self.due] = 0, 0
        done = self.steps == np.arange(N_ENVS) + 2
        rewards = np.where(self.due, 0, self.at[:, 0])
        infos = self.infos(self.observed(self.at, self.steps), done)
        if self.mode is SAME:
            self.at = np.where(done[:, None], 0, self.at)
            self.steps = np.where(done, 0, self.steps)
        self.due = done & (self.mode is NEXT)
        flags = self.made(done), self.made(np.zeros(N_ENVS, bool))
        return self.observed(self.at, self.steps), self.made(rewards), *flags, infos


def of_row(observation, k):
    """The observation of one environment."""
    if isinstance(observation, dict):
        steps, at = observation["more"]
        return {"more": (steps[k], at[k])}
    return observation[k]


def stacked(observation, done, name="final_obs"):
    return {name: observation} if done.any() else {}


def each(observation, done, of=list, name="final_obs", rest=None):
    """One for each environment; what has not ended gave nothing."""
    return {name: of([of_row(observation, k) if done[k] else rest for k in range(N_ENVS)])} if done.any() else {}


def objects(values):
    found = np.empty(len(values), object)
    found[:] = values
    return found


def objects_inside(observation, done):
    if not done.any():
        return {}
    steps, at = observation["more"]
    return {"final_obs": {"more": (objects(list(steps)), objects(list(at)))}}


def dicts(observation, done, of=list, name="final_obs"):
    return of([{name: of_row(observation, k)} if done[k] else {} for k in range(N_ENVS)])


FORMS = {
    "one": stacked,
    "one, by its old name": functools.partial(stacked, name="final_observation"),
    "an array of objects": functools.partial(each, of=objects),
    "a list": each,
    "a tuple": functools.partial(each, of=tuple),
    "a list of dicts": dicts,
    "a tuple of dicts": functools.partial(dicts, of=tuple),
    "Stable-Baselines3's": functools.partial(dicts, name="terminal_observation"),
}


def walked(env, n_steps=9):
    """The transitions of each environment, the same moves for all; only its own keys."""
    found = [[] for _ in range(N_ENVS)]
    env.reset(DictTensor())
    for t in range(n_steps):
        moves = torch.tensor([[0.5 + t, 2.0], [-1.0, t / 4], [0.25, 3.0]])
        nested = DictTensor({"action/move": moves, "action/jump": torch.tensor([0, 1, 1])})
        action = nested if env.is_nested else DictTensor({"action": moves})
        (after, _), (following, _) = env.step(action)
        for k in range(N_ENVS):
            if after["initial_state"][k] and not after["done"][k]:
                continue  # this was no step
            keys = [key for key in after if not key.startswith("last_action")]
            found[k].append({key: (after[key][k].tolist(), following[key][k].tolist()) for key in keys})
    return found


def env_of(mode, *arguments, **others):
    envs = Walk(mode, *arguments, **others)
    env = GymVectorEnv(envs, 0)
    env.is_nested = envs.is_nested
    return env


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("mode", MODES)
@every_library
def test_actions_are_arrays_of_the_library_that_observations_are_of(library, mode, is_nested):
    wanted, found = (walked(env_of(mode, name, is_nested=is_nested)) for name in ("numpy", library))
    assert found == wanted
    ends = [t for t, step in enumerate(wanted[1]) if step["done"][0]]
    assert ends[:2] == [2, 5] and any(step["reward"][0] for step in wanted[0])


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "nested"])
@every_library
def test_actions_have_the_dtypes_of_the_space_and_are_the_environments_own(library, is_nested):
    envs = Walk(SAME, library, is_nested=is_nested)
    env = GymVectorEnv(envs, 0)
    env.reset()
    moves, jumps = torch.ones(3, 2, dtype=torch.float64), torch.tensor([0, 1, 1], dtype=torch.int16)
    env.step(DictTensor({"action/move": moves, "action/jump": jumps} if is_nested else {"action": moves}))
    (given,) = envs.given
    given = given if is_nested else {"move": given}
    kinds = {type(envs.made(np.zeros(1)))}
    assert {type(value) for value in given.values()} == kinds
    assert str(given["move"].dtype).removeprefix("torch.") == "float32"
    if library in ("numpy", "torch"):
        for value in given.values():
            value[:] = 0
        assert moves.all() and jumps.any()


@pytest.mark.parametrize("n_processes", [0, 1])
def test_tensors_are_given_in_workers_too(n_processes):
    def rollout(library):
        def create_env(seed):
            return GymVectorEnv(Walk(NEXT, library), seed)

        with RL_Batcher(6, Pushing, {}, create_env, {}, n_processes, 3) as batcher:
            batcher.reset()
            batcher.execute()
            return batcher.get()[0]

    assert rollout("torch").trajectories == rollout("numpy").trajectories


class Pushing(RL_Agent):
    """Moves by what it sees."""

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": 2 - observation["frame"] / 3}), state


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_of_tensors_is_one_as_they_should_be(mode):
    def create_env(seed):
        return DeviceEnv(GymVectorEnv(Walk(mode, "torch"), seed), "cpu", "cpu")

    check_env(create_env, {}, n_steps=20, uses_seed=False)


# --- infos ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "infos",
    [lambda *_: None, lambda *_: [{}, {}, {}], lambda *_: ({"x": 1}, {}, {}), lambda *_: [], lambda *_: {}],
    ids=["None", "a list", "a tuple", "an empty list", "a dict"],
)
@pytest.mark.parametrize("mode", [NEXT, DISABLED])
def test_infos_may_be_anything_where_no_final_observation_is_read_from_them(mode, infos):
    assert walked(env_of(mode, infos=infos)) == walked(env_of(mode, infos=lambda *_: {}))


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_final_observations_are_taken_in_every_form(form, library, is_nested):
    if form == "a tuple" and is_nested:
        form = "a list"  # what is nested may be a tuple itself
    found = walked(env_of(SAME, library, FORMS[form], is_nested))
    wanted = walked(env_of(DISABLED, is_nested=is_nested))
    assert found == wanted


def test_final_observations_may_be_a_dict_of_arrays_of_objects():
    assert walked(env_of(SAME, infos=objects_inside, is_nested=True)) == walked(env_of(DISABLED, is_nested=True))


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        (lambda *_: {"final_obs": [None, np.zeros(2), np.zeros(2)]}, "^environment 0: final observation is m"),
        (lambda *_: [{}, {"final_obs": np.zeros(2)}, {}], r"^environment 0: final observation is missing: .*"),
        (lambda *_: {"final_obs": [np.zeros(3)] * 3}, r"^environment 0: final observation has shape \(3,\)"),
        (lambda *_: {"final_obs": None}, r"^environment: Walk ended an episode without infos\['final_obs'\]$"),
        (lambda *_: None, "^environment: infos with 'final_obs' must be a dict or 3 dicts, got NoneType$"),
        (lambda *_: [{"final_obs": np.zeros(2)}], "^environment: infos with 'final_obs' must .* or 3 dicts, got list$"),
    ],
)
def test_a_final_observation_that_is_needed_and_not_there_is_named(infos, message):
    env = env_of(SAME, infos=infos)
    env.reset()
    action = DictTensor({"action": torch.zeros(3, 2)})
    env.step(action)
    with pytest.raises(SpecError, match=message):
        env.step(action)


def test_final_observations_in_a_list_of_infos_show_that_the_mode_is_another():
    env = env_of(NEXT, infos=dicts)
    with pytest.raises(SpecError, match=r"^environment: Walk gave infos\['final_obs'\], which is not NextStep$"):
        walked(env)


def test_an_empty_space_of_a_single_environment_is_not_taken_for_none():
    envs = Walk(SAME)
    envs.single_observation_space = spaces.Dict()
    envs.observation_space = Count.observation_space
    with pytest.raises(SpecError, match=r"^observation: space Dict\(\) has no entries$"):
        GymVectorEnv(envs, 0)
