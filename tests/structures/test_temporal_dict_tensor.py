"""`TemporalDictTensor`: conformance vectors CV19-CV32 and CV34, and what lies around them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import lengths_and_time, make_temporal, schemas, steps, temporals

from rlstructs import DictTensor, MissingKeyError, SpecError, TemporalDictTensor, Trajectories

quick = settings(deadline=None, max_examples=60)


def temporal(y, lengths=None):
    return TemporalDictTensor({"y": torch.as_tensor(y)}, None if lengths is None else torch.tensor(lengths))


@pytest.fixture
def m():
    """The example of the conformance vectors: y counts through (3, 4), lengths 2, 4, 1."""
    return temporal(torch.arange(12).view(3, 4), [2, 4, 1])


# --- construction -----------------------------------------------------------------------------------

ROWS, TIMES = torch.zeros(3, 4), torch.tensor([2, 4, 1])


@pytest.mark.parametrize(
    ("tensors", "lengths", "error", "message"),
    [
        ({"y": ROWS}, TIMES.int(), SpecError, r"lengths must be int64 \(B,\), got \(3,\) int32"),  # CV34
        ({"y": ROWS}, torch.tensor([9, 4, 1]), SpecError, r"lengths must lie in \[0, 4\], got 1\.\.9"),  # CV34
        ({"y": ROWS}, torch.tensor([-1, 4, 1]), SpecError, r"got -1\.\.4"),
        ({}, torch.tensor([-1, 4, 1]), SpecError, r"got -1\.\.4"),
        ({"y": ROWS}, torch.tensor(2), SpecError, r"lengths must be int64 \(B,\), got \(\) int64"),
        ({"y": ROWS}, [2, 4, 1], SpecError, r"lengths must be int64 \(B,\), got list"),
        ({"y": ROWS}, torch.tensor([2, 4]), SpecError, r"'y' has shape \(3, 4\), expected \(2, 4, \.\.\.\)"),
        ({"y": ROWS, "z": torch.zeros(3, 5)}, TIMES, SpecError, r"'z' has shape \(3, 5\), expected \(3, 4, \.\.\.\)"),
        ({"y": ROWS, "z": torch.zeros(2, 4)}, None, SpecError, r"'z' has shape \(2, 4\)"),
        ({"y": ROWS, "z": torch.zeros(3)}, None, SpecError, r"'z' has shape \(3,\)"),
        ({"y": torch.zeros(3)}, TIMES, SpecError, r"'y' has shape \(3,\), expected \(3, T, \.\.\.\)"),
        ({"y": torch.zeros(3)}, None, SpecError, r"'y' has shape \(3,\)"),
        ({"y": ROWS, "z": ROWS.to("meta")}, None, SpecError, "'z' is on meta, expected cpu"),
        ({"y": ROWS.to("meta")}, TIMES, SpecError, "'y' is on meta, expected cpu"),
        ({"lengths": ROWS}, None, SpecError, "no tensor may be called 'lengths'"),
        ({"y": [1]}, None, TypeError, "'y' must be a torch.Tensor, got list"),
        (ROWS, None, TypeError, "needs a mapping"),
    ],
    ids=[
        "int32", "too long", "negative", "negative without keys", "no axis", "list", "rows of lengths", "time", "rows",
        "second without time", "without time", "without time or lengths", "devices", "device of lengths", "name",
        "value", "no mapping",
    ],
)  # fmt: skip
def test_construction_names_what_is_wrong(tensors, lengths, error, message):
    with pytest.raises(error, match=f"^TemporalDictTensor: .*{message}"):
        TemporalDictTensor(tensors, lengths)


def test_lengths_are_full_by_default_and_lie_on_the_device_of_the_tensors():
    made = TemporalDictTensor({"y": torch.zeros(3, 4)})
    assert (made.lengths.tolist(), made.lengths.dtype) == ([4, 4, 4], torch.int64)
    assert TemporalDictTensor({"y": torch.zeros(3, 4, device="meta")}).device().type == "meta"


def test_the_mapping_is_copied_but_not_the_tensors_or_lengths():
    y, lengths = torch.zeros(2, 3), torch.tensor([1, 2])
    mapping = {"y": y, "nested": {"z": y}}
    made = TemporalDictTensor(mapping, lengths)
    mapping["more"] = y
    assert list(made) == ["y", "nested/z"]
    assert (made["y"] is y, made.lengths is lengths) == (True, True)


def test_another_temporal_one_is_not_taken_without_its_lengths(m):
    with pytest.raises(SpecError, match="'lengths'"):
        TemporalDictTensor(m)


def test_one_without_tensors_keeps_its_rows():
    empty = TemporalDictTensor()
    assert (len(empty), empty.n_timesteps(), empty.empty(), empty.full(), empty.mask().shape) == (
        0, 0, True, True, (0, 0),
    )  # fmt: skip
    assert (empty.shorten(), empty.clone(), empty.unfold(), TemporalDictTensor.cat([])) == (empty, empty, [], empty)
    bare = TemporalDictTensor({}, torch.tensor([1, 3]))
    assert (bare.n_elems(), bare.n_timesteps(), bare.index([1]).lengths.tolist()) == (2, 3, [3])
    assert bare.mask().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert TemporalDictTensor.cat([bare, bare]).lengths.tolist() == [1, 3, 1, 3]


def test_rows_and_time_may_be_none():
    for shape in ((0, 4), (3, 0)):
        made = temporal(torch.zeros(shape))
        assert (made.n_elems(), made.n_timesteps(), made.mask().shape, made.full()) == (*shape, shape, True)
        assert made.shorten().temporal_slice(0, 9).clone().zero_padding().n_elems() == shape[0]
        assert made.masked_temporal_index(0)[0]["y"].shape == (0,)


# --- reading ----------------------------------------------------------------------------------------


def test_it_reads_as_a_mapping_of_its_tensors(m):
    assert (list(m.keys()), list(m), "y" in m, "lengths" in m, len(m), m.n_elems(), m.n_timesteps()) == (
        ["y"], ["y"], True, False, 3, 3, 4,
    )  # fmt: skip
    assert [(key, value is m["y"]) for key, value in m.items()] == [("y", True)]
    assert [value is m["y"] for value in m.values()] == [True]
    with pytest.raises(KeyError, match=r"^TemporalDictTensor: no key 'z', there are \['y'\]$"):
        m["z"]


def test_repr_shows_names_shapes_dtypes_and_the_range_of_lengths(m):
    expected = "TemporalDictTensor(n_elems=3, n_timesteps=4, lengths=1..4, device=cpu, y=(3, 4) int64)"
    assert repr(m) == expected
    assert repr(m.to("meta")) == expected.replace("1..4", "?").replace("cpu", "meta")
    assert repr(TemporalDictTensor()) == "TemporalDictTensor(n_elems=0, n_timesteps=0, lengths=0..0, device=cpu)"


def test_specs_come_without_batch_and_time(m):
    m.set("z", torch.zeros(3, 4, 2, 5))
    expected = {"y": {"size": (), "dtype": torch.int64}, "z": {"size": (2, 5), "dtype": torch.float32}}
    assert m.specs() == m.slice(0, 0).specs() == expected


def test_mask_marks_the_valid_steps(m):  # CV19
    mask = m.mask()
    assert (mask.tolist(), mask.dtype) == ([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], torch.float32)
    assert m.mask(torch.bool).dtype == torch.bool
    assert m.mask(dtype=torch.bool).int().tolist() == mask.tolist()


@pytest.mark.parametrize(("lengths", "full"), [([4, 4, 4], True), ([2, 4, 1], False), ([0, 0, 0], False)], ids=str)
def test_full_says_that_there_is_no_padding(lengths, full):  # CV29
    assert temporal(torch.zeros(3, 4), lengths).full() is full


def test_get_shares_tensors_and_lengths_unless_told_to_clone(m):
    part = m.get(["y"])
    assert (part["y"] is m["y"], part.lengths is m.lengths) == (True, True)
    assert m.get(["y"], clone=True)["y"].data_ptr() != m["y"].data_ptr()
    assert m.get([]).lengths.tolist() == [2, 4, 1]
    with pytest.raises(TypeError, match="string 'y'"):
        m.get("y")
    with pytest.raises(MissingKeyError, match="'z'"):
        m.get(["z"])


# --- equality and copies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "lengths", "equal"),
    [
        ([[1.0, 2, 9], [3, float("nan"), 4]], [2, 3], True),
        ([[1.0, 2, 9], [3, float("nan"), 5]], [2, 3], False),
        ([[1.0, 2, 0], [3, float("nan"), 4]], [3, 3], False),
        ([[1.0, 2, 0, 0], [3, float("nan"), 4, 0]], [2, 3], False),
    ],
    ids=["padding", "value", "lengths", "time"],
)
def test_equality_does_not_count_padding(y, lengths, equal):
    a = temporal([[1.0, 2, float("nan")], [3, float("nan"), 4]], [2, 3])
    assert (a == temporal(y, lengths)) is equal
    assert (a != temporal(y, lengths)) is not equal


def test_it_equals_no_other_class(m):
    assert m != DictTensor({"y": m["y"], "lengths": m.lengths})


@pytest.mark.parametrize(
    "copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, TemporalDictTensor.clone],
    ids=["pickle", "deepcopy", "clone"],
)  # fmt: skip
def test_a_copy_is_equal_and_private(m, copied):
    made = copied(m)
    assert made == m
    made["y"].zero_()
    made.lengths.zero_()
    assert (m["y"][2, 3], m.lengths.tolist()) == (11, [2, 4, 1])


def test_zero_padding_leaves_the_original_and_every_dtype():
    for dtype in (torch.bool, torch.uint8, torch.float32):
        m = temporal(torch.ones(2, 3, 2, dtype=dtype), [1, 3])
        zeroed = m.zero_padding()
        assert (zeroed["y"].dtype, zeroed["y"][0].int().tolist()) == (dtype, [[1, 1], [0, 0], [0, 0]])
        assert (zeroed["y"][1].all(), m["y"].all()) == (True, True)
    full = temporal(torch.ones(2, 3))
    assert full.zero_padding() is full


# --- rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [1, -2, np.int64(1), torch.tensor(1)], ids=["int", "negative", "numpy", "torch"])
def test_one_row_keeps_the_batch_axis(m, index):  # CV31
    row = m.index(index)
    assert (row["y"].tolist(), row.lengths.tolist()) == ([[4, 5, 6, 7]], [4])
    assert m.slice(1) == row
    row["y"].fill_(0)
    assert m["y"][1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("index", [3, -4, [3], None, 1.0, True, [True, False]], ids=str)
def test_index_refuses_what_is_no_row(m, index):
    with pytest.raises(IndexError):
        m.index(index)


@pytest.mark.parametrize(
    ("index", "rows"),
    [([2, 0], [2, 0]), (torch.tensor([False, True, True]), [1, 2]), ([], []), (slice(1, None), [1, 2])],
    ids=["list", "mask", "nothing", "slice"],
)
def test_index_gathers_rows_and_lengths(m, index, rows):
    chosen = m.index(index)
    assert (chosen["y"].tolist(), chosen.lengths.tolist()) == (m["y"][rows].tolist(), [[2, 4, 1][row] for row in rows])
    assert chosen.n_timesteps() == 4


def test_slice_follows_python_and_unfold_gives_one_row_each(m):  # CV31
    assert m.slice(1, 100).lengths.tolist() == [4, 1]
    assert m.slice(2, 1).n_elems() == 0
    assert [(part["y"].shape, part.lengths.tolist()) for part in m.unfold()] == [((1, 4), [n]) for n in (2, 4, 1)]


# --- time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "values", "rows"), [(1, [1, 5], [0, 1]), (3, [7], [1]), (4, [], []), (99, [], [])])
def test_masked_temporal_index_gives_the_valid_rows(m, t, values, rows):  # CV20
    found, index = m.masked_temporal_index(t)
    assert (found["y"].tolist(), index.tolist(), index.dtype) == (values, rows, torch.int64)


def test_masked_temporal_index_refuses_negative_times(m):
    with pytest.raises(IndexError, match=r"^masked_temporal_index: t must not be negative, got -1"):
        m.masked_temporal_index(-1)


def test_temporal_index_gives_all_rows_padding_included(m):  # CV21
    at = m.temporal_index(3)
    assert (type(at), at["y"].tolist(), m.temporal_index(-1)["y"].tolist()) == (DictTensor, [3, 7, 11], [3, 7, 11])
    at["y"].fill_(0)
    assert m["y"][:, 3].tolist() == [0, 0, 0]
    with pytest.raises(IndexError):
        m.temporal_index(4)


@pytest.mark.parametrize(
    ("times", "values"),
    [([0, 3, 1], [0, 7, 9]), ("last", [1, 7, 8]), (2, [2, 6, 10]), ([2], [2, 6, 10])],
    ids=["times", "last valid", "scalar", "one"],
)
def test_temporal_multi_index_gives_each_row_at_its_own_time(m, times, values):  # CV21
    at = m.temporal_multi_index(m.lengths - 1 if times == "last" else torch.tensor(times))
    assert at["y"].tolist() == values


@pytest.mark.parametrize("times", [[0, 1], [[0], [1], [2]], [0, 4, 0]], ids=["size", "axes", "range"])
def test_temporal_multi_index_refuses_other_times(m, times):
    with pytest.raises(IndexError):
        m.temporal_multi_index(torch.tensor(times))


@pytest.mark.parametrize(
    ("bounds", "columns", "lengths"),
    [
        ((1, 3), [1, 2], [1, 2, 0]),  # CV22
        ((2, 4), [2, 3], [0, 2, 0]),  # CV23
        ((0, 9), [0, 1, 2, 3], [2, 4, 1]),  # CV24
        ((3, 3), [], [0, 0, 0]),  # CV25
        ((7, 9), [], [0, 0, 0]),
    ],
    ids=str,
)
def test_temporal_slice_cuts_time_and_lengths(m, bounds, columns, lengths):
    part = m.temporal_slice(*bounds)
    assert (part["y"].tolist(), part.lengths.tolist()) == (m["y"][:, columns].tolist(), lengths)
    assert (part.n_timesteps(), part.lengths.dtype) == (len(columns), torch.int64)
    assert m.lengths.tolist() == [2, 4, 1]
    part["y"].fill_(0)
    assert m["y"][:, columns].sum() == 0


@pytest.mark.parametrize("bounds", [(0, -1), (3, 1), (-2, 4)], ids=str)
def test_temporal_slice_refuses_other_bounds(m, bounds):  # CV25
    with pytest.raises(SpecError, match=f"needs 0 <= from <= to, got {bounds[0]} and {bounds[1]}"):
        m.temporal_slice(*bounds)


@pytest.mark.parametrize(("lengths", "longest"), [([2, 1, 0], 2), ([0, 0, 0], 0), ([4, 1, 0], 4)], ids=str)
def test_shorten_cuts_what_is_padding_in_every_row(lengths, longest):  # CV26
    m = temporal(torch.arange(12).view(3, 4), lengths)
    short = m.shorten()
    assert (short["y"].tolist(), short.lengths.tolist()) == (m["y"][:, :longest].tolist(), lengths)
    assert short.shorten() == short


# --- putting together -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "y", "lengths"),
    [
        (([[1, 2], [3, 0]], [2, 1]), ([[4, 5, 6]], [3]), [[1, 2, 0], [3, 0, 0], [4, 5, 6]], [2, 1, 3]),  # CV27
        (([[True, True]], [2]), ([[True] * 3], [3]), [[True, True, False], [True] * 3], [2, 3]),  # CV27
        (([[1, 2, 9, 9]], [2]), ([[1, 2], [3, 0]], [2, 1]), [[1, 2, 9, 9], [1, 2, 0, 0], [3, 0, 0, 0]], [2, 2, 1]),
    ],
    ids=["int", "bool", "longer than its lengths"],  # the last is CV28
)
def test_cat_pads_shorter_sequences_with_zeros(first, second, y, lengths):
    whole = TemporalDictTensor.cat([temporal(*first), temporal(*second)])
    assert (whole["y"].tolist(), whole.lengths.tolist()) == (y, lengths)
    assert whole["y"].dtype == torch.tensor(first[0]).dtype


def test_cat_of_one_or_of_mixed_dtypes(m):
    alone = TemporalDictTensor.cat([m])
    alone["y"].zero_()
    alone.lengths.zero_()
    assert (m["y"][0, 1], m.lengths.tolist()) == (1, [2, 4, 1])
    for n_timesteps in (1, 2):
        mixed = TemporalDictTensor.cat(iter([temporal([[3]]), temporal(torch.full((1, n_timesteps), 0.5))]))
        assert (mixed["y"].dtype, mixed["y"][:, 0].tolist()) == (torch.float32, [3, 0.5])


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({}, MissingKeyError, r"item 1: key\(s\) \['y'\] are missing"),
        ({"y": ROWS, "z": ROWS}, SpecError, r"item 1: unknown key\(s\) \['z'\]"),
        ({"y": torch.zeros(3, 4, 2)}, SpecError, r"'y' is \(3, 4, 2\).*item 1, expected \(3, 4\)"),
        ({"y": ROWS.to("meta")}, SpecError, "is on meta in item 1, expected cpu"),
    ],
    ids=["missing", "unknown", "shape", "device"],
)
def test_cat_refuses_items_that_do_not_fit(m, other, error, message):
    with pytest.raises(error, match=rf"^TemporalDictTensor\.cat: .*{message}"):
        TemporalDictTensor.cat([m, TemporalDictTensor(other)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float32], ids=str)
def test_expand_appends_rows_of_length_zero_and_keeps_the_dtype(dtype):  # CV30
    m = temporal(torch.ones(3, 4, dtype=dtype), [2, 4, 1])
    grown = m.expand(5)
    assert (grown["y"].dtype, grown["y"].shape, grown.lengths.tolist()) == (dtype, (5, 4), [2, 4, 1, 0, 0])
    assert (grown.slice(0, 3) == m, grown["y"][3:].any().item()) == (True, False)
    assert m.expand(3) == m
    with pytest.raises(SpecError, match=r"^expand: has 3 rows, cannot have 2"):
        m.expand(2)


def test_set_adds_replaces_and_begins(m):
    m.set("z", torch.ones(3, 4, 2))
    m.set("y", torch.ones(3, 4))
    assert (list(m), m["y"].dtype, m.lengths.tolist()) == (["y", "z"], torch.float32, [2, 4, 1])
    empty = TemporalDictTensor()
    empty.set("y", torch.zeros(2, 3))
    assert empty.lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("value", "error"), [(torch.zeros(3, 5), SpecError), (torch.zeros(2, 4), SpecError), ([1], TypeError)],
    ids=["time", "rows", "list"],
)  # fmt: skip
def test_set_refuses_and_changes_nothing(m, value, error):
    with pytest.raises(error, match="'z'"):
        m.set("z", value)
    assert list(m) == ["y"]


# --- copy_ ------------------------------------------------------------------------------------------


def test_copy_writes_each_row_up_to_its_own_length():  # CV32
    source = temporal([[1, 2, 3], [4, 5, 6]], [2, 1])
    target = temporal(torch.zeros(3, 4, dtype=torch.int64))
    y = target["y"]
    target.copy_(source, torch.tensor([1, 0]), torch.tensor([0, 2]))
    assert (y.tolist(), target.lengths.tolist()) == ([[4, 0, 0, 0], [0, 0, 0, 0], [1, 2, 0, 0]], [1, 4, 2])


def test_copy_clears_what_a_longer_row_left():
    target = temporal([[7, 8, 9]])
    target.copy_(temporal([[1]]), [0], [0])
    assert (target["y"].tolist(), target.lengths.tolist()) == ([[1, 0, 0]], [1])


def test_copy_takes_a_source_with_longer_time_if_its_rows_fit():
    target = temporal([[0, 0]])
    target.copy_(temporal([[1, 2, 9, 9], [1, 2, 3, 9]], [2, 3]), [0], [0])
    assert (target["y"].tolist(), target.lengths.tolist()) == ([[1, 2]], [2])


@pytest.mark.parametrize(
    ("source", "rows_from", "rows_to", "error", "message"),
    [
        (temporal([[1] * 5]), [0], [0], SpecError, "a row has 5 steps, there is room for 4"),
        (temporal([[1.0]]), [0], [0], SpecError, r"'y' is \(1, 1\) float32"),
        (temporal([[[1]]]), [0], [0], SpecError, r"'y' is \(1, 1, 1\) int64"),
        (TemporalDictTensor({}, torch.tensor([1])), [0], [0], MissingKeyError, "'y'"),
        (temporal([[1]]), [1], [0], IndexError, "source index is out of range for 1 rows"),
        (temporal([[1]]), [0], [3], IndexError, "destination index is out of range for 3 rows"),
        (temporal([[1]]), [0], [0, 1], SpecError, "1 rows to read and 2 to write"),
    ],
    ids=["time", "dtype", "shape", "key", "source", "destination", "sizes"],
)
def test_copy_refuses_and_changes_nothing(m, source, rows_from, rows_to, error, message):
    before = m.clone()
    with pytest.raises(error, match=message):
        m.copy_(source, rows_from, rows_to)
    assert m == before


# --- devices and memory -----------------------------------------------------------------------------


def test_to_shares_what_is_there_already_and_moves_lengths_too(m):
    for device in ("cpu", torch.device("cpu")):
        same = m.to(device, non_blocking=True)
        assert (same is m, same["y"] is m["y"], same.lengths is m.lengths) == (False, True, True)
    moved = m.to("meta")
    assert (moved.device().type, moved["y"].device.type) == ("meta", "meta")


def test_share_memory_includes_the_lengths(m):
    assert m.share_memory_() is m
    assert (m["y"].is_shared(), m.lengths.is_shared()) == (True, True)


# --- against models ---------------------------------------------------------------------------------


@quick
@given(schemas, st.lists(lengths_and_time(), max_size=3))
def test_slices_of_cat_are_its_parts(schema, sizes):
    parts = [make_temporal(schema, *size, start=100 * part) for part, size in enumerate(sizes)]
    whole, row = TemporalDictTensor.cat(parts), 0
    assert whole.lengths.tolist() == [length for lengths, _ in sizes for length in lengths]
    assert whole.n_timesteps() == max((part.n_timesteps() for part in parts), default=0)
    for part in parts:
        rows = whole.slice(row, row + part.n_elems())
        assert rows.temporal_slice(0, part.n_timesteps()) == part
        assert all(not tensor[:, part.n_timesteps() :].any() for tensor in rows.values())
        row += part.n_elems()


def test_arguments_have_the_names_of_rlstructures():
    m = TemporalDictTensor(from_dict={"y": torch.arange(12).view(3, 4)}, lengths=torch.tensor([2, 4, 1]))
    assert m.temporal_slice(index_from=1, index_to=3).lengths.tolist() == [1, 2, 0]
    assert m.temporal_index(index_t=1)["y"].tolist() == [1, 5, 9]
    assert m.temporal_multi_index(index_t=m.lengths - 1)["y"].tolist() == [1, 7, 8]
    assert m.masked_temporal_index(index_t=1)[1].tolist() == [0, 1]
    m.copy_(source=m.clone(), source_indexes=torch.tensor([1]), destination_indexes=torch.tensor([0]))
    assert m.expand(new_batch_size=4).lengths.tolist() == [4, 4, 1, 0]
    assert TemporalDictTensor.cat(tensors=[m, m]).n_elems() == 6
    assert Trajectories.cat(trajectories=[Trajectories(DictTensor(), m)]).n_elems() == 3


@quick
@given(temporals, st.integers(0, 6), st.integers(0, 6))
def test_temporal_slice_agrees_with_lists(m, time_from, time_to):
    time_from, time_to = sorted((time_from, time_to))
    part = m.temporal_slice(time_from, time_to)
    assert part.lengths.tolist() == [len(range(length)[time_from:time_to]) for length in m.lengths.tolist()]
    assert steps(part) == {key: [row[time_from:time_to] for row in rows] for key, rows in steps(m).items()}


@quick
@given(temporals, st.data())
def test_rows_agree_with_lists(m, data):
    n_elems = m.n_elems()
    picks = data.draw(st.lists(st.integers(-n_elems, n_elems - 1), max_size=6) if n_elems else st.just([]))
    assert steps(m.index(picks)) == {key: [rows[i] for i in picks] for key, rows in steps(m).items()}
    for view in (m.shorten(), m.zero_padding(), m.clone(), m.expand(n_elems + 2).slice(0, n_elems)):
        assert (steps(view), view.lengths.tolist()) == (steps(m), m.lengths.tolist())
    assert m.mask().sum(1).tolist() == m.lengths.tolist()
    assert [steps(row) for row in m.unfold()] == [
        {key: [rows[i]] for key, rows in steps(m).items()} for i in range(n_elems)
    ]
    for t in range(m.n_timesteps() + 1):
        found, rows = m.masked_temporal_index(t)
        assert rows.tolist() == [row for row in range(n_elems) if m.lengths[row] > t]
        assert {key: tensor.tolist() for key, tensor in found.items()} == {
            key: [row[t] for row in rows if len(row) > t] for key, rows in steps(m).items()
        }


@quick
@given(schemas, lengths_and_time(), lengths_and_time(), st.data())
def test_copy_agrees_with_lists(schema, from_sizes, to_sizes, data):
    source, target = make_temporal(schema, *from_sizes, start=100), make_temporal(schema, *to_sizes)
    fitting = [row for row, n in enumerate(from_sizes[0]) if n <= target.n_timesteps() or not schema]
    n_rows = data.draw(st.integers(0, target.n_elems())) if fitting else 0
    rows_to = data.draw(st.permutations(range(target.n_elems())))[:n_rows]
    rows_from = [data.draw(st.sampled_from(fitting)) for _ in rows_to]
    model, new, lengths = steps(target), steps(source), target.lengths.tolist()
    for i, j in zip(rows_from, rows_to, strict=True):
        lengths[j] = from_sizes[0][i]
        for key in model:
            model[key][j] = new[key][i]
    target.copy_(source, rows_from, rows_to)
    assert (steps(target), target.lengths.tolist()) == (model, lengths)
    for row in rows_to:
        assert all(not tensor[row, lengths[row] :].any() for tensor in target.values())


@pytest.mark.parametrize("times", [1, [1], torch.tensor(1), torch.tensor([1, 1], dtype=torch.uint8)], ids=str)
def test_one_time_may_come_as_any_integer(times):
    m = TemporalDictTensor({"x": torch.arange(6).view(2, 3)}, torch.tensor([3, 3]))
    assert m.temporal_multi_index(times)["x"].tolist() == [1, 4]


@pytest.mark.parametrize("times", [torch.tensor([True, False]), 1.0], ids=["mask", "float"])
def test_times_that_are_no_integers_are_refused(times):
    m = TemporalDictTensor({"x": torch.arange(6).view(2, 3)}, torch.tensor([3, 3]))
    with pytest.raises(IndexError, match="^temporal_multi_index: times must be integers"):
        m.temporal_multi_index(times)


def test_a_structure_of_lengths_alone_can_be_shown_on_meta():
    assert "n_elems=2" in repr(TemporalDictTensor({}, torch.tensor([1, 2])).to("meta"))


@pytest.mark.parametrize("method", ["shorten", "zero_padding"])
def test_lengths_of_what_was_made_of_another_are_its_own(method):
    m = TemporalDictTensor({"y": torch.tensor([[1, 2, 9, 9]])}, torch.tensor([2]))
    getattr(m, method)().lengths.fill_(1)
    assert m.lengths.tolist() == [2]


def numbered():
    """Three rows with the numbers of their first steps, of which one is not known."""
    return TemporalDictTensor({"x": torch.arange(12).view(3, 4)}, torch.tensor([4, 0, 2]), torch.tensor([100, 200, -1]))


@pytest.mark.parametrize(("change", "expected"), [
    (lambda t: t.clone(), [100, 200, -1]), (lambda t: t.to("cpu"), [100, 200, -1]),
    (lambda t: t.index(1), [200]), (lambda t: t.index([2, 0]), [-1, 100]), (lambda t: t.slice(0, 2), [100, 200]),
    (lambda t: t.index(torch.tensor([True, False, True])), [100, -1]), (lambda t: t.unfold()[1], [200]),
    (lambda t: t.temporal_slice(1, 3), [101, 201, -1]), (lambda t: t.shorten(), [100, 200, -1]),
    (lambda t: t.zero_padding(), [100, 200, -1]), (lambda t: t.get(["x"]), [100, 200, -1]),
    (lambda t: t.get(["x"], clone=True), [100, 200, -1]), (lambda t: t.set("y", t["x"]), [100, 200, -1]),
    (lambda t: t.expand(4), [100, 200, -1, -1]), (lambda t: pickle.loads(pickle.dumps(t)), [100, 200, -1]),
    (lambda t: TemporalDictTensor.cat([t, t.index(0)]), [100, 200, -1, 100]),
    (lambda t: TemporalDictTensor.cat([t.index(0), TemporalDictTensor({"x": t["x"]})]), [100, -1, -1, -1]),
    (lambda t: copy.deepcopy(t), [100, 200, -1]), (lambda t: t.share_memory_(), [100, 200, -1]),
])  # fmt: skip
def test_first_steps_stay_those_of_their_rows(change, expected):
    assert change(numbered()).first_steps.tolist() == expected


@pytest.mark.parametrize("ending", ["npz", "pt", "h5"])
def test_files_hold_first_steps(ending, tmp_path):
    numbered().save(tmp_path / f"a.{ending}")
    assert TemporalDictTensor.load(tmp_path / f"a.{ending}").first_steps.tolist() == [100, 200, -1]


def test_copy_takes_first_steps_along_and_forgets_them_where_there_are_none():
    source, plain = numbered(), TemporalDictTensor({"x": torch.zeros(3, 4, dtype=torch.int64)})
    target = plain.clone()
    target.copy_(source, [0, 1], [2, 0])
    assert target.first_steps.tolist() == [200, -1, 100]
    source.copy_(plain, [0], [0])
    assert source.first_steps.tolist() == [-1, 200, -1]
    one = numbered()
    one.shorten().copy_(plain, [0], [0])
    assert one.first_steps.tolist() == [100, 200, -1]


def test_first_steps_are_neither_compared_nor_given_to_other_libraries():
    one, other = numbered(), TemporalDictTensor(dict(numbered().items()), numbered().lengths)
    assert one == other and list(one) == ["x"] and repr(one) == repr(other)
    assert one.numpy().keys() == one.jax().keys() == {"x", "lengths"}
    assert TemporalDictTensor.from_numpy(one.numpy()).first_steps is None
    assert other.first_steps is None and other.index(0).first_steps is None


@pytest.mark.parametrize(("first_steps", "message"), [
    (torch.zeros(2, dtype=torch.int64), r"first_steps is \(2,\) int64 on cpu, expected \(3,\) int64 on cpu"),
    (torch.zeros(3), r"first_steps must be int64 \(B,\), got \(3,\) float32"),
    ([1, 2, 3], r"first_steps must be int64 \(B,\), got list"),
])  # fmt: skip
def test_first_steps_that_do_not_fit_are_refused(first_steps, message):
    with pytest.raises(SpecError, match=message):
        TemporalDictTensor({"x": torch.zeros(3, 4)}, None, first_steps)
