"""A pool of one job in this process, with the methods of `WorkerPool`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlstructs.workers.interrupts import forget_last_interrupt
from rlstructs.workers.loop import close_job
from rlstructs.workers.messages import Future, gather_values
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.workers")
class InlinePool:
    """Runs one job in this process, for debugging; its exceptions keep their own traceback.

    Args:
        factory, shared: see `WorkerPool`.
        around: returns the context in which the factory and every method run.
        init_worker: called with 0, before the factory.
    """

    #: Whether a worker that failed can be replaced.
    can_restart = False

    def __init__(
        self,
        factory: Callable[..., Any],
        *,
        shared: tuple[Any, ...] = (),
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        init_worker: Callable[[int], object] | None = None,
    ) -> None:
        forget_last_interrupt()
        self._around = around
        with around():
            if init_worker is not None:
                init_worker(0)
            self._job: Any = factory(0, *shared)
        self.n_workers, self.pids, self.states, self._open = 1, [os.getpid()], ["idle"], True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `job.method(*args)`; returns its value in a list of one."""
        return self.gather(self.ask(method, *args))

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Future]:
        """Calls `job.method(*args)`; the future holds the value or the exception."""
        future = Future(0, method)
        try:
            with self._around():
                future.end(getattr(self._job, method)(*args))
        except Exception as error:
            future.end(error=error)
        return [future]

    def gather(self, futures: Sequence[Future], timeout: float | None = None) -> list[Any]:
        """Returns the values of calls, or raises what the first that failed raised."""
        return gather_values(futures)

    def settle(
        self, futures: Sequence[Future], n: int | None = None, *, timeout: float | None = None, fails_fast: bool = False
    ) -> None:
        """Does nothing: a call is over when it returns."""

    def is_settled(self, futures: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Returns True: a call is over when it returns."""
        return True

    def check(self) -> dict[int, BaseException]:
        """Returns no failures: the job's process is this one."""
        return {}

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Future]:
        """Raises: a job in this process cannot be replaced."""
        raise NotImplementedError("a job in this process cannot be replaced")

    def close(self, timeout: float = 0.0, *, with_earlier: bool = True) -> None:
        """Closes the job. Idempotent."""
        if self._open:
            self._open = False
            job, self._job = self._job, None
            with self._around():
                close_job(job)

    def kill(self, patience: float = 0.0) -> None:
        """Closes the job and ignores its exceptions."""
        with contextlib.suppress(Exception):
            self.close()
