"""Gives classes the name of the package that exports them as their `__module__`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def set_module(package: str) -> Callable[[C], C]:
    """Sets a class's `__module__` to the package that exports it, instead of the file that defines it.

    Pickles, messages and tracebacks then name what users import, and files can be moved. The package must export the
    class under its name.
    """

    def decorate(cls: C) -> C:
        # doctest finds only classes whose `__module__` is the file, and those listed in `__test__`.
        vars(sys.modules[cls.__module__]).setdefault("__test__", {})[cls.__name__] = cls
        cls.__module__ = package
        return cls

    return decorate
