"""What stores and priorities do when they get more room, and what files keep of generators."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlstructs.errors import FileError, SpecError, StateError
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.draw.priorities import Priorities
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

WIDE = 80  # float32: more bytes than from which on a next observation is stored once


@pytest.mark.parametrize("order", ["lane", "slot"])
@pytest.mark.parametrize("capacity", [2, 4, 7])
def test_resized_columns_keep_lanes_and_slots(order, capacity):
    columns = Columns(3, 4, order)
    columns.add("x", Spec(np.dtype(np.int64), fill=-1))
    before = np.arange(12).reshape(3, 4)
    columns.put_cells("x", slice(None), slice(None), before)
    columns.resize(capacity)
    n = min(capacity, 4)
    assert columns.cells["x"].tolist() == [[*row[:n], *[-1] * (capacity - n)] for row in before.tolist()]
    assert list(columns.specs) == ["x"] and columns.n_rows == 3 * capacity
    rows = columns.rows(np.array([2]), np.array([1]))
    assert columns.gather(["x"], rows)[0].tolist() == [9]


def test_what_lies_beside_a_linked_column_is_there_after_it_has_grown():
    buffer = Buffer(1, 4, seed=0)
    frames = np.repeat(np.arange(5, dtype=np.float32)[:, None], WIDE, axis=1)[None]
    following = frames[:, 1:].copy()
    following[0, 1] = 7  # the last step of an episode
    buffer._intake.write({"obs": frames[:, :-1], "obs_next": following})
    columns = buffer._storage.columns
    columns._rows_of("obs_next")[2] = 9  # not where it is read from
    buffer._storage.grow(8)
    assert buffer._storage.gather(["obs_next"], np.arange(4))[0][:, 0].tolist() == [1, 7, 3, 4]
    assert columns._rows_of("obs_next")[:, 0].tolist() == [0, 7, 0, 0, 0, 0, 0, 0]


def test_only_an_empty_store_shrinks():
    storage = Storage(1, 8)
    storage.columns.add("x", Spec(np.dtype(np.int64)))
    storage.write({"x": np.ones((1, 2), int)})
    with pytest.raises(StateError, match="^a store with rows cannot shrink from 8 to 4 per lane$"):
        storage.grow(4)
    storage.clear()
    storage.grow(4)
    storage.write({"x": np.arange(6)[None]})
    assert len(storage) == 4 and storage.columns.n_rows == 4


def grown_store():
    storage = Storage(1, 4)
    storage.columns.add("x", Spec(np.dtype(np.int64)))
    storage.alignment = 8
    priorities = Priorities(4, 1, alpha=0.5)
    storage.write({"x": np.arange(4)[None]})
    priorities.update(storage.view(), np.arange(4), np.array([1.0, 4.0, 9.0, 16.0]))
    return storage, priorities


def test_priorities_follow_a_store_that_grows():
    storage, priorities = grown_store()
    storage.grow(8)
    priorities.grow(8)
    storage.write({"x": np.arange(2)[None]})
    priorities.follow(storage.view())
    np.testing.assert_allclose(priorities.tree.values, [1, 2, 3, 4, 4, 4, 0, 0])
    assert priorities.tree.total == pytest.approx(18) and priorities.tree.minimum == 1
    with pytest.raises(SpecError, match="priorities must be finite"):
        priorities.update(storage.view(), np.array([0]), np.array([1e308]))


def test_another_alpha_keeps_the_priorities():
    storage, priorities = grown_store()
    for alpha in (1.0, 2.0, 0.25, 0.5):
        priorities.set_alpha(alpha)
        np.testing.assert_allclose(priorities.tree.values, np.array([1, 4, 9, 16.0]) ** alpha)
    priorities.set_alpha(0.0)
    priorities.set_alpha(1.0)
    assert priorities.tree.values.tolist() == [1, 1, 1, 1]
    priorities.update(storage.view(), np.array([0]), np.array([1e200]))
    with pytest.raises(SpecError, match=r"^alpha 2.0: the largest priority is 1e\+200, it may be"):
        priorities.set_alpha(2.0)
    assert priorities.alpha == 1.0


def test_a_row_that_was_replaced_has_the_priority_of_a_new_one_and_no_late_one():
    storage, priorities = grown_store()
    view = storage.view()
    for drawn in ([3, 1], [1, 2, 0]):
        priorities.drawn.remember(view, np.array(drawn))
    priorities.replace(np.array([1]))
    np.testing.assert_allclose(priorities.tree.values, [1, 4, 3, 4])
    rows = np.array([1, 2, 0])
    assert not priorities.drawn.is_last(rows, view)
    priorities.update(view, rows, np.array([25.0, 36.0, 49.0]))
    np.testing.assert_allclose(priorities.tree.values, [7, 4, 6, 4])
    priorities.update(view, np.array([3, 1]), np.array([100.0, 100.0]))
    np.testing.assert_allclose(priorities.tree.values, [7, 4, 6, 10])
    priorities.update(view, np.array([1, 3, 2]), np.array([64.0, 81.0, 0.0]))  # some of several draws
    np.testing.assert_allclose(priorities.tree.values, [7, 4, 0, 9])
    priorities.drawn.remember(view, np.array([1]))  # drawn again, as what it is now
    priorities.update(view, np.array([1]), np.array([25.0]))
    np.testing.assert_allclose(priorities.tree.values, [7, 5, 0, 9])


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_file_restores_every_generator_of_numpy(name, tmp_path):  # R30
    rng = np.random.Generator(getattr(np.random, name)(3))
    rng.integers(3, size=5, dtype=np.int32)  # half a number is left over
    buffer, other = Buffer(1, 2, seed=rng), Buffer(1, 2, seed=0)
    buffer.save(tmp_path / "x.npz")
    other.load(tmp_path / "x.npz")
    assert type(other._rng.bit_generator).__name__ == name
    for draw in (lambda g: g.integers(5, size=7, dtype=np.int32), lambda g: g.random(9)):
        assert draw(rng).tolist() == draw(other._rng).tolist()


def test_a_generator_that_there_is_not_is_a_damaged_file(tmp_path):
    buffer = Buffer(1, 2, seed=0)
    buffer.save(tmp_path / "x.npz")
    arrays = dict(np.load(tmp_path / "x.npz"))
    header = json.loads(arrays["__header__"].tobytes())
    header["state"]["rng"]["bit_generator"] = "load"
    arrays["__header__"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(FileError, match="no bit generator 'load'"):
        buffer.load(tmp_path / "x.npz")
