"""Debug mode: what is not to be read is poisoned, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from frameworks import CUDA, KINDS, add, array, host, make
from helpers import count_batcher, rollout

from rlstructs.debug import is_on, poison
from rlstructs.replay import DictTensorReplayBuffer, ReplayBuffer, TensorStorage
from rlstructs.replay.buffer import Buffer


@pytest.fixture(params=["argument", "variable"])
def debugged(request, monkeypatch):
    """Arguments that turn debug mode on."""
    if request.param == "argument":
        return {"debug": True}
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    return {}


def collected(**arguments):
    with count_batcher([[2, 4], [3, 9]], 5, **arguments) as batcher:
        batcher.reset()
        return rollout(batcher)[0]


def test_padding_is_poisoned_and_all_else_as_ever(debugged):
    plain, poisoned = collected(debug=False), collected(**debugged)
    assert torch.equal(plain.lengths, poisoned.lengths) and plain.info == poisoned.info
    mask = plain.mask(torch.bool)
    assert not mask.all()
    for key, tensor in poisoned.trajectories.items():
        assert torch.equal(tensor[mask], plain.trajectories[key][mask])
        inside = tensor[~mask]
        if tensor.dtype.is_floating_point:
            assert inside.isnan().all(), key
        elif tensor.dtype is torch.int64:
            assert (inside == torch.iinfo(torch.int64).min).all(), key


def test_slots_are_poisoned_before_they_are_written_again(debugged):
    with count_batcher([[9], [9]], 3, autoreset=True, **debugged) as batcher:
        batcher.reset()
        first, _ = rollout(batcher)
        kept = first.trajectories["observation/frame"].clone()
        batcher._engine._transport.slots[0].release()
        assert np.isnan(batcher._engine._transport.slots[0].read(None, 3)["observation/frame"].numpy()).all()
        second, _ = rollout(batcher)
        assert torch.equal(first.trajectories["observation/frame"], kept)
        assert second.trajectories["observation/frame"][:, :, 1].tolist() == [[3, 4, 5]] * 2


def test_poison_is_of_each_keys_own_dtype(debugged):
    with count_batcher([[9], [9]], 3, autoreset=True, **debugged) as batcher:
        batcher.reset()
        rollout(batcher)  # which gives its slots back
        for name, tensor in batcher._engine._transport.slots[0].read(None, 3).items():
            wanted = poison(tensor[:0].numpy().dtype)
            same = tensor.isnan() if wanted != wanted else tensor == wanted
            assert same.all(), name


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("RLSTRUCTS_DEBUG", raising=False)
    assert not is_on() and is_on(True)
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "0")
    assert not is_on()
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    assert is_on() and not is_on(False)


def test_poison_is_what_the_documentation_says():
    assert np.isnan(poison(np.dtype(np.float16))) and np.isnan(poison(np.dtype(np.complex64)))
    assert poison(np.dtype(np.int16)) == -(2**15) and poison(np.dtype(np.uint8)) == 255
    assert poison(np.dtype(bool)) is False


# --- replay stores ------------------------------------------------------------------------------------


def marks(array):
    """Where an array of numpy holds poison."""
    value = poison(array.dtype)
    return np.isnan(array) if value != value else array == value


DTYPES = ["float32", "int64", "uint8", "uint16", "bfloat16"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CUDA])
@pytest.mark.parametrize("name", DTYPES)
def test_rows_that_a_memory_does_not_hold_are_poisoned(kind, name, monkeypatch):
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    memory = make(kind, 3, 2, {"x": ("float32", 1), "y": (name, 2)})

    def poisoned(tensor):
        return marks(host(memory.get_tensor_by_name(tensor))).all(axis=2).tolist()

    assert poisoned("x") == poisoned("y") == [[True, True]] * 3
    add(memory, kind, x=[[1.0], [2.0]])
    assert poisoned("x") == [[False, False]] + [[True, True]] * 2
    assert poisoned("y") == [[True, True]] * 3  # left out of the write
    for _ in range(4):
        memory.add_samples(x=array(kind, [[3.0], [4.0]]), y=array(kind, [[5, 6], [7, 8]], name))
    assert poisoned("x") == poisoned("y") == [[False, False]] * 3
    memory.reset()
    assert poisoned("x") == poisoned("y") == [[True, True]] * 3


def test_rows_that_a_buffer_does_not_hold_are_poisoned(monkeypatch):
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    buffer = ReplayBuffer(6)
    columns = buffer._storage.columns.flat

    def poisoned(name):
        return marks(columns[name]).reshape(6, -1).all(axis=1).tolist()

    for n in range(4):
        buffer.add({"obs": np.full(100, n, np.float32), "act": n, "rew": 0.5, "terminated": False, "truncated": False})
    for name in ("obs", "act", "rew"):
        assert poisoned(name) == [False] * 4 + [True] * 2
    buffer.reset()
    for name in ("obs", "act", "rew"):
        assert poisoned(name) == [True] * 6


def test_columns_that_come_later_hold_zeros_in_the_rows_before_and_poison_in_the_rest(monkeypatch):
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    buffer = Buffer(1, 4)
    buffer._intake.write({"x": np.ones((1, 2), np.int32)})
    buffer._intake.write({"x": np.ones((1, 1), np.int32), "y": np.ones((1, 1), np.int32)}, unknown="grow")
    least = np.iinfo(np.int32).min
    assert buffer._storage.columns.flat["y"].tolist() == [0, 0, 1, least]
    buffer._intake.write({"x": np.ones((1, 1), np.int32)}, missing="fill")
    assert buffer._storage.columns.flat["y"].tolist() == [0, 0, 1, 0]  # as documented
    buffer._storage.grow(6)
    assert buffer._storage.columns.flat["y"].tolist() == [0, 0, 1, 0, least, least]


def test_what_buffers_hand_out_is_the_same_in_debug_mode(monkeypatch):
    def batches():
        buffer = DictTensorReplayBuffer(storage=TensorStorage(12), batch_size=8, generator=3, n_step=2, stack_num=2)
        found = []
        for n in range(5):
            obs = torch.arange(4.0 * n, 4.0 * n + 4)[:, None].expand(4, 100)
            done = torch.tensor([False, n % 2 == 0, False, False])
            buffer.extend({"obs": obs, "next": {"obs": obs + 1, "reward": obs[:, 0], "done": done}})
            found.append(dict(buffer.sample().items()))
            if n == 2:
                buffer.empty()
                buffer.extend({"obs": obs, "next": {"obs": obs + 1, "reward": obs[:, 0], "done": done}})
        return found

    plain = batches()
    monkeypatch.setenv("RLSTRUCTS_DEBUG", "1")
    for one, other in zip(plain, batches(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["torch", "jax", "jax-tensors"])
def test_poisoned_padding_does_not_matter_to_a_memory_of_a_smaller_dtype(kind, debugged):
    batch = collected(**debugged)
    memory = make(kind, 5, 4, {"actions": ("int32", 1)})
    memory.add_trajectories(batch, {"actions": "action/action"})
    assert len(memory) == int(batch.lengths.sum()) < 20
