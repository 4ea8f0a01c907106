"""The exceptions of worker processes.

WorkerError                 something went wrong in or with a worker
    WorkerCrashed           the process is gone: it was killed, exited, or could not start
    WorkerTimeout           no reply in time (also a TimeoutError, Python's and multiprocessing's)
RemoteTraceback             never raised: the `__cause__` of an exception that a worker sent
OutOfMemoryError            the machine does not have as much shared memory
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tempfile

from rlstructs.workers.public_names import set_module


@set_module("rlstructs.workers")
class WorkerError(RuntimeError):
    """A worker failed and its own exception could not be sent.

    Attributes:
        worker_index: the index of the worker; None if the error is not about one worker.
    """

    def __init__(self, message: str, worker_index: int | None = None) -> None:
        super().__init__(message)
        self.worker_index = worker_index

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.worker_index)


@set_module("rlstructs.workers")
class WorkerCrashed(WorkerError):
    """A worker process is gone.

    Attributes:
        exitcode: the exit status, `-N` if signal N killed it, None if unknown.
    """

    def __init__(self, message: str, worker_index: int | None = None, exitcode: int | None = None) -> None:
        super().__init__(message, worker_index)
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.worker_index, self.exitcode)


@set_module("rlstructs.workers")
class WorkerTimeout(WorkerError, TimeoutError, multiprocessing.TimeoutError):
    """A worker did not reply within the deadline."""  # gymnasium's AsyncVectorEnv raises multiprocessing's


@set_module("rlstructs.workers")
class RemoteTraceback(Exception):
    """The traceback of an exception in a worker.

    It is the `__cause__` of the exception that the parent raises.

    Attributes:
        worker_index: the worker that raised it.
    """

    def __init__(self, text: str, worker_index: int) -> None:
        super().__init__(text, worker_index)
        self.text = text
        self.worker_index = worker_index

    def __str__(self) -> str:
        return f'in worker {self.worker_index}:\n"""\n{self.text}"""'


def is_gone(error: BaseException) -> bool:
    """Whether an error means that a worker is gone or late.

    False for an exception that its job raised. A plain WorkerError may be either: it also stands for an exception of
    the job that could not be sent.
    """
    return isinstance(error, WorkerError) and (
        isinstance(error, (WorkerCrashed, WorkerTimeout)) or not isinstance(error.__cause__, RemoteTraceback)
    )


def check_owner(pid: int) -> None:
    """Raises WorkerError in a forked copy of process `pid`, which started the workers.

    A copy would read that process's replies and write to the memory that it shares with its workers.
    """
    if os.getpid() != pid:
        raise WorkerError("the workers belong to the process that this one is a forked copy of")


def strip_traceback(error: WorkerError) -> WorkerError:
    """Removes the traceback of an error to keep, and returns the error.

    The traceback would refer to the callers' frames, and these to the object that keeps the error. Such a cycle, and
    the shared memory in it, would live until the next full garbage collection.
    """
    error.__context__ = None  # the EOFError of the pipe
    return error.with_traceback(None)


def describe_exit(exitcode: int | None) -> str:
    """Says in words what an exit code of multiprocessing means."""
    if exitcode is None:
        return "exit code unknown"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"exit code {exitcode}, killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"exit code {exitcode}"


@set_module("rlstructs.workers")
class OutOfMemoryError(MemoryError):
    """More shared memory was asked for than the machine or its control group has."""


# Python's message when the system refuses another thread.
NO_THREAD = "can't start new thread"


class StartError(Exception):
    """A worker could not be started; its message says why."""


def suggest_next_step(error: BaseException) -> str:
    """Returns advice to append to the message of a start error.

    "" if there is none.
    """
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
