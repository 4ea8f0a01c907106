"""What environments observe, in every form and of every space, through everything that steps environments."""

from __future__ import annotations

import array
import collections
import enum
import functools
import inspect
import itertools
import threading
import types
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlstructs import (
    DictTensor,
    GymEnv,
    GymEnvInf,
    GymVectorEnv,
    RandomAgent,
    RL_Batcher,
    SharedVectorEnv,
    SpecError,
)
from rlstructs.testing import check_env

Box = functools.partial(spaces.Box, -9, 9)
VECTOR, SCALAR, MATRIX = Box((2,)), Box(()), Box((2, 2))
PAIR = spaces.Dict(x=Box((2,)), y=spaces.Discrete(9))
TWO = spaces.Tuple([Box((2,)), spaces.Discrete(9)])


class Given(gymnasium.Env):
    """Observes the number of its step, as `made` makes it; episodes of three steps."""

    def __init__(self, space, made, action_space=None):
        self.observation_space, self.made = space, made
        self.action_space = spaces.Discrete(2) if action_space is None else action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.made(0), {}

    def step(self, action):
        with warnings.catch_warnings():  # gymnasium warns of numbers that are no arrays, which its batches are made of
            warnings.simplefilter("ignore")
            assert self.action_space.contains(action), action
        self.steps += 1
        return self.made(self.steps), 1.0, self.steps == 3, False, {}


class Own(collections.abc.Mapping):
    """A mapping that cannot be copied."""

    def __init__(self, **entries):
        self.entries, self.lock = entries, threading.Lock()

    def __getitem__(self, key):
        return self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class Kind(np.ndarray):
    """An array of another class."""


class Array:
    """What numpy can make an array of."""

    def __init__(self, number):
        self.number = number

    def __array__(self, dtype=None, copy=None):
        return two(self.number)


def two(number, dtype=np.float32):
    return np.full(2, number, dtype)


def read_only(number):
    made = two(number)
    made.flags.writeable = False
    return made


def pair(number):
    return {"x": two(number), "y": number}


def derived(number):
    """A tensor that has been computed with gradients."""
    return torch.full((2,), float(number), requires_grad=True) * 1


Step = enum.IntEnum("Step", "a b c d", start=0)

# Each holds the number of the step in all its places.
FORMS = {
    "beside a lock": (PAIR, lambda number: {"lock": threading.Lock(), **pair(number)}),
    "a proxy": (PAIR, lambda number: types.MappingProxyType(pair(number))),
    "a proxy beside a generator": (PAIR, lambda n: types.MappingProxyType({**pair(n), "more": (k for k in ())})),
    "a mapping with a lock": (PAIR, lambda number: Own(**pair(number))),
    "proxies in a proxy": (
        spaces.Dict(a=PAIR),
        lambda n: types.MappingProxyType({"a": types.MappingProxyType(pair(n)), "lock": threading.Lock()}),
    ),
    "an ordered dict": (PAIR, lambda number: collections.OrderedDict(y=number, x=two(number))),
    "fields of an array": (PAIR, lambda n: np.array((two(n), n), [("x", "f4", 2), ("y", "i8")])[()]),
    "a tuple": (TWO, lambda number: (two(number), np.int8(number))),
    "a list for a tuple": (TWO, lambda number: [two(number), number]),
    "a tuple beside a lock": (TWO, lambda number: (two(number), number, threading.Lock())),
    "a matrix": (MATRIX, lambda number: np.full((2, 2), number).view(np.matrix)),
    "a masked array": (VECTOR, lambda number: np.ma.masked_array(two(number), [False, False])),
    "a subclass": (VECTOR, lambda number: two(number).view(Kind)),
    "a memoryview": (VECTOR, lambda number: memoryview(two(number))),
    "memoryviews": (PAIR, lambda number: {"x": memoryview(two(number)), "y": number}),
    "an array of Python": (VECTOR, lambda number: array.array("f", [number, number])),
    "what numpy makes an array of": (VECTOR, Array),
    "a tensor": (VECTOR, lambda number: torch.full((2,), number)),
    "a tensor with gradients": (VECTOR, derived),
    "tensors with gradients": (PAIR, lambda number: {"x": derived(number), "y": torch.tensor(number)}),
    "a tensor of bfloat16": (VECTOR, lambda number: torch.full((2,), number, dtype=torch.bfloat16)),
    "a scalar tensor": (SCALAR, lambda number: torch.tensor(float(number), requires_grad=True)),
    "a list": (VECTOR, lambda number: [number, float(number)]),
    "a list of arrays": (VECTOR, lambda number: [np.array(number), np.float16(number)]),
    "a deque": (VECTOR, lambda number: collections.deque([number, number])),
    "a number": (SCALAR, float),
    "a number of numpy": (SCALAR, np.float64),
    "an array without axes": (SCALAR, np.array),
    "an array of one": (SCALAR, lambda number: np.array([number])),
    "a member of an enumeration": (spaces.Discrete(9), Step),
    "a small int": (spaces.Discrete(9), lambda number: np.array(number, np.int8)),
    "backwards": (VECTOR, lambda number: np.full(4, number, np.float32)[::-2]),
    "strided": (MATRIX, lambda number: np.full((4, 6), number, np.float32)[::2, ::-3]),
    "Fortran's order": (MATRIX, lambda number: np.asfortranarray(np.full((2, 2), number, np.float32))),
    "broadcast": (MATRIX, lambda number: np.broadcast_to(np.float32(number), (2, 2))),
    "read-only": (VECTOR, read_only),
    "another byte order": (VECTOR, lambda number: two(number, ">f4")),
    "another byte order for ints": (Box((2,), np.int16), lambda number: two(number, ">i2")),
    "float16": (VECTOR, lambda number: two(number, np.float16)),
    "long floats": (VECTOR, lambda number: two(number, np.longdouble)),
}
every_form = pytest.mark.parametrize("form", FORMS)


def of_shared(mode, make, seed):
    return GymVectorEnv(SharedVectorEnv([make] * 2, 0, autoreset_mode=mode), seed)


SURFACES = {
    "GymEnv": lambda make, seed: GymEnv([make(), make()], seed),
    "GymEnvInf": lambda make, seed: GymEnvInf([make(), make()], seed),
    **{f"SharedVectorEnv, {mode.value}": functools.partial(of_shared, mode) for mode in AutoresetMode},
}
every_surface = pytest.mark.parametrize("surface", SURFACES)


def seen(env, n_steps):
    """What the agent sees at each step, and what followed, as columns of numbers, beside flags."""
    agent, found = RandomAgent(env.action_space), []
    torch.manual_seed(1)
    observation, _ = env.reset(DictTensor())
    for _ in range(n_steps):
        if not observation.n_elems():
            break
        action, _ = agent(DictTensor(), observation, DictTensor())
        (after, _), (following, _) = env.step(action)
        found.append((observation, after))
        observation = following
    return found


def numbers(observation):
    keys = [key for key in observation if key.split("/")[0] in ("frame", "x", "y", "a", "0", "1")]
    values = {number for key in keys for number in observation[key].double().flatten().tolist()}
    assert keys and len(values) == 1
    return values.pop()


@every_surface
@every_form
def test_an_observation_may_have_any_form_that_holds_the_numbers_of_its_space(form, surface):
    env = SURFACES[surface](lambda: Given(*FORMS[form]), 0)
    steps = [(numbers(before), numbers(after)) for before, after in seen(env, 3)]
    assert steps == [(0, 1), (1, 2), (2, 3)]
    if surface != "GymEnv":  # and the first of the next episode
        more = [numbers(before) for before, _ in seen(env, 7)]
        assert more in ([0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1, 2])  # NEXT_STEP spends a step on the reset
    env.close()


def test_all_forms_at_once_come_from_workers_as_from_this_process(start_method):
    space = spaces.Dict({form: FORMS[form][0] for form in FORMS})

    def make():
        return Given(space, lambda number: {form: made(number) for form, (_, made) in FORMS.items()})

    found = []
    for n_workers in (0, 2):
        with SharedVectorEnv([make] * 2, n_workers, autoreset_mode="SameStep", start_method=start_method) as envs:
            found.append(seen(GymVectorEnv(envs, 0), 5))
    assert found[0] == found[1]
    after = found[0][2][1]
    assert {value for key in after if "/" in key or key in FORMS for value in after[key].flatten().tolist()} == {3}


@pytest.mark.parametrize("n_workers", [0, 2])
def test_final_observations_hold_what_the_space_has_and_nothing_else(n_workers):
    def make():
        return Given(PAIR, lambda number: {"lock": threading.Lock(), "y": number, "x": two(number)})

    with SharedVectorEnv([make] * 2, n_workers, autoreset_mode="SameStep") as env:
        env.reset()
        for _ in range(3):
            infos = env.step(np.zeros(2, np.int64))[4]
    for final in infos["final_obs"]:
        assert list(final) == ["y", "x"] and final["y"] == 3 and final["x"].tolist() == [3, 3]


@pytest.mark.parametrize("surface", ["GymEnv", "GymEnvInf", "SharedVectorEnv, SameStep"])
@pytest.mark.parametrize(
    ("common", "made"),
    [
        (np.zeros(2, np.float32), lambda common: common),
        (np.zeros(2, np.float32), memoryview),
        (np.zeros(2, np.float32), torch.from_numpy),
        ([0.0, 0.0], lambda common: common),
        (collections.deque([0.0, 0.0], 2), lambda common: common),
    ],
    ids=["an array", "a memoryview", "a tensor", "a list", "a deque"],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_environments_that_write_into_the_same_memory_are_told_apart(is_nested, common, made, surface):
    numbered = itertools.count()

    class Writing(gymnasium.Env):
        action_space = spaces.Discrete(2)
        observation_space = spaces.Dict(x=VECTOR) if is_nested else VECTOR

        def __init__(self):
            self.number = next(numbered)

        def observed(self, steps):
            self.steps = steps
            for at in range(2):
                common[at] = float(self.number + 2 * steps)
            return types.MappingProxyType({"x": made(common)}) if is_nested else made(common)

        def reset(self, *, seed=None, options=None):
            return self.observed(0), {}

        def step(self, action):
            return self.observed(self.steps + 1), 0.0, False, False, {}

    env, key = SURFACES[surface](Writing, 0), "x" if is_nested else "frame"
    found = [(before[key][:, 0].tolist(), after[key][:, 0].tolist()) for before, after in seen(env, 3)]
    assert found == [([0, 1], [2, 3]), ([2, 3], [4, 5]), ([4, 5], [6, 7])]


WRONG = {
    "a part is missing": (PAIR, lambda number: {"x": two(number)}, "'y' cannot be read: KeyError"),
    "None": (PAIR, lambda number: None, "'x' cannot be read: TypeError"),
    "complex": (PAIR, lambda number: {"x": two(number, complex), "y": 1}, "'x'"),
    "text": (PAIR, lambda number: {"x": ["a", "b"], "y": 1}, "'x'"),
    "ragged": (PAIR, lambda number: {"x": [[1], [2, 3]], "y": 1}, "'x' cannot be read: ValueError"),
    "an object": (PAIR, lambda number: {"x": object(), "y": 1}, "'x' has shape"),
    "a sparse tensor": (PAIR, lambda number: {"x": torch.zeros(2).to_sparse(), "y": 1}, "'x' cannot be read: "),
}


@every_surface
@pytest.mark.parametrize("wrong", WRONG)
def test_an_observation_that_holds_something_else_is_refused_by_its_key(wrong, surface):
    space, made, message = WRONG[wrong]
    with pytest.raises((SpecError, TypeError), match=f"observation {message}") as caught:
        seen(SURFACES[surface](lambda: Given(space, made), 0), 2)
    assert any("environment" in text for text in [str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_parts_that_are_no_arrays_are_refused_by_name_if_they_are_missing():
    space = spaces.Dict(word=spaces.Text(3), x=Box((2,)))
    env = SharedVectorEnv([lambda: Given(space, lambda number: {"x": two(number)})], 0)
    with env, pytest.raises(SpecError, match=r"^observation \['word'\] cannot be read: KeyError\('word'\)"):
        env.reset()


# --- spaces --------------------------------------------------------------------------------------

EDGES = {
    **{f"Box of {code}": Box((2,), np.dtype(code)) for code in (">f2", ">f4", ">f8", ">i2", ">i8", "f2", "i1")},
    **{f"Box of {code}": spaces.Box(0, 9, (2,), np.dtype(code)) for code in ("u1", "u2", "u4", "u8", ">u2", ">u8")},
    "Box of bools": spaces.Box(0, 1, (2,), np.bool_),
    "Box ()": Box((), np.dtype(">f4")),
    "Box (0,)": Box((0,)),
    "Box (3, 0)": Box((3, 0)),
    "Box (0, 3)": Box((0, 3)),
    "MultiDiscrete of >i4": spaces.MultiDiscrete([3, 4], dtype=np.dtype(">i4"), start=[-1, 5]),
    "MultiDiscrete, 2 axes": spaces.MultiDiscrete([[3, 4], [2, 2]], start=[[1, 2], [-3, 4]]),
    "MultiBinary, 2 axes": spaces.MultiBinary((2, 3)),
    "empty ones within": spaces.Dict(a=spaces.Dict(), b=spaces.Dict(c=Box((0,)), d=spaces.Tuple([Box(())]))),
}
if "dtype" in inspect.signature(spaces.Discrete).parameters:  # not in gymnasium 1.1
    EDGES |= {
        "Discrete of int8": spaces.Discrete(100, start=20, dtype=np.int8),
        "Discrete of uint8": spaces.Discrete(9, dtype=np.uint8),
        "Discrete of >i4": spaces.Discrete(9, start=-4, dtype=">i4"),
    }


@every_surface
@pytest.mark.parametrize("space", EDGES.values(), ids=EDGES.keys())
def test_observations_and_actions_of_every_dtype_and_shape_are_those_of_the_space(space, surface):
    space.seed(2)
    samples = [space.sample() for _ in range(4)]
    env = SURFACES[surface](lambda: Given(space, samples.__getitem__, space), 0)
    found = seen(env, 3)
    assert len(found) == 3
    for sample, (before, after) in zip(samples, found, strict=False):
        for key in [key for key in before if key.split("/")[0] in ("frame", "b")]:
            part = sample if key == "frame" else sample["b"]["c"] if key == "b/c" else sample["b"]["d"][0]
            got = before[key][0].numpy()
            assert got.dtype.isnative and np.array_equal(got.reshape(np.shape(part)), np.asarray(part, got.dtype))
            suffix = "" if key == "frame" else f"/{key}"
            assert after[f"last_action{suffix}"][0].numel() == np.size(part)
    env.close()


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long floats are float64")
@pytest.mark.parametrize("keep_float64", [False, True])
def test_floats_that_are_longer_than_64_bits_are_rounded(keep_float64):
    space = Box((2,), np.longdouble)
    made = Given(space, lambda number: two(number + 0.1, np.longdouble), space)
    env = GymEnvInf([made], 0, keep_float64=keep_float64)
    (_, after), *_ = seen(env, 1)
    dtype = torch.float64 if keep_float64 else torch.float32
    assert (after["frame"].dtype, after["last_action"].dtype) == (dtype, dtype)
    assert after["frame"].tolist() == [[torch.tensor(1.1, dtype=dtype).item()] * 2]


# --- keys ----------------------------------------------------------------------------------------

KEYS = {
    "an empty one": {"": Box((2,)), "frame": Box((3,))},
    "an empty one alone": {"": Box((2,))},
    "one within an empty one": {"": spaces.Dict(a=Box((2,))), "a": Box((3,))},
    "an empty one within": {"a": spaces.Dict({"": Box((2,))}), "b": Box((3,))},
    "a slash": {"/": Box((2,)), "x": Box((3,))},
    "a part and a whole": {"a": Box((2,)), "a/b": Box((3,))},
    "ints": {1: Box((2,)), 2: Box((3,))},
    "None": {None: Box((2,)), "x": Box(())},
    "words of a batch": {"observation": Box((2,)), "action": Box((1,)), "lengths": Box(()), "reset": Box(())},
}


def leaves_of(space, sample, path=()):
    """Pairs of key and array."""
    if isinstance(space, spaces.Dict):
        parts = (leaves_of(inner, sample[part], (*path, str(part))) for part, inner in space.items())
        return [pair for pairs in parts for pair in pairs]
    return [("/".join(path), sample)]


@every_surface
@pytest.mark.parametrize("entries", KEYS.values(), ids=KEYS.keys())
def test_no_entry_is_lost_whatever_it_is_called(entries, surface):
    space = spaces.Dict(entries)
    space.seed(0)
    sample = space.sample()
    env = SURFACES[surface](lambda: Given(space, lambda number: sample, space), 0)
    (before, after), *_ = seen(env, 1)
    wanted = dict(leaves_of(space, sample))
    flags = {"reward", "done", "terminated", "truncated", "initial_state"}
    assert set(before.keys()) - flags == {*wanted, *(f"last_action/{key}" for key in wanted)}
    for key, value in wanted.items():
        assert before[key].tolist() == after[key].tolist() == [value.tolist()] * 2
        assert after[f"last_action/{key}"].shape == after[key].shape
    env.close()


def test_an_entry_without_a_name_reaches_the_trajectories():
    space = spaces.Dict(KEYS["an empty one"])
    sample = space.sample()

    def create_env(seed):
        return GymEnvInf([Given(space, lambda number: sample, space)], seed)

    with RL_Batcher(4, RandomAgent, {"action_space": space}, create_env, {}, 0, 1) as batcher:
        batcher.reset()
        batcher.execute()
        steps = batcher.get()[0].trajectories
    assert steps["observation/"][0, 0].tolist() == sample[""].tolist()
    assert steps["_observation/frame"][0, 0].tolist() == sample["frame"].tolist()
    assert steps["action/action/"].shape == (1, 4, 2) and steps["action/action/frame"].shape == (1, 4, 3)
    check_env(create_env, {}, n_steps=12, uses_seed=False)


@every_surface
@pytest.mark.parametrize(
    ("entries", "key"),
    [
        ({"a/b": Box((2,)), "a": spaces.Dict(b=Box((3,)))}, "a/b"),
        ({1: Box((2,)), "1": Box((3,))}, "1"),
        ({"": spaces.Dict(a=Box((2,))), "/a": Box((3,))}, "/a"),
    ],
    ids=str,
)
def test_entries_that_would_become_one_are_refused(entries, key, surface):
    space = spaces.Dict(entries)
    for given, what in (((space, None), "observation"), ((VECTOR, space), "action")):
        with pytest.raises(SpecError, match=rf"^{what}: two entries of space Dict.* are called '{key}'$"):
            SURFACES[surface](functools.partial(Given, given[0], two, given[1]), 0)


@every_surface
@pytest.mark.parametrize("key", ["reward", "raw_reward", "terminated", "truncated", "done", "initial_state"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_entries_that_are_called_as_what_every_observation_has_are_refused(key, is_nested, surface):
    space = spaces.Dict({key: spaces.Dict(x=VECTOR) if is_nested else VECTOR})
    with pytest.raises(SpecError, match=f"^observation: an entry may not be called '{key}"):
        SURFACES[surface](lambda: Given(space, lambda number: None), 0)


def test_the_name_of_a_record_is_refused():
    with pytest.raises(SpecError, match=r"^observation: a key may not be called '\\x00record'"):
        GymEnv([Given(spaces.Dict({"\0record": VECTOR}), lambda number: {"\0record": two(number)})], 0)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(VECTOR), spaces.Graph(VECTOR, None)], ids=str)
def test_spaces_that_are_not_supported_are_refused_by_their_key(space):
    within = spaces.Dict(a=spaces.Tuple([VECTOR, space]))
    with pytest.raises(SpecError, match=r"^observation: space .* is not supported; .* \(it is entry 'a/1'\)$"):
        GymEnv([Given(within, lambda number: None)], 0)


def test_complex_actions_are_refused():
    env = GymEnvInf([Given(VECTOR, two, VECTOR)], 0)
    env.reset(DictTensor())
    with pytest.raises(SpecError, match=r"^agent: 'action' is \(1, 2\) complex64, expected a floating point dtype"):
        env.step(DictTensor({"action": torch.zeros(1, 2, dtype=torch.complex64)}))
