"""Every dtype of torch through every operation and conversion: the right values, or an error that says what to do."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch

from rlstructs import DictTensor, SpecError, TemporalDictTensor, Trajectories
from rlstructs.structures.dict_tensor import masked_dicttensor, masked_tensor

EVERY = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
UNFIT = [dtype for dtype in EVERY if re.fullmatch(r"torch\.(u?int[1-7]|bits.*|qu?int.*|float4.*)", str(dtype))]
USABLE = [dtype for dtype in EVERY if dtype not in UNFIT]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def named(dtype):
    return str(dtype).removeprefix("torch.")


def tensor_of(dtype, *shape):
    """Numbers 0 to 3 of a dtype."""
    numbers = torch.arange(int(np.prod(shape))).reshape(shape).remainder(4)
    return numbers.to(dtype) if dtype is not torch.bool else numbers > 1


def bits(tensor):
    wide = torch.complex64 if tensor.dtype is torch.complex32 else tensor.dtype
    wide = torch.float32 if "float8" in str(tensor.dtype) else wide
    return tensor.to(wide).tolist(), tensor.dtype, tuple(tensor.shape)


def saved(structure, path):
    structure.save(path)
    return type(structure).load(path)


OPERATIONS = {
    "clone": lambda d: d.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "cat": lambda d: DictTensor.cat([d, d]).slice(4, 8),
    "index": lambda d: d.index([0, 1, 2, 3]),
    "index with a mask": lambda d: d.index(torch.ones(4, dtype=torch.bool)),
    "index with numbers": lambda d: DictTensor.cat([d.index([k]) for k in range(4)]),
    "slice": lambda d: d.slice(0, 4),
    "unfold": lambda d: DictTensor.cat(d.unfold()),
    "masked": lambda d: masked_dicttensor(d, d, torch.tensor([True, False, True, False])),
    "share_memory_": lambda d: d.clone().share_memory_(),
    "to": lambda d: d.to("cpu"),
    "set": lambda d: DictTensor().set("x", d["x"]),
}  # fmt: skip


def copied(d):
    made = d.clone()
    made.copy_(d, [0, 1], [0, 1])
    return made


OPERATIONS["copy_"] = copied


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", USABLE, ids=named)
def test_operations_keep_values_of_every_dtype(dtype, operation):
    tensor = tensor_of(dtype, 4, 3)
    made = OPERATIONS[operation](DictTensor({"x": tensor}))
    assert bits(made["x"]) == bits(tensor)
    assert "x" in repr(made) and made.specs()["x"]["dtype"] is dtype


@pytest.mark.parametrize("dtype", USABLE, ids=named)
def test_equality_looks_at_values_of_every_dtype(dtype):
    d = DictTensor({"x": tensor_of(dtype, 4, 3)})
    assert d == DictTensor({"x": tensor_of(dtype, 4, 3)})
    assert d != DictTensor({"x": tensor_of(dtype, 4, 3).flip(0)})


TEMPORAL = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "cat": lambda t: TemporalDictTensor.cat([t, t]).slice(2, 4),
    "cat of others": lambda t: TemporalDictTensor.cat([t, t.temporal_slice(0, 1)]).slice(0, 2),
    "index": lambda t: t.index([0, 1]),
    "zero_padding": lambda t: t.zero_padding(),
    "expand": lambda t: t.expand(4).index([0, 1]),
    "trajectories": lambda t: Trajectories.cat([Trajectories(DictTensor(), t)]).trajectories,
}  # fmt: skip


@pytest.mark.parametrize("operation", TEMPORAL)
@pytest.mark.parametrize("dtype", USABLE, ids=named)
def test_sequences_keep_values_of_every_dtype(dtype, operation):
    steps = TemporalDictTensor({"x": tensor_of(dtype, 2, 3, 2)}, torch.tensor([3, 3]))
    made = TEMPORAL[operation](steps)
    assert bits(made["x"]) == bits(steps["x"])
    taken, _ = steps.masked_temporal_index(1)
    assert bits(taken["x"]) == bits(steps["x"][:, 1]) == bits(steps.temporal_index(1)["x"])
    assert bits(steps.temporal_multi_index([0, 2])["x"][1]) == bits(steps["x"][1, 2])


@pytest.mark.parametrize("ending", ["npz", "pt", "h5"])
@pytest.mark.parametrize("dtype", USABLE, ids=named)
def test_files_hold_every_dtype(dtype, ending, tmp_path):
    d = DictTensor({"x": tensor_of(dtype, 4, 3)})
    assert bits(saved(d, tmp_path / f"x.{ending}")["x"]) == bits(d["x"])


def through(library, d):
    if library == "tensordict":
        return DictTensor.from_tensordict(d.to_tensordict())
    if library == "numpy view":
        return DictTensor.from_numpy(d.numpy(view=True), view=True)
    if library == "warp view":
        return DictTensor.from_warp(d.warp(view=True), view=True)
    return getattr(DictTensor, f"from_{library}")(getattr(d, library)())


@pytest.mark.parametrize("library", ["numpy", "numpy view", "jax", "warp", "warp view", "tensordict"])
@pytest.mark.parametrize("dtype", USABLE, ids=named)
def test_libraries_take_every_dtype_or_it_is_named(dtype, library):
    pytest.importorskip(library.split()[0])
    d = DictTensor({"x": tensor_of(dtype, 4, 3)})
    try:
        made = through(library, d)
    except SpecError as error:
        has_none = dtype.is_complex or dtype is torch.bfloat16 or "float8" in str(dtype)
        assert has_none and re.match(f"'x' is {named(dtype)}, which (numpy|jax|warp) lacks; convert it", str(error))
        return
    expected = d["x"]
    if library == "jax" and expected.dtype.itemsize >= 8 and dtype is not torch.complex64:  # without jax_enable_x64
        expected = expected.to(made["x"].dtype)
        assert made["x"].dtype.itemsize == dtype.itemsize // 2
    assert bits(made["x"]) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=named)
def test_warp_arrays_have_the_unsigned_integers_of_tensors(dtype):
    wp = pytest.importorskip("warp")
    largest = torch.iinfo(dtype).max
    tensor = torch.tensor([0, 1, largest], dtype=dtype)
    for view in (False, True):
        [array] = DictTensor({"x": tensor}).warp(view=view).values()
        assert array.dtype is getattr(wp, named(dtype)) and array.numpy().tolist() == [0, 1, largest]
        assert (array.ptr == tensor.data_ptr()) == view
        assert DictTensor.from_warp({"x": array})["x"].tolist() == [0, 1, largest]


@pytest.mark.parametrize("dtype", UNFIT, ids=named)
def test_a_dtype_that_torch_can_do_nothing_with_is_named_at_once(dtype):
    is_quantised = named(dtype).startswith("q")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_quantised:
            tensor = torch._empty_affine_quantized([2, 4], scale=1.0, zero_point=0, dtype=dtype)
        else:
            tensor = torch.empty(2, 4, dtype=dtype)
    why = "which is quantised; dequantize it first" if is_quantised else "whose values torch cannot copy; convert it"
    message = f"'x' is {named(dtype)}, {why}"
    for make in (
        lambda: DictTensor({"x": tensor}), lambda: DictTensor({"a": torch.zeros(2)}).set("x", tensor),
        lambda: TemporalDictTensor({"x": tensor}, torch.tensor([1, 3])),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=f"{re.escape(message)}.*Supported are bool, integers of 8 to 64 bits"):
            make()


def test_masked_tensor_takes_every_dtype():
    for dtype in USABLE:
        one, other = tensor_of(dtype, 4, 3), tensor_of(dtype, 4, 3).flip(0)
        made = masked_tensor(one, other, torch.tensor([True, False, False, True]))
        assert bits(made[0]) == bits(other[0]) and bits(made[1]) == bits(one[1]), dtype


# --- memories ---------------------------------------------------------------------------------------


def memory_of(library):
    import importlib

    pytest.importorskip(library)
    return importlib.import_module(f"rlstructs.memories.{library}").RandomMemory(memory_size=4, num_envs=1)


def given_dtypes():
    import ml_dtypes

    names = ["bool", *(f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)),
             "float16", "float32", "float64", "complex64", "complex128"]  # fmt: skip
    return {
        **{f"numpy {name}": np.dtype(name) for name in names},
        "numpy type complex64": np.complex64,
        "numpy text": np.dtype("U3"),
        "numpy datetime": np.dtype("M8[s]"),
        "a name": "bfloat16",
        "ml_dtypes bfloat16": np.dtype(ml_dtypes.bfloat16),
        "ml_dtypes float8": np.dtype(ml_dtypes.float8_e4m3fn),
        **{f"torch {named(dtype)}": dtype for dtype in EVERY},
    }


@pytest.mark.parametrize("library", ["torch", "jax", "warp"])
@pytest.mark.parametrize("dtype", given_dtypes().values(), ids=given_dtypes())
def test_a_memory_takes_a_dtype_or_names_it_and_the_tensor(library, dtype):
    memory = memory_of(library)
    try:
        memory.create_tensor("x", 2, dtype)
    except SpecError as error:
        wanted = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
        assert str(error).startswith("tensor 'x': dtype ") and (wanted in str(error) or repr(dtype) in str(error))
        assert memory.get_tensor_names() == []
        return
    assert memory.get_tensor_by_name("x").shape == (4, 1, 2)
    memory.add_samples(x=np.ones((1, 2), bool))
    [[rows]] = memory.sample(["x"], batch_size=2)
    host = rows.float() if isinstance(rows, torch.Tensor) and rows.dtype is torch.bfloat16 else rows
    host = host.numpy() if hasattr(host, "numpy") and not isinstance(host, np.ndarray) else np.asarray(host)
    assert np.asarray(host).astype(np.complex64).reshape(-1).tolist() == [1, 1, 1, 1] or host.dtype == np.uint16


@pytest.mark.parametrize("library", ["torch", "jax", "warp"])
@pytest.mark.parametrize("dtype", USABLE, ids=named)
def test_trajectories_of_every_dtype_are_added_or_named(library, dtype):
    memory = memory_of(library)
    steps = {"action/action": tensor_of(dtype, 1, 3, 2)}
    info = DictTensor({"env_index": torch.zeros(1, dtype=torch.int64)})
    batch = Trajectories(info, TemporalDictTensor(steps, torch.tensor([3])))
    try:
        memory.add_trajectories(batch, {"actions": "action/action"})
    except SpecError as error:
        assert "'actions'" in str(error) and named(dtype) in str(error)
        assert not len(memory) and not memory.get_tensor_names()
        return
    assert len(memory) == 3
