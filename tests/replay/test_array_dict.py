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
from torch import distributions

from rlstructs import SpecError
from rlstructs.replay import ArrayDict, ReplayBuffer, VectorReplayBuffer


def made():
    return ArrayDict(obs={"image": np.arange(8.0).reshape(4, 2), "speed": np.arange(4)}, act=np.array([3, 2, 1, 0]))


def test_what_is_nested_has_joined_names_however_it_is_given():
    batch = made()
    assert list(batch) == ["obs/image", "obs/speed", "act"] and list(batch.get_keys()) == ["obs", "act"]
    again = ArrayDict({"obs/image": batch.obs.image, "obs": {"speed": batch["obs"]["speed"]}}, act=batch.act)
    rows = ArrayDict([{"obs": {"image": [2 * i, 2 * i + 1], "speed": i}, "act": 3 - i} for i in range(4)])
    nested = ArrayDict(obs=[{"image": [2 * i, 2 * i + 1], "speed": i} for i in range(4)], act=batch.act)
    assert batch == again == rows == nested == batch.to_dict() and batch != batch[:3] and batch != {"act": batch.act}
    assert batch.to_dict()["obs"]["speed"].tolist() == [0, 1, 2, 3] and set(batch.to_dict(False)) == {"obs", "act"}
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
    with pytest.raises(ValueError, match="^rows cannot have new names, got .'rew'., there are"):
        batch[0] = {"act": 1, "rew": 0}
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


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor])
def test_batches_are_calculated_with(library):  # A19: + * /
    batch = ArrayDict(obs={"speed": library([1.0, 2.0])}, act=library([3.0, 4.0]), info={})
    doubled = batch + batch
    assert doubled == batch * 2 and doubled / 2 == batch and "info" in doubled and type(doubled) is ArrayDict
    assert (batch + {"obs": {"speed": 1.0}, "act": np.float32(2)}).act.tolist() == [5, 6] and batch.act[0] == 3
    speed = batch.obs
    speed += 1
    batch *= 10
    batch /= 5
    assert speed.speed.tolist() == [2, 3] and batch.obs.speed.tolist() == [4, 6] and batch.act.tolist() == [6, 8]
    before = copy.deepcopy(batch)
    with pytest.raises(ValueError, match=r"^rows must have the names .'act', 'obs/speed'., got .'act'."):
        batch += {"act": 1.0}
    assert batch == before


def test_rows_are_cleared():  # A19: empty and empty_
    batch = ArrayDict(obs={"image": np.ones((3, 2)), "name": np.array(["a", None, "c"], object)}, act=torch.ones(3))
    cleared = ArrayDict.empty(batch, [0, 2])
    assert cleared.obs.image.tolist() == [[0, 0], [1, 1], [0, 0]] and cleared.act.tolist() == [0, 1, 0]
    assert cleared.obs.name.tolist() == [None, None, None] and batch.obs.name.tolist() == ["a", None, "c"]
    image = batch.obs.image
    assert batch.empty_(slice(1)) is batch and image.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert ArrayDict.empty(batch).act.tolist() == [0, 0, 0] and batch.act.tolist() == [0, 1, 1]
    row = ArrayDict(rew=np.float32(2), done=True, act=np.array(3), info="x").empty_()
    assert row.rew == 0 and row.rew.dtype == np.float32 and row.done is False and row.act == 0 and row.info is None


def test_what_is_taken_out_may_have_a_default():
    batch = made()
    assert batch.pop("x", None) is None and batch.pop(key="act", default=1)[0] == 3 and batch.get(key="act") is None
    with pytest.raises(KeyError):
        batch.pop("act")


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


@pytest.mark.parametrize("form", [list, tuple, np.array], ids=["list", "tuple", "objects"])
def test_mappings_of_each_row_are_stacked_wherever_they_are_given(form):  # so environments give their infos
    infos = form([{"k": 1, "b": {"c": 2.0}}, {"k": 2, "b": {"c": 3.0}}])
    put, within = ArrayDict(x=np.zeros(2)), ArrayDict(x=np.zeros(2))
    put.info = infos
    within["a/info"] = infos
    for batch in (ArrayDict(infos), ArrayDict(x=np.zeros(2), info=infos).info, put.info, within.a.info):
        assert batch.k.tolist() == [1, 2] and batch.b.c.tolist() == [2, 3]
    assert ArrayDict(form([{"a": 1.0}, {"a": 3.0}])).a.tolist() == [1, 3]
    put.info = form([{}, {}])
    assert "k" not in put.info and "info" in put and len(put) == 2


def test_a_batch_may_be_a_copy():  # A19: Batch(given, copy=True)
    given = {"x": np.zeros(3), "info": {"t": torch.zeros(3)}}
    for batch in (ArrayDict(given, copy=True), ArrayDict(given, True), ArrayDict(copy=True, **given)):
        batch.x += 1
        batch.info.t += 1
        assert list(batch) == ["x", "info/t"]
    assert not given["x"].any() and not given["info"]["t"].any()
    assert ArrayDict(given, copy=False).x is ArrayDict(given).x is given["x"] and ArrayDict(None) == ArrayDict() == {}
    with pytest.raises(TypeError, match="^copy must be a bool, got ndarray; give a column of this name in a mapping$"):
        ArrayDict(copy=np.zeros(3))
    assert list(ArrayDict({"copy": np.zeros(3)})) == ["copy"]


def test_what_is_nested_and_empty_is_there_to_be_filled():  # as programs begin: Batch(obs={}, act={}, info={})
    batch = ArrayDict(obs={}, act={}, info={}, policy={})
    assert list(batch) == ["obs", "act", "info", "policy"] and "policy" in batch and batch.policy == {}
    assert len(batch) == 0 and not batch and batch.shape == [] and not batch.hasnull()
    for same in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), ArrayDict(batch), ArrayDict(batch.to_dict())):
        assert type(same) is ArrayDict and same == batch != ArrayDict(obs={})
    batch.info.sub = {}
    batch.info.sub.n = np.arange(3)
    batch.obs = np.ones((3, 2))
    batch.update(act=np.zeros(3))
    policy = batch.policy
    policy.hidden = np.zeros((3, 4))
    assert list(batch) == ["obs", "act", "info/sub/n", "policy/hidden"] and len(batch) == 3
    assert batch.info.sub.n.tolist() == [0, 1, 2] and batch.policy.hidden is policy.hidden


def test_what_is_nested_and_empty_stays_and_is_in_no_ones_way():
    batch = ArrayDict(policy={}, x=np.array([1.0, np.nan, 3.0]), info={"b": {}})
    assert repr(batch) == "ArrayDict(policy=ArrayDict(), x=(3,) float64, info/b=ArrayDict())"
    assert len(batch) == 3 and batch.shape == [3] and batch.hasnull()
    results = [batch[1:], batch.dropnull(), batch.isnull(), batch.to_torch(), *batch.split(2)]
    results += [ArrayDict.cat([batch, batch]), ArrayDict.stack([batch, batch])]
    for made in results:
        assert set(made) == {"policy", "x", "info/b"} and made.policy == {} and made.info.b == {}
    assert batch.to_dict()["info"] == {"b": {}} and batch[0].to_dict()["policy"] == {}
    batch[1] = {"x": 2.0}
    grown = ArrayDict(obs={}, policy={})
    grown.cat_({"obs": batch.x})
    assert grown.obs.tolist() == [1, 2, 3] and set(ArrayDict.cat([batch, {"x": batch.x}])) == set(batch)
    assert batch.pop("policy") == {} and list(batch) == ["x", "info/b"]
    del batch.info.b
    assert list(batch) == ["x"]
    buffer = VectorReplayBuffer(4, 2)
    for _ in range(2):
        zeros = np.zeros(2)
        buffer.add(ArrayDict(obs=zeros, act=zeros, rew=zeros, terminated=zeros, truncated=zeros, info={}, policy={}))
    assert sorted(buffer._specs) == ["act", "obs", "rew", "terminated", "truncated"] and len(buffer) == 4


PROBS = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) + 0.1
SLICED = {
    "categorical": distributions.Categorical(probs=PROBS),
    "logits": distributions.Categorical(logits=PROBS * 50),
    "bernoulli": distributions.Independent(distributions.Bernoulli(probs=PROBS), 1),
    "normal": distributions.Normal(PROBS, 1.0),
    "independent": distributions.Independent(distributions.Normal(PROBS, PROBS + 1), 1),
    "beta": distributions.Beta(PROBS, PROBS + 1),
    "gaussian": distributions.MultivariateNormal(PROBS, torch.eye(3) + 1),
    "student": distributions.StudentT(PROBS),
}


@pytest.mark.parametrize("name", SLICED)
def test_rows_of_distributions_are_picked(name):  # A19
    dist = SLICED[name]
    batch, value = ArrayDict(dist=dist, n=np.arange(4)), dist.sample()
    whole = dist.log_prob(value)
    for index in (2, -1, np.int64(1), slice(1, 3), slice(0, 0), [3, 0, 0], np.array([1, 2]), np.arange(4) == 2):
        part = batch[index]
        assert type(part.dist) is type(dist)
        if whole[index].numel():  # torch has no densities of nothing
            torch.testing.assert_close(part.dist.log_prob(value[index]), whole[index])
        assert part.dist.batch_shape == whole[index].shape and part.dist.event_shape == dist.event_shape
    assert [part.dist.batch_shape[0] for part in batch.split(3)] == [3, 1] and len(ArrayDict(dist=dist)) == 4
    with pytest.raises(IndexError):
        batch[[4]]


def test_gradients_reach_what_a_picked_distribution_was_made_of():
    logits = torch.zeros(3, 2, requires_grad=True)
    part = ArrayDict(dist=distributions.Categorical(logits=logits))[[0, 2]]
    part.dist.log_prob(torch.tensor([0, 1])).sum().backward()
    assert logits.grad.abs().sum(1).tolist() == [1, 0, 1]


def test_a_distribution_that_cannot_be_picked_from_is_not_handed_out_whole():
    class Own(distributions.Normal):
        """It may be made in another way."""

    tanh = distributions.TransformedDistribution(distributions.Normal(PROBS, 1.0), distributions.TanhTransform())
    for dist, name in ((tanh, "TransformedDistribution"), (Own(PROBS, 1.0), "Own")):
        with pytest.raises(SpecError, match=f"^rows of the distribution {name} cannot be taken; put its parameters"):
            ArrayDict(dist=dist)[:2]
    one = distributions.Categorical(PROBS[0])  # of no rows
    assert ArrayDict(dist=one, x=np.zeros(2))[:1].dist is one


@pytest.mark.parametrize(
    "items",
    [
        {"a/b": np.zeros(2), "a": {"b": np.ones(2)}},
        {"a": {"b": np.ones(2)}, "a/b": np.zeros(2)},
        {"": {"b": np.ones(2)}, "/b": np.zeros(2)},
    ],
    ids=["joined first", "nested first", "empty"],
)
def test_two_arrays_of_one_name_are_refused_and_not_lost(items):
    (name,) = (key for key in items if "/" in key)
    with pytest.raises(SpecError, match=f"^ArrayDict: key '{name}' is given twice$"):
        ArrayDict(items)
    with pytest.raises(SpecError, match=f"^ArrayDict: key '{name}' is given twice$"):
        ArrayDict(obs=items)
    flags = {"terminated": False, "truncated": False}
    added = {"obs": items, "act": 0, "rew": 0.0, **flags, "obs_next": items, "info": {}}
    with pytest.raises(SpecError, match=f"key 'obs/{name}' is given twice|key '{name}' is given twice"):
        ReplayBuffer(4).add(added)


@pytest.mark.parametrize("key", [1, None, ("a", "b"), 2.5, b"a"])
def test_keys_that_are_no_strings_are_refused(key):
    for items in ({key: np.zeros(2)}, {"obs": {key: np.zeros(2)}}, {key: {"x": np.zeros(2)}}):
        with pytest.raises(TypeError, match="^ArrayDict: a key must be a string, got"):
            ArrayDict(items)


def test_names_may_be_empty():
    batch = ArrayDict(obs={"": np.zeros(2), "frame": np.ones(2)})
    assert list(batch) == ["obs/", "obs/frame"] and batch.obs[""].tolist() == [0, 0]


@pytest.mark.parametrize("key", [3, 0, None, 1.5, ("obs", "image"), np.int64(3), b"obs"])
def test_what_is_no_name_is_in_no_batch(key):
    for batch in (ArrayDict({"3/x": [1.0], "None/x": [1.0], "obs": {"image": [2.0]}}), ArrayDict()):
        assert key not in batch and batch.get(key, "none") == "none"
        with pytest.raises(TypeError, match="unhashable"):
            assert [key] in batch
