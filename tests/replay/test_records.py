"""Records: small columns side by side hold and give what columns alone do."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from rlstructs.memories.torch import RandomMemory
from rlstructs.replay.rows import columns as columns_module
from rlstructs.replay.rows.backing import Folder, Shared
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.records import AT_ONCE, LARGE, group_columns, width_of
from rlstructs.replay.rows.spec import Spec

N_LANES, CAPACITY = 3, 1500


@pytest.fixture(autouse=True)
def _records_of_any_size(monkeypatch):
    """Small stores have records too."""
    monkeypatch.setattr(columns_module, "LEAST_RECORDS", 0)


SPECS = {
    "observations": Spec(np.dtype(np.float32), (17,)),
    "flag": Spec(np.dtype(bool)),
    "flags": Spec(np.dtype(bool), (1,)),
    "count": Spec(np.dtype(np.int64)),
    "matrix": Spec(np.dtype(np.float64), (2, 3)),
    "half": Spec(np.dtype(np.int16), (3,), is_bfloat16=True),
    "frame": Spec(np.dtype(np.uint8), (12, 13, 2)),
    "wide": Spec(np.dtype(np.complex128)),
    "nothing": Spec(np.dtype(np.float32), (0,)),
    "object": Spec(np.dtype(object)),
}
RECORD = ["observations", "flag", "flags", "count", "matrix", "half"]


def filled(columns: Columns, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes numbers to all columns and returns them, by row id."""
    rng, written = np.random.default_rng(seed), {}
    for name, spec in columns.specs.items():
        values = rng.integers(0, 2 if spec.dtype == bool else 100, size=(columns.n_rows, *spec.shape))
        written[name] = values.astype(spec.dtype)
        columns.put_rows(name, slice(None), written[name])
    return written


def made(backing=None, specs=SPECS, order="slot") -> Columns:
    columns = Columns(N_LANES, CAPACITY, order, backing)
    columns.add_all(specs)
    return columns


@pytest.mark.parametrize("names", [list(SPECS), ["flag"], ["matrix"], ["flag", "count", "flag"], ["frame", "half"], []])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (0,), (2 * AT_ONCE + 3,)])
def test_a_draw_is_a_contiguous_private_copy_of_the_rows(names, shape):
    columns = made(specs=SPECS if shape else {name: spec for name, spec in SPECS.items() if name != "object"})
    names, written = [name for name in names if name in columns.specs], filled(columns)
    rows = np.random.default_rng(1).integers(columns.n_rows, size=shape)
    drawn = columns.gather(names, rows)
    for name, values in zip(names, drawn, strict=True):
        values = np.asarray(values)
        assert values.dtype == columns.specs[name].dtype and values.shape == shape + columns.specs[name].shape
        assert (values == written[name][rows]).all()
        assert values.flags.c_contiguous and not np.shares_memory(values, columns.flat[name])
    arrays = [values for values in drawn if isinstance(values, np.ndarray) and values.size]
    assert not any(np.shares_memory(a, b) for at, a in enumerate(arrays) for b in arrays[:at])
    before = [np.array(values) for values in drawn]
    columns.gather(names, (rows + 1) % columns.n_rows)
    assert all((np.asarray(a) == b).all() for a, b in zip(drawn, before, strict=True))


def test_small_columns_that_come_together_lie_side_by_side_and_aligned():
    columns = made()
    row = columns.nbytes // columns.n_rows
    assert row == columns.nbytes_per_row(SPECS)
    assert row - sum(spec.nbytes for spec in SPECS.values()) in range(8)  # filled up to 8 bytes
    firsts = [columns.flat[name].ctypes.data for name in RECORD]
    assert max(firsts) - min(firsts) < row
    for name in SPECS:
        spec, rows = columns.specs[name], columns.flat[name]
        assert spec.is_object or rows.ctypes.data % spec.dtype.alignment == 0
        assert rows.flags.c_contiguous == (name not in RECORD)
    columns.add("late", Spec(np.dtype(np.float32)))
    assert columns.flat["late"].flags.c_contiguous


def test_a_record_has_no_column_that_is_large_and_a_file_has_one_column():
    specs = {name: Spec(np.dtype(np.uint8), (LARGE - 1,)) for name in "abcdefghi"}
    groups = group_columns(specs)
    assert [len(group) for group in groups] == [4, 4]  # one is left over
    assert group_columns({"a": Spec(np.dtype(np.uint8), (LARGE,)), "b": Spec(np.dtype(np.uint8))}) == []
    columns = made(Folder(), {"a": Spec(np.dtype(np.uint8)), "b": Spec(np.dtype(np.uint8))})
    assert all(rows.flags.c_contiguous for rows in columns.flat.values())


def test_columns_keep_their_rows_when_they_are_moved_grown_copied_and_exchanged():
    specs = {name: spec for name, spec in SPECS.items() if name != "object"}
    columns = made(specs=specs, order="lane")
    written = filled(columns)
    copy = pickle.loads(pickle.dumps(columns))
    columns.put_rows("count", 0, -1)
    assert all((copy.flat[name] == written[name]).all() for name in copy.specs)
    columns.put_rows("count", 0, written["count"][0])
    columns.move(Shared())
    columns.exchange({"count": (Spec(np.dtype(np.float64)), written["count"] / 4)}, gone=["flag", "frame"])
    columns.resize(CAPACITY + 1)
    for name in columns.specs:
        expected = written[name] / 4 if name == "count" else written[name]
        assert (columns.cells[name][:, :CAPACITY] == expected.reshape(N_LANES, CAPACITY, *expected.shape[1:])).all()
    assert "flag" not in columns.flat


def test_threads_that_draw_at_once_get_their_own_rows():
    columns = made()
    written, wrong = filled(columns), []

    def draw(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for n in rng.integers(1, 600, size=150):
            rows = rng.integers(columns.n_rows, size=n)
            for name, values in zip(RECORD, columns.gather(RECORD, rows), strict=True):
                if not (values == written[name][rows]).all():
                    wrong.append(name)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_live_tensor_in_a_record_is_written_through_and_stays_so_in_shared_memory():
    memory = RandomMemory(memory_size=10, num_envs=2)
    memory.create_tensor("observations", size=5)
    memory.create_tensor("terminated", size=1, dtype=bool)
    for share in (False, True):
        if share:
            memory.share_memory()
        live, marks = memory.get_tensor_by_name("observations"), memory.get_tensor_by_name("terminated", keepdim=False)
        assert live.is_shared() == marks.is_shared() == share
        live[3, 1] = 7.0
        marks[7] = True
        [[observations, terminated]] = memory.sample_by_index(["observations", "terminated"], [7])
        assert observations.tolist() == [[7.0] * 5] and terminated.tolist() == [[True]]
        live[3, 1] = 0.0


def test_records_waste_at_most_a_tenth_of_their_memory():
    number, flag = Spec(np.dtype(np.int64)), Spec(np.dtype(bool))
    specs = {"number": number, "other": number, "flag": flag, "more": flag}
    assert [list(group) for group in group_columns(specs)] == [["number", "other"], ["flag", "more"]]
    assert made(specs=specs).nbytes == N_LANES * CAPACITY * (8 + 8 + 1 + 1)
    dtypes = (bool, np.int16, np.int64)
    many = {f"{dtype.__name__}{n}": Spec(np.dtype(dtype), (n,)) for dtype in dtypes for n in range(1, 40)}
    for group in group_columns(many):
        n_bytes = sum(spec.nbytes for spec in group.values())
        assert n_bytes <= width_of(group.values()) <= min(1.1 * n_bytes, 1024)


@pytest.mark.parametrize("order", ["slot", "lane"])
def test_what_fits_in_a_cache_has_no_records_until_it_has_grown(monkeypatch, order):
    specs = {name: spec for name, spec in SPECS.items() if name != "object"}
    least = N_LANES * CAPACITY * width_of([specs[name] for name in RECORD])
    monkeypatch.setattr(columns_module, "LEAST_RECORDS", least + 1)
    columns = made(specs=specs, order=order)
    filled(columns)
    before = {name: np.array(cells) for name, cells in columns.cells.items()}
    assert all(rows.flags.c_contiguous for rows in columns.flat.values())
    assert columns.nbytes == columns.n_rows * columns.nbytes_per_row(specs)
    columns.resize(CAPACITY + 1)
    assert [name for name, rows in columns.flat.items() if not rows.flags.c_contiguous] == RECORD
    assert all((columns.cells[name][:, :CAPACITY] == cells).all() for name, cells in before.items())
    live = RandomMemory(memory_size=10, num_envs=2)
    for name in ("observations", "values"):
        live.create_tensor(name, size=5)
    assert live.get_tensor_by_name("observations").is_contiguous() and live.tensors_view["values"].is_contiguous()


@pytest.mark.parametrize("order", ["slot", "lane"])
@pytest.mark.parametrize("least", [0, 1 << 40])
def test_blocks_of_any_layout_are_written_and_copied_right(monkeypatch, order, least):
    monkeypatch.setattr(columns_module, "LEAST_RECORDS", least)
    specs = {name: spec for name, spec in SPECS.items() if name != "object"}
    columns, rng = Columns(N_LANES, 8, order), np.random.default_rng(0)
    columns.add_all(specs)
    for name, spec in specs.items():
        whole = rng.integers(0, 2, size=(N_LANES, 8, *spec.shape)).astype(spec.dtype)
        wide = rng.integers(0, 2, size=(2 * N_LANES, 8, *spec.shape)).astype(spec.dtype)
        strided = np.array(whole.T).T  # rows that are not contiguous
        for values in (whole, wide[::2], strided):
            columns.put_cells(name, slice(None), slice(None), np.zeros((), spec.dtype))
            columns.put_cells(name, slice(None), slice(2, 7), values[:, 1:6])
            columns.put_cells(name, np.array([2, 0]), 7, values[:2, 7])
            assert (columns.cells[name][:, 2:7] == values[:, 1:6]).all()
            assert (columns.cells[name][[2, 0], 7] == values[:2, 7]).all() and not columns.cells[name][:, :2].any()
        cells = np.array(columns.cells[name])
        for first, n in ((0, 8), (3, 4), (14, 5), (9, 0)):
            slots = np.arange(first, first + n) % 8
            [by_lane], [by_step] = (columns.copy_steps([name], first, n, by_lane) for by_lane in (True, False))
            assert (by_lane == cells[:, slots].reshape(by_lane.shape)).all() and by_lane.flags.c_contiguous
            assert (by_step == cells[:, slots].swapaxes(0, 1).reshape(by_step.shape)).all()
            assert len(by_lane) == len(by_step) == N_LANES * n
