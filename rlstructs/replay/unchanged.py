"""How a buffer is pickled while other threads may write: it raises rather than give half of a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstructs.errors import StateError

#: The last key of a state that is pickled.
UNCHANGED = "_unchanged"


class Unchanged:
    """Stands under that key: what lies before it is pickled as it is in memory, without a lock.

    Args:
        content: gives something else after a change.
    """

    def __init__(self, content: Callable[[], Any]) -> None:
        self._content, self._before = content, content()

    def __reduce__(self) -> Any:
        if self._content() != self._before:
            raise StateError("a buffer was changed by another thread while it was pickled: save gives what there is")
        return bool, ()
