"""What leaves for numpy, jax, warp and tensordict, and what comes back: values, dtypes and whose memory it is."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import warp as wp
from hypothesis import given, settings
from processes import LIMIT
from strategies import dict_tensors, filled, temporals
from tensordict import TensorDict

from rlstructs import DictTensor, SpecError, TemporalDictTensor, Trajectories
from rlstructs.frameworks.start_warp import _drop_lines

LIBRARIES = ["numpy", "jax", "warp"]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}  # by jax, unless told
SIZE = 4096  # elements: enough for libraries that alias large aligned arrays only


def leave(structure, library, **arguments):
    return getattr(structure, library)(**arguments)


def enter(kind, library, arrays, **arguments):
    return getattr(kind, f"from_{library}")(arrays, **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_dtypes_make_the_round_trip(library, dtype):
    if (library, dtype) == ("numpy", torch.bfloat16):
        return  # refused: below
    d = DictTensor({"x": filled((3, 2), dtype)})
    arrays = leave(d, library)
    back = enter(DictTensor, library, arrays)
    expected = NARROWED.get(dtype, dtype) if library == "jax" else dtype
    assert tuple(arrays["x"].shape) == (3, 2)
    assert back == DictTensor({"x": d["x"].to(expected)})


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (), (2, 1, 3, 1)], ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_shapes_make_the_round_trip(library, shape):
    if (library, shape) == ("warp", ()):
        return  # refused: below
    d = DictTensor({"x": torch.full(shape, 3.5)})
    assert enter(DictTensor, library, leave(d, library)) == d


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12.0)[::3],
        torch.ones(3, requires_grad=True),
        torch.arange(3.0)[:, None].expand(3, 4),
    ],
    ids=["transposed", "strided", "gradient", "expanded"],
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_tensors_of_any_layout_leave(library, tensor):
    arrays = leave(DictTensor({"x": tensor}), library)
    assert np.asarray(arrays["x"].numpy() if library == "warp" else arrays["x"]).tolist() == tensor.tolist()
    assert enter(DictTensor, library, arrays) == DictTensor({"x": tensor})
    if library == "numpy":
        assert arrays["x"].flags.c_contiguous


def test_lazily_conjugated_tensors_leave():
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert DictTensor({"z": z.conj()}).numpy()["z"].tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_three_structures_make_the_round_trip(library):
    info = DictTensor({"env_index": torch.arange(2, dtype=torch.int32)})
    m = TemporalDictTensor({"o/f": torch.rand(2, 3, 2), "done": torch.ones(2, 3).bool()}, torch.tensor([3, 1]))
    for structure in (info, m, Trajectories(info, m), Trajectories(DictTensor(), m)):
        assert enter(type(structure), library, leave(structure, library)) == structure
    assert set(leave(m, library)) == {"o/f", "done", "lengths"}
    assert enter(TemporalDictTensor, library, leave(m, library)).lengths.dtype == torch.int64
    assert list(leave(Trajectories(info, m), library)) == ["info", "trajectories"]


# --- whose memory it is -----------------------------------------------------------------------------


def test_tensordicts_that_are_made_past_their_constructor_are_as_those_that_it_makes():
    assert hasattr(TensorDict, "_new_unsafe")  # private; without it they are made by the constructor
    made = DictTensor({"a": torch.zeros(3, 2), "next/b": torch.ones(3), "next/c/d": torch.ones(3, 1)}).to_tensordict()
    inside = {"b": torch.ones(3), "c": {"d": torch.ones(3, 1)}}
    wanted = TensorDict({"a": torch.zeros(3, 2), "next": inside}, batch_size=[3])
    for each, other in ((made, wanted), (made["next"], wanted["next"]), (made["next", "c"], wanted["next", "c"])):
        assert (type(each), each.batch_size, each.device) == (type(other), other.batch_size, other.device)
        assert type(each.batch_size) is type(other.batch_size) and set(each.keys(True)) == set(other.keys(True))
    assert (made == wanted).all() and (made[1:] == wanted[1:]).all()
    assert (made.reshape(3, 1) == wanted.reshape(3, 1)).all()
    made["more"] = torch.zeros(3)
    with pytest.raises(RuntimeError):
        made["more"] = torch.zeros(2)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_leaves_is_private(library):
    x = torch.ones(SIZE)
    assert x.data_ptr() % 64 == 0
    array = leave(DictTensor({"x": x}), library)["x"]
    x.fill_(7)
    assert float((array.numpy() if library == "warp" else np.asarray(array)).max()) == 1
    if library != "jax":  # whose arrays cannot be written to
        array.fill(5) if library == "numpy" else array.fill_(5)
        assert x.unique().tolist() == [7]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_enters_is_private(library):
    source = torch.ones(SIZE).numpy()
    assert source.ctypes.data % 64 == 0
    array = {"numpy": lambda a: a, "jax": jnp.array, "warp": wp.array}[library](source)
    x = enter(DictTensor, library, {"x": array})["x"]
    x.fill_(7)
    assert float((array.numpy() if library == "warp" else np.asarray(array)).max()) == 1
    if library != "jax":
        array.fill(5) if library == "numpy" else array.fill_(5)
        assert x.unique().tolist() == [7]


@pytest.mark.parametrize("library", ["numpy", "warp"])
def test_views_share_memory_in_both_directions_when_asked_for(library):
    x = torch.ones(SIZE)
    array = leave(DictTensor({"x": x}), library, view=True)["x"]
    x.fill_(7)
    assert float((array.numpy() if library == "warp" else array).min()) == 7
    back = enter(DictTensor, library, {"x": array}, view=True)["x"]
    back.fill_(8)
    assert x.unique().tolist() == [8]


def test_views_of_transposed_tensors_are_views():
    x = torch.arange(6.0).view(2, 3).t()
    for array in (DictTensor({"x": x}).numpy(view=True)["x"], DictTensor({"x": x}).warp(view=True)["x"].numpy()):
        assert array.tolist() == x.tolist()


def test_a_view_of_read_only_memory_is_refused_but_copied():
    array = np.ones(3)
    array.flags.writeable = False
    with pytest.raises(SpecError, match="^'x' is read-only"):
        DictTensor.from_numpy({"x": array}, view=True)
    assert DictTensor.from_numpy({"x": array})["x"].tolist() == [1, 1, 1]


# --- what the other side cannot hold ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "tensor", "message"),
    [
        ("numpy", torch.ones(3).bfloat16(), "'x' is bfloat16, which numpy lacks; convert it to float32 first"),
        ("numpy", torch.eye(2).to_sparse(), r"'x' is sparse_coo, which numpy lacks; use to_dense\(\) first"),
        ("jax", torch.tensor([2**31]), "'x' holds values that do not fit int32.*set jax_enable_x64"),
        ("jax", torch.tensor([-(2**31) - 1]), "'x' holds values that do not fit int32"),
        ("jax", torch.tensor([2**32], dtype=torch.int64).to(torch.uint64), "'x' holds values that do not fit uint32"),
        ("warp", torch.zeros(1, 1, 1, 1, 1), "'x' has 5 axes, warp arrays have 1 to 4"),
        ("warp", torch.tensor(1.0), "'x' has 0 axes, warp arrays have 1 to 4"),
        ("warp", torch.ones(3, dtype=torch.complex64), "'x' is complex64, which warp lacks"),
    ],
    ids=["bfloat16", "sparse", "int64", "negative int64", "uint64", "axes", "no axis", "complex"],
)
def test_what_a_library_cannot_hold_is_refused_by_name(library, tensor, message):
    with pytest.raises(SpecError, match=f"^{message}"):
        leave(DictTensor({"x": tensor}), library)


def test_jax_takes_integers_up_to_its_limit_and_beyond_when_told():
    edge = torch.tensor([2**31 - 1, -(2**31)])
    assert DictTensor({"x": edge}).jax()["x"].tolist() == edge.tolist()
    jax.config.update("jax_enable_x64", True)
    try:
        wide = DictTensor({"x": torch.tensor([2**40 + 1])})
        assert wide.jax()["x"].dtype == jnp.int64
        assert DictTensor.from_jax(wide.jax()) == wide
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.zeros(2, [("f", "f4")]), np.zeros(2, np.longdouble)],
    ids=["text", "objects", "records", "longdouble"],
)  # fmt: skip
@pytest.mark.parametrize("view", [False, True])
def test_numpy_arrays_that_torch_cannot_hold_are_refused_by_name(array, view):
    with pytest.raises(SpecError, match="^'x' is a numpy array that torch cannot take"):
        DictTensor.from_numpy({"x": array}, view=view)


def test_numpy_arrays_of_any_layout_enter():
    arrays = {
        "big": np.array([1, 2], dtype=">i4"),
        "reversed": np.arange(2)[::-1],
        "fortran": np.asfortranarray(np.arange(4).reshape(2, 2)),
        "list": [1.5, 2.5],
    }
    assert {key: tensor.tolist() for key, tensor in DictTensor.from_numpy(arrays).items()} == {
        "big": [1, 2], "reversed": [1, 0], "fortran": [[0, 1], [2, 3]], "list": [1.5, 2.5],
    }  # fmt: skip


def test_what_enters_is_flattened_and_checked():
    nested = DictTensor.from_numpy({"a": {"b": np.zeros(2)}, "c": np.zeros(2)})
    assert list(nested) == ["a/b", "c"]
    with pytest.raises(SpecError, match="'y' has batch size 3"):
        DictTensor.from_numpy({"x": np.zeros(2), "y": np.zeros(3)})
    with pytest.raises(SpecError, match="lengths must lie in"):
        TemporalDictTensor.from_numpy({"y": np.zeros((1, 2)), "lengths": np.array([3])})
    assert TemporalDictTensor.from_numpy({"y": np.zeros((1, 2))}).lengths.tolist() == [2]


# --- tensordict -------------------------------------------------------------------------------------


def test_tensordict_nests_keys_and_shares_tensors():
    d = DictTensor({"observation/frame": torch.zeros(3, 2), "observation/goal/x": torch.ones(3), "y": torch.arange(3)})
    td = d.to_tensordict()
    assert td.batch_size == td["observation"].batch_size == (3,)
    assert td["observation", "goal", "x"] is d["observation/goal/x"]
    assert td[1]["observation", "frame"].shape == (2,)
    back = DictTensor.from_tensordict(td)
    assert back == d
    assert back["y"] is d["y"]


def test_tensordict_takes_all_three_structures():
    m = TemporalDictTensor({"o/f": torch.rand(2, 3)}, torch.tensor([3, 1]))
    t = Trajectories(DictTensor({"a/b": torch.arange(2)}), m)
    for structure in (m, t, Trajectories(DictTensor(), m), DictTensor(), DictTensor({"loss": torch.tensor(1.0)})):
        assert type(structure).from_tensordict(structure.to_tensordict()) == structure
    assert t.to_tensordict().batch_size == (2,)
    assert DictTensor({"loss": torch.tensor(1.0)}).to_tensordict().batch_size == ()


def test_one_made_elsewhere_is_checked():
    td = TensorDict({"a": {"b": torch.zeros(2, 3)}, "c": torch.zeros(3)}, batch_size=[])
    with pytest.raises(SpecError, match="'c' has batch size 3, expected 2"):
        DictTensor.from_tensordict(td)


@pytest.mark.parametrize("keys", [["a", "a/b"], ["a/b", "a"]], ids=str)
def test_a_name_that_is_a_tensor_and_a_group_cannot_be_nested(keys):
    with pytest.raises(SpecError, match=r"^'a(/b)?' cannot be nested"):
        DictTensor({key: torch.zeros(1) for key in keys}).to_tensordict()


# --- against each other -----------------------------------------------------------------------------


def without_bfloat16(structure):
    return structure.get([key for key, tensor in structure.items() if tensor.dtype != torch.bfloat16])


@settings(deadline=None, max_examples=40)
@given(dict_tensors, temporals)
def test_random_structures_make_the_round_trip(d, m):
    for structure in (without_bfloat16(d), without_bfloat16(m)):
        for view in (False, True):
            assert type(structure).from_numpy(structure.numpy(view), view=view) == structure
    assert TemporalDictTensor.from_tensordict(m.to_tensordict()) == m
    assert DictTensor.from_warp(d.warp()) == d


# --- warp's start -----------------------------------------------------------------------------------

QUIET = """
import os, sys, torch
from rlstructs import DictTensor
from rlstructs.frameworks.start_warp import _drop_lines

def open_files():
    targets = [os.path.realpath(f"/dev/fd/{fd}") for fd in os.listdir("/dev/fd")]
    return targets.count(os.path.realpath("/dev/fd/2")), sum("(deleted)" in target for target in targets)

configured = sys.argv[1] == "True"
d = DictTensor({"x": torch.zeros(3)})
before = open_files()
if configured:
    import warp
    warp.config.log_level = warp.LOG_DEBUG
assert DictTensor.from_warp(d.warp()) == d
import warp
assert warp.config.log_level == (warp.LOG_DEBUG if configured else warp.LOG_INFO), warp.config.log_level
assert open_files() == before == (1, 0), (before, open_files())
os.write(2, b"end")
os.close(2)
with _drop_lines(b""):
    pass
"""


@pytest.mark.parametrize("configured", [False, True], ids=["as it is", "configured by the user"])
def test_warp_starts_without_a_word_and_stays_as_it_was_configured(configured, subprocess_env):
    command = [sys.executable, "-W", "error", "-c", QUIET, str(configured)]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"end")


def test_other_text_comes_through_while_warp_starts(capfd):
    with _drop_lines(b"noise"):
        os.write(2, b"kept 1\nnoise 2\nkept")
        os.write(2, b" 3\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "kept 1\nkept 3\n"
    with pytest.raises(KeyError), _drop_lines(b"noise"):
        os.write(2, b"kept")
        raise KeyError
    os.write(2, b" after")
    assert capfd.readouterr().err == "kept after"


@pytest.mark.parametrize("view", [False, True])
def test_a_tensor_with_the_negative_bit_keeps_its_sign_in_warp(view):
    d = DictTensor({"x": torch.tensor([1 + 2j]).conj().imag})
    assert d.warp(view=view)["x"].numpy().tolist() == [-2.0]
