"""Tianshou's buffers in files, pickles and copies: the next samples are those that would have come.

"A" is a section of spec/tianshou-torchrl.md, "R" a scenario of spec/user-demand.md.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from replay_rows import draws, fill, listed, row, rows, state_of

from rlstructs import FileError, SpecError
from rlstructs.replay import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer

h5py = pytest.importorskip("h5py")
SETTINGS = {"stack_num": 2, "sample_avail": True, "n_step": 2, "gamma": 0.5}


def plain(n):
    buffer = ReplayBuffer(7, **SETTINGS, ignore_obs_next=True)
    return fill(buffer, n, ends=[4], info={"x": np.zeros(2, np.uint8)})


def frames(n):
    """Next observations are stored through the next rows."""
    buffer, video = ReplayBuffer(7, **SETTINGS), np.arange(20 * 80, dtype=np.float32).reshape(20, 80)
    for t in range(n):
        buffer.add({**row(t, t == 4), "obs": video[t], "obs_next": video[t + 1] + (t == 4)})
    return buffer


def vector(n):
    buffer = VectorReplayBuffer(14, 2, **SETTINGS, framework="torch")
    for t in range(n):
        buffer.add(rows([t, t], [t == 4, t == 5], half=torch.ones(2, dtype=torch.bfloat16)))
        buffer.add(rows([t], half=torch.zeros(1, dtype=torch.bfloat16)), [1])
    return buffer


def prioritized(n):
    buffer = fill(PrioritizedReplayBuffer(7, 0.6, 0.4, weight_norm=False), n, ends=[4])
    if n:
        _, index = buffer.sample(5)
        buffer.update_weight(index, np.arange(5.0))
    return buffer


def prioritized_vector(n):
    buffer = PrioritizedVectorReplayBuffer(14, 2, alpha=0.6, beta=0.4)
    for t in range(n):
        buffer.add(rows([t, t], [t == 4, 0]))
    if n:
        buffer.update_weight(buffer.sample_indices(3), [7.0, 8.0, 9.0])
        buffer.set_beta(0.9)
    return buffer


MADE = [plain, frames, vector, prioritized, prioritized_vector]


def ways(buffer, folder):
    """The buffer again, as it comes out of a file, a pickle or a copy."""
    buffer.save_hdf5(folder / "plain")
    buffer.save_hdf5(str(folder / "packed.hdf5"), compression="gzip")
    yield type(buffer).load_hdf5(folder / "plain")
    yield type(buffer).load_hdf5(str(folder / "packed.hdf5"))
    for suffix in (".npz", ".pt", ".h5", ".hdf5"):
        buffer.save(folder / f"x{suffix}")
        other = type(buffer)._of_settings(buffer._settings(), {})
        other._rng.random(3)
        other.load(folder / f"x{suffix}")
        yield other
    yield pickle.loads(pickle.dumps(buffer))
    yield copy.deepcopy(buffer)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("n", [0, 3, 12])
def test_the_next_samples_are_those_that_would_have_come(made, n, tmp_path):  # R30, A12, A22 test_hdf5, test_pickle
    buffer = made(n)
    if n:
        buffer.sample(4)
    expected = draws(copy.deepcopy(buffer)) if n else None
    for same in ways(buffer, tmp_path):
        assert type(same) is type(buffer) and repr(same) == repr(buffer) and same._settings() == buffer._settings()
        assert state_of(same) == state_of(buffer)
        assert [same.last_index.tolist(), same.unfinished_index().tolist()] == [
            buffer.last_index.tolist(), buffer.unfinished_index().tolist()
        ]  # fmt: skip
        if n:
            assert draws(same) == expected


@pytest.mark.parametrize("made", [plain, frames, vector])
def test_what_comes_out_goes_on_as_the_original_does(made, tmp_path):  # A21.2: stale rows of several environments there
    buffer = made(9)
    expected = None
    for same in [*ways(buffer, tmp_path), buffer]:
        found = []
        for t in range(9, 20):
            more = {name: same._specs[name].shape for name in ("info/x",) if name in same._specs}
            more = {name: np.zeros(shape, np.uint8) for name, shape in more.items()}
            if isinstance(same, VectorReplayBuffer):
                found.append(listed(same.add(rows([t, t], [t % 3 == 0, 0], half=torch.ones(2, dtype=torch.bfloat16)))))
            elif same._storage.columns.links:
                obs = np.full(80, t, np.float32)
                found.append(listed(same.add({**row(t, t % 3 == 0), "obs": obs, "obs_next": obs + 1})))
            else:
                found.append(listed(same.add(row(t, t % 3 == 0, **more))))
        state = found, state_of(same)
        assert expected is None or state == expected
        expected = state


def test_priorities_that_come_after_a_restart_reach_only_the_rows_that_they_are_for(tmp_path):
    buffer = prioritized(7)
    _, index = buffer.sample(None)
    buffer.save_hdf5(tmp_path / "x")
    same = PrioritizedReplayBuffer.load_hdf5(tmp_path / "x")
    fill(same, 2, start=7)
    same.update_weight(index, np.full(7, 50.0))
    assert (same.weight[:2] < 50**0.6).all() and (same.weight[2:] >= 50**0.6).all()


def test_the_settings_come_from_the_file_and_the_device_from_the_caller(tmp_path):
    buffer = ReplayBuffer(3, 2, True, True, True, 5, framework="torch", new_keys="error", missing_keys="error")
    for t in range(2):
        buffer.add({**row(t), "obs": [1, 2, 3]})
    buffer.save_hdf5(tmp_path / "x")
    same = ReplayBuffer.load_hdf5(tmp_path / "x", device="cpu")
    assert same._settings() == buffer._settings() and same.sample(2)[0]["obs"].device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=["name", "device"])
def test_the_device_may_be_the_cpu_that_numpy_has(device, tmp_path):  # as programs ask for that run without cuda
    buffer = fill(ReplayBuffer(3, device=device), 2)
    buffer.save_hdf5(tmp_path / "x")
    assert ReplayBuffer.load_hdf5(tmp_path / "x", device=device)[:].obs.tolist() == [0, 1]
    with pytest.raises(FileError, match="device must be None or the CPU for numpy, got 'cuda'$"):
        ReplayBuffer.load_hdf5(tmp_path / "x", device="cuda")


def test_a_subclass_with_a_constructor_of_its_own_can_be_loaded(tmp_path):  # tianshou calls none
    class Named(ReplayBuffer):
        def __init__(self, name, buffer_size, **settings):
            super().__init__(buffer_size, **settings)
            self.name = name

    class Known(VectorReplayBuffer):
        def __init__(self, *args, color="red", **settings):
            super().__init__(*args, **settings)
            self.color = color

    fill(Named("x", 4, stack_num=2), 3).save_hdf5(tmp_path / "x")
    same = Named.load_hdf5(tmp_path / "x")
    assert type(same) is Named and len(same) == 3 and same.stack_num == 2 and not hasattr(same, "name")
    several = Known(8, 2, color="blue")
    several.add(rows([1, 2]))
    several.save_hdf5(tmp_path / "y")
    assert len(Known.load_hdf5(tmp_path / "y")) == 2 and Known.load_hdf5(tmp_path / "y").color == "red"


def test_no_pickle_is_in_a_file(tmp_path):  # A12: loading executed code there
    vector(5).save_hdf5(tmp_path / "x")
    with h5py.File(tmp_path / "x") as file:
        found = []
        file.visititems(lambda name, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
        assert all(item.dtype.kind in "biuf" for item in found) and len(found) > 8
    assert b"numpy.core" not in (tmp_path / "x").read_bytes() and b"cnumpy" not in (tmp_path / "x").read_bytes()


def test_a_compressed_file_is_smaller(tmp_path):
    buffer = fill(ReplayBuffer(2000), 2000, x=np.zeros(50))
    buffer.save_hdf5(tmp_path / "plain")
    buffer.save_hdf5(tmp_path / "lzf", compression="lzf")
    assert (tmp_path / "lzf").stat().st_size * 3 < (tmp_path / "plain").stat().st_size
    with pytest.raises(SpecError, match="^compression must be None or one of"):
        buffer.save_hdf5(tmp_path / "other", compression="zip")
    assert not (tmp_path / "other").exists() and len(list(tmp_path.iterdir())) == 2


CHANGES = {  # to the header of a file
    "settings": ('"size": 7', '"size": -7'), "unknown setting": ('"size": 7', '"size": 7, "x": 1'),
    "capacity": ('"size": 7', '"size": 8'), "version": ('"version": 1', '"version": 9'),
    "column": ('"obs": ["int64"', '"obs": ["int32"'), "no settings": ('"settings"', '"sett"'),
}  # fmt: skip


def damage(path, kind):
    if kind == "no file of HDF5":
        path.write_bytes(b"nothing")
    elif kind == "foreign":
        with h5py.File(path, "w") as file:
            file["obs"] = np.zeros(3)
    elif kind == "cut off":
        path.write_bytes(path.read_bytes()[:-500])
    else:
        with h5py.File(path, "r+") as file:
            text = file["__header__"][:].tobytes().decode()
            assert CHANGES[kind][0] in text
            del file["__header__"]
            file["__header__"] = np.frombuffer(text.replace(*CHANGES[kind]).encode(), np.uint8)


@pytest.mark.parametrize("kind", ["no file of HDF5", "foreign", "cut off", *CHANGES])
def test_a_damaged_or_foreign_file_is_an_error(kind, tmp_path):  # the list
    path = tmp_path / "x.h5"
    plain(5).save_hdf5(path)
    damage(path, kind)
    with pytest.raises(FileError, match=r"x\.h5: "):
        ReplayBuffer.load_hdf5(path)
    if kind not in ("settings", "unknown setting", "capacity", "no settings"):
        buffer = plain(3)
        before = state_of(buffer)
        with pytest.raises(FileError, match=r"x\.h5: "):
            buffer.load(path)
        assert state_of(buffer) == before


def test_a_file_of_another_class_or_none_at_all(tmp_path):
    plain(5).save_hdf5(tmp_path / "x.h5")
    with pytest.raises(FileError, match="holds a ReplayBuffer, not a VectorReplayBuffer$"):
        VectorReplayBuffer.load_hdf5(tmp_path / "x.h5")
    with pytest.raises(FileNotFoundError, match="no such file"):
        ReplayBuffer.load_hdf5(tmp_path / "y.h5")
    with pytest.raises(FileError, match="holds 1 lanes of 7 rows, this buffer has 1 of 8"):
        ReplayBuffer(8).load(tmp_path / "x.h5")
