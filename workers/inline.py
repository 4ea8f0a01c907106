"""One job in this process, behind the interface of `WorkerPool`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workers.interrupts import forget_last_interrupt
from workers.loop import close_job
from workers.messages import Asked


class InlinePool:
    """The same jobs, or rather one of them, in this process: for debugging.

    Takes what `WorkerPool` takes; what the job raises arrives with its own traceback.

    Args:
        around: gives a context in which the factory and every method run.
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
        self._asked: list[Asked] = []
        with around():
            if init_worker is not None:
                init_worker(0)
            self._job: Any = factory(0, *shared)
        self.n_workers, self.pids, self.states, self._open = 1, [os.getpid()], ["idle"], True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `job.method(*args)`; its value as a list of one."""
        self.broadcast(method, *args)
        return self.gather()

    def broadcast(self, method: str, *args: Any) -> None:
        """Calls `job.method(*args)`; what it raises is raised by `gather`."""
        self._asked = self.ask(method, *args)

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Asked]:
        """Calls `job.method(*args)`; what it raises is in what is returned."""
        asked = Asked(0, method)
        try:
            with self._around():
                asked.end(getattr(self._job, method)(*args))
        except Exception as error:
            asked.end(error=error)
        return [asked]

    def settle(self, asked: Sequence[Asked], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Nothing: a call is over when it returns."""

    def is_settled(self, asked: Sequence[Asked], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """True."""
        return True

    def check(self) -> dict[int, BaseException]:
        """No failures: the job is here."""
        return {}

    def send(self, index: int, method: str, *args: Any) -> None:
        """As `broadcast`: there is one job."""
        self.broadcast(method, *args)

    def ready(self, timeout: float | None = 0.0) -> bool:
        """True: a call is over when it returns."""
        for each in self._asked:
            if each.error is not None:
                self._asked = []
                raise each.error
        return True

    def gather(self, timeout: float | None = None) -> list[Any]:
        """The value of the last call, as a list of one, or what it raised."""
        self.ready()
        return [each.value for each in self._asked]  # and keeps them: who is interrupted asks again

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Asked]:
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
        """Closes the job and says nothing of how that went."""
        with contextlib.suppress(Exception):
            self.close()
