"""A pool of workers: broadcasts requests, gathers replies under one deadline, restarts workers, closes all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from typing import Any

from workers import messages, pickling
from workers.channel import deadline_in
from workers.descriptors import check_enough
from workers.errors import WorkerError, WorkerTimeout, check_owner, strip_traceback
from workers.failures import Failure
from workers.interrupts import defer_first_interrupt, defer_interrupt, forget_last_interrupt
from workers.messages import Asked, Build, Call, Close, Post, Result, State
from workers.process import WorkerProcess, end_all
from workers.script_pickling import make_build_request
from workers.settings.log_records import LogPipe
from workers.start import default_start_method
from workers.watch import Watch

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
        self.timeout = timeout
        self._made_by = os.getpid()
        # Restarted workers get the same request, even if the factory or this process has changed since.
        start_method = start_method or default_start_method()
        self._first = make_build_request(setup, init_worker, factory, start_method)
        self._log = LogPipe()
        self._arguments = (shared, start_method, tuple(preload), name, self._log.writer)
        self._workers: list[WorkerProcess] = []
        self._replies: dict[int, Any] = {}
        self._answers: list[tuple[int, bytes]] = []
        self._failures: dict[int, BaseException] = {}
        self._late: set[int] = set()  # workers that missed a deadline and may still reply
        self._watch = Watch(self._log)
        # Not weakref.finalize: this one runs before multiprocessing joins the remaining children at exit, and never in
        # a forked copy of this process.
        self._finalizer = util.Finalize(self, _end_left, args=(self._workers, self._log), exitpriority=100)
        try:
            check_enough(n_workers)
            for index in range(n_workers):
                self._begin(index)
            self._send(self._workers, self._first)
            self.gather()
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
    def can_restart(self) -> bool:
        """True: a worker that failed can be replaced."""
        return True

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker index."""
        return [worker.pid for worker in self._workers]

    @property
    def states(self) -> list[str]:
        """"idle", "busy" or "gone", by worker index."""
        return [worker.state.value for worker in self._workers]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `job.method(*args)` in every worker; returns the values, by worker index."""
        self.broadcast(method, *args)
        return self.gather()

    def broadcast(self, method: str, *args: Any) -> None:
        """Asks every worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send(self._workers, Call(method, args))

    def ask(self, method: str, *args: Any, only: Iterable[int] | None = None) -> list[Asked]:
        """Asks workers to call `job.method(*args)`, and returns at once; the returned objects get the results.

        A worker may get several requests: they wait in its pipe, so that all of them together must be small
        (`messages.AT_ONCE` bytes) unless the worker is idle. A request to a worker that is gone fails.

        Args:
            method: the name of the job's method.
            args: its arguments.
            only: the indexes of the workers to ask; None for all.
        """
        return self._send(self._chosen(only), Call(method, args), is_kept=True)

    def settle(self, asked: Sequence[Asked], n: int | None = None, *, fails_fast: bool = False) -> None:
        """Waits until `n` requests are over; one that takes longer than the pool's timeout counts as failed.

        Args:
            asked: the requests, as returned by `ask`.
            n: how many to wait for; None for all.
            fails_fast: whether to stop at the first failure.
        """
        while workers := self._awaited(asked, n, fails_fast):
            self._wait(None, workers)
        for each in asked:
            if not each.is_over and not each.error and self._workers[each.index] in self._overdue():
                each.error = _late([self._workers[each.index]], self.timeout)
                self._late.add(each.index)

    def is_settled(self, asked: Sequence[Asked], n: int | None = None, *, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""
        return not self._awaited(asked, n, fails_fast)

    def _awaited(self, asked: Sequence[Asked], n: int | None, fails_fast: bool) -> list[WorkerProcess]:
        """Returns the workers that `settle` has to wait for; looks at the clock once, as a deadline may pass."""
        self._drain()
        if fails_fast and any(each.error for each in asked):
            return []
        if sum(each.is_over for each in asked) >= (len(asked) if n is None else n):
            return []
        overdue, indexes = self._overdue(), {each.index for each in asked if not each.is_over}
        return [worker for worker in self._busy() if worker.index in indexes and worker not in overdue]

    def send(self, index: int, method: str, *args: Any) -> None:
        """Asks one worker to call `job.method(*args)`, and returns at once."""
        self._check_idle()
        self._send([self._workers[index]], Call(method, args))

    def post(self, post: Post, only: Iterable[int] | None = None) -> None:
        """Has workers call `job.answer` with bytes, and returns at once; `answers` gives the bytes that it returns.

        Far quicker than a call, because nothing is pickled. A worker may get several posts: they wait in its pipe, so
        that all of them together must be small (`messages.AT_ONCE` bytes) unless the worker is idle.

        Args:
            post: the request; each of its bytes objects gets one answer.
            only: the indexes of the workers to ask; None for all.
        """
        self._send(self._chosen(only), post, post.message)

    def answers(self) -> list[tuple[int, bytes]]:
        """Returns the answers to posts: worker index and bytes, the oldest first.

        It returns the same answers again until `forget_answers`.
        """
        return self._answers

    def forget_answers(self) -> None:
        """Drops the answers that `answers` returns."""
        self._answers = []

    def await_answer(self, timeout: float | None = None) -> None:
        """Waits until `answers` is not empty, or no worker is busy.

        Args, Raises: see `gather`.
        """
        self._take_read()
        deadline = deadline_in(timeout)
        while not self._failures and not self._answers and (busy := self._busy()):
            if not self._wait(deadline, busy):
                self._raise_late(timeout)
        self._raise_failure()

    def ready(self, timeout: float | None = 0.0) -> bool:
        """Waits up to `timeout` seconds; returns whether every asked worker has replied.

        `gather` still returns every reply, in the workers' order.

        Raises:
            WorkerTimeout: a worker took longer than the pool's timeout.
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        self._take_read()
        deadline = deadline_in(timeout)
        while not self._failures and (busy := self._busy()):
            if not self._wait(deadline, busy):
                if self._overdue():
                    self._raise_late(None)
                return False
        self._raise_failure()
        return True

    def gather(self, timeout: float | None = None) -> list[Any]:
        """Waits for the replies of all asked workers, and returns them by worker index.

        Args:
            timeout: in seconds; None for the pool's own.

        Raises:
            WorkerTimeout: not all replied in time; the message names the late workers.
            WorkerCrashed: a worker is gone.
            Exception: what a job raised, with the worker's traceback as the cause.
        """
        if not self.ready(timeout):
            self._raise_late(timeout)
        if not self._replies:  # there were only answers to posts
            return []
        replies, self._replies = self._replies, {}
        return [replies[index] for index in sorted(replies)]

    def check_owner(self) -> None:
        """Raises WorkerError in a forked copy of the process that started the workers."""
        check_owner(self._made_by)

    def check(self) -> dict[int, BaseException]:
        """Returns the error of each worker that is gone, by index."""
        self._drain()
        gone = [worker for worker in self._workers if worker.state is State.GONE]
        return {worker.index: strip_traceback(worker.make_crash_error()) for worker in gone}

    def restart(self, successors: Mapping[int, tuple[Any, ...]]) -> list[Asked]:
        """Replaces workers, whatever they are doing; their unfinished requests fail.

        Args:
            successors: by worker index, the arguments that the factory gets after `shared`.

        Returns:
            The requests to build the new jobs, for `settle`.
        """
        old = [self._workers[index] for index in successors]
        self._close_idle(old)
        for worker in old:
            self._watch.forget(worker)
        end_all(old)
        self._log.read_all()
        self._log.deliver()
        for worker in old:
            for each in worker.asked:
                each.end(error=strip_traceback(worker.make_crash_error()))
        asked = []
        for index, args in successors.items():
            self._late.discard(index)
            self._replies.pop(index, None)
            self._failures.pop(index, None)
            try:
                self._watch.check()
                check_enough(1)  # without descriptors the fork server would fail, and other pools' workers with it
                self._begin(index)
            except WorkerError as error:
                asked.append(Asked(index, Build.label, is_over=True, error=strip_traceback(error)))
            else:
                asked += self._send([self._workers[index]], dataclasses.replace(self._first, args=args), is_kept=True)
        return asked

    def _close_idle(self, workers: list[WorkerProcess]) -> None:
        """Has idle workers close their jobs."""
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
            Exception: the first exception of a job; every worker has ended all the same.
        """
        if not self._is_ours():
            return
        self._watch.end()
        if timeout is None:
            timeout = CLOSE_DELAY if self.timeout is None else min(CLOSE_DELAY, self.timeout)
        deadline = time.monotonic() + float(timeout)  # it may be a number of numpy
        # A busy worker reads the request when it is done. One that no longer reads, or is late, is left to `kill`.
        lost = self._failures.keys() | self._late
        open_workers = [worker for worker in self._workers if worker.can_close() and worker.index not in lost]
        errors: list[BaseException] = []
        try:
            for worker in open_workers:
                with contextlib.suppress(WorkerError):  # the worker is gone, which was reported before
                    worker.send(Close())
            for worker in open_workers:
                errors += worker.await_close(deadline, with_earlier, self._log)
        finally:
            self.kill(0.0 if lost else max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]

    def kill(self, patience: float = 0.0) -> None:
        """Ends every worker that has not ended within `patience` seconds: SIGTERM, then SIGKILL."""
        if self._is_ours():
            self._watch.end()
            for worker in self._workers:
                self._watch.forget(worker)
            end_all(self._workers, patience)
            self._log.read_all()
            self._log.deliver()
            self._log.close()
            self._finalizer.cancel()  # last: an interrupt before this leaves the rest to the finalizer

    def _is_ours(self) -> bool:
        """Whether the pool still has to be ended, and by this process: a forked copy must not end it."""
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
            worker = WorkerProcess(index, *self._arguments, self.timeout)
            self._workers[index : index + 1] = [worker]
            try:
                self._watch.add(worker)
            except WorkerError:  # the pool was closed meanwhile, perhaps without this worker
                end_all([worker])
                raise

    def _wait(self, deadline: float | None, workers: list[WorkerProcess]) -> bool:
        """Waits for the first replies and reads them; False if none came before a deadline, the pool's included."""
        if self.timeout is not None:
            due = min(worker.since for worker in workers) + self.timeout
            deadline = due if deadline is None else min(due, deadline)
        has_come = self._watch.wait(deadline, self._read)
        self._log.deliver()
        return has_come

    def _drain(self) -> None:
        """Reads everything that has arrived."""
        self._take_read()
        while self._watch.wait(time.monotonic(), self._read) and self._busy():
            pass
        self._log.deliver()

    def _take_read(self) -> None:
        """Takes the replies that were read while a request was sent."""
        for worker in self._workers:
            while worker.state is State.BUSY and worker.channel.has_message():
                with defer_interrupt():
                    self._take(*worker.receive())
                    self._log.read()

    def _overdue(self) -> list[WorkerProcess]:
        """Returns the busy workers that took longer than the pool's timeout."""
        if self.timeout is None:
            return []
        now = time.monotonic()
        return [worker for worker in self._busy() if now >= worker.since + self.timeout]

    def _raise_late(self, timeout: float | None) -> None:
        late, timeout = (self._overdue(), self.timeout) if timeout is None else (self._busy(), timeout)
        self._late |= {worker.index for worker in late}
        raise _late(late, timeout)

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures.pop(min(self._failures))

    def _chosen(self, only: Iterable[int] | None) -> list[WorkerProcess]:
        return self._workers if only is None else [self._workers[index] for index in only]

    def _send(
        self, workers: list[WorkerProcess], request: Build | Call | Post, message: list[bytes] | None = None,
        is_kept: bool = False,
    ) -> list[Asked]:  # fmt: skip
        """Sends a request to workers under one deadline; raises a failure unless the returned objects keep it."""
        self.check_owner()
        message = messages.frame(pickling.dumps(request)) if message is None else message  # once for all
        deadline = deadline_in(self.timeout)
        asked = []
        for worker in workers:
            try:
                asked.append(worker.send(request, message, deadline, is_kept))
            except (WorkerError, TimeoutError) as error:
                failure = self._unread(worker, request, error)
                if not is_kept:
                    raise failure from error
                asked.append(Asked(worker.index, request.label, is_over=True, error=strip_traceback(failure)))
        return asked

    def _unread(self, worker: WorkerProcess, request: Build | Call | Post, error: Exception) -> WorkerError:
        if isinstance(error, WorkerError):
            return error
        return WorkerTimeout(
            f"worker {worker.index} (pid {worker.pid}) has not read {request.label!r} within {self.timeout} s",
            worker.index,
        )

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.state is State.BUSY]

    def _check_idle(self, workers: list[WorkerProcess] | None = None) -> None:
        if busy := [worker for worker in (self._workers if workers is None else workers) if worker.state is State.BUSY]:
            raise RuntimeError(
                f"worker {busy[0].index} is still busy with {busy[0].last_request!r}: gather its reply first"
            )

    def _read(self, index: int, is_pipe: bool) -> None:
        """Reads what a worker has written, without waiting for the rest."""
        worker = self._workers[index]
        try:
            while worker.channel.read_available():
                worker.since = time.monotonic()  # a long reply comes in pieces
                while worker.state is State.BUSY and worker.channel.has_message():
                    self._take(*worker.receive())
                if is_pipe:
                    return
            if is_pipe:  # another thread has read the reply
                return
        except EOFError:
            pass
        error = strip_traceback(worker.make_crash_error())  # it has ended, and all its replies are read
        self._log.read_all()
        if all(asked.is_kept for asked in worker.asked) and worker.asked:
            for asked in worker.asked:
                asked.end(error=error)
        else:
            self._failures[index] = error
        self._watch.forget(worker)

    def _take(self, asked: Asked, reply: Any) -> None:
        index = asked.index
        self._late.discard(index)
        if isinstance(reply, bytes):
            self._answers.append((index, reply))
            return
        value: Any = None
        error: BaseException | None = None
        if isinstance(reply, Failure):
            error = reply.to_exception(index, asked.label)
        elif isinstance(reply, Exception):  # the reply cannot be unpickled
            error = reply
        else:
            assert isinstance(reply, Result)
            value = reply.value
        if asked.is_kept:
            asked.end(value, error)
        elif error is not None:
            self._failures[index] = error
        else:
            self._replies[index] = value


def _late(workers: list[WorkerProcess], timeout: float | None) -> WorkerTimeout:
    return WorkerTimeout(
        f"no reply within {timeout} s to {workers[0].last_request!r} from worker(s) "
        + ", ".join(f"{worker.index} (pid {worker.pid})" for worker in workers),
        workers[0].index,
    )
