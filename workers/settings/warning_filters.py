"""The filters of warnings, as they travel to another process.

A category travels by its name where it has one: the module that it is of is not imported for it. Where that module is
not loaded yet, nothing warns by that category: the filter takes its place among the others once it is.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from workers import pickling
from workers.settings.on_import import after_import


class Named(NamedTuple):
    """A category of warnings by the names of its module and of its class."""

    module: str
    name: str

    def found(self) -> Any:
        """The class, None unless the module is loaded and has it."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        return found


# As `warnings.filters` has them: action, message, category, module, line.
Filter = tuple[str, Any, Any, Any, int]

# What was taken over, the first that is looked at first; of some the category is not known yet, but `Named`.
_taken_over: list[Filter] = []
_is_quiet = False


def read() -> list[bytes]:
    """The filters of this process, the first that is looked at first; without those that cannot be pickled."""
    found, filters = [], list[Any](warnings.filters)
    for action, message, category, module, line in filters:
        named = Named(category.__module__, category.__qualname__)
        is_known = named.module != "__main__" and named.found() is category
        with contextlib.suppress(Exception):  # what cannot be sent, no worker can warn by
            found.append(pickling.dumps((action, message, named if is_known else category, module, line)))
    return found


def write(pickled: list[bytes]) -> None:
    """Replaces the filters of this process by what `read` gave."""
    _taken_over[:] = [pickling.loads(data) for data in pickled]
    filters: Any = warnings.filters
    filters[:] = [each for each in _taken_over if not isinstance(each[2], Named)]
    _insert_known()
    for each in _taken_over:
        if isinstance(each[2], Named):
            after_import(each[2].module, _insert_known)
    # Of a worker that forks: the second thread is ours, it waits for the end of the main process.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignores warnings, and drops the filters that modules set as they are imported."""
    global _is_quiet
    _is_quiet = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _is_quiet = False
    _insert_known()


def _insert_known() -> None:
    """Puts filters whose categories have become known before those that come after them."""
    if _is_quiet:  # what is inserted now is dropped
        return
    filters: Any = warnings.filters
    for place, (action, message, category, module, line) in reversed(list(enumerate(_taken_over))):
        if isinstance(category, Named) and (known := category.found()) is not None:
            _taken_over[place] = action, message, known, module, line
            later = [filters.index(other) for other in _taken_over[place + 1 :] if other in filters]
            filters.insert(later[0] if later else len(filters), _taken_over[place])
    _forget_what_was_decided()


def _forget_what_was_decided() -> None:
    """Modules note what became of a warning, for as long as no filter changes: leaving this block is such a change."""
    with warnings.catch_warnings():
        pass
