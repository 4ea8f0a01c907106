"""Settings of a process that its workers take over.

Filters of warnings, for example.

A table holds the functions that read and write each setting. Each value is pickled separately, so that one
that cannot be pickled does not affect the others.

The category of a filter of warnings travels by name, so that its module need not be imported. Until that module is
loaded nothing can warn with the category; then the filter takes its place among the others.
"""

from __future__ import annotations

import contextlib
import decimal
import locale
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from rlstructs.workers import logs, pickling
from rlstructs.workers import logs as log_settings

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

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
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


class CategoryName(NamedTuple):
    """The name of a category of warnings: its module and its class."""

    module: str
    name: str

    def find(self) -> Any:
        """Returns the class; None unless its module is loaded and has it."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        return found


# The entries of `warnings.filters`: action, message, category, module, line.
Filter = tuple[str, Any, Any, Any, int]

# The parent's filters in the order in which they apply; a category that is not loaded yet is a `CategoryName`.
_parent_filters: list[Filter] = []
_is_quiet = False


def read_filters() -> list[bytes]:
    """Pickles each filter of this process, in order.

    Leaves out filters that cannot be pickled.
    """
    found, filters = [], list[Any](warnings.filters)
    for action, message, category, module, line in filters:
        name = CategoryName(category.__module__, category.__qualname__)
        has_name = name.module != "__main__" and name.find() is category
        with contextlib.suppress(Exception):  # a category that cannot be sent cannot occur in a worker
            found.append(pickling.dumps((action, message, name if has_name else category, module, line)))
    return found


def write_filters(pickled: list[bytes]) -> None:
    """Replaces the filters of this process by those that `read_filters` returned in another."""
    _parent_filters[:] = [pickling.loads(data) for data in pickled]
    filters: Any = warnings.filters
    filters[:] = [each for each in _parent_filters if not isinstance(each[2], CategoryName)]
    _insert_loaded()
    for each in _parent_filters:
        if isinstance(each[2], CategoryName):
            after_import(each[2].module, _insert_loaded)
    # For a worker that forks: the second thread is ours and only waits for the end of the main process.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)


@contextlib.contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignores warnings in a block.

    Drops the filters that modules set while they are imported there.
    """
    global _is_quiet
    _is_quiet = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _is_quiet = False
    _insert_loaded()


def _insert_loaded() -> None:
    """Inserts the filters whose categories are loaded by now.

    Each at its place in the order.
    """
    if _is_quiet:  # a filter that is inserted now would be dropped
        return
    filters: Any = warnings.filters
    for place, (action, message, category, module, line) in reversed(list(enumerate(_parent_filters))):
        if isinstance(category, CategoryName) and (loaded := category.find()) is not None:
            _parent_filters[place] = action, message, loaded, module, line
            later = [filters.index(other) for other in _parent_filters[place + 1 :] if other in filters]
            filters.insert(later[0] if later else len(filters), _parent_filters[place])
    _clear_registries()


def _clear_registries() -> None:
    """Makes modules forget which warnings they have shown.

    Leaving this block counts as a change of filters.
    """
    with warnings.catch_warnings():
        pass


logger = logging.getLogger("rlstructs.workers")


class Setting(NamedTuple):
    """The functions that read and write one setting of this process."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    @classmethod
    def attribute(cls, owner: Any, name: str) -> Setting:
        """Makes a setting of an attribute, for example of a module."""
        return cls(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


Table = Mapping[str, Setting]


def read_settings(table: Table) -> dict[str, bytes]:
    """Pickles the settings of this process, by name.

    Leaves out those that cannot be read or pickled.
    """
    found = {}
    for name, setting in table.items():
        try:
            found[name] = pickling.dumps(setting.read())
        except Exception as error:
            logger.debug("workers do not take over %s: %r", name, error)
    return found


def write_settings(table: Table, values: Mapping[str, bytes]) -> None:
    """Applies the settings that `read_settings` returned in another process, where they differ here."""
    for name, data in values.items():
        try:
            value = pickling.loads(data)
            if table[name].read() != value:
                table[name].write(value)
        except Exception as error:
            logger.warning("%s could not be taken over by a worker: %r", name, error)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silences warnings in a block that imports modules.

    The parent has imported them and shown the warnings. Undoes changes that the modules make to warning filters and
    logging levels.
    """
    levels = log_settings.read_levels()
    try:
        with ignore_warnings():
            yield
    finally:
        log_settings.write_levels(levels)


def _read_warning_format() -> Any:
    """Returns the user's function that formats warnings; None for Python's own."""
    function = warnings.formatwarning
    return None if function.__module__ == "warnings" else function


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


SETTINGS: Table = {
    "sys.setrecursionlimit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "locale.setlocale": Setting(lambda: locale.setlocale(locale.LC_ALL), _set_locale),
    "decimal.setcontext": Setting(decimal.getcontext, decimal.setcontext),
    "logging": Setting(log_settings.read_log_settings, log_settings.write_log_settings),
    "logging's handlers": Setting(log_settings.read_handler_classes, logs.leave_to_parent),
    "warnings.filters": Setting(read_filters, write_filters),
    "warnings.defaultaction": Setting.attribute(warnings, "defaultaction"),
    "warnings.formatwarning": Setting(_read_warning_format, Setting.attribute(warnings, "formatwarning").write),
}
