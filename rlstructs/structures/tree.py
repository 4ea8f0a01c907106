"""What the three structures share: they are trees of tensors.

A structure says what its tree is (`_tree`) and how it is made of one (`_from_tree`); copying, moving,
comparing, converting and saving are then written once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlstructs.errors import FileError, MissingKeyError, SpecError
from rlstructs.files import layout
from rlstructs.frameworks.dtypes import CARRIERS, UNFIT, portable, refuse, restored
from rlstructs.frameworks.torch import as_device
from rlstructs.structures import interop
from rlstructs.structures.interop import Tree, map_tree

S = TypeVar("S", bound="Structure")


class Structure:
    """A tree of tensors that share their batch axis."""

    # What files call it: of a class that is derived, that from which it is.
    _kind: str
    # Tensors are mutable, so that equal content gives no stable hash.
    __hash__ = None  # type: ignore[assignment]

    def _tree(self) -> Mapping[str, Any]:
        """The tensors, without a copy: name -> tensor, or name -> such a mapping."""
        raise NotImplementedError

    @classmethod
    def _from_tree(cls: type[S], tree: Tree) -> S:
        """Makes a structure of a tree, and checks it."""
        raise NotImplementedError

    @classmethod
    def _trusted(cls: type[S], tree: Tree) -> S:
        """Makes a structure of a tree like that of `_tree`, unchecked: a check reads lengths, which waits for a GPU."""
        raise NotImplementedError

    def n_elems(self) -> int:
        """Number of rows, B."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.n_elems()

    def _map(self: S, function: Callable[[torch.Tensor], torch.Tensor]) -> S:
        return self._trusted(map_tree(function, self._tree()))

    def clone(self: S) -> S:
        """A copy of every tensor; keeps the autograd link."""
        return self._map(torch.clone)

    def to(self: S, device: torch.device | str, non_blocking: bool = False) -> S:
        """The same on a device. Tensors that are there already are shared, not copied.

        Args:
            device: where to.
            non_blocking: lets a copy from pinned memory to a GPU overlap with what follows.
        """
        target = as_device(device)
        return self._map(lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def __reduce__(self) -> Any:
        return _unpickled, (type(self), map_tree(portable, self._tree()))  # torch does not pickle every dtype

    def pin_memory(self: S) -> S:
        """A copy in page-locked host memory, from which copies to a GPU are asynchronous.

        Raises:
            RuntimeError: torch sees no accelerator.
        """
        return self._map(torch.Tensor.pin_memory)

    def share_memory_(self: S) -> S:
        """Moves every tensor to shared memory, in place; returns itself."""
        map_tree(torch.Tensor.share_memory_, self._tree())
        return self

    def __eq__(self, other: object) -> bool:
        """Equal content: same class, names, shapes, dtypes and values, NaN equal to NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return _equal_trees(self._content(), other._content())

    def _content(self) -> Mapping[str, Any]:
        """The part of the tree that `==` compares."""
        return self._tree()

    def numpy(self, view: bool = False) -> dict[str, Any]:
        """The tensors as numpy arrays: `{name: array}`, `lengths` among them where there are any.

        Args:
            view: share memory with tensors that are on the CPU, in place of a copy.
        """
        return interop.to_numpy(self._tree(), view)

    def jax(self) -> dict[str, Any]:
        """The tensors as jax arrays, private copies; of 32 bits for 64, unless jax_enable_x64 is set.

        Raises:
            SpecError: an integer does not fit 32 bits.
        """
        return interop.to_jax(self._tree())

    def warp(self, view: bool = False) -> dict[str, Any]:
        """The tensors as warp arrays.

        Args:
            view: share memory with the tensors, in place of a copy.

        Raises:
            SpecError: a tensor has not 1 to 4 axes, or a dtype that warp has not.
        """
        return interop.to_warp(self._tree(), view)

    @classmethod
    def from_numpy(cls: type[S], arrays: Mapping[str, Any], *, view: bool = False) -> S:
        """Made of numpy arrays, as `numpy()` gives them. Copies, unless `view`."""
        return cls._from_tree(interop.from_numpy(arrays, view))

    @classmethod
    def from_jax(cls: type[S], arrays: Mapping[str, Any]) -> S:
        """Made of jax arrays, as `jax()` gives them; copies."""
        return cls._from_tree(interop.from_jax(arrays))

    @classmethod
    def from_warp(cls: type[S], arrays: Mapping[str, Any], *, view: bool = False) -> S:
        """Made of warp arrays, as `warp()` gives them. Copies, unless `view`."""
        return cls._from_tree(interop.from_warp(arrays, view))

    def to_tensordict(self) -> Any:
        """A `tensordict.TensorDict` of the same tensors, without a copy; batch size (B,).

        Keys are split at `/` into nested ones. Needs the extra `tensordict`.
        """
        return interop.to_tensordict(self._tree(), self.n_elems())

    @classmethod
    def from_tensordict(cls: type[S], tensordict: Any) -> S:
        """Made of the tensors of a `tensordict.TensorDict`, without a copy."""
        return cls._from_tree(interop.from_tensordict(tensordict))

    def save(self, path: str | Path) -> None:
        """Writes a file; a file that was there stays whole until the new one is.

        Args:
            path: ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`).

        Raises:
            FileError: the ending is another one, or the file cannot hold a name.
            SpecError: the file cannot hold a dtype.
            OSError: it cannot be written.
        """
        layout.save(path, self._kind, self._tree())

    @classmethod
    def load(cls: type[S], path: str | Path) -> S:
        """Reads what `save` wrote. Executes nothing that the file says.

        Raises:
            FileError: the file is not ours, damaged, or holds another class.
            FileNotFoundError: there is none.
        """
        tree = layout.load(path, cls._kind)
        try:
            return cls._from_tree(tree)
        except (SpecError, TypeError) as error:
            raise FileError(f"{path}: damaged: {error}") from error


class TensorMap(Structure):
    """A structure that is a mapping, name -> tensor."""

    _tensors: Mapping[str, torch.Tensor]

    def keys(self) -> Any:
        """The names, in the order in which they were given."""
        return self._tensors.keys()

    def values(self) -> Any:
        """The tensors."""
        return self._tensors.values()

    def items(self) -> Any:
        """Pairs of name and tensor."""
        return self._tensors.items()

    def empty(self) -> bool:
        """Whether there is no tensor. One that has tensors with 0 rows is not empty."""
        return not self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            return self._tensors[key]
        except (KeyError, TypeError):  # a list or a slice has no hash
            missing = missing_key(type(self).__name__, key, self._tensors)
            if not isinstance(key, str):
                missing = MissingKeyError(f"{missing}; rows are taken by .index({key!r})")
            raise missing from None

    def _picked(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        if isinstance(keys, str):
            raise TypeError(f"get takes a list of keys, got the string {keys!r}; use [{keys!r}] for one tensor")
        return {key: self[key] for key in keys}


def flatten(mapping: Mapping[str, Any] | TensorMap, owner: str) -> dict[str, torch.Tensor]:
    """A flat copy of a mapping: nested ones give keys joined with `/`.

    Raises:
        TypeError: it is no mapping, a key is no string, or a value no tensor.
        SpecError: two keys are the same once joined.
    """
    if isinstance(mapping, TensorMap):
        mapping = mapping._tree()  # not items(), which would lose the lengths of a TemporalDictTensor
    elif type(mapping) is not dict and not isinstance(mapping, Mapping):
        raise TypeError(f"{owner}: needs a mapping of names to tensors, got {type(mapping).__name__}")
    flat: dict[str, torch.Tensor] = {}
    for key, value in mapping.items():
        if type(key) is not str:
            if not isinstance(key, str):
                raise TypeError(f"{owner}: a key must be a string, got {key!r}")
            key = str.__str__(key)  # numpy's strings and members of enumerations are strings too
        if isinstance(value, torch.Tensor):
            if key in flat:
                raise SpecError(f"{owner}: key {key!r} is given twice")
            if value.dtype in UNFIT:
                raise refuse(owner, key, value.dtype)
            flat[key] = value
        elif isinstance(value, (Mapping, TensorMap)):
            for name, tensor in flatten(value, owner).items():
                if (joined := f"{key}/{name}") in flat:
                    raise SpecError(f"{owner}: key {joined!r} is given twice")
                flat[joined] = tensor
        else:
            raise TypeError(f"{owner}: {key!r} must be a torch.Tensor, got {type(value).__name__}")
    return flat


def missing_key(owner: str, key: object, present: Iterable[str]) -> MissingKeyError:
    """The error for a key that is not there."""
    return MissingKeyError(f"{owner}: no key {key!r}, there are {sorted(present)}")


def check_same_keys(owner: str, wanted: Iterable[str], got: Iterable[str]) -> None:
    """Raises MissingKeyError or SpecError unless two sets of keys are the same."""
    wanted, got = set(wanted), set(got)
    if wanted - got:
        raise MissingKeyError(f"{owner}: key(s) {sorted(wanted - got)} are missing, got {sorted(got)}")
    if got - wanted:
        raise SpecError(f"{owner}: unknown key(s) {sorted(got - wanted)}, expected {sorted(wanted)}")


def parts_of(kind: type[S], items: Iterable[S]) -> list[S]:
    """The items that `kind.cat` was given, as a list.

    Raises:
        TypeError: one is no `kind`.
    """
    parts = list(items)
    for number, part in enumerate(parts):
        if not isinstance(part, kind):
            raise TypeError(f"{kind.__name__}.cat: item {number} is a {type(part).__name__}, not a {kind.__name__}")
    return parts


def check_alike(owner: str, key: str, tensors: Iterable[torch.Tensor], axes: int) -> None:
    """Raises SpecError unless tensors of one key agree in their device and in their shape after `axes` axes."""
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


def _unpickled(kind: type[S], tree: Tree) -> S:
    return kind._trusted(map_tree(restored, tree))


def put_rows(tensor: torch.Tensor, index: Any, values: torch.Tensor) -> None:
    """`tensor[index] = values`, of the same dtype, also for those that torch cannot write to by index."""
    values, dtype = values.to(tensor.device), CARRIERS.get(tensor.dtype)
    if dtype is None or values.dtype != tensor.dtype:
        tensor[index] = values
    else:
        tensor.view(dtype)[index] = values.view(dtype)


def show(tensor: torch.Tensor) -> str:
    """Shape and dtype in short: `(3, 2) float32`."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _equal_trees(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if mine.keys() != theirs.keys():
        return False
    return all(
        _equal_trees(value, theirs[key]) if isinstance(value, Mapping) else equal(value, theirs[key])
        for key, value in mine.items()
    )


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and values, NaN equal to NaN; on whatever devices."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    same = a == b
    if a.dtype.is_floating_point or a.dtype.is_complex:
        same |= a.isnan() & b.isnan()
    return bool(same.all())
