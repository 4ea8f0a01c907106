"""Pickles by value, so that no worker has to import the program's main module."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle

from workers.messages import _classes


def dumps(obj: Any) -> bytes:
    """Pickles by cloudpickle."""
    return cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Unpickles, leaving classes that this process already has as they are."""
    return Unpickler(io.BytesIO(data)).load()


class Unpickler(pickle.Unpickler):
    """Leaves classes that this process already has as they are."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: list[Any] = []  # classes that are made here, and yet to be filled

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.startswith("cloudpickle"):
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return partial(self._make_class, found)
            if name == "_class_setstate":
                return partial(self._fill_class, found)
        return found

    def _make_class(self, make: Callable[..., Any], *arguments: Any) -> Any:
        is_here = arguments[-2] in _classes
        made = make(*arguments)
        if not is_here:
            self._made.append(made)
        return made

    def _fill_class(self, set_state: Callable[..., Any], cls: Any, state: Any) -> Any:
        # A class of the script comes back with every exception of it. cloudpickle finds the class that
        # is here already, but would then overwrite its methods with copies that see other globals.
        names = set(state[0]) - {"__module__", "__doc__"}
        is_made_here = any(cls is made for made in self._made)
        return cls if names and names <= set(vars(cls)) and not is_made_here else set_state(cls, state)
