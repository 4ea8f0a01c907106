"""The error of a worker that could not be started, and advice on such errors."""

from __future__ import annotations

import errno
import tempfile

# Python's message when the system refuses another thread.
NO_THREAD = "can't start new thread"


class StartError(Exception):
    """A worker could not be started; its message says why."""


def suggest_next_step(error: BaseException) -> str:
    """Returns advice to append to the message of an error during a start; "" if there is none."""
    text, number = str(error), getattr(error, "errno", None)
    if "AF_UNIX path too long" in text:
        # The fork server's socket lies in the temporary directory.
        return f"; the path of the temporary directory, {_get_temp_folder()}, is too long: set TMPDIR to a shorter one"
    if number == errno.EAGAIN or NO_THREAD in text:
        return (
            "; the system allows no more processes or threads for this user or container: raise the limit "
            "(ulimit -u, or the container's pids limit), or start fewer workers"
        )
    if number == errno.ENOMEM:
        return "; there is no memory for another process: start fewer workers, or free some"
    if number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR):
        return (
            f"; the fork server has its socket in the temporary directory ({_get_temp_folder()}): set TMPDIR to a "
            'folder that exists, can be written to and is not full, or give start_method="spawn", which needs none'
        )
    return ""


def _get_temp_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "there is none"
