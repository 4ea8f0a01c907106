"""`ArrayDict`: what a batch is when it is no `DictTensor`; it has what users of tianshou's `Batch` rely on."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.public_names import set_module
from rlstructs.replay import array_ops
from rlstructs.replay.array_values import ArrayValues
from rlstructs.replay.roles import is_info

A = TypeVar("A", bound="ArrayDict")

NOTHING: Any = object()


@set_module("rlstructs.replay")
class ArrayDict(ArrayValues):
    """Arrays by name, with a row each: its length is theirs, and an index that is no name picks rows.

    `Batch` is another name of it. What is nested has names joined with `/`, and is reached as such too. Attributes are
    items. As of a `DictTensor`, iterating gives the names. Lists become arrays, or a tensor if they are of tensors.
    Those of mappings, and arrays of such, are rows of what is nested. What is nested and empty is a name of its own
    until something is put there.

    Args:
        given: a mapping, or pairs of name and array; or a list or an array of mappings, each a row.
        copy: whether all of it is copied, rather than shared.
        named: more arrays by name.

    Raises:
        TypeError: `copy` is no bool.

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
                if not isinstance(inside, Mapping):
                    self._set(name, inside)
                    continue
                for key, each in inside.items():
                    self._check_new(f"{name}/{key}")
                    self._set(f"{name}/{key}", each)
                if not inside.keys() and name not in self:
                    self._set(name, inside)
            else:
                self._check_new(name)
                self._set(name, value)

    def _check_new(self, name: str) -> None:
        if dict.__contains__(self, name) and not isinstance(dict.__getitem__(self, name), ArrayDict):
            raise SpecError(f"{type(self).__name__}: key {name!r} is given twice")

    @classmethod
    def trusted(cls: type[A], items: Any) -> A:
        """Makes one of names that are joined already and arrays, unchecked."""
        made = cls.__new__(cls)
        dict.__init__(made, items)
        return made

    # Names

    def __getitem__(self, index: Any) -> Any:
        """What is under a name; or rows, of all arrays that have some.

        Raises:
            KeyError, IndexError: there is nothing.
            SpecError: there is a distribution of torch of which rows cannot be taken.
        """
        if isinstance(index, str):
            found = super().__getitem__(index)
            return self._nested(index) if isinstance(found, ArrayDict) else found
        return self._like((name, array_ops.rows(value, index)) for name, value in self.items())

    def __missing__(self, name: str) -> Any:
        if not self._inside(name):
            raise KeyError(f"no {name!r} in this batch, there are {sorted(self)}")
        return self._nested(name)

    def _nested(self, name: str) -> ArrayDict:
        return _Nested(self, name)

    def _inside(self, name: str) -> dict[str, Any]:
        """What is nested there, by the rest of its name."""
        start = f"{name}/"
        return {key[len(start) :]: value for key, value in self.items() if key.startswith(start)}

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or any(key.startswith(f"{name}/") for key in self)

    def get(self, key: str, default: Any = None) -> Any:
        """What is there under a name, or `default`."""
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, index: Any, value: Any) -> None:
        """Puts something under a name, in the place of what was nested there; what is nested gets names of its own.

        An index that is no name puts rows: `value` is a mapping of the same names.

        Raises:
            ValueError: the names are others.
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
        own = self._arrays()
        for name, array in self._of_same_names(value).items():
            own[name][index] = array

    def _of_same_names(self, given: Any) -> dict[str, Any]:
        found, own = ArrayDict(given)._arrays(), self._arrays()
        if found.keys() != own.keys():
            raise ValueError(f"rows must have the names {sorted(own)}, got {sorted(found)}")
        return found

    def _set(self, name: str, value: Any) -> None:
        for around in array_ops.around(name):
            if isinstance(super().get(around), ArrayDict):  # it is empty no more
                super().__delitem__(around)
        super().__setitem__(name, array_ops.array_of(value) if isinstance(value, (list, tuple)) else value)

    def _arrays(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if not isinstance(value, ArrayDict)}

    def _delete(self, name: str) -> None:
        super().__delitem__(name)

    def __delitem__(self, name: str) -> None:
        """Takes away what is there under a name, all that is nested too.

        Raises:
            KeyError: there is nothing.
        """
        names = [name] if super().__contains__(name) else [f"{name}/{key}" for key in self._inside(name)]
        if not names:
            raise KeyError(f"no {name!r} in this batch, there are {sorted(self)}")
        for each in names:
            self._delete(each)

    def pop(self, key: str, default: Any = NOTHING) -> Any:
        """Takes out what is there under a name, all that is nested too; the default if there is nothing.

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
        """Puts what is under each name."""
        for name, value in dict(given, **named).items():
            self[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and numpy ask for
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

    def get_keys(self) -> Any:
        """The names."""
        return self.keys()

    # Rows

    def split(self: A, size: int, shuffle: bool = True, merge_last: bool = False) -> Iterator[A]:
        """Rows in parts.

        Args:
            size: rows of each, the last may have fewer; -1 for all at once.
            shuffle: whether their order is random, by numpy's global generator.
            merge_last: whether a part that would be smaller goes with the one before.

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
        """Puts an array under a name, or values to some rows of it.

        Args:
            arr: values, a row each.
            key: the name.
            index: of the rows; None for all.
            default_value: of all other rows, where the name is new.

        Raises:
            ValueError, TypeError: the values are not as many as the rows, or there can be no such default.
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
        """A dict for each row."""
        return [self[row].to_dict() for row in range(len(self))]

    def to_dict(self, recursive: bool = True) -> dict[str, Any]:
        """What is nested as dicts in a dict; as they are here if not `recursive`."""
        found: dict[str, Any] = {}
        for name, value in self.items():
            *path, last = name.split("/") if recursive else [name]
            at = found
            for each in path:
                at = at.setdefault(each, {})
            at[last] = {} if recursive and isinstance(value, ArrayDict) else value
        return found

    def dropnull(self: A) -> A:
        """The rows without such."""
        found = np.zeros(len(self), bool)
        for value in self.values():
            if array_ops.shape(value):
                null = array_ops.nulls(value)
                found |= null.any(axis=tuple(range(1, null.ndim)))
        made: A = self[~found]
        return made

    # Joined

    @staticmethod
    def cat(batches: Iterable[Mapping[str, Any]]) -> ArrayDict:
        """Batches of the same names one behind another."""
        return _join(list(batches), array_ops.cat)

    @staticmethod
    def stack(batches: Iterable[Mapping[str, Any]], axis: int = 0) -> ArrayDict:
        """Batches of the same names and shapes along a new axis; infos may differ, and are objects where they do."""
        listed = [ArrayDict(batch) for batch in batches]
        odd = _find_odd_infos(listed) if axis == 0 else []
        columns = {name: array_ops.stacked([batch._arrays().get(name) for batch in listed]) for name in odd}
        for batch in listed if odd else ():
            for name in batch.keys() & odd:
                batch._delete(name)
        made = _join(listed, lambda values: array_ops.stack(values, axis))
        for name, column in columns.items():
            made._set(name, column)
        return made

    def cat_(self, batches: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Puts one or several batches behind this one."""
        more = [batches] if isinstance(batches, Mapping) else list(batches)
        self.update(ArrayDict.cat([*([self] if self else []), *more]))

    def stack_(self, batches: Sequence[Mapping[str, Any]], axis: int = 0) -> None:
        """Stacks this one and others along a new axis."""
        self.update(ArrayDict.stack([*([self] if self else []), *batches], axis))

    # Else

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        others = ArrayDict(other)
        return dict.keys(self) == dict.keys(others) and all(
            np.array_equal(array_ops.array(value), array_ops.array(others[name])) for name, value in self.items()
        )

    def __ne__(self, other: object) -> bool:  # or it would be that of a dict
        return not self == other

    __hash__ = None  # type: ignore[assignment] # as of a dict

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={array_ops.show(value)}" for name, value in self.items())
        return f"{type(self).__name__}({shown})"

    def _like(self: A, items: Any) -> A:
        return type(self).trusted(items)


class _Nested(ArrayDict):
    """What is nested under a name of a batch: what is put here is put there."""

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
    """Mappings, a row each, as a batch; those of infos that differ as an array of objects."""
    try:
        return ArrayDict(value)
    except ValueError:
        if not is_info(name):
            raise
        return array_ops.stacked(value)


def _find_odd_infos(batches: list[ArrayDict]) -> list[str]:
    """The names of infos that not all of these batches have, or not in the same shape."""
    infos = dict.fromkeys(name for batch in batches for name in batch._arrays() if is_info(name))
    return [name for name in infos if len({np.shape(b.get(name)) if name in b else None for b in batches}) > 1]


def _join(batches: Sequence[Mapping[str, Any]], join: Callable[[list[Any]], Any]) -> ArrayDict:
    flat = [ArrayDict(batch) for batch in batches]
    arrays = [batch._arrays() for batch in flat]
    for one in arrays:
        if one.keys() != arrays[0].keys():
            raise ValueError(f"batches must have the same names, got {sorted(arrays[0])} and {sorted(one)}")
    made = {name: join([one[name] for one in arrays]) for name in (arrays[0] if arrays else ())}
    return ArrayDict({**{name: {} for batch in flat for name in batch}, **made})


Batch = ArrayDict
