"""Converts trees of tensors to numpy, jax, warp and tensordict, and back.

Results are copies unless the caller asks for a view: on a CPU several of these libraries would share memory without
saying so. Each library is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.frameworks.dtypes import FLOAT8, SIGNED, dtype_name
from rlstructs.frameworks.start_warp import WARP_DTYPES, WARP_MAX_AXES, start_warp
from rlstructs.structures.arrays import tensor_to_array

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
