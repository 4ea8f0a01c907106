"""The names that a package exports, imported when they are first used.

Classes bear the package's name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def set_module(package: str) -> Callable[[C], C]:
    """Sets a class's `__module__` to the package that exports it.

    Otherwise it would be the file that defines it.

    Pickles, messages and tracebacks then name what users import, and files can be moved. The package must export the
    class under its name.
    """

    def decorate(cls: C) -> C:
        # doctest finds only classes whose `__module__` is the file, and those listed in `__test__`.
        vars(sys.modules[cls.__module__]).setdefault("__test__", {})[cls.__name__] = cls
        cls.__module__ = package
        return cls

    return decorate


def export_lazily(
    package: str, exports: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the functions `__getattr__` and `__dir__` of a package.

    A package defines them `if not TYPE_CHECKING`: type checkers allow any name of a package that has a `__getattr__`.

    Args:
        package: its name.
        exports: public name -> module that defines it, relative to the package.
        modules: names of public modules of the package.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{exports[name]}"), name)

    def list_names() -> list[str]:
        # A shell completes names by this. By default it would be what the package's own file has imported.
        return sorted({*exports, *modules})

    return get, list_names
