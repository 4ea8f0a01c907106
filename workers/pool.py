"""Pools of jobs, in worker processes or in this one.

`WorkerPool` has a process for each job, `InlinePool` runs one here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from typing import Any, Protocol

from rlstructs.workers.arena import check_enough
from rlstructs.workers.errors import WorkerError, check_owner, strip_traceback
from rlstructs.workers.interrupts import defer_first_interrupt, defer_interrupt, forget_last_interrupt
from rlstructs.workers.logs import LogPipe
from rlstructs.workers.loop import close_job
from rlstructs.workers.messages import Build, Call, Close, Future, Post, State, gather_values
from rlstructs.workers.process import StartOptions, WorkerProcess, end_all
from rlstructs.workers.public_names import set_module
from rlstructs.workers.replies import Exchange
from rlstructs.workers.script import make_build_request
from rlstructs.workers.start import default_start_method

# Seconds that workers get to close their jobs.
CLOSE_DELAY = 3.0
# Seconds that the other workers get to close their jobs when a factory has raised.
START_PATIENCE = 1.0


def _nothing(index: int) -> None:
    pass


def _end_left(workers: list[WorkerProcess], log: LogPipe) -> None:
    """Ends the workers of a pool that was not closed."""
    with defer_first_interrupt():  # a finalizer runs only once
        end_all(workers)
        log.read_all()
        log.deliver()
        log.close()


@set_module("rlstructs.workers")
class WorkerPool:
    """Worker processes, each with one job.

    Args:
        n_workers: how many processes.
        factory: `factory(index, *shared)` is called in each worker and returns its job, any object.
            cloudpickle pickles it, so it may be a lambda or a class of the script.
        shared: objects that each worker gets as it starts, usually `SharedArena`s.
        start_method: "forkserver" (the default on Linux), "spawn" (elsewhere) or "fork".
        timeout: seconds within which replies must come, None for no limit. The pool notices at once when a worker
            ends, whatever the timeout is.
        preload: modules that the fork server imports once for all workers.
        setup: called in each worker, with its index, before the factory is unpickled.
        init_worker: called in each worker, with its index, after `setup`. An exception in it is raised here like one
            in the factory. Handlers that it adds to loggers handle the worker's records in the worker, too.
        name: the name of the processes; each adds its index.

    Raises:
        WorkerCrashed, WorkerTimeout: a worker could not start.
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
        setup: Callable[[int], None] = _nothing,
        init_worker: Callable[[int], object] | None = None,
        name: str = "worker",
    ) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        forget_last_interrupt()
        self._made_by = os.getpid()
        # Restarted workers get the same request, even if the factory or this process has changed since.
        start_method = start_method or default_start_method()
        self._first = make_build_request(setup, init_worker, factory, start_method)
        self._log = LogPipe()
        self._options = StartOptions(shared, start_method, tuple(preload), name, self._log.writer)
        self._workers: list[WorkerProcess] = []
        self._exchange = Exchange(self._workers, self._log, timeout)
        # Not weakref.finalize: this one runs before multiprocessing joins the remaining children at exit, and never in
        # a forked copy of this process.
        self._finalizer = util.Finalize(self, _end_left, args=(self._workers, self._log), exitpriority=100)
        try:
            check_enough(n_workers)
            for index in range(n_workers):
                self._begin(index)
            self.gather(self._send(None, self._first))
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, WorkerError):
                with contextlib.suppress(Exception):  # a factory raised: the other jobs may have to close
                    self.close(START_PATIENCE)
            self.kill()
            raise

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    @property
    def timeout(self) -> float | None:
        """Seconds within which replies must come, None for no limit."""
        return self._exchange.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._exchange.timeout = seconds

    @property
    def can_restart(self) -> bool:
        """True: a worker that failed can be replaced."""
        return True

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker index."""
        return [worker.pid for worker in self._workers]

    @property
    def states(self) -> list[str]:
        """ "idle", "busy" or "gone", by worker index."""
        return [worker.state.value for worker in self._workers]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `job.method(*args)` in every worker; returns the values, by worker index.

        Raises:
            RuntimeError: a worker is still busy with an earlier request.
            Exception: see `gather`.
        """
        if busy := [worker for worker in self._exchange.find_busy() if worker.is_awaited]:
            raise RuntimeError(f"worker {busy[0].index} is still busy with {busy[0].last_request!r}: wait for it first")
        return self.gather(self.ask(method, *args))

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Future]:
        """Asks workers to call `job.method(*args)`, and returns at once; the futures get the values.

        A worker may get several requests: they wait in its pipe, so that all of them together must be small
        (`messages.AT_ONCE` bytes) unless the worker is idle. A request to a worker that is gone fails.

        Args:
            method: the name of the job's method.
            args: its arguments.
            only: the indexes of the workers to ask; None for all.
        """
        return self._send(only, Call(method, args))

    def post(self, post: Post, only: Iterable[int] | None = None) -> list[Future]:
        """Makes workers call `job.answer` with bytes, and returns at once.

        The futures get the bytes that it returns. Far quicker than `ask`, because nothing is pickled; with the same
        limit to what may wait in a pipe.

        Args:
            post: the request; each of its bytes objects gets a future.
            only: the indexes of the workers to ask; None for all.
        """
        return self._send(only, post, post.message)

    def gather(self, futures: Sequence[Future], timeout: float | None = None) -> list[Any]:
        """Waits for replies and returns their values.

        Can be called again after an interrupt or a timeout.

        Args:
            futures: what `ask`, `post` or `restart` returned.
            timeout: in seconds; None for the pool's own.

        Raises:
            WorkerTimeout: not all replied in time; the message names the late workers.
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        self._exchange.settle(futures, None, timeout, fails_fast=True)
        return gather_values(futures)

    def settle(
        self, futures: Sequence[Future], n: int | None = None, *, timeout: float | None = None, fails_fast: bool = False
    ) -> None:
        """Waits for replies and raises nothing.

        Futures get a `WorkerTimeout` if their workers are late.

        Args:
            futures: what `ask`, `post` or `restart` returned.
            n: how many of them to wait for; None for all.
            timeout: in seconds, for all of them; the pool's own timeout counts, too, for each worker.
            fails_fast: whether to stop at the first failure.
        """
        self._exchange.settle(futures, n, timeout, fails_fast)

    def is_settled(self, futures: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""
        return self._exchange.is_settled(futures, n, fails_fast)

    def check_owner(self) -> None:
        """Raises WorkerError in a forked copy of the process that started the workers."""
        check_owner(self._made_by)

    def check(self) -> dict[int, BaseException]:
        """Returns the error of each worker that is gone, by index."""
        self._exchange.drain()
        gone = [worker for worker in self._workers if worker.state is State.GONE]
        return {worker.index: strip_traceback(worker.make_crash_error()) for worker in gone}

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Future]:
        """Replaces workers, whatever they are doing; their unfinished requests fail.

        Args:
            successors: by worker index, the arguments that the factory gets after `shared`.

        Returns:
            A future for each new job, which is over when the job is built.
        """
        old = [self._workers[index] for index in successors]
        self._close_idle(old)
        for worker in old:
            self._exchange.watch.forget(worker)
        end_all(old)
        self._log.read_all()
        self._log.deliver()
        for worker in old:
            worker.fail_futures(worker.make_crash_error())
        futures = []
        for index, args in successors.items():
            self._exchange.late.discard(index)
            try:
                self._exchange.watch.check()
                check_enough(1)  # without descriptors the fork server would fail, and other pools' workers with it
                self._begin(index)
            except WorkerError as error:
                futures.append(Future(index, Build.label, True, None, strip_traceback(error)))
            else:
                futures += self._send([index], dataclasses.replace(self._first, args=args))
        return futures

    def _close_idle(self, workers: list[WorkerProcess]) -> None:
        """Makes idle workers close their jobs."""
        delay = CLOSE_DELAY if self.timeout is None else min(CLOSE_DELAY, self.timeout)
        idle = [worker for worker in workers if worker.state is State.IDLE and worker.can_close()]
        for worker in idle:
            with contextlib.suppress(WorkerError):
                worker.send(Close())
        deadline = time.monotonic() + delay
        for worker in idle:
            worker.await_close(deadline)

    def close(self, timeout: float | None = None, *, with_earlier: bool = True) -> None:
        """Closes every job and ends every worker, by force after `timeout` seconds. Idempotent.

        Args:
            timeout: in seconds; None for 3, or the pool's own if that is less. A worker that has already missed a
                deadline is ended at once.
            with_earlier: whether exceptions of earlier requests that were not gathered are raised, too.

        Raises:
            Exception: the first exception of a job; every worker has ended nevertheless.
        """
        if not self._is_ours():
            return
        self._exchange.watch.end()
        if timeout is None:
            timeout = CLOSE_DELAY if self.timeout is None else min(CLOSE_DELAY, self.timeout)
        deadline = time.monotonic() + float(timeout)  # it may be a number of numpy
        # A busy worker reads the request when it is done. One that no longer reads, or is late, is left to `kill`.
        late = self._exchange.late
        open_workers = [worker for worker in self._workers if worker.can_close() and worker.index not in late]
        errors: list[BaseException] = []
        try:
            for worker in open_workers:
                with contextlib.suppress(WorkerError):  # the worker is gone, which was reported before
                    worker.send(Close())
            for worker in open_workers:
                errors += worker.await_close(deadline, with_earlier, self._log)
        finally:
            self.kill(0.0 if late else max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]

    def kill(self, patience: float = 0.0) -> None:
        """Ends every worker that has not ended within `patience` seconds: SIGTERM, then SIGKILL."""
        if self._is_ours():
            self._exchange.watch.end()
            for worker in self._workers:
                self._exchange.watch.forget(worker)
            end_all(self._workers, patience)
            self._log.read_all()
            self._log.deliver()
            self._log.close()
            self._finalizer.cancel()  # last: an interrupt before this leaves the rest to the finalizer

    def _is_ours(self) -> bool:
        """Whether the pool still has to be ended by this process.

        A forked copy must not end it.
        """
        return self._finalizer.still_active() and os.getpid() == self._made_by

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a connection, even an incomplete one, would close the pipe when it is freed.
        raise TypeError("worker processes cannot be copied or pickled, nor what holds them")

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # the exception of the block matters more than one of a job that closes
            with contextlib.suppress(Exception):
                self.close()

    def _begin(self, index: int) -> None:
        """Starts a worker and puts it in its place in the list."""
        with defer_interrupt():  # a worker that is started but not listed would never be ended
            worker = WorkerProcess(index, self._options, self.timeout)
            self._workers[index : index + 1] = [worker]
            try:
                self._exchange.watch.add(worker)
            except WorkerError:  # the pool was closed meanwhile, perhaps without this worker
                end_all([worker])
                raise

    def _send(
        self, only: Iterable[int] | None, request: Build | Call | Post, message: list[bytes] | None = None
    ) -> list[Future]:
        self.check_owner()
        workers = self._workers if only is None else [self._workers[index] for index in only]
        return self._exchange.send(workers, request, message)


class Pool(Protocol):
    """One job per worker.

    `WorkerPool` runs them in processes, `InlinePool` runs one in this process.
    """

    @property
    def n_workers(self) -> int:
        """Number of workers."""

    @property
    def pids(self) -> list[int]:
        """The process id of each worker."""

    @property
    def states(self) -> list[str]:
        """ "idle", "busy" or "gone", for each worker."""

    @property
    def can_restart(self) -> bool:
        """Whether a worker that failed can be replaced."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every job and returns the values by worker.

        Raises the first failure.
        """

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Future]:
        """Asks workers to call a method of their jobs, and returns at once.

        `only` has the indexes of the workers; None for all.
        """

    def gather(self, futures: Sequence[Future]) -> list[Any]:
        """Waits for replies and returns their values; raises the first failure."""

    def settle(self, futures: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Waits until `n` of the futures are over; None for all.

        With `fails_fast`, also until one has failed.
        """

    def is_settled(self, futures: Sequence[Future], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""

    def check(self) -> dict[int, BaseException]:
        """The failures of workers that are known to be gone, by index."""

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Future]:
        """Replaces workers; for each index, the arguments that its new job is built with."""

    def close(self, *, with_earlier: bool = True) -> None:
        """Closes every job and ends every worker; raises errors of closing.

        `with_earlier`: errors of earlier calls too.
        """

    def kill(self) -> None:
        """Ends every worker at once."""


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
