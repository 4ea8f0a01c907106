"""Folders of rollouts: written while rollouts come, and read part by part."""

from __future__ import annotations

import re
import weakref

import pytest
import torch

from rlstructs import DictTensor, FileError, TemporalDictTensor, Trajectories, load_rollouts, save_rollouts
from rlstructs.structures import trajectories


def rollout(number, n_timesteps=4):
    steps = {"x": torch.full((2, n_timesteps, 3), float(number)), "flag": torch.ones(2, n_timesteps, dtype=torch.bool)}
    lengths = torch.tensor([n_timesteps, number % n_timesteps])
    return Trajectories(DictTensor({"env_index": torch.arange(2)}), TemporalDictTensor(steps, lengths))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(trajectories, "PART_NBYTES", 3 * trajectories._nbytes(rollout(0)))


def test_a_folder_holds_what_was_given_in_order(tmp_path, small_parts):
    rollouts = [rollout(number, n_timesteps=3 + number % 2) for number in range(10)]
    assert save_rollouts(tmp_path / "x", iter(rollouts)) == 20
    parts = list(load_rollouts(tmp_path / "x"))
    assert len(parts) > 2 and Trajectories.cat(parts) == Trajectories.load(tmp_path / "x") == Trajectories.cat(rollouts)


def test_rollouts_are_written_while_they_come_and_not_kept(tmp_path, small_parts):
    seen, memory = [], rollout(0)

    def rollouts():
        for number in range(9):
            n_parts = len(list(tmp_path.glob("x/*")))
            assert n_parts == number // 3
            assert all(reference() is None for reference in seen[:-1])
            memory.trajectories["x"].fill_(number)  # as `get(out=)` does
            given = Trajectories(memory.info, memory.trajectories)
            seen.append(weakref.ref(given))
            yield given
            del given

    save_rollouts(tmp_path / "x", rollouts())
    found = Trajectories.load(tmp_path / "x").trajectories["x"]
    assert found[::2, 0, 0].tolist() == list(range(9))


def test_what_came_before_an_error_stays(tmp_path, small_parts):
    def rollouts():
        for number in range(5):
            yield rollout(number)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_rollouts(tmp_path / "x", rollouts())
    assert Trajectories.load(tmp_path / "x") == Trajectories.cat(map(rollout, range(5)))


def test_an_error_says_what_is_wrong(tmp_path, small_parts):
    save_rollouts(tmp_path / "x", map(rollout, range(9)))
    with pytest.raises(FileError, match="x: must be a new or an empty folder, it has 'part_00000.*'"):
        save_rollouts(tmp_path / "x", [rollout(0)])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save_rollouts(tmp_path / "no" / "x", [rollout(0)])
    with pytest.raises(TypeError, match="save_rollouts: needs Trajectories, got DictTensor"):
        save_rollouts(tmp_path / "y", [DictTensor({})])
    assert not (tmp_path / "y").exists()
    (tmp_path / "x" / "part_000001.npz").unlink()
    for load in (load_rollouts, Trajectories.load):
        with pytest.raises(FileError, match=re.escape(f"{tmp_path / 'x'}: part_000001.npz is missing")):
            load(tmp_path / "x")
    with pytest.raises(FileError, match="a folder without part_000000.npz, which save_rollouts writes"):
        Trajectories.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_rollouts(tmp_path / "z")
