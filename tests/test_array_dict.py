"""`ArrayDict`: names, rows and values of a batch, as programs for tianshou's `Batch` use them."""

from __future__ import annotations

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlstructs.replay import ArrayDict, ReplayBuffer


def made():
    return ArrayDict(obs={"image": np.arange(8.0).reshape(4, 2), "speed": np.arange(4)}, act=np.array([3, 2, 1, 0]))


def test_what_is_nested_has_joined_names_however_it_is_given():
    batch = made()
    assert list(batch) == list(batch.get_keys()) == ["obs/image", "obs/speed", "act"]
    again = ArrayDict({"obs/image": batch.obs.image, "obs": {"speed": batch["obs"]["speed"]}}, act=batch.act)
    rows = ArrayDict([{"obs": {"image": [2 * i, 2 * i + 1], "speed": i}, "act": 3 - i} for i in range(4)])
    nested = ArrayDict(obs=[{"image": [2 * i, 2 * i + 1], "speed": i} for i in range(4)], act=batch.act)
    assert batch == again == rows == nested == batch.to_dict() and batch != batch[:3] and batch != {"act": batch.act}
    assert batch.to_dict()["obs"]["speed"].tolist() == [0, 1, 2, 3] and set(batch.to_dict(False)) == set(batch)
    assert batch.to_list_of_dicts()[2]["obs"]["speed"] == 2
    for one in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), ArrayDict(batch)):
        assert type(one) is ArrayDict and one == batch
    assert type(pickle.loads(pickle.dumps(batch.obs))) is ArrayDict and copy.copy(batch.obs) == batch.obs


def test_what_is_put_into_a_nested_part_is_put_into_the_batch():
    batch = made()
    batch.obs.image = batch.obs.image / 255
    batch.obs.image *= 2
    batch.obs.more = {"x": np.ones(4)}
    batch.obs.more.x = batch.obs.more.x + 1
    assert batch.obs.image[3].tolist() == [12 / 255, 14 / 255] and batch["obs/more/x"].tolist() == [2, 2, 2, 2]
    del batch.obs.more.x
    assert batch.obs.pop("speed").tolist() == [0, 1, 2, 3] and list(batch) == ["obs/image", "act"]
    with pytest.raises(KeyError, match="no 'speed' in this batch"):
        batch.obs.pop("speed")
    batch.update({"obs": {"speed": np.zeros(4)}}, rew=np.ones(4))
    assert list(batch) == ["act", "obs/speed", "rew"]
    transitions = ReplayBuffer(3)
    transitions.add({"obs": 1, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
    found = transitions[[0]]
    found.policy.logp = np.zeros(1)  # none was stored
    assert found.policy.logp.tolist() == found["policy/logp"].tolist() == [0]


def test_rows_are_picked_and_put():
    batch = made()
    assert len(batch) == 4 and batch.shape == [4] and bool(batch) and not ArrayDict() and len(ArrayDict()) == 0
    assert batch[1].act == 2 and batch[[3, 0]].obs.speed.tolist() == [3, 0] and len(batch[batch.act > 1]) == 2
    batch[:2] = batch[2:]
    assert batch.act.tolist() == [1, 0, 1, 0] and batch.obs.speed.tolist() == [2, 3, 2, 3]
    with pytest.raises(ValueError, match="^rows must have the names"):
        batch[0] = {"act": 1}
    assert len(ArrayDict(x=np.zeros((2, 3)), y=np.zeros((2, 3, 4)))) == 2
    assert ArrayDict(x=np.zeros((2, 3)), y=np.zeros((2, 3, 4))).shape == [2, 3]


@given(st.integers(0, 12), st.integers(1, 5), st.booleans(), st.booleans())
def test_parts_have_every_row_once(n, size, shuffle, merge_last):
    batch = ArrayDict(x=np.arange(n))
    parts = [part.x.tolist() for part in batch.split(size, shuffle, merge_last)]
    found = [row for part in parts for row in part]
    assert sorted(found) == list(range(n)) and (shuffle or found == list(range(n)))
    rest = n % size
    if merge_last and rest and n > size:
        assert [len(part) for part in parts] == [size] * (n // size - 1) + [size + rest]
    else:
        assert [len(part) for part in parts] == [size] * (n // size) + [rest] * bool(rest)


def test_parts_are_shuffled_by_numpys_seed():
    batch = ArrayDict(x=np.arange(50))
    for _ in range(2):
        np.random.seed(3)
        assert next(batch.split(-1)).x.tolist() == np.random.RandomState(3).permutation(50).tolist()
    with pytest.raises(ValueError, match="^size must be -1 or at least 1, got 0$"):
        batch.split(0)


def test_arrays_become_tensors_and_come_back():
    batch = made()
    there = batch.to_torch(dtype=torch.float32)
    assert {value.dtype for value in there.values()} == {torch.float32} and batch.act.dtype == np.int64
    batch.to_torch_()
    assert batch.obs.image.dtype is torch.float64 and batch.act.tolist() == [3, 2, 1, 0]
    back = batch.to_numpy()
    batch.to_numpy_()
    assert back == batch == made() and type(back.act) is np.ndarray
    doubled = batch.apply_values_transform(lambda value: value * 2)
    assert doubled.act.tolist() == [6, 4, 2, 0] and batch.act.tolist() == [3, 2, 1, 0]
    assert batch.apply_values_transform(np.sum, inplace=True) is None and batch.act == 6


def test_values_are_set_at_a_key():
    batch = made()
    batch.set_array_at_key(np.array([1.5]), "ret", index=[2], default_value=-1.0)
    assert batch.ret.tolist() == [-1, -1, 1.5, -1]
    batch.set_array_at_key(np.array([9, 8]), "act", index=[0, 1])
    batch.set_array_at_key(np.zeros(4), "obs/speed")
    assert batch.act.tolist() == [9, 8, 1, 0] and not batch.obs.speed.any()
    with pytest.raises(ValueError, match="^'x' has 3 rows, the batch has 4; give an index to set some$"):
        batch.set_array_at_key(np.zeros(3), "x")
    with pytest.raises(ValueError, match=r"^'obs' is nested: name one of \['image', 'speed'\] in it$"):
        batch.set_array_at_key(np.zeros(1), "obs", index=[0])
    with pytest.raises(TypeError):
        batch.set_array_at_key(np.zeros(1, int), "y", index=[0])  # None is no whole number
    assert "y" not in batch


def test_missing_values_are_found_and_left_out():
    batch = ArrayDict(x=np.array([[1.0, 2], [np.nan, 0], [3, 4]]), y=np.array([1, "a", None], object), n=np.arange(3))
    assert batch.isnull().x.tolist() == [[False, False], [True, False], [False, False]]
    assert batch.isnull().y.tolist() == [False, False, True] and not batch.isnull().n.any() and batch.hasnull()
    assert batch.dropnull().n.tolist() == [0] and not batch.dropnull().hasnull()
    assert ArrayDict(x=torch.tensor([1.0, np.nan]).bfloat16()).isnull().x.tolist() == [False, True]
    nothing = ArrayDict(x=np.full((1, 2), np.nan)).dropnull()
    assert len(nothing) == len(nothing.dropnull()) == 0


def test_lists_become_arrays():
    batch = ArrayDict(obs=[1, 2, 3], more={"x": [torch.ones(2)] * 3})
    batch.adv = [0.5, 1.5, 2.5]
    batch.more.y = [[1], [2, 3], []]  # of no shape
    batch.set_array_at_key([True, False, True], "kept")
    assert len(batch) == 3 and batch[1].obs == 2 and batch.more.x.shape == (3, 2) and batch.kept.dtype == bool
    assert [part.adv.tolist() for part in batch.split(2, shuffle=False)] == [[0.5, 1.5], [2.5]]
    assert batch[1:].more.y.tolist() == [[2, 3], []]


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor, jnp.asarray])
def test_batches_are_joined(library):
    one, two = (ArrayDict(a=library([n, n]), b={"c": library([[1.0], [2.0]])}) for n in (1, 2))
    joined, stacked = ArrayDict.cat([one, two]), ArrayDict.stack([one, two.to_dict()], axis=1)
    assert type(joined.a) is type(stacked.a) is type(one.a)
    assert joined.a.tolist() == [1, 1, 2, 2] and joined.b.c.shape == (4, 1)
    assert stacked.a.tolist() == [[1, 2], [1, 2]] and stacked.b.c.shape == (2, 2, 1)
    grown = ArrayDict()
    for more in (one, [two, two]):
        grown.cat_(more)
    assert grown.a.tolist() == [1, 1, 2, 2, 2, 2]
    one.stack_([two])
    assert one.a.tolist() == [[1, 1], [2, 2]]
    with pytest.raises(ValueError, match="^batches must have the same names"):
        ArrayDict.cat([two, {"a": two.a}])


def test_tensors_made_of_arrays_that_may_not_be_written_are_copies():
    held = np.zeros(3)
    held.setflags(write=False)
    batch = ArrayDict(of_jax=jnp.zeros(3), of_numpy=held)
    for tensor in batch.to_torch().values():
        tensor.add_(1)
    assert float(batch["of_jax"].sum()) == float(held.sum()) == 0
