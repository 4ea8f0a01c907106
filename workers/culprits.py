"""Which part of an object cannot be pickled: the global of a script, the attribute, the variable of a closure."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

# Of the implementation: what of a program cloudpickle sends, and by what name it finds it.
_cloudpickle = importlib.import_module("cloudpickle.cloudpickle")
# Objects that are searched.
MOST = 200


def why_not_sent(objects: Mapping[str, Any]) -> str | None:
    """Says which of some objects cannot be sent to a worker and why, naming the part; None if all can.

    Args:
        objects: by what they are called in the message.
    """
    for name, value in objects.items():
        error = _error(value)
        if error is None:
            continue
        steps, error = _search(value, error, set()) or ([], error)
        if not steps:
            return f"{name} cannot be sent to a worker: {error}"
        *way, last = steps
        through = f" (through {' -> '.join(way)})" if way else ""
        step = "make it in a function that the worker calls"
        return f"{name} cannot be sent to a worker: {error}; it is {last}{through}: {step}"
    return None


def _search(value: Any, error: Exception, seen: set[int]) -> tuple[list[str], Exception] | None:
    """The steps to the part that is to blame, and why; None if it is not in here.

    Args:
        value: cannot be pickled.
        error: why.
        seen: the ids of those on the way to it, and of those that were searched.
    """
    seen.add(id(value))
    is_whole = True
    for step, part in _parts(value) if len(seen) < MOST else ():
        why = _error(part)
        if why is None:
            continue
        is_whole = False
        if id(part) not in seen and (found := _search(part, why, seen)):
            return [step, *found[0]], found[1]
    return ([], error) if is_whole else None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with an object, and how it is called."""
    if isinstance(value, (types.FunctionType, type)):
        if not _cloudpickle._should_pickle_by_reference(value):
            yield from _parts_of_function(value) if isinstance(value, types.FunctionType) else _parts_of_class(value)
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
        if isinstance(held := getattr(value, "__dict__", None), dict):
            yield from ((f"{kind.__name__}.{name}", part) for name, part in held.items())
        yield f"the class {kind.__name__}", kind


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
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


def _parts_of_class(cls: type) -> Iterator[tuple[str, Any]]:
    state = _cloudpickle._class_getstate(cls)[0]
    yield from ((f"{cls.__name__}.{name}", part) for name, part in state.items())
    yield from ((f"the class {base.__name__}", base) for base in cls.__bases__)


def _error(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None
