"""`DictTensor` and the masked functions: conformance vectors CV1-CV18 and what lies around them."""

from __future__ import annotations

import copy
import enum
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import dict_tensors, make_dict_tensor, schemas

from rlstructs import DictTensor, MissingKeyError, SpecError, TemporalDictTensor, masked_dicttensor, masked_tensor
from rlstructs.frameworks.torch import as_device

NAN, INF = float("nan"), float("inf")
quick = settings(deadline=None, max_examples=60)


@pytest.fixture
def d():
    """The example of the conformance vectors: three rows of x (2,) and y ()."""
    return DictTensor({"x": torch.arange(6.0).view(3, 2), "y": torch.arange(3)})


def same_tensor(a, b):
    """Same dtype, shape and values, NaN equal to NaN."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# --- masked_tensor, masked_dicttensor: CV1-CV6 ----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.uint8])
def test_masked_tensor_selects_rows_of_the_second_where_the_mask_is_one(dtype):  # CV1
    chosen = masked_tensor(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]), torch.tensor([0, 1, 0]).to(dtype))
    same_tensor(chosen, torch.tensor([1, 20, 3]))


@pytest.mark.parametrize("cell", [(3,), (3, 4), (1, 3), (2, 1, 2), ()], ids=str)  # CV2, CV3
def test_masked_tensor_keeps_the_shape_whatever_the_rank(cell):
    chosen = masked_tensor(torch.zeros(2, *cell), torch.ones(2, *cell), torch.tensor([0, 1]))
    same_tensor(chosen, torch.stack([torch.zeros(cell), torch.ones(cell)]))


@pytest.mark.parametrize(
    ("t0", "t1", "mask", "expected"),
    [
        ([1.0, 2.0], [NAN, 5.0], [0, 1], [1.0, 5.0]),  # CV4
        ([INF, NAN], [1.0, 2.0], [1, 0], [1.0, NAN]),
        ([2**40 + 1], [0], [0], [2**40 + 1]),  # CV4
        ([True, False], [False, True], [0, 1], [True, True]),
    ],
    ids=["nan", "inf", "int64", "bool"],
)
def test_masked_tensor_is_exact(t0, t1, mask, expected):
    same_tensor(masked_tensor(torch.tensor(t0), torch.tensor(t1), torch.tensor(mask)), torch.tensor(expected))


def test_masked_tensor_takes_no_rows():  # CV5
    empty = masked_tensor(torch.zeros(0, 3), torch.ones(0, 3), torch.zeros(0))
    assert empty.shape == (0, 3)


def test_a_mask_between_0_and_1_blends_by_the_formula_of_rlstructures():
    t0, t1 = torch.tensor([[0.0, 8], [1, 2], [NAN, 3]]), torch.tensor([[4.0, 0], [NAN, 5], [6, 7]])
    t0.requires_grad_(), t1.requires_grad_()
    blended = masked_tensor(t0, t1, torch.tensor([0.25, 0.0, 1.0]))
    assert blended.tolist() == [[1, 6], [1, 2], [6, 7]]  # rows that are not blended are exact, beside NaN too
    blended[0].sum().backward()
    assert t0.grad[0].tolist() == [0.75, 0.75] and t1.grad[0].tolist() == [0.25, 0.25]
    assert masked_tensor(torch.tensor([0, 2**40 + 1]), torch.tensor([5, 7]), torch.tensor([0.5, 0])).tolist() == [
        2, 2**40 + 1
    ]  # fmt: skip
    blended = masked_dicttensor(DictTensor({"x": t0.detach()}), DictTensor({"x": t1.detach()}), torch.full((3,), 0.5))
    assert blended["x"][0].tolist() == [2, 4]


def test_masked_tensor_is_a_new_tensor_through_which_gradients_reach_both():
    t0, t1 = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    chosen = masked_tensor(t0, t1, torch.tensor([False, False]))
    assert chosen.data_ptr() not in (t0.data_ptr(), t1.data_ptr())
    masked_tensor(t0, t1, torch.tensor([True, False])).sum().backward()
    assert (t0.grad.tolist(), t1.grad.tolist()) == ([0, 1], [1, 0])


@pytest.mark.parametrize(
    ("t0", "t1", "mask", "message"),
    [
        (torch.zeros(3), torch.ones(3), torch.tensor([0, 1]), r"mask is \(2,\) int64.*\(3,\) float32"),  # CV5
        (torch.zeros(3), torch.ones(3), torch.tensor([1]), r"mask is \(1,\)"),
        (torch.zeros(2), torch.ones(2), torch.tensor([[0, 1]]), r"mask is \(1, 2\)"),
        (torch.zeros(()), torch.ones(()), torch.tensor([1]), "one value per row"),
        (torch.zeros(2), torch.ones(2), torch.tensor([-0.25, 1]), "numbers from 0 to 1$"),
        (torch.zeros(2), torch.ones(2), torch.tensor([2, 1]), "numbers from 0 to 1$"),
        (torch.zeros(2), torch.ones(2), torch.tensor([NAN, 1]), "numbers from 0 to 1$"),
        (torch.zeros(2), torch.ones(2, 1), torch.tensor([0, 1]), r"tensor1 is \(2, 1\) float32, expected \(2,\)"),
        (torch.zeros(2), torch.ones(2).long(), torch.tensor([0, 1]), r"int64, expected \(2,\) float32"),
    ],
    ids=["size", "broadcast", "rank", "no axis", "below 0", "above 1", "nan", "shape", "dtype"],
)
def test_masked_tensor_refuses(t0, t1, mask, message):
    with pytest.raises(SpecError, match=rf"^masked_tensor: .*{message}"):
        masked_tensor(t0, t1, mask)


def test_masked_dicttensor_masks_every_key_and_takes_two_empty_ones(d):  # CV6
    chosen = masked_dicttensor(d, DictTensor({"y": -d["y"] - 1, "x": d["x"] * 10}), torch.tensor([0, 1, 1]))
    assert chosen == DictTensor({"x": torch.tensor([[0.0, 1], [20, 30], [40, 50]]), "y": torch.tensor([0, -2, -3])})
    assert masked_dicttensor(DictTensor(), DictTensor(), torch.tensor([0, 1])).empty()


def test_masked_dicttensor_needs_the_same_keys(d):  # CV6
    with pytest.raises(MissingKeyError, match="'y'"):
        masked_dicttensor(d, d.get(["x"]), torch.zeros(3))
    with pytest.raises(KeyError):
        masked_dicttensor(d, DictTensor(), torch.zeros(3))
    with pytest.raises(SpecError, match=r"unknown key\(s\) \['x', 'y'\]"):
        masked_dicttensor(DictTensor(), d, torch.zeros(3))


# --- construction -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"x": torch.zeros(3), "y": torch.zeros(2)}, SpecError, r"'y' has batch size 2, expected 3 \(from 'x'\)"),
        ({"x": torch.zeros(3), "l": torch.tensor(1), "y": torch.zeros(0, 3)}, SpecError, "'y' has batch size 0"),
        ({"x": torch.zeros(3), "y": torch.zeros(3, device="meta")}, SpecError, r"'y' is on meta, expected cpu"),
        ({"x": np.zeros(3)}, TypeError, "'x' must be a torch.Tensor, got ndarray"),
        ({"x": {"y": 1}}, TypeError, "'y' must be a torch.Tensor, got int"),
        ({1: torch.zeros(3)}, TypeError, "a key must be a string, got 1"),
        ({1: {"x": torch.zeros(3)}}, TypeError, "a key must be a string, got 1"),
        ({"a": {"b": torch.zeros(3)}, "a/b": torch.zeros(3)}, SpecError, "'a/b' is given twice"),
        ([torch.zeros(3)], TypeError, "needs a mapping .* got list"),
        (torch.zeros(3), TypeError, "needs a mapping .* got Tensor"),
    ],
    ids=["rows", "no rows", "device", "array", "nested value", "key", "nested key", "twice", "list", "tensor"],
)
def test_construction_names_what_is_wrong(tensors, error, message):  # CV17
    with pytest.raises(error, match=f"^DictTensor: .*{message}"):
        DictTensor(tensors)


@pytest.mark.parametrize("made", [DictTensor, lambda tensors: TemporalDictTensor(tensors, torch.tensor([2, 1]))])
def test_keys_may_be_strings_of_any_class(made):
    class Name(str, enum.Enum):
        X = "x"

    two = made({np.str_("a"): torch.zeros(2, 3), Name.X: {Name.X: torch.ones(2, 3)}})
    assert list(two.keys()) == ["a", "x/x"] and {type(key) for key in two} == {str}
    assert two["a"].shape == (2, 3) and two[Name.X + "/x"].all()


def test_no_key_is_lost_for_being_empty():
    two = DictTensor({"": torch.zeros(2), "frame": torch.ones(2), "a": {"": torch.zeros(2)}})
    assert list(two.keys()) == ["", "frame", "a/"]
    with pytest.raises(SpecError, match=r"^DictTensor: key '/a' is given twice$"):
        DictTensor({"": {"a": torch.zeros(2)}, "/a": torch.zeros(2)})


def test_losses_without_axes_are_legal():  # CV17
    losses = DictTensor({"loss": torch.tensor(0.5), "entropy": torch.tensor(2.0)})
    assert (losses.n_elems(), losses["loss"].item(), losses.specs()["loss"]["size"]) == (0, 0.5, ())
    assert losses.clone() == losses
    beside = DictTensor({"loss": torch.tensor(0.5), "x": torch.zeros(3)})
    assert beside.n_elems() == 3


def test_the_mapping_is_copied_but_not_the_tensors():
    x = torch.zeros(3)
    mapping = {"x": x}
    d = DictTensor(mapping)
    mapping["y"] = torch.zeros(3)
    assert list(d.keys()) == ["x"]
    assert d["x"] is x


def test_nested_mappings_give_keys_joined_with_slashes():
    leaf = torch.zeros(2)
    d = DictTensor({"a": {"b": leaf, "c": {"d": leaf}}, "e": DictTensor({"f": leaf}), "none": {}})
    assert list(d) == ["a/b", "a/c/d", "e/f"]
    assert DictTensor(d) == d


def test_a_nested_temporal_one_keeps_its_lengths():
    m = TemporalDictTensor({"y": torch.zeros(2, 3)}, torch.tensor([1, 3]))
    assert DictTensor({"m": m})["m/lengths"].tolist() == [1, 3]


def test_an_empty_one_has_no_rows_and_no_device_and_zero_rows_are_not_empty():  # CV18
    empty = DictTensor({})
    assert (empty.n_elems(), len(empty), empty.device(), empty.empty(), list(empty)) == (0, 0, None, True, [])
    assert empty == DictTensor() == DictTensor(None)
    assert not DictTensor({"x": torch.zeros(0, 3)}).empty()
    for made in (empty.clone(), empty.to("cpu"), empty.index([5]), empty.slice(0, 2), empty.prepend_key("a")):
        assert made == empty
    assert empty.unfold() == []


# --- reading ----------------------------------------------------------------------------------------


def test_it_reads_as_a_mapping(d):
    assert (list(d.keys()), list(d), "x" in d, "z" in d, len(d), d.n_elems()) == (["x", "y"],) * 2 + (True, False, 3, 3)
    assert [value is d[key] for key, value in d.items()] == [True, True]
    assert [value is d[key] for key, value in zip(d, d.values(), strict=True)] == [True, True]
    assert dict(d)["x"] is d["x"]


def test_a_missing_key_is_named_beside_those_present(d):
    with pytest.raises(KeyError, match=r"^DictTensor: no key 0, there are .*; rows are taken by .index\(0\)$"):
        d[0]
    with pytest.raises(KeyError, match=r"; rows are taken by .index\(\[0, 1\]\)$"):
        d[[0, 1]]
    with pytest.raises(KeyError, match=r"^DictTensor: no key 'z', there are \['x', 'y'\]$"):
        d["z"]


def test_repr_shows_names_shapes_and_dtypes_only(d):
    assert repr(d) == "DictTensor(n_elems=3, device=cpu, x=(3, 2) float32, y=(3,) int64)"
    assert repr(DictTensor()) == "DictTensor(n_elems=0, device=None)"
    assert len(repr(DictTensor({"x": torch.zeros(1000, 1000)}))) < 100


def test_specs_come_without_the_batch_axis_and_without_rows(d):  # CV15
    expected = {"x": {"size": (2,), "dtype": torch.float32}, "y": {"size": (), "dtype": torch.int64}}
    assert d.specs() == d.slice(0, 0).specs() == expected


def test_get_shares_tensors_unless_told_to_clone(d):
    assert list(d.get(["y", "x"])) == ["y", "x"]
    assert d.get(["x"])["x"] is d["x"]
    assert d.get(["x"], clone=True)["x"].data_ptr() != d["x"].data_ptr()
    with pytest.raises(MissingKeyError, match="'z'"):
        d.get(["x", "z"])
    with pytest.raises(TypeError, match="got the string 'x'"):
        d.get("x")


def test_clone_copies_and_keeps_the_autograd_link():
    x = torch.ones(2, requires_grad=True)
    cloned = DictTensor({"x": x}).clone()
    cloned["x"].sum().backward()
    assert (x.grad.tolist(), cloned["x"].data_ptr() == x.data_ptr()) == ([1, 1], False)


# --- equality ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ({"y": torch.tensor([1]), "x": torch.tensor([[1.0, NAN]])}, True),
        ({"x": torch.tensor([[1.0, NAN]])}, False),
        ({"x": torch.tensor([[1.0, NAN]]), "z": torch.tensor([1])}, False),
        ({"x": torch.tensor([[1.0, 0.0]]), "y": torch.tensor([1])}, False),
        ({"x": torch.tensor([[1.0, NAN]]).double(), "y": torch.tensor([1])}, False),
        ({"x": torch.tensor([[[1.0, NAN]]]), "y": torch.tensor([1])}, False),
        ({"x": torch.tensor([[1.0, NAN]]), "y": torch.tensor([2])}, False),
    ],
    ids=["other order", "key missing", "other key", "nan", "dtype", "shape", "value"],
)
def test_equality_is_of_content(other, equal):
    d = DictTensor({"x": torch.tensor([[1.0, NAN]]), "y": torch.tensor([1])})
    assert (d == DictTensor(other)) is equal
    assert (d != DictTensor(other)) is not equal


def test_it_equals_no_other_class_and_has_no_hash(d):
    assert d != {"x": d["x"], "y": d["y"]}
    assert DictTensor() != TemporalDictTensor()
    with pytest.raises(TypeError, match="unhashable"):
        hash(d)


@pytest.mark.parametrize("copied", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copy_is_equal_and_private(d, copied):
    made = copied(d)
    assert made == d
    made["x"].zero_()
    assert d["x"][2, 1] == 5


# --- rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "rows"),
    [((0, 2), [0, 1]), ((1, 100), [1, 2]), ((2, 1), []), ((-2, 3), [1, 2]), ((0, 0), [])],
    ids=str,
)
def test_slice_follows_python(d, bounds, rows):  # CV7
    part = d.slice(*bounds)
    assert (part["y"].tolist(), part["x"].shape) == (rows, (len(rows), 2))


def test_slices_and_unfolded_rows_are_views(d):  # CV7, CV10
    for part in (d.slice(0, 2), d.index(slice(0, 2)), d.unfold()[0], d.slice(0)):
        part["y"].fill_(7)
        assert d["y"][0] == 7
        d["y"][0] = 0


def test_a_single_row_loses_the_batch_axis(d):  # CV8
    for row in (d.slice(1), d.index(1), d.index(-2), d.index(np.int64(1)), d.index(torch.tensor(1))):
        assert (row["x"].tolist(), row["x"].shape, row["y"].item(), row["y"].ndim) == ([2, 3], (2,), 1, 0)
    for row in (5, -4):
        with pytest.raises(IndexError):
            d.slice(row)


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ([2, 0], [2, 0]),
        (torch.tensor([-1, 0, 0]), [2, 0, 0]),
        (torch.tensor([2], dtype=torch.int32), [2]),
        (torch.tensor([True, False, True]), [0, 2]),
        ([True, False, True], [0, 2]),
        (np.array([2, 0], dtype=np.uint8), [2, 0]),
        (np.array([False, True, False]), [1]),
        (range(1, 3), [1, 2]),
        ((2, 1), [2, 1]),
        (slice(None, None, 2), [0, 2]),
        (torch.tensor([], dtype=torch.long), []),
        ([], []),
    ],
    ids=lambda value: str(value).replace("\n", ""),
)
def test_index_gathers_rows(d, index, rows):  # CV9
    chosen = d.index(index)
    assert (chosen["y"].tolist(), chosen["x"].tolist()) == (rows, [[2.0 * row, 2 * row + 1] for row in rows])
    assert chosen["x"].shape == (len(rows), 2)


@pytest.mark.parametrize(
    "index",
    [
        [3], [-4], [True, False], 1.0, [1.0], torch.tensor([]), np.zeros(0), torch.tensor([1, 0, 1], dtype=torch.uint8),
        None, True, torch.tensor(True), ..., "x", [[0], [1]], torch.zeros(1, 1, dtype=torch.long),
    ],
    ids=lambda value: str(value).replace("\n", ""),
)  # fmt: skip
def test_index_refuses_what_is_no_index(d, index):
    with pytest.raises(IndexError):
        d.index(index)


def test_gathered_rows_are_a_copy(d):
    d.index([0, 1, 2])["y"].fill_(7)
    assert d["y"].tolist() == [0, 1, 2]


def test_unfold_gives_one_row_each(d):  # CV10
    rows = d.unfold()
    assert [row["y"].tolist() for row in rows] == [[0], [1], [2]]
    assert rows[1]["x"].tolist() == [[2, 3]]


# --- putting together -------------------------------------------------------------------------------


def test_cat_puts_rows_one_after_another_in_private_memory(d):  # CV11
    twice = DictTensor.cat([d, d])
    assert (twice.n_elems(), twice["y"].tolist()) == (6, [0, 1, 2, 0, 1, 2])
    assert DictTensor.cat(part for part in (d, d)) == twice
    assert DictTensor.cat([]).empty()
    alone = DictTensor.cat([d])
    assert (alone == d, alone["x"].data_ptr() == d["x"].data_ptr()) == (True, False)


def test_cat_promotes_dtypes():
    parts = [DictTensor({"x": torch.ones(1)}), DictTensor({"x": torch.ones(1, dtype=torch.int64)})]
    assert DictTensor.cat(parts)["x"].dtype == torch.float32


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        ({}, {"x": torch.zeros(1)}, SpecError, r"item 1: unknown key\(s\) \['x'\]"),  # CV11
        ({"x": torch.zeros(1)}, {"x": torch.zeros(1), "y": torch.zeros(1)}, SpecError, r"unknown key\(s\) \['y'\]"),
        ({"x": torch.zeros(1)}, {}, MissingKeyError, r"item 1: key\(s\) \['x'\] are missing"),
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}, SpecError, r"'x' is \(1, 3\).*item 1, expected \(1, 2\)"),
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(0)}, SpecError, r"'x' is \(0,\)"),
        ({"x": torch.tensor(1)}, {"x": torch.tensor(1)}, SpecError, "'x' has no axis"),
        ({"x": torch.zeros(1)}, {"x": torch.zeros(1, device="meta")}, SpecError, "'x' is on meta in item 1"),
    ],
    ids=["first empty", "more keys", "fewer keys", "shape", "rank", "no axis", "device"],
)
def test_cat_refuses_items_that_do_not_fit(first, second, error, message):
    with pytest.raises(error, match=rf"^DictTensor\.cat: .*{message}"):
        DictTensor.cat([DictTensor(first), DictTensor(second)])


def test_cat_takes_structures_only(d):
    with pytest.raises(TypeError, match=r"^DictTensor\.cat: item 1 is a dict, not a DictTensor$"):
        DictTensor.cat([d, dict(d)])
    with pytest.raises(TypeError, match="item 0 is a str"):
        DictTensor.cat(d)


def test_tensors_are_removed_in_place():  # as of rlstructures in March 2021
    d = DictTensor({"a/x": torch.zeros(2), "a/y": torch.ones(2), "b": torch.arange(2)})
    other = DictTensor(d)
    d.unset("b")
    assert list(d) == ["a/x", "a/y"] and list(other) == ["a/x", "a/y", "b"]
    with pytest.raises(MissingKeyError, match="^DictTensor: no key 'b', there are"):
        d.unset("b")
    other.unset_key("a/")
    other.unset_key("c")
    assert list(other) == ["b"]
    d.unset_key("")
    assert d.empty() and d.n_elems() == 0


def test_arguments_have_the_names_of_rlstructures():
    d = DictTensor({"x": torch.zeros(3)})
    d.copy_(source=DictTensor({"x": torch.ones(3)}), source_indexes=[0], destination_indexes=[2])
    assert d["x"].tolist() == [0, 0, 1]
    assert DictTensor.cat(tensors=[d, d]).n_elems() == 6
    assert d.slice(index_from=0, index_to=2).n_elems() == d.get(keys=["x"], clone=True).slice(0, 2).n_elems() == 2


def test_truncate_key_takes_only_names_that_start_with_the_prefix():  # CV12
    x, y = torch.zeros(1), torch.ones(1)
    both = DictTensor({"a/x": x, "b/y": y})
    assert (list(both.truncate_key("a/")), both.truncate_key("a/")["x"] is x) == (["x"], True)
    two = DictTensor({"observation/x": x, "_observation/x": y})
    assert two.truncate_key("observation/")["x"] is x
    assert len(two.truncate_key("observation/").keys()) == 1
    assert two.truncate_key("none/").empty()
    assert list(both.truncate_key("a/").prepend_key("a/")) == ["a/x"]


def test_plus_shares_the_tensors_of_both(d):  # CV13
    x, y = d.get(["x"]), d.get(["y"])
    for left, right in ((x, y), (DictTensor(), d), (d, DictTensor())):
        both = left + right
        assert both == d
        assert both["x"] is d["x"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": torch.zeros(3)}, r"\['x'\] are on both sides"),  # CV13
        ({"z": torch.zeros(2)}, "'z' has batch size 2, expected 3"),
        ({"z": torch.zeros(3, device="meta")}, "'z' is on meta"),
    ],
    ids=["key", "rows", "device"],
)
def test_plus_refuses_what_does_not_fit(d, other, message):
    with pytest.raises(SpecError, match=message):
        d + DictTensor(other)
    with pytest.raises(TypeError):
        d + other


def test_set_adds_or_replaces_in_place(d):  # CV16
    d.set("z", torch.ones(3))
    d.set("y", torch.zeros(3))
    d.set("nested", {"a": torch.zeros(3)})
    assert (list(d), d["y"].dtype) == (["x", "y", "z", "nested/a"], torch.float32)
    empty = DictTensor({})
    empty.set("x", torch.zeros(2))
    assert empty.n_elems() == 2


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.zeros(2), SpecError, "'z' has batch size 2, expected 3"),  # CV16
        (torch.zeros(3, device="meta"), SpecError, "'z' is on meta"),
        ([1, 2, 3], TypeError, "'z' must be a torch.Tensor, got list"),
    ],
    ids=["rows", "device", "list"],
)
def test_set_refuses_and_changes_nothing(d, value, error, message):
    with pytest.raises(error, match=message):
        d.set("z", value)
    assert list(d) == ["x", "y"]


# --- copy_ ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.tensor, list, np.array], ids=["tensor", "list", "array"])
def test_copy_writes_rows_in_place(index):  # CV14
    target = DictTensor({"x": torch.zeros(3, 2)})
    x = target["x"]
    target.copy_(DictTensor({"x": torch.full((4, 2), 5.0), "other": torch.zeros(4)}), index([3, 0]), index([0, 2]))
    assert (x.tolist(), target["x"] is x) == ([[5, 5], [0, 0], [5, 5]], True)


@pytest.mark.parametrize(
    ("source", "source_index", "destination_index", "error", "message"),
    [
        ({"x": torch.ones(3, 2)}, [0], [0], MissingKeyError, "'y'"),
        ({"x": torch.ones(3, 2), "y": torch.ones(3)}, [0], [0], SpecError, r"'y' is \(3,\) float32.*\(3,\) int64"),
        ({"x": torch.ones(3, 1), "y": torch.ones(3).long()}, [0], [0], SpecError, r"'x' is \(3, 1\)"),
        ({"x": torch.ones(3, 2), "y": torch.tensor(1)}, [0], [0], SpecError, r"'y' is \(\)"),
        (None, [0, 1], [0], SpecError, "2 rows to read and 1 to write"),
        (None, [3], [0], IndexError, "source index is out of range for 3 rows"),
        (None, [0], [-4], IndexError, "destination index is out of range for 3 rows"),
        (None, 0, 0, IndexError, "source index must be int64"),
        (None, [0], [True, False, False], IndexError, "destination index must be int64"),
    ],
    ids=["key", "dtype", "shape", "no axis", "sizes", "source", "destination", "int", "mask"],
)
def test_copy_refuses_and_changes_nothing(d, source, source_index, destination_index, error, message):
    before = d.clone()
    source = before if source is None else DictTensor(source)
    with pytest.raises(error, match=message):
        d.copy_(source, source_index, destination_index)
    assert d == before


# --- devices and memory -----------------------------------------------------------------------------


def test_to_shares_what_is_there_already(d):
    for device in ("cpu", torch.device("cpu")):
        same = d.to(device, non_blocking=True)
        assert (same is d, same["x"] is d["x"]) == (False, True)


def test_to_moves_every_tensor(d):
    moved = d.to("meta")
    assert (moved.device(), [t.device.type for t in moved.values()]) == (torch.device("meta"), ["meta"] * 2)
    assert d.device() == torch.device("cpu")
    assert repr(moved) == "DictTensor(n_elems=3, device=meta, x=(3, 2) float32, y=(3,) int64)"


def test_as_device_takes_names_and_devices():
    assert as_device("cpu") == as_device(torch.device("cpu")) == torch.device("cpu")
    assert as_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(TypeError, match=r"^a device must be a torch.device or its name, got torch.float64$"):
        DictTensor({"x": torch.zeros(2)}).to(torch.float64)


def test_pin_memory_pins_or_says_that_there_is_no_accelerator(d):
    if torch.cuda.is_available():
        assert all(tensor.is_pinned() for tensor in d.pin_memory().values())
    else:
        with pytest.raises(RuntimeError, match="accelerator|NVIDIA driver"):
            d.pin_memory()


def test_share_memory_moves_in_place(d):
    x = d["x"]
    assert d.share_memory_() is d
    assert (d["x"] is x, all(t.is_shared() for t in d.values())) == (True, True)


# --- against models ---------------------------------------------------------------------------------


def rows_of(d):
    """A model: the rows as a list of dicts of plain values."""
    return [{key: tensor[row].tolist() for key, tensor in d.items()} for row in range(d.n_elems())]


@quick
@given(schemas, st.lists(st.integers(0, 4), max_size=4))
def test_slices_of_cat_are_its_parts(schema, sizes):
    parts = [make_dict_tensor(schema, n_elems, start=100 * part) for part, n_elems in enumerate(sizes)]
    whole, row = DictTensor.cat(parts), 0
    assert whole.n_elems() == (sum(sizes) if schema else 0)
    for part in parts:
        assert whole.slice(row, row + part.n_elems()) == part
        row += part.n_elems()


@quick
@given(dict_tensors, st.data())
def test_index_agrees_with_lists(d, data):
    n_elems, rows = d.n_elems(), rows_of(d)
    picks = data.draw(st.lists(st.integers(-n_elems, n_elems - 1), max_size=6) if n_elems else st.just([]))
    mask = data.draw(st.lists(st.booleans(), min_size=n_elems, max_size=n_elems))
    bounds = data.draw(st.slices(n_elems).filter(lambda s: (s.step or 1) > 0))
    assert rows_of(d.index(picks)) == [rows[i] for i in picks]
    assert rows_of(d.index(torch.tensor(mask, dtype=torch.bool))) == [r for r, m in zip(rows, mask, strict=True) if m]
    assert rows_of(d.index(bounds)) == rows[bounds]
    assert [rows_of(part)[0] for part in d.unfold()] == rows


@quick
@given(schemas, st.integers(0, 4), st.integers(0, 4), st.data())
def test_copy_agrees_with_lists(schema, n_source, n_target, data):
    source, target = make_dict_tensor(schema, n_source, start=100), make_dict_tensor(schema, n_target)
    n_rows = data.draw(st.integers(0, target.n_elems())) if source.n_elems() else 0
    rows_to = data.draw(st.permutations(range(target.n_elems())))[:n_rows]
    rows_from = [data.draw(st.integers(0, source.n_elems() - 1)) for _ in rows_to]
    model, new = rows_of(target), rows_of(source)
    for i, j in zip(rows_from, rows_to, strict=True):
        model[j] = new[i]
    target.copy_(source, rows_from, rows_to)
    assert rows_of(target) == model


@quick
@given(dict_tensors)
def test_copies_are_equal_to_their_originals(d):
    for made in (d.clone(), pickle.loads(pickle.dumps(d)), DictTensor(dict(d)), d.prepend_key("p/").truncate_key("p/")):
        assert made == d


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_integers_are_copied_and_pickled_too(dtype):
    d = DictTensor({"x": torch.arange(3).to(dtype)})
    assert pickle.loads(pickle.dumps(d)) == d and copy.deepcopy(d) == d
    d.copy_(DictTensor({"x": torch.tensor([7, 8]).to(dtype)}), [1], [0])
    assert d["x"].tolist() == [8, 1, 2]


def test_a_refused_copy_changes_nothing():
    d = DictTensor({"a": torch.zeros(3), "b": torch.zeros(3, requires_grad=True)})
    with pytest.raises(SpecError, match="^DictTensor.copy_: 'b' is a leaf that requires a gradient"):
        d.copy_(DictTensor({"a": torch.ones(3), "b": torch.ones(3)}), [0], [0])
    assert d["a"].tolist() == [0, 0, 0]


def test_a_backward_slice_is_refused():
    with pytest.raises(IndexError, match="^a slice must go forward"):
        DictTensor({"a": torch.zeros(3)}).index(slice(None, None, -1))


@pytest.mark.parametrize("more", [{}, {"loss": torch.tensor(1.0)}, {"y": torch.zeros(3)}])
def test_what_takes_the_place_of_another_has_its_batch_size(more):
    d = DictTensor({"x": torch.zeros(3), **more})
    with pytest.raises(SpecError, match=r"'x' has batch size 2, expected 3 \(from 'x'\)"):
        d.set("x", torch.zeros(2))
    assert d.n_elems() == 3
    assert d.set("x", torch.ones(3, 2))["x"].shape == (3, 2) and list(d.keys()) == ["x", *more]
