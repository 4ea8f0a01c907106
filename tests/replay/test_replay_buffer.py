"""`ReplayBuffer`: what is added, what `add` returns, and the neighbourhood of rows in their episodes.

"A" is a section of spec/tianshou-torchrl.md, "R" and "D" a scenario of spec/user-demand.md.
"""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from replay_rows import fill, listed, row, rows, state_of

from rlstructs import DictTensor, MissingKeyError, SpecError, StateError
from rlstructs.replay import (
    ArrayDict,
    CachedReplayBuffer,
    HERReplayBuffer,
    HERVectorReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

nan = float("nan")


# add: what it returns


def test_add_tells_where_a_row_lies_and_what_its_episode_came_to():  # A3.6
    buffer = ReplayBuffer(5)
    found = [listed(buffer.add(row(t, t == 3))) for t in range(7)]
    assert found == [
        [[0], [0], [0], [0]], [[1], [0], [0], [0]], [[2], [0], [0], [0]], [[3], [6], [4], [0]],
        [[4], [0], [0], [4]], [[0], [0], [0], [4]], [[1], [0], [0], [4]],
    ]  # fmt: skip
    added = buffer.add(row(7))
    assert [part.dtype for part in added] == [np.int64, np.float64, np.int64, np.int64]
    assert [part.shape for part in added] == [(1,)] * 4


def test_truncation_ends_an_episode_too_and_a_given_done_does_not():
    buffer = ReplayBuffer(9)
    assert listed(buffer.add({**row(1), "truncated": True, "done": False})) == [[0], [1], [1], [0]]
    assert listed(buffer.add({**row(2), "done": True})) == [[1], [0], [0], [1]]
    assert listed(buffer.add({**row(3), "terminated": True, "truncated": True})) == [[2], [5], [2], [1]]
    assert buffer.done[:3].tolist() == [True, False, True]
    assert buffer.terminated[:3].tolist() == [False, False, True]


def test_rewards_may_be_vectors():  # A3.6
    buffer = ReplayBuffer(4)
    for t, done in enumerate([False, True, True]):
        added = buffer.add({**row(t, done), "rew": np.array([1.0, t])})
        assert added[1].shape == (1, 2)
        assert added[1].tolist() == [[[0, 0]], [[2, 1]], [[1, 2]]][t]
    assert buffer.rew.shape == (4, 2)


@pytest.mark.parametrize("form", ["scalars", "lists"])  # the quick way and the general one
def test_an_episode_longer_than_the_buffer_reports_all_of_it_and_begins_with_its_oldest_row(form):
    buffer = ReplayBuffer(3)
    for t in range(8):
        one = row(t, t == 7)
        added = listed(buffer.add(one if form == "scalars" else {key: [value] for key, value in one.items()}, *(
            [] if form == "scalars" else [[0]])))  # fmt: skip
        assert added == [[t % 3], [28 * (t == 7)], [8 * (t == 7)], [max(0, t - 2) % 3]]
    assert buffer.sample_indices(0).tolist() == [2, 0, 1]
    assert listed(buffer.add(row(8))) == [[2], [0], [0], [2]]


def test_a_batch_with_an_axis_for_rows_needs_the_buffer_id_0():  # A3.3, A22 test_replaybuffer
    buffer = ReplayBuffer(4)
    assert listed(buffer.add(rows([7]), buffer_ids=[0])) == [[0], [0], [0], [0]]
    assert listed(buffer.add(rows([8], [True]), buffer_ids=np.array([0]))) == [[1], [15], [2], [0]]
    assert buffer.obs.shape == (4,)
    for wrong in ([5], [0, 3], [], 0, [[0]], [0.0], ["0"]):  # A21.13: [5] and [0, 3] too
        with pytest.raises(SpecError, match=r"^buffer_ids must be None or \[0\]"):
            buffer.add(rows([9]), buffer_ids=wrong)
    with pytest.raises(SpecError, match=r"^'obs' has 2 rows, expected one for each of 1 lanes$"):
        buffer.add(rows([9, 9]), buffer_ids=[0])
    with pytest.raises(SpecError, match=r"^'obs' has shape \(\), expected a first axis of rows$"):
        buffer.add(row(9), buffer_ids=[0])
    assert len(buffer) == 2


# add: what it takes


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, np.atleast_2d], ids=["list", "1", "torch", "2"])
def test_the_flags_of_one_transition_may_be_arrays_of_one(form):  # A22 test_custom_key
    buffer = ReplayBuffer(4)
    for t in range(3):  # the first row, one like those before, and one that ends
        flags = {"terminated": form([t == 2]), "truncated": form([0])}
        added = buffer.add({**row(0), "obs": np.zeros((1, 3)), "rew": np.ones(1), **flags})
    assert listed(added) == [[2], [[3.0]], [3], [0]]
    assert buffer.terminated.tolist() == [False, False, True, False] and buffer[:].obs.shape == (3, 1, 3)


@pytest.mark.parametrize("form", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_the_flags_of_several_transitions_may_have_axes_of_one(form):  # as stacks of such have them
    one = ArrayDict(obs=2, act=2, rew=2, terminated=form([False]), truncated=form([True]))
    buffer = ReplayBuffer(4)
    for t in range(2):
        assert listed(buffer.add(ArrayDict.stack([one]), buffer_ids=[0])) == [[t], [2], [1], [t]]
    vector = VectorReplayBuffer(8, 2)
    for t in range(2):
        ended = {"terminated": form([[[False]], [[True]]]), "truncated": form([[0], [0]])}
        assert listed(vector.add({**rows([1, 2]), **ended})) == [[t, 4 + t], [0, 2], [0, 1], [0, 4 + t]]
    assert buffer.truncated.tolist() == [True, True, False, False] and vector.terminated[4:6].tolist() == [True, True]
    before = state_of(vector)
    for wrong in (form([[False, True], [False, True]]), form([[[False], [True]]] * 2), form(False)):
        with pytest.raises(SpecError, match="^'truncated' has shape"):
            vector.add({**rows([1, 2]), "truncated": wrong})
    assert state_of(vector) == before


def test_the_keys_of_a_transition_are_there_to_be_read():  # as tianshou's tutorial reads them
    assert set(ReplayBuffer._required_keys_for_add) == set(row(1))
    assert set(ReplayBuffer._reserved_keys) == {*row(1), "done", "obs_next", "info", "policy"}


def test_columns_have_the_dtypes_and_shapes_of_the_first_row():  # R31, A22
    buffer = ReplayBuffer(3)
    frame = np.arange(12, dtype=np.uint8).reshape(3, 4)
    buffer.add({"obs": {"image": frame, "at": np.float32(0.5)}, "act": np.int64(2**62 + 1), "rew": 1,
                "terminated": 0, "truncated": np.bool_(False), "info": {"n": np.int16(3)}})  # fmt: skip
    specs = {name: (spec.dtype.name, spec.shape) for name, spec in buffer._specs.items()}
    assert specs == {
        "obs/image": ("uint8", (3, 4)), "obs/at": ("float32", ()), "act": ("int64", ()), "rew": ("float64", ()),
        "terminated": ("bool", ()), "truncated": ("bool", ()), "info/n": ("int16", ()),
    }  # fmt: skip
    batch = buffer[0]
    assert batch.obs.image.tolist() == frame.tolist() and batch.act == 2**62 + 1 and batch.info.n == 3
    assert buffer.obs.image.shape == (3, 3, 4) and buffer.obs.image[1:].sum() == 0
    assert buffer.nbytes <= 3 * (12 + 4 + 8 + 8 + 1 + 1 + 2 + 8) + 100  # 8 for the bookkeeping of episodes


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_numbers_of_another_byte_order_are_taken(first):  # as HDF5, or network packets, may hold them
    buffer = ReplayBuffer(4, framework="torch", n_step=2, gamma=0.5)
    swapped = {**row(0), "obs": np.array([1, 2], ">f4"), "act": np.array(3, ">i2"), "rew": np.array(5.0, ">f8")}
    native = {**row(0), "obs": np.float32([1, 2]), "act": np.int16(3), "rew": np.float64(5.0)}
    for batch in (swapped, native) if first else (native, swapped):
        buffer.add(batch)
    batch, _ = buffer.sample(0)
    assert batch["obs"].tolist() == [[1, 2], [1, 2]] and batch["obs"].dtype == torch.float32
    assert batch["act"].tolist() == [3, 3] and batch["act"].dtype == torch.int16
    assert batch["rew"].tolist() == [7.5, 5.0] and buffer.obs.dtype.isnative


def test_float_rewards_keep_their_dtype():
    for dtype in (np.float16, np.float32, np.float64):
        buffer = ReplayBuffer(2)
        buffer.add({**row(0), "rew": dtype(0.5)})
        assert buffer.rew.dtype == dtype
    buffer = ReplayBuffer(2)
    buffer.add({**row(0), "rew": torch.tensor(0.5, dtype=torch.bfloat16)})
    assert listed(buffer.add({**row(0, True), "rew": torch.tensor(1.5, dtype=torch.bfloat16)}))[1] == [2.0]
    assert buffer[:].rew.tolist() == [0.5, 1.5]


class Batch:
    """As tianshou's: keys and `[]`, nothing else."""

    def __init__(self, **items):
        self._items = items

    def keys(self):
        return self._items.keys()

    def __getitem__(self, key):
        return self._items[key]


FORMS = {
    "dict": lambda obs: {"obs": obs},
    "batch": lambda obs: {"obs": Batch(**obs)},
    "torch": lambda obs: {"obs": {k: torch.as_tensor(v) for k, v in obs.items()}},
    "lists": lambda obs: {"obs": {k: np.asarray(v).tolist() for k, v in obs.items()}},
    "flat": lambda obs: {f"obs/{k}": v for k, v in obs.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_kind_are_the_same(form):
    buffer = ReplayBuffer(4)
    for t in range(3):
        rest = row(t)
        del rest["obs"]
        buffer.add({**rest, **FORMS[form]({"a": np.array([t, t + 1]), "b": t})})
    assert buffer[:].obs.a.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert buffer[:].obs["b"].tolist() == [0, 1, 2]


def test_dict_tensors_tensordicts_and_batches_are_taken():
    tensordict = pytest.importorskip("tensordict")
    buffer = ReplayBuffer(4)
    values = {key: torch.tensor([1]) if key in ("obs", "act") else torch.tensor([0.0]) for key in row(0)}
    values |= {"terminated": torch.tensor([False]), "truncated": torch.tensor([True])}
    buffer.add(DictTensor(values), buffer_ids=[0])
    buffer.add(tensordict.TensorDict(values, batch_size=[1]), buffer_ids=[0])
    buffer.add(Batch(**values), buffer_ids=[0])
    assert buffer[:].obs.tolist() == [1, 1, 1] and buffer[:].truncated.tolist() == [True] * 3


def test_what_is_added_is_copied_and_left_alone():  # R12, R34
    buffer = ReplayBuffer(3)
    one = {**row(1), "obs": np.zeros(3), "act": np.zeros(2), "info": {"x": 1}}
    for _ in range(2):
        before = {key: np.copy(value) if isinstance(value, np.ndarray) else value for key, value in one.items()}
        buffer.add(one)
        assert one.keys() == before.keys() and one["info"] == {"x": 1}
        one["obs"] += 1
    assert buffer[:].obs.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_what_is_none_or_empty_is_not_there():  # A22 test_custom_key
    buffer = ReplayBuffer(3)
    buffer.add({**row(0), "obs_next": None, "info": {}, "policy": {"hidden": {}}, "returns": 5.0})
    batch = buffer[0]
    assert sorted(batch) == ["act", "done", "obs", "obs_next", "returns", "rew", "terminated", "truncated"]
    assert batch.returns == 5 and batch.info == {} and batch.policy == {}
    assert "info" in batch and "policy" in batch and "nothing" not in batch  # as in tianshou's batches
    with pytest.raises(AttributeError, match="no 'nothing' in this batch"):
        _ = batch.nothing


def test_the_keys_of_a_batch_are_those_at_the_top():  # A6: all nine, and what else there is
    buffer = ReplayBuffer(3)
    for t in range(2):
        buffer.add(row(t, t == 1, returns=1.0) | {"obs": {"image": np.zeros(3), "state": {"speed": t}}})
    every = ["obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info", "policy", "returns"]
    for batch in (buffer[0], buffer[:], buffer.sample(2)[0], buffer[:][1:]):
        assert list(batch.keys()) == list(batch.get_keys()) == every and all(key in batch for key in every)
        assert {key: batch[key] for key in batch.keys()}["obs"].state.speed is not None  # noqa: SIM118
        assert sorted(batch) == sorted([
            "act", "done", "obs/image", "obs/state/speed", "obs_next/image", "obs_next/state/speed", "returns", "rew",
            "terminated", "truncated",
        ])  # fmt: skip
    batch = buffer[:]
    assert batch == buffer[:] and ArrayDict(batch) == batch == ArrayDict(batch)
    batch.set_array_at_key([1.0, 2.0], "policy", [0, 1])
    assert batch.policy.tolist() == [1, 2] and batch.pop("policy").tolist() == [1, 2]
    assert batch.pop("info") == {} and batch.pop("policy", 3) == 3 and list(batch.keys()) == [*every[:7], every[-1]]
    assert "info" not in batch and "info" not in batch[1:] and not hasattr(copy.deepcopy(batch), "policy")
    again = ReplayBuffer(3)
    again.add(batch[:1], buffer_ids=[0])  # goes back in as it is
    assert again[0].obs.state.speed == 0 and list(again[0].keys()) == every


def test_infos_that_never_came_are_empty():  # A6
    buffers = [fill(ReplayBuffer(4), 2), fill(ReplayBuffer(4, framework="torch"), 2), ReplayBuffer(4)]
    vector = VectorReplayBuffer(8, 2)
    vector.add(rows([1, 2]))
    for buffer in (*buffers, vector):
        for key in ("info", "policy"):
            assert getattr(buffer, key) == {} and len(getattr(buffer, key).keys()) == 0
    for buffer, index in ((buffers[0], 1), (buffers[1], [0, 1]), (vector, [0, 4])):
        for key in ("info", "policy"):
            assert not buffer.get(index, key).keys() and buffer.get(index, key, default_value=7) == 7
            with pytest.raises(IndexError):
                buffer.get(3, key)
    with pytest.raises(MissingKeyError, match="^no 'nothing' in this buffer"):
        buffers[0].get(0, "nothing")


MAKERS = {
    "ReplayBuffer": lambda **more: ReplayBuffer(4, **more),
    "VectorReplayBuffer": lambda **more: VectorReplayBuffer(8, 2, **more),
    "PrioritizedReplayBuffer": lambda **more: PrioritizedReplayBuffer(4, 0.6, 0.4, **more),
    "PrioritizedVectorReplayBuffer": lambda **more: PrioritizedVectorReplayBuffer(8, 2, alpha=0.6, beta=0.4, **more),
    "HERReplayBuffer": lambda **more: HERReplayBuffer(4, print, 3, **more),
    "HERVectorReplayBuffer": lambda **more: HERVectorReplayBuffer(8, 2, print, 3, **more),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_misspelt_argument_is_named_with_the_public_class_and_others_are_ignored(name):
    text = rf"^{name}\(\) got an unexpected keyword argument 'stack_sum'; did you mean 'stack_num'\?$"
    with pytest.raises(TypeError, match=text):
        MAKERS[name](stack_sum=4)
    assert MAKERS[name](whatever=1, weight_norm=False).stack_num == 1  # as in tianshou
    assert MAKERS[name](stack_num=4).stack_num == 4


OF_OTHERS = [  # what programs of rlberry and torchrl do with their `ReplayBuffer`, and the class that does it here
    (lambda: ReplayBuffer(max_replay_size=100, rng=np.random.default_rng()), "'max_replay_size'", "rlberry"),
    (lambda: ReplayBuffer(100, np.random.default_rng()), "stack_num must be an int, got a generator", "rlberry"),
    (lambda: ReplayBuffer(100, rng=np.random.default_rng()), "'rng'", "rlberry"),
    (lambda: ReplayBuffer(100).setup_entry("obs", float), "'setup_entry'", "rlberry"),
    (lambda: ReplayBuffer(100).append({}), "'append'", "rlberry"),
    (lambda: ReplayBuffer(100).end_episode(), "'end_episode'", "rlberry"),
    (lambda: ReplayBuffer(storage=ListStorage(100), batch_size=4), "'storage'", "torchrl"),
    (lambda: ReplayBuffer(batch_size=4), "'batch_size'", "torchrl"),
    (lambda: ReplayBuffer(), "needs a size", "torchrl"),
    (lambda: ReplayBuffer(100).extend({"x": [1]}), "'extend'", "torchrl"),
    (lambda: VectorReplayBuffer(100, 2).update_priority([1], [1]), "'update_priority'", "torchrl"),
]
CLASSES = {"rlberry": "ChunkReplayBuffer", "torchrl": "TensorDictReplayBuffer"}


@pytest.mark.parametrize(("use", "what", "system"), OF_OTHERS, ids=[f"{each[2]} {each[1]}" for each in OF_OTHERS])
def test_who_takes_it_for_the_buffer_of_another_system_is_told_the_class(use, what, system):
    hint = rf"; {system}'s ReplayBuffer, which [a-z ]+, is rlstructs\.replay\.{CLASSES[system]}$"
    with pytest.raises((TypeError, AttributeError), match=rf"{what}.*{hint}"):
        use()


def test_a_key_that_is_none_in_every_row_is_not_there():  # as stacks of infos have it
    one = {**row(1), "info": {"e": None, "k": 1}}
    vector, buffer = VectorReplayBuffer(6, 2), ReplayBuffer(3)
    for _ in range(2):
        vector.add(ArrayDict.stack([one] * 2))
        buffer.add(ArrayDict.stack([one]), buffer_ids=[0])
    assert list(vector.info) == list(buffer.info) == ["k"] and vector[:].info.k.tolist() == [1] * 4
    with pytest.raises(MissingKeyError, match=r"^key\(s\) \['act'\] are missing"):
        vector.add(ArrayDict.stack([{**one, "act": None}] * 2))
    vector.add(ArrayDict.stack([one, {**one, "info": {"e": "text", "k": 1}}]))
    assert vector[:].info.e.tolist() == [None, None, None, None, None, "text"]


def test_new_keys_grow_columns_zero_in_the_rows_before_and_say_so_once(caplog):  # A3.7
    buffer = fill(ReplayBuffer(3), 2)
    with caplog.at_level(logging.INFO, "rlstructs"):
        for t in (2, 3):
            buffer.add(row(t, info={"a": {"b": t}}, returns=t))
    assert buffer[:].info.a.b.tolist() == [0, 2, 3] and buffer[:].returns.tolist() == [0, 2, 3]
    assert [record.message for record in caplog.records] == [
        "ReplayBuffer: new columns ['info/a/b', 'returns'], zero in the rows before"
    ]


def test_missing_keys_are_zero_and_not_what_was_there_before():  # A3.8
    buffer = fill(ReplayBuffer(2), 2, obs_next=7, info={"a": 5})
    buffer.add(row(2))
    assert buffer[:].info.a.tolist() == [5, 0] and buffer[:].obs_next.tolist() == [7, 0]


def test_a_key_cannot_have_the_name_of_what_a_sample_holds_besides():
    buffer = ReplayBuffer(2, n_step=3)
    for batch in (row(1, discount=0.5), row(1, discount={"x": 1})):
        with pytest.raises(SpecError, match="^'discount' is what a batch of this buffer holds beside its keys; give"):
            buffer.add(batch)
    buffer.add(row(1, weight=0.5))
    with pytest.raises(SpecError, match="^'discount' is what a batch"):
        buffer.set_array_at_key([0.5], "discount", index=[0])
    assert "discount" not in buffer._specs and buffer.get([0], "weight").tolist() == [0.5]
    fill(ReplayBuffer(2), 1, discount=0.5)
    with pytest.raises(SpecError, match="^'weight' is what a batch of this buffer holds beside its keys"):
        PrioritizedReplayBuffer(2, 0.5, 0.5).add(row(1, weight=0.5))


def test_unknown_and_missing_keys_may_be_errors():
    buffer = fill(ReplayBuffer(2, new_keys="error", missing_keys="error"), 1, info=1)
    with pytest.raises(SpecError, match=r"^unknown key\(s\) \['x'\], this buffer has"):
        buffer.add(row(1, info=1, x=2))
    with pytest.raises(MissingKeyError, match=r"^key\(s\) \['info'\] are missing"):
        buffer.add(row(1))
    assert len(buffer) == 1
    with pytest.raises(SpecError, match="^new_keys must be 'error' or 'grow' and missing_keys 'error' or 'fill', got"):
        ReplayBuffer(2, new_keys="drop")


def without(key):
    return {name: value for name, value in row(1, x=[1, 2]).items() if name != key}


BAD = {
    "no obs": (without("obs"), MissingKeyError, r"^key\(s\) \['obs'\] are missing, got \['act', 'rew'"),
    "no act, no rew": ({"obs": 1, "terminated": False, "truncated": False}, MissingKeyError, r"\['act', 'rew'\] are"),
    "no terminated": (without("terminated"), MissingKeyError, r"^key\(s\) \['terminated'\] are missing"),
    "done only": (
        {"obs": 1, "act": 1, "rew": 1.0, "done": True},
        MissingKeyError,
        r"^key\(s\) \['terminated', 'truncated'\] are missing, got .*; 'done' does not say which",
    ),
    "empty obs": ({**row(1), "obs": {}}, MissingKeyError, r"^key\(s\) \['obs'\] are missing"),
    "nested rew": ({**row(1), "rew": {"a": 1}}, SpecError, "^'rew' must be an array"),
    "lossy": ({**row(1), "obs": 1.7}, SpecError, "^'obs' is float64, which would lose its values as int64"),
    "too large": ({**row(1), "small": 300}, SpecError, "^'small' holds int64 values that do not fit uint8"),
    "negative": ({**row(1), "small": -1}, SpecError, "^'small' holds int64 values that do not fit uint8"),
    "shape": ({**row(1), "obs": [1, 2]}, SpecError, r"^'obs' has shape \(1, 1, 2\), expected \(1, 1\)$"),
    "long": ({**row(1), "new": np.ones(2, np.longdouble)}, SpecError, "^'new' holds float128, which only numpy has"),
    "text": ({**row(1), "act": "left"}, SpecError, "^'act' holds <U4; a buffer keeps numbers only$"),
    "object": ({**row(1), "policy": {"x": object()}}, SpecError, "^'policy/x' holds object; a buffer keeps numbers"),
    "new and bad": ({**row(1), "new": 1, "newer": "text"}, SpecError, "^'newer' holds <U4"),
    "ragged": ({**row(1), "new": [[1, 2], [3]]}, SpecError, "^'new' must be an array"),
    "reward": ({**row(1), "rew": "much"}, SpecError, "^'rew' must hold numbers, got <U4$"),
    "vector reward": ({**row(1), "rew": [1.0, 2.0]}, SpecError, r"^'rew' has shape \(1, 1, 2\), expected \(1, 1\)$"),
    "flag": ({**row(1), "terminated": 2}, SpecError, "^'terminated' must hold bools, or 0 and 1, got int64"),
    "flag nan": ({**row(1), "truncated": nan}, SpecError, "^'truncated' must hold bools, or 0 and 1, got float64"),
    "flags": ({**row(1), "terminated": [0, 0]}, SpecError, r"^'terminated' has shape \(2,\), expected one bool"),
    "leaf and parent": ({**row(1), "obs/x": 1}, SpecError, "^'obs' cannot be an array and have 'obs/x' in it$"),
    "twice": ({**row(1), "a/b": 1, "a": {"b": 2}}, SpecError, "^add: key 'a/b' is given twice$"),
    "no mapping": ([1, 2], TypeError, "^add: needs a mapping of names to arrays, got list$"),
    "no names": ({1: 2}, TypeError, "^add: a key must be a string, got 1$"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_failed_add_changes_nothing(what):  # A21.9, C1 "failed write"
    batch, error, message = BAD[what]
    buffer = fill(ReplayBuffer(4), 2, small=np.uint8(1))
    before = state_of(buffer)
    with pytest.raises(error, match=message):
        buffer.add(batch)
    assert state_of(buffer) == before
    assert listed(buffer.add(row(2, True, small=0))) == [[2], [3], [3], [0]]


@pytest.mark.parametrize("what", ["no obs", "text", "flag", "leaf and parent"])
def test_a_failed_first_add_leaves_an_empty_buffer(what):
    batch, error, message = BAD[what]
    buffer = ReplayBuffer(4)
    with pytest.raises(error, match=message):
        buffer.add(batch)
    assert not len(buffer) and not buffer._specs
    buffer.add({**row(1), "obs": np.zeros((2, 2), np.uint8)})
    assert buffer.obs.shape == (4, 2, 2)


# prev, next, and what goes on


def test_what_goes_on_is_what_went_on_when_it_was_looked_at():
    buffer = fill(ReplayBuffer(4), 1, ends=[0])
    rows_then = buffer._table.rows()
    buffer.add(row(1))  # by another thread
    assert rows_then.unfinished().tolist() == [] and buffer.unfinished_index().tolist() == [1]


def test_the_worked_example():  # A4
    buffer = fill(ReplayBuffer(5), 7, ends=[3])
    assert buffer.obs.tolist() == [5, 6, 2, 3, 4] and buffer.done.tolist() == [False, False, False, True, False]
    assert buffer.prev(np.arange(5)).tolist() == [4, 0, 2, 2, 4]
    assert buffer.next(np.arange(5)).tolist() == [1, 1, 3, 3, 0]
    assert buffer.sample_indices(0).tolist() == [2, 3, 4, 0, 1]
    assert buffer.last_index.tolist() == [1] and buffer.unfinished_index().tolist() == [1]


def test_prev_and_next_keep_the_shape_of_the_index():
    buffer = fill(ReplayBuffer(8), 5)
    for index, expected in [
        (2, 1), (-1, 3), (np.int32(0), 0), ([4, 0], [3, 0]), ([[1], [2]], [[0], [1]]),
        (torch.tensor([3]), [2]), (np.array([], int), []), ([], []), (slice(1, 3), [0, 1]),
        (np.array([True, False, False, True, False]), [0, 2]),
    ]:  # fmt: skip
        found = buffer.prev(index)
        assert np.asarray(found).tolist() == expected and np.asarray(found).dtype == np.int64
        assert np.isscalar(found) is isinstance(index, (int, np.integer))
    assert buffer.next(-1) == 4 and buffer.next([-5, 2]).tolist() == [1, 3]


@pytest.mark.parametrize("method", ["prev", "next"])
@pytest.mark.parametrize(
    ("index", "error"),
    [(5, IndexError), (-6, IndexError), ([0, 9], IndexError), (np.zeros(3, bool), IndexError), ([0.5], SpecError)],
    ids=str,
)
def test_neighbours_of_rows_that_are_not_there_are_errors(method, index, error):
    with pytest.raises(error, match=r"^index |^a mask"):
        getattr(fill(ReplayBuffer(8), 5), method)(index)


def test_an_empty_buffer_has_no_neighbours_and_nothing_unfinished():  # A21.15
    for buffer in (ReplayBuffer(4), ReplayBuffer(0), fill(ReplayBuffer(4), 3)):
        buffer.reset()
        assert buffer.unfinished_index().tolist() == [] and buffer.unfinished_index().dtype == np.int64
        assert buffer.prev([]).tolist() == buffer.next(np.zeros(0, int)).tolist() == []
        for method in (buffer.prev, buffer.next):
            with pytest.raises(IndexError, match="^index 0 holds no row; 0 of"):
                method(0)


def test_the_newest_row_ends_an_episode_until_another_comes():  # A4
    buffer = fill(ReplayBuffer(4), 2)
    assert buffer.next([0, 1]).tolist() == [1, 1]
    fill(buffer, 1, start=2)
    assert buffer.next([0, 1, 2]).tolist() == [1, 2, 2]


def test_steps_back_and_forth_stay_within_an_episode_however_many():  # A4: idempotent at the ends
    buffer = fill(ReplayBuffer(7), 30, ends=[24, 27])
    episodes = {t: (24 if t < 25 else 27 if t < 28 else 29) for t in range(23, 30)}
    back = forth = np.arange(7)
    for _ in range(7):
        back, forth = buffer.prev(back), buffer.next(forth)
    first = {24: 23, 27: 25, 29: 28}
    assert [buffer.obs[i] for i in back] == [first[episodes[t]] for t in buffer.obs]
    assert [buffer.obs[i] for i in forth] == [episodes[t] for t in buffer.obs]


def test_what_is_left_of_an_overwritten_episode_begins_with_its_oldest_row():  # A3
    buffer = fill(ReplayBuffer(4), 6, ends=[4])
    assert buffer.obs.tolist() == [4, 5, 2, 3]
    assert buffer.prev([0, 1, 2, 3]).tolist() == [3, 1, 2, 2]
    assert buffer.next([0, 1, 2, 3]).tolist() == [0, 1, 3, 0]


# get_buffer_indices


def edges_buffer():
    return VectorReplayBuffer(10, 2)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (2, 4, [2, 3]), (4, 2, [4, 0, 1]), (8, 7, [8, 9, 5, 6]), (0, 5, [0, 1, 2, 3, 4]), (5, 7, [5, 6]),
        (4, 0, [4]), (8, 5, [8, 9]), (5, 10, [5, 6, 7, 8, 9]),  # exactly up to the end
        (0, 0, []), (5, 5, []), (2, 2, []),
    ],
)  # fmt: skip
def test_rows_of_an_interval_go_around_the_end_of_their_lane(start, stop, expected):  # A7, A22
    found = edges_buffer().get_buffer_indices(start, np.int64(stop))
    assert found.tolist() == expected and found.dtype == np.int64


@pytest.mark.parametrize(
    ("start", "stop"), [(1, 6), (8, 1), (5, 3), (0, 10), (4, 10), (10, 10), (-1, 2), (2, 11), (9, 4)]
)
def test_an_interval_across_lanes_is_an_error(start, stop):  # A7
    with pytest.raises(ValueError, match=rf"^rows {start} to {stop} are not in one of the lanes .* \[0, 5, 10\]$"):
        edges_buffer().get_buffer_indices(start, stop)


def test_the_rows_of_an_episode_are_those_from_where_it_begins_to_where_it_ends():  # A7
    for length in range(1, 13):  # of 5 at most are there
        buffer = fill(ReplayBuffer(5), 3, ends=[2])
        for t in range(length):
            index, _, ep_len, start = buffer.add(row(t, t == length - 1))
        found = buffer.get_buffer_indices(int(start[0]), int(index[0]) + 1)
        # An episode of several rounds has nothing of its own at its end but `ep_len`: none of it is left out.
        assert buffer.obs[found].tolist() == list(range(max(0, length - 5), length))
        assert ep_len == [length]


def test_a_full_lane_of_several_episodes_is_no_interval():
    buffer = fill(ReplayBuffer(5), 8, ends=[5])
    assert buffer.get_buffer_indices(3, 3).tolist() == []


def test_edges():  # A7
    assert ReplayBuffer(10).subbuffer_edges.tolist() == [0, 10]
    assert edges_buffer().subbuffer_edges.tolist() == [0, 5, 10]
    assert ReplayBuffer(0).subbuffer_edges.tolist() == [0, 0]
    cached = CachedReplayBuffer(ReplayBuffer(10), 2, 5)
    assert cached.subbuffer_edges.tolist() == [0, 10, 15, 20]
    assert cached.get_buffer_indices(17, 16).tolist() == [17, 18, 19, 15]


# The constructor, reset, and size 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": -1}, SpecError, "^size must be at least 1, got -1$"),
        ({"size": 2.5}, TypeError, "^size must be an int, got 2.5$"),
        ({"size": float("inf")}, TypeError, "^size must be an int, got inf$"),
        ({"size": -1e2}, SpecError, "^size must be at least 1, got -100$"),
        ({"stack_num": 0}, SpecError, "^stack_num must be at least 1, got 0$"),
        ({"stack_nun": 4}, TypeError, "unexpected keyword argument 'stack_nun'"),  # A1: swallowed there
        ({"framework": "tensorflow"}, SpecError, "^framework must be one of"),
        ({"n_step": 0}, SpecError, "^n_step must be at least 1, got 0$"),
        ({"gamma": 1.5}, SpecError, r"^gamma must be in \[0, 1\], got 1.5$"),
        ({"random_seed": -1}, SpecError, "^a seed must be"),
    ],
)
def test_wrong_arguments_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        ReplayBuffer(**{"size": 4, **arguments})


@pytest.mark.parametrize("size", [1e1, np.float64(10), np.int32(10)], ids=repr)
def test_a_size_may_be_written_as_a_whole_float(size):  # as tianshou's users do
    assert ReplayBuffer(size).maxsize == VectorReplayBuffer(size, 2).maxsize == 10
    assert type(ReplayBuffer(size).maxsize) is int


def test_stack_num_is_checked_when_it_is_assigned():
    buffer = ReplayBuffer(4)
    with pytest.raises(SpecError, match="^stack_num must be at least 1, got 0$"):
        buffer.stack_num = 0
    assert buffer.stack_num == 1


def test_a_buffer_of_size_0_takes_nothing_and_gives_nothing():  # A1
    buffer = ReplayBuffer(0)
    with pytest.raises(StateError, match="^a buffer of size 0 takes no rows$"):
        buffer.add(row(1))
    with pytest.raises(StateError, match="^a buffer of size 0 takes no rows$"):
        buffer.set_batch({"obs": []})
    assert len(buffer) == buffer.maxsize == 0 and buffer.sample_indices(0).tolist() == []
    assert buffer.update(fill(ReplayBuffer(3), 2)).tolist() == [] and repr(buffer) == "ReplayBuffer(0 of 0 rows)"


def test_the_number_of_rows_has_the_name_that_programs_know():
    buffer = ReplayBuffer(4)
    for t in range(6):
        assert buffer._size == len(buffer) == min(t, 4)
        buffer.add({"obs": t, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})


def test_a_reset_buffer_is_as_new():  # R29, A14
    buffer, new = fill(ReplayBuffer(3), 5, ends=[1]), ReplayBuffer(3)
    buffer.reset()
    assert len(buffer) == 0 and buffer.last_index.tolist() == [0]
    for t in range(5):
        assert listed(buffer.add(row(t, t == 3))) == listed(new.add(row(t, t == 3)))
    assert buffer[:].obs.tolist() == new[:].obs.tolist() == [2, 3, 4]


def test_a_reset_may_count_returns_and_lengths_further():  # A14
    buffer = fill(ReplayBuffer(5), 3)
    buffer.reset(keep_statistics=True)
    assert len(buffer) == 0
    assert listed(buffer.add(row(10))) == [[0], [0], [0], [0]]
    # The episode had five steps and its oldest row that is there is row 0.
    assert listed(buffer.add(row(20, True))) == [[1], [33], [5], [0]]


def test_the_size_of_a_buffer_and_its_text():
    buffer = fill(ReplayBuffer(7), 2, info={"x": np.zeros((2, 3))})
    assert len(buffer) == 2 and buffer.maxsize == 7
    assert repr(buffer) == (
        "ReplayBuffer(2 of 7 rows: obs int64, act int64, rew float64, terminated bool, truncated bool, "
        "info/x float64[2, 3])"
    )


def test_a_store_that_would_not_fit_is_refused_before_anything_is_taken():
    buffer = ReplayBuffer(10**9)
    with pytest.raises(MemoryError, match="bytes are needed"):
        buffer.add({**row(1), "obs": np.zeros((1000, 1000))})
    assert not buffer._specs and not len(buffer)
