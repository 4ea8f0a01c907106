"""Keeps Python's garbage collector away from what imports leave behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Turns off the garbage collector in a block that imports modules, and exempts what exists at its end from then on.

    torch alone makes some 300,000 objects, which stay. To look at them again and again takes a sixth of the time of
    the imports, and gives each worker that is forked afterwards its own copy of the memory that they are in.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()
