"""Why a worker could not be started, and what to do about it."""

from __future__ import annotations

import errno
import tempfile

# What Python says when the system refuses another thread.
NO_THREAD = "can't start new thread"


class StartError(Exception):
    """A worker could not be started; its message says why."""


def next_step(error: BaseException) -> str:
    """What to do about an error of a start, to be put behind it; "" where that is not known."""
    text, number = str(error), getattr(error, "errno", None)
    if "AF_UNIX path too long" in text:
        # The fork server listens at a name in it.
        return f"; the name of the temporary directory, {_folder()}, is too long: set TMPDIR to a shorter one"
    if number == errno.EAGAIN or NO_THREAD in text:
        return (
            "; the system starts no more processes or threads for this user or container: raise the limit "
            "(ulimit -u, or the container's pids limit), or start fewer workers"
        )
    if number == errno.ENOMEM:
        return "; there is no memory for another process: start fewer workers, or free some"
    if number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR):
        return (
            f"; the fork server has its socket in the temporary directory ({_folder()}): set TMPDIR to a folder that "
            'exists, can be written to and is not full, or give start_method="spawn", which needs none'
        )
    return ""


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "there is none"
