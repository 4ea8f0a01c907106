"""Spaces as flat columns: what is taken, what is refused, what an environment's `step` gets."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from rlstructs import DictTensor, MissingKeyError, SpecError
from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.spaces import Column, example_value, list_leaves

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
FLOATS = ["float16", "float32", "float64"]


def whole_range(dtype):
    return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, (2,), dtype)


# One of every kind, for observations and actions alike.
SPACES = {
    **{f"box-{name}": whole_range(np.dtype(name)) for name in INTEGERS},
    **{f"box-{name}": spaces.Box(-2, 3, (2,), np.dtype(name)) for name in FLOATS},
    "box-bool": spaces.Box(0, 1, (2,), np.bool_),
    "box-scalar": spaces.Box(-1, 1, (), np.float32),
    "box-scalar-uint8": spaces.Box(0, 9, (), np.uint8),
    "box-no-rows": spaces.Box(-1, 1, (0,), np.float32),
    "box-2x3": spaces.Box(-1, 1, (2, 3), np.float32),
    "box-image": spaces.Box(0, 255, (3, 4, 3), np.uint8),
    "box-off-zero": spaces.Box(3, 5, (2,), np.int32),
    "box-bounds-differ": spaces.Box(
        np.array([0.1, -5, -np.inf, 2]), np.array([0.7, np.inf, 4, np.inf]), dtype=np.float64
    ),
    "box-unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "box-far-off": spaces.Box(2**62 + 1, 2**62 + 3, (2,), np.int64),
    "discrete": spaces.Discrete(5),
    "discrete-start": spaces.Discrete(3, start=-7),
    "multidiscrete": spaces.MultiDiscrete([2, 5]),
    "multidiscrete-int32": spaces.MultiDiscrete([2, 5], dtype=np.int32),
    "multidiscrete-2d-start": spaces.MultiDiscrete([[2, 5, 1], [3, 3, 9]], start=[[0, -4, 7], [0, 0, 1]]),
    "multibinary": spaces.MultiBinary(4),
    "multibinary-2d": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict(pos=spaces.Box(-1, 1, (1,), np.float32), id=spaces.Discrete(3)),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),
    "nested": spaces.Dict(
        a=spaces.Tuple([spaces.Discrete(3, start=2), spaces.Dict(b=spaces.Box(0, 255, (2, 2), np.uint8))]),
        c=spaces.Tuple([spaces.Tuple([spaces.MultiDiscrete([4, 2])])]),
    ),
}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())

REFUSED = {
    "text": spaces.Text(3),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), None),
    "sequence": spaces.Sequence(spaces.Discrete(2)),
    "one-of": spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
}


def flat(space, sample, key=""):
    """The leaves of a sample: pairs of key and array."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        for part, inner in parts.items():
            yield from flat(inner, sample[part], f"{key}/{part}" if key else str(part))
    else:
        yield key, np.asarray(sample)


def stacked(space, samples, prefix=""):
    """Samples as columns: name -> (B, ...); `prefix` alone where the space has one leaf without name."""
    rows = [dict(flat(space, sample)) for sample in samples]
    names = {key: f"{prefix}/{key}".strip("/") for key in rows[0]}
    return {name: np.stack([row[key] for row in rows]) for key, name in names.items()}


# --- leaves --------------------------------------------------------------------------------------


def test_nested_spaces_give_keys_joined_with_slashes():
    found = [(leaf.key, leaf.shape, leaf.dtype.name) for leaf in list_leaves(SPACES["nested"], "observation")]
    assert found == [("a/0", (), "int64"), ("a/1/b", (2, 2), "uint8"), ("c/0/0", (2,), "int64")]


@every_space
def test_dtypes_are_those_of_the_space_but_for_float64(space):
    for keep_float64 in (False, True):
        for leaf in list_leaves(space, "observation", keep_float64):
            shrinks = leaf.space.dtype == np.float64 and not keep_float64
            assert (leaf.dtype, leaf.shape) == (np.float32 if shrinks else leaf.space.dtype, leaf.space.shape)


@pytest.mark.parametrize("within", [lambda s: s, lambda s: spaces.Dict(x=spaces.Discrete(2), y=spaces.Tuple([s]))])
@pytest.mark.parametrize("space", REFUSED.values(), ids=REFUSED.keys())
def test_other_spaces_are_refused_by_name(space, within):
    message = rf"^action: space {re.escape(str(space))} is not supported; expected Box, Discrete, "
    with pytest.raises(SpecError, match=message):
        list_leaves(within(space), "action")


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple([]), spaces.Dict(a=spaces.Dict())], ids=str)
def test_a_space_without_entries_is_refused(space):
    with pytest.raises(SpecError, match=rf"^observation: space {re.escape(str(space))} has no entries"):
        list_leaves(space, "observation")


def test_entries_that_would_share_a_key_are_refused():
    space = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict(b=spaces.Discrete(3))})
    with pytest.raises(SpecError, match=r"observation: two entries .* are called 'a/b'"):
        list_leaves(space, "observation")


@every_space
def test_the_example_of_a_leaf_lies_in_its_space(space):
    for leaf in list_leaves(space, "observation", keep_float64=True):
        value = example_value(leaf)
        assert leaf.space.contains(int(value) if isinstance(leaf.space, spaces.Discrete) else value)


# --- columns -------------------------------------------------------------------------------------


@every_space
def test_columns_hold_observations_as_they_are(space):
    space.seed(3)
    samples = [space.sample() for _ in range(3)]
    wanted = stacked(space, samples)
    for leaf in list_leaves(space, "observation", keep_float64=True):
        column = Column(leaf, 5)
        filled = column.fill(samples)
        expected = wanted[leaf.key].reshape(3, *leaf.row_shape)
        assert filled.dtype == expected.dtype and np.array_equal(filled, expected)
        assert np.array_equal(column.fill(samples[1:]), expected[1:])


def column_of(space, n_envs=2):
    return Column(list_leaves(space, "observation")[0], n_envs)


def test_scalars_of_discrete_spaces_have_a_feature_axis():
    column = column_of(spaces.Discrete(9), 4)
    values = [3, np.int64(4), np.array(5, np.int32), np.array([6])]
    assert column.fill(values).tolist() == [[3], [4], [5], [6]] and column.array.dtype == np.int64


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), [np.array([1, 255]), np.array([0, 7], np.int64)]),
        (spaces.Box(0, 255, (2,), np.uint8), [[1, 255], (0, 7)]),
        (spaces.Box(0, 255, (2,), np.uint8), [np.array([1.0, 255.0]), np.array([0.0, 7.0])]),
        (spaces.Box(-9, 9, (2,), np.int8), [np.array([1, -9], np.int16), np.array([True, False])]),
        (spaces.MultiBinary(2), [np.array([True, False]), np.array([0, 1])]),
        (spaces.Box(-9, 9, (2,), np.float32), [np.array([1, -9]), [0.5, 2]]),
        (spaces.Box(0, 1, (), np.uint8), [np.array([1]), 0]),
        (spaces.Box(0, 1, (1,), np.float32), [0.5, np.float32(1)]),
        (spaces.Box(0, 1, (1, 1), np.float32), [np.array([0.5]), 1]),
    ],
    ids=lambda value: str(value) if isinstance(value, spaces.Space) else None,
)
def test_other_dtypes_are_taken_where_no_value_changes(space, values):
    column = column_of(space)
    shape = column.leaf.row_shape
    assert column.fill(values).tolist() == [np.asarray(value).reshape(shape).tolist() for value in values]
    assert column.array.dtype == space.dtype


def test_float64_is_rounded_whatever_comes_beside_it():
    column = column_of(spaces.Box(-1, 1, (), np.float32), 3)
    filled = column.fill([0.1, np.array([0.2]), np.float64(0.3)])
    assert np.array_equal(filled, np.array([0.1, 0.2, 0.3], np.float32))


UINT8 = spaces.Box(0, 255, (2,), np.uint8)
POSE = spaces.Dict(pose=spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float32)))


@pytest.mark.parametrize(
    ("space", "wrong", "message"),
    [
        (UINT8, np.zeros(3, np.uint8), r"has shape \(3,\), the space says \(2,\)"),
        (UINT8, np.zeros((1, 2), np.uint8), r"has shape \(1, 2\), the space says \(2,\)"),
        (UINT8, np.uint8(3), r"has shape \(\), the space says \(2,\)"),
        (UINT8, np.array([1, 256]), "has dtype int64, and values that the space's uint8 cannot hold"),
        (UINT8, np.array([1, 300], np.uint16), "has dtype uint16, and values"),
        (UINT8, np.array([-1, 1], np.int8), "has dtype int8, and values"),
        (UINT8, np.array([0.5, 1]), "has dtype float64, and values"),
        (UINT8, np.array([np.nan, 1]), "has dtype float64, and values"),
        (UINT8, np.array(["1", "2"]), "has dtype <U1, and values"),
        (UINT8, None, r"has shape \(\)"),
        (UINT8, [[1], [2, 3]], "cannot be read: ValueError"),
        (spaces.Discrete(5), 1.5, "has dtype float64, and values that the space's int64 cannot hold"),
        (spaces.Discrete(5), np.array([1, 2]), r"has shape \(2,\), the space says \(\)"),
        (POSE, {"pose": {"x": np.zeros(1, np.float32)}}, r"'pose/x' has shape \(1,\), the space says \(2,\)"),
        (POSE, {"pose": {"y": np.zeros(2, np.float32)}}, r"'pose/x' cannot be read: KeyError\('x'\)"),
        (POSE, np.zeros(2, np.float32), "'pose/x' cannot be read: IndexError"),
    ],
)
def test_a_wrong_observation_is_refused_by_environment_and_key(space, wrong, message):
    with pytest.raises(SpecError, match=rf"^environment 4: observation {message}"):
        column_of(space).fill([space.sample(), wrong], environments=[1, 4])


def test_sizes_that_only_add_up_are_refused():
    with pytest.raises(SpecError, match=r"^environment 0: observation has shape \(3,\)"):
        column_of(UINT8).fill([np.zeros(3, np.uint8), np.zeros(1, np.uint8)])


# --- actions -------------------------------------------------------------------------------------


@every_space
def test_environments_get_actions_of_the_space(space):
    space.seed(1)
    samples = [space.sample() for _ in range(3)]
    tensors = {key: torch.from_numpy(rows) for key, rows in stacked(space, samples, "action").items()}
    got, columns = ActionReader(space).read(DictTensor(tensors), 3)
    for action, sample in zip(got, samples, strict=True):
        assert space.contains(action)
        assert data_equivalence(dict(flat(space, action)), dict(flat(space, sample)))
    for leaf in list_leaves(space, "action"):
        assert np.array_equal(columns[leaf.key], tensors[ActionReader.key(leaf)].numpy())


def test_discrete_actions_are_ints_and_others_arrays_of_their_own():
    action = DictTensor({"action/0": torch.tensor([2]), "action/1": torch.zeros(1, 2, dtype=torch.int8)})
    ((discrete, bits),), _ = ActionReader(SPACES["tuple"]).read(action, 1)
    assert type(discrete) is int and type(bits) is np.ndarray and bits.dtype == np.int8
    bits[:] = 1
    assert not action["action/1"].any()
    (scalar,), _ = ActionReader(SPACES["box-scalar"]).read(DictTensor({"action": torch.zeros(1)}), 1)
    assert type(scalar) is np.ndarray and scalar.shape == ()


@pytest.mark.parametrize(
    ("space", "tensor"),
    [
        (spaces.Discrete(5), torch.tensor([4, 0], dtype=torch.uint8)),
        (spaces.MultiBinary(2), torch.tensor([[True, False], [False, False]])),
        (spaces.Box(0, 255, (1,), np.uint8), torch.tensor([[255], [0]])),
        (spaces.Box(0, 1, (1,), np.float64), torch.tensor([[0.25], [0.5]])),
        (spaces.Box(0, 1, (1,), np.float32), torch.tensor([[0.25], [0.5]], dtype=torch.float64)),
    ],
    ids=str,
)
def test_actions_of_another_width_are_converted(space, tensor):
    tensor = tensor.requires_grad_(tensor.is_floating_point())
    for action in ActionReader(space).read(DictTensor({"action": tensor}), 2)[0]:
        assert space.contains(action)


@pytest.mark.parametrize(
    ("space", "tensors", "message"),
    [
        (spaces.Discrete(5), {"actoin": torch.zeros(2)}, r"no 'action' in its output, there are \['actoin'\]"),
        (SPACES["dict"], {"action/pos": torch.zeros(2, 1)}, "no 'action/id' in its output"),
        (spaces.Discrete(5), {"action": torch.zeros(3).long()}, r"'action' has shape \(3,\), expected \(2,\)"),
        (spaces.Discrete(5), {"action": torch.zeros(2, 1).long()}, r"'action' has shape \(2, 1\), expected \(2,\)"),
        (spaces.Discrete(5), {"action": torch.zeros(2)}, r"'action' is \(2,\) float32, expected an integer dtype"),
        (spaces.Discrete(5), {"action": torch.zeros(2).bool()}, r"'action' is \(2,\) bool, expected an integer dtype"),
        (SPACES["box-2x3"], {"action": torch.zeros(2, 3)}, r"'action' has shape \(2, 3\), expected \(2, 2, 3\)"),
        (SPACES["box-2x3"], {"action": torch.zeros(2, 2, 3).long()}, "int64, expected a floating point dtype for Box"),
        (UINT8, {"action": torch.full((2, 2), 256)}, r"'action' has values that Box\(0, 255, .* cannot hold"),
        (UINT8, {"action": torch.full((2, 2), -1, dtype=torch.int8)}, "'action' has values that Box"),
        (spaces.MultiBinary(2), {"action": torch.zeros(2, 2)}, r"float32, expected an integer dtype for MultiBinary"),
    ],
)
def test_a_wrong_action_is_refused_by_key(space, tensors, message):
    with pytest.raises(SpecError, match=f"^agent: .*{message}") as caught:
        ActionReader(space).read(DictTensor(tensors), 2)
    assert isinstance(caught.value, MissingKeyError) == message.startswith("no ")


@pytest.mark.parametrize(
    ("space", "keys"),
    [
        (spaces.Discrete(5), "'action': ..."),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3)), "'action/a': ..., 'action/b': ..."),
    ],
)
def test_an_action_that_is_a_tensor_is_refused_with_the_keys_that_it_needs(space, keys):
    with pytest.raises(TypeError, match=rf"^action: needs DictTensor\(\{{{re.escape(keys)}\}}\), got Tensor$"):
        ActionReader(space).read(torch.tensor([0, 1]), 2)


def test_a_batch_size_that_was_right_before_is_refused_when_fewer_run():
    reader, action = ActionReader(spaces.Discrete(5)), DictTensor({"action": torch.tensor([1, 2])})
    assert reader.read(action, 2)[0] == [1, 2]
    with pytest.raises(SpecError, match=r"'action' has shape \(2,\), expected \(1,\)"):
        reader.read(action, 1)
