"""Pickles by value, so that no worker has to import the program's main module."""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle

# Classes that cloudpickle has sent or rebuilt in this process, by the ids that it gives them.
_CLASSES = importlib.import_module("cloudpickle.cloudpickle")._DYNAMIC_CLASS_TRACKER_BY_ID


def dumps(obj: Any) -> bytes:
    """Pickles by cloudpickle."""
    return cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Unpickles; classes that this process already has stay as they are."""
    return Unpickler(io.BytesIO(data)).load()


class Unpickler(pickle.Unpickler):
    """Unpickles; classes that this process already has stay as they are."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._new_classes: list[Any] = []  # made by this unpickler, which has to fill them

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.startswith("cloudpickle"):
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return partial(self._make_class, found)
            if name == "_class_setstate":
                return partial(self._fill_class, found)
        return found

    def _make_class(self, make: Callable[..., Any], *arguments: Any) -> Any:
        is_here = arguments[-2] in _CLASSES
        cls = make(*arguments)
        if not is_here:
            self._new_classes.append(cls)
        return cls

    def _fill_class(self, set_state: Callable[..., Any], cls: Any, state: Any) -> Any:
        # An exception of a class of the script brings its class back here. cloudpickle finds that this process has
        # the class, but would overwrite its methods with copies that use other globals.
        names = set(state[0]) - {"__module__", "__doc__"}
        is_new = any(cls is new for new in self._new_classes)
        return cls if names and names <= set(vars(cls)) and not is_new else set_state(cls, state)
