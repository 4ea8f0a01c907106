"""Memories of the three libraries, and arrays to and from each; the tests of memories share it.

A kind is a library, and where its memories keep their rows: "torch" in host memory, "torch-tensors" in
tensors as they do for a GPU, but on the CPU, and "torch-cuda" on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import warp as wp

from rlstructs.memories import jax as of_jax
from rlstructs.memories import torch as of_torch
from rlstructs.memories import warp as of_warp

LIBRARIES = {"torch": of_torch, "jax": of_jax, "warp": of_warp}


def _variant(library: str, where: str):
    """Memories of a library whose rows lie elsewhere, as a module would have them."""
    module, on_gpu = LIBRARIES[library], where == "cuda"
    framework = type(module.Memory.framework)

    class Framework(framework):
        def device(self, device):
            return super().device(("cuda:0" if on_gpu else "cpu") if device is None else device)

        def device_of_rows(self, device):
            return torch.device("cpu") if where == "tensors" else super().device_of_rows(device)

        def to_torch(self, value):
            if where == "tensors" and isinstance(value, jax.Array | wp.array):
                return torch.from_dlpack(value) if library == "jax" else wp.to_torch(value)
            return super().to_torch(value)

    made, kind = {"framework": Framework(), "__module__": __name__}, f"{library.title()}{where.title()}"
    classes = {}
    for name in module.__all__:
        own = f"{name}Of{kind}"
        classes[name] = globals()[own] = type(own, (getattr(module, name),), made | {"__qualname__": own})
    Framework.__qualname__ = f"FrameworkOf{kind}"  # memories are pickled with theirs
    globals()[Framework.__qualname__] = Framework
    return SimpleNamespace(**classes)


# On a machine with a GPU that is the default device; these are to be on the host all the same.
KINDS = {name: _variant(name, "host") if torch.cuda.is_available() else LIBRARIES[name] for name in LIBRARIES}
KINDS |= {f"{name}-tensors": _variant(name, "tensors") for name in LIBRARIES}
ON_HOST = list(LIBRARIES)
CUDA = {f"{name}-cuda": _variant(name, "cuda") for name in LIBRARIES}


def _has_cuda(kind):
    """Whether torch and the library have a GPU."""
    if not torch.cuda.is_available():
        return False
    return "gpu" in {device.platform for device in jax.devices()} if library(kind) == "jax" else True


def library(kind):
    """The library of a kind."""
    return kind.partition("-")[0]


# For pytest; those that need a GPU are skipped without one.
EVERY_KIND = [*KINDS] + [
    pytest.param(kind, marks=[pytest.mark.cuda, pytest.mark.skipif(not _has_cuda(kind), reason=f"no GPU for {kind}")])
    for kind in CUDA
]
KINDS |= CUDA
# jax has no 64 bits by default.
NARROW = {"int64": "int32", "float64": "float32"}


def name_of(kind, name):
    """What a library makes of the dtype of this name."""
    return NARROW.get(name, name) if library(kind) == "jax" else name


def dtype(kind, name):
    """A library's own dtype."""
    name = name_of(kind, name)
    return jnp.dtype(name) if library(kind) == "jax" else getattr({"torch": torch, "warp": wp}[library(kind)], name)


def array(kind, values, name=None):
    """One of the library's arrays; of float32 where `values` has floats and no dtype is named."""
    values = np.array(values)
    if name is None:
        name = "float32" if values.dtype.kind == "f" else values.dtype.name
    where = "cuda:0" if kind in CUDA else "cpu"
    if library(kind) == "torch":
        return torch.from_numpy(values).to(where, dtype(kind, name))
    if library(kind) == "jax":
        return jax.device_put(jnp.array(values, dtype(kind, name)), jax.devices("gpu" if kind in CUDA else "cpu")[0])
    return wp.array(values, dtype=dtype(kind, name), device=where)


def host(value):
    """numpy's view of a library's array, a copy from a GPU; bfloat16 as float32."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    value = value.numpy() if isinstance(value, wp.array) else np.asarray(value)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def change(value, at, number):
    """Writes to the memory of an array of torch or warp."""
    if isinstance(value, wp.array):
        value = wp.to_torch(value)
    value[at] = number


def share_memory(one, other):
    """Whether arrays of torch or warp are of the same memory."""
    first, second = (wp.to_torch(value) if isinstance(value, wp.array) else value for value in (one, other))
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def kind_of(memory):
    """The kind of a memory."""
    return next(kind for kind, module in KINDS.items() if type(memory) in vars(module).values())


def dtype_name(kind, value):
    """The name of an array's dtype."""
    if library(kind) == "torch":
        return str(value.dtype).removeprefix("torch.")
    return value.dtype.__name__ if library(kind) == "warp" else value.dtype.name


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
