"""Takes the filters of warnings to another process.

A category travels by name, so that its module need not be imported. Until that module is loaded nothing can warn with
the category; then the filter takes its place among the others.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlstructs.workers import pickling
from rlstructs.workers.settings.on_import import after_import


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


def read() -> list[bytes]:
    """Pickles each filter of this process, in order; leaves out filters that cannot be pickled."""
    found, filters = [], list[Any](warnings.filters)
    for action, message, category, module, line in filters:
        name = CategoryName(category.__module__, category.__qualname__)
        has_name = name.module != "__main__" and name.find() is category
        with contextlib.suppress(Exception):  # a category that cannot be sent cannot occur in a worker
            found.append(pickling.dumps((action, message, name if has_name else category, module, line)))
    return found


def write(pickled: list[bytes]) -> None:
    """Replaces the filters of this process by those that `read` returned in another."""
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
    """Ignores warnings in a block, and drops the filters that modules set while they are imported there."""
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
    """Inserts the filters whose categories are loaded by now, each at its place in the order."""
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
    """Makes modules forget which warnings they have shown: leaving this block counts as a change of filters."""
    with warnings.catch_warnings():
        pass
