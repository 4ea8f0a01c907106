"""Pickles objects, and explains why one cannot be pickled.

By value, so that no worker has to import the program's main module.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
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


# cloudpickle's implementation module: its private functions say which parts it pickles.
_cloudpickle = importlib.import_module("cloudpickle.cloudpickle")
# The most objects that are searched.
MAX_OBJECTS = 200


def explain_pickle_error(objects: Mapping[str, Any]) -> str | None:
    """Explains the first failure to pickle one of these objects.

    Names the part; None if all can be pickled.

    Args:
        objects: the objects, each under its name in the message.
    """
    for name, value in objects.items():
        error = _try_to_pickle(value)
        if error is None:
            continue
        steps, error = _find_culprit(value, error, set()) or ([], error)
        if not steps:
            return f"{name} cannot be sent to a worker: {error}"
        *path, last = steps
        through = f" (through {' -> '.join(path)})" if path else ""
        step = "make it in a function that the worker calls"
        return f"{name} cannot be sent to a worker: {error}; it is {last}{through}: {step}"
    return None


def _find_culprit(value: Any, error: Exception, seen: set[int]) -> tuple[list[str], Exception] | None:
    """Finds the innermost part that cannot be pickled.

    Args:
        value: an object that cannot be pickled.
        error: what pickling it raised.
        seen: the ids of the objects that were searched.

    Returns:
        The steps from `value` to the part, and what pickling it raised; None if every bad part was searched before.
    """
    seen.add(id(value))
    is_innermost = True
    for step, part in _list_parts(value) if len(seen) < MAX_OBJECTS else ():
        part_error = _try_to_pickle(part)
        if part_error is None:
            continue
        is_innermost = False
        if id(part) not in seen and (found := _find_culprit(part, part_error, seen)):
            return [step, *found[0]], found[1]
    return ([], error) if is_innermost else None


def _list_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that are pickled with an object, each with a name.

    The names are for messages.
    """
    if isinstance(value, (types.FunctionType, type)):
        if _cloudpickle._should_pickle_by_reference(value):
            return
        if isinstance(value, types.FunctionType):
            yield from _list_parts_of_function(value)
        else:
            yield from _list_parts_of_class(value)
    elif isinstance(value, types.MethodType):
        yield value.__func__.__qualname__, value.__func__
        yield f"the object of {value.__func__.__qualname__}", value.__self__
    elif isinstance(value, functools.partial):
        yield "the function of a partial", value.func
        yield from ((f"argument {index} of a partial", part) for index, part in enumerate(value.args))
        yield from ((f"argument {name!r} of a partial", part) for name, part in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod)):
        yield "its function", value.__func__
    elif isinstance(value, property):
        yield from (("its function", part) for part in (value.fget, value.fset, value.fdel) if part is not None)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        kind = type(value)
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield from ((f"{kind.__name__}.{name}", part) for name, part in attributes.items())
        yield f"the class {kind.__name__}", kind


def _list_parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__qualname__.replace("<locals>.", "")
    module = "the script" if function.__module__ == "__main__" else function.__module__
    for used in _cloudpickle._extract_code_globals(function.__code__):
        if used in function.__globals__:
            yield f"the global {used!r} of {module} that {name} uses", function.__globals__[used]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"the variable {variable!r} around {name}", _cloudpickle._get_cell_contents(cell)
    yield from ((f"the default {index} of {name}", part) for index, part in enumerate(function.__defaults__ or ()))
    yield from ((f"the default {key!r} of {name}", part) for key, part in (function.__kwdefaults__ or {}).items())
    yield from ((f"{name}.{key}", part) for key, part in vars(function).items())


def _list_parts_of_class(cls: type) -> Iterator[tuple[str, Any]]:
    state = _cloudpickle._class_getstate(cls)[0]
    yield from ((f"{cls.__name__}.{name}", part) for name, part in state.items())
    yield from ((f"the class {base.__name__}", base) for base in cls.__bases__)


def _try_to_pickle(value: Any) -> Exception | None:
    """Tries to pickle an object; returns the exception, or None."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None
