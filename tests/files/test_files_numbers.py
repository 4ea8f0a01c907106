"""Numbers that files of memories and buffers claim make sense before anything is changed."""

from __future__ import annotations

import json

import fuzz_subjects
import mutations
import numpy as np
import pytest
import torch
from frameworks import add, flat, make
from hostile import refused

from rlstructs.replay import (
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    VectorReplayBuffer,
)


def rewritten(path, state=None, arrays=None, compression=None):
    """Writes a file again with other numbers, and checksums that are right."""
    header, held = mutations.read(path, path.suffix)
    for where, value in (state or {}).items():
        at = header["state"]
        *above, last = where.split(".")
        for key in above:
            at = at[key]
        at[last] = value
    for name, value in (arrays or {}).items():
        held[name] = np.asarray(value(held[name].copy()) if callable(value) else value)
        header["arrays"][name] = {"dtype": held[name].dtype.name, "shape": list(held[name].shape)}
    mutations.write(path, path.suffix, json.dumps(header), held, compression)
    return path


def put(*places):
    """Numbers in places of an array."""

    def change(array):
        for at, value in places:
            array[at] = value
        return array

    return change


def huge(array):
    array[...] = 2**63 - 1
    return array


MT = {"bit_generator": "MT19937", "state": {"key": [0] * 624, "pos": 0}}
PHILOX = {"bit_generator": "Philox", "state": {"counter": [0] * 4, "key": [0] * 2}, "buffer": [0] * 4, "buffer_pos": 4,
          "has_uint32": 0, "uinteger": 0}  # fmt: skip
GENERATORS = {
    "a place beyond the key": {**MT, "state": {"key": [1] * 624, "pos": 625}},
    "a place before the buffer": PHILOX | {"buffer_pos": -1},
    "a place beyond the buffer": PHILOX | {"buffer_pos": 5},
    "nothing but zeros": MT,
    "a step of zero": {"bit_generator": "PCG64", "state": {"state": 0, "inc": 0}, "has_uint32": 0, "uinteger": 0},
    "a number too large": {
        "bit_generator": "PCG64", "state": {"state": 2**128, "inc": 1}, "has_uint32": 0, "uinteger": 0},
    "a name of something else": {"bit_generator": "seed"},
    "no state": {"bit_generator": "PCG64"},
}  # fmt: skip
MEMORY = {
    "a huge ring": {"arrays": {"__ring__": huge}},
    "a ring that wraps": {"arrays": {"__ring__": put(((1, 0), 2**62), ((2, 0), 2**62))}},
    "a writer of too many rows": {"arrays": {"__ring__": put(((1, 0), 99))}},
    "an episode that goes on": {"arrays": {"__episodes__": put((0, (5, 7)))}},
    "an episode below zero": {"arrays": {"__episodes__": put((slice(None), (-1, 0)))}},
    "no end of an episode": {"arrays": {"__episodes__": put((slice(None), (0, 9)))}},
    "a priority below zero": {"arrays": {"__leaves__": put((0, -1.0))}},
    "an infinite priority": {"arrays": {"__leaves__": put((0, np.inf))}},
    "no priority": {"arrays": {"__leaves__": put((0, np.nan))}},
    "a sum without limit": {"arrays": {"__leaves__": put((slice(None), 1e308))}},
    "draws of rows that are not": {"arrays": {"__drawn__": np.array([[99], [0], [0]])}},
    "draws out of order": {"arrays": {"__drawn__": np.array([[0, 0], [0, 0], [1, 0]])}},
    "a largest priority without limit": {"state": {"max_priority": 1e305}},
    "a largest priority of nothing": {"state": {"max_priority": 0}},
    "a largest priority in words": {"state": {"max_priority": "1"}},
    "samples below zero": {"state": {"n_samples": -1}},
    "samples in parts": {"state": {"n_samples": 1.5}},
    "sizes in parts": {"state": {"memory_size": 4.0}},
    "a dtype of torch's modules": {"state": {"tensors.x": ["onnx", [2]]}},
    "a shape below zero": {"state": {"tensors.x": ["float32", [-2]]}},
    "a shape of nothing of much": {"state": {"tensors.x": ["float32", [0, 2**62]]}},
    **{f"a generator: {name}": {"state": {"rng": state}} for name, state in GENERATORS.items()},
}  # fmt: skip


def memory(n_rows, kind="torch"):
    made = make(kind, 4, 2, {"x": ("float32", 2), "terminated": ("bool", 1)}, cls="PrioritizedMemory")
    for t in range(n_rows):
        add(made, kind, x=np.full((2, 2), t, np.float32), terminated=[[t % 2 == 1], [False]])
    return made


@pytest.mark.parametrize(("kind", "form"), [("torch", "npz"), ("torch", "pt"), ("jax", "npz"), ("warp", "pt")])
@pytest.mark.parametrize("what", MEMORY)
def test_numbers_of_a_memory_make_sense_before_it_is_changed(what, kind, form, tmp_path):
    path = memory(3, kind).save(tmp_path, format=form)
    rewritten(path)
    memory(2, kind).load(path)
    rewritten(path, **MEMORY[what])
    target = memory(2, kind)
    before = flat(target.sample_all(["x"])[0][0]), target._state()
    refused(target.load, path)
    assert (flat(target.sample_all(["x"])[0][0]), target._state()) == before
    target.sample(["x"], batch_size=3)
    target.reset()


def test_a_memory_without_its_episodes_is_not_given_others(tmp_path):
    path = memory(3).save(tmp_path, format="npz")
    header, held = mutations.read(path, ".npz")
    del held["__episodes__"], header["arrays"]["__episodes__"]
    mutations.write(path, ".npz", json.dumps(header), held)
    refused(memory(4).load, path, "no episodes")


def test_priorities_are_of_rows_that_are_there(tmp_path):
    path = memory(2).save(tmp_path, format="npz")
    made = memory(2)
    made.sample(["x"], batch_size=2)
    path = made.save(tmp_path, format="npz")
    rewritten(path, arrays={"__leaves__": put((7, 1.0))})
    refused(memory(2).load, path, "priorities of empty rows")


def vector(n):
    buffer = VectorReplayBuffer(10, 2)
    for t in range(n):
        flags = {"terminated": np.array([t == 2, False]), "truncated": np.zeros(2, bool)}
        buffer.add({"obs": np.zeros((2, 80)), "act": np.zeros(2), "rew": np.full(2, 1.0 * t), **flags})
    return buffer


def torchrl(n, sampler=SamplerWithoutReplacement):
    buffer = DictTensorReplayBuffer(storage=ListStorage(40), sampler=sampler(), batch_size=2, generator=0)
    for t in range(n):
        buffer.extend({"x": torch.tensor([t]), "done": torch.tensor([t % 3 == 2])})
    if n:
        buffer.sample()
    return buffer


def tianshou(n):
    buffer = PrioritizedReplayBuffer(9, 0.6, 0.4)
    for t in range(n):
        buffer.add({"obs": t, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
    return buffer


BUFFERS = {
    "an alignment of zero": (vector, {"state": {"alignment": 0}}),
    "an alignment that overflows": (vector, {"state": {"alignment": 2**62}}),
    "a huge ring": (vector, {"arrays": {"ring": huge}}),
    "rows in the middle": (vector, {"arrays": {"ring": put((slice(None), 7))}}),
    "lanes in parts": (vector, {"state": {"n_lanes": 2.0}}),
    "a capacity in words": (vector, {"state": {"capacity": "5"}}),
    "fewer slots than rows": (
        vector, {"state": {"n_slots": 0}, "arrays": {name: lambda array: array[:, :0] for name in (
            "episodes", "rows/obs", "rows/act", "rows/rew", "rows/terminated", "rows/truncated")}}),
    "episodes out of order": (vector, {"arrays": {"episodes": put(((0, 1), (3, 0)))}}),
    "lengths below zero": (vector, {"arrays": {"more/lengths": np.array([-1, 0])}}),
    "returns of another shape": (vector, {"arrays": {"more/returns": np.zeros((2, 3))}}),
    "a flag that is a number": (vector, {"state": {"columns.terminated": ["float64", [], False]},
                                         "arrays": {"rows/terminated": np.zeros((2, 3))}}),
    "a reward that is complex": (vector, {"state": {"columns.rew": ["complex64", [], False]},
                                          "arrays": {"rows/rew": np.zeros((2, 3), np.complex64)}}),
    "a dtype of objects": (vector, {"state": {"columns.rew": ["object", [], False]}}),
    "bfloat16 of floats": (vector, {"state": {"columns.rew": ["float64", [], True]}}),
    "a column through another": (vector, {"state": {"linked": {"act": "rew"}}}),
    "a generator without a step": (vector, {"state": {"rng": GENERATORS["a step of zero"]}}),
    "a generator that reads elsewhere": (vector, {"state": {"rng": GENERATORS["a place beyond the key"]}}),
    "an exponent below zero": (tianshou, {"state": {"own.settings.alpha": -0.5}}),
    "a priority without limit": (tianshou, {"state": {"own.max_priority": 1e307}}),
    "priorities without limit": (tianshou, {"arrays": {"more/__leaves__": np.full(9, 1e308)}}),
    "an order of rows that are not": (torchrl, {"arrays": {"more/order": np.array([99])}}),
    "an order from below": (torchrl, {"arrays": {"more/order": np.array([-1])}}),
    "a pass that is yet to come": (torchrl, {"state": {"own.sampler.pass": 2**62}}),
    "windows of nothing": (torchrl, {"state": {"own.sampler.length": 0}}),
    "rows of which there are none": (torchrl, {"state": {"own.n_rows": 2**40}}),
    "written in parts": (torchrl, {"state": {"own.n_written": 0.5}}),
    "episodes that are a word": (torchrl, {"state": {"own.knows_episodes": "no"}}),
    "axes of a batch that it is not": (torchrl, {"state": {"own.axes": {"": 9}}}),
    "axes without a batch": (torchrl, {"state": {"own.axes": {"x": 1}}}),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".h5"])
@pytest.mark.parametrize("what", BUFFERS)
def test_numbers_of_a_buffer_make_sense_before_it_is_changed(what, suffix, tmp_path):
    made, changes = BUFFERS[what]
    path = tmp_path / f"x{suffix}"
    made(3).save(path)
    rewritten(path)
    made(2).load(path)
    rewritten(path, **changes)
    target = made(2)
    before = fuzz_subjects.saving.contents(target)[2]
    refused(target.load, path)
    assert fuzz_subjects.saving.contents(target)[2] == before
    empty = made(0)
    refused(empty.load, path)
    assert len(empty) == 0
    target.sample(2)


def test_a_tree_of_more_leaves_than_there_are_takes_no_memory(tmp_path):
    path = tmp_path / "x.npz"
    torchrl(3, lambda: PrioritizedSampler(alpha=0.5, beta=0.5)).save(path)
    rewritten(path, state={"own.n_rows": 2**36})
    refused(torchrl(0, lambda: PrioritizedSampler(alpha=0.5, beta=0.5)).load, path)


SETTINGS = {
    "a size": ("size", 10**12), "frames of frames": ("stack_num", 10**9), "steps": ("n_step", 10**9),
    "a share": ("gamma", 1e9), "a library": ("framework", "os"), "a size in words": ("size", "7"),
}  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_a_file_make_no_buffer_that_the_file_has_not(what, tmp_path):
    path = tmp_path / "x.h5"
    tianshou(3).save_hdf5(path)
    name, value = SETTINGS[what]
    rewritten(path, state={f"own.settings.{name}": value})
    refused(PrioritizedReplayBuffer.load_hdf5, path)


class Logged(ReplayBuffer):
    """A program's own, which does something with its argument."""

    opened: list[str] = []  # noqa: RUF012 - of all

    def __init__(self, size, log=None, **settings):
        super().__init__(size, **settings)
        self.opened.append(log)


def test_a_file_calls_no_constructor_with_arguments_that_are_none_of_ours(tmp_path):
    path = tmp_path / "x.h5"
    Logged(7).save_hdf5(path)
    Logged.opened.clear()
    rewritten(path, state={"own.settings.log": "/etc/passwd"})
    refused(Logged.load_hdf5, path, "has an unknown setting 'log'")
    assert Logged.opened == []


def test_a_buffer_whose_writer_was_interrupted_is_read_by_the_rows_that_it_has(tmp_path):
    buffer = tianshou(13)
    buffer._storage.ring.reserve(slice(None), 1)  # what a write does first
    buffer.save(tmp_path / "x.npz")
    other = tianshou(0)
    other.load(tmp_path / "x.npz")
    for each in (buffer, other):
        _, rows = each.sample(0)
        assert rows.tolist() == [5, 6, 7, 8, 0, 1, 2, 3]
        assert each.prev(rows).size == each.next(rows).size == len(each) == 8


def test_a_shard_without_its_tensors_is_refused(tmp_path):
    path, *_ = fuzz_subjects.subjects()["RayReplay.folder"].save(tmp_path)
    shard = next(path.parent.glob("shard-0*"))
    header, held = mutations.read(shard, ".npz")
    for tree in (header["arrays"], held, header["state"]["tensors"]):
        del tree["x"]
    mutations.write(shard, ".npz", json.dumps(header), held)
    subject = fuzz_subjects.subjects()["RayReplay.folder"]
    target = subject.target()
    message = r"shard-0-\w+.npz: has no tensor\(s\) \['x'\]"
    refused(lambda each: subject.load(target, each), path, message)
