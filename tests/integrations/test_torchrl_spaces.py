"""`SharedVectorWrapper` has the keys, specs and values of torchrl's `SerialEnv` of `GymWrapper`, for every space."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Text,
    Tuple,
    flatten,
)  # fmt: skip
from tensordict import is_tensor_collection
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.envs.utils import check_env_specs

from rlstructs import SharedVectorEnv
from rlstructs.errors import SpecError
from rlstructs.integrations.torchrl import SharedVectorWrapper

PLAIN, TWO = Box(-1, 1, (2,)), Discrete(2)
DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]

SPACES = {dtype: Box(0, 1 if dtype == "bool" else 100, (2,), dtype) for dtype in DTYPES} | {
    "scalar": Box(-1, 1, ()), "empty": Box(-1, 1, (0,)), "unbounded": Box(-np.inf, np.inf, (2, 3)),
    "half": Box(0, np.inf, (2,)), "image": Box(0, 255, (4, 5, 3), np.uint8), "grey": Box(0, 255, (4, 5, 1), np.uint8),
    "channels_first": Box(0, 255, (3, 4, 5), np.uint8), "matrix": Box(0, 255, (4, 3), np.uint8),
    "float_image": Box(0, 255, (4, 5, 3), np.float32), "dark_image": Box(0, 254, (4, 5, 3), np.uint8),
    "discrete": Discrete(3), "constant": Discrete(1),
    "binary": MultiBinary(4), "multi": MultiDiscrete([2, 3]), "multi_equal": MultiDiscrete([3, 3]),
    "multi_int32": MultiDiscrete([2, 3], dtype=np.int32), "multi_2d": MultiDiscrete([[2, 3], [2, 3]]),
    "tuple": Tuple([PLAIN, PLAIN]), "tuple_of_one": Tuple([PLAIN]), "tuple_discrete": Tuple([TWO, TWO]),
    "tuple_nested": Tuple([Tuple([PLAIN]), Tuple([PLAIN])]), "text": Text(5), "dict": Dict(a=PLAIN, b=Discrete(3)),
    "dict_of_one": Dict(a=PLAIN), "dict_slash": Dict({"a/b": PLAIN, "c": PLAIN}),
    "dict_nested": Dict(a=Dict(b=PLAIN, c=TWO), d=Box(-1, 1, ())), "dict_text": Dict(t=Text(4), n=Dict(t=Text(4))),
    "dict_tuple": Dict(s=Tuple([PLAIN, PLAIN]), x=PLAIN), "dict_pixels": Dict(pixels=Box(0, 255, (4, 4, 3), np.uint8)),
    "state": Dict(state=Box(-1, 1, (3,))), "state_and_more": Dict(frame=PLAIN, state=Box(-1, 1, (3,))),
    "state_and_observation": Dict(state=Box(-1, 1, (3,)), observation=PLAIN), "state_dict": Dict(state=Dict(x=PLAIN)),
}  # fmt: skip
if "dtype" in inspect.signature(Discrete).parameters:  # not in gymnasium 1.1
    SPACES["discrete_int32"] = Discrete(3, dtype=np.int32)
# With a start, torchrl returns what the environment returned and draws actions from 0, if they are not one-hot.
STARTS = {"start": Discrete(3, start=2), "multi_start": MultiDiscrete([2, 3], start=[1, 1])}
ONLY_OBSERVED = {"dict_empty": Dict(), "dict_action": Dict(action=PLAIN, x=PLAIN)}
# Actions with which SerialEnv fails, or steps environments with what is no action: arrays of one number, a single
# entry of a Dict without its key, "state" under another name.
ONLY_HERE = {"binary_of_one": MultiBinary(1), "multi_of_one": MultiDiscrete([3]), "dict_of_one": Dict(a=PLAIN)}
ONLY_HERE |= {name: SPACES[name] for name in ("dict_pixels", "state", "state_dict", "state_and_more")}
IMPOSSIBLE = {
    "uint16": Box(0, 9, (2,), np.uint16), "uint32": Box(0, 9, (2,), np.uint32), "uint64": Box(0, 9, (2,), np.uint64),
    "binary_2d": MultiBinary((2, 3)), "multi_2d_unequal": MultiDiscrete([[2, 3], [4, 5]]),
    "tuple_unequal": Tuple([TWO, Discrete(3)]), "tuple_mixed": Tuple([PLAIN, TWO]), "tuple_empty": Tuple([]),
    "tuple_shapes": Tuple([PLAIN, Box(-1, 1, (3,))]), "graph": Graph(PLAIN, TWO), "oneof": OneOf([TWO, PLAIN]),
    "sequence": Sequence(PLAIN), "dict_graph": Dict(g=Graph(PLAIN, TWO), x=PLAIN),
}  # fmt: skip
IMPOSSIBLE_OBSERVED = {
    "state_nested": Dict(a=Dict(state=PLAIN)), "tuple_dict": Tuple([Dict(a=PLAIN)] * 2), "reward": Dict(reward=PLAIN),
    "done": Dict(done=PLAIN, x=PLAIN),
}  # fmt: skip

# With numbers that are one-hot or not.
CASES = [(name, False) for name in SPACES] + [
    (name, True) for name in SPACES if name.startswith(("discrete", "multi", "tuple_discrete", "dict", "constant"))
]


class Sampled(gymnasium.Env):
    """Observations are samples, rewards sums of actions; episodes end in turn by a termination and a truncation."""

    def __init__(self, observed, acted, k):
        self.observation_space, self.action_space, self.k, self.n_episodes = observed, acted, k, 0
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_episodes, self.t = self.n_episodes + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        ends = self.t == 2 + self.k
        return self.observe(), self.sum_up(action), ends and self.k == 0, ends and self.k == 1, {}

    def observe(self):
        self.observation_space.seed(100 * self.n_episodes + 10 * self.k + self.t)
        return self.observation_space.sample()

    def sum_up(self, action):
        if isinstance(self.action_space, Text):
            return float(len(action))
        if isinstance(self.action_space, Dict) and any(isinstance(s, (Text, Dict)) for s in self.action_space.values()):
            return float(sorted(action) == sorted(self.action_space))
        if isinstance(self.action_space, Dict):
            action = flatten(self.action_space, action)
        return float(np.sum(action, dtype=np.float64))


def make_both(observed, acted, **settings):
    makers = [partial(Sampled, observed, acted, k) for k in range(2)]
    yield SerialEnv(2, [lambda make=make: GymWrapper(make(), **settings) for make in makers])
    yield SharedVectorWrapper(SharedVectorEnv(makers, n_workers=0), **settings)


def compare(found, wanted):
    """The same keys, types, dtypes, shapes and values."""
    assert set(found.keys(True, True)) == set(wanted.keys(True, True)) and found.batch_size == wanted.batch_size
    for key in wanted.keys(True, True):
        a, b = found.get(key), wanted.get(key)
        if is_tensor_collection(b):
            assert a.tolist() == b.tolist() and a.batch_size == b.batch_size, key
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b), key


def is_same(observed, acted, **settings):
    envs = list(make_both(observed, acted, **settings))
    theirs, ours = envs
    for name in ("observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec"):
        assert getattr(ours, name) == getattr(theirs, name), name
    with contextlib.ExitStack() as stack:
        for env in envs:
            stack.callback(env.close)
        first = [env.reset() for env in envs]
        compare(first[1], first[0])
        batches = []
        for env in envs:
            torch.manual_seed(0)
            batches.append(env.rollout(9, break_when_any_done=False))
    compare(batches[1], batches[0])
    return batches[1]["next", "done"].sum() > 3


@pytest.mark.parametrize(("name", "is_categorical"), [*CASES, *dict.fromkeys(ONLY_OBSERVED, False).items()])
def test_observations_are_those_of_torchrls_own_environments(name, is_categorical):
    space = (SPACES | ONLY_OBSERVED)[name]
    assert is_same(space, TWO, categorical_action_encoding=is_categorical)


@pytest.mark.parametrize(("name", "is_categorical"), [case for case in CASES if case[0] not in ONLY_HERE])
def test_actions_are_those_of_torchrls_own_environments(name, is_categorical):
    assert is_same(Dict(seen=PLAIN), SPACES[name], categorical_action_encoding=is_categorical)


@pytest.mark.parametrize("name", STARTS)
def test_numbers_that_do_not_start_at_0_are_as_in_torchrl_or_refused(name):
    assert is_same(STARTS[name], STARTS[name], categorical_action_encoding=True)
    envs = SharedVectorEnv([partial(Sampled, STARTS[name], TWO, k) for k in range(2)], n_workers=0)
    with contextlib.closing(envs), pytest.raises(SpecError, match="start at 0.*pass categorical_action_encoding=True"):
        SharedVectorWrapper(envs)


@pytest.mark.parametrize("name", ONLY_HERE)
def test_actions_that_torchrl_passes_without_their_shape_are_members_of_the_space(name):
    class Checked(Sampled):
        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(action)

    envs = SharedVectorEnv([partial(Checked, Dict(seen=PLAIN), ONLY_HERE[name], k) for k in range(2)], n_workers=0)
    with contextlib.closing(SharedVectorWrapper(envs)) as env:
        check_env_specs(env)


def test_an_action_mask_flattens_a_multi_discrete_space():
    seen = Dict(action_mask=Box(0, 1, (2, 3), np.int8), x=PLAIN)
    theirs, ours = make_both(seen, MultiDiscrete([2, 3]), categorical_action_encoding=True)
    with contextlib.closing(ours) as env:
        assert env.full_action_spec == theirs.full_action_spec and env.full_action_spec["action"].n == 6
        actions = iter(torch.tensor([[5, 1], [3, 0]]))
        batch = env.rollout(2, lambda action_mask, x: next(actions))
    assert batch["next", "reward"][..., 0].tolist() == [[3, 1], [1, 0]]  # (1, 2), (0, 1); (1, 0), (0, 0)


def test_sequences_of_equal_length_are_stacked_and_others_refused():
    class Equal(Sampled):
        def observe(self):
            return np.full((self.k if self.t else 2, 2), self.t, np.float32)

    envs = SharedVectorEnv([partial(Equal, Sequence(PLAIN, stack=True), TWO, k) for k in range(2)], n_workers=0)
    with contextlib.closing(SharedVectorWrapper(envs)) as env:
        data = env.reset()
        assert data["observation"].shape == (2, 2, 2)
        with pytest.raises(SpecError, match=r"cannot stack observations of Sequence.*equal size"):
            env.step(env.rand_action(data))


@pytest.mark.parametrize("name", IMPOSSIBLE | IMPOSSIBLE_OBSERVED)
def test_what_torchrl_cannot_represent_is_named(name):
    space = (IMPOSSIBLE | IMPOSSIBLE_OBSERVED)[name]
    pairs = [(space, TWO), (PLAIN, space)] if name in IMPOSSIBLE else [(space, TWO)]
    for observed, acted in pairs:
        with pytest.raises(Exception):  # noqa: B017 - so that nothing is refused that it can do
            next(make_both(observed, acted)).rollout(9, break_when_any_done=False)
        envs = SharedVectorEnv([partial(Sampled, observed, acted, k) for k in range(2)], n_workers=0)
        with contextlib.closing(envs), pytest.raises(SpecError, match="torchrl cannot represent batches of the"):
            SharedVectorWrapper(envs)
