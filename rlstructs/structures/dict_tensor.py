"""`DictTensor`: named tensors over one batch axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.checks import hint_batch_first
from rlstructs.errors import SpecError
from rlstructs.structures.tree import (
    TensorMap,
    check_alike,
    check_parts,
    check_same_keys,
    flatten,
    put_rows,
    show,
    show_fields,
)
from rlstructs.workers.public_names import set_module

# More than any number of rows; torch refuses steps near 2**63.
LARGEST_STEP = 1 << 40
Index = Any  # an int, a list of ints, an int64 tensor, a bool mask, a numpy array or a slice


@set_module("rlstructs")
class DictTensor(TensorMap):
    """An ordered map name -> tensor whose axis 0 is the batch.

    The mapping is copied, the tensors are not. Nested mappings are flattened: `{"a": {"b": t}}` has the key `a/b`.
    Tensors without axes, such as losses, are allowed too.

    Args:
        tensors: name -> tensor (B, ...); None for no tensors.

    Raises:
        TypeError: a value is not a tensor, or a key not a string.
        SpecError: a tensor has another batch size or device than the first one, or two keys are the same once
            joined; the message names the key.

    Example:
        >>> d = DictTensor({"x": torch.zeros(3, 2), "y": torch.arange(3)})
        >>> d
        DictTensor(n_elems=3, device=cpu, x=(3, 2) float32, y=(3,) int64)
        >>> d.index([2, 0])["y"]
        tensor([2, 0])
        >>> d.slice(0, 2).n_elems()
        2
    """

    _kind = "DictTensor"
    _tensors: Mapping[str, torch.Tensor]

    def __init__(self, tensors: Mapping[str, Any] | TensorMap | None = None) -> None:
        self._tensors = {} if tensors is None else flatten(tensors, "DictTensor")
        if len(self._tensors) > 1:  # skipped for agents, which make one with a single tensor at every step
            _check(self._tensors.items())

    @classmethod
    def trusted(cls, tensors: Mapping[str, torch.Tensor]) -> DictTensor:
        """Wraps a valid flat mapping without checks or a copy, for hot loops."""
        made = cls.__new__(cls)
        made._tensors = tensors
        return made

    def _tree(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    @classmethod
    def _from_tree(cls, tree: Mapping[str, Any]) -> DictTensor:
        return cls(tree)

    @classmethod
    def _from_trusted(cls, tree: dict[str, Any]) -> DictTensor:
        return cls.trusted(tree)

    def n_elems(self) -> int:
        """Number of rows, B; 0 if no tensor has an axis."""
        for tensor in self._tensors.values():
            if tensor.ndim:
                return tensor.shape[0]
        return 0

    def device(self) -> torch.device | None:
        """The device of the tensors; None if there are none."""
        return next((tensor.device for tensor in self._tensors.values()), None)

    def specs(self) -> dict[str, dict[str, Any]]:
        """`{name: {"size": shape without the batch axis, "dtype": dtype}}`."""
        return {key: {"size": t.shape[1:], "dtype": t.dtype} for key, t in self._tensors.items()}

    def get(self, keys: Iterable[str], clone: bool = False) -> DictTensor:
        """A DictTensor of some of the tensors, which are shared unless `clone`.

        Raises:
            MissingKeyError: there is no such key.
        """
        picked = DictTensor.trusted(self._pick(keys))
        return picked.clone() if clone else picked

    def set(self, key: str, value: torch.Tensor) -> DictTensor:
        """Adds or replaces a tensor (B, ...), in place.

        An empty object takes any B.

        Returns:
            This object.

        Raises:
            TypeError: the value is not a tensor; nothing changes.
            SpecError: it has another batch size or device; nothing changes.
        """
        made = flatten({key: value}, "DictTensor")
        _check([*self._tensors.items(), *made.items()])  # the new tensor must fit the one that it replaces too
        self._tensors = {**self._tensors, **made}
        return self

    def unset(self, key: str) -> None:
        """Removes a tensor, in place.

        Raises:
            MissingKeyError: there is no such key.
        """
        self[key]  # raises if it is missing
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name != key}

    def unset_key(self, prefix: str) -> None:
        """Removes the tensors whose names start with `prefix`, in place."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(prefix)}

    def index(self, index: Index) -> DictTensor:
        """The rows at `index`.

        Args:
            index: an int drops the batch axis; a slice gives views; a list, an int64 tensor or a bool mask (B,) gives
                a copy.

        Raises:
            IndexError: the index is out of range, or of another type.
        """
        index = as_index(index)
        return DictTensor.trusted({key: tensor[index] for key, tensor in self._tensors.items()})

    def slice(self, index_from: int, index_to: int | None = None) -> DictTensor:
        """Returns views of rows `index_from` to `index_to - 1`.

        With one argument, of that row, without the batch axis.
        """
        return self.index(index_from if index_to is None else slice(index_from, index_to))

    def unfold(self) -> list[DictTensor]:
        """B views of one row each, with the batch axis."""
        return [self.slice(row, row + 1) for row in range(self.n_elems())]

    @staticmethod
    def cat(tensors: Iterable[DictTensor]) -> DictTensor:
        """Concatenates the rows of all items in a copy.

        Dtypes are promoted as in `torch.cat`.

        Raises:
            MissingKeyError, SpecError: the items differ in keys, row shapes or devices.
        """
        parts = check_parts(DictTensor, tensors)
        for number, part in enumerate(parts):
            check_same_keys(f"DictTensor.cat: item {number}", parts[0], part)
        columns = {key: [part[key] for part in parts] for key in (parts[0] if parts else ())}
        for key, column in columns.items():
            check_alike("DictTensor.cat", key, column, axes=1)
        return DictTensor.trusted({key: torch.cat(column) for key, column in columns.items()})

    def prepend_key(self, prefix: str) -> DictTensor:
        """Adds `prefix` to each name; the tensors are shared."""
        return DictTensor.trusted({prefix + key: tensor for key, tensor in self._tensors.items()})

    def truncate_key(self, prefix: str) -> DictTensor:
        """The tensors whose names start with `prefix`, without it in their names."""
        return DictTensor.trusted(
            {key[len(prefix) :]: tensor for key, tensor in self._tensors.items() if key.startswith(prefix)}
        )

    def __add__(self, other: DictTensor) -> DictTensor:
        """The tensors of both, shared with both.

        Raises:
            SpecError: a name is in both, or batch sizes or devices differ.
        """
        if not isinstance(other, DictTensor):
            return NotImplemented
        if both := self._tensors.keys() & other._tensors.keys():
            raise SpecError(f"DictTensor: key(s) {sorted(both)} are on both sides of +")
        return DictTensor({**self._tensors, **other._tensors})

    def copy_(self, source: DictTensor, source_indexes: Index, destination_indexes: Index) -> None:
        """Copies rows of `source` to rows of this object, in place.

        Args:
            source: has at least the keys of this object, with the same dtypes and row shapes.
            source_indexes: int64 (K,) or a list: the rows to read.
            destination_indexes: int64 (K,) or a list: the rows to write.

        Raises:
            MissingKeyError, SpecError, IndexError: an argument does not fit; nothing changes.
        """
        rows_from, rows_to = check_copy("DictTensor.copy_", self, source, source_indexes, destination_indexes)
        for key, tensor in self._tensors.items():
            put_rows(tensor, rows_to, source[key][rows_from])

    def __repr__(self) -> str:
        return show_fields(self._head(), self)

    def _head(self) -> str:
        """The beginning of the repr."""
        return f"DictTensor(n_elems={self.n_elems()}, device={self.device()}"


def as_index(index: Index) -> Any:
    """Converts an index to an int, a slice, or a tensor (K,).

    The tensor is int64 or bool.

    Raises:
        IndexError: it is of another type.
    """
    if isinstance(index, slice) and index.step is not None and index.step < 1:
        raise IndexError(f"a slice must go forward, got {index}")
    if isinstance(index, slice) and index.step is not None:
        return slice(index.start, index.stop, min(index.step, LARGEST_STEP))
    if type(index) is int or isinstance(index, slice):
        return index
    if not isinstance(index, torch.Tensor):
        array = np.asarray(index)
        if array.size == 0 and not isinstance(index, np.ndarray):
            array = array.astype(np.int64)
        if array.dtype.kind not in "biu":
            raise IndexError(f"an index must be integers, a bool mask or a slice, got {index!r}")
        index = torch.from_numpy(array.astype(np.bool_ if array.dtype.kind == "b" else np.int64))
    # uint8 is refused: torch takes it for a mask, numpy for integers.
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.bool):
        raise IndexError(f"an index must be integers, a bool mask or a slice, got {show(index)}")
    if index.ndim > 1 or (index.ndim == 0 and index.dtype == torch.bool):
        raise IndexError(f"an index must have one axis, got {show(index)}")
    if index.ndim == 0:
        return int(index)
    return index if index.dtype == torch.bool else index.long()


def check_copy(
    owner: str, target: TensorMap, source: TensorMap, source_index: Index, destination_index: Index
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both indexes as int64 (K,), after checking the rows.

    Raises unless these rows of `source` fit the rows of `target`.
    """
    indexes = as_index(source_index), as_index(destination_index)
    for name, part, index in zip(("source", "destination"), (source, target), indexes, strict=True):
        if not isinstance(index, torch.Tensor) or index.dtype != torch.int64:
            raise IndexError(f"{owner}: the {name} index must be int64 (K,), got {index}")
        rows = part.n_elems()
        if len(index) and not (-rows <= int(index.min()) and int(index.max()) < rows):
            raise IndexError(f"{owner}: the {name} index is out of range for {rows} rows")
    if len(indexes[0]) != len(indexes[1]):
        raise SpecError(f"{owner}: got {len(indexes[0])} rows to read and {len(indexes[1])} to write")
    axes = 1 if isinstance(target, DictTensor) else 2
    for key, tensor in target.items():
        other = source[key]
        fits = other.dtype == tensor.dtype and other.shape[axes:] == tensor.shape[axes:]
        if not fits or min(tensor.ndim, other.ndim) < axes:
            raise SpecError(f"{owner}: {key!r} is {show(other)} in the source, expected {show(tensor)}")
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            raise SpecError(f"{owner}: {key!r} is a leaf that requires a gradient, into which torch does not write")
    return indexes


def masked_tensor(tensor0: torch.Tensor, tensor1: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns rows of `tensor1` where `mask` is set, otherwise of `tensor0`.

    The result is a new tensor.

    A number between 0 and 1 blends two rows: `tensor0 * (1 - mask) + tensor1 * mask`, in the dtype of `tensor0`. All
    other rows are exact for every dtype, and rows that are not selected have no influence, even if they hold NaN.

    Args:
        tensor0: (B, ...).
        tensor1: the same shape and dtype.
        mask: (B,), bool, or numbers from 0 to 1.

    Raises:
        TypeError: the mask is not a tensor.
        SpecError: shapes or dtypes differ, or the mask has another size or holds other numbers.

    Example:
        >>> masked_tensor(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]), torch.tensor([0, 1, 0]))
        tensor([ 1, 20,  3])
        >>> masked_tensor(torch.zeros(2), torch.full((2,), 4.0), torch.tensor([1.0, 0.25]))
        tensor([4., 1.])
    """
    return _masked("masked_tensor:", tensor0, tensor1, mask)


def _masked(owner: str, tensor0: torch.Tensor, tensor1: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{owner} mask must be a tensor, got {type(mask).__name__}")
    shape0, shape1, n = tuple(tensor0.shape), tuple(tensor1.shape), mask.numel()
    if shape0 != shape1 or tensor0.dtype != tensor1.dtype:
        hint = hint_batch_first(shape0, n) or hint_batch_first(shape1, n)
        raise SpecError(f"{owner} tensor1 is {show(tensor1)}, expected {show(tensor0)} as tensor0{hint}")
    if mask.ndim != 1 or tensor0.ndim == 0 or n != shape0[0]:
        hint = hint_batch_first(shape0, n)
        raise SpecError(f"{owner} mask is {show(mask)}, expected one value per row of {show(tensor0)}{hint}")
    share = mask.view(-1, *[1] * (tensor0.ndim - 1))
    if mask.dtype == torch.bool:
        return torch.where(share, tensor1, tensor0)
    is_one, is_zero = share == 1, share == 0
    if not bool((is_one | is_zero).all()):
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise SpecError(f"{owner} mask must be bool, or hold numbers from 0 to 1")
        blend = (tensor0 * (1 - share) + tensor1 * share).to(tensor0.dtype)
        tensor0 = torch.where(is_zero, tensor0, blend)
    return torch.where(is_one, tensor1, tensor0)


def masked_dicttensor(dicttensor0: DictTensor, dicttensor1: DictTensor, mask: torch.Tensor) -> DictTensor:
    """Applies `masked_tensor` to every key.

    Raises:
        MissingKeyError: the keys differ.
        SpecError: the keys differ, or `masked_tensor` refuses the tensors of one; the message names the key.
    """
    check_same_keys("masked_dicttensor: dicttensor1", dicttensor0.keys(), dicttensor1.keys())
    made = {}
    for key, tensor in dicttensor0.items():
        made[key] = _masked(f"masked_dicttensor: {key!r}:", tensor, dicttensor1[key], mask)
    return DictTensor.trusted(made)


def _check(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises SpecError unless all tensors have one batch size and one device."""
    first, known = None, None
    for key, tensor in tensors:
        if first is None:
            first = key
            device = tensor.device
        elif tensor.device != device:
            raise SpecError(f"DictTensor: {key!r} is on {tensor.device}, expected {device} (from {first!r})")
        if tensor.ndim:
            if known is None:
                known, source = tensor, key
            elif len(tensor) != len(known):
                hint = _hint_permuted(source, known, len(tensor)) or _hint_permuted(key, tensor, len(known))
                raise SpecError(
                    f"DictTensor: {key!r} has batch size {len(tensor)}, expected {len(known)} (from {source!r}){hint}"
                )


def _hint_permuted(key: str, tensor: torch.Tensor, n: int) -> str:
    """Returns a hint for a tensor with n rows on its second axis.

    "" for any other tensor.
    """
    hint = hint_batch_first(tuple(tensor.shape), n)
    return hint and f"; {key!r} has shape {tuple(tensor.shape)}, expected ({n}, ...){hint}"
