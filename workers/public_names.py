"""Names classes by the package that exports them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def set_module(package: str) -> Callable[[C], C]:
    """Has a class say that it is of the package that exports it, not of the file that defines it.

    So pickles, messages and tracebacks name what users import, and files can be moved. The package must give the class
    by its name.
    """

    def decorate(cls: C) -> C:
        # doctest looks only for classes that say they are of the file, and for those listed here.
        vars(sys.modules[cls.__module__]).setdefault("__test__", {})[cls.__name__] = cls
        cls.__module__ = package
        return cls

    return decorate
