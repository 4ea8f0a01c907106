"""The base classes of the three structures, which are trees of tensors.

A structure defines its tree (`_tree`) and how it is made from one (`_from_tree`). Copying, moving, comparing,
converting and saving are written here, once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlstructs.errors import FileError, MissingKeyError, SpecError
from rlstructs.files import layout
from rlstructs.frameworks.torch import (
    CARRIERS,
    UNSUPPORTED,
    as_device,
    dtype_error,
    dtype_name,
    from_picklable,
    to_picklable,
)
from rlstructs.structures import arrays as convert
from rlstructs.structures.arrays import Tree, map_tree

S = TypeVar("S", bound="Structure")


class Structure:
    """A tree of tensors that share their batch axis."""

    # The name of the class in files; users' subclasses inherit it.
    _kind: str
    # A hash of the content would change with it, because tensors are mutable.
    __hash__ = None  # type: ignore[assignment]

    def _tree(self) -> Mapping[str, Any]:
        """The tensors, not copied: name -> tensor, or name -> such a mapping."""
        raise NotImplementedError

    def _shown(self) -> Mapping[str, Any]:
        """The part of the tree that other libraries are given."""
        return self._tree()

    @classmethod
    def _from_tree(cls: type[S], tree: Tree) -> S:
        """Makes a structure from a tree and checks it."""
        raise NotImplementedError

    @classmethod
    def _from_trusted(cls: type[S], tree: Tree) -> S:
        """Makes a structure from a tree of `_tree`, without checks.

        Checks would read lengths, which waits for a GPU.
        """
        raise NotImplementedError

    def n_elems(self) -> int:
        """Number of rows, B."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.n_elems()

    def _map(self: S, function: Callable[[torch.Tensor], torch.Tensor]) -> S:
        return self._from_trusted(map_tree(function, self._tree()))

    def clone(self: S) -> S:
        """Copies every tensor; gradients flow back to the originals."""
        return self._map(torch.clone)

    def to(self: S, device: torch.device | str, non_blocking: bool = False) -> S:
        """Moves all tensors to a device; shares those that are there already.

        Args:
            device: the target.
            non_blocking: whether copies from pinned memory to a GPU may overlap with what follows.
        """
        target = as_device(device)
        return self._map(lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def __reduce__(self) -> Any:
        return _unpickle, (type(self), map_tree(to_picklable, self._tree()))  # torch cannot pickle every dtype

    def pin_memory(self: S) -> S:
        """Returns a copy in page-locked host memory.

        Copies from there to a GPU can be asynchronous.

        Raises:
            RuntimeError: torch finds no accelerator.
        """
        return self._map(torch.Tensor.pin_memory)

    def share_memory_(self: S) -> S:
        """Moves every tensor to shared memory, in place; returns this object."""
        map_tree(torch.Tensor.share_memory_, self._tree())
        return self

    def __eq__(self, other: object) -> bool:
        """Whether class, names, shapes, dtypes and values are the same; NaN equals NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return _equal_trees(self._content(), other._content())

    def _content(self) -> Mapping[str, Any]:
        """The part of the tree that `==` compares."""
        return self._tree()

    def numpy(self, view: bool = False) -> dict[str, Any]:
        """The tensors, and `lengths` if there are any, as numpy arrays: `{name: array}`.

        Args:
            view: whether arrays share memory with tensors on the CPU; otherwise they are copies.

        Raises:
            SpecError: numpy lacks a dtype.
        """
        return convert.to_numpy(self._shown(), view)

    def jax(self, view: bool = False) -> dict[str, Any]:
        """The tensors as jax arrays; 64-bit numbers become 32-bit unless jax_enable_x64 is set.

        Args:
            view: whether arrays share memory with the tensors, which then must not change; those that jax has to
                convert, or that are not contiguous, are copies nevertheless. Otherwise all are copies.

        Raises:
            SpecError: an integer does not fit into 32 bits, or jax lacks a dtype.
        """
        return convert.to_jax(self._shown(), view)

    def warp(self, view: bool = False) -> dict[str, Any]:
        """The tensors as warp arrays.

        Args:
            view: whether arrays share memory with the tensors; otherwise they are copies.

        Raises:
            SpecError: a tensor has no axis, more than 4, or a dtype that warp lacks.
        """
        return convert.to_warp(self._shown(), view)

    @classmethod
    def from_numpy(cls: type[S], arrays: Mapping[str, Any], *, view: bool = False) -> S:
        """Makes a structure from the result of `numpy()`; copies the arrays unless `view`."""
        return cls._from_tree(convert.from_numpy(arrays, view))

    @classmethod
    def from_jax(cls: type[S], arrays: Mapping[str, Any]) -> S:
        """Makes a structure from the result of `jax()`; copies the arrays."""
        return cls._from_tree(convert.from_jax(arrays))

    @classmethod
    def from_warp(cls: type[S], arrays: Mapping[str, Any], *, view: bool = False) -> S:
        """Makes a structure from the result of `warp()`; copies the arrays unless `view`."""
        return cls._from_tree(convert.from_warp(arrays, view))

    def to_tensordict(self) -> Any:
        """A `tensordict.TensorDict` of the same tensors, not copied; its batch size is (B,).

        A key with `/` becomes a key of a nested TensorDict. Needs the extra `tensordict`.
        """
        return convert.to_tensordict(self._shown(), [self.n_elems()])

    @classmethod
    def from_tensordict(cls: type[S], tensordict: Any) -> S:
        """Makes a structure from a `tensordict.TensorDict`, whose tensors it shares."""
        return cls._from_tree(convert.from_tensordict(tensordict))

    def save(self, path: str | Path, *, compress: bool = False) -> None:
        """Writes a file; replaces an existing one only when the new one is complete.

        Args:
            path: ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`).
            compress: whether tensors of uint8 and bool with 512 bytes or more per row are compressed, and next
                observations stored only where they differ from the observations that follow. Needs the extra `zstd`.

        Raises:
            FileError: the path has another ending, or a name is not possible in such a file.
            ImportError: there is no zstd.
            OSError: the file cannot be written.
        """
        layout.save(path, self._kind, self._tree(), compress)

    @classmethod
    def load(cls: type[S], path: str | Path) -> S:
        """Reads a file that `save` wrote, without executing anything from it.

        Raises:
            FileError: the file was not written by `save`, is damaged, or holds another class.
            FileNotFoundError: there is no such file.
        """
        tree = layout.load(path, cls._kind)
        try:
            return cls._from_tree(tree)
        except (SpecError, TypeError) as error:
            raise FileError(f"{path}: damaged: {error}") from error


class TensorMap(Structure):
    """A structure that maps names to tensors."""

    _tensors: Mapping[str, torch.Tensor]

    def keys(self) -> Any:
        """The names, in the given order."""
        return self._tensors.keys()

    def values(self) -> Any:
        """The tensors."""
        return self._tensors.values()

    def items(self) -> Any:
        """Pairs of a name and a tensor."""
        return self._tensors.items()

    def empty(self) -> bool:
        """Whether there are no tensors; tensors of 0 rows count as tensors."""
        return not self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            return self._tensors[key]
        except (KeyError, TypeError):  # a list or a slice has no hash
            error = missing_key_error(type(self).__name__, key, self._tensors)
            if not isinstance(key, str) and hasattr(self, "index"):  # packs have no rows
                error = MissingKeyError(f"{error}; rows are taken by .index({key!r})")
            raise error from None

    def find(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Picks tensors by name. Others of a lease are not made."""
        tensors = self._tensors
        return {key: tensors[key] for key in keys if key in tensors}

    def _pick(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        if isinstance(keys, str):
            raise TypeError(f"get takes a list of keys, got the string {keys!r}; use [{keys!r}] for one tensor")
        return {key: self[key] for key in keys}


def flatten(mapping: Mapping[str, Any] | TensorMap, owner: str) -> dict[str, torch.Tensor]:
    """Copies a mapping and flattens nested ones, whose keys are joined with `/`.

    Raises:
        TypeError: `mapping` is not a mapping, a key is not a string, or a value is not a tensor.
        SpecError: two keys are the same once joined, or a dtype is not supported.
    """
    if isinstance(mapping, TensorMap):
        mapping = mapping._shown()  # not items(), which would lose the lengths of a TemporalDictTensor
    elif type(mapping) is not dict and not isinstance(mapping, Mapping):
        raise TypeError(f"{owner}: needs a mapping of names to tensors, got {type(mapping).__name__}")
    flat: dict[str, torch.Tensor] = {}
    for key, value in mapping.items():
        if type(key) is not str:
            if not isinstance(key, str):
                raise TypeError(f"{owner}: a key must be a string, got {key!r}")
            key = str.__str__(key)  # the plain str of a numpy string or an enum member
        if isinstance(value, torch.Tensor):
            if key in flat:
                raise SpecError(f"{owner}: key {key!r} is given twice")
            if value.dtype in UNSUPPORTED:
                raise dtype_error(owner, key, value.dtype)
            flat[key] = value
        elif isinstance(value, (Mapping, TensorMap)):
            for name, tensor in flatten(value, owner).items():
                if (joined := f"{key}/{name}") in flat:
                    raise SpecError(f"{owner}: key {joined!r} is given twice")
                flat[joined] = tensor
        else:
            raise TypeError(f"{owner}: {key!r} must be a torch.Tensor, got {type(value).__name__}")
    return flat


def missing_key_error(owner: str, key: object, present: Iterable[str]) -> MissingKeyError:
    """The error for a key that is not there."""
    return MissingKeyError(f"{owner}: no key {key!r}, there are {sorted(present)}")


def check_same_keys(owner: str, wanted: Iterable[str], got: Iterable[str]) -> None:
    """Raises MissingKeyError or SpecError unless two sets of keys are equal."""
    wanted, got = set(wanted), set(got)
    if wanted - got:
        raise MissingKeyError(f"{owner}: key(s) {sorted(wanted - got)} are missing, got {sorted(got)}")
    if got - wanted:
        raise SpecError(f"{owner}: unknown key(s) {sorted(got - wanted)}, expected {sorted(wanted)}")


def check_parts(kind: type[S], items: Iterable[S]) -> list[S]:
    """Returns the items that `kind.cat` was given, as a list.

    Raises:
        TypeError: an item is not a `kind`.
    """
    parts = list(items)
    for number, part in enumerate(parts):
        if not isinstance(part, kind):
            raise TypeError(f"{kind.__name__}.cat: item {number} is a {type(part).__name__}, not a {kind.__name__}")
    return parts


def check_alike(owner: str, key: str, tensors: Iterable[torch.Tensor], axes: int) -> None:
    """Raises SpecError unless a key's tensors have the same device and shape.

    Shapes may differ in the first `axes` axes.
    """
    first: torch.Tensor | None = None
    for number, tensor in enumerate(tensors):
        first = tensor if first is None else first
        if tensor.ndim < axes:
            raise SpecError(f"{owner}: {key!r} has no axis to write along, it is {show(tensor)} in item {number}")
        if tensor.shape[axes:] != first.shape[axes:]:
            raise SpecError(
                f"{owner}: {key!r} is {show(tensor)} in item {number}, expected {show(first)} but for its first "
                f"{'axis' if axes == 1 else f'{axes} axes'}"
            )
        if tensor.device != first.device:
            raise SpecError(f"{owner}: {key!r} is on {tensor.device} in item {number}, expected {first.device}")


def _unpickle(kind: type[S], tree: Tree) -> S:
    return kind._from_trusted(map_tree(from_picklable, tree))


def put_rows(tensor: torch.Tensor, index: Any, values: torch.Tensor) -> None:
    """Does `tensor[index] = values`, also for dtypes that torch cannot index.

    Such tensors must have the same dtype.
    """
    values, dtype = values.to(tensor.device), CARRIERS.get(tensor.dtype)
    if dtype is None or values.dtype != tensor.dtype:
        tensor[index] = values
    else:
        tensor.view(dtype)[index] = values.view(dtype)


def show(tensor: torch.Tensor) -> str:
    """Describes a tensor by shape and dtype: `(3, 2) float32`."""
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"


def show_fields(head: str, tensors: TensorMap, separator: str = ", ") -> str:
    """Completes a repr: appends each key with its shape and dtype to `head`."""
    return separator.join([head, *(f"{key}={show(tensor)}" for key, tensor in tensors.items())]) + ")"


def _equal_trees(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if mine.keys() != theirs.keys():
        return False
    return all(
        _equal_trees(value, theirs[key]) if isinstance(value, Mapping) else equal(value, theirs[key])
        for key, value in mine.items()
    )


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and values are the same.

    NaN equals NaN, and devices may differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    same = a == b
    if a.dtype.is_floating_point or a.dtype.is_complex:
        same |= a.isnan() & b.isnan()
    return bool(same.all())
