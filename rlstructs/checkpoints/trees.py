"""Files of nested dicts and lists, written by `torch.save`.

`files.tree_archive` reads them, as `torch.load` would.

numpy arrays, and arrays and keys of jax, are stored as tensors beside a note of their kind, because such a read makes
only tensors. Collections that it does not make are stored as lists.
"""

from __future__ import annotations

import copy
import io
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from rlstructs.checks import DTYPES
from rlstructs.errors import SpecError
from rlstructs.files.archives import NewFile
from rlstructs.files.opening import name_damage, open_file
from rlstructs.files.tree_archive import ARRAY, read_tree, weigh

# Types that `torch.load` reads as they are.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
# Values of a dict's key `ARRAY`: the kind of array that the dict stands for, or the name of a collection.
NUMPY, SCALAR, JAX, KEY, PARAMETER, SPARSE = "numpy", "numpy scalar", "jax", "jax key", "parameter", "sparse"
# Collections that are stored as lists of their items; the first two only if not all keys are texts and numbers.
COLLECTIONS = (dict, OrderedDict, Counter, set, frozenset, deque)
TEXT_OR_NUMBER = (str, int, float, bool)
# Types of keys; keys may also be tuples or frozensets of these.
KEYS = (*TEXT_OR_NUMBER, complex, bytes, type(None))


def save_tree(path: Path, name: str, tree: Any) -> None:
    """Writes a tree to a new file.

    Args:
        path: of the file.
        name: of the tree, for messages.
        tree: dicts, lists, tuples, sets, deques, tensors, numbers, texts, None, and arrays of numpy and jax.

    Raises:
        SpecError: it holds something else, which a read could not make.
        OSError: the file cannot be written.
    """
    encoded = encode_tree(name, tree)
    try:
        weigh(encoded, {})
    except ValueError as error:
        raise SpecError(f"{name} cannot be read again: {error}") from error
    try:
        with closing(NewFile(path)) as new:  # torch would raise a RuntimeError for a full disk
            torch.save(encoded, cast("IO[bytes]", new))
    except OSError as error:
        error.filename = str(path)
        raise


def load_tree(path: Path, data: bytes | None = None) -> Any:
    """Reads a tree; its tensors are in host memory.

    Args:
        path: of the file.
        data: its bytes, if they are read already.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is damaged.
    """
    with name_damage(f"{path}: damaged"), open_file(path) if data is None else io.BytesIO(data) as file:
        return _decode(read_tree(file))


def encode_tree(name: str, tree: Any) -> Any:
    """Replaces arrays and collections in a tree by what a file can hold.

    Parts without any stay the same objects. Raises what `save_tree` does.
    """
    kind = type(tree)
    if kind in (dict, OrderedDict) and all(type(key) in TEXT_OR_NUMBER and key != ARRAY for key in tree):
        return _replace_values(tree, {key: encode_tree(f"{name}[{key!r}]", value) for key, value in tree.items()})
    if kind in (list, tuple):
        parts = [encode_tree(f"{name}[{at}]", value) for at, value in enumerate(tree)]
        return tree if all(a is b for a, b in zip(parts, tree, strict=True)) else kind(parts)
    if kind in COLLECTIONS:
        return _encode_collection(name, tree)
    if torch.nn.parameter.is_lazy(tree):
        raise SpecError(f"{name} has no shape yet; save a lazy module after its first call")
    if isinstance(tree, torch.nn.Parameter):
        return {ARRAY: PARAMETER, "value": tree.detach(), "requires_grad": tree.requires_grad}
    if kind is torch.Tensor:
        return _encode_tensor(name, tree)
    if kind in PLAIN:
        return tree
    if isinstance(tree, (np.ndarray, np.generic)):
        return _encode_array(name, tree, NUMPY if isinstance(tree, np.ndarray) else SCALAR)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(tree, jax.Array):
        if jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
            made_by = str(jax.random.key_impl(tree))
            return {**_encode_array(name, np.asarray(jax.random.key_data(tree)), KEY), "key": made_by}
        return _encode_array(name, np.asarray(tree), JAX)
    raise SpecError(
        f"{name} is a {type(tree).__name__}, which a checkpoint cannot hold; expected dicts, lists, tuples, sets, "
        "tensors, arrays, numbers, texts or None, or an object with state_dict and load_state_dict"
    )


def _encode_tensor(name: str, tensor: torch.Tensor) -> Any:
    """Returns the tensor in a form that can be read back.

    A sparse one as a dict.
    """
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        is_coo = tensor.layout is torch.sparse_coo
        parts = (
            [tensor._indices(), tensor._values()]
            if is_coo
            else [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        )
        found = {ARRAY: SPARSE, "parts": [_encode_tensor(name, part.detach()) for part in parts]}
        return {**found, "size": list(tensor.shape), "is_coalesced": is_coo and tensor.is_coalesced()}
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else f"{tensor.layout}"
        raise SpecError(f"{name} is a tensor that a checkpoint cannot hold: {'meta' if tensor.is_meta else kind}")
    plain = tensor.detach() if vars(tensor) or tensor._backward_hooks else tensor
    if tensor.device.type not in ("cpu", "cuda", "mps", "xpu"):
        plain = plain.detach().cpu()
    plain = plain.resolve_conj().resolve_neg()
    if plain.numel() * plain.element_size() > plain.untyped_storage().nbytes():  # it was expanded
        plain = plain.contiguous()
    return plain if plain is tensor else plain.detach().requires_grad_(tensor.requires_grad)


def _replace_values(tree: Any, values: Mapping[Any, Any]) -> Any:
    """Returns a dict with these values; the same dict if they are unchanged."""
    if all(values[key] is value for key, value in tree.items()):
        return tree
    found = copy.copy(tree)  # which keeps the versions of modules that a state of torch has as an attribute
    found.update(values)
    return found


def _encode_collection(name: str, tree: Any) -> dict[str, Any]:
    kind = type(tree)
    if kind is deque:
        return {ARRAY: kind.__name__, "items": encode_tree(name, list(tree)), "maxlen": tree.maxlen}
    for key in tree:
        if not _is_key(key):
            raise SpecError(f"{name} has the key {key!r}; expected a text, a number, or a tuple of these")
    items = [encode_tree(f"{name}, its key {key!r}", key) for key in tree]
    if isinstance(tree, dict):
        values = [encode_tree(f"{name}[{key!r}]", value) for key, value in tree.items()]
        items = [*map(list, zip(items, values, strict=True))]
    return {ARRAY: kind.__name__, "items": items}


def _is_key(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return all(map(_is_key, key))
    return type(key) in KEYS or isinstance(key, np.generic)


def _encode_array(name: str, array: Any, kind: str) -> dict[str, Any]:
    array = np.asarray(array)
    dtype = array.dtype
    if dtype.name not in DTYPES and kind != JAX:
        raise SpecError(f"{name} is an array of {dtype}, which a checkpoint cannot hold; make it one of plain numbers")
    values = np.frombuffer(bytearray(np.ascontiguousarray(array, dtype.name).tobytes()), np.uint8)
    found = {ARRAY: kind, "dtype": dtype.name, "shape": list(array.shape), "bytes": torch.from_numpy(values)}
    return found if dtype.isnative else {**found, "order": dtype.byteorder}


def _decode(tree: Any) -> Any:
    if isinstance(tree, dict):
        if ARRAY not in tree:
            return _replace_values(tree, {key: _decode(value) for key, value in tree.items()})
        if tree[ARRAY] == PARAMETER:
            return torch.nn.Parameter(tree["value"], tree["requires_grad"])
        if tree[ARRAY] == SPARSE:
            return _decode_sparse(tree)
        return _decode_collection(tree) if "items" in tree else _decode_array(tree)
    if type(tree) in (list, tuple):
        parts = [_decode(value) for value in tree]
        return tree if all(a is b for a, b in zip(parts, tree, strict=True)) else type(tree)(parts)
    return tree


def _decode_collection(tree: Mapping[str, Any]) -> Any:
    kind: Any = {each.__name__: each for each in COLLECTIONS}[tree[ARRAY]]
    items = _decode(tree["items"])
    if kind is deque:
        return deque(items, tree["maxlen"])
    return kind(dict(items)) if issubclass(kind, dict) else kind(items)


def _decode_sparse(tree: Mapping[str, Any]) -> Any:
    is_csr = len(tree["parts"]) == 3
    make: Any = torch.sparse_csr_tensor if is_csr else torch.sparse_coo_tensor
    found = make(*tree["parts"], tree["size"], check_invariants=True)
    return found if is_csr else found._coalesced_(tree["is_coalesced"])


def _decode_array(tree: Mapping[str, Any]) -> Any:
    values: np.ndarray = tree["bytes"].numpy()
    kind = tree[ARRAY]
    if kind in (NUMPY, SCALAR):
        array = values.view(DTYPES[tree["dtype"]]).reshape(tree["shape"])
        return array.astype(array.dtype.newbyteorder(tree.get("order", "="))) if kind == NUMPY else array[()]
    import jax

    array = values.view(jax.numpy.dtype(tree["dtype"])).reshape(tree["shape"])  # bfloat16 too
    if kind == KEY:
        return jax.random.wrap_key_data(jax.numpy.array(array), impl=tree["key"])
    return jax.numpy.array(array)
