"""`DictTensorReplayBuffer`: rows in, batches out, by index, and what is refused.

"R" is a scenario of user-demand.md, "B" a section of tianshou-torchrl.md: B5 are bugs that are not to be reproduced,
B6 torchrl's own tests.
"""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from frameworks import host
from replay_storages import DeviceStorage

from rlstructs import (
    DictTensor,
    MissingKeyError,
    OutOfMemoryError,
    SpecError,
    StateError,
    TemporalDictTensor,
    Trajectories,
)
from rlstructs.replay import (
    ArrayDict,
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.lanes import N_COUNTERS

LIST, TENSOR, MEMMAP, DEVICE = "list", "tensor", "memmap", "device"
FRAMEWORKS = ["torch", "numpy", "jax", "warp"]


STORAGES = {LIST: ListStorage, TENSOR: TensorStorage, MEMMAP: MemmapStorage, DEVICE: DeviceStorage}


@pytest.fixture(params=list(STORAGES))
def storage(request):
    return STORAGES[request.param]


def made(storage=ListStorage, max_size=10, **settings):
    return DictTensorReplayBuffer(storage=storage(max_size), **{"generator": 0, **settings})


def numbered(start, n):
    """Rows that hold their number, as an observation of two numbers, and as what it led to."""
    t = torch.arange(start, start + n)
    return {"obs": torch.stack([t, -t], 1).float(), "next": {"reward": t.double(), "done": t % 5 == 4}}


def held(buffer):
    """The numbers of the rows, the oldest first."""
    return buffer["next/reward"][buffer._storage.view().row_ids(np.arange(len(buffer)))].tolist()


def by_id(start, stop, size, first=0):
    """Numbers that were written one after another, the first with this row id, in the order of row ids."""
    return sorted(range(start, stop), key=lambda number: (first + number) % size)


# Writing


def test_arguments_have_torchrls_names():
    buffer = made(sampler=PrioritizedSampler(beta=1.0))
    assert buffer.add(data={"obs": torch.zeros(2), "next": {"reward": 9.0, "done": True}}) == 0
    assert buffer.extend(tensordicts=numbered(0, 3), update_priority=None).tolist() == [1, 2, 3]
    buffer.update_priority(index=[0, 1, 2, 3], priority=0.0)
    buffer.update_tensordict_priority(data={"index": torch.tensor([2]), "td_error": torch.tensor([1.0])})
    again = made(sampler=PrioritizedSampler(beta=1.0))
    again.load_state_dict(state_dict=buffer.state_dict())
    assert held(again) == [9, 0, 1, 2] and again.sample(batch_size=8)["index"].tolist() == [2] * 8


def test_row_ids_go_around_and_the_newest_rows_stay(storage):  # B6 test_cursor_position2
    buffer = made(storage, 4)
    assert buffer.extend(numbered(0, 3)).tolist() == [0, 1, 2]
    assert held(buffer) == [0, 1, 2]
    assert buffer.extend(numbered(3, 3)).tolist() == [3, 0, 1]
    assert held(buffer) == [2, 3, 4, 5] and len(buffer) == 4
    assert buffer.extend(numbered(6, 4)).tolist() == [2, 3, 0, 1]
    assert held(buffer) == [6, 7, 8, 9]
    assert buffer.add({"obs": torch.zeros(2), "next/reward": 10.0, "next/done": False}) == 2
    assert held(buffer) == [7, 8, 9, 10]
    assert buffer.write_count == 11


@pytest.mark.parametrize("before", [0, 1, 3])
def test_of_more_rows_than_there_is_room_for_the_last_stay(storage, before):  # B5.15
    buffer = made(storage, 4)
    buffer.extend(numbered(100, before))
    ids = buffer.extend(numbered(0, 11))
    assert ids.dtype == torch.int64 and ids[:7].tolist() == [-1] * 7
    assert sorted(ids[7:].tolist()) == [0, 1, 2, 3]
    assert held(buffer) == [7, 8, 9, 10]
    assert buffer[ids[7:]]["next/reward"].tolist() == [7, 8, 9, 10]


def test_an_empty_extend_gives_an_empty_tensor(storage):  # B5.14
    buffer = made(storage)
    for _ in range(2):
        steps = TemporalDictTensor({key: value[None] for key, value in flat_numbered(0, 0).items()})
        for nothing in (numbered(0, 0), [], DictTensor(), {}, steps):
            ids = buffer.extend(nothing)
            assert (ids.shape, ids.dtype) == ((0,), torch.int64)
        buffer.extend(numbered(0, 2))
    assert held(buffer) == [0, 1, 0, 1]


class Like:
    """What has keys and [] and is no mapping, as tianshou's batches."""

    def __init__(self, values):
        self._values = values

    def keys(self):
        return self._values.keys()

    def __getitem__(self, key):
        return self._values[key]


def flat_numbered(start, n):
    nested = numbered(start, n)
    return {"obs": nested["obs"], "next/reward": nested["next"]["reward"], "next/done": nested["next"]["done"]}


def arrays(start, n, to):
    return {key: to(value.numpy()) for key, value in flat_numbered(start, n).items()}


BATCHES = {
    "mapping": lambda: numbered(0, 6),
    "DictTensor": lambda: DictTensor(numbered(0, 6)),
    "list of mappings": lambda: [
        {"obs": torch.tensor([t, -t]).float(), "next": {"reward": float(t), "done": t % 5 == 4}} for t in range(6)
    ],
    "list of DictTensors": lambda: [DictTensor(numbered(0, 6)).index(at) for at in range(6)],
    "numpy": lambda: arrays(0, 6, np.array),
    "lists": lambda: arrays(0, 6, np.ndarray.tolist),
    "ArrayDict": lambda: ArrayDict(arrays(0, 6, np.array)),
    "what has keys": lambda: Like({"obs": numbered(0, 6)["obs"], "next": Like(numbered(0, 6)["next"])}),
    "TemporalDictTensor": lambda: TemporalDictTensor(
        {
            key: torch.cat([value[:4], value[4:], value[:2]]).unflatten(0, (2, 4))
            for key, value in flat_numbered(0, 6).items()
        },
        torch.tensor([4, 2]),
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_rows_come_in_as_whatever_they_are(kind, storage):
    buffer = made(storage)
    assert buffer.extend(BATCHES[kind]()).tolist() == list(range(6))
    read = buffer[:]
    assert read["obs"].tolist() == [[t, -t] for t in range(6)]
    assert read["next/reward"].tolist() == list(range(6)) and read["next/done"].tolist() == [False] * 4 + [True, False]
    assert read["next/done"].dtype == torch.bool and read["next/reward"].dtype == torch.float64


@pytest.mark.parametrize("to", ["jax", "warp"])
def test_rows_come_in_as_arrays_of_other_libraries(to):
    numbers = np.arange(6, dtype=np.float32)
    batch = DictTensor({"x": torch.from_numpy(numbers), "n": torch.arange(6, dtype=torch.int32)})
    buffer = made()
    buffer.extend(getattr(batch, to)())
    assert buffer["x"].tolist() == buffer["n"].tolist() == numbers.tolist()


def test_bfloat16_of_torch_and_jax_stays_what_it_is():
    import jax.numpy as jnp

    buffer = made()
    buffer.extend({"half": torch.tensor([1.5, -2.0]).bfloat16()})
    buffer.extend({"half": jnp.array([0.5], jnp.bfloat16)})
    assert buffer["half"].dtype == torch.bfloat16 and buffer["half"].tolist() == [1.5, -2, 0.5]


@pytest.mark.parametrize("sizes", [(7, 1), (7, 2), (7, 2, 3)])
def test_a_row_of_tensordicts_with_more_batch_axes_keeps_them(sizes):
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = made(batch_size=4)
    buffer.extend(TensorDict({"obs": torch.zeros(*sizes, 5)}, batch_size=sizes))
    for row in (buffer[1], buffer[-1], buffer[np.int64(2)]):
        assert row.batch_size == row["index"].shape == sizes[1:]


def test_a_tensordict_comes_in_and_leaves_as_one(tmp_path):
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = made(batch_size=4)
    buffer.extend(TensorDict(numbered(0, 6), [6]))
    assert buffer.add(TensorDict(numbered(0, 6), [6])[5]) == 6
    assert held(buffer) == buffer["next", "reward"].tolist() == [0, 1, 2, 3, 4, 5, 5]
    buffer.save(tmp_path / "buffer.npz")
    loaded = made(batch_size=4)
    loaded.load(tmp_path / "buffer.npz")
    for one in (buffer, pickle.loads(pickle.dumps(buffer)), loaded):
        batch, info = one.sample(return_info=True)
        assert isinstance(batch, TensorDict) and batch.batch_size == (4,) and set(info) == {"index"}
        assert (batch["next", "reward"] == buffer["next", "reward"][batch["index"]]).all()
        assert isinstance(one[:], TensorDict) and one[2].batch_size == () and one[2]["next", "reward"] == 2
        assert isinstance(one["next"], TensorDict) and set(one[:].keys()) == {"obs", "next", "index"}
        found = [one[index]["index"].tolist() for index in (slice(1, 3), -1, [5, 0])]
        assert found == [[1, 2], 6, [5, 0]]
        assert batch.device == one[:].device == torch.device("cpu")
    other = made(batch_size=4, framework="numpy")
    other.load(tmp_path / "buffer.npz")
    assert type(other.sample()) is type(other[:]) is ArrayDict
    buffer[:2] = TensorDict({"next": {"reward": torch.tensor([7.0, 8.0])}}, [2])
    buffer[:] = buffer[:]
    assert held(buffer)[:3] == [7, 8, 2]
    numpys = made(framework="numpy")
    numpys.extend(TensorDict(numbered(0, 6), [6]))
    assert type(numpys.sample(2)) is ArrayDict
    with pytest.raises(SpecError):
        refused = made()
        refused.extend(TensorDict({"index": torch.zeros(2)}, [2]))
    refused.extend(numbered(0, 2))
    assert isinstance(refused.sample(1), DictTensor)


def test_a_list_of_tensordicts_leaves_as_one():
    TensorDict = pytest.importorskip("tensordict").TensorDict
    rows = TensorDict({"obs": torch.arange(30.0).view(3, 5, 2)}, [3, 5])
    for given, axes in ((list(rows), (5,)), (tuple(rows[:, 0]), ())):
        buffer = made()
        assert buffer.extend(given).tolist() == [0, 1, 2]
        batch = buffer.sample(4)
        assert type(batch) is TensorDict and batch.batch_size == (4, *axes) == batch["index"].shape
        assert (buffer[:]["obs"] == torch.stack(tuple(given))["obs"]).all()
    mixed = made()
    mixed.extend([rows[0, 0], {"obs": torch.zeros(2)}])
    assert isinstance(mixed.sample(2), DictTensor)


@pytest.mark.parametrize(("way", "in_list"), [("extend", False), ("extend", True), ("add", False)])
def test_a_tensorclass_says_what_is_taken(way, in_list):
    tensorclass = pytest.importorskip("tensordict").tensorclass

    class Rows:
        obs: torch.Tensor

    given, buffer = tensorclass(Rows)(obs=torch.arange(3.0), batch_size=[3]), made()
    with pytest.raises(TypeError, match=f"^{way}: takes a mapping, a DictTensor or a tensordict, got the tensorclass "
                                        r"Rows: give its .to_tensordict\(\)$"):  # fmt: skip
        getattr(buffer, way)([given] if in_list else given)
    assert buffer.extend(given.to_tensordict()).tolist() == [0, 1, 2]


def test_rows_of_several_axes_stay_so():
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = DictTensorPrioritizedReplayBuffer(storage=TensorStorage(4), alpha=1.0, beta=1.0, generator=0)
    rows = TensorDict({"obs": torch.arange(30.0).view(3, 5, 2), "done": torch.zeros(3, 5, 1, dtype=bool)}, [3, 5])
    buffer.extend(rows)
    buffer.add(rows[1])
    batch = buffer.sample(8)
    assert batch.batch_size == (8, 5) and batch["index"].shape == batch["priority_weight"].shape == (8, 5)
    assert (batch["obs"] == torch.cat([rows, rows[1:2]])["obs"][batch["index"][:, 0]]).all()
    batch["td_error"] = (batch["index"] + 1.0)[..., None] * torch.tensor([0.1, 0.2, 1, 0.3, 0])[:, None]
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.max_priority == pytest.approx(batch["index"].max().item() + 1)


def test_what_is_nested_in_rows_keeps_the_axes_that_it_has_more(tmp_path):  # as the agents of torchrl's environments
    TensorDict = pytest.importorskip("tensordict").TensorDict
    far = TensorDict({"y": torch.zeros(6, 3, 2)}, [6, 3, 2])
    agents = TensorDict({"x": torch.arange(18).view(6, 3), "far": far}, [6, 3])
    rows = TensorDict({"agents": agents, "next": {"agents": agents.clone(), "done": torch.zeros(6, 1)}}, [6])
    buffer = made(TensorStorage, 8)
    buffer.extend(rows[:5])
    buffer.add(rows[5])
    buffer.save(tmp_path / "buffer.npz")
    twins = [made(TensorStorage, 8) for _ in range(3)]
    twins[0].load(tmp_path / "buffer.npz")
    twins[1].load_state_dict(buffer.state_dict())
    for row in rows:
        twins[2].add(row)
    for each in (buffer, *twins):
        batch = each.sample(4)
        assert batch.batch_size == (4,) and batch["next"].batch_size == (4,)
        for name in ("agents", ("next", "agents")):
            assert batch[name].batch_size == (4, 3) and batch[name, "far"].batch_size == (4, 3, 2)
        assert (batch["agents", "x"] == rows["agents", "x"][batch["index"]]).all()
        assert each[2]["agents"].batch_size == (3,) and each["agents"].batch_size == (6, 3)


def test_trajectories_come_in_with_valid_steps_only():  # R2, R14: two of them never follow one another
    t = torch.arange(4).expand(3, 4) + 10 * torch.arange(3)[:, None]
    done = torch.zeros(3, 4, dtype=torch.bool)
    done[0, 1] = True
    steps = TemporalDictTensor({"observation/frame": t, "_observation/terminated": done}, torch.tensor([2, 4, 1]))
    batch = Trajectories(DictTensor({"env_index": torch.tensor([0, 0, 5])}), steps)
    for way in ("extend", "add_trajectories", "steps"):
        buffer = made()
        if way == "add_trajectories":
            buffer.add_trajectories(batch)
        else:
            assert buffer.extend(steps if way == "steps" else batch).tolist() == list(range(7))
        assert buffer["observation/frame"].tolist() == [0, 1, 10, 11, 12, 13, 20]
        assert buffer._storage.episodes.times(np.arange(7)).tolist() == [0, 1, 0, 1, 2, 3, 0]
    renamed = made()
    renamed.add_trajectories(batch, {"x": "observation/frame"})
    assert renamed["x"].tolist() == [0, 1, 10, 11, 12, 13, 20]
    assert renamed._storage.episodes.times(np.arange(7)).tolist() == [0, 1, 0, 1, 2, 3, 0]
    with pytest.raises(MissingKeyError, match=r"^add_trajectories: no \['y'\] in the trajectories, there are"):
        renamed.add_trajectories(batch, {"x": "y"})
    with pytest.raises(TypeError, match="needs Trajectories, got TemporalDictTensor"):
        renamed.add_trajectories(steps)


def test_dtypes_and_bytes_are_those_of_the_first_rows(storage):  # R31
    rows = {
        "image": torch.randint(0, 256, (6, 3, 4), dtype=torch.uint8), "flag": torch.ones(6, 1, dtype=torch.bool),
        "id": torch.arange(6) + 2**53 + 1, "action": torch.rand(6, 2, dtype=torch.float64),
        "count": torch.arange(6).to(torch.uint16),
    }  # fmt: skip
    buffer = made(storage, 6)
    buffer.extend(rows)
    read = buffer[:]
    for name, value in rows.items():
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
        assert read[name].tolist() == value.tolist()
    padding = buffer.nbytes - (6 * (12 + 1 + 8 + 16 + 2) + 6 * 8 + N_COUNTERS * 8)
    assert padding in (0, 6)  # a record of the columns has 40 bytes


def test_a_quick_add_is_an_add(storage):
    rows = [numbered(t, 1) for t in range(30)]
    plain, quick = made(storage, 12), made(storage, 12)
    for at, row in enumerate(rows):
        [expected] = plain.extend(row).tolist()
        reward = row["next"]["reward"][0]
        item = {"obs": row["obs"][0], "next": {"reward": [reward, float(reward), reward.numpy(), int(reward)][at % 4],
                                              "done": bool(row["next"]["done"])}}  # fmt: skip
        assert quick.add(item if at % 3 else DictTensor(row).index(0)) == expected
    assert plain[:] == quick[:] and plain.write_count == quick.write_count == 30
    assert (plain._storage.episodes.times(np.arange(12)) == quick._storage.episodes.times(np.arange(12))).all()


def test_a_list_storage_grows_and_row_ids_stay():
    buffer = made(max_size=5000)
    small = buffer.nbytes
    n = 0
    for size in (1, 1000, 40, 3000, 900, 500):
        ids = buffer.extend({"x": torch.arange(n, n + size)})
        assert ids.tolist() == [at % 5000 for at in range(n, n + size)]
        n += size
        assert buffer["x"].tolist() == by_id(max(0, n - 5000), n, 5000)
        if n == 1041:
            assert buffer.nbytes < small + 4100 * 8
    for _ in range(2):  # the same again once it has been emptied, in whatever state it has grown to
        buffer.empty()
        assert buffer.extend({"x": torch.arange(7)}).tolist() == list(range(7))
        assert buffer["x"].tolist() == list(range(7))


@pytest.mark.parametrize("max_size", [1025, 1999, 2048, 3001, 4099])
def test_a_list_storage_that_was_emptied_early_still_grows(max_size):
    buffer = made(max_size=max_size)
    n = 0
    for size in (10, 1030, max_size, 5):
        buffer.extend({"x": torch.arange(n, n + size)})
        buffer.empty()
        n += size
    buffer.extend({"x": torch.arange(700)})
    buffer.extend({"x": torch.arange(700, 1200)})
    assert buffer.extend({"x": torch.arange(1200, max_size + 500)})[-1] == 499
    assert buffer["x"].tolist() == by_id(500, max_size + 500, max_size)


def test_one_row_at_a_time_fills_and_wraps_a_list_storage():
    buffer = made(max_size=2000)
    assert [buffer.add({"x": t, "done": t % 7 == 6}) for t in range(2500)] == [t % 2000 for t in range(2500)]
    assert buffer["x"].tolist() == by_id(500, 2500, 2000)
    assert (
        buffer._storage.episodes.times(buffer._storage.view().row_ids(np.arange(2000))) == np.arange(500, 2500) % 7
    ).all()


class Filling(torch.nn.Module):
    def forward(self, batch):
        return batch

    def inv(self, batch):
        batch["obs"].fill_(9)
        return batch


def test_what_is_given_is_neither_kept_nor_changed():  # R12, R34, B5.6
    for buffer in (made(), made(transform=Filling())):
        rows = numbered(0, 3)
        keys, copy = list(rows), rows["obs"].clone()
        buffer.extend(rows)
        assert list(rows) == keys and (rows["obs"] == copy).all()
        before = buffer[:]["obs"].clone()
        rows["obs"].fill_(7)
        assert (buffer[:]["obs"] == before).all()
    source = np.zeros((1000, 2), np.float32)
    last = weakref.ref(source)
    buffer.extend({"obs": source[:2], "next": {"reward": np.zeros(2), "done": np.zeros(2, bool)}})
    del source
    gc.collect()
    assert last() is None


def other(start, n):
    """Rows of another schema than `numbered` has: a column less, a column more, another shape and another dtype."""
    t = torch.arange(start, start + n)
    return {"obs": torch.stack([t, t, t], 1).float(), "next/reward": t + 0.5, "more": t}


@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_emptied_buffer_takes_rows_of_another_schema(storage, prefetch, tmp_path):  # torchrl's sac-async does
    buffer = made(storage, 2000, batch_size=4, prefetch=prefetch, sampler=PrioritizedSampler(beta=1.0))
    for _ in range(2):
        buffer.extend(numbered(0, 1500))
        buffer.add({name: values[0] for name, values in flat_numbered(7, 1).items()})
        late = buffer.sample()["index"]
        buffer.empty()
        for n in (3, 2500):
            buffer.extend(other(0, n))
            buffer.update_priority(late, torch.ones(4))
            batch = buffer.sample()
            assert (batch["more"] + 0.5 == batch["next/reward"]).all()
        assert sorted(buffer[:].keys()) == ["more", "next/reward", "obs"] and buffer[:]["obs"].shape == (2000, 3)
        assert buffer["more"].tolist() == by_id(500, 2500, 2000, first=3)
        assert buffer["next/reward"].dtype == torch.float32
        buffer.add({"obs": torch.zeros(3), "next/reward": 0.5, "more": 9})
        twin = made(storage, 2000, batch_size=4, sampler=PrioritizedSampler(beta=1.0))
        buffer.save(tmp_path / "buffer.npz")
        twin.load(tmp_path / "buffer.npz")
        assert twin["more"].tolist() == buffer["more"].tolist() and twin.sample() == buffer.sample()
        with pytest.raises(SpecError, match="^unknown key"):
            buffer.extend({**other(0, 1), "x": [1]})
        buffer.empty()
    buffer.close()


def test_the_files_of_columns_that_an_emptied_buffer_had_are_removed(tmp_path):
    buffer = made(lambda n: MemmapStorage(n, scratch_dir=tmp_path / "x"), 5)
    buffer.extend(numbered(0, 3))
    buffer.empty()
    with pytest.raises(SpecError, match="keeps numbers only"):
        buffer.extend({"obs": torch.zeros(1), "name": ["a"]})
    buffer.extend(numbered(0, 2))
    assert held(buffer) == [0, 1] and len(list((tmp_path / "x").iterdir())) == 3
    buffer.empty()
    buffer.extend({"x": torch.arange(2)})
    assert buffer["x"].tolist() == [0, 1] and len(list((tmp_path / "x").iterdir())) == 1


def test_rows_that_no_columns_would_take_leave_an_emptied_buffer_as_it_was(storage):
    buffer = made(storage, 5, sampler=SliceSampler(slice_len=2, end_key=("next", "done")))
    buffer.extend(numbered(0, 3))
    buffer.empty()
    before = buffer[:]
    for rows, error in (
        ({"x": ["a"]}, SpecError), ({"x": torch.zeros(2)}, MissingKeyError),
        ({"next/done": [0], "index": [0.5]}, SpecError), ({"next/done": [0], "x": ["a"]}, SpecError),
    ):  # fmt: skip
        with pytest.raises(error):
            buffer.extend(rows)
        assert buffer[:] == before and len(buffer) == 0
    buffer.extend(numbered(0, 2))
    buffer.extend(numbered(2, 3))
    assert held(buffer) == [0, 1, 2, 3, 4] and buffer.sample(2)["next/truncated"].tolist() == [False, True]


def test_an_emptied_buffer_knows_episodes_by_what_it_holds():
    buffer = made(sampler=SliceSampler(slice_len=2))
    buffer.extend(numbered(0, 6))
    buffer.empty()
    buffer.extend({"x": torch.arange(4)})
    with pytest.raises(SpecError, match="^nothing says where episodes end"):
        buffer.sample(2)
    buffer.empty()
    buffer.extend({"x": torch.arange(4), "episode": [0, 1, 1, 2]})
    assert buffer.sample(2)["x"].tolist() == [1, 2]
    ranked = made(max_size=2, writer=MaxValueWriter("next/reward"))
    for start in (0, 10):
        ranked.extend(numbered(start, 3))
        ranked.empty()
        ranked.extend(other(start, 3))
        assert sorted(ranked["more"].tolist()) == [start + 1, start + 2]
        ranked.empty()


def test_the_first_rows_after_empty_say_what_batches_leave_as():
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer, rows = made(), TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3])
    for given, kind, axes in (({"x": rows["x"]}, DictTensor, None), (rows, TensorDict, (4, 3)),
                              (TensorDict({"x": rows["x"]}, [2]), TensorDict, (4,))):  # fmt: skip
        buffer.extend(given)
        batch = buffer.sample(4)
        assert type(batch) is kind and (axes is None or batch.batch_size == axes)
        buffer.empty()
    buffer.add({"x": torch.arange(3)})
    assert isinstance(buffer.sample(1), DictTensor)


def test_a_batch_that_is_being_made_keeps_its_columns():
    def collate(batch):  # as another thread may, meanwhile
        buffer.empty()
        buffer.extend(other(0, 3))
        return batch

    buffer = made(collate_fn=collate)
    buffer.extend(numbered(0, 3))
    batch = buffer.sample(4)
    assert set(batch.keys()) == {"obs", "next/reward", "next/done", "index"} and batch["next/done"].dtype == torch.bool


BAD_ROWS = {
    "a missing key": ({"obs": torch.zeros(2, 2)}, MissingKeyError, r"^key\(s\) .*reward.\] are missing"),
    "an unknown key": ({**flat_numbered(0, 2), "x": torch.zeros(2)}, SpecError, r"^unknown key\(s\) \['x'\]"),
    "too few rows": ({**flat_numbered(0, 2), "obs": torch.zeros(3, 2)}, SpecError, "has 2 rows, 'obs' has 3"),
    "a wrong shape": ({**flat_numbered(0, 2), "obs": torch.zeros(2, 3)}, SpecError, "'obs' has shape"),
    "a lossy cast": ({**flat_numbered(0, 2), "next/done": torch.full((2,), 0.5)}, SpecError, "lose its values as bool"),
    "one number": ({**flat_numbered(0, 2), "obs": 3.0}, SpecError, "'obs' is one number, its first axis"),
    "a text": ({**flat_numbered(0, 2), "obs": "hello"}, SpecError, "'obs' is 'hello', its first axis should be"),
    "8-bit floats": (
        {**flat_numbered(0, 2), "obs": torch.zeros(2, 2).to(torch.float8_e5m2)},
        SpecError,
        "^'obs' is float8_e5m2, which numpy lacks; convert it to float32 first$",
    ),
    "a string": ({**flat_numbered(0, 2), "obs": ["a", "b"]}, SpecError, "a buffer keeps numbers only"),
    "no mapping": (torch.zeros(3), TypeError, "needs a mapping of names to arrays, got Tensor"),
    "a key that is no string": ({3: torch.zeros(3)}, TypeError, "a key must be a string, got 3"),
    "items of other keys": ([{"obs": 1.0}, {"x": 2.0}], SpecError, "^extend: item 1: key"),
    "items of other shapes": ([{"obs": [1.0]}, {"obs": [1.0, 2.0]}], SpecError, "has different shapes in the items"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_do_not_fit_change_nothing(case, storage):  # B5.1, B5.2
    buffer = made(storage, 4)
    buffer.extend(numbered(0, 3))
    before = buffer[:]
    rows, error, message = BAD_ROWS[case]
    with pytest.raises(error, match=message):
        buffer.extend(rows)
    assert buffer[:] == before and buffer.write_count == 3 and buffer.extend(numbered(3, 1)).tolist() == [3]


def test_a_row_with_a_batch_axis_is_no_row():  # B4: torchrl writes it, or breaks
    buffer = made()
    buffer.add({"x": torch.zeros(2)})
    for wrong in (torch.zeros(1, 2), torch.zeros(2, 2)):
        with pytest.raises(SpecError, match="'x' has shape"):
            buffer.add({"x": wrong})
    assert len(buffer) == 1


def test_a_row_of_nothing_is_refused():
    with pytest.raises(SpecError, match="^a row needs a column, there is none$"):
        made().add({})


def test_an_index_of_the_users_own_is_refused():  # B5.14
    buffer = made()
    with pytest.raises(SpecError, match=r"^key\(s\) \['index'\] cannot be stored: samples have \['index'\] of their"):
        buffer.extend({"index": torch.zeros(3), "x": torch.zeros(3)})
    assert len(buffer) == 0 and buffer.extend({"x": torch.zeros(3)}).tolist() == [0, 1, 2]
    with pytest.raises(SpecError, match=r"\['discount'\] cannot be stored"):
        made(n_step=2).extend({"discount": torch.zeros(3)})


def of_six(sampler, as_tensordict):
    """A buffer with the rows x = 0 to 5."""
    rows = {"x": torch.arange(6.0), "next": {"reward": torch.zeros(6, 1)}}
    buffer = made(sampler=sampler(), batch_size=4)
    buffer.extend(pytest.importorskip("tensordict").TensorDict(rows, [6]) if as_tensordict else rows)
    return buffer


@pytest.mark.parametrize("as_tensordict", [False, True])
@pytest.mark.parametrize("sampler", [RandomSampler, PrioritizedSampler])
def test_a_sample_of_another_buffer_comes_in_without_its_ids(sampler, as_tensordict):
    source = of_six(sampler, as_tensordict)
    buffer, batch = made(sampler=sampler(), batch_size=8), source.sample()
    for _ in range(2):
        assert buffer.extend(batch).tolist() == list(range(len(buffer) - 4, len(buffer)))
    assert buffer["x"].equal(torch.cat([batch["x"]] * 2)) and set(buffer._specs) == {"x", "next/reward"}
    assert (buffer.sample()["index"] < 8).all()
    alone = made()
    assert alone.extend({"index": np.arange(3), "x": [1.0, 2.0, 3.0]}).tolist() == [0, 1, 2]
    assert alone.add({"index": 7, "x": 4.0}) == 3 and alone["x"].tolist() == [1, 2, 3, 4]


def test_more_than_there_is_memory_for_is_refused(monkeypatch):
    monkeypatch.setattr(Columns, "available_bytes", lambda columns: 50_000)
    buffer = made(max_size=1_000_000)
    buffer.extend({"x": torch.zeros(1000)})
    with pytest.raises(OutOfMemoryError, match="^16,384 rows: 65,536 bytes are needed, 50,000 are available$"):
        buffer.extend({"x": torch.zeros(9000)})
    assert len(buffer) == 1000
    with pytest.raises(OutOfMemoryError, match="4,000,000 bytes are needed, 50,000 are available"):
        made(TensorStorage, 1_000_000).extend({"x": torch.zeros(1)})


# Sampling


@pytest.mark.parametrize("n", [1, 3, 4, 11])
def test_a_sample_holds_rows_and_their_ids(storage, n):
    buffer = made(storage, 4)
    buffer.extend(numbered(0, n))
    batch = buffer.sample(200)
    assert isinstance(batch, DictTensor) and batch.n_elems() == 200
    assert (batch["index"].dtype, batch["index"].shape) == (torch.int64, (200,))
    assert set(batch["next/reward"].tolist()) == set(range(max(0, n - 4), n))  # R20: the newest, too
    assert (batch["obs"][:, 0] == batch["next/reward"]).all() and (batch["obs"][:, 1] == -batch["next/reward"]).all()
    assert buffer[batch["index"]]["obs"].equal(batch["obs"])


def test_samples_are_uniform_over_a_wrapped_ring():
    buffer = made(max_size=10)
    buffer.extend(numbered(0, 14))
    counts = torch.bincount(buffer.sample(20_000)["index"], minlength=10)
    assert ((counts - 2000).abs() < 200).all()


def test_the_same_seed_gives_the_same_samples(storage):  # B6 TestRNG
    def stream(**settings):
        buffer = made(storage, **settings)
        buffer.extend(numbered(0, 10))
        return [buffer.sample(5)["index"].tolist() for _ in range(3)]

    assert stream(generator=3) == stream(generator=np.random.default_rng(3)) != stream(generator=4)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert stream(generator=generators[0]) == stream(generator=generators[1])
    torch.manual_seed(5)
    first = stream(generator=None)
    torch.manual_seed(5)
    assert first == stream(generator=None)


def test_a_generator_can_be_set():
    buffer = made()
    buffer.extend(numbered(0, 10))
    buffer.generator = 7
    first = buffer.sample(5)["index"].tolist()
    buffer.generator = np.random.default_rng(7)
    assert buffer.sample(5)["index"].tolist() == first
    state = buffer.generator.bit_generator.state
    second = buffer.sample(5)["index"].tolist()
    buffer.generator.bit_generator.state = state
    assert buffer.sample(5)["index"].tolist() == second
    with pytest.raises(SpecError, match="a seed must be"):
        buffer.generator = "seven"


def test_batch_size_comes_from_the_constructor_or_the_call():  # B4, B6 test_batch_errors
    buffer, fixed = made(), made(batch_size=3)
    for each in (buffer, fixed):
        each.extend(numbered(0, 6))
    assert fixed.sample().n_elems() == fixed.sample(3).n_elems() == 3 and buffer.sample(4).n_elems() == 4
    with pytest.warns(UserWarning, match="^sample: batch_size 5 is another than that of the constructor, 3"):
        assert fixed.sample(5).n_elems() == 5
    with pytest.raises(RuntimeError, match="^batch_size not specified"):
        buffer.sample()
    with pytest.raises(StateError, match="^batch_size not specified: give one to the constructor to iterate"):
        next(iter(buffer))
    for wrong, error in ((-1, SpecError), (2.5, TypeError)):
        with pytest.raises(error, match="^batch_size must be"):
            buffer.sample(wrong)
        with pytest.raises(error, match="^batch_size must be"):
            made(batch_size=wrong)
    with pytest.raises(SpecError, match="^batch_size must be at least 1"):
        made(batch_size=0)


def test_nothing_is_sampled_from_nothing(storage):  # B6 test_empty, R29
    buffer = made(storage, batch_size=50)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^Cannot sample from an empty storage.$"):
            buffer.sample()
        with pytest.raises(StateError, match="^Cannot sample from an empty storage.$"):
            next(iter(buffer))
        assert len(buffer) == buffer.write_count == 0
        assert buffer.extend(numbered(7, 3)).tolist() == [0, 1, 2]
        assert set(buffer.sample()["next/reward"].tolist()) == {7, 8, 9}
        buffer.empty()


def test_what_is_known_of_the_rows_comes_along_if_asked_for():
    buffer = DictTensorPrioritizedReplayBuffer(alpha=0.5, beta=0.5, generator=0)
    buffer.extend(numbered(0, 4))
    batch, info = buffer.sample(3, return_info=True)
    assert list(info) == ["index", "priority_weight"]
    assert info["index"].equal(batch["index"]) and info["priority_weight"].equal(batch["priority_weight"])
    batch, info = buffer.sample(3, True, include_info=False)
    assert set(batch.keys()) == {"obs", "next/reward", "next/done"} and set(info) == {"index", "priority_weight"}
    assert buffer[info["index"]] == batch
    assert "index" not in buffer.sample(3, include_info=False)


def test_whether_there_is_a_batch_is_known_without_drawing_it(storage):
    buffer, same = (made(storage, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4) for _ in range(2))
    assert not buffer.can_sample()
    for each in (buffer, same):
        each.extend(numbered(0, 3))
    assert not buffer.can_sample() and buffer.can_sample(3)
    for each in (buffer, same):
        each.extend(numbered(3, 7))
    for _ in range(5):
        assert buffer.can_sample()
        assert buffer.sample() == same.sample()
    with pytest.raises(StateError, match="^batch_size not specified"):
        made(storage).can_sample()
    slices = made(storage, sampler=SliceSampler(slice_len=4, end_key="next/done"), batch_size=8)
    slices.extend(numbered(0, 3))
    assert not slices.can_sample()  # no slice is as long
    slices.extend(numbered(3, 7))
    assert slices.can_sample()


def test_how_full_it_is():
    buffer = made(max_size=8, batch_size=2, prefetch=3)
    buffer.extend(numbered(0, 10))
    for _ in range(3):
        buffer.sample()
    assert buffer.stats() == {
        "size": 8, "capacity": 8, "utilization": 1.0, "write_count": 10, "prefetch_queue_size": 3, "initialized": True,
    }  # fmt: skip
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 10 and len(buffer) == 0
    buffer.empty()
    assert buffer.stats()["utilization"] == buffer.write_count == 0


def test_samples_are_private_copies(storage):  # R43, B5.6
    buffer = made(storage)
    buffer.extend(numbered(0, 5))
    before = buffer[:]
    batch, info = buffer.sample(20, return_info=True)
    for tensor in [*batch.values(), *info.values(), *buffer[:].values(), *buffer[1:3].values(), buffer["obs"]]:
        tensor.zero_()
    assert buffer[:] == before


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("where", [LIST, DEVICE])
def test_samples_leave_as_arrays_of_the_framework(framework, where):
    buffer = made(STORAGES[where], framework=framework)
    buffer.extend({**flat_numbered(0, 6), "half": torch.arange(6).bfloat16()})
    for batch in (buffer.sample(4), buffer[:4]):
        assert type(batch) is (DictTensor if framework == "torch" else ArrayDict)
        module = {"numpy": "numpy", "torch": "torch", "jax": "jaxlib", "warp": "warp"}[framework]
        assert {type(value).__module__.partition(".")[0] for value in batch.values()} == {module}
        numbers = host(batch["next/reward"]).astype(int).tolist()
        assert host(batch["obs"]).tolist() == [[t, -t] for t in numbers]
        if framework != "warp":  # which gives the bits of bfloat16 to numpy
            assert host(batch["half"]).tolist() == numbers
    one = buffer[3]
    assert host(one["obs"]).tolist() == [3, -3] and host(one["next/reward"]).ravel().tolist() == [3]
    assert host(buffer["next/reward"]).tolist() == list(range(6))
    assert host(buffer["next"]["reward"]).tolist() == list(range(6))


def test_a_device_that_numpy_has_not_is_refused():
    with pytest.raises(SpecError, match="^device must be None or the CPU for numpy"):
        made(framework="numpy", device="cuda")
    with pytest.raises(SpecError, match="^framework must be one of"):
        made(framework="tensorflow")
    assert made(device="cpu").extend(numbered(0, 1)).tolist() == [0]


def test_a_random_buffer_is_iterated_for_ever():  # B4
    buffer = made(batch_size=4)
    buffer.extend(numbered(0, 6))
    stream = iter(buffer)
    batches = [next(stream) for _ in range(20)]
    assert all(batch.n_elems() == 4 for batch in batches)
    assert {t for batch in batches for t in batch["next/reward"].tolist()} == set(range(6))


def test_page_locked_memory_needs_an_accelerator():  # B4
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="^pin_memory: torch sees no accelerator"):
        made(pin_memory=True)


def test_steps_and_frames_are_put_together_when_they_are_read():  # R8, R10
    t = torch.arange(8)
    following = {"obs": t + 1.0, "reward": torch.ones(8), "terminated": t == 2, "truncated": t == 5}
    rows = {"obs": t.float(), "next": following}
    buffer = made(n_step=2, gamma=0.5, stack_num=3)
    buffer.extend(rows)
    batch = buffer.sample(300)
    expected = {
        0: ([0, 0, 0], [0, 1, 2], 1.5, 0.25, False, False), 1: ([0, 0, 1], [1, 2, 3], 1.5, 0.25, True, False),
        2: ([0, 1, 2], [1, 2, 3], 1.0, 0.5, True, False), 3: ([3, 3, 3], [3, 4, 5], 1.5, 0.25, False, False),
        4: ([3, 3, 4], [4, 5, 6], 1.5, 0.25, False, True), 5: ([3, 4, 5], [4, 5, 6], 1.0, 0.5, False, True),
        6: ([6, 6, 6], [6, 7, 8], 1.5, 0.25, False, False), 7: ([6, 6, 7], [6, 7, 8], 1.0, 0.5, False, False),
    }  # fmt: skip
    names = ["obs", "next/obs", "next/reward", "discount", "next/terminated", "next/truncated"]
    found = {at: tuple(batch[name][row].tolist() for name in names) for row, at in enumerate(batch["index"].tolist())}
    assert found == expected
    assert buffer[:]["obs"].tolist() == t.tolist()  # by index rows are what they are
    only = made(stack_num=2, stack_keys=["next/reward"])
    only.extend(rows)
    assert only.sample(4)["next/reward"].shape == (4, 2) and only.sample(4)["obs"].shape == (4,)


def test_what_is_stacked_is_named():
    buffer = made(stack_num=2, stack_keys=[("next", "obs")])
    buffer.extend({"obs": torch.zeros(6, 3), "next": {"obs": torch.ones(6, 3), "done": torch.zeros(6) > 0}})
    batch = buffer.sample(4)
    assert batch["next/obs"].shape == (4, 2, 3) and batch["obs"].shape == (4, 3)
    with pytest.raises(SpecError, match="^stack_keys must be several names, got the string 'obs'$"):
        made(stack_num=2, stack_keys="obs")
    buffer = made(stack_num=2, stack_keys=["obs", "nothing"])
    buffer.extend(numbered(0, 3))
    with pytest.raises(MissingKeyError, match=r"^stack_keys: no .'nothing'. in this buffer, there are .'next/done'"):
        buffer.sample(2)


def test_what_a_batcher_puts_beside_observations_is_neither_summed_nor_stacked():
    t = torch.arange(6.0)[None]
    seen = {"frame": t, "reward": t, "initial_state": t == 0, "done": t < 0, "last_action": t.long()}
    after = {"frame": t + 1, "reward": t + 1, "initial_state": t < 0, "done": t == 5, "last_action": t.long() + 1}
    keys = {f"observation/{key}": value for key, value in seen.items()}
    keys |= {f"_observation/{key}": value for key, value in after.items()}
    rollout = Trajectories(DictTensor({}), TemporalDictTensor(keys, torch.tensor([6])))
    n_step, stacked = made(n_step=2, gamma=0.5), made(stack_num=3)
    for buffer in (n_step, stacked):
        buffer.add_trajectories(rollout)
    batch = n_step.sample(200)
    at = batch["index"].float()
    assert batch["observation/reward"].equal(at) and batch["observation/frame"].equal(at)
    assert batch["_observation/frame"].equal((at + 2).clamp(max=6))
    assert batch["_observation/reward"].equal(torch.where(at < 5, at + 1 + 0.5 * (at + 2), at + 1))
    batch = stacked.sample(200)
    shapes = {key: tuple(batch[key].shape[1:]) for key in keys}
    assert shapes == {key: (3,) if key.endswith("frame") else () for key in keys}
    assert batch["_observation/reward"].equal(batch["index"].float() + 1)


@pytest.mark.parametrize("settings", [{"n_step": 2}, {"stack_num": 2}])
def test_steps_are_not_put_together_across_what_nobody_knows(settings):
    buffer = made(**settings)
    buffer.extend({"obs": torch.zeros(4), "reward": torch.zeros(4)})
    with pytest.raises(SpecError, match="^nothing says where episodes end"):
        buffer.sample(2)


def test_a_frame_is_stored_once(storage):
    n, size = 300, 40 * 40
    video = torch.randint(0, 256, (n + 1, size), dtype=torch.uint8)
    done = torch.arange(n) % 50 == 49
    following = video[1:].clone()
    following[done] += 1
    buffer = made(storage, n, stack_num=4)
    for start in range(0, n, 7):
        part = slice(start, start + 7)
        buffer.extend({"obs": video[:-1][part], "next": {"obs": following[part], "done": done[part]}})
    if storage is not DeviceStorage:
        assert buffer.nbytes < 1.1 * n * size
    assert buffer["next/obs"].equal(following)
    assert buffer.sample(5)["next/obs"].shape == (5, 4, size)


# By index


def test_rows_are_read_by_id_in_order_and_by_name(storage):  # B6 test_index_nonfull
    buffer = made(storage, 5)
    for start, n in ((0, 3), (3, 4)):
        buffer.extend(numbered(start, n))
        numbers = [0, 1, 2] if not start else [5, 6, 2, 3, 4]
        assert buffer["next/reward"].tolist() == buffer[:]["next/reward"].tolist() == numbers
        assert buffer.storage[:]["next/reward"].tolist() == [row["next/reward"] for row in buffer.storage] == numbers
        batch = buffer.sample(50)
        for column in ("obs", "next/reward"):  # the ids of a sample are places in a column
            assert buffer[column][batch["index"]].equal(batch[column])
        assert buffer[1:3]["next/reward"].tolist() == numbers[1:3]
        assert buffer[-2:]["next/reward"].tolist() == numbers[-2:]
        assert buffer[::-2]["obs"][:, 0].tolist() == numbers[::-2]
        assert buffer[1:100]["next/reward"].tolist() == numbers[1:] and len(buffer[4:2]) == 0
        assert buffer[-1]["next/reward"] == numbers[-1] and buffer[-len(numbers)]["obs"].shape == (2,)
        mask = buffer["next/reward"] > 1
        assert buffer[mask]["next/reward"].tolist() == [t for t in numbers if t > 1]
    assert buffer[-1]["next/reward"] == 4 and buffer[-5]["next/reward"] == 5  # of the highest id, and of the lowest
    ids = [0, 3, 3]
    for index in (ids, np.array(ids), torch.tensor(ids), np.array(ids, np.uint8)):
        assert buffer[index]["next/reward"].tolist() == [5, 3, 3]
    assert buffer[torch.tensor(0)]["next/reward"] == buffer[0]["next/reward"] == 5
    assert buffer[np.array([[0, 1], [2, 3]])]["next/reward"].tolist() == [[5, 6], [2, 3]]
    assert buffer["next", "reward"].tolist() == buffer["next"]["reward"].tolist() == [5, 6, 2, 3, 4]
    assert len(buffer[[]]) == 0 and sorted(buffer["next"].keys()) == ["done", "reward"]


BAD_INDEXES = {
    "a row that is not there": (3, IndexError, "^index 3 holds no row$"),
    "a row beyond": (10, IndexError, r"^index 10 is not in \[0, 10\)$"),
    "too far back": (-4, IndexError, "^index -4 is out of range for 3 rows$"),
    "a negative one among others": ([0, -1], IndexError, r"^index -1 is not in"),
    "a mask of another size": ([True, False], IndexError, "^a mask must have a value for each of the 3 rows"),
    "a float": (0.5, IndexError, "^an index must be row ids"),
    "nothing": (None, IndexError, "^an index must be row ids"),
    "another name": ("x", MissingKeyError, "^no 'x' in this buffer, there are"),
    "half a name": ("nex", MissingKeyError, "^no 'nex' in this buffer"),
    "a tuple of numbers": ((0, 1), TypeError, "^a key must be a string"),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_index_that_is_none_is_refused(case):
    buffer = made()
    buffer.extend(numbered(0, 3))
    index, error, message = BAD_INDEXES[case]
    with pytest.raises(error, match=message):
        buffer[index]


def test_rows_are_changed_in_place(storage):  # B6 set_at_
    buffer = made(storage, 5)
    buffer.extend(numbered(0, 7))
    buffer[[0, 3]] = {"next": {"reward": [50.0, 30.0]}}
    assert held(buffer) == [2, 30, 4, 50, 6]
    buffer[-1] = {"obs": [8.0, 9.0], "next/reward": 60.0}
    assert buffer["next/reward"].tolist() == [50, 6, 2, 30, 60] and buffer[4]["obs"].tolist() == [8, 9]
    buffer[:2] = {"next/reward": torch.tensor([51.0, 7.0])}
    buffer[buffer["next/reward"] > 40] = {"next/reward": np.array([52, 61])}
    assert buffer["next/reward"].tolist() == [52, 7, 2, 30, 61]
    buffer["next", "reward"] = torch.arange(5)
    assert buffer["next/reward"].tolist() == [0, 1, 2, 3, 4] and len(buffer) == 5 and buffer.write_count == 7
    buffer[[1, 1]] = {"next/reward": [5.0, 6.0]}  # the last counts
    assert buffer[1]["next/reward"] == 6
    buffer[[]] = {"next/reward": np.zeros(0)}
    before = buffer[:]
    for values, error in (
        ({"next/reward": [1.0]}, SpecError), ({"x": [1.0, 2.0]}, MissingKeyError),
        ({"next/done": [0.5, 0.5]}, SpecError), (3.0, TypeError),
        ({"next/reward": [1.0, 2.0], "obs": [[1.0], [2.0]]}, SpecError),
    ):  # fmt: skip
        with pytest.raises(error):
            buffer[[0, 1]] = values
    with pytest.raises(IndexError, match="holds no row|is not in"):
        buffer[[0, 7]] = {"next/reward": [1.0, 2.0]}
    assert buffer[:] == before


@pytest.mark.parametrize("as_tensordict", [False, True])
@pytest.mark.parametrize("sampler", [RandomSampler, PrioritizedSampler])
def test_a_sample_that_was_changed_is_written_back(sampler, as_tensordict):
    buffer = of_six(sampler, as_tensordict)
    batch = buffer.sample()
    index = batch["index"].unique()
    batch.set("x", batch["x"] + 10)
    buffer[batch["index"]] = batch
    changed = torch.arange(6.0)
    changed[index] += 10
    assert buffer["x"].equal(changed)
    for each in ("index", "nothing"):
        with pytest.raises(MissingKeyError, match=f"no '{each}'"):
            buffer[each] = torch.arange(6)


def test_columns_are_changed_in_place(storage):  # B6 set_/set_at_/update_, read_all/write_all
    buffer = made(storage, 5)
    buffer.extend(numbered(0, 7))

    def rewards():
        return buffer["next/reward"].tolist()

    assert buffer.set_(("next", "reward"), torch.arange(5)) is buffer and rewards() == [0, 1, 2, 3, 4]
    assert buffer.set_at_("next/reward", [7.0, 9.0], [0, 1]) is buffer and rewards() == [7, 9, 2, 3, 4]
    changed = numbered(10, 5)
    assert buffer.update_(changed, keys_to_update=[("next", "reward")]) is buffer
    assert rewards() == [10, 11, 12, 13, 14] and buffer["obs"][:, 0].tolist() == [5, 6, 2, 3, 4]
    buffer.update_(changed, clone=True)
    assert buffer["obs"][:, 0].tolist() == rewards() == buffer.read_all_in_order()["next/reward"].tolist()
    buffer.write_all({"next/reward": buffer.read_all_in_order(2)["next/reward"] + 1})
    buffer.write_all({"next/reward": [-3.0]}, 1)
    assert rewards() == [-3, 12, 12, 13, 14]
    before = buffer[:]
    for change, error in (
        (lambda: buffer.update_(changed, keys_to_update=["x"]), MissingKeyError),
        (lambda: buffer.update_(numbered(0, 4)), SpecError), (lambda: buffer.set_("x", [0] * 5), MissingKeyError),
        (lambda: buffer.write_all(numbered(0, 2), 1), SpecError), (lambda: buffer.set_at_("obs", 1.0, 0), SpecError),
    ):  # fmt: skip
        with pytest.raises(error):
            change()
    assert buffer[:] == before


@pytest.mark.parametrize("as_tensordict", [False, True])
@pytest.mark.parametrize("way", ["write_all", "[:]", "mask", "ids"])
def test_what_is_written_to_all_rows_may_have_new_columns(storage, way, as_tensordict):  # B1; as PPO adds advantages
    buffer, rows = made(storage, 5, batch_size=4, sampler=PrioritizedSampler(beta=1.0)), numbered(0, 7)
    buffer.extend(pytest.importorskip("tensordict").TensorDict(rows, [7]) if as_tensordict else rows)
    buffer.add({"obs": torch.zeros(2), "next": {"reward": 7.0, "done": False}})
    every = buffer.read_all_in_order()
    reward = every["next", "reward"] if as_tensordict else every["next/reward"]
    every.set("adv", reward[:, None].float() * 2)
    every.set("half", reward.bfloat16() / 2)
    if way == "write_all":
        buffer.write_all(every)
    else:
        at = {"[:]": slice(None), "mask": np.ones(5, bool), "ids": [0, 1, 2, 3, 4]}[way]
        buffer[at] = every
    assert buffer["adv"].tolist() == [[10], [12], [14], [6], [8]] and buffer["half"].dtype == torch.bfloat16
    batch = buffer.sample()
    assert batch["adv"].equal(buffer[batch["index"]]["adv"]) and batch["half"].shape == (4,)
    with pytest.raises(MissingKeyError, match="missing"):
        buffer.add({"obs": torch.zeros(2), "next": {"reward": 7.0, "done": False}})
    buffer.add({"obs": torch.zeros(2), "next": {"reward": 8.0, "done": False}, "adv": torch.ones(1), "half": 4.0})
    assert buffer["adv"].tolist() == [[10], [12], [14], [1], [8]]
    buffer.empty()
    assert buffer.extend(numbered(0, 2)).tolist() == [0, 1]  # the next rollout comes without


def test_new_columns_that_cannot_be_change_nothing(storage):
    buffer = made(storage, 5, sampler=PrioritizedSampler(beta=1.0))
    buffer.extend(numbered(0, 4))
    before = buffer[:]
    for values, error in (
        ({"adv": torch.zeros(3)}, SpecError), ({"next/reward": torch.zeros(4), "adv": ["a"] * 4}, SpecError),
        ({"index": torch.zeros(4)}, MissingKeyError), ({"priority_weight": torch.zeros(4)}, MissingKeyError),
        ({"adv": torch.zeros(4), "next/reward": torch.zeros(4, 2)}, SpecError),
    ):  # fmt: skip
        with pytest.raises(error):
            buffer[:] = values
    for part in (slice(1, None), [0, 0, 1, 2], 0):
        with pytest.raises(MissingKeyError, match="^no 'adv' in this store"):
            buffer[part] = {"adv": np.zeros(1) if part == 0 else np.zeros(3 if isinstance(part, slice) else 4)}
    with pytest.raises(MissingKeyError):
        buffer.write_all({"adv": torch.zeros(3)}, 3)
    for change in (lambda: buffer.update_({"adv": torch.zeros(4)}), lambda: buffer.set_("adv", torch.zeros(4)),
                   lambda: buffer.set_at_("adv", torch.zeros(4), slice(None))):  # fmt: skip
        with pytest.raises(MissingKeyError, match="^no 'adv' in this store"):
            change()
    assert buffer[:] == before


def test_a_new_column_may_end_episodes():
    buffer = made(sampler=SliceSampler(slice_len=2))
    buffer.extend({"x": torch.arange(4)})
    buffer[:] = {"done": torch.tensor([True, False, True, True])}
    assert buffer.sample(2)["x"].tolist() == [1, 2]


def test_a_row_that_is_changed_is_the_only_one_that_is_looked_at(storage, monkeypatch):
    buffer = made(storage, 500)
    buffer.extend(numbered(0, 500))
    looked_at = []
    gather = buffer._storage.gather
    monkeypatch.setattr(buffer._storage, "gather", lambda *args: looked_at.append(args[1].size) or gather(*args))
    buffer[3] = {"next/reward": 50.0}
    assert sum(looked_at) <= 1


def test_episodes_follow_ends_that_are_changed(storage):
    buffer = made(storage, 10)
    t = torch.arange(9)
    buffer.extend({"obs": t.float(), "next": {"reward": torch.ones(9), "done": t % 3 == 2}})
    times = lambda: buffer._storage.episodes.times(buffer._storage.view().row_ids(np.arange(9))).tolist()  # noqa: E731
    assert times() == [0, 1, 2] * 3
    buffer[2] = {"next/done": False}
    assert times() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    buffer[[0, 6]] = {"next/done": [True, True]}
    assert times() == [0, 0, 1, 2, 3, 4, 0, 0, 1]
    buffer["obs"] = torch.zeros(9)
    assert times() == [0, 0, 1, 2, 3, 4, 0, 0, 1]
    buffer.extend({"obs": torch.zeros(1), "next": {"reward": torch.ones(1), "done": torch.ones(1).bool()}})
    assert buffer._storage.episodes.remaining(np.array([8, 9])).tolist() == [1, 1]


def test_where_trajectories_begin_stays_so_when_ends_are_changed():
    t = torch.arange(6).view(2, 3)
    buffer = made()
    buffer.extend(TemporalDictTensor({"obs": t, "done": torch.zeros(2, 3, dtype=torch.bool)}))
    buffer[1] = {"done": True}
    assert buffer._storage.episodes.times(np.arange(6)).tolist() == [0, 1, 0, 0, 1, 2]
    buffer[1] = {"done": False}
    assert buffer._storage.episodes.times(np.arange(6)).tolist() == [0, 1, 2, 0, 1, 2]


# Else


def test_torchrls_names_are_the_same_classes():
    assert TensorDictReplayBuffer is DictTensorReplayBuffer
    assert TensorDictPrioritizedReplayBuffer is DictTensorPrioritizedReplayBuffer
    for buffer in (TensorDictReplayBuffer(), TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4)):
        assert buffer.storage.max_size == 1000 and len(buffer.extend({"x": torch.arange(1500)})) == 1500
        assert len(buffer) == 1000 and buffer["x"].min() == 500  # as torchrl's default storage
    assert ListStorage().max_size == ListStorage(None).max_size == torch.iinfo(torch.int64).max  # no limit


def test_a_repr_says_what_there_is():
    buffer = made(batch_size=3)
    buffer.extend(numbered(0, 2))
    assert repr(buffer) == (
        "DictTensorReplayBuffer(len=2, ListStorage(max_size=10), RandomSampler(), RoundRobinWriter(), batch_size=3, "
        "obs=(2,) float32, next/reward=() float64, next/done=() bool)"
    )
    per = DictTensorReplayBuffer(sampler=PrioritizedSampler(alpha=0.6, beta=0.4))
    assert "PrioritizedSampler(alpha=0.6, beta=0.4, eps=1e-08, reduction='max')" in repr(per)
    assert repr(PrioritizedSliceSampler(slice_len=2, alpha=0.5)) == (
        "PrioritizedSliceSampler(slice_len=2, strict_length=True, pad_output=False, per='window', alpha=0.5, beta=0.5, "
        "eps=1e-08, reduction='max')"
    )
    assert repr(MemmapStorage(3)) == "MemmapStorage(max_size=3, scratch_dir=None)"
    assert repr(MaxValueWriter("x")) == "MaxValueWriter(rank_key='x', reduction='sum')"
    assert repr(SamplerWithoutReplacement()) == "SamplerWithoutReplacement(drop_last=False, shuffle=True)"


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(TypeError, match="^storage must be a ReplayStorage, or a function that creates one, got int$"):
        DictTensorReplayBuffer(storage=100)
    with pytest.raises(TypeError, match="^sampler must be a Sampler, or a function that creates one, got ListStorage$"):
        DictTensorReplayBuffer(sampler=ListStorage)
    with pytest.raises(TypeError, match="^a transform must be a function of a batch, got int$"):
        made(transform=3)
    with pytest.raises(ValueError, match="^prefetch needs a batch_size"):
        made(prefetch=2)
    for settings, message in (({"n_step": 0}, "n_step"), ({"stack_num": 0}, "stack_num"), ({"gamma": 2.0}, "gamma")):
        with pytest.raises(SpecError, match=f"^{message} must be"):
            made(**settings)
    with pytest.raises(TypeError, match="^a key must be a string"):
        made(priority_key=3)
    with pytest.raises(TypeError, match="^sampler: this buffer has its own"):
        DictTensorPrioritizedReplayBuffer(alpha=0.5, beta=0.5, sampler=PrioritizedSampler())


def test_threads_may_write_and_sample_at_once(storage):  # R44
    buffer = made(storage, 64, batch_size=16, prefetch=2)
    buffer.extend(checked_rows(0, 8))
    errors, stop = [], threading.Event()

    def write(start):
        try:
            for n in range(start, start + 300):
                rows = checked_rows(n, n % 9 + 1)
                if n % 3:
                    buffer.extend(rows)
                else:
                    buffer.add({name: value[0] for name, value in rows.items()})
        except Exception as error:  # a thread shows it to nobody
            errors.append(error)

    def read():
        try:
            while not stop.is_set():
                batch = buffer.sample()
                assert (batch["x"].sum(dim=1) == batch["sum"]).all() and (batch["x"][:, 0] == batch["n"]).all()
                assert 0 < len(buffer[:]) <= 64
        except Exception as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(1000 * at,)) for at in range(2)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    buffer.close()
    assert not errors
    assert buffer.write_count == 8 + sum(n % 9 + 1 if n % 3 else 1 for at in (0, 1000) for n in range(at, at + 300))
    everything = buffer[:]
    assert (everything["x"].sum(dim=1) == everything["sum"]).all() and len(everything) == 64


def checked_rows(start, n):
    """Rows whose columns say whether they belong together."""
    x = torch.arange(start, start + n)[:, None] + torch.arange(200)
    return {"n": torch.arange(start, start + n), "x": x, "sum": x.sum(dim=1)}


def test_priorities_are_set_to_those_of_a_tensordict_that_was_read_by_index():
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = DictTensorPrioritizedReplayBuffer(storage=TensorStorage(4), alpha=1.0, beta=1.0, batch_size=8, generator=0)
    buffer.extend(TensorDict({"obs": torch.arange(6)}, [6]))  # the oldest two are gone
    rows = buffer[:]
    rows["td_error"] = (rows["obs"] == 4).float()
    buffer.update_tensordict_priority(rows)
    assert buffer.sample()["obs"].tolist() == [4] * 8


@pytest.mark.parametrize("n_stacked", [2, 3])
def test_stacks_lie_behind_the_axes_of_a_tensordict(n_stacked):
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = made(TensorStorage, 20, batch_size=6, stack_num=n_stacked, stack_keys=["observation"])
    times, envs = torch.arange(12.0).view(12, 1), torch.arange(2.0)
    frames = (10 * times + envs)[..., None].expand(12, 2, 4)
    buffer.extend(TensorDict({"observation": frames, "env": envs.expand(12, 2), "done": torch.zeros(12, 2)}, [12, 2]))
    batch = buffer.sample()
    assert batch.batch_size == (6, 2) and batch["observation"].shape == (6, 2, n_stacked, 4)
    for row, t in zip(batch, batch["index"][:, 0].tolist(), strict=True):
        for env in range(2):
            frames = [10 * max(t - ago, 0) + env for ago in reversed(range(n_stacked))]
            assert row["observation"][env, :, 0].tolist() == frames


def test_an_index_of_two_axes_gives_a_tensordict_of_two():
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = made(TensorStorage)
    buffer.extend(TensorDict({"a": torch.arange(6)}, [6]))
    found = buffer[torch.tensor([[1, 2, 0], [3, 4, 5]])]
    assert found.batch_size == (2, 3) and found["index"].equal(found["a"])


def test_rows_without_a_column_are_an_error():
    TensorDict = pytest.importorskip("tensordict").TensorDict
    for before in (None, TensorDict({"a": torch.arange(6)}, [6])):
        buffer = made(TensorStorage)
        n = 0 if before is None else len(buffer.extend(before))
        for rows in (TensorDict({}, [2]), TensorDict({"next": {}}, [2]), {"next": {}}):
            with pytest.raises(MissingKeyError, match="^extend: rows need a column, there is none"):
                buffer.extend(rows)
        assert len(buffer) == n and not len(buffer.extend([])) and not len(buffer.extend(TensorDict({}, [0])))


def test_methods_that_a_program_overrides_are_called_where_others_use_them(tmp_path):
    calls = []

    class Watched(DictTensorPrioritizedReplayBuffer):
        def __getitem__(self, index):
            calls.append("[]")
            return super().__getitem__(index)

        def __setitem__(self, index, values):
            calls.append("[]=")
            super().__setitem__(index, values)

        def update_priority(self, index, priority):
            calls.append("update_priority")
            super().update_priority(index, priority)

        def dumps(self, path):
            calls.append("dumps")
            super().dumps(path)

        def load(self, path):
            calls.append("load")
            super().load(path)

    def called(call):
        calls.clear()
        call()
        return calls

    buffer = Watched(alpha=1.0, beta=1.0, batch_size=2)
    buffer.extend(numbered(0, 4))
    batch = buffer.sample()
    batch.set("td_error", torch.ones(2))
    assert called(buffer.read_all_in_order) == ["[]"]
    assert called(lambda: buffer.write_all(numbered(4, 4))) == ["[]="]
    assert called(lambda: buffer.update_tensordict_priority(batch)) == ["update_priority"]
    assert called(lambda: buffer.sampler.update_priority(0, 1.0)) == ["update_priority"]
    assert called(lambda: buffer.save(tmp_path / "folder")) == ["dumps"]
    assert called(lambda: buffer.loads(tmp_path / "folder")) == ["load"]


def test_what_is_no_name_is_not_in_the_info_of_a_draw():
    buffer = DictTensorReplayBuffer(batch_size=3)
    buffer.extend(numbered(0, 4))
    _, info = buffer.sample(return_info=True)
    name = next(iter(info))
    assert name in info and info.get(name) is info[name]
    for key in (3, None, 1.5, ("a", 3), (), b"index"):
        assert key not in info and info.get(key, "none") == "none"
        with pytest.raises(KeyError):
            info[key]
    with pytest.raises(TypeError, match="unhashable"):
        assert [name] in info
