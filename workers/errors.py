"""What can go wrong with a worker process.

WorkerError                 anything that went wrong in or with a worker
    WorkerCrashed           the process is gone: killed, exited, or it could not start
    WorkerTimeout           no reply in time (also a TimeoutError, Python's and multiprocessing's)
RemoteTraceback             never raised: the `__cause__` of an exception that a worker sent
"""

from __future__ import annotations

import multiprocessing
import os
import signal


class WorkerError(RuntimeError):
    """A worker failed and its own exception could not be brought over as it was.

    Attributes:
        worker_index: which worker, or None when it is not one of them.
    """

    def __init__(self, message: str, worker_index: int | None = None) -> None:
        super().__init__(message)
        self.worker_index = worker_index

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.worker_index)


class WorkerCrashed(WorkerError):
    """A worker process is gone.

    Attributes:
        exitcode: the exit status, `-N` when signal N killed it, None when unknown.
    """

    def __init__(self, message: str, worker_index: int | None = None, exitcode: int | None = None) -> None:
        super().__init__(message, worker_index)
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.worker_index, self.exitcode)


class WorkerTimeout(WorkerError, TimeoutError, multiprocessing.TimeoutError):
    """A worker did not reply within the deadline."""  # gymnasium's AsyncVectorEnv raises multiprocessing's


class RemoteTraceback(Exception):
    """The traceback of an exception as it was in the worker; the `__cause__` of what is raised here.

    Attributes:
        worker_index: which worker raised it.
    """

    def __init__(self, text: str, worker_index: int) -> None:
        super().__init__(text, worker_index)
        self.text = text
        self.worker_index = worker_index

    def __str__(self) -> str:
        return f'in worker {self.worker_index}:\n"""\n{self.text}"""'


def is_gone(error: BaseException) -> bool:
    """Whether an error says that a worker is gone or late, and not what its job raised.

    What could not be brought over as it was, is a WorkerError too.
    """
    return isinstance(error, WorkerError) and (
        isinstance(error, (WorkerCrashed, WorkerTimeout)) or not isinstance(error.__cause__, RemoteTraceback)
    )


def check_owner(pid: int) -> None:
    """Raises WorkerError unless this process is `pid`, which has made the workers, and no forked copy of it.

    A copy would read replies that are for the other, and write to memory that the other shares with its workers.
    """
    if os.getpid() != pid:
        raise WorkerError("the workers belong to the process that this one is a forked copy of")


def bare(error: WorkerError) -> WorkerError:
    """`error` without tracebacks: they hold every caller, and those hold what the error is kept in.

    Nothing of such a ring, shared memory least of all, would go before the next full garbage collection.
    """
    error.__context__ = None  # the end of the pipe
    return error.with_traceback(None)


def describe_exit(exitcode: int | None) -> str:
    """Says in words how a process ended, from its exit code as multiprocessing gives it."""
    if exitcode is None:
        return "exit code unknown"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"exit code {exitcode}, killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"exit code {exitcode}"


class OutOfMemoryError(MemoryError):
    """More shared memory was asked for than the machine or its control group has."""
