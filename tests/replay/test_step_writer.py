"""The quick way to write one row to every lane leaves what the general one leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from frameworks import KINDS

from rlstructs.replay.rows import step_copies
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import Storage

SIZE, LANES = 5, 3


def memory(quick):
    made = KINDS["torch"].RandomMemory(memory_size=SIZE, num_envs=LANES, seed=0)
    made.create_tensor("x", size=2)
    made.create_tensor("frame", size=(2, 2), dtype=torch.uint8, keep_dimensions=True)
    for name in ("terminated", "truncated"):
        made.create_tensor(name, size=1, dtype=torch.bool)
    if not quick:
        made._intake.write_quickly = lambda tensors, strict: False
    return made


def content(made):
    storage = made._storage
    rows = made.sample_all(made.get_tensor_names(), sequence_length=2)[0]
    counters = storage.ring.counters.tolist()
    every = storage.view().every_row()
    episodes = storage.episodes.times(every).tolist(), storage.episodes.remaining(every).tolist()
    return [row.tolist() for row in rows], counters, episodes


def rows_of(rng, n=LANES):
    ends = rng.random((2, n, 1)) < 0.25
    return {
        "x": rng.random((n, 2), np.float32),
        "frame": rng.integers(0, 255, (n, 2, 2), np.uint8),
        "terminated": ends[0],
        "truncated": ends[1],
    }


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_leave_the_same(seed):
    rng = np.random.default_rng(seed)
    quick, general = memory(True), memory(False)
    n_quick = 0
    for _ in range(60):
        operation = rng.choice(["row"] * 6 + ["part", "cast", "some", "reset", "set"])
        if operation == "reset":
            quick.reset(), general.reset()
        elif operation == "set":
            values = rng.random((SIZE, LANES, 1)) < 0.3
            quick.set_tensor_by_name("terminated", values), general.set_tensor_by_name("terminated", values)
        else:
            rows = rows_of(rng, 1 if operation == "part" else LANES)
            if operation == "cast":
                rows["x"] = rows["x"].astype(np.float64)
            if operation == "some":
                del rows["frame"]
            if rng.random() < 0.5:
                rows = {name: torch.from_numpy(values) for name, values in rows.items()}
            if rng.random() < 0.5:  # as skrl's agents give them: there are no such tensors
                rows = {"states": None, **rows, "next_x": rows["x"]}
            try:
                version = quick._storage.clock.changes
                quick.add_samples(**rows)
            except ValueError:
                with pytest.raises(ValueError, match="do not fit"):
                    general.add_samples(**rows)
            else:
                general.add_samples(**rows)
                n_quick += quick._storage.clock.changes == version
        np.testing.assert_equal(content(quick), content(general))
    assert n_quick > 5


def store(n_lanes=2, order="slot", **ends):
    storage = Storage(n_lanes, 4, order=order)
    storage.columns.add("x", Spec(np.dtype(np.float32), (3,)))
    for name, spec in ends.items():
        storage.columns.add(name, spec)
    if ends:
        storage.track_episodes()
    return storage


def test_what_there_are_no_tensors_of_takes_no_other_way():
    quick = memory(True)
    rows = rows_of(np.random.default_rng(0))
    quick.add_samples(**rows)
    version = quick._storage.clock.changes
    quick.add_samples(**rows, next_x=rows["x"], states=None, infos=[[1], [2, 3]])
    del rows["frame"]  # as an agent leaves out returns, which it computes later
    quick.add_samples(**rows)
    assert (quick._storage.clock.changes, len(quick)) == (version, 3 * LANES)
    assert not quick.tensors["frame"][2].any()
    del rows["truncated"]  # what the live tensor holds says where episodes end
    quick.add_samples(**rows)
    assert (quick._storage.clock.changes > version, len(quick)) == (True, 4 * LANES)


GOOD = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    "tensors",
    [
        {}, {"y": GOOD}, {"x": GOOD, "y": GOOD}, {"x": GOOD[:1]}, {"x": GOOD[:, :1]}, {"x": GOOD.astype(np.float64)},
        {"x": GOOD.tolist()}, {"x": None}, {"x": torch.ones(2, 3, requires_grad=True)},
        {"x": torch.ones(2, 3).double()}, {"x": torch.ones(2, 3, device="meta")},
    ],
    ids=["none", "other", "more", "lanes", "shape", "dtype", "list", "None", "gradient", "double", "elsewhere"],
)  # fmt: skip
def test_what_it_cannot_write_it_leaves_alone(tensors):
    storage = store()
    writer = StepWriter(storage, ())
    assert writer.write({"x": GOOD})
    before = storage.ring.counters.copy()
    assert not writer.write(tensors)
    assert (storage.ring.counters == before).all()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_stores_that_are_not_in_step_or_shared_are_written_quickly_too(is_shared, shape):
    """The marks of ends may have axes: one that is not zero ends the episode."""
    rng, stores = np.random.default_rng(0), [store(terminated=Spec(np.dtype(bool), shape)) for _ in range(2)]
    for made in stores:
        made.write({"x": GOOD[:1, None], "terminated": np.zeros((1, 1, *shape), bool)}, slice(0, 1))
        if is_shared:
            made.share()
    quick, general = stores
    writer = StepWriter(quick, ("terminated",))
    for _ in range(12):
        rows = {"x": rng.random((2, 3), np.float32), "terminated": rng.random((2, *shape)) < 0.3}
        assert writer.write(rows)
        done = rows["terminated"].reshape(2, -1).any(1)[:, None]
        general.write({name: values[:, None] for name, values in rows.items()}, done=done)
        assert (quick.ring.counters == general.ring.counters).all()
        every = general.view().every_row()
        assert quick.gather(["x"], every)[0].tolist() == general.gather(["x"], every)[0].tolist()
        assert quick.episodes.times(every).tolist() == general.episodes.times(every).tolist()
        assert quick.episodes.remaining(every).tolist() == general.episodes.remaining(every).tolist()


def test_another_process_may_write_to_lanes_of_its_own():
    """As the heads of its lanes rise, they do not count as those of this writer; its own must be as it left them."""
    storage = store(terminated=Spec(np.dtype(bool)))
    storage.share()
    writer, lane = StepWriter(storage, ("terminated",)), np.array([1])
    row = {"x": GOOD[:1], "terminated": np.zeros(1, bool)}
    assert writer.write(row, lane)
    ring = storage.ring
    ring.reserve(slice(0, 1), 1)  # the other process is in the middle of a write
    assert writer.write(row, lane)
    ring.publish(slice(0, 1), 1)
    assert writer.write(row, lane) and ring.head.tolist() == [1, 3]
    ring.reserve(slice(1, 2), 1)  # a writer of this lane was killed
    assert writer.write(row, lane) is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["slot", "lane"])
def test_both_ways_leave_the_same_in_every_order(order, seed):
    rng = np.random.default_rng(seed)
    flag = Spec(np.dtype(bool))
    quick, general = store(order=order, terminated=flag), store(order=order, terminated=flag)
    writer = StepWriter(quick, ("terminated",))
    for _ in range(30):
        rows = {"x": rng.random((2, 3), np.float32), "terminated": rng.random(2) < 0.3}
        assert writer.write(rows)
        block = {name: values[:, None] for name, values in rows.items()}
        general.write(block, done=rows["terminated"][:, None])
        assert (quick.ring.counters == general.ring.counters).all()
        every = quick.view().every_row()
        for name in rows:
            np.testing.assert_array_equal(*(each.gather([name], every)[0] for each in (quick, general)))
        for look in (
            (each.episodes.times for each in (quick, general)),
            (each.episodes.remaining for each in (quick, general)),
        ):
            np.testing.assert_array_equal(*(seen(every) for seen in look))


def test_an_interrupted_write_is_not_built_upon():
    storage = store()
    writer = StepWriter(storage, ())
    assert writer.write({"x": GOOD})
    rows, writer._rows = writer._rows, [None]
    with pytest.raises(TypeError):
        writer.write({"x": GOOD})
    writer._rows = rows
    storage.write({"x": 2 * GOOD[:, None]})
    assert writer.write({"x": 3 * GOOD})
    assert (storage.columns.cells["x"][0, :3, 0].tolist(), len(storage)) == ([1, 2, 3], 6)


def test_two_writers_to_one_store_take_turns():
    storage, general = store(terminated=Spec(np.dtype(bool))), store(terminated=Spec(np.dtype(bool)))
    writers = [StepWriter(storage, ("terminated",)) for _ in range(2)]
    for t, turn in enumerate([0, 0, 1, 0, 1, 1, 0]):
        rows = {"x": t * GOOD, "terminated": np.array([t == 3, False])}
        assert writers[turn].write(rows)
        general.write({name: values[:, None] for name, values in rows.items()}, done=rows["terminated"][:, None])
        assert (storage.ring.counters == general.ring.counters).all()
        every = general.view().every_row()
        assert storage.gather(["x"], every)[0].tolist() == general.gather(["x"], every)[0].tolist()
        assert storage.episodes.times(every).tolist() == general.episodes.times(every).tolist()


def tensor_memory(kind, quick, size=600):
    made = KINDS["torch"].RandomMemory(memory_size=size, num_envs=12, seed=0)
    for name, dtype in {"x": torch.bfloat16, "n": torch.uint8, "late": None, "terminated": torch.bool}.items():
        made.create_tensor(name, size=(2, 3) if name == "n" else 1, dtype=dtype, keep_dimensions=name == "n")
    if kind == "live":
        made.get_tensor_by_name("late")[:] = 7
    if kind == "shared":
        made.share_memory()
    if not quick:
        made._intake.write_quickly = lambda tensors, strict: False
    return made


@pytest.mark.parametrize("size", [100, 600])
@pytest.mark.parametrize("kind", ["plain", "wide", "live", "shared"])
def test_tensors_that_torch_copies_leave_the_same(kind, size, monkeypatch):
    """In stores of few and of many slots, more than once round; episodes of one and of all lanes end."""
    if kind == "wide":
        monkeypatch.setattr(step_copies, "MOST_STAGED", 60)  # "n" has 72 bytes
    quick, general = tensor_memory(kind, True, size), tensor_memory(kind, False, size)
    for step in range(1300):
        ends = torch.rand(12, 1) < (0.0, 0.05, 1.0)[step % 3 if step % 40 == 0 else 1]
        row = {"x": torch.rand(12, 1).bfloat16(), "n": torch.randint(255, (12, 2, 3), dtype=torch.uint8)}
        with torch.inference_mode(step < 70):
            changes = quick._storage.clock.changes
            quick.add_samples(**row, terminated=ends)
            assert quick._storage.clock.changes == changes or not step
        general.add_samples(**row, terminated=ends)
    np.testing.assert_equal(content(quick), content(general))


CASTS = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("size", [3, 600])
@pytest.mark.parametrize("given", CASTS, ids=str)
@pytest.mark.parametrize("column", CASTS, ids=str)
def test_tensors_that_torch_casts_leave_the_same(column, given, size):
    """Numbers that do not fit, too; a gradient is not recorded."""
    quick, general = (KINDS["torch"].RandomMemory(size, 4, seed=0) for _ in range(2))
    general._intake.write_quickly = lambda tensors, strict: False
    for memory in (quick, general):
        memory.create_tensor("x", 2, dtype=column)
        memory.create_tensor("terminated", 1, dtype=torch.bool)
    for numbers in (
        [0, 1, 2, 100, 255, 7, 3, 1],
        [-1, 0.5, 70000, -0.0, 1e30, -2.5, 3e9, 1e-9],
        [np.nan, np.inf, -np.inf] + [1] * 5,
    ):
        x = torch.tensor(numbers, dtype=torch.float64)
        x = (x if given.is_floating_point else x.nan_to_num(0).clamp(-100, 255)).to(given).reshape(4, 2)
        rows = {"x": x.requires_grad_() if given.is_floating_point else x, "terminated": torch.rand(4, 1) < 0.5}
        quick.add_samples(**rows), general.add_samples(**rows)
        assert all(not each.requires_grad for each in quick.tensors.values())
    np.testing.assert_equal(content(quick), content(general))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1, 1), torch.ones(12, 1, device="meta"), torch.ones(12, 1).to_sparse(), torch.ones(12, 1).double(),
        torch.ones(12, 1, requires_grad=True),
    ],
    ids=["broadcast", "meta", "sparse", "double", "gradient"],
)  # fmt: skip
def test_a_tensor_that_torch_would_copy_otherwise_is_converted_or_refused(value):
    memory = tensor_memory("plain", True)
    row = {"n": torch.ones(12, 2, 3, dtype=torch.uint8), "terminated": torch.zeros(12, 1, dtype=torch.bool)}
    memory.add_samples(**row, late=torch.zeros(12, 1))
    memory.add_samples(**row, late=torch.zeros(12, 1))
    try:
        memory.add_samples(**row, late=value)
    except (ValueError, NotImplementedError):  # torch's own, of a tensor without numbers
        assert len(memory) == 24 and (memory._storage.ring.reserved == 2).all()
    else:
        assert memory.tensors["late"][2].tolist() == [[1.0]] * 12
    memory.add_samples(**row, late=torch.zeros(12, 1))
    assert not memory.tensors["late"].requires_grad


@pytest.mark.parametrize("where", ["memory", "compressed", "on disk"])
def test_marks_of_ends_may_be_wide(where, tmp_path):
    """A mark for each of many agents; an episode ends where one of them is set."""
    settings = {"compressed": {"compression": {"terminated": "zstd"}}, "on disk": {"path": tmp_path}}
    memory = KINDS["torch"].RandomMemory(memory_size=20, num_envs=2, seed=0, **settings.get(where, {}))
    memory.create_tensor("x", size=1)
    memory.create_tensor("terminated", size=300, dtype=torch.bool)
    for step in range(6):
        marks = torch.zeros(2, 300, dtype=torch.bool)
        marks[0, 7] = step == 2
        memory.add_samples(x=torch.full((2, 1), float(step)), terminated=marks)
    times = memory._storage.episodes.times(memory._storage.view().every_row())
    assert times.reshape(6, 2).T.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
