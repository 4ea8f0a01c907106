"""Imported first of all by our fork server: limits its threads and ends it with the main process.

The end of the server's pipe alone would not end it: a forked child of the main process holds it open.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from multiprocessing import forkserver

from workers import loop


def _prepare() -> None:
    os.environ.update(dict.fromkeys(loop.THREAD_VARIABLES, "1"))  # before torch and numpy read them
    # The watching thread does nothing but wait, so forking beside it is safe.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # a sandbox may not allow it
            loop.end_with(os.pidfd_open(os.getppid()))


# Any other process may import this module (a documentation tool does) and stays as it is.
if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    _prepare()
