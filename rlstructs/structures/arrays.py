"""Tensors as numpy arrays that share their memory, and in jax, warp and tensordict.

Results of the functions for trees are copies unless the caller asks for a view: on a CPU several of these libraries
would share memory without saying so. Each library is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.frameworks.start_warp import WARP_DTYPES, WARP_MAX_AXES, start_warp
from rlstructs.frameworks.torch import FLOAT8, SIGNED, dtype_name

Spec = tuple[tuple[int, ...], np.dtype[Any]]  # row shape, dtype
TensorSpec = tuple[tuple[int, ...], torch.dtype]


class _Named(Protocol):
    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as a numpy array, without a copy on the CPU.

    Raises:
        TypeError: numpy lacks its dtype or layout.
    """
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # it has a gradient or is not on the CPU: rare, and all these calls take time
        return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()


def arrays_of(tensors: _Named, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Picks tensors by name, as arrays; see `as_array`.

    Other tensors of a lease are not made.
    """
    return {name: as_array(tensors[name]) for name in names if name in tensors}


def tensor_to_array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """`as_array` with an error that names the tensor.

    Raises:
        SpecError: numpy lacks its dtype or layout.
    """
    try:
        return as_array(tensor)
    except TypeError as error:
        if tensor.layout is not torch.strided:
            what = str(tensor.layout).removeprefix("torch.")
            raise SpecError(f"{name!r} is {what}, which numpy lacks; use to_dense() first") from error
        dtype, wide = dtype_name(tensor.dtype), "complex64" if tensor.dtype.is_complex else "float32"
        raise SpecError(f"{name!r} is {dtype}, which numpy lacks; convert it to {wide} first") from error


def raw_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory as a numpy array; int16 for bfloat16, which numpy lacks.

    numpy can index arrays of every dtype, torch cannot.
    """
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return as_array(tensor)


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `raw_of`: an array's memory as a tensor of this dtype."""
    found = torch.from_numpy(array)
    return found if found.dtype is dtype else found.view(dtype)


def tensors_of(arrays: Mapping[str, np.ndarray], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Converts arrays, by name, to tensors of the dtypes of their specs; see `tensor_of`."""
    return {name: tensor_of(array, specs[name][1]) for name, array in arrays.items()}


def put(column: torch.Tensor, index: Any, values: torch.Tensor) -> None:
    """`column[index] = values`, for every dtype."""
    raw_of(column)[index] = raw_of(values)


def find_true(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and columns of the True entries of a mask (B, T).

    int64 (K,) each, row by row. Like `numpy.nonzero`, which takes twelve times as long for a mask of a hundred thousand
    entries.
    """
    flat = mask.reshape(-1).nonzero()[0]
    if not flat.size:
        return flat, flat
    rows = flat // max(1, mask.shape[1])
    return rows, flat - rows * mask.shape[1]


def put_at(
    arrays: Mapping[str, np.ndarray], rows: np.ndarray, times: np.ndarray, values: Mapping[str, np.ndarray]
) -> None:
    """Sets `arrays[key][rows, times] = values[key]` for every key of `values`.

    Arrays are (B, T, ...), values (K, ...).
    """
    for key, new in values.items():
        array = arrays[key]
        if array.flags.c_contiguous:  # numpy is three times as fast with one index as with two
            array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])[rows * array.shape[1] + times] = new
        else:
            array[rows, times] = new


def specs_of(tensors: _Named) -> dict[str, TensorSpec]:
    """Row shape and dtype of each key."""
    return {key: (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in tensors.items()}


def numpy_specs(specs: Mapping[str, TensorSpec]) -> dict[str, Spec]:
    """The specs with numpy's dtypes.

    Raises:
        SpecError: numpy lacks a dtype.
    """
    converted = {}
    for key, (shape, dtype) in specs.items():
        try:
            converted[key] = shape, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        except TypeError as error:
            raise SpecError(f"observation: {key!r} is {dtype}, which numpy lacks") from error
    return converted


def raw_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of the array that `raw_of` gives for a tensor of this dtype.

    Raises:
        TypeError: numpy lacks it.
    """
    return torch.empty(0, dtype=torch.int16 if dtype is torch.bfloat16 else dtype, device="cpu").numpy().dtype


def check_dtype(what: str, key: str, dtype: torch.dtype) -> None:
    """Raises SpecError unless shared memory can hold values of this dtype."""
    try:
        raw_dtype(dtype)
    except TypeError as error:
        raise SpecError(f"{what}: {key!r} is {dtype}, which cannot be recorded; convert it first") from error


Tree = dict[str, Any]  # name -> tensor, or name -> Tree


def map_tree(function: Callable[[Any], Any], tree: Mapping[str, Any]) -> Tree:
    """Applies a function to every leaf of a tree."""
    return {
        name: map_tree(function, leaf) if isinstance(leaf, Mapping) else function(leaf) for name, leaf in tree.items()
    }


def _map_named(function: Callable[[str, Any], Any], tree: Mapping[str, Any]) -> Tree:
    return {
        name: _map_named(function, leaf) if isinstance(leaf, Mapping) else function(name, leaf)
        for name, leaf in tree.items()
    }


def to_numpy(tree: Mapping[str, Any], view: bool) -> Tree:
    def convert(name: str, tensor: torch.Tensor) -> np.ndarray:
        array = tensor_to_array(name, tensor)
        return array if view else array.copy()

    return _map_named(convert, tree)


def _from_host(name: str, array: np.ndarray) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name!r} is a numpy array that torch cannot take: {error}") from error


def from_numpy(arrays: Mapping[str, Any], view: bool) -> Tree:
    def convert(name: str, array: Any) -> torch.Tensor:
        array = np.asarray(array)
        if not view:
            return _from_host(name, np.array(array, order="C", dtype=array.dtype.newbyteorder("=")))
        if not array.flags.writeable:
            raise SpecError(f"{name!r} is read-only, and a tensor that shares its memory would not be")
        return _from_host(name, array)

    return _map_named(convert, arrays)


def to_jax(tree: Mapping[str, Any], view: bool) -> Tree:
    import jax
    import jax.numpy as jnp

    def convert(name: str, tensor: torch.Tensor) -> Any:
        if view and tensor.is_contiguous() and (tensor.dtype.itemsize < 8 or jax.config.jax_enable_x64):
            return jax.dlpack.from_dlpack(tensor.detach())
        if tensor.dtype == torch.bfloat16:
            return jnp.array(tensor_to_array(name, tensor.float()), dtype=jnp.bfloat16)
        if tensor.dtype in FLOAT8 and hasattr(jnp, dtype_name(tensor.dtype)):
            bits = tensor_to_array(name, tensor.detach().contiguous().view(torch.uint8))
            return jnp.array(bits.view(np.dtype(getattr(jnp, dtype_name(tensor.dtype)))))
        if tensor.dtype == torch.complex32:
            raise SpecError(f"{name!r} is complex32, which jax lacks; convert it to complex64 first")
        array = fit_to_jax(name, tensor_to_array(name, tensor))
        # jnp.array copies, where device_put would share aligned host memory.
        return jnp.array(array)

    with jax.transfer_guard("allow"):  # the caller has asked for it
        return _map_named(convert, tree)


def fit_to_jax(name: str, array: np.ndarray) -> np.ndarray:
    """Converts an array of 64 bits to 32, unless jax_enable_x64 is set.

    Raises:
        SpecError: an integer does not fit into 32 bits.
    """
    import jax

    if array.dtype.itemsize < 8 or array.dtype == np.complex64 or jax.config.jax_enable_x64:
        return array
    if array.dtype.kind in "iu":
        return _narrow(name, array)
    return array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)


def _narrow(name: str, array: np.ndarray) -> np.ndarray:
    narrow = np.dtype(np.int32 if array.dtype.kind == "i" else np.uint32)
    limits = np.iinfo(narrow)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise SpecError(
            f"{name!r} holds values that do not fit {narrow}, to which jax limits integers; set jax_enable_x64"
        )
    return array.astype(narrow)


def from_jax(arrays: Mapping[str, Any]) -> Tree:
    def convert(name: str, array: Any) -> torch.Tensor:
        host = np.array(array, order="C")
        if host.dtype.name == "bfloat16":
            return torch.from_numpy(host.astype(np.float32)).bfloat16()
        if host.dtype.name.startswith("float8") and isinstance(getattr(torch, host.dtype.name, None), torch.dtype):
            return torch.from_numpy(host.view(np.uint8)).view(getattr(torch, host.dtype.name))
        return _from_host(name, host)

    return _map_named(convert, arrays)


def to_warp(tree: Mapping[str, Any], view: bool) -> Tree:
    wp = start_warp()

    def convert(name: str, tensor: torch.Tensor) -> Any:
        if not 1 <= tensor.ndim <= WARP_MAX_AXES:
            raise SpecError(f"{name!r} has {tensor.ndim} axes, warp arrays have 1 to {WARP_MAX_AXES}; reshape it first")
        tensor = tensor.resolve_conj().resolve_neg()
        source = tensor.detach() if view else tensor.detach().clone(memory_format=torch.contiguous_format)
        signed = SIGNED.get(tensor.dtype)
        if signed is not None:  # warp has unsigned dtypes, but takes no tensor of them
            return wp.from_torch(source.view(signed), dtype=getattr(wp, dtype_name(tensor.dtype)))
        try:
            return wp.from_torch(source)  # keeps `source` alive
        except TypeError as error:
            raise SpecError(
                f"{name!r} is {dtype_name(tensor.dtype)}, which warp lacks; convert it first, to one of {WARP_DTYPES}"
            ) from error

    return _map_named(convert, tree)


def from_warp(arrays: Mapping[str, Any], view: bool) -> Tree:
    wp = start_warp()

    def convert(array: Any) -> torch.Tensor:
        # `to_torch` goes through numpy, of which older versions do not take empty arrays of warp.
        tensor = wp.to_torch(array) if array.size else torch.utils.dlpack.from_dlpack(array)
        return tensor if view else tensor.clone()

    return map_tree(convert, arrays)


def to_tensordict(tree: Mapping[str, Any], sizes: Sequence[int], device: torch.device | None = None) -> Any:
    """Makes a `TensorDict` with batch axes of these sizes.

    Without batch axes if a tensor has fewer axes.
    """
    from tensordict import TensorDict

    leaves = list(_leaves(tree))
    shape = torch.Size(sizes if all(tensor.ndim >= len(sizes) for tensor in leaves) else ())
    n_axes = len(shape)
    fits = all(tensor.shape[:n_axes] == shape and device in (None, tensor.device) for tensor in leaves)
    # The constructor looks at each tensor several times; torchrl makes its batches in this way, too.
    make = getattr(TensorDict, "_new_unsafe", TensorDict) if fits else TensorDict
    return make(nest_names(tree), batch_size=shape, device=device)


def _leaves(tree: Mapping[str, Any]) -> Iterator[Any]:
    for leaf in tree.values():
        if type(leaf) is not torch.Tensor and isinstance(leaf, Mapping):
            yield from _leaves(leaf)
        else:
            yield leaf


def nest_names(tree: Mapping[str, Any]) -> Tree:
    """Nests a tree at the slashes of its names.

    Raises:
        SpecError: a name is a tensor and a group of tensors.
    """
    nested: Tree = {}
    for name, leaf in tree.items():
        *parents, last = name.split("/")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise SpecError(f"{name!r} cannot be nested: {parent!r} is a tensor itself")
        if last in inner:
            raise SpecError(f"{name!r} cannot be nested: it is a tensor and a group of tensors")
        is_tensor = type(leaf) is torch.Tensor  # nearly always, and quicker to find out
        inner[last] = nest_names(leaf) if not is_tensor and isinstance(leaf, Mapping) else leaf
    return nested


def from_tensordict(tensordict: Any) -> Tree:
    return {
        name: from_tensordict(leaf) if not isinstance(leaf, torch.Tensor) else leaf for name, leaf in tensordict.items()
    }
