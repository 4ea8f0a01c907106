"""The store under the memories: its columns, its clock, its episodes, and where its bytes lie."""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlstructs.replay
from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError, StateError
from rlstructs.replay.draw.drawn_rows import DrawnRows
from rlstructs.replay.draw.plan import AVOID_ENDS, MASK_ENDS, Selection, Uniform, Windows, draw_fitting
from rlstructs.replay.draw.view import View
from rlstructs.replay.rows import columns
from rlstructs.replay.rows import lanes as ring
from rlstructs.replay.rows.backing import Folder, Heap, HeapBlock, Shared, SharedBlock
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.episodes import LENGTH, NO_END, TIME, Episodes
from rlstructs.replay.rows.lanes import N_COUNTERS, Counters, Ring, RowIds
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import ALL, Storage

ORDERS = ["lane", "slot"]
BACKINGS = ["heap", "shared", "disk"]
FLOAT = Spec(np.dtype(np.float32))
COUNT = Spec(np.dtype(np.int64), (2,), fill=-7)


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


def make_backing(kind, folder):
    return {"heap": Heap, "shared": Shared}[kind]() if kind != "disk" else Folder(folder / kind)


@pytest.fixture(params=BACKINGS)
def backing(request, tmp_path):
    return make_backing(request.param, tmp_path)


def make_storage(n_lanes=2, capacity=4, order="lane", backing=None):
    """A store with a float and an int column, and episodes."""
    storage = Storage(n_lanes, capacity, order=order, backing=backing)
    storage.columns.add("x", FLOAT)
    storage.columns.add("n", COUNT)
    storage.track_episodes()
    return storage


def block(values):
    """Both columns of `make_storage`, for values (n, T)."""
    values = np.asarray(values)
    return {"x": values.astype(np.float32), "n": np.stack([values, -values], -1).astype(np.int64)}


def contents(storage):
    """What each lane holds of "x", from the oldest row to the newest."""
    view = storage.view()
    steps = [np.arange(low, high) for low, high in zip(view.low, view.high, strict=True)]
    return [storage.columns.cells["x"][lane, at % storage.columns.capacity].tolist() for lane, at in enumerate(steps)]


def everything(storage):
    """A copy of all that a store holds."""
    columns = [*storage.columns.flat.values(), *storage.episodes.columns.flat.values(), storage.ring.counters]
    return [column.tobytes() for column in columns]


# Columns


def test_rows_and_places_are_inverse_and_point_at_the_cells(order):
    columns = Columns(n_lanes=3, capacity=5, order=order)
    columns.add("x", FLOAT)
    lanes, slots = (axis.ravel() for axis in np.mgrid[:3, :5])
    rows = columns.rows(lanes, slots)
    assert sorted(rows.tolist()) == list(range(15))
    assert [axis.tolist() for axis in columns.places(rows)] == [lanes.tolist(), slots.tolist()]
    columns.flat["x"][rows] = 10 * lanes + slots
    assert columns.cells["x"].tolist() == [[10 * lane + slot for slot in range(5)] for lane in range(3)]


def test_the_order_says_which_rows_are_neighbours():
    lanes, slots = np.array([0, 0, 1]), np.array([0, 1, 0])
    assert Columns(3, 5, "lane").rows(lanes, slots).tolist() == [0, 1, 5]
    assert Columns(3, 5, "slot").rows(lanes, slots).tolist() == [0, 3, 1]


def test_cells_are_the_same_memory_as_flat(order, backing):
    columns = Columns(2, 3, order, backing)
    columns.add("n", COUNT)
    assert np.shares_memory(columns.flat["n"], columns.cells["n"])
    assert (columns.flat["n"].shape, columns.cells["n"].shape) == ((6, 2), (2, 3, 2))


@pytest.mark.parametrize(
    "dtype, fill, expected",
    [
        ("float32", None, np.nan), ("float16", None, np.nan), ("complex64", None, np.nan), ("int8", None, 0),
        ("uint8", None, 0), ("bool", None, False), ("uint16", 32704, 32704), ("float32", 0.0, 0), ("float64", -1, -1),
    ],
)  # fmt: skip
def test_a_new_column_holds_unwritten_rows(order, backing, dtype, fill, expected):
    columns = Columns(2, 3, order, backing)
    columns.add("x", Spec(np.dtype(dtype), (2,), fill))
    np.testing.assert_array_equal(columns.flat["x"], np.full((6, 2), expected, dtype), strict=False)


def test_a_column_added_later_leaves_the_others_as_they_were(order, backing):
    columns = Columns(2, 3, order, backing)
    columns.add("a/b", FLOAT)
    columns.flat["a/b"][:] = np.arange(6)
    columns.add("../c", FLOAT)
    assert columns.flat["a/b"].tolist() == list(range(6))
    assert columns.nbytes == 2 * 6 * 4


def test_gather_gives_private_rows_in_the_shape_of_the_ids(order, backing):
    columns = Columns(2, 3, order, backing)
    columns.add("n", COUNT)
    columns.flat["n"][:] = np.arange(12).reshape(6, 2)
    (rows,) = columns.gather(["n"], np.array([[5, 0], [2, 2]]))
    assert rows.tolist() == [[[10, 11], [0, 1]], [[4, 5], [4, 5]]]
    assert not np.shares_memory(rows, columns.flat["n"])
    columns.flat["n"][:] = 0
    assert rows[0, 0].tolist() == [10, 11]


@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_a_row_without_numbers_is_a_row(backing, shape):
    columns = Columns(2, 3, backing=backing)
    columns.add("empty", Spec(np.dtype(np.float32), shape))
    assert columns.gather(["empty"], np.array([1, 5]))[0].shape == (2, *shape)


CASTS = [
    ("float64", "float32", [0.1, np.nan, np.inf]), ("float64", "float16", [0.1]), ("float32", "float64", [0.1]),
    ("complex128", "complex64", [0.1j]), ("int64", "uint8", [0, 255]), ("int64", "int8", [-128, 127]),
    ("uint64", "int64", [2**63 - 1]), ("int64", "bool", [0, 1]), ("bool", "int8", [True]), ("uint8", "float32", [255]),
    ("bool", "float32", [True]), ("int64", "float32", [2**24]), ("float32", "complex64", [1.5]),
]  # fmt: skip


@pytest.mark.parametrize("given_dtype, dtype, values", CASTS, ids=[f"{a}-{b}" for a, b, _ in CASTS])
def test_check_casts_what_only_loses_the_precision_of_floats(given_dtype, dtype, values):
    columns = Columns(1, 3)
    columns.add("x", Spec(np.dtype(dtype)))
    values = np.array(values, given_dtype)
    cast = columns.check("x", values, values.shape)
    assert cast.dtype == dtype
    np.testing.assert_array_equal(cast, values.astype(dtype))


NO_CASTS = [
    ("int64", "uint8", 256), ("int64", "uint8", -1), ("int8", "uint64", -1), ("uint64", "int64", 2**63),
    ("int64", "bool", 2), ("int64", "int32", 2**31), ("float32", "int64", 1.0), ("float64", "uint8", 1.0),
    ("float32", "bool", 1.0), ("complex64", "float32", 1j), ("float64", "float32", 1e300), ("float32", "float16", 1e5),
    ("int64", "float32", 2**24 + 1), ("int64", "float16", 70_000), ("<U1", "float32", "1"),
]  # fmt: skip


@pytest.mark.parametrize("given_dtype, dtype, value", NO_CASTS, ids=[f"{v}-{a}-{b}" for a, b, v in NO_CASTS])
def test_check_refuses_a_cast_that_loses_more(given_dtype, dtype, value):
    columns = Columns(1, 3)
    columns.add("x", Spec(np.dtype(dtype)))
    with pytest.raises(SpecError, match=f"^'x' .*{dtype}"):
        columns.check("x", np.array([value], given_dtype), (1,))


# Where the bytes lie


@pytest.mark.parametrize("target", BACKINGS)
def test_move_keeps_every_value(order, backing, target, tmp_path):
    columns = Columns(2, 3, order, backing)
    columns.add("x", FLOAT)
    columns.add("n", COUNT)
    columns.flat["n"][:4] = np.arange(8).reshape(4, 2)
    before = {name: flat.copy() for name, flat in columns.flat.items()}
    old = columns.flat["n"]
    columns.move(make_backing(target, tmp_path / "new"))
    columns.add("late", FLOAT)
    assert not np.shares_memory(old, columns.flat["n"])
    for name, values in before.items():
        np.testing.assert_array_equal(columns.flat[name], values)
    columns.flat["n"][5] = 1
    assert columns.cells["n"][1, 2].tolist() == [1, 1]


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "i686"])
def test_no_fence_slows_processors_that_keep_the_order(machine):
    assert ring.is_ordered(machine)


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "armv7l", "ppc64le", "riscv64", "loongarch64", "s390x", ""])
def test_fences_keep_the_order_on_other_processors(machine):
    assert not ring.is_ordered(machine)


@pytest.fixture
def fences(monkeypatch):
    """What was seen at each fence, as on a processor that needs them; `fences.look` says what."""
    seen = SimpleNamespace(events=[], look=lambda: None)

    def fence(old=ring.fence):
        old()
        seen.events.append(seen.look())

    monkeypatch.setattr(ring, "IS_ORDERED", False)
    monkeypatch.setattr(ring, "fence", fence)
    return seen


def test_a_writer_raises_a_counter_writes_rows_and_raises_the_other_in_this_order(fences):
    storage = make_storage(1, 2)
    fences.look = lambda: (*storage.ring.counters[1:3, 0].tolist(), storage.columns.cells["x"][0, 0].item())
    storage.write(block([[7]]))
    assert fences.events[0][:2] == (1, 0) and np.isnan(fences.events[0][2])
    assert fences.events[1:] == [(1, 0, 7)] and storage.ring.head.tolist() == [1]
    fences.events.clear()
    fences.look = lambda: storage.ring.counters[:3, 0].tolist()
    storage.clear()
    assert fences.events == [[2, 1, 1], [2, 2, 1]] and storage.ring.counters[:3, 0].tolist() == [2, 2, 2]


def test_pickles_of_earlier_versions_have_no_floors():
    storage = make_storage(2, 3)
    storage.write(block([[7, 8], [9, 10]]))
    state = storage.counters.__getstate__()
    del state["n_counters"]
    numbers = state["_block"].bytes().view(np.int64)
    old = HeapBlock(numbers.nbytes - 2 * 8)
    old.bytes().view(np.int64)[...] = np.delete(numbers, [6, 7])
    restored = Counters.__new__(Counters)
    restored.__setstate__({**state, "_block": old})
    np.testing.assert_array_equal(restored._block.bytes(), storage.counters._block.bytes())


def test_a_reader_reads_counters_rows_and_counters_in_this_order(fences, monkeypatch):
    storage = make_storage(1, 2)
    storage.write(block([[7, 8]]))
    fences.events.clear()
    fences.look = lambda: "fence"
    gather = storage.columns.gather

    def read(names, rows):
        fences.events.append("rows")
        return gather(names, rows)

    monkeypatch.setattr(storage.columns, "gather", read)
    storage.write(block([[9]]))
    fences.events.clear()
    rng = np.random.default_rng(0)

    def select(n):
        view = storage.view()
        return Selection(view.draw(n, rng)[:, None], view)

    storage.sample(3, select, lambda picked: storage.gather(["x"], picked.rows[:, 0]))
    assert fences.events == ["fence", "rows", "fence"]
    storage._view = None
    fences.events.clear()
    storage.read_at(np.array([0]), lambda view, rows: storage.gather(["x"], rows))
    assert fences.events == ["fence", "rows", "fence"]


def blocks_of(storage):
    return [*storage.columns._blocks.values(), storage.counters._block, *storage.episodes.columns._blocks.values()]


def test_a_share_without_room_shares_nothing(monkeypatch):
    storage = make_storage()
    storage.write(block([[1, 2, 3], [4, 5, 6]]), done=np.zeros((2, 3), bool))
    n_needed = 0
    while storage.is_private:
        left = iter(range(n_needed))

        def allocate(backing, name, nbytes, sparse=False, *, left=left):
            if next(left, None) is None:
                raise OutOfMemoryError("none is left")
            return SharedBlock(nbytes)

        blocks = blocks_of(storage)
        with monkeypatch.context() as patch, contextlib.suppress(OutOfMemoryError):
            patch.setattr(Shared, "allocate", allocate)
            storage.share()
            break
        assert storage.is_private and blocks_of(storage) == blocks
        n_needed += 1
    assert n_needed > 2 and not storage.is_private
    assert storage.ring.head.tolist() == [3, 3]


def test_what_was_drawn_does_not_keep_columns_that_were_replaced(order):
    storage, drawn = make_storage(order=order), DrawnRows()
    storage.write(block([[1, 2, 3], [4, 5, 6]]))
    drawn.remember(storage.view(), np.array([0, 1]))
    old = weakref.ref(storage.columns)
    storage.take_columns(storage.columns.emptied(storage.columns.capacity))
    gc.collect()
    assert old() is None and drawn.find_unchanged(storage.view(), np.array([0, 1])).tolist() == [True, True]


def test_share_keeps_rows_episodes_and_what_comes(order, backing):
    storage = make_storage(order=order, backing=backing)
    storage.write(block([[1, 2, 3], [4, 5, 6]]), done=np.array([[0, 1, 0], [0, 0, 0]], bool))
    storage.share()
    assert contents(storage) == [[1, 2, 3], [4, 5, 6]]
    assert storage.episodes.open_lengths(ALL).tolist() == [1, 3]
    storage.write(block([[7, 8], [9, 10]]))
    assert contents(storage) == [[2, 3, 7, 8], [5, 6, 9, 10]]
    assert storage.episodes.open_lengths(ALL).tolist() == [3, 5]


def test_an_ordinary_store_is_pickled_by_value(order):
    storage = make_storage(order=order)
    storage.write(block([[1, 2], [3, 4]]))
    copy = pickle.loads(pickle.dumps(storage))
    storage.write(block([[5], [6]]), done=np.ones((2, 1), bool))
    assert contents(copy) == [[1, 2], [3, 4]]
    copy.write(block([[7], [8]]))
    assert contents(copy) == [[1, 2, 7], [3, 4, 8]]
    assert contents(storage) == [[1, 2, 5], [3, 4, 6]]
    assert copy.episodes.open_lengths(ALL).tolist() == [3, 3]
    assert storage.episodes.open_lengths(ALL).tolist() == [0, 0]


def test_only_the_store_swaps_its_columns_and_counts_its_changes():
    package = Path(rlstructs.replay.__file__).parent
    wrong = re.compile(
        r"storage\.(columns = |links = |(columns\.)?(episodes\.)?ring\.counters\[)|clock\.(\w+ [+-]= |notes\[)"
    )
    files = [*package.rglob("*.py"), *(package.parent / "memories").glob("*.py")]
    assert len(files) > 50
    assert not [file.name for file in files if wrong.search(file.read_text())]
    assert wrong.search("self._storage.clock.changes += 1") and wrong.search("storage.columns = columns")


def test_nbytes_counts_columns_episodes_and_counters(order, backing):
    storage = make_storage(n_lanes=2, capacity=4, order=order, backing=backing)
    assert storage.nbytes == 2 * 4 * (4 + 16 + 8) + N_COUNTERS * 2 * 8


# The clock


def make_ring(n_lanes=2, capacity=4):
    return Ring(np.zeros((N_COUNTERS, n_lanes), np.int64), capacity)


def test_reserve_takes_rows_away_before_publish_gives_new_ones():
    ring = make_ring()
    ring.reserve(ALL, 4)
    assert (ring.oldest().tolist(), len(ring)) == ([0, 0], 0)
    ring.publish(ALL, 4)
    assert (ring.oldest().tolist(), len(ring)) == ([0, 0], 8)
    ring.reserve(slice(1, 2), 3)
    assert (ring.oldest().tolist(), ring.head.tolist(), len(ring)) == ([0, 3], [4, 4], 5)
    ring.publish(slice(1, 2), 3)
    assert (ring.oldest().tolist(), ring.head.tolist(), len(ring)) == ([0, 3], [4, 7], 8)


def test_what_a_dead_writer_reserved_stays_reserved():
    ring = make_ring(1)
    ring.reserve(ALL, 4)
    ring.publish(ALL, 4)
    ring.reserve(ALL, 3)  # and dies
    ring.reserve(ALL, 1)
    ring.publish(ALL, 1)
    assert (ring.oldest().tolist(), ring.head.tolist(), len(ring)) == ([3], [5], 2)


def test_reserve_and_publish_take_a_number_for_each_lane():
    ring = make_ring(3)
    lanes, counts = np.array([2, 0]), np.array([6, 1])
    ring.reserve(lanes, counts)
    ring.publish(lanes, counts)
    assert (ring.oldest().tolist(), ring.head.tolist(), len(ring)) == ([0, 0, 2], [1, 0, 6], 5)
    assert ring.is_full().tolist() == [False, False, True]


@pytest.mark.parametrize("n_rows", [(0, 0), (1, 1), (4, 4), (3, 6), (8, 5)], ids=str)
def test_clear_begins_every_lane_at_the_same_new_step_in_slot_zero(n_rows):
    ring = make_ring()
    ring.reserve(ALL, np.array(n_rows))
    ring.publish(ALL, np.array(n_rows))
    valid = [range(low, head) for low, head in zip(ring.oldest(), ring.head, strict=True)]
    ring.clear()
    assert len(ring) == 0
    assert not ring.is_full().any()
    assert (ring.head % ring.capacity).tolist() == [0, 0]
    assert ring.head[0] == ring.head[1]
    # Whoever follows the steps can tell the cleared rows from those that come.
    assert all(not steps or low > steps[-1] + 1 for low, steps in zip(ring.oldest(), valid, strict=True))


def test_clear_forgets_what_a_dead_writer_reserved():
    ring = make_ring(1)
    ring.reserve(ALL, 3)
    ring.clear()
    ring.reserve(ALL, 2)
    ring.publish(ALL, 2)
    assert len(ring) == 2


def test_a_row_id_stands_for_the_newest_step_that_its_row_can_hold(order):
    ids = RowIds(2, 4, order)
    rows = ids.rows(np.array([0, 0, 0, 0, 1]), np.array([0, 1, 2, 3, 3]))
    assert ids.steps(rows, np.array([5, 3])).tolist() == [4, 5, 2, 3, 3]


# Writing


@pytest.mark.parametrize("n_timesteps", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("before", [0, 1, 3, 4], ids="from{}".format)
def test_a_write_keeps_the_newest_rows(order, backing, n_timesteps, before):
    storage = make_storage(order=order, backing=backing)
    rows = np.arange(2 * (before + n_timesteps)).reshape(2, -1)
    storage.write(block(rows[:, :before])) if before else None
    storage.write(block(rows[:, before:]))
    assert contents(storage) == rows[:, -4:].tolist()
    assert len(storage) == min(4, before + n_timesteps) * 2


@pytest.mark.parametrize("lanes", [slice(1, 3), np.array([2, 0]), np.array([False, True, True])], ids=str)
@pytest.mark.parametrize("lengths", [None, (2, 3)], ids=["whole", "ragged"])
def test_a_write_to_some_lanes_leaves_the_others(order, lanes, lengths):
    storage = make_storage(3, 4, order)
    storage.write(block([[1], [2], [3]]))
    storage.write(block([[10, 11, 12], [20, 21, 22]]), lanes, lengths=None if lengths is None else np.array(lengths))
    expected = [[1], [2], [3]]
    for lane, values, n in zip(np.arange(3)[lanes], ([10, 11, 12], [20, 21, 22]), lengths or (3, 3), strict=True):
        expected[lane] += values[:n]
    assert contents(storage) == expected


def test_lanes_that_stand_apart_are_written_each_at_its_own_head(order):
    storage = make_storage(3, 4, order)
    storage.write(block([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), lengths=np.array([3, 0, 2]))
    storage.write(block([[10, 11], [20, 21], [30, 31]]))
    assert contents(storage) == [[2, 3, 10, 11], [20, 21], [7, 8, 30, 31]]


@pytest.mark.parametrize("lengths", [None, (3, 1)], ids=["whole", "ragged"])
def test_a_column_that_is_left_out_gets_unwritten_rows_not_old_ones(order, lengths):
    storage = make_storage(2, 4, order)
    storage.write(block(np.arange(1, 9).reshape(2, 4)))
    storage.write({"x": np.ones((2, 3), np.float32)}, lengths=None if lengths is None else np.array(lengths))
    for lane, n in enumerate(lengths or (3, 3)):
        assert storage.columns.cells["n"][lane, :n].tolist() == [[-7, -7]] * n
        assert (storage.columns.cells["n"][lane, n:, 0] > 0).all()
    storage.write({"n": np.ones((2, 4, 2), np.int64)})
    assert np.isnan(storage.columns.flat["x"]).all()


def test_an_empty_write_changes_nothing(order):
    storage = make_storage(2, 4, order)
    storage.write(block([[1], [2]]))
    before = everything(storage)
    storage.write(block(np.zeros((2, 0))))
    storage.write(block(np.zeros((0, 1))), np.zeros(0, np.int64))
    storage.write(block(np.zeros((2, 3))), lengths=np.zeros(2, np.int64))
    assert everything(storage) == before


GOOD = block(np.ones((2, 3)))
BAD_WRITES = {
    "an unknown column": ({**GOOD, "y": GOOD["x"]}, {}),
    "a wrong row shape": ({"n": GOOD["n"][..., :1]}, {}),
    "too few axes": ({"x": np.ones(2, np.float32)}, {}),
    "a lossy cast": ({**GOOD, "n": GOOD["n"].astype(np.float32)}, {}),
    "columns of other T": ({**GOOD, "n": GOOD["n"][:, :2]}, {}),
    "too few rows": (block(np.ones((1, 3))), {}),
    "too many rows": (block(np.ones((3, 3))), {}),
    "too many for the lanes": (GOOD, {"lanes": slice(0, 1)}),
    "an unknown lane": (GOOD, {"lanes": np.array([1, 2])}),
    "a lane twice": (GOOD, {"lanes": np.array([1, 1])}),
    "too few lengths": (GOOD, {"lengths": np.array([1])}),
    "a length above T": (GOOD, {"lengths": np.array([1, 4])}),
    "a negative length": (GOOD, {"lengths": np.array([1, -1])}),
    "done of other T": (GOOD, {"done": np.zeros((2, 2), bool)}),
    "starts of other T": (GOOD, {"starts": np.zeros((2, 2), bool)}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("values, settings", BAD_WRITES.values(), ids=BAD_WRITES)
def test_a_write_that_fails_changes_nothing(order, values, settings):
    storage = make_storage(2, 4, order)
    storage.write(block(np.arange(1, 7).reshape(2, 3)), done=np.array([[0, 1, 0], [0, 0, 0]], bool))
    before = everything(storage)
    with pytest.raises((SpecError, MissingKeyError)):
        storage.write(values, **settings)
    assert everything(storage) == before


# Episodes


def times_and_lengths(storage, lane=0):
    rows = storage.columns.rows(lane, np.arange(storage.view().low[lane], storage.ring.head[lane]) % 4)
    remaining = storage.episodes.remaining(rows)
    return storage.episodes.times(rows).tolist(), np.where(remaining == NO_END, -1, remaining).tolist()


def write_lane(storage, n_timesteps, done=(), starts=(), lengths=None):
    """One lane's rows, with ends and starts at these times."""
    marks = [np.isin(np.arange(n_timesteps), at)[None] for at in (done, starts)]
    lengths = None if lengths is None else np.array([lengths])
    storage.write(
        {"x": np.zeros((1, n_timesteps), np.float32)}, slice(0, 1), lengths=lengths, done=marks[0], starts=marks[1]
    )


WRITES = {
    "one open": ([(3,)], [0, 1, 2], [-1, -1, -1]),
    "ended": ([(3, [2])], [0, 1, 2], [3, 2, 1]),
    "ended in between": ([(4, [1])], [0, 1, 0, 1], [2, 1, -1, -1]),
    "ended later": ([(2,), (2, [0])], [0, 1, 2, 0], [3, 2, 1, -1]),
    "ended step by step": ([(1,), (1,), (1, [0]), (1,)], [0, 1, 2, 0], [3, 2, 1, -1]),
    "cut by a start": ([(4, [], [2])], [0, 1, 0, 1], [2, 1, -1, -1]),
    "cut by the next block": ([(3,), (1, [], [0])], [0, 1, 2, 0], [3, 2, 1, -1]),
    "an end and a start": ([(4, [1], [2])], [0, 1, 0, 1], [2, 1, -1, -1]),
    "longer than the ring": ([(11,)], [7, 8, 9, 10], [-1, -1, -1, -1]),
    "longer and ended": ([(3,), (8, [7])], [7, 8, 9, 10], [4, 3, 2, 1]),
    "an end in the padding": ([(4, [1, 3], [], 3)], [0, 1, 0], [2, 1, -1]),
    "a start in the padding": ([(2,), (2, [], [1], 1)], [0, 1, 2], [-1, -1, -1]),
    "a start in nothing but padding": ([(2,), (2, [], [0], 0)], [0, 1], [-1, -1]),
    "a start in the padding of a long block": ([(2,), (5, [], [4], 1)], [0, 1, 2], [-1, -1, -1]),
    "ended by a short row of a long block": ([(3,), (3, [0], [], 1)], [0, 1, 2, 3], [4, 3, 2, 1]),
}


@pytest.mark.parametrize("writes, times, remaining", WRITES.values(), ids=WRITES)
def test_each_row_knows_where_it_stands_in_its_episode(order, writes, times, remaining):
    storage = make_storage(2, 4, order)
    for write in writes:
        write_lane(storage, *write)
    assert times_and_lengths(storage) == (times, remaining)
    assert storage.episodes.open_lengths(ALL).tolist() == [times[-1] + 1 if remaining[-1] == -1 else 0, 0]


def test_close_ends_the_open_episode_and_nothing_else(order):
    storage = make_storage(2, 4, order)
    write_lane(storage, 4, done=[1])
    for _ in range(2):
        storage.episodes.close(np.array([0]))
        storage.episodes.close(np.array([1]))
        assert times_and_lengths(storage) == ([0, 1, 0, 1], [2, 1, 2, 1])
    write_lane(storage, 1)
    assert times_and_lengths(storage) == ([1, 0, 1, 0], [1, 2, 1, -1])


def test_episodes_tracked_from_later_on_take_what_is_there_for_one_episode(order):
    storage = Storage(2, 4, order=order)
    storage.columns.add("x", FLOAT)
    storage.write({"x": np.zeros((2, 6), np.float32)}, done=np.ones((2, 6), bool))
    assert storage.track_episodes() is storage.track_episodes()
    write_lane(storage, 1, done=[0])
    assert times_and_lengths(storage) == ([1, 2, 3, 4], [4, 3, 2, 1])
    assert times_and_lengths(storage, 1) == ([0, 1, 2, 3], [-1] * 4)


def test_rebuild_finds_what_was_written(order):
    storage = make_storage(3, 4, order)
    done = np.array([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]], bool)
    storage.write({"x": np.zeros((3, 6), np.float32)}, done=done)
    rebuilt = Episodes(storage.ring, order)
    rebuilt.rebuild(np.stack([done[:, 4], done[:, 5], done[:, 2], done[:, 3]], 1))
    slots = np.array([2, 3, 0, 1])
    found = [rebuilt.columns.cells["episode"][:, slots, which].tolist() for which in (TIME, LENGTH)]
    assert found == [
        [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3]],  # those that began before the oldest row begin with it
        [[3, 3, 3, 0], [0, 0, 0, 0], [4, 4, 4, 4]],
    ]


def die_while_writing(storage, n_timesteps, done=()):
    """What a writer of lane 0 leaves that was killed before it raised the head."""
    storage.ring.reserve(slice(0, 1), n_timesteps)
    rows = (storage.ring.head[0] + np.arange(n_timesteps)) % storage.columns.capacity
    storage.columns.cells["x"][0, rows] = -1
    storage.episodes.write(slice(0, 1), np.isin(np.arange(n_timesteps), done)[None])


@pytest.mark.parametrize("n_timesteps, done", [(1, []), (1, [0]), (2, [0]), (2, [0, 1]), (2, [1])], ids=str)
def test_a_successor_goes_on_where_a_dead_writer_began(order, n_timesteps, done):
    storage = make_storage(2, 4, order)
    storage.write(block([[1, 2, 3], [4, 5, 6]]), done=np.array([[1, 0, 0], [0, 0, 0]], bool))
    die_while_writing(storage, n_timesteps, done)
    kept = [2, 3] if n_timesteps == 2 else [1, 2, 3]
    assert contents(storage) == [kept, [4, 5, 6]]
    storage.write(block([[7], [8]]))
    assert contents(storage) == [[*kept, 7], [4, 5, 6, 8]]
    times, remaining = times_and_lengths(storage)
    assert (times[-3:], remaining[-3:]) == ([0, 1, 2], [-1, -1, -1])


@pytest.mark.parametrize("done", [(), (0,), (3,)], ids=str)
def test_a_successor_begins_anew_where_a_dead_writer_left_nothing(order, done):
    storage = make_storage(2, 4, order)
    storage.write(block([[1, 2, 3], [4, 5, 6]]))
    die_while_writing(storage, 4, done)
    assert contents(storage) == [[], [4, 5, 6]]
    write_lane(storage, 2)
    assert times_and_lengths(storage) == ([0, 1], [-1, -1])


# Drawing


def test_many_rows_are_written_in_pieces_as_in_one(order, monkeypatch):
    stores = [make_storage(3, 20, order), make_storage(3, 20, order)]
    for store, at_once in zip(stores, (4096, 7), strict=True):
        monkeypatch.setattr(columns, "ROWS_AT_ONCE", at_once)
        for start, n in ((0, 13), (50, 20), (100, 0), (150, 9), (200, 45)):
            given = block(start + np.arange(3 * n).reshape(3, n))
            store.write(given if n != 9 else {"x": given["x"]})
    for name in ("x", "n"):
        np.testing.assert_array_equal(*(store.columns.flat[name] for store in stores))
    assert (stores[0].ring.counters == stores[1].ring.counters).all()


def test_uniform_draws_every_row_equally_often_over_a_wrapped_ring(order):
    storage = make_storage(3, 5, order)
    storage.write(block(np.arange(21).reshape(3, 7)), lengths=np.array([7, 2, 6]))
    rows = Uniform().draw(storage.view(), 120_000, np.random.default_rng(0))
    found, counts = np.unique(storage.columns.flat["x"][rows], return_counts=True)
    assert found.tolist() == [2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 18, 19]
    chi_squared = ((counts - 10_000) ** 2 / 10_000).sum()
    assert chi_squared < 31.3  # 11 degrees of freedom, p = 0.001


def test_uniform_without_replacement_gives_each_row_at_most_once():
    storage = make_storage()
    storage.write(block(np.zeros((2, 3))))
    rng = np.random.default_rng(0)
    for n in (2, 6, 7):
        rows = Uniform(False).draw(storage.view(), n, rng).tolist()
        assert len(set(rows)) == len(rows) == min(n, 6)


@pytest.mark.parametrize("n_rows, length", [(0, 1), (2, 3), (4, 5)])
def test_nothing_is_drawn_from_nothing(order, n_rows, length):
    storage = make_storage(order=order)
    storage.write(block(np.zeros((2, n_rows)))) if n_rows else None
    view = storage.view(length)
    assert (view.counts().tolist(), view.every_row().tolist(), view.by_step().tolist()) == ([0, 0], [], [])
    assert [rows.tolist() for rows in view.by_lane(2)] == [[], []]
    with pytest.raises(SpecError, match="^nothing to sample"):
        Uniform().draw(view, 1, np.random.default_rng(0))


def test_draw_fitting_finds_the_only_row_that_fits_and_says_when_there_is_none():
    storage = make_storage(1, 1000)
    storage.write(block(np.arange(1000)[None]))
    view, rng = storage.view(), np.random.default_rng(0)

    def drawn(wanted):
        return draw_fitting(lambda n: Uniform().draw(view, n, rng), lambda rows: rows == wanted, 5, rng.choice, view)

    assert drawn(421).tolist() == [421] * 5
    with pytest.raises(SpecError, match="^nothing to sample: no window"):
        drawn(-1)


def drawing(storage, seed=0):
    rng = np.random.default_rng(seed)

    def select(n):
        rows = Uniform().draw(view := storage.view(), n, rng)[:, None]
        return Selection(rows, view, {"rows": rows[:, 0].copy()})

    return select


def test_sample_draws_again_what_was_overwritten_while_it_read(order):
    storage = make_storage(1, 8, order)
    storage.write(block(np.arange(8)[None]))
    reads = []

    def read(selection):
        if not reads:
            storage.write(block(np.arange(100, 105)[None]))  # five of the eight that were drawn from fall out
        reads.append(selection.rows[:, 0].copy())
        return storage.columns.gather(["x"], selection.rows[:, 0])

    picked, (x,) = storage.sample(200, drawing(storage), read)
    assert [len(rows) for rows in reads] == [200, (reads[0] < 5).sum()]
    assert (picked.rows[:, 0] == picked.fields["rows"]).all()
    np.testing.assert_array_equal(storage.columns.flat["x"][picked.rows[:, 0]], x)
    kept = reads[0] >= 5
    assert (picked.rows[kept, 0] == reads[0][kept]).all()


def test_sample_draws_nothing_that_a_writer_has_reserved(order):
    storage = make_storage(1, 8, order)
    storage.write(block(np.arange(8)[None]))
    storage.ring.reserve(ALL, 6)
    storage.columns.cells["x"][0, :6] = -1  # half-written
    _, (x,) = storage.sample(200, drawing(storage), lambda s: storage.columns.gather(["x"], s.rows))
    assert set(x.ravel().tolist()) == {6, 7}


class Interrupted(Ring):
    """What someone sees who is interrupted while he looks at the counters for the first time."""

    def __init__(self, counters, capacity, torn):
        self.seen = [counters, torn]
        super().__init__(counters, capacity)

    @property
    def counters(self):
        return self.seen.pop() if len(self.seen) > 1 else self.seen[0]

    @counters.setter
    def counters(self, counters):
        """They are in `seen`."""


@pytest.mark.parametrize("late", ["reserved", "head"])
def test_a_span_holds_counters_of_one_time(order, late):
    storage = make_storage(2, 4, order)
    storage.write(block(np.zeros((2, 6))))
    before = storage.ring.counters.copy()
    storage.write(block(np.zeros((2, 9))))
    torn = storage.ring.counters.copy()
    torn[2 if late == "reserved" else 1] = before[2]
    view = View(Interrupted(storage.ring.counters, 4, torn), storage.columns, 2)
    assert (view.low.tolist(), view.high.tolist(), view.total) == ([11, 11], [14, 14], 6)


def test_sample_gives_up_on_a_ring_that_is_overwritten_faster_than_read():
    storage = make_storage(1, 8)
    storage.write(block(np.arange(8)[None]))

    def read(selection):
        storage.write(block(np.arange(8)[None]))
        return storage.columns.gather(["x"], selection.rows)

    with pytest.raises(StateError, match="overwritten faster than they are read; use a larger memory$"):
        storage.sample(4, drawing(storage), read)


def test_sample_says_that_too_few_rows_are_left_to_draw_again():
    storage = make_storage(1, 8)
    storage.write(block(np.arange(8)[None]))

    def read(selection):
        if len(storage) == 8:
            storage.clear()
            storage.write(block(np.zeros((1, 2))))
        return storage.columns.gather(["x"], selection.rows)

    def select(n):
        return drawing(storage)(min(n, len(storage)))

    with pytest.raises(StateError, match="^sample: rows were dropped while they were read$"):
        storage.sample(6, select, read)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None], ids=repr)
def test_a_size_must_be_an_int(value):
    with pytest.raises(TypeError, match="^n must be an int"):
        check_count("n", value)


@pytest.mark.parametrize("value", [0, -1, np.int64(0)])
def test_a_size_must_be_at_least_one(value):
    with pytest.raises(SpecError, match="^n must be at least 1"):
        check_count("n", value)
    assert check_count("n", np.int32(3)) == 3


# Everything against plain lists


class Model:
    """What a store should hold: of each lane the newest rows, each with its episode and its place in it."""

    def __init__(self, n_lanes, capacity):
        self.lanes = [deque(maxlen=capacity) for _ in range(n_lanes)]
        self.open = [None] * n_lanes
        self.lengths, self.closed = [], set()

    def close(self, lane):
        if self.open[lane] is not None:
            self.closed.add(self.open[lane])
            self.open[lane] = None

    def write(self, lane, head, x, n, done, starts):
        for t in range(len(x)):
            if starts[t]:
                self.close(lane)
            if self.open[lane] is None:
                self.open[lane] = len(self.lengths)
                self.lengths.append(0)
            episode = self.open[lane]
            self.lanes[lane].append((lane, head + t, x[t], n[t], episode, self.lengths[episode]))
            self.lengths[episode] += 1
            if done[t]:
                self.close(lane)

    def clear(self):
        for lane, rows in enumerate(self.lanes):
            rows.clear()
            self.open[lane] = None

    def remaining(self, row):
        return self.lengths[row[4]] - row[5] if row[4] in self.closed else NO_END

    def open_lengths(self):
        return [0 if episode is None else self.lengths[episode] for episode in self.open]


def check_rows(storage, model):
    """View, contents and episodes."""
    columns, episodes, view = storage.columns, storage.episodes, storage.view()
    rows = [row for lane in model.lanes for row in lane]
    ids = columns.rows(*np.array([(row[0], row[1] % columns.capacity) for row in rows] or np.zeros((0, 2), int)).T)
    assert view.counts().tolist() == [len(lane) for lane in model.lanes]
    assert len(storage) == view.total == len(rows)
    assert sorted(view.every_row().tolist()) == sorted(ids.tolist())
    assert view.by_lane(1)[0].tolist() == ids.tolist()
    by_step = sorted(range(len(rows)), key=lambda i: (rows[i][1], rows[i][0]))
    assert view.by_step().tolist() == ids[by_step].tolist()
    np.testing.assert_array_equal(columns.flat["x"][ids], np.array([row[2] for row in rows], np.float32))
    assert columns.flat["n"][ids].tolist() == [row[3] for row in rows]
    assert episodes.times(ids).tolist() == [row[5] for row in rows]
    assert episodes.remaining(ids).tolist() == [model.remaining(row) for row in rows]
    assert episodes.open_lengths(ALL).tolist() == model.open_lengths()
    assert columns.places(ids)[0].tolist() == [row[0] for row in rows]
    assert view.steps(ids).tolist() == [row[1] for row in rows]
    every = np.arange(columns.n_rows)
    assert view.has(every).tolist() == np.isin(every, ids).tolist()


def check_windows(storage, model, length):
    """Each window of each anchor, row by row."""
    columns, view = storage.columns, storage.view(length)
    lanes = [list(lane) for lane in model.lanes]
    ids = {row[:2]: int(columns.rows(row[0], row[1] % columns.capacity)) for lane in lanes for row in lane}

    def expected(windows, masks):
        firsts = [[row[5] == 0 for row in window] for window in windows]
        rows = [[ids[row[:2]] for row in window] for window in windows]
        return rows, masks, [[a and b for a, b in zip(x, y, strict=True)] for x, y in zip(firsts, masks, strict=True)]

    def same(picked, windows, masks):
        rows, masks, firsts = expected(windows, masks)
        found = picked.rows, picked.fields["mask"], picked.fields["is_first"]
        assert tuple(array.tolist() for array in found) == (rows, masks, firsts)

    def fitting(windows, view, anchors):
        fits = windows.fits(view)
        return [True] * len(anchors) if fits is None else fits(anchors).tolist()

    full = [lane[i : i + length] for lane in lanes for i in range(len(lane) - length + 1)]
    anchors = np.array([ids[window[0][:2]] for window in full], np.int64)
    assert sorted(view.every_row().tolist()) == sorted(anchors.tolist())
    if full:
        same(Windows(length).expand(view, anchors, {}), full, [[True] * length] * len(full))
        inside = [[row[4] == window[0][4] for row in window] for window in full]
        same(Windows(length, MASK_ENDS).expand(view, anchors, {}), full, inside)
        whole = [model.remaining(window[0]) >= length for window in full]
        assert fitting(Windows(length, AVOID_ENDS), view, anchors) == whole
        last = columns.shifted(anchors, length - 1)
        same(Windows(length, is_last=True).expand(storage.view(), last, {}), full, [[True] * length] * len(full))
        inside = [[row[4] == window[-1][4] for row in window] for window in full]
        same(Windows(length, MASK_ENDS, is_last=True).expand(storage.view(), last, {}), full, inside)
        assert fitting(Windows(length, AVOID_ENDS, is_last=True), storage.view(), last) == list(map(all, inside))

    rows = storage.view()
    anchors = np.array(list(ids.values()), np.int64)
    if not ids:
        return
    stacks, forward, masks = [], [], []
    for lane in lanes:
        for i, row in enumerate(lane):
            past = [other for other in lane[max(i - length + 1, 0) : i + 1] if other[4] == row[4]]
            stacks.append([past[0]] * (length - len(past)) + past)
            future = [other for other in lane[i : i + length] if other[4] == row[4]]
            forward.append(future + [future[-1]] * (length - len(future)))
            masks.append([True] * len(future) + [False] * (length - len(future)))
    assert rows.frames(anchors, length).tolist() == expected(stacks, masks)[0]
    window, mask = rows.run(anchors, length)
    assert (window.tolist(), mask.tolist()) == expected(forward, masks)[:2]
    assert fitting(Windows(length, is_last=True), rows, anchors) == [
        i >= length - 1 for lane in lanes for i in range(len(lane))
    ]


def flags(n, n_timesteps):
    row = st.lists(st.sampled_from([False, False, True]), min_size=n_timesteps, max_size=n_timesteps)
    return st.none() | st.lists(row, min_size=n, max_size=n).map(lambda rows: np.array(rows, bool))


def draw_lanes(data, n_lanes):
    """Lanes as `write` takes them, and as numbers."""
    kind = data.draw(st.sampled_from(["all", "slice", "array"]), "lanes")
    if kind == "all":
        return ALL, list(range(n_lanes))
    if kind == "slice":
        low = data.draw(st.integers(0, n_lanes - 1))
        high = data.draw(st.integers(low + 1, n_lanes))
        return slice(low, high), list(range(low, high))
    lanes = data.draw(st.lists(st.integers(0, n_lanes - 1), min_size=1, max_size=n_lanes, unique=True))
    return np.array(lanes), lanes


def write_both(data, storage, model, first):
    """The same random rows to both, numbered from `first`."""
    lanes, numbers = draw_lanes(data, storage.columns.n_lanes)
    n, n_timesteps = len(numbers), data.draw(st.integers(1, 2 * storage.columns.capacity + 1), "T")
    lengths = data.draw(st.none() | st.lists(st.integers(0, n_timesteps), min_size=n, max_size=n), "lengths")
    done, starts = data.draw(flags(n, n_timesteps), "done"), data.draw(flags(n, n_timesteps), "starts")
    values = np.arange(first, first + n * n_timesteps).reshape(n, n_timesteps)
    given = block(values)
    for name in data.draw(st.sampled_from([[], [], ["x"], ["n"]]), "left out"):
        del given[name]
    heads = storage.ring.head[lanes].tolist()
    storage.write(given, lanes, lengths=None if lengths is None else np.array(lengths), done=done, starts=starts)
    nothing = np.zeros((n, n_timesteps), bool)
    for i, lane in enumerate(numbers):
        valid = slice(None if lengths is None else lengths[i])
        model.write(
            lane,
            heads[i],
            given["x"][i, valid].tolist() if "x" in given else [np.nan] * len(values[i, valid]),
            given["n"][i, valid].tolist() if "n" in given else [[-7, -7]] * len(values[i, valid]),
            (nothing if done is None else done)[i],
            (nothing if starts is None else starts)[i],
        )
    return first + n * n_timesteps


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_store_holds_what_plain_lists_hold(data):
    n_lanes, capacity = data.draw(st.integers(1, 3), "lanes"), data.draw(st.integers(1, 6), "capacity")
    storage = make_storage(n_lanes, capacity, data.draw(st.sampled_from(ORDERS), "order"))
    model, number = Model(n_lanes, capacity), 1
    check_rows(storage, model)
    for _ in range(data.draw(st.integers(1, 6), "writes")):
        operation = data.draw(st.sampled_from(["write"] * 8 + ["clear", "close"]), "operation")
        if operation == "clear":
            storage.clear()
            model.clear()
        elif operation == "close":
            lane = data.draw(st.integers(0, n_lanes - 1))
            storage.episodes.close(np.array([lane]))
            model.close(lane)
        else:
            number = write_both(data, storage, model, number)
        check_rows(storage, model)
        check_windows(storage, model, data.draw(st.integers(1, capacity + 1), "length"))


def test_newer_gives_the_rows_from_a_step_on(order):
    storage = make_storage(3, 5, order)
    storage.write(block(np.arange(24).reshape(3, 8)))
    x, since = storage.columns.flat["x"], np.array([5, 8, 0])
    assert x[storage.view().newer(since)].tolist() == [5, 6, 7, 19, 20, 21, 22, 23]
    storage.write(block(np.full((3, 1), 30)), lengths=np.array([1, 0, 0]))
    assert x[storage.view().newer(since)].tolist() == [5, 6, 7, 30, 19, 20, 21, 22, 23]


@pytest.mark.parametrize("order", ["lane", "slot"])
def test_rows_are_counted_by_lane_and_then_by_slot(order):
    rng = np.random.default_rng(0)
    for _ in range(100):
        n_lanes, capacity = (int(number) for number in rng.integers(1, 6, 2))
        storage = make_storage(n_lanes, capacity, order)
        for _ in range(rng.integers(0, 8)):
            n = n_lanes if rng.random() < 0.5 else int(rng.integers(1, n_lanes + 1))
            lanes, n_rows = rng.permutation(n_lanes)[:n], int(rng.integers(1, 4))
            if rng.random() < 0.8:
                specs = storage.columns.specs.items()
                storage.write({name: np.zeros((n, n_rows, *spec.shape), spec.dtype) for name, spec in specs}, lanes)
            else:
                storage.clear(lanes)
        view, columns = storage.view(), storage.columns
        every = view.row_ids(np.arange(view.total))
        np.testing.assert_array_equal(view.every_row(), every)
        expected = sorted(every, key=lambda row: tuple(columns.places(row)))
        np.testing.assert_array_equal(view.by_slot(np.arange(view.total)), expected)
        with pytest.raises(IndexError):
            view.by_slot(np.array([view.total]))


@pytest.mark.parametrize("order", ["lane", "slot"])
def test_lengths_of_many_episodes_are_set_as_those_of_each(order):
    rng, n_lanes, capacity = np.random.default_rng(0), 40, 7
    for _ in range(30):
        stores = [make_storage(n_lanes, capacity, order) for _ in range(2)]
        heads = np.full(n_lanes, 9) if rng.random() < 0.3 else rng.integers(capacity, 50, n_lanes)
        lanes = rng.permutation(n_lanes)[: rng.integers(9, n_lanes)]
        before, totals = rng.integers(0, 2 * capacity, (2, lanes.size)).astype(np.int32)
        n_new = 1 if rng.random() < 0.5 else rng.integers(0, capacity + 1, lanes.size)
        for storage in stores:
            storage.track_episodes()
            storage.ring.head[:] = heads
        stores[0].episodes.set_lengths(lanes, before, totals, n_new)
        for at in range(lanes.size):
            one = slice(at, at + 1)
            n_after = n_new if isinstance(n_new, int) else n_new[one]
            stores[1].episodes.set_lengths(lanes[one], before[one], totals[one], n_after)
        many, each = (storage.episodes.columns.flat["episode"] for storage in stores)
        assert many.tolist() == each.tolist()


def test_shifted_rows_go_round_the_end_of_their_lane(order):
    rng = np.random.default_rng(0)
    for _ in range(50):
        n_lanes, capacity = (int(n) for n in rng.integers(1, 7, 2))
        ids = RowIds(n_lanes, capacity, order)
        rows, each = rng.integers(0, n_lanes * capacity, 7), rng.integers(-9, 10, 7)
        lanes, slots = ids.places(rows)
        assert np.array_equal(ids.shifted(rows, each), ids.rows(lanes, (slots + each) % capacity))
        by = np.sort(each[:3])
        around = ids.rows(lanes[:, None], (slots[:, None] + by) % capacity)
        assert np.array_equal(ids.shifted(rows[:, None], by), around)
