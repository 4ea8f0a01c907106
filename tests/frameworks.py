"""Memories of the three libraries, and arrays to and from each; the tests of memories share it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
import warp as wp

from rlstructs.memories import jax as of_jax
from rlstructs.memories import torch as of_torch
from rlstructs.memories import warp as of_warp

KINDS = {"torch": of_torch, "jax": of_jax, "warp": of_warp}
# jax has no 64 bits by default.
NARROW = {"int64": "int32", "float64": "float32"}


def name_of(kind, name):
    """What a library makes of the dtype of this name."""
    return NARROW.get(name, name) if kind == "jax" else name


def dtype(kind, name):
    """A library's own dtype."""
    name = name_of(kind, name)
    return getattr(torch, name) if kind == "torch" else getattr(wp, name) if kind == "warp" else jnp.dtype(name)


def array(kind, values, name=None):
    """One of the library's arrays; of float32 where `values` has floats and no dtype is named."""
    values = np.array(values)
    if name is None:
        name = "float32" if values.dtype.kind == "f" else values.dtype.name
    if kind == "torch":
        return torch.from_numpy(values).to(dtype(kind, name))
    if kind == "jax":
        return jnp.array(values, dtype(kind, name))
    return wp.array(values, dtype=dtype(kind, name), device="cpu")


def host(value):
    """numpy's view of a library's array; bfloat16 as float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    value = value.numpy() if isinstance(value, wp.array) else np.asarray(value)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def dtype_name(kind, value):
    """The name of an array's dtype."""
    if kind == "torch":
        return str(value.dtype).removeprefix("torch.")
    return value.dtype.__name__ if kind == "warp" else value.dtype.name


def flat(value):
    """Its numbers as one plain list."""
    return host(value).ravel().tolist()


def make(kind, memory_size, num_envs=1, tensors=(), *, cls="RandomMemory", **settings):
    """A memory with float tensors of one number per row, or with the dtypes and sizes in `tensors`."""
    memory = getattr(KINDS[kind], cls)(memory_size=memory_size, num_envs=num_envs, seed=0, **settings)
    for name in tensors:
        wanted, size = tensors[name] if isinstance(tensors, dict) else ("float32", 1)
        assert memory.create_tensor(name, size=size, dtype=dtype(kind, wanted), keep_dimensions=isinstance(size, tuple))
    return memory


def add(memory, kind, **values):
    """`add_samples` of the library's arrays, made from what numpy takes."""
    memory.add_samples(**{name: array(kind, value) for name, value in values.items()})


def counted(kind, memory_size, num_envs, n_rows, **settings):
    """A memory in which `t` is the number of the row and `e` the environment."""
    memory = make(kind, memory_size, num_envs, ["t", "e"], **settings)
    for t in range(n_rows):
        add(memory, kind, t=np.full((num_envs, 1), float(t)), e=np.arange(float(num_envs))[:, None])
    return memory


def snapshot(memory):
    """All that there is in a memory, to be compared."""
    tensors = {name: host(memory.get_tensor_by_name(name)).tobytes() for name in memory.get_tensor_names()}
    return tensors, len(memory), memory.memory_index, memory.env_index, memory.filled
