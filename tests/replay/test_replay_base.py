"""What every buffer shares: next observations stored once, growth, reading, files, frameworks."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surfaces import SURFACES

from rlstructs import DictTensor, FileError, SpecError, TemporalDictTensor, Trajectories
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.draw.reading import Reading
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

WIDE = 80  # float32: more bytes than from which on a next observation is stored once


def frames(values):
    """A frame for each number, all of its pixels the number."""
    return np.repeat(np.asarray(values, np.float32)[..., None], WIDE, axis=-1)


class Model:
    """Per lane the newest rows as (obs, obs_next, terminated)."""

    def __init__(self, n_lanes, capacity):
        self.lanes, self.capacity = [[] for _ in range(n_lanes)], capacity

    def write(self, lane, rows):
        self.lanes[lane] = (self.lanes[lane] + rows)[-self.capacity :]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n_lanes=st.integers(1, 3), capacity=st.integers(1, 6))
def test_a_next_observation_stored_through_the_next_row_reads_as_it_was_written(data, n_lanes, capacity):
    buffer, model = Buffer(n_lanes, capacity, seed=0), Model(n_lanes, capacity)
    for _ in range(data.draw(st.integers(1, 12))):
        n_timesteps = data.draw(st.integers(1, 8))
        # Few numbers, so that the next row often holds what this one led to, and often does not.
        obs = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n_lanes * n_timesteps,
                                          max_size=n_lanes * n_timesteps))).reshape(n_lanes, n_timesteps)  # fmt: skip
        following = np.array(data.draw(st.lists(st.integers(0, 2), min_size=obs.size, max_size=obs.size)))
        following = following.reshape(obs.shape)
        lengths = np.array([data.draw(st.integers(0, n_timesteps)) for _ in range(n_lanes)])
        ragged = data.draw(st.booleans())
        block = {"obs": frames(obs), "obs_next": frames(following), "terminated": np.zeros(obs.shape, bool)}
        buffer._intake.write(block, lengths=lengths if ragged else None)
        for lane in range(n_lanes):
            n = lengths[lane] if ragged else n_timesteps
            model.write(lane, list(zip(obs[lane, :n].tolist(), following[lane, :n].tolist(), strict=True)))
        change = data.draw(st.sampled_from(["", "obs", "obs_next", "clear", "grow"]))
        view = buffer._storage.view()
        if change in ("obs", "obs_next") and view.total:
            row = data.draw(st.integers(0, view.total - 1))
            [lane], [step] = (x.tolist() for x in (buffer._storage.columns.places(view.every_row())[0][[row]],
                                                  view.steps(view.every_row()[[row]])))  # fmt: skip
            buffer._storage.put({change: frames([9])}, view.every_row()[[row]])
            old = list(model.lanes[lane][step - view.low[lane]])
            old[change == "obs_next"] = 9
            model.lanes[lane][step - view.low[lane]] = tuple(old)
        elif change == "clear":
            buffer._storage.clear()
            model = Model(n_lanes, model.capacity)
        elif change == "grow" and not buffer._storage.ring.is_full().any() and not (buffer._storage.ring.base).any():
            model.capacity += 3
            buffer._storage.grow(model.capacity)
            buffer._storage.alignment = model.capacity
        assert "obs_next" in buffer._storage.columns.links
        rows, _ = buffer._storage.view().by_lane(1)
        expected = [row for lane in model.lanes for row in lane]
        for name, at in (("obs", 0), ("obs_next", 1)):
            [values] = buffer._storage.gather([name], rows)
            np.testing.assert_array_equal(values, frames([row[at] for row in expected]).reshape(-1, WIDE))


def test_a_frame_is_stored_once():
    n, size = 1000, 84 * 84
    video = np.random.default_rng(0).integers(0, 256, (1, n + 1, size), np.uint8)
    done = (np.arange(n) % 100 == 99)[None]
    buffer = Buffer(1, n, seed=0)
    following = video[:, 1:].copy()
    following[done] += 1  # the true final observation is not what the next episode begins with
    buffer._intake.write({"obs": video[:, :-1], "obs_next": following, "terminated": done})
    assert buffer.nbytes < n * (size + 16) + 11 * size
    rows = np.arange(n)[::-1]
    np.testing.assert_array_equal(buffer._storage.gather(["obs_next"], rows)[0], following[0, rows])


def test_the_next_of_a_next_observation_is_not_stored_through_a_column_that_is_linked_itself(tmp_path):
    buffer = Buffer(1, 8, seed=0)
    obs, following, after = (np.full((1, 5, WIDE), start) + np.arange(5.0)[None, :, None] for start in (0.0, 1.0, 2.0))
    buffer._intake.write({"obs": obs, "next_obs": following, "next_next_obs": after})
    for name, expected in (("obs", obs), ("next_obs", following), ("next_next_obs", after)):
        np.testing.assert_array_equal(buffer._storage.gather([name], np.arange(5))[0], expected[0])
    buffer.save(tmp_path / "x.npz")
    other = Buffer(1, 8, seed=0)
    other.load(tmp_path / "x.npz")
    np.testing.assert_array_equal(other._storage.gather(["next_next_obs"], np.arange(5))[0], after[0])


def test_bits_decide_what_is_the_same_observation():
    buffer = Buffer(1, 8, seed=0)
    obs = np.zeros((1, 3, WIDE), np.float32)
    following = obs.copy()
    following[0, 0] = -0.0
    following[0, 1] = np.nan
    obs[0, 2] = np.nan
    buffer._intake.write({"obs": obs, "obs_next": following, "rew": np.zeros((1, 3))})
    [values] = buffer._storage.gather(["obs_next"], np.arange(3))
    np.testing.assert_array_equal(values.view(np.uint32), following[0].view(np.uint32))
    assert buffer._storage.columns.links["obs_next"].is_separate.tolist() == [True] + [False] * 7


def test_a_store_that_grows_keeps_rows_episodes_and_row_ids():
    storage = Storage(1, 4)
    storage.track_episodes()
    storage.columns.add("x", Spec(np.dtype(np.int64)))
    storage.alignment = 24
    for _ in range(2):  # the second time after it was cleared
        for capacity in (8, 24):
            n = storage.columns.capacity - len(storage)
            x = len(storage) + np.arange(n)[None]
            storage.write({"x": x}, done=x % 3 == 2)
            if storage.columns.capacity < capacity:
                storage.grow(capacity)
        rows = np.arange(len(storage))
        assert storage.gather(["x"], rows)[0].tolist() == rows.tolist()
        assert storage.episodes.times(rows).tolist() == (rows % 3).tolist()
        storage.clear()
    storage.write({"x": np.zeros((1, 1), int)}, done=np.zeros((1, 1), bool))
    assert storage.view().every_row().tolist() == [0]


def sample(buffer, rows, reading):
    rows, names = np.asarray(rows), list(buffer._specs)
    arrays = reading.read(buffer._storage, buffer._storage.view(), names, rows.reshape(len(rows), -1))
    return {name: np.asarray(array)[:, 0] if rows.ndim == 1 else np.asarray(array) for name, array in arrays.items()}


def episodes_buffer(**arguments):
    """Episodes of 3 steps of one lane, 8 steps; observation and what follows count on."""
    buffer = Buffer(1, 16, seed=0, **arguments)
    t = np.arange(8)[None]
    buffer._intake.write({
        "obs": t * 1.0, "obs_next": t + 1.0, "rew": np.ones((1, 8), np.float32), "act": t,
        "terminated": t == 2, "truncated": t == 5,
    })  # fmt: skip
    return buffer


def test_n_step_stops_at_the_end_of_an_episode_and_at_the_newest_row():  # R8
    read = sample(episodes_buffer(), [0, 1, 2, 4, 6, 7], Reading(n_step=2, gamma=0.5))
    assert read["rew"].tolist() == [1.5, 1.5, 1, 1.5, 1.5, 1]
    assert read["discount"].tolist() == [0.25, 0.25, 0.5, 0.25, 0.25, 0.5]
    assert read["obs"].tolist() == [0, 1, 2, 4, 6, 7]
    assert read["obs_next"].tolist() == [2, 3, 3, 6, 8, 8]
    assert read["terminated"].tolist() == [False, True, True, False, False, False]
    assert read["truncated"].tolist() == [False, False, False, True, False, False]
    assert read["act"].tolist() == [0, 1, 2, 4, 6, 7]


def test_a_stack_holds_its_own_episode_only():  # R10
    read = sample(episodes_buffer(), [0, 1, 2, 3, 5], Reading(stack_num=3))
    assert read["obs"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 4, 5]]
    assert read["obs_next"].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [3, 3, 4], [4, 5, 6]]
    assert read["act"].tolist() == [0, 1, 2, 3, 5]


def test_stacks_and_n_steps_go_together_and_rows_may_have_any_shape():
    read = sample(episodes_buffer(), [[0, 1], [3, 4]], Reading(n_step=2, gamma=1.0, stack_num=2))
    assert read["obs"].tolist() == [[[0, 0], [0, 1]], [[3, 3], [3, 4]]]
    assert read["obs_next"].tolist() == [[[1, 2], [2, 3]], [[4, 5], [5, 6]]]
    assert read["rew"].tolist() == [[2, 2], [2, 2]]


def test_only_the_keys_that_are_asked_for_are_stacked():
    read = sample(episodes_buffer(), [1], Reading(stack_num=2, stack_keys=("act",)))
    assert read["obs"].tolist() == [1] and read["act"].tolist() == [[0, 1]]


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".h5"])
@pytest.mark.parametrize("n", [0, 3, 11])
def test_a_file_restores_everything(suffix, n, tmp_path):
    def made():
        return Buffer(2, 5, seed=1)

    first, second = made(), made()
    for t in range(n):
        first._intake.write({
            "obs": frames([[t % 3]] * 2), "obs_next": frames([[(t + 1) % 3]] * 2), "flag": np.ones((2, 1), bool),
            "half": torch.full((2, 1), t, dtype=torch.bfloat16), "terminated": np.full((2, 1), t % 4 == 3),
        })  # fmt: skip
    first.save(tmp_path / f"x{suffix}")
    second._rng.random(7)
    second.load(tmp_path / f"x{suffix}")
    assert len(first) == len(second)
    assert first._rng.random() == second._rng.random()
    rows = first._storage.view().every_row()
    for a, b in zip(*(x._storage.gather(list(first._specs), rows) for x in (first, second)), strict=True):
        np.testing.assert_array_equal(a, b)
    for buffer in (first, second):
        buffer._intake.write({
            "obs": frames([[1], [2]]), "obs_next": frames([[5], [5]]), "flag": np.zeros((2, 1), bool),
            "half": torch.zeros(2, 1, dtype=torch.bfloat16), "terminated": np.zeros((2, 1), bool),
        })  # fmt: skip
    rows = first._storage.view().every_row()
    for a, b in zip(*(x._storage.gather(list(first._specs), rows) for x in (first, second)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first._storage.episodes.times(rows) == second._storage.episodes.times(rows)).all()


@pytest.mark.parametrize("n", [0, 3, 5, 11])
def test_a_file_may_have_stored_next_observations_in_another_way(n, tmp_path):
    def filled(link, start, n):
        buffer = Buffer(2, 5, seed=1)
        first = {"obs": frames([[start]] * 2), "terminated": np.zeros((2, 1), bool)}
        buffer._intake.write({**first, "obs_next": frames([[start]] * 2)} if link else first)
        if not link:  # there are rows when it comes: it is a column of its own
            buffer._intake.write({**first, "obs_next": frames([[start]] * 2)}, unknown="grow")
        buffer._storage.clear()
        for t in range(start, start + n):  # of the second lane fewer, and what lies beside in the first
            rows = {"obs": frames([[t]]), "obs_next": frames([[t + 1]]), "terminated": np.array([[t % 4 == 3]])}
            buffer._intake.write({**rows, "obs_next": frames([[-t]])} if t % 4 == 3 else rows, np.array([0]))
            if t % 2:
                buffer._intake.write(rows, np.array([1]))
        assert bool(buffer._storage.columns.links) == link
        return buffer

    def read(buffer):
        return [
            array.tolist() for array in buffer._storage.gather(list(buffer._specs), buffer._storage.view().every_row())
        ]

    for link in (True, False):
        saved, other = filled(link, 0, n), filled(not link, 50, 4)
        saved.save(tmp_path / "x.npz")
        other.load(tmp_path / "x.npz")
        assert read(other) == read(saved)
        for buffer in (saved, other):
            for t in (90, 91):
                rows = {"obs": frames([[t], [t]]), "obs_next": frames([[t + 1], [7]])}
                buffer._intake.write({**rows, "terminated": np.zeros((2, 1), bool)})
        assert read(other) == read(saved)


def test_a_file_of_another_size_changes_nothing(tmp_path):
    episodes_buffer().save(tmp_path / "x.npz")
    other = Buffer(1, 17, seed=0)
    other._intake.write({"x": np.zeros((1, 2))})
    with pytest.raises(FileError, match="holds 1 lanes of 16 rows, this buffer has 1 of 17"):
        other.load(tmp_path / "x.npz")
    assert len(other) == 2
    same = Buffer(1, 16, seed=0)
    same._intake.write({"x": np.zeros((1, 2))})
    with pytest.raises(FileError, match="has columns act"):
        same.load(tmp_path / "x.npz")
    assert len(same) == 2 and list(same._specs) == ["x"]


@pytest.mark.parametrize("n_lanes", [1, 3])
def test_trajectories_come_in_with_valid_steps_only(n_lanes):
    lengths = torch.tensor([2, 4, 1])
    t = torch.arange(4).expand(3, 4) + 10 * torch.arange(3)[:, None]
    done = torch.zeros(3, 4, dtype=torch.bool)
    done[0, 1] = True
    steps = TemporalDictTensor({"observation/frame": t, "_observation/terminated": done}, lengths)
    buffer = Buffer(n_lanes, 10, seed=0)
    buffer.add_trajectories(Trajectories(DictTensor({"env_index": torch.arange(3)}), steps))
    rows = buffer._storage.view().by_lane(1)[0]
    assert buffer._storage.gather(["observation/frame"], rows)[0].tolist() == [0, 1, 10, 11, 12, 13, 20]
    assert buffer._storage.episodes.times(rows).tolist() == [0, 1, 0, 1, 2, 3, 0]
    with pytest.raises(SpecError, match="unknown key"):
        buffer.add_trajectories(Trajectories(DictTensor({"env_index": torch.arange(3)}),
                                             TemporalDictTensor({"x": t, **dict(steps.items())}, lengths)))  # fmt: skip
    assert len(buffer) == 7


@pytest.mark.parametrize("framework", ["torch", "numpy", "jax", "warp"])
def test_samples_leave_as_arrays_of_the_framework(framework):
    buffer = Buffer(1, 4, seed=0, framework=framework)
    buffer._intake.write({
        "obs/x": np.array([[[1.0, 2.0]]], np.float64), "n": np.array([[7]]), "ok": np.array([[True]]),
        "half": torch.full((1, 1), 1.5, dtype=torch.bfloat16),
    })  # fmt: skip
    arrays = dict(zip(buffer._specs, buffer._storage.gather(list(buffer._specs), np.array([0, 0])), strict=True))
    batch = buffer._export(arrays, buffer._specs)
    assert type(batch) is (DictTensor if framework == "torch" else ArrayDict)
    module = "numpy" if framework == "numpy" else {"torch": "torch", "jax": "jaxlib", "warp": "warp"}[framework]
    for name, expected in (("obs/x", [[1, 2], [1, 2]]), ("n", [7, 7]), ("ok", [True, True]), ("half", [1.5, 1.5])):
        value = batch[name]
        assert type(value).__module__.split(".")[0] == module
        host = value.float() if framework == "torch" else value.numpy() if framework == "warp" else value
        assert np.asarray(host).astype(float).tolist() == np.asarray(expected, float).tolist()


def test_integers_that_do_not_fit_jax_are_an_error():
    buffer = Buffer(1, 4, seed=0, framework="jax")
    with pytest.raises(SpecError, match="'n' holds values that do not fit"):
        buffer._export({"n": np.array([2**40])}, buffer._specs)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": np.zeros((1, 2))}, r"^key\(s\) \['b'\] are missing, got \['a'\]$"),
        ({"a": np.zeros((1, 2)), "b": np.zeros((1, 2)), "c": np.zeros((1, 2))}, r"^unknown key\(s\) \['c'\]"),
        ({"a": np.zeros((1, 2)), "b": np.zeros((1, 3))}, "'b' has shape"),
        ({"a": np.zeros((1, 2, 3)), "b": np.zeros((1, 2))}, "'a' has shape"),
        ({"a": np.full((1, 2), 1.5), "b": np.full((1, 2), "text")}, "'b' holds <U4; a buffer keeps numbers only"),
        ({"a": np.zeros((1, 2)), "b": np.array([[1, None]])}, "'b' holds object; a buffer keeps numbers only"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(rows, message):
    buffer = Buffer(1, 4, seed=0)
    buffer._intake.write({"a": np.zeros((1, 1)), "b": np.zeros((1, 1))})
    with pytest.raises(SpecError, match=message):
        buffer._intake.write(rows)
    assert len(buffer) == 1 and list(buffer._specs) == ["a", "b"]


def test_columns_that_come_later_are_zero_in_the_rows_before():
    buffer = Buffer(1, 4, seed=0)
    buffer._intake.write({"a": np.ones((1, 1))})
    buffer._intake.write({"b": np.ones((1, 1))}, unknown="grow", missing="fill")
    assert [a.tolist() for a in buffer._storage.gather(["a", "b"], np.arange(2))] == [[1, 0], [0, 1]]


def with_finals():
    """4000 frames of 84 x 84, 80 episodes, and what follows them: after an end something else than the next row."""
    n, size = 4000, 84 * 84
    done = (np.arange(n) % 50 == 49)[None]
    frames = np.random.default_rng(0).integers(0, 256, (1, n + 1, size), np.uint8)
    following = frames[:, 1:].copy()
    following[done] += 1
    return {"obs": frames[:, :-1], "obs_next": following, "terminated": done}


def test_what_lies_beside_takes_small_pages_only(subprocess_env):
    # In a program of its own: what other tests leave would be measured too.
    program = textwrap.dedent("""
        import ctypes
        import psutil
        from rlstructs.replay.buffer import Buffer
        from test_replay_base import with_finals

        buffer, steps = Buffer(1, 4000, seed=0), with_finals()
        before = psutil.Process().memory_info().rss
        buffer._intake.write(steps)
        ctypes.CDLL(None).malloc_trim(0)  # freed memory, which the process keeps for later arrays, is not the buffer's
        taken = psutil.Process().memory_info().rss - before
        # Huge pages would take 2 MB for each of the 80 that lie beside.
        assert taken < 1.1 * steps["obs"].nbytes, taken
    """)
    done = subprocess.run([sys.executable, "-c", program], env=subprocess_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_lies_beside_is_pickled_as_small_pages():
    buffer, steps = Buffer(1, 4000, seed=0), with_finals()
    buffer._intake.write(steps)
    data = pickle.dumps(buffer)
    assert len(data) < 1.1 * steps["obs"].nbytes
    copy = pickle.loads(data)
    np.testing.assert_array_equal(copy._storage.gather(["obs_next"], np.arange(4000))[0], steps["obs_next"][0])
    copy._intake.write({name: values[:, :1] for name, values in steps.items()})
    assert len(copy) == 4000


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_a_buffer_that_nobody_holds_frees_its_rows_at_once(surface):
    buffer = surface.make()
    stores = [weakref.ref(store) for store in surface.stores(buffer)]
    gc.collect()
    gc.disable()  # no part may hold the buffer: a cycle waits for the collector
    try:
        del buffer
        assert [store() for store in stores] == [None] * len(stores)
    finally:
        gc.enable()
