"""Pytrees of jax as named columns.

Functions of jax are traced once before they are compiled.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from rlstructs.envs.jax_functions import FORKED
from rlstructs.errors import SpecError
from rlstructs.seeding import int32_seed
from rlstructs.structures.arrays import raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import check_same_keys

try:
    import jax as jax  # others import it from here, after this error
except ImportError as error:
    raise ImportError("jax is needed for environments in jax: pip install jax") from error

_Arrays = Mapping[str, Any]
# Where jax says which argument or result is no array.
NOT_ARRAY = re.compile(
    r"(Argument .* |a value |The problematic value is )of type <class .*?(?=, which|\.\s|$)", re.MULTILINE
)


def name_leaves(tree: Any, name: str) -> dict[str, Any]:
    """Returns the arrays of a pytree by name.

    Names of nested entries are joined with `/`; `name` is that of a tree that is one array.

    Raises:
        SpecError: two arrays have one name, as those of `{"a/b": 1, "a": {"b": 2}}`.

    Example:
        >>> name_leaves({"arm": (1, 2), "goal": 3}, "frame"), name_leaves(4, "frame")
        ({'arm/0': 1, 'arm/1': 2, 'goal': 3}, {'frame': 4})
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = "/".join(map(_name_step, path)) or name
        if key in named:
            raise SpecError(f"two arrays are called {key!r}: names of nested entries are joined with '/'")
        named[key] = leaf
    return named


def _name_step(step: Any) -> str:
    """The name of a step of a path: key, attribute or index."""
    found = next((getattr(step, name) for name in ("key", "name", "idx") if hasattr(step, name)), step)
    return str(found)


def check_start_method() -> None:
    """Raises SpecError in a worker that was forked."""
    process = multiprocessing.current_process()
    if process.name.startswith("rlstructs-worker") and isinstance(process, multiprocessing.context.ForkProcess):
        raise SpecError(FORKED)


_make_keys = jax.jit(jax.vmap(jax.random.PRNGKey))


def make_keys(seeds: Sequence[int]) -> np.ndarray:
    """Makes a key of each seed, uint32 (E, 2)."""
    check_start_method()
    return np.asarray(_make_keys(np.array([one if one < 2**32 else int32_seed(one) for one in seeds], np.uint32)))


def fold_rows(keys: Any, number: Any) -> Any:
    """Folds a number in the key of each row."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def tensor_of_jax(array: Any) -> torch.Tensor:
    """Returns an array of jax as a tensor on the CPU.

    It shares the array's memory, if that is there.
    """
    return from_dlpack(array if array.device.platform == "cpu" else np.array(array))


def tensors_of_jax(columns: _Arrays) -> DictTensor:
    """Copies arrays of jax, by name, to tensors on the CPU."""
    return DictTensor.trusted({key: _copy_to_tensor(array) for key, array in columns.items()})


def _copy_to_tensor(array: Any) -> torch.Tensor:
    copied = np.array(array)
    is_known = copied.dtype != jax.numpy.bfloat16  # torch does not know it as a dtype of numpy
    return torch.from_numpy(copied) if is_known else tensor_of(copied.view(np.int16), torch.bfloat16)


def arrays_of_tensors(tensors: DictTensor) -> dict[str, np.ndarray]:
    """Returns tensors, by name, as arrays for a compiled function."""
    return {key: _as_array(tensor) for key, tensor in tensors.items()}


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    array = raw_of(tensor.detach().cpu())
    return array.view(jax.numpy.bfloat16) if tensor.dtype is torch.bfloat16 else array


def select_rows(which: Any, one: Any, other: Any) -> Any:
    """Returns pytree `one` in these rows, bool (B,), and `other` elsewhere.

    Shapes and dtypes are those of `other`.
    """

    def select(a: Any, b: Any) -> Any:
        a = jax.numpy.asarray(a)
        return jax.numpy.where(which.reshape(which.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(select, one, other)


def trace(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Traces a function twice.

    Returns the shapes and dtypes of its results, a pytree of `jax.ShapeDtypeStruct`.

    Args:
        what: the function's name in messages.
        function: the function.
        arguments: pytrees of arrays, or of their shapes.

    Raises:
        SpecError: it is no pure function: it needs numbers where jax knows only shapes, uses what an earlier call has
            kept, prints what it traces, or computes something else the second time; or it takes or returns something
            that is no array.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            # New functions, because jax keeps the traces of those that it knows.
            first, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*arguments)
            second = jax.make_jaxpr(lambda *args: function(*args))(*arguments)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        why = f"{type(error).__name__}: {_first_line(str(error))}"
        raise SpecError(f"{what} is not a pure function that jax can compile: {why}") from error
    except TypeError as error:
        if (found := NOT_ARRAY.search(str(error))) is None:
            raise
        raise SpecError(f"{what} takes or returns something that is no array: {found[0]}") from error
    if any(name in printed.getvalue() for name in ("Traced<", "Tracer(")):
        text = _first_line(printed.getvalue())
        raise SpecError(
            f"{what} prints {text!r}, without numbers: it runs only while it is compiled; use jax.debug.print"
        )
    sys.stdout.write(printed.getvalue())
    if str(first) != str(second) or not _are_same(first.consts, second.consts):
        raise SpecError(
            f"{what} is not a pure function: called again with the same arguments it computes something else; random "
            "numbers must come from its key, and what it remembers from its state"
        )
    return shapes


def _are_same(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f") for a, b in pairs
    )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def check_like(what: str, expected: Any, got: Any) -> None:
    """Raises SpecError unless two pytrees of shapes have equal structure, shapes and dtypes."""
    one, other = (name_leaves(tree, "its value") for tree in (expected, got))
    check_same_keys(what, one, other)
    for key, wanted in one.items():
        if (wanted.shape, wanted.dtype) != (other[key].shape, other[key].dtype):
            raise SpecError(f"{what}: {key!r} is {describe(other[key])}, expected {describe(wanted)}")
    if jax.tree.structure(expected) != jax.tree.structure(got):
        raise SpecError(f"{what} is a {jax.tree.structure(got)}, expected {jax.tree.structure(expected)}")


def describe(value: Any) -> str:
    """Describes what a traced function has returned.

    It is the dtype and shape of an array, or a type.
    """
    is_array = isinstance(value, (jax.ShapeDtypeStruct, np.ndarray))
    return f"{np.dtype(value.dtype).name} {tuple(value.shape)}" if is_array else type(value).__name__
