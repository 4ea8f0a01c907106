"""`ArrayDict`: a batch of arrays of any library, with the methods of tianshou's `Batch`."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.leave import array_ops
from rlstructs.replay.leave.array_ops import ArrayValues
from rlstructs.workers.public_names import set_module

A = TypeVar("A", bound="ArrayDict")

NOTHING: Any = object()


@set_module("rlstructs.replay")
class ArrayDict(ArrayValues):
    """A batch: arrays by name, whose first axis is the rows.

    `len` counts rows, and an index that is not a name takes rows. `Batch` is another name of this class. Nested names
    are joined with `/`; `batch["a"]` is a batch of all that is nested in `a`. Items are also attributes. Like a
    `DictTensor`, it iterates over its names. Lists become arrays, or tensors if they hold tensors. Lists and arrays of
    mappings become nested rows. An empty nested batch has a name of its own until something is put into it.

    Args:
        given: a mapping, or pairs of name and array; or a list or an array of mappings, each a row.
        copy: whether the arrays are copied rather than shared.
        named: more arrays by name.

    Raises:
        TypeError: `copy` is not a bool.

    Example:
        >>> batch = ArrayDict(obs={"image": np.zeros((4, 2)), "speed": np.arange(4)}, act=np.ones(4))
        >>> batch.obs.speed = batch.obs.speed * 2
        >>> len(batch), list(batch), batch["obs/speed"], batch[1:3].obs
        (4, ['obs/image', 'obs/speed', 'act'], array([0, 2, 4, 6]), ArrayDict(image=(2, 2) float64, speed=(2,) int64))
        >>> [len(part) for part in batch.split(3)], "obs" in batch, "info" in batch
        ([3, 1], True, False)
    """

    def __init__(self, given: Any = None, /, copy: bool = False, **named: Any) -> None:
        super().__init__()
        if not isinstance(copy, (bool, np.bool_)):
            raise TypeError(f"copy must be a bool, got {type(copy).__name__}; give a column of this name in a mapping")
        given = {} if given is None else ArrayDict.stack(given) if array_ops.are_rows(given) else given
        items = dict(given, **named)
        for name, value in (copying.deepcopy(items) if copy else items).items():
            if not isinstance(name, str):
                raise TypeError(f"{type(self).__name__}: a key must be a string, got {name!r}")
            if isinstance(value, Mapping) or array_ops.are_rows(value):
                inside = _as_rows(name, value)
                if not isinstance(inside, ArrayDict):
                    self._set(name, inside)
                    continue
                for key, each in dict.items(inside):
                    self._check_new(f"{name}/{key}")
                    self._set(f"{name}/{key}", each)
                if not dict.keys(inside) and name not in self:
                    self._set(name, inside)
            else:
                self._check_new(name)
                self._set(name, value)

    def _check_new(self, name: str) -> None:
        if dict.__contains__(self, name) and not isinstance(dict.__getitem__(self, name), ArrayDict):
            raise SpecError(f"{type(self).__name__}: key {name!r} is given twice")

    @classmethod
    def trusted(cls: type[A], items: Any) -> A:
        """Creates a batch of joined names and arrays, without checks."""
        made = cls.__new__(cls)
        dict.__init__(made, items)
        return made

    # Names

    def __getitem__(self, index: Any) -> Any:
        """Returns the value of a name, or takes rows of all arrays.

        Raises:
            KeyError, IndexError: there is no such name or row.
            SpecError: rows of a distribution of torch cannot be taken.
        """
        if isinstance(index, str):
            found = super().__getitem__(index)
            return self._nested(index) if isinstance(found, ArrayDict) else found
        return self._like((name, array_ops.rows(value, index)) for name, value in dict.items(self))

    def __missing__(self, name: str) -> Any:
        if not self._inside(name):
            raise KeyError(f"no {name!r} in this batch, there are {sorted(self)}")
        return self._nested(name)

    def _nested(self, name: str) -> ArrayDict:
        return _Nested(self, name)

    def _inside(self, name: str) -> dict[str, Any]:
        """Returns the entries below a name, by the rest of their names."""
        start = f"{name}/"
        return {key[len(start) :]: value for key, value in dict.items(self) if key.startswith(start)}

    def __contains__(self, name: object) -> bool:
        has_nested = isinstance(name, str) and any(key.startswith(f"{name}/") for key in self)
        return has_nested or super().__contains__(name)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a name, or `default`."""
        try:
            return self[key] if isinstance(key, str) else default
        except KeyError:
            return default

    def __setitem__(self, index: Any, value: Any) -> None:
        """Sets the value of a name, or rows of all arrays.

        A value replaces everything that was nested in its name; mappings are flattened. An index that is not a name
        sets rows; then `value` is a mapping. Names that it lacks become 0, or None for objects.

        Raises:
            ValueError: rows have other names, or are not a mapping.
        """
        if not isinstance(index, str):
            self._put_rows(index, value)
            return
        for key in self._inside(index):
            self._delete(f"{index}/{key}")
        value = _as_rows(index, value) if array_ops.are_rows(value) else value
        if not isinstance(value, Mapping):
            self._set(index, value)
            return
        if super().__contains__(index):
            self._delete(index)
        if not value.keys():
            self._set(index, ArrayDict())
        for key, inside in value.items():
            self[f"{index}/{key}"] = inside

    def _put_rows(self, index: Any, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"rows are set from a mapping, got {type(value).__name__}")
        own, given = self._arrays(), ArrayDict(value)._arrays()
        if unknown := sorted(given.keys() - own.keys()):
            raise ValueError(f"rows cannot have new names, got {unknown}, there are {sorted(own)}")
        for name, array in own.items():
            if name in given:
                array[index] = given[name]
            else:
                array_ops.cleared(array, index)

    def _of_same_names(self, given: Any) -> dict[str, Any]:
        found, own = ArrayDict(given)._arrays(), self._arrays()
        if found.keys() != own.keys():
            raise ValueError(f"rows must have the names {sorted(own)}, got {sorted(found)}")
        return found

    def _set(self, name: str, value: Any) -> None:
        for around in array_ops.around(name):
            if isinstance(super().get(around), ArrayDict):  # no longer empty
                super().__delitem__(around)
        convert = array_ops.array_of if isinstance(value, (list, tuple)) else array_ops.of_objects
        super().__setitem__(name, convert(value))

    def _arrays(self) -> dict[str, Any]:
        return {name: value for name, value in dict.items(self) if not isinstance(value, ArrayDict)}

    def _delete(self, name: str) -> None:
        super().__delitem__(name)

    def __delitem__(self, name: str) -> None:
        """Removes the value of a name, and everything nested in it.

        Raises:
            KeyError: there is nothing.
        """
        names = [name] if super().__contains__(name) else [f"{name}/{key}" for key in self._inside(name)]
        if not names:
            raise KeyError(f"no {name!r} in this batch, there are {sorted(self)}")
        for each in names:
            self._delete(each)

    def pop(self, key: str, default: Any = NOTHING) -> Any:
        """Removes a name and returns its value, or `default`.

        Everything nested in the name is removed, too.

        Raises:
            KeyError: there is nothing, and no default.
        """
        if default is not NOTHING and key not in self:
            return default
        found = self[key]
        found = ArrayDict(found) if isinstance(found, ArrayDict) else found
        del self[key]
        return found

    def update(self, given: Any = (), /, **named: Any) -> None:
        """Sets the arrays of a mapping."""
        for name, value in dict(given, **named).items():
            self[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and numpy look for such methods
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def keys(self) -> Any:
        """Returns the names at the top.

        Iteration, `items` and `values` are over all arrays instead.
        """
        return dict.fromkeys(name.partition("/")[0] for name in self).keys()

    def get_keys(self) -> Any:
        """Iterates over the keys."""
        return self.keys()

    # Rows

    def split(self: A, size: int, shuffle: bool = True, merge_last: bool = False) -> Iterator[A]:
        """Splits rows into parts.

        Args:
            size: rows of each part, the last may have fewer; -1 for a single part.
            shuffle: whether the order is random, by numpy's global generator.
            merge_last: whether a smaller last part is merged with the one before.

        Raises:
            ValueError: `size` is neither -1 nor at least 1.
        """
        n = len(self)
        if size < 1 and size != -1:
            raise ValueError(f"size must be -1 or at least 1, got {size}")
        size = max(n, 1) if size == -1 else size
        order = np.random.permutation(n) if shuffle else np.arange(n)
        ends = [*range(size, n, size), n] if n else []
        if merge_last and n % size and len(ends) > 1:
            del ends[-2]
        return (self[order[start:end]] for start, end in zip([0, *ends], ends, strict=False))

    def set_array_at_key(self, arr: Any, key: str, index: Any = None, default_value: Any = None) -> None:
        """Sets an array, or some rows of it.

        Args:
            arr: values, one per row.
            key: the name.
            index: of the rows; None for all.
            default_value: of the other rows of a new array.

        Raises:
            ValueError, TypeError: the numbers of values and rows differ, or the default does not fit.
        """
        if index is None:
            if len(arr) != len(self):
                raise ValueError(f"{key!r} has {len(arr)} rows, the batch has {len(self)}; give an index to set some")
            self[key] = arr
            return
        held = self.get(key)
        if held is None or (isinstance(held, ArrayDict) and not held):
            arr = np.asarray(arr)
            self[key] = np.full((len(self), *arr.shape[1:]), default_value).astype(arr.dtype)
        elif isinstance(held, ArrayDict):
            raise ValueError(f"{key!r} is nested: name one of {sorted(held)} in it")
        self[key][index] = arr

    def to_list_of_dicts(self) -> list[dict[str, Any]]:
        """Returns a dict for each row."""
        return [self[row].to_dict() for row in range(len(self))]

    def to_dict(self, recursive: bool = True) -> dict[str, Any]:
        """Returns a dict of the names at the top.

        Nested batches become dicts if `recursive`.
        """
        if not recursive:
            return {name: self[name] for name in self.keys()}
        found: dict[str, Any] = {}
        for name, value in dict.items(self):
            *path, last = name.split("/")
            at = found
            for each in path:
                at = at.setdefault(each, {})
            at[last] = {} if isinstance(value, ArrayDict) else value
        return found

    def dropnull(self: A) -> A:
        """Returns the rows without NaN and None."""
        found = np.zeros(len(self), bool)
        for value in dict.values(self):
            if array_ops.shape(value):
                null = array_ops.nulls(value)
                found |= null.any(axis=tuple(range(1, null.ndim)))
        made: A = self[~found]
        return made

    # Joined

    @staticmethod
    def cat(batches: Iterable[Mapping[str, Any]]) -> ArrayDict:
        """Concatenates batches with the same names; leaves out those without any."""
        return _join(list(batches), array_ops.cat)

    @staticmethod
    def stack(batches: Iterable[Mapping[str, Any]], axis: int = 0) -> ArrayDict:
        """Stacks batches of the same shapes.

        Batches without names are left out, and infos that differ become objects. Along axis 0, a batch may lack a name
        that another has: its row holds 0, or None where others hold objects.
        """
        listed = [batch for batch in map(ArrayDict, batches) if dict.__len__(batch)]
        odd = _find_odd(listed) if axis == 0 else []
        columns = {name: array_ops.stacked([batch._arrays().get(name) for batch in listed]) for name in odd}
        for batch in listed if odd else ():
            for name in dict.keys(batch) & odd:
                batch._delete(name)
        made = _join(listed, lambda values: array_ops.stack(values, axis))
        for name, column in columns.items():
            made._set(name, column)
        return made

    def cat_(self, batches: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Appends one or several batches."""
        more = [batches] if isinstance(batches, Mapping) else list(batches)
        self.update(ArrayDict.cat([*([self] if self else []), *more]))

    def stack_(self, batches: Sequence[Mapping[str, Any]], axis: int = 0) -> None:
        """Stacks this batch and others along a new axis."""
        self.update(ArrayDict.stack([*([self] if self else []), *batches], axis))

    # Comparison and display

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        others = ArrayDict(other)
        return dict.keys(self) == dict.keys(others) and all(
            np.array_equal(array_ops.array(value), array_ops.array(others[name])) for name, value in dict.items(self)
        )

    def __ne__(self, other: object) -> bool:  # instead of that of dict
        return not self == other

    __hash__ = None  # type: ignore[assignment] # as of a dict

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={array_ops.show(value)}" for name, value in dict.items(self))
        return f"{type(self).__name__}({shown})"

    def _like(self: A, items: Any) -> A:
        return type(self).trusted(items)


class _Nested(ArrayDict):
    """The part of a batch below a name; follows changes of that batch."""

    def __init__(self, outer: ArrayDict, name: str) -> None:
        dict.__init__(self, outer._inside(name))
        vars(self).update(_outer=outer, _start=f"{name}/")

    def _set(self, name: str, value: Any) -> None:
        super()._set(name, value)
        self._outer[self._start + name] = value

    def _delete(self, name: str) -> None:
        super()._delete(name)
        del self._outer[self._start + name]

    def _like(self, items: Any) -> Any:
        return ArrayDict.trusted(items)

    def __reduce__(self) -> Any:
        return ArrayDict, (dict(self),)

    def __repr__(self) -> str:
        return repr(ArrayDict(self))


def _as_rows(name: str, value: Any) -> Any:
    """Converts mappings, one per row, to a batch.

    Infos that differ become an array of objects.
    """
    try:
        return ArrayDict(value)
    except ValueError:
        if not is_info(name):
            raise
        return array_ops.stacked(value)


def _find_odd(batches: list[ArrayDict]) -> list[str]:
    """Lists names that some batches lack, and infos of different shapes."""
    names = dict.fromkeys(name for batch in batches for name in batch._arrays())
    shapes = {name: {np.shape(b.get(name)) if dict.__contains__(b, name) else None for b in batches} for name in names}
    return [name for name in names if len(shapes[name]) > 1 and (is_info(name) or None in shapes[name])]


def _join(batches: Sequence[Mapping[str, Any]], join: Callable[[list[Any]], Any]) -> ArrayDict:
    flat = [batch for batch in map(ArrayDict, batches) if dict.__len__(batch)]
    arrays = [batch._arrays() for batch in flat]
    for one in arrays:
        if one.keys() != arrays[0].keys():
            raise ValueError(f"batches must have the same names, got {sorted(arrays[0])} and {sorted(one)}")
    made = {name: join([one[name] for one in arrays]) for name in (arrays[0] if arrays else ())}
    return ArrayDict({**{name: {} for batch in flat for name in batch}, **made})


Batch = ArrayDict
