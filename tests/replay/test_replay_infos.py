"""Infos of tianshou's buffers are in each row what the environment said in that step."""

from __future__ import annotations

import copy
import pickle
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from replay_rows import state_of

from rlstructs import SharedVectorEnv
from rlstructs.errors import FileError, OutOfMemoryError, SpecError
from rlstructs.replay import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    HERVectorReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

NAN = float("nan")


def rewards(achieved, desired):
    return -np.abs(achieved - desired).sum(axis=-1)


BUFFERS = {
    "plain": lambda **more: ReplayBuffer(9, **more),
    "prioritised": lambda **more: PrioritizedReplayBuffer(9, 0.6, 0.4, **more),
    "hindsight": lambda **more: HERReplayBuffer(9, rewards, 5, **more),
    "vector": lambda **more: VectorReplayBuffer(18, 2, **more),
    "prioritised vector": lambda **more: PrioritizedVectorReplayBuffer(18, 2, alpha=0.6, beta=0.4, **more),
    "hindsight vector": lambda **more: HERVectorReplayBuffer(18, 2, compute_reward_fn=rewards, horizon=5, **more),
    "cached": lambda **more: CachedReplayBuffer(ReplayBuffer(9, **more), 2, 9),
}
surfaces = pytest.mark.parametrize("kind", BUFFERS)
ABSENT = object()


def obs_of(kind, t):
    frame = np.full(2, t, np.float32)
    return {"achieved_goal": frame, "desired_goal": frame, "x": frame} if kind.startswith("hindsight") else frame


def add(kind, buffer, t, info):
    """Adds step t with this info, where there are several environments to the first of them; gives its row."""
    row = {"obs": obs_of(kind, t), "obs_next": obs_of(kind, t + 1), "act": t, "rew": float(t),
           "terminated": False, "truncated": False}  # fmt: skip
    if buffer.subbuffer_edges.size == 2:
        return int(buffer.add({**row, "info": info})[0][0])
    pair = {name: [value, value] for name, value in row.items()}
    return int(buffer.add({**pair, "info": [info, {"other": 1.0}]})[0][0])


def info_at(buffer, row):
    """What the info `x` of a row is, as its environment said it."""
    batch = buffer[row]
    found = batch.get("info/x")
    if isinstance(found, np.ndarray) and not found.ndim:
        return found[()]
    inside = {name[len("info/x/") :]: batch[name] for name in batch if name.startswith("info/x/")}
    return {name: each[()] if isinstance(each, np.ndarray) else each for name, each in inside.items()} or found


def same(found, said):
    if isinstance(said, dict):
        return found.keys() == said.keys() and all(same(found[key], each) for key, each in said.items())
    if isinstance(said, torch.Tensor):
        said = said.float().numpy()
    if isinstance(said, np.ndarray) and not said.ndim:
        return same(found, said[()])
    if isinstance(said, (list, tuple, np.ndarray)):
        return len(found) == len(said) and all(same(one, other) for one, other in zip(found, said, strict=True))
    return found is said or bool(found == said) or (found != found and said != said)


THING = threading.Lock()
SAID = {
    "text": ["a", "b", "ccc"],
    "text of numpy": [np.str_("a"), np.str_("bcd"), 3],
    "an object": [1, THING, 2],
    "an int that becomes a float": [1, 0.5, 2],
    "a bool that becomes a count": [True, 5, 2],
    "a bool that becomes a float": [False, 0.25, True],
    "a small number that becomes large": [np.int8(3), 300, -(2**40)],
    "an unsigned one that becomes negative": [np.uint8(200), -1, 2**40],
    "whole numbers that no float holds": [2**60 + 1, 0.5, 1],
    "one that no int holds": [1, 2**70, 3],
    "an unsigned one of 64 bits beside a negative one": [np.uint64(2**63 + 1), -1, 3],
    "a short float that becomes a long one": [np.float32(0.5), 0.1, 1 / 3],
    "a half float that becomes large": [np.float16(0.5), 1e6, 3],
    "a long double": [1, np.longdouble(1) / 3, 2],
    "bfloat16": [torch.tensor(0.5, dtype=torch.bfloat16), 1 / 3, "x"],
    "a complex number": [1, 2j, 0.5],
    "NaN and infinity": [1, NAN, float("inf")],
    "a number that becomes an array": [1, np.array([1, 2]), 3],
    "an array of another shape": [np.zeros(2), np.zeros((2, 1)), np.zeros(2)],
    "a number that becomes a dict": [1, {"b": 2}, 3],
    "a dict that becomes a number": [{"b": 2, "c": {"d": 0.5}}, 1, {"b": 3}],
    "a dict that becomes text": [{"b": "t"}, "text", {"b": "u"}],
    "an empty dict": [1, {}, 2],
    "a list that grows": [[1], [1, 2], [1, 2, 3]],
    "an empty list that grows": [[], [1], [1, 2]],
    "a ragged list": [[[1], [1, 2]], [[1]], [3]],
    "a tuple": [(1, 2), (1, "a"), (3,)],
    "None": [3, None, 4],
    "arrays without axes": [np.array(3), np.array(0.5), np.array("t")],
    "arrays of an object": [np.array({"x": 1}, object), np.array("t", object), np.array(None, object)],
    "bytes": [b"a", 1, b"c"],
    "dates": [np.datetime64("2020-01-01"), 3, None],
    "keys that are no text": [{0: 1}, {1: "x"}, 2],
    "a set": [{1, 2}, {3}, 1],
    "tensors": [torch.tensor(3), torch.tensor([1.0, 2]), torch.zeros(2).to(torch.float8_e4m3fn)],
    "one that comes later": [ABSENT, 1, "x"],
    "one that goes": ["a", ABSENT, "c"],
}


@surfaces
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_an_info_is_in_each_row_what_was_said(kind, said):
    buffer = BUFFERS[kind]()
    at = [add(kind, buffer, t, {} if info is ABSENT else {"x": info}) for t, info in enumerate(said)]
    for row, info in zip(at, said, strict=True):
        found = info_at(buffer, row)
        assert found in (None, 0) if info is ABSENT else same(found, info)
    batch, rows = buffer.sample(32)
    values = batch.obs.x if kind.startswith("hindsight") else batch.obs
    assert len(rows) == len(values) == len(batch.info) == 32
    assert buffer.act.dtype == np.int64 and buffer.rew.dtype == np.float64 and buffer.terminated.dtype == bool


@surfaces
@pytest.mark.parametrize("suffix", ["npz", "pt", "h5"])
def test_infos_of_every_kind_are_in_files_pickles_and_copies(kind, suffix, tmp_path):
    infos = [1, "text", None, {"b": [1, "a", (2, 3j)], "c": b"x"}, np.arange(3, dtype=np.int8), [True, NAN, 2**70]]
    buffer = BUFFERS[kind]()
    at = [add(kind, buffer, t, {"x": info, "n": t}) for t, info in enumerate(infos)]
    buffer.save(tmp_path / f"buffer.{suffix}")
    loaded, other = BUFFERS[kind](), BUFFERS[kind]()
    add(kind, other, 0, {"x": 1, "y": "gone"})
    for same_kind in (loaded, other):
        same_kind.load(tmp_path / f"buffer.{suffix}")
    for each in (loaded, other, copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert set(each._specs) == set(buffer._specs) and len(each) == len(buffer)
        assert all(same(info_at(each, row), info) for row, info in zip(at, infos, strict=True))
        add(kind, each, 6, {"x": "more", "n": 0.5})
    assert info_at(buffer, at[1]) == "text" and buffer._specs["info/n"].dtype == np.int64


UNFIT = {
    "a lock": (THING, "holds a _thread.lock"),
    "a lock in a list": ([1, [THING]], "holds a _thread.lock"),
    "a key": ({1: 2}, "holds a dict with the key 1, which is not a string"),
    "dates": (np.zeros(2, "M8[s]"), r"holds an array of datetime64\[s\]"),
}


@pytest.mark.parametrize(("info", "why"), UNFIT.values(), ids=UNFIT)
def test_what_no_file_holds_is_named_and_nothing_is_written(info, why, tmp_path):
    buffer = ReplayBuffer(3)
    add("plain", buffer, 0, {"x": info})
    (tmp_path / "there.npz").write_bytes(b"before")
    with pytest.raises(SpecError, match=f"^save: 'info/x' {why}, which a file cannot: it holds numbers, text"):
        buffer.save(tmp_path / "there.npz")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


@surfaces
@pytest.mark.parametrize("bad", [{"act": "left"}, {"obs": np.ones(3)}, {"rew": [1.0, 2]}, {"truncated": 2}], ids=str)
def test_a_write_that_fails_leaves_the_columns_of_infos_as_they_are(kind, bad):
    buffer = BUFFERS[kind]()
    add(kind, buffer, 0, {"x": 1, "y": {"z": 1}})
    before, specs = state_of(buffer), dict(buffer._specs)
    obs = obs_of(kind, 1)
    row = {"obs": obs, "obs_next": obs, "act": 1, "rew": 1.0, "terminated": False, "truncated": False, **bad}
    info = {"x": "text", "y": 1, "new": THING}
    with pytest.raises((SpecError, TypeError, KeyError)):
        if buffer.subbuffer_edges.size == 2:
            buffer.add({**row, "info": info})
        else:
            buffer.add({**{name: [value, value] for name, value in row.items()}, "info": [info, info]})
    assert state_of(buffer) == before and buffer._specs == specs


@pytest.mark.parametrize("key", ["obs", "act", "policy", "returns"])
def test_only_infos_widen(key):
    buffer = ReplayBuffer(4)
    row = {"obs": 1, "act": 1, "rew": 1.0, "terminated": False, "truncated": False, "policy": 1, "returns": 1}
    buffer.add(row)
    for value in (0.5, "text", [1, 2], 2**70):
        with pytest.raises(SpecError, match=f"^'{key}' "):
            buffer.add({**row, key: value})


class Told(gymnasium.Env):
    """An environment whose infos are of many kinds."""

    observation_space, action_space = gymnasium.spaces.Box(0, 99, (2,)), gymnasium.spaces.Discrete(2)

    def __init__(self, length):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(2, np.float32), {"begun": True}

    def step(self, action):
        self._t += 1
        info = {"t": self._t, "name": f"step {self._t}", "trace": list(range(self._t))}
        return np.full(2, self._t, np.float32), 1.0, self._t == self._length, False, info


@pytest.mark.parametrize("kind", ["vector", "prioritised vector", "cached"])
@pytest.mark.parametrize("vector", [gymnasium.vector.SyncVectorEnv, SharedVectorEnv], ids=lambda cls: cls.__name__)
def test_infos_of_vector_environments_are_added_as_they_come(kind, vector):
    buffer = CachedReplayBuffer(ReplayBuffer(20), 2, 9) if kind == "cached" else BUFFERS[kind]()
    env = vector([lambda: Told(2), lambda: Told(3)], autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        obs, _ = env.reset(seed=0)
        for _ in range(6):
            after, reward, terminated, truncated, infos = env.step(np.zeros(2, np.int64))
            buffer.add({"obs": obs, "act": np.zeros(2), "rew": reward, "terminated": terminated,
                        "truncated": truncated, "obs_next": after, "info": infos})  # fmt: skip
            obs = after
    finally:
        env.close()
    batch, _ = buffer.sample(0)
    ends = batch.terminated
    assert ends.sum() == 5
    assert all(final is None for final in batch.info.final_obs[~ends])
    assert sorted(final.tolist() for final in batch.info.final_obs[ends]) == [[2.0, 2.0]] * 3 + [[3.0, 3.0]] * 2
    assert sorted(batch.info.final_info.name[ends]) == ["step 2"] * 3 + ["step 3"] * 2
    assert batch.info._final_obs.tolist() == ends.tolist()
    named = batch.info.name[~ends].tolist()
    assert sorted(named) == ["step 1"] * 5 + ["step 2"] * 2


@surfaces
def test_infos_are_copied_in_and_out(kind):
    buffer, trace = BUFFERS[kind](), []
    at = []
    for t in range(3):
        trace.append([t])
        at.append(add(kind, buffer, t, {"x": {"trace": trace, "end": "."}}))
    trace[0][0] = 99
    batch = buffer[at]
    for found in batch.info.x.trace if "info/x/trace" in batch else [each["trace"] for each in batch.info.x]:
        found[0][0] = 77
    found = [info_at(buffer, row)["trace"] for row in at]
    assert [np.asarray(each).tolist() for each in found] == [[[0]], [[0], [1]], [[0], [1], [2]]]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "warp"])
def test_objects_stay_numpys_and_batches_of_torch_are_without_them(framework, caplog):
    if framework in ("jax", "warp"):
        pytest.importorskip(framework)
    buffer = ReplayBuffer(4, framework=framework)
    for t, info in enumerate([1, "text"]):
        add("plain", buffer, t, {"x": info, "n": t})
    batch, _ = buffer.sample(0)
    assert buffer.get([0, 1], "info/x").tolist() == [1, "text"] and buffer.get(1, "info/x") == "text"
    assert np.asarray(batch["info/n"]).tolist() == [0, 1]
    if framework == "torch":
        assert "info/x" not in batch and "info/x" not in buffer[1]
        assert [record.message for record in caplog.records] == [
            "ReplayBuffer: ['info/x'] hold objects, which batches of torch leave out: read them with `get`, or let "
            "`framework` be 'numpy'"
        ]
    else:
        assert batch["info/x"].tolist() == [1, "text"] and buffer[1]["info/x"] == "text" and not caplog.records


@surfaces
def test_other_ways_to_change_a_buffer_take_such_infos_too(kind):
    buffer = BUFFERS[kind]()
    at = [add(kind, buffer, t, {"x": t}) for t in range(3)]
    buffer.set_array_at_key(["a", None, [1, 2]], "info/x", index=at)
    assert [info_at(buffer, row) for row in at[:2]] == ["a", None] and list(info_at(buffer, at[2])) == [1, 2]
    buffer.set_array_at_key(np.arange(3), "info/more", index=at, default_value=-1)
    buffer.set_array_at_key([0.5, 1, 2], "info/more", index=at)
    assert buffer[at].info.more.tolist() == [0.5, 1, 2]
    if type(buffer).__name__ != "CachedReplayBuffer":
        names = {name: getattr(buffer, name) for name in ("act", "rew")}
        buffer.set_batch({**names, "info": {"x": np.array(["t"] * buffer.maxsize)}})
        assert info_at(buffer, at[2]) == "t"
    if buffer.subbuffer_edges.size == 2:
        other = BUFFERS[kind]()
        add(kind, other, 0, {"x": 1})
        placed = other.update(buffer)
        assert info_at(other, int(placed[-1])) == "t" and info_at(other, 0) == 1


def test_from_data_takes_infos_that_are_set_later_and_batches_differ_in_theirs():
    batch = Batch.stack([Batch(row, info=info) for row, info in zip(
        [{"obs": t, "act": 0, "rew": 1.0, "terminated": False, "truncated": False} for t in range(3)],
        [{"a": 1, "b": "t"}, {}, {"a": 2, "c": [1]}], strict=True,
    )])  # fmt: skip
    assert batch.info.a.tolist() == [1, 0, 2] and batch.info.b.tolist() == ["t", None, None]
    buffer = VectorReplayBuffer(6, 3)
    buffer.add(batch)
    infos = Batch(obs=np.zeros(3), info=[{"a": 1}, {"b": 0.5}, {"a": "x"}])
    batch["info"] = infos.info
    buffer.add(batch)
    assert buffer[:].info.a.tolist() == [1, 1, 0, None, 2, "x"]
    made = ReplayBuffer.from_data([1, 2], [1, 2], [0.0, 1], [0, 1], [0, 0])
    made.set_array_at_key(["a", 1], "info/x")
    assert made[:].info.x.tolist() == ["a", 1]


def test_null_values_are_looked_for_in_numbers_only():
    buffer = fill = ReplayBuffer(4)
    for t, info in enumerate(["a", None, NAN]):
        add("plain", fill, t, {"x": info, "n": 1.0})
    assert not buffer.hasnull() and not buffer.isnull().info.x.any()
    buffer.set_array_at_key([NAN], "info/n", index=[1])
    buffer.dropnull()
    assert buffer[:].info.x[0] == "a" and len(buffer) == 2


def test_threads_that_draw_see_a_column_before_or_after_it_changed():
    row = {"act": 0, "rew": 0.0, "terminated": False, "truncated": False}
    forms = [bool, np.int8, int, float, lambda v: [v, v], str, lambda v: {"v": v}]
    errors = []

    def read(buffer, done):
        try:
            while not done.is_set():
                batch, _ = buffer.sample(16)
                one = buffer[0]
                assert one.info.x in (0, one.obs) and len(buffer.info.x) == 64
                for obs, said in zip(batch.obs, batch.info.x, strict=True):
                    value = said["v"] if isinstance(said, dict) else said
                    assert float(value if isinstance(value, str) else np.ravel(value)[0]) == obs
        except BaseException as error:
            errors.append(error)

    for _ in range(20):
        buffer, done = ReplayBuffer(64), threading.Event()
        buffer.add({**row, "obs": 0.0, "info": {"x": False}})
        readers = [threading.Thread(target=read, args=(buffer, done)) for _ in range(2)]
        for reader in readers:
            reader.start()
        for value, form in enumerate(forms):
            buffer.add({**row, "obs": float(value), "info": {"x": form(value) if value != 1 else np.int8(1)}})
        done.set()
        for reader in readers:
            reader.join()
    assert not errors


def test_a_main_buffer_that_was_changed_by_itself_agrees_with_its_caches():
    main = ReplayBuffer(9)
    buffer = CachedReplayBuffer(main, 2, 5)
    row = {"obs": [1, 2], "act": [0, 0], "rew": [0.0, 0], "terminated": [True, False], "truncated": [False, False]}
    buffer.add({**row, "info": [{"x": 1}, {"x": 2}]})
    main.add({name: value[0] for name, value in row.items()} | {"info": {"x": "text"}})
    buffer.add({**row, "info": [{"x": 3}, {"x": 4.5}]})
    assert buffer[buffer.sample_indices(0)].info.x.tolist() == [1, "text", 3, 2, 4.5]


def test_there_must_be_room_for_a_column_that_widens(monkeypatch):
    buffer = ReplayBuffer(1000)
    add("plain", buffer, 0, {"x": np.int8(1)})
    monkeypatch.setattr(type(buffer._storage.columns), "available_bytes", lambda self: 100)
    for value in (1e9, "text"):
        with pytest.raises(OutOfMemoryError, match=r"^\['info/x'\]: 8,000 bytes are needed, 100 are available$"):
            add("plain", buffer, 1, {"x": value})
    assert len(buffer) == 1 and buffer._specs["info/x"].dtype == np.int8


def test_strict_buffers_refuse_new_infos_and_widen_those_that_there_are():
    buffer = ReplayBuffer(4, new_keys="error", missing_keys="error")
    add("plain", buffer, 0, {"x": 1})
    add("plain", buffer, 1, {"x": "text"})
    with pytest.raises(SpecError, match=r"^unknown key\(s\) \['info/y'\]"):
        add("plain", buffer, 2, {"x": 1, "y": THING})
    assert buffer[:].info.x.tolist() == [1, "text"]


def test_a_file_whose_objects_are_no_such_text_is_refused(tmp_path):
    from rlstructs.replay.rows import objects as object_files

    for text in (b"[1]", b"{}", b"[", b'[{"run": "os"}, 1]', b'[{"array": ["O", [1], ""]}, 1]', b"[1, 2, 3]",
                 b'[{"array": ["<f8", [2], "AAAA"]}, 1]', b"[" * 10**5, b'[{"a": 1, "b": 2}, 1]'):  # fmt: skip
        with pytest.raises((FileError, ValueError, TypeError, RecursionError)):
            object_files.from_json("info/x", np.frombuffer(text, np.uint8), (2,))
