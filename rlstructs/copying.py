"""Copies agents and arguments, and finds the part of them that cannot be copied."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, TypeVar

import cloudpickle
import torch

T = TypeVar("T")

# The most levels of nested attributes that are searched.
DEPTH = 20
# The dicts in which a torch module keeps its parts; users reach the parts as attributes of the module.
PARTS = ("_parameters", "_buffers", "_modules")


def deep_copy(agent: T) -> T:
    """Copies an agent; the copy shares nothing with it.

    Raises:
        TypeError: something in it cannot be copied; the message names it and says what to do.
    """
    try:
        return copy.deepcopy(agent)
    except Exception as error:
        name = type(agent).__name__
        path, value, why = _find_obstacle(agent, "", error)
        what = f"its attribute {path} (of type {type(value).__name__}) cannot be copied" if path else "it raised"
        raise TypeError(
            f"{name} cannot be copied for an evaluation: {what}: {why}; define {name}.copy_for_evaluation() to return "
            "another agent that acts the same, or keep objects that cannot be copied out of the agent"
        ) from error


def copy_arguments(arguments: T) -> T:
    """Copies a factory's arguments by `deepcopy`, or by a pickle if that fails.

    `deepcopy` fails for a Python module, for example.
    """
    try:
        return copy.deepcopy(arguments)
    except Exception:
        return cloudpickle.loads(cloudpickle.dumps(arguments))  # type: ignore[no-any-return]


def _find_obstacle(
    value: Any, path: str, error: Exception, above: frozenset[int] = frozenset()
) -> tuple[str, Any, Exception]:
    """Finds the innermost part that cannot be copied.

    Returns its path, the part and the error.
    """
    if len(above) < DEPTH:
        for name, part in _parts(value):
            if id(part) in above:
                continue
            try:
                copy.deepcopy(part)
            except Exception as inner:
                below = f"{path}{name}" if path or name.startswith("[") else name.removeprefix(".")
                return _find_obstacle(part, below, inner, above | {id(value)})
    return path, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value, each with its path, such as `.a`.

    An entry has a path such as `[0]`.
    """
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    if isinstance(value, (torch.Tensor, type)):
        return
    own = getattr(value, "__dict__", {})
    is_module = isinstance(value, torch.nn.Module)
    for name, part in own.items():
        if is_module and name in PARTS:
            yield from ((f".{key}", each) for key, each in part.items())
        else:
            yield f".{name}", part
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    yield from ((f".{name}", getattr(value, name)) for name in slots if name not in own and hasattr(value, name))
