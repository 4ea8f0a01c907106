"""Base class of a buffer's parts, and checks of torchrl's arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlstructs.errors import SpecError

P = TypeVar("P", bound="Part")
# Stands for every value of an argument: none changes anything.
ANY = object()


class Part:
    """A storage, a sampler or a writer, with its settings.

    It belongs to one buffer.
    """

    _owner: weakref.ref[Any] | None = None

    @property
    def owner(self) -> Any:
        """The buffer; None if it belongs to none."""
        return None if self._owner is None else self._owner()

    def check_free(self, buffer: Any) -> None:
        """Raises SpecError if it belongs to a buffer other than this one."""
        if self.owner is not None and self.owner is not buffer:
            raise SpecError(f"this {type(self).__name__} belongs to another buffer; make one for each")

    def belong(self, buffer: Any) -> None:
        """Attaches to a buffer; None detaches."""
        self._owner = None if buffer is None else weakref.ref(buffer)

    def _shown(self) -> dict[str, Any]:
        """Returns the settings that a repr shows."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_owner"}


def create_part(name: str, given: Any, kind: type[P], default: Callable[[], P]) -> P:
    """Returns a part, or creates it.

    Args:
        name: of the argument.
        given: a `kind`, a function that creates one, or None for the result of `default`.

    Raises:
        TypeError: it is neither a `kind` nor creates one.
    """
    if given is None:
        return default()
    made = given() if callable(given) and not isinstance(given, kind) else given
    if not isinstance(made, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, or a function that creates one, got {type(made).__name__}")
    return made


def check_neutral(owner: str, given: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Checks arguments of torchrl's that have no meaning here.

    Args:
        owner: name of the class that they are given to, for messages.
        given: the arguments.
        neutral: name -> the value without any effect; `ANY` if no value has one.

    Raises:
        TypeError: there is no such argument.
        SpecError: a value would have an effect in torchrl.
    """
    for name, value in given.items():
        if name not in neutral:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
        wanted = neutral[name]
        if wanted is not ANY and value is not None and (wanted is None or value != wanted):
            raise SpecError(f"{owner}: {name} must be {wanted!r}, got {value!r}; other values are not supported")


def join_key(key: Any) -> str:
    """Converts a key of torchrl to the name of a column.

    For example ("next", "reward") to `next/reward`.

    Raises:
        TypeError: it is neither a string nor a tuple of strings.
    """
    if isinstance(key, str):
        return key
    if not isinstance(key, tuple) or not key or not all(isinstance(each, str) for each in key):
        raise TypeError(f"a key must be a string, or a tuple of strings, got {key!r}")
    return "/".join(key)
