"""What a buffer is put together of: each part is given as an object, or as what makes one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlstructs.errors import SpecError

P = TypeVar("P", bound="Part")
# Of an argument: whatever it is, it changes nothing.
ANY = object()


class Part:
    """A storage, a sampler or a writer: settings, and what goes with them, of one buffer."""

    _owner: weakref.ref[Any] | None = None

    def check_free(self, buffer: Any) -> None:
        """Raises SpecError if it belongs to another buffer than this one."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner is not buffer:
            raise SpecError(f"this {type(self).__name__} belongs to another buffer; make one for each")

    def belong(self, buffer: Any) -> None:
        """Belongs to this buffer from now on; to none, if that is None."""
        self._owner = None if buffer is None else weakref.ref(buffer)

    def _shown(self) -> dict[str, Any]:
        """The settings that a repr shows."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_owner"}


def part(name: str, given: Any, kind: type[P], default: Callable[[], P]) -> P:
    """A part, as it is given or as what is given makes it.

    Args:
        name: of the argument.
        given: a `kind`, something that makes one, or None for what `default` makes.

    Raises:
        TypeError: it is none, and makes none.
    """
    if given is None:
        return default()
    made = given() if callable(given) and not isinstance(given, kind) else given
    if not isinstance(made, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, or what makes one, got {type(made).__name__}")
    return made


def check_neutral(owner: str, given: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Takes arguments of torchrl's that have no meaning here.

    Args:
        owner: who is given them, for messages.
        given: the arguments.
        neutral: by name, which value asks for nothing; `ANY` if every one does.

    Raises:
        TypeError: there is no such argument.
        SpecError: one asks for something.
    """
    for name, value in given.items():
        if name not in neutral:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
        wanted = neutral[name]
        if wanted is not ANY and value is not None and (wanted is None or value != wanted):
            raise SpecError(f"{owner}: {name} must be {wanted!r}, got {value!r}; there is no such thing here")


def joined(key: Any) -> str:
    """The name of a column: ("next", "reward") is that of `next/reward`.

    Raises:
        TypeError: it is no string and no tuple of strings.
    """
    if isinstance(key, str):
        return key
    if not isinstance(key, tuple) or not key or not all(isinstance(each, str) for each in key):
        raise TypeError(f"a key must be a string, or a tuple of strings, got {key!r}")
    return "/".join(key)
