"""`GymEnv` and `GymEnvInf`: what observations hold, who runs, what environments are given."""

from __future__ import annotations

import copy
import functools
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import Count
from test_spaces import REFUSED, SPACES, every_space, flat, stacked

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    NormalizeObservation,
    NormalizeReward,
    RandomAgent,
    RL_Batcher,
    SpecError,
    StateError,
)
from rlstructs.envs import VecEnv
from rlstructs.seeding import EnvSeed
from rlstructs.testing import check_env

both_classes = pytest.mark.parametrize("cls", [GymEnv, GymEnvInf])


class Recording(gymnasium.Env):
    """Shows samples of its observation space for `length` steps; keeps what it showed and was given."""

    def __init__(self, observation=None, action=None, length=3, terminated=True, truncated=False):
        self.observation_space = spaces.Discrete(9) if observation is None else observation
        self.action_space = spaces.Discrete(5) if action is None else action
        self.length, self.flags = length, (terminated, truncated)
        self.shown, self.actions, self.resets, self.n_closed = [], [], [], 0

    def _show(self):
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]

    def reset(self, **arguments):
        self.resets.append(arguments)
        self.steps = 0
        return self._show(), {}

    def step(self, action):
        self.actions.append(action)
        self.steps += 1
        terminated, truncated = self.flags if self.steps == self.length else (False, False)
        return self._show(), 1.0, terminated, truncated, {}

    def close(self):
        self.n_closed += 1


class Giving(Recording):
    """Gives something else as its reward or observation from its second step on."""

    def __init__(self, length=9, **given):
        super().__init__(spaces.Box(0, 9, (2,), np.float32), length=length)
        self.given = given

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.steps > 1:
            observation, reward = self.given.get("observation", observation), self.given.get("reward", reward)
        return observation, reward, *rest


class Buffer(gymnasium.Env):
    """Writes every observation, the number of steps, into the same array."""

    action_space = spaces.Discrete(5)

    def __init__(self, length, nested=False):
        box = spaces.Box(0, 9, (1,), np.float32)
        self.length, self.array = length, np.zeros(1, np.float32)
        self.observation_space = spaces.Dict(x=spaces.Tuple([box])) if nested else box
        self.observation = {"x": (self.array,)} if nested else self.array

    def reset(self, *, seed=None, options=None):
        self.array[:] = 0
        return self.observation, {}

    def step(self, action):
        self.array += 1
        return self.observation, 1.0, bool(self.array[0] == self.length), False, {}


def counts(cls, *lengths, seed=7):
    return cls([Count(length) for length in lengths], seed)


def act(env, *values):
    return env.step(DictTensor({"action": torch.tensor(values)}))


def assert_holds(pair, **columns):
    """The pair's columns, and `running`, have these values."""
    observation, running = pair
    assert running.dtype == torch.int64
    for key, values in columns.items():
        if isinstance(values, str):
            values = [letter == "T" for letter in values]
        found = running if key == "running" else observation[key]
        assert found.tolist() == values, key


# --- what observations hold: CV35-CV46 -----------------------------------------------------------


@both_classes
def test_a_reset_gives_the_first_observation_of_everyone(cls):  # CV35, CV39
    pair = counts(cls, 1, 2, 4).reset()
    assert_holds(
        pair, frame=[[0, 0]] * 3, reward=[0, 0, 0], done="FFF", terminated="FFF", truncated="FFF",
        initial_state="TTT", last_action=[0, 0, 0], running=[0, 1, 2],
    )  # fmt: skip
    dtypes = {key: tensor.dtype for key, tensor in pair[0].items()}
    flags = dict.fromkeys(["done", "terminated", "truncated", "initial_state"], torch.bool)
    assert dtypes == {"frame": torch.float32, "reward": torch.float32, "last_action": torch.int64, **flags}


def test_an_environment_that_ends_leaves_the_running_set():
    env = counts(GymEnv, 1, 2, 4)
    env.reset()
    first, second = act(env, 1, 2, 3)  # CV36
    assert_holds(
        first, running=[0, 1, 2], reward=[1, 1, 1], done="TFF", terminated="TFF", truncated="FFF",
        initial_state="FFF", last_action=[1, 2, 3], frame=[[0, 1]] * 3,
    )  # fmt: skip
    assert_holds(second, running=[1, 2], last_action=[2, 3], done="FF", frame=[[0, 1]] * 2, initial_state="FF")
    first, second = act(env, 4, 0)  # CV37
    assert_holds(first, running=[1, 2], reward=[2, 2], done="TF")
    assert_holds(second, running=[2])
    first, second = act(env, 1)
    assert_holds(first, running=[2], reward=[3], done="F")
    assert_holds(second, running=[2], frame=[[0, 3]])
    first, second = act(env, 1)  # CV38
    assert_holds(first, running=[2], reward=[4], done="T")
    assert second[1].shape == (0,) and second[1].dtype == torch.int64
    assert second[0].n_elems() == 0 and second[0].specs() == first[0].specs()
    with pytest.raises(StateError, match=r"^step: every environment has ended, call reset$"):
        act(env, 1)
    assert_holds(env.reset(), frame=[[1, 0]] * 3, running=[0, 1, 2], done="FFF")


def test_an_environment_that_ends_resets_itself_in_the_same_step():
    env = counts(GymEnvInf, 1, 2, 4)
    env.reset()
    first, second = act(env, 1, 2, 3)  # CV39
    assert_holds(
        first, running=[0, 1, 2], reward=[1, 1, 1], done="TFF", initial_state="FFF", last_action=[1, 2, 3],
        frame=[[0, 1]] * 3,
    )  # fmt: skip
    assert_holds(
        second, running=[0, 1, 2], reward=[0, 1, 1], done="FFF", terminated="FFF", initial_state="TFF",
        last_action=[0, 2, 3], frame=[[1, 0], [0, 1], [0, 1]],
    )  # fmt: skip
    first, second = act(env, 4, 0, 1)  # CV40
    assert_holds(first, reward=[1, 2, 2], done="TTF", frame=[[1, 1], [0, 2], [0, 2]])
    assert_holds(second, reward=[0, 0, 2], initial_state="TTF", frame=[[2, 0], [1, 0], [0, 2]])
    act(env, 1, 1, 1)
    first, second = act(env, 1, 1, 1)  # CV41
    assert_holds(first, done="TTT", frame=[[3, 1], [1, 2], [0, 4]], initial_state="FFF")
    assert_holds(second, initial_state="TTT", frame=[[4, 0], [2, 0], [1, 0]], running=[0, 1, 2], done="FFF")


def test_dict_observations_give_a_key_for_each_entry():  # CV42
    observation, _ = GymEnv([Recording(SPACES["dict"]) for _ in range(2)], 0).reset()
    assert set(observation) == {
        "pos", "id", "reward", "done", "terminated", "truncated", "initial_state", "last_action",
    }  # fmt: skip
    assert (observation["pos"].dtype, observation["pos"].shape) == (torch.float32, (2, 1))
    assert (observation["id"].dtype, observation["id"].shape) == (torch.int64, (2, 1))


@pytest.mark.parametrize("nested", [False, True])
def test_an_array_that_the_environment_writes_into_again_is_copied_from(nested):  # CV43, R1
    env, key = GymEnvInf([Buffer(2, nested), Buffer(3, nested)], 0), "x/0" if nested else "frame"
    start, _ = env.reset()
    pairs = [act(env, 0, 0) for _ in range(3)]
    assert start[key].tolist() == [[0], [0]]
    assert [first[0][key].flatten().tolist() for first, _ in pairs] == [[1, 1], [2, 2], [1, 3]]
    assert [second[0][key].flatten().tolist() for _, second in pairs] == [[1, 1], [0, 2], [1, 0]]


def test_a_time_limit_truncates():  # CV45
    env = GymEnvInf([gymnasium.wrappers.TimeLimit(Count(10), 3)], 0)
    env.reset()
    act(env, 0), act(env, 0)
    first, second = act(env, 0)
    assert_holds(first, done="T", truncated="T", terminated="F", frame=[[0, 3]])
    assert_holds(second, done="F", truncated="F", terminated="F", frame=[[1, 0]])


@both_classes
@pytest.mark.parametrize(("terminated", "truncated"), [(True, False), (False, True), (True, True)])
def test_terminated_and_truncated_are_kept_apart(cls, terminated, truncated):  # R3
    env = cls([Recording(length=1, terminated=terminated, truncated=truncated), Recording(length=2)], 0)
    env.reset()
    (after, _), _ = act(env, 0, 0)
    assert [after[flag].tolist() for flag in ("done", "terminated", "truncated")] == [
        [True, False], [terminated, False], [truncated, False],
    ]  # fmt: skip


@both_classes
def test_fixed_episodes_have_no_step_but_their_own(cls):  # R4
    env = counts(cls, 3, 3, 3, 3)
    env.reset()
    ended = []
    for step in range(1, 10 if cls is GymEnvInf else 4):
        (after, _), _ = act(env, 0, 0, 0, 0)
        assert after["reward"].tolist() == [(step - 1) % 3 + 1] * 4
        ended += [step] * int(after["done"].sum())
    assert ended == ([3] * 4 + [6] * 4 + [9] * 4 if cls is GymEnvInf else [3] * 4)


@both_classes
@pytest.mark.parametrize("name", ["box-2x3", "box-scalar", "nested", "discrete-start", "multibinary"])
def test_the_last_action_is_zero_where_an_episode_starts(cls, name):  # CV46
    space = SPACES[name]
    env = cls([Recording(action=space, length=length) for length in (1, 2)], 0)
    start, _ = env.reset()
    space.seed(1)
    action = {key: torch.from_numpy(rows) for key, rows in stacked(space, [space.sample()] * 2, "action").items()}
    (after, _), (following, _) = env.step(DictTensor(action))
    for key, tensor in action.items():
        assert start[f"last_{key}"].shape == tensor.shape and not start[f"last_{key}"].any()
        assert torch.equal(after[f"last_{key}"], tensor)
        assert torch.equal(following[f"last_{key}"][-1], tensor[-1])
        assert cls is GymEnv or not following[f"last_{key}"][0].any()


@both_classes
@every_space
def test_every_space_for_observations_and_for_actions(cls, space):  # R35
    envs = [Recording(space, space, length) for length in (2, 9)]
    env = cls(envs, 0, keep_float64=True)
    start, _ = env.reset()
    assert_shows(space, start, [made.shown[0] for made in envs])
    assert env.example().tensors().specs() == start.specs()
    for step in (1, 2):
        given = [space.sample() for _ in envs]
        rows = stacked(space, given, "action")
        (after, _), (following, running) = env.step(DictTensor({k: torch.from_numpy(v) for k, v in rows.items()}))
        assert after.specs() == following.specs() == start.specs()
        assert_shows(space, after, [made.shown[step] for made in envs])
        for made, sample in zip(envs, given, strict=True):
            assert space.contains(made.actions[-1])
            assert data_equivalence(dict(flat(space, made.actions[-1])), dict(flat(space, sample)))
    assert_shows(space, following, [envs[k].shown[-1] for k in running])


def assert_shows(space, observation, samples):
    for key, rows in stacked(space, samples).items():
        found = observation[key or "frame"].numpy()
        assert found.dtype == rows.dtype and np.array_equal(found.reshape(rows.shape), rows), key


@pytest.mark.parametrize("keep_float64", [False, True])
def test_float64_becomes_float32_unless_it_is_kept(keep_float64):
    box = spaces.Box(-1, 1, (2,), np.float64)
    recording = Recording(spaces.Dict(x=box, y=box), box)
    env = GymEnv([recording], 0, keep_float64=keep_float64)
    action = torch.full((1, 2), 0.1, dtype=torch.float64)
    (after, _), _ = env.reset() and env.step(DictTensor({"action": action}))
    wanted = torch.float64 if keep_float64 else torch.float32
    assert {after[key].dtype for key in ("x", "y", "last_action")} == {wanted}
    assert after["reward"].dtype == torch.float32
    assert torch.equal(after["last_action"], action.to(wanted)) and recording.actions[0].dtype == np.float64


def test_what_was_given_out_does_not_change():
    env = counts(GymEnvInf, 2, 3)
    kept = [env.reset()[0]]
    for _ in range(4):
        first, second = act(env, 1, 2)
        kept += [first[0], second[0]]
    copies = [observation.clone() for observation in kept]
    act(env, 3, 3)
    env.reset()
    assert kept == copies


def of_vectors(cls, *lengths):
    makers = [functools.partial(Count, length) for length in lengths]
    return GymVectorEnv(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
@pytest.mark.parametrize("wrap", [lambda env: env, NormalizeObservation, NormalizeReward], ids=["", "observ", "reward"])
@pytest.mark.parametrize(("make", "cls"), [(counts, GymEnv), (counts, GymEnvInf), (of_vectors, None)])
def test_a_copy_goes_on_by_itself_as_its_original_does(make, cls, wrap, copied):
    env = wrap(make(cls, 2, 5))
    env.reset()
    act(env, 1, 2)
    twin = copied(env)
    for n_running in (2, 1 if cls is GymEnv else 2):
        stepped = act(env, *[3] * n_running)
        assert [seen for seen, _ in act(twin, *[3] * n_running)] == [seen for seen, _ in stepped]
        assert stepped[0][0]["last_action"].tolist() == [3] * n_running
    assert twin.reset()[0] == env.reset()[0]


def test_flags_of_an_episode_end_do_not_stay():
    env = GymEnv([Count(1), Count(9)], 0)
    env.reset()
    act(env, 0, 0)
    env.reset(DictTensor({"length": torch.tensor([9, 9])}))
    first, _ = act(env, 0, 0)
    assert_holds(first, done="FF", terminated="FF", truncated="FF")


# --- what environments are given -----------------------------------------------------------------


@both_classes
@pytest.mark.parametrize(
    ("seed", "wanted"),
    [(7, [7, 8]), (np.int64(7), [7, 8]), ([4, 4], [4, 4]), (EnvSeed(3, 1), EnvSeed(3, 1).for_environments(2))],
    ids=["int", "numpy", "list", "derived"],
)
def test_seeds_reach_the_first_reset_only_and_the_action_spaces(cls, seed, wanted):  # CV35
    envs = [Recording(action=spaces.Discrete(2**30), length=1) for _ in range(2)]
    env = cls(envs, seed)
    for made, value in zip(envs, wanted, strict=True):
        assert made.action_space.sample() == spaces.Discrete(2**30, seed=value).sample()
    env.reset(), act(env, 1, 1), env.reset()
    for made, value in zip(envs, wanted, strict=True):
        n_resets = 3 if cls is GymEnvInf else 2
        assert made.resets == [{"seed": value}] + [{}] * (n_resets - 1)


def test_later_episodes_continue_the_stream():
    first, second, other = (GymEnvInf([gymnasium.make("CartPole-v1")], seed) for seed in (3, 3, 4))
    starts = [[env.reset()[0]["frame"] for _ in range(3)] for env in (first, second, other)]
    assert all(torch.equal(a, b) for a, b in zip(starts[0], starts[1], strict=True))
    assert not torch.equal(starts[0][0], starts[0][1]) and not torch.equal(starts[0][0], starts[2][0])


@both_classes
def test_env_info_reaches_every_reset(cls):
    envs = [Recording(length=1), Recording(length=2)]
    env = cls(envs, 0)
    env.reset(DictTensor({"length": torch.tensor([5, 6]), "at": torch.tensor([[1.5, 2.5], [3.5, 4.5]])}))
    act(env, 0, 0)
    options = [{"length": 5, "at": [1.5, 2.5]}, {"length": 6, "at": [3.5, 4.5]}]
    assert envs[0].resets == [{"seed": 0, "options": options[0]}] + [{"options": options[0]}] * (cls is GymEnvInf)
    assert envs[1].resets == [{"seed": 1, "options": options[1]}]
    env.reset()
    assert envs[0].resets[-1] == envs[1].resets[-1] == {}


def test_env_info_changes_what_runs():  # CV44
    env = counts(GymEnv, 3, 3)
    env.reset(DictTensor({"length": torch.tensor([1, 2])}))
    assert_holds(act(env, 0, 0)[1], running=[1])
    for wrong in (torch.zeros(1), torch.zeros(3)):
        with pytest.raises(SpecError, match=rf"^env_info: has {len(wrong)} rows, expected 2"):
            env.reset(DictTensor({"length": wrong}))


def test_env_info_that_an_environment_changes_is_whole_at_the_next_reset():
    class Emptying(Recording):
        def reset(self, *, seed=None, options=None):
            found = super().reset(options=dict(options), at=list(options["at"]))
            options.pop("length")
            options["at"].clear()
            return found

    emptying = Emptying(length=1)
    env = GymEnvInf([emptying], 0)
    env.reset(DictTensor({"length": torch.tensor([5]), "at": torch.tensor([[1, 2]])}))
    act(env, 0)
    assert [(reset["options"]["length"], reset["at"]) for reset in emptying.resets] == [(5, [1, 2])] * 2


def test_an_attribute_called_set_is_left_alone():
    class Settable(Count):
        def set(self, *arguments):
            raise AssertionError("called")

    env = GymEnvInf([Settable(1)], 0)
    env.reset()
    assert_holds(act(env, 0)[1], initial_state="T")


def test_counting_touches_no_environment():
    recording = Recording()
    env = GymEnv([recording], 0)
    assert env.n_envs() == 1 and len(env.example()) == 1 and not recording.resets
    assert env.observation_space == recording.observation_space and env.action_space is recording.action_space
    assert isinstance(env, VecEnv)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("which", ["observation", "action"])
@pytest.mark.parametrize("space", REFUSED.values(), ids=REFUSED.keys())
def test_spaces_that_are_not_supported_are_refused_at_construction(space, which, nested):
    whole = spaces.Dict(fine=spaces.Discrete(2), odd=spaces.Tuple([space])) if nested else space
    with pytest.raises(SpecError) as caught:
        GymEnv([Recording(**{which: whole})], 0)
    assert str(caught.value).startswith(f"{which}: space {space} is not supported")


@pytest.mark.parametrize("name", ["reward", "done", "terminated", "truncated", "initial_state", "last_action"])
@pytest.mark.parametrize("nested", [False, True])
def test_names_that_every_observation_has_are_refused(name, nested):
    inner = spaces.Discrete(2)
    space = spaces.Dict({name: spaces.Dict(x=inner) if nested else inner})
    key = f"{name}/x" if nested else name
    with pytest.raises(SpecError, match=f"^observation: an entry may not be called '{key}'; reserved are"):
        GymEnv([Recording(space)], 0)


ONE = Recording()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_an_environment_without_a_space_is_refused_by_name(name, is_there):  # rlstructures needed none
    envs = [Recording(), Recording()]
    delattr(envs[1], name)
    if is_there:
        setattr(envs[1], name, None)
    with pytest.raises(SpecError, match=f"^envs: number 1 has no {name}, which says what keys, dtypes and shapes"):
        GymEnv(envs, 0)


VECTOR = gymnasium.make_vec("CartPole-v1", 1, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize(
    ("envs", "seed", "error", "message"),
    [
        ([], 0, SpecError, "^envs: needs at least one environment, got none"),
        ([Recording(), object()], 0, TypeError, "^envs: number 1 must be a gymnasium.Env, got object"),
        (Recording(), 0, TypeError, r"^envs: needs a list .*, got Recording: put it into a list, \[env\]$"),
        (Recording, 0, TypeError, r"^envs: needs a list .*, got type: call it, .* \[make\(\) for _ in range\(n\)\]$"),
        (VECTOR, 0, TypeError, "^envs: needs a list .*, got CartPoleVectorEnv: give it to GymVectorEnv$"),
        ([Recording], 0, TypeError, "^envs: number 0 must be a gymnasium.Env, got type, call it$"),
        ([ONE, Recording(), ONE], 0, SpecError, "^envs: number 2 is given twice"),
        ([ONE, gymnasium.wrappers.TimeLimit(ONE, 5)], 0, SpecError, "^envs: number 1 is given twice"),
        ([Recording(), Recording(spaces.Discrete(8))], 0, SpecError,
         r"^envs: observation_space of number 1 is Discrete\(8\), of number 0 Discrete\(9\)"),
        ([Recording(), Recording(action=spaces.Discrete(6))], 0, SpecError,
         r"^envs: action_space of number 1 is Discrete\(6\), of number 0 Discrete\(5\)"),
        ([Recording()], -1, SpecError, "^seed: must not be negative, got -1"),
        ([Recording()], [1, 2], SpecError,
         r"^seed: needs 1 seeds of at least 0, one for each of the environments, got \[1, 2\]"),
        ([Recording()], None, TypeError, "^seed: needs an int, or one for each of 1 environments, got None"),
    ],
    ids=["none", "no-gym", "no-list", "class", "vector", "classes", "twice", "wrapped", "observations", "actions",
         "negative", "many", "no-seed"],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(envs, seed, error, message):
    with pytest.raises(error, match=message):
        GymEnv(envs, seed)


def test_a_step_before_the_first_reset_is_refused():
    with pytest.raises(StateError, match=r"^step: call reset first"):
        act(counts(GymEnv, 3), 1)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"other": torch.tensor([1])}, r"^agent: no 'action' in its output, there are \['other'\]"),
        ({"action": torch.tensor([1, 2])}, r"^agent: 'action' has shape \(2,\), expected \(1,\) \(1 environments"),
        ({"action": torch.tensor([1.0])}, r"^agent: 'action' is \(1,\) float32, expected an integer dtype"),
        ({"action": torch.tensor([[1]])}, r"^agent: 'action' has shape \(1, 1\), expected \(1,\)"),
    ],
    ids=["key", "rows", "dtype", "shape"],
)
def test_a_wrong_action_is_refused_when_only_some_run(action, message):
    env = counts(GymEnv, 1, 3)
    env.reset()
    act(env, 1, 2)
    with pytest.raises(SpecError, match=message):
        env.step(DictTensor(action))
    assert_holds(act(env, 3)[0], running=[1], last_action=[3], frame=[[0, 2]])


@pytest.mark.parametrize("autoreset", [False, True])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": None}, "reward must be a number, got None"),
        ({"reward": "1.5"}, "reward must be a number, got '1.5'"),
        ({"reward": 1j}, "reward must be a number, got 1j"),
        ({"reward": np.ones(2)}, r"reward must be a number, got array\(\[1., 1.\]\)"),
        ({"reward": [1.0]}, r"reward must be a number, got \[1.0\]"),
        ({"observation": np.zeros(3, np.float32)}, r"observation has shape \(3,\), the space says \(2,\)"),
        ({"observation": np.array(["a", "b"])}, "observation has dtype <U1"),
    ],
    ids=["none", "text", "complex", "vector", "list", "shape", "dtype"],
)
def test_a_wrong_step_is_refused_by_environment(autoreset, given, message):
    env = (GymEnvInf if autoreset else GymEnv)([Giving(length=1), Giving(), Giving(**given)], 0)
    env.reset()
    act(env, 0, 0, 0)
    with pytest.raises(SpecError, match=f"^environment 2: {message}"):
        act(env, *[0] * (3 if autoreset else 2))


def test_a_reward_may_be_larger_than_any_integer_of_an_array():
    env = GymEnv([Giving(reward=2**70), Giving()], 0)
    env.reset()
    act(env, 0, 0)
    assert act(env, 0, 0)[0][0]["reward"].tolist() == [2.0**70, 1.0]


def test_a_wrong_first_observation_is_refused_by_environment():
    class Wrong(Giving):
        def _show(self):
            return np.zeros(1, np.float32) if self.resets[1:] else super()._show()

    env = GymEnvInf([Giving(), Wrong(length=1)], 0)
    env.reset()
    with pytest.raises(SpecError, match=r"^environment 1: observation has shape \(1,\)"):
        act(env, 0, 0)
    with pytest.raises(SpecError, match=r"^environment 1: observation has shape \(1,\)"):
        env.reset()


@pytest.mark.parametrize(
    "reward",
    [2, True, np.float64(2), np.float32(2), np.int8(2), np.array(2.0), torch.tensor(2.0), float("inf")],
    ids=repr,
)
def test_any_number_is_a_reward(reward):
    env = GymEnv([Giving(reward=reward), Giving()], 0)
    env.reset(), act(env, 0, 0)
    assert_holds(act(env, 0, 0)[0], reward=[float(reward), 1.0])


def test_what_an_environment_raises_arrives():
    class Raising(Recording):
        def step(self, action):
            raise KeyError("own")

    env = GymEnv([Recording(), Raising()], 0)
    env.reset()
    with pytest.raises(KeyError, match="own"):
        act(env, 0, 0)


def test_close_closes_all_although_some_raise():
    class Raising(Recording):
        def close(self):
            super().close()
            raise ValueError(f"cannot close after {len(self.resets)} resets")

    envs = [Recording(), Raising(), Recording(), Raising()]
    env = GymEnv(envs, 0)
    envs[3].resets.append({})
    with pytest.raises(ValueError, match="cannot close after 0 resets"):
        env.close()
    assert [made.n_closed for made in envs] == [1, 1, 1, 1]


class SameReward(Count):
    """Gives the same array as the reward, always."""

    def __init__(self, length):
        super().__init__(length)
        self.reward = np.zeros(())

    def reset(self, **arguments):
        self.reward[...] = 0
        return super().reset(**arguments)

    def step(self, action):
        observation, self.reward[...], *rest = super().step(action)
        return observation, self.reward, *rest


def test_a_reward_that_a_reset_overwrites_is_kept():  # R1
    env = GymEnvInf([SameReward(2)], 0)
    env.reset()
    rewards = [env.step(DictTensor({"action": torch.tensor([0])}))[0][0]["reward"].item() for _ in range(4)]
    assert rewards == [1, 2, 1, 2]


class OneReward(Count):
    """Environments that have one array for the rewards of them all."""

    reward = np.zeros(())

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.reward[...] = reward * self.length
        return observation, self.reward, *rest


def test_rewards_that_another_environment_overwrites_are_kept():
    env = GymEnvInf([OneReward(8), OneReward(9)], 0)
    env.reset()
    rewards = [env.step(DictTensor({"action": torch.tensor([0, 0])}))[0][0]["reward"].tolist() for _ in range(4)]
    assert rewards == [[8 * step, 9 * step] for step in range(1, 5)]


def test_setting_a_key_of_one_observation_leaves_the_other():
    env = GymEnvInf([Count(9)], 0)
    env.reset()
    (after, _), (following, _) = env.step(DictTensor({"action": torch.tensor([0])}))
    after.set("reward", after["reward"] * 10)
    assert (after["reward"].item(), following["reward"].item()) == (10, 1)


def test_a_bfloat16_action_will_do_for_a_box():
    env = GymEnvInf([gymnasium.make("Pendulum-v1")], 0)
    env.reset()
    twin = GymEnvInf([gymnasium.make("Pendulum-v1")], 0)
    twin.reset()
    (half, _), _ = env.step(DictTensor({"action": torch.ones(1, 1, dtype=torch.bfloat16)}))
    (full, _), _ = twin.step(DictTensor({"action": torch.ones(1, 1)}))
    assert half == full


class Common(gymnasium.Env):
    """Shows what it was told in an array of its class; ends when told 9."""

    action_space, seen = spaces.Discrete(10), {"a": np.zeros(2, np.float32)}

    def __init__(self, nested):
        box = spaces.Box(0, 99, (2,))
        self.nested, self.observation_space = nested, spaces.Dict({"a": box}) if nested else box

    def _show(self, value):
        self.seen["a"][:] = value
        return self.seen if self.nested else self.seen["a"]

    def reset(self, *, seed=None, options=None):
        return self._show(0), {}

    def step(self, action):
        return self._show(action), 0.0, action == 9, False, {}


@pytest.mark.parametrize("nested", [False, True])
def test_environments_that_observe_into_one_array_show_what_each_of_them_observed(nested):
    env, key = GymEnvInf([Common(nested) for _ in range(3)], 0), "a" if nested else "frame"
    assert env.reset()[0][key].tolist() == [[0, 0]] * 3
    for actions in ([1, 2, 3], [9, 4, 9], [5, 6, 7]):
        (after, _), (following, _) = env.step(DictTensor({"action": torch.tensor(actions)}))
        assert after[key].tolist() == [[action] * 2 for action in actions]
        assert following[key].tolist() == [[0 if action == 9 else action] * 2 for action in actions]


@pytest.mark.parametrize("episode_seeds", [False, True])
def test_a_reset_that_is_made_again_gives_the_same_seeds(episode_seeds):
    first, second = Recording(), Recording()
    env, reset = GymEnvInf([first, second], 3, episode_seeds=episode_seeds), second.reset
    second.reset = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        env.reset()
    second.reset = reset
    env.reset()
    [before, again] = first.resets
    assert before == again and before["seed"] is not None


# --- clip_actions ---------------------------------------------------------------------------------

BOXES = {
    "Box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32)),
    "float64": spaces.Box(-1, 1, (2,), np.float64), "uint8": spaces.Box(0, 200, (2,), np.uint8),
    "scalar": spaces.Box(-1, 1, ()), "Dict": spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)),
}  # fmt: skip


class Told(gymnasium.Env):
    """Keeps the actions that it is given."""

    observation_space = spaces.Box(-1, 1, (1,))

    def __init__(self, space):
        self.action_space, self.actions = space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action if isinstance(action, dict) else np.asarray(action)), action
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def drawn(space, n):
    """Actions far beyond the bounds, and within them."""
    if isinstance(space, spaces.Dict):
        return {f"action/{key}": value for key, one in space.items() for value in drawn(one, n).values()}
    if isinstance(space, spaces.Discrete):
        return {"action": torch.arange(n) % 3}
    values = torch.tensor([-900.0, 0.5, 300.0])[torch.arange(n) % 3].reshape(n, *[1] * len(space.shape))
    values = values.expand(n, *space.shape)
    return {"action": values.long() if space.dtype.kind == "u" else values}


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("is_vector", [False, True], ids=["GymEnvInf", "GymVectorEnv"])
def test_clipped_actions_reach_the_environment_and_drawn_ones_the_rollout(name, is_vector):
    space, envs = BOXES[name], [Told(BOXES[name]) for _ in range(3)]
    vector = gymnasium.vector.SyncVectorEnv([functools.partial(lambda env: env, env) for env in envs])
    env = GymVectorEnv(vector, 0, clip_actions=True) if is_vector else GymEnvInf(envs, 0, clip_actions=True)
    env.reset()
    action = drawn(space, 3)
    (after, _), _ = env.step(DictTensor(action))
    for key, tensor in action.items():
        assert torch.equal(after[f"last_{key}"], tensor.to(after[f"last_{key}"].dtype))
    for row, one in enumerate(envs):
        for key, tensor in action.items():
            own = space[key.removeprefix("action/")] if isinstance(space, spaces.Dict) else space
            given = one.actions[0][key.removeprefix("action/")] if isinstance(space, spaces.Dict) else one.actions[0]
            low, high = (own.low, own.high) if isinstance(own, spaces.Box) else (0, 2)
            np.testing.assert_array_equal(given, np.clip(tensor[row].numpy(), low, high))


# --- environments without an observation space ----------------------------------------------------


class Bare(gymnasium.Env):
    """Has no observation space; shows one value, times the step."""

    action_space = spaces.Discrete(2)

    def __init__(self, value):
        self.value, self.n_resets = value, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.drawn, self.t, self.n_resets = self.np_random.random(), 0, self.n_resets + 1
        return self.value, {}

    def step(self, action):
        self.t += 1
        return self.value, self.drawn, self.t == 3, False, {}


VALUES = {
    "float32": np.ones((2, 3), np.float32), "float64": np.full(3, 0.5), "uint8": np.full((4, 4, 1), 200, np.uint8),
    "int64": np.array([-(2**40)]), "uint64": np.array([2**63], np.uint64), "bool": np.array([True, False]),
    "scalar": np.float32(2), "tensor": torch.ones(3), "empty": np.zeros((0,), np.float32),
}  # fmt: skip


@both_classes
@pytest.mark.parametrize("name", VALUES)
def test_a_first_observation_that_is_an_array_stands_for_the_space(cls, name):
    value = VALUES[name]
    wanted = torch.as_tensor(value)
    wanted = wanted.to({torch.float64: torch.float32, torch.bool: torch.int8}.get(wanted.dtype, wanted.dtype))
    envs = [Bare(value), Bare(value)]
    state = np.random.get_state()[1].tolist()
    env = cls(envs, 3)
    assert [each.n_resets for each in envs] == [1, 0] and np.random.get_state()[1].tolist() == state
    observation, _ = env.reset()
    assert env.example().tensors().specs() == observation.specs()
    assert all(torch.equal(row, wanted) for row in observation["frame"]) and observation["frame"].dtype == wanted.dtype
    (after, _), _ = env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
    assert [*after["reward"]] == [np.float32(np.random.default_rng(3 + k).random()) for k in range(2)]


@pytest.mark.parametrize("value", [{"a": np.zeros(2)}, (np.zeros(2),), 3, "text", np.array(["text"]), None], ids=repr)
def test_a_first_observation_that_is_no_array_does_not(value):
    message = "^envs: number 0 has no observation_space, .* and its first observation is not an array of numbers, but"
    with pytest.raises(SpecError, match=message):
        GymEnv([Bare(value)], 0)


def test_a_batcher_runs_environments_without_observation_spaces():
    agent = functools.partial(RandomAgent, Bare.action_space)
    create = lambda seed: GymEnvInf([Bare(VALUES["float32"]) for _ in range(2)], seed)  # noqa: E731
    with RL_Batcher(7, agent, {}, create, {}, 0, 0) as batcher:
        steps = next(iter(batcher)).trajectories
    check_env(create, n_steps=7)
    assert steps["observation/frame"].shape == (2, 7, 2, 3) and steps["_observation/done"].sum() == 4
