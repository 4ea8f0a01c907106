"""Calls functions when a module is imported, if it ever is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls `function()` now if the module is loaded, otherwise once it has been imported.

    Args:
        name: the module's name.
        function: the function; if it raises, the import fails.
    """
    if name in sys.modules:
        function()
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(function)


class _Finder(MetaPathFinder):
    """Finds awaited modules by the other finders, and makes their loaders call the functions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _extend_loader(spec)
                return spec
        return None


def _extend_loader(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    if not hasattr(loader, "exec_module") or isinstance(loader, type):  # a package without __init__, a built-in module
        return
    execute = loader.exec_module

    def execute_and_call(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == spec.name:  # one loader may load several modules
            for function in _waiting.pop(spec.name, []):
                function()

    loader.exec_module = execute_and_call
