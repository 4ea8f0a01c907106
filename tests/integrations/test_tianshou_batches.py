"""`Batch` and the buffers do what tianshou's do, where the page of differences names none."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tianshou.data
import torch

import rlstructs.replay

BOTH = (tianshou.data, rlstructs.replay)


def plain(value):
    """A value without its library: nested dicts of dtypes, shapes and lists."""
    if isinstance(value, (dict, tianshou.data.Batch)):
        return {key: plain(value[key]) for key in sorted(value.keys())}
    if isinstance(value, torch.Tensor):
        return "torch", str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return str(np.asarray(value).dtype), np.asarray(value).tolist()
    return value


def nested(Batch):
    return Batch(a=np.arange(4), info=Batch(n=Batch(x=np.arange(4.0), y=np.arange(4)), m=np.arange(4)))


def put(batch, index, value):
    batch[index] = value
    return batch


def changed(batch, method, *arguments):
    getattr(batch, method)(*arguments)
    return batch


CALLS = {
    "keys": lambda B: sorted(nested(B).keys()),
    "keys_of_info": lambda B: sorted(nested(B).info.keys()),
    "keys_inside": lambda B: sorted(nested(B)["info"].n.keys()),
    "get_keys": lambda B: sorted(nested(B).info.get_keys()),
    "keys_of_rows": lambda B: sorted(nested(B)[1:3].info.keys()),
    "copied": lambda B: copy.deepcopy(nested(B)),
    "pickled": lambda B: pickle.loads(pickle.dumps(nested(B))),
    "to_dict": lambda B: nested(B).to_dict(),
    "to_dict_flat": lambda B: {key: type(each).__name__[-3:] for key, each in nested(B).to_dict(recursive=False).items()
                               if key == "a"},
    "to_dict_flat_inside": lambda B: nested(B).to_dict(recursive=False)["info"].n,
    "to_at_least_2d": lambda B: B(a=np.arange(3), b=np.ones((3, 2)), c=B(d=np.arange(3.0))).to_at_least_2d(),
    "to_at_least_2d_numbers": lambda B: B(a=1.0, b=np.float32(2)).to_at_least_2d(),
    "dicts": lambda B: B([{"a": 1, "b": 2}, {"a": 3}]),
    "dicts_of_floats": lambda B: B([{"a": 1.5}, {"b": 2.5}, {"a": 1.0, "b": 3.0}]),
    "dicts_of_text": lambda B: B([{"a": "x"}, {"b": "y"}]),
    "dicts_of_dicts": lambda B: B([{"a": {"x": 1}}, {"a": {"y": 2}}]),
    "dicts_that_lack_a_dict": lambda B: B([{"a": {"x": 1}}, {"b": 2}]),
    "dicts_of_flags": lambda B: B([{"a": True}, {"b": 2}]),
    "dicts_of_arrays": lambda B: B([{"a": np.ones(2)}, {"b": 2}]),
    "dicts_of_tensors": lambda B: B([{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}]),
    "array_of_dicts": lambda B: B(np.array([{"a": 1}, {"b": 2}], object)),
    "dicts_inside": lambda B: B(info=[{"a": 1}, {"b": 2}]),
    "array_of_dicts_inside": lambda B: B(info=np.array([{"a": 1}, {"b": 2.5}], object)),
    "batches_and_none": lambda B: B([B(a=1), B()]),
    "stack": lambda B: B.stack([B(a=1, b=B(c=2)), B(a=3, b=B(c=4))]),
    "stack_of_other_keys": lambda B: B.stack([B(a=np.array([1.0, 2])), B(a=np.array([1.0, 2]), b=np.array([3, 1]))]),
    "stack_with_empty": lambda B: B.stack([B(), B(a=1)]),
    "stack_of_nothing": lambda B: B.stack([]),
    "cat": lambda B: B.cat([nested(B), nested(B)]),
    "cat_empty_first": lambda B: B.cat([B(), B(a=np.arange(2))]),
    "cat_empty_last": lambda B: B.cat([nested(B), B()]),
    "cat_of_nothing": lambda B: B.cat([B(), B()]),
    "cat_in_place": lambda B: changed(B(a=np.arange(1)), "cat_", B()),
    "cat_to_empty": lambda B: changed(B(), "cat_", [B(a=np.arange(2)), B(a=np.arange(1))]),
    "row": lambda B: put(B(a=np.arange(2), b=np.arange(2) + 5), 0, {"a": 9}),
    "row_of_objects": lambda B: put(B(a=np.arange(2.0), b=np.array(["x", "y"], object)), 0, {"a": 9.0}),
    "row_of_text": lambda B: put(B(a=np.arange(2.0), b=["x", "y"]), 0, {"a": 9.0}),
    "rows": lambda B: put(B(a=np.arange(3.0), b=np.arange(3) + 3), slice(0, 2), B(a=np.array([7.0, 8.0]))),
    "rows_by_list": lambda B: put(B(a=np.arange(3.0), b=np.arange(3) + 3), [2, 0], B(a=np.array([7.0, 8.0]))),
    "row_of_nested": lambda B: put(nested(B), 1, B(a=9, info=B(m=5))),
    "row_of_nested_without": lambda B: put(nested(B), 1, B(a=9)),
    "row_of_nothing": lambda B: put(B(a=np.arange(2.0) + 1), 0, B()),
    "text": lambda B: B(a=["x", "y"], b=np.array(["x"])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_batches_are_tianshous(name):
    theirs, ours = (plain(CALLS[name](data.Batch)) for data in BOTH)
    assert ours == theirs


WRONG = {
    "cat_other_keys": lambda B: B.cat([B(a=np.arange(2)), B(b=np.arange(2))]),
    "cat_nested_and_not": lambda B: B.cat([B(a=np.arange(2), b=B(c=np.ones(2))), B(a=np.arange(2))]),
    "stack_other_keys_behind": lambda B: B.stack([B(a=np.ones(2)), B(b=np.ones(2))], axis=1),
    "row_of_new_keys": lambda B: put(B(a=np.arange(2)), 0, {"c": 9}),
    "row_of_new_keys_inside": lambda B: put(nested(B), 0, B(info=B(z=5))),
    "row_of_a_number": lambda B: put(B(a=np.arange(2)), 0, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_tianshou_refuses_is_refused_and_changes_nothing(name):
    for data in BOTH:
        with pytest.raises(ValueError):
            WRONG[name](data.Batch)


def rows(data, first, done):
    n = np.arange(first, first + 2)
    return data.Batch(
        obs=n, act=n, rew=n.astype(float), terminated=np.array(done), truncated=np.zeros(2, bool), obs_next=n + 1,
        info=data.Batch(k=10 * n, s=data.Batch(t=n + 0.5, u=n)),
    )  # fmt: skip


def test_keys_of_sampled_infos_are_those_at_the_top():
    found = []
    for data in BOTH:
        buffer = data.VectorReplayBuffer(10, 2)
        buffer.add(rows(data, 1, [False, True]))
        batch, _ = buffer.sample(3)
        found.append((sorted(batch.info.keys()), sorted(batch.info.s.keys()), sorted(batch[:1].info.get_keys())))
    assert found[1] == found[0] == (["k", "s"], ["t", "u"], ["k", "s"])


@pytest.mark.parametrize("way", ["hdf5", "pickle", "copy"])
def test_rows_that_were_moved_out_of_a_cache_keep_what_was_there(tmp_path, way):
    found = []
    for data in BOTH:
        buffer = data.CachedReplayBuffer(data.ReplayBuffer(10), 2, 4)
        for step, done in enumerate([[False, False], [True, False], [False, True], [False, False]]):
            buffer.add(rows(data, 1 + 2 * step, done))
        path = str(tmp_path / f"{data.__name__}.hdf5")
        if way == "hdf5":
            buffer.save_hdf5(path)
            buffer = type(buffer).load_hdf5(path)
        else:
            buffer = copy.deepcopy(buffer) if way == "copy" else pickle.loads(pickle.dumps(buffer))
        columns = [buffer.obs, buffer.act, buffer.rew, buffer.done, buffer.info.k, buffer.info.s.t]
        sizes = [len(buffer), len(buffer.main_buffer), *(len(cache) for cache in buffer.cached_buffers)]
        found.append((sizes, [np.asarray(column).tolist() for column in columns]))
    assert found[1] == found[0] and found[0][0][:2] == [8, 5]
