"""Files of nested dicts and lists: `torch.save` writes them, `torch.load(weights_only=True)` reads them.

numpy arrays, and arrays and keys of jax, are stored as tensors beside what they were, because such a read makes none.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import DTYPES, clean_text
from rlstructs.errors import FileError, SpecError

# What `torch.load` reads as it is.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
# The key of a dict that stands for an array, with what kind of array it is.
ARRAY, NUMPY, SCALAR, JAX, KEY = "__array__", "numpy", "numpy scalar", "jax", "jax key"


def save_tree(path: Path, name: str, tree: Any) -> None:
    """Writes a tree to a new file.

    Args:
        path: of the file.
        name: of the tree, for messages.
        tree: dicts, lists, tuples, tensors, numbers, texts, None, and arrays of numpy and jax.

    Raises:
        SpecError: there is something else in it, which no read would make.
    """
    torch.save(encode_tree(name, tree), path)


def load_tree(path: Path) -> Any:
    """Reads a tree; its tensors are in host memory.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is damaged.
    """
    try:
        return _decode(torch.load(path, map_location="cpu", weights_only=True))
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # torch may raise anything for arbitrary bytes
        raise FileError(f"{path}: damaged: {clean_text(error)}") from error


def encode_tree(name: str, tree: Any) -> Any:
    """Replaces arrays in a tree; a part without any stays the same object. Raises what `save_tree` does."""
    if isinstance(tree, (dict, OrderedDict)) and type(tree) in (dict, OrderedDict):
        found = {key: encode_tree(f"{name}[{key!r}]", value) for key, value in tree.items()}
        for key in tree:
            if type(key) not in (str, int, float, bool) or key == ARRAY:
                raise SpecError(f"{name} has the key {key!r}; needed is a text or a number")
        return tree if all(found[key] is value for key, value in tree.items()) else found
    if type(tree) in (list, tuple):
        parts = [encode_tree(f"{name}[{at}]", value) for at, value in enumerate(tree)]
        return tree if all(a is b for a, b in zip(parts, tree, strict=True)) else type(tree)(parts)
    if isinstance(tree, torch.nn.Parameter):
        return tree.detach()
    if type(tree) in PLAIN:
        return tree
    if isinstance(tree, (np.ndarray, np.generic)):
        return _encode_array(name, tree, NUMPY if isinstance(tree, np.ndarray) else SCALAR)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(tree, jax.Array):
        if jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
            kind = str(jax.random.key_impl(tree))
            return {**_encode_array(name, np.asarray(jax.random.key_data(tree)), KEY), "key": kind}
        return _encode_array(name, np.asarray(tree), JAX)
    raise SpecError(
        f"{name} is a {type(tree).__name__}, which a checkpoint cannot hold; needed are dicts, lists, tuples, tensors, "
        "arrays, numbers, texts or None, or an object with state_dict and load_state_dict"
    )


def _encode_array(name: str, array: Any, kind: str) -> dict[str, Any]:
    array = np.asarray(array)
    dtype = array.dtype
    if dtype.name not in DTYPES and kind != JAX:
        raise SpecError(f"{name} is an array of {dtype}, which a checkpoint cannot hold; make it one of plain numbers")
    values = np.frombuffer(bytearray(np.ascontiguousarray(array, dtype.name).tobytes()), np.uint8)
    return {ARRAY: kind, "dtype": dtype.name, "shape": list(array.shape), "bytes": torch.from_numpy(values)}


def _decode(tree: Any) -> Any:
    if isinstance(tree, dict):
        if ARRAY in tree:
            return _decode_array(tree)
        found = {key: _decode(value) for key, value in tree.items()}
        return tree if all(found[key] is value for key, value in tree.items()) else found
    if type(tree) in (list, tuple):
        parts = [_decode(value) for value in tree]
        return tree if all(a is b for a, b in zip(parts, tree, strict=True)) else type(tree)(parts)
    return tree


def _decode_array(tree: Mapping[str, Any]) -> Any:
    values: np.ndarray = tree["bytes"].numpy()
    kind = tree[ARRAY]
    if kind in (NUMPY, SCALAR):
        array = values.view(DTYPES[tree["dtype"]]).reshape(tree["shape"])
        return array.copy() if kind == NUMPY else array[()]
    import jax

    array = values.view(jax.numpy.dtype(tree["dtype"])).reshape(tree["shape"])  # bfloat16 too
    if kind == KEY:
        return jax.random.wrap_key_data(jax.numpy.array(array), impl=tree["key"])
    return jax.numpy.array(array)
