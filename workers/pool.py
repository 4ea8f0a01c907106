"""N workers as one: broadcast a request, gather the replies under one deadline, close all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import Any

from workers import messages
from workers.channel import milliseconds
from workers.errors import WorkerError, WorkerTimeout
from workers.messages import Build, Call, Close, Failure, Result, State
from workers.process import WorkerProcess
from workers.start import default_start_method

# Seconds that workers get to close their jobs, then from SIGTERM to SIGKILL, then to be reaped.
CLOSE_DELAY, TERM_DELAY, KILL_DELAY = 3.0, 0.5, 1.0


def _nothing() -> None:
    pass


class WorkerPool:
    """Jobs in worker processes, one each.

    Args:
        n_workers: how many.
        factory: `factory(index, *shared)` is called in each worker and returns its job, any object.
            Pickled by cloudpickle, so a lambda or a class of the script will do.
        shared: what is handed over while a worker starts, `SharedArena`s above all.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which replies must come, None for no limit. Deaths are noticed at
            once either way.
        preload: modules that the fork server imports once for all workers.
        setup: called in each worker before the factory is unpickled.
        name: what the processes are called, with their index behind it.

    Raises:
        WorkerCrashed, WorkerTimeout: a worker did not come up.
        Exception: what a factory raised, with the worker's traceback as the cause.
    """

    def __init__(
        self,
        n_workers: int,
        factory: Callable[..., Any],
        *,
        shared: tuple[Any, ...] = (),
        start_method: str | None = None,
        timeout: float | None = None,
        preload: Iterable[str] = (),
        setup: Callable[[], None] = _nothing,
        name: str = "worker",
    ) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        build = Build(messages.dumps(setup), messages.dumps(factory), dict(os.environ), _directory())
        self.timeout = timeout
        self._workers: list[WorkerProcess] = []
        self._replies: dict[int, Any] = {}
        self._poll = select.poll()
        self._index_of: dict[int, int] = {}
        # Not weakref.finalize: this one runs before multiprocessing joins what is left at exit,
        # and never in a forked copy of this process.
        self._finalizer = util.Finalize(self, _kill, args=(self._workers,), exitpriority=100)
        try:
            for index in range(n_workers):
                self._start(index, shared, start_method or default_start_method(), tuple(preload), name)
            self._send_all(build)
            self.gather()
        except BaseException:
            self.kill()
            raise

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker index."""
        return [worker.pid for worker in self._workers]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `job.method(*args)` in every worker; the values, by worker index."""
        self.broadcast(method, *args)
        return self.gather()

    def broadcast(self, method: str, *args: Any) -> None:
        """Asks every worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send_all(Call(method, args))

    def send(self, index: int, method: str, *args: Any) -> None:
        """Asks one worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send(self._workers[index], Call(method, args))

    def ready(self, timeout: float | None = 0.0) -> bool:
        """Waits up to `timeout` seconds; whether every asked worker has replied.

        Takes nothing away: `gather` still returns every reply, in the workers' order.

        Raises:
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._busy():
            events = self._poll.poll(milliseconds(deadline))
            for fd, _ in events:
                self._read(self._workers[self._index_of[fd]])
            if not events and deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def gather(self, timeout: float | None = None) -> list[Any]:
        """The replies of all that were asked, by worker index.

        Args:
            timeout: seconds; None for the pool's own.

        Raises:
            WorkerTimeout: not all replied in time; names who did not.
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        timeout = self.timeout if timeout is None else timeout
        if not self.ready(timeout):
            late = self._busy()
            raise WorkerTimeout(
                f"no reply within {timeout} s to {late[0].last_request!r} from worker(s) "
                + ", ".join(f"{worker.index} (pid {worker.pid})" for worker in late),
                late[0].index,
            )
        replies, self._replies = self._replies, {}
        return [replies[index] for index in sorted(replies)]

    def close(self, timeout: float = CLOSE_DELAY) -> None:
        """Closes every job and ends every worker, by force after `timeout` seconds. Idempotent.

        Raises:
            Exception: what the first job raised while it closed; everything is gone all the same.
        """
        if not self._finalizer.still_active():
            return
        deadline = time.monotonic() + timeout
        # A busy one reads it when it is through. One that reads no more is left to `kill`.
        open_workers = [worker for worker in self._workers if worker.can_close()]
        for worker in open_workers:
            with contextlib.suppress(WorkerError):  # gone: reported where it mattered
                worker.send(Close())
        errors = [error for worker in open_workers for error in self._await_close(worker, deadline)]
        self.kill(max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]

    def kill(self, patience: float = 0.0) -> None:
        """Ends every worker that has not ended within `patience` seconds: SIGTERM, then SIGKILL."""
        if self._finalizer.still_active():
            for worker in self._workers:
                self._forget(worker)
            self._finalizer.cancel()
            _kill(self._workers, patience)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # what is on its way out matters more than what a job says as it closes
            with contextlib.suppress(Exception):
                self.close()

    def _start(self, index: int, *arguments: Any) -> None:
        worker = WorkerProcess(index, *arguments)
        self._workers.append(worker)
        for fd in (worker.channel.fileno(), worker.sentinel()):
            self._poll.register(fd, select.POLLIN)
            self._index_of[fd] = index

    def _send_all(self, request: Build | Call) -> None:
        data = messages.dumps(request)  # once for all
        for worker in self._workers:
            self._send(worker, request, data)

    def _send(self, worker: WorkerProcess, request: Build | Call, data: bytes | None = None) -> None:
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        try:
            worker.send(request, data, deadline)
        except TimeoutError as error:
            raise WorkerTimeout(
                f"worker {worker.index} (pid {worker.pid}) has not read {request.label!r} within {self.timeout} s",
                worker.index,
            ) from error

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.state is State.BUSY]

    def _check_idle(self) -> None:
        if busy := self._busy():
            raise RuntimeError(
                f"worker {busy[0].index} is still busy with {busy[0].last_request!r}: gather its reply first"
            )

    def _read(self, worker: WorkerProcess) -> None:
        if worker.state is not State.BUSY or not worker.channel.has_message():
            self._forget(worker)  # it ended, with nothing more to say
            raise worker.crashed()
        try:
            reply = worker.receive()
        except WorkerError:
            self._forget(worker)
            raise
        if isinstance(reply, Failure):
            raise reply.to_exception(worker.index, worker.last_request)
        assert isinstance(reply, Result)
        self._replies[worker.index] = reply.value

    def _forget(self, worker: WorkerProcess) -> None:
        for fd in [fd for fd, index in self._index_of.items() if index == worker.index]:
            self._poll.unregister(fd)
            del self._index_of[fd]

    def _await_close(self, worker: WorkerProcess, deadline: float) -> list[BaseException]:
        errors: list[BaseException] = []
        if worker.state is State.GONE:
            return errors
        poll = select.poll()
        poll.register(worker.channel.fileno(), select.POLLIN)
        while poll.poll(milliseconds(deadline)):
            try:
                reply = worker.channel.receive()
            except EOFError:
                return errors
            if isinstance(reply, Failure):
                errors.append(reply.to_exception(worker.index, Close.label))
        return errors


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # deleted under this process
        return None


def _kill(workers: list[WorkerProcess], patience: float = 0.0) -> None:
    deadline = time.monotonic() + patience
    left = [worker for worker in workers if not worker.join(max(0.0, deadline - time.monotonic()))]
    for signum, delay in ((signal.SIGTERM, TERM_DELAY), (signal.SIGKILL, KILL_DELAY)):
        for worker in left:
            worker.kill(signum)
        deadline = time.monotonic() + delay
        left = [worker for worker in left if not worker.join(max(0.0, deadline - time.monotonic()))]
    for worker in workers:
        worker.release()
