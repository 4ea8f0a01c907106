"""One suite for the memories of torch, jax and warp. "CV" is a conformance vector of skrl's memories, "S" one of its
bugs that must not come back, "R" a scenario in which comparable systems went wrong."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import pickle
import sys
import weakref
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from frameworks import (
    EVERY_KIND,
    KINDS,
    ON_HOST,
    add,
    array,
    change,
    counted,
    dtype,
    dtype_name,
    flat,
    host,
    library,
    make,
    name_of,
    share_memory,
    snapshot,
)
from gymnasium import spaces
from helpers import create_gym, rollout
from processes import LIMIT
from walk import Walk

from rlstructs import DictTensor, RandomAgent, RL_Batcher, TemporalDictTensor, Trajectories
from rlstructs.errors import MissingKeyError, SpecError, StateError

nan = float("nan")


@pytest.fixture(params=EVERY_KIND)
def kind(request):
    return request.param


def every(memory, *names, **settings):
    """Each tensor's numbers as `sample_all` gives them: for each part a list."""
    return [[flat(tensor) for tensor in part] for part in memory.sample_all(names, **settings)]


def windows(memory, length, name="t", **settings):
    """The different sequences that 400 draws give."""
    [[tensor]] = memory.sample([name], batch_size=400, sequence_length=length, **settings)
    return {tuple(row) for row in host(tensor).reshape(-1, length).tolist()}


def test_storage_comes_by_row_and_then_by_environment(kind):  # CV1
    memory = counted(kind, 4, 2, 4)
    [[t, e, unknown]] = memory.sample_all(["t", "e", "unknown"])
    assert (flat(t), flat(e), unknown) == ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4, None)
    assert host(t).shape == (8, 1)


def test_sequences_come_by_environment_and_are_never_cut(kind):  # CV2, S7, S11
    memory = counted(kind, 4, 2, 4)
    assert every(memory, "t", "e", sequence_length=2) == [[[0, 1, 2, 3] * 2, [0] * 4 + [1] * 4]]
    parts = every(memory, "t", "e", sequence_length=2, mini_batches=3)
    assert [t for t, _ in parts] == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert [e for _, e in parts] == [[0] * 4, [1] * 2, [1] * 2]
    assert memory.all_sequence_indexes.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("name", ["float32", "int32", "uint8", "bool", "bfloat16"])
def test_dtypes_have_names(kind, name):
    memory = KINDS[kind].RandomMemory(memory_size=2)
    memory.create_tensor("x", 1, name)
    framework = memory.framework
    assert framework.dtype_name(framework.dtype(name)) == name


def test_numbers_that_are_none_are_refused(kind):
    memory = counted(kind, 4, 2, 4)
    for wrong in ("2", 2.5, None, True):
        with pytest.raises(TypeError, match=f"^mini_batches must be an int, got {wrong!r}$"):
            memory.sample(["t"], 2, mini_batches=wrong)
    for wrong in ("1", None, torch.tensor(0.5)):
        with pytest.raises(TypeError, match="^gamma must be a number, got"):
            memory.sample(["t"], 2, gamma=wrong)


@pytest.mark.parametrize("mini_batches", [-1, 0, 1, 2, 3, 4, 8, 10])
def test_sample_all_gives_every_row_exactly_once(kind, mini_batches):  # CV3, S8, R28
    parts = every(counted(kind, 4, 2, 4), "t", mini_batches=mini_batches)
    expected = np.array_split([0, 0, 1, 1, 2, 2, 3, 3], max(mini_batches, 1))
    assert [t for [t] in parts] == [part.tolist() for part in expected]


def test_sample_all_gives_no_row_that_was_never_written(kind):  # CV4, S9
    memory = counted(kind, 4, 2, 2)
    assert (len(memory), every(memory, "t")) == (4, [[[0, 0, 1, 1]]])
    assert every(memory, "t", sequence_length=2) == [[[0, 1, 0, 1]]]
    empty = make(kind, 4, 2, ["t"])
    assert every(empty, "t", mini_batches=2) == [[[]], [[]]]
    assert every(empty, "t", sequence_length=3) == [[[]]]


def test_a_sequence_steps_from_row_to_row_of_one_environment(kind):  # CV5
    memory = counted(kind, 6, 2, 6)
    [[t, e]] = memory.sample(["t", "e"], batch_size=3, sequence_length=3)
    indexes = np.asarray(memory.get_sampling_indexes())
    assert indexes.dtype == np.int64 and indexes.shape == (9,)
    starts = indexes[::3]
    assert indexes.tolist() == [int(i) for start in starts for i in (start, start + 2, start + 4)]
    assert (flat(t), flat(e)) == ((indexes // 2).tolist(), (indexes % 2).tolist())
    assert (np.asarray(memory.get_sampling_indexes()) == np.asarray(memory.sampling_indexes)).all()


def test_every_window_of_a_full_memory_is_drawn_and_no_other(kind):  # CV6
    memory = counted(kind, 5, 3, 5)
    [[t, e]] = memory.sample(["t", "e"], batch_size=400, sequence_length=3)
    rows = {(*ts, *es) for ts, es in zip(host(t).reshape(-1, 3).tolist(), host(e).reshape(-1, 3).tolist(), strict=True)}
    assert rows == {(s, s + 1, s + 2, e, e, e) for s in range(3) for e in range(3)}


def test_windows_of_a_row_that_some_environments_have(kind):  # CV7
    memory = counted(kind, 5, 3, 2)
    add(memory, kind, t=[[2.0], [2.0]], e=[[0.0], [1.0]])
    assert len(memory) == 8
    [[t, e]] = memory.sample(["t", "e"], batch_size=400, sequence_length=2)
    pairs = zip(host(t).reshape(-1, 2).tolist(), host(e).reshape(-1, 2).tolist(), strict=True)
    found = {(*ts, *es) for ts, es in pairs}
    assert found == {(0, 1, e, e) for e in range(3)} | {(1, 2, e, e) for e in range(2)}


def test_windows_do_not_cross_the_write_head_and_do_cross_the_end_of_storage(kind):  # CV8, S10
    memory = counted(kind, 4, 1, 6)
    assert flat(memory.get_tensor_by_name("t")) == [4, 5, 2, 3]
    assert windows(memory, 2) == {(2, 3), (3, 4), (4, 5)}
    assert windows(memory, 4) == {(2, 3, 4, 5)}
    assert every(memory, "t") == [[[2, 3, 4, 5]]]


def test_several_rows_at_once_wrap(kind):  # CV9, S2
    memory = make(kind, 5, 1, ["t"])
    add(memory, kind, t=np.arange(3.0)[:, None])
    add(memory, kind, t=np.arange(3.0, 7.0)[:, None])
    assert flat(memory.get_tensor_by_name("t")) == [5, 6, 2, 3, 4]
    assert (memory.memory_index, memory.filled, len(memory)) == (2, True, 5)


def test_tensors_of_one_call_lie_in_the_same_rows(kind):  # CV10, S3, R26
    memory = make(kind, 5, 1, ["x", "y"])
    add(memory, kind, x=[[1.0], [2.0], [3.0]], y=[[10.0], [20.0], [30.0]])
    assert [flat(memory.get_tensor_by_name(name)[:3]) for name in "xy"] == [[1, 2, 3], [10, 20, 30]]
    assert (memory.memory_index, len(memory), memory.filled) == (3, 3, False)
    add(memory, kind, x=[[4.0], [5.0], [6.0]], y=[[40.0], [50.0], [60.0]])
    assert (memory.memory_index, memory.filled) == (1, True)
    assert every(memory, "x", "y") == [[[2, 3, 4, 5, 6], [20, 30, 40, 50, 60]]]


@pytest.mark.parametrize("n", [3, 4, 6, 7, 8, 20])
def test_more_rows_than_there_is_room_for_leave_the_last(kind, n):  # CV11
    memory = make(kind, 3, 1, ["t"])
    add(memory, kind, t=np.arange(float(n))[:, None])
    assert (every(memory, "t"), len(memory), memory.filled) == ([[[n - 3, n - 2, n - 1]]], 3, True)
    assert memory.memory_index == n % 3


def test_a_whole_row_after_a_part_of_one_goes_to_each_environments_own_next_row(kind):  # CV12, S6
    memory = make(kind, 3, 3, ["t"])
    add(memory, kind, t=[[1.0], [2.0]])
    add(memory, kind, t=[[5.0], [6.0], [7.0]])
    assert (len(memory), memory.memory_index, memory.env_index) == (5, 1, 2)
    assert every(memory, "t", sequence_length=3) == [[[1, 5, 2, 6, 7]]]
    add(memory, kind, t=[[8.0]])
    assert (len(memory), memory.memory_index, memory.env_index) == (6, 2, 0)
    assert every(memory, "t") == [[[1, 2, 7, 5, 6, 8]]]


def test_tensors_without_an_axis_of_rows_are_one_transition(kind):  # CV13
    memory = make(kind, 3, 2, {"x": ("float32", 3), "r": ("float32", 1)})
    add(memory, kind, x=[1.0, 2.0, 3.0], r=[9.0])
    assert (len(memory), memory.memory_index, memory.env_index) == (1, 0, 1)
    assert every(memory, "x", "r") == [[[1, 2, 3], [9]]]


def test_a_new_tensor_leaves_the_others_as_they_are(kind):  # CV14, S1, R27
    memory = counted(kind, 4, 2, 2)
    memory.create_tensor("y", size=2)
    [[t, y]] = memory.sample_all(["t", "y"])
    assert flat(t) == [0, 0, 1, 1]
    assert np.isnan(host(y)).all() and host(y).shape == (4, 2)


def test_each_time_that_it_fills_it_is_exported(kind, tmp_path):  # CV15, S17
    memory = counted(kind, 4, 1, 9, export=True, export_format="npz", export_directory=str(tmp_path))
    files = sorted((tmp_path / "memories").iterdir())
    assert [np.load(file)["t"].ravel().tolist() for file in files] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(memory) == 4


def test_reset_drops_the_rows_and_keeps_the_storage(kind):  # CV16, R29
    memory = counted(kind, 4, 2, 6)
    memory.sample(["t"], batch_size=5)
    indexes = np.asarray(memory.get_sampling_indexes()).copy()
    memory.reset()
    assert (len(memory), memory.memory_index, memory.env_index, memory.filled) == (0, 0, 0, False)
    assert flat(memory.get_tensor_by_name("t")) == [4, 4, 5, 5, 2, 2, 3, 3]
    assert (np.asarray(memory.get_sampling_indexes()) == indexes).all()
    add(memory, kind, t=[[7.0], [8.0]], e=[[0.0], [1.0]])
    assert flat(memory.get_tensor_by_name("t")) == [7, 8, 5, 5, 2, 2, 3, 3]
    assert (len(memory), memory.memory_index, every(memory, "t")) == (2, 1, [[[7, 8]]])


@pytest.mark.parametrize("n_rows", [1, 3, 4, 5, 7])
def test_after_a_reset_in_the_middle_of_a_row_the_first_environment_comes_first(kind, n_rows):
    memory = counted(kind, 4, 2, n_rows)
    add(memory, kind, t=[[9.0]], e=[[0.0]])
    memory.reset()
    for at, (n, place) in enumerate([(1, (0, 1)), (1, (1, 0)), (2, (2, 0)), (1, (2, 1))]):
        add(memory, kind, t=np.full((n, 1), 10.0 + at), e=np.zeros((n, 1)))
        assert (memory.memory_index, memory.env_index) == place
    assert every(memory, "t", sequence_length=4) == [[[10, 12, 13, 11, 12]]]


def test_episodes_of_before_a_reset_do_not_go_on(kind):  # R29
    memory = make(kind, 4, 1, {"t": ("float32", 1), "terminated": ("bool", 1)})
    for t in range(3):
        add(memory, kind, t=[[float(t)]], terminated=[[False]])
    memory.reset()
    add(memory, kind, t=[[5.0], [6.0]], terminated=[[False], [False]])
    memory.sample(["t"], batch_size=40)
    first, indexes = flat(memory.get_sampling_is_first()), np.asarray(memory.get_sampling_indexes())
    assert first == (indexes == 0).tolist()


def write_one_row_each(memories):
    for memory in memories:
        memory.add_samples(t=np.full((2, 1), 7.0, np.float32))


def test_a_process_that_it_is_given_to_writes_rows_that_this_one_sees(start_method):  # CV17, S25
    memories = [make(kind, 3, 2, ["t"]) for kind in ON_HOST]
    for memory in memories:
        memory.share_memory()
    context = multiprocessing.get_context(start_method)
    process = context.Process(target=write_one_row_each, args=(memories,))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0
    assert [(len(memory), memory.memory_index, *every(memory, "t")) for memory in memories] == [(2, 1, [[7, 7]])] * 3


@pytest.mark.parametrize("kind", ON_HOST)
def test_sharing_keeps_what_is_there(kind):
    memory = make(kind, 4, 2, {"t": ("float32", 1), "terminated": ("bool", 1)})
    for t in range(6):
        add(memory, kind, t=np.full((2, 1), float(t)), terminated=np.full((2, 1), t == 3))
    before = snapshot(memory)
    memory.share_memory()
    assert snapshot(memory) == before
    add(memory, kind, t=[[6.0], [6.0]], terminated=[[False], [False]])
    assert every(memory, "t") == [[[3, 3, 4, 4, 5, 5, 6, 6]]]
    assert windows(memory, 2, episode_ends="never") == {(4, 5), (5, 6)}


def send_tensor(channel, tensor):
    tensor += 1
    channel.put(tensor.is_shared())


def test_tensors_of_torch_say_whether_they_are_shared():  # as those of skrl
    memory = make("torch", 4, 2, {"t": ("float32", 1), "k": ("int64", (2, 3)), "terminated": ("bool", 1)})
    add(memory, "torch", t=[[1.0], [2.0]])

    def tensors():
        views = memory.tensors_view
        return [*memory.tensors.values(), *views.values(), memory.get_tensor_by_name("t"), memory._tensor_t]

    assert not any(tensor.is_shared() for tensor in tensors())
    shapes = [tensor.shape for tensor in tensors()]
    memory.share_memory()
    assert all(tensor.is_shared() for tensor in tensors()) and [tensor.shape for tensor in tensors()] == shapes
    add(memory, "torch", t=[[3.0], [4.0]], k=np.arange(12).reshape(2, 2, 3))
    live = memory.get_tensor_by_name("t")
    assert flat(live)[:4] == [1, 2, 3, 4] and memory.tensors["k"][1].tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    live[0, 0] = 9
    assert every(memory, "t") == [[[9, 2, 3, 4]]]
    # One that is sent to another process is of the same memory there.
    context = torch.multiprocessing.get_context("spawn")
    channel = context.SimpleQueue()
    process = context.Process(target=send_tensor, args=(channel, live))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0 and channel.get() and every(memory, "t") == [[[10, 3, 4, 5]]]


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind not in ON_HOST])
def test_tensors_of_a_device_cannot_be_shared(kind):
    memory = counted(kind, 4, 2, 3)
    before = snapshot(memory)
    with pytest.raises(StateError, match="^the rows lie on .* and cannot be moved; make the memory with device='cpu'$"):
        memory.share_memory()
    assert snapshot(memory) == before
    add(memory, kind, t=[[3.0], [3.0]], e=[[0.0], [1.0]])
    assert every(memory, "t") == [[[0, 0, 1, 1, 2, 2, 3, 3]]]


# Constructor and tensors


def test_a_new_memory_is_empty(kind):
    memory = KINDS[kind].RandomMemory(memory_size=3, num_envs=2)
    assert (memory.memory_size, memory.num_envs, len(memory)) == (3, 2, 0)
    assert (memory.filled, memory.memory_index, memory.env_index) == (False, 0, 0)
    assert (memory.sampling_indexes, memory.get_sampling_indexes(), memory.tensors) == (None, None, {})
    assert (memory.export, memory.export_format, memory.export_directory) == (False, "pt", "")
    assert "cpu" in str(KINDS[kind].RandomMemory(memory_size=1, device="cpu").device)
    with pytest.raises(TypeError, match="abstract"):
        KINDS[kind].Memory(memory_size=3)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"memory_size": 0}, SpecError, "^memory_size must be at least 1, got 0$"),
        ({"memory_size": -1}, SpecError, "^memory_size must be at least 1, got -1$"),
        ({"memory_size": 2.0}, TypeError, "^memory_size must be an int, got 2.0$"),
        ({"memory_size": True}, TypeError, "^memory_size must be an int, got True$"),
        ({"memory_size": 2, "num_envs": 0}, SpecError, "^num_envs must be at least 1, got 0$"),
        ({"memory_size": 2, "num_envs": "2"}, TypeError, "^num_envs must be an int, got '2'$"),
        ({"memory_size": 2, "export_format": "np"}, ValueError, "^the format must be one of .*'npz'.*, got 'np'$"),
        ({"memory_size": 2, "device": "abacus", "strict": True}, SpecError, "^device: .* has no 'abacus'"),
        ({"memory_size": 2, "device": "cpu:7x", "strict": True}, SpecError, "^device: .* has no 'cpu:7x'"),
        ({"memory_size": 2, "device": 3.5, "strict": True}, (TypeError, SpecError), "3.5"),
        ({"memory_size": 2, "seed": -1}, SpecError, "^a seed must be a Generator or an int of at least 0, got -1$"),
        ({"memory_size": 2, "seed": 1.5}, SpecError, "^a seed must be a Generator or an int of at least 0, got 1.5$"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, settings, error, message):
    with pytest.raises(error, match=message):
        KINDS[kind].RandomMemory(**settings)


@pytest.mark.parametrize("device", ["abacus", "cpu:7x"])
def test_the_default_device_takes_the_place_of_an_unknown_one_with_a_warning(kind, device, caplog):  # as in skrl
    with caplog.at_level(logging.WARNING, "rlstructs"):
        memory = KINDS[kind].RandomMemory(memory_size=2, device=device)
    assert memory.device == KINDS[kind].RandomMemory(memory_size=2).device
    [record] = caplog.records
    assert f"has no '{device}'" in record.message and record.message.endswith("the default device takes its place")


@pytest.mark.parametrize("cls", ["RandomMemory", "PrioritizedMemory"])
def test_arguments_may_come_by_place_as_skrl_had_them(kind, cls, tmp_path):
    class Derived(getattr(KINDS[kind], cls)):
        def create_tensor(self, name, size, dtype=None, keep_dimensions=False):
            return super().create_tensor(name, size, dtype, keep_dimensions)

    if cls == "RandomMemory":
        memory = Derived(3, 2, None, True, "npz", tmp_path, False, seed=1)
        assert (memory.export, memory.export_format, memory.export_directory) == (True, "npz", tmp_path)
        assert memory._replacement is False
    else:
        memory = Derived(memory_size=3, num_envs=2)
    assert (memory.memory_size, memory.num_envs) == (3, 2)
    memory.create_tensor("x", (2, 3), dtype(kind, "float32"), True)
    memory.create_tensor("y", 2)
    for t in range(2):
        add(memory, kind, x=np.full((2, 2, 3), float(t)), y=np.full((2, 2), float(t)))
    parts = memory.sample(["x", "y"], 2, 2, 2)
    assert [[host(tensor).shape for tensor in part] for part in parts] == [[(2, 2, 3), (2, 2)]] * 2
    assert [flat(y) for [y] in memory.sample_all(["y"], 2, 2)] == [[0, 0, 1, 1]] * 2
    assert [flat(y) for [y] in memory.sample_by_index(["y"], [0, 3], 2)] == [[0, 0], [1, 1]]
    assert memory.save(tmp_path, "pt").suffix == ".pt"


def test_a_tensor_is_given_by_flat_index_too(kind):
    memory = make(kind, 4, 3, {"x": ("float32", (2, 5))})
    add(memory, kind, x=np.arange(30.0).reshape(3, 2, 5))
    by_row, by_index = (memory.get_tensor_by_name("x", keepdim=keepdim) for keepdim in (True, False))
    assert (host(by_row).shape, host(by_index).shape) == ((4, 3, 2, 5), (12, 2, 5))
    np.testing.assert_array_equal(host(by_row).reshape(12, 2, 5), host(by_index))
    assert flat(memory.tensors_view["x"])[:30] == flat(by_index)[:30] == list(range(30))


SIZES = {
    "int": (3, 3), "numpy int": (np.int64(3), 3), "list": ([2, 3], 6), "tuple": ((2, 3), 6), "empty list": ([], 1),
    "Box": (spaces.Box(-1, 1, (2, 3)), 6), "Discrete": (spaces.Discrete(5), 1),
    "MultiBinary": (spaces.MultiBinary(4), 4), "MultiDiscrete": (spaces.MultiDiscrete([3, 4, 5]), 3),
    "MultiDiscrete of 2 axes": (spaces.MultiDiscrete([[2, 3, 4], [5, 6, 7]]), 6),  # S26
    "Tuple": (spaces.Tuple([spaces.Discrete(5), spaces.Box(-1, 1, (2,))]), 3),
    "Dict": (spaces.Dict({"a": spaces.Discrete(5), "b": spaces.Tuple([spaces.MultiBinary(2)])}), 3),
}  # fmt: skip


@pytest.mark.parametrize(("size", "n"), SIZES.values(), ids=SIZES)
def test_a_tensor_takes_as_many_numbers_as_its_size_says(kind, size, n):
    memory = make(kind, 4, 2)
    assert memory.create_tensor("x", size=size) is True
    assert host(memory.get_tensor_by_name("x")).shape == (4, 2, n)
    assert memory.create_tensor("x", size=size) is False
    assert dtype_name(kind, memory.get_tensor_by_name("x")) == "float32"


def test_a_size_of_none_makes_nothing(kind):
    memory = make(kind, 4, 2)
    assert memory.create_tensor("states", size=None, dtype="nonsense") is False
    assert memory.get_tensor_names() == []


def test_dimensions_can_be_kept(kind):  # S5
    memory = make(kind, 4, 2)
    assert memory.create_tensor("x", size=(3, 2), keep_dimensions=True) is True
    assert memory.create_tensor("x", size=[3, 2], keep_dimensions=True) is False
    assert host(memory.get_tensor_by_name("x")).shape == (4, 2, 3, 2)
    values = np.arange(12.0).reshape(2, 3, 2)
    add(memory, kind, x=values)
    assert (len(memory), host(memory.sample_all(["x"])[0][0]).tolist()) == (2, values.tolist())
    with pytest.raises(SpecError, match=r"^tensor 'x' exists with rows of shape \(3, 2\), not \(2, 3\)$"):
        memory.create_tensor("x", size=(2, 3), keep_dimensions=True)
    with pytest.raises(SpecError, match=r"^tensor 'x' exists with rows of shape \(3, 2\), not \(2,\)$"):
        memory.create_tensor("x", size=2)


def test_a_tensor_is_not_made_again_with_another_dtype(kind):
    memory = make(kind, 4, 2, {"x": ("uint8", 3)})
    assert memory.create_tensor("x", size=3) is False
    assert memory.create_tensor("x", size=3, dtype=dtype(kind, "uint8")) is False
    with pytest.raises(SpecError, match="^tensor 'x' exists with dtype .*uint8.*, not .*float16"):
        memory.create_tensor("x", size=3, dtype=dtype(kind, "float16"))
    assert memory.create_tensor("y", size=1, dtype=float) is True
    assert memory.create_tensor("y", size=1, dtype=float) is False


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("x", {"size": 0}, SpecError, "size must be at least 1, got 0"),
        ("x", {"size": [2, 0]}, SpecError, "size must be at least 1, got 0"),
        ("x", {"size": -1}, SpecError, "size must be at least 1, got -1"),
        ("x", {"size": 1.5}, TypeError, "size must be an int, got 1.5"),
        ("x", {"size": True}, TypeError, "size must be an int, got True"),
        ("x", {"size": "3"}, TypeError, "size must be an int, got '3'"),
        ("x", {"size": object()}, TypeError, "size must be an int, a list of ints, a gymnasium space or None"),
        ("x", {"size": 3, "keep_dimensions": True}, SpecError, "size must be a tuple or a list"),
        ("x", {"size": spaces.Discrete(3), "keep_dimensions": True}, SpecError, "size must be a tuple or a list"),
        ("x", {"size": spaces.Sequence(spaces.Discrete(3))}, SpecError, "no fixed number of elements"),
        ("x", {"size": 3, "dtype": "no dtype"}, SpecError, "dtype must be one of"),
        ("x", {"size": 3, "dtype": object}, SpecError, "dtype"),
        ("x", {"size": 2**50}, MemoryError, "^tensor 'x': .* bytes are needed, .* are available"),
        ("", {"size": 3}, SpecError, "^a tensor's name must be a string"),
        ("__ring__", {"size": 3}, SpecError, "^a tensor's name must be a string that does not begin and end"),
        (3, {"size": 3}, SpecError, "^a tensor's name must be a string"),
    ],
)
def test_tensors_that_cannot_be_are_refused(kind, name, arguments, error, message):
    memory = counted(kind, 4, 2, 1)
    before = snapshot(memory)
    with pytest.raises(error, match=message):
        memory.create_tensor(name, **arguments)
    assert snapshot(memory) == before


@pytest.mark.parametrize("name", ["a b", "a.b", "observation/frame", "é-1", "__", "__x", "x__"])
def test_names_may_hold_anything(kind, name):
    memory = make(kind, 2, 1, ["z", name])
    add(memory, kind, **{name: [[1.0]], "z": [[2.0]]})
    assert (memory.get_tensor_names(), every(memory, name)) == (sorted([name, "z"]), [[[1]]])


DTYPES = ["uint8", "bool", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_kept(kind, name):  # R31
    memory = make(kind, 3, 2, {"x": (name, 2)})
    unwritten = host(memory.get_tensor_by_name("x"))
    assert np.isnan(unwritten).all() if "float" in name else not unwritten.any()
    values = np.array([[1, 0], [0, 1]]) if name == "bool" else np.array([[1, 2], [3, 100]])
    memory.add_samples(x=array(kind, values, name))
    memory.add_samples(x=array(kind, values[::-1], name))
    [[every_row]], [[drawn]] = memory.sample_all(["x"]), memory.sample(["x"], batch_size=3)
    for tensor in (every_row, drawn, memory.get_tensor_by_name("x"), memory.tensors_view["x"]):
        assert dtype_name(kind, tensor) == name_of(kind, name)
    assert host(every_row).tolist() == values.tolist() + values[::-1].tolist()
    rows = host(every_row)[np.asarray(memory.get_sampling_indexes())]
    assert host(drawn).tolist() == rows.tolist()


@pytest.mark.parametrize(("name", "value"), [("int64", 2**40 + 1), ("float64", 0.1), ("uint8", 255)])
def test_values_are_not_rounded(kind, name, value):
    if name_of(kind, name) != name:
        value = 2**20 + 1 if name == "int64" else 0.5
    memory = make(kind, 2, 1, {"x": (name, 1)})
    memory.add_samples(x=array(kind, [[value]], name))
    assert every(memory, "x") == [[[value]]]


@pytest.mark.parametrize("cls", ["RandomMemory", "PrioritizedMemory"])
def test_the_bytes_it_takes_are_what_the_dtypes_say_and_little_more(kind, cls):  # R31
    memory = make(kind, 1000, 8, {"x": ("uint8", (84, 4)), "r": ("float32", 1), "terminated": ("bool", 1)}, cls=cls)
    known = memory.nbytes
    rows = 8000
    assert rows * (84 * 4 + 5) <= known <= rows * (84 * 4 + 5 + 16 + 40 * (cls == "PrioritizedMemory")) + 2**20
    add(memory, kind, x=np.zeros((8, 84, 4), np.uint8), r=np.zeros((8, 1)), terminated=np.zeros((8, 1), bool))
    memory.sample(["x"], batch_size=4)
    assert memory.nbytes == known


def test_a_tensor_is_the_live_storage_and_in_jax_a_copy(kind):
    memory = counted(kind, 2, 2, 1)
    tensor, view = memory.get_tensor_by_name("t"), memory.tensors_view["t"]
    assert host(tensor).shape == (2, 2, 1) and host(view).shape == (4, 1)
    if library(kind) == "jax":
        before = np.array(tensor)
        add(memory, kind, t=[[5.0], [6.0]], e=[[0.0], [1.0]])
        np.testing.assert_array_equal(np.asarray(tensor), before)
        return
    change(tensor, (0, 1), 8)
    assert every(memory, "t") == [[[0, 8]]]
    change(view, 0, 9)
    assert every(memory, "t") == [[[9, 8]]]
    assert flat(memory.tensors["t"])[:2] == flat(memory._tensor_t)[:2] == [9, 8]
    add(memory, kind, t=[[5.0], [6.0]], e=[[0.0], [1.0]])
    assert flat(tensor) == [9, 8, 5, 6]


def test_tensors_may_be_assigned_by_name(kind):
    memory = make(kind, 2, 2, {"b": ("float32", 3), "a": ("float32", 1)})
    add(memory, kind, b=np.zeros((2, 3)), a=np.zeros((2, 1)))
    values = np.arange(12.0, dtype=np.float32).reshape(2, 2, 3)
    for tensors in (memory.tensors, memory.tensors_view):
        assert list(tensors) == ["b", "a"]  # as they were made
    shown = memory.tensors
    shown["b"] = array(kind, values)
    assert every(memory, "b")[0][0] == list(range(6)) and flat(shown["b"]) == list(range(12))
    memory.tensors_view["b"] = array(kind, values.reshape(4, 3) + 1)
    assert flat(memory.tensors["b"]) == list(range(1, 13))
    for tensors in (memory.tensors, memory.tensors_view):
        with pytest.raises(MissingKeyError, match="^no tensor 'c' in this memory"):
            tensors["c"] = array(kind, values[:1, :1, 0])
    with pytest.raises(SpecError, match="^'a' has shape"):
        memory.tensors["a"] = array(kind, values)
    assert flat(memory.tensors["b"]) == list(range(1, 13))


def test_a_derived_memory_may_make_its_tensors_by_itself(kind):  # as those of skrl 1 do
    class Halved(type(make(kind, 1))):
        def create_tensor(self, name, size, dtype=None, keep_dimensions=False):
            if name in self.tensors:
                return False
            self.tensors[name] = array(kind, np.zeros((self.memory_size, self.num_envs, size // 2)), dtype)
            view = host(self.tensors[name]).reshape(-1, size // 2)
            self.tensors_view[name] = array(kind, view, dtype)
            self.tensors_keep_dimensions[name] = keep_dimensions
            return True

    memory = Halved(memory_size=3, num_envs=2)
    assert memory.create_tensor("x", 4) and memory.create_tensor("n", 2, "uint8") and not memory.create_tensor("x", 4)
    assert memory.tensors_keep_dimensions == {"x": False, "n": False}
    add(memory, kind, x=np.arange(4.0).reshape(2, 2), n=np.array([[1], [255]], np.uint8))
    [[x, n]] = memory.sample_all(["x", "n"])
    assert (flat(x), flat(n), dtype_name(kind, n)) == ([0, 1, 2, 3], [1, 255], "uint8")


@pytest.mark.parametrize("of", ["tensors", "tensors_view"])
@pytest.mark.parametrize("how", ["deepcopy", "file"])
def test_a_copy_of_the_tensors_is_apart_from_the_memory(of, how, tmp_path):
    memory = counted("torch", 2, 2, 1)
    if how == "deepcopy":
        copied = copy.deepcopy(getattr(memory, of))
    else:
        torch.save(getattr(memory, of), tmp_path / "tensors.pt")
        copied = torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert list(copied) == ["t", "e"] and flat(copied["e"])[:2] == [0, 1]
    copied["t"][...] = 7
    copied["e"] = torch.zeros(3)
    assert every(memory, "t", "e") == [[[0, 0], [0, 1]]]


def test_an_index_of_several_axes_gives_tensors_of_as_many(kind):
    memory = counted(kind, 4, 2, 4)
    index = np.arange(6).reshape(3, 2)
    [[t]] = memory.sample_by_index(["t"], index)
    assert host(t).shape == (3, 2, 1) and flat(t) == flat(memory.sample_by_index(["t"], index.reshape(-1))[0][0])
    parts = memory.sample_by_index(["t"], index, mini_batches=2)
    assert [host(part).shape for [part] in parts] == [(2, 2, 1), (1, 2, 1)]


def test_a_batch_of_all_rows_is_an_epoch_unless_told_otherwise(kind):
    memory = counted(kind, 4, 2, 5)
    for _ in range(5):
        [[t], [u]] = memory.sample(["t"], batch_size=len(memory), mini_batches=2)
        indexes = host(memory.get_sampling_indexes())
        assert sorted(indexes.tolist()) == list(range(8)) and len(host(t)) == len(host(u)) == 4
    assert len(host(memory.sample(["t"], batch_size=12)[0][0])) == 12
    repeats = [len(set(host(memory.sample(["t"], 7) and memory.get_sampling_indexes()).tolist())) for _ in range(9)]
    assert min(repeats) < 7


def test_a_tensor_can_be_set(kind):
    memory = counted(kind, 2, 2, 1)
    values = np.arange(4.0, dtype=np.float32).reshape(2, 2, 1)
    memory.set_tensor_by_name("t", given := array(kind, values))
    assert flat(memory.get_tensor_by_name("t")) == [0, 1, 2, 3]
    assert (len(memory), every(memory, "t")) == (2, [[[0, 1]]])
    memory.set_tensor_by_name("t", array(kind, [[7.0]]))
    assert flat(memory.get_tensor_by_name("t")) == [7] * 4
    assert flat(given) == [0, 1, 2, 3]
    empty = make(kind, 2, 2, ["t"])
    empty.set_tensor_by_name("t", given)
    assert len(empty) == 0


def test_setting_where_episodes_end_changes_where_they_end(kind):
    memory = make(kind, 4, 1, {"t": ("float32", 1), "terminated": ("bool", 1)})
    add(memory, kind, t=np.arange(4.0)[:, None], terminated=np.zeros((4, 1), bool))
    memory.set_tensor_by_name("terminated", array(kind, np.array([0, 1, 0, 0], bool).reshape(4, 1, 1)))
    assert windows(memory, 2, episode_ends="never") == {(0, 1), (2, 3)}


@pytest.mark.parametrize("method", ["get_tensor_by_name", "set_tensor_by_name"])
def test_an_unknown_tensor_is_a_key_error(kind, method):
    memory = counted(kind, 2, 2, 1)
    arguments = ["x"] if method.startswith("get") else ["x", array(kind, [[1.0]])]
    with pytest.raises(KeyError, match=r"^no tensor 'x' in this memory, there are \['e', 't'\]$"):
        getattr(memory, method)(*arguments)
    with pytest.raises(AttributeError, match="no attribute '_tensor_x'"):
        memory._tensor_x  # noqa: B018


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((8, 1), np.float32), r"'t' has shape \(8, 1\), expected \(4, 2, 1\)"),
        (np.zeros((4, 2, 3), np.float32), r"'t' has shape \(4, 2, 3\), expected \(4, 2, 1\)"),
        (np.full((4, 2, 1), 1j), "'t' is complex.*would lose its values as float32"),
    ],
)
def test_a_value_that_does_not_fit_is_not_set(kind, values, message):
    memory = counted(kind, 4, 2, 4)
    before = snapshot(memory)
    with pytest.raises(SpecError, match=message):
        memory.set_tensor_by_name("t", values)
    assert snapshot(memory) == before


# Adding


ADDS = {  # id -> num_envs, shapes of successive observations, then len, memory_index and env_index
    "a row of each": (3, [(3, 2)], (3, 1, 0)),
    "some": (3, [(2, 2)], (2, 0, 2)),
    "some, and the rest": (3, [(2, 2), (1, 2)], (3, 1, 0)),
    "one by one": (3, [(2,), (2,)], (2, 0, 2)),
    "one by one, a row": (3, [(2,), (2,), (2,)], (3, 1, 0)),
    "a row of one": (1, [(1, 2)], (1, 1, 0)),
    "no axis, of one": (1, [(2,)], (1, 1, 0)),
    "several of one": (1, [(3, 2)], (3, 3, 0)),
    "none of some": (3, [(0, 2)], (0, 0, 0)),
    "none of one": (1, [(0, 2)], (0, 0, 0)),
}


@pytest.mark.parametrize(("num_envs", "shapes", "place"), ADDS.values(), ids=ADDS)
@pytest.mark.parametrize("tracked", [False, True], ids=["no ends", "ends"])
def test_the_shape_of_the_observations_says_what_is_added(kind, num_envs, shapes, place, tracked):
    memory = make(kind, 4, num_envs, {"observations": ("float32", 2), "terminated": ("bool", 1)})
    given = np.arange(2.0 * sum(np.prod(shape[:-1], dtype=int) for shape in shapes)).reshape(-1, 2)
    start = 0
    for shape in shapes:
        n = int(np.prod(shape[:-1], dtype=int))
        ends = {"terminated": array(kind, np.zeros((*shape[:-1], 1), bool))} if tracked else {}
        values = given[start : start + n].reshape(shape)
        memory.add_samples(observations=array(kind, values, "float32"), **ends)
        start += n
    assert (len(memory), memory.memory_index, memory.env_index) == place
    assert host(memory.sample_all(["observations"])[0][0]).tolist() == given.tolist()


def test_observations_decide_before_the_first_tensor(kind):  # S20
    memory = make(kind, 4, 2, {"r": ("float32", 1), "observations": ("float32", 3)})
    add(memory, kind, r=[1.0, 2.0], observations=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert (len(memory), memory.memory_index, every(memory, "r")) == (2, 1, [[[1, 2]]])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_number_per_row_may_come_without_its_axis(kind, shape):  # R32
    memory = make(kind, 4, 3, {"observations": ("float32", 2), "rewards": ("float32", 1), "actions": ("int32", 1)})
    add(memory, kind, observations=np.zeros((3, 2)), rewards=np.arange(3.0).reshape(shape),
        actions=np.arange(3, dtype=np.int32).reshape(shape))  # fmt: skip
    for name in ("rewards", "actions"):
        [[tensor]] = memory.sample_all([name])
        assert (host(tensor).shape, flat(tensor)) == ((3, 1), [0, 1, 2])


def test_unknown_names_and_none_are_skipped(kind):
    memory = make(kind, 4, 2, ["x", "y"])
    add_all = partial(memory.add_samples, x=array(kind, [[1.0], [2.0]]))
    add_all(z=array(kind, [[1.0], [2.0]]))
    add_all(states=None)
    memory.add_samples(observations=None, x=array(kind, [[3.0], [4.0]]))
    assert (len(memory), every(memory, "x", "z")[0][0]) == (6, [1, 2, 1, 2, 3, 4])


@pytest.mark.parametrize(
    "tensors",
    [{"z": np.zeros((3, 2, 4))}, {"z": None}, {"z": "text", "observations": np.zeros((2, 1))}, {"x": None, "z": 1}],
)
def test_adding_only_unknown_names_adds_nothing(kind, tensors):  # as skrl skips them
    memory = counted(kind, 4, 2, 3)
    memory.create_tensor("x", size=1)
    before = snapshot(memory)
    memory.add_samples(**tensors)
    assert snapshot(memory) == before
    with pytest.raises(SpecError, match="^add_samples: "):
        make(kind, 4, 2, ["x"], strict=True).add_samples(**tensors)


def test_what_there_is_no_tensor_of_may_be_anything(kind):
    class Unreadable:
        def __array__(self, *arguments, **settings):
            raise RuntimeError("never to be read")

    memory = make(kind, 4, 2, ["x", "y"])
    for values in (np.array([[1.0], [2.0]]), np.array([[3.0]])):  # a row, and a part of one
        rows = {name: array(kind, values) for name in ("x", "y")}
        memory.add_samples(**rows, infos=[[1], [2, 3]], state=Unreadable(), text="so", nothing=None)
    memory.add_samples(x=array(kind, [[4.0]]), infos=Unreadable())
    assert every(memory, "x") == [[[1, 2, 3, 4]]]


def test_a_strict_memory_skips_nothing(kind):
    memory = make(kind, 4, 2, ["x", "y"], strict=True)
    values = array(kind, [[1.0], [2.0]])
    before = snapshot(memory)
    for call, error, message in [
        (lambda: memory.add_samples(x=values, z=values), KeyError, r"^add_samples: no tensor\(s\) \['z'\]"),
        (lambda: memory.add_samples(x=values, y=None), SpecError, r"^add_samples: \['y'\] are None$"),
        (lambda: memory.sample(["z"], batch_size=1), KeyError, r"^no tensor\(s\) \['z'\] in this memory"),
        (lambda: memory.sample_all(["x", "z"]), KeyError, r"^no tensor\(s\) \['z'\] in this memory"),
        (lambda: memory.sample_by_index(["z"], indexes=[0]), KeyError, r"^no tensor\(s\) \['z'\] in this memory"),
    ]:
        with pytest.raises(error, match=message):
            call()
        assert snapshot(memory) == before
    memory.add_samples(x=values, y=values)
    assert len(memory) == 2


def test_what_is_left_out_is_poisoned_and_never_stale(kind):  # S19
    memory = make(kind, 2, 1, {"x": ("float32", 1), "y": ("float32", 2), "n": ("uint8", 1), "b": ("bfloat16", 1)})
    for t in range(2):
        memory.add_samples(x=array(kind, [[float(t)]]), y=array(kind, [[1.0, 2.0]]), n=array(kind, [[7]], "uint8"),
                           b=array(kind, [[1.0]], "bfloat16"))  # fmt: skip
    add(memory, kind, x=[[5.0]])
    [[x, y, n, b]] = memory.sample_by_index(["x", "y", "n", "b"], indexes=[0, 1])
    assert (flat(x), flat(n)) == ([5, 1], [0, 7])
    np.testing.assert_array_equal(host(y), [[nan, nan], [1, 2]])
    np.testing.assert_array_equal(host(b), [[nan], [1]])


@pytest.mark.parametrize(("of", "n"), [("tensors", 3), ("tensors_view", 1), ("get_tensor_by_name", 2)])
def test_what_a_program_writes_to_the_next_row_stays_when_that_is_added(kind, of, n):  # as agents of skrl do
    tensors = {"x": ("float32", 1), "valid": ("bool", 1), "u": ("uint16", 2)}
    memory = make(kind, 4, 3, tensors | ({} if n == 3 else {"b": ("bfloat16", 1)}))  # of which rows come less quickly
    rng, found = np.random.default_rng(0), []
    for t in range(10):
        row, valid = memory.memory_index, rng.random((3, 1)) < 0.5
        if library(kind) == "jax":  # which has no tensors that can be written to
            values = np.array(memory.tensors["valid"])
            values[row] = valid
            memory.tensors["valid"] = values
        else:
            tensor = memory.get_tensor_by_name("valid") if of == "get_tensor_by_name" else getattr(memory, of)["valid"]
            change(tensor, slice(3 * row, 3 * row + 3) if of == "tensors_view" else row, torch.from_numpy(valid))
        for first in range(0, 3, n):
            add(memory, kind, x=np.full((min(n, 3 - first), 1), float(t)))
        found += valid.ravel().tolist()
    assert every(memory, "x", "valid") == [[[t for t in range(6, 10) for _ in range(3)], found[-12:]]]


def test_several_rows_keep_what_a_program_wrote_there(kind):
    memory = make(kind, 5, 1, ["x", "y"])
    memory.set_tensor_by_name("y", array(kind, np.arange(5.0).reshape(5, 1, 1)))
    for n, kept in [(3, [0, 1, 2]), (4, [2, 3, 4, 0, 1]), (12, [4, 0, 1, 2, 3])]:
        add(memory, kind, x=np.zeros((n, 1)))
        assert every(memory, "y") == [[kept]]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "^add_samples: needs at least one tensor, got none$"),
        ({"x": None, "r": None}, "^add_samples: every tensor is None$"),
        ({"x": np.zeros((3, 4))}, r"^add_samples: 'x' has shape \(3, 4\), expected \(3, 2\)$"),
        ({"x": np.zeros((3, 1))}, r"^add_samples: 'x' has shape \(3, 1\), expected \(3, 2\)$"),  # S14
        ({"x": np.zeros((3, 2)), "r": np.zeros((2, 1))}, r"^add_samples: 'r' has shape \(2, 1\), expected \(3, 1\)$"),
        ({"x": np.zeros((3, 2)), "r": np.zeros((3, 3))}, r"^add_samples: 'r' has shape \(3, 3\), expected \(3, 1\)$"),
        ({"x": np.zeros((3, 2)), "k": np.zeros((3, 4))}, r"^add_samples: 'k' has shape \(3, 4\), expected .*2, 2\)$"),
        ({"x": np.zeros((3, 2), complex)}, "^'x' is complex128, which would lose its values as float32"),
        ({"x": np.full((3, 2), "a")}, "'x'"),
        ({"x": np.zeros((4, 2))}, "^add_samples: 4 rows are more than the 3 environments$"),
        ({"x": np.zeros((2, 2))}, "^add_samples: 2 rows do not fit, 1 environments are left in this row$"),
        ({"x": np.zeros((2, 3, 2))}, r"^add_samples: 'x' has shape \(2, 3, 2\), expected \(n, \*data\) or"),
        ({"x": np.zeros(())}, r"^add_samples: 'x' has shape \(\), expected \(n, \*data\) or \(\*data\)$"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(kind, tensors, message):  # S18
    memory = make(kind, 2, 3, {"x": ("float32", 2), "r": ("float32", 1), "n": ("uint8", 1), "k": ("float32", (2, 2))})
    for n in (3, 3, 2):
        add(memory, kind, x=np.ones((n, 2)), r=np.ones((n, 1)), n=np.ones((n, 1), np.uint8), k=np.ones((n, 2, 2)))
    before = snapshot(memory)
    with pytest.raises(SpecError, match=message):
        memory.add_samples(**tensors)
    assert snapshot(memory) == before


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (0.5, "^'n' is float64, which would lose its values as uint8"),
        (300.0, "^'n' holds int64 values that do not fit uint8$"),
        (300, "^'n' holds int64 values that do not fit uint8$"),
        (-1, "^'n' holds int64 values that do not fit uint8$"),
        (1e300, "^'x' holds float64 values that do not fit float32$"),
    ],
)
def test_a_strict_memory_refuses_numbers_that_do_not_fit(kind, numbers, message):
    memory = make(kind, 2, 3, {"x": ("float32", 2), "n": ("uint8", 1)}, strict=True)
    add(memory, kind, x=np.ones((3, 2)), n=np.ones((3, 1), np.uint8))
    before = snapshot(memory)
    given = {"n": np.full((3, 1), numbers), "x": np.zeros((3, 2))}
    if numbers == 1e300:
        given = {"n": np.ones((3, 1), np.uint8), "x": np.full((3, 2), numbers)}
    with pytest.raises(SpecError, match=message):
        memory.add_samples(**given)
    with pytest.raises(SpecError, match=message):
        memory.set_tensor_by_name(message[2], given[message[2]][None])
    assert snapshot(memory) == before


CASTS = {  # dtype -> numbers, and what is stored of them
    "uint8": ([300.7, -1.0, 2.9, True], [44, 255, 2, 1]), "bool": ([0.5, 2.0, 0.0, -1.0], [True, True, False, True]),
    "int32": ([-2.9, 2.9, 7.0, 0.0], [-2, 2, 7, 0]), "float16": ([1e9, 0.5, -1e9, 2.0], [np.inf, 0.5, -np.inf, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("way", ["add_samples", "set_tensor_by_name"])
def test_numbers_are_cast_as_skrl_casts_them(kind, name, way):
    memory, (numbers, expected) = make(kind, 4, 1, {"n": (name, 1)}), CASTS[name]
    column = np.array(numbers, np.float64)[:, None]
    if way == "add_samples":
        memory.add_samples(n=column)
        assert every(memory, "n") == [[expected]]
    else:
        memory.set_tensor_by_name("n", column[:, None])
        assert flat(memory.get_tensor_by_name("n")) == expected


@pytest.mark.parametrize("name", ["bool", "uint8", "int64"])
def test_floats_that_are_whole_are_flags_and_integers(kind, name):
    memory = make(kind, 3, 2, {"n": (name, 1)}, strict=True)
    add(memory, kind, n=[[1.0], [0.0]])
    memory.add_samples(n=array(kind, [[0.0], [1.0]], "float16"))
    assert every(memory, "n") == [[[1, 0, 0, 1]]]
    memory.set_tensor_by_name("n", array(kind, np.ones((3, 2, 1)), "float32"))
    assert every(memory, "n") == [[[1, 1, 1, 1]]]
    for wrong in (0.5, np.nan, np.inf):
        with pytest.raises(SpecError, match="^'n' is float32, which would lose its values as"):
            add(memory, kind, n=[[1.0], [wrong]])
        with pytest.raises(SpecError, match="^'n' is float32, which would lose its values as"):
            memory.set_tensor_by_name("n", array(kind, np.full((3, 2, 1), wrong), "float32"))
    assert every(memory, "n") == [[[1, 1, 1, 1]]]


def test_a_two_is_no_bool_of_a_strict_memory(kind):
    memory = make(kind, 2, 1, {"b": ("bool", 1)}, strict=True)
    with pytest.raises(SpecError, match="^'b' holds int64 values that do not fit bool$"):
        memory.add_samples(b=np.array([[2]]))
    memory.add_samples(b=np.array([[1], [0]]))
    assert every(memory, "b") == [[[True, False]]]


def test_lanes_that_are_far_apart_are_told_by_the_furthest(kind):
    memory = make(kind, 4, 2, ["observations"])
    for n, place in [(1, (0, 1)), (2, (3, 0)), (3, (2, 0))]:  # heads [0, 1], [0, 3], [0, 6]
        memory.add_trajectories(trajectories([n], [1], x=grid(1, n)), {"observations": "x"})
        assert (memory.memory_index, memory.env_index) == place
    assert (len(memory), memory.filled) == (4, False)
    add(memory, kind, observations=[[9.0]])  # goes to the environment that is behind
    assert every(memory, "observations", sequence_length=4) == [[[9, 1, 0, 1, 2]]]


# Sampling


def test_batches_come_in_the_order_of_the_names(kind):
    memory = counted(kind, 4, 2, 4)
    for parts in (memory.sample(["e", "x", "t"], batch_size=6), memory.sample_by_index(["e", "x", "t"], indexes=[1])):
        [[e, x, t]] = parts
        assert x is None and flat(e) != flat(t)
    assert isinstance(parts, list) and isinstance(parts[0], list)
    assert memory.sample([], batch_size=2) == [[]]


@pytest.mark.parametrize("make_indexes", [list, np.array, tuple, partial(np.array, dtype=np.int32), "own"])
def test_rows_by_index(kind, make_indexes):
    memory = counted(kind, 4, 2, 6)
    drawn = memory.sample(["t"], batch_size=3) and np.asarray(memory.get_sampling_indexes()).copy()
    indexes = array(kind, [7, 0, 3, 0], "int32") if make_indexes == "own" else make_indexes([7, 0, 3, 0])
    [[t, e]] = memory.sample_by_index(["t", "e"], indexes=indexes)
    assert (flat(t), flat(e)) == ([3, 4, 5, 4], [1, 0, 1, 0])
    parts = memory.sample_by_index(["t"], indexes=indexes, mini_batches=3)
    assert [flat(t) for [t] in parts] == [[3, 4], [5], [4]]
    assert host(memory.sample_by_index(["t"], indexes=[])[0][0]).shape == (0, 1)
    assert (np.asarray(memory.get_sampling_indexes()).copy() == drawn).all()


@pytest.mark.parametrize(
    ("indexes", "error", "message"),
    [
        ([8], IndexError, r"^index 8 is not in \[0, 8\)$"),
        ([0, -1], IndexError, r"^index -1 is not in \[0, 8\)$"),
        ([10**15], IndexError, r"^index 1000000000000000 is not in \[0, 8\)$"),
        (np.array([2**64 - 1], np.uint64), IndexError, r"^index 18446744073709551615 is not in \[0, 8\)$"),
        ([0.5], SpecError, "^index must hold integers, got float64$"),
        ([True], SpecError, "^index must hold integers, got bool$"),
    ],
)
def test_indexes_out_of_range_are_refused(kind, indexes, error, message):  # S13
    memory = counted(kind, 4, 2, 4)
    before = snapshot(memory)
    with pytest.raises(error, match=message):
        memory.sample_by_index(["t"], indexes=indexes)
    assert snapshot(memory) == before


@pytest.mark.parametrize("replacement", [True, False])
def test_a_sample_is_what_lies_at_its_indexes(kind, replacement):
    memory = counted(kind, 5, 3, 8, replacement=replacement)
    [[t, e]] = memory.sample(["t", "e"], batch_size=15)
    indexes = np.asarray(memory.get_sampling_indexes())
    assert isinstance(memory.get_sampling_indexes(), torch.Tensor if library(kind) == "torch" else np.ndarray)
    rows, steps = indexes // 3, np.array([5, 6, 7, 3, 4])
    assert (flat(t), flat(e)) == (steps[rows].tolist(), (indexes % 3).tolist())
    assert (sorted(indexes.tolist()) == list(range(15))) is not replacement


SPLITS = [(0, [10]), (1, [10]), (2, [6, 4]), (3, [4, 4, 2]), (6, [2, 2, 2, 2, 2, 0])]


@pytest.mark.parametrize(("mini_batches", "sizes"), SPLITS)
def test_mini_batches_hold_whole_sequences(kind, mini_batches, sizes):  # S11
    memory = counted(kind, 5, 3, 8)
    parts = memory.sample(["t"], batch_size=5, sequence_length=2, mini_batches=mini_batches)
    assert [host(t).shape for [t] in parts] == [(size, 1) for size in sizes]
    t = np.concatenate([host(t) for [t] in parts]).reshape(5, 2)
    assert (t[:, 1] - t[:, 0] == 1).all()
    assert t.ravel().tolist() == flat(memory.sample_by_index(["t"], indexes=memory.get_sampling_indexes())[0][0])


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(kind):  # S24
    def drawn(**settings):
        memory = KINDS[kind].RandomMemory(memory_size=100, **settings)
        memory.create_tensor("t", size=1)
        add(memory, kind, t=np.arange(100.0)[:, None])
        return [flat(memory.sample(["t"], batch_size=20)[0][0]) for _ in range(2)]

    assert drawn(seed=3) == drawn(seed=3) != drawn(seed=4)
    assert drawn(seed=3)[0] != drawn(seed=3)[1]
    seeded = []
    for _ in range(2):  # without a seed it follows the library's global generator
        torch.manual_seed(0)
        np.random.seed(0)
        seeded.append(drawn())
    assert seeded[0] == seeded[1] != drawn()


SAMPLING = [
    ({"batch_size": 0}, SpecError, "^batch_size must be at least 1, got 0$"),
    ({"batch_size": 1.5}, TypeError, "^batch_size must be an int, got 1.5$"),
    ({"sequence_length": -1}, SpecError, "^sequence_length must be at least 1, got -1$"),
    ({"sequence_length": 4}, SpecError, "^nothing to sample: no row, or no window of this length, is stored$"),
    ({"sequence_length": 40}, SpecError, "^nothing to sample: no row, or no window of this length, is stored$"),
    ({"sequence_length": 3, "episode_ends": "never"}, SpecError, "^nothing to sample: no window of this length"),
    ({"sequence_length": 2, "n_step": 2}, SpecError, "^n_step and sequence_length cannot both be above 1$"),
    ({"n_step": 0}, SpecError, "^n_step must be at least 1, got 0$"),
    ({"gamma": 1.1}, SpecError, r"^gamma must be in \[0, 1\], got 1.1$"),
    ({"gamma": nan}, SpecError, r"^gamma must be in \[0, 1\], got nan$"),
    ({"episode_ends": "cut"}, SpecError, "^episode_ends must be one of .*'never'.*, got 'cut'$"),
    ({"names": "t"}, TypeError, "^names must be a list of names, got the string 't'$"),
]


@pytest.mark.parametrize(("settings", "error", "message"), SAMPLING)
@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_samples_that_cannot_be_are_refused(kind, settings, error, message, replacement):
    memory = make(kind, 4, 2, {"t": ("float32", 1), "terminated": ("bool", 1)}, replacement=replacement)
    for t in range(3):
        add(memory, kind, t=np.full((2, 1), float(t)), terminated=np.full((2, 1), t == 1))
    before = snapshot(memory)
    with pytest.raises(error, match=message):
        memory.sample(**{"names": ["t"], "batch_size": 1} | settings)
    assert snapshot(memory) == before
    assert memory.get_sampling_indexes() is None


def test_an_empty_memory_gives_no_sample(kind):
    for memory in (make(kind, 4, 2, ["t"]), make(kind, 4, 2), counted(kind, 4, 2, 6)):
        memory.reset()
        with pytest.raises(SpecError, match="^nothing to sample: no row, or no window of this length, is stored$"):
            memory.sample(["t"], batch_size=1)


@pytest.mark.parametrize("more", [0, 1, 60])
def test_without_replacement_a_batch_has_no_more_than_there_is(kind, more):
    memory = counted(kind, 4, 2, 3, replacement=False)
    [[t]] = memory.sample(["t"], batch_size=6 + more)
    assert (sorted(flat(t)), host(memory.get_sampling_mask()).tolist()) == ([0, 0, 1, 1, 2, 2], [True] * 6)
    parts = memory.sample(["t", "e"], batch_size=4 + more, sequence_length=2, mini_batches=3)
    assert [host(t).shape for t, _ in parts] == [(4, 1), (2, 1), (2, 1)]
    t = np.concatenate([host(t) for t, _ in parts]).reshape(4, 2).tolist()
    assert sorted(map(tuple, t)) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert len(memory.get_sampling_indexes()) == 8


@pytest.mark.parametrize("replacement", [True, False])
def test_a_derived_memory_may_draw_by_itself_as_those_of_skrl_do(kind, replacement):
    class Newest(KINDS[kind].RandomMemory):
        def sample(self, names, *, batch_size, mini_batches=1, sequence_length=1):
            n_rows = self.memory_size * self.num_envs if self.filled else self.memory_index * self.num_envs
            drawn = min(batch_size, n_rows) if not self._replacement else batch_size
            self.sampling_indexes = np.arange(n_rows - drawn, n_rows) % n_rows
            return self.sample_by_index(names=names, indexes=self.sampling_indexes, mini_batches=mini_batches)

    memory = Newest(memory_size=4, num_envs=2, replacement=replacement)
    memory.create_tensor("t", size=1)
    for t in range(3):
        add(memory, kind, t=np.full((2, 1), float(t)))
    [[t]] = memory.sample(["t"], batch_size=7)
    assert flat(t) == ([2.0] if replacement else []) + [0, 0, 1, 1, 2, 2]
    assert len(memory.get_sampling_indexes()) == len(flat(t))


def writing_by_itself(cls):
    """A class of torch's memories that adds rows in the way of skrl's: into the tensors, and then the indexes."""

    class Writing(cls):
        def add_samples(self, **tensors):
            n = len(tensors["x"])
            for name, values in tensors.items():
                if n == self.num_envs:
                    self.tensors[name][self.memory_index].copy_(values)
                else:
                    self.tensors[name][self.memory_index, self.env_index : self.env_index + n].copy_(values)
            if n == self.num_envs:
                self.memory_index += 1
            else:
                self.env_index += n
            if self.env_index >= self.num_envs:
                self.env_index = 0
                self.memory_index += 1
            if self.memory_index >= self.memory_size:
                self.memory_index = 0
                self.filled = True

    return Writing


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["torch", "torch-tensors"])
def test_a_derived_memory_may_write_and_count_by_itself(kind, seed):
    rng = np.random.default_rng(seed)
    size, num_envs = (int(n) for n in rng.integers(1, 6, 2))
    memories = []
    for cls in (KINDS[kind].RandomMemory, writing_by_itself(KINDS[kind].RandomMemory)):
        memories.append(cls(memory_size=size, num_envs=num_envs, device="cpu", seed=0))
        memories[-1].create_tensor("x", size=2)
        memories[-1].create_tensor("terminated", size=1, dtype=torch.bool)
    for _ in range(25):
        left = num_envs - memories[0].env_index
        n = num_envs if left == num_envs and rng.random() < 0.7 else int(rng.integers(1, left + 1))
        x, terminated = torch.from_numpy(rng.random((n, 2), np.float32)), torch.from_numpy(rng.random((n, 1)) < 0.3)
        found = []
        for memory in memories:
            memory.add_samples(x=x, terminated=terminated)
            [drawn] = memory.sample(["x", "terminated"], batch_size=5, episode_ends="mask", sequence_length=1)
            told = memory.get_sampling_is_first(), memory.get_sampling_mask(), *drawn
            rows = [flat(tensor) for tensor in memory.sample_all(["x", "terminated"], sequence_length=2)[0]]
            counts = len(memory), memory.filled, memory.memory_index, memory.env_index
            found.append((counts, rows, [flat(tensor) for tensor in told]))
        assert found[0] == found[1]
        if rng.random() < 0.1:
            for memory in memories:
                memory.reset()


def test_how_many_rows_there_are_may_be_said(kind):
    memory = make(kind, 5, 2, ["x"])
    values = np.arange(10.0).reshape(5, 2, 1)
    memory.set_tensor_by_name("x", array(kind, values))
    memory.filled = True
    assert (len(memory), every(memory, "x")) == (10, [[list(range(10))]])
    memory.memory_index = 3
    assert (memory.filled, memory.memory_index, every(memory, "x")) == (True, 3, [[[6, 7, 8, 9, 0, 1, 2, 3, 4, 5]]])
    memory.filled = False
    assert (memory.filled, memory.memory_index, every(memory, "x")) == (False, 3, [[list(range(6))]])
    memory.env_index = 1
    assert (len(memory), memory.env_index, every(memory, "x")) == (7, 1, [[list(range(7))]])
    memory.memory_index = 0
    memory.env_index = 0
    assert len(memory) == 0
    for name, value, error in [
        ("memory_index", 6, SpecError), ("memory_index", -1, SpecError), ("env_index", 3, SpecError),
        ("env_index", 1.0, TypeError),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"^{name} must be"):
            setattr(memory, name, value)


@pytest.mark.parametrize("cls", ["RandomMemory", "PrioritizedMemory"])
def test_samples_come_by_what_a_derived_memory_makes_of_rows_by_index(kind, cls):
    class Hosted(getattr(KINDS[kind], cls)):
        def sample_by_index(self, names, *, indexes, mini_batches=1):
            batches = super().sample_by_index(names, indexes=indexes, mini_batches=mini_batches)
            return [[None if tensor is None else host(tensor) for tensor in batch] for batch in batches]

    memory = Hosted(memory_size=4, num_envs=2, seed=0)
    memory.create_tensor("t", size=1)
    for t in range(6):
        add(memory, kind, t=np.full((2, 1), float(t)))
    parts = memory.sample(["t", "absent"], batch_size=6, sequence_length=2, mini_batches=3)
    assert [(type(t), t.shape, absent) for t, absent in parts] == [(np.ndarray, (4, 1), None)] * 3
    t = np.concatenate([t for t, _ in parts]).reshape(6, 2)
    assert (t[:, 1] - t[:, 0] == 1).all()
    indexes = np.asarray(memory.get_sampling_indexes())
    assert t.ravel().tolist() == np.array([4, 5, 2, 3])[indexes // 2].tolist()
    assert host(memory.get_sampling_mask()).all()


def test_what_episodes_decide_needs_a_tensor_that_says_where_they_end(kind):
    memory = counted(kind, 4, 2, 4)
    for settings in ({"n_step": 2}, {"sequence_length": 2, "episode_ends": "mask"}, {"episode_ends": "never"}):
        with pytest.raises(StateError, match="^no tensor 'terminated' or 'truncated' says where episodes end$"):
            memory.sample(["t"], batch_size=1, **settings)
    for method in ("mask", "is_first", "discounts"):
        with pytest.raises(StateError, match="^call sample first$"):
            getattr(memory, f"get_sampling_{method}")()
    memory.sample(["t"], batch_size=3)
    with pytest.raises(StateError, match="^no tensor 'terminated' or 'truncated' says where episodes end$"):
        memory.get_sampling_is_first()
    assert flat(memory.get_sampling_mask()) == [True] * 3
    np.testing.assert_allclose(host(memory.get_sampling_discounts()), [0.99] * 3, rtol=1e-6)


# Private memory


def test_samples_are_copies(kind):  # S28
    memory = counted(kind, 4, 2, 4)
    before = snapshot(memory)
    samples = [memory.sample(["t"], batch_size=8), memory.sample_all(["t"]), memory.sample_all(["t"], mini_batches=3),
               memory.sample_all(["t"], sequence_length=2), memory.sample_by_index(["t"], indexes=[0, 1])]  # fmt: skip
    values = [[flat(t) for [t] in parts] for parts in samples]
    for _ in range(4):
        add(memory, kind, t=[[50.0], [51.0]], e=[[0.0], [1.0]])
    assert [[flat(t) for [t] in parts] for parts in samples] == values
    if library(kind) == "jax":
        return
    after = snapshot(memory)
    assert after != before
    for [t] in (part for parts in samples for part in parts):
        change(t, ..., -1)
    assert snapshot(memory) == after


def test_a_name_given_twice_gives_two_copies(kind):
    if library(kind) == "jax":
        return  # its arrays are never written to
    memory = counted(kind, 4, 2, 4)
    for parts in (memory.sample(["t", "t"], batch_size=8), memory.sample_all(["t", "t"], mini_batches=2)):
        first, second = parts[0]
        assert flat(first) == flat(second)
        assert not share_memory(first, second)


def test_what_was_added_may_change_afterwards(kind):  # R43, R12
    memory = make(kind, 3, 1, {"x": ("float32", 500)})
    source = np.arange(1000.0, dtype=np.float32).reshape(2, 500)
    kept = source.copy()
    memory.add_samples(x=source)
    [[drawn]] = memory.sample_all(["x"])
    np.testing.assert_array_equal(source, kept)
    source[...] = -1
    np.testing.assert_array_equal(host(drawn), kept)
    np.testing.assert_array_equal(host(memory.get_tensor_by_name("x"))[:2, 0], kept)


def test_transposed_and_strided_arrays_are_read_right(kind):  # R43
    memory = make(kind, 3, 2, {"x": ("float32", 3), "b": ("bool", 1)})
    values = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    given = array(kind, values)
    given = given.transpose() if library(kind) == "warp" else given.T
    memory.add_samples(x=given, b=array(kind, [[True], [False]]))
    memory.add_samples(x=values.T, b=np.array([[True, False], [False, True]])[:, ::2])
    assert host(memory.sample_all(["x"])[0][0]).tolist() == values.T.tolist() * 2
    assert every(memory, "b") == [[[True, False, True, False]]]


def test_a_tensor_with_a_gradient_is_stored_without_it():
    memory = make("torch", 3, 2, ["x"])
    memory.add_samples(x=torch.ones(2, 1, requires_grad=True) * 2)
    [[x]] = memory.sample_all(["x"])
    assert not x.requires_grad and not memory.get_tensor_by_name("x").requires_grad


def test_what_was_added_is_not_kept_alive(kind):  # R34
    memory = make(kind, 3, 2, ["x"])
    source = array(kind, np.ones((2, 1)))
    gone = weakref.ref(source)
    memory.add_samples(x=source)
    del source
    gc.collect()
    assert gone() is None


# Episodes: sequences, n-step


class Model:
    """Plain lists of the steps of each environment, and what memory there should be of them."""

    def __init__(self, memory_size, num_envs):
        self.size, self.lanes = memory_size, [[] for _ in range(num_envs)]

    def at(self, index):
        """The environment of a flat index, and the step that lies there."""
        row, lane = divmod(int(index), len(self.lanes))
        newest = len(self.lanes[lane]) - 1
        return lane, newest - (newest - row) % self.size

    def episode_end(self, lane, step):
        """The step after the last of this one's episode that is known."""
        steps = self.lanes[lane]
        while step < len(steps):
            step += 1
            if steps[step - 1]["ends"] or (step < len(steps) and steps[step]["first"]):
                break
        return step

    def is_first(self, lane, step):
        steps = self.lanes[lane]
        return step == 0 or steps[step]["first"] or steps[step - 1]["ends"]

    def n_step(self, index, n, gamma):
        lane, step = self.at(index)
        steps = self.lanes[lane][step : min(step + n, self.episode_end(lane, step))]
        reward = sum(gamma**k * s["reward"] for k, s in enumerate(steps))
        last = steps[-1]
        return reward, last["next"], last["terminated"], last["truncated"], gamma ** len(steps)

    def valid(self):
        """The flat indexes that hold a row."""
        return {
            step % self.size * len(self.lanes) + lane
            for lane, steps in enumerate(self.lanes)
            for step in range(max(0, len(steps) - self.size), len(steps))
        }


TRANSITION = {"observations": ("float32", 1), "next_observations": ("float32", 1), "rewards": ("float32", 1),
              "terminated": ("bool", 1), "truncated": ("bool", 1)}  # fmt: skip


def episodic(kind, memory_size, num_envs, n_rows, seed=0, **settings):
    """A memory and its model, with episodes of random lengths that end in either way."""
    memory, model = make(kind, memory_size, num_envs, TRANSITION, **settings), Model(memory_size, num_envs)
    rng = np.random.default_rng(seed)
    clocks = np.zeros(num_envs)
    for _ in range(n_rows):
        reward = rng.integers(-3, 4, (num_envs, 1)).astype(np.float32)
        terminated, truncated = rng.random((2, num_envs, 1)) < 0.2
        observation = clocks[:, None].copy()
        following = observation + 1
        add(memory, kind, observations=observation, next_observations=following, rewards=reward,
            terminated=terminated, truncated=truncated)  # fmt: skip
        for lane in range(num_envs):
            ends = bool(terminated[lane, 0] or truncated[lane, 0])
            model.lanes[lane].append({
                "observation": observation[lane, 0], "next": following[lane, 0], "reward": float(reward[lane, 0]),
                "terminated": bool(terminated[lane, 0]), "truncated": bool(truncated[lane, 0]), "ends": ends,
                "first": False,
            })  # fmt: skip
            clocks[lane] = 100 * (lane + 1) + 10 * len(model.lanes[lane]) if ends else following[lane, 0]
    return memory, model


def check_n_step(memory, model, n, gamma, batch_size=200):
    names = ["observations", "next_observations", "rewards", "terminated", "truncated"]
    [[observations, following, rewards, terminated, truncated]] = memory.sample(
        names, batch_size=batch_size, n_step=n, gamma=gamma
    )
    indexes = np.asarray(memory.get_sampling_indexes())
    expected = [model.n_step(index, n, gamma) for index in indexes]
    found = zip(flat(rewards), flat(following), flat(terminated), flat(truncated),
                flat(memory.get_sampling_discounts()), strict=True)  # fmt: skip
    np.testing.assert_allclose(np.array(list(found), float), np.array(expected, float), rtol=1e-5, atol=1e-5)
    starts = [model.lanes[lane][step]["observation"] for lane, step in map(model.at, indexes)]
    assert flat(observations) == [float(np.float32(start)) for start in starts]
    assert flat(memory.get_sampling_mask()) == [True] * batch_size
    assert flat(memory.get_sampling_is_first()) == [model.is_first(*model.at(index)) for index in indexes]
    assert host(rewards).shape == (batch_size, 1)


@pytest.mark.parametrize("n_rows", [4, 10, 11, 27])
@pytest.mark.parametrize(("n", "gamma"), [(1, 0.9), (2, 1.0), (3, 0.5), (5, 0.0), (30, 0.9)])
def test_n_step_is_what_a_plain_loop_gives(kind, n_rows, n, gamma):  # R8
    memory, model = episodic(kind, 10, 2, n_rows)
    before = snapshot(memory)
    check_n_step(memory, model, n, gamma)
    assert snapshot(memory) == before  # R9


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("truncated", (1 + 0.5 * 2, 2.0, False, True, 0.25)),
        ("terminated", (1 + 0.5 * 2, 2.0, True, False, 0.25)),
        ("both", (1 + 0.5 * 2, 2.0, True, True, 0.25)),  # R3: the two are kept apart
        (None, (1 + 0.5 * 2 + 0.25 * 4, 103.0, False, False, 0.125)),
    ],
)
def test_n_step_stops_at_the_end_of_the_episode_with_its_true_final_observation(kind, end, expected):  # R2, R8
    memory = make(kind, 6, 1, TRANSITION)
    for t in range(4):
        add(memory, kind, observations=[[float(t)]], next_observations=[[t + 1.0 + 100 * (t > 1)]],
            rewards=[[2.0**t]], terminated=[[t == 1 and end in ("terminated", "both")]],
            truncated=[[t == 1 and end in ("truncated", "both")]])  # fmt: skip
    names = ["rewards", "next_observations", "terminated", "truncated"]
    [tensors] = memory.sample(names, batch_size=50, n_step=3, gamma=0.5)
    at = np.asarray(memory.get_sampling_indexes()).tolist().index(0)
    assert (*(flat(tensor)[at] for tensor in tensors), flat(memory.get_sampling_discounts())[at]) == expected


def test_n_step_is_shortened_at_the_newest_row(kind):  # R7
    memory = make(kind, 6, 1, TRANSITION)
    for t in range(9):
        add(memory, kind, observations=[[float(t)]], next_observations=[[t + 1.0]], rewards=[[1.0]],
            terminated=[[False]], truncated=[[False]])  # fmt: skip
    assert flat(memory.get_tensor_by_name("observations")) == [6, 7, 8, 3, 4, 5]
    [[observations, following, rewards]] = memory.sample(
        ["observations", "next_observations", "rewards"], batch_size=200, n_step=3, gamma=1.0
    )
    found = set(zip(flat(observations), flat(following), flat(rewards), strict=True))
    assert found == {(t, min(t + 3, 9), min(3, 9 - t)) for t in range(3, 9)}
    assert windows(memory, 3, "observations") == {(t, t + 1, t + 2) for t in range(3, 7)}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_n_step_sums_rewards_of_any_float(kind, name):
    memory = make(kind, 4, 1, {"rewards": (name, 1), "terminated": ("bool", 1)})
    memory.add_samples(rewards=array(kind, [[1.0], [2.0], [4.0]], name), terminated=array(kind, np.zeros((3, 1), bool)))
    [[rewards]] = memory.sample(["rewards"], batch_size=50, n_step=2, gamma=0.5)
    expected = np.array([2.0, 4.0, 4.0])[np.asarray(memory.get_sampling_indexes())]
    assert (flat(rewards), dtype_name(kind, rewards)) == (expected.tolist(), name_of(kind, name))


def test_an_unwritten_reward_beyond_the_newest_row_is_not_summed(kind):
    memory = make(kind, 4, 1, {"rewards": ("float32", 1), "terminated": ("bool", 1)})
    add(memory, kind, rewards=[[1.0], [2.0]], terminated=[[False], [False]])
    [[rewards]] = memory.sample(["rewards"], batch_size=20, n_step=4, gamma=1.0)
    assert set(flat(rewards)) == {3.0, 2.0}


def sequences(memory, length, batch_size=300, **settings):
    """For each of many sequences its indexes, mask and is_first, and what it holds."""
    [[observations]] = memory.sample(["observations"], batch_size=batch_size, sequence_length=length, **settings)
    tensors = (memory.get_sampling_indexes(), memory.get_sampling_mask(), memory.get_sampling_is_first(), observations)
    arrays = [host(tensor).reshape(-1, length).tolist() for tensor in tensors]
    return list(zip(*arrays, strict=True))


def starts_of_windows(model, length):
    """The places from which there are `length` rows that are all held."""
    return {
        (lane, step)
        for lane, steps in enumerate(model.lanes)
        for step in range(max(0, len(steps) - model.size), len(steps) - length + 1)
    }


@pytest.mark.parametrize("n_rows", [5, 10, 12, 33])
@pytest.mark.parametrize("episode_ends", ["cross", "mask", "never"])
def test_sequences_are_what_a_plain_loop_gives(kind, n_rows, episode_ends):  # R13, R15
    memory, model = episodic(kind, 10, 2, n_rows, seed=n_rows)
    length, drawn = 3, set()
    allowed = starts_of_windows(model, length)
    if episode_ends == "never":
        allowed = {(lane, step) for lane, step in allowed if model.episode_end(lane, step) >= step + length}
    for indexes, mask, is_first, observations in sequences(memory, length, episode_ends=episode_ends):
        lane, step = model.at(indexes[0])
        drawn.add((lane, step))
        steps = [(lane, step + k) for k in range(length)]
        assert [model.at(index) for index in indexes] == steps
        n_valid = model.episode_end(lane, step) - step if episode_ends == "mask" else length
        assert mask == [k < n_valid for k in range(length)]
        assert is_first == [model.is_first(*at) and valid for at, valid in zip(steps, mask, strict=True)]
        assert observations == [float(np.float32(model.lanes[at][k]["observation"])) for at, k in steps]
    assert drawn == allowed and drawn


@pytest.mark.parametrize("n_rows", [10, 14])
def test_sequences_without_replacement_are_all_that_there_are(kind, n_rows):
    memory, model = episodic(kind, 10, 2, n_rows, seed=3, replacement=False)
    allowed = {(lane, step) for lane, step in starts_of_windows(model, 2) if model.episode_end(lane, step) >= step + 2}
    for more in (0, 1, 100):
        found = sequences(memory, 2, len(allowed) + more, episode_ends="never")
        assert len(found) == len(allowed) and {model.at(indexes[0]) for indexes, *_ in found} == allowed


def test_rare_sequences_are_found(kind):  # R25
    memory = make(kind, 1000, 1, {"observations": ("float32", 1), "terminated": ("bool", 1)})
    ends = np.ones((1000, 1), bool)
    ends[500:503] = False
    add(memory, kind, observations=np.arange(1000.0)[:, None], terminated=ends)
    assert windows(memory, 4, "observations", episode_ends="never") == {(500, 501, 502, 503)}


def test_where_episodes_begin_is_told_as_it_was_when_the_rows_were_drawn(kind):
    memory = make(kind, 3, 1, {"t": ("float32", 1), "terminated": ("bool", 1)})
    add(memory, kind, t=np.arange(3.0)[:, None], terminated=[[False], [False], [True]])
    memory.sample(["t"], batch_size=30)
    expected = (np.asarray(memory.get_sampling_indexes()) == 0).tolist()
    add(memory, kind, t=np.arange(3.0)[:, None], terminated=[[True], [True], [True]])
    assert flat(memory.get_sampling_is_first()) == expected


@pytest.mark.parametrize("name", ["terminated", "truncated", "done", "dones"])
@pytest.mark.parametrize("of", ["bool", "int8", "float32"])
def test_any_of_these_tensors_ends_an_episode(kind, name, of):
    memory = make(kind, 4, 1, {"t": ("float32", 1), name: (of, 1)})
    memory.add_samples(t=array(kind, np.arange(4.0)[:, None]), **{name: array(kind, [[0], [1], [0], [0]], of)})
    assert windows(memory, 2, episode_ends="never") == {(0, 1), (2, 3)}


# Trajectories


def trajectories(lengths, env_index, **tensors):
    """A batch of the library's; tensors (B, T, ...)."""
    tensors = {name: torch.as_tensor(values) for name, values in tensors.items()}
    steps = TemporalDictTensor(tensors, torch.tensor(lengths, dtype=torch.int64))
    return Trajectories(DictTensor({"env_index": torch.tensor(env_index, dtype=torch.int64)}), steps)


def grid(n_rows, n_timesteps, *shape, start=0):
    count = np.arange(start, start + n_rows * n_timesteps * int(np.prod(shape, dtype=int)), dtype=np.float32)
    return count.reshape(n_rows, n_timesteps, *shape)


def test_ragged_trajectories_store_exactly_their_valid_steps(kind):
    memory = make(kind, 4, 4)
    batch = trajectories([3, 1, 0], [2, 0, 1], x=grid(3, 3, 2), r=grid(3, 3, start=100))
    memory.add_trajectories(batch, {"x": "x", "r": "r"})
    [[x, r]] = memory.sample_all(["x", "r"], sequence_length=4)
    assert (flat(x), flat(r)) == ([6, 7, 0, 1, 2, 3, 4, 5], [103, 100, 101, 102])
    assert len(memory) == 4
    unwritten = np.ones((4, 4), bool)
    unwritten[0, [0, 2]] = unwritten[1:3, 2] = False
    np.testing.assert_array_equal(np.isnan(host(memory.get_tensor_by_name("r")))[..., 0], unwritten)


def test_trajectories_of_one_length_fill_rows_and_wrap(kind):
    memory = make(kind, 4, 2)
    for start in (0, 100, 200):
        memory.add_trajectories(trajectories([3, 3], [0, 1], x=grid(2, 3, start=start)), {"x": "x"})
    assert every(memory, "x", sequence_length=9) == [[[102, 200, 201, 202, 105, 203, 204, 205]]]
    assert (memory.memory_index, memory.env_index, memory.filled, len(memory)) == (1, 0, True, 8)


@pytest.mark.parametrize("lengths", [[9, 9], [9, 2], [2, 9]], ids=str)
def test_trajectories_longer_than_the_memory_leave_their_last_steps(kind, lengths):
    memory = make(kind, 4, 2)
    memory.add_trajectories(trajectories(lengths, [0, 1], x=grid(2, 9)), {"x": "x"})
    expected = [list(range(9 * lane + max(0, n - 4), 9 * lane + n)) for lane, n in enumerate(lengths)]
    assert every(memory, "x", sequence_length=9) == [[expected[0] + expected[1]]]


@pytest.mark.parametrize("name", ["uint8", "bool", "int64", "float16", "float32", "float64", "bfloat16"])
def test_missing_tensors_get_the_dtype_of_the_trajectories(kind, name):  # R31
    memory = make(kind, 4, 2)
    values = torch.arange(12).reshape(2, 2, 3).to(getattr(torch, name))
    memory.add_trajectories(trajectories([2, 2], [0, 1], x=values), {"x": "x"})
    [[x]] = memory.sample_all(["x"], sequence_length=2)
    assert (dtype_name(kind, x), host(x).shape) == (name_of(kind, name), (4, 3))
    assert host(x).tolist() == values.reshape(4, 3).tolist()


@pytest.mark.parametrize("name", ["int64", "float32", "bfloat16"])
def test_padding_of_a_new_tensor_is_not_converted(kind, name):  # jax stores int64 as int32
    memory = make(kind, 4, 2)
    values = torch.tensor([[5, 6], [7, 2**62]]).to(getattr(torch, name))
    memory.add_trajectories(trajectories([2, 1], [0, 1], x=values), {"x": "x"})
    assert every(memory, "x", sequence_length=2) == [[[5, 6, 7]]]


def test_only_new_tensors_are_compared_with_free_memory():
    memory, batch, asked = make("torch", 4, 2), trajectories([2, 2], [0, 1], x=grid(2, 2)), []
    for _ in range(2):
        sys.setprofile(walk := Walk())
        try:
            memory.add_trajectories(batch, {"x": "x"})
        finally:
            sys.setprofile(None)
        asked.append("workers/limits.py" in walk.relative_files())
    assert asked == [True, False]


def test_tensors_that_are_there_keep_their_shape_and_dtype(kind):
    memory = make(kind, 4, 2, {"x": ("float32", 6), "n": ("int32", 1)})
    batch = trajectories([2, 1], [0, 1], x=grid(2, 2, 2, 3), n=np.arange(4).reshape(2, 2))
    memory.add_trajectories(batch, {"x": "x", "n": "n"})
    [[x, n]] = memory.sample_all(["x", "n"], sequence_length=2)
    assert (host(x).tolist(), flat(n)) == (grid(3, 6).reshape(3, 6).tolist(), [0, 1, 2])


def test_trajectories_of_one_environment_follow_one_another(kind):
    memory = make(kind, 4, 2)
    first = trajectories([2, 1], [0, 1], x=grid(2, 2))
    second = trajectories([1, 2], [1, 0], x=grid(2, 2, start=10))
    memory.add_trajectories(Trajectories.cat([first, second]), {"x": "x"})
    assert every(memory, "x", sequence_length=4) == [[[0, 1, 12, 13, 2, 10]]]


def test_no_trajectories_change_nothing(kind):
    memory = make(kind, 4, 2, ["x"])
    memory.add_trajectories(trajectories([], [], x=np.zeros((0, 3), np.float32)), {"x": "x"})
    memory.add_trajectories(trajectories([0, 0], [0, 1], x=np.zeros((2, 0), np.float32)), {"x": "x"})
    assert (len(memory), memory.memory_index) == (0, 0)


def good(**changes):
    tensors = {"x": np.ones((2, 3), np.float32), "n": np.ones((2, 3), np.int64), "terminated": np.zeros((2, 3), bool)}
    return tensors | changes


ALL = {"x": "x", "n": "n", "terminated": "terminated", "new": "x"}
BAD = {
    "no trajectories": (lambda: {"x": 1}, ALL, TypeError, "^add_trajectories: needs Trajectories, got dict$"),
    "no env_index": (
        lambda: Trajectories(DictTensor(), trajectories([3, 3], [0, 1], **good()).trajectories), ALL, KeyError,
        "^add_trajectories: no 'env_index' in the trajectories' info",
    ),
    "a lane too many": (
        lambda: trajectories([3, 3], [0, 2], **good()), ALL, SpecError,
        r"^add_trajectories: env_index 2 is not in \[0, 2\), the memory's num_envs$",
    ),
    "a negative lane": (
        lambda: trajectories([3, 3], [0, -1], **good()), ALL, SpecError, r"^add_trajectories: env_index -1 is not in",
    ),
    "a key that is not there": (
        lambda: trajectories([3, 3], [0, 1], **good()), {**ALL, "y": "z"}, KeyError,
        r"^add_trajectories: no \['z'\] in the trajectories, there are \['n', 'terminated', 'x'\]$",
    ),
    "default names without their keys": (
        lambda: trajectories([3, 3], [0, 1], **good()), None, KeyError,
        r"^add_trajectories: no \[.*'observation/frame'",
    ),
    "another shape": (
        lambda: trajectories([3, 3], [0, 1], **good(x=np.ones((2, 3, 2), np.float32))), ALL, SpecError,
        r"^add_trajectories: 'x' has rows of shape \(2,\), the tensor's are \(1,\)$",
    ),
    "values that do not fit": (
        lambda: trajectories([3, 3], [0, 1], **good(n=np.full((2, 3), 300))), ALL, SpecError,
        "^'n' holds int64 values that do not fit uint8$",
    ),
    "floats for integers": (
        lambda: trajectories([3, 3], [0, 1], **good(n=np.ones((2, 3), np.float32))), ALL, SpecError,
        "^'n' is float32, which would lose its values as uint8",
    ),
    "a name of ours": (
        lambda: trajectories([3, 3], [0, 1], **good()), {**ALL, "__ring__": "x"}, SpecError,
        "a tensor's name must be a string that does not begin and end with '__'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "names", "error", "message"), BAD.values(), ids=BAD)
def test_trajectories_that_do_not_fit_change_nothing(kind, batch, names, error, message):
    memory = make(kind, 4, 2, {"x": ("float32", 1), "n": ("uint8", 1), "terminated": ("bool", 1)})
    memory.add_trajectories(trajectories([2, 1], [0, 1], **good()), {"x": "x", "n": "n", "terminated": "terminated"})
    before = snapshot(memory)
    with pytest.raises(error, match=message):
        memory.add_trajectories(batch(), names)
    assert snapshot(memory) == before


def test_integers_that_jax_cannot_hold_make_no_tensor():
    memory = make("jax", 4, 2)
    batch = trajectories([1, 1], [0, 1], a=grid(2, 1), n=np.full((2, 1), 2**40))
    with pytest.raises(SpecError, match="'n' holds int64 values that do not fit int32"):
        memory.add_trajectories(batch, {"a": "a", "n": "n"})
    assert (memory.get_tensor_names(), len(memory)) == ([], 0)


def test_a_function_of_jax_is_compiled_once_for_the_batches_of_a_memory():
    import jax

    memory, double = make("jax", 4, 2, {"x": ("float32", 3)}), jax.jit(lambda batch: [2 * x for x in batch])
    memory.add_samples(x=np.ones((2, 3), np.float32))
    for _ in range(10):
        [batch] = memory.sample(["x"], batch_size=5)
        double(batch)
    assert double._cache_size() == 1


KEYS = {
    "observations": "observation/frame", "next_observations": "_observation/frame", "actions": "action/action",
    "rewards": "_observation/reward", "terminated": "_observation/terminated", "truncated": "_observation/truncated",
}  # fmt: skip


def append(model, batch):
    """The valid steps of a batch, one by one."""
    steps = batch.trajectories
    for at, (lane, length) in enumerate(zip(batch.info["env_index"].tolist(), batch.lengths.tolist(), strict=True)):
        for t in range(length):
            step = {name: steps[key][at, t].numpy() for name, key in KEYS.items()}
            model.lanes[lane].append({
                **step, "reward": float(step["rewards"]), "next": step["next_observations"].tolist(),
                "terminated": bool(step["terminated"]), "truncated": bool(step["truncated"]),
                "ends": bool(step["terminated"] or step["truncated"]),
                "first": bool(steps["observation/initial_state"][at, t]),
            })  # fmt: skip


@pytest.mark.parametrize("memory_size", [40, 300])
@pytest.mark.parametrize("autoreset", [False, True], ids=["GymEnv", "GymEnvInf"])
def test_rollouts_are_stored_step_by_step(kind, memory_size, autoreset):  # R1, R4, R14
    memory, model = make(kind, memory_size, 3), Model(memory_size, 3)
    space = gymnasium.make("CartPole-v1").action_space
    arguments = {"env_id": "CartPole-v1", "n_envs": 3, "autoreset": autoreset, "max_episode_steps": 21}
    with RL_Batcher(16, RandomAgent, {"action_space": space}, create_gym, arguments, 0, [7]) as batcher:
        for _ in range(2):  # a reset cuts off the episodes of the environments that reset themselves
            batcher.reset()
            n_working = 3
            for _ in range(4):
                if not n_working:
                    break
                batch, n_working = rollout(batcher)
                memory.add_trajectories(batch)
                append(model, batch)
    assert sum(step["ends"] for steps in model.lanes for step in steps) >= 6
    assert any(step["truncated"] for steps in model.lanes for step in steps)
    assert memory.get_tensor_names() == sorted(KEYS)
    assert len(memory) == len(model.valid())
    dtypes = {"actions": name_of(kind, "int64"), "terminated": "bool", "truncated": "bool"}
    for name in KEYS:
        [[tensor]] = memory.sample_all([name], sequence_length=1000)
        expected = np.concatenate([[step[name] for step in steps[-memory_size:]] for steps in model.lanes])
        np.testing.assert_array_equal(host(tensor), expected.reshape(len(memory), -1))
        assert dtype_name(kind, tensor) == dtypes.get(name, "float32")
    check_rollout_samples(memory, model)


def check_rollout_samples(memory, model):
    names = ["rewards", "next_observations", "terminated", "truncated"]
    [tensors] = memory.sample(names, batch_size=300, n_step=4, gamma=0.9)
    rewards, following, terminated, truncated = map(host, tensors)
    discounts = host(memory.get_sampling_discounts())
    for at, index in enumerate(np.asarray(memory.get_sampling_indexes())):
        reward, last, ends, cut, discount = model.n_step(index, 4, 0.9)
        np.testing.assert_allclose([rewards[at, 0], discounts[at]], [reward, discount], rtol=1e-5)
        assert (following[at].tolist(), terminated[at, 0], truncated[at, 0]) == (last, ends, cut)
    memory.sample(["rewards"], batch_size=300, sequence_length=5, episode_ends="mask")
    indexes = np.asarray(memory.get_sampling_indexes()).reshape(300, 5)
    masks, firsts = (host(t).reshape(300, 5) for t in (memory.get_sampling_mask(), memory.get_sampling_is_first()))
    for row, mask, first in zip(indexes, masks, firsts, strict=True):
        places = [model.at(index) for index in row]
        lane, step = places[0]
        valid = [k < model.episode_end(lane, step) - step for k in range(5)]
        assert mask.tolist() == valid
        assert first.tolist() == [ok and model.is_first(*place) for ok, place in zip(valid, places, strict=True)]


def test_sharing_again_leaves_processes_that_run_connected(start_method):
    memories = [make(kind, 3, 2, ["t"]) for kind in ON_HOST]
    context = multiprocessing.get_context(start_method)
    for memory in memories:
        memory.share_memory()
    begins = context.Event()
    process = context.Process(target=write_when_told, args=(memories, begins))
    process.start()
    for memory in memories:
        memory.share_memory()
    begins.set()
    process.join(LIMIT)
    assert [(len(memory), *every(memory, "t")) for memory in memories] == [(2, [[7, 7]])] * 3


def write_when_told(memories, begins):
    assert begins.wait(LIMIT)
    write_one_row_each(memories)


@pytest.mark.parametrize("kind", ON_HOST)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
def test_a_copy_writes_as_its_original(kind, again):
    memory = counted(kind, 4, 2, 3)
    other = again(memory)
    for each in (memory, other):
        add(each, kind, t=[[3.0], [3.0]], e=[[0.0], [1.0]])
    assert snapshot(other) == snapshot(memory) and every(other, "t") == [[[0, 0, 1, 1, 2, 2, 3, 3]]]


def test_a_name_without_a_tensor_gives_none_and_one_warning_that_names_it(kind, caplog):
    memory = make(kind, 4, 2, ["a"])
    memory.create_tensor("states", None)  # as skrl's agents do where there are none
    add(memory, kind, a=[[1], [2]])
    for draw in (memory.sample, memory.sample):
        assert draw(["a", "rewrds"], 2)[0][1] is None
    assert memory.sample_by_index(["rewrds"], [0])[0] == memory.sample_all(["rewrds"])[0] == [None]
    [record] = [record for record in caplog.records if "no tensor(s)" in record.getMessage()]
    assert "no tensor(s) ['rewrds'] in this memory, there are ['a']" in record.getMessage()
    assert memory.sample(["states", "others"], 1)[0] == [None, None]
    assert [record.args[0] for record in caplog.records if "no tensor(s)" in record.msg] == [["rewrds"], ["others"]]
    strict = make(kind, 4, 2, ["a"], strict=True)
    add(strict, kind, a=[[1], [2]])
    for draw, *more in ((strict.sample, 1), (strict.sample_all,), (strict.sample_by_index, [0])):
        with pytest.raises(MissingKeyError, match=r"no tensor\(s\) \['b'\] in this memory, there are \['a'\]"):
            draw(["b"], *more)
