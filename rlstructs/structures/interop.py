"""Handing tensors to numpy, jax, warp and tensordict, and taking them back.

What leaves is private memory unless a view is asked for by name: on a CPU several of these libraries
alias host memory without saying so. Each is imported when it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.frameworks.dtypes import FLOAT8, SIGNED

Tree = dict[str, Any]  # name -> tensor, or name -> Tree

WARP_MAX_AXES = 4
WARP_DTYPES = "bool, integers of 8 to 64 bits, float16, bfloat16, float32 and float64"
_START_LOCK = threading.Lock()


def map_tree(function: Callable[[Any], Any], tree: Mapping[str, Any]) -> Tree:
    """The same tree of what `function` makes of each leaf."""
    return {
        name: map_tree(function, leaf) if isinstance(leaf, Mapping) else function(leaf)
        for name, leaf in tree.items()
    }


def _map_named(function: Callable[[str, Any], Any], tree: Mapping[str, Any]) -> Tree:
    return {
        name: _map_named(function, leaf) if isinstance(leaf, Mapping) else function(name, leaf)
        for name, leaf in tree.items()
    }


def host_array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array, which shares its memory where that can be.

    Raises:
        SpecError: numpy has not this dtype.
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return host.numpy()
    except TypeError as error:
        wide = "complex64" if tensor.dtype.is_complex else "float32"
        dtype = named(tensor.dtype)
        raise SpecError(f"{name!r} is {dtype}, which numpy has not; convert it to {wide} first") from error


def named(dtype: torch.dtype) -> str:
    """The name of a dtype, without that of torch."""
    return str(dtype).removeprefix("torch.")


def to_numpy(tree: Mapping[str, Any], view: bool) -> Tree:
    def convert(name: str, tensor: torch.Tensor) -> np.ndarray:
        array = host_array(name, tensor)
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
            raise SpecError(f"{name!r} is read-only; a tensor that views it could be written to")
        return _from_host(name, array)

    return _map_named(convert, arrays)


def to_jax(tree: Mapping[str, Any]) -> Tree:
    import jax.numpy as jnp

    def convert(name: str, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bfloat16:
            return jnp.array(host_array(name, tensor.float()), dtype=jnp.bfloat16)
        if tensor.dtype in FLOAT8 and hasattr(jnp, named(tensor.dtype)):
            bits = host_array(name, tensor.detach().contiguous().view(torch.uint8))
            return jnp.array(bits.view(np.dtype(getattr(jnp, named(tensor.dtype)))))
        if tensor.dtype == torch.complex32:
            raise SpecError(f"{name!r} is complex32, which jax has not; convert it to complex64 first")
        array = fitting_jax(name, host_array(name, tensor))
        # jnp.array copies; device_put would alias aligned host memory.
        return jnp.array(array)

    return _map_named(convert, tree)


def fitting_jax(name: str, array: np.ndarray) -> np.ndarray:
    """An array in a dtype that jax has now: in 32 bits for 64, unless jax_enable_x64 is set.

    Raises:
        SpecError: an integer does not fit.
    """
    import jax

    if array.dtype.itemsize < 8 or array.dtype == np.complex64 or jax.config.jax_enable_x64:
        return array
    if array.dtype.kind in "iu":
        return _as_32_bits(name, array)
    return array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)


def _as_32_bits(name: str, array: np.ndarray) -> np.ndarray:
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
        if signed is not None:  # which warp has, but takes from no tensor
            return wp.from_torch(source.view(signed), dtype=getattr(wp, named(tensor.dtype)))
        try:
            return wp.from_torch(source)  # keeps `source` alive
        except TypeError as error:
            raise SpecError(
                f"{name!r} is {named(tensor.dtype)}, which warp has not; convert it first, to one of {WARP_DTYPES}"
            ) from error

    return _map_named(convert, tree)


def from_warp(arrays: Mapping[str, Any], view: bool) -> Tree:
    wp = start_warp()
    return map_tree(lambda array: wp.to_torch(array) if view else wp.to_torch(array).clone(), arrays)


def to_tensordict(tree: Mapping[str, Any], n_elems: int, device: torch.device | None = None) -> Any:
    from tensordict import TensorDict

    flat = TensorDict(_nested(tree), batch_size=[], device=device)
    if all(tensor.ndim > 0 for tensor in flat.values(include_nested=True, leaves_only=True)):
        flat.batch_size = [n_elems]
    return flat


def _nested(tree: Mapping[str, Any]) -> Tree:
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
        inner[last] = _nested(leaf) if isinstance(leaf, Mapping) else leaf
    return nested


def from_tensordict(tensordict: Any) -> Tree:
    return {
        name: from_tensordict(leaf) if not isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in tensordict.items()
    }


@functools.cache
def start_warp() -> Any:
    """The warp module, ready for use."""
    import warp as wp

    # Its start-up text, and its warning where there is no GPU, would land in a program's own output.
    no_driver = b"Could not find or load the NVIDIA CUDA driver"
    with quiet_warp(), contextlib.nullcontext() if _has_cuda_driver() else _without_lines(no_driver):
        wp.init()
    return wp


@contextlib.contextmanager
def quiet_warp() -> Iterator[None]:
    """Warp says nothing meanwhile: neither that it starts nor that it compiles a kernel."""
    import warp as wp

    with _START_LOCK:
        level = wp.config.log_level
        wp.config.log_level = wp.LOG_ERROR
        try:
            yield
        finally:
            wp.config.log_level = level


@contextlib.contextmanager
def _without_lines(unwanted: bytes) -> Iterator[None]:
    """Holds back what is written to descriptor 2 meanwhile, and then lets it through but for such lines.

    No setting of warp reaches this text: its C code writes it.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed: nobody reads it
        yield
        return
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(stderr, 2)
                held.seek(0)
                with open(2, "wb", closefd=False) as out:
                    out.writelines(line for line in held if unwanted not in line)
    finally:
        os.close(stderr)


def _has_cuda_driver() -> bool:
    for name in ("libcuda.so", "libcuda.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False
