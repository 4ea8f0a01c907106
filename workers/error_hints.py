"""Adds advice to exceptions that occur only because code runs in a worker."""

from __future__ import annotations

import bdb

from rlstructs.workers.failures import add_note
from rlstructs.workers.main_module import explain_left_out

NO_TERMINAL = (
    "a worker has no terminal: debug in the main process, with n_processes=0 of a batcher or n_workers=0 of a "
    "SharedVectorEnv"
)


def add_hint(error: BaseException) -> None:
    """Adds advice to an exception that was raised in this worker, if there is advice for it."""
    if isinstance(error, bdb.BdbQuit) and not error.args:  # raised by breakpoint()
        error.args = (NO_TERMINAL,)
    elif isinstance(error, EOFError) and "when reading a line" in str(error):  # raised by input()
        add_note(error, NO_TERMINAL)
    elif isinstance(error, NameError) and (why := explain_left_out(error.name or "")):
        add_note(error, f"{error.name!r} of the script was not sent to this worker: {why}")
